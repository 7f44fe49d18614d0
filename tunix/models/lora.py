"""Low-rank updates of frozen matrices: LoRA, and how its forms scale, start and normalize them.

    LoRA     y = x W + s x a b                       a [in, r] random, b [r, out] zero; s = alpha / r (arXiv:2106.09685)
    rsLoRA   s = alpha / sqrt(r)                     Kalajdzievski 2023, arXiv:2312.03732
    PiSSA    y = x W + s x (a b - a0 b0)             a0 b0 are W's r largest singular values; a, b start there
                                                     (Meng et al. 2024, arXiv:2404.02948)
    DoRA     y = m * x (W + s a b) / |W + s a b|     the norm is that of each output; m starts as |W|
                                                     (Liu et al. 2024, arXiv:2402.09353)

PiSSA's paper takes s a0 b0 out of the frozen matrix. Here W stays as it is, and a0 b0 are frozen factors beside it: the
sum is the same, the base is still the base, and PEFT has a name for the result: an update of rank 2 r.
"""

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec, auto_axes, reshard

from tunix.config import PROJECTIONS, Model
from tunix.config.layers import Lora
from tunix.models.matmul import product
from tunix.models.quantized import dequantize
from tunix.sharding.layout import Layout, drop_reduced
from tunix.sharding.table import Equation

if TYPE_CHECKING:
    from tunix.models.layers import DropoutKey, Initializer


class Factors(nnx.Module):
    """The two factors of an update; with PiSSA also those that it started from, which are frozen."""

    def __init__(self, updated: Equation, cfg: Model, layout: Layout, initializer: "Initializer"):
        self.updated, self.layout, self.scale = updated, layout, cfg.lora.scale
        self.first, self.second = updated.low_rank()
        fan_in = math.prod(cfg.dims[dim_name] for dim_name in self.first.summed)
        a, b = ([cfg.dims[dim_name] for dim_name in equation.w] for equation in (self.first, self.second))
        self.a = nnx.Param(initializer.normal(a, layout.param, fan_in**-0.5), equation=self.first)
        # a is random and b is 0: the update is 0 at first, and b has a gradient. With both at 0 neither would have one.
        self.b = nnx.Param(jnp.zeros(b, layout.param), equation=self.second)
        has_start = cfg.lora.init == "pissa"
        self.a_start = nnx.Param(jnp.zeros(a, layout.param), equation=self.first) if has_start else None
        self.b_start = nnx.Param(jnp.zeros(b, layout.param), equation=self.second) if has_start else None

    def gathered(self) -> list[tuple[float, jax.Array, jax.Array]]:
        """Return the pairs of factors, in the shapes of `first` and `second`, each with what multiplies its product."""
        pairs: list[Any] = [(self.scale, self.a, self.b)]
        if self.a_start is not None:  # not one product of twice the rank: jax 0.10.2 cannot join them on stages
            pairs.append((-self.scale, self.a_start, self.b_start))
        gather = self.layout.gather
        return [(scale, gather(a[...], self.first), gather(b[...], self.second)) for scale, a, b in pairs]


