"""Ring attention: keys and values travel from device to device, and queries stay (arXiv:2310.01889).

Four devices share a sequence. Device 2 sees the blocks of keys in this order, and computes with those it needs:

    step        0        1        2        3
    keys of     2        1        0        3        each device hands its block on to the next one
                part     all      all      skipped: these tokens come later

A device's own block is attention of a row to itself. All queries come after the tokens of every other block that they
may see, so a block is a range of keys for each query, without a triangle (`Ranges`):

                  block 0       block 1       own block 2
    query 10      . . . # #     # # # # #     #                  #: visible; the window of 8 tokens begins in block 0
    query 11      . . . . #     # # # # #     # #

A row of `RINGS` computes with one block. It divides the result by the block's own sum of exp(score). Results a and b
with sums s and t make (s a + t b) / (s + t). Sums are kept as their log2.

The backward pass is written by hand: automatic differentiation would keep keys, values and results of every block. Keys
and values go round once more, and their gradients travel with them, float32, until they are home again.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tunix.models.attention_mask import MASKED, MaskRule, first_keys, last_queries
from tunix.models.context_parallel import chunk_size
from tunix.models.flash_attention import (
    LOG2_E,
    MULTIPLE,
    BackwardInputs,
    Inputs,
    Variant,
    forward,
    keys_gradient,
    pad_heads,
    queries_gradient,
    through_cap,
)
from tunix.models.kernels import FLASH_BLOCKS, FlashBlocks, find_row_in_use, padded_dim
from tunix.models.layers import soft_cap
from tunix.sharding.table import token_axes

Pair = tuple[jax.Array, jax.Array]


class Ranges(NamedTuple):
    """Keys of one block that the device's queries see, both [B, T] int32. Queries of the own block see no later key."""

    first: jax.Array  # position in the block of the first key that each query sees; T where it sees none
    end: jax.Array  # position behind the last query that sees each key of the block; 0 where none does
    is_local: bool


def ring_attention(
    kernel: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask_rule: MaskRule,
    cap: float | None = None,
    with_sums: bool = False,
) -> Any:
    """Return [B, T, N, H] of this device's queries over the keys of all devices, inside a `shard_map`.

    `mask_rule` is the rule for the whole sequence, in which each segment is one run. `kernel` is a key of `RINGS`.
    With `with_sums` the result is a pair with the logs of the sums of exp(score), [B, T, N] float32 in nats.
    """
    segments, window, local_tokens = mask_rule.q_segments, mask_rule.window, q.shape[1]
    start = jax.lax.axis_index(token_axes()) * local_tokens
    first = jax.lax.dynamic_slice_in_dim(first_keys(segments, window), start, local_tokens, axis=1)
    out, log_sums = _attention(RINGS[kernel](cap), q, k, v, (first, last_queries(segments, window)))
    return (out, jnp.swapaxes(log_sums, 1, 2) / LOG2_E) if with_sums else out


