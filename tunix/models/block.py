"""One block of the decoder: attention and MLP around the residual stream. The config says of which parts it is made."""

from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tunix.config import Model
from tunix.config.layers import ExpertsMlp
from tunix.models.attention import Attention
from tunix.models.experts import Experts
from tunix.models.layers import ACTIVATIONS, MLP, NORMS, BlockSums, DropoutKey, Initializer, Matrix, identity, look_up
from tunix.models.linear_attention import LinearAttention, Recurrence
from tunix.models.mla import Heads, LatentAttention
from tunix.models.rope import Rope, Turns, layer_rope, make_tables
from tunix.sharding.layout import Layout
from tunix.sharding.table import Equation

# Inputs of each layer (`model.layer_inputs`): a vector of each token for each layer (Gemma 4).
#
#     tokens [B, T] -------> table -------> [B, t, l, p] --+
#     x      [B, t, D] --> projection, norm [B, t, l, p] --+-- sum / sqrt(2) --> inputs [l, B, t, p]
#
#     x [B, t, D] --+-- gate, activation --> [B, t, p] -- x inputs of the layer --> down, norm --+--> [B, t, D]
#                   +----------------------------------------------------------------------------+
#
# The numbers of a token are few, so every device computes all of them for its tokens of the residual stream.


class LayerInputs(nnx.Module):
    """Vectors of the tokens for each layer: rows of a table [V, l, p], and a projection of the embedding."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        self.equation, self.layout = Equation("BTV,Vlp->BTlp"), layout
        shape = [cfg.dims[dim_name] for dim_name in self.equation.w]
        self.width, self.projection_scale = cfg.dims["p"], cfg.embed_dim**-0.5
        self.table = nnx.Param(initializer.normal(shape, layout.param, self.width**-0.5), equation=self.equation)
        self.projection = Matrix("BtD,Dlp->Btlp", cfg, layout, initializer)
        self.norm = NORMS[cfg.norm]("Btlp", cfg, layout)

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Return inputs [l, B, t, p] of tokens [B, T] int32 and their embeddings [B, t, D]."""
        table = self.layout.gather(self.table[...], self.equation)
        rows = self.layout.split_stream(look_up(table, tokens, self.layout.activation("BTlp")))
        projected = self.projection.multiply(x)
        projected = self.norm(projected * jnp.asarray(self.projection_scale, x.dtype))
        both = projected + rows * jnp.asarray(self.width**0.5, rows.dtype)
        return jnp.moveaxis(both * jnp.asarray(2**-0.5, x.dtype), 2, 0)


