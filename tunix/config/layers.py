"""Parts of a model: RoPE and its scalings, attention, MLPs and experts, shared layers, low-rank updates."""

import math
import re
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from tunix.base.config_types import Count, CountOrZero, Flag, NonNegative, Positive, Regex, Section

if TYPE_CHECKING:
    from tunix.config.model import Model


class Rope(Section):
    """Rotary positions (RoPE), and a way to stretch them over a longer context."""

    name: str
    """How the rotations are slowed down for a longer context, in layers that attend to everything."""


class RopeUnscaled(Rope):
    """Positions as they are."""

    name: Literal["none"]  # type: ignore[assignment]


class RopeLinear(Rope):
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    name: Literal["linear"]  # type: ignore[assignment]
    factor: Positive
    """Ratio of the longer context to the original one."""


class RopeLlama3(RopeLinear):
    """Slow rotations divided by a factor, fast ones left, those between mixed (Llama 3.1's model card)."""

    name: Literal["llama3"]  # type: ignore[assignment]
    original_context: Count
    """Tokens of the context before it was made longer."""
    low_freq_factor: Positive
    """Rotations with fewer turns than this in the original context are divided by the factor."""
    high_freq_factor: Positive
    """Rotations with more turns than this in the original context are left."""


class RopeYarn(RopeLinear):
    """YaRN (Peng et al. 2023, arXiv:2309.00071)."""

    name: Literal["yarn"]  # type: ignore[assignment]
    original_context: Count
    """Tokens of the context before it was made longer."""
    beta_fast: Positive
    """Rotations with more turns than this in the original context are left."""
    beta_slow: Positive
    """Rotations with fewer turns than this in the original context are divided by the factor."""
    attention_factor: Positive | None
    """Queries and keys are multiplied by this; null is 0.1 * log(factor) + 1."""
    truncate: Flag
    """Round the borders between fast, mixed and slow rotations to whole pairs of dimensions."""


class RopeLong(Rope):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): a divisor for each rotation, found by a search."""

    name: Literal["longrope"]  # type: ignore[assignment]
    original_context: Count
    """Tokens of the context before it was made longer."""
    short_factors: list[Positive]
    """Divisors of the rotations, for sequences of at most the original context."""
    long_factors: list[Positive]
    """Divisors of the rotations, for longer sequences."""
    attention_factor: Positive | None
    """Queries and keys are multiplied by this; null is sqrt(1 + log(context_length / original) / log(original))."""


class RopeProportional(Rope):
    """Rotations of a share of the pairs, as fast as if all pairs were rotated; the others are left as they are."""

    name: Literal["proportional"]  # type: ignore[assignment]
    share: Annotated[float, Field(gt=0, le=1)]
    """Share of the pairs of a head that are rotated, the fastest ones."""


RopeScaling = Annotated[
    RopeUnscaled | RopeLinear | RopeLlama3 | RopeYarn | RopeLong | RopeProportional, Field(discriminator="name")
]


# Magnitudes of queries and keys where nothing gives them; `ratio` is that of the longer context to the original one. A
# longer context has more keys for each query: the magnitude keeps the softmax over them as sharp as it was.


def yarn_magnitude(ratio: float, mscale: float = 1.0) -> float:
    """Return that of YaRN; DeepSeek multiplies its logarithm by `mscale`."""
    return 0.1 * mscale * math.log(ratio) + 1 if ratio > 1 else 1.0


def longrope_magnitude(ratio: float, original_context: int) -> float:
    """Return that of LongRoPE."""
    return math.sqrt(1 + math.log(ratio) / math.log(original_context)) if ratio > 1 else 1.0


class Latent(Section):
    """Queries, keys and values out of narrow vectors of each token (DeepSeek-V2, arXiv:2405.04434)."""

    query_dim: Count | None
    """Width of the vector that a token's queries are made of (Q); null for queries out of the token's whole vector."""
    dim: Count
    """Width of the vector that a token's keys and values are made of (C): a cache keeps it in their place."""
    value_dim: Count
    """Width of the values of one head (W), at most head_dim."""


class LinearAttention(Section):
    """Layers with a memory of fixed size in the place of keys and values (gated delta rule, arXiv:2412.06464)."""

    num_key_heads: Count
    """Heads of queries and of keys (I); each serves num_value_heads / num_key_heads value heads."""
    num_value_heads: Count
    """Heads of values and of results (J)."""
    key_dim: Count
    """Width of a key and of a query of one head (E)."""
    value_dim: Count
    """Width of a value of one head (M)."""
    filter_size: Count
    """Tokens that the filters of queries, keys and values take, the newest included (Z)."""

    @property
    def state_size(self) -> int:
        """Numbers of the memory of one layer, for one sequence."""
        return self.num_value_heads * self.key_dim * self.value_dim


