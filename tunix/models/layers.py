"""The parts of a decoder. The letters of shapes and equations are explained in layout.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.config import Model
from tunix.layout import Equation
from tunix.mesh import Layout


class Einsum(nnx.Module):
    """A matrix product `x,w->y`; the equation declares the weight's shape, sharding and fan-in.

    The one door through which matrices meet activations: `Einsum("BTD,DNH->BTNH", ...)` maps [B, T, D] to
    [B, T, N, H] with a weight [D, N, H], normal with variance 1 / fan-in.
    """

    def __init__(self, equation: str, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        self.equation, self.layout = Equation(equation), layout
        fan_in = math.prod(cfg.dims[letter] for letter in self.equation.summed)
        shape = [cfg.dims[letter] for letter in self.equation.w]
        weight = jax.random.normal(rngs.params(), shape, layout.param) * fan_in**-0.5
        self.w = nnx.Param(weight, equation=self.equation)

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.layout.gather(self.w[...], self.equation)
        return jnp.einsum(self.equation.text, x, weight, out_sharding=self.layout.activation(self.equation.y))


class RMSNorm(nnx.Module):
    """x / rms(x) * (1 + scale) over the last dimension, in float32 (Zhang & Sennrich 2019; Gemma's 1 + scale)."""

    def __init__(self, letters: str, cfg: Model, layout: Layout):
        self.equation, self.eps, self.layout = Equation(f"{letters},{letters[-1]}->{letters}"), cfg.norm_eps, layout
        self.scale = nnx.Param(jnp.zeros(cfg.dims[letters[-1]], layout.param), equation=self.equation)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        scale = 1 + self.layout.gather(self.scale[...], self.equation)
        scaled = jnp.einsum(self.equation.text, normed, scale, out_sharding=self.layout.activation(self.equation.y))
        return scaled.astype(x.dtype)


class Embedding(nnx.Module):
    """Token vectors [V, D], used at both ends of the decoder."""

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        self.equation, self.layout, self.scale = Equation("BTD,VD->BTV"), layout, cfg.embed_dim**0.5
        table = jax.random.normal(rngs.params(), (cfg.vocab_size, cfg.embed_dim), layout.param) / self.scale
        self.table = nnx.Param(table, equation=self.equation)

    def gathered(self) -> jax.Array:
        """The table for the next two. Gathered once for both ends, its gradient travels once."""
        return self.layout.gather(self.table[...], self.equation)

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """[B, T] int32 -> [B, T, D], times sqrt(D)."""
        rows = table.at[tokens].get(out_sharding=self.layout.activation("BTD"))
        return rows * jnp.asarray(self.scale, table.dtype)

    def logits(self, table: jax.Array, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, V] float32."""
        out = jnp.einsum(self.equation.text, x, table, out_sharding=self.layout.activation("BTV"))
        return out.astype(jnp.float32)


def rope_frequencies(cfg: Model, theta: float, scale: float) -> np.ndarray:
    """Radians per position of each pair of dimensions, [H / 2] float32 (RoFormer, arXiv:2104.09864)."""
    exponents = np.arange(0, cfg.head_dim, 2, dtype=np.float64) / cfg.head_dim
    return (theta**-exponents / scale).astype(np.float32)


def apply_rope(x: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + H/2) of [B, T, N, H] by positions [B, T] x frequencies [H / 2], in float32."""
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
