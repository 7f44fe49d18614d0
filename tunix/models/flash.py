"""Attention on ranges of keys, for GPUs: scores stay on the chip, and blocks of keys that no query sees are skipped.

Query i of a row sees the keys first(i) ... i, as `Seen` says: from the first token of its document, or of its window.
Documents and windows are one number for each query, and data. `first` never falls along a row, because a document is
one run of it. So the keys of a block of queries are one range of blocks, and the queries of a block of keys are too:

                keys  0   1   2   3   4   5          two documents, blocks 0-2 and 3-5
    queries 0         d                              d: computed, with a mask (an end of the range lies in the block)
            1         #   d                          #: computed, no mask needed
            2         #   #   d                      empty: skipped, forward and backward
            3                     d
            4                     #   d
            5                     #   #   d

The algorithm is FlashAttention-2 (Dao 2023, arXiv:2307.08691), written in Pallas and lowered by Triton. There are three
kernels: the forward pass; the gradient of queries, a block of queries at a time; the gradients of keys and values, a
block of keys at a time (flash_kernels.py). Products take 16-bit operands and add up in float32, and the softmax is
float32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tunix.models.chips import row_of_chip
from tunix.models.flash_blocks import BLOCKS, Blocks
from tunix.models.flash_kernels import LOG2_E, forward, keys_gradient, queries_gradient
from tunix.models.seen import first_keys

MULTIPLE = 128  # rows are filled up to a multiple of all sizes of blocks


def flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: Any,
    blocks: dict[int, Blocks] | None = None,
    cap: float | None = None,
    with_sums: bool = False,
) -> Any:
    """Attention of [B, T, N, H] queries, which come scaled, over [B, T, K, H] keys and values of the same rows.

    With a `cap`, scores s become cap * tanh(s / cap) before the softmax. Values may be narrower than keys. With
    `with_sums` the result is a pair with the logs of the sums of exp(score), [B, T, N] float32.
    Each segment of `seen` must be one run of its row. T is filled up to a multiple of 128 and H to the next size that
    `BLOCKS` has. With `blocks` given, the kernels are interpreted: slow, on any device, for tests.
    """
    interpret = blocks is not None
    if blocks is None:
        blocks = row_of_chip(BLOCKS, jax.sharding.get_abstract_mesh().abstract_device.device_kind)
    assert blocks is not None
    length, dim = q.shape[1], q.shape[3]
    padded_dim = min(size for size in blocks if size >= dim)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, -length % MULTIPLE), (0, 0), (0, padded_dim - x.shape[3])])

    # Tokens that fill a row up are a segment of their own.
    segments = jnp.pad(seen.q_segments, [(0, 0), (0, -length % MULTIPLE)], constant_values=-1)
    first, end = first_keys(segments, seen.window), last_queries(segments, seen.window)
    out, log_sums = _attend(pad(q), pad(k), pad(v), first, end, blocks[padded_dim], cap, interpret)
    out = out[:, :length, :, : v.shape[3]]
    return (out, jnp.swapaxes(log_sums, 1, 2)[:, :length] / LOG2_E) if with_sums else out


def last_queries(segments: jax.Array, window: jax.Array | int) -> jax.Array:
    """Return the place behind the last query that sees each key, [B, T] int32."""
    length = segments.shape[1]
    places = jnp.arange(length, dtype=jnp.int32)
    changes = segments[:, 1:] != segments[:, :-1]
    edge = jnp.ones_like(changes[:, :1])
    behind = jnp.where(jnp.concatenate([changes, edge], 1), places + 1, length)
    behind = jax.lax.cummin(behind, axis=1, reverse=True)
    return jnp.minimum(behind, places + window)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(q, k, v, first, end, blocks, cap, interpret):
    return forward(q, k, v, first, blocks.forward, cap, interpret)


def _attend_forward(q, k, v, first, end, blocks, cap, interpret):
    # Both have the name by which remat policies keep them: without log_sums the forward kernel would run again.
    out, log_sums = (checkpoint_name(x, "attention") for x in forward(q, k, v, first, blocks.forward, cap, interpret))
    return (out, log_sums), (q, k, v, first, end, out, log_sums)


def _attend_backward(blocks, cap, interpret, kept, gradients):
    q, k, v, first, end, out, log_sums = kept
    d_out, d_log_sums = gradients
    # The gradient of the scores is p * (dp - delta), where delta = sum(dp * p) = sum(d_out * out) of each query. The
    # gradient of the log of the sum is p, times what the caller makes of it: it joins delta.
    delta = jnp.einsum("btnh,btnh->bnt", out, d_out, preferred_element_type=jnp.float32)
    delta -= d_log_sums * LOG2_E  # log2 of the sums
    dq = queries_gradient(q, k, v, first, log_sums, delta, d_out, blocks.d_queries, cap, interpret)
    dk, dv = keys_gradient(q, k, v, end, log_sums, delta, d_out, blocks.d_keys, cap, interpret)
    return dq, dk, dv, None, None


_attend.defvjp(_attend_forward, _attend_backward)
