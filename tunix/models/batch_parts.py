"""Parts of a microbatch that take turns within a layer, so that one part computes while rows of the other travel.

Tokens go to experts of other devices and come back, in each layer. With one part nothing can be computed meanwhile; two
parts do not wait for each other:

    arithmetic    attention 0 | attention 1 | experts 0 | attention 0 of the next layer ...
    transfers                 | tokens 0    | tokens 1  | sums 0 ...

A device splits its own sequences, so a part lies on the devices as the whole does, and no number changes its place.
"""

import inspect
from collections.abc import Generator
from functools import reduce
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


# A block in two steps: it gives x [B, t, D] behind attention, takes an array or None, and returns what it returns. Its
# experts do not begin before the array is computed.
Steps = Generator[jax.Array, jax.Array | None, Any]


def finish(steps: Steps, after: jax.Array | None = None) -> Any:
    """Run the steps of a block to their end, from the first one on or from behind attention, and return its result.

    `after` [B, t, D] is what fused kernels of experts wait for (`Experts`)."""
    if inspect.getgeneratorstate(steps) == inspect.GEN_CREATED:
        next(steps)
    try:
        steps.send(after)
    except StopIteration as end:
        return end.value
    raise AssertionError("a block has two steps")


def finish_parts(parts: list[Steps]) -> list[Any]:
    """Return the results of a block on all parts: attention of each part, and then the MLP of each part.

    Experts of a part begin behind attention of the next part, so that tokens travel while that is computed. XLA does
    not know how long our kernels take, and would let the experts wait for the tokens.
    """
    attended = [next(steps) for steps in parts]
    return [finish(steps, after) for steps, after in zip(parts, [*attended[1:], None], strict=True)]


def merge_sums(sums: list[BlockSums]) -> BlockSums:
    """Return the sums of a block over all its parts."""
    penalties = join_rows([each.penalties for each in sums])
    routing = jax.tree.map(lambda *each: sum(each[1:], each[0]), *[each.routing for each in sums])
    head_scores = jax.tree.map(lambda *each: reduce(jnp.maximum, each), *[each.head_scores for each in sums])
    return BlockSums(penalties, routing, head_scores)
