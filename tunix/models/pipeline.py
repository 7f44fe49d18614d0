"""Blocks on stages: where rows and layers lie, and the forward pass of an evaluation through the stages.

Each of S stages has L / S layers, and computes P parts of the batch one after the other. This file has the forward pass
alone, one part a tick. Training goes backward in the same ticks (training/pipeline_step.py).

    tick        0    1    2    3    4    5    6          P = 4 parts, S = 4 stages, P + S - 1 = 7 ticks
    stage 0    p0   p1   p2   p3    .    .    .
    stage 1     .   p0   p1   p2   p3    .    .          a dot is a tick in which a stage computes what nobody uses;
    stage 2     .    .   p0   p1   p2   p3    .          the share of such ticks, (S - 1) / (P + S - 1), is the bubble
    stage 3     .    .    .   p0   p1   p2   p3

Outside of the blocks the axis of the stages splits the batch, so no stage waits for the embedding or the loss. The
parts lie in a queue that is split over the stages (as in MaxText). In a tick stage 0 takes the part at one slot of its
queue. This slot then moves on: each stage gets what the next stage had there, and the last stage puts in the part
that it has finished. So a tick sends two things, computed rows to the next stage and a slot of the queue to the stage
before, and nothing is gathered.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, get_abstract_mesh, reshard

from tunix.models.kernels import mesh_platform
from tunix.sharding.arrays import bring_to
from tunix.sharding.layout import Layout
from tunix.sharding.mesh import count_devices

# (layers, rows) -> rows: the layers of each stage, arrays [S, L / S, ...], on its rows, [S, rows, ...]
RunLayers = Callable[[Any, Any], Any]


def run_stages(run: RunLayers, layers: Any, rows: Any, layout: Layout, parts_per_stage: int | None) -> Any:
    """Return what `run` returns for all layers, arrays [L, ...], and all rows, arrays [B, ...], by stages.

    The queue of each stage has `parts_per_stage` parts; None gives each sequence of a device a part of its own. It is
    for evaluations: a backward pass would keep what each tick computes.
    """
    # The queue, with two stages and two slots for each. In tick t stage 0 takes the part at slot t mod 2. Then this
    # slot moves up by one stage, and the last stage puts in the part that it has finished:
    #
    #     after tick             0           1           2           3           4
    #     stage 0    p0 p1       p2 p1       p2 p3       -- p3       -- P0       P1 P0      P: finished
    #     stage 1    p2 p3       -- p3       -- P0       P1 P0       P1 P2       P3 P2      --: of a bubble
    lanes = Lanes(layout)
    num_stages = lanes.num_stages
    queue = jax.tree.map(lambda x: lanes.fold(x, parts_per_stage), rows)
    layers = jax.tree.map(lanes.split_layers, layers)
    num_slots = jax.tree.leaves(queue)[0].shape[1]
    stages = reshard(jnp.arange(num_stages), PartitionSpec(lanes.stage_axes))

    def tick(carry, now):
        queue, received = carry
        index = now % num_slots
        waiting = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), queue)
        out = run(layers, lanes.select(stages == 0, waiting, received))
        put = lanes.select(stages == num_stages - 1, out, lanes.send(waiting, -1))
        queue = jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, axis=1), queue, put)
        return (queue, lanes.send(out, 1)), None

    iterations = jnp.arange(num_slots * num_stages + num_stages - 1)
    start = queue, jax.tree.map(lambda x: jnp.zeros_like(x[:, 0]), queue)
    (queue, _), _ = jax.lax.scan(tick, start, iterations)
    # The first part is finished in tick S - 1, and so lies at the slot of this tick.
    return jax.tree.map(lambda x: lanes.unfold(jnp.roll(x, 1 - num_stages, axis=1)), queue)


class Lanes:
    """Places of rows and layers in a pipeline, on the mesh in use.

    Rows [B, ...] of a batch are split over the axes of the stages, and then over the other axes of the batch. In the
    pipeline they are [S, slots, rows, ...], in which each device has the rows that it had, and nothing is sent.
    """

    def __init__(self, layout: Layout):
        sizes = get_abstract_mesh().shape
        self.stage_axes = layout.stage_axes
        batch = layout.batch_axes
        assert batch[: len(self.stage_axes)] == self.stage_axes, "stages are the outermost axes of the batch"
        self.row_axes = batch[len(self.stage_axes) :]
        self.num_stages = count_devices(sizes, self.stage_axes)
        self.num_shards = count_devices(sizes, self.row_axes)

    def fold(self, x: jax.Array, num_slots: int | None, dim: int = 0) -> jax.Array:
        """[B, ...] -> [S, slots, rows, ...]; with `dim` 1, [A, B, ...] -> [A, S, slots, rows, ...]."""
        # Rows of a device stay on it, so slots cut each device's rows, not the batch. With two stages of two devices
        # and two slots, a batch of eight rows lies as follows:
        #
        #     rows        0 1 | 2 3 | 4 5 | 6 7         |: between devices
        #     stage 0     slot 0: 0 2    slot 1: 1 3
        #     stage 1     slot 0: 4 6    slot 1: 5 7
        num_local = x.shape[dim] // (self.num_stages * self.num_shards)
        num_slots = num_slots or num_local
        spec = jax.typeof(x).sharding.spec
        front, remaining = spec[:dim], spec[dim + 1 :]
        shape, row_shape = x.shape[:dim], x.shape[dim + 1 :]
        x = x.reshape(
            *shape, self.num_stages, self.num_shards, num_slots, num_local // num_slots, *row_shape,
            out_sharding=PartitionSpec(*front, self.stage_axes, self.row_axes, None, None, *remaining),
        ).swapaxes(dim + 1, dim + 2)  # fmt: skip
        folded = PartitionSpec(*front, self.stage_axes, None, self.row_axes, *remaining)
        return x.reshape(*shape, self.num_stages, num_slots, -1, *row_shape, out_sharding=folded)

    def list_parts(self, x: jax.Array, num_slots: int | None, layout: Layout) -> jax.Array:
        """[A, B], [A, B, T] or [A, B, texts, D] -> [M, rows, ...]: parts of all microbatches in the order in which they
        go in.

        `layout` is that of one part outside of the stages (`Layout.with_tokens_on_stages`).
        """
        x = self.fold(x, num_slots, dim=1)
        spec = layout.activation("BT" if x.ndim == 5 else "B")  # of [rows, T]; other rows are whole
        x = reshard(x, PartitionSpec(None, None, None, *spec))
        return x.reshape(-1, *x.shape[3:], out_sharding=PartitionSpec(None, *spec))

    def unfold(self, x: jax.Array) -> jax.Array:
        """[S, slots, rows, ...] -> [B, ...]"""
        remaining = jax.typeof(x).sharding.spec[3:]
        x = x.reshape(
            self.num_stages, x.shape[1], self.num_shards, -1, *x.shape[3:],
            out_sharding=PartitionSpec(self.stage_axes, None, self.row_axes, None, *remaining),
        ).swapaxes(1, 2)  # fmt: skip
        return x.reshape(-1, *x.shape[4:], out_sharding=PartitionSpec((*self.stage_axes, *self.row_axes), *remaining))

    def split_layers(self, x: jax.Array) -> jax.Array:
        """[L, ...] -> [S, L / S, ...]"""
        spec = jax.typeof(x).sharding.spec
        x = reshard(x, PartitionSpec(self.stage_axes, *spec.partitions[1:], reduced=spec.reduced))
        return x.reshape(self.num_stages, -1, *x.shape[1:], out_sharding=self.spec_of_stages(spec))

    def spec_of_stages(self, spec: PartitionSpec) -> PartitionSpec:
        """Return the spec of an array [L, ...] as [S, L / S, ...]."""
        remaining = spec.partitions[1:]
        return PartitionSpec(self.stage_axes, None, *remaining, reduced=spec.reduced, unreduced=spec.unreduced)

    def leave_bubbles_out(self, counts: Any, part: jax.Array, num_parts: int) -> Any:
        """Return counts [S, ...], zero on the stages where the number of the part, [S], is that of no part."""
        counts = jax.tree.map(lambda x: reshard(x, PartitionSpec(self.stage_axes)), counts)
        return self.select((part >= 0) & (part < num_parts), counts, jax.tree.map(jnp.zeros_like, counts))

    def select(self, condition: jax.Array, chosen: Any, remaining: Any) -> Any:
        """Return rows [S, ...]: the chosen ones on the stages where the condition [S] is true, the others elsewhere."""

        def one(a: jax.Array, b: jax.Array) -> jax.Array:
            spec = jax.typeof(a).sharding.spec
            mask = condition.reshape(-1, *[1] * (a.ndim - 1))
            return jnp.where(jnp.broadcast_to(mask, a.shape, out_sharding=spec), a, b)

        return jax.tree.map(one, chosen, remaining)

    def on_every_stage(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """[rows, ...] -> [S, rows, ...], the same rows on each stage, which has them laid out as `spec`."""
        x = reshard(x, spec)
        return jnp.broadcast_to(x, (self.num_stages, *x.shape), out_sharding=PartitionSpec(self.stage_axes, *spec))

    def from_stage(self, condition: jax.Array, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """[S, rows, T, D] -> [rows, t, D] of the one stage where the condition [S] holds, laid out as `spec`: stages
        split the tokens that each of their devices has. [S, rows] -> [rows], which every stage has."""

        # A sum over stages, to which the others add zeros. XLA would sum and send where it could scatter.
        def on_each_stage(x: jax.Array) -> jax.Array:
            if x.ndim == 2:
                return jax.lax.psum(x[0], self.stage_axes)
            return jax.lax.psum_scatter(x[0], self.stage_axes, scatter_dimension=1, tiled=True)

        x = self.select(condition, x, jnp.zeros_like(x))
        return jax.shard_map(on_each_stage, in_specs=jax.typeof(x).sharding.spec, out_specs=spec)(x)

    def make_ring(self, shapes: Any, num_slots: int) -> Any:
        """Return zeros for arrays of these shapes in each slot, [slots, ...]; stages use slots of their own."""

        def one(shape: Any) -> jax.Array:
            # A constant that a backward pass takes, as the 16 numbers of nf4, may lie nowhere: each device has it.
            spec = shape.sharding.spec.partitions if shape.sharding else ()
            return reshard(jnp.zeros((num_slots, *shape.shape), shape.dtype), PartitionSpec(None, *spec))

        return jax.tree.map(one, shapes)

    def put(self, ring: Any, arrays: Any, slots: jax.Array) -> Any:
        """Return a ring with arrays put into a slot of each stage, [S]."""

        def on_each_stage(ring: jax.Array, x: jax.Array, slots: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(ring, x, slots[0], axis=0)

        def one(ring: jax.Array, x: jax.Array) -> jax.Array:
            of_ring = jax.typeof(ring).sharding.spec
            specs = of_ring, PartitionSpec(*of_ring.partitions[1:]), PartitionSpec(self.stage_axes)
            return jax.shard_map(on_each_stage, in_specs=specs, out_specs=of_ring, check_vma=False)(ring, x, slots)

        return jax.tree.map(one, ring, arrays)

    def take(self, ring: Any, slots: jax.Array) -> Any:
        """Return the arrays in a slot of each stage, [S]."""

        def on_each_stage(ring: jax.Array, slots: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(ring, slots[0], axis=0, keepdims=False)

        def one(ring: jax.Array) -> jax.Array:
            spec = jax.typeof(ring).sharding.spec
            specs, out = (spec, PartitionSpec(self.stage_axes)), PartitionSpec(*spec.partitions[1:])
            return jax.shard_map(on_each_stage, in_specs=specs, out_specs=out, check_vma=False)(ring, slots)

        return jax.tree.map(one, ring)

    def send(self, rows: Any, by: int) -> Any:
        """Send rows [S, ...] to the stage that is `by` further on; those of the last stage go to the first."""
        pairs = [(stage, (stage + by) % self.num_stages) for stage in range(self.num_stages)]

        def one(x: jax.Array) -> jax.Array:
            spec = jax.typeof(x).sharding.spec
            sent = jax.shard_map(lambda x: jax.lax.ppermute(x, self.stage_axes, pairs), in_specs=spec, out_specs=spec)
            return sent(x)

        with jax.named_scope("send"):
            return jax.tree.map(one, rows)

    def follow(self, tree: Any, earlier: Any) -> Any:
        """Return `tree`, of which nothing is used before `earlier` is there, on CPUs; elsewhere `tree` as it is.

        On CPUs (jaxlib 0.10.2) a loop goes on while operations behind it begin, if they take nothing that it gives.
        Then devices reach the collectives of both in different orders, and wait for one another for ever.
        """
        if mesh_platform() != "cpu":
            return tree

        def on_each_device(leaves: list[jax.Array], earlier: list[jax.Array]) -> list[jax.Array]:
            mark = sum(x.ravel()[0].astype(jnp.float32) for x in earlier)
            never = (mark != mark) & (mark == 0)  # XLA does not see it; a barrier is gone before it orders operations
            return [jnp.where(never, jnp.zeros_like(x), x) for x in leaves]

        (leaves, form), marks = jax.tree.flatten(tree), jax.tree.leaves(earlier)
        specs, of_marks = ([jax.typeof(x).sharding.spec for x in each] for each in (leaves, marks))
        tied = jax.shard_map(on_each_device, in_specs=(specs, of_marks), out_specs=specs, check_vma=False)
        return jax.tree.unflatten(form, tied(leaves, marks))


class Chunks:
    """Chunks of layers: each stage of a pipeline has v of them, and works on one in each tick.

    Layers are dealt out to stages in turn: each stage gets every S-th chunk of the layers. S = 2 stages, v = 2, L = 8:

                                       stage 0              stage 1
        at rest, [L, ...]              0 1 2 3              4 5 6 7
           | deal_out: layers travel
        dealt out, [L, ...]            0 1   4 5            2 3   6 7
           | split: nothing travels
        chunks, [S, v, L / (S v), ...] [0 1] [4 5]          [2 3] [6 7]         one chunk (v = 1) is [S, L / S, ...]

    Shape and sharding of an array at rest stay, so nothing outside of a step knows of the order: checkpoints, exports,
    averages and evaluations have the layers in their own order.
    """

    def __init__(self, lanes: Lanes, num_chunks: int):
        self.lanes, self.num_chunks = lanes, num_chunks
        self._of_stages = PartitionSpec(lanes.stage_axes)

    def deal_out(self, x: jax.Array) -> jax.Array:
        """Return arrays [L, ...] at rest as [L, ...] in the order of the stages' chunks."""
        return self._exchange(x, to_chunks=True)

    def take_back(self, x: jax.Array) -> jax.Array:
        """Return arrays [L, ...] in the order of the chunks as they rest: the inverse of `deal_out`."""
        return self._exchange(x, to_chunks=False)

    def _exchange(self, x: jax.Array, *, to_chunks: bool) -> jax.Array:
        """Each stage sends each of its chunks to one stage, in v permutes."""
        if self.num_chunks == 1:
            return x
        axes, spec = self.lanes.stage_axes, jax.typeof(x).sharding.spec

        def on_each_stage(x: jax.Array) -> jax.Array:
            chunks = x.reshape(self.num_chunks, -1, *x.shape[1:])
            result = jnp.zeros_like(chunks)
            stage = jax.lax.axis_index(axes)
            for number in range(self.num_chunks):
                # A permute sends one array from each device and brings one to each: so v permutes, of a chunk each.
                sends = list_sends(self.lanes.num_stages, self.num_chunks, number)
                if not to_chunks:  # the same trips, from their end to their beginning
                    sends = [(target, slot, source, index) for source, index, target, slot in sends]
                # All stages run one program, in which the number of the stage is data: tables [S] say which chunk it
                # sends, and where it puts the one that it gets.
                sent = jnp.asarray([index for _, index, _, _ in sorted(sends)])
                put = jnp.asarray([slot for _, slot in sorted(trip[2:] for trip in sends)])
                chunk = jax.lax.dynamic_index_in_dim(chunks, sent[stage], keepdims=False)
                chunk = jax.lax.ppermute(chunk, axes, [(source, target) for source, _, target, _ in sends])
                result = jax.lax.dynamic_update_index_in_dim(result, chunk, put[stage], 0)
            return result.reshape(x.shape)

        return jax.shard_map(on_each_stage, in_specs=spec, out_specs=spec)(x)

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
        front, remaining = spec.partitions[0], spec.partitions[2:]
        spec = PartitionSpec(front, None, None, *remaining, reduced=spec.reduced, unreduced=spec.unreduced)
        return x.reshape(x.shape[0], self.num_chunks, -1, *x.shape[2:], out_sharding=spec)

    def merge_stage(self, x: jax.Array) -> jax.Array:
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

    def take_layer(self, chunk: jax.Array, x: jax.Array, layer: jax.Array) -> jax.Array:
        """Return a layer of one chunk of each stage, [S, ...], of an array [S, v, L / (S v), ...]; `chunk` is [S].

        A loop over the layers of a chunk that `take` returns would need a copy of the chunk first.
        """

        def on_each_stage(x: jax.Array, chunk: jax.Array, layer: jax.Array) -> jax.Array:
            layers = x.reshape(-1, *x.shape[3:])
            index = chunk[0] * x.shape[2] + layer
            where = [index, *[jnp.zeros_like(index)] * (layers.ndim - 1)]
            return jax.lax.dynamic_slice(layers, where, (1, *layers.shape[1:]), allow_negative_indices=False)

        spec = jax.typeof(x).sharding.spec
        out = _without_chunks(_without_chunks(spec))
        taken = jax.shard_map(on_each_stage, in_specs=(spec, self._of_stages, PartitionSpec()), out_specs=out)
        return taken(x, chunk, layer)

    def add(self, total: Any, more: Any, chunk: jax.Array, join: Callable[..., jax.Array] = jnp.add) -> Any:
        """Return totals [S, v, L / (S v), ...] with `more` [S, L / (S v), ...] added to one chunk [S] of each stage.

        `join` makes one array of both; by default it adds them.

        jax 0.10.2 has no slices of arrays that are still to be summed over devices: each device adds to its own part in
        a `shard_map` that does not ask for types.
        """
        if self.num_chunks == 1:
            return jax.tree.map(lambda a, b: join(a, b.astype(a.dtype)), total, more)

        # Only this chunk is read and written.
        def on_each_stage(total: jax.Array, more: jax.Array, chunk: jax.Array) -> jax.Array:
            zero = jnp.zeros_like(chunk[0])
            where = [zero, chunk[0], *[zero] * (more.ndim - 1)]
            local = jax.lax.dynamic_slice(total, where, (1, 1, *more.shape[1:]), allow_negative_indices=False)
            added = join(local, more[:, None].astype(total.dtype))
            return jax.lax.dynamic_update_slice(total, added, where, allow_negative_indices=False)

        def one(total: jax.Array, more: jax.Array) -> jax.Array:
            spec = jax.typeof(total).sharding.spec
            specs = spec, _without_chunks(spec), self._of_stages
            return jax.shard_map(on_each_stage, in_specs=specs, out_specs=spec, check_vma=False)(total, more, chunk)

        return jax.tree.map(one, total, more)

    def add_layer(self, chunk: jax.Array, total: jax.Array, more: jax.Array, layer: Any, _: Any) -> jax.Array:
        """Return a total as that of `add` with `more` [S, ...] added to one layer of one chunk [S] of each stage.

        It has the arguments of `add_in_place` behind the chunk; stages sum over replicas later.
        """
        num_places = total.ndim - more.ndim  # before the dimensions of the layer: chunk and layer, or layer

        # XLA reads, adds and writes in one kernel where slice and update have the same scalar, so both places are one
        # number. An entry of an array is no such scalar: each kernel takes it out anew.
        def on_each_stage(total: jax.Array, more: jax.Array, chunk: jax.Array, layer: jax.Array) -> jax.Array:
            layers = total.reshape(-1, *more.shape[1:])
            index = chunk[0] * (len(layers) // self.num_chunks) + layer if num_places > 1 else layer
            where = [index, *[jnp.zeros_like(index)] * (more.ndim - 1)]
            local = jax.lax.dynamic_slice(layers, where, more.shape, allow_negative_indices=False)
            added = local + more.astype(total.dtype)
            layers = jax.lax.dynamic_update_slice(layers, added, where, allow_negative_indices=False)
            return layers.reshape(total.shape)

        spec = jax.typeof(total).sharding.spec
        front, remaining = spec.partitions[0], spec.partitions[1 + num_places :]
        of_layer = PartitionSpec(front, *remaining, reduced=spec.reduced, unreduced=spec.unreduced)
        specs = spec, of_layer, self._of_stages, PartitionSpec()
        add = jax.shard_map(on_each_stage, in_specs=specs, out_specs=spec, check_vma=False)
        return add(total, bring_to(more, of_layer), chunk, jnp.asarray(layer, chunk.dtype))

    def zeros(self, of_chunk: jax.ShapeDtypeStruct) -> jax.Array:
        """Return zeros for all chunks of arrays of this shape, [S, L / (S v), ...]."""
        spec, shape = of_chunk.sharding.spec, of_chunk.shape
        if self.num_chunks == 1:
            return reshard(jnp.zeros(shape, of_chunk.dtype), spec)
        chunks = jnp.zeros((shape[0], self.num_chunks, *shape[1:]), of_chunk.dtype)
        return reshard(chunks, PartitionSpec(spec[0], None, *spec[1:]))


def list_sends(num_stages: int, num_chunks: int, number: int) -> list[tuple[int, int, int, int]]:
    """Return the trips of one permute: stage and slot of a chunk at rest, stage and slot where it is dealt to.

    Chunk g = p v + i is the i-th at rest on stage p, and belongs to stage g mod S. Each permute takes one chunk of each
    stage, so that each stage gets one. p v mod S repeats after S / d stages, where d is the greatest common divisor of
    v and S; from one such run of stages to the next, i moves on by one, which fills the gaps. For S = v = 2:

        permute 0    stage 0 sends chunk 0 to stage 0    stage 1 sends chunk 3 to stage 1
                1    stage 0 sends chunk 1 to stage 1    stage 1 sends chunk 2 to stage 0
    """
    run = num_stages // math.gcd(num_stages, num_chunks)
    sends = []
    for stage in range(num_stages):
        index = (number + stage // run) % num_chunks
        chunk = stage * num_chunks + index
        sends.append((stage, index, chunk % num_stages, chunk // num_stages))
    return sends


def _without_chunks(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec of [S, layers, ...] for that of [S, v, layers, ...]."""
    front, _, *remaining = spec.partitions
    return PartitionSpec(front, *remaining, reduced=spec.reduced, unreduced=spec.unreduced)
