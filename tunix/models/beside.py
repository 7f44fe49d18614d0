"""Experts beside an MLP that computes every token (Gemma 4): both take the residual stream, behind norms of their own.

x [B, t, D] --+-- norm --> MLP ------> norm --+
              +-- norm --> experts --> norm --+--> [B, t, D]
              +-- router ---^
"""

from typing import Any

import jax
from flax import nnx

from tunix.config import Model
from tunix.models.block_sums import BlockSums
from tunix.models.draws import Draws
from tunix.models.experts import Experts
from tunix.models.layers import MLP
from tunix.models.norms import NORMS
from tunix.sharding.layout import Layout


class ExpertsBesideMlp(nnx.Module):
    """An MLP and experts, whose results are added: [B, t, D] of the residual stream -> [B, t, D]."""

    def __init__(self, cfg: Model, layout: Layout, draws: Draws):
        # Both parts have norms of their own, so the block has none before them.
        def norm() -> Any:
            return NORMS[cfg.norm]("BtD", cfg, layout)

        self.dense, self.experts = MLP(cfg, layout, draws, "gated"), Experts(cfg, layout, draws)
        self.pre_dense, self.post_dense = norm(), norm()
        self.pre_experts, self.post_experts = norm(), norm()

    def __call__(self, x, noise) -> tuple[jax.Array, BlockSums]:
        """Return [B, t, D], and the sums of the router."""
        with jax.named_scope("dense"):
            dense = self.post_dense(self.dense(self.pre_dense(x), noise)[0])
        y, sums = self.experts(self.pre_experts(x), noise, routed=x)
        return dense + self.post_experts(y), sums
