"""Products of activations and weights. All matrix products of the model go through `product`."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, PartitionSpec, reshard

from tunix.base.dotted_path import import_object
from tunix.models import cpu_library
from tunix.models.kernels import mesh_platform
from tunix.models.table import GROUPED, MATMUL_DTYPES
from tunix.sharding.arrays import vary_alike
from tunix.sharding.layout import Layout, drop_reduced, gradient_spec
from tunix.sharding.table import Equation

# Products of 8-bit floats ("FP8 Formats for Deep Learning", Micikevicius et al. 2022, arXiv:2209.05433).
#
# Activations and weights are rounded to e4m3 (3 bits of fraction, largest 448), gradients to e5m2 (2 bits, largest
# 57,344). Each array is divided by one scale before it is rounded: a power of two that follows from its own largest
# number ("current scaling"), so nothing is remembered between steps. All three products of a weight multiply 8-bit
# numbers, and the scales of both factors multiply the result:
#
#     x, w -> y           x [e4m3] . w [e4m3]    x scale of x . scale of w
#     backward, of x      g [e5m2] . w [e4m3]    x scale of g . scale of w
#     backward, of w      x [e4m3] . g [e5m2]    x scale of x . scale of g
#
# The largest number is that of all devices, so the same numbers are rounded alike on every mesh. That is one all-reduce
# of a scalar for each activation and each gradient of a product, and for each weight that is split in use (tp). A power
# of two loses no bit, so it makes no difference when the result is multiplied.
#
# Chips with products of 8-bit floats run them as they are (cuBLASLt's or Triton's). Elsewhere XLA widens both factors
# before it multiplies, which gives the same sums in more time.

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def fp8_product(equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Return y of `x,w->y`, of the equation's shape, laid out as `spec`. All three products take 8-bit floats."""
    x_spec, w_spec = (jax.typeof(each).sharding.spec for each in (x, w))
    dtype = x.dtype

    @jax.custom_vjp
    def multiply(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        rounded = _round(x, FORWARD), _round(w, FORWARD)
        return _multiply(equation.text, *rounded, dtype, spec), rounded

    def backward(rounded, gradient):
        x8, w8 = rounded
        g8 = _round(gradient, GRADIENT)
        d_x = _multiply(f"{equation.y},{equation.w}->{equation.x}", g8, w8, dtype, gradient_spec(x_spec))
        d_w = _multiply(f"{equation.x},{equation.y}->{equation.w}", x8, g8, w.dtype, gradient_spec(w_spec))
        return d_x, d_w

    multiply.defvjp(forward, backward)
    return multiply(x, w)


Rounded = tuple[jax.Array, jax.Array]  # numbers in 8 bits, and the power of two that they were divided by (float32)


def _round(x: jax.Array, dtype: jnp.dtype) -> Rounded:
    """Return an array in 8 bits, and its scale."""
    x = drop_reduced(x)  # nothing differentiates what follows
    # Remat policies that keep products keep their scales: the backward pass asks no other device for them again.
    scale = checkpoint_name(_scale(jnp.max(jnp.abs(x)), dtype), "product")
    # Without a barrier XLA may widen the numbers at once, and drop both conversions: nothing would be rounded.
    return jax.lax.optimization_barrier((x / scale.astype(x.dtype)).astype(dtype)), scale


def _scale(max_value: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the smallest power of two that brings `max_value` below the largest power of two of `dtype`."""
    # A float32 above zero has 8 bits of exponent and 23 of fraction. jnp.frexp and jnp.ldexp of JAX 0.12 lose the
    # sharding under vmap, which is how stages run.
    bits = jax.lax.bitcast_convert_type(max_value.astype(jnp.float32), jnp.int32)
    exponent = (bits >> 23) - 126  # largest is less than 2 to this power
    # e4m3: numbers up to 448, of which 256 = 2^8 is the largest power of two. A largest number of 1000 < 2^10 gets the
    # scale 2^(10 - 8) = 4, and becomes 250.
    power = exponent - (jnp.finfo(dtype).maxexp - 1)
    # Zeros have any scale. A number that is not finite leaves none in the result, and the step is skipped.
    scale = jax.lax.bitcast_convert_type((jnp.clip(power, -120, 120) + 127) << 23, jnp.float32)
    return jnp.where(jnp.isfinite(max_value), scale, jnp.nan)


def _multiply(text: str, a: Rounded, b: Rounded, dtype: jnp.dtype, spec: PartitionSpec) -> jax.Array:
    """Return the product of two arrays in 8 bits times both scales, in `dtype`, laid out as `spec`."""
    (a8, scale_a), (b8, scale_b) = a, b
    y = jnp.einsum(text, a8, b8, preferred_element_type=dtype, out_sharding=spec)
    # A factor of a sum that is still open over some axes must be `reduced` over them.
    scale = reshard(scale_a * scale_b, PartitionSpec(reduced=spec.unreduced))
    return y * scale.astype(dtype)


MANY_NUMBERS = 2**16  # of x or y, from which on `plain` multiplies matrices
FEW_ROWS = 64  # rows of x up to which `few_rows` differs from `plain`; from 128 on both are equally fast
FEWER_ROWS = 8  # rows of 16 bits up to which x comes first again


def product(
    equation: Equation, x: jax.Array, w: jax.Array, layout: Layout, kind: str = "plain", name: str | None = "product"
) -> jax.Array:
    """Return y of `x,w->y`, in the shapes of the equation, where the layout has activations of these dimensions.

    `w` is a gathered weight. `kind` is a key of `MATMUL`. `name` is the one by which remat policies keep the result;
    None where they keep what is made of it.
    """
    einsum = Equation(equation.einsum_text)
    y = MATMUL[kind].multiply(einsum, layout.as_matmul_input(x, equation), w, layout.result(equation))
    y = layout.scatter_tokens(y, equation)
    return y if name is None else checkpoint_name(y, name)


def _plain(equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Multiply in the dtype of the operands: by XLA's library for CPUs where it takes the product, else as two matrices
    where `_Matrices` fit, else as the equation says.

    The gradient of a weight is a sum over sequences and tokens. Before XLA's CPU backend sums over two dimensions, it
    copies an operand into another order, and it takes the gradient of the result, with all that computes it:

        [B, T, D] . [B, T, F] -> [D, F]     copies [B, T, F], one number at a time
        [BT, D] . [BT, F]     -> [D, F]     copies nothing
    """
    if cpu_library.supports_matmul(equation, x, w):
        return cpu_library.multiply(equation, x, w, spec)
    matrices = _Matrices.find(equation, x, w, spec, MANY_NUMBERS)
    if matrices is None:
        return jnp.einsum(equation.text, x, w, out_sharding=spec)
    return matrices.multiply(equation, x, w, spec)


def _with_wide_gradient(equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Multiply in the dtype of x; the gradient of w has the wider dtype of w, in which products are summed anyway."""
    w_spec = gradient_spec(jax.typeof(w).sharding.spec)

    @jax.custom_vjp
    def multiply(x, w):
        return _plain(equation, x, w.astype(x.dtype), spec)

    def backward(factors, gradient):
        x, w = factors
        (d_x,) = jax.vjp(lambda x: _plain(equation, x, w.astype(x.dtype), spec), x)[1](gradient)
        text = f"{equation.x},{equation.y}->{equation.w}"
        return d_x, jnp.einsum(text, x, gradient, preferred_element_type=w.dtype, out_sharding=w_spec)

    multiply.defvjp(lambda x, w: (multiply(x, w), (x, w)), backward)
    return multiply(x, w)


class _Matrices(NamedTuple):
    """A product `x,w->y` as one of two matrices: [rows, summed] and [summed, out] or [out, summed]."""

    text: str  # for einsum
    out: str  # letters of the dimensions of y that are those of w
    num_rows: int
    num_summed: int
    x_spec: PartitionSpec
    w_spec: PartitionSpec
    y_spec: PartitionSpec

    @classmethod
    def find(
        cls, equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec, min_size: int
    ) -> "_Matrices | None":
        """Return the matrices; None where they need another order of numbers, and where x and y have fewer numbers.

        For small ones the order of sums, and so the last digit, is that of earlier versions.
        """
        rows, summed = equation.batch, equation.summed
        out = "".join(dim_name for dim_name in equation.y if dim_name not in rows)
        orders = {summed + out: ("rs,so->ro", summed), out + summed: ("rs,os->ro", out)}
        if equation.x != rows + summed or equation.y != rows + out or equation.w not in orders:
            return None
        num_rows = math.prod(x.shape[: len(rows)])
        num_summed = x.size // num_rows
        if num_rows * max(num_summed, w.size // num_summed) < min_size:
            return None
        text, first = orders[equation.w]
        mesh = jax.typeof(x).sharding.mesh
        x_spec = _merge(jax.typeof(x).sharding.spec, len(rows), mesh)
        w_spec = _merge(jax.typeof(w).sharding.spec, len(first), mesh)
        y_spec = _merge(spec, len(rows), mesh)
        if x_spec is None or w_spec is None or y_spec is None:
            return None
        return cls(text, out, num_rows, num_summed, x_spec, w_spec, y_spec)

    def multiply(
        self, equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec, result_dtype: str | None = None
    ) -> jax.Array:
        """Return y of the equation, laid out as `spec`; the product gives numbers of `result_dtype`, if any."""
        x2 = jax.lax.reshape(x, (self.num_rows, self.num_summed), out_sharding=self.x_spec)
        shape = (self.num_summed, -1) if self.text == "rs,so->ro" else (-1, self.num_summed)
        w2 = jnp.reshape(w, shape, out_sharding=self.w_spec)
        y_spec = self.y_spec
        if is_twice := self.num_rows == 1 and result_dtype is not None:
            # XLA's library takes no product with a single row: its loop would widen the weight.
            x2, y_spec = reshard(x2, PartitionSpec(None, self.x_spec[1])), PartitionSpec(None, self.y_spec[1])
            x2 = jnp.concatenate([x2, x2])
        y2 = jnp.einsum(self.text, x2, w2, preferred_element_type=result_dtype, out_sharding=y_spec).astype(x.dtype)
        y2 = y2[:1] if is_twice else y2
        out = [w.shape[equation.w.index(dim_name)] for dim_name in self.out]
        return jax.lax.reshape(y2, (*x.shape[: len(equation.batch)], *out), out_sharding=spec)


def _merge(spec: PartitionSpec, first: int, mesh: AbstractMesh) -> PartitionSpec | None:
    """Return where an array lies as a matrix of its `first` dimensions and the others.

    Each device keeps its numbers in their order where only the first dimension of a group is split; else None.
    """
    # [B, T, D] as [BT, D], with B split in two: each device has rows that follow one another. With T split, a device
    # would have some rows of each sequence, which no spec of [BT, D] says.
    merged = []
    for group in (spec.partitions[:first], spec.partitions[first:]):
        dims = [(axes,) if isinstance(axes, str) else axes or () for axes in group]
        if any(mesh.shape[axis] > 1 for axes in dims[1:] for axis in axes):
            return None
        merged.append(tuple(axis for axes in dims for axis in axes) or None)
    return PartitionSpec(*merged, reduced=spec.reduced, unreduced=spec.unreduced)


def _few_rows(equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Multiply as XLA's CPU backend is fastest for few rows of x; the summed dimensions of `w` stand last.

    That backend copies its second factor into an order of its own at each product, and reads the first one as it lies.
    With few rows of x that copy of the weight takes most of the time, so the weight comes first and x is copied:

        plain       x [rows, D] . w [D, F]    -> [rows, F]        copies w
        few rows    w [F, D] . x [rows, D]    -> [F, rows]        copies x; the small result is transposed

    With more rows, and in 16 bits with fewer, it multiplies matrices. As the equation says, [B, T, D] . [N, H, D], XLA
    would turn the weight first.
    """
    equation, num_rows = equation.summed_last(), math.prod(x.shape[:2])
    is_narrow = cpu_library.supports_few_rows(x, w)
    if num_rows > FEW_ROWS or (is_narrow and num_rows <= FEWER_ROWS):
        matrices = _Matrices.find(equation, x, w, spec, MANY_NUMBERS if num_rows > FEW_ROWS else 0)
        if matrices is not None:
            return matrices.multiply(equation, x, w, spec, "float32" if is_narrow else None)
    if num_rows > FEW_ROWS:
        return _plain(equation, x, w, spec)
    equation, rows = equation.in_order(), equation.batch
    y = "".join(dim_name for dim_name in equation.y if dim_name not in rows) + rows
    out_sharding = PartitionSpec(*(spec[equation.y.index(dim_name)] for dim_name in y))
    # A float32 result, which is cast before anything turns it: so XLA's library takes factors of 16 bits as they are.
    turned = jnp.einsum(
        f"{equation.w},{equation.x}->{y}", w, x, preferred_element_type=jnp.float32, out_sharding=out_sharding
    ).astype(x.dtype)
    # Without a barrier XLA folds the transposition into the product, and swaps the factors again.
    return jnp.einsum(f"{y}->{equation.y}", jax.lax.optimization_barrier(turned))


class ProductKind(NamedTuple):
    """A kind of product.

    One with a backward rule of its own (jax.custom_vjp) gives what that rule needs, beside x and w, the name "product"
    in its forward rule. Without it the forward rule runs again in the backward pass.
    """

    # (`x,w->y`, x, the gathered weight, where y lies) -> y
    multiply: Callable[[Equation, jax.Array, jax.Array, PartitionSpec], jax.Array]
    # -> the equation, whose weight has its dimensions in the order that `multiply` takes
    order: Callable[[Equation], Equation] = lambda equation: equation
    few_rows_on: tuple[str, ...] = ()  # platforms where it is the fastest for few rows of x; elsewhere that is "plain"


MATMUL = {
    "plain": ProductKind(_plain),
    "wide_gradient": ProductKind(_with_wide_gradient),
    "few_rows": ProductKind(_few_rows, Equation.summed_last, few_rows_on=("cpu",)),
    **{name: ProductKind(import_object(each.product)) for name, each in MATMUL_DTYPES.items()},
}


def product_of_few_rows() -> str:
    """Return the key of `MATMUL` that is fastest for few rows of x, on the devices of the mesh in use."""
    platform = mesh_platform()
    fitting = [name for name, kind in MATMUL.items() if platform in kind.few_rows_on]
    return fitting[0] if fitting else "plain"


def grouped_product(rows: jax.Array, w: jax.Array, sizes: jax.Array, kind: str) -> jax.Array:
    """Return [R, out] of rows [R, in] sorted by group, weights [X, in, out] and the number of rows of each group [X].

    The arrays are those of one device. `kind` is a key of `GROUPED` or a dotted path. Results of rows behind the last
    group are undefined, and so are the gradients of these rows.
    """
    # As types that vary over the same axes: JAX's own product does not take those of low-rank factors as they are.
    return checkpoint_name(import_object(GROUPED.get(kind, kind))(*vary_alike(rows, w, sizes)), "product")