class InputGate(nnx.Module):
    """The part of a block that takes the layer's inputs: [B, t, D] and [B, t, p] -> [B, t, D]."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        self.activation = ACTIVATIONS[cfg.mlp.activation]
        self.gate = Matrix("BtD,Dp->Btp", cfg, layout, initializer)
        self.down = Matrix("Btp,pD->BtD", cfg, layout, initializer)
        self.norm = NORMS[cfg.norm]("BtD", cfg, layout)

    def __call__(self, x: jax.Array, inputs: jax.Array) -> jax.Array:
        """x [B, t, D] and the inputs of the layer [B, t, p] -> [B, t, D]."""
        h = self.activation(self.gate.multiply(x)) * inputs
        return x + self.norm(self.down.multiply(h))


# Experts beside an MLP that computes every token (Gemma 4): both take the residual stream, behind norms of their own.
#
# x [B, t, D] --+-- norm --> MLP ------> norm --+
#               +-- norm --> experts --> norm --+--> [B, t, D]
#               +-- router ---^


class ExpertsBesideMlp(nnx.Module):
    """An MLP and experts, whose results are added: [B, t, D] of the residual stream -> [B, t, D]."""

    def __init__(self, cfg: Model, layout: Layout, initializer: Initializer):
        # Both parts have norms of their own, so the block has none before them.
        def norm() -> Any:
            return NORMS[cfg.norm]("BtD", cfg, layout)

        self.dense, self.experts = MLP(cfg, layout, initializer, "gated"), Experts(cfg, layout, initializer)
        self.pre_dense, self.post_dense = norm(), norm()
        self.pre_experts, self.post_experts = norm(), norm()

    def __call__(self, x, dropout_key, after=None, is_text=None) -> tuple[jax.Array, BlockSums]:
        """Return [B, t, D], and the sums of the router; `after` and `is_text` are those of `Experts`."""
        with jax.named_scope("dense"):
            dense = self.post_dense(self.dense(self.pre_dense(x), dropout_key)[0])
        y, sums = self.experts(self.pre_experts(x), dropout_key, x, after, is_text)
        return dense + self.post_experts(y), sums


class Mix(NamedTuple):
    """Ways in which tokens of a layer act on one another; the rest of the model works on each token alone.

    A layer takes the way of its kind. Both return the results of the tokens, and the layer's cache for later tokens,
    which is None in training.
    """

    # (queries [B, T, N, H], entries of the tokens in a cache, the way from entries to keys and values)
    compute_attention: Callable[[jax.Array, tuple[jax.Array, ...], Heads], tuple[Any, Any]]
    recur: Callable[[Recurrence], tuple[jax.Array, Any]]
    # [B, T] bool, False of padding, which routers do not count; None in generation, which needs no counts
    is_text: jax.Array | None = None


class HeadScores(NamedTuple):
    """Scores that a mix returns in the place of a cache, where the step asks for `BlockSums.head_scores`."""

    max_scores: jax.Array


class PartKind(NamedTuple):
    """A kind of a part of a block. A layer takes the first of a table that it has."""

    has: Callable[[Model, int], bool]  # whether a layer of a model, given by its number, has this kind
    make: Callable[[Model, Layout, Initializer], nnx.Module]


MIXERS = {
    "linear": PartKind(lambda cfg, layer: cfg.is_linear(layer), LinearAttention),
    "shared_global": PartKind(
        lambda cfg, layer: cfg.is_shared(layer) and _has_global_heads(cfg, layer),
        partial(Attention, dim_names="kh", has_kv=False),
    ),
    "shared": PartKind(lambda cfg, layer: cfg.is_shared(layer), partial(Attention, has_kv=False)),
    "global": PartKind(lambda cfg, layer: _has_global_heads(cfg, layer), partial(Attention, dim_names="kh")),
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
    "experts": PartKind(lambda cfg, layer: isinstance(cfg.mlp, ExpertsMlp) and layer in cfg.expert_layers, Experts),
    "plain": PartKind(lambda cfg, layer: cfg.mlp.kind == "plain", partial(MLP, kind="plain")),
    # Also of the layers without experts in a model that has experts.
    "gated": PartKind(lambda cfg, layer: cfg.mlp.kind in ("gated", "experts"), partial(MLP, kind="gated")),
}


def _has_global_heads(cfg: Model, layer: int) -> bool:
    return cfg.heads_of(layer).dim_names == "kh"


def find_part(kinds: Mapping[str, PartKind], cfg: Model, layer: int) -> str:
    """Return the key of the kind that a layer of a model has, of `MIXERS` or of `MLPS`."""
    return next(name for name, kind in kinds.items() if kind.has(cfg, layer))


# A block in two steps: it gives x [B, t, D] behind attention, takes it again with an array or None, and returns what it
# returns. Its experts do not begin before the array is computed.
Steps = Generator[jax.Array, tuple[jax.Array, jax.Array | None], Any]


def finish(steps: Steps) -> Any:
    """Run both steps of a block, and return its result."""
    return _run_mlp(steps, next(steps))


def _run_mlp(steps: Steps, x: jax.Array, after: jax.Array | None = None) -> Any:
    """Run the second step of a block, and return its result. Fused kernels of experts wait for `after` (`Experts`)."""
    try:
        steps.send((x, after))
    except StopIteration as end:
        return end.value
    raise AssertionError("a block has two steps")


def finish_parts(first: Steps, second: Steps, other: "OtherPart | None") -> list[Any]:
    """Return the results of a block on both parts: attention of each part, and then the MLP of each part.

    XLA does not know how long our kernels take, and would let a part wait for what travels. So experts of a part begin
    behind attention of the next part, so that tokens travel while that is computed. Where the stream is split, `other`
    is what both blocks meet.
    """
    if other is None:
        x_first, x_second = next(first), next(second)
        return [_run_mlp(first, x_first, x_second), _run_mlp(second, x_second)]
    x_first = next(first)
    x_second, x_first = other.run(partial(next, second), x_first)
    (y_first, *rest), x_second = other.run(partial(_run_mlp, first, x_first), x_second)
    done, y_first = other.run(partial(_run_mlp, second, x_second), y_first)
    return [(y_first, *rest), done]


class OtherPart:
    """The residual stream of one part, which goes on in the middle of a branch of the other part.

    The sum of a branch travels while the other part computes. Barriers say when: it has come in the middle of a branch
    of the other part, and tokens for the next branch travel during the second half of that one.

        arithmetic    attention 0      | attention 1       | MLP 0            | MLP 1             | attention 0 ...
        transfers                      | sum 0 -> tokens 0 | sum 1 -> tokens 1 | sum 0 -> tokens 0 |
                                              ^ the middle, where `meet` stands
    """

    _stream: jax.Array | None = None

    def run(self, branch: Callable[[], Any], stream: jax.Array) -> tuple[Any, jax.Array]:
        """Return what a branch of a part gives, and the stream [B, t, D] of the other part as it goes on."""
        self._stream = stream
        result = branch()
        stream, self._stream = self._stream, None
        return result, stream

    def meet(self, array: jax.Array) -> jax.Array:
        """Return an array of any shape in the middle of a branch. No part goes on before the other one has come."""
        if self._stream is not None:
            array, self._stream = jax.lax.optimization_barrier((array, self._stream))
        return array


class LayerScale(nnx.Module):
    """A trained number, 1 at first, times each number of [B, t, D], the result of a layer."""

    def __init__(self, layout: Layout):
        self.equation, self.layout = Equation("BtDo,o->BtDo"), layout
        self.factor = nnx.Param(jnp.ones(1, layout.param), equation=self.equation)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, t, D] -> [B, t, D]."""
        factor, spec = self.layout.gather(self.factor[...], self.equation), self.layout.activation(self.equation.y)
        return jnp.einsum(self.equation.text, x[..., None], factor, out_sharding=spec)[..., 0].astype(x.dtype)


