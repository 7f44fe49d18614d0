"""Keys and values that some layers leave and later layers take (`model.shared_kv`).

A layer that leaves them gives them to whoever runs the layers, beside what its mix keeps. A layer that takes them has
queries alone, and keeps nothing: in generation it looks into the cache of the layer that left them.
"""

from typing import Any, NamedTuple

import jax

from tunix.models.block import Mix


class Left(NamedTuple):
    """What a layer that leaves its keys and values returns in the place of what its mix keeps."""

    kept: Any  # by the mix
    kv: tuple[jax.Array, ...]  # keys and values [B, T, K, H] of the tokens at work


def leave_kv(mix: Mix) -> Mix:
    """Return the mix of a layer that leaves its keys and values."""

    def attend(q, kv, heads):
        out, kept = mix.attend(q, kv, heads)
        return out, Left(kept, kv)

    return mix._replace(attend=attend)


def take_kv(mix: Mix, kv: tuple[jax.Array, ...]) -> Mix:
    """Return the mix of a layer that takes these keys and values; `mix` is that of the layer that left them."""

    def attend(q, _, heads):
        out, _ = mix.attend(q, kv, heads)
        return out, ()

    return mix._replace(attend=attend)
