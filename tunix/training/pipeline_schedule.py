"""Turns of stages: the part of the batch, and the chunk of its layers, on which a stage works in a tick.

With one chunk a stage has L / S layers in a row (1F1B). With several it has as many runs of layers, and a part goes
through all stages once for each chunk (interleaved schedule, Narayanan et al. 2021, arXiv:2104.04473):

    layers         0 1      2 3      4 5      6 7         S = 2 stages, v = 2 chunks, L = 8
    stage          0        1        0        1
    chunk          0        0        1        1

    tick           0    1    2    3    4    5    6    7    8         forward passes of 4 parts; a number is a part
    stage 0        0    1    0    1    2    3    2    3
                   chunk 0   chunk 1   chunk 0   chunk 1
    stage 1             0    1    0    1    2    3    2    3

A tick takes 1 / v of the time, and still S - 1 of them pass until the last stage has work: the bubble is a v-th of that
with one chunk. Backward passes have the same order in a mirror: last chunk first, last stage first. The last stage goes
backward through a part in the tick in which it has finished the part's last chunk.
"""

import heapq
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


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

    def forward(self, now: jax.Array, stages: jax.Array) -> ScheduleSlot:
        """Return the turns of the stages [S] forward: stage s does in tick t what stage 0 did in tick t - s."""
        chunk, part = self._locate(now - stages)
        return ScheduleSlot(chunk, part)

    def backward(self, now: jax.Array, stages: jax.Array) -> ScheduleSlot:
        """Return the turns of the stages [S] backward: in the order of the forward turns, with chunks reversed."""
        chunk, part = self._locate(self._backward_iterations(now, stages))
        return ScheduleSlot(self.num_chunks - 1 - chunk, part)

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
        """Return `function(*otherwise)` where the scalar `due` is true, as always with one chunk, else `otherwise`."""
        if self.num_chunks == 1:
            return function(*otherwise)

        # A loop that runs once or not at all, in place of `cond`: XLA copies what goes through a branch as it is, and
        # the sums of a table's gradient are large. A loop changes them where they lie.
        def run(carry: tuple[jax.Array, tuple]) -> tuple[jax.Array, tuple]:
            return jnp.zeros_like(carry[0]), function(*carry[1])

        with jax.named_scope(f"one_of_{self.num_chunks}"):  # the share of ticks, which costs/hlo.py reads
            return jax.lax.while_loop(lambda carry: carry[0], run, (due, otherwise))[1]

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


class Slots(NamedTuple):
    """Places of what stages keep of a part from their forward to their backward turn."""

    put: np.ndarray  # [ticks, S] int32: where a stage puts what it keeps in a tick
    taken: np.ndarray  # [ticks, S] int32: where it finds what it goes backward through
    num_slots: int


@cache
def assign_slots(num_stages: int, num_chunks: int, num_parts: int) -> Slots:
    """Return slots for all ticks, as few as the first stage needs: (v + 1) S - 1.

    In a bubble a stage puts what nobody uses into a free slot, and goes backward through what it has put last: numbers
    that are finite, so that gradients of zero stay zero. S = 2 stages, v = 1 chunk; a number is a part:

        tick          0    1    2    3         the last stage needs one slot: it goes backward at once
        stage 0 F    p0   p1   p2   p3
                B              p0   p1
        slots 0      p0   p0   p0   p3         p0 is free behind tick 2
              1           p1   p1   p1
              2                p2   p2
    """
    turns: Any = Turns(num_stages, num_chunks, num_parts)
    stages = np.arange(num_stages)
    (_, fill, _), (_, end, _), (_, last, _) = turns.loops
    put, taken = np.zeros((2, last, num_stages), np.int32)
    free = [list(range(num_parts * num_chunks + 1)) for _ in stages]  # heaps: the lowest number comes first
    saved: list[dict[tuple[int, int], int]] = [{} for _ in stages]
    for now in range(last):
        goes_forward, goes_back = now < end, now >= fill
        (chunks, parts), (back_chunks, back_parts) = turns.forward(now, stages), turns.backward(now, stages)
        for stage in stages:
            if goes_forward:
                put[now, stage] = free[stage][0]
                if 0 <= parts[stage] < num_parts:
                    saved[stage][chunks[stage], parts[stage]] = heapq.heappop(free[stage])
            if goes_back:
                is_work = 0 <= back_parts[stage] < num_parts
                last_put = put[min(now, end - 1), stage]
                taken[now, stage] = saved[stage].pop((back_chunks[stage], back_parts[stage])) if is_work else last_put
                if is_work:
                    heapq.heappush(free[stage], int(taken[now, stage]))
    return Slots(put, taken, int(put.max()) + 1)
