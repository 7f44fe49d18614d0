"""Attention of tokens to a cache of pages on GPUs: a program reads pages of its row alone, as many as it has.

A page has the heads side by side, [P, K, S, H], as slots have them. A program of the kernel has one row, the queries of
one key/value head, and a part of the row's tokens: rows are few, and a GPU has many processors. Each row is cut into
the same number of parts, whatever others have, so what it computes does not depend on its neighbours. The parts are put
together as those of a ring are: each has its largest score, and the sum of exp(score - max_score).

A token whose time is `n` sees the tokens 0 to n of its pages.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tunix.base.errors import UserError
from tunix.models.attention import Scaled
from tunix.models.attention_mask import MASKED
from tunix.models.flash_attention import LOG2_E, call_kernel, shape_like
from tunix.models.grouped_matmul import load_block, load_vector, part_of, store_block
from tunix.models.layers import soft_cap
from tunix.sharding.layout import Layout

# The fastest of 65 on one H200: tokens that a program has at a time, of whole pages, and parts of a row.
KEYS, PARTS = 32, 8
MAX_QUERIES = 64  # of a program
# Pallas (jax 0.10.2) numbers the entries of an array of at most 4 GiB in 32 bits with a sign, and of a larger one in
# 64 bits. So of codes of one byte, those behind the first 2 GiB would be read at negative places.
UNREACHED = range(2**31 + 1, 2**32 + 1)  # bytes of such an array


class Threads(NamedTuple):
    """Threads that run a program of the kernel."""

    warps: int  # groups of 32 threads
    stages: int = 1  # the next block is not fetched ahead: that takes the room of other programs


class Inputs(NamedTuple):
    """Arrays of a device, and in a kernel the refs to them."""

    q: Any  # [A, K, M, H]: queries of a row that share a key/value head, scaled
    last: Any  # [A, M] int32: the last token that each query sees; -1 for none
    table: Any  # [A, W] int32
    heads: Any  # [K] int32: heads of the pages that this device's queries see
    k: Any  # [P K, S, H]: page p of head k is p K + k
    v: Any
    k_scales: Any = None  # [P K, S] float32, of codes
    v_scales: Any = None


def attend_to_pages(
    q: jax.Array,
    k: jax.Array | Scaled,
    v: jax.Array | Scaled,
    table: jax.Array,
    times: jax.Array,
    layout: Layout,
    options: Mapping[str, Any],
    kv_dim_name: str = "K",
    interpret: bool = False,
) -> jax.Array:
    """Return [A, T, N, H] of queries [A, T, N, H], which come scaled, at `times` [A, T].

    Args:
        k: keys of pages [P, K, S, H], or their codes with scales [P, K, S, 1].
        v: their values.
        table: [A, W] int32, the pages of each row. What is behind them may be any number.
        options: `cap` alone.
        interpret: run without a GPU.
    """
    spec = layout.activation("BTNH")
    as_given = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (k, v, table, times))

    def local_attention(q, k, v, table, times):
        num_heads = jax.tree.leaves(k)[0].shape[1]
        heads = layout.local_kv_heads(jnp.arange(num_heads)[None, None, :, None], q.shape[2], kv_dim_name).reshape(-1)
        return _attend(q, k, v, table, times, heads, options.get("cap"), interpret)

    # A kernel has no types of what varies over devices.
    mapped = jax.shard_map(local_attention, in_specs=(spec, *as_given), out_specs=spec, check_vma=False)
    return mapped(q, k, v, table, times)


def _attend(q, k, v, table, times, heads, cap: float | None, interpret: bool) -> jax.Array:
    """Do as `attend_to_pages` on one device, whose queries share these `heads` [K] of the pages.

    Raises:
        UserError: the kernel does not reach all codes.
    """
    (k, k_scales), (v, v_scales) = ((x.codes, x.scales) if isinstance(x, Scaled) else (x, None) for x in (k, v))
    rows, length, num_queries, dim = q.shape
    num_pages, num_heads, size, _ = k.shape
    if k.dtype.itemsize == 1 and k.size in UNREACHED:
        raise UserError(
            f"cache_dtype=int8: the pages of a layer have {k.size:,} codes on a device, and the kernel of pages "
            f"reaches {2**31:,}; set cache=slots or cache_dtype=null (of a run sampling.cache or "
            "sampling.cache_dtype), or draw fewer answers at one time"
        )
    shared = num_queries // len(heads)
    count = length * shared  # queries that share a head
    queries = q.reshape(rows, length, len(heads), shared, dim).swapaxes(1, 2).reshape(rows, len(heads), count, dim)
    k, v = (x.reshape(num_pages * num_heads, size, dim) for x in (k, v))
    k_scales, v_scales = (None if x is None else x.reshape(-1, size) for x in (k_scales, v_scales))
    inputs = Inputs(
        queries,
        jnp.repeat(times, shared, 1),
        jnp.pad(jnp.minimum(table, num_pages - 1) * num_heads, ((0, 0), (0, -table.shape[1] % (KEYS // size)))),
        heads.astype(jnp.int32), k, v, k_scales, v_scales,
    )  # fmt: skip
    at_once = min(MAX_QUERIES, pl.next_power_of_2(max(16, count)))  # a product of matrices has 16 rows at least
    shape = rows, len(heads), PARTS, count
    out, max_score, sums = call_kernel(
        partial(_kernel, at_once=at_once, cap=cap),
        (inputs,),
        out_shape=[shape_like(q, (*shape, dim), jnp.float32), *[shape_like(q, shape, jnp.float32)] * 2],
        grid=(PARTS, len(heads) * pl.cdiv(count, at_once), rows),
        block=Threads(max(1, at_once * dim // 2048)),
        interpret=interpret,
        name="attention_to_pages",
    )
    share = jnp.exp2(max_score - jnp.max(max_score, 2, keepdims=True))
    total = jnp.sum(sums * share, 2)
    out = jnp.sum(out * share[..., None], 2) / jnp.where(total == 0, 1, total)[..., None]
    return out.reshape(rows, len(heads), length, shared, dim).swapaxes(1, 2).reshape(q.shape).astype(q.dtype)


def _kernel(inputs: Inputs, out_ref, max_score_ref, sum_ref, *, at_once: int, cap: float | None):
    """Compute for some queries of a row one part of its tokens: [M, H], the largest scores [M], and sums [M]."""
    part, row = pl.program_id(0), pl.program_id(2)
    count, (_, size, dim) = inputs.q.shape[2], inputs.k.shape
    blocks_of_queries, pages_at_once = pl.cdiv(count, at_once), KEYS // size
    index = pl.program_id(1) // blocks_of_queries
    head = inputs.heads[index]
    queries, is_query = part_of(pl.program_id(1) % blocks_of_queries, at_once, count)
    q = load_block(inputs.q.at[row, index, queries, :], is_query, None)
    last = load_vector(inputs.last.at[row, queries], is_query, other=-1)
    num_blocks = pl.cdiv(jnp.max(last) + 1, KEYS)
    per_part = pl.cdiv(num_blocks, PARTS)

    def attend(n, state):
        out, max_score, total = state
        page = inputs.table[row, pl.ds(n * pages_at_once, pages_at_once)] + head
        keys = inputs.k[page].reshape(KEYS, dim).astype(q.dtype)
        scores = triton.dot(q, keys.T)
        if inputs.k_scales is not None:
            scores *= inputs.k_scales[page].reshape(1, KEYS)
        is_seen = n * KEYS + jnp.arange(KEYS)[None, :] <= last[:, None]
        scores = jnp.where(is_seen, soft_cap(scores, cap) * LOG2_E, MASKED)
        larger = jnp.maximum(max_score, jnp.max(scores, 1))
        shrink = jnp.exp2(max_score - larger)
        weights = jnp.where(is_seen, jnp.exp2(scores - larger[:, None]), 0)
        total = total * shrink + jnp.sum(weights, 1)
        if inputs.v_scales is not None:
            weights *= inputs.v_scales[page].reshape(1, KEYS)
        values = inputs.v[page].reshape(KEYS, dim).astype(q.dtype)
        return out * shrink[:, None] + triton.dot(weights.astype(q.dtype), values), larger, total

    nothing = jnp.zeros((at_once, dim), jnp.float32), jnp.full(at_once, MASKED), jnp.zeros(at_once, jnp.float32)
    begin = part * per_part
    state = jax.lax.fori_loop(begin, jnp.minimum(begin + per_part, num_blocks), attend, nothing)
    out, max_score, total = state
    store_block(out_ref.at[row, index, part, queries, :], out, is_query, None)
    for ref, values in ((max_score_ref, max_score), (sum_ref, total)):
        triton.store(ref.at[row, index, part, queries], values, mask=is_query)
