"""Latent attention: queries, keys and values are made of narrow vectors (DeepSeek-V2, arXiv:2405.04434).

    x [B, T, D] --+-- q_down, norm --> [B, T, Q] -- q -------> queries [B, T, N, H]         the last R of H are rotated
                  |   (or at once: q_whole)
                  +-- kv_down, norm -> [B, T, C] -- kv_up ---> keys [B, T, N, H - R], values [B, T, N, W]
                  +-- k -------------> [B, T, R], rotated: the rest of the key, the same for all heads

In training, keys and values are made of the latents once. A cache has C + R numbers of a token and not those of its
heads. In generation there is one query to each row, so the query goes through `kv_up` in place of all keys:

    q . (latent kv_up) = (q kv_up) . latent            one key/value head of C + R numbers, with the latent as its value
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.config import Model
from tunix.models.attention import AttentionFn, Heads
from tunix.models.layers import NORMS, Einsum, Initializer
from tunix.models.matmul import MATMUL
from tunix.models.rope import apply_rope
from tunix.sharding.layout import Layout

LATENT_EPS = 1e-6  # of the norms of latents in DeepSeek's code and transformers, whatever `model.norm_eps`


class LatentAttention(nnx.Module):
    """Attention [B, t, D] -> [B, t, D], and its cache, over keys and values made of a latent."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        self.cfg, self.layout, self.scale = cfg, layout, cfg.query_scale**-0.5
        self.num_plain = cfg.head_dim - cfg.num_rotated  # numbers of a query and of a key that are not rotated
        assert cfg.latent is not None
        self.queries_have_latent = cfg.latent.query_dim is not None
        if self.queries_have_latent:
            self.q_down = Einsum("attention.q_down", "BTD,DQ->BTQ", cfg, layout, initializer)
            self.q = Einsum("attention.q", "BTQ,QNH->BTNH", cfg, layout, initializer)
            self.q_norm = NORMS[cfg.norm]("BTQ", cfg, layout, eps=LATENT_EPS)
        else:
            self.q_whole = Einsum("attention.q_whole", "BTD,DNH->BTNH", cfg, layout, initializer)
        self.kv_down = Einsum("attention.kv_down", "BTD,DC->BTC", cfg, layout, initializer)
        self.k = Einsum("attention.k", "BTD,DR->BTR", cfg, layout, initializer)
        self.kv_up = Einsum("attention.kv_up", "BTC,CNO->BTNO", cfg, layout, initializer)
        self.o = Einsum("attention.o", "BTNW,NWD->BtD", cfg, layout, initializer)
        self.kv_norm = NORMS[cfg.norm]("BTC", cfg, layout, eps=LATENT_EPS)

    def __call__(self, x, positions, rope, mix, dropout_key):
        """[B, t, D] -> ([B, t, D], the cache of the layer, made of latents [B, T, C] and rotated keys [B, T, R])."""
        x = self.layout.gather_tokens(x)
        if self.queries_have_latent:
            q = self.q(self.q_norm(self.q_down(x, dropout_key)), dropout_key)
        else:
            q = self.q_whole(x, dropout_key)
        plain, rotated = q[..., : self.num_plain], q[..., self.num_plain :]
        rotated = apply_rope(rotated, positions, rope, self.cfg.rotated_pairs)
        q = jnp.concatenate([plain, rotated], -1) * self.scale
        latent = self.kv_norm(self.kv_down(x, dropout_key))
        shared = apply_rope(self.k(x, dropout_key)[:, :, None], positions, rope, self.cfg.rotated_pairs)[:, :, 0]

        heads = Heads(partial(self._expand, dropout_key=dropout_key), self._look_back)
        out, cache = mix.compute_attention(q, (latent, shared), heads)
        return self.o(out, dropout_key), cache

    def _expand(self, latent: jax.Array, shared: jax.Array, dropout_key: Any = None) -> tuple[jax.Array, jax.Array]:
        """Return keys [B, S, N, H] and values [B, S, N, W] of latents [B, S, C] and the keys of all heads [B, S, R]."""
        both = self.kv_up(latent, dropout_key)
        plain, values = both[..., : self.num_plain], both[..., self.num_plain :]
        # The rotated part is computed once for a token and repeated for all heads: [B, S, R] -> [B, S, N, R].
        shape = (*plain.shape[:3], shared.shape[-1])
        # In float32, so that its gradient, a sum over heads, is added up in it.
        repeated = shared[:, :, None].astype(jnp.float32)
        rotated = jnp.broadcast_to(repeated, shape, out_sharding=self.layout.activation("BTNH"))
        return jnp.concatenate([plain, rotated.astype(shared.dtype)], -1), values

    def _look_back(self, q: jax.Array, entries: tuple[jax.Array, ...], compute_attention: AttentionFn) -> jax.Array:
        """Return results [B, T, N, W] of few queries over the entries of a cache, without keys and values of heads."""
        latent, shared = entries
        if self.kv_up.lora is not None:  # its update is a product of its own
            k, v = (jnp.swapaxes(x, 1, 2) for x in self._expand(latent, shared))
            return compute_attention(q, k, v, self.layout)
        dim_names, w = MATMUL[self.kv_up.product].order(self.kv_up.equation).w, self.kv_up.gathered()
        # One key for all heads, with C + R numbers: scores are the same when kv_up multiplies the query in place of the
        # key. Results are sums of latents, out of which kv_up makes sums of values.
        w_keys, w_values = jnp.split(w, [self.num_plain], dim_names.index("O"))
        spec = self.layout.activation("BTNC")
        latent_q = jnp.einsum(f"BTNO,{dim_names}->BTNC", q[..., : self.num_plain], w_keys, out_sharding=spec)
        queries = jnp.concatenate([latent_q, q[..., self.num_plain :]], -1)
        keys, values = (x[:, None] for x in (jnp.concatenate([latent, shared], -1), latent))
        one_head = replace(self.layout, unsplit=self.layout.unsplit | {"K"})  # every device needs it
        out = compute_attention(queries, keys, values, one_head)
        return jnp.einsum(f"BTNC,{dim_names}->BTNO", out, w_values, out_sharding=self.layout.activation("BTNO"))
