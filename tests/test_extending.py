"""docs/extending.md: a user's own parts, in a folder outside of the repository."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import installs
from support.extending import PAGE, my_command, my_parts, my_values
from support.harness import ONE_LAYER, ROOT, RUN, cli, metrics

import tunix
from tunix.average import average
from tunix.base.errors import UserError
from tunix.config import Average, Export
from tunix.config.command_line import read_settings
from tunix.config.compose import add_search_path, compose
from tunix.config.pretrained_config import describe_keys_outside_family
from tunix.data.batches import FIELDS
from tunix.data.dataset import load_corpus, prepare_corpus
from tunix.export import export
from tunix.parity import compare, show
from tunix.training.choices import build_mesh
from tunix.training.loss import HeldOut, find_loss_kind

WRONG = """
import optax
from tunix.run import sinks

def numbers():
    yield 5

def empty():
    return iter(())

def halves():
    yield "half \\ud800 of it"
    yield from (f"Text {number} and some words." for number in range(80))

def uphill():
    return optax.scale_by_adam()

def forgets():
    optax.scale_by_adam()

def asks():
    def update(updates, state, params=None):
        return (optax.tree.scale(-1.0, updates) if optax.global_norm(updates) < 100 else updates), state
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

def infinite(phases):
    return lambda step: float("inf")

def downhill(phases):
    return lambda step: -1.0

def halves_late(phases):
    return lambda step: 1.0 if step < phases.rest // 2 else 0.5

def mean_loss(model, batch, seed):
    return batch["loss_mask"].mean()

def steps_loss(model, batch, seed):
    from tunix.training.loss import Loss
    total = batch["loss_mask"].sum()
    return Loss(total, total, {"loss": total, "step": total})

class Quiet(sinks.Sink):
    def __init__(self, start):
        self.name = start.config["logging"]["sinks"][0]

import my_parts
from dataclasses import replace
from tunix.huggingface.family import Name

Q = {"blocks.attention.q.w": Name("model.layers.{}.self_attn.q_proj.weight", "NH,Y")}
LETTER = replace(my_parts.ARCEE, names=my_parts.ARCEE.names | Q)

class Silent:
    def __init__(self, start):
        raise OSError("no disk")

class Bare:
    def __init__(self, start):
        pass

    def write(self, record, group):
        pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_parts.py").write_text(my_parts())
    (tmp_path / "wrong_parts.py").write_text(WRONG)
    (tmp_path / "notes.txt").write_text("\n\n".join(f"Paragraph {n} of the notes, and some words." for n in range(80)))
    return tmp_path


def test_a_run_of_a_users_own_parts(folder):
    words = shlex.split(my_command())[2:]
    done = cli(
        *RUN,
        *ONE_LAYER,
        "data.held_out_fraction=0.2",
        "hydra.run.dir=run",
        "model.mesh_shape=[[2,2],[fsdp,tp]]",
        *words,
        cwd=folder,
        devices=4,
    )
    assert done.returncode == 0, done.stderr
    lines = metrics(folder / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] < lines[0]["loss"]
    rates = [line["learning_rate"] for line in lines]
    assert rates[1] > rates[-1], "the stairs go down"
    assert "Marks fails" not in done.stdout + done.stderr
    marks = (folder / "run" / "marks.txt").read_text().splitlines()
    assert [mark.split(":")[0] for mark in marks if mark.startswith("train")] == [
        f"train step {n}" for n in range(1, 7)
    ]


OWN = "my_parts:ARCEE"
TINY = ROOT / "tests/models/tiny_arcee"  # tunix.parity --keep, of the config.json of transformers' ArceeConfig()


