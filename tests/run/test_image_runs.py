"""Runs of a model that sees: answers about images, resumed to the last digit, without leaks, drawn and scored."""

import base64
import io
import json
import re
import shutil
import time

import jax
import numpy as np
import pytest
from inference.test_serve import post, serving
from PIL import Image
from support.harness import ONE_DEVICE, ONE_LAYER, RUN, metrics
from support.images import SEES, draw, save
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tunix
from tunix.base.errors import UserError
from tunix.checkpoints.checkpoint import check_same
from tunix.config.compose import compose
from tunix.data.batches import Position
from tunix.data.dataset import load_corpus
from tunix.data.image_processors import SquareProcessor
from tunix.data.image_slots import index_images
from tunix.data.prompts import load_prompts
from tunix.inference.openai_api import ApiError
from tunix.inference.sampling import Sampling
from tunix.sharding.arrays import to_global
from tunix.training.choices import build_mesh
from tunix.training.logprobs import compute_token_log_probs
from tunix.training.scores import score_documents
from tunix.training.train_spec import assemble
from tunix.verify import check_everything, verify

SHAPES = [
    *RUN, *ONE_LAYER, *SEES, ONE_DEVICE, "distributed.allow_idle_devices=true", "data=shapes", "data.num_rows=60",
    "data.image_size=16", "data.held_out_fraction=0.1", "tokenizer=bytes", "scheduler=constant", "training.global_batch_size=4",
    "training.micro_batch_size=4", "training.seq_len=80", "training.loss_chunk_size=80",
]  # fmt: skip


