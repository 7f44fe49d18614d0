"""The decoder's architecture, and the mesh."""

import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, field_validator, model_validator

from tunix.base.dotted import entry_of
from tunix.base.section import Count, CountOrZero, Flag, Positive, Regex, Section
from tunix.config.mlp import AnyMlp, ExpertsMlp
from tunix.config.rope import RopeLong, RopeScaling
from tunix.families import FAMILIES, Family
from tunix.sharding import mesh_shape
from tunix.sharding.dims import codes_per_byte, read_dims, weights_per_scale

MeshShape = Annotated[Any, AfterValidator(mesh_shape.parse)]

# Attention kernels. Each is a function, given by its place so that this module needs no jax; `models/attention.py` says
# what a kernel takes and gives.
KERNELS = {
    "auto": "tunix.models.kernels:fastest",
    "flash": "tunix.models.flash:flash",
    "xla": "tunix.models.attention:plain",
    "cudnn": "tunix.models.attention:cudnn",
}

# Products of rows with the weights of their experts, by their place too; `models/products.py` says what one takes.
GROUPED = {
    "auto": "tunix.models.kernels:fastest_grouped",
    "grouped": "tunix.models.grouped:grouped",
    "xla": "jax.lax:ragged_dot",
}

PROJECTIONS = (
    "attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down",
    "attention.q_down", "attention.kv_down", "attention.kv_up", "attention.q_whole",
    "attention.gate", "attention.beta", "attention.decay",
)  # fmt: skip


def _match_projections(pattern: str | None) -> str | None:
    if pattern is not None and not any(re.search(pattern, name) for name in PROJECTIONS):
        raise ValueError(f"matches none of {', '.join(PROJECTIONS)}")
    return pattern


class Lora(Section):
    """Low-rank updates of frozen matrices (Hu et al. 2021, arXiv:2106.09685)."""

    rank: CountOrZero
    """Rank of the updates (r); 0 trains all weights, without them."""
    alpha: Positive
    """Updates are multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)]
    """Share of an update's inputs that a training step leaves out."""
    targets: Regex
    """Regular expression of the projections that are updated: of attention.q, attention.k, attention.v, attention.o,
    mlp.gate, mlp.up and mlp.down; with model.latent also attention.q_down (or
    attention.q_whole in its and attention.q's place), attention.kv_down and attention.kv_up; with gates also
    attention.gate; with model.linear_attention also attention.beta and attention.decay."""
    train_also: Regex | None
    """Regular expression of parameters that are trained fully beside the updates, like embedding|head; null for
    none."""
    quantize_base: Literal["int8", "nf4"] | None
    """Keep the frozen matrices of attention and MLP in 8 or 4 bits, with a scale for each 32 weights; null keeps them
    in training.param_dtype. Needs qwix."""

    _matches = field_validator("targets")(_match_projections)


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


class Run(NamedTuple):
    """Layers in a row in which stacks of blocks take turns in the same order again and again."""

    layers: range
    pattern: tuple[str, ...]  # names of the stacks of its first layers; then it begins again


