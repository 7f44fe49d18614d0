"""Products of queries with a block of keys of the ring by XLA's own operations (ring.py).

A block is computed for some queries at a time. It is skipped for queries that see none of its keys: those of later
tokens, of other documents, or before the window. Results of blocks are added up with the largest score so far, as in
FlashAttention (arXiv:2205.14135), so that the scores of one block exist at one time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.models.seen import MASKED, Seen, first_keys
from tunix.models.soft_cap import soft_cap
from tunix.sharding.dims import token_axes

MOST_QUERIES = 512  # of a device, whose scores with a block of keys exist at one time


class Sums(NamedTuple):
    """Results so far, for queries [B, Q, K, G, H], where G query heads share one of K key/value heads."""

    out: jax.Array  # [B, Q, K, G, H] float32: sum of values, each times exp(score - top)
    top: jax.Array  # [B, Q, K, G] float32: the largest score
    total: jax.Array  # [B, Q, K, G] float32: sum of exp(score - top)


class Queries(NamedTuple):
    """Facts about queries, for the rule which keys they see; of all chunks, with a first dimension."""

    places: jax.Array  # [Q] int32, in the whole sequence
    segments: jax.Array  # [B, Q] int32
    first: jax.Array  # [B, Q] int32: place of the first key that each sees


class Facts(NamedTuple):
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

    def arrange(self, q: jax.Array, num_kv_heads: int, seen: Seen) -> tuple[jax.Array, Facts]:
        """Return the queries [B, T, N, H] of this device as all other methods take them, and facts about them."""
        batch, own_tokens, num_heads, head_dim = q.shape
        size = chunk_size(own_tokens)
        start = jax.lax.axis_index(token_axes()) * own_tokens

        def take_own(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, own_tokens, axis=1)

        first = first_keys(seen.q_segments, seen.window)
        places, segments, first = start + jnp.arange(own_tokens), take_own(seen.q_segments), take_own(first)
        queries = Queries(places.reshape(-1, size), *(_split_chunks(x, size) for x in (segments, first)))
        heads = q.reshape(batch, own_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return _split_chunks(heads, size), Facts(queries, seen.k_segments)

    def restore(self, out: jax.Array, log_sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return results of `finish` as [B, T, N, H] and [B, T, N]."""
        out, log_sums = _join_chunks(out), _join_chunks(log_sums)
        return out.reshape(*out.shape[:2], -1, out.shape[-1]), log_sums.reshape(*out.shape[:2], -1)

    def start(self, q: jax.Array, v: jax.Array) -> Sums:
        """Return sums of no block."""
        nothing = jnp.zeros_like(q, jnp.float32)[..., : v.shape[3]]  # values may be narrower than keys
        return Sums(nothing, nothing[..., 0] + MASKED, nothing[..., 0])

    def add(self, q: jax.Array, facts: Facts, sums: Sums, block: Any, step: Any) -> Sums:
        """Add the block of keys and values that came in `step` to the sums of all queries."""
        k, v = block
        key_places, key_segments = _place_keys(k, facts.key_segments, step)

        def compute(q, queries, sums):
            scores = soft_cap(jnp.einsum("bqkgh,bskh->bqkgs", q, k, preferred_element_type=jnp.float32), self.cap)
            mask = _mask(queries, key_places, key_segments)
            top = jnp.maximum(sums.top, jnp.max(jnp.where(mask, scores, MASKED), -1))
            p = jnp.where(mask, jnp.exp(scores - top[..., None]), 0)
            scale = jnp.exp(sums.top - top)  # the sums so far were taken relative to a smaller score
            more = jnp.einsum("bqkgs,bskh->bqkgh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return Sums(sums.out * scale[..., None] + more, top, sums.total * scale + jnp.sum(p, -1))

        def add_chunk(chunk):
            q, queries, sums = chunk
            return _compute_if_seen(compute, queries, key_places, sums, q, queries)

        return jax.lax.map(add_chunk, (q, facts.queries, sums))

    def finish(self, q: jax.Array, sums: Sums) -> tuple[jax.Array, jax.Array]:
        """Return outputs [chunks, B, Q, K, G, H], and logs of the sums of the softmax without the last dimension."""
        return (sums.out / sums.total[..., None]).astype(q.dtype), sums.top + jnp.log(sums.total)

    def start_backward(
        self, out: jax.Array, log_sums: jax.Array, d_out: jax.Array, d_log_sums: jax.Array
    ) -> BackwardInputs:
        """Return what `add_gradients` needs of the queries beside themselves; see `flash_kernels.BackwardInputs`."""
        delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1) - d_log_sums
        return BackwardInputs(log_sums, delta, d_out)

    def add_gradients(
        self, q: jax.Array, facts: Facts, backward: BackwardInputs, dq: jax.Array, block: Any, step: Any
    ) -> Any:
        """Return dq with what the block of keys and values adds to it, and the gradients of the block, all float32."""
        k, v = block
        key_places, key_segments = _place_keys(k, facts.key_segments, step)

        def compute(q, queries, backward, gradients):
            log_sums, delta, d_out = backward
            dq, dk, dv = gradients
            scores = soft_cap(jnp.einsum("bqkgh,bskh->bqkgs", q, k, preferred_element_type=jnp.float32), self.cap)
            p = jnp.where(_mask(queries, key_places, key_segments), jnp.exp(scores - log_sums[..., None]), 0)
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
            dq, *d_block = _compute_if_seen(compute, queries, key_places, (dq, *d_block), q, queries, backward)
            return tuple(d_block), dq

        nothing = tuple(jnp.zeros_like(x, jnp.float32) for x in block)
        (dk, dv), dq = jax.lax.scan(add_chunk, nothing, (q, facts.queries, backward, dq))
        return dq, dk, dv


def chunk_size(own_tokens: int) -> int:
    """Return how many queries of a device are computed, or skip a block of keys, together."""
    return max(n for n in range(1, MOST_QUERIES + 1) if own_tokens % n == 0)


def _split_chunks(x: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [T / size, B, size, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _join_chunks(x: jax.Array) -> jax.Array:
    """[chunks, B, size, ...] -> [B, T, ...], the inverse of `_split_chunks`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _compute_if_seen(compute: Callable[..., Any], queries: Queries, key_places: jax.Array, carry: Any, *arguments: Any):
    """Return `compute(*arguments, carry)`, or `carry` where none of the queries sees a key at these places."""
    is_seen = (queries.places[-1] >= key_places[0]) & (jnp.min(queries.first) <= key_places[-1])
    return jax.lax.cond(is_seen, lambda carry: compute(*arguments, carry), lambda carry: carry, carry)


def _place_keys(k: jax.Array, segments: jax.Array, step: Any) -> tuple[jax.Array, jax.Array]:
    """Return places [S] and segments [B, S] of the keys that came in `step`, from those of the whole sequence."""
    axes, num_keys = token_axes(), k.shape[1]
    owner = (jax.lax.axis_index(axes) - step) % jax.lax.axis_size(axes)  # each step, keys move on by one device
    places = owner * num_keys + jnp.arange(num_keys)
    return places, jax.lax.dynamic_slice_in_dim(segments, owner * num_keys, num_keys, axis=1)


def _mask(queries: Queries, key_places: jax.Array, key_segments: jax.Array) -> jax.Array:
    """Return which keys the queries see, [B, Q, 1, 1, S] bool."""
    near = (key_places <= queries.places[:, None]) & (key_places >= queries.first[..., None])
    same = queries.segments[..., None] == key_segments[:, None]
    return (near & same)[:, :, None, None]
