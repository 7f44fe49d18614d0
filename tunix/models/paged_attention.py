"""Attention of tokens to a cache of pages on GPUs: a program reads the pages of its row alone, as many as it has.

The kernel is JAX's (`jax.experimental.pallas.ops.gpu.paged_attention`). It takes pages of one head after those of
another, [K, P, S, H]. A cache has the heads of a page side by side, [P, K, S, H], as slots do. So the kernel is told of
one head that has P x K pages, and of a row for each query and key/value head: page k + K p has head k of page p.
Nothing is copied.

A row whose token is `n` sees the tokens 0 to n of its pages: those of several new tokens are rows of their own.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

from tunix.models.attention import Scaled
from tunix.sharding.layout import Layout

SPLITS = 8  # parts of a row that are computed side by side: rows are few, and a GPU has many processors
BLOCK_BYTES = 32 << 10  # of keys that a program has at one time; with values, and the next ones on their way, 4 times


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
        return _run_kernel(q, k, v, table, times, heads, options.get("cap"), interpret)

    # A kernel has no types of what varies over devices.
    mapped = jax.shard_map(local_attention, in_specs=(spec, *as_given), out_specs=spec, check_vma=False)
    return mapped(q, k, v, table, times)


def _run_kernel(
    q: jax.Array,
    k: jax.Array | Scaled,
    v: jax.Array | Scaled,
    table: jax.Array,
    times: jax.Array,
    heads: jax.Array,
    cap: float | None,
    interpret: bool,
) -> jax.Array:
    """Do as `attend_to_pages` on one device, whose queries share these `heads` of the pages."""
    (k, k_scales), (v, v_scales) = ((x.codes, x.scales) if isinstance(x, Scaled) else (x, None) for x in (k, v))
    rows, length, _, dim = q.shape
    num_pages, num_heads, size, _ = k.shape
    at_once = max(1, BLOCK_BYTES // (size * dim * q.dtype.itemsize))
    table = jnp.minimum(table, num_pages - 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (at_once * SPLITS))))
    table = (table[:, None] * num_heads + heads[:, None]).reshape(rows * len(heads), -1)  # a row and its heads
    out = paged_attention(
        q.reshape(rows, length, len(heads), -1, dim).swapaxes(0, 1).reshape(length * rows * len(heads), -1, dim),
        *(x.reshape(1, num_pages * num_heads, size, dim) for x in (k, v)),
        jnp.tile(table, (length, 1)),
        jnp.repeat(times.T.reshape(-1) + 1, len(heads)),
        *(None if x is None else x.reshape(1, num_pages * num_heads, size) for x in (k_scales, v_scales)),
        pages_per_compute_block=at_once,
        k_splits=SPLITS,
        interpret=interpret,
        attn_logits_soft_cap=cap,
    )
    return out.reshape(length, rows, -1, dim).swapaxes(0, 1)
