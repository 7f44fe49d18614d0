"""What the compiled step moves between devices is what its strategy promises."""

import re
from collections import Counter
from functools import cache

import jax
import pytest
from support.harness import SMALL, Program, batch, program

from tunix.config.compose import compose
from tunix.costs.hlo import read_collectives
from tunix.training.choices import build_mesh, select

MICROBATCHES = 4


@cache
def moved(strategy: str, sync: int, optimizer: str = "adamw") -> dict[str, float]:
    """Bytes that one step gathers and reduces, as multiples of the float32 parameters (norm scales apart)."""
    step = program(
        "model.mesh_shape=[[8],[fsdp]]", f"training.gradient_accumulation_steps={MICROBATCHES}",
        f"training.sharding_strategy={strategy}", f"training.sync_gradients_every={sync}", f"optimizer={optimizer}",
    )  # fmt: skip
    matrices = list_matrix_bytes(step)
    params = step.built.abstract["params"]
    table = params["embedding"]["table"].size * 4
    compiled = step.compile(batch(32, MICROBATCHES))
    found = [c for c in read_collectives(compiled.as_text()) if c.group_size > 1]

    def total(*kinds: str) -> float:
        return sum(c.num_bytes * c.times for c in found if c.kind in kinds) / sum(matrices)

    return {
        "gathered": total("all-gather"),
        "reduced": total("all-reduce", "reduce-scatter"),
        "other": total("all-to-all", "collective-permute"),
        "table": table / sum(matrices),
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "arguments": compiled.memory_analysis().argument_size_in_bytes,
    }


def list_matrix_bytes(step: Program) -> list[int]:
    leaves = jax.tree.leaves_with_path(step.built.abstract["params"])
    return [4 * leaf.size for path, leaf in leaves if path[-1].key != "scale"]


NORMS = 0.02  # norm scales and scalars come on top


@pytest.mark.nightly(but=["full_shard-1-None-4", "shard_grad_op-1-1-4"])
@pytest.mark.parametrize(
    ("strategy", "sync", "gathered", "reduced"),
    [
        # Blocks forward and backward in each microbatch; XLA lifts the table, the same for all of them, out of the loop.
        ("full_shard", 1, None, MICROBATCHES),
        ("full_shard", 2, 1, MICROBATCHES / 2),
        ("full_shard", 4, 1, 1),
        ("shard_grad_op", 1, 1, MICROBATCHES),
        ("shard_grad_op", 4, 1, 1),
        ("shard_optimizer", 1, 1, MICROBATCHES),
        ("shard_optimizer", 4, 1, 1),
        ("no_shard", 1, 0, MICROBATCHES),
        ("no_shard", 4, 0, 1),
    ],
)
def test_bytes_of_collectives(strategy, sync, gathered, reduced):
    found = moved(strategy, sync)
    if gathered is None:
        gathered = 2 * MICROBATCHES * (1 - found["table"]) + found["table"]
    assert found["gathered"] == pytest.approx(gathered, rel=NORMS)
    assert found["reduced"] == pytest.approx(reduced, rel=NORMS)
    assert found["other"] == 0


@pytest.mark.nightly
def test_fewer_reductions_cost_memory():
    each, once = moved("full_shard", 1), moved("full_shard", 4)
    assert once["temporary"] > 1.3 * each["temporary"]
    assert once["arguments"] == each["arguments"]


@pytest.mark.parametrize(
    ("mesh", "strategy", "sync"),
    [
        ("[[8],[dp]]", "full_shard", MICROBATCHES),
        ("[[4,2],[dp,tp]]", "full_shard", MICROBATCHES),
        ("[[8],[fsdp]]", "no_shard", MICROBATCHES),
        ("[[8],[fsdp]]", "shard_optimizer", MICROBATCHES),
        ("[[2,4],[dp,fsdp]]", "full_shard", 1),
        ("[[8],[fsdp]]", "shard_grad_op", 1),
        ("[[4],[tp]]", "no_shard", 1),  # nothing is reduced over data shards
    ],
)
def test_gradients_are_reduced_once_a_step_where_no_axis_splits_them(mesh, strategy, sync):
    words = [
        f"model.mesh_shape={mesh}",
        f"training.sharding_strategy={strategy}",
        "distributed.allow_idle_devices=true",
    ]
    cfg = compose([*SMALL, *words, f"training.gradient_accumulation_steps={MICROBATCHES}"]).config
    assert select(cfg, build_mesh(cfg)).sync_every == sync
    assert select(cfg.with_training(sync_gradients_every=2), build_mesh(cfg)).sync_every == 2


@pytest.mark.nightly
def test_muon_sends_each_momentum_out_and_back_once():
    """Beside what a step moves with AdamW: twice the matrices, of three layers that are filled up to eight."""
    muon, adamw = moved("full_shard", 1, "muon"), moved("full_shard", 1)
    assert muon["gathered"] == pytest.approx(adamw["gathered"], rel=NORMS)
    assert muon["reduced"] == pytest.approx(adamw["reduced"], rel=NORMS)
    assert muon["other"] <= 2 * 8 / 3


@pytest.mark.nightly
def test_strategies_order_by_bytes_per_device():
    strategies = {"full_shard": 1, "shard_optimizer": MICROBATCHES, "no_shard": MICROBATCHES}
    sizes = [moved(strategy, sync)["arguments"] for strategy, sync in strategies.items()]
    assert sizes[0] == sizes[1] < sizes[2]  # between two steps ZeRO 1 has shards alone; in a step it has all weights
    assert moved("shard_grad_op", 1)["temporary"] > moved("full_shard", 1)["temporary"]


def test_replicas_reduce_only_their_shards():
    """HSDP: gradients are summed inside a replica first, so that replicas exchange one shard."""
    step = program("model.mesh_shape=[[2,4],[dp,fsdp]]", "training.gradient_accumulation_steps=1")
    found = [c for c in read_collectives(step.compile(batch(8)).as_text()) if c.kind == "all-reduce"]
    matrices = sum(list_matrix_bytes(step))
    inside = sum(c.num_bytes * c.times for c in found if c.group_size == 4)
    between = sum(c.num_bytes * c.times for c in found if c.group_size == 2)
    assert inside == pytest.approx(matrices, rel=NORMS)
    assert between == pytest.approx(matrices / 4, rel=NORMS)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["[[8],[fsdp]]", "[[2,2,2],[dp,fsdp,tp]]", "[[8],[tp]]"])
def test_compiling_is_quiet(mesh, capfd, monkeypatch):
    """XLA says when it cannot lay an array out and copies it whole; it has no reason to."""
    monkeypatch.setattr(
        "jax._src.compilation_cache.is_cache_used", lambda *_: False
    )  # what is compiled already says nothing
    wide = ["model.num_heads=8", "model.head_dim=4"]
    step = program(f"model.mesh_shape={mesh}", *wide)
    with jax.set_mesh(step.mesh):
        step.built.compile_new_state(0)
    step.compile(batch(16))
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err


def test_the_program_is_as_long_at_any_depth():
    """Layers with windows and layers without are one scan, so the time to compile does not grow with their number."""

    def instructions(num_layers: int) -> list[str]:
        text = program("model.mesh_shape=[[8],[fsdp]]", f"model.num_layers={num_layers}").lower(batch()).as_text()
        return re.findall(r" = (?:\"|stablehlo\.)?([\w.]+)", text)

    few, many = Counter(instructions(4)), Counter(instructions(12))
    assert few == many
    assert few["while"] >= 2  # forward and backward
