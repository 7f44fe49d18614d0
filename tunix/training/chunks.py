"""Chunks of positions: logits [B, T, V] never exist, only those of one chunk at a time."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

# Rows of logits that a device has at one time where the size of a chunk is `auto`. Each chunk reads the table [V, D],
# and reads and writes the sum of its gradient: with 4096 rows that takes an eighth of the time of the chunk's products
# on an H100. More rows save little more, and take more memory.
ROWS = 4096


def count_chunk_positions(chunk_size: int | str, num_sequences: int, length: int) -> int:
    """Return of how many positions of each sequence a device has logits at one time.

    `chunk_size` is that number, or `auto`: then a device with `length` tokens of each of `num_sequences` sequences has
    at most `ROWS` rows of logits at one time, and at most half of its rows.
    """
    if chunk_size != "auto":
        return min(int(chunk_size), length)
    # Two at least: with one chunk the logits of all rows would exist. Two sequences of 6,000 tokens make 3 chunks, each
    # of 2,000 positions.
    num_chunks = max(2, math.ceil(num_sequences * length / ROWS))
    return math.ceil(length / num_chunks)


def make_splitter(hidden: jax.Array, chunk_size: int | str) -> Callable[[jax.Array], jax.Array]:
    """Return a function that splits arrays [B, T, ...] into chunks [chunks, B, positions, ...].

    `hidden` is one of these arrays; its sharding says which rows and positions a device has. Of a sequence that lies on
    several devices, each device puts `positions` / devices of its own into every chunk:

        two devices   0 1 2 3 | 4 5 6 7     two chunks    0 1 | 4 5   and   2 3 | 6 7

    Zeros fill each device's last chunk up.
    """
    num_sequences, own_length = jax.typeof(hidden).sharding.shard_shape(hidden.shape)[:2]
    size = count_chunk_positions(chunk_size, num_sequences, own_length)
    num_chunks = math.ceil(own_length / size)

    def split(x: jax.Array) -> jax.Array:
        if num_chunks == 1:
            return x[None]
        # [B, T] -> [B, devices, own tokens] -> [B, devices, chunks, size] -> [chunks, B, devices x size]. The split
        # dimension stays apart, or the outer one of two that are joined: each device reshapes what it has.
        rows, tokens, *others = jax.typeof(x).sharding.spec
        shape = x.shape[0], x.shape[1] // own_length, own_length, *x.shape[2:]
        x = jax.lax.reshape(x, shape, out_sharding=PartitionSpec(rows, tokens, None, *others))
        if missing := num_chunks * size - own_length:
            x = jnp.pad(x, [(0, missing if dim == 2 else 0) for dim in range(x.ndim)])
        shape = *shape[:2], num_chunks, size, *shape[3:]
        x = jax.lax.reshape(x, shape, out_sharding=PartitionSpec(rows, tokens, None, None, *others))
        shape = num_chunks, shape[0], shape[1] * size, *shape[4:]
        return jax.lax.reshape(jnp.moveaxis(x, 2, 0), shape, out_sharding=PartitionSpec(None, rows, tokens, *others))

    return split


def join_chunks(x: jax.Array, length: int) -> jax.Array:
    """Return chunks [chunks, B, positions] as [B, T] with T = `length`: the inverse of the split."""
    if len(x) == 1:
        return x[0]
    # The steps of the split backwards, without the zeros that filled the last chunk up.
    _, rows, tokens = jax.typeof(x).sharding.spec
    num_chunks, num_rows, _ = x.shape
    size = jax.typeof(x).sharding.shard_shape(x.shape)[2]
    parts = x.shape[2] // size
    x = jax.lax.reshape(x, (num_chunks, num_rows, parts, size), out_sharding=PartitionSpec(None, rows, tokens, None))
    shape = num_rows, parts, num_chunks * size
    x = jax.lax.reshape(jnp.moveaxis(x, 0, 2), shape, out_sharding=PartitionSpec(rows, tokens, None))
    x = x[:, :, : length // parts]
    return jax.lax.reshape(x, (num_rows, length), out_sharding=PartitionSpec(rows, tokens))
