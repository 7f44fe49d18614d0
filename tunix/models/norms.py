"""Norms: of the residual stream, of queries and keys, of the results of a branch. All compute in float32."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tunix.config import Model
from tunix.models.layers import Bias
from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout


def divide_by_rms(x: jax.Array, eps: float, axes: tuple[int, ...] = (-1,)) -> jax.Array:
    """Return x / rms(x) in float32, the mean taken over `axes`, in the dtype of x."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axes, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale) in float32 (Zhang & Sennrich 2019).

    The mean is taken over the last dimension, or over the last two with `dims="NH"`. Gemma's offset is 1, and its
    scales are 0 at first.
    """

    def __init__(self, letters: str, cfg: Model, layout: Layout, dims: str | None = None, offset: float = 0.0):
        dims = dims or letters[-1]
        self.equation, self.eps, self.layout = Equation(f"{letters},{dims}->{letters}"), cfg.norm_eps, layout
        self.offset, self.axes = offset, tuple(range(-len(dims), 0))
        scale = jnp.full([cfg.dims[letter] for letter in dims], 1 - offset, layout.param)
        self.scale = nnx.Param(scale, equation=self.equation)

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = divide_by_rms(x.astype(jnp.float32), self.eps, self.axes)
        scaled = _multiply_by_scale(normed, self.offset, self.scale, self.equation, self.layout)
        return checkpoint_name(scaled.astype(x.dtype), "norm")


class LayerNorm(nnx.Module):
    """(x - mean) / standard deviation * (offset + scale) + bias over [B, t, D], in float32 (arXiv:1607.06450)."""

    def __init__(self, letters: str, cfg: Model, layout: Layout, offset: float = 0.0):
        self.equation, self.eps, self.layout = Equation(f"{letters},{letters[-1]}->{letters}"), cfg.norm_eps, layout
        self.offset = offset
        scale = jnp.full(cfg.dims[letters[-1]], 1 - offset, layout.param)
        self.scale = nnx.Param(scale, equation=self.equation)
        self.bias = Bias(letters, cfg, layout)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        # In two passes: the mean of squares less the square of the mean loses digits where the mean is large.
        centred = x32 - jnp.mean(x32, -1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + self.eps)
        scaled = _multiply_by_scale(normed, self.offset, self.scale, self.equation, self.layout)
        return checkpoint_name(self.bias(scaled).astype(x.dtype), "norm")


def _multiply_by_scale(
    normed: jax.Array, offset: float, scale: nnx.Param, equation: Equation, layout: Layout
) -> jax.Array:
    """Return normed [B, t, D] * (offset + scale [D]), where the scale is the weight of the equation.

    The scale is repeated for every token before it is multiplied, so its gradient is a sum over tokens. The gradient of
    a product "BtD,D->BtD" is the same sum, but as a product of matrices, before which XLA's CPU backend copies both
    factors into another order.
    """
    gathered = offset + layout.gather(scale[...], equation)
    dims = [equation.y.index(letter) for letter in equation.w]
    return normed * jax.lax.broadcast_in_dim(gathered, normed.shape, dims, out_sharding=layout.activation(equation.y))


NORMS: dict[str, Any] = {
    "rms": RMSNorm,
    "rms_unit_offset": partial(RMSNorm, offset=1.0),
    "layer": LayerNorm,
    "layer_unit_offset": partial(LayerNorm, offset=1.0),
}
