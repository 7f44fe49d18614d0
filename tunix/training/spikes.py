"""Spikes: steps whose loss or gradient norm lies far above those of the steps before. Their update is skipped.

The devices decide, within the step: no step waits for the host. `state["spikes"]` is there only where
`training.spike_deviations` is set:

    loss, grad_norm   [training.spike_window] float32: a ring of the newest numbers of steps that were taken
    taken             int32: numbers that were written into the rings so far
    row, total        int32: spikes in a row up to now, and spikes of the whole run

A number of a spike does not go into the ring: it would raise the limit for the steps behind it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tunix.config import Training

WATCHED = ("loss", "grad_norm")


@dataclass(frozen=True)
class SpikeGuard:
    """The limit of a step: `deviations` standard deviations above the mean of the last `window` steps."""

    deviations: float
    window: int

    def start(self) -> dict[str, Any]:
        """Return the part `spikes` of the state of a run that has no steps yet; to be compiled."""
        zero = jnp.zeros((), jnp.int32)
        rings = {name: jnp.zeros(self.window, jnp.float32) for name in WATCHED}
        return {"spikes": {**rings, "taken": zero, "row": zero, "total": zero}}

    def check(
        self, spikes: dict[str, jax.Array], numbers: dict[str, jax.Array], finite: jax.Array
    ) -> tuple[jax.Array, dict[str, Any], dict[str, jax.Array]]:
        """Judge a step by its numbers `loss` and `grad_norm`.

        Returns:
            True where the step is a spike; the part of the state after the step; numbers for metrics.jsonl.
        """
        taken, place = spikes["taken"], jnp.arange(self.window)
        above = {name: self._count_deviations(spikes[name], taken, numbers[name]) for name in WATCHED}
        is_high = [value > self.deviations for value in above.values()]  # False where `above` is not a number
        spike = finite & (is_high[0] | is_high[1])
        # A step that is not finite has a counter of its own, and does not end a row of spikes.
        row = jnp.where(finite, jnp.where(spike, spikes["row"] + 1, 0), spikes["row"])
        total = spikes["total"] + spike
        # A ring is written by comparison with all places, which needs no scatter: it has a few hundred numbers.
        written = (place == taken % self.window) & finite & ~spike
        rings = {name: jnp.where(written, numbers[name], spikes[name]) for name in WATCHED}
        new = {**rings, "taken": taken + (finite & ~spike), "row": row, "total": total}
        reported = {f"{name}_deviations": value for name, value in above.items()}
        return spike, {"spikes": new}, {"spikes": row, "spikes_total": total, **reported}

    def _count_deviations(self, ring: jax.Array, taken: jax.Array, number: jax.Array) -> jax.Array:
        """Return by how many standard deviations a number lies above the mean of a ring; NaN until it is half full."""
        is_set = jnp.arange(self.window) < taken
        count = jnp.maximum(1, is_set.sum())
        mean = jnp.where(is_set, ring, 0).sum() / count
        deviation = jnp.sqrt(jnp.where(is_set, (ring - mean) ** 2, 0).sum() / count)
        smallest = jnp.finfo(jnp.float32).eps * jnp.abs(mean) + jnp.finfo(jnp.float32).tiny  # equal numbers: rounding
        # The deviation of a few numbers says little: any of the first steps of a run could be a spike.
        is_ready = taken >= max(2, self.window // 2)
        return jnp.where(is_ready, (number - mean) / jnp.maximum(deviation, smallest), jnp.nan)


def make_guard(training: Training) -> SpikeGuard | None:
    """Make the guard that the config asks for; None where it asks for none."""
    deviations, window = training.spike_deviations, training.spike_window
    return None if deviations is None else SpikeGuard(deviations, window)
