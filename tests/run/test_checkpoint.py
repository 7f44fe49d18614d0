"""A resumed run is the unbroken run; a checkpoint that cannot be used is named; what is kept is what was asked for."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from conftest import write_corpus
from support.harness import RUN, TWO_DEVICES, metrics

import tunix
from tunix.average import average, average_weights
from tunix.base.errors import Stopped, UserError
from tunix.checkpoints.checkpoint import Improvement
from tunix.checkpoints.store import find_parts, find_storage
from tunix.config import Average, Evaluate, Export, Generate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.config.model import list_keys_outside
from tunix.config.saved_runs import find_resume_point
from tunix.data.dataset import HASH_BITS, find_units, hash_document, load_corpus
from tunix.evaluate import evaluate
from tunix.export import export
from tunix.generate import generate
from tunix.inference.pretrained import Pretrained, find_checkpoint
from tunix.verify import check_everything

FLOAT32 = "dtype=float32"
EXPERTS = (
    "model=tiny_moe", "model.num_layers=2", "model.global_every=1", "model.sliding_window=null",
    "model.mlp.num_experts=4", "model.mlp.expert_dim=8",
)  # fmt: skip
MESH = "model.mesh_shape=[[4,2],[fsdp,tp]]"


@pytest.fixture
def run(tmp_path, corpus, monkeypatch):
    """Train a small model in a folder of its own; returns the run's folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, corpus=corpus):
        words = (
            words
            if any(word.startswith("resume=") for word in words)
            else (*RUN, "data=text", f"data.paths=['{corpus}']", MESH, *words)
        )
        return tunix.train(list(words)).folder

    return run


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Callable[..., Path]:
    """Folder of a finished run with these words; made once, and changed by no test."""

    @cache
    def finished(*words: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("finished"))
            return tunix.train([*RUN, "data=text", f"data.paths=['{corpus}']", MESH, *words]).folder

    return finished


@pytest.fixture
def finished_copy(finished, tmp_path) -> Callable[..., Path]:
    """The same, as a copy that a test may change: it holds the checkpoints of steps 3 and 6."""
    return lambda *words: shutil.copytree(finished(*words), tmp_path / "copied", symlinks=True)


def losses(folder) -> dict[int, float]:
    """Loss of each step; a step that was run twice must have come to the same."""
    found: dict[int, float] = {}
    for line in metrics(folder):
        assert found.setdefault(line["step"], line["loss"]) == line["loss"], (
            f"step {line['step']} differs when run again"
        )
    return found


def steps(folder) -> list[int]:
    return sorted(int(name) for name in os.listdir(folder / "checkpoints") if name.isdigit())


def test_resume_on_the_same_mesh_is_bit_identical(run, finished):
    whole = finished()
    part = run("hydra.run.dir=part", "training.max_steps=6", "checkpoint.max_to_keep=9")
    shutil.rmtree(part / "checkpoints" / "6")
    run(f"resume={part}")
    assert losses(part) == losses(whole)
    assert [line["step"] for line in metrics(part)] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    held_out = [[line["loss"] for line in metrics(folder, "held_out") if line["step"] == 6] for folder in (part, whole)]
    assert held_out[0][0] == held_out[0][1] == held_out[1][0]


@pytest.mark.nightly(but=["[[2,4],[fsdp,tp]]"])
@pytest.mark.parametrize("mesh", ["[[8],[fsdp]]", "[[2,2,2],[dp,fsdp,tp]]", "[[2,4],[fsdp,tp]]"])
def test_resume_on_another_mesh_sees_the_same_data(run, finished_copy, mesh):
    part = finished_copy("training.global_batch_size=8")
    expected = [losses(part)[step] for step in (4, 5, 6)]
    shutil.rmtree(part / "checkpoints" / "6")
    run(f"resume={part}", f"model.mesh_shape={mesh}")
    again = [line["loss"] for line in metrics(part)][6:]
    np.testing.assert_allclose(again, expected, rtol=1e-5)


