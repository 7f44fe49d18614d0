"""Rotary positions (RoPE), and how they are stretched over a longer context."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tunix.config import Model
from tunix.config.layers import QueryGrowth, RopeLong, longrope_magnitude, yarn_magnitude

Turns = tuple[jax.Array, jax.Array]  # sine and cosine of angles


class Rope(NamedTuple):
    """Rotations of several layers, or of one without the first dimension.

    R numbers of a head are rotated: all of them, or `model.rotated_dim`.
    """

    frequencies: jax.Array  # [L, R / 2] float32, radians per position of each pair of dimensions
    magnitude: jax.Array  # [L] float32, of a rotated vector
    rotates: jax.Array  # [L] bool: false in layers without positions, whose frequencies are 0
    kind: jax.Array  # [L] int32: which of the different rotations of these layers; see `make_tables`
    # [L, R / 2] int32: which of a token's three positions turns each pair (`model.rope_sections`); None: it has one
    axes: jax.Array | None = None
    # Sine and cosine of one layer's angles, [B, T, R / 2] float32, times the magnitude, where they are computed already
    turns: Turns | None = None


def layer_rope(cfg: Model, layers: Sequence[int], final_length: int | jax.Array) -> Rope:
    """Return rotations of these layers: those of `rope_theta`, scaled, or of `local_rope_theta` in local layers.

    A layer without positions turns by 0 radians. The layers have heads of one width. `final_length` is the number of
    tokens that the sequences grow to, a number of Python's, a scalar, or [B] of each: LongRoPE turns slower in longer
    ones, and frequencies are [L, B, 1, R / 2] then.
    """
    assert cfg.rope_theta is not None
    (num_rotated,) = {cfg.rotated_dim or cfg.heads_of(layer).dim for layer in layers}
    scaled, magnitude = SCALINGS[cfg.rope_scaling.name](cfg, cfg.rope_theta, num_rotated)
    if isinstance(cfg.rope_scaling, RopeLong):
        short, long = scaled
        if isinstance(final_length, jax.Array) and final_length.ndim:
            final_length = final_length[:, None, None]
        scaled = jnp.where(final_length > cfg.rope_scaling.original_context, long, short)
    local = scaled if cfg.local_rope_theta is None else _rotations(cfg.local_rope_theta, num_rotated)
    is_scaled = np.array([cfg.local_rope_theta is None or cfg.is_global(layer) for layer in layers])
    is_rotated = np.array([cfg.is_rotated(layer) for layer in layers])
    where = jnp.where if isinstance(scaled, jax.Array) else np.where  # numpy's are float64
    of_layers = -1, *[1] * scaled.ndim
    frequencies = where(is_scaled.reshape(of_layers), scaled, local) * is_rotated.reshape(of_layers)
    magnitudes = np.where(is_scaled & is_rotated, magnitude, 1.0)
    arrays = jnp.asarray(frequencies, jnp.float32), jnp.asarray(magnitudes, jnp.float32), jnp.asarray(is_rotated)
    axes = None if cfg.rope_sections is None else jnp.asarray([_list_axes(cfg.rope_sections)] * len(layers), jnp.int32)
    return Rope(*arrays, jnp.asarray(_list_kinds(cfg, layers)[1], jnp.int32), axes)


def _list_axes(sections: Sequence[int]) -> list[int]:
    """Return which position turns each pair of a head: 0 time, 1 row, 2 column.

    Sections of 4, 2 and 2 pairs take turns until those of rows and columns are used up:  0 1 2 0 1 2 0 0
    """
    return [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections))]


def make_tables(cfg: Model, layers: Sequence[int], final_length: int | jax.Array, positions: jax.Array) -> Turns:
    """Return sine and cosine [kinds, B, T, R / 2] of positions [B, T], for each different rotation of these layers.

    XLA's CPU backend takes both for cheap, and computes them anew wherever they are used: for each head of each layer,
    forward and backward. A table is computed once.
    """
    first, _ = _list_kinds(cfg, layers)
    rope = layer_rope(cfg, [layers[index] for index in first], final_length)
    ropes = [jax.tree.map(lambda x, index=index: x[index], rope) for index in range(len(first))]
    sines, cosines = zip(*(find_turns(positions, each) for each in ropes), strict=True)
    return jnp.stack(sines), jnp.stack(cosines)


def _list_kinds(cfg: Model, layers: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the indices of the first layers of each different rotation, and which rotation each layer has."""
    rotations = [(cfg.is_rotated(layer), cfg.local_rope_theta is None or cfg.is_global(layer)) for layer in layers]
    different = list(dict.fromkeys(rotations))
    return [rotations.index(each) for each in different], [different.index(each) for each in rotations]