class Mtp(Section):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437): one more layer, which learns to predict the token after
    the next one."""

    loss_weight: Positive
    """Its cross entropy counts with this weight in the loss."""


class QueryGrowth(Section):
    """Queries that grow with their position p: they are multiplied by 1 + rate * log(1 + floor((p + offset) / every))
    (arXiv:2501.19399)."""

    rate: Positive
    """Growth at the first step."""
    every: Count
    """Tokens of a step."""
    offset: CountOrZero
    """Added to the position."""
    layers: Literal["all", "unrotated"]
    """Layers whose queries grow: all, or those without positions (model.unrotated_every)."""


class GlobalHeads(Section):
    """Heads of global layers, where they are not those of local layers."""

    head_dim: Count
    """Width of one head in global layers (h), even with RoPE."""
    num_kv_heads: Count
    """Key/value heads of global layers (k); each serves num_heads / num_kv_heads query heads."""
    values_are_keys: Flag
    """Values of global layers are their keys before norm and rotation; these layers have no projection of values."""


class HeadSizes(NamedTuple):
    """Sizes of the heads of one layer with attention."""

    num_kv_heads: int
    dim: int  # width of queries and of keys
    value_dim: int
    # The letters of both dimensions (sharding/table.py): KH, or kh in layers with `GlobalHeads`. One model may have
    # both kinds, and an equation must tell their sizes apart.
    dim_names: str


Activation = Literal["silu", "gelu", "relu2", "xielu"]


class GatedMlp(Section):
    """A linear unit gated by its activation (Shazeer 2020, arXiv:2002.05202)."""

    kind: Literal["gated"]
    """The activation of one product gates another."""
    activation: Activation
    """SiLU, GELU by its tanh formula, squared ReLU (relu2, arXiv:2109.08668), or xIELU (arXiv:2411.13010)."""


class PlainMlp(Section):
    """Two products with an activation between them."""

    kind: Literal["plain"]
    """One product, the activation, another product."""
    activation: Activation
    """SiLU, GELU by its tanh formula, squared ReLU (relu2, arXiv:2109.08668), or xIELU (arXiv:2411.13010)."""


class ExpertsMlp(Section):
    """A mixture of experts: gated MLPs, of which a router chooses a few for each token (arXiv:1701.06538)."""

    kind: Literal["experts"]
    """Experts, and a router that chooses among them."""
    activation: Literal["silu", "gelu", "clamped_silu"]
    """SiLU, GELU by its tanh formula, or GPT-OSS's gate: x of at most 7 times sigmoid(1.702 x), times what it gates,
    within 7 of 0, plus 1. The shared expert and dense layers have the first two."""
    biases: Flag
    """The router's logits and each projection of an expert have a bias."""
    num_experts: Count
    """Experts of a layer (X)."""
    experts_per_token: Count
    """Experts that compute each token."""
    expert_dim: Count
    """Hidden width of one expert (G)."""
    shared_dim: Count | None
    """Hidden width of a shared expert, which computes every token beside the chosen ones (U); null for none."""
    shared_gate: Flag
    """The shared expert's result is multiplied by the sigmoid of a projection of the token to one number."""
    dense_layers: CountOrZero
    """Number of first layers that have one gated MLP of width mlp_dim and no experts."""
    every: Count
    """Every n-th layer has experts; the others have one gated MLP of width mlp_dim."""
    scores: Literal["softmax", "sigmoid"]
    """Scores of the experts, out of the router's logits: softmax over all experts, or a sigmoid of each."""
    normalized: Flag
    """Divide the scores of a token's experts by their sum, before the results are added with these weights."""
    scale: Positive
    """The weights are multiplied by this."""
    weighted: Literal["results", "inputs"]
    """What the weights of a token's experts multiply: the experts' results, or the token before they compute it."""
    num_groups: Count
    """Groups of equal size that the experts are in; 1 for no groups."""
    groups_per_token: Count
    """Groups that a token's experts are taken from: those with the largest sum of two scores (arXiv:2412.19437)."""
    balance_loss: NonNegative
    """Weight of the loss that balances the experts' loads within each sequence (arXiv:2412.19437, equation 17)."""
    z_loss: NonNegative
    """Weight of the square of log(Z), Z the sum of exp(router's logits), per token (arXiv:2202.08906)."""
    bias_rate: NonNegative | None
    """Each expert has a bias in the choice, not in the weights; after a step it rises by this where the expert's load
    was below the mean, and falls by this where it was above (arXiv:2408.15664). null for no bias."""
    beside_mlp: Flag
    """Each layer also has a gated MLP of width mlp_dim, with norms of its own before and after it, and so have the
    experts; the router takes the residual stream, divided by its root mean square and sqrt(embed_dim), times a trained
    scale; and the weight of each expert is multiplied by a trained number (Gemma 4)."""

    @model_validator(mode="after")
    def _check(self) -> "ExpertsMlp":
        prefix, groups, taken = "model.mlp.", self.num_groups, self.groups_per_token
        if self.num_experts % groups:
            raise ValueError(f"{prefix}num_experts={self.num_experts} is not divisible by {prefix}num_groups={groups}")
        if taken > groups:
            raise ValueError(f"{prefix}groups_per_token={taken} is more than {prefix}num_groups={groups}")
        if self.activation == "clamped_silu" and (self.shared_dim or self.dense_layers or self.every > 1):
            raise ValueError(
                f"{prefix}activation=clamped_silu is one of experts; set {prefix}shared_dim=null, "
                f"{prefix}dense_layers=0 and {prefix}every=1, or {prefix}activation=silu"
            )
        if self.shared_gate and self.shared_dim is None:
            raise ValueError(
                f"{prefix}shared_gate=true: there is no shared expert; give {prefix}shared_dim, or leave the gate out"
            )
        choices = self.num_experts // groups * taken
        if self.experts_per_token > choices:
            limit = f"the {choices} experts in {prefix}groups_per_token={taken} of {prefix}num_groups={groups} groups"
            if groups == 1:
                limit = f"{prefix}num_experts={self.num_experts}"
            raise ValueError(f"{prefix}experts_per_token={self.experts_per_token} is more than {limit}; lower it")
        return self


