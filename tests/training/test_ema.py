"""Copies of the parameters follow the steps, the same on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.harness import ONE_LAYER, SGD, batch, program

from tunix.base.errors import UserError
from tunix.sharding.arrays import bytes_per_device
from tunix.training.train_spec import assemble

FAST = [*SGD, *ONE_LAYER, "optimizer.learning_rate=1", "training.ema_decay=0.5"]
MESH = "model.mesh_shape=[[4,2],[fsdp,tp]]"


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def test_the_moving_average_is_the_one_made_by_hand():
    """A step that is not finite leaves it as it was."""
    trained, bad = program(MESH, *FAST), batch()
    bad["loss_mask"][0, 3, 5] = np.nan
    expected = on_host(trained.state["params"])
    assert jax.tree.all(jax.tree.map(np.array_equal, on_host(trained.state["copies"]["ema"]), expected))
    for rows in (batch(), batch(), bad, batch()):
        before = on_host(trained.state["copies"])
        trained.run(rows, steps=1)
        if rows is bad:
            jax.tree.map(np.testing.assert_array_equal, trained.state["copies"], before)
            continue
        expected = jax.tree.map(lambda a, p: 0.5 * a + 0.5 * np.asarray(p), expected, trained.state["params"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), trained.state["copies"]["ema"], expected
    )


def test_several_averages_in_a_dtype_of_their_own():
    """Each is moved in float32 and rounded once; the decay of 0 is the parameters themselves."""
    words = [word for word in FAST if "ema_decay" not in word]
    trained = program(MESH, *words, "training.ema_decay=[0,0.5]", "training.ema_dtype=bfloat16")
    expected = jax.tree.map(lambda p: p.astype(jnp.bfloat16), on_host(trained.state["params"]))
    for _ in range(2):
        trained.run(batch(), steps=1)
        params = on_host(trained.state["params"])
        expected = jax.tree.map(
            lambda a, p: (a.astype(np.float32) + np.float32(0.5) * (p - a.astype(np.float32))).astype(jnp.bfloat16),
            expected, params,
        )  # fmt: skip
    ema = on_host(trained.state["copies"])
    assert ema.keys() == {"ema_0", "ema_0.5"}
    jax.tree.map(np.testing.assert_array_equal, ema["ema_0.5"], expected)
    jax.tree.map(lambda a, p: np.testing.assert_array_equal(a, p.astype(jnp.bfloat16)), ema["ema_0"], params)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
def test_the_moving_average_is_the_same_on_every_mesh(strategy):
    """Also of a model of which only some parameters are trained: the others are not copied."""
    lora = ["model.lora.rank=2", "model.lora.targets=attention.q|mlp.up", "model.lora.train_also=final_norm"]
    one = program("model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", *FAST, *lora)
    many = program(MESH, *FAST, *lora, f"training.sharding_strategy={strategy}")
    for each in (one, many):
        each.run(batch(), steps=2)
    first, second = (on_host(each.state["copies"]["ema"]) for each in (one, many))
    assert len(jax.tree.leaves(first)) == len(jax.tree.leaves(many.arch.trained_weights))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), first, second)


@pytest.mark.nightly
def test_an_average_in_the_memory_of_the_host_has_the_same_bits(monkeypatch):
    """Sharded alike; a step that is not finite leaves it as it was; a checkpoint without it starts it there."""
    words = [MESH, *FAST, "training.ema_memory=host"]
    trained, expected = program(*words), program(MESH, *FAST)
    bad = batch()
    bad["loss_mask"][0, 3, 5] = np.nan
    for rows in (batch(), bad, batch()):
        for each in (trained, expected):
            each.run(rows, steps=1)
    jax.tree.map(np.testing.assert_array_equal, on_host(trained.state["copies"]), on_host(expected.state["copies"]))
    for here, there in zip(*(jax.tree.leaves(each.state["copies"]) for each in (trained, expected)), strict=True):
        assert (here.sharding.memory_kind, here.sharding.spec) == ("pinned_host", there.sharding.spec)
    with jax.set_mesh(trained.mesh):
        whole = assemble(trained.cfg, trained.mesh)
        started = whole.complete({"params": trained.state["params"]})["copies"]
    assert bytes_per_device(whole.abstract["copies"]) == 0
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(started)} == {"pinned_host"}
    monkeypatch.setattr("tunix.training.train_spec.has_host_memory", lambda mesh: False)
    with pytest.raises(UserError, match=r"training.ema_memory=host needs devices that read .* pinned memory, and cpu"):
        program(*words)


def test_a_copy_is_sharded_like_the_moments():
    state = program("model.mesh_shape=[[8],[fsdp]]", "training.sharding_strategy=shard_optimizer", *FAST).state
    assert bytes_per_device(state["copies"]) == bytes_per_device(state["opt_state"])
