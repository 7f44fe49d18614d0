"""The plain kernel computes no scores of keys before the window or behind a block of queries."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr

from tunix.models.attention import (
    SPANS,
    WINDOW_BLOCK,
    _sliding_window,
    _triangle,
    _weigh_values,
    plain,
    select_query_block,
)
from tunix.models.attention_mask import row_mask_rule

HEADS, DIM = 2, 8
TRIANGLE, NEAR = (partial(way, weigh=_weigh_values) for way in (_triangle, partial(_sliding_window, span=SPANS[0])))


def row(length: int, segments: jax.Array | None = None) -> tuple:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, length, heads, DIM)), jnp.float32) for heads in (HEADS, 1, 1))
    return q, k, v, jnp.zeros((1, length), jnp.int32) if segments is None else segments


def attended(kernel, q, k, v, segments, window):
    return kernel(q, k, v, row_mask_rule(segments, window))


def count_pairs(jaxpr: Jaxpr) -> int:
    """Return the pairs of a query and a key whose scores or weights a program computes, both products together."""
    pairs = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sizes = [equation.invars[0].aval.shape[dim] for dim in contracted]
            pairs += math.prod(equation.outvars[0].aval.shape) * math.prod(sizes) // (HEADS * DIM)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                pairs += equation.params.get("length", 1) * count_pairs(inner)
    return pairs


@pytest.mark.parametrize("length", [1024, 4096])
def test_pairs_that_are_computed(length):
    """Keys up to the end of each block of queries; in `_sliding_window`, only those of the blocks that a window may reach.

    The forward pass has two products of a pair. The backward pass has five: the scores again, and four gradients.
    """
    block = select_query_block(length)
    ends = range(block, length + 1, block)
    pairs = {TRIANGLE: block * sum(ends), NEAR: length * (SPANS[0] + WINDOW_BLOCK)}
    q, k, v, segments = row(length)
    for way, num_pairs in pairs.items():

        def forward(q, k, v, way=way):
            return attended(way, q, k, v, segments, jnp.int32(9))

        def both_passes(q, k, v, forward=forward):
            out, pull_back = jax.vjp(forward, q, k, v)
            return pull_back(out)

        assert count_pairs(jax.make_jaxpr(forward)(q, k, v).jaxpr) == 2 * num_pairs
        assert count_pairs(jax.make_jaxpr(both_passes)(q, k, v).jaxpr) == (2 + 5) * num_pairs


def test_each_way_sees_the_keys_of_the_window():
    """Of one document, whose tokens could see what fills up the blocks before its first."""
    arguments = row(2 * SPANS[0] + 6)

    @jax.jit
    def both(window):
        return [attended(kernel, *arguments, window) for kernel in (plain, TRIANGLE)]

    with jax.set_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])):
        for window in (9, SPANS[0], SPANS[0] + WINDOW_BLOCK):
            one, other = both(jnp.int32(window))
            np.testing.assert_allclose(one, other, atol=3e-6, err_msg=str(window))


@pytest.mark.nightly
def test_the_size_of_the_window_chooses_the_way_and_gradients_stay():
    """One program for all windows; documents begin anywhere, and the length is no multiple of a block."""
    length = 2 * SPANS[0] + 6
    segments = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (1, length))), jnp.int32)
    arguments = row(length, segments)

    @jax.jit
    def both(window):
        results = []
        for kernel in (plain, TRIANGLE):
            out, pull_back = jax.vjp(
                lambda *qkv, kernel=kernel: attended(kernel, *qkv, segments, window), *arguments[:3]
            )
            results.append([out, *pull_back(jnp.cos(out))])
        return results

    with jax.set_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])):
        assert str(jax.make_jaxpr(partial(attended, plain))(*arguments, jnp.int32(9))).count("cond[") == 1
        for window in (9, SPANS[0], SPANS[0] + 1, length):
            for one, other in zip(*both(jnp.int32(window)), strict=True):
                np.testing.assert_allclose(one, other, atol=3e-6 * float(jnp.abs(other).max()), err_msg=str(window))
