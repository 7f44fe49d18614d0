"""Rows of docs/adding.md: the places exist, and a new entry in one of them works without another edit.

A copy of the package gets a new entry for each row. One run uses most of them; programs and costs that are traced, and
not compiled, use the others.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import ROOT, RUN, SMALL, experts, metrics
from support.new_entries import OF_PROGRAMS, OF_THE_RUN

from tunix.base.errors import UserError
from tunix.checkpoints.store import find_parts, find_storage
from tunix.config.compose import compose

ENTRIES = OF_THE_RUN | OF_PROGRAMS
PAGE = (ROOT / "docs" / "adding.md").read_text()
ROWS = dict(re.findall(r"^\| (an? [^|]+?) \| (.*) \|$", PAGE, re.MULTILINE))


def test_each_row_is_tried():
    """Other tests compose each experiment, and read folders of text."""
    assert ROWS.keys() - ENTRIES.keys() == {"an experiment", "a corpus of text"}
    assert ENTRIES.keys() <= ROWS.keys()


@pytest.mark.parametrize("thing", ROWS)
def test_tables_of_the_page_are_where_it_says(thing):
    tables = re.findall(r"`([A-Z_]{4,})` of `(tunix/[\w/]+)\.py`", ROWS[thing])
    for table, file in tables:
        assert hasattr(importlib.import_module(file.replace("/", ".").removesuffix(".__init__")), table), (table, file)


@pytest.mark.parametrize("thing", ENTRIES)
def test_the_page_names_the_files(thing):
    entry, row = ENTRIES[thing], re.sub(r"NAME", "mine", ROWS[thing])
    for file in [*(edit.file for edit in entry.edits), *(file for file, _ in entry.files)]:
        assert f"`{file.replace('mine_tiny', 'mine')}`" in row


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Folder of a copy of the package that has every new entry."""
    root = tmp_path_factory.mktemp("adding")
    for name in ("tunix", "conf"):
        shutil.copytree(ROOT / name, root / name)  # and what Python has compiled
    shutil.copy(ROOT / "run_training.py", root)
    for entry in ENTRIES.values():
        for file, text in entry.files:
            assert not (root / file).exists()
            (root / file).write_text(text)
        for edit in entry.edits:
            text = (root / edit.file).read_text()
            assert text.count(edit.before) == 1, edit.before
            text = text.replace(edit.before, edit.after)
            text = text.replace("from typing import TYPE_CHECKING, ", "from typing import TYPE_CHECKING, Literal, ")
            (root / edit.file).write_text(text)
    return root


def python(root: Path, *words: str) -> str:
    """What Python prints in a process of its own, which imports the copy."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(root) -> Path:
    """Folder of the run."""
    words = [word for entry in OF_THE_RUN.values() for word in entry.words]
    python(root, "run_training.py", *RUN, *words, "hydra.run.dir=run")
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


def test_new_mesh_axes_split_the_batch_and_a_dimension(run):
    """tests/sharding/test_tables.py compares the losses on such a mesh with those on one device."""
    log = (run / "train.log").read_text()
    assert '[[2,2,2],["extra","wide","cp"]] over 8' in log
    assert "8 sequences = 1 microbatch(es) x 2 data shard(s) x 4" in log
    assert read_parameters(run)["blocks.mlp.up.w"][2] == 24 // 2, "wide splits the new dimension"


def test_a_new_sink_gets_every_line(run):
    assert (run / "lines.jsonl").read_text() == (run / "metrics.jsonl").read_text() != ""


def test_a_new_exchange_of_attention_is_counted(run):
    log = (run / "train.log").read_text()
    assert "another attention by another" in log
    assert "all-to-all" in log


def test_a_new_field_comes_with_the_batches_of_a_new_task(run):
    assert all(0 < line["evens"] < 256 for line in metrics(run))
    assert "name: counting" in (run / "config.yaml").read_text()


def test_a_new_reason_ends_the_run(run):
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    assert "three steps are enough" in (run / "train.log").read_text()


def test_a_new_store_keeps_the_checkpoints_and_a_new_copy(run):
    assert (run / "marked").exists()
    assert find_parts(*find_storage(run / "checkpoints" / "3"))["copies"] == ["first"]


def test_a_model_of_a_new_family_has_new_parts(run):
    """Its last layer has another kind of block, with a mixer of its own."""
    assert "mine, " in (run / "train.log").read_text()
    assert "last_blocks.attention.shift.b" in read_parameters(run)
    assert "blocks.attention.shift.b" not in read_parameters(run)


def read_parameters(run: Path) -> dict[str, list[int]]:
    """Return the shape that a device writes of each parameter in the run's checkpoint, by name."""
    tree = json.loads((run / "checkpoints" / "3" / "state" / "_METADATA").read_text())["tree_metadata"]
    named = {".".join(key["key"] for key in leaf["key_metadata"]): leaf["value_metadata"] for leaf in tree.values()}
    return {
        name.removeprefix("params."): value["write_shape"] for name, value in named.items() if name[:7] == "params."
    }


@pytest.fixture(scope="module")
def traced(root) -> dict:
    """Numbers of support/use_new_entries.py."""
    words = [word for entry in OF_PROGRAMS.values() for word in entry.words]
    small = [*SMALL, experts(), "model.num_layers=2", "model.global_every=1"]
    return json.loads(python(root, str(ROOT / "tests" / "support" / "use_new_entries.py"), *small, *words))


@pytest.mark.nightly
def test_a_new_dtype_of_products_multiplies(traced):
    assert traced["products"] > 0
    assert 0 < traced["matmul_share"] < 1


def test_a_new_product_serves_few_rows(traced):
    assert traced["few_rows"] == "halves"


def test_a_new_exchange_of_experts_is_counted(traced):
    (num_bytes,) = traced["gathered for experts"]
    assert num_bytes > 0


def test_a_new_axis_keeps_weights(traced):
    assert "keeper" in traced["rests over"]


def test_a_plan_compares_a_new_exchange_on_a_new_device_and_network(traced):
    assert "Mine" in traced["exchange"]
    assert "by another" in traced["exchange"]
    assert traced["network"] == 99


def test_a_new_reward_scores(traced):
    assert traced["scores"] == [1, 0]


def test_a_new_objective_of_pairs_is_compared_with_the_model_of_step_0(traced):
    assert traced["compared"]


def test_a_new_environment_understands_a_new_format(traced):
    assert traced["said"] == ["Hi"]
    assert traced["before"] == "I say it. "


def test_what_no_table_has_is_refused():
    with pytest.raises(UserError, match="scheduler.name=halving: expected one of warmup_cosine, "):
        compose(["scheduler.name=halving"])
    with pytest.raises(UserError, match="extra"):
        compose(["model.mesh_shape=[[4,2],[extra,fsdp]]"])
    with pytest.raises(UserError, match="data.source=numbers: expected one of python_stdlib, "):
        compose(["data.source=numbers"])
    with pytest.raises(UserError, match="optimizer.name=signs: expected one of adamw, "):
        compose(["optimizer.name=signs"])
