"""Ring attention: keys and values travel from device to device, and queries stay (arXiv:2310.01889).

Four devices share a sequence. Device 2 sees the blocks of keys in this order, and computes with those it needs:

    step        0        1        2        3
    keys of     2        1        0        3        each device hands its block on to the next one
                part     all      all      skipped: these tokens come later

A block is computed for some queries at a time. It is skipped for queries that see none of its keys: those of later
tokens, of other documents, or before the window. Results of blocks are added up with the largest score so far, as in
FlashAttention (arXiv:2205.14135), so that the scores of one block exist at one time.

The backward pass is written by hand: automatic differentiation would keep the scores of every block. Keys and values go
round once more, and their gradients travel with them, float32, until they are home again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

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


def attend_in_ring(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: Seen,
    cap: float | None = None,
    with_sums: bool = False,
) -> Any:
    """Return [B, T, N, H] of this device's queries over the keys of all devices, inside a `shard_map`.

    `seen` is the rule for the whole sequence, in which each segment is one run. Blocks are computed by XLA's own
    operations; `kernel` is not called.
    """
    batch, own_tokens, num_heads, head_dim = q.shape
    kv_heads = k.shape[2]
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
    heads = q.reshape(batch, own_tokens, kv_heads, num_heads // kv_heads, head_dim)
    out, log_sums = _attend(_in_chunks(heads, size), k, v, queries, seen.k_segments, cap)
    out = _joined(out).reshape(*q.shape[:3], -1)
    return (out, _joined(log_sums).reshape(q.shape[:3])) if with_sums else out


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


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, queries, segments, cap):
    return _forward(q, k, v, queries, segments, cap)


def _attend_forward(q, k, v, queries, segments, cap):
    # Both have the name by which remat policies keep them: without them the keys would go round once more.
    out, log_sums = (checkpoint_name(x, "attention") for x in _forward(q, k, v, queries, segments, cap))
    return (out, log_sums), (q, k, v, queries, segments, out, log_sums)


def _attend_backward(cap, kept, gradients):
    q, k, v, queries, segments, out, log_sums = kept
    d_out, d_log_sums = gradients
    # The gradient of the scores is p * (dp - delta), where delta = sum(dp * p) = sum(d_out * out) of each query. The
    # gradient of the log of the sum is p, times what the caller makes of it: it joins delta.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1) - d_log_sums
    pull = partial(_pull_back, q, queries, log_sums, delta, d_out, segments, cap)
    # The gradients of a block follow it one step later, and each device adds its part. After the last step they are
    # handed on once more, and are at home then.
    block = _hand_on((k, v))
    dq, *gradients = pull(jnp.zeros_like(q, jnp.float32), (k, v), 0)

    def visit(carry, step):
        # Both are on their way while the device computes: the next block, and the gradients of the block before this
        # one, which belong to the keys that the next device has now.
        dq, block, gradients = carry
        following, came = _hand_on(block), _hand_on(gradients)
        dq, *more = pull(dq, block, step)
        return (dq, following, tuple(a + b for a, b in zip(came, more, strict=True))), None

    num_devices = jax.lax.axis_size(token_axes())
    steps = jnp.arange(1, num_devices - 1)
    (dq, block, gradients), _ = jax.lax.scan(visit, (dq, block, tuple(gradients)), steps)
    came = _hand_on(gradients)
    dq, *more = pull(dq, block, num_devices - 1)
    dk, dv = _hand_on(tuple(a + b for a, b in zip(came, more, strict=True)))  # home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(q, k, v, queries, segments, cap) -> tuple[jax.Array, jax.Array]:
    """Return outputs [chunks, B, Q, K, G, H], and logs of the sums of the softmax without the last dimension."""
    nothing = jnp.zeros_like(q, jnp.float32)[..., : v.shape[3]]  # values may be narrower than keys
    sums = Sums(nothing, nothing[..., 0] + MASKED, nothing[..., 0])
    add = partial(_add_block, q, queries, segments, cap)
    # The first and the last block stand outside of the loop: the first is the device's own, and behind the last one
    # nothing is left to hand on. With four devices:
    #
    #     compute with    own | block 1    block 2 | block 3
    #     hand on         own | block 1    block 2 |
    #                         |<---- visit ------->|
    block = _hand_on((k, v))  # on its way while the device computes with its own
    sums = add(sums, (k, v), 0)

    def visit(carry, step):
        sums, block = carry
        following = _hand_on(block)
        return (add(sums, block, step), following), None

    num_devices = jax.lax.axis_size(token_axes())
    (sums, block), _ = jax.lax.scan(visit, (sums, block), jnp.arange(1, num_devices - 1))
    sums = add(sums, block, num_devices - 1)
    return (sums.out / sums.total[..., None]).astype(q.dtype), sums.top + jnp.log(sums.total)


def _hand_on(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Send arrays to the next device of the ring, and return those of the one before."""
    axes = token_axes()
    num_devices = jax.lax.axis_size(axes)
    pairs = [(device, (device + 1) % num_devices) for device in range(num_devices)]
    return tuple(jax.lax.ppermute(x, axes, pairs) for x in arrays)


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
