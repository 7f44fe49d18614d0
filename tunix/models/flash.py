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

from tunix.models.chips import find_row_in_use
from tunix.models.flash_blocks import BLOCKS, Blocks, padded_dim
from tunix.models.flash_kernels import (
    LOG2_E,
    BackwardInputs,
    Inputs,
    Variant,
    forward,
    keys_gradient,
    queries_gradient,
)
from tunix.models.seen import first_keys, last_queries

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
    rows, interpret = blocks or find_row_in_use(BLOCKS), blocks is not None
    length, dim = q.shape[1], padded_dim(rows, q.shape[3])
    # Tokens that fill a row up are a segment of their own: no token of the row sees them.
    segments = jnp.pad(seen.q_segments, [(0, 0), (0, -length % MULTIPLE)], constant_values=-1)
    first, end = first_keys(segments, seen.window), last_queries(segments, seen.window)
    inputs = Inputs(pad_heads(q, dim), pad_heads(k, dim), pad_heads(v, dim), first, end)
    out, log_sums = _attend(inputs, Variant(rows[dim], cap, interpret))
    # The kernels compute exp2, which is faster, so their sums are log2: nats are log2 / log2(e).
    out = out[:, :length, :, : v.shape[3]]
    return (out, jnp.swapaxes(log_sums, 1, 2)[:, :length] / LOG2_E) if with_sums else out


def pad_heads(x: jax.Array, dim: int) -> jax.Array:
    """Fill [B, T, heads, H] up to a multiple of all sizes of blocks, and to this head dim."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % MULTIPLE), (0, 0), (0, dim - x.shape[3])])


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(inputs: Inputs, variant: Variant) -> Any:
    return forward(inputs, variant)


def _attend_forward(inputs, variant):
    # Both have the name by which remat policies keep them: without log_sums the forward kernel would run again.
    out, log_sums = (checkpoint_name(x, "attention") for x in forward(inputs, variant))
    return (out, log_sums), (inputs, out, log_sums)


def _attend_backward(variant, residuals, gradients):
    inputs, out, log_sums = residuals
    backward = BackwardInputs.from_gradients(out, log_sums, *gradients)
    dq = queries_gradient(inputs, backward, variant)
    dk, dv = keys_gradient(inputs, backward, variant)
    return (Inputs(dq, dk, dv, first=None, end=None),)  # places are whole numbers, which have no gradient


_attend.defvjp(_attend_forward, _attend_backward)