TRAINED = [
    *SHAPES, "task=sft", "checkpoint.save_every_steps=2", "evaluation.every_steps=null", "evaluation.sample_tokens=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps."""
    return tunix.train(
        [*TRAINED, "training.max_steps=4", f"hydra.run.dir={tmp_path_factory.mktemp('run')}/whole"]
    ).folder


@pytest.mark.nightly
def test_a_mesh_of_three_axes_computes_the_same_of_images():
    """`tunix.verify` on a run with images."""
    cfg = compose([*SHAPES, "task=sft", "training.micro_batch_size=2"]).config
    one, split = verify(cfg, [[[1], ["fsdp"]], [[2, 2, 2], ["fsdp", "cp", "tp"]]], num_steps=2)
    assert max(split.compute_differences(one).values()) < 1e-5


def test_a_resumed_run_has_as_many_images_in_a_row():
    """Another number packs other sequences: sample n would be another one."""
    position = Position(3, 24, "data", "tokenizer")
    two, three = (compose([*SHAPES, "task=sft", f"training.images_per_row={slots}"]).config for slots in (2, 3))
    saved = two.model_dump(mode="json", by_alias=True)
    check_same(two, saved, position, position)
    with pytest.raises(UserError, match="training.images_per_row=3, but the checkpoint was made with 2; leave it"):
        check_same(three, saved, position, position)


@pytest.mark.nightly
def test_pairs_that_had_no_room_for_their_images_get_a_reference(tmp_path):
    """A run with fewer slots has left them out: its log-probabilities of the first model have none for them."""
    image = "data:image/png;base64," + base64.b64encode(save(Image.fromarray(draw(16, 16)))).decode()
    rows = [
        {"prompt": "what?", "chosen": f"a{n}", "rejected": f"b{n}", "images": [image] * (1 + n % 2)} for n in range(8)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [word for word in SHAPES if not word.startswith(("data", "training.seq_len"))]
    words += ["task=dpo", "task.long_pairs=skip", "data=pairs", f"data.paths=[{tmp_path}/pairs.jsonl]"]
    words += ["data.held_out_fraction=0", "training.seq_len=160", "training.max_steps=1", "loading.packing=pad"]
    for slots in (2, 4):
        own = [f"training.images_per_row={slots}", f"loading.cache_dir={tmp_path}/cache"]
        run = tunix.train([*words, *own, f"hydra.run.dir={tmp_path}/{slots}"]).folder
        assert metrics(run)[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)


@pytest.mark.nightly
def test_damage_of_a_run_with_images_is_found(trained, tmp_path):
    lines, is_whole = check_everything(str(trained))
    assert is_whole
    assert len(lines) == 2
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, symlinks=True)
    checkpoint = folder / "checkpoints/4"
    file = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    lines, is_whole = check_everything(str(folder))
    assert not is_whole
    assert [line.startswith("DAMAGED") for line in lines].count(True) == 1


@pytest.mark.nightly
def test_a_resumed_run_reads_the_same_images(trained, tmp_path):
    tunix.train([*TRAINED, "training.max_steps=2", f"hydra.run.dir={tmp_path}/cut"])
    tunix.train([f"resume={tmp_path}/cut", "training.max_steps=4"])
    lines, again = metrics(trained), metrics(tmp_path / "cut")
    assert len(lines) == 4
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    assert [line["grad_norm"] for line in again] == [line["grad_norm"] for line in lines]


@pytest.mark.nightly
def test_the_end_of_a_run_shows_images_with_answers(trained):
    log = (trained / "train.log").read_text()
    (count,) = re.findall(r"answers to (\d+) images that are held out: ", log)
    assert int(count) > 0
    assert "ms to decode, the " in log
    events = EventAccumulator(str(trained), size_guidance={"images": 0}).Reload()
    (sheet,) = events.Images("answers")
    assert Image.open(io.BytesIO(sheet.encoded_image_string)).size == (4 * 172, -(-int(count) // 4) * 220)


def compare_images(cfg, row, compute):
    """Return numbers [T] that `compute(module, batch)` gives for a row, and those with another first image."""
    other = row | {"images": row["images"].copy()}
    other["images"][0] = 255 - other["images"][0]
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        program = assemble(cfg, mesh)
        params = program.new_state(cfg.seed)["params"]
        batch = to_global({name: np.stack([row[name], other[name]])[None] for name in row}, mesh)
        first = {name: leaf[0] for name, leaf in batch.items()}
        return np.asarray(jax.jit(lambda params, batch: compute(program.arch.module(params), batch))(params, first))


def test_an_image_is_seen_by_its_own_conversation_alone():
    """Two conversations in a row: another image in one of them changes no number of the other."""
    cfg = compose([*SHAPES, "task=sft"]).config
    (packed,) = load_corpus(cfg).train.values()
    row = next(row for row in map(packed.__getitem__, range(len(packed))) if row["image_index"].max() >= 4)
    one, two = compare_images(cfg, row, lambda *of: compute_token_log_probs(*of, None, chunk_size=80)[0])
    segments, place = row["segment_ids"], int(np.argmax(row["image_index"] >= 0))
    own = segments == segments[place]
    behind = own & (np.arange(len(own)) >= place)
    assert (one[behind] != two[behind]).any()
    before = own & (np.arange(len(own)) < place - 1)
    assert (segments > 0).sum() > own.sum() > 0
    np.testing.assert_array_equal(one[~own], two[~own])
    np.testing.assert_array_equal(one[before], two[before])


def test_scores_follow_from_images(tmp_path):
    """Of task=classify, and of task=reward, which are computed by one function."""
    image = "data:image/png;base64," + base64.b64encode(save(Image.fromarray(draw(16, 16)))).decode()
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    rows = [{"messages": messages, "images": [image], "label": label} for label in "ab"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [word for word in SHAPES if not word.startswith("data")]
    own = ["task=classify", "task.labels=[a,b]", "data=jsonl", f"data.paths=[{tmp_path}/rows.jsonl]"]
    cfg = compose([*words, *own, "data.held_out_fraction=0", f"loading.cache_dir={tmp_path}/cache"]).config
    (packed,) = load_corpus(cfg).train.values()
    one, two = compare_images(cfg, packed[0], lambda *of: score_documents(*of, None)[0])
    assert np.abs(one - two)[packed[0]["loss_mask"] > 0].max() > 0.1


def test_prompts_have_their_images():
    cfg = compose(
        [*SHAPES, "task=grpo", "task.group_size=2", "sampling.max_new_tokens=8", "task.rewards=[exact_match]"]
    ).config
    prompts = load_prompts(cfg, 72)
    found = prompts.spread("train", 100)
    assert len(found) > 50
    for prompt in found:
        index, tokens = prompt.images.image_index, np.array(prompt.tokens)
        assert prompt.images.pixels.shape == (1, 8, 8, 3)
        assert index[tokens == 4].tolist() == [0, 1, 2, 3]
        assert (index[tokens != 4] == -1).all()
        assert prompt.columns.keys() == {"question", "answer", "messages"}
        assert prompt.columns["messages"][0]["content"] == [
            {"type": "image"}, {"type": "text", "text": prompt.columns["question"]},
        ]  # fmt: skip


@pytest.mark.nightly
def test_answers_to_images_are_drawn_and_learnt_from(tmp_path):
    """GRPO: the log-probabilities that an answer was drawn with are those of the step, which sees the same images."""
    words = [
        *SHAPES, "task=grpo", "task.rewards=[exact_match]", "task.group_size=2", "task.reward_processes=1",
        "sampling.max_new_tokens=4", "training.max_steps=1", "evaluation.num_prompts=2", "optimizer.learning_rate=1e-9",
    ]  # fmt: skip
    result = tunix.train([*words, f"hydra.run.dir={tmp_path}"])
    (line,) = metrics(tmp_path)
    assert line["mismatch_max"] < 1e-4
    assert result.held_out["prompts"] > 0


@pytest.mark.nightly
def test_the_server_takes_images(trained, tmp_path):
    """Data URLs, and files of the folders that were allowed; the answer is that of the model to the same pixels."""
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    for folder in (allowed, other):
        folder.mkdir()
        (folder / "a.png").write_bytes(save(Image.fromarray(draw(20, 12))))
    (allowed / "link.png").symlink_to(other / "a.png")
    (allowed / "broken.png").write_bytes(b"PNG")
    data = (allowed / "a.png").read_bytes()
    model = tunix.load_pretrained(trained)
    key = "a key"

    def ask(port, *urls, text="how many?", **more):
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], "logprobs": True,
                "temperature": 0, "max_tokens": 4, **more}  # fmt: skip
        status, _, said = post(port, json.dumps(body), "/v1/chat/completions", key)
        if status != 200:
            return status, said["error"]["message"]
        return status, [each["logprob"] for each in said["choices"][0]["logprobs"]["content"]]

    processor = SquareProcessor(8, 4)
    text = model.vocab.chat.render(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}], True
    )
    tokens = model.tokenizer.encode(processor.expand([text], [data])[0], add_special_tokens=False).ids
    images = index_images(tokens, [data], processor, 4)
    (expected,) = model.sample([tokens], Sampling(4, 0.0), images=[images])
    words = f"server.api_key={key}", f"server.image_folders=['{allowed}']", "server.max_image_pixels=500"
    with serving(model, trained, *words) as (app, port):
        image = {"role": "user", "content": [{"type": "image", "image": data}]}
        with pytest.raises(ApiError, match="^the images take too long for server.request_timeout_s=600"):
            app.reader._read_images([image], time.monotonic() - 600)
        status, found = ask(port, "data:image/png;base64," + base64.b64encode(data).decode())
        assert status == 200
        np.testing.assert_allclose(found, expected.log_probabilities[: len(found)], atol=1e-5)
        assert ask(port, f"file://{allowed}/%61.png") == (200, found)
        scored = ask(port, f"file://{allowed}/a.png", top_logprobs=1)[1]  # by a second pass, which sees the image too
        np.testing.assert_allclose(scored, found, atol=1e-5)
        assert (
            ask(port, "data:image/png;base64," + base64.b64encode(save(Image.new("RGB", (9, 9)))).decode())[1] != found
        )
        for urls, message in (
            ([f"file://{other}/a.png"], "names a file outside of server.image_folders"),
            ([f"file://{allowed}/../other/a.png"], "names a file outside of server.image_folders"),
            ([f"{allowed}/link.png"], "names a file outside of server.image_folders"),
            (["https://example.org/a.png"], "names an image at an address"),
            ([f"{allowed}/broken.png"], "has an image that is none of JPEG"),
            (["data:image/png;base64," + base64.b64encode(save(Image.new("RGB", (30, 30)))).decode()], "more than server.max_image_pixels=500"),
            ([f"{allowed}/a.png"] * 9000, "9000 images are more tokens than"),
        ):  # fmt: skip
            status, said = ask(port, *urls)
            assert (status, message in said) == (400, True), said
        assert ask(port, text="<image_soft_token>") == (
            400, "the conversation has <image_soft_token> in its text where there is no image",
        )  # fmt: skip
