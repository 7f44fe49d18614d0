"""Chunks of layers: each stage of a pipeline has v of them, and works on one in each tick (pipeline_schedule.py).

Where 8 layers lie, with S = 2 stages and v = 2:

                                   stage 0              stage 1
    at rest, [L, ...]              0 1 2 3              4 5 6 7
       | deal_out: layers travel
    dealt out, [L, ...]            0 1   4 5            2 3   6 7
       | split: nothing travels
    chunks, [S, v, L / (S v), ...] [0 1] [4 5]          [2 3] [6 7]
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.models.pipeline import Lanes, deal_out, take_back
from tunix.training.state import add_gradients

# Turns of stages: the part of the batch, and the chunk of its layers, on which a stage works in a tick.
#
# With one chunk a stage has L / S layers in a row (1F1B). With several it has as many runs of layers, and a part goes
# through all stages once for each chunk (interleaved schedule, Narayanan et al. 2021, arXiv:2104.04473):
#
#     layers         0 1      2 3      4 5      6 7         S = 2 stages, v = 2 chunks, L = 8
#     stage          0        1        0        1
#     chunk          0        0        1        1
#
#     tick           0    1    2    3    4    5    6    7    8         forward passes of 4 parts; a number is a part
#     stage 0        0    1    0    1    2    3    2    3
#                    chunk 0   chunk 1   chunk 0   chunk 1
#     stage 1             0    1    0    1    2    3    2    3
#
# A tick takes 1 / v of the time, and still S - 1 of them pass until the last stage has work: the bubble is a v-th of
# that with one chunk. Backward passes have the same order in a mirror: last chunk first, last stage first. The last
# stage goes backward through a part in the tick in which it has finished the part's last chunk.


class ScheduleSlot(NamedTuple):
    """Work of each stage in a tick."""

    chunk: jax.Array  # [S] int32
    part: jax.Array  # [S] int32, below 0 or not below M where a stage works on nothing


class Turns:
    """Order of S stages with v chunks of layers each, which compute M parts, a multiple of S."""

    def __init__(self, num_stages: int, num_chunks: int, num_parts: int):
        self.num_stages, self.num_chunks, self.num_parts = num_stages, num_chunks, num_parts
        self.round = num_stages * num_chunks  # ticks in which a stage works on S parts

    @property
    def loops(self) -> tuple[tuple[int, int, dict[str, bool]], ...]:
        """First tick, end, and what all stages do: ticks forward, ticks both ways, ticks backward."""
        fill, end = self.round - 1, self.num_chunks * self.num_parts + self.num_stages - 1
        return (
            (0, fill, {"forward": True, "backward": False}),
            (fill, end, {"forward": True, "backward": True}),
            (end, end + fill, {"forward": False, "backward": True}),
        )

    @property
    def num_saved(self) -> int:
        """Most ticks between those in which a stage takes rows and goes backward through them, both counted."""
        return 2 * self.round - 1

    def forward(self, now: jax.Array, stages: jax.Array) -> ScheduleSlot:
        """Return the turns of the stages [S] forward: stage s does in tick t what stage 0 did in tick t - s."""
        chunk, part = self._locate(now - stages)
        return ScheduleSlot(chunk, part)

    def backward(self, now: jax.Array, stages: jax.Array) -> ScheduleSlot:
        """Return the turns of the stages [S] backward: in the order of the forward turns, with chunks reversed."""
        chunk, part = self._locate(self._backward_iterations(now, stages))
        return ScheduleSlot(self.num_chunks - 1 - chunk, part)

    # Rows are found again by the tick in which they were taken, so a stage needs no list of the parts that it keeps. In
    # the picture above, part 0 goes through its last two pieces of layers and back:
    #
    #     tick          2           3                 4
    #     stage 0       F chunk 1                     B chunk 1        taken_at(4) = 2
    #     stage 1                   F, B chunk 1                       taken_at(3) = 3
    def taken_at(self, now: jax.Array, stages: jax.Array) -> jax.Array:
        """Return the ticks [S] in which stages took the rows through which they go backward now."""
        ahead = self.backward(now, stages).chunk * self.num_stages + stages  # chunks before this one, of all stages
        return now - 2 * (self.round - 1 - ahead)

    def entering(self, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return whether the first stage takes a part of the batch, and its number; scalars."""
        chunk, part = self._locate(now)
        return chunk == 0, part

    def finishing(self, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return whether the last stage finishes a part in this tick, and its number; scalars."""
        chunk, part = self._locate(self._backward_iterations(now, self.num_stages - 1))
        return chunk == 0, part

    def returning(self, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return whether the first stage goes backward through its first chunk, and the number of the part; scalars."""
        chunk, part = self._locate(self._backward_iterations(now, 0))
        return chunk == self.num_chunks - 1, part

    def if_due(self, due: jax.Array, function: Callable[..., Any], *otherwise: Any) -> Any:
        """Return `function(*otherwise)` where `due`, a scalar, is true, else `otherwise`; with one chunk it is due
        in each tick."""
        if self.num_chunks == 1:
            return function(*otherwise)
        return jax.lax.cond(due, function, lambda *same: same, *otherwise)

    def _backward_iterations(self, now: Any, stages: Any) -> Any:
        """Return the ticks since stages began to go backward: the last stage first, when a part is finished."""
        return now - (self.round - 1) - (self.num_stages - 1 - stages)

    def _locate(self, iterations: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return chunk and part after so many ticks of a stage's work, in the order of forward passes.

        ticks    0  1  2  3    4  5  6  7       S = 2 stages, v = 2 chunks: a round is 4 ticks
        chunk    0  0  1  1    0  0  1  1
        part     0  1  0  1    2  3  2  3
        """
        rounds, remaining = iterations // self.round, iterations % self.round
        return remaining // self.num_stages, rounds * self.num_stages + iterations % self.num_stages


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

    def add(self, total: Any, more: Any, chunk: jax.Array) -> Any:
        """Return totals [S, v, L / (S v), ...] with `more` [S, L / (S v), ...] added to one chunk [S] of each stage.

        jax 0.10.2 has no `dynamic_slice` of arrays that are still to be summed over devices, so the chunk comes out of
        a choice among all.
        """
        if self.num_chunks == 1:
            return add_gradients(total, more)

        def on_each_stage(total: jax.Array, more: jax.Array, chunk: jax.Array) -> jax.Array:
            local = total[:, 0]
            for number in range(1, self.num_chunks):
                local = jax.lax.select(chunk[0] == number, total[:, number], local)
            return jax.lax.dynamic_update_slice_in_dim(total, (local + more)[:, None], chunk[0], axis=1)

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