class Model(Section):
    """A decoder's architecture and size, and the mesh it is laid out on."""

    family: entry_of(FAMILIES, Family)  # type: ignore[valid-type]
    """Whose names and config.json the model has in Hugging Face's files; or your own, `package.module:name`."""
    vocab_size: Count
    """Rows of the embedding table, at least the tokenizer's tokens; `auto`: their number rounded up to 128s."""
    embed_dim: Count
    """Width of the residual stream (D)."""
    mlp_dim: Count
    """Hidden width of the MLP (F); with experts, of dense layers alone."""
    num_layers: Count
    """Decoder blocks (L)."""
    num_heads: Count
    """Query heads (N)."""
    num_kv_heads: Count
    """Key/value heads (K); each serves num_heads / num_kv_heads query heads."""
    head_dim: Count
    """Width of one head (H), even with RoPE."""
    context_length: Count
    """Longest sequence (P): what training.seq_len and a prompt with its answer may not exceed."""
    latent: Latent | None
    """Latent attention: head_dim is that of queries and keys, whose last rotated_dim numbers are rotated; null for keys
    and values out of the token's whole vector."""
    linear_attention: LinearAttention | None
    """Linear attention in the layers that are not global, of which global_every says the number; null for attention in
    all layers."""
    attention_gate: Flag
    """Results of attention are multiplied by the sigmoid of a projection, number by number (arXiv:2505.06708)."""
    sliding_window: Count | None
    """Tokens that a local layer attends to, itself included; null where there are no local layers."""
    local_attention: Literal["window", "chunk"]
    """A token of a local layer attends to the last sliding_window tokens, or to those of its chunk: a document is cut
    into chunks of sliding_window tokens."""
    global_every: Count
    """Every n-th layer attends to all earlier tokens; the others are local, or linear with model.linear_attention."""
    positions: Literal["rope", "learned"]
    """Where a token is: rotated queries and keys, or a learned vector added to its embedding."""
    rope_theta: Positive | None
    """RoPE base of global layers; null with learned positions."""
    local_rope_theta: Positive | None
    """RoPE base of local layers, which no scaling changes; null rotates them as global layers."""
    unrotated_every: Count | None
    """Every n-th layer leaves queries and keys as they are (arXiv:2305.19466); null rotates in every layer."""
    rope_scaling: RopeScaling
    """How RoPE is stretched over a longer context, in global layers."""
    rotated_dim: Count | None
    """How many of a head's numbers RoPE rotates, the first ones; null rotates all."""
    rotated_pairs: Literal["halves", "neighbours"]
    """Numbers that RoPE rotates together: i of the first half and i of the second, or 2i and 2i + 1."""
    query_scale: Positive
    """Queries are multiplied by query_scale ** -0.5."""
    query_growth: QueryGrowth | None
    """Queries that grow with their position; null for queries that do not."""
    attention_cap: Positive | None
    """Scores s of attention become cap * tanh(s / cap) before the softmax; null for no cap."""
    attention_sinks: Flag
    """Each head has a number that is one more score in its softmax, without a value: a query may take from no token."""
    norm: Literal["rms", "rms_unit_offset", "layer", "layer_unit_offset"]
    """RMSNorm, RMSNorm times 1 + scale, LayerNorm with a bias, or LayerNorm times 1 + scale with a bias."""
    norm_placement: Literal["pre", "pre_and_post", "post"]
    """Norms before attention and MLP, after them (on what is added to the residual stream), or both."""
    norm_eps: Positive
    """Added to the mean square, or to the variance."""
    qk_norm: Literal["none", "per_head", "all_heads", "after_rotation"]
    """Norm of queries and keys: none, of each head, of all heads together; or of each head after its rotation, without
    weights, in layers that rotate."""
    mlp: AnyMlp
    """The part of a block that works on each token alone."""
    biases: Regex | None
    """Regular expression of the projections with a bias, of those that `model.lora.targets` names; null for none."""
    tied_head: Flag
    """Logits are taken with the embedding table; false gives them a table of their own."""
    scaled_embedding: Flag
    """Embeddings are multiplied by sqrt(embed_dim)."""
    embedding_multiplier: Positive
    """Embeddings are multiplied by this."""
    residual_multiplier: Positive
    """What attention and MLP add to the residual stream is multiplied by this."""
    logits_divisor: Positive
    """Logits are divided by this."""
    logits_cap: Positive | None
    """Logits l become cap * tanh(l / cap); null for no cap."""
    init_from: str | None
    """Start from these weights: a folder with config.json and safetensors, or an ID of the Hugging Face hub. Sets the
    keys above, and the tokenizer unless tokenizer.path is given."""
    lora: Lora
    """Low-rank updates in place of full training."""
    init_adapter: str | None
    """Start from the low-rank updates of an adapter: a folder as PEFT or tunix.export writes it, or an ID of the
    Hugging Face hub. Sets rank, alpha and targets of model.lora; the adapter's base is model.init_from."""
    attention: entry_of(KERNELS)  # type: ignore[valid-type]
    """Attention kernel: flash (our own; GPUs, 16-bit products), cudnn (GPUs, 16-bit products), xla (anywhere), or auto:
    the fastest one that is exact here. The start report says which, and why."""
    expert_products: entry_of(GROUPED)  # type: ignore[valid-type]
    """Products of experts: grouped (our own kernel; GPUs, 16-bit products), xla (anywhere; on GPUs it multiplies all
    tokens with all experts), or auto: the fastest one that is exact here. The start report says which, and why."""
    cp_exchange: Literal["auto", "ulysses", "ring"]
    """How attention reaches the tokens that cp gives to other devices: ulysses (devices swap tokens for heads; any
    kernel; cp * tp divides num_heads), ring (keys and values go round), or auto: where the heads allow both, the one
    that is predicted to be faster; ulysses where the speed of the devices is not known."""
    mesh_shape: MeshShape
    """Device mesh: `[[sizes], [axis names]]` of the axes pp, dp, fsdp, ep, cp, tp in any order, one -1 to fill; or
    `auto`, all devices on fsdp."""

    _matches = field_validator("biases")(_match_projections)

    @property
    def dims(self) -> dict[str, int]:
        """Size of each dimension of the weights by its letter (`tunix.sharding.dims.DIMS`)."""
        dims = read_dims("model", self) | {"o": 1}
        if self.latent is not None:
            dims |= {"R": self.num_rotated, "O": self.head_dim - self.num_rotated + self.latent.value_dim}
        if self.cp_exchange != "ulysses":
            del dims["n"]  # a ring splits no heads
        if self.lora.quantize_base is not None:
            dims["c"] = self.embed_dim // codes_per_byte(self.lora.quantize_base)
            dims["e"] = self.embed_dim // weights_per_scale(self.embed_dim)
        return dims

    def stack_of(self, layer: int) -> str:
        """Return the name of the stack of equal blocks that a layer is in."""
        if self.is_linear(layer):
            return f"linear_blocks_{layer % self.global_every}"
        mlp = self.mlp
        if isinstance(mlp, ExpertsMlp) and (layer < mlp.dense_layers or (layer + 1) % mlp.every):
            return "dense_blocks"
        return "blocks"

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Numbers of the layers of each stack, in the order of their first layers."""
        stacks: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_layers):
            name = self.stack_of(layer)
            stacks[name] = (*stacks.get(name, ()), layer)
        return stacks

    @property
    def runs(self) -> tuple[Run, ...]:
        """All layers as runs: one whose pattern repeats, or else a run for each group of neighbours of one stack."""
        names = [self.stack_of(layer) for layer in range(self.num_layers)]
        for size in range(1, self.num_layers // 2 + 1):
            if names == names[:size] * (self.num_layers // size):
                return (Run(range(self.num_layers), tuple(names[:size])),)
        changes = [layer for layer in range(1, len(names)) if names[layer] != names[layer - 1]]
        ends = zip([0, *changes], [*changes, len(names)], strict=True)
        return tuple(Run(range(first, last), (names[first],)) for first, last in ends)

    @property
    def keeps_base(self) -> bool:
        """True where only updates are trained, from nothing: without them, the model is that of step 0."""
        return self.lora.rank > 0 and self.lora.train_also is None and self.init_adapter is None

    @property
    def num_rotated(self) -> int:
        """Numbers of a head that RoPE rotates."""
        return self.head_dim if self.rotated_dim is None else self.rotated_dim

    @property
    def attention_options(self) -> dict[str, Any]:
        """Options of attention kernels that this model needs (`models/attention.py`)."""
        capped = {} if self.attention_cap is None else {"cap": self.attention_cap}
        return capped | ({"with_sums": True} if self.attention_sinks else {})

    def windows(self, length: int) -> list[int]:
        """Tokens that each layer attends to in a sequence of `length` tokens; a layer of linear attention to none."""
        local = length if self.sliding_window is None else min(length, self.sliding_window)
        local = local if self.linear_attention is None else 0
        return [length if self.is_global(layer) else local for layer in range(self.num_layers)]

    def is_global(self, layer: int) -> bool:
        return (layer + 1) % self.global_every == 0

    def is_linear(self, layer: int) -> bool:
        """Return whether the layer has linear attention."""
        return self.linear_attention is not None and not self.is_global(layer)

    def is_rotated(self, layer: int) -> bool:
        """Return whether the layer rotates its queries and keys, where positions are rotations."""
        return self.unrotated_every is None or (layer + 1) % self.unrotated_every != 0

    @model_validator(mode="after")
    def _check(self) -> "Model":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.num_kv_heads}"
            )
        if self.positions == "rope":
            self._check_rotations()
        if self.qk_norm == "after_rotation" and self.positions != "rope":
            raise ValueError(f"model.qk_norm=after_rotation needs rotations, not model.positions={self.positions}")
        if self.query_growth is not None and self.query_growth.layers == "unrotated" and not self.unrotated_every:
            raise ValueError(
                "model.query_growth.layers=unrotated needs layers without positions; set model.unrotated_every, or "
                "model.query_growth=null"
            )
        if self.norm.startswith("layer") and self.qk_norm != "none":
            raise ValueError(
                f"model.qk_norm={self.qk_norm} needs an RMSNorm, not model.norm={self.norm}; set it to none"
            )
        local = self.global_every > 1 and self.linear_attention is None
        for key, needed, why in (
            ("sliding_window", local, f"model.global_every={self.global_every}"),
            ("rope_theta", self.positions == "rope", f"model.positions={self.positions}"),
        ):
            if needed and getattr(self, key) is None:
                raise ValueError(f"model.{key} must be given with {why}")
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.linear_attention is not None:
            self._check_linear(self.linear_attention)
        if isinstance(self.mlp, ExpertsMlp):
            self._check_experts(self.mlp)
        elif self.expert_products != "auto":
            raise ValueError(
                f"model.expert_products={self.expert_products}: model.mlp.kind={self.mlp.kind} has no experts; set "
                "model.expert_products=auto"
            )
        if self.cp_exchange == "ring" and self.attention not in ("auto", "xla"):
            raise ValueError(
                f"model.attention={self.attention}: model.cp_exchange=ring computes blocks by XLA's own operations; "
                "set model.attention=auto, or model.cp_exchange=ulysses, which runs every kernel"
            )
        quantized = self.lora.quantize_base
        if quantized and not self.lora.rank:
            raise ValueError(f"model.lora.quantize_base={quantized} freezes what model.lora.rank=0 trains; give a rank")
        if quantized and self.embed_dim % codes_per_byte(quantized):
            raise ValueError(f"model.embed_dim={self.embed_dim} must be even: model.lora.quantize_base={quantized}")
        return self

    def _check_linear(self, linear: LinearAttention) -> None:
        if linear.num_value_heads % linear.num_key_heads:
            raise ValueError(
                f"model.linear_attention.num_value_heads={linear.num_value_heads} is not divisible by "
                f"model.linear_attention.num_key_heads={linear.num_key_heads}"
            )
        if self.num_layers < self.global_every:
            raise ValueError(
                f"model.global_every={self.global_every} leaves no layer of model.num_layers={self.num_layers} that "
                "attends to all earlier tokens; lower it"
            )
        if self.sliding_window is not None:
            raise ValueError(
                f"model.sliding_window={self.sliding_window}: there are no local layers with model.linear_attention; "
                "set it to null"
            )
        if isinstance(self.mlp, ExpertsMlp):
            raise ValueError(
                "model.linear_attention does not go with experts yet; set model.mlp={kind:gated,activation:silu}"
            )

    def _check_latent(self, latent: Latent) -> None:
        wanted_values: tuple[tuple[str, Any], ...] = (
            ("num_kv_heads", self.num_heads), ("qk_norm", "none"), ("attention_sinks", False),
            ("attention_gate", False),
        )  # fmt: skip
        for key, wanted in wanted_values:
            if (value := getattr(self, key)) != wanted:
                raise ValueError(f"model.{key}={value} does not go with model.latent; set it to {wanted}")
        if self.rotated_dim is None or self.rotated_dim >= self.head_dim:
            raise ValueError(
                f"model.rotated_dim={self.rotated_dim} must be a number below model.head_dim={self.head_dim} with "
                "model.latent"
            )
        if self.attention == "cudnn" and latent.value_dim != self.head_dim:
            raise ValueError(
                "model.attention=cudnn: cuDNN takes values as wide as keys, and "
                f"model.latent.value_dim={latent.value_dim} is not model.head_dim={self.head_dim}; set "
                "model.attention=auto"
            )
        if latent.value_dim > self.head_dim:
            raise ValueError(
                f"model.latent.value_dim={latent.value_dim} is more than model.head_dim={self.head_dim}; lower it"
            )

    def _check_rotations(self) -> None:
        key = "head_dim" if self.rotated_dim is None else "rotated_dim"
        if self.num_rotated % 2:
            raise ValueError(f"model.{key}={self.num_rotated} must be even: RoPE rotates pairs")
        if self.num_rotated > self.head_dim:
            raise ValueError(f"model.rotated_dim={self.rotated_dim} is more than model.head_dim={self.head_dim}")
        if isinstance(self.rope_scaling, RopeLong):
            for name in ("short_factors", "long_factors"):
                if (count := len(getattr(self.rope_scaling, name))) != self.num_rotated // 2:
                    raise ValueError(
                        f"model.rope_scaling.{name} has {count} divisors; model.{key}={self.num_rotated} needs "
                        f"{self.num_rotated // 2}"
                    )

    def _check_experts(self, mlp: ExpertsMlp) -> None:
        if "blocks" not in self.stacks:
            key = "dense_layers" if mlp.dense_layers >= self.num_layers else "every"
            raise ValueError(
                f"model.mlp.{key}={getattr(mlp, key)} leaves none of model.num_layers={self.num_layers} layers to the "
                "experts; lower it, or take model.mlp={kind:gated,activation:silu}"
            )
        updated = [name for name in PROJECTIONS if name.startswith("mlp.") and re.search(self.lora.targets, name)]
        if self.lora.rank and updated:
            raise ValueError(
                f"model.lora.targets={self.lora.targets} matches {updated[0]}: experts have no low-rank updates; set "
                "model.lora.targets=attention"
            )
        if self.biases is not None and any(re.search(self.biases, name) for name in PROJECTIONS if "mlp." in name):
            raise ValueError(f"model.biases={self.biases} matches projections of the MLP: experts have no biases")
