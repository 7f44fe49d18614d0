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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


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
    # the image above, part 0 goes through its last two pieces of layers and back:
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
        """Return `function(*otherwise)` where the scalar `due` is true, as always with one chunk, else `otherwise`."""
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
