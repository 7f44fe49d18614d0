"""Random numbers of the initial weights."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


class Draws:
    """Arrays of random numbers, each drawn with a key of its own; without a key all numbers are 0.

    Where only shapes matter there is no key: JAX takes milliseconds to trace how random numbers of one shape are made.
    """

    def __init__(self, key: jax.Array | None):
        self.key, self.count = key, 0

    def normal(self, shape: Sequence[int], dtype: Any, deviation: float) -> jax.Array:
        """Return numbers of mean 0 with this standard deviation."""
        if self.key is None:
            return jnp.zeros(shape, dtype)
        return jax.random.normal(self._next_key(), shape, dtype) * deviation

    def uniform(self, shape: Sequence[int], low: float | jax.Array, high: float | jax.Array) -> jax.Array:
        """Return float32 numbers between `low` and `high`."""
        if self.key is None:
            return jnp.zeros(shape)
        return jax.random.uniform(self._next_key(), shape, minval=low, maxval=high)

    def split(self, num: int) -> jax.Array | None:
        """Return keys [num] for as many other `Draws`; None without a key."""
        return None if self.key is None else jax.random.split(self._next_key(), num)

    def _next_key(self) -> jax.Array:
        assert self.key is not None
        self.count += 1
        return jax.random.fold_in(self.key, self.count - 1)
