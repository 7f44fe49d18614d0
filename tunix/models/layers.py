"""Layers: initializers, dropout, norms, weights and their products, the MLP, embeddings."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from tunix.config import Model
from tunix.config.vision import TOWER
from tunix.models.kernels import mesh_platform
from tunix.models.lora import LowRank
from tunix.models.matmul import product
from tunix.models.quantized import dequantize, quantize
from tunix.sharding.layout import Layout
from tunix.sharding.table import STREAM_TOKENS, Equation


def named(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their names, like `blocks.attention.q.w`."""
    return [(parameter_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def parameter_name(path: Any) -> str:
    """Return the name of a path in a tree of parameters, like `blocks.attention.q.w`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


KEYS_AT_ONCE = 16  # XLA compiles how sixteen keys are made in the time of one


class Initializer:
    """Arrays of random numbers, each drawn with a key of its own; without a key all numbers are 0.

    Where only shapes matter there is no key: JAX takes milliseconds to trace how random numbers of one shape are made.
    """

    def __init__(self, key: jax.Array | None):
        self.key = key
        self.keys = iter(()) if key is None else _list_keys(key)

    def normal(self, shape: Sequence[int], dtype: Any, deviation: float) -> jax.Array:
        """Return an array of this shape, of mean 0 and this standard deviation."""
        if self.key is None:
            return jnp.zeros(shape, dtype)
        return jax.random.normal(next(self.keys), shape, dtype) * deviation

    def uniform(self, shape: Sequence[int], low: float | jax.Array, high: float | jax.Array) -> jax.Array:
        """Return an array of this shape, float32 between `low` and `high`."""
        if self.key is None:
            return jnp.zeros(shape)
        return jax.random.uniform(next(self.keys), shape, minval=low, maxval=high)

    def make_stack(self, num: int, make: Callable[["Initializer"], nnx.Module]) -> Any:
        """Return equal modules as one, whose parameters have a first dimension [num]; `make` gets a key for each."""
        keys = None if self.key is None else jax.random.split(next(self.keys), num)
        graphdef, params = jax.vmap(lambda key: nnx.split(make(Initializer(key))), axis_size=num)(keys)
        return nnx.merge(graphdef, params)


def _list_keys(key: jax.Array) -> Iterator[jax.Array]:
    """Yield `jax.random.fold_in(key, number)` for the numbers from 0 on."""
    for first in count(0, KEYS_AT_ONCE):
        yield from jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(first, first + KEYS_AT_ONCE))


class DropoutKey(NamedTuple):
    """Source of the random choices of one layer, the same for a row of a microbatch wherever the row is computed."""

    key: jax.Array  # of the microbatch and the layer
    rows: jax.Array | None = None  # [B] int32: numbers of these rows in the microbatch; None where all are here

    def sample(self, index: int, share: float, shape: tuple[int, ...]) -> jax.Array:
        """Return [B, ...] bool, true for this share of the entries; `index` tells apart the draws of a layer."""
        # Each row has a key of its own: a stage draws for its part of a batch alone, and no noise travels.
        rows, key = jnp.arange(shape[0]) if self.rows is None else self.rows, jax.random.fold_in(self.key, index)
        # As many keys as rows, laid out alike: jax 0.10.2 refuses one key and one row that axes of one device split.
        keys = jax.lax.broadcast(key, rows.shape, out_sharding=jax.typeof(rows).sharding.spec)

        def draw(key: jax.Array, row: jax.Array) -> jax.Array:
            return jax.random.bernoulli(jax.random.fold_in(key, row), share, shape[1:])

        return jax.vmap(draw)(keys, rows)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Return cap * tanh(x / cap) of any shape, near x for small x and never beyond the cap; x where there is no cap.

    It is for the scores of attention and for logits (Gemma 2, arXiv:2408.00118).
    """
    return x if cap is None else cap * jnp.tanh(x / cap)


class Routing(NamedTuple):
    """Tokens sent to experts by one layer: float32 counts without a gradient. Of several layers, with an L."""

    load: jax.Array  # [X]: tokens of each expert
    tokens: jax.Array  # number of tokens
    entropy: jax.Array  # sum over tokens of the entropy of the router's scores, in nats
    dropped: jax.Array | None = None  # choices of tokens that found no room; None where there is room for all


class BlockSums(NamedTuple):
    """Numbers that blocks return beside their result, summed over their tokens and layers."""

    # [B] float32 by name in metrics.jsonl: a mean over the tokens of each sequence. A loss minimises these penalties
    # with its own, each sequence with the weight that it has in the loss.
    penalties: dict[str, jax.Array]
    routing: Routing | None  # None without experts
    # [N] float32, of several layers [L, N]: the largest log of the sum of exp(score) of a query, of each head. None
    # where the step does not ask for it (`Transformer.reports_scores`).
    head_scores: jax.Array | None = None


NO_SUMS = BlockSums({}, None)


def merge_layers(blocks: list[BlockSums]) -> BlockSums:
    """Return the numbers of stacks that take turns, given those of each slot of a turn, with a first dimension L.

    Penalties are added up. Routing comes in the order of layers:

        slot 0    layers 0 2 4
        slot 1    layers 1 3 5        --> 0 1 2 3 4 5: stacked along a second dimension, then joined with the first
    """
    penalties = [{name: values.sum(0) for name, values in each.penalties.items()} for each in blocks]
    sums = reduce(merge_runs, (BlockSums(each, None) for each in penalties))
    for name in ("routing", "head_scores"):
        if values := [getattr(each, name) for each in blocks if getattr(each, name) is not None]:
            in_turns = jax.tree.map(lambda *each: jnp.stack(each, 1).reshape(-1, *each[0].shape[1:]), *values)
            sums = sums._replace(**{name: in_turns})
    return sums


def merge_stages(of_layers: BlockSums) -> BlockSums:
    """Return the numbers of all layers, [L, ...] on every device, out of those of each stage's layers, [S, L / S, ...].

    They travel once a microbatch or a step, and are small.
    """
    return jax.tree.map(lambda x: reshard(x, PartitionSpec()).reshape(-1, *x.shape[2:]), of_layers)


def merge_runs(first: BlockSums, second: BlockSums) -> BlockSums:
    """Return the numbers of two runs of layers, one after the other."""
    penalties = dict(first.penalties)
    for name, value in second.penalties.items():
        penalties[name] = penalties[name] + value if name in penalties else value

    def concatenate(first: Any, second: Any) -> Any:
        if first is None or second is None:
            return second if first is None else first
        return jax.tree.map(lambda *both: jnp.concatenate(both), first, second)

    return BlockSums(penalties, *map(concatenate, first[1:], second[1:]))


# Weights, their products, and the MLP. The letters of shapes and equations are in sharding/table.py.


ACTIVATIONS: dict[str, Any] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


@jax.custom_vjp
def softplus(weight: jax.Array) -> jax.Array:
    """Return log(1 + exp(weight)) of any shape, also of a gathered weight, whose gradient is a part of a sum."""
    return jax.nn.softplus(weight)


# JAX multiplies a part of a sum by a number that all devices have; it has no rules for what its own softplus does.
softplus.defvjp(lambda weight: (softplus(weight), jax.nn.sigmoid(weight)), lambda slope, gradient: (gradient * slope,))


class Xielu(nnx.Module):
    """xIELU (Huang & Schlag 2024, arXiv:2411.13010): [B, T, F] -> [B, T, F], with two trained numbers.

    x > 0     a x^2 + x / 2                   a = softplus(positive)
    x <= 0    b (exp(x) - 1 - x) + x / 2      b = softplus(negative) + 1 / 2
    """

    BETA, EPS = 0.5, -1e-6

    def __init__(self, dim_names: str, layout: Layout):
        self.equation, self.layout = Equation(f"{dim_names}o,o->{dim_names}o"), layout
        # a = 0.8 and b = 0.8 at first: log(exp(y) - 1) is the number whose softplus is y.
        self.positive, self.negative = (
            nnx.Param(jnp.full(1, math.log(math.expm1(value)), layout.param), equation=self.equation)
            for value in (0.8, 0.8 - self.BETA)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, F] -> [B, T, F]."""
        above = jnp.where(x > 0, x * x, 0)
        # The minimum keeps exp of large x, which `where` drops, from being infinite: its gradient would be no number.
        below = jnp.where(x > 0, 0, jnp.expm1(jnp.minimum(x, self.EPS)) - x)
        return self._times(above, self.positive, 0) + self._times(below, self.negative, self.BETA) + self.BETA * x

    def _times(self, x: jax.Array, number: nnx.Param, offset: float) -> jax.Array:
        factor = self.layout.gather(softplus(number[...]) + offset, self.equation)
        spec = self.layout.activation(self.equation.y)
        return jnp.einsum(self.equation.text, x[..., None], factor, out_sharding=spec)[..., 0].astype(x.dtype)


class Bias(nnx.Module):
    """A vector [N, H], [F] or [D] added to every token of [B, T, N, H], [B, T, F], [B, t, D]; zero at first."""

    def __init__(self, dim_names: str, cfg: Model, layout: Layout):
        """`dim_names` are those of the array that it is added to."""
        self.tokens, vector = dim_names[:2], dim_names[2:]
        self.equation, self.layout = Equation(f"{self.tokens},{vector}->{dim_names}"), layout
        zeros = jnp.zeros([cfg.dims[dim_name] for dim_name in vector], layout.param)
        self.b = nnx.Param(zeros, equation=self.equation)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, N, H], [B, T, F] or [B, t, D] -> the same shape."""
        # A product with ones spreads the bias over tokens. So its gradient is a product too, and the equation declares
        # the sum over tokens like that of any weight.
        bias = self.layout.gather(self.b[...], self.equation)
        result = self.layout.activation(self.equation.y)
        # In a split stream the ones have the shape of x, and the product is one of elements, like that of a norm's
        # scale: XLA of jaxlib 0.10.2 aborts on the gradient of ones [B, t] times a vector inside of a scan.
        in_stream = STREAM_TOKENS in self.tokens and self.layout.stream_axes
        dim_names = self.equation.y if in_stream else self.tokens
        ones = jnp.ones(x.shape[: len(dim_names)], bias.dtype, out_sharding=self.layout.activation(dim_names))
        spread = jnp.einsum(f"{dim_names},{self.equation.w}->{self.equation.y}", ones, bias, out_sharding=result)
        return (x + spread).astype(x.dtype)


class Matrix(nnx.Module):
    """A weight that a product `x,w->y` takes; the equation declares the weight's shape, sharding and fan-in.

    Normal with variance 1 / fan-in. With `qtype` it rests as codes and scales of this kind.

    `product` is a key of `MATMUL`. Where it is not "plain", the weight is gathered already, and its dimensions stand
    in the `order` of this kind.
    """

    def __init__(self, equation: str, cfg: Model, layout: Layout, initializer: Initializer, qtype: str | None = None):
        self.equation, self.layout, self.product, self.qtype = Equation(equation), layout, "plain", qtype
        fan_in = math.prod(cfg.dims[dim_name] for dim_name in self.equation.summed)
        # With variance 1 / fan-in, numbers of y have the variance of those of x.
        weight = initializer.normal([cfg.dims[dim_name] for dim_name in self.equation.w], layout.param, fan_in**-0.5)
        if self.qtype is None:
            self.w = nnx.Param(weight, equation=self.equation)
        else:
            quantized, scales = quantize(weight, self.equation.w, self.qtype)
            code_equation, scale_equation = self.equation.quantized()
            self.w = nnx.Param(quantized, equation=code_equation)
            self.w_scale = nnx.Param(scales, equation=scale_equation)

    def gathered(self, keep_dtype: bool = False) -> jax.Array:
        """Return the weight, of the shape `equation.w`, as the product takes it: gathered, and no longer quantized.

        With `keep_dtype` it may be in the dtype of its gradient (models/layer_scan.py).
        """
        if self.product != "plain":
            return self.w[...]
        if self.qtype is None:
            return self.layout.gather(self.w[...], self.equation, keep_dtype)
        if jnp.issubdtype(self.w.dtype, jnp.floating):  # inference/gathered.py has made it a matrix already
            return self.w[...]
        # Codes travel, not matrices: these are bytes, and each device makes the matrix of what it gathered.
        code_equation, scale_equation = self.equation.quantized()
        quantized = self.layout.gather(self.w[...], code_equation)
        scales = self.layout.gather(self.w_scale[...], scale_equation)
        spec = self.layout.in_use(code_equation)
        dtype, stage_axes = self.layout.compute, self.layout.stages_around
        return dequantize(quantized, scales, self.equation, self.qtype, dtype, spec, stage_axes)

    def multiply(self, x: jax.Array) -> jax.Array:
        """x -> y in the shapes of the equation."""
        return product(self.equation, x, self.gathered(), self.layout)


class Einsum(Matrix):
    """A weight and its product `x,w->y`.

    `Einsum("attention.q", "BTD,DNH->BTNH", ...)` maps [B, T, D] to [B, T, N, H] with a weight [D, N, H], and adds a
    bias [N, H] if `model.biases` names the projection.
    """

    def __init__(self, name: str, equation: str, cfg: Model, layout: Layout, initializer: Initializer):
        # Blocks of codes lie along D, so a weight without it rests as it is.
        qtype = cfg.lora.quantize_base if "D" in Equation(equation).w else None
        super().__init__(equation, cfg, layout, initializer, qtype)
        self.result_name = f"product.{name}"  # by which remat policies keep the result
        in_tower = name.startswith(TOWER)
        has_bias = in_tower or (cfg.biases is not None and re.search(cfg.biases, name))
        self.bias = Bias(self.equation.y, cfg, layout) if has_bias else identity
        is_frozen = in_tower and cfg.vision is not None and cfg.vision.freeze_tower
        has_update = cfg.lora.rank and not is_frozen and re.search(cfg.lora.targets, name)
        self.lora = LowRank(name, self.equation, cfg, layout, initializer) if has_update else None

    def __call__(self, x: jax.Array, dropout_key: DropoutKey | None = None) -> jax.Array:
        """x -> y in the shapes of the equation; `dropout_key` is for the update, and None outside of training."""
        kind = self.layout.block_matmul if self.product == "plain" else self.product
        w = self.gathered(keep_dtype=kind == "plain")
        if kind == "plain" and w.dtype != self.layout.compute:
            kind = "wide_gradient"
        # Of a product and its update the sum alone is kept: the backward pass needs neither by itself.
        has_sum = self.lora is not None and self.lora.magnitude is None
        y = product(self.equation, x, w, self.layout, kind, None if has_sum else self.result_name)
        if self.lora is None:
            return self.bias(y)
        if not has_sum:
            return self.bias(self.lora.normalize(x, y, w, dropout_key, kind))
        return checkpoint_name(self.bias(y) + self.lora(x, dropout_key), self.result_name)


def identity(x: jax.Array) -> jax.Array:
    """Return x of any shape: it stands in the place of a part that a family does not have."""
    return x


class MLP(nnx.Module):
    """A gated linear unit (Shazeer 2020, arXiv:2002.05202), or a plain MLP: [B, t, D] -> [B, t, D]."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer, kind: str, width: str = "F"):
        """`width` is the letter of the hidden width."""
        into, out = f"BTD,D{width}->BT{width}", f"BT{width},{width}D->BtD"
        self.layout = layout
        is_trained = cfg.mlp.activation == "xielu"  # the only activation with parameters
        self.activation = Xielu(f"BT{width}", layout) if is_trained else ACTIVATIONS[cfg.mlp.activation]
        self.gate = Einsum("mlp.gate", into, cfg, layout, initializer) if kind == "gated" else None
        self.up = Einsum("mlp.up", into, cfg, layout, initializer)
        self.down = Einsum("mlp.down", out, cfg, layout, initializer)

    def __call__(self, x, dropout_key, meet=identity) -> tuple[jax.Array, BlockSums]:
        """Return [B, t, D], and sums for the loss, of which this kind has none. `meet` is that of `OtherPart`."""
        x = self.layout.gather_tokens(x)
        up = meet(self.up(x, dropout_key))
        h = self.activation(up) if self.gate is None else self.activation(self.gate(x, dropout_key)) * up
        return self.down(h, dropout_key), NO_SUMS


def divide_by_rms(x: jax.Array, eps: float, axes: tuple[int, ...] = (-1,)) -> jax.Array:
    """Return x / rms(x) of any shape, computed in float32, the mean taken over `axes`, in the dtype of x."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axes, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale) in float32 (Zhang & Sennrich 2019).

    The mean is taken over the last dimension, or over the last two with `dims="NH"`. Gemma's offset is 1, and its
    scales are 0 at first.
    """

    def __init__(
        self,
        dim_names: str,
        cfg: Model,
        layout: Layout,
        dims: str | None = None,
        offset: float = 0.0,
        eps: float | None = None,
    ):
        """`eps` None is that of the decoder."""
        dims = dims or dim_names[-1]
        self.equation, self.layout = Equation(f"{dim_names},{dims}->{dim_names}"), layout
        self.eps = cfg.norm_eps if eps is None else eps
        self.offset, self.axes = offset, tuple(range(-len(dims), 0))
        scale = jnp.full([cfg.dims[dim_name] for dim_name in dims], 1 - offset, layout.param)
        self.scale = nnx.Param(scale, equation=self.equation)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, t, D], or with heads [B, T, N, H] -> the same shape and dtype."""
        scaled = self.multiply_by_scale(divide_by_rms(x.astype(jnp.float32), self.eps, self.axes))
        return checkpoint_name(scaled.astype(x.dtype), "norm")

    def multiply_by_scale(self, normed: jax.Array) -> jax.Array:
        """Return normed [B, t, D] * (offset + scale [D]), where the scale is the weight of the equation.

        The scale is repeated for every token before it is multiplied, so its gradient is a sum over tokens. The
        gradient of a product "BtD,D->BtD" is the same sum, but as a product of matrices, before which XLA's CPU backend
        copies both factors into another order.
        """
        scale, spec = self.layout.gather(self.scale[...], self.equation), self.layout.activation(self.equation.y)
        dims = [self.equation.y.index(dim_name) for dim_name in self.equation.w]
        return normed * jax.lax.broadcast_in_dim(self.offset + scale, normed.shape, dims, out_sharding=spec)


class LayerNorm(RMSNorm):
    """(x - mean) / standard deviation * (offset + scale) + bias over [B, t, D], in float32 (arXiv:1607.06450)."""

    def __init__(self, dim_names: str, cfg: Model, layout: Layout, *others: Any, **named: Any):
        super().__init__(dim_names, cfg, layout, *others, **named)
        self.bias = Bias(dim_names, cfg, layout)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, t, D] -> [B, t, D], in the dtype of x."""
        x32 = x.astype(jnp.float32)
        # In two passes: the mean of squares less the square of the mean loses digits where the mean is large.
        centred = x32 - jnp.mean(x32, self.axes, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, self.axes, keepdims=True) + self.eps)
        return checkpoint_name(self.bias(self.multiply_by_scale(normed)).astype(x.dtype), "norm")


NORMS: dict[str, Any] = {
    "rms": RMSNorm,
    "rms_unit_offset": partial(RMSNorm, offset=1.0),
    "layer": LayerNorm,
    "layer_unit_offset": partial(LayerNorm, offset=1.0),
}


def look_up(table: jax.Array, numbers: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Return rows [B, T, ...] of a table [V, ...] by numbers [B, T] int32, laid out as `spec`."""

    def rows_of(table: jax.Array, numbers: jax.Array) -> jax.Array:
        # In float32, so that the gradient of a row is added up in it: in bfloat16 a thousand ones add up to 256.
        return table.astype(jnp.float32).at[numbers].get(out_sharding=spec).astype(table.dtype)

    def backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
        from tunix.models.table_gradient import sum_by_number  # kernels are imported where there is a GPU

        table, numbers = residuals
        return sum_by_number(gradient, numbers, jax.typeof(table)), None

    if mesh_platform() != "gpu":
        return rows_of(table, numbers)
    on_gpu = jax.custom_vjp(rows_of)
    on_gpu.defvjp(lambda table, numbers: (rows_of(table, numbers), (table, numbers)), backward)
    return on_gpu(table, numbers)


class Embedding(nnx.Module):
    """Token vectors [V, D]; with a tied head used at both ends of the decoder."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        self.equation, self.layout, self.product = Equation("BTD,VD->BTV"), layout, "plain"
        self.scale = (cfg.embed_dim**0.5 if cfg.scaled_embedding else 1.0) * cfg.embedding_multiplier
        self.divisor, self.cap = cfg.logits_divisor, cfg.logits_cap
        table = initializer.normal((cfg.vocab_size, cfg.embed_dim), layout.param, cfg.embed_dim**-0.5)
        self.table = nnx.Param(table, equation=self.equation)

    def gathered(self) -> jax.Array:
        """Return the table [V, D] for `lookup` and `logits`, gathered once for both: its gradient travels once."""
        return self.layout.gather(self.table[...], self.equation)

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return the vectors [B, t, D] of tokens [B, T] int32, times sqrt(D) if the family scales them."""
        # A lookup, not a product with one-hot vectors [B, T, V]: these are as large as the logits.
        rows = self.layout.split_stream(look_up(table, tokens, self.layout.activation("BTD")))
        return rows * jnp.asarray(self.scale, table.dtype)

    def logits(self, table: jax.Array, x: jax.Array) -> jax.Array:
        """Return the logits [B, T, V] float32 of x [B, T, D], divided and capped if the family does so."""
        # float32 behind the product: exp and the sum over V of the loss need more digits than bfloat16 has.
        logits = product(self.equation, x, table, self.layout, self.product).astype(jnp.float32)
        logits = logits if self.divisor == 1 else logits / self.divisor
        return soft_cap(logits, self.cap)


class LearnedPositions(nnx.Module):
    """A vector for each place in the context [P, D], added to the vector of the token there."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        self.equation, self.layout = Equation("BtP,PD->BtD"), layout
        shape = (cfg.context_length, cfg.embed_dim)
        self.table = nnx.Param(initializer.normal(shape, layout.param, cfg.embed_dim**-0.5), equation=self.equation)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """[B, t, D] and [B, T] int32 -> [B, t, D]"""
        table, positions = self.layout.gather(self.table[...], self.equation), self.layout.split_stream(positions)
        return x + look_up(table, positions, self.layout.activation("BtD"))