def _find_ranges(bounds: Pair, step: Any) -> Ranges:
    """Return the ranges of the block that came in `step`: 0 as a number of Python, or a traced number that is not 0.

    `bounds` are positions in the whole sequence: of the first key of each own query [B, T], and behind the last query
    of each key of the sequence [B, S].
    """
    (first, end), axes = bounds, token_axes()
    device, local_tokens = jax.lax.axis_index(axes), first.shape[1]
    owner = (device - step) % jax.lax.axis_size(axes)  # each step, keys move on by one device
    end = jax.lax.dynamic_slice_in_dim(end, owner * local_tokens, local_tokens, axis=1)
    first = jnp.clip(first - owner * local_tokens, 0, local_tokens)
    end = jnp.clip(end - device * local_tokens, 0, local_tokens)
    # Where the block comes after the own queries, both ranges are empty.
    first, end = jnp.where(owner > device, local_tokens, first), jnp.where(owner > device, 0, end)
    return Ranges(first, end, is_local=isinstance(step, int) and step == 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring, q, k, v, bounds):
    """Return outputs [B, T, N, H], and log2 of the sums of the softmax [B, N, T] float32."""
    # The first and the last block stand outside of the loop: the first is the device's own, and behind the last one
    # nothing is left to hand on. With four devices:
    #
    #     compute with    own | block 1    block 2 | block 3
    #     hand on         own | block 1    block 2 |
    #                         |<---- visit ------->|
    block = _hand_on((k, v))  # on its way while the device computes with its own
    sums = ring.attend(q, k, v, _find_ranges(bounds, 0))

    def visit(carry, step):
        sums, block = carry
        next_block = _hand_on(block)
        return (_merge(sums, ring.attend(q, *block, _find_ranges(bounds, step))), next_block), None

    num_devices = jax.lax.axis_size(token_axes())
    (sums, block), _ = jax.lax.scan(visit, (sums, block), jnp.arange(1, num_devices - 1))
    out, log_sums = _merge(sums, ring.attend(q, *block, _find_ranges(bounds, num_devices - 1)))
    return out.astype(q.dtype), log_sums


def _attention_forward(ring, q, k, v, bounds):
    # Both have the name by which remat policies keep them: without them the keys would go round once more.
    out, log_sums = (checkpoint_name(x, "attention") for x in _attention(ring, q, k, v, bounds))
    return (out, log_sums), (q, k, v, bounds, out, log_sums)


def _attention_backward(ring, residuals, gradients):
    """Take the keys round once more. The gradients of a block go with it, one step behind, and each device adds a part.

    Four devices, the block of device 0:

        step            0      1      2      3
        keys are on     0      1      2      3
        gradients on    0 +=   1 +=   2 +=   3 +=   then home to 0
    """
    q, k, v, bounds, out, log_sums = residuals
    backward = BackwardInputs.from_gradients(out, log_sums, *gradients)
    block = _hand_on((k, v))
    dq, *gradients = ring.gradients(q, k, v, _find_ranges(bounds, 0), backward)

    def add(dq, block, received, step):
        more, *d_block = ring.gradients(q, *block, _find_ranges(bounds, step), backward)
        return dq + more, tuple(a + b for a, b in zip(received, d_block, strict=True))

    def visit(carry, step):
        # Two sends run while the device computes: the next block, and the gradients of the block before this one,
        # which belong to the keys that the next device has now.
        dq, block, gradients = carry
        next_block, received = _hand_on(block), _hand_on(gradients)
        dq, gradients = add(dq, block, received, step)
        return (dq, next_block, gradients), None

    num_devices = jax.lax.axis_size(token_axes())
    steps = jnp.arange(1, num_devices - 1)
    (dq, block, gradients), _ = jax.lax.scan(visit, (dq, block, tuple(gradients)), steps)
    dq, gradients = add(dq, block, _hand_on(gradients), num_devices - 1)
    dk, dv = _hand_on(gradients)  # home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attention.defvjp(_attention_forward, _attention_backward)


def _merge(sums: Pair, more: Pair) -> Pair:
    """Return results [B, T, N, H] and their log2 sums [B, N, T] of two sets of keys together, float32."""
    # Sums as parts of the larger one: their own values may be too large for float32.
    top = jnp.maximum(sums[1], more[1])
    weights = jnp.exp2(sums[1] - top), jnp.exp2(more[1] - top)
    total = weights[0] + weights[1]
    before, after = (jnp.swapaxes(weight / total, 1, 2)[..., None] for weight in weights)
    return sums[0] * before + more[0] * after, top + jnp.log2(total)


