"""The decoder: embedding, a scan over equal blocks, final norm. Gemma 3's text model (arXiv:2503.19786)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

from tunix.config import Model
from tunix.mesh import Layout
from tunix.models.attention import attend
from tunix.models.layers import Einsum, Embedding, RMSNorm, apply_rope, rope_frequencies


def _all_but_gathered_weights(primitive, *_, **params) -> bool:
    """What `remat=none` keeps for the backward pass: gathered weights of all blocks would add up to the whole model."""
    return primitive.name not in ("custom_vjp_call", "reshard") and params.get("name") != "gathered"  # Layout.gather


POLICIES = jax.checkpoint_policies
REMAT = {
    "none": _all_but_gathered_weights,
    "dots": POLICIES.checkpoint_dots_with_no_batch_dims,
    "attention": POLICIES.save_only_these_names("attention"),
    "full": POLICIES.nothing_saveable,
}


class Attention(nnx.Module):
    """Grouped-query attention with RMS-normed queries and keys and rotary positions."""

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        self.layout, self.kernel, self.scale = layout, cfg.attention, cfg.query_scale**-0.5
        self.q = Einsum("BTD,DNH->BTNH", cfg, layout, rngs)
        self.k = Einsum("BTD,DKH->BTKH", cfg, layout, rngs)
        self.v = Einsum("BTD,DKH->BTKH", cfg, layout, rngs)
        self.o = Einsum("BTNH,NHD->BTD", cfg, layout, rngs)
        self.q_norm = RMSNorm("BTNH", cfg, layout)
        self.k_norm = RMSNorm("BTKH", cfg, layout)

    def __call__(self, x, positions, segment_ids, frequencies, window):
        q = apply_rope(self.q_norm(self.q(x)), positions, frequencies) * self.scale
        k = apply_rope(self.k_norm(self.k(x)), positions, frequencies)
        out = attend(q, k, self.v(x), segment_ids, window, layout=self.layout, kernel=self.kernel)
        return self.o(checkpoint_name(out, "attention"))


class MLP(nnx.Module):
    """GELU-gated linear unit (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        self.gate = Einsum("BTD,DF->BTF", cfg, layout, rngs)
        self.up = Einsum("BTD,DF->BTF", cfg, layout, rngs)
        self.down = Einsum("BTF,FD->BTD", cfg, layout, rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x))


class Block(nnx.Module):
    """Attention and MLP, each with a norm before and a norm after, around the residual stream."""

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        self.attention = Attention(cfg, layout, rngs)
        self.mlp = MLP(cfg, layout, rngs)
        self.pre_attention, self.post_attention, self.pre_mlp, self.post_mlp = (
            RMSNorm("BTD", cfg, layout) for _ in range(4)
        )

    def __call__(self, x, positions, segment_ids, frequencies, window):
        with jax.named_scope("attention"):
            h = self.attention(self.pre_attention(x), positions, segment_ids, frequencies, window)
            x = x + self.post_attention(h)
        with jax.named_scope("mlp"):
            return x + self.post_mlp(self.mlp(self.pre_mlp(x)))


class Transformer(nnx.Module):
    """Tokens to logits. All blocks share one stacked set of parameters with a leading dimension L."""

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs, remat: str = "none"):
        self.cfg, self.layout, self.remat = cfg, layout, remat
        self.embedding = Embedding(cfg, layout, rngs)
        self.blocks = _stacked(lambda rngs: Block(cfg, layout, rngs), cfg.num_layers, rngs)
        self.final_norm = RMSNorm("BTD", cfg, layout)

    def __call__(self, tokens, positions=None, segment_ids=None) -> jax.Array:
        """[B, T] int32 -> logits [B, T, V] float32. Without the last two, each row is one document."""
        table = self.embedding.gathered()
        return self.embedding.logits(table, self.hidden(table, tokens, positions, segment_ids))

    def hidden(self, table, tokens, positions=None, segment_ids=None) -> jax.Array:
        """[B, T] int32 -> [B, T, D], what the last norm gives; `table` is `embedding.gathered()`."""
        if positions is None:
            positions = jnp.zeros_like(tokens) + jnp.arange(tokens.shape[1])
        if segment_ids is None:
            segment_ids = jnp.zeros_like(tokens)
        rows = self.layout.activation("BT")
        tokens, positions, segment_ids = (reshard(x, rows) for x in (tokens, positions, segment_ids))
        with jax.named_scope("embed"):
            x = self.embedding.lookup(table, tokens)
        graphdef, params = nnx.split(self.blocks)

        def layer(x, scanned):
            params, frequencies, window = scanned
            return nnx.merge(graphdef, params)(x, positions, segment_ids, frequencies, window), None

        layer = jax.checkpoint(layer, policy=REMAT[self.remat], prevent_cse=False)
        with jax.named_scope("blocks"):
            x, _ = jax.lax.scan(layer, x, (params, *self._per_layer(tokens.shape[1])))
        with jax.named_scope("final_norm"):
            return self.final_norm(x)

    def _per_layer(self, length: int) -> tuple[jax.Array, jax.Array]:
        """What tells the blocks apart: RoPE frequencies [L, H / 2] and window in tokens [L]."""
        cfg = self.cfg
        is_global = np.arange(1, cfg.num_layers + 1) % cfg.global_every == 0
        everywhere = rope_frequencies(cfg, cfg.rope_theta, cfg.rope_scale)
        nearby = rope_frequencies(cfg, cfg.local_rope_theta, 1.0)
        frequencies = np.where(is_global[:, None], everywhere, nearby)
        return jnp.asarray(frequencies), jnp.asarray(np.where(is_global, length, cfg.sliding_window))


def _stacked(make, count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules as one, each parameter with a leading dimension."""
    graphdef = None

    def params(key):
        nonlocal graphdef
        graphdef, state = nnx.split(make(nnx.Rngs(key)))
        return state

    stacked = jax.vmap(params)(jax.random.split(rngs.params(), count))
    return nnx.merge(graphdef, stacked)
