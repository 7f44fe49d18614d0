"""The layer of multi-token prediction (`model.mtp`): it learns to predict the token after the next one.

    state [B, T, D] of token n, behind the final norm ---> norm --+
                                                                  +-- [B, t, 2D] --> projection --> block --> norm
    table ---> vector [B, t, D] of token n + 1 ----------> norm --+                                             |
                                                                     the model's own head: logits of token n + 2

Published files keep it as the layer behind the last one, or under a name of its own. Its block is that of a model of
one layer (`Model.mtp_model`), so it runs as all blocks do. Logits of the next token do not depend on it. A sampler may
guess by it (inference/sampling.py).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.config import Model
from tunix.models.block import Forward, Rows
from tunix.models.layer_scan import GradientSums
from tunix.models.layer_stacks import Stacks, list_stacks
from tunix.models.layers import NORMS, BlockSums, Initializer, Matrix
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

    @property
    def stacks(self) -> Stacks:
        return Stacks(self)

    def __call__(self, rows: Rows, forward: Forward) -> tuple[jax.Array, BlockSums]:
        """Rows with the result of `join` as x -> [B, T, D] that logits are taken of, and the numbers of the block."""
        rows, sums = self.stacks.run(rows, forward)
        return self.layout.gather_stream(self.norm(rows.x)), sums

    def run_apart(self, rows: Rows, forward: Forward, params: dict[str, list[Any]]) -> tuple[jax.Array, list]:
        """Return [B, T, D] as `__call__`, and the layer's cache in place of numbers (decoding; `Stacks.run_apart`)."""
        rows, caches = self.stacks.run_apart(rows, forward, params)
        return self.layout.gather_stream(self.norm(rows.x)), caches

    def join(self, tokens: jax.Array, states: jax.Array) -> jax.Array:
        """Vectors [B, t, D] of the next tokens, and states [B, T, D] -> what the block takes, [B, t, D]."""
        states = self.layout.split_stream(states)
        return self.projection.multiply(jnp.concatenate([self.token_norm(tokens), self.state_norm(states)], -1))
