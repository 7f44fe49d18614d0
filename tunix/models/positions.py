"""Rotary positions (RoPE), and how they are stretched over a longer context."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tunix.config import Model


class Rope(NamedTuple):
    """Rotations of several layers, or of one without the first dimension."""

    frequencies: jax.Array  # [L, H / 2] float32, radians per position of each pair of dimensions
    magnitude: jax.Array  # [L] float32, of a rotated vector


def layer_rope(cfg: Model, layers: range) -> Rope:
    """Rotations of these layers: in global layers the scaled ones of `rope_theta`, else those of `local_rope_theta`.

    A layer without positions turns by 0 radians.
    """
    assert cfg.rope_theta is not None
    scaled, magnitude = SCALINGS[cfg.rope_scaling.name](cfg.rope_scaling, cfg.rope_theta, cfg.head_dim)
    local = _rotations(cfg.local_rope_theta or cfg.rope_theta, cfg.head_dim)
    is_global = np.array([cfg.is_global(layer) for layer in layers])
    is_rotated = np.array([cfg.is_rotated(layer) for layer in layers])
    frequencies = np.where(is_global[:, None], scaled, local) * is_rotated[:, None]
    magnitudes = np.where(is_global & is_rotated, magnitude, 1.0)
    return Rope(jnp.asarray(frequencies, jnp.float32), jnp.asarray(magnitudes, jnp.float32))


def apply_rope(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Rotate the pairs (i, i + H/2) of [B, T, N, H] by positions [B, T] x one layer's frequencies, in float32.

    RoFormer, arXiv:2104.09864.
    """
    angles = positions[:, :, None, None].astype(jnp.float32) * rope.frequencies
    sin, cos = jnp.sin(angles) * rope.magnitude, jnp.cos(angles) * rope.magnitude
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def _rotations(theta: float, head_dim: int) -> np.ndarray:
    """Radians per position of each pair of dimensions, [H / 2] float64."""
    return theta ** -(np.arange(0, head_dim, 2) / head_dim)


def _unscaled(cfg, theta, head_dim):
    return _rotations(theta, head_dim), 1.0


def _linear(cfg, theta, head_dim):
    return _rotations(theta, head_dim) / cfg.factor, 1.0


def _llama3(cfg, theta, head_dim):
    plain = _rotations(theta, head_dim)
    turns = cfg.original_context * plain / (2 * math.pi)
    kept = np.clip((turns - cfg.low_freq_factor) / (cfg.high_freq_factor - cfg.low_freq_factor), 0, 1)
    return plain * kept + plain / cfg.factor * (1 - kept), 1.0


def _yarn(cfg, theta, head_dim):
    plain = _rotations(theta, head_dim)

    def pair(turns):
        """The number of the pair that makes `turns` full turns in the original context."""
        return head_dim * math.log(cfg.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(pair(cfg.beta_fast)), 0), min(math.ceil(pair(cfg.beta_slow)), head_dim - 1)
    kept = 1 - np.clip((np.arange(head_dim // 2) - first) / max(last - first, 1e-3), 0, 1)
    magnitude = cfg.attention_factor or (0.1 * math.log(cfg.factor) + 1 if cfg.factor > 1 else 1.0)
    return plain * kept + plain / cfg.factor * (1 - kept), magnitude


SCALINGS = {"none": _unscaled, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
