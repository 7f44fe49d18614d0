"""Attention on ranges of keys, for GPUs: scores stay on the chip, and blocks of keys that no query sees are skipped.

Query i of a row sees the keys first(i) ... i, as `MaskRule` says: from the first token of its document or window.
Documents and windows are one number for each query, and data. `first` never falls along a row, because a document is
one run of it. So the keys of a block of queries are one range of blocks, and the queries of a block of keys are too:

                keys  0   1   2   3   4   5          two documents, blocks 0-2 and 3-5
    queries 0         d                              d: computed, with a mask (an end of the range lies in the block)
            1         #   d                          #: computed, no mask needed
            2         #   #   d                      empty: skipped, forward and backward
            3                     d
            4                     #   d
            5                     #   #   d

Tokens of an image also see the later ones of their image (`MaskRule.q_ends`). Then two more numbers bound the range:
the end of the keys of each query, and the first query that sees each key. They do not fall along a row either.

The algorithm is FlashAttention-2 (Dao 2023, arXiv:2307.08691), written in Pallas and lowered by Triton. There are three
kernels: the forward pass; the gradient of queries, a block of queries at a time; the gradients of keys and values, a
block of keys at a time. Products take 16-bit operands and add up in float32, and the softmax is float32.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tunix.models.attention_mask import MASKED, first_keys, first_queries, last_queries
from tunix.models.kernels import FLASH_BLOCKS, FlashBlocks, find_row_in_use, padded_dim
from tunix.models.layers import soft_cap


def call_kernel(kernel: Any, arrays: tuple[Any, ...], *, block: Any, **params: Any) -> Any:
    """Return what a kernel computes of arrays, or of trees of them; its `block` says how many threads run a program."""
    run = triton.CompilerParams(num_warps=block.warps, num_stages=block.stages)
    return pl.pallas_call(kernel, compiler_params=run, **params)(*arrays)


def shape_like(x: jax.Array, shape: tuple[int, ...], dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Return the shape of a result that varies over the mesh as `x` does, inside a shard_map."""
    return jax.ShapeDtypeStruct(shape, dtype or x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


# Kernels of attention on ranges: the forward pass, the gradient of queries, and that of keys and values.
#
# Each kernel is a function of refs, which a program reads with `ref[...]`. `Inputs` and `BackwardInputs` hold arrays
# outside of a kernel, and the refs to their blocks inside of it: Pallas keeps the structure of its arguments.

LOG2_E = math.log2(math.e)  # the chip's fast exponential is 2 ** x


class Inputs(NamedTuple):
    """Queries, keys, values, and the ranges that say which keys a query sees. A kernel gets one of the two ranges."""

    q: Any  # [B, T, N, H], scaled
    k: Any  # [B, T, K, H]
    v: Any  # [B, T, K, H]
    first: Any  # [B, T] int32: position of the first key that each query sees
    end: Any  # [B, T] int32: position behind the last query that sees each key
    # Of rows with images, where a query may see keys behind its own; else None:
    q_end: Any = None  # [B, T] int32: position behind the last key that each query sees
    k_first: Any = None  # [B, T] int32: position of the first query that sees each key


class BackwardInputs(NamedTuple):
    """Arrays of the queries that the gradients need beside the inputs of the forward pass."""

    log_sums: Any  # [B, N, T] float32: log2 of the sums of the softmax
    delta: Any  # [B, N, T] float32: the part of the gradient of a score that is the same for all keys of a query
    d_out: Any  # [B, T, N, H]

    @classmethod
    def from_gradients(cls, out: jax.Array, log_sums: jax.Array, d_out: jax.Array, d_log_sums: jax.Array) -> Any:
        """Return these arrays, out of the results [B, T, N, H] and [B, N, T] of the forward pass and their
        gradients.

        The gradient of the scores is p * (dp - delta), where delta = sum(dp * p) = sum(d_out * out) of each query. The
        gradient of the log of the sum is p, times what the caller makes of it: it joins delta.
        """
        delta = jnp.einsum("btnh,btnh->bnt", out, d_out, preferred_element_type=jnp.float32)
        return cls(log_sums, delta - d_log_sums * LOG2_E, d_out)


class Variant(NamedTuple):
    """Everything about a call of the kernels that is known before the arrays: each variant is a program of its own."""

    blocks: FlashBlocks
    cap: float | None  # of the scores
    interpret: bool  # on any device, slowly, for tests
    # All keys are tokens before the queries, and there are so many; those behind them fill the array up. A query may
    # see none of them. None: keys and queries are the same tokens.
    num_before: int | None = None
    dtype: Any = None  # of the results; None is that of the queries
    suffix: str = ""  # of the names of the kernels


def forward(inputs: Inputs, variant: Variant) -> Any:
    """Return outputs [B, T, N, H], and log2 of the sums of the softmax [B, N, T] float32."""
    (batch, length, heads, _), block = inputs.q.shape, variant.blocks.forward
    specs, sums = _query_specs(inputs, block.queries)
    return call_kernel(
        partial(_forward_kernel, variant=variant),
        (inputs._replace(end=None, k_first=None),),
        out_shape=[
            shape_like(inputs.q, inputs.q.shape, variant.dtype),
            shape_like(inputs.q, (batch, heads, length), jnp.float32),
        ],
        in_specs=(specs,),
        out_specs=[specs.q, sums],
        # A program for each head, block of queries and row. All keys of the row are in reach; it loads those it needs.
        grid=(heads, length // block.queries, batch),
        block=block,
        interpret=variant.interpret,
        name=f"attention_forward{variant.suffix}",
    )


def queries_gradient(inputs: Inputs, backward: BackwardInputs, variant: Variant) -> Any:
    """Return the gradient of the queries, of the shape of q."""
    (batch, length, heads, _), block = inputs.q.shape, variant.blocks.d_queries
    specs, sums = _query_specs(inputs, block.queries)
    return call_kernel(
        partial(_queries_kernel, variant=variant),
        (inputs._replace(end=None, k_first=None), backward),
        out_shape=shape_like(inputs.q, inputs.q.shape, variant.dtype),
        in_specs=(specs, BackwardInputs(sums, sums, specs.q)),
        out_specs=specs.q,
        grid=(heads, length // block.queries, batch),
        block=block,
        interpret=variant.interpret,
        name=f"attention_d_queries{variant.suffix}",
    )


def keys_gradient(inputs: Inputs, backward: BackwardInputs, variant: Variant) -> Any:
    """Return the gradients of keys and values, of the shapes of k and v."""
    (batch, length, heads, dim), block = inputs.q.shape, variant.blocks.d_keys
    kv_heads = inputs.k.shape[2]
    group = heads // kv_heads
    # A program for each key/value head: it goes through the query heads that share it, and adds their gradients up.
    keys = pl.BlockSpec((None, block.keys, None, dim), lambda head, n, row: (row, n, head, 0))
    queries = pl.BlockSpec((None, length, group, dim), lambda head, n, row: (row, 0, head, 0))
    ends = pl.BlockSpec((None, block.keys), lambda head, n, row: (row, n))
    sums = pl.BlockSpec((None, group, length), lambda head, n, row: (row, head, 0))
    return call_kernel(
        partial(_keys_kernel, variant=variant),
        (inputs._replace(first=None, q_end=None), backward),
        out_shape=[shape_like(x, x.shape, variant.dtype) for x in (inputs.k, inputs.v)],
        in_specs=(
            Inputs(queries, keys, keys, None, ends, k_first=None if inputs.k_first is None else ends),
            BackwardInputs(sums, sums, queries),
        ),
        out_specs=[keys, keys],
        grid=(kv_heads, length // block.keys, batch),
        block=block,
        interpret=variant.interpret,
        name=f"attention_d_keys{variant.suffix}",
    )


def _query_block(program: Any, num_programs: Any) -> Any:
    """Return the block of queries of a program: the last ones see the most keys, so they are the first to run."""
    return num_programs - 1 - program


def _query_specs(inputs: Inputs, block_q: int) -> tuple[Inputs, pl.BlockSpec]:
    """Return the parts of the inputs, and of an array [B, N, T], that a program for one block of queries sees."""
    _, length, heads, dim = inputs.q.shape
    group = heads // inputs.k.shape[2]
    block = partial(_query_block, num_programs=length // block_q)
    queries = pl.BlockSpec((None, block_q, None, dim), lambda head, n, row: (row, block(n), head, 0))
    keys = pl.BlockSpec((None, length, None, dim), lambda head, n, row: (row, 0, head // group, 0))
    firsts = pl.BlockSpec((None, block_q), lambda head, n, row: (row, block(n)))
    sums = pl.BlockSpec((None, None, block_q), lambda head, n, row: (row, head, block(n)))
    return Inputs(queries, keys, keys, firsts, None, q_end=None if inputs.q_end is None else firsts), sums


def _over_blocks(body, carry, low, full, last, high):
    """Run `body` over the blocks low ... high - 1. Those in full ... last - 1 need no mask."""
    for start, stop, masked in ((low, full, True), (full, last, False), (last, high, True)):
        carry = jax.lax.fori_loop(start, stop, partial(body, masked=masked), carry)
    return carry


def _over_keys(body, carry, first, q_end, begin, block_q, block_k, num_before):
    """Run `body` over the blocks of keys that the block of queries at `begin` sees.

    block of keys    0   1   2   3   4   5   6        the first keys of the queries lie in blocks 1 and 2, the queries
                         m   m   #   #   m            themselves in block 5; m: masked, #: each query sees each key
                         low     full    last         high is 6

    Keys before all queries end with the block in which the last of them lies.
    """
    low, end = jnp.min(first) // block_k, begin + block_q if num_before is None else num_before
    last, high = (begin if num_before is None else num_before) // block_k, pl.cdiv(end, block_k)
    if q_end is not None:  # each query sees its keys up to an end of its own
        last, high = jnp.min(q_end) // block_k, pl.cdiv(jnp.max(q_end), block_k)
    full = jnp.minimum(pl.cdiv(jnp.max(first), block_k), last)
    return _over_blocks(body, carry, low, full, last, high)


def _sees(first, q_end, rows, keys, num_before):
    """Return which keys the queries at `rows` see, [queries, keys] bool."""
    upper = keys <= rows[:, None] if num_before is None else (keys < num_before)[None]
    upper = upper if q_end is None else keys < q_end[:, None]
    return (keys >= first[:, None]) & upper


def through_cap(gradient: jax.Array, capped: jax.Array, cap: float | None) -> jax.Array:
    """Return the gradient of scores of any shape, out of that of the capped scores."""
    return gradient if cap is None else gradient * (1 - (capped / cap) ** 2)


def _forward_kernel(inputs: Inputs, out_ref, log_sums_ref, *, variant: Variant):
    """Output of a block of queries of one head.

    The scores of a query exist for one block of keys at a time, so its softmax is computed block by block: `top` is the
    largest score so far, and all sums are relative to it.

        out   = sum of exp(score - top) value           total = sum of exp(score - top)

    Where a block has a larger score, both sums shrink by exp(old top - new top) before the block is added.
    """
    (block_q, dim), block_k, cap = inputs.q.shape, variant.blocks.forward.keys, variant.cap
    begin, num_before = _query_block(pl.program_id(1), pl.num_programs(1)) * block_q, variant.num_before
    q, first, rows = inputs.q[...], inputs.first[...], begin + jnp.arange(block_q)
    q_end = None if inputs.q_end is None else inputs.q_end[...]

    def body(n, carry, *, masked):
        out, top, total = carry
        span = pl.ds(n * block_k, block_k)
        scores = soft_cap(triton.dot(q, inputs.k[span, :].T), cap)
        if masked:
            keys = n * block_k + jnp.arange(block_k)
            scores = jnp.where(_sees(first, q_end, rows, keys, num_before), scores, MASKED)
        higher = jnp.maximum(top, scores.max(1))
        shift = jnp.where(higher == MASKED, 0, higher * LOG2_E)[:, None]
        p = jnp.exp2(scores * LOG2_E - shift)  # one instruction computes the difference: it rounds once
        scale = jnp.exp2((top - higher) * LOG2_E)
        v = inputs.v[span, :]
        return out * scale[:, None] + triton.dot(p.astype(v.dtype), v), higher, total * scale + p.sum(1)

    nothing = jnp.zeros((block_q, dim), jnp.float32), jnp.full(block_q, -jnp.inf), jnp.zeros(block_q, jnp.float32)
    out, top, total = _over_keys(body, nothing, first, q_end, begin, block_q, block_k, num_before)
    if num_before is not None:  # no block of keys may be in reach
        top, total = jnp.where(total == 0, MASKED, top), jnp.where(total == 0, 1, total)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    log_sums_ref[...] = top * LOG2_E + jnp.log2(total)


def _queries_kernel(inputs: Inputs, backward: BackwardInputs, dq_ref, *, variant: Variant):
    """Gradient of a block of queries of one head: the sum of d_scores x key over the keys that they see."""
    (block_q, dim), block_k, cap = inputs.q.shape, variant.blocks.d_queries.keys, variant.cap
    begin, num_before = _query_block(pl.program_id(1), pl.num_programs(1)) * block_q, variant.num_before
    q, first, rows = inputs.q[...], inputs.first[...], begin + jnp.arange(block_q)
    q_end = None if inputs.q_end is None else inputs.q_end[...]
    log_sums, delta, d_out = backward.log_sums[...], backward.delta[...], backward.d_out[...]

    def body(n, dq, *, masked):
        span = pl.ds(n * block_k, block_k)
        k = inputs.k[span, :]
        scores = soft_cap(triton.dot(q, k.T), cap)
        p = jnp.exp2(scores * LOG2_E - log_sums[:, None])  # the softmax once more, out of the sums of the forward pass
        if masked:
            keys = n * block_k + jnp.arange(block_k)
            p = jnp.where(_sees(first, q_end, rows, keys, num_before), p, 0)
        d_scores = p * (triton.dot(d_out, inputs.v[span, :].T) - delta[:, None])
        d_scores = through_cap(d_scores, scores, cap)
        return dq + triton.dot(d_scores.astype(k.dtype), k)

    dq = jnp.zeros((block_q, dim), jnp.float32)
    dq = _over_keys(body, dq, first, q_end, begin, block_q, block_k, num_before)
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _keys_kernel(inputs: Inputs, backward: BackwardInputs, dk_ref, dv_ref, *, variant: Variant):
    """Gradients of a block of keys and values of one head; the query heads that share it come one after the other."""
    (block_k, dim), block_q, cap = inputs.k.shape, variant.blocks.d_keys.queries, variant.cap
    begin, are_before = pl.program_id(1) * block_k, variant.num_before is not None
    k, v, end = inputs.k[...], inputs.v[...], inputs.end[...]
    k_first = begin + jnp.arange(block_k) if inputs.k_first is None else inputs.k_first[...]

    def body(n, carry, *, masked, head):
        dk, dv = carry
        span = pl.ds(n * block_q, block_q)
        q, d_out = inputs.q[span, head, :], backward.d_out[span, head, :]
        scores = soft_cap(triton.dot(k, q.T), cap)  # [keys, queries]
        p = jnp.exp2(scores * LOG2_E - backward.log_sums[head, span][None, :])
        if masked:
            rows = n * block_q + jnp.arange(block_q)
            sees = rows < end[:, None]
            p = jnp.where(sees if are_before else sees & (rows >= k_first[:, None]), p, 0)
        dv += triton.dot(p.astype(d_out.dtype), d_out)
        d_scores = p * (triton.dot(v, d_out.T) - backward.delta[head, span][None, :])
        d_scores = through_cap(d_scores, scores, cap)
        return dk + triton.dot(d_scores.astype(q.dtype), q), dv

    # block of queries    0   1   2   3   4   5   6       the positions of the keys lie in block 1, and their ends, of a
    #                         m   #   #   m               document or of a window, in block 4; m: masked, #: each query
    #                        low full    last             sees each key; high is 5
    #
    # All queries come after keys before them: the first blocks need no mask then.
    low, high = 0 if are_before else begin // block_q, pl.cdiv(jnp.max(end), block_q)
    full = 0 if are_before else jnp.minimum(pl.cdiv(begin + block_k, block_q), high)
    if inputs.k_first is not None:
        low, full = jnp.min(k_first) // block_q, jnp.minimum(pl.cdiv(jnp.max(k_first), block_q), high)
    last = jnp.maximum(jnp.min(end) // block_q, full)

    def one_head(head, carry):
        return _over_blocks(partial(body, head=head), carry, low, full, last, high)

    nothing = jnp.zeros((block_k, dim), jnp.float32)
    dk, dv = jax.lax.fori_loop(0, inputs.q.shape[1], one_head, (nothing, nothing))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


MULTIPLE = 128  # rows are filled up to a multiple of all sizes of blocks


def flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask_rule: Any,
    blocks: dict[int, FlashBlocks] | None = None,
    cap: float | None = None,
    with_sums: bool = False,
    future_keys: int = 0,
) -> Any:
    """Attention of [B, T, N, H] queries, which come scaled, over [B, T, K, H] keys and values of the same rows.

    With a `cap`, scores s become cap * tanh(s / cap) before the softmax. Values may be narrower than keys. With
    `with_sums` the result is a pair with the logs of the sums of exp(score), [B, T, N] float32. Each segment of
    `mask_rule` must be one run of its row. T is filled up to a multiple of 128 and H to the next size that
    `FLASH_BLOCKS` has. With `blocks` given, the kernels are interpreted: slow, on any device, for tests. `future_keys`
    is not read: `mask_rule.q_ends` says which keys behind its own a query sees.
    """
    rows, interpret = blocks or find_row_in_use(FLASH_BLOCKS), blocks is not None
    length, dim = q.shape[1], padded_dim(rows, q.shape[3])
    # Tokens that fill a row up are a segment of their own: no token of the row sees them.
    segments = jnp.pad(mask_rule.q_segments, [(0, 0), (0, -length % MULTIPLE)], constant_values=-1)
    first, end = first_keys(segments, mask_rule.window), last_queries(segments, mask_rule.window)
    inputs = Inputs(pad_heads(q, dim), pad_heads(k, dim), pad_heads(v, dim), first, end)
    if mask_rule.q_ends is not None:
        positions = jnp.arange(length, segments.shape[1], dtype=jnp.int32)
        filler = jnp.broadcast_to(positions + 1, (len(segments), len(positions)))
        # No end is beyond the row: an image may have been cut there.
        q_end = jnp.concatenate([jnp.minimum(mask_rule.q_ends, length), filler], 1)
        inputs = inputs._replace(q_end=q_end, k_first=first_queries(q_end))
    out, log_sums = _attention(inputs, Variant(rows[dim], cap, interpret))
    # The kernels compute exp2, which is faster, so their sums are log2: nats are log2 / log2(e).
    out = out[:, :length, :, : v.shape[3]]
    return (out, jnp.swapaxes(log_sums, 1, 2)[:, :length] / LOG2_E) if with_sums else out


def pad_heads(x: jax.Array, dim: int) -> jax.Array:
    """Fill [B, T, heads, H] up to a multiple of all sizes of blocks, and to this head dim."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % MULTIPLE), (0, 0), (0, dim - x.shape[3])])


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(inputs: Inputs, variant: Variant) -> Any:
    return forward(inputs, variant)


def _attention_forward(inputs, variant):
    # Both have the name by which remat policies keep them: without log_sums the forward kernel would run again.
    out, log_sums = (checkpoint_name(x, "attention") for x in forward(inputs, variant))
    return (out, log_sums), (inputs, out, log_sums)


def _attention_backward(variant, residuals, gradients):
    inputs, out, log_sums = residuals
    backward = BackwardInputs.from_gradients(out, log_sums, *gradients)
    dq = queries_gradient(inputs, backward, variant)
    dk, dv = keys_gradient(inputs, backward, variant)
    return (Inputs(dq, dk, dv, None, None),)  # positions are whole numbers, which have no gradient


_attention.defvjp(_attention_forward, _attention_backward)