STAGES = (
    "model.mesh_shape=[[2],[pp]]", "distributed.allow_idle_devices=true", "model.num_layers=4", "model.global_every=2",
    "training.pipeline_schedule=interleaved", "training.micro_batch_size=2", "training.global_batch_size=4",
    "training.max_steps=2", "checkpoint.save_every_steps=1", "evaluation.every_steps=null",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        ["model.mesh_shape=[[2],[fsdp]]"],
        ["model.mesh_shape=[[2,2],[pp,tp]]", "training.pipeline_schedule=1f1b"],
        ["model.mesh_shape=[[4],[pp]]", "training.micro_batch_size=1"],
    ],
    ids=["no stages", "1f1b, tp", "1f1b, more stages"],
)
def test_resume_from_interleaved_stages(run, finished_copy, words):
    """A checkpoint has the layers in the order of the model, whatever the order in which stages had them."""
    part = finished_copy(*STAGES)
    expected = losses(part)[2]
    shutil.rmtree(part / "checkpoints" / "2")
    run(f"resume={part}", "training.pipeline_schedule=auto", *words)
    lines = metrics(part)
    assert [line["step"] for line in lines] == [1, 2, 2]
    np.testing.assert_allclose(lines[-1]["loss"], expected, rtol=1e-5)


@pytest.mark.nightly
def test_resume_from_stages_behind_dense_layers(run, finished_copy):
    """Layers before the stages rest on them, and without stages elsewhere."""
    part = finished_copy(*STAGES[:2], *STAGES[5:], "model=tiny_moe", "model.num_layers=4", "model.mlp.dense_layers=2")
    expected = losses(part)[2]
    shutil.rmtree(part / "checkpoints" / "2")
    run(f"resume={part}", "model.mesh_shape=[[2],[fsdp]]")
    np.testing.assert_allclose(metrics(part)[-1]["loss"], expected, rtol=1e-5)


@pytest.mark.nightly
def test_resume_under_another_strategy(run):
    folder = run("training.sharding_strategy=no_shard")
    shutil.rmtree(folder / "checkpoints" / "6")
    run(f"resume={folder}", "training.sharding_strategy=full_shard")
    by_step = [line["loss"] for line in metrics(folder)]
    np.testing.assert_allclose(by_step[6:], by_step[3:6], rtol=1e-5)


def test_a_chosen_step_puts_newer_ones_aside(run, finished_copy):
    folder = finished_copy(*TWO_DEVICES)
    run(f"resume={folder}/checkpoints/3", "training.max_steps=5")
    assert steps(folder) == [3, 5]
    (aside,) = folder.glob("checkpoints_put_aside_*")
    assert os.listdir(aside) == ["6"]


@pytest.mark.nightly
def test_a_longer_run_goes_on_where_it_ended(run, finished_copy):
    folder = finished_copy(*TWO_DEVICES)
    run(f"resume={folder}", "training.max_steps=8")
    assert [line["step"] for line in metrics(folder)] == list(range(1, 9))
    tokens = [line["tokens"] for line in metrics(folder)]
    assert tokens == [tokens[0] * n for n in range(1, 9)]
    run(f"resume={folder}")  # nothing is left to do, and that is no error
    assert len(metrics(folder)) == 8


@pytest.mark.nightly
@pytest.mark.parametrize("limit", ["training.max_tokens=1024", "training.num_epochs"])
def test_a_limit_in_data_is_met_with_another_batch(run, limit, corpus):
    """Four sequences a step until step 3; the sequences that are left are cut into steps of eight."""
    if limit == "training.num_epochs":
        cfg = compose([*RUN, "data=text", f"data.paths=['{corpus}']"]).config
        limit += f"={32.5 / load_corpus(cfg).num_samples}"
    first = run("training.max_steps=3", *TWO_DEVICES)
    folder = run(f"resume={first}", "training.max_steps=null", limit, "training.global_batch_size=8")
    assert [(line["step"], line["tokens"]) for line in metrics(folder)][3:] == [(4, 640), (5, 896)]
    log = (folder / "train.log").read_text()
    assert "sample 12 comes after step 3; the last step is 5, not 4" in log
    assert "nothing is left" not in log
    run(f"resume={folder}")
    assert len(metrics(folder)) == 5
    assert f"nothing is left to train after step 5: {limit}; raise it" in (folder / "train.log").read_text()


