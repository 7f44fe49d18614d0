"""One block of the decoder: attention and MLP around the residual stream. The config says of which parts it is made."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tunix.config import Model
from tunix.config.mlp import ExpertsMlp
from tunix.models.beside import ExpertsBesideMlp
from tunix.models.block_sums import BlockSums
from tunix.models.draws import Draws
from tunix.models.experts import Experts
from tunix.models.grouped_query import Attention
from tunix.models.latent import Heads, LatentAttention
from tunix.models.layer_inputs import InputGate
from tunix.models.layers import MLP, unchanged
from tunix.models.linear_attention import LinearAttention, Recurrence
from tunix.models.noise import Noise
from tunix.models.norms import NORMS
from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout


class Mix(NamedTuple):
    """Ways in which tokens of a layer act on one another; the rest of the model works on each token alone.

    A layer takes the way of its kind. Both return the results of the tokens, and the layer's cache for later tokens,
    which is None in training.
    """

    # (queries [B, T, N, H], entries of the tokens in a cache, the way from entries to keys and values)
    attend: Callable[[jax.Array, tuple[jax.Array, ...], Heads], tuple[Any, Any]]
    recur: Callable[[Recurrence], tuple[jax.Array, Any]]


class PartKind(NamedTuple):
    """A kind of a part of a block. A layer takes the first of a table that it has."""

    has: Callable[[Model, int], bool]  # whether a layer of a model, given by its number, has this kind
    make: Callable[[Model, Layout, Draws], nnx.Module]


MIXERS = {
    "linear": PartKind(lambda cfg, layer: cfg.is_linear(layer), LinearAttention),
    "shared_global": PartKind(
        lambda cfg, layer: cfg.is_shared(layer) and _has_global_heads(cfg, layer),
        partial(Attention, letters="kh", has_kv=False),
    ),
    "shared": PartKind(lambda cfg, layer: cfg.is_shared(layer), partial(Attention, has_kv=False)),
    "global": PartKind(lambda cfg, layer: _has_global_heads(cfg, layer), partial(Attention, letters="kh")),
    "latent": PartKind(lambda cfg, layer: cfg.latent is not None, LatentAttention),
    "attention": PartKind(lambda cfg, layer: True, Attention),
}
MLPS = {
    # Of layers that share keys and values.
    "gated_shared": PartKind(lambda cfg, layer: cfg.is_shared(layer), partial(MLP, kind="gated", width="f")),
    # Its parts have norms of their own before them.
    "experts_beside": PartKind(
        lambda cfg, layer: isinstance(cfg.mlp, ExpertsMlp) and cfg.mlp.beside_mlp, ExpertsBesideMlp
    ),
    "experts": PartKind(
        lambda cfg, layer: isinstance(cfg.mlp, ExpertsMlp) and cfg.stack_of(layer) != "dense_blocks", Experts
    ),
    "plain": PartKind(lambda cfg, layer: cfg.mlp.kind == "plain", partial(MLP, kind="plain")),
    # Also of the layers without experts in a model that has experts.
    "gated": PartKind(lambda cfg, layer: cfg.mlp.kind in ("gated", "experts"), partial(MLP, kind="gated")),
}


def _has_global_heads(cfg: Model, layer: int) -> bool:
    return cfg.heads_of(layer).letters == "kh"


def find_part(kinds: Mapping[str, PartKind], cfg: Model, layer: int) -> str:
    """Return the key of the kind that a layer of a model has, of `MIXERS` or of `MLPS`."""
    return next(name for name, kind in kinds.items() if kind.has(cfg, layer))


class LayerScale(nnx.Module):
    """A trained number, 1 at first, times each number of [B, t, D], the result of a layer."""

    def __init__(self, letters: str, layout: Layout):
        self.equation, self.layout = Equation(f"{letters}o,o->{letters}o"), layout
        self.factor = nnx.Param(jnp.ones(1, layout.param), equation=self.equation)

    def __call__(self, x: jax.Array) -> jax.Array:
        factor, spec = self.layout.gather(self.factor[...], self.equation), self.layout.activation(self.equation.y)
        return jnp.einsum(self.equation.text, x[..., None], factor, out_sharding=spec)[..., 0].astype(x.dtype)


class Block(nnx.Module):
    """Attention and MLP around the residual stream, with norms before them, after them, or both.

    `mixer` is a key of `MIXERS`, `mlp` one of `MLPS`.
    """

    def __init__(self, cfg: Model, layout: Layout, mixer: str, mlp: str, draws: Draws):
        def norm(is_there: bool) -> Any:
            return NORMS[cfg.norm]("BtD", cfg, layout) if is_there else unchanged

        self.multiplier = cfg.residual_multiplier
        before, after = cfg.norm_placement != "post", cfg.norm_placement != "pre"
        self.attention = MIXERS[mixer].make(cfg, layout, draws)
        self.mlp = MLPS[mlp].make(cfg, layout, draws)
        self.pre_attention, self.post_attention = norm(before), norm(after)
        self.pre_mlp, self.post_mlp = norm(before and mlp != "experts_beside"), norm(after)
        self.scale = LayerScale("BtD", layout) if cfg.layer_scale else unchanged
        self.input_gate = InputGate(cfg, layout, draws) if cfg.layer_inputs is not None else None

    def __call__(
        self, x, positions, rope, mix: Mix, noise: Noise | None = None, inputs: jax.Array | None = None
    ) -> tuple[jax.Array, Any, BlockSums]:
        """Return [B, t, D], the cache, and numbers for the loss; `inputs` [B, t, p] are those of the layer."""
        with jax.named_scope("attention"):
            h, cache = self.attention(self.pre_attention(x), positions, rope, mix, noise)
            # Both branches start from the residual stream and add to it: x + attention(norm(x)), then x + mlp(norm(x)).
            x = checkpoint_name(x + self._scaled(self.post_attention(h)), "residual")
        with jax.named_scope("mlp"):
            h, sums = self.mlp(self.pre_mlp(x), noise)
            x = x + self._scaled(self.post_mlp(h))
        if self.input_gate is not None and inputs is not None:
            with jax.named_scope("input_gate"):
                x = self.input_gate(x, inputs)
        with jax.named_scope("mlp"):
            return self.scale(x), cache, sums

    def _scaled(self, h: jax.Array) -> jax.Array:
        return h if self.multiplier == 1 else h * jnp.asarray(self.multiplier, h.dtype)
