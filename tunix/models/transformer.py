"""The decoder: embedding, a scan over equal blocks, final norm. The config says of which parts a block is made."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

from tunix.config import Model
from tunix.models.attention import causal
from tunix.models.layers import NORMS, Einsum, Embedding, LearnedPositions, unchanged
from tunix.models.positions import Rope, apply_rope, layer_rope
from tunix.sharding.layout import Layout


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
GELU = partial(jax.nn.gelu, approximate=True)
ACTIVATIONS: dict[str, Any] = {"gated_silu": jax.nn.silu, "gated_gelu": GELU, "gelu": GELU}


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): [B, T, D] -> [B, T, D], and what `mix` keeps."""

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        self.scale, self.rotated = cfg.query_scale**-0.5, cfg.positions == "rope"
        self.q = Einsum("attention.q", "BTD,DNH->BTNH", cfg, layout, rngs)
        self.k = Einsum("attention.k", "BTD,DKH->BTKH", cfg, layout, rngs)
        self.v = Einsum("attention.v", "BTD,DKH->BTKH", cfg, layout, rngs)
        self.o = Einsum("attention.o", "BTNH,NHD->BTD", cfg, layout, rngs)
        self.q_norm, self.k_norm = (
            unchanged
            if cfg.qk_norm == "none"
            else NORMS[cfg.norm](letters, cfg, layout, letters[-1] if cfg.qk_norm == "per_head" else letters[-2:])
            for letters in ("BTNH", "BTKH")
        )

    def __call__(self, x, positions, rope, mix, key):
        q, k = self.q_norm(self.q(x, key)), self.k_norm(self.k(x, key))
        if self.rotated:
            q, k = apply_rope(q, positions, rope), apply_rope(k, positions, rope)
        out, kept = mix(q * self.scale, k, self.v(x, key))
        return self.o(checkpoint_name(out, "attention"), key), kept


class MLP(nnx.Module):
    """A gated linear unit (Shazeer 2020, arXiv:2002.05202), or a plain MLP: [B, T, D] -> [B, T, D]."""

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[cfg.mlp]
        self.gate = Einsum("mlp.gate", "BTD,DF->BTF", cfg, layout, rngs) if cfg.mlp.startswith("gated") else None
        self.up = Einsum("mlp.up", "BTD,DF->BTF", cfg, layout, rngs)
        self.down = Einsum("mlp.down", "BTF,FD->BTD", cfg, layout, rngs)

    def __call__(self, x, key):
        up = self.up(x, key)
        h = self.activation(up) if self.gate is None else self.activation(self.gate(x, key)) * up
        return self.down(h, key)


class Block(nnx.Module):
    """Attention and MLP around the residual stream, with norms before them, after them, or both.

    `mix(q, k, v)` is who attends to whom: it gives [B, T, N, H], and what the caller wants to keep of it.
    """

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        self.attention = Attention(cfg, layout, rngs)
        self.mlp = MLP(cfg, layout, rngs)
        before, after = cfg.norm_placement != "post", cfg.norm_placement != "pre"
        self.pre_attention, self.post_attention, self.pre_mlp, self.post_mlp = (
            NORMS[cfg.norm]("BTD", cfg, layout) if wanted else unchanged for wanted in (before, after, before, after)
        )

    def __call__(self, x, positions, rope, mix, key=None):
        with jax.named_scope("attention"):
            h, kept = self.attention(self.pre_attention(x), positions, rope, mix, key)
            x = x + self.post_attention(h)
        with jax.named_scope("mlp"):
            return x + self.post_mlp(self.mlp(self.pre_mlp(x), key)), kept


