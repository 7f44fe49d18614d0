"""Continue a text: one token after the other from the model's distribution."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, reshard

from tunix.mesh import data_shards, local_rows, to_global
from tunix.state import Architecture


def sample(
    arch: Architecture, params: dict, mesh: Mesh, prompt: list[int], num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """`num_tokens` tokens that follow `prompt`; temperature 0 takes the likeliest each time.

    Runs the model on the whole sequence for each token: right for a glimpse, not for serving.
    """
    length = len(prompt) + num_tokens
    rows = len(local_rows(mesh, data_shards(mesh)))  # the prompt once for each data shard
    tokens = np.zeros((1, rows, length), np.int32)
    tokens[:, :, : len(prompt)] = prompt

    @jax.jit
    def continued(params, tokens, key):
        model = arch.module(params)
        table = model.embedding.gathered()

        def next_token(position, tokens):
            hidden = jax.lax.dynamic_slice_in_dim(model.hidden(table, tokens), position - 1, 1, axis=1)
            logits = reshard(model.embedding.logits(table, hidden), jax.P())[0, 0]
            likeliest = jnp.argmax(logits)
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logits / max(temperature, 1e-6))
            token = (drawn if temperature > 0 else likeliest).astype(tokens.dtype)
            return jnp.where(jnp.arange(length) == position, token, tokens)

        return jax.lax.fori_loop(len(prompt), length, next_token, tokens[0])

    out = continued(params, to_global({"tokens": tokens}, mesh)["tokens"], jax.random.key(seed))
    return np.asarray(out.addressable_shards[0].data)[0, len(prompt) :].tolist()
