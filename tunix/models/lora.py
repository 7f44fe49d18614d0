"""Low-rank updates as arrays: added to the matrices they belong to."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import reshard

from tunix.config import Lora
from tunix.models.quantized import dequantize
from tunix.sharding.layout import Layout


def merge(params: dict[str, Any], weights: dict[str, Any], cfg: Lora, layout: Layout) -> dict[str, Any]:
    """Return the tree without its low-rank updates: each matrix w becomes w + a b * alpha / r, computed in float32.

    Quantized matrices are matrices again, in `layout.param`. `weights` is the tree of `state.Weight` of the same
    parameters.
    """
    if not isinstance(params, dict):
        return params
    merged: Any = {name: merge(leaf, weights[name], cfg, layout) for name, leaf in params.items() if name != "lora"}
    if "w_scale" in params:
        equation, scales = weights["w"].equation, merged.pop("w_scale")
        spec = layout.in_use(equation)
        codes, scales, qtype = reshard(params["w"], spec), reshard(scales, spec), str(cfg.quantize_base)
        merged["w"] = dequantize(codes, scales, equation.dequantized(), qtype, "float32", spec).astype(layout.param)
    if "lora" in params:
        w, lora = weights["w"].equation.dequantized().w, params["lora"]
        first, second = (weights["lora"][name].equation.w for name in "ab")
        spec = jax.typeof(merged["w"]).sharding.spec
        update = jnp.einsum(
            f"{first},{second}->{w}", *(lora[name].astype(jnp.float32) for name in "ab"), out_sharding=spec
        )
        total = merged["w"].astype(jnp.float32) + update * (cfg.alpha / cfg.rank)
        merged["w"] = total.astype(merged["w"].dtype)
    return merged
