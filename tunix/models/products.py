"""Products of activations and weights. All matrix products of the model go through `product`."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from tunix.base.dotted import import_object
from tunix.config.kernel_tables import GROUPED
from tunix.models.fp8 import fp8_product
from tunix.sharding.dims import Equation
from tunix.sharding.layout import Layout

FEW_ROWS = 64  # rows of x up to which `few_rows` differs from `plain`; from 128 on both are equally fast


def product(
    equation: Equation, x: jax.Array, w: jax.Array, layout: Layout, kind: str = "plain", name: str = "product"
) -> jax.Array:
    """Return y of `x,w->y`, where the layout has activations of these dimensions.

    `w` is a gathered weight. `kind` is a key of `PRODUCTS`. `name` is the one by which remat policies keep the result.
    """
    einsum = Equation(equation.einsum_text)
    y = PRODUCTS[kind](einsum, layout.meet(x, equation), w, layout.result(equation))
    return checkpoint_name(layout.leave_branch(y, equation), name)


def _plain(equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Multiply in the dtype of the operands."""
    return jnp.einsum(equation.text, x, w, out_sharding=spec)


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


# A product with a backward rule of its own (jax.custom_vjp) gives what that rule needs, beside x and w, the name
# "product" in its forward rule. Without it the forward rule runs again in the backward pass.
PRODUCTS = {"plain": _plain, "few_rows": _few_rows, "fp8": fp8_product}
# The order in which the dimensions of a weight stand for each kind of product.
WEIGHTS: dict[str, Callable[[Equation], Equation]] = {
    "plain": lambda equation: equation,
    "fp8": lambda equation: equation,
    "few_rows": Equation.summed_last,
}


def grouped_product(rows: jax.Array, w: jax.Array, sizes: jax.Array, kind: str = "auto") -> jax.Array:
    """Return [R, out] of rows [R, in] sorted by group, weights [X, in, out] and the number of rows of each group [X].

    The arrays are those of one device. `kind` is a key of `GROUPED` or a dotted path. Results of rows
    behind the last group are undefined, and so are the gradients of these rows.
    """
    return checkpoint_name(import_object(GROUPED.get(kind, kind))(rows, w, sizes), "product")