@pytest.mark.nightly
def test_a_family_of_ones_own_is_transformers(folder):
    """Logits, gradients, packed rows, answers and files of the page's Arcee, on one device and on four."""
    checks = compare(TINY, OWN, 1e-4)
    assert len(checks) == 7
    assert show(checks) == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_the_parity_command_of_the_page(folder, installs_dir):
    """transformers makes the model that the command compares; a family with another MLP is told where it differs."""
    python = installs.torch(installs_dir) / "python"
    make = "import transformers; transformers.ArceeConfig(num_key_value_heads=8).save_pretrained('DIR')"
    subprocess.run([python, "-c", make], check=True)
    variable, *words = shlex.split(re.findall(r"^(TRANSFORMERS_PYTHON=PYTHON python .*)$", PAGE, re.MULTILINE)[0])
    environment = os.environ | {variable.partition("=")[0]: str(python), "PYTHONPATH": f"{ROOT}:{folder}"}
    command = [sys.executable, *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 7
    (folder / "my_parts.py").write_text(my_parts().replace('"activation": "relu2"', '"activation": "silu"'))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "from layer 0 on, or before the first layer" in done.stdout


def test_a_family_of_ones_own(folder):
    """A run's config, a size, and files that go out as they came."""
    own = f"model.family={OWN}"
    shutil.copytree(TINY, folder / "hf")
    (folder / "my_conf/model").mkdir(parents=True)
    (folder / "my_conf/model/my_arcee.yaml").write_text(my_values())

    model = tunix.load_pretrained("hf", family=OWN)
    assert describe_keys_outside_family(model.cfg) == ""
    export(read_settings(Export, ["checkpoint=hf", f"family={OWN}", "output=out", "dtype=float32"]))
    average(read_settings(Average, ["checkpoint=[hf,out]", f"family={OWN}", "output=mean", "dtype=float32"]))
    written = json.loads((folder / "out/config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("arcee", ["ArceeForCausalLM"])
    before = load_file(TINY / "model.safetensors")
    for output in ("out", "mean"):
        after = load_file(folder / output / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[tensor], after[tensor]) for tensor in before)

    short = ["training.seq_len=32", "tokenizer.vocab_size=300"]
    read = compose([own, "model.init_from=hf", *short]).config.model
    assert read.model_dump(exclude={"init_from", "mesh_shape"}) == model.cfg.model_dump(
        exclude={"init_from", "mesh_shape"}
    )
    sized = compose(add_search_path(["model=my_arcee", *short], "my_conf")).config.model
    assert (sized.family, sized.mlp.kind, sized.mlp.activation, sized.embed_dim) == (OWN, "plain", "relu2", 32)

    parity = ROOT / "tests/models/parity/qwen2"
    for words, message in (
        (
            ["model.init_from=hf"],
            "model_type=arcee is not understood; .*a family of your own: model.family=.*, or family=.* a command",
        ),
        (["model.init_from=hf", "model.family=my_parts:ARCE"], "has no Family ARCE; did you mean ARCEE?"),
        ([f"model.init_from={parity}", own], "model_type=qwen2 is not understood; understood are arcee"),
    ):
        with pytest.raises(UserError, match=message):
            compose([*words, *short])
    with pytest.raises(
        UserError, match="q_proj.weight has dims=NH,Y in its family; the model has no dimension Y, but D"
    ):
        tunix.load_pretrained("hf", family="wrong_parts:LETTER")


def try_out(words: list[str]) -> None:
    """Compose and call the parts, as the beginning of a run does."""
    cfg = compose([*RUN, *words]).config
    for section in (cfg.data, cfg.optimizer, cfg.scheduler):
        section.try_out()
    cfg.logging.try_out(cfg.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data=custom data.function=wrong_parts:numbers", "data.function=wrong_parts:numbers fails: TypeError: the first document is 5"),
        ("data=custom data.function=wrong_parts:empty", "data.function=wrong_parts:empty yields no document"),
        ("data=custom data.function=my_parts:paragraphs data.arguments={path:nowhere.txt}", "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.txt'"),
        ("optimizer=custom optimizer.function=wrong_parts:uphill", "optimizer.function=wrong_parts:uphill fails: ValueError: its update does not lower the loss"),
        ("optimizer=custom optimizer.function=wrong_parts:forgets", "fails: TypeError: returned None, not an optax.GradientTransformation"),
        ("optimizer=custom optimizer.function=my_parts:adabelief optimizer.arguments={b3:1}", "unexpected keyword argument 'b3'"),
        ("optimizer=custom optimizer.function=wrong_parts:asks", "wrong_parts:asks fails: TracerBoolConversionError: "),
        ("scheduler.name=wrong_parts:infinite", "its factor is inf at step 0"),
        ("scheduler.name=wrong_parts:downhill", "its factor is -1.0 at step 0"),
        ("scheduler.name=wrong_parts:halves_late", "wrong_parts:halves_late fails: TracerBoolConversionError: "),
        ("logging.sinks=[wrong_parts:Silent]", "logging.sinks=wrong_parts:Silent fails: OSError: no disk"),
        ("logging.sinks=[wrong_parts:Bare]", "logging.sinks=wrong_parts:Bare has no text and no image and no close; let the class derive from tunix.run.table.Sink"),
        ("scheduler.name=my_parts:stair", "module my_parts has no function or class stair; did you mean stairs?"),
        ("scheduler.name=my_parts.py:stairs", "on PYTHONPATH; did you mean my_parts:stairs?"),
        ("scheduler.name=nowhere:stairs", "module nowhere cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
        ("scheduler.name=constnat", "expected one of warmup_cosine, warmup_linear, constant, wsd, cosine_hold, inverse_sqrt, range_test, sqrt_decay, or package.module:name; did you mean constant?"),
        ("logging.sinks=[jsonl,tensorbord]", "did you mean tensorboard?"),
        ("data=custom data.function=itertools:count data.arguments={b:1}", "data.function=itertools:count fails: TypeError: "),
        ("data=custom", "data.function must be given"),
        ("data=custom data.function=my_parts:paragraphs data.b1=1", "unknown key data.b1"),
        ("optimizer=custom optimizer.function=paragraphs", "optimizer.function=paragraphs: expected package.module:name"),
    ],
    ids=lambda value: value.split()[-1] if "=" in value.split()[-1] else "",
)  # fmt: skip
def test_a_part_that_does_not_work(words, message, folder):
    with pytest.raises(UserError) as error:
        try_out(words.split())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_half_of_a_character_is_left_out(folder):
    words = ["data=custom", "data.function=wrong_parts:halves", "data.held_out_fraction=0"]
    prepared, _ = prepare_corpus(compose([*RUN, *words]).config)
    assert prepared["custom"].index["left_out"] == {"half of a character": 1}


WRAPPED = """
from functools import partial, wraps
from my_parts import paragraphs
from wraps_parts import logged

@logged
def read():
    yield from paragraphs("notes.txt")

class Reader:
    def __call__(self):
        return paragraphs("notes.txt")

bound, made, imported = partial(paragraphs, "notes.txt"), Reader(), paragraphs
"""
LOGGED = """
from functools import wraps

def logged(function):
    @wraps(function)
    def call():
        return function()
    return call
"""


def test_a_change_of_the_named_file_makes_a_new_corpus(folder):
    """Whatever its function is: wrapped by another module's decorator, a partial, an object, imported."""
    (folder / "wraps_parts.py").write_text(LOGGED)
    (folder / "wrapped_parts.py").write_text(WRAPPED)
    own = compose([*RUN, "data=custom", "data.function=wrapped_parts:read"]).config.data
    sources = [own.model_copy(update={"function": f"wrapped_parts:{name}"}) for name in ("read", "bound", "made")]
    sources.append(own.model_copy(update={"function": "wrapped_parts:imported", "arguments": {"path": "notes.txt"}}))
    before = [source.units(1) for source in sources]
    assert [len(list(source.read(source.units(1)[0]))) for source in sources] == [80] * 4
    assert [source.units(1) for source in sources] == before
    (folder / "wrapped_parts.py").write_text(WRAPPED + "# other documents")
    assert not any(unit in before for unit in (source.units(1) for source in sources))


def test_a_sink_may_leave_everything_out_and_reads_the_config(folder):
    try_out(["logging.sinks=[wrong_parts:Quiet]"])


def test_a_loss_of_ones_own_gets_the_fields_of_its_task(folder):
    """And the numbers that are filled in: those of another task's loss are refused by name."""
    short = ["data=arithmetic", "sampling.max_new_tokens=8", "task.loss=my_parts:focal_loss"]
    for task, fields in (("grpo", {"advantages", "log_probs"}), ("kto", {"labels", "kl"})):
        kind = find_loss_kind(compose([*RUN, *short, f"task={task}"]).config)
        assert kind.fields.keys() - FIELDS.keys() == fields | {"reference_log_probs"}
        assert kind.make(None).__name__ == "focal_loss"
    for words, message in (
        ("task.loss=dpo", "task.loss=dpo is the loss of task=dpo: batches of task=pretrain lack its fields"),
        ("task=dpo data=arithmetic task.loss=next_token", "is the loss of task=pretrain and task=sft: batches of"),
        ("task.loss=dft", "task.loss=dft is the loss of task=sft: batches of task=pretrain lack its fields"),
        ("task.loss=my_parts:focal_loss training.z_loss=0.1", "task.loss=my_parts:focal_loss has no such term; set it"),
    ):
        with pytest.raises(UserError, match=f"{message}.*"):
            compose([*RUN, *words.split()])


@pytest.mark.parametrize(
    ("name", "message"), [("mean_loss", "TypeError"), ("steps_loss", "ValueError: its sums have step, which each line")]
)
def test_a_loss_that_does_not_work_writes_nothing(folder, name, message):
    before = sorted(folder.iterdir())
    words = ["data=text", "data.paths=[notes.txt]", f"task.loss=wrong_parts:{name}", "dry_run=true"]
    done = cli(*RUN, *ONE_LAYER, *words, cwd=folder, devices=1)
    assert done.returncode == 2
    assert f"error: task.loss=wrong_parts:{name} fails: {message}" in done.stderr
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == before


def test_a_loss_that_is_no_mean_over_tokens_has_no_bits_per_byte(folder):
    """A mean over microbatches was divided by the bytes of the text, as if it were a sum of nats."""
    words = ["data=custom", "data.function=my_parts:paragraphs", "data.arguments={path: notes.txt}"]
    cfg = compose([*RUN, *ONE_LAYER, *words, "data.held_out_fraction=0.2", "task.loss=my_parts:focal_loss"]).config
    totals = {"loss": np.float32(12)}, np.float32(4)
    held_out = HeldOut(cfg, load_corpus(cfg), lambda *_: totals, build_mesh(cfg), num_rows=8)
    assert held_out.evaluate({}) == {"loss": 3.0}
    held_out.totals = lambda *_: (dict.fromkeys(["loss", "mtp_loss"], np.float32(12)), np.float32(held_out.num_tokens))
    assert held_out.evaluate({}).keys() == {"loss", "perplexity", "bits_per_byte", "eval_tokens", "mtp_loss"}
