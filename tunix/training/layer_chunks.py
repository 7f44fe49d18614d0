"""Chunks of layers: each stage of a pipeline has v of them, and works on one in each tick (turns.py).

Where 8 layers lie, with S = 2 stages and v = 2:

                                   stage 0              stage 1
    at rest, [L, ...]              0 1 2 3              4 5 6 7
       | deal_out: layers travel
    dealt out, [L, ...]            0 1   4 5            2 3   6 7
       | split: nothing travels
    chunks, [S, v, L / (S v), ...] [0 1] [4 5]          [2 3] [6 7]
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.models.dealing import deal_out, take_back
from tunix.models.pipeline import Lanes
from tunix.training.state import add_gradients


class Chunks:
    """Chunks of the layers of each stage, [S, v, L / (S v), ...]; one chunk is [S, L / S, ...]."""

    def __init__(self, lanes: Lanes, num_chunks: int):
        self.lanes, self.num_chunks = lanes, num_chunks
        self._of_stages = PartitionSpec(lanes.stage_axes)

    def deal_out(self, x: jax.Array) -> jax.Array:
        """Return arrays [L, ...] at rest as [L, ...] in the order of the stages' chunks."""
        return x if self.num_chunks == 1 else deal_out(x, self.lanes.stage_axes, self.lanes.num_stages, self.num_chunks)

    def take_back(self, x: jax.Array) -> jax.Array:
        """Return arrays [L, ...] in the order of the chunks as they rest: the inverse of `deal_out`."""
        return (
            x if self.num_chunks == 1 else take_back(x, self.lanes.stage_axes, self.lanes.num_stages, self.num_chunks)
        )

    def split(self, x: jax.Array) -> jax.Array:
        """Return arrays [L, ...] that are dealt out as chunks."""
        return self.split_stage(self.lanes.split_layers(x))

    def split_values(self, x: jax.Array) -> jax.Array:
        """Return arrays [L, ...] in the order of the layers, which every device has, as chunks."""
        # In the order of the layers they are [v, S, layers of a chunk]. Every device has all of them: nothing travels.
        by_chunk = x.reshape(self.num_chunks, self.lanes.num_stages, -1, *x.shape[1:])
        return self.split(by_chunk.swapaxes(0, 1).reshape(x.shape))

    def in_order(self, tree: Any) -> Any:
        """Return arrays [L, ...], which every device has, in the order of the layers again."""

        def one(x: jax.Array) -> jax.Array:
            by_stage = x.reshape(self.lanes.num_stages, self.num_chunks, -1, *x.shape[1:])
            return by_stage.swapaxes(0, 1).reshape(x.shape)

        return jax.tree.map(one, tree)

    def split_stage(self, x: jax.Array) -> jax.Array:
        """Return arrays [S, L / S, ...] as chunks."""
        if self.num_chunks == 1:
            return x
        spec = jax.typeof(x).sharding.spec
        front, others = spec.partitions[0], spec.partitions[2:]
        spec = PartitionSpec(front, None, None, *others, reduced=spec.reduced, unreduced=spec.unreduced)
        return x.reshape(x.shape[0], self.num_chunks, -1, *x.shape[2:], out_sharding=spec)

    def join_stage(self, x: jax.Array) -> jax.Array:
        """Return chunks as arrays [S, L / S, ...]."""
        if self.num_chunks == 1:
            return x
        return x.reshape(x.shape[0], -1, *x.shape[3:], out_sharding=_without_chunks(jax.typeof(x).sharding.spec))

    def take(self, tree: Any, chunk: jax.Array) -> Any:
        """Return the layers of one chunk of each stage, [S, L / (S v), ...]; `chunk` is [S]."""
        if self.num_chunks == 1:
            return tree

        # Stages work on different chunks in a tick: an index that differs between devices needs a shard_map.
        def on_each_stage(x: jax.Array, chunk: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, chunk[0], axis=1, keepdims=False)

        def one(x: jax.Array) -> jax.Array:
            spec = jax.typeof(x).sharding.spec
            taken = jax.shard_map(on_each_stage, in_specs=(spec, self._of_stages), out_specs=_without_chunks(spec))
            return taken(x, chunk)

        return jax.tree.map(one, tree)

    def add(self, total: Any, more: Any, chunk: jax.Array) -> Any:
        """Return totals of all chunks with what is added to one chunk of each stage.

        jax 0.10.2 has no `dynamic_slice` of arrays that are still to be summed over devices, so the chunk comes out of
        a choice among all.
        """
        if self.num_chunks == 1:
            return add_gradients(total, more)

        def on_each_stage(total: jax.Array, more: jax.Array, chunk: jax.Array) -> jax.Array:
            own = total[:, 0]
            for number in range(1, self.num_chunks):
                own = jax.lax.select(chunk[0] == number, total[:, number], own)
            return jax.lax.dynamic_update_slice_in_dim(total, (own + more)[:, None], chunk[0], axis=1)

        def one(total: jax.Array, more: jax.Array) -> jax.Array:
            spec, more = jax.typeof(total).sharding.spec, more.astype(total.dtype)
            specs = spec, _without_chunks(spec), self._of_stages
            return jax.shard_map(on_each_stage, in_specs=specs, out_specs=spec)(total, more, chunk)

        return jax.tree.map(one, total, more)

    def zeros(self, of_chunk: jax.ShapeDtypeStruct) -> jax.Array:
        """Return zeros for all chunks of arrays of this shape, [S, L / (S v), ...]."""
        spec, shape = of_chunk.sharding.spec, of_chunk.shape
        if self.num_chunks == 1:
            return reshard(jnp.zeros(shape, of_chunk.dtype), spec)
        chunks = jnp.zeros((shape[0], self.num_chunks, *shape[1:]), of_chunk.dtype)
        return reshard(chunks, PartitionSpec(spec[0], None, *spec[1:]))


def _without_chunks(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec of [S, layers, ...] for that of [S, v, layers, ...]."""
    front, _, *others = spec.partitions
    return PartitionSpec(front, *others, reduced=spec.reduced, unreduced=spec.unreduced)