class Block(nnx.Module):
    """Attention and MLP around the residual stream, with norms before them, after them, or both.

    `mixer` is a key of `MIXERS`, `mlp` one of `MLPS`.
    """

    def __init__(self, cfg: Model, layout: Layout, mixer: str, mlp: str, initializer: Initializer):
        def norm(is_there: bool) -> Any:
            return NORMS[cfg.norm]("BtD", cfg, layout) if is_there else identity

        self.multiplier = cfg.residual_multiplier
        before, after = cfg.norm_placement != "post", cfg.norm_placement != "pre"
        self.attention = MIXERS[mixer].make(cfg, layout, initializer)
        self.mlp, self.has_experts = MLPS[mlp].make(cfg, layout, initializer), mlp in ("experts", "experts_beside")
        self.pre_attention, self.post_attention = norm(before), norm(after)
        self.pre_mlp, self.post_mlp = norm(before and mlp != "experts_beside"), norm(after)
        self.scale = LayerScale(layout) if cfg.layer_scale else identity
        self.input_gate = InputGate(cfg, layout, initializer) if cfg.layer_inputs is not None else None

    def __call__(
        self, x, positions, rope, mix: Mix, dropout_key: DropoutKey | None = None, inputs: jax.Array | None = None
    ) -> tuple[jax.Array, Any, BlockSums]:
        """Return [B, t, D], the cache, and numbers for the loss; `inputs` [B, t, p] are those of the layer."""
        return finish(self.steps(x, positions, rope, mix, dropout_key, inputs))

    def steps(
        self,
        x,
        positions,
        rope,
        mix: Mix,
        dropout_key: DropoutKey | None = None,
        inputs: jax.Array | None = None,
        other: OtherPart | None = None,
    ) -> Steps:
        """Do what `__call__` does with x [B, t, D] in two steps; the first one ends behind attention (`Steps`)."""
        meet = identity if other is None else other.meet
        if other is not None:
            mix = _meet_behind(mix, other)
        with jax.named_scope("attention"):
            h, cache = self.attention(self.pre_attention(x), positions, rope, mix, dropout_key)
            cache, head_scores = (None, cache.max_scores) if isinstance(cache, HeadScores) else (cache, None)
            # Both branches start from the residual stream and add to it: x + attention(norm(x)), then x + mlp(norm(x)).
            x = checkpoint_name(x + self._scaled(self.post_attention(h)), "residual")
        x, after = yield x
        with jax.named_scope("mlp"):
            more: dict[str, Any] = {"meet": meet} if isinstance(self.mlp, MLP) else {}  # not of one's own
            if self.has_experts:
                more = {"after": after, "is_text": mix.is_text}
            h, sums = self.mlp(self.pre_mlp(x), dropout_key, **more)
            x = x + self._scaled(self.post_mlp(h))
        if self.input_gate is not None and inputs is not None:
            with jax.named_scope("input_gate"):
                x = self.input_gate(x, inputs)
        with jax.named_scope("mlp"):
            return self.scale(x), cache, sums._replace(head_scores=head_scores)

    def _scaled(self, h: jax.Array) -> jax.Array:
        return h if self.multiplier == 1 else h * jnp.asarray(self.multiplier, h.dtype)


