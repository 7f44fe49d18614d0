"""Kernels of attention on ranges: the forward pass, the gradient of queries, and that of keys and values."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tunix.models.flash_blocks import Block
from tunix.models.soft_cap import soft_cap

LOG2_E = math.log2(math.e)  # the chip's fast exponential is 2 ** x
MASKED = -1e30  # a score. It is finite, because a block may have no key at all for some of its queries


class Keys(NamedTuple):
    """Keys of one call of the kernels, relative to its queries, and its results."""

    # All keys are tokens before the queries, and there are so many; those behind them fill the array up. A query may
    # see none of them. None: keys and queries are the same tokens.
    num_before: int | None = None
    dtype: Any = None  # of the results; None is that of the queries
    suffix: str = ""  # of the names of the kernels


WHOLE = Keys()  # of whole sequences


def forward(q, k, v, first, block, cap, interpret, of: Keys = WHOLE):
    """Return outputs [B, T, N, H], and log2 of the sums of the softmax [B, N, T] float32."""
    batch, length, heads, _ = q.shape
    queries, keys, rows, sums = _specs_of_queries(q, k, block)
    return _call(
        partial(_forward_kernel, block_k=block.keys, cap=cap, num_before=of.num_before),
        (q, k, v, first),
        out_shape=[_like(q, q.shape, of.dtype), _like(q, (batch, heads, length), jnp.float32)],
        in_specs=[queries, keys, keys, rows],
        out_specs=[queries, sums],
        # A program for each head, block of queries and row. All keys of the row are in reach; it loads those it needs.
        grid=(heads, length // block.queries, batch),
        block=block,
        interpret=interpret,
        name=f"attention_forward{of.suffix}",
    )


def queries_gradient(q, k, v, first, log_sums, delta, d_out, block, cap, interpret, of: Keys = WHOLE):
    """Return the gradient of the queries, of the shape of q; log_sums and delta are [B, N, T]."""
    batch, length, heads, _ = q.shape
    queries, keys, rows, sums = _specs_of_queries(q, k, block)
    return _call(
        partial(_queries_kernel, block_k=block.keys, cap=cap, num_before=of.num_before),
        (q, k, v, first, log_sums, delta, d_out),
        out_shape=_like(q, q.shape, of.dtype),
        in_specs=[queries, keys, keys, rows, sums, sums, queries],
        out_specs=queries,
        grid=(heads, length // block.queries, batch),
        block=block,
        interpret=interpret,
        name=f"attention_d_queries{of.suffix}",
    )


def keys_gradient(q, k, v, end, log_sums, delta, d_out, block, cap, interpret, of: Keys = WHOLE):
    """Return the gradients of keys and values; `end` [B, T] are the places behind the last queries that see them."""
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # A program for each key/value head: it goes through the query heads that share it, and adds their gradients up.
    keys = pl.BlockSpec((None, block.keys, None, dim), lambda head, n, row: (row, n, head, 0))
    queries = pl.BlockSpec((None, length, group, dim), lambda head, n, row: (row, 0, head, 0))
    rows = pl.BlockSpec((None, block.keys), lambda head, n, row: (row, n))
    sums = pl.BlockSpec((None, group, length), lambda head, n, row: (row, head, 0))
    return _call(
        partial(_keys_kernel, block_q=block.queries, cap=cap, are_before=of.num_before is not None),
        (q, k, v, end, log_sums, delta, d_out),
        out_shape=[_like(k, k.shape, of.dtype), _like(v, v.shape, of.dtype)],
        in_specs=[queries, keys, keys, rows, sums, sums, queries],
        out_specs=[keys, keys],
        grid=(kv_heads, length // block.keys, batch),
        block=block,
        interpret=interpret,
        name=f"attention_d_keys{of.suffix}",
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


def _over_keys(body, carry, first, begin, block_q, block_k, num_before):
    """Run `body` over the blocks of keys that the block of queries at `begin` sees.

    block of keys    0   1   2   3   4   5   6        the first keys of the queries lie in blocks 1 and 2, the queries
                         m   m   #   #   m            themselves in block 5; m: masked, #: each query sees each key
                         low     full    last         high is 6

    Keys before all queries end with the block in which the last of them lies.
    """
    low, end = jnp.min(first) // block_k, begin + block_q if num_before is None else num_before
    last, high = (begin if num_before is None else num_before) // block_k, pl.cdiv(end, block_k)
    full = jnp.minimum(pl.cdiv(jnp.max(first), block_k), last)
    return _over_blocks(body, carry, low, full, last, high)


def _sees(first, rows, keys, num_before):
    """Return which keys the queries at `rows` see, [queries, keys] bool."""
    upper = keys <= rows[:, None] if num_before is None else (keys < num_before)[None]
    return (keys >= first[:, None]) & upper


def _through_cap(gradient: jax.Array, capped: jax.Array, cap: float | None) -> jax.Array:
    """Return the gradient of scores, out of that of the capped scores."""
    return gradient if cap is None else gradient * (1 - (capped / cap) ** 2)


def _forward_kernel(q_ref, k_ref, v_ref, first_ref, out_ref, log_sums_ref, *, block_k, cap, num_before):
    block_q, dim = q_ref.shape
    begin = pl.program_id(1) * block_q
    q, first, rows = q_ref[...], first_ref[...], begin + jnp.arange(block_q)

    def body(n, carry, *, masked):
        out, top, total = carry  # outputs and sums so far, relative to the largest score so far
        here = pl.ds(n * block_k, block_k)
        scores = soft_cap(triton.dot(q, k_ref[here, :].T), cap) * LOG2_E
        if masked:
            keys = n * block_k + jnp.arange(block_k)
            scores = jnp.where(_sees(first, rows, keys, num_before), scores, MASKED)
        # Softmax block by block: where a larger score comes, what was added up before shrinks to the new scale.
        higher = jnp.maximum(top, scores.max(1))
        p, scale = jnp.exp2(scores - higher[:, None]), jnp.exp2(top - higher)
        v = v_ref[here, :]
        return out * scale[:, None] + triton.dot(p.astype(v.dtype), v), higher, total * scale + p.sum(1)

    nothing = jnp.zeros((block_q, dim), jnp.float32), jnp.full(block_q, -jnp.inf), jnp.zeros(block_q, jnp.float32)
    out, top, total = _over_keys(body, nothing, first, begin, block_q, block_k, num_before)
    if num_before is not None:  # no block of keys may be in reach
        top, total = jnp.where(total == 0, MASKED, top), jnp.where(total == 0, 1, total)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    log_sums_ref[...] = top + jnp.log2(total)


def _queries_kernel(
    q_ref, k_ref, v_ref, first_ref, log_sums_ref, delta_ref, d_out_ref, dq_ref, *, block_k, cap, num_before
):
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
            p = jnp.where(_sees(first, rows, keys, num_before), p, 0)
        d_scores = p * (triton.dot(d_out, v_ref[here, :].T) - delta[:, None])
        d_scores = _through_cap(d_scores, scores, cap)
        return dq + triton.dot(d_scores.astype(k.dtype), k)

    dq = _over_keys(body, jnp.zeros((block_q, dim), jnp.float32), first, begin, block_q, block_k, num_before)
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _keys_kernel(
    q_ref, k_ref, v_ref, end_ref, log_sums_ref, delta_ref, d_out_ref, dk_ref, dv_ref, *, block_q, cap, are_before
):
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
            sees = rows < end[:, None]
            p = jnp.where(sees if are_before else sees & (rows >= keys[:, None]), p, 0)
        dv += triton.dot(p.astype(d_out.dtype), d_out)
        d_scores = p * (triton.dot(v, d_out.T) - delta_ref[head, here][None, :])
        d_scores = _through_cap(d_scores, scores, cap)
        return dk + triton.dot(d_scores.astype(q.dtype), q), dv

    # The queries that see these keys: from the keys' own places on (masked: keys after a query), then those that see
    # all of them, and at last those after the end of a document or of a window (masked again). All queries come after
    # keys before them.
    low, high = 0 if are_before else begin // block_q, pl.cdiv(jnp.max(end), block_q)
    full = 0 if are_before else jnp.minimum(pl.cdiv(begin + block_k, block_q), high)
    last = jnp.maximum(jnp.min(end) // block_q, full)

    def one_head(head, carry):
        return _over_blocks(partial(body, head=head), carry, low, full, last, high)

    nothing = jnp.zeros((block_k, dim), jnp.float32)
    dk, dv = jax.lax.fori_loop(0, q_ref.shape[1], one_head, (nothing, nothing))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
