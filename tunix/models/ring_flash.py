"""Products of queries with a block of keys of the ring by the kernels of flash attention (ring.py, flash_kernels.py).

A device's own block is attention of whole sequences, as the kernels know it. All queries come after the tokens of every
other block that they may see, so a block is a range of keys for each query, without a triangle. For queries that see
nothing of a block the range is empty, and the kernels skip it: there is no branch.

                  block 0       block 1       own block 2
    query 8       . . . # #     # # # # #     #                  #: seen; the document or the window begins in block 0
    query 9       . . . . #     # # # # #     # #

A block's results are normalised by its own sum. Results a and b with sums s and t make (s a + t b) / (s + t). Sums are
kept as their log2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.models.chips import row_of_chip
from tunix.models.flash import MULTIPLE, last_queries
from tunix.models.flash_blocks import BLOCKS, Blocks, blocks_for
from tunix.models.flash_kernels import LOG2_E, MASKED, Keys, forward, keys_gradient, queries_gradient
from tunix.models.seen import Seen, first_keys
from tunix.sharding.dims import token_axes


class Sums(NamedTuple):
    """Results of the blocks so far."""

    out: jax.Array  # [B, T, N, H] float32, normalised
    log_sums: jax.Array  # [B, N, T] float32: log2 of the sums of exp(score)


class Facts(NamedTuple):
    """Ranges of keys and queries of a sequence, int32."""

    start: jax.Array  # [], place of the first own query
    first: jax.Array  # [B, T]: place of the first key that each own query sees
    end: jax.Array  # [B, S]: place behind the last query that sees each key of the sequence


class Flash(NamedTuple):
    """Products by the kernels, of queries [B, T, N, H]."""

    cap: float | None
    blocks: dict[int, Blocks] | None = None  # by head dim; None: those of the chip. Given, kernels are interpreted

    def __hash__(self) -> int:
        return hash((self.cap, tuple((self.blocks or {}).items())))

    def arrange(self, q: jax.Array, num_kv_heads: int, seen: Seen) -> tuple[jax.Array, Facts]:
        """Return the queries as they are, and facts about the sequence."""
        own_tokens = q.shape[1]
        start = jax.lax.axis_index(token_axes()) * own_tokens
        first = first_keys(seen.q_segments, seen.window)
        first = jax.lax.dynamic_slice_in_dim(first, start, own_tokens, axis=1)
        return q, Facts(start, first, last_queries(seen.q_segments, seen.window))

    def restore(self, out: jax.Array, log_sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return results of `finish` as [B, T, N, H] and, in nats, [B, T, N]."""
        return out, jnp.swapaxes(log_sums, 1, 2) / LOG2_E

    def start(self, q: jax.Array, v: jax.Array) -> Sums:
        """Return sums of no block."""
        nothing = jnp.zeros_like(q, jnp.float32)
        return Sums(nothing[..., : v.shape[3]], jnp.swapaxes(nothing[..., 0], 1, 2) + MASKED)

    def add(self, q: jax.Array, facts: Facts, sums: Sums, block: Any, step: Any) -> Sums:
        """Add the block of keys and values that came in `step`; step 0 is the device's own block."""
        first, _ = self._ranges(facts, q.shape[1], step)
        blocks, dim = self._sizes(q)
        q_here, k, v = (_pad(x, dim) for x in (q, *block))
        results = forward(q_here, k, v, first, blocks.forward, self.cap, self._interpret, self._keys(q, step))
        out, log_sums = results[0][:, : q.shape[1], :, : block[1].shape[3]], results[1][..., : q.shape[1]]
        top = jnp.maximum(sums.log_sums, log_sums)
        before, here = jnp.exp2(sums.log_sums - top), jnp.exp2(log_sums - top)
        total = before + here
        before, here = (jnp.swapaxes(share / total, 1, 2)[..., None] for share in (before, here))
        return Sums(sums.out * before + out * here, top + jnp.log2(total))

    def finish(self, q: jax.Array, sums: Sums) -> tuple[jax.Array, jax.Array]:
        """Return outputs [B, T, N, H], and log2 of the sums of the softmax [B, N, T]."""
        return sums.out.astype(q.dtype), sums.log_sums

    def start_back(self, out: jax.Array, log_sums: jax.Array, d_out: jax.Array, d_log_sums: jax.Array) -> Any:
        """Return what `pull` needs of the queries beside themselves; see `flash`."""
        delta = jnp.einsum("btnh,btnh->bnt", out, d_out, preferred_element_type=jnp.float32) - d_log_sums * LOG2_E
        return log_sums, delta, d_out

    def pull(self, q: jax.Array, facts: Facts, back: Any, dq: jax.Array, block: Any, step: Any) -> Any:
        """Return dq with what the block of keys and values adds to it, and the gradients of the block, all float32."""
        log_sums, delta, d_out = back
        first, end = self._ranges(facts, q.shape[1], step)
        blocks, dim = self._sizes(q)
        missing = [(0, 0), (0, 0), (0, -q.shape[1] % MULTIPLE)]
        log_sums, delta = (jnp.pad(x, missing) for x in (log_sums, delta))
        q_here, k, v, d_out = (_pad(x, dim) for x in (q, *block, d_out))
        more = queries_gradient(
            q_here,
            k,
            v,
            first,
            log_sums,
            delta,
            d_out,
            blocks.d_queries,
            self.cap,
            self._interpret,
            self._keys(q, step),
        )
        dk, dv = keys_gradient(
            q_here, k, v, end, log_sums, delta, d_out, blocks.d_keys, self.cap, self._interpret, self._keys(q, step)
        )
        results = zip((more, dk, dv), (q, *block), strict=True)
        more, dk, dv = (x[:, : q.shape[1], :, : like.shape[3]] for x, like in results)
        return dq + more, dk, dv

    def _ranges(self, facts: Facts, own_tokens: int, step: Any) -> tuple[jax.Array, jax.Array]:
        """Return the first keys of queries and the ends of keys relative to the block of `step`, filled up.

        Queries before the block see none of it. Tokens that fill it up are seen by none.
        """
        axes, missing = token_axes(), [(0, 0), (0, -own_tokens % MULTIPLE)]
        device = jax.lax.axis_index(axes)
        owner = (device - step) % jax.lax.axis_size(axes)
        begin = owner * own_tokens
        end = jax.lax.dynamic_slice_in_dim(facts.end, begin, own_tokens, axis=1)
        first = jnp.clip(facts.first - begin, 0, own_tokens)
        end = jnp.clip(end - facts.start, 0, own_tokens)
        first, end = jnp.where(owner > device, own_tokens, first), jnp.where(owner > device, 0, end)
        return jnp.pad(first, missing, constant_values=own_tokens), jnp.pad(end, missing)

    def _sizes(self, q: jax.Array) -> tuple[Blocks, int]:
        """Return the blocks of the kernels, and the head dim to which arrays are filled up."""
        blocks = self.blocks
        if blocks is None:
            blocks = row_of_chip(BLOCKS, jax.sharding.get_abstract_mesh().abstract_device.device_kind)
        assert blocks is not None
        return blocks_for(blocks, q.shape[3]), min(size for size in blocks if size >= q.shape[3])

    @property
    def _interpret(self) -> bool:
        return self.blocks is not None

    def _keys(self, q: jax.Array, step: Any) -> Keys:
        is_own = isinstance(step, int) and step == 0
        return Keys(None if is_own else q.shape[1], jnp.float32, "_own" if is_own else "_before")


def _pad(x: jax.Array, dim: int) -> jax.Array:
    """Fill [B, T, heads, H] up to a multiple of all sizes of blocks, and to this head dim."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % MULTIPLE), (0, 0), (0, dim - x.shape[3])])
