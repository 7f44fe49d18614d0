"""A mixture of experts: a router sends each token to a few gated MLPs, whose results are added up with its weights.

    x [B, T, D] --- router ---> k experts of each token, and their weights, [B, T, k]
        |
        |   on each device, n = its tokens:
        |   n * k rows, sorted by expert      | expert 0 | expert 1 | expert 2 ...
        |   grouped products                  each expert's weights meet its rows
        |   rows in their old order           n tokens, k results each: added up with the weights
        v
    y [B, T, D]

No token is dropped: the rows of a device have room for every choice, however uneven the loads are.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tunix.config import Model
from tunix.config.mlp import ExpertsMlp
from tunix.models.block_sums import BlockSums, Routing
from tunix.models.layers import ACTIVATIONS, MLP, Matrix
from tunix.models.products import grouped_product, product
from tunix.sharding.dims import Equation
from tunix.sharding.layout import Layout

SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}


class Routes(NamedTuple):
    """Experts of each token, and the weights of their results."""

    experts: jax.Array  # [B, T, k] int32
    weights: jax.Array  # [B, T, k] float32


class Router(Matrix):
    """Scores of experts for a token, and the choice of the best: [B, T, D] -> `Routes`, and sums for the loss."""

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        super().__init__("BTD,DY->BTY", cfg, layout, rngs)
        assert isinstance(cfg.mlp, ExpertsMlp)
        self.mlp = cfg.mlp
        if self.mlp.bias_rate is not None:
            zeros = jnp.zeros(self.mlp.num_experts)  # float32: a step adds less than 16 bits resolve
            self.bias = nnx.Param(zeros, equation=Equation("BTY,Y->BTY"))

    def __call__(self, x: jax.Array) -> tuple[Routes, BlockSums]:
        logits = product(self.equation, x, self.gathered(), self.layout).astype(jnp.float32)
        scores = SCORES[self.mlp.scores](logits)
        experts = self._choose(jax.lax.stop_gradient(scores))
        # A comparison in place of a lookup: it fuses, and its gradient is a sum in a fixed order.
        is_chosen = experts[..., None] == jnp.arange(self.mlp.num_experts)  # [B, T, k, X]
        weights = jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0), -1)
        if self.mlp.normalized:
            weights = weights / jnp.sum(weights, -1, keepdims=True)
        choices = jnp.sum(is_chosen.astype(jnp.float32), 2)  # [B, T, X]: 1 where the token takes the expert
        return Routes(experts, weights * self.mlp.scale), self._sums(logits, scores, choices)

    def _choose(self, scores: jax.Array) -> jax.Array:
        """Return the experts [B, T, k] int32 with the best scores [B, T, X], within the best groups."""
        if self.mlp.bias_rate is not None:
            scores = scores + jax.lax.stop_gradient(self.bias[...].astype(jnp.float32))
        if self.mlp.num_groups > 1:
            grouped = scores.reshape(*scores.shape[:2], self.mlp.num_groups, -1)
            best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
            groups = jax.lax.top_k(best_two, self.mlp.groups_per_token)[1]
            is_open = jnp.any(groups[..., None] == jnp.arange(self.mlp.num_groups), 2)
            scores = jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(scores, self.mlp.experts_per_token)[1]

    def _sums(self, logits: jax.Array, scores: jax.Array, choices: jax.Array) -> BlockSums:
        """Return the penalties of each sequence, and counts; all arguments are [B, T, X] float32.

        The balance loss of a sequence is the sum over experts of (share of choices) x (mean share of scores) x X. It is
        1 where all loads are equal. It is a sum over sequences, so microbatches and meshes do not change it.
        """
        mlp, penalties = self.mlp, {}
        shares = scores / jnp.sum(scores, -1, keepdims=True)
        if mlp.balance_loss:
            loads = jnp.mean(choices, 1) * (mlp.num_experts / mlp.experts_per_token)
            penalties["balance_loss"] = mlp.balance_loss * jnp.sum(loads * jnp.mean(shares, 1), -1)
        if mlp.z_loss:
            squares = jax.nn.logsumexp(logits, -1) ** 2
            penalties["router_z_loss"] = mlp.z_loss * jnp.mean(squares, 1)
        shares = jax.lax.stop_gradient(shares)
        entropy = -jnp.sum(jax.scipy.special.xlogy(shares, shares))
        num_tokens = jnp.float32(scores.shape[0] * scores.shape[1])
        return BlockSums(penalties, Routing(jnp.sum(choices, (0, 1)), num_tokens, entropy))


class Experts(nnx.Module):
    """The experts of a layer behind their router, and a shared one beside them: [B, T, D] -> [B, T, D]."""

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        assert isinstance(cfg.mlp, ExpertsMlp)
        self.layout, self.activation = layout, ACTIVATIONS[cfg.mlp.activation]
        self.router = Router(cfg, layout, rngs)
        qtype = cfg.lora.quantize_base
        self.expert_gate = Matrix("BTXD,XDG->BTXG", cfg, layout, rngs, qtype)
        self.expert_up = Matrix("BTXD,XDG->BTXG", cfg, layout, rngs, qtype)
        self.expert_down = Matrix("BTXG,XGD->BTXD", cfg, layout, rngs, qtype)
        self.shared = None if cfg.mlp.shared_dim is None else MLP(cfg, layout, rngs, "gated", width="U")

    def __call__(self, x, key) -> tuple[jax.Array, BlockSums]:
        """Return [B, T, D], and the sums of the router."""
        with jax.named_scope("router"):
            routes, sums = self.router(x)
        with jax.named_scope("experts"):
            y = self._compute(x, routes)
        if self.shared is not None:
            with jax.named_scope("shared_expert"):
                y = y + self.shared(x, key)[0]
        return y, sums

    def _compute(self, x: jax.Array, routes: Routes) -> jax.Array:
        """Return the sum over each token's experts of weight x result, [B, T, D]."""
        parts = (self.expert_gate, self.expert_up, self.expert_down)
        weights = [self.layout.enter_devices(part.gathered()) for part in parts]
        num_experts, split_width = weights[0].shape[0], self.layout.product_axes(self.expert_down.equation)
        of_tokens = self.layout.activation("BT")
        specs = [jax.typeof(weight).sharding.spec for weight in weights]

        @partial(jax.shard_map, in_specs=(of_tokens, of_tokens, of_tokens, specs), out_specs=of_tokens)
        def on_each_device(x, experts, shares, weights):
            gate, up, down = weights
            num_choices = experts.shape[-1]
            # Here and not where a product meets it: so its gradient is summed over devices before it is repeated.
            x = jax.lax.pcast(x, split_width, to="varying")
            rows = jnp.repeat(x.reshape(-1, x.shape[-1]), num_choices, axis=0)
            order = jnp.argsort(experts.reshape(-1))
            sizes = jnp.bincount(experts.reshape(-1), length=num_experts).astype(jnp.int32)
            rows = rows.at[order].get(unique_indices=True)
            hidden = self.activation(grouped_product(rows, gate, sizes)) * grouped_product(rows, up, sizes)
            results = grouped_product(hidden, down, sizes)
            results = jnp.zeros_like(results).at[order].set(results, unique_indices=True)
            results = results.reshape(*experts.shape, -1)
            y = jnp.einsum("BTkD,BTk->BTD", results, shares.astype(results.dtype))
            return jax.lax.psum(y, split_width).astype(x.dtype)

        return checkpoint_name(on_each_device(x, *routes, weights), "product")
