"""Low-rank updates as arrays: added to the matrices they belong to."""

from typing import Any

import jax
import jax.numpy as jnp

from tunix.config import Lora


def merge(params: dict[str, Any], weights: dict[str, Any], cfg: Lora) -> dict[str, Any]:
    """The tree without its low-rank updates: each matrix w becomes w + a b * alpha / r, computed in float32.

    `weights` is the tree of `state.Weight` of the same parameters.
    """
    if not isinstance(params, dict):
        return params
    merged = {name: merge(leaf, weights[name], cfg) for name, leaf in params.items() if name != "lora"}
    if "lora" in params:
        w, lora = weights["w"].equation.w, params["lora"]
        first, second = (weights["lora"][name].equation.w for name in "ab")
        spec = jax.typeof(params["w"]).sharding.spec
        update = jnp.einsum(
            f"{first},{second}->{w}", *(lora[name].astype(jnp.float32) for name in "ab"), out_sharding=spec
        )
        total = params["w"].astype(jnp.float32) + update * (cfg.alpha / cfg.rank)
        merged["w"] = total.astype(params["w"].dtype)
    return merged