def find_turns(positions: jax.Array, rope: Rope) -> Turns:
    """Return sine and cosine [B, T, R / 2] of positions x one layer's frequencies, times its magnitude.

    Positions are [B, T], or [B, T, 3] of tokens that have one in time, a row and a column.
    """
    if positions.ndim == 3:
        assert rope.axes is not None
        time, row, column = (positions[:, :, axis : axis + 1] for axis in range(3))
        positions = jnp.where(rope.axes == 0, time, jnp.where(rope.axes == 1, row, column))
    else:
        positions = positions[:, :, None]
    # float32: in bfloat16 the positions 257 and 256 are equal.
    angles = positions.astype(jnp.float32) * rope.frequencies
    return jnp.sin(angles) * rope.magnitude, jnp.cos(angles) * rope.magnitude


def apply_rope(x: jax.Array, positions: jax.Array, rope: Rope, pairs: str) -> jax.Array:
    """Rotate the first R numbers of [B, T, N, H] by positions [B, T] x one layer's frequencies, in float32.

    `pairs` says which numbers turn together (RoFormer, arXiv:2104.09864), for R = 6 of 8 numbers of a head:

        halves        a b c A B C - -        a turns with A, b with B, c with C
        neighbours    a A b B c C - -        the last two are left as they are
    """
    return rotate(x, rope.turns or find_turns(positions, rope), pairs)


def rotate(x: jax.Array, turns: Turns, pairs: str) -> jax.Array:
    """Rotate the first R numbers of [B, T, N, H] by angles of which these are sine and cosine, in float32."""
    sin, cos = (turn[:, :, None] for turn in turns)
    num_rotated = 2 * sin.shape[-1]
    rotated, remaining = x[..., :num_rotated].astype(jnp.float32), x[..., num_rotated:]
    if pairs == "neighbours":
        first, second = rotated[..., ::2], rotated[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(rotated.shape)
    else:
        first, second = jnp.split(rotated, 2, -1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    turned = turned.astype(x.dtype)
    return turned if num_rotated == x.shape[-1] else jnp.concatenate([turned, remaining], -1)


def grow_queries(q: jax.Array, positions: jax.Array, rope: Rope | None, growth: QueryGrowth) -> jax.Array:
    """Multiply queries [B, T, N, H] by a factor that grows with their positions [B, T]; see `QueryGrowth`."""
    steps = jnp.floor((positions + growth.offset).astype(jnp.float32) / growth.every)
    factor = 1 + growth.rate * jnp.log1p(steps)
    if growth.layers == "unrotated":
        assert rope is not None
        factor = jnp.where(rope.rotates, 1, factor)
    return q * factor[:, :, None, None].astype(q.dtype)


def _rotations(theta: float, dim: int) -> np.ndarray:
    """Return radians per position of each pair of `dim` numbers, [dim / 2] float64."""
    return theta ** -(np.arange(0, dim, 2) / dim)


# Scalings stretch the rotations over a longer context. The first pairs of a head turn fast and tell near tokens apart;
# the last ones turn slowly and tell far ones apart. In a context that is `factor` times longer, slow pairs reach angles
# that training never showed, if nothing changes:
#
#     linear      every pair turns slower, by `factor`
#     llama3      fast pairs stay, slow ones turn slower by `factor`; those between are mixed by their turns
#     yarn        as llama3, mixed by the number of the pair; and vectors grow longer, which sharpens the softmax
#     longrope    a factor of its own for each pair, found by a search; others for short sequences than for long ones


def _proportional(cfg, theta, dim):
    is_rotated = np.arange(dim // 2) < int(cfg.rope_scaling.share * dim // 2)
    return _rotations(theta, dim) * is_rotated, 1.0


def _llama3(cfg, theta, dim):
    scaling, plain = cfg.rope_scaling, _rotations(theta, dim)
    turns = scaling.original_context * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Llama 4 has one factor for both: nothing is mixed.
    share = np.clip((turns - low) / (high - low), 0, 1) if high != low else (turns > low).astype(float)
    return plain * share + plain / scaling.factor * (1 - share), 1.0


def _yarn(cfg, theta, dim):
    scaling, plain = cfg.rope_scaling, _rotations(theta, dim)

    def find_pair(turns):
        """Return the number of the pair that makes `turns` full turns in the original context."""
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = find_pair(scaling.beta_fast), find_pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    share = 1 - np.clip((np.arange(dim // 2) - first) / max(last - first, 1e-3), 0, 1)
    magnitude = scaling.attention_factor or yarn_magnitude(scaling.factor)
    return plain * share + plain / scaling.factor * (1 - share), magnitude


def _longrope(cfg, theta, dim):
    """Return rotations of sequences up to the original context, and those of longer ones; and their magnitude."""
    scaling, plain = cfg.rope_scaling, _rotations(theta, dim)
    magnitude = longrope_magnitude(cfg.context_length / scaling.original_context, scaling.original_context)
    rotations = plain / np.array(scaling.short_factors), plain / np.array(scaling.long_factors)
    return rotations, scaling.attention_factor or magnitude


# (model, RoPE base, R) -> radians per position of each pair, [R / 2] float64, and the magnitude of a rotated vector.
SCALINGS = {
    "none": lambda cfg, theta, dim: (_rotations(theta, dim), 1.0),
    "linear": lambda cfg, theta, dim: (_rotations(theta, dim) / cfg.rope_scaling.factor, 1.0),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
