"""Runs of a model that sees images of any size: on every mesh, packed without leaks, resumed, answered and scored."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image
from run.test_tile_runs import check_pairs, check_resume, check_serving
from support.harness import ONE_DEVICE, ONE_LAYER, RUN, metrics
from support.images import ANY_SIZE, SEES_ANY_SIZE, draw, save

import tunix
from tunix.config.compose import compose
from tunix.data.dataset import load_corpus
from tunix.data.image_processors import PatchProcessor
from tunix.sharding.arrays import to_global
from tunix.training.choices import build_mesh
from tunix.training.logprobs import compute_token_log_probs
from tunix.training.train_spec import assemble
from tunix.verify import verify

WORDS = [
    *RUN, *ONE_LAYER, *SEES_ANY_SIZE, ONE_DEVICE, "distributed.allow_idle_devices=true", "tokenizer=bytes",
    "scheduler=constant", "training.global_batch_size=4", "training.micro_batch_size=4", "training.seq_len=96",
    "training.loss_chunk_size=96", "data=jsonl", "data.held_out_fraction=0.2",
]  # fmt: skip
FORM = PatchProcessor(*(ANY_SIZE[key] for key in ("patch_size", "merge_size", "min_pixels", "max_pixels")))
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


@pytest.mark.nightly  # test_qwen3_vl.py has a mesh of two axes
@pytest.mark.parametrize("exchange", ["ulysses", "ring"])
def test_a_mesh_of_three_axes_computes_the_same(words, exchange):
    cfg = compose([*words, "task=sft", "training.micro_batch_size=2", f"model.cp_exchange={exchange}"]).config
    one, split = verify(cfg, [[[1], ["fsdp"]], [[2, 2, 2], ["fsdp", "cp", "tp"]]], num_steps=2)
    assert max(split.compute_differences(one).values()) < 1e-5


def test_rows_have_the_patches_and_places_of_their_images(words):
    corpus = load_corpus(compose([*words, "task=sft"]).config)
    (packed,) = corpus.train.values()
    (folder,) = {Path(word.split("'")[1]).parent for word in words if word.startswith("data.paths")}
    files = {FORM.decode(path.read_bytes()).units.tobytes(): path.name for path in folder.glob("*.png")}
    seen = []
    for row in map(packed.__getitem__, range(len(packed))):
        counts = row["image_grids"].prod(-1)
        index = row["image_index"]
        assert index[index >= 0].tolist() == list(range(counts.sum() // 4))
        assert (row["tokens"][index >= 0] == ANY_SIZE["image_token"]).all()
        *images, padding = np.split(row["images"], np.cumsum(counts))
        assert not padding.any()
        seen += [files[units.tobytes()] for units in images if len(units)]
    assert len(seen) == len(set(seen)) == corpus.prepared["jsonl"].index["shards"][0]["train"]["images"]


@pytest.mark.nightly  # the same with squares is in test_image_runs.py
def test_a_resumed_run_reads_the_same_images_and_answers_them(words, tmp_path):
    check_serving(check_resume(words, tmp_path), (2, 8), num_units=16)


@pytest.mark.nightly
def test_pairs_of_answers(words, tmp_path):
    check_pairs([*words, "model.context_length=256"], tmp_path, num_tokens=256)


@pytest.mark.nightly  # the same with squares is in test_image_runs.py
def test_answers_are_drawn_and_learnt_from(words, tmp_path):
    """GRPO: the log-probabilities that an answer was drawn with are those of the step, which sees the same images."""
    shapes = ["data=shapes", "data.num_rows=60", "data.image_size=16", "data.held_out_fraction=0.1"]
    own = [word for word in WORDS if not word.startswith("data")]
    grpo = [
        *own, *shapes, "task=grpo", "task.rewards=[exact_match]", "task.group_size=2", "task.reward_processes=1",
        "sampling.max_new_tokens=4", "training.max_steps=1", "evaluation.num_prompts=2", "optimizer.learning_rate=1e-9",
    ]  # fmt: skip
    tunix.train([*grpo, f"hydra.run.dir={tmp_path}"])
    (line,) = metrics(tmp_path)
    assert line["mismatch_max"] < 1e-4


def test_a_changed_image_changes_no_other_conversation(words):
    cfg = compose([*words, "task=sft", "training.seq_len=192", "training.loss_chunk_size=192"]).config
    (packed,) = load_corpus(cfg).train.values()
    row = next(row for row in map(packed.__getitem__, range(len(packed))) if row["segment_ids"].max() > 1)
    other = row | {"images": row["images"].copy()}
    other["images"][: row["image_grids"][0].prod()] ^= 255  # the patches of the first image
    mesh = build_mesh(cfg)

    def score(params, batch):
        return compute_token_log_probs(program.arch.module(params), batch, None, chunk_size=192)[0]

    with jax.set_mesh(mesh):
        program = assemble(cfg, mesh)
        params = program.new_state(cfg.seed)["params"]
        batch = to_global({name: np.stack([row[name], other[name]])[None] for name in row}, mesh)
        one, two = np.asarray(jax.jit(score)(params, {name: leaf[0] for name, leaf in batch.items()}))
    is_own = row["segment_ids"] == 1
    assert (one[is_own] != two[is_own]).any()
    np.testing.assert_array_equal(one[~is_own], two[~is_own])