class LowRank(Factors):
    """A product's update: x a b * s, zero at first, or with DoRA the updated product with a norm of its own."""

    def __init__(self, name: str, updated: Equation, cfg: Model, layout: Layout, initializer: "Initializer"):
        super().__init__(updated, cfg, layout, initializer)
        self.dropout, self.index = cfg.lora.dropout, PROJECTIONS.index(name)
        # Generation divides the magnitudes by the norms once for all tokens (`inference/gathered.py`).
        self.is_divided = False
        equation = updated.magnitudes()
        ones = jnp.ones([cfg.dims[dim_name] for dim_name in equation.w], layout.param)
        self.magnitude = nnx.Param(ones, equation=equation) if cfg.lora.use_dora else None

    def __call__(self, x: jax.Array, dropout_key: "DropoutKey | None") -> jax.Array:
        """x -> the update of y, in the shapes of the updated equation."""
        x = self.layout.as_matmul_input(x, self.first)
        if dropout_key is not None and self.dropout:
            x = self._drop(x, dropout_key)
        updates = []
        for scale, a, b in self.gathered():
            between = product(self.first, x, a, self.layout)
            updates.append(product(self.second, between, b, self.layout, name=None) * scale)
        return sum(updates[1:], updates[0])

    def _drop(self, x: jax.Array, dropout_key: "DropoutKey") -> jax.Array:
        stays = dropout_key.sample(self.index, 1 - self.dropout, x.shape)
        # Divided by the share that stays, so that the mean of the sum is that without dropout.
        return jnp.where(reshard(stays, jax.typeof(x).sharding.spec), x / (1 - self.dropout), 0).astype(x.dtype)

    def normalize(
        self, x: jax.Array, y: jax.Array, w: jax.Array, dropout_key: "DropoutKey | None", kind: str
    ) -> jax.Array:
        """Return DoRA's result in the place of y, the product of x and the gathered matrix w, in the shapes of the
        equation; `kind` is that of y.

        With dropout, the update is that of m / |..| * (W + s a b) - W, as in PEFT: W alone sees every input.
        """
        x = self.layout.as_matmul_input(x, self.first)
        update, drops = self(x, dropout_key), dropout_key is not None and self.dropout
        if not drops:
            return self._multiply_by_gain(y + update, w)
        assert dropout_key is not None
        dropped = product(self.updated, self._drop(x, dropout_key), w, self.layout, kind)
        return y + self._multiply_by_gain(dropped + update, w) - dropped

    def _multiply_by_gain(self, y: jax.Array, w: jax.Array) -> jax.Array:
        assert self.magnitude is not None
        equation = self.updated.magnitudes()
        spec = self.layout.activation(equation.y)
        dims = [equation.y.index(dim_name) for dim_name in equation.w]

        def spread(vector: jax.Array) -> jax.Array:
            return jax.lax.broadcast_in_dim(vector, y.shape, dims, out_sharding=spec)

        gain = spread(self.layout.gather(self.magnitude[...], equation))
        if not self.is_divided:
            gain = gain / spread(self.norms(w))
        return (y * gain).astype(y.dtype)

    def norms(self, w: jax.Array) -> jax.Array:
        """Return the norms of the updated matrix, one for each output [...], float32, without a gradient (DoRA, section
        4.3)."""
        equation, total = self.updated, _detach(w).astype(jnp.float32)
        spec = jax.typeof(total).sharding.spec
        for scale, a, b in self.gathered():
            a32, b32 = (_detach(each).astype(jnp.float32) for each in (a, b))
            total += scale * _multiply(a32, b32, equation, spec)
        return jnp.sqrt(jnp.sum(total * total, [equation.w.index(dim_name) for dim_name in equation.summed]))


class ExpertFactors(Factors):
    """The update of a matrix [X, in, out] of experts: each expert has factors of its own."""

    def as_local_inputs(self) -> list[tuple[jax.Array, jax.Array]]:
        """Return the pairs of factors, gathered, as a `shard_map` takes them; the second one times its number."""
        local = self.layout.as_local_input
        return [(local(a), (local(b).astype(jnp.float32) * scale).astype(b.dtype)) for scale, a, b in self.gathered()]


def _detach(x: jax.Array) -> jax.Array:
    """Return an array that nothing differentiates; `reduced` in its type says how a gradient would be summed."""
    return jax.lax.stop_gradient(drop_reduced(x))


def _multiply(a: jax.Array, b: jax.Array, updated: Equation, spec: PartitionSpec) -> jax.Array:
    """Return a b in the shape of the updated matrix."""
    first, second = (equation.w for equation in updated.low_rank())
    return jnp.einsum(f"{first},{second}->{updated.w}", a, b, out_sharding=spec)


# Updates of whole trees of parameters. `weights` is the tree of `state.Weight` of the same parameters.


def merge(params: dict[str, Any], weights: dict[str, Any], cfg: Lora, layout: Layout) -> dict[str, Any]:
    """Return the tree without its low-rank updates: each is added to its matrix, computed in float32.

    Quantized matrices are matrices again, in `layout.param`.
    """
    if not isinstance(params, dict):
        return params
    merged: Any = {name: merge(leaf, weights[name], cfg, layout) for name, leaf in params.items() if name != "lora"}
    if "w_scale" in params:
        del merged["w_scale"]
        merged["w"] = _make_matrix(params, weights, cfg, layout).astype(layout.param)
    if "lora" in params:
        equation, lora = weights["w"].equation.dequantized(), params["lora"]
        w, factors = merged["w"].astype(jnp.float32), {name: leaf.astype(jnp.float32) for name, leaf in lora.items()}
        spec = jax.typeof(w).sharding.spec
        total = w + _multiply(factors["a"], factors["b"], equation, spec) * cfg.scale
        if "a_start" in factors:
            total -= _multiply(factors["a_start"], factors["b_start"], equation, spec) * cfg.scale
        if "magnitude" in factors:
            dims = [equation.w.index(dim_name) for dim_name in equation.summed]
            gain = factors["magnitude"] / jnp.sqrt(jnp.sum(total * total, dims))
            kept = [n for n in range(w.ndim) if n not in dims]
            total = total * jax.lax.broadcast_in_dim(gain, w.shape, kept, out_sharding=spec)
        merged["w"] = total.astype(merged["w"].dtype)
    return merged


