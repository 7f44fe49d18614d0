"""Random choices of dropout, the same for a row of a microbatch wherever the row is computed."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p


class Noise(NamedTuple):
    """Source of the random choices of one layer, for some rows of a microbatch."""

    key: jax.Array  # of the microbatch and the layer
    rows: jax.Array | None = None  # [B] int32: numbers of these rows in the microbatch; None where all are here

    def draw(self, place: int, share: float, shape: tuple[int, ...]) -> jax.Array:
        """Return [B, ...] bool, true for this share of the entries; `place` tells apart the draws of a layer."""
        key = jax.random.fold_in(self.key, place)
        if self.rows is None:
            return jax.random.bernoulli(key, share, shape)
        return _bernoulli_of_rows(key, share, shape, self.rows)


def _bernoulli_of_rows(key: jax.Array, share: float, shape: tuple[int, ...], rows: jax.Array) -> jax.Array:
    """Return the rows with these numbers of `jax.random.bernoulli(key, share, [all rows, ...])`.

    JAX draws entry n of an array as threefry(key, n), where n is a 64-bit number. So the entries of some rows can be
    drawn alone. Parts of a batch on stages need that: each stage draws for its part, and no noise travels.
    """
    size = math.prod(shape[1:])
    assert size < 2**32
    entries = jnp.arange(size, dtype=jnp.uint32).reshape(1, *shape[1:])
    high, low = (each.reshape(-1, *[1] * (len(shape) - 1)) for each in _multiply(rows.astype(jnp.uint32), size))
    low = low + entries
    high = high + (low < entries).astype(jnp.uint32)  # a sum that is too large for 32 bits is smaller than a part of it
    first, second = jax.random.key_data(key)
    bits_high, bits_low = threefry2x32_p.bind(*(jnp.broadcast_to(word, shape) for word in (first, second)), high, low)
    # 23 random bits behind the exponent of 1.0 are a number from 1 to 2.
    ones = ((bits_high ^ bits_low) >> 9) | jnp.uint32(0x3F800000)
    return jax.lax.bitcast_convert_type(ones, jnp.float32) - 1 < share


def _multiply(rows: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return high and low 32 bits of the products of uint32 numbers and a size below 2^32.

    JAX has no 64-bit numbers here, so the product is one by hand, with digits of 16 bits:

        row x size = high high 2^32 + (high low + low high) 2^16 + low low
    """
    half = jnp.uint32(0xFFFF)
    row_high, row_low = rows >> 16, rows & half
    size_high, size_low = jnp.uint32(size >> 16), jnp.uint32(size & 0xFFFF)
    middle = row_high * size_low + ((row_low * size_low) >> 16)
    crossed = row_low * size_high + (middle & half)
    return row_high * size_high + (middle >> 16) + (crossed >> 16), rows * jnp.uint32(size & 0xFFFFFFFF)
