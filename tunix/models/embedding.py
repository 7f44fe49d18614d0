"""Tables of vectors: of the tokens, at both ends of the decoder, and of the places in the context."""

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.config import Model
from tunix.models.draws import Draws
from tunix.models.products import product
from tunix.models.soft_cap import soft_cap
from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout


class Embedding(nnx.Module):
    """Token vectors [V, D]; with a tied head used at both ends of the decoder."""

    def __init__(self, cfg: Model, layout: Layout, draws: Draws):
        self.equation, self.layout, self.product = Equation("BTD,VD->BTV"), layout, "plain"
        self.scale = (cfg.embed_dim**0.5 if cfg.scaled_embedding else 1.0) * cfg.embedding_multiplier
        self.divisor, self.cap = cfg.logits_divisor, cfg.logits_cap
        table = draws.normal((cfg.vocab_size, cfg.embed_dim), layout.param, cfg.embed_dim**-0.5)
        self.table = nnx.Param(table, equation=self.equation)

    def gathered(self) -> jax.Array:
        """Return the table as `lookup` and `logits` take it; gathered once for both, so its gradient travels once."""
        return self.layout.gather(self.table[...], self.equation)

    def lookup(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return the vectors [B, t, D] of tokens [B, T] int32, times sqrt(D) if the family scales them."""
        # A lookup, not a product with one-hot vectors [B, T, V]: these are as large as the logits.
        rows = self.layout.split_stream(table.at[tokens].get(out_sharding=self.layout.activation("BTD")))
        return rows * jnp.asarray(self.scale, table.dtype)

    def logits(self, table: jax.Array, x: jax.Array) -> jax.Array:
        """Return the logits [B, T, V] float32 of x [B, T, D], divided and capped if the family does so."""
        # float32 behind the product: exp and the sum over V of the loss need more digits than bfloat16 has.
        logits = product(self.equation, x, table, self.layout, self.product).astype(jnp.float32)
        logits = logits if self.divisor == 1 else logits / self.divisor
        return soft_cap(logits, self.cap)


class LearnedPositions(nnx.Module):
    """A vector for each place in the context [P, D], added to the vector of the token there."""

    def __init__(self, cfg: Model, layout: Layout, draws: Draws):
        self.equation, self.layout = Equation("BtP,PD->BtD"), layout
        shape = (cfg.context_length, cfg.embed_dim)
        self.table = nnx.Param(draws.normal(shape, layout.param, cfg.embed_dim**-0.5), equation=self.equation)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """[B, t, D] and [B, T] int32 -> [B, t, D]"""
        table, positions = self.layout.gather(self.table[...], self.equation), self.layout.split_stream(positions)
        return x + table.at[positions].get(out_sharding=self.layout.activation("BtD"))
