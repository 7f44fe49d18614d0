"""Router of a mixture of experts: a score of each expert for each token, and the choice of the best."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.config import Model
from tunix.config.mlp import ExpertsMlp
from tunix.models.block_sums import BlockSums, Routing
from tunix.models.draws import Draws
from tunix.models.layers import Bias, Matrix, unchanged
from tunix.models.norms import RMSNorm
from tunix.models.products import product
from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout
from tunix.sharding.stages import stage_shard_map

SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}


def penalty_names(cfg: Model) -> tuple[str, ...]:
    """Return the names of the penalties that a layer's router gives."""
    weights = {}
    if isinstance(cfg.mlp, ExpertsMlp):
        weights = {"balance_loss": cfg.mlp.balance_loss, "router_z_loss": cfg.mlp.z_loss}
    return tuple(name for name, weight in weights.items() if weight)


class Routes(NamedTuple):
    """Experts of each token, and the weights of their results."""

    experts: jax.Array  # [B, t, k] int32
    weights: jax.Array  # [B, t, k] float32


class Router(Matrix):
    """Scores of experts for a token, and the choice of the best: [B, t, D] -> `Routes`, and sums for the loss."""

    def __init__(self, cfg: Model, layout: Layout, draws: Draws):
        super().__init__("BtD,DY->BtY", cfg, layout, draws)  # each device has whole experts' scores of its own tokens
        assert isinstance(cfg.mlp, ExpertsMlp)
        self.mlp = cfg.mlp
        self.logits_bias = Bias("BtY", cfg, layout) if self.mlp.biases else unchanged
        # Beside an MLP (Gemma 4) the router takes the residual stream, so it has a norm and scales of its own.
        is_beside = self.mlp.beside_mlp
        self.norm = RMSNorm("BtD", cfg, layout) if is_beside else unchanged
        self.input_scale = cfg.embed_dim**-0.5 if is_beside else 1.0
        ones = jnp.ones(self.mlp.num_experts, layout.param)
        self.expert_scales = nnx.Param(ones, equation=Equation("Bt,Y->BtY")) if is_beside else None
        if self.mlp.bias_rate is not None:
            zeros = jnp.zeros(self.mlp.num_experts)  # float32: a step adds less than 16 bits resolve
            self.bias = nnx.Param(zeros, equation=Equation("BtY,Y->BtY"))

    def __call__(self, x: jax.Array) -> tuple[Routes, BlockSums]:
        x = self.norm(x)
        x = x if self.input_scale == 1 else x * jnp.asarray(self.input_scale, x.dtype)
        logits = product(self.equation, x, self.gathered(), self.layout).astype(jnp.float32)
        logits = self.logits_bias(logits)
        scores = SCORES[self.mlp.scores](logits)
        experts = self._choose(jax.lax.stop_gradient(scores))
        # A comparison in place of a lookup: it fuses, and its gradient is a sum in a fixed order.
        is_chosen = experts[..., None] == jnp.arange(self.mlp.num_experts)  # [B, t, k, X]
        weights = jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0), -1)
        if self.mlp.normalized:
            weights = weights / jnp.sum(weights, -1, keepdims=True)
        if self.expert_scales is not None:
            scales = self.layout.gather(self.expert_scales[...], self.expert_scales.equation)
            spec = self.layout.activation("Bt")
            weights = weights * jnp.einsum("BtkY,Y->Btk", is_chosen.astype(scales.dtype), scales, out_sharding=spec)
        choices = jnp.sum(is_chosen.astype(jnp.float32), 2)  # [B, t, X]: 1 where the token takes the expert
        return Routes(experts, weights * self.mlp.scale), self._sums(logits, scores, choices)

    def _choose(self, scores: jax.Array) -> jax.Array:
        """Return the experts [B, t, k] int32 with the best scores [B, t, X], within the best groups.

        Each device chooses for its own tokens. Outside of a `shard_map`, XLA gathers the scores of all devices for a
        `top_k`.
        """
        if self.mlp.bias_rate is not None:  # the bias evens out loads: it counts for the choice, not for the weights
            scores = scores + jax.lax.stop_gradient(self.bias[...].astype(jnp.float32))
        spec = self.layout.activation("BtY")
        stand_in = lambda scores: scores[..., : self.mlp.experts_per_token].astype(jnp.int32)  # noqa: E731
        return stage_shard_map(self._choose_on_device, spec, spec, self.layout.stages_around, stand_in)(scores)

    def _choose_on_device(self, scores: jax.Array) -> jax.Array:
        """Return the best experts; with groups, those of the groups whose two best experts have the largest sums."""
        if self.mlp.num_groups > 1:
            grouped = scores.reshape(*scores.shape[:2], self.mlp.num_groups, -1)
            best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
            groups = jax.lax.top_k(best_two, self.mlp.groups_per_token)[1]
            is_best = jnp.any(groups[..., None] == jnp.arange(self.mlp.num_groups), 2)
            scores = jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(scores, self.mlp.experts_per_token)[1]

    def _sums(self, logits: jax.Array, scores: jax.Array, choices: jax.Array) -> BlockSums:
        """Return the penalties of each sequence, and counts; all arguments are [B, t, X] float32.

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
        # On the mesh, as `entropy` is: a scan that takes two layers at a time cannot stack a constant that is not.
        num_tokens = jnp.full_like(entropy, scores.shape[0] * scores.shape[1])
        return BlockSums(penalties, Routing(jnp.sum(choices, (0, 1)), num_tokens, entropy))
