"""Layers before those that stages share: dense layers of a model whose later layers have experts (DeepSeek-V3).

There the axes of the stages split the batch, as around all blocks: S stages run these layers for S parts of the batch
at a time, which is as much work for each stage as if they were shared. They run for all parts before the first tick,
and backward behind the last one, so ticks know nothing of them (S = 2 stages, M = 4 parts, 2 of each stage):

    forward      p0 p2 | p1 p3          two passes, each with a part of each stage
    ticks        an entry of p0 goes in, ..., its gradient takes its place, ...
    backward     p0 p2 | p1 p3          each pass runs forward once more

Between them entries wait with their tokens split over the stages: one array [M, rows, t, D] for entries and gradients.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.data.batches import Batch
from tunix.models.block import Rows
from tunix.models.layers import BlockSums
from tunix.models.transformer import RowMask
from tunix.training.state import add_gradients

if TYPE_CHECKING:
    from tunix.training.pipeline_step import StagedModel, Stream


class FirstLayers:
    """The embedding and the layers before the stages, of the model of a step."""

    def __init__(self, step: "StagedModel", batch: Batch, seeds: jax.Array):
        """`batch` has arrays [A, B, ...], and `seeds` [A] are those of its microbatches."""
        self.step, self.parts, self.lanes = step, step.parts, step.lanes
        self.num_slots = self.parts.per_microbatch // self.lanes.num_stages  # parts of each stage in a microbatch
        groups = jax.tree.map(self._list_groups, (batch, self.parts.on_stages(batch)))
        self.groups = *groups, jnp.repeat(seeds, self.num_slots)

    def forward(self, outer: Any, layers: Any) -> tuple["Stream", BlockSums]:
        """Return the stream of all parts, [M, rows, t, D], and the numbers of these layers; weights are the trained
        ones outside of the blocks, and those of these layers."""
        stream, (_, routing, scores) = jax.lax.map(partial(self._run, (outer, layers)), self.groups)
        merged = jax.tree.map(self._merge_stages, stream)
        routing, scores = jax.tree.map(lambda x: x.sum(0), routing), None if scores is None else scores.max(0)
        return merged, BlockSums({}, routing, scores)

    def backward(self, outer: Any, layers: Any, d_stream: "Stream", d_outer: Any, d_layers: Any) -> tuple[Any, Any]:
        """Return the gradients so far, with those added that come of the gradients of the stream of all parts."""

        def go_back(so_far: Any, inputs: Any) -> tuple[Any, None]:
            group, d_stream = inputs
            vjp = jax.vjp(lambda *trained: self._run(trained, group), outer, layers, has_aux=True)[1]
            return tuple(map(add_gradients, so_far, vjp(d_stream))), None

        return jax.lax.scan(go_back, (d_outer, d_layers), (self.groups, jax.tree.map(self._split_stages, d_stream)))[0]

    def take(self, stream: "Stream", number: jax.Array) -> "Stream":
        """Return the stream of a part, [rows, t, D]; see `Parts` for a number that is that of no part."""
        index = self._find(number)
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stream)

    def put(self, stream: "Stream", part: "Stream", number: jax.Array) -> "Stream":
        """Return the stream of all parts with that of one part replaced, if there is one of this number."""
        index, is_part = self._find(number), (number >= 0) & (number < self.parts.count)
        kept = jax.tree.map(lambda new, old: jnp.where(is_part, new, old), part, self.take(stream, number))
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, 0), stream, kept)

    def _run(self, trained: tuple[Any, Any], group: Any) -> tuple["Stream", BlockSums]:
        """Run the layers for a part of each stage; the stream has these parts side by side, [S, rows, t, D]."""
        fields, entering, seed = group
        model = self.step.around_stages(*trained)
        x = model.embed(model.vocab_weights(), fields["tokens"], fields["positions"])
        segments = reshard(fields["segment_ids"], model.layout.activation("BS"))
        rows = entering._replace(x=x, positions=fields["positions"], mask_inputs=RowMask(segments, None))
        assert isinstance(rows, Rows)
        rows, sums = model.run_before_stages(rows, self.step.forward._replace(seed=seed))
        penalties = rows.penalties | {name: rows.penalties[name] + value for name, value in sums.penalties.items()}
        stream = self._to_parts(model.layout.gather_stream(rows.x), "BtD"), jax.tree.map(self._to_parts, penalties)
        return stream, sums._replace(penalties={})

    def _to_parts(self, x: jax.Array, dim_names: str = "B") -> jax.Array:
        """[S * rows, ...] -> [S, rows, ...], which the stages split by tokens: an all-to-all."""
        return reshard(self.lanes.fold(x, 1)[:, 0], PartitionSpec(None, *self.step.outer.layout.activation(dim_names)))

    def _list_groups(self, x: jax.Array) -> jax.Array:
        """[A, B, ...] -> [A * slots, S * rows, ...]: a part of each stage side by side, and nothing is sent."""
        axes, remaining = (*self.lanes.stage_axes, *self.lanes.row_axes), jax.typeof(x).sharding.spec[2:]
        x = self.lanes.fold(x, self.num_slots, dim=1).swapaxes(1, 2)
        return x.reshape(-1, x.shape[2] * x.shape[3], *x.shape[4:], out_sharding=PartitionSpec(None, axes, *remaining))

    def _merge_stages(self, x: jax.Array) -> jax.Array:
        """[G, S, ...], whose first two dimensions nothing splits -> [G * S, ...]."""
        return x.reshape(-1, *x.shape[2:], out_sharding=PartitionSpec(*jax.typeof(x).sharding.spec[1:]))

    def _split_stages(self, x: jax.Array) -> jax.Array:
        """[G * S, ...] -> [G, S, ...]."""
        shape = -1, self.lanes.num_stages, *x.shape[1:]
        return x.reshape(shape, out_sharding=PartitionSpec(None, *jax.typeof(x).sharding.spec))

    def _find(self, number: jax.Array) -> jax.Array:
        """Return where a part is in the order of the groups; `Parts` has all parts of a stage one after the other."""
        microbatch, remaining = jnp.divmod(jnp.clip(number, 0, self.parts.count - 1), self.parts.per_microbatch)
        stage, slot = jnp.divmod(remaining, self.num_slots)
        return (microbatch * self.num_slots + slot) * self.lanes.num_stages + stage
