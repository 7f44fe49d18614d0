"""Rows of docs/adding.md: the places exist, and a new entry in one of them works without another edit.

A copy of the package gets a new entry in each table, and one run uses them all.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.harness import ROOT, RUN, metrics

from tunix.base.errors import UserError
from tunix.cli.compose import compose
from tunix.run.items import parts_in


class Entry(NamedTuple):
    """An edit of one file that adds an entry to a table, and the words of a command that choose it."""

    file: str
    before: str  # stands once in the file
    after: str
    words: tuple[str, ...]


ENTRIES = {
    "a data source": Entry(
        "tunix/sources/__init__.py",
        "SOURCES = (",
        """\
class Numbers(Synthetic):
    source: Literal["numbers"]

    def read(self, unit):
        for number in range(unit.start, unit.stop):
            yield Item(f"numbers@{number}", " ".join(map(str, range(number, number + 100))))


SOURCES = (Numbers, """,
        ("data=synthetic", "data.source=numbers", "data.num_documents=200", "data.mean_document_bytes=300"),
    ),
    "an optimizer": Entry(
        "tunix/optimizers/__init__.py",
        "OPTIMIZERS = (",
        """\
class Signs(Lion):
    name: Literal["signs"]

    def rule(self, weights):
        import jax
        import optax

        return optax.stateless(lambda updates, params: jax.tree.map(lambda update: update**0, updates))


OPTIMIZERS = (Signs, """,
        ("optimizer=lion", "optimizer.name=signs", "optimizer.weight_decay=0"),
    ),
    "a schedule": Entry(
        "tunix/optimizers/schedules.py",
        "SHAPES = {",
        'SHAPES = {\n    "halving": Shape(lambda phases: lambda step: 0.5**step),',
        ("scheduler.name=halving", "scheduler.warmup_steps=0", "optimizer.learning_rate=0.5"),
    ),
    "a loss": Entry(
        "tunix/training/losses.py",
        "LOSSES = {",
        """\
def _make_twice(cfg):
    once = _make_next_token(cfg)

    def twice(model, batch, seed):
        loss = once(model, batch, seed)
        return loss._replace(sums=loss.sums | {"twice": 2 * loss.sums["loss"]})

    return twice


LOSSES = {
    "twice": LossKind(_make_twice, _text_quality),""",
        ("task.loss=twice",),
    ),
    "a metric sink": Entry(
        "tunix/sinks/__init__.py",
        "SINKS: dict[str, Callable[[Start], Sink]] = {",
        """\
class Lines(Jsonl):
    def __init__(self, start):
        self.file = (start.folder / "lines.jsonl").open("w")


SINKS: dict[str, Callable[[Start], Sink]] = {"lines": Lines, """,
        ("logging.sinks=[jsonl,lines]",),
    ),
    "a copy of the parameters": Entry(
        "tunix/training/copies.py",
        '= {"ema":',
        '= {"first": lambda training: lambda copy, params: copy, "ema":',
        (),
    ),
    "a mesh axis that splits the batch": Entry(
        "tunix/sharding/dims.py",
        "MESH = (",
        'MESH = (\n    Axis("extra", splits_batch=True),',
        ("model.mesh_shape=[[4,2],[extra,fsdp]]",),
    ),
    "an attention kernel": Entry(
        "tunix/config/kernel_tables.py",
        "KERNELS = {",
        'KERNELS = {\n    "another": "tunix.models.attention:plain",',
        ("model.attention=another",),
    ),
    "a rematerialization policy": Entry(
        "tunix/config/training.py",
        "REMAT = {",
        'REMAT = {\n    "norms": ("norm",),',
        ("training.remat=norms",),
    ),
}
PAGE = (ROOT / "docs" / "adding.md").read_text()
ROWS = dict(re.findall(r"^\| (an? [^|]+?) \| (.*) \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("thing", ROWS)
def test_tables_of_the_page_are_where_it_says(thing):
    tables = re.findall(r"`([A-Z_]{4,})` of `(tunix/[\w/]+)\.py`", ROWS[thing])
    for table, file in tables:
        assert hasattr(importlib.import_module(file.replace("/", ".").removesuffix(".__init__")), table), (table, file)
    assert tables or thing not in ENTRIES


@pytest.mark.parametrize("thing", ENTRIES)
def test_the_page_names_the_file(thing):
    assert f"`{ENTRIES[thing].file}`" in ROWS[thing]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Folder of a run that uses every new entry."""
    root = tmp_path_factory.mktemp("adding")
    for name in ("tunix", "conf"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run_training.py", root)
    for entry in ENTRIES.values():
        file = root / entry.file
        text = file.read_text()
        assert text.count(entry.before) == 1, entry.before
        text = text.replace(entry.before, entry.after)
        file.write_text(
            text.replace("from typing import TYPE_CHECKING, ", "from typing import TYPE_CHECKING, Literal, ")
        )
    words = [word for entry in ENTRIES.values() for word in entry.words]
    done = subprocess.run(
        [sys.executable, "run_training.py", *RUN, *words, "training.max_steps=3", "hydra.run.dir=run"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return root / "run"


def test_a_new_source_is_read(run):
    assert "numbers: 1" in (run / "train.log").read_text()  # 1.. documents to train on


def test_a_new_kernel_is_reported(run):
    assert "another attention" in (run / "train.log").read_text()


def test_a_new_remat_policy_is_reported(run):
    assert "remat norms" in (run / "train.log").read_text()


def test_a_new_optimizer_and_a_new_schedule_move_the_weights(run):
    assert "signs at 0.5, halving" in (run / "train.log").read_text()
    assert [line["learning_rate"] for line in metrics(run)] == [0.5, 0.25, 0.125]


def test_a_new_loss_reports_its_sums(run):
    assert [line["twice"] for line in metrics(run)] == [pytest.approx(2 * line["loss"]) for line in metrics(run)]


def test_a_new_mesh_axis_splits_the_batch(run):
    """tests/sharding/test_tables.py compares the losses on such a mesh with those on one device."""
    log = (run / "train.log").read_text()
    assert '[[4,2],["extra","fsdp"]] over 8' in log
    assert "8 sequences = 1 microbatch(es) x 8 data shard(s) x 1" in log


def test_a_new_sink_gets_every_line(run):
    assert (run / "lines.jsonl").read_text() == (run / "metrics.jsonl").read_text() != ""


def test_a_new_copy_of_the_parameters_is_in_checkpoints(run):
    assert parts_in(run / "checkpoints" / "3")["copies"] == ["first"]


def test_what_no_table_has_is_refused():
    with pytest.raises(UserError, match="scheduler.name=halving: expected one of warmup_cosine, "):
        compose(["scheduler.name=halving"])
    with pytest.raises(UserError, match="extra"):
        compose(["model.mesh_shape=[[4,2],[extra,fsdp]]"])
    with pytest.raises(UserError, match="data.source=numbers: expected one of python_stdlib, "):
        compose(["data.source=numbers"])
    with pytest.raises(UserError, match="optimizer.name=signs: expected one of adamw, "):
        compose(["optimizer.name=signs"])
