"""QK-clip (Kimi K2, arXiv:2507.20534): queries and keys of a head shrink where its scores have grown too large.

A step reports the largest score s of each head and layer. Behind the update, where s is above `optimizer.qk_clip` = t,
the products of the head's queries and keys are multiplied by g = t / s:

    each head has keys of its own      queries and keys by the root of g
    heads share keys                   queries by g: shared keys stay, for the other heads
    latent attention                   the parts of a head that are not rotated by the root of g, the rotated queries by
                                       g: the rotated key is that of all heads

s is the log of the sum of exp(score) of a query, which the kernel of attention has anyway: no product is added. It is
at least the largest score, and at most log(keys) above it; the higher the largest score stands out, the closer it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix.config import Config, Model
from tunix.models.layers import parameter_name
from tunix.training.logprobs import HEAD_SCORES, Sums


def make_clip(cfg: Config) -> Callable[[dict, Sums], dict] | None:
    """Return the function of parameters behind the update, and of the sums of a step, that clips; None without a
    key."""
    limit, model = cfg.optimizer.score_limit, cfg.model
    if limit is None:
        return None
    powers = _list_powers(model)

    def clip(params: dict, sums: Sums) -> dict:
        scores = sums[HEAD_SCORES].value
        factors = jnp.where(scores > limit, limit / jnp.maximum(scores, limit), 1.0)

        def of_parameter(path: Any, param: jax.Array) -> jax.Array:
            stack, _, part = parameter_name(path).partition(".")
            part = part.removeprefix("attention.").removesuffix(".bias.b").removesuffix(".w")
            if stack not in model.stacks or part not in powers:
                return param
            of_layers = factors[np.array(model.stacks[stack])]
            by_number = of_layers[..., None] ** powers[part]  # [L, N, H]
            # A weight is [L, D, N, H] or [L, C, N, O], a bias [L, N, H].
            shape = [size if at in (0, param.ndim - 2, param.ndim - 1) else 1 for at, size in enumerate(param.shape)]
            return (param * by_number.reshape(shape)).astype(param.dtype)

        return jax.tree.map_with_path(of_parameter, params)

    return clip


def _list_powers(model: Model) -> dict[str, np.ndarray]:
    """Return the power of a head's factor for each number of its heads, [H], by the name of the projection."""
    if model.latent is not None:
        plain = model.head_dim - model.num_rotated
        queries = np.repeat([0.5, 1.0], [plain, model.num_rotated])
        keys = np.repeat([0.5, 0.0], [plain, model.dims["O"] - plain])
        return {"q": queries, "q_whole": queries, "kv_up": keys}
    if model.num_heads == model.num_kv_heads:
        return dict.fromkeys(("q", "k"), np.full(model.head_dim, 0.5))
    return {"q": np.ones(model.head_dim)}
