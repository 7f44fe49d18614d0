"""Blocks on stages: parts of a batch stream through them, one stage a tick (GPipe, Huang et al., arXiv:1811.06965).

Each of S stages has L / S layers, and computes P parts of the batch one after the other. JAX differentiates the loop,
so the backward pass runs the ticks in the other direction.

    tick        0    1    2    3    4    5    6          P = 4 parts, S = 4 stages, P + S - 1 = 7 ticks
    stage 0    p0   p1   p2   p3    .    .    .
    stage 1     .   p0   p1   p2   p3    .    .          a dot is a tick in which a stage computes what nobody uses;
    stage 2     .    .   p0   p1   p2   p3    .          the share of such ticks, (S - 1) / (P + S - 1), is the bubble
    stage 3     .    .    .   p0   p1   p2   p3

Outside of the blocks the axis of the stages splits the batch, so no stage waits for the embedding or the loss. The
parts lie in a queue that is split over the stages (as in MaxText). In a tick stage 0 takes the part at one place of its
queue. This place then moves on: each stage gets what the next stage had there, and the last stage puts in the part
that it has finished. So a tick sends two things, computed rows to the next stage and a place of the queue to the stage
before, and nothing is gathered.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, get_abstract_mesh, reshard

from tunix.sharding.layout import Layout
from tunix.sharding.mesh_shape import count_devices

# (layers, rows) -> (rows, counts): the layers of each stage, arrays [S, L / S, ...], on its rows, [S, rows, ...]. The
# counts are a tree of arrays [S, ...] that are added up over the parts of the batch.
RunLayers = Callable[[Any, Any], tuple[Any, Any]]


def run_stages(run: RunLayers, layers: Any, rows: Any, layout: Layout, parts_per_stage: int | None) -> tuple[Any, Any]:
    """Return what `run` returns for all layers, arrays [L, ...], and all rows, arrays [B, ...], by stages.

    The queue of each stage has `parts_per_stage` parts; None gives each sequence of a device a part of its own. Counts
    are those of each stage, [S, ...].
    """
    # The queue, with two stages and two places for each. In tick t stage 0 takes the part at place t mod 2. Then this
    # place moves up by one stage, and the last stage puts in the part that it has finished:
    #
    #     after tick             0           1           2           3           4
    #     stage 0    p0 p1       p2 p1       p2 p3       -- p3       -- P0       P1 P0      P: finished
    #     stage 1    p2 p3       -- p3       -- P0       P1 P0       P1 P2       P3 P2      --: of a bubble
    lanes = Lanes(layout)
    num_stages = lanes.num_stages
    queue = jax.tree.map(lambda x: lanes.fold(x, parts_per_stage), rows)
    layers = jax.tree.map(lanes.split_layers, layers)
    num_places = jax.tree.leaves(queue)[0].shape[1]
    num_parts = num_places * num_stages
    stages = reshard(jnp.arange(num_stages), PartitionSpec(lanes.stage_axes))

    # The backward pass of a tick computes its blocks again: only the rows that the stages took are kept.
    run_all = jax.checkpoint(run, prevent_cse=False)

    def tick(carry, now):
        queue, received = carry
        place = now % num_places
        waiting = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, axis=1, keepdims=False), queue)
        out, counts = run_all(layers, lanes.choose(stages == 0, waiting, received))
        counts = lanes.leave_bubbles_out(counts, now - stages, num_parts)
        put = lanes.choose(stages == num_stages - 1, out, lanes.send(waiting, -1))
        queue = jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, place, axis=1), queue, put)
        return (queue, lanes.send(out, 1)), counts

    ticks = jnp.arange(num_parts + num_stages - 1)
    start = queue, jax.tree.map(lambda x: jnp.zeros_like(x[:, 0]), queue)
    (queue, _), counts = jax.lax.scan(tick, start, ticks)
    counts = jax.tree.map(lambda each: jnp.sum(each, 0), counts)
    # The first part is finished in tick S - 1, and so lies at the place of this tick.
    return jax.tree.map(lambda x: lanes.unfold(jnp.roll(x, 1 - num_stages, axis=1)), queue), counts


def spread_seed(layout: Layout, seed: jax.Array | None) -> jax.Array | None:
    """Return the seed of a microbatch for each stage, [S]; None where nothing is random."""
    if seed is None:
        return None
    spec = PartitionSpec(layout.stage_axes)
    return jnp.broadcast_to(seed, (Lanes(layout).num_stages,), out_sharding=spec)


class Lanes:
    """Places of rows and layers in a pipeline, on the mesh in use.

    Rows [B, ...] of a batch are split over the axes of the stages, and then over the other axes of the batch. In the
    pipeline they are [S, places, rows, ...], in which each device has the rows that it had, and nothing is sent.
    """

    def __init__(self, layout: Layout):
        sizes = get_abstract_mesh().shape
        self.stage_axes = layout.stage_axes
        batch = layout.batch_axes
        assert batch[: len(self.stage_axes)] == self.stage_axes, "stages are the outermost axes of the batch"
        self.row_axes = batch[len(self.stage_axes) :]
        self.num_stages = count_devices(sizes, self.stage_axes)
        self.num_shards = count_devices(sizes, self.row_axes)

    def fold(self, x: jax.Array, places: int | None, dim: int = 0) -> jax.Array:
        """[B, ...] -> [S, places, rows, ...]; with `dim` 1, [A, B, ...] -> [A, S, places, rows, ...]."""
        # Rows of a device stay on it, so places cut each device's rows, not the batch. With two stages of two devices
        # and two places, a batch of eight rows lies as follows:
        #
        #     rows        0 1 | 2 3 | 4 5 | 6 7         |: between devices
        #     stage 0     place 0: 0 2    place 1: 1 3
        #     stage 1     place 0: 4 6    place 1: 5 7
        num_local = x.shape[dim] // (self.num_stages * self.num_shards)
        places = places or num_local
        spec = jax.typeof(x).sharding.spec
        front, rest = spec[:dim], spec[dim + 1 :]
        shape, others = x.shape[:dim], x.shape[dim + 1 :]
        x = x.reshape(
            *shape, self.num_stages, self.num_shards, places, num_local // places, *others,
            out_sharding=PartitionSpec(*front, self.stage_axes, self.row_axes, None, None, *rest),
        ).swapaxes(dim + 1, dim + 2)  # fmt: skip
        folded = PartitionSpec(*front, self.stage_axes, None, self.row_axes, *rest)
        return x.reshape(*shape, self.num_stages, places, -1, *others, out_sharding=folded)

    def list_parts(self, x: jax.Array, places: int | None, layout: Layout) -> jax.Array:
        """[A, B] or [A, B, T] -> [M, rows, ...]: the parts of all microbatches in the order in which they go in.

        `layout` is that of one part outside of the stages (`Layout.with_tokens_on_stages`).
        """
        x = self.fold(x, places, dim=1)
        spec = layout.activation("BT"[: x.ndim - 3])
        x = reshard(x, PartitionSpec(None, None, None, *spec))
        return x.reshape(-1, *x.shape[3:], out_sharding=PartitionSpec(None, *spec))

    def unfold(self, x: jax.Array) -> jax.Array:
        """[S, places, rows, ...] -> [B, ...]"""
        rest = jax.typeof(x).sharding.spec[3:]
        x = x.reshape(
            self.num_stages, x.shape[1], self.num_shards, -1, *x.shape[3:],
            out_sharding=PartitionSpec(self.stage_axes, None, self.row_axes, None, *rest),
        ).swapaxes(1, 2)  # fmt: skip
        return x.reshape(-1, *x.shape[4:], out_sharding=PartitionSpec((*self.stage_axes, *self.row_axes), *rest))

    def split_layers(self, x: jax.Array) -> jax.Array:
        """[L, ...] -> [S, L / S, ...]"""
        spec = jax.typeof(x).sharding.spec
        x = reshard(x, PartitionSpec(self.stage_axes, *spec.partitions[1:], reduced=spec.reduced))
        return x.reshape(self.num_stages, -1, *x.shape[1:], out_sharding=self.spec_of_stages(spec))

    def spec_of_stages(self, spec: PartitionSpec) -> PartitionSpec:
        """Return the spec of an array [L, ...] as [S, L / S, ...]."""
        others = spec.partitions[1:]
        return PartitionSpec(self.stage_axes, None, *others, reduced=spec.reduced, unreduced=spec.unreduced)

    def leave_bubbles_out(self, counts: Any, part: jax.Array, num_parts: int) -> Any:
        """Return counts [S, ...], zero on the stages where the number of the part, [S], is that of no part."""
        counts = jax.tree.map(lambda x: reshard(x, PartitionSpec(self.stage_axes)), counts)
        return self.choose((part >= 0) & (part < num_parts), counts, jax.tree.map(jnp.zeros_like, counts))

    def choose(self, condition: jax.Array, chosen: Any, others: Any) -> Any:
        """Return rows [S, ...]: the chosen ones on the stages where the condition [S] is true, the others elsewhere."""

        def one(a: jax.Array, b: jax.Array) -> jax.Array:
            spec = jax.typeof(a).sharding.spec
            where = condition.reshape(-1, *[1] * (a.ndim - 1))
            return jnp.where(jnp.broadcast_to(where, a.shape, out_sharding=spec), a, b)

        return jax.tree.map(one, chosen, others)

    def on_every_stage(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """[rows, ...] -> [S, rows, ...], the same rows on each stage, which has them laid out as `spec`."""
        x = reshard(x, spec)
        return jnp.broadcast_to(x, (self.num_stages, *x.shape), out_sharding=PartitionSpec(self.stage_axes, *spec))

    def from_stage(self, condition: jax.Array, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """[S, rows, ...] -> [rows, ...] of the one stage where the condition [S] holds, laid out as `spec`."""
        # A product with 0 and 1: the choice is a sum over stages, so it is one reduce-scatter where `spec` splits rows.
        letters = "BTD"[: x.ndim - 1]
        return jnp.einsum(f"S,S{letters}->{letters}", condition.astype(x.dtype), x, out_sharding=spec)

    def several(self, x: jax.Array, count: int) -> jax.Array:
        """[S, rows, ...] -> [S, count, rows, ...]"""
        spec = jax.typeof(x).sharding.spec
        shape = x.shape[0], count, *x.shape[1:]
        return jnp.broadcast_to(x[:, None], shape, out_sharding=PartitionSpec(spec[0], None, *spec[1:]))

    def send(self, rows: Any, by: int) -> Any:
        """Send rows [S, ...] to the stage that is `by` further on; those of the last stage go to the first."""
        pairs = [(stage, (stage + by) % self.num_stages) for stage in range(self.num_stages)]

        def one(x: jax.Array) -> jax.Array:
            spec = jax.typeof(x).sharding.spec
            sent = jax.shard_map(lambda x: jax.lax.ppermute(x, self.stage_axes, pairs), in_specs=spec, out_specs=spec)
            return sent(x)

        with jax.named_scope("send"):
            return jax.tree.map(one, rows)