AnyMlp = Annotated[GatedMlp | PlainMlp | ExpertsMlp, Field(discriminator="kind")]


class SharedKv(Section):
    """KV sharing (Gemma 4): last layers, which have no keys and values of their own. A local one takes those of the
    last local layer before all of them, a global one those of the last global layer."""

    layers: Count
    """Number of these layers."""
    mlp_dim: Count
    """Hidden width of their MLP (f): model.mlp_dim, or twice as much."""


class LayerInputs(Section):
    """A vector of each token for each layer (Gemma 4): a row of a table, and a projection of the token's embedding."""

    dim: Count
    """Width of the vector (p)."""


class Run(NamedTuple):
    """Layers in a row whose stacks take turns in an order that repeats: one scan of the program."""

    layers: range
    pattern: tuple[str, ...]  # the stacks of its first layers, by name; the other layers repeat this order


def list_runs(model: "Model") -> tuple[Run, ...]:
    """Return all layers of a model as runs.

    Layers whose keys and values are shared later are in a run of one turn, just before the layers that take them. Then
    the scan over the other layers does not return keys and values, which would take the memory of all its layers.

        global_every=3, 4 of 10 layers are shared    0 1 2 | 3 4 5 | 6 7 8 9
                                                     local layers 6, 7 and 9 take those of 4, global layer 8 those of 5
    """
    names = [model.stack_of(layer) for layer in range(model.num_layers)]
    if model.vision is not None and model.vision.deepstack_layers:
        # What is added behind a layer is added behind a run.
        count = len(model.vision.deepstack_layers)
        alone = tuple(Run(range(layer, layer + 1), (names[layer],)) for layer in range(count))
        return (*alone, *_list_runs(names[count:], count))
    if model.shared_kv is None:
        first = model.layers_before_stages or 0
        return (*_list_runs(names[:first], 0), *_list_runs(names[first:], first))
    first = model.num_layers - model.shared_kv.layers
    turn = range(first - model.global_every, first)
    before, shared = _list_runs(names[: turn.start], 0), _list_runs(names[first:], first)
    return (*before, Run(turn, tuple(names[turn.start : first])), *shared)


