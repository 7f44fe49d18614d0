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
block of keys at a time. Products take 16-bit operands and add up in float32, and the softmax is float32.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tunix.models.chips import row_of_chip
from tunix.models.flash_blocks import BLOCKS, Block, Blocks
from tunix.models.seen import first_keys
from tunix.models.soft_cap import soft_cap

LOG2_E = math.log2(math.e)  # the chip's fast exponential is 2 ** x
MASKED = -1e30  # a score. It is finite, because a block may have no key at all for some of its queries
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
    first, end = _ranges(segments, seen.window)
    out, log_sums = _attend(pad(q), pad(k), pad(v), first, end, blocks[padded_dim], cap, interpret)
    out = out[:, :length, :, : v.shape[3]]
    return (out, jnp.swapaxes(log_sums, 1, 2)[:, :length] / LOG2_E) if with_sums else out


def _ranges(segments: jax.Array, window: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first key of each query, and the query behind the last one that sees each key: [B, T] int32."""
    length = segments.shape[1]
    places = jnp.arange(length, dtype=jnp.int32)
    changes = segments[:, 1:] != segments[:, :-1]
    edge = jnp.ones_like(changes[:, :1])
    behind = jnp.where(jnp.concatenate([changes, edge], 1), places + 1, length)
    behind = jax.lax.cummin(behind, axis=1, reverse=True)
    return first_keys(segments, window), jnp.minimum(behind, places + window)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(q, k, v, first, end, blocks, cap, interpret):
    return _forward(q, k, v, first, blocks.forward, cap, interpret)


def _attend_forward(q, k, v, first, end, blocks, cap, interpret):
    # Both have the name by which remat policies keep them: without log_sums the forward kernel would run again.
    out, log_sums = (checkpoint_name(x, "attention") for x in _forward(q, k, v, first, blocks.forward, cap, interpret))
    return (out, log_sums), (q, k, v, first, end, out, log_sums)


def _attend_backward(blocks, cap, interpret, kept, gradients):
    q, k, v, first, end, out, log_sums = kept
    d_out, d_log_sums = gradients
    # The gradient of the scores is p * (dp - delta), where delta = sum(dp * p) = sum(d_out * out) of each query. The
    # gradient of the log of the sum is p, times what the caller makes of it: it joins delta.
    delta = jnp.einsum("btnh,btnh->bnt", out, d_out, preferred_element_type=jnp.float32)
    delta -= d_log_sums * LOG2_E  # log2 of the sums
    dq = _queries_gradient(q, k, v, first, log_sums, delta, d_out, blocks.d_queries, cap, interpret)
    dk, dv = _keys_gradient(q, k, v, end, log_sums, delta, d_out, blocks.d_keys, cap, interpret)
    return dq, dk, dv, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(q, k, v, first, block, cap, interpret):
    """Return outputs [B, T, N, H], and log2 of the sums of the softmax [B, N, T] float32."""
    batch, length, heads, _ = q.shape
    queries, keys, rows, sums = _specs_of_queries(q, k, block)
    return _call(
        partial(_forward_kernel, block_k=block.keys, cap=cap),
        (q, k, v, first),
        out_shape=[_like(q, q.shape), _like(q, (batch, heads, length), jnp.float32)],
        in_specs=[queries, keys, keys, rows],
        out_specs=[queries, sums],
        # A program for each head, block of queries and row. All keys of the row are in reach; it loads those it needs.
        grid=(heads, length // block.queries, batch),
        block=block,
        interpret=interpret,
        name="attention_forward",
    )


def _queries_gradient(q, k, v, first, log_sums, delta, d_out, block, cap, interpret):
    batch, length, heads, _ = q.shape
    queries, keys, rows, sums = _specs_of_queries(q, k, block)
    return _call(
        partial(_queries_kernel, block_k=block.keys, cap=cap),
        (q, k, v, first, log_sums, delta, d_out),
        out_shape=_like(q, q.shape),
        in_specs=[queries, keys, keys, rows, sums, sums, queries],
        out_specs=queries,
        grid=(heads, length // block.queries, batch),
        block=block,
        interpret=interpret,
        name="attention_d_queries",
    )


def _keys_gradient(q, k, v, end, log_sums, delta, d_out, block, cap, interpret):
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # A program for each key/value head: it goes through the query heads that share it, and adds their gradients up.
    keys = pl.BlockSpec((None, block.keys, None, dim), lambda head, n, row: (row, n, head, 0))
    queries = pl.BlockSpec((None, length, group, dim), lambda head, n, row: (row, 0, head, 0))
    rows = pl.BlockSpec((None, block.keys), lambda head, n, row: (row, n))
    sums = pl.BlockSpec((None, group, length), lambda head, n, row: (row, head, 0))
    return _call(
        partial(_keys_kernel, block_q=block.queries, cap=cap),
        (q, k, v, end, log_sums, delta, d_out),
        out_shape=[_like(k, k.shape), _like(v, v.shape)],
        in_specs=[queries, keys, keys, rows, sums, sums, queries],
        out_specs=[keys, keys],
        grid=(kv_heads, length // block.keys, batch),
        block=block,
        interpret=interpret,
        name="attention_d_keys",
    )


def _specs_of_queries(q, k, block):
    """Return what a program for one block of queries sees of queries, of keys, of [B, T] and of [B, N, T]."""
    _, length, heads, dim = q.shape
    group = heads // k.shape[2]
    return (
        pl.BlockSpec((None, block.queries, None, dim), lambda head, n, row: (row, n, head, 0)),
        pl.BlockSpec((None, length, None, dim), lambda head, n, row: (row, 0, head // group, 0)),
        pl.BlockSpec((None, block.queries), lambda head, n, row: (row, n)),
        pl.BlockSpec((None, None, block.queries), lambda head, n, row: (row, head, n)),
    )


def _call(kernel, arrays, *, block: Block, **params) -> Any:
    run = triton.CompilerParams(num_warps=block.warps, num_stages=block.stages)
    return pl.pallas_call(kernel, compiler_params=run, **params)(*arrays)


def _like(x: jax.Array, shape, dtype=None) -> jax.ShapeDtypeStruct:
    """Return the shape of a result that varies over the mesh as `x` does, inside a shard_map."""
    return jax.ShapeDtypeStruct(shape, dtype or x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _over_blocks(body, carry, low, full, last, high):
    """Run `body` over the blocks low ... high - 1. Those in full ... last - 1 need no mask."""
    for start, stop, masked in ((low, full, True), (full, last, False), (last, high, True)):
        carry = jax.lax.fori_loop(start, stop, partial(body, masked=masked), carry)
    return carry


def _over_keys(body, carry, first, begin, block_q, block_k):
    """Run `body` over the blocks of keys that the block of queries at `begin` sees.

    block of keys    0   1   2   3   4   5   6        the first keys of the queries lie in blocks 1 and 2, the queries
                         m   m   #   #   m            themselves in block 5; m: masked, #: each query sees each key
                         low     full    last         high is 6
    """
    low, high = jnp.min(first) // block_k, pl.cdiv(begin + block_q, block_k)
    last = begin // block_k
    full = jnp.minimum(pl.cdiv(jnp.max(first), block_k), last)
    return _over_blocks(body, carry, low, full, last, high)


def _through_cap(gradient: jax.Array, capped: jax.Array, cap: float | None) -> jax.Array:
    """Return the gradient of scores, out of that of the capped scores."""
    return gradient if cap is None else gradient * (1 - (capped / cap) ** 2)


def _forward_kernel(q_ref, k_ref, v_ref, first_ref, out_ref, log_sums_ref, *, block_k, cap):
    block_q, dim = q_ref.shape
    begin = pl.program_id(1) * block_q
    q, first, rows = q_ref[...], first_ref[...], begin + jnp.arange(block_q)

    def body(n, carry, *, masked):
        out, top, total = carry  # outputs and sums so far, relative to the largest score so far
        here = pl.ds(n * block_k, block_k)
        scores = soft_cap(triton.dot(q, k_ref[here, :].T), cap) * LOG2_E
        if masked:
            keys = n * block_k + jnp.arange(block_k)
            scores = jnp.where((keys >= first[:, None]) & (keys <= rows[:, None]), scores, MASKED)
        # Softmax block by block: where a larger score comes, what was added up before shrinks to the new scale.
        higher = jnp.maximum(top, scores.max(1))
        p, scale = jnp.exp2(scores - higher[:, None]), jnp.exp2(top - higher)
        v = v_ref[here, :]
        return out * scale[:, None] + triton.dot(p.astype(v.dtype), v), higher, total * scale + p.sum(1)

    nothing = jnp.zeros((block_q, dim), jnp.float32), jnp.full(block_q, -jnp.inf), jnp.zeros(block_q, jnp.float32)
    out, top, total = _over_keys(body, nothing, first, begin, block_q, block_k)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    log_sums_ref[...] = top + jnp.log2(total)


def _queries_kernel(q_ref, k_ref, v_ref, first_ref, log_sums_ref, delta_ref, d_out_ref, dq_ref, *, block_k, cap):
    block_q, dim = q_ref.shape
    begin = pl.program_id(1) * block_q
    q, first, rows = q_ref[...], first_ref[...], begin + jnp.arange(block_q)
    log_sums, delta, d_out = log_sums_ref[...], delta_ref[...], d_out_ref[...]

    def body(n, dq, *, masked):
        here = pl.ds(n * block_k, block_k)
        k = k_ref[here, :]
        scores = soft_cap(triton.dot(q, k.T), cap)
        p = jnp.exp2(scores * LOG2_E - log_sums[:, None])  # the softmax once more, out of the sums that were kept
        if masked:
            keys = n * block_k + jnp.arange(block_k)
            p = jnp.where((keys >= first[:, None]) & (keys <= rows[:, None]), p, 0)
        d_scores = p * (triton.dot(d_out, v_ref[here, :].T) - delta[:, None])
        d_scores = _through_cap(d_scores, scores, cap)
        return dq + triton.dot(d_scores.astype(k.dtype), k)

    dq = _over_keys(body, jnp.zeros((block_q, dim), jnp.float32), first, begin, block_q, block_k)
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _keys_kernel(q_ref, k_ref, v_ref, end_ref, log_sums_ref, delta_ref, d_out_ref, dk_ref, dv_ref, *, block_q, cap):
    """Gradients of a block of keys and values of one head; the query heads that share it come one after the other."""
    block_k, dim = k_ref.shape
    begin = pl.program_id(1) * block_k
    k, v, end, keys = k_ref[...], v_ref[...], end_ref[...], begin + jnp.arange(block_k)

    def body(n, carry, *, masked, head):
        dk, dv = carry
        here = pl.ds(n * block_q, block_q)
        q, d_out = q_ref[here, head, :], d_out_ref[here, head, :]
        scores = soft_cap(triton.dot(k, q.T), cap)  # [keys, queries]
        p = jnp.exp2(scores * LOG2_E - log_sums_ref[head, here][None, :])
        if masked:
            rows = n * block_q + jnp.arange(block_q)
            p = jnp.where((rows >= keys[:, None]) & (rows < end[:, None]), p, 0)
        dv += triton.dot(p.astype(d_out.dtype), d_out)
        d_scores = p * (triton.dot(v, d_out.T) - delta_ref[head, here][None, :])
        d_scores = _through_cap(d_scores, scores, cap)
        return dk + triton.dot(d_scores.astype(q.dtype), q), dv

    # The queries that see these keys: from the keys' own places on (masked: keys after a query), then those that see
    # all of them, and at last those after the end of a document or of a window (masked again).
    low, high = begin // block_q, pl.cdiv(jnp.max(end), block_q)
    full = jnp.minimum(pl.cdiv(begin + block_k, block_q), high)
    last = jnp.maximum(jnp.min(end) // block_q, full)

    def one_head(head, carry):
        return _over_blocks(partial(body, head=head), carry, low, full, last, high)

    nothing = jnp.zeros((block_k, dim), jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_ref.shape[1], one_head, (nothing, nothing))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
