"""Rule that says which keys a query sees: by positions, segments and a window. It stands in place of a mask."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # score of a key that a query does not see; finite, as a query may see no key of a block


class MaskRule(NamedTuple):
    """Which keys a query sees: those of its segment, at its own position and at the `window - 1` positions before it.

    A position is the number of a token in its row. A rule in this form, in place of a mask [T, S], is small, may travel
    between devices beside the keys that it describes, and lets a kernel skip keys: where a segment is one run of a row,
    as a document is, query i of equal queries and keys sees exactly the keys first(i) ... i, and `first` never falls.
    With `q_ends` these are first(i) ... end(i) - 1, and neither falls.
    """

    q_positions: jax.Array  # [T] int32, the same for all rows
    k_positions: jax.Array  # [S] int32
    q_segments: jax.Array  # [B, T] int32
    k_segments: jax.Array  # [B, S] int32
    window: jax.Array | int  # int32 scalar; data, so that layers with different windows are one program
    # [B, T] int32: position behind the last key that a query sees, for tokens of images, which also see the later
    # tokens of their image. None: a query sees no key behind its own position.
    q_ends: jax.Array | None = None

    def mask(self) -> jax.Array:
        """Return the rule as a mask, [B, 1, T, S] bool."""
        distance = self.q_positions[:, None] - self.k_positions
        if self.q_ends is None:
            in_window = (distance >= 0) & (distance < self.window)
        else:
            in_window = (self.k_positions < self.q_ends[:, :, None]) & (distance < self.window)
        same = self.q_segments[:, :, None] == self.k_segments[:, None, :]
        return (in_window & same)[:, None]

    def queries(self, start: jax.Array, size: int) -> "MaskRule":
        """Return the rule for `size` of the T queries, from the scalar `start` on."""
        index = start + jnp.arange(size)
        ends = None if self.q_ends is None else self.q_ends[:, index]
        return self._replace(q_positions=self.q_positions[index], q_segments=self.q_segments[:, index], q_ends=ends)


def row_mask_rule(segment_ids: jax.Array, window: jax.Array | int, ends: jax.Array | None = None) -> MaskRule:
    """Return the rule for the tokens of a row among themselves; `segment_ids` and `ends` are [B, T] int32."""
    positions = jnp.arange(segment_ids.shape[1])
    return MaskRule(positions, positions, segment_ids, segment_ids, window, ends)


def first_keys(segments: jax.Array, window: jax.Array | int) -> jax.Array:
    """Return the position of the first key that each query of [B, T] sees: of its segment, one run, or its window."""
    positions = jnp.arange(segments.shape[1], dtype=jnp.int32)
    return jnp.maximum(_find_starts(segments, positions), positions - window + 1)


def last_queries(segments: jax.Array, window: jax.Array | int) -> jax.Array:
    """Return the position behind the last query that sees each key of [B, T], in its segment, one run, and window."""
    length = segments.shape[1]
    positions = jnp.arange(length, dtype=jnp.int32)
    # A token that ends its segment says where that is; the others take it from the next such token behind them.
    changes = segments[:, 1:] != segments[:, :-1]
    edge = jnp.ones_like(changes[:, :1])
    behind = jnp.where(jnp.concatenate([changes, edge], 1), positions + 1, length)
    behind = jax.lax.cummin(behind, axis=1, reverse=True)
    return jnp.minimum(behind, positions + window)


def first_queries(ends: jax.Array) -> jax.Array:
    """Return the position of the first query that sees each key of [B, T]: of its image, or its own.

    `ends` are `MaskRule.q_ends`, which are equal in an image:

        ends            1  5 5 5 5  6  7
        first queries   0  1 1 1 1  5  6
    """
    positions = jnp.arange(ends.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones_like(ends[:, :1], bool), ends[:, 1:] != ends[:, :-1]], 1)
    return jax.lax.cummax(jnp.where(starts, positions, 0), axis=1)


def split_chunks(segments: jax.Array, size: jax.Array | int) -> jax.Array:
    """Cut each segment of [B, S], one run, into chunks of `size` tokens; return the position of each one's first token.

    These positions are segments themselves, of which a layer with chunks of local attention sees one:

        segments  4 4 4 4 4 4 4 7 7 7 7
        size 3    0 0 0 3 3 3 6 7 7 7 10
    """
    positions = jnp.arange(segments.shape[1], dtype=jnp.int32)
    starts = _find_starts(segments, positions)
    return starts + (positions - starts) // size * size


def _find_starts(segments: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the position of the first token of the segment of each token of [B, S].

    segments             4 4 4 7 7
    is_first             1 0 0 1 0
    its position, or 0   0 0 0 3 0
    largest so far       0 0 0 3 3
    """
    changes = segments[:, 1:] != segments[:, :-1]
    is_first = jnp.concatenate([jnp.ones_like(changes[:, :1]), changes], 1)
    return jax.lax.cummax(jnp.where(is_first, positions, 0), axis=1)
