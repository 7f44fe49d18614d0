"""Exchanges of experts: rows go where their experts are and come back; what finds no room is dropped and counted."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.test_fused_experts import KERNELS
from support.gpu_compiler import compile_for_gpu
from support.harness import experts

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.models import expert_parallel
from tunix.models.expert_parallel import Trips, count_rows, limit_to_capacity, plan_rows, select_expert_exchange
from tunix.models.experts import Experts
from tunix.models.layers import Initializer
from tunix.sharding.table import axis_names
from tunix.training.choices import build_layout, build_mesh
from tunix.training.train_spec import assemble


def exchange(sent: list[np.ndarray], trips: list[Trips], length: int) -> list[np.ndarray]:
    """Do for all devices what `jax.lax.ragged_all_to_all` does, in numpy; a place that nobody writes is -1."""
    got = [np.full(length, -1) for _ in sent]
    for source, (rows, trip) in enumerate(zip(sent, trips, strict=True)):
        for target, other in enumerate(trips):
            size, begin, index = trip.sizes[target], trip.starts[target], trip.offsets[target]
            assert size == other.arriving[source]
            got[target][index : index + size] = rows[begin : begin + size]
    return got


@pytest.mark.parametrize("capacity", [None, 12, 5])
@pytest.mark.parametrize(("num_devices", "num_local"), [(4, 3), (2, 1)])
def test_rows_go_where_their_experts_are_and_come_back(num_devices, num_local, capacity):
    """Of each device its choices sorted by expert, as numbers that no two choices share."""
    rng = np.random.default_rng(num_devices)
    choices = [np.sort(rng.integers(0, num_devices * num_local, 10)) for _ in range(num_devices)]
    choices[-1][:] = 0  # all to one expert
    counts = np.array([np.bincount(each, minlength=num_devices * num_local) for each in choices], np.int32)
    size = count_rows(10, 1, num_devices, num_local, None) if capacity is None else capacity
    plan = jax.jit(plan_rows, static_argnums=2)
    plans = [jax.tree.map(np.asarray, plan(counts, device, size)) for device in range(num_devices)]
    kept = [np.repeat(np.arange(len(plan.sent)), plan.sent) for plan in plans]
    ids = [100 * device + np.arange(len(each)) for device, each in enumerate(kept)]
    padded = [np.pad(each, (0, 10 - len(each)), constant_values=-2) for each in ids]
    came = exchange(padded, [plan.there for plan in plans], size)
    expert_of = {
        int(n): int(e) for numbers, each in zip(ids, kept, strict=True) for n, e in zip(numbers, each, strict=True)
    }
    for device, (rows, plan) in enumerate(zip(came, plans, strict=True)):
        is_row = rows >= 0
        np.testing.assert_array_equal(is_row, plan.group < num_local)
        requested = [expert_of[int(row)] for row in rows[is_row]]
        np.testing.assert_array_equal(plan.group[is_row] + device * num_local, requested)
    back = exchange(came, [plan.back for plan in plans], 10)
    for own, rows in zip(ids, back, strict=True):
        np.testing.assert_array_equal(rows[: len(own)], own)
    if capacity is None:
        np.testing.assert_array_equal([plan.sent for plan in plans], counts)


def test_each_device_and_expert_gives_up_the_same_share():
    both = np.array([[40, 60, 10, 0], [0, 100, 0, 5]], np.int32)  # 200 rows for device 0, and 15 for device 1
    limit = jax.jit(limit_to_capacity, static_argnums=1)
    np.testing.assert_array_equal(limit(both, 150), [[29, 44, 10, 0], [0, 74, 0, 5]])
    np.testing.assert_array_equal(limit(both, 200), both)


def emulated(operand, output, starts, sizes, offsets, arriving, *, axis_name):
    """Do what `jax.lax.ragged_all_to_all` does by gathering all rows: jax 0.10.2 does not compile it for CPUs."""
    device = jax.lax.axis_index(axis_name)
    rows, starts, sizes, offsets = (jax.lax.all_gather(x, axis_name) for x in (operand, starts, sizes, offsets))
    for source in range(len(rows)):
        offset = jnp.arange(len(output)) - offsets[source, device]
        found = rows[source].at[starts[source, device] + offset].get(mode="clip")
        is_from = (offset >= 0) & (offset < sizes[source, device])
        output = jnp.where(is_from.reshape(-1, *[1] * (output.ndim - 1)), found, output)
    return output


@pytest.fixture
def rows_on_cpus(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    monkeypatch.setattr(expert_parallel, "WITHOUT_ROWS", ())


def results_of_a_layer(*words: str, mesh_shape: str = "[[2,2,2],[fsdp,ep,tp]]", **changed) -> SimpleNamespace:
    """Outputs of a layer [B, T, D], gradients, choices [B, T, k], their weights and the number that was dropped."""
    cfg = compose(
        [f"model.mesh_shape={mesh_shape}", "model.embed_dim=16", "training.mixed_precision=fp32", "training.seq_len=6",
         experts(**changed), *words]
    ).config  # fmt: skip
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        layout = build_layout(cfg, mesh)
        layer, state = nnx.split(nnx.jit(lambda: Experts(cfg.model, layout, Initializer(jax.random.key(0))))())
        x, g = (np.random.default_rng(seed).normal(size=(8, 6, 16)).astype(np.float32) for seed in (0, 1))

        def loss(state, x):
            made = nnx.merge(layer, state)
            routes, _ = made.router(x)
            y, sums = made(x, None)
            return jnp.sum(y * jax.reshard(g, jax.typeof(y).sharding.spec)), (y, routes, sums.routing)

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, (y, routes, routing)), gradients = run(state, jax.reshard(x, layout.activation("BtD")))
        params = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    return SimpleNamespace(
        x=x, y=np.asarray(y), choices=np.asarray(routes.experts), shares=np.asarray(routes.weights),
        dropped=routing.dropped, params=params, gradients=jax.tree.map(np.asarray, gradients), mesh=mesh,
    )  # fmt: skip


@pytest.mark.nightly(but=["results, fsdp ep tp"])
@pytest.mark.parametrize(
    ("changed", "mesh_shape"),
    [
        ({}, "[[2,2,2],[fsdp,ep,tp]]"),
        ({"weighted": "inputs", "biases": True, "normalized": False}, "[[2,4],[fsdp,ep]]"),
    ],
    ids=["results, fsdp ep tp", "inputs, biases"],
)
def test_rows_give_the_numbers_of_gathered_tokens(changed, mesh_shape, rows_on_cpus):
    """Outputs and gradients of weights and tokens; with too little room, the results of what is dropped are missing."""
    gathered, rows = (
        results_of_a_layer(f"model.expert_exchange={name}", mesh_shape=mesh_shape, **changed)
        for name in ("gather", "rows")
    )
    assert gathered.dropped is None
    np.testing.assert_allclose(rows.y, gathered.y, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(*map(jax.tree.leaves, (rows.gradients, gathered.gradients)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    if not changed:
        assert_dropped(results_of_a_layer("model.expert_buffer_factor=0.75"))


def assert_dropped(found: SimpleNamespace) -> None:
    """Compute a layer in numpy with the choices for which `limit_to_capacity` has room."""
    num_devices, per_token = found.mesh.shape["ep"], found.choices.shape[-1]
    parts = found.choices.reshape(-1, num_devices, 12 * per_token)  # [groups, devices, choices]: 2 sequences a device
    is_kept = np.zeros(parts.shape, bool)
    limit = jax.jit(limit_to_capacity, static_argnums=1)
    for group, offsets in zip(parts, is_kept, strict=True):
        counts = np.array([np.bincount(each, minlength=8) for each in group], np.int32)
        kept = np.asarray(limit(counts, count_rows(12, per_token, num_devices, 8 // num_devices, 0.75)))
        for device, chosen in enumerate(group):
            for expert in range(8):
                offsets[device, np.flatnonzero(chosen == expert)[: kept[device, expert]]] = True
    assert 0 < float(found.dropped) == np.sum(~is_kept)
    shares = np.where(is_kept.reshape(found.choices.shape), found.shares, 0)
    gate, up, down = (found.params[f"expert_{name}"]["w"] for name in ("gate", "up", "down"))
    h = np.einsum("BTD,XDF->BTXF", found.x, gate)
    each = np.einsum("BTXF,XFD->BTXD", h / (1 + np.exp(-h)) * np.einsum("BTD,XDF->BTXF", found.x, up), down)
    chosen = np.take_along_axis(each, found.choices[..., None], 2)
    np.testing.assert_allclose(found.y, np.einsum("BTkD,BTk->BTD", chosen, shares), rtol=1e-4, atol=1e-5)


def chosen(*words: str, ep: int = 4, platform: str | None = "gpu") -> tuple[str, str]:
    model = compose(["model=tiny_moe", *words]).config.model
    return tuple(select_expert_exchange(model, dict.fromkeys(axis_names(), 1) | {"ep": ep}, platform))


def test_auto_takes_what_sends_fewer_bytes():
    """Two experts for a token: with two devices gathered tokens are as few."""
    assert chosen() == ("rows", "sends fewer bytes: 2 experts of a token, ep=4")
    assert chosen(ep=2) == ("gather", "2 experts of a token, ep=2")
    assert chosen(ep=1)[0] == chosen(platform="cpu")[0] == chosen("model.expert_exchange=gather")[0] == "gather"
    assert chosen("model.expert_buffer_factor=1.5", ep=2)[0] == "rows"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=tiny_moe", "model.expert_exchange=rows"], "model.expert_exchange=rows: an exchange of rows .* does not compile for cpu"),
        (["model=tiny_moe", "model.expert_buffer_factor=1.25"], "model.expert_buffer_factor=1.25: .* set model.expert_buffer_factor=null and"),
        (["model=tiny_moe", "model.expert_exchange=gather", "model.expert_buffer_factor=2"], "bounds a buffer that model.expert_exchange=gather lacks"),
        (["model.expert_exchange=rows"], "model.expert_exchange=rows: model.mlp.kind=gated has no experts; set it to auto"),
        (["model.expert_buffer_factor=2"], "model.expert_buffer_factor=2.0: .* set it to null"),
    ],
)  # fmt: skip
def test_mistakes(words, message):
    def made() -> None:
        cfg = compose([*words, "model.mesh_shape=[[2,4],[fsdp,ep]]"]).config
        mesh = build_mesh(cfg)
        with jax.set_mesh(mesh):
            assemble(cfg, mesh)

    with pytest.raises(UserError, match=message):
        made()


@pytest.mark.nightly
@pytest.mark.parametrize("words", [[], ["model.expert_buffer_factor=1.25", "training.sequence_parallel=false"]])
def test_gpu_program_sends_rows(words, installs_dir):
    """Compiled for eight H100s: forward, again, and backward; no token is gathered, and bytes are those of theory."""
    found = json.loads(compile_for_gpu("compile_rows.py", *words, installs_dir=installs_dir)[-1])
    layers, num_choices, row = 2, 512 * 2, 256 * 2
    # A row goes there and back forward and again (a norm behind the experts needs the results), and so do gradients;
    # the share of a row goes there twice, and its gradient back.
    sent = layers * num_choices * (6 * row + 3 * 4)
    assert found["compiled"]["ragged-all-to-all"] == found["derived"]["ragged-all-to-all"] == [layers * 9, sent]
    assert found["compiled"]["all-gather"][1] == found["derived"]["all-gather"][1] == layers * 2 * 4 * 8 * 4  # counts
    assert found["compiled"].keys() == {"ragged-all-to-all", "all-gather"}
    assert found["is_timed"]
    assert found["kernels"].keys() == {f"experts_{name}" for name in KERNELS}
