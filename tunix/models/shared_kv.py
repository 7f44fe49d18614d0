"""Keys and values of one layer that later layers use too (`model.shared_kv`).

    layer 13   q, k, v --> attention --> result
                  |  |                                        `Stacks` carries them in `Rows.shared`
                  v  v
    layer 17   q  k, v --> attention --> result               a layer with queries alone

The layer that computes them, the donor, returns them beside what its mix returns (`donate_kv`). A layer that takes them
(`take_kv`) has no cache of its own: in generation it looks into that of its donor.
"""

from typing import Any, NamedTuple

import jax

from tunix.models.block import Mix


class Donation(NamedTuple):
    """Keys and values of a donor for later layers, beside its cache; its mix returns both in the place of the cache."""

    cache: Any
    kv: tuple[jax.Array, ...]  # keys and values [B, T, K, H] of the tokens at work


def donate_kv(mix: Mix) -> Mix:
    """Return the mix of a donor, out of that of the same layer without later layers that take its keys and values."""

    def attend(q, kv, heads):
        out, cache = mix.attend(q, kv, heads)
        return out, Donation(cache, kv)

    return mix._replace(attend=attend)


def take_kv(mix: Mix, kv: tuple[jax.Array, ...]) -> Mix:
    """Return the mix of a layer that takes these keys and values; `mix` is that of their donor."""

    def attend(q, _, heads):
        out, _ = mix.attend(q, kv, heads)
        return out, ()

    return mix._replace(attend=attend)
