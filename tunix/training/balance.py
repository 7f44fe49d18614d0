"""Biases of routers follow the loads of experts, without a gradient (Wang et al. 2024, arXiv:2408.15664)."""

from typing import Any

import jax
import jax.numpy as jnp

from tunix.models.block_sums import Routing


def move_biases(params: dict[str, Any], weights: dict[str, Any], routing: Routing, rate: jax.Array) -> dict[str, Any]:
    """Return the parameters with the bias [L, X] of each expert raised or lowered by `rate`.

    It rises where the expert had fewer tokens in this step than the mean of its layer, and falls where it had more.
    `weights` is the tree of `state.Weight`.
    """
    # The sign alone: a bias moves as far for an expert with few tokens as for one with none, so it never jumps.
    missing = jnp.sign(jnp.mean(routing.load, 1, keepdims=True) - routing.load)
    return jax.tree.map(
        lambda param, weight: param + rate * missing if weight.equation.is_choice else param, params, weights
    )
