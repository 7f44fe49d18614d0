"""Runs of a model that sees images in tiles: the same on every mesh, resumed to the last digit, drawn and scored."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from inference.test_serve import post, serving
from PIL import Image
from support.harness import ONE_DEVICE, ONE_LAYER, RUN, metrics
from support.images import SEES_TILES, draw, save

import tunix
from tunix.config.compose import compose
from tunix.data.dataset import load_corpus
from tunix.data.image_processors import find_processor
from tunix.data.image_slots import index_images
from tunix.inference.sampling import Sampling
from tunix.verify import verify

WORDS = [
    *RUN, *ONE_LAYER, *SEES_TILES, ONE_DEVICE, "distributed.allow_idle_devices=true", "tokenizer=bytes",
    "scheduler=constant", "training.global_batch_size=4", "training.micro_batch_size=4", "training.seq_len=256",
    "training.loss_chunk_size=256", "data=jsonl", "data.held_out_fraction=0.2", "model.context_length=512",
]  # fmt: skip
SIZES = {(16, 16): (2, 2), (30, 7): (1, 2), (9, 25): (2, 1)}  # tiles of images, down and across


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Words of runs on conversations about an image of several shapes."""
    folder = tmp_path_factory.mktemp("rows")
    rows = []
    for number in range(30):
        width, height = list(SIZES)[number % 3]
        (folder / f"{number}.png").write_bytes(save(Image.fromarray(draw(width, height, seed=number))))
        parts = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "what?"}]
        answer = {"role": "assistant", "content": f"it is {number}"}
        rows.append({"messages": [{"role": "user", "content": parts}, answer], "answer": f"it is {number}"})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [*WORDS, f"data.paths=['{folder}/rows.jsonl']", f"loading.cache_dir='{folder}/cache'"]


@pytest.mark.nightly  # test_smolvlm.py has a mesh of two axes
def test_a_mesh_of_three_axes_computes_the_same(words):
    """One step, of prepared shards."""
    cfg = compose([*words, "task=sft", "training.micro_batch_size=2"]).config
    one, split = verify(cfg, [[[1], ["fsdp"]], [[2, 2, 2], ["fsdp", "cp", "tp"]]], num_steps=1)
    assert max(split.compute_differences(one).values()) < 1e-5


def test_rows_have_the_tiles_of_their_images(words):
    (packed,) = load_corpus(compose([*words, "task=sft"]).config).train.values()
    found = []
    for row in map(packed.__getitem__, range(len(packed))):
        grids = [(down, across) for down, across in row["image_grids"].tolist() if down]
        count = sum(down * across + 1 for down, across in grids)
        assert row["image_index"][row["image_index"] >= 0].tolist() == list(range(count))
        assert ((row["tokens"] == 4) == (row["image_index"] >= 0)).all()
        assert row["images"][:count].any((1, 2, 3)).all()
        assert not row["images"][count:].any()
        found += grids
    assert len(found) > 20
    assert set(found) == set(SIZES.values())


@pytest.mark.nightly
def test_a_resumed_run_reads_the_same_images_and_answers_them(words, tmp_path):
    whole = check_resume(words, tmp_path)
    (count,) = re.findall(r"answers to (\d+) images that are held out: ", (whole / "train.log").read_text())
    assert int(count) > 0
    check_serving(whole, (1, 2), num_units=3)


def check_resume(words, folder):
    """A run of four steps, and one that stops behind the second, give the same digits; returns the first one's folder."""
    saving = ["checkpoint.save_every_steps=2", "evaluation.every_steps=null", "evaluation.sample_tokens=4"]
    run = [*words, "task=sft", *saving]
    whole = tunix.train([*run, "training.max_steps=4", f"hydra.run.dir={folder}/whole"]).folder
    tunix.train([*run, "training.max_steps=2", f"hydra.run.dir={folder}/cut"])
    tunix.train([f"resume={folder}/cut", "training.max_steps=4"])
    lines, again = metrics(whole), metrics(folder / "cut")
    assert len(lines) == 4
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in again] == [line[name] for line in lines]
    return whole


def check_serving(folder, grid, num_units):
    """The server's answer to an image of 30 x 7 pixels is the model's to the same units, of any kind of tower."""
    data, turn = save(Image.fromarray(draw(30, 7))), {"role": "user"}
    model = tunix.load_pretrained(folder)
    processor = find_processor(model.cfg.vision)
    text = model.vocab.chat.render([turn | {"content": [{"type": "image"}, {"type": "text", "text": "what?"}]}], True)
    tokens = model.tokenizer.encode(processor.expand([text], [data])[0], add_special_tokens=False).ids
    images = index_images(tokens, [data], processor, 4)
    assert images.grids.tolist() == [list(grid)]
    assert len(images.pixels) == num_units
    (expected,) = model.sample([tokens], Sampling(4, 0.0), images=[images])
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    body = {"messages": [turn | {"content": parts}], "logprobs": True, "temperature": 0, "max_tokens": 4}
    with serving(model, folder, "server.api_key=a key") as (_, port):
        status, _, said = post(port, json.dumps(body), "/v1/chat/completions", "a key")
    assert status == 200, said
    found = [each["logprob"] for each in said["choices"][0]["logprobs"]["content"]]
    np.testing.assert_allclose(found, expected.log_probabilities[: len(found)], atol=1e-5)


@pytest.mark.nightly
def test_pairs_of_answers(words, tmp_path):
    check_pairs(words, tmp_path, num_tokens=512)


def check_pairs(words, output, num_tokens):
    """DPO begins at log 2: the model and its reference see the same images, which are those of `words`."""
    folder = Path(re.search(r"'([^']*)/rows.jsonl'", " ".join(words))[1])
    names = sorted(path.name for path in folder.glob("*.png"))[:8]
    rows = [{"prompt": "what?", "chosen": f"a {name}", "rejected": f"b {name}", "images": [name]} for name in names]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = ["data=pairs", f"data.paths=['{folder}/pairs.jsonl']", "data.held_out_fraction=0", "task=dpo"]
    more = [
        f"training.seq_len={num_tokens}", f"training.loss_chunk_size={num_tokens}", "training.max_steps=1",
        "evaluation.every_steps=null",
    ]  # fmt: skip
    kept = [word for word in words if not word.startswith("data")]
    tunix.train([*kept, *own, *more, f"hydra.run.dir={output}"])
    (line,) = metrics(output)
    assert line["loss"] == pytest.approx(np.log(2), abs=1e-3)


@pytest.mark.nightly
def test_answers_to_images_are_drawn_and_learnt_from(words, tmp_path):
    """GRPO: the log-probabilities that an answer was drawn with are those of the step, which sees the same tiles."""
    run = [
        *words, "task=grpo", "task.rewards=[exact_match]", "task.group_size=2", "task.reward_processes=1",
        "sampling.max_new_tokens=4", "training.max_steps=1", "evaluation.num_prompts=2", "optimizer.learning_rate=1e-9",
    ]  # fmt: skip
    result = tunix.train([*run, f"hydra.run.dir={tmp_path}"])
    (line,) = metrics(tmp_path)
    assert line["mismatch_max"] < 1e-4
    assert np.isfinite(line["loss"])
    assert result.held_out["prompts"] > 0