# Values of a forward pass through the blocks: of each layer, of the rows of tokens, and of all layers together.


class Layer(NamedTuple):
    """Values in which a layer differs from the others of its stack; with a first dimension L, those of all its layers.

    They are data, so that the layers of a stack are one program.
    """

    number: Any  # int32 scalar, in the whole model
    window: Any  # int32 scalar: a query sees its own token and the `window - 1` before it
    rope: Rope | None  # None with learned positions
    inputs: Any  # [B, t, p], of `model.layer_inputs`; None without


class Rows(NamedTuple):
    """Arrays [B, ...] that a block takes of sequences. In a pipeline they travel from stage to stage together."""

    x: Any  # [B, t, D], the residual stream; a block changes it and nothing else
    positions: Any  # [B, T] int32
    mask_inputs: Any  # what the mix needs of the sequences: a tree of arrays, or None
    # On stages alone:
    penalties: Any = None  # {name: [B]}, those of the layers so far
    numbers: jax.Array | None = None  # [B] int32 in the microbatch: dropout draws by them
    # Keys and values of donors for later layers (`Donation`), by the letters of their heads
    shared: Any = None


class Forward(NamedTuple):
    """Values that all layers share in a forward pass."""

    # (a layer, `Rows.mask_inputs`) -> how tokens of these rows act on one another in this layer
    mix_of: Callable[[Layer, Any], Mix]
    length: int  # tokens of the sequences, or those for which a cache has room
    seed: Any = None  # int32 scalar for the dropout of training, or None
    # Tokens that the sequences end with, if they grow beyond `length`: of all, or [B] of each
    final_length: int | jax.Array | None = None
    features: Any = ()  # [B, t, D] each: of images, added behind the first layers
    inputs: Any = None  # [l, B, t, p], of all layers, where the model has `layer_inputs`

    def rope(self, cfg: Model, layers: Any) -> Rope | None:
        """Return the rotations of layers with heads of one width, arrays [L, ...]; None with learned positions."""
        return layer_rope(cfg, layers, self._final_length) if cfg.positions == "rope" else None

    def rope_tables(self, cfg: Model, layers: Any, positions: jax.Array) -> Turns | None:
        """Return `make_tables` of such layers and of positions [B, T]; None with learned positions."""
        return make_tables(cfg, layers, self._final_length, positions) if cfg.positions == "rope" else None

    @property
    def _final_length(self) -> int | jax.Array:
        return self.length if self.final_length is None else self.final_length


# Keys and values of one layer that later layers use too (`model.shared_kv`).
#
#     layer 13   q, k, v --> attention --> result
#                   |  |                                        `Stacks` carries them in `Rows.shared`
#                   v  v
#     layer 17   q  k, v --> attention --> result               a layer with queries alone
#
# The layer that computes them, the donor, returns them beside what its mix returns (`donate_kv`). A layer that takes
# them (`take_kv`) has no cache of its own: in generation it looks into that of its donor.


class Donation(NamedTuple):
    """Keys and values of a donor for later layers, beside its cache; its mix returns both in the place of the cache."""

    cache: Any
    kv: tuple[jax.Array, ...]  # keys and values [B, T, K, H] of the tokens at work


def _meet_behind(mix: Mix, other: OtherPart) -> Mix:
    """Return the mix with which attention meets the other part before its last product."""

    def compute_attention(q, kv, heads):
        out, cache = mix.compute_attention(q, kv, heads)
        return other.meet(out), cache

    return mix._replace(compute_attention=compute_attention)


def donate_kv(mix: Mix) -> Mix:
    """Return the mix of a donor, out of that of the same layer without later layers that take its keys and values."""

    def compute_attention(q, kv, heads):
        out, cache = mix.compute_attention(q, kv, heads)
        return out, Donation(cache, kv)

    return mix._replace(compute_attention=compute_attention)


def take_kv(mix: Mix, kv: tuple[jax.Array, ...]) -> Mix:
    """Return the mix of a layer that takes these keys and values [B, S, K, H] of its donor; `mix` is the donor's."""

    def compute_attention(q, _, heads):
        out, _ = mix.compute_attention(q, kv, heads)
        return out, ()

    return mix._replace(compute_attention=compute_attention)