class Transformer(nnx.Module):
    """Tokens to logits. All blocks share one stacked set of parameters with a leading dimension L."""

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs, remat: str = "none"):
        self.cfg, self.layout, self.remat = cfg, layout, remat
        self.embedding = Embedding(cfg, layout, rngs)
        self.positions = LearnedPositions(cfg, layout, rngs) if cfg.positions == "learned" else None
        self.blocks = _stacked(lambda rngs: Block(cfg, layout, rngs), cfg.num_layers, rngs)
        self.final_norm = NORMS[cfg.norm]("BTD", cfg, layout)
        self.head = None if cfg.tied_head else Embedding(cfg, layout, rngs)

    def __call__(self, tokens, positions=None, segment_ids=None) -> jax.Array:
        """[B, T] int32 -> logits [B, T, V] float32. Without the last two, each row is one document."""
        tables = self.tables()
        return self.logits(tables, self.hidden(tables, tokens, positions, segment_ids))

    def tables(self) -> tuple[jax.Array, jax.Array]:
        """The tables of both ends, gathered: [V, D] to look tokens up in and [V, D] to take logits with."""
        table = self.embedding.gathered()
        return table, table if self.head is None else self.head.gathered()

    def hidden(self, tables, tokens, positions=None, segment_ids=None, noise=None) -> jax.Array:
        """[B, T] int32 -> [B, T, D], what the last norm gives. `noise`, a number, seeds the dropout of training."""
        if positions is None:
            positions = jnp.zeros_like(tokens) + jnp.arange(tokens.shape[1])
        if segment_ids is None:
            segment_ids = jnp.zeros_like(tokens)
        rows = self.layout.activation("BT")
        tokens, positions, segment_ids = (reshard(x, rows) for x in (tokens, positions, segment_ids))
        x = self.embedded(tables, tokens, positions)
        graphdef, params = nnx.split(self.blocks)

        def layer(x, scanned):
            params, rope, window, number = scanned
            mix = causal(segment_ids, window, self.layout, self.cfg.attention)
            key = None if noise is None else jax.random.fold_in(jax.random.key(noise), number)
            return nnx.merge(graphdef, params)(x, positions, rope, mix, key)

        layer = jax.checkpoint(layer, policy=REMAT[self.remat], prevent_cse=False)
        windows = jnp.asarray(self.cfg.windows(tokens.shape[1]))
        with jax.named_scope("blocks"):
            x, _ = jax.lax.scan(layer, x, (params, self.rope(), windows, jnp.arange(len(windows))))
        with jax.named_scope("final_norm"):
            return self.final_norm(x)

    def unrolled(self, tables, tokens, positions, blocks, mixes) -> tuple[jax.Array, list]:
        """What `hidden` gives, one layer after the other with a mix each, and what the mixes keep.

        `blocks` are the parameters of each layer; this module holds those of one.
        """
        x, kept = self.embedded(tables, tokens, positions), []
        graphdef, rope = nnx.split(self.blocks)[0], self.rope()
        for layer, mix in enumerate(mixes):
            rotations = jax.tree.map(lambda of_all, n=layer: of_all[n], rope)
            x, keep = nnx.merge(graphdef, blocks[layer])(x, positions, rotations, mix)
            kept.append(keep)
        return self.final_norm(x), kept

    def embedded(self, tables, tokens, positions) -> jax.Array:
        """[B, T] int32 -> [B, T, D], what the first block takes."""
        with jax.named_scope("embed"):
            x = self.embedding.lookup(tables[0], tokens)
            return x if self.positions is None else self.positions(x, positions)

    def rope(self) -> Rope | None:
        """Rotations of all layers; None with learned positions."""
        return layer_rope(self.cfg) if self.cfg.positions == "rope" else None

    def logits(self, tables, x) -> jax.Array:
        """[B, T, D] -> [B, T, V] float32."""
        return self.embedding.logits(tables[1], x)


def _stacked(make, count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules as one, each parameter with a leading dimension."""
    graphdef: Any = None

    def params(key):
        nonlocal graphdef
        graphdef, state = nnx.split(make(nnx.Rngs(key)))
        return state

    stacked = jax.vmap(params)(jax.random.split(rngs.params(), count))
    return nnx.merge(graphdef, stacked)