def _make_matrix(params: dict[str, Any], weights: dict[str, Any], cfg: Lora, layout: Layout) -> jax.Array:
    """Return the matrix that a node of the tree holds, in float32; codes are numbers again."""
    if "w_scale" not in params:
        return params["w"].astype(jnp.float32)
    equation = weights["w"].equation
    spec = layout.in_use(equation)
    quantized, scales = reshard(params["w"], spec), reshard(params["w_scale"], spec)
    return dequantize(quantized, scales, equation.dequantized(), str(cfg.quantize_base), "float32", spec)


def start_updates(
    params: dict[str, Any], initial: dict[str, Any] | None, weights: dict[str, Any], cfg: Lora, layout: Layout
) -> dict[str, Any]:
    """Return the parameters with what updates take from their matrices: PiSSA's factors, DoRA's magnitudes.

    Updates that `initial` has, those of an adapter, stay. To be compiled.
    """
    if not isinstance(params, dict) or (cfg.init != "pissa" and not cfg.use_dora):
        return params
    given = initial or {}
    tree = {name: start_updates(leaf, given.get(name), weights[name], cfg, layout) for name, leaf in params.items()}
    if "lora" not in tree or (given.get("lora") or {}).get("a") is not None:
        return tree
    lora, equation = dict(tree["lora"]), weights["w"].equation.dequantized()
    w = _make_matrix(params, weights, cfg, layout)
    if cfg.init == "pissa":
        a, b = _take_largest(w, equation, cfg, [layout.stored(weights["lora"][name].equation) for name in "ab"])
        dtype = lora["a"].dtype
        lora |= {"a": a.astype(dtype), "b": b.astype(dtype)}
        lora |= {"a_start": lora["a"], "b_start": lora["b"]}
    if "magnitude" in lora:  # the update is zero, so the norms are those of the matrix
        w = drop_reduced(w)
        norms = jnp.sqrt(jnp.sum(w * w, [equation.w.index(dim_name) for dim_name in equation.summed]))
        spec = layout.stored(weights["lora"]["magnitude"].equation)
        lora["magnitude"] = reshard(norms, spec).astype(lora["magnitude"].dtype)
    return tree | {"lora": lora}


def _take_largest(
    w: jax.Array, equation: Equation, cfg: Lora, specs: list[PartitionSpec]
) -> tuple[jax.Array, jax.Array]:
    """Return factors whose product, times the scale, has the largest singular values of each matrix of w."""
    copies, summed = equation.copies, equation.summed
    outer = "".join(dim_name for dim_name in equation.w if dim_name not in copies + summed)
    first, second = (each.w for each in equation.low_rank())

    def factor(w):
        turned = w.transpose([equation.w.index(dim_name) for dim_name in copies + summed + outer])
        sizes = dict(zip(copies + summed + outer, turned.shape, strict=True)) | {"r": cfg.rank}
        num_in, num_out = (math.prod(sizes[dim_name] for dim_name in each) for each in (summed, outer))
        matrices = turned.reshape(-1, num_in, num_out)

        def decompose(matrix):
            u, values, v = jnp.linalg.svd(matrix, full_matrices=False)
            roots = jnp.sqrt(values[: cfg.rank] / cfg.scale)
            # Zeros stand for the singular values that a matrix with a side below the rank lacks.
            missing = max(0, cfg.rank - len(values))
            a, b = u[:, : cfg.rank] * roots, roots[:, None] * v[: cfg.rank]
            return jnp.pad(a, ((0, 0), (0, missing))), jnp.pad(b, ((0, missing), (0, 0)))

        a, b = jax.lax.map(decompose, matrices)  # one at a time: the decomposition needs several times its memory
        ordered = []
        for array, ours, theirs in ((a, first, copies + summed + "r"), (b, second, copies + "r" + outer)):
            shaped = array.reshape([sizes[dim_name] for dim_name in theirs])
            ordered.append(shaped.transpose([theirs.index(dim_name) for dim_name in ours]))
        return tuple(ordered)

    # XLA lays out the decomposition, which names no mesh axes.
    return auto_axes(factor, out_sharding=tuple(specs))(w)


def remove_updates(params: Any) -> Any:
    """Return the parameters whose updates are 0: with b = 0, or with PiSSA's factors where they started."""
    if not isinstance(params, dict):
        return params
    tree = {name: remove_updates(node) for name, node in params.items()}
    if "lora" in tree:
        lora = tree["lora"]
        start = {"a": lora["a_start"], "b": lora["b_start"]} if "a_start" in lora else {"b": jnp.zeros_like(lora["b"])}
        tree["lora"] = lora | start
    return tree
