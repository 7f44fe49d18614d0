"""Chunks of positions: logits [B, T, V] never exist, only those of one chunk at a time."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Rows of logits that a device has at one time where the size of a chunk is `auto`. Each chunk reads the table [V, D],
# and reads and writes the sum of its gradient: with 4096 rows that takes an eighth of the time of the chunk's products
# on an H100. More rows save little more, and take more memory.
ROWS = 4096


def chunk_positions(chunk_size: int | str, num_sequences: int, length: int) -> int:
    """Return of how many positions of each sequence logits exist at one time.

    `chunk_size` is that number, or `auto`: then a device with `num_sequences` sequences has at most `ROWS` rows of
    logits at one time, and at most half of its rows.
    """
    if chunk_size != "auto":
        return min(int(chunk_size), length)
    num_chunks = max(2, math.ceil(num_sequences * length / ROWS))
    return math.ceil(length / num_chunks)


def chunk_splitter(hidden: jax.Array, chunk_size: int | str) -> Callable[[jax.Array], jax.Array]:
    """Return a function that splits arrays [B, T, ...] into chunks [chunks, B, positions, ...].

    `hidden` is one of these arrays; its sharding says how many rows a device has. Zeros fill the last chunk up.
    """
    num_sequences, length = jax.typeof(hidden).sharding.shard_shape(hidden.shape)[:2]
    size = chunk_positions(chunk_size, num_sequences, length)
    num_chunks = math.ceil(length / size)

    def split(x: jax.Array) -> jax.Array:
        if num_chunks == 1:  # where B is 1 too, a reshape would not know which of the dimensions the mesh splits
            return x[None]
        if missing := num_chunks * size - length:
            x = jnp.pad(x, [(0, missing if dim == 1 else 0) for dim in range(x.ndim)])
        return x.reshape(x.shape[0], num_chunks, size, *x.shape[2:]).swapaxes(0, 1)

    return split


def join_chunks(x: jax.Array, length: int) -> jax.Array:
    """[chunks, B, positions] -> [B, T] with T = `length`, the inverse of the split."""
    if len(x) == 1:
        return x[0]
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)[:, :length]