def test_the_first_checkpoint_can_be_gone_on_with(run):
    folder = run("checkpoint.save_first=true", "training.max_steps=2", *TWO_DEVICES)
    run(f"resume={folder}/checkpoints/0")
    assert [line["step"] for line in metrics(folder)] == [1, 2, 1, 2]
    losses(folder)
    assert steps(folder) == [0, 2]


@pytest.mark.nightly
def test_an_evaluation_that_a_stop_prevented_is_made_up_for(run):
    with pytest.raises(Stopped):
        run(
            "training.max_steps=1",
            "training.time_limit_s=0.001",
            "evaluation.sample_tokens=3",
            "hydra.run.dir=it",
            *TWO_DEVICES,
        )
    assert metrics(Path("it"), "held_out") == []
    run("resume=it", "training.time_limit_s=null")
    assert [line["step"] for line in metrics(Path("it"), "held_out")] == [1]
    assert "after >>>" in Path("it/train.log").read_text()


@pytest.mark.nightly
def test_an_evaluation_that_a_stop_left_out_counts_as_in_an_unbroken_run(run):
    """Also for patience: without the first evaluation, the second one would be the best, and the run a step longer."""
    words = ["evaluation.every_steps=1", "evaluation.patience=1", "evaluation.min_improvement=100", *TWO_DEVICES]
    with pytest.raises(Stopped):
        run(*words, "training.time_limit_s=0.001", "hydra.run.dir=it")
    run("resume=it", "training.time_limit_s=null")
    assert metrics(Path("it"), "held_out") == metrics(run(*words), "held_out")
    assert [line["step"] for line in metrics(Path("it"), "held_out")] == [1, 2]


@pytest.mark.nightly
def test_what_is_kept(run):
    folder = run(
        "training.max_steps=8", "checkpoint.save_every_steps=1", "checkpoint.max_to_keep=2", "checkpoint.keep_every_steps=3",
        "checkpoint.save_first=true", "evaluation.every_steps=1", *TWO_DEVICES,
    )  # fmt: skip
    held_out = {line["step"]: line["loss"] for line in metrics(folder, "held_out")}
    best = min(held_out, key=held_out.get)
    assert steps(folder) == sorted({0, 3, 6, 7, 8, best})
    assert (f"best held out: step {best};" in (folder / "train.log").read_text()) == (best != 8)
    bare = run("checkpoint.save_every_steps=null", "checkpoint.keep_best=false", *TWO_DEVICES)
    assert steps(bare) == [6]
    waited = run("checkpoint.async=false", "checkpoint.max_to_keep=1", "checkpoint.keep_best=false", *TWO_DEVICES)
    assert steps(waited) == [6]


@pytest.mark.nightly
def test_a_hard_stop_and_chosen_steps(run, finished, monkeypatch):
    """The schedule is that of the whole run: the steps after the stop have the losses of an unbroken run."""
    monkeypatch.setenv("TUNIX_API_KEY", "a secret")
    monkeypatch.setenv("TUNIX_WEBHOOK_URL", "http://localhost/a secret")
    words = ["checkpoint.save_at_steps=[1]", "checkpoint.max_to_keep=1", "checkpoint.save_every_steps=null"]
    with pytest.raises(Stopped, match="training.hard_stop=2: saved; go on with resume="):
        run("hydra.run.dir=it", "training.hard_stop=2", "logging.level=warning", "checkpoint.keep_best=false", *words)
    assert steps(Path("it")) == [1, 2]
    assert "step 2/6" not in Path("it/train.log").read_text()
    run("resume=it", "logging.level=info")
    assert losses(Path("it")) == losses(finished())
    assert steps(Path("it")) == [1, 6]
    assert "step 6/6" in Path("it/train.log").read_text()
    record = json.loads(Path("it/environment.json").read_text())
    assert record["packages"]["jax"] == jax.__version__
    assert isinstance(record["git_diff"], str)
    assert record["variables"]["TUNIX_API_KEY"] == "***"
    assert "a secret" not in json.dumps(record["variables"])


