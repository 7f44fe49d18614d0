"""Norms of each weight in each layer: of its gradient, of the weight, and of its change in a step.

They tell which layer a spike comes from, and whether all layers learn at the same pace: in a healthy run, the norm of a
change over the norm of its weight is about the same in every layer.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.models.paths import named
from tunix.sharding.equations import Equation

NORMS = "layer_norms"  # their name among the numbers of a step


def compute_norms(weights: dict[str, Any], trees: dict[str, dict[str, Any]]) -> dict[str, jax.Array]:
    """Return the norms of the leaves of `trees`, such as {"gradient": ...}, keyed `gradient/blocks.attention.q.w`.

    `weights` is the tree of `Weight` of what is trained. A weight that is stacked over layers gives a norm for each
    layer, [L]; any other one a scalar.
    """
    equations = {name: weight.equation for name, weight in named(weights)}
    return {
        f"{what}/{name}": _compute_norm(leaf, equations[name])
        for what, tree in trees.items()
        for name, leaf in named(tree)
    }


def compute_norms_if_due(
    is_due: jax.Array, weights: dict[str, Any], trees: dict[str, dict[str, Any]]
) -> dict[str, jax.Array]:
    """Return `compute_norms` where they are due in a step, else zeros in their place."""
    # Both ways of a condition must return equal shapes; a step between two due ones reads none of the trees.
    shapes = jax.eval_shape(partial(compute_norms, weights), trees)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.cond(is_due, partial(compute_norms, weights), lambda _: zeros, trees)


def _compute_norm(x: jax.Array, equation: Equation) -> jax.Array:
    """Return the norm of each layer, whole on every device; the sum over split dimensions is one over devices."""
    first = int(equation.is_stacked)
    squares = jnp.square(x.astype(jnp.float32)).sum(range(first, x.ndim))
    return reshard(jnp.sqrt(squares), PartitionSpec(*[None] * first))
