"""Parts of a microbatch that take turns within a layer, so that one part computes while rows of the other travel.

Tokens go to experts of other devices and come back, in each layer. With one part nothing can be computed meanwhile; two
parts do not wait for each other:

    arithmetic    attention 0 | attention 1 | experts 0 | attention 0 of the next layer ...
    transfers                 | tokens 0    | tokens 1  | sums 0 ...

A device splits its own sequences, so a part lies on the devices as the whole does, and no number changes its place.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tunix.models.layers import BlockSums
from tunix.sharding.layout import Layout


def count_parts(layout: Layout, x: jax.Array) -> int:
    """Return the parts of rows x [B, t, D]: those of the layout where they divide the sequences of a device, else 1."""
    sizes = jax.sharding.get_abstract_mesh().shape
    local_rows = len(x)
    for axis in layout.batch_axes:
        local_rows //= sizes[axis]
    return 1 if layout.stage_axes or local_rows % layout.batch_parts else layout.batch_parts


def split_rows(rows: Any, num_parts: int) -> list[Any]:
    """Return the parts of a tree of arrays [B, ...]: each device splits its own rows."""

    def split(array: jax.Array) -> tuple[jax.Array, ...]:
        spec = jax.typeof(array).sharding.spec
        split_own = jax.shard_map(
            lambda own: tuple(jnp.split(own, num_parts)), in_specs=spec, out_specs=(spec,) * num_parts
        )
        return split_own(array)

    leaves, tree = jax.tree.flatten(rows)
    return [jax.tree.unflatten(tree, part) for part in zip(*map(split, leaves), strict=True)]


def join_rows(parts: list[Any]) -> Any:
    """Return the tree of arrays [B, ...] that `split_rows` has split."""

    def join(*arrays: jax.Array) -> jax.Array:
        spec = jax.typeof(arrays[0]).sharding.spec
        return jax.shard_map(lambda *own: jnp.concatenate(own), in_specs=(spec,) * len(arrays), out_specs=spec)(*arrays)

    return jax.tree.map(join, *parts)


def run_parts(
    run: Callable[[jax.Array, Any], tuple[jax.Array, BlockSums]], xs: tuple[jax.Array, ...], others: list[Any]
) -> tuple[tuple[jax.Array, ...], BlockSums]:
    """Run a block on each part, x [B, t, D] and the other arrays of its rows; return all x, and the sums of all."""
    results: list[tuple[jax.Array, BlockSums]] = []
    for x, other in zip(xs, others, strict=True):
        if results:
            # A part begins when the router of the part before has chosen, so that attention of this part is computed
            # while tokens of the one before travel. In the backward pass the barrier stands the other way round.
            before, sums = results[-1]
            x, sums = jax.lax.optimization_barrier((x, sums))
            results[-1] = before, sums
        results.append(run(x, other))
    all_x, all_sums = zip(*results, strict=True)
    penalties = join_rows([sums.penalties for sums in all_sums])
    routing = jax.tree.map(lambda *each: sum(each[1:], each[0]), *[sums.routing for sums in all_sums])
    return all_x, BlockSums(penalties, routing)
