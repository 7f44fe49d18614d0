"""Weights, their products, and the MLP. The letters of shapes and equations are in sharding/dims.py."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import reshard

from tunix.config import PROJECTIONS, Model
from tunix.models.block_sums import NO_SUMS, BlockSums
from tunix.models.draws import Draws
from tunix.models.noise import Noise
from tunix.models.products import product
from tunix.models.quantized import dequantize, quantize
from tunix.sharding.dims import STREAM_TOKENS
from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout


def _relu_squared(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Any] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "relu2": _relu_squared,
}


class Xielu(nnx.Module):
    """xIELU (Huang & Schlag 2024, arXiv:2411.13010): [B, T, F] -> [B, T, F], with two trained numbers.

    x > 0     a x^2 + x / 2                   a = softplus(positive)
    x <= 0    b (exp(x) - 1 - x) + x / 2      b = softplus(negative) + 1 / 2
    """

    BETA, EPS = 0.5, -1e-6

    def __init__(self, letters: str, layout: Layout):
        self.equation, self.layout = Equation(f"{letters}o,o->{letters}o"), layout
        self.positive, self.negative = (self._number(value) for value in (0.8, 0.8 - self.BETA))

    def _number(self, value: float) -> nnx.Param:
        """Return the parameter whose softplus is `value` at first."""
        return nnx.Param(jnp.full(1, math.log(math.expm1(value)), self.layout.param), equation=self.equation)

    def __call__(self, x: jax.Array) -> jax.Array:
        above = jnp.where(x > 0, x * x, 0)
        # The minimum keeps exp of large x, which `where` drops, from being infinite: its gradient would be no number.
        below = jnp.where(x > 0, 0, jnp.expm1(jnp.minimum(x, self.EPS)) - x)
        return self._times(above, self.positive, 0) + self._times(below, self.negative, self.BETA) + self.BETA * x

    def _times(self, x: jax.Array, number: nnx.Param, offset: float) -> jax.Array:
        factor = self.layout.gather(jax.nn.softplus(number[...]) + offset, self.equation)
        spec = self.layout.activation(self.equation.y)
        return jnp.einsum(self.equation.text, x[..., None], factor, out_sharding=spec)[..., 0].astype(x.dtype)


class Bias(nnx.Module):
    """A vector [N, H], [F] or [D] added to every token of [B, T, N, H], [B, T, F], [B, t, D]; zero at first."""

    def __init__(self, letters: str, cfg: Model, layout: Layout):
        """`letters` are those of the array that it is added to."""
        self.tokens, vector = letters[:2], letters[2:]
        self.equation, self.layout = Equation(f"{self.tokens},{vector}->{letters}"), layout
        zeros = jnp.zeros([cfg.dims[letter] for letter in vector], layout.param)
        self.b = nnx.Param(zeros, equation=self.equation)

    def __call__(self, x: jax.Array) -> jax.Array:
        # A product with ones spreads the bias over tokens. So its gradient is a product too, and the equation declares
        # the sum over tokens like that of any weight.
        bias = self.layout.gather(self.b[...], self.equation)
        result = self.layout.activation(self.equation.y)
        # In a split stream the ones have the shape of x, and the product is one of elements, like that of a norm's
        # scale: XLA of jaxlib 0.10.2 aborts on the gradient of ones [B, t] times a vector inside of a scan.
        in_stream = STREAM_TOKENS in self.tokens and self.layout.stream_axes
        letters = self.equation.y if in_stream else self.tokens
        ones = jnp.ones(x.shape[: len(letters)], bias.dtype, out_sharding=self.layout.activation(letters))
        spread = jnp.einsum(f"{letters},{self.equation.w}->{self.equation.y}", ones, bias, out_sharding=result)
        return (x + spread).astype(x.dtype)


class Matrix(nnx.Module):
    """A weight that a product `x,w->y` takes; the equation declares the weight's shape, sharding and fan-in.

    Normal with variance 1 / fan-in. With `qtype` it rests as codes and scales of this kind.

    `product` is a key of `PRODUCTS`. Where it is not "plain", the weight is gathered already, and its dimensions stand
    in the `order` of this kind.
    """

    def __init__(self, equation: str, cfg: Model, layout: Layout, draws: Draws, qtype: str | None = None):
        self.equation, self.layout, self.product, self.qtype = Equation(equation), layout, "plain", qtype
        fan_in = math.prod(cfg.dims[letter] for letter in self.equation.summed)
        shape = [cfg.dims[letter] for letter in self.equation.w]
        # With variance 1 / fan-in, numbers of y have the variance of those of x.
        weight = draws.normal(shape, layout.param, fan_in**-0.5)
        if self.qtype is None:
            self.w = nnx.Param(weight, equation=self.equation)
        else:
            codes, scales = quantize(weight, self.equation.w, self.qtype)
            code_equation, scale_equation = self.equation.quantized()
            self.w = nnx.Param(codes, equation=code_equation)
            self.w_scale = nnx.Param(scales, equation=scale_equation)

    def gathered(self) -> jax.Array:
        """Return the weight as the product takes it: gathered, and a matrix again if it rests quantized."""
        if self.product != "plain":
            return self.w[...]
        if self.qtype is None:
            return self.layout.gather(self.w[...], self.equation)
        if jnp.issubdtype(self.w.dtype, jnp.floating):  # inference/gathered.py has made it a matrix already
            return self.w[...]
        # Codes travel, not matrices: these are bytes, and each device makes the matrix of what it gathered.
        code_equation, scale_equation = self.equation.quantized()
        codes = self.layout.gather(self.w[...], code_equation)
        scales = self.layout.gather(self.w_scale[...], scale_equation)
        spec = self.layout.in_use(code_equation)
        return dequantize(
            codes, scales, self.equation, self.qtype, self.layout.compute, spec, self.layout.stages_around
        )


class Einsum(Matrix):
    """A weight and its product `x,w->y`.

    `Einsum("attention.q", "BTD,DNH->BTNH", ...)` maps [B, T, D] to [B, T, N, H] with a weight [D, N, H], and adds a
    bias [N, H] if `model.biases` names the projection.
    """

    def __init__(self, name: str, equation: str, cfg: Model, layout: Layout, draws: Draws):
        # Blocks of codes lie along D, so a weight without it rests as it is.
        qtype = cfg.lora.quantize_base if "D" in Equation(equation).w else None
        super().__init__(equation, cfg, layout, draws, qtype)
        self.result_name = f"product.{name}"  # by which remat policies keep the result
        has_bias = cfg.biases is not None and re.search(cfg.biases, name)
        self.bias = Bias(self.equation.y, cfg, layout) if has_bias else unchanged
        has_update = cfg.lora.rank and re.search(cfg.lora.targets, name)
        self.lora = LowRank(name, self.equation, cfg, layout, draws) if has_update else None

    def __call__(self, x: jax.Array, noise: Noise | None = None) -> jax.Array:
        """`noise` draws what dropout leaves out, and is None outside of training."""
        kind = self.layout.block_products if self.product == "plain" else self.product
        y = self.bias(product(self.equation, x, self.gathered(), self.layout, kind, self.result_name))
        return y if self.lora is None else y + self.lora(x, noise)


class LowRank(nnx.Module):
    """A product's low-rank update x a b * alpha / r, zero at first (LoRA, arXiv:2106.09685)."""

    def __init__(self, name: str, updated: Equation, cfg: Model, layout: Layout, draws: Draws):
        self.first, self.second = updated.low_rank()
        self.layout, self.scale, self.dropout = layout, cfg.lora.alpha / cfg.lora.rank, cfg.lora.dropout
        self.place = PROJECTIONS.index(name)
        fan_in = math.prod(cfg.dims[letter] for letter in self.first.summed)
        a, b = ([cfg.dims[letter] for letter in equation.w] for equation in (self.first, self.second))
        self.a = nnx.Param(draws.normal(a, layout.param, fan_in**-0.5), equation=self.first)
        # a is random and b is 0: the update is 0 at first, and b has a gradient. With both at 0 neither would have one.
        self.b = nnx.Param(jnp.zeros(b, layout.param), equation=self.second)

    def __call__(self, x: jax.Array, noise: Noise | None) -> jax.Array:
        x = self.layout.meet(x, self.first)
        if noise is not None and self.dropout:
            stays = noise.draw(self.place, 1 - self.dropout, x.shape)
            # Divided by the share that stays, so that the mean of the sum is that without dropout.
            x = jnp.where(reshard(stays, jax.typeof(x).sharding.spec), x / (1 - self.dropout), 0).astype(x.dtype)
        for equation, factor in ((self.first, self.a), (self.second, self.b)):
            x = product(equation, x, self.layout.gather(factor[...], equation), self.layout)
        return x * self.scale


