"""Products of activations and weights. All matrix products of the model go through `product`."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, PartitionSpec

from tunix.base.dotted import import_object
from tunix.config.kernel_tables import GROUPED, MATMUL_DTYPES
from tunix.models.kernels import mesh_device
from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout

MANY_NUMBERS = 2**16  # of x or y, from which on `plain` multiplies matrices
FEW_ROWS = 64  # rows of x up to which `few_rows` differs from `plain`; from 128 on both are equally fast


def product(
    equation: Equation, x: jax.Array, w: jax.Array, layout: Layout, kind: str = "plain", name: str = "product"
) -> jax.Array:
    """Return y of `x,w->y`, where the layout has activations of these dimensions.

    `w` is a gathered weight. `kind` is a key of `PRODUCTS`. `name` is the one by which remat policies keep the result.
    """
    einsum = Equation(equation.einsum_text)
    y = PRODUCTS[kind].multiply(einsum, layout.meet(x, equation), w, layout.result(equation))
    return checkpoint_name(layout.leave_branch(y, equation), name)


def _plain(equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Multiply in the dtype of the operands: as two matrices where `_Matrices` fit, else as the equation says.

    The gradient of a weight is a sum over sequences and tokens. Before XLA's CPU backend sums over two dimensions, it
    copies an operand into another order, and it takes the gradient of the result, with all that computes it:

        [B, T, D] . [B, T, F] -> [D, F]     copies [B, T, F], one number at a time
        [BT, D] . [BT, F]     -> [D, F]     copies nothing
    """
    matrices = _Matrices.find(equation, x, w, spec)
    if matrices is None:
        return jnp.einsum(equation.text, x, w, out_sharding=spec)
    x2 = jax.lax.reshape(x, (matrices.num_rows, matrices.num_summed), out_sharding=matrices.x_spec)
    shape = (matrices.num_summed, -1) if matrices.text == "rs,so->ro" else (-1, matrices.num_summed)
    w2 = jnp.reshape(w, shape, out_sharding=matrices.w_spec)
    y2 = jnp.einsum(matrices.text, x2, w2, out_sharding=matrices.y_spec)
    out = [w.shape[equation.w.index(letter)] for letter in matrices.out]
    return jax.lax.reshape(y2, (*x.shape[: len(equation.batch)], *out), out_sharding=spec)


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
    def find(cls, equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> "_Matrices | None":
        """Return the matrices; None where they need another order of numbers, and where x and y are small.

        For small ones the order of sums, and so the last digit, is that of earlier versions.
        """
        rows, summed = equation.batch, equation.summed
        out = "".join(letter for letter in equation.y if letter not in rows)
        orders = {summed + out: ("rs,so->ro", summed, out), out + summed: ("rs,os->ro", out, summed)}
        if equation.x != rows + summed or equation.y != rows + out or equation.w not in orders:
            return None
        num_rows = math.prod(x.shape[: len(rows)])
        num_summed = x.size // num_rows
        if num_rows * max(num_summed, w.size // num_summed) < MANY_NUMBERS:
            return None
        text, first, _ = orders[equation.w]
        x_type, w_type = jax.typeof(x).sharding, jax.typeof(w).sharding
        x_spec = _merge(x_type.spec, len(rows), x_type.mesh)
        w_spec = _merge(w_type.spec, len(first), x_type.mesh)
        y_spec = _merge(spec, len(rows), x_type.mesh)
        if x_spec is None or w_spec is None or y_spec is None:
            return None
        return cls(text, out, num_rows, num_summed, x_spec, w_spec, y_spec)


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
    """
    equation = equation.summed_last()
    if math.prod(x.shape[:2]) > FEW_ROWS:
        return _plain(equation, x, w, spec)
    rows = equation.batch
    y = "".join(letter for letter in equation.y if letter not in rows) + rows
    out_sharding = PartitionSpec(*(spec[equation.y.index(letter)] for letter in y))
    turned = jnp.einsum(f"{equation.w},{equation.x}->{y}", w, x, out_sharding=out_sharding)
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


PRODUCTS = {
    "plain": ProductKind(_plain),
    "few_rows": ProductKind(_few_rows, Equation.summed_last, few_rows_on=("cpu",)),
    **{name: ProductKind(import_object(each.product)) for name, each in MATMUL_DTYPES.items()},
}


def product_of_few_rows() -> str:
    """Return the key of `PRODUCTS` that is fastest for few rows of x, on the devices of the mesh in use."""
    device = mesh_device()
    fitting = [name for name, kind in PRODUCTS.items() if device is not None and device.platform in kind.few_rows_on]
    return fitting[0] if fitting else "plain"


def grouped_product(rows: jax.Array, w: jax.Array, sizes: jax.Array, kind: str = "auto") -> jax.Array:
    """Return [R, out] of rows [R, in] sorted by group, weights [X, in, out] and the number of rows of each group [X].

    The arrays are those of one device. `kind` is a key of `GROUPED` or a dotted path. Results of rows
    behind the last group are undefined, and so are the gradients of these rows.
    """
    return checkpoint_name(import_object(GROUPED.get(kind, kind))(rows, w, sizes), "product")
