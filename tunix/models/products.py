"""Products of activations and weights. All matrix products of the model go through `product`."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from tunix.sharding.dims import Equation
from tunix.sharding.layout import Layout


def product(equation: Equation, x: jax.Array, w: jax.Array, layout: Layout, kind: str = "plain") -> jax.Array:
    """Return y of `x,w->y`, where the layout has activations of these dimensions.

    `w` is a gathered weight. `kind` is a key of `PRODUCTS`. The result has the name by which remat policies keep it.
    """
    return checkpoint_name(PRODUCTS[kind](equation, x, w, layout.activation(equation.y)), "product")


def _plain(equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Multiply in the dtype of the operands."""
    return jnp.einsum(equation.text, x, w, out_sharding=spec)


# A product with a backward rule of its own (jax.custom_vjp) gives what that rule needs, beside x and w, the name
# "product" in its forward rule. Without it the forward rule runs again in the backward pass.
PRODUCTS = {"plain": _plain}
