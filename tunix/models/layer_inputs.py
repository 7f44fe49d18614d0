"""Inputs of each layer (`model.layer_inputs`): a vector of each token for each layer (Gemma 4).

    tokens [B, T] -------> table -------> [B, t, l, p] --+
    x      [B, t, D] --> projection, norm [B, t, l, p] --+-- sum / sqrt(2) --> inputs [l, B, t, p]

    x [B, t, D] --+-- gate, activation --> [B, t, p] -- x inputs of the layer --> down, norm --+--> [B, t, D]
                  +----------------------------------------------------------------------------+

The numbers of a token are few, so every device computes all of them for its tokens of the residual stream.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.config import Model
from tunix.models.draws import Draws
from tunix.models.layers import ACTIVATIONS, Matrix
from tunix.models.norms import NORMS
from tunix.models.products import product
from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout


class LayerInputs(nnx.Module):
    """Vectors of the tokens for each layer: rows of a table [V, l, p], and a projection of the embedding."""

    def __init__(self, cfg: Model, layout: Layout, draws: Draws):
        self.equation, self.layout = Equation("BtV,Vlp->Btlp"), layout
        shape = [cfg.dims[letter] for letter in self.equation.w]
        self.width, self.projection_scale = cfg.dims["p"], cfg.embed_dim**-0.5
        table = draws.normal(shape, layout.param, self.width**-0.5)
        self.table = nnx.Param(table, equation=self.equation)
        self.projection = Matrix("BtD,Dlp->Btlp", cfg, layout, draws)
        self.norm = NORMS[cfg.norm]("Btlp", cfg, layout)

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Return inputs [l, B, t, p] of tokens [B, T] int32 and their embeddings [B, t, D]."""
        table = self.layout.gather(self.table[...], self.equation)
        rows = self.layout.split_stream(table.at[tokens].get(out_sharding=self.layout.activation("BTlp")))
        projected = product(self.projection.equation, x, self.projection.gathered(), self.layout)
        projected = self.norm(projected * jnp.asarray(self.projection_scale, x.dtype))
        both = projected + rows * jnp.asarray(self.width**0.5, rows.dtype)
        return jnp.moveaxis(both * jnp.asarray(2**-0.5, x.dtype), 2, 0)


class InputGate(nnx.Module):
    """The part of a block that takes the layer's inputs: [B, t, D] and [B, t, p] -> [B, t, D]."""

    def __init__(self, cfg: Model, layout: Layout, draws: Draws):
        self.layout, self.activation = layout, ACTIVATIONS[cfg.mlp.activation]
        self.gate = Matrix("BtD,Dp->Btp", cfg, layout, draws)
        self.down = Matrix("Btp,pD->BtD", cfg, layout, draws)
        self.norm = NORMS[cfg.norm]("BtD", cfg, layout)

    def __call__(self, x: jax.Array, inputs: jax.Array) -> jax.Array:
        h = self.activation(product(self.gate.equation, x, self.gate.gathered(), self.layout)) * inputs
        return x + self.norm(product(self.down.equation, h, self.down.gathered(), self.layout))
