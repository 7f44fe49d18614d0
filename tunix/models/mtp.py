"""The layer of multi-token prediction (`model.mtp`): it learns to predict the token after the next one.

    state [B, T, D] of token n, behind the final norm ---> norm --+
                                                                  +-- [B, t, 2D] --> projection --> block --> norm
    table ---> vector [B, t, D] of token n + 1 ----------> norm --+                                             |
                                                                     the model's own head: logits of token n + 2

Published files keep it as the layer behind the last one, or under a name of its own. Its block is that of a model of
one layer (`Model.mtp_model`), so it runs as all blocks do. Logits of the next token do not depend on it.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.config import Model
from tunix.models.layer_scan import GradientSums
from tunix.models.layer_stacks import list_stacks
from tunix.models.layers import NORMS, Initializer, Matrix
from tunix.models.matmul import product
from tunix.models.remat import Remat
from tunix.sharding.layout import Layout


class MtpLayer(nnx.Module):
    """Norms, a projection, and a block; `Stacks` takes it for a model of one layer."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer, remat: Remat):
        self.cfg, self.layout, self.remat = cfg.mtp_model, layout, remat
        self.parts_per_stage, self.prefetch = None, False
        self.gradient_sums: GradientSums | None = None  # its gradients are those of autodiff
        self.token_norm, self.state_norm = (NORMS[cfg.norm]("BtD", cfg, layout) for _ in range(2))
        self.projection = Matrix("Btμ,μD->BtD", cfg, layout, initializer)
        for stack in list_stacks(self.cfg):
            setattr(self, stack.name, stack.make(self.cfg, layout, initializer))
        self.norm = NORMS[cfg.norm]("BtD", cfg, layout)

    def join(self, tokens: jax.Array, states: jax.Array) -> jax.Array:
        """Vectors [B, t, D] of the next tokens, and states [B, t, D] -> what the block takes, [B, t, D]."""
        both = jnp.concatenate([self.token_norm(tokens), self.state_norm(states)], -1)
        return product(self.projection.equation, both, self.projection.gathered(), self.layout)
