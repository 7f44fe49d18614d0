"""Scores that a model gives for a whole document in the place of logits: a reward, one of each class, or a vector.

    tokens -> blocks -> hidden [B, T, D] -> scores [B, T, v] of each token -> those of a document, by its pooling

The head is a linear map without a bias, as in `...ForSequenceClassification` of transformers. So pooling may come
behind it: a weighted sum of scores is the score of the weighted sum of hidden states.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import reshard

from tunix.config import Model
from tunix.models.layers import Initializer, Matrix
from tunix.sharding.layout import Layout


def weigh_last_token(segment_ids: jax.Array) -> jax.Array:
    """Return weights [B, T] float32 of segments [B, T] int32: 1 at the last token of each document, else 0."""
    following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    return ((segment_ids != following) & (segment_ids > 0)).astype(jnp.float32)


def weigh_all_tokens(segment_ids: jax.Array) -> jax.Array:
    """Return weights [B, T] float32 of segments [B, T] int32 that make means: 1 / n at all n tokens of a document."""
    # A comparison in place of a scatter; it fuses: [B, T, T] never exists.
    counts = jnp.sum(segment_ids[:, :, None] == segment_ids[:, None, :], -1)
    return (segment_ids > 0) / counts.astype(jnp.float32)


# How the tokens of a document become one: weights of its tokens [B, T], out of the segments [B, T] of whole sequences.
POOLINGS: dict[str, Callable[[jax.Array], jax.Array]] = {"last": weigh_last_token, "mean": weigh_all_tokens}


def pool_weights(segment_ids: jax.Array, layout: Layout, pooling: str = "last") -> jax.Array:
    """Return the weights [B, T] of tokens in their documents by a row of `POOLINGS`, laid out as tokens are."""
    # Whether a token is the last one, the next token says, which may be on another device.
    whole = reshard(segment_ids, layout.activation("BS"))
    return reshard(POOLINGS[pooling](whole), layout.activation("BT"))


def pool(hidden: jax.Array, segment_ids: jax.Array, layout: Layout, pooling: str, count: int) -> jax.Array:
    """Return the vectors [B, u, D] float32 of the first `count` documents of each row; zeros where it has fewer."""
    numbers = 1 + jnp.arange(count)
    is_local = reshard(segment_ids, layout.activation("BT"))[..., None] == numbers
    weights = pool_weights(segment_ids, layout, pooling)[..., None] * is_local
    return jnp.einsum(
        "BTu,BTD->BuD", weights, hidden.astype(jnp.float32), precision="highest", out_sharding=layout.activation("BuD")
    )


class ScoreHead(Matrix):
    """Scores of tokens: [B, T, D] -> [B, T, v] float32, one number for each of `model.labels`."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        super().__init__("BTD,Dv->BTv", cfg, layout, initializer)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, v] float32."""
        with jax.named_scope("scores"):
            return self.multiply(hidden).astype(jnp.float32)


def score_rows(model: Any, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Return the numbers [B, v] float32 of rows of one document each, with tokens [B, T] int32.

    `segment_ids` [B, T] are 1 in the document and 0 behind it.
    """
    hidden, _ = model.hidden(model.vocab_weights(), tokens, None, segment_ids)
    return jnp.sum(model.score(hidden) * pool_weights(segment_ids, model.layout)[..., None], 1)


def embed_rows(model: Any, tokens: jax.Array, segment_ids: jax.Array, pooling: str) -> jax.Array:
    """Return the vectors [B, D] float32, of length 1, of rows of one text each, as `score_rows` takes them."""
    hidden, _ = model.hidden(model.vocab_weights(), tokens, None, segment_ids)
    return normalize(pool(hidden, segment_ids, model.layout, pooling, 1)[:, 0])


def normalize(vectors: jax.Array) -> jax.Array:
    """Return vectors [..., D] with length 1; those of zeros stay zeros."""
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(vectors), -1, keepdims=True), 1e-24))