class MLP(nnx.Module):
    """A gated linear unit (Shazeer 2020, arXiv:2002.05202), or a plain MLP: [B, t, D] -> [B, t, D]."""

    def __init__(self, cfg: Model, layout: Layout, draws: Draws, kind: str, width: str = "F"):
        """`width` is the letter of the hidden width."""
        into, out = f"BTD,D{width}->BT{width}", f"BT{width},{width}D->BtD"
        self.layout = layout
        is_trained = cfg.mlp.activation == "xielu"  # the only activation with parameters
        self.activation = Xielu(f"BT{width}", layout) if is_trained else ACTIVATIONS[cfg.mlp.activation]
        self.gate = Einsum("mlp.gate", into, cfg, layout, draws) if kind == "gated" else None
        self.up = Einsum("mlp.up", into, cfg, layout, draws)
        self.down = Einsum("mlp.down", out, cfg, layout, draws)

    def __call__(self, x, noise) -> tuple[jax.Array, BlockSums]:
        """Return [B, t, D], and sums for the loss, of which this kind has none."""
        x = self.layout.enter_branch(x)
        up = self.up(x, noise)
        h = self.activation(up) if self.gate is None else self.activation(self.gate(x, noise)) * up
        return self.down(h, noise), NO_SUMS


def unchanged(x: jax.Array) -> jax.Array:
    """Return x: it stands in the place of a part that a family does not have."""
    return x
