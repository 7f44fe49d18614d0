"""Products of queries with a block of keys of the ring by XLA's own operations (context_parallel.py).

A block is computed for some queries at a time. It is skipped for queries that see none of its keys: those of later
tokens, of other documents, or before the window. Results of blocks are added up with the largest score so far, as in
FlashAttention (arXiv:2205.14135), so that the scores of one block exist at one time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.models.attention_mask import MASKED, MaskRule, first_keys
from tunix.models.layers import soft_cap
from tunix.sharding.table import token_axes

MAX_QUERIES = 512  # of a device, whose scores with a block of keys exist at one time


class Sums(NamedTuple):
    """Results so far, for queries [B, Q, K, G, H], where G query heads share one of K key/value heads."""

    out: jax.Array  # [B, Q, K, G, H] float32: sum of values, each times exp(score - top)
    top: jax.Array  # [B, Q, K, G] float32: the largest score
    total: jax.Array  # [B, Q, K, G] float32: sum of exp(score - top)


class Queries(NamedTuple):
    """Facts about queries, for the rule which keys they see; of all chunks, with a first dimension."""

    positions: jax.Array  # [Q] int32, in the whole sequence
    segments: jax.Array  # [B, Q] int32
    first: jax.Array  # [B, Q] int32: place of the first key that each sees


class MaskInfo(NamedTuple):
    """Facts about the own queries and about the keys of all devices."""

    queries: Queries
    key_segments: jax.Array  # [B, S] int32, of the whole sequence


class BackwardInputs(NamedTuple):
    """Arrays of the queries that the gradients need beside the queries themselves."""

    log_sums: jax.Array  # [chunks, B, Q, K, G] float32
    delta: jax.Array  # [chunks, B, Q, K, G] float32: part of a score's gradient that all keys of a query share
    d_out: jax.Array  # [chunks, B, Q, K, G, H]


class Plain(NamedTuple):
    """Products by XLA's own operations, of queries [chunks, B, Q, K, G, H]."""

    cap: float | None

    def arrange(self, q: jax.Array, num_kv_heads: int, mask_rule: MaskRule) -> tuple[jax.Array, MaskInfo]:
        """Return the queries [B, T, N, H] of this device as all other methods take them, and facts about them."""
        batch, local_tokens, num_heads, head_dim = q.shape
        size = chunk_size(local_tokens)
        start = jax.lax.axis_index(token_axes()) * local_tokens

        def take_local(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, local_tokens, axis=1)

        first = first_keys(mask_rule.q_segments, mask_rule.window)
        positions, segments, first = (
            start + jnp.arange(local_tokens),
            take_local(mask_rule.q_segments),
            take_local(first),
        )
        queries = Queries(positions.reshape(-1, size), *(_split_chunks(x, size) for x in (segments, first)))
        heads = q.reshape(batch, local_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return _split_chunks(heads, size), MaskInfo(queries, mask_rule.k_segments)

    def restore(self, out: jax.Array, log_sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return results of `finish` as [B, T, N, H] and [B, T, N]."""
        out, log_sums = _merge_chunks(out), _merge_chunks(log_sums)
        return out.reshape(*out.shape[:2], -1, out.shape[-1]), log_sums.reshape(*out.shape[:2], -1)

    def start(self, q: jax.Array, v: jax.Array) -> Sums:
        """Return sums of no block, for queries [chunks, B, Q, K, G, H] and values [B, T, K, H]."""
        nothing = jnp.zeros_like(q, jnp.float32)[..., : v.shape[3]]  # values may be narrower than keys
        return Sums(nothing, nothing[..., 0] + MASKED, nothing[..., 0])

    def add(self, q: jax.Array, mask_info: MaskInfo, sums: Sums, block: Any, step: Any) -> Sums:
        """Add the block of keys and values, each [B, T, K, H], that came in `step` to the sums of queries
        [chunks, B, Q, K, G, H]."""
        k, v = block
        key_positions, key_segments = _locate_keys(k, mask_info.key_segments, step)

        def compute(q, queries, sums):
            scores = soft_cap(jnp.einsum("bqkgh,bskh->bqkgs", q, k, preferred_element_type=jnp.float32), self.cap)
            mask = _mask(queries, key_positions, key_segments)
            top = jnp.maximum(sums.top, jnp.max(jnp.where(mask, scores, MASKED), -1))
            p = jnp.where(mask, jnp.exp(scores - top[..., None]), 0)
            scale = jnp.exp(sums.top - top)  # the sums so far were taken relative to a smaller score
            more = jnp.einsum("bqkgs,bskh->bqkgh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return Sums(sums.out * scale[..., None] + more, top, sums.total * scale + jnp.sum(p, -1))

        def add_chunk(chunk):
            q, queries, sums = chunk
            return _compute_if_visible(compute, queries, key_positions, sums, q, queries)

        return jax.lax.map(add_chunk, (q, mask_info.queries, sums))

    def finish(self, q: jax.Array, sums: Sums) -> tuple[jax.Array, jax.Array]:
        """Return outputs [chunks, B, Q, K, G, H], and logs of the sums of the softmax without the last dimension."""
        return (sums.out / sums.total[..., None]).astype(q.dtype), sums.top + jnp.log(sums.total)

    def start_backward(
        self, out: jax.Array, log_sums: jax.Array, d_out: jax.Array, d_log_sums: jax.Array
    ) -> BackwardInputs:
        """Return what `add_gradients` needs beside the queries; `out` and `d_out` are [chunks, B, Q, K, G, H]. See
        `flash_attention.BackwardInputs`."""
        delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1) - d_log_sums
        return BackwardInputs(log_sums, delta, d_out)

    def add_gradients(
        self, q: jax.Array, mask_info: MaskInfo, backward: BackwardInputs, dq: jax.Array, block: Any, step: Any
    ) -> Any:
        """Return dq [chunks, B, Q, K, G, H] with what the block adds to it, and the gradients of keys and values
        [B, T, K, H] of the block, all float32."""
        k, v = block
        key_positions, key_segments = _locate_keys(k, mask_info.key_segments, step)

        def compute(q, queries, backward, gradients):
            log_sums, delta, d_out = backward
            dq, dk, dv = gradients
            scores = soft_cap(jnp.einsum("bqkgh,bskh->bqkgs", q, k, preferred_element_type=jnp.float32), self.cap)
            p = jnp.where(_mask(queries, key_positions, key_segments), jnp.exp(scores - log_sums[..., None]), 0)
            dv += jnp.einsum("bqkgs,bqkgh->bskh", p.astype(v.dtype), d_out, preferred_element_type=jnp.float32)
            dp = jnp.einsum("bqkgh,bskh->bqkgs", d_out, v, preferred_element_type=jnp.float32)
            # The gradient of a softmax: ds_i = p_i (dp_i - sum_j p_j dp_j), whose sum over all keys is `delta`.
            d_scores = p * (dp - delta[..., None])
            if self.cap is not None:
                d_scores *= 1 - (scores / self.cap) ** 2  # the derivative of the cap, out of its result
            d_scores = d_scores.astype(q.dtype)
            dq += jnp.einsum("bqkgs,bskh->bqkgh", d_scores, k, preferred_element_type=jnp.float32)
            dk += jnp.einsum("bqkgs,bqkgh->bskh", d_scores, q, preferred_element_type=jnp.float32)
            return dq, dk, dv

        # All queries add to the gradients of the block, so these are the carry. Each chunk of queries has its own dq.
        def add_chunk(d_block, chunk):
            q, queries, backward, dq = chunk
            dq, *d_block = _compute_if_visible(compute, queries, key_positions, (dq, *d_block), q, queries, backward)
            return tuple(d_block), dq

        nothing = tuple(jnp.zeros_like(x, jnp.float32) for x in block)
        (dk, dv), dq = jax.lax.scan(add_chunk, nothing, (q, mask_info.queries, backward, dq))
        return dq, dk, dv


def chunk_size(local_tokens: int) -> int:
    """Return how many queries of a device are computed, or skip a block of keys, together."""
    return max(n for n in range(1, MAX_QUERIES + 1) if local_tokens % n == 0)


def _split_chunks(x: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [T / size, B, size, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _merge_chunks(x: jax.Array) -> jax.Array:
    """[chunks, B, size, ...] -> [B, T, ...], the inverse of `_split_chunks`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _compute_if_visible(
    compute: Callable[..., Any], queries: Queries, key_positions: jax.Array, carry: Any, *arguments: Any
):
    """Return `compute(*arguments, carry)`, or `carry` where none of the queries sees a key at these places."""
    is_visible = (queries.positions[-1] >= key_positions[0]) & (jnp.min(queries.first) <= key_positions[-1])
    return jax.lax.cond(is_visible, lambda carry: compute(*arguments, carry), lambda carry: carry, carry)


def _locate_keys(k: jax.Array, segments: jax.Array, step: Any) -> tuple[jax.Array, jax.Array]:
    """Return places [S] and segments [B, S] of the keys that came in `step`, from those of the whole sequence."""
    axes, num_keys = token_axes(), k.shape[1]
    owner = (jax.lax.axis_index(axes) - step) % jax.lax.axis_size(axes)  # each step, keys move on by one device
    positions = owner * num_keys + jnp.arange(num_keys)
    return positions, jax.lax.dynamic_slice_in_dim(segments, owner * num_keys, num_keys, axis=1)


def _mask(queries: Queries, key_positions: jax.Array, key_segments: jax.Array) -> jax.Array:
    """Return which keys the queries see, [B, Q, 1, 1, S] bool."""
    near = (key_positions <= queries.positions[:, None]) & (key_positions >= queries.first[..., None])
    same = queries.segments[..., None] == key_segments[:, None]
    return (near & same)[:, :, None, None]