def _hand_on(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Send arrays to the next device of the ring, and return those of the one before."""
    axes = token_axes()
    num_devices = jax.lax.axis_size(axes)
    pairs = [(device, (device + 1) % num_devices) for device in range(num_devices)]
    return tuple(jax.lax.ppermute(x, axes, pairs) for x in arrays)


class FlashRing(NamedTuple):
    """Products with a block by the kernels of flash attention, which skip an empty range: there is no branch."""

    cap: float | None
    blocks: dict[int, FlashBlocks] | None = None  # by head dim; None: those of the chip. Given, kernels are interpreted

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, ranges: Ranges) -> Pair:
        """Return results [B, T, N, H] of the block [B, T, K, H], and log2 of its sums [B, N, T], both float32."""
        out, log_sums = forward(*self._arguments(q, k, v, ranges))
        return out[:, : q.shape[1], :, : v.shape[3]], log_sums[..., : q.shape[1]]

    def gradients(self, q: jax.Array, k: jax.Array, v: jax.Array, ranges: Ranges, backward: BackwardInputs) -> Any:
        """Return the gradients of q [B, T, N, H], k and v [B, T, K, H] that come of the block, float32."""
        inputs, variant = self._arguments(q, k, v, ranges)
        missing = [(0, 0), (0, 0), (0, -q.shape[1] % MULTIPLE)]
        log_sums, delta = (jnp.pad(x, missing) for x in (backward.log_sums, backward.delta))
        padded = BackwardInputs(log_sums, delta, pad_heads(backward.d_out, inputs.q.shape[3]))
        gradients = queries_gradient(inputs, padded, variant), *keys_gradient(inputs, padded, variant)
        return tuple(d[:, : q.shape[1], :, : x.shape[3]] for d, x in zip(gradients, (q, k, v), strict=True))

    def _arguments(self, q: jax.Array, k: jax.Array, v: jax.Array, ranges: Ranges) -> tuple[Inputs, Variant]:
        """Return the arguments of the kernels, arrays filled up. Tokens that fill up see nothing."""
        local_tokens, rows = q.shape[1], self.blocks or find_row_in_use(FLASH_BLOCKS)
        dim, missing = padded_dim(rows, q.shape[3]), [(0, 0), (0, -local_tokens % MULTIPLE)]
        first, end = jnp.pad(ranges.first, missing, constant_values=local_tokens), jnp.pad(ranges.end, missing)
        inputs = Inputs(pad_heads(q, dim), pad_heads(k, dim), pad_heads(v, dim), first, end)
        variant = Variant(rows[dim], self.cap, self.blocks is not None, dtype=jnp.float32)
        if ranges.is_local:
            return inputs, variant._replace(suffix="_own")
        return inputs, variant._replace(num_before=local_tokens, suffix="_before")


class XlaRing(NamedTuple):
    """Products with a block by XLA's own operations, for a chunk of queries at a time, whose scores exist together.

    A block is skipped for a chunk that sees none of its keys: those of later tokens, of other documents, or before the
    window. Arrays of chunks are [chunks, B, Q, K, G, ...]: Q queries, of whose heads G share one of K key/value heads.
    """

    cap: float | None

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, ranges: Ranges) -> Pair:
        """Return what `FlashRing.attend` does: [B, T, N, H] and [B, N, T]."""

        def compute(q, rows, first):
            scores, mask = self._scores(q, k, rows, first, ranges.is_local)
            top = jnp.max(jnp.where(mask, scores, MASKED), -1)
            p = jnp.where(mask, jnp.exp2(scores - top[..., None]), 0)
            total = jnp.sum(p, -1)
            total = jnp.where(total == 0, 1, total)  # of a query that sees no key of the block
            out = jnp.einsum("bqkgs,bskh->bqkgh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return out / total[..., None], top + jnp.log2(total)

        def skip(q, rows, first):
            nothing = jnp.zeros_like(q, jnp.float32)[..., : v.shape[3]]  # values may be narrower than keys
            return nothing, nothing[..., 0] + MASKED

        def one_chunk(chunk):
            _, _, first = chunk
            return jax.lax.cond(jnp.min(first) < k.shape[1], compute, skip, *chunk)

        out, log_sums = jax.lax.map(one_chunk, self._split(q, k, ranges))
        return _merge_heads(out), jnp.swapaxes(_merge_heads(log_sums[..., None])[..., 0], 1, 2)

    def gradients(self, q: jax.Array, k: jax.Array, v: jax.Array, ranges: Ranges, backward: BackwardInputs) -> Any:
        """Return what `FlashRing.gradients` does, each of the shape of q, k or v."""

        def compute(d_block, q, rows, first, log_sums, delta, d_out):
            dk, dv = d_block
            scores, mask = self._scores(q, k, rows, first, ranges.is_local)
            p = jnp.where(mask, jnp.exp2(scores - log_sums), 0)
            dv += jnp.einsum("bqkgs,bqkgh->bskh", p.astype(v.dtype), d_out, preferred_element_type=jnp.float32)
            dp = jnp.einsum("bqkgh,bskh->bqkgs", d_out, v, preferred_element_type=jnp.float32)
            # The gradient of a softmax: ds_i = p_i (dp_i - sum_j p_j dp_j), whose sum over all keys is `delta`.
            d_scores = through_cap(p * (dp - delta), scores / LOG2_E, self.cap).astype(q.dtype)
            dk += jnp.einsum("bqkgs,bqkgh->bskh", d_scores, q, preferred_element_type=jnp.float32)
            dq = jnp.einsum("bqkgs,bskh->bqkgh", d_scores, k, preferred_element_type=jnp.float32)
            return (dk, dv), dq

        def skip(d_block, q, *_):
            return d_block, jnp.zeros_like(q, jnp.float32)

        # All queries add to the gradients of the block, so these are the carry. Each chunk of queries has its own dq.
        def one_chunk(d_block, chunk):
            _, _, first, *_ = chunk
            return jax.lax.cond(jnp.min(first) < k.shape[1], compute, skip, d_block, *chunk)

        of_queries = (jnp.swapaxes(x, 1, 2)[..., None] for x in (backward.log_sums, backward.delta))
        split = partial(_split_heads, num_kv_heads=k.shape[2])
        chunks = *self._split(q, k, ranges), *map(split, (*of_queries, backward.d_out))
        nothing = tuple(jnp.zeros_like(x, jnp.float32) for x in (k, v))
        (dk, dv), dq = jax.lax.scan(one_chunk, nothing, chunks)
        return _merge_heads(dq), dk, dv

    def _split(self, q: jax.Array, k: jax.Array, ranges: Ranges) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return chunks of the queries, of their positions [chunks, Q] and of their first keys [chunks, B, Q]."""
        size = chunk_size(q.shape[1])
        rows = jnp.arange(q.shape[1]).reshape(-1, size)
        return _split_heads(q, k.shape[2]), rows, _split_chunks(ranges.first, size)

    def _scores(self, q: jax.Array, k: jax.Array, rows: jax.Array, first: jax.Array, is_local: bool) -> Pair:
        """Return the scores [B, Q, K, G, S] of a chunk, times log2(e), and which of them count, [B, Q, 1, 1, S]."""
        scores = soft_cap(jnp.einsum("bqkgh,bskh->bqkgs", q, k, preferred_element_type=jnp.float32), self.cap)
        keys = jnp.arange(k.shape[1])
        mask = keys >= first[..., None]
        mask = mask & (keys <= rows[:, None]) if is_local else mask
        return scores * LOG2_E, mask[:, :, None, None]


def _split_chunks(x: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [T / size, B, size, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _split_heads(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [chunks, B, Q, K, N / K, H]."""
    heads = x.reshape(*x.shape[:2], num_kv_heads, -1, x.shape[3])
    return _split_chunks(heads, chunk_size(x.shape[1]))


def _merge_heads(x: jax.Array) -> jax.Array:
    """[chunks, B, Q, K, G, H] -> [B, T, N, H], the inverse of `_split_heads`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1, x.shape[-1])


# Products with a block by kernel, a key of `RING_KERNELS` (models/table.py).
RINGS: dict[str, Any] = {"flash": FlashRing, "xla": XlaRing}
