"""The tables of dimensions and mesh axes: names of axes stand there alone, and a new axis is one row there."""

import ast
import re
from dataclasses import replace

import numpy as np
import pytest
from support.harness import ROOT, batch, program

from tunix.base.errors import UserError
from tunix.sharding import table as dims
from tunix.sharding.mesh import check_divides, device_table
from tunix.sharding.table import DIMS, Axis, axis_names

TABLES = ROOT / "tunix/sharding/table.py"


@pytest.mark.parametrize("path", sorted((ROOT / "tunix").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_axis_is_named_outside_the_tables(path):
    constants = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    named = [node.lineno for node in constants if node.value in axis_names()]
    assert path == TABLES or not named, f"{path} names a mesh axis in lines {named}; ask {TABLES.name} instead"


def test_every_key_of_the_table_sets_its_dimension():
    cfg = program().cfg
    parts = ("model.mlp.", "model.latent.", "model.linear_attention.", "model.global_heads.")
    parts += ("model.shared_kv.", "model.layer_inputs.", "model.vision.")
    of_parts = {dim_name for dim_name, dim in DIMS.items() if dim.key.startswith(parts)}
    assert of_parts == set("UXYG") | set("QCW") | set("IEJMZ") | set("kh") | set("fp") | set("yxabdmq")
    assert not of_parts & cfg.dims.keys()  # a dense model, whose attention has no latents, in every layer
    assert all(
        (dim_name in cfg.dims) == bool(dim.key)
        for dim_name, dim in DIMS.items()
        if dim_name not in {*"cenosizwg", *of_parts}
    )
    assert cfg.dims["T"] == cfg.training.seq_len


@pytest.fixture
def new_axis(monkeypatch):
    """A mesh axis that splits the batch: one row, and nothing else."""
    monkeypatch.setattr(dims, "MESH", (*dims.MESH, Axis("xp", splits_batch=True)))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
def test_a_new_axis_that_splits_the_batch_is_one_row(new_axis, strategy):
    more = [f"training.sharding_strategy={strategy}", "training.gradient_accumulation_steps=2"]
    alone = ["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", "training.micro_batch_size=4"]
    rows = batch(8, microbatches=2)
    reference = program(*more, *alone).run(rows)
    step = program(*more, "model.mesh_shape=[[2,2,2],[xp,fsdp,tp]]")
    assert dict(step.mesh.shape) == dict.fromkeys(axis_names(), 1) | {"fsdp": 2, "tp": 2, "xp": 2}
    for ours, theirs in zip(step.run(rows), reference, strict=True):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    heads, *table = device_table(step.mesh)
    assert heads == ["fsdp, xp", "tp=0", "tp=1"]
    assert [row[0] for row in table] == ["0, 0", "0, 1", "1, 0", "1, 1"]
    assert [row[1].split()[0] for row in table] == ["0", "1", "4", "5"]  # xp is the innermost axis


@pytest.mark.parametrize(
    ("shape", "heads"),
    [
        ("[[8],[fsdp]]", ["fsdp", "device"]),
        ("[[2,4],[dp,fsdp]]", ["dp, fsdp", "device"]),
        ("[[4,2],[fsdp,tp]]", ["fsdp", "tp=0", "tp=1"]),
    ],
)
def test_the_table_of_devices_names_no_axis_of_size_1(shape, heads):
    first, *rows = device_table(program(f"model.mesh_shape={shape}").mesh)
    assert first == heads
    assert sorted(int(cell.split()[0]) for row in rows for cell in row[1:]) == list(range(8))


def test_an_axis_that_splits_tokens_is_refused_where_it_does_not_divide_them(monkeypatch):
    monkeypatch.setattr(dims, "MESH", (*dims.MESH, Axis("xp")))
    monkeypatch.setitem(DIMS, "T", replace(DIMS["T"], activation="xp"))
    with pytest.raises(UserError, match="training.seq_len=32 is not divisible by mesh axis xp=3"):
        check_divides({"T": 32}, dict.fromkeys(axis_names(), 1) | {"xp": 3})


def test_a_letter_stands_for_one_dimension():
    letters = re.findall(r'^ +Dim\("(\w)"', TABLES.read_text(), re.MULTILINE)
    assert len(letters) == len(set(letters)) == len(DIMS)