def _list_runs(names: list[str], start: int) -> tuple[Run, ...]:
    """Return one run if the layers repeat a pattern, else a run for each group of neighbours of one stack. `names` are
    the stacks of the layers from number `start` on: L L G L L G is one run with the pattern L L G, and D E E E is two
    runs, D and E."""
    # The shortest pattern is found first. One that does not repeat at least twice is no pattern.
    for size in range(1, len(names) // 2 + 1):
        if names == names[:size] * (len(names) // size):
            return (Run(range(start, start + len(names)), tuple(names[:size])),)
    changes = [layer for layer in range(1, len(names)) if names[layer] != names[layer - 1]]
    ends = zip([0, *changes], [*changes, len(names)], strict=True) if names else []
    return tuple(Run(range(start + first, start + last), (names[first],)) for first, last in ends)


def find_donors(model: "Model") -> dict[str, int]:
    """Return the layers that give their keys and values to the shared layers, by the letters of their heads.

    {} in a model without shared layers.
    """
    if model.shared_kv is None:
        return {}
    # The last layer of each kind: a later one replaces an earlier one in the dict.
    return {model.heads_of(layer).dim_names: layer for layer in range(model.num_layers - model.shared_kv.layers)}


def check_shared_layers(model: "Model") -> None:
    """Raise ValueError where shared keys and values, or inputs of each layer, do not go with the rest of the model."""
    shared = model.shared_kv
    if model.layer_inputs is not None and model.norm.startswith("layer"):
        raise ValueError(f"model.layer_inputs needs an RMSNorm, not model.norm={model.norm}; set it to null")
    if shared is None:
        return
    if model.global_heads is None or isinstance(model.mlp, ExpertsMlp) or model.mlp.kind != "gated":
        raise ValueError(
            "model.shared_kv needs model.global_heads, and a gated MLP in each layer; set model.shared_kv=null"
        )
    if shared.layers > model.num_layers - model.global_every:
        raise ValueError(
            f"model.shared_kv.layers={shared.layers} leaves fewer than model.global_every={model.global_every} of "
            f"model.num_layers={model.num_layers} layers with keys and values of their own; lower it"
        )
    if shared.mlp_dim not in (model.mlp_dim, 2 * model.mlp_dim):
        raise ValueError(
            f"model.shared_kv.mlp_dim={shared.mlp_dim} must be model.mlp_dim={model.mlp_dim}, or twice as much: "
            "config.json has no word for another width"
        )


PROJECTIONS = (
    "attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down",
    "attention.q_down", "attention.kv_down", "attention.kv_up", "attention.q_whole",
    "attention.gate", "attention.beta", "attention.decay",
    # Of the tower of `model.vision`:
    "tower.attention.q", "tower.attention.k", "tower.attention.v", "tower.attention.o", "tower.mlp.up",
    "tower.mlp.down",
)  # fmt: skip
EXPERT_PROJECTIONS = ("mlp.expert_gate", "mlp.expert_up", "mlp.expert_down")
UPDATED = (*PROJECTIONS, *EXPERT_PROJECTIONS)  # what low-rank updates are for


def match_projections(pattern: str | None) -> str | None:
    """Return the regular expression unchanged. Raises `ValueError` where it matches no projection: a typo would train
    nothing, in silence."""
    if pattern is not None and not any(re.search(pattern, name) for name in UPDATED):
        raise ValueError(f"matches none of {', '.join(UPDATED)}")
    return pattern


class Lora(Section):
    """Low-rank updates of frozen matrices (Hu et al. 2021, arXiv:2106.09685)."""

    rank: CountOrZero
    """Rank of the updates (r); 0 trains all weights, without them."""
    alpha: Positive
    """Updates are multiplied by alpha / rank, or with use_rslora by alpha / sqrt(rank)."""
    use_rslora: Flag
    """Divide alpha by the root of the rank, so that updates of a high rank learn as fast (rsLoRA, arXiv:2312.03732)."""
    use_dora: Flag
    """Train the norm of each output of a matrix beside the update, which changes its direction alone (DoRA,
    arXiv:2402.09353). Not of experts."""
    init: Literal["zero", "pissa"]
    """Start of an update: zero, a random first factor and a second one of 0; pissa, the largest singular values of the
    matrix, which its frozen part lacks (PiSSA, arXiv:2404.02948). Either way step 0 computes what the base computes."""
    loraplus_lr_ratio: Positive
    """Learning rate of the second factor, as a multiple of optimizer.learning_rate (LoRA+, arXiv:2402.12354: 16); 1 for
    one rate."""
    dropout: Annotated[float, Field(ge=0, lt=1)]
    """Share of an update's inputs that a training step leaves out."""
    targets: Regex
    """Regular expression of the projections that are updated: of attention.q, attention.k, attention.v, attention.o,
    mlp.gate, mlp.up and mlp.down; with model.latent also attention.q_down (or
    attention.q_whole in its and attention.q's place), attention.kv_down and attention.kv_up; with gates also
    attention.gate; with model.linear_attention also attention.beta and attention.decay; with experts also
    mlp.expert_gate, mlp.expert_up and mlp.expert_down, of which each expert has an update of its own.
    With model.vision and model.vision.freeze_tower=false also those of the tower: tower.attention.q, ..., tower.mlp.up
    and tower.mlp.down; '^attention|^mlp' is the decoder alone, tower the tower alone."""
    train_also: Regex | None
    """Regular expression of parameters that are trained fully beside the updates, like embedding|head; null for
    none."""
    quantize_base: Literal["int8", "nf4"] | None
    """Keep the frozen matrices of attention and MLP in 8 or 4 bits, with a scale for each 32 weights; null keeps them
    in training.param_dtype. Needs qwix."""

    _matches = field_validator("targets")(match_projections)

    @property
    def scale(self) -> float:
        """Factor of the updates."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)
