"""Products of queries with a block of keys of the ring by XLA's own operations (ring.py).

A block is computed for some queries at a time. It is skipped for queries that see none of its keys: those of later
tokens, of other documents, or before the window. Results of blocks are added up with the largest score so far, as in
FlashAttention (arXiv:2205.14135), so that the scores of one block exist at one time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.models.seen import Seen, first_keys
from tunix.models.soft_cap import soft_cap
from tunix.sharding.dims import token_axes

MASKED = -1e30  # a score. It is finite, because a block may have no key at all for some of its queries
MOST_QUERIES = 512  # of a device, whose scores with a block of keys exist at one time


class Sums(NamedTuple):
    """Results so far, for queries [B, Q, K, G, H], where G query heads share one of K key/value heads."""

    out: jax.Array  # [B, Q, K, G, H] float32: sum of values, each times exp(score - top)
    top: jax.Array  # [B, Q, K, G] float32: the largest score
    total: jax.Array  # [B, Q, K, G] float32: sum of exp(score - top)


class Queries(NamedTuple):
    """Facts about queries, for the rule which keys they see."""

    places: jax.Array  # [Q] int32, in the whole sequence
    segments: jax.Array  # [B, Q] int32
    first: jax.Array  # [B, Q] int32: place of the first key that each sees


class Plain(NamedTuple):
    """Products by XLA's own operations, of queries [chunks, B, Q, K, G, H]."""

    cap: float | None

    def arrange(self, q: jax.Array, num_kv_heads: int, seen: Seen) -> tuple[jax.Array, Any]:
        """Return the queries [B, T, N, H] of this device as all other methods take them, and facts about them."""
        batch, own_tokens, num_heads, head_dim = q.shape
        size = chunk_size(own_tokens)
        start = jax.lax.axis_index(token_axes()) * own_tokens

        def own(of_sequence: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(of_sequence, start, own_tokens, axis=of_sequence.ndim - 1)

        first = first_keys(seen.q_segments, seen.window)
        queries = Queries(start + jnp.arange(own_tokens), own(seen.q_segments), own(first))
        queries = Queries(
            queries.places.reshape(-1, size),
            *(jnp.moveaxis(x.reshape(batch, -1, size), 1, 0) for x in (queries.segments, queries.first)),
        )
        heads = q.reshape(batch, own_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return _in_chunks(heads, size), (queries, seen.k_segments)

    def restore(self, out: jax.Array, log_sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return results of `finish` as [B, T, N, H] and [B, T, N]."""
        out, log_sums = _joined(out), _joined(log_sums)
        return out.reshape(*out.shape[:2], -1, out.shape[-1]), log_sums.reshape(*out.shape[:2], -1)

    def start(self, q: jax.Array, v: jax.Array) -> Sums:
        """Return sums of no block."""
        nothing = jnp.zeros_like(q, jnp.float32)[..., : v.shape[3]]  # values may be narrower than keys
        return Sums(nothing, nothing[..., 0] + MASKED, nothing[..., 0])

    def add(self, q: jax.Array, facts: Any, sums: Sums, block: Any, step: Any) -> Sums:
        """Add the block of keys and values that came in `step` to the sums of all queries."""
        queries, segments = facts
        return _add_block(q, queries, segments, self.cap, sums, block, step)

    def finish(self, q: jax.Array, sums: Sums) -> tuple[jax.Array, jax.Array]:
        """Return outputs [chunks, B, Q, K, G, H], and logs of the sums of the softmax without the last dimension."""
        return (sums.out / sums.total[..., None]).astype(q.dtype), sums.top + jnp.log(sums.total)

    def start_back(self, out: jax.Array, log_sums: jax.Array, d_out: jax.Array, d_log_sums: jax.Array) -> Any:
        """Return what `pull` needs of the queries beside themselves."""
        # The gradient of the scores is p * (dp - delta), where delta = sum(dp * p) = sum(d_out * out) of each query.
        # The gradient of the log of the sum is p, times what the caller makes of it: it joins delta.
        delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1) - d_log_sums
        return log_sums, delta, d_out

    def pull(self, q: jax.Array, facts: Any, back: Any, dq: jax.Array, block: Any, step: Any) -> Any:
        """Return dq with what the block of keys and values adds to it, and the gradients of the block, all float32."""
        queries, segments = facts
        log_sums, delta, d_out = back
        return _pull_back(q, queries, log_sums, delta, d_out, segments, self.cap, dq, block, step)


def chunk_size(own_tokens: int) -> int:
    """Return how many queries of a device are computed, or skip a block of keys, together."""
    return max(n for n in range(1, MOST_QUERIES + 1) if own_tokens % n == 0)


def _in_chunks(x: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [T / size, B, size, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _joined(x: jax.Array) -> jax.Array:
    """[chunks, B, size, ...] -> [B, T, ...], the inverse of `_in_chunks`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _add_block(q, queries, segments, cap, sums: Sums, block, step) -> Sums:
    """Add the block of keys and values that came in `step` to the sums of all queries."""
    k, v = block
    key_places, key_segments = _facts_of_keys(k, segments, step)

    def compute(q, queries, sums):
        scores = soft_cap(jnp.einsum("bqkgh,bskh->bqkgs", q, k, preferred_element_type=jnp.float32), cap)
        mask = _mask(queries, key_places, key_segments)
        top = jnp.maximum(sums.top, jnp.max(jnp.where(mask, scores, MASKED), -1))
        p = jnp.where(mask, jnp.exp(scores - top[..., None]), 0)
        scale = jnp.exp(sums.top - top)  # the sums so far were taken relative to a smaller score
        more = jnp.einsum("bqkgs,bskh->bqkgh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return Sums(sums.out * scale[..., None] + more, top, sums.total * scale + jnp.sum(p, -1))

    def one_chunk(chunk):
        q, queries, sums = chunk
        return _unless_skipped(compute, queries, key_places, sums, q, queries)

    return jax.lax.map(one_chunk, (q, queries, sums))


def _pull_back(q, queries, log_sums, delta, d_out, segments, cap, dq, block, step):
    """Return dq with what the block of keys and values adds to it, and the gradients of the block, all float32."""
    k, v = block
    key_places, key_segments = _facts_of_keys(k, segments, step)

    def compute(q, queries, log_sums, delta, d_out, gradients):
        dq, dk, dv = gradients
        scores = soft_cap(jnp.einsum("bqkgh,bskh->bqkgs", q, k, preferred_element_type=jnp.float32), cap)
        p = jnp.where(_mask(queries, key_places, key_segments), jnp.exp(scores - log_sums[..., None]), 0)
        dv += jnp.einsum("bqkgs,bqkgh->bskh", p.astype(v.dtype), d_out, preferred_element_type=jnp.float32)
        dp = jnp.einsum("bqkgh,bskh->bqkgs", d_out, v, preferred_element_type=jnp.float32)
        d_scores = p * (dp - delta[..., None])
        if cap is not None:
            d_scores *= 1 - (scores / cap) ** 2  # the derivative of the cap, out of its result
        d_scores = d_scores.astype(q.dtype)
        dq += jnp.einsum("bqkgs,bskh->bqkgh", d_scores, k, preferred_element_type=jnp.float32)
        dk += jnp.einsum("bqkgs,bqkgh->bskh", d_scores, q, preferred_element_type=jnp.float32)
        return dq, dk, dv

    def one_chunk(of_keys, chunk):
        q, queries, log_sums, delta, d_out, dq = chunk
        arguments = q, queries, log_sums, delta, d_out
        dq, *of_keys = _unless_skipped(compute, queries, key_places, (dq, *of_keys), *arguments)
        return tuple(of_keys), dq

    nothing = tuple(jnp.zeros_like(x, jnp.float32) for x in block)
    (dk, dv), dq = jax.lax.scan(one_chunk, nothing, (q, queries, log_sums, delta, d_out, dq))
    return dq, dk, dv


def _unless_skipped(compute: Callable[..., Any], queries: Queries, key_places: jax.Array, carry: Any, *arguments: Any):
    """Return `compute(*arguments, carry)`, or `carry` where none of the queries sees a key at these places."""
    needed = (queries.places[-1] >= key_places[0]) & (jnp.min(queries.first) <= key_places[-1])
    return jax.lax.cond(needed, lambda carry: compute(*arguments, carry), lambda carry: carry, carry)


def _facts_of_keys(k: jax.Array, segments: jax.Array, step: Any) -> tuple[jax.Array, jax.Array]:
    """Return places [S] and segments [B, S] of the keys that came in `step`, from those of the whole sequence."""
    axes, num_keys = token_axes(), k.shape[1]
    owner = (jax.lax.axis_index(axes) - step) % jax.lax.axis_size(axes)
    places = owner * num_keys + jnp.arange(num_keys)
    return places, jax.lax.dynamic_slice_in_dim(segments, owner * num_keys, num_keys, axis=1)


def _mask(queries: Queries, key_places: jax.Array, key_segments: jax.Array) -> jax.Array:
    """Return which keys the queries see, [B, Q, 1, 1, S] bool."""
    near = (key_places <= queries.places[:, None]) & (key_places >= queries.first[..., None])
    same = queries.segments[..., None] == key_segments[:, None]
    return (near & same)[:, :, None, None]