@pytest.mark.nightly
def test_the_best_is_kept_also_after_a_resume(run):
    """Overfitting on purpose: a huge rate makes the later checkpoints worse."""
    words = [
        "checkpoint.save_every_steps=1",
        "evaluation.every_steps=1",
        "checkpoint.max_to_keep=1",
        *TWO_DEVICES,
    ]
    folder = run(*words, "training.max_steps=3", "scheduler.warmup_ratio=0")
    run(f"resume={folder}", "training.max_steps=6", "optimizer.learning_rate=3")
    held_out = {line["step"]: line["loss"] for line in metrics(folder, "held_out")}
    best = min(held_out, key=held_out.get)
    assert best <= 3
    assert steps(folder) == [best, 6]


def tear(folder) -> None:
    """Cut the array data of a checkpoint short, as a disk may."""
    files = [path for path in (folder / "state").rglob("d/*") if path.is_file()]
    for path in files:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def flip_a_bit(folder) -> None:
    """Change one bit in the middle of the largest file of the arrays."""
    path = max((path for path in (folder / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.nightly(but=["flip_a_bit"])
@pytest.mark.parametrize("damage", [tear, flip_a_bit])
def test_a_damaged_newest_checkpoint_is_passed_over_loudly(run, finished_copy, damage):
    folder = finished_copy(*TWO_DEVICES)
    damage(folder / "checkpoints" / "6")
    run(f"resume={folder}")
    log = (folder / "train.log").read_text()
    assert "CHECKPOINT OF STEP 6 IS DAMAGED, taking the one before" in log
    assert re.search("checkpoints/6/state/.* (were written|other bytes)", log)
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    losses(folder)
    assert steps(folder) == [3, 6]


def test_checkpoints_that_cannot_be_used_are_named(run, finished_copy):
    folder = finished_copy(*TWO_DEVICES)
    with pytest.raises(UserError, match="has no checkpoint of step 4; it has 3, 6"):
        run(f"resume={folder}/checkpoints/4")
    for words, message in [
        (["model.num_layers=4"], "model.num_layers=4, but the checkpoint was made with 3"),
        (["model.rope_theta=5e5"], "model.rope_theta=500000.0, but the checkpoint was made with 1000000.0"),
        (["optimizer=lion"], "optimizer.name=lion, but the checkpoint was made with adamw"),
        (["optimizer=adafactor"], "optimizer.name=adafactor, but the checkpoint was made with adamw"),
        (["model.tied_head=false"], "model.tied_head=false, but the checkpoint was made with true"),
        (["training.seq_len=16"], "training.seq_len=16, but the checkpoint was made with 32"),
        (["training.param_dtype=bfloat16"], "training.param_dtype=bfloat16, but the checkpoint was made with float32"),
        (["seed=1"], "seed=1, but the checkpoint was made with 0"),
        (
            ["tokenizer.vocab_size=280"],
            "the tokenizer .* is not the checkpoint's .* tokenizer.vocab_size was 300; leave it",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            run(f"resume={folder}", *words)
    config = (folder / "config.yaml").read_text()
    assert "num_layers: 3" in config
    assert len((folder / "train.log").read_text().splitlines()) < 60
    tear(folder / "checkpoints" / "6")
    with pytest.raises(UserError, match="the checkpoint of step 6 .* is damaged"):
        run(f"resume={folder}/checkpoints/6")
    tear(folder / "checkpoints" / "3")
    with pytest.raises(UserError, match=r"all checkpoints in .* are damaged \(3, 6\)"):
        run(f"resume={folder}")


def empty(checkpoint: Path) -> str:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    return "checkpoints/6 lacks state/_METADATA, state/manifest.ocdbt, run/metadata, tokenizer/metadata"


def copy_half(checkpoint: Path) -> str:
    """Leave what a copy that is under way has brought: the arrays of one process."""
    for path in [*checkpoint.iterdir(), *(checkpoint / "state").iterdir()]:
        if path.name not in ("state", "ocdbt.process_0"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return "checkpoints/6 lacks state/_METADATA, state/manifest.ocdbt, run/metadata, tokenizer/metadata"


def leave_out_digests(checkpoint: Path) -> str:
    """Leave what an older version has written, with half of each array."""
    for path in checkpoint.rglob("digests*.json"):
        path.unlink()
    tear(checkpoint)
    return "checkpoints/6/state cannot be read: "


def leave_out_index(checkpoint: Path) -> str:
    (checkpoint / "state" / "digests.json").unlink()
    return "checkpoints/6/state/digests.json cannot be read"


def link_to_nothing(checkpoint: Path) -> str:
    shutil.rmtree(checkpoint)
    checkpoint.symlink_to("nowhere")
    return "checkpoints/6 is no folder, but a link to nothing"


def put_a_file(checkpoint: Path) -> str:
    shutil.rmtree(checkpoint)
    checkpoint.touch()
    return "checkpoints/6 is no folder"


@pytest.mark.nightly(but=["empty", "leave_out_digests", "link_to_nothing"])
@pytest.mark.parametrize("damage", [empty, copy_half, leave_out_digests, leave_out_index, link_to_nothing, put_a_file])
def test_a_checkpoint_that_is_not_there_as_a_whole_is_refused(finished_copy, tmp_path, monkeypatch, damage):
    """Where no folder has the name of the step, there is no such checkpoint; else the message says what is missing."""
    run = finished_copy(*TWO_DEVICES)
    monkeypatch.chdir(tmp_path)
    message = damage(run / "checkpoints" / "6")
    lines, is_intact = check_everything(str(run))
    assert not is_intact
    assert [line.partition(" ")[0] for line in lines] == [f"{run}/checkpoints/3:", "DAMAGED"]
    assert message in lines[1]
    is_folder = (run / "checkpoints" / "6").is_dir()
    named, newest = f"checkpoint={run}/checkpoints/6", f"checkpoint={run}"
    message = re.escape(message) if is_folder else "has no checkpoint of step 6; it has 3"
    for word in (named, newest) if is_folder else (named,):
        for ask in (
            lambda word: export(read_settings(Export, [word, "output=exported"])),
            lambda word: evaluate(read_settings(Evaluate, [word])),
            lambda word: generate(read_settings(Generate, [word, "prompt=a"])),
        ):
            with pytest.raises(UserError, match=message) as error:
                ask(word)
            assert "\n" not in str(error.value)
    if not is_folder:
        assert find_checkpoint(run / "checkpoints", None).name == "3"


@pytest.mark.parametrize("step", [None, 3])
def test_a_run_without_a_checkpoint_has_none_yet(tmp_path, step):
    with pytest.raises(UserError, match=r"^checkpoint: .* has no checkpoint yet$"):
        find_checkpoint(tmp_path, step)


def test_a_changed_corpus_is_refused(run, tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    folder = run("tokenizer.train_bytes=1", corpus=corpus)  # the tokenizer sees the first document only
    cfg = compose(["data=text", f"data.paths=['{corpus}']"]).config
    files = [Path(unit.path) for unit in find_units(cfg.data, cfg.loading)]
    held_out = next(file for file in files if hash_document(file.name) < cfg.data.held_out_fraction * 2**HASH_BITS)
    for file, message in [
        (files[-1], "the training data .* are not the checkpoint's .*; sample 24 of one is not sample 24"),
        (held_out, "the held-out documents of text are not .*before and after step 6 would be of other texts"),
    ]:
        text = file.read_text()
        file.write_text(text[::-1])
        with pytest.raises(UserError, match=message):
            run(f"resume={folder}")
        file.write_text(text)
    assert len(metrics(folder)) == 6


@pytest.mark.nightly
def test_leave_to_go_on_with_a_changed_corpus(run, tmp_path):
    """With the tokenizer of the checkpoint, though the corpus would give another; and given once."""
    corpus = write_corpus(tmp_path / "corpus")
    folder = run(*TWO_DEVICES, corpus=corpus)
    for path in corpus.glob("*.txt"):
        path.write_text(path.read_text()[::-1])
    with pytest.raises(
        UserError, match="the tokenizer .* is not the checkpoint's .* loading.allow_changed_data=true goes on"
    ):
        run(f"resume={folder}")
    run(f"resume={folder}", "loading.allow_changed_data=true", "training.max_steps=7")
    assert [line["step"] for line in metrics(folder)][6:] == [7]
    assert "allow_changed_data: false" in (folder / "config.yaml").read_text()


def test_a_run_without_a_whole_checkpoint_starts_at_step_0_and_says_so(run, finished_copy):
    folder = finished_copy(*TWO_DEVICES)
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    run(f"resume={folder}")
    assert "starting at step 0" in (folder / "train.log").read_text()
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6] * 2
    losses(folder)


def test_resume_latest(run):
    # outputs/ is often on another disk. A way up from there is not the way up from the link to it.
    Path("scratch/of/mine/outputs").mkdir(parents=True)
    Path("outputs").symlink_to("scratch/of/mine/outputs")
    folder = run("hydra.run.dir=elsewhere/it", "training.max_steps=1", *TWO_DEVICES)
    run("resume=latest", "training.max_steps=2")
    assert [line["step"] for line in metrics(folder)][-1] == 2
    link = Path("outputs/tunix/latest")
    for source in (link, link / "checkpoints/2"):  # the link became one to itself
        assert find_resume_point(str(source), None)[0] == folder.resolve()
    Path("loop").symlink_to("loop")
    with pytest.raises(UserError, match="^resume=loop: loop is not a run's folder"):
        find_resume_point("loop", None)


def moving_average(folder, step: int):
    """The moving average of the parameters in a checkpoint, on the host."""
    storage, step = find_storage((folder / "checkpoints" / str(step)).absolute())
    return storage.restore(step, abstract_copy(folder))["copies"]["ema"]


def abstract_copy(folder):
    """Names and shapes of the average in `folder`, whatever mesh it was written on."""
    weights = tunix.load_pretrained(folder).params
    return {"copies": {"ema": jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), weights)}}


@pytest.mark.nightly
def test_a_moving_average_goes_on_bit_identically_and_is_exported(run):
    words = ["training.ema_decay=0.5", "checkpoint.max_to_keep=9"]
    whole, part = run("hydra.run.dir=whole", *words), run("hydra.run.dir=part", *words)
    shutil.rmtree(part / "checkpoints" / "6")
    run(f"resume={part}", "training.ema_memory=host")  # read into the host's memory, and saved from there
    assert losses(part) == losses(whole)
    expected = moving_average(whole, 6)
    assert jax.tree.all(jax.tree.map(np.array_equal, moving_average(part, 6), expected))
    tokens = np.arange(16)[None]
    trained, averaged = (tunix.load_pretrained(part, weights=name)(tokens) for name in ("trained", "ema"))
    assert not np.allclose(trained, averaged, atol=1e-3)
    export(read_settings(Export, [f"checkpoint={part}", "output=averaged", "weights=ema"]))
    np.testing.assert_allclose(tunix.load_pretrained("averaged")(tokens), averaged, atol=1e-5)
    for source in (run("hydra.run.dir=plain", "training.max_steps=1"), "averaged"):
        with pytest.raises(UserError, match=r"^weights=ema: .* weights=trained"):
            tunix.load_pretrained(source, weights="ema")


def test_checkpoints_are_averaged(finished, tmp_path, monkeypatch):
    """Of one run, with equal shares; of a run and Hugging Face's files, with others."""
    run = finished(*TWO_DEVICES)
    monkeypatch.chdir(tmp_path)

    def averaged(*words: str):
        average(read_settings(Average, [*words, "dtype=float32"]))
        return jax.tree.leaves(tunix.load_pretrained(words[-1].partition("=")[2]).params)

    third, sixth = (jax.tree.leaves(tunix.load_pretrained(run / "checkpoints" / step).params) for step in "36")
    assert not all(np.array_equal(a, b) for a, b in zip(third, sixth, strict=True))
    for a, b, mean in zip(third, sixth, averaged(f"checkpoint={run}", "steps=[3,6]", "output=mean"), strict=True):
        np.testing.assert_allclose(mean, (np.asarray(a) + np.asarray(b)) / 2, rtol=1e-6, atol=1e-7)
    words = f"checkpoint=[{run}/checkpoints/3,mean]", "shares=[1,2]", "output=again"  # (1 x third + 2 x mean) / 3
    for a, b, mean in zip(third, sixth, averaged(*words), strict=True):
        np.testing.assert_allclose(mean, (2 * np.asarray(a) + np.asarray(b)) / 3, rtol=1e-5, atol=1e-6)

    for words, message in (
        (["steps=[3,5]"], "has no checkpoint of 5; it has 3, 6"),
        (["steps=[3,3]"], "checkpoints/3 is named twice; name each checkpoint once"),
        (["steps=[0,3]"], "^steps.0=0: expected a number of at least 1$"),
        (["steps=[3]"], "an average needs two checkpoints or more, 1 given"),
        (["steps=[3]", "checkpoint=[a,b]"], "steps chooses checkpoints of one run, but"),
        (["steps=all", "shares=[1]"], "has 1 numbers for 2 checkpoints"),
        ([], r"give the folder of a run and steps=\[300,400\]"),
        (["steps=all", "output=again"], "output=again exists already"),
    ):
        with pytest.raises(UserError, match=message):
            average(read_settings(Average, [f"checkpoint={run}", "output=other", *words]))
    (tmp_path / "link").symlink_to("mean")
    for sources in (f"{run}/checkpoints/6,{run}", "mean,again,link"):
        with pytest.raises(UserError, match="/(6|mean) is named twice; name each checkpoint once"):
            average(read_settings(Average, [f"checkpoint=[{sources}]", "output=other"]))
    (tmp_path / "again" / "digests.json").unlink()
    words = (tmp_path / "again" / "tokenizer.json").read_text()
    (tmp_path / "again" / "tokenizer.json").write_text(words.replace("<pad>", "<fill>"))
    with pytest.raises(UserError, match="token 0 is '<pad>' in mean, but '<fill>' in again; weights for different"):
        average(read_settings(Average, ["checkpoint=[mean,again]", "output=other"]))


@pytest.mark.nightly
def test_an_average_takes_what_differs_in_no_part_of_the_architecture(finished, tmp_path, monkeypatch):
    """How results are computed, and the losses of experts; of low-rank updates, which are added first, their keys."""
    monkeypatch.chdir(tmp_path)

    def copied(run: Path, name: str, **keys: object) -> str:
        """Copy a run and set keys of the model in its config; return the copy's folder."""
        shutil.copytree(run, name, symlinks=True)
        config = yaml.safe_load((run / "config.yaml").read_text())
        for key, value in keys.items():
            section, _, last = key.rpartition("__")
            keys_of_section = config["model"][section] if section else config["model"]
            assert last in keys_of_section
            keys_of_section[last] = value
        Path(name, "config.yaml").write_text(yaml.safe_dump(config))
        return name

    def averaged(sources: list, output: str) -> list:
        average(read_settings(Average, [f"checkpoint=[{','.join(map(str, sources))}]", f"output={output}", FLOAT32]))
        return jax.tree.leaves(tunix.load_pretrained(output).params)

    def merged(source: Path | str) -> list:
        return jax.tree.leaves(tunix.load_pretrained(source).merged().params)

    experts = finished(*EXPERTS, "training.max_steps=1", *TWO_DEVICES)
    others = {
        "attention": "xla", "cp_exchange": "ring", "expert_products": "xla", "expert_exchange": "rows",
        "expert_buffer_factor": 2.0, "mlp__balance_loss": 0.5, "mlp__z_loss": 0.25,
    }  # fmt: skip
    assert {key.replace("__", ".") for key in others} == list_keys_outside("computation", "losses")
    same = averaged([experts, *(copied(experts, key, **{key: value}) for key, value in others.items())], "same")
    for a, b in zip(same, merged(experts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    for key, value in {"norm_eps": 1e-3, "mlp__experts_per_token": 1}.items():
        with pytest.raises(UserError, match=rf"checkpoint: model\.{key.partition('__')[0]} is .* have no average"):
            averaged([experts, copied(experts, key, **{key: value})], "refused")

    updates = finished("model.lora.rank=2", "training.max_steps=2", *TWO_DEVICES)
    twice = copied(updates, "alpha", lora__alpha=32.0)
    for mean, a, b in zip(averaged([updates, twice], "mean"), merged(updates), merged(twice), strict=True):
        np.testing.assert_allclose(mean, (np.asarray(a) + np.asarray(b)) / 2, rtol=1e-5, atol=1e-6)


def test_weights_in_other_stacks_have_no_average(monkeypatch):
    """Their arrays have other names: the sum of both ended in a traceback. The weights are those of the key `weights`."""
    cfg = compose([]).config.model
    configs = {"a": cfg, "b": cfg.model_copy(update={"layers_before_stages": 1})}

    def load(source, *_, weights, **__):
        assert weights == "ema"
        return Pretrained(configs[source], *[None] * 3, {}, *[None] * 3)

    monkeypatch.setattr("tunix.average.load_pretrained", load)
    message = (
        "model.layers_before_stages is None in a, but 1 in b; their weights have no average; average their exports"
    )
    with pytest.raises(UserError, match=message):
        average_weights(["a", "b"], (1.0, 1.0), Mock(weights="ema"), "no_shard")


def test_an_average_has_two_models_in_memory_at_a_time(monkeypatch):
    """While the third was read, the first, the second and their sum were there too."""
    found, cfg = [], compose([]).config.model

    def load(source, *_, **__):
        found.append(sum(array.shape == (977,) for array in jax.live_arrays()))
        return Pretrained(cfg, *[None] * 3, {"w": jnp.full(977, float(source))}, *[None] * 3)

    monkeypatch.setattr("tunix.average.load_pretrained", load)
    mean = average_weights(["1", "2", "3", "6"], (1.0, 1.0, 1.0, 1.0), Mock(), "no_shard")
    assert found == [0, 1, 1, 1]
    np.testing.assert_allclose(mean.params["w"], 3.0)


@pytest.mark.nightly
def test_a_moving_average_may_begin_and_end_with_a_resume(run):
    folder = run("training.max_steps=3", *TWO_DEVICES)
    before = tunix.load_pretrained(folder).params
    run(f"resume={folder}", "training.max_steps=4", "training.ema_decay=0.5", "checkpoint.max_to_keep=9")
    after = tunix.load_pretrained(folder).params
    expected = jax.tree.map(lambda a, p: a + 0.5 * (p - a), before, after)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), moving_average(folder, 4), expected
    )
    assert "the checkpoint has no ema of the parameters" in (folder / "train.log").read_text()
    run(f"resume={folder}", "training.max_steps=5", "training.ema_decay=null")
    assert find_parts(*find_storage(folder / "checkpoints" / "5"))["copies"] == []
    assert "ema is not wanted any more: it is dropped" in (folder / "train.log").read_text()


def test_a_loss_that_is_no_number_is_never_the_best():
    """A run that begins with one goes on while it improves; an earlier version has saved such a best."""
    patience, nan = compose(["evaluation.patience=3"]).config.evaluation, float("nan")
    for improvement in (Improvement(), Improvement(nan, 1)):
        for cost in (nan, 3.0, nan, 2.0, 2.5):
            improvement = improvement.after(cost, patience)
        assert improvement == Improvement(2.0, 1)
