"""Random numbers of the initial weights."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp

KEYS_AT_ONCE = 16  # XLA compiles how sixteen keys are made in the time of one


class Draws:
    """Arrays of random numbers, each drawn with a key of its own; without a key all numbers are 0.

    Where only shapes matter there is no key: JAX takes milliseconds to trace how random numbers of one shape are made.
    """

    def __init__(self, key: jax.Array | None):
        self.key = key
        self.keys = iter(()) if key is None else _list_keys(key)

    def normal(self, shape: Sequence[int], dtype: Any, deviation: float) -> jax.Array:
        """Return numbers of mean 0 with this standard deviation."""
        if self.key is None:
            return jnp.zeros(shape, dtype)
        return jax.random.normal(next(self.keys), shape, dtype) * deviation

    def uniform(self, shape: Sequence[int], low: float | jax.Array, high: float | jax.Array) -> jax.Array:
        """Return float32 numbers between `low` and `high`."""
        if self.key is None:
            return jnp.zeros(shape)
        return jax.random.uniform(next(self.keys), shape, minval=low, maxval=high)

    def split(self, num: int) -> jax.Array | None:
        """Return keys [num] for as many other `Draws`; None without a key."""
        return None if self.key is None else jax.random.split(next(self.keys), num)


def _list_keys(key: jax.Array) -> Iterator[jax.Array]:
    """Yield `jax.random.fold_in(key, number)` for the numbers from 0 on."""
    for first in count(0, KEYS_AT_ONCE):
        yield from jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(first, first + KEYS_AT_ONCE))
