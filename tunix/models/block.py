"""One block of the decoder: attention and MLP around the residual stream. The config says of which parts it is made."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tunix.config import Model
from tunix.models.block_sums import BlockSums
from tunix.models.experts import Experts
from tunix.models.latent import Attend, Heads, LatentAttention
from tunix.models.layers import MLP, NORMS, Bias, Einsum, divide_by_rms, unchanged
from tunix.models.linear_attention import LinearAttention, Recurrence
from tunix.models.noise import Noise
from tunix.models.positions import apply_rope, grow_queries
from tunix.sharding.layout import Layout


class Mix(NamedTuple):
    """Ways in which tokens of a layer act on one another; the rest of the model works on each token alone.

    A layer takes the way of its kind. Both return the results of the tokens, and what the caller keeps.
    """

    # (queries [B, T, N, H], what tokens leave for later ones, the way from there to keys and values)
    attend: Callable[[jax.Array, tuple[jax.Array, ...], Heads], tuple[Any, Any]]
    recur: Callable[[Recurrence], tuple[jax.Array, Any]]


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): [B, t, D] -> [B, t, D], and what `mix` keeps.

    With `model.attention_gate` each token says which numbers of its result count.
    """

    def __init__(self, cfg: Model, layout: Layout, rngs: nnx.Rngs):
        self.cfg, self.layout, self.scale = cfg, layout, cfg.query_scale**-0.5
        self.q = Einsum("attention.q", "BTD,DNH->BTNH", cfg, layout, rngs)
        self.k = Einsum("attention.k", "BTD,DKH->BTKH", cfg, layout, rngs)
        self.v = Einsum("attention.v", "BTD,DKH->BTKH", cfg, layout, rngs)
        self.o = Einsum("attention.o", "BTNH,NHD->BtD", cfg, layout, rngs)
        self.q_norm, self.k_norm = (self._norm(letters, cfg, layout) for letters in ("BTNH", "BTKH"))
        self.sinks = Bias("BTN", cfg, layout) if cfg.attention_sinks else None
        has_gate = cfg.attention_gate
        self.gate = Einsum("attention.gate", "BTD,DNH->BTNH", cfg, layout, rngs) if has_gate else None

    def _norm(self, letters: str, cfg: Model, layout: Layout) -> Any:
        """Norm of queries or keys, over each head or over all heads together."""
        if cfg.qk_norm in ("none", "after_rotation"):
            return unchanged
        dims = {"per_head": "H", "all_heads": letters[-2:]}[cfg.qk_norm]
        return NORMS[cfg.norm](letters, cfg, layout, dims)

    def __call__(self, x, positions, rope, mix, noise):
        x = self.layout.enter_branch(x)
        q, k = self.q_norm(self.q(x, noise)), self.k_norm(self.k(x, noise))
        if self.cfg.positions == "rope":
            q, k = (apply_rope(x, positions, rope, self.cfg.rotated_pairs) for x in (q, k))
        if self.cfg.qk_norm == "after_rotation":
            q, k = (jnp.where(rope.rotates, divide_by_rms(x, self.cfg.norm_eps), x) for x in (q, k))
        if self.cfg.query_growth is not None:
            q = grow_queries(q, positions, rope, self.cfg.query_growth)
        out, kept = mix.attend(q * self.scale, (k, self.v(x, noise)), Heads(_as_they_are, self._look_back))
        out = out if self.sinks is None else self._pour(*out)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(self.gate(x, noise))
        return self.o(out, noise), kept

    def _look_back(self, q: jax.Array, kept: tuple[jax.Array, ...], attend: Attend) -> Any:
        return attend(q, *kept, self.layout)

    def _pour(self, out: jax.Array, log_sums: jax.Array) -> jax.Array:
        """Return the results [B, T, N, H] as if each head's softmax had one more score, the sink, without a value.

        sum(exp(s) v) / (sum(exp(s)) + exp(sink)) = result * sigmoid(log(sum(exp(s))) - sink)
        """
        assert self.sinks is not None
        share = jax.nn.sigmoid(-self.sinks(-log_sums))
        return out * share[..., None].astype(out.dtype)


def _as_they_are(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return k, v


MIXERS: dict[str, Callable[[Model, Layout, nnx.Rngs], nnx.Module]] = {
    "attention": Attention,
    "latent": LatentAttention,
    "linear": LinearAttention,
}
MLPS: dict[str, Callable[[Model, Layout, nnx.Rngs], nnx.Module]] = {
    "gated": partial(MLP, kind="gated"),
    "plain": partial(MLP, kind="plain"),
    "experts": Experts,
}


class Block(nnx.Module):
    """Attention and MLP around the residual stream, with norms before them, after them, or both.

    `mixer` is a key of `MIXERS`, `mlp` one of `MLPS`.
    """

    def __init__(self, cfg: Model, layout: Layout, mixer: str, mlp: str, rngs: nnx.Rngs):
        def norm(wanted: bool) -> Any:
            return NORMS[cfg.norm]("BtD", cfg, layout) if wanted else unchanged

        self.multiplier = cfg.residual_multiplier
        before, after = cfg.norm_placement != "post", cfg.norm_placement != "pre"
        self.attention = MIXERS[mixer](cfg, layout, rngs)
        self.mlp = MLPS[mlp](cfg, layout, rngs)
        self.pre_attention, self.post_attention = norm(before), norm(after)
        self.pre_mlp, self.post_mlp = norm(before), norm(after)

    def __call__(self, x, positions, rope, mix: Mix, noise: Noise | None = None) -> tuple[jax.Array, Any, BlockSums]:
        """Return [B, t, D], what `mix` keeps, and numbers for the loss."""
        with jax.named_scope("attention"):
            h, kept = self.attention(self.pre_attention(x), positions, rope, mix, noise)
            x = checkpoint_name(x + self._scaled(self.post_attention(h)), "residual")
        with jax.named_scope("mlp"):
            h, sums = self.mlp(self.pre_mlp(x), noise)
            return x + self._scaled(self.post_mlp(h)), kept, sums

    def _scaled(self, h: jax.Array) -> jax.Array:
        return h if self.multiplier == 1 else h * jnp.asarray(self.multiplier, h.dtype)
