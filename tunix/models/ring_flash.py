"""Products of queries with a block of keys of the ring by the kernels of flash attention (context_parallel.py).

A device's own block is attention of a row to itself, as the kernels know it. All queries come after the tokens of every
other block that they may see, so a block is a range of keys for each query, without a triangle. For queries that see
nothing of a block the range is empty, and the kernels skip it: there is no branch.

                  block 0       block 1       own block 2
    query 10      . . . # #     # # # # #     #                  #: seen; the window of 8 tokens begins in block 0
    query 11      . . . . #     # # # # #     # #

The kernels divide the result of a block by the block's own sum of exp(score). Results a and b with sums s and t make
(s a + t b) / (s + t). Sums travel as their log2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.models.attention_mask import MASKED, MaskRule, first_keys, last_queries
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
)
from tunix.models.kernel_blocks import FLASH_BLOCKS, FlashBlocks, find_row_in_use, padded_dim
from tunix.sharding.table import token_axes


class Sums(NamedTuple):
    """Results of the blocks so far."""

    out: jax.Array  # [B, T, N, H] float32, normalised
    log_sums: jax.Array  # [B, N, T] float32: log2 of the sums of exp(score)


class MaskInfo(NamedTuple):
    """Ranges of keys and queries of a sequence, int32."""

    start: jax.Array  # [], place of the first own query
    first: jax.Array  # [B, T]: place of the first key that each own query sees
    end: jax.Array  # [B, S]: place behind the last query that sees each key of the sequence


class Flash(NamedTuple):
    """Products by the kernels, of queries [B, T, N, H]."""

    cap: float | None
    blocks: dict[int, FlashBlocks] | None = None  # by head dim; None: those of the chip. Given, kernels are interpreted

    def __hash__(self) -> int:
        return hash((self.cap, tuple((self.blocks or {}).items())))

    def arrange(self, q: jax.Array, num_kv_heads: int, mask_rule: MaskRule) -> tuple[jax.Array, MaskInfo]:
        """Return the queries [B, T, N, H] as they are, and facts about the sequence."""
        local_tokens = q.shape[1]
        start = jax.lax.axis_index(token_axes()) * local_tokens
        first = first_keys(mask_rule.q_segments, mask_rule.window)
        first = jax.lax.dynamic_slice_in_dim(first, start, local_tokens, axis=1)
        return q, MaskInfo(start, first, last_queries(mask_rule.q_segments, mask_rule.window))

    def restore(self, out: jax.Array, log_sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return results of `finish` as [B, T, N, H] and, in nats, [B, T, N]."""
        return out, jnp.swapaxes(log_sums, 1, 2) / LOG2_E

    def start(self, q: jax.Array, v: jax.Array) -> Sums:
        """Return sums of no block, for queries [B, T, N, H] and values [B, T, K, H]."""
        nothing = jnp.zeros_like(q, jnp.float32)
        return Sums(nothing[..., : v.shape[3]], jnp.swapaxes(nothing[..., 0], 1, 2) + MASKED)

    def add(self, q: jax.Array, mask_info: MaskInfo, sums: Sums, block: Any, step: Any) -> Sums:
        """Add the block of keys and values, each [B, T, K, H], that came in `step` to the sums of queries
        [B, T, N, H]. Step 0 is the device's own block."""
        inputs, variant = self._arguments(q, mask_info, block, step)
        out, log_sums = forward(inputs, variant)
        out, log_sums = out[:, : q.shape[1], :, : block[1].shape[3]], log_sums[..., : q.shape[1]]
        # Sums as parts of the larger one: their own values may be too large for float32.
        top = jnp.maximum(sums.log_sums, log_sums)
        before, after = jnp.exp2(sums.log_sums - top), jnp.exp2(log_sums - top)
        total = before + after
        before, after = (jnp.swapaxes(part / total, 1, 2)[..., None] for part in (before, after))
        return Sums(sums.out * before + out * after, top + jnp.log2(total))

    def finish(self, q: jax.Array, sums: Sums) -> tuple[jax.Array, jax.Array]:
        """Return outputs [B, T, N, H], and log2 of the sums of the softmax [B, N, T]."""
        return sums.out.astype(q.dtype), sums.log_sums

    def start_backward(
        self, out: jax.Array, log_sums: jax.Array, d_out: jax.Array, d_log_sums: jax.Array
    ) -> BackwardInputs:
        """Return what `add_gradients` needs beside the queries; `out` and `d_out` are [B, T, N, H]."""
        return BackwardInputs.from_gradients(out, log_sums, d_out, d_log_sums)

    def add_gradients(
        self, q: jax.Array, mask_info: MaskInfo, backward: BackwardInputs, dq: jax.Array, block: Any, step: Any
    ) -> Any:
        """Return dq [B, T, N, H] with what the block adds to it, and the gradients of keys and values [B, T, K, H]
        of the block, all float32."""
        inputs, variant = self._arguments(q, mask_info, block, step)
        missing = [(0, 0), (0, 0), (0, -q.shape[1] % MULTIPLE)]
        log_sums, delta = (jnp.pad(x, missing) for x in (backward.log_sums, backward.delta))
        padded = BackwardInputs(log_sums, delta, pad_heads(backward.d_out, inputs.q.shape[3]))
        gradients = queries_gradient(inputs, padded, variant), *keys_gradient(inputs, padded, variant)
        pairs = zip(gradients, (q, *block), strict=True)
        more, dk, dv = (gradient[:, : q.shape[1], :, : x.shape[3]] for gradient, x in pairs)
        return dq + more, dk, dv

    def _arguments(self, q: jax.Array, mask_info: MaskInfo, block: Any, step: Any) -> tuple[Inputs, Variant]:
        """Return the arguments of the kernels for the block of `step`, arrays filled up."""
        first, end = self._ranges(mask_info, q.shape[1], step)
        k, v = block
        rows = self.blocks or find_row_in_use(FLASH_BLOCKS)
        dim = padded_dim(rows, q.shape[3])
        inputs = Inputs(pad_heads(q, dim), pad_heads(k, dim), pad_heads(v, dim), first, end)
        variant = Variant(rows[dim], self.cap, self.blocks is not None, dtype=jnp.float32)
        # Step 0 is the own block, and comes as a number of Python. A traced step is one of a scan, and never 0.
        if isinstance(step, int) and step == 0:
            return inputs, variant._replace(suffix="_own")
        return inputs, variant._replace(num_before=q.shape[1], suffix="_before")

    def _ranges(self, mask_info: MaskInfo, local_tokens: int, step: Any) -> tuple[jax.Array, jax.Array]:
        """Return `Inputs.first` and `Inputs.end` for the block of `step`, filled up.

        First keys count from the beginning of the block, and ends of keys from the first own query. Where the block
        comes after the own queries (`owner > device`), both ranges are empty. So are those of tokens that fill up.
        """
        axes, missing = token_axes(), [(0, 0), (0, -local_tokens % MULTIPLE)]
        device = jax.lax.axis_index(axes)
        owner = (device - step) % jax.lax.axis_size(axes)
        begin = owner * local_tokens
        end = jax.lax.dynamic_slice_in_dim(mask_info.end, begin, local_tokens, axis=1)
        first = jnp.clip(mask_info.first - begin, 0, local_tokens)
        end = jnp.clip(end - mask_info.start, 0, local_tokens)
        first, end = jnp.where(owner > device, local_tokens, first), jnp.where(owner > device, 0, end)
        return jnp.pad(first, missing, constant_values=local_tokens), jnp.pad(end, missing)
