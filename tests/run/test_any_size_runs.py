"""Runs of a model that sees images of any size: on every mesh, packed without leaks, resumed, answered and scored."""

import json

import numpy as np
import pytest
from PIL import Image
from support.harness import ONE_DEVICE, ONE_LAYER, RUN, metrics
from support.images import SEES_ANY_SIZE, draw, save

import tunix
from tunix.config.compose import compose
from tunix.data.dataset import load_corpus
from tunix.verify import verify

WORDS = [
    *RUN, *ONE_LAYER, *SEES_ANY_SIZE, ONE_DEVICE, "distributed.allow_idle_devices=true", "tokenizer=bytes",
    "scheduler=constant", "training.global_batch_size=4", "training.micro_batch_size=4", "training.seq_len=96",
    "training.loss_chunk_size=96", "data=jsonl", "data.held_out_fraction=0.2",
]  # fmt: skip
SIZES = [(8, 8), (16, 16), (30, 7), (9, 25), (12, 20)]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Words of runs on conversations about images of several sizes, one or two of them in each."""
    folder = tmp_path_factory.mktemp("rows")
    rows = []
    for number in range(40):
        parts = []
        for part in range(1 + number % 2):
            width, height = SIZES[(number + part) % len(SIZES)]
            name = f"{number}-{part}.png"
            (folder / name).write_bytes(save(Image.fromarray(draw(width, height, seed=number + 50 * part))))
            parts += [{"type": "image", "image": name}, {"type": "text", "text": "what?"}]
        rows.append(
            {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": f"it is {number}"}]}
        )
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [*WORDS, f"data.paths=['{folder}/rows.jsonl']", f"loading.cache_dir='{folder}/cache'"]


def test_a_mesh_of_three_axes_computes_the_same(words):
    cfg = compose([*words, "task=sft", "training.micro_batch_size=2"]).config
    one, split = verify(cfg, [[[1], ["fsdp"]], [[2, 2, 2], ["fsdp", "cp", "tp"]]], num_steps=2)
    assert max(split.compute_differences(one).values()) < 1e-5


def test_rows_have_the_patches_and_places_of_their_images(words):
    corpus = load_corpus(compose([*words, "task=sft"]).config)
    (packed,) = corpus.train.values()
    seen = 0
    for row in map(packed.__getitem__, range(len(packed))):
        counts = row["image_grids"].prod(-1) // 4
        index = row["image_index"]
        assert index[index >= 0].tolist() == list(range(counts.sum()))
        assert (row["tokens"][index >= 0] == 4).all()
        assert not row["images"][4 * counts.sum() :].any()
        seen += np.count_nonzero(counts)
    assert seen == 47  # of 40 rows, 8 of which are held out


def test_a_resumed_run_reads_the_same_images(words, tmp_path):
    run = [
        *words,
        "task=sft",
        "checkpoint.save_every_steps=2",
        "evaluation.every_steps=null",
        "evaluation.sample_tokens=4",
    ]
    whole = tunix.train([*run, "training.max_steps=4", f"hydra.run.dir={tmp_path}/whole"]).folder
    tunix.train([*run, "training.max_steps=2", f"hydra.run.dir={tmp_path}/cut"])
    tunix.train([f"resume={tmp_path}/cut", "training.max_steps=4"])
    lines, again = metrics(whole), metrics(tmp_path / "cut")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    assert [line["grad_norm"] for line in again] == [line["grad_norm"] for line in lines]
