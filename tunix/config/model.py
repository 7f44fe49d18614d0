"""The decoder's architecture, and the mesh."""

from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from tunix.base.config_types import Count, Flag, Positive, Regex, Section, row_of
from tunix.config.layers import (
    AnyMlp,
    ExpertsMlp,
    GlobalHeads,
    HeadSizes,
    Latent,
    LayerInputs,
    LinearAttention,
    Lora,
    Mtp,
    QueryGrowth,
    RopeScaling,
    Run,
    SharedKv,
    list_runs,
    match_projections,
)
from tunix.config.model_checks import check_model_keys
from tunix.config.vision import AnyVision, Gemma3Vision
from tunix.huggingface.table import FAMILIES, Family
from tunix.models.table import CP_EXCHANGES, EXPERT_EXCHANGES, FUSED, GROUPED, KERNELS
from tunix.sharding import mesh
from tunix.sharding.table import read_dims, values_per_byte, weights_per_scale

# Keys of `model` that are no part of the architecture, by what they decide. Models that differ in these alone have
# parameters of the same shapes and the same meaning, but for low-rank updates and the arrays that layers share. Code
# that compares models reads this.
OUTSIDE_ARCHITECTURE = {
    "mesh": frozenset({"mesh_shape"}),
    "computation": frozenset(
        {"attention", "expert_products", "expert_exchange", "expert_buffer_factor", "cp_exchange"}
    ),  # how results are computed
    "start": frozenset({"init_from", "init_adapter"}),  # where the first weights come from
    "updates": frozenset({"lora", "vision.freeze_tower", "vision.freeze_projector"}),  # what is trained
    # To which size images are brought.
    "images": frozenset({"vision.min_pixels", "vision.max_pixels", "vision.tiles_per_side"}),
    "losses": frozenset({"mlp.balance_loss", "mlp.z_loss"}),  # how experts are trained
    "mtp": frozenset({"mtp"}),  # a layer beside those that compute logits
    "stacks": frozenset({"layers_before_stages"}),  # which layers have their weights in one array
}


def list_keys_outside(*decide: str) -> set[str]:
    """Return the keys of `model` that decide one of these (keys of `OUTSIDE_ARCHITECTURE`); without words, all."""
    return set().union(*(OUTSIDE_ARCHITECTURE[name] for name in decide or OUTSIDE_ARCHITECTURE))


MeshShape = Annotated[Any, AfterValidator(mesh.parse)]


class Model(Section):
    """A decoder's architecture and size, and the mesh it is laid out on."""

    family: row_of(FAMILIES, Family)  # type: ignore[valid-type]
    """Family whose names of tensors and of config.json's keys the model has in Hugging Face's files; or your own,
    `package.module:name`."""
    vocab_size: Count
    """Rows of the embedding table, at least the tokenizer's tokens; `auto`: their number, rounded up to a multiple of
    128."""
    embed_dim: Count
    """Width of the residual stream (D)."""
    mlp_dim: Count
    """Hidden width of the MLP (F); with experts, of dense layers alone, or of the MLP beside experts."""
    num_layers: Annotated[Count, Field(le=10_000)]
    """Decoder blocks (L)."""
    num_heads: Count
    """Query heads (N)."""
    num_kv_heads: Count
    """Key/value heads (K); each serves num_heads / num_kv_heads query heads (fewer than those: grouped-query attention,
    GQA)."""
    head_dim: Count
    """Width of one head (H), even with RoPE."""
    context_length: Count
    """Longest sequence (P): what training.seq_len and a prompt with its answer may not exceed."""
    latent: Latent | None
    """Multi-head latent attention (MLA, DeepSeek-V2); null for ordinary attention. head_dim is the width of queries and
    keys; the last rotated_dim numbers of it get RoPE."""
    linear_attention: LinearAttention | None
    """Gated delta-rule attention (Qwen 3 Next) in all layers but every global_every-th; null for softmax attention
    everywhere."""
    global_heads: GlobalHeads | None
    """Heads of global layers; null for those of local layers."""
    shared_kv: SharedKv | None
    """KV sharing (Gemma 4): the last layers reuse keys and values of earlier layers; null: every layer has its own."""
    layer_inputs: LayerInputs | None
    """A vector of each token for each layer, which a gate lets into the residual stream; null for none."""
    mtp: Mtp | None
    """A layer for multi-token prediction behind the last one (DeepSeek-V3, GLM-4.5, Qwen 3 Next), which
    `model.init_from` then reads and an export keeps; null: files are read and written without it."""
    vision: AnyVision | None
    """A tower that sees, and a projector of its results into the residual stream; null for a model of text alone."""
    value_norm: Flag
    """Values are divided by their root mean square, each head's, without weights."""
    attention_gate: Flag
    """Results of attention are multiplied by the sigmoid of a projection, number by number (arXiv:2505.06708)."""
    sliding_window: Count | None
    """Tokens that a local layer attends to, itself included; null where there are no local layers."""
    local_attention: Literal["window", "chunk"]
    """A token of a local layer attends to the last sliding_window tokens (sliding window attention), or to those of its
    chunk: a document is cut into chunks of sliding_window tokens."""
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
    rope_sections: Annotated[tuple[Count, Count, Count], Field(min_length=3, max_length=3)] | None
    """Pairs of a head that RoPE rotates by a token's position in time, by its row in an image, and by its column; they
    take turns (Qwen 3 VL). For text the three are equal. null: all by the position."""
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
    layer_scale: Flag
    """The result of each layer, residual stream and all, is multiplied by a trained number, 1 at first."""
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
    labels: Annotated[tuple[str, ...], Field(min_length=1)] | None
    """Names of the numbers that a head gives each document in the place of logits, at its last token; null: the model
    gives logits. task=reward and task=classify set it, and so does the config.json of a `...ForSequenceClassification`
    (id2label)."""
    init_from: str | None
    """Start from these weights: a folder with config.json and safetensors, or an ID of the Hugging Face hub. Sets the
    keys above, and the tokenizer unless tokenizer.path is given."""
    lora: Lora
    """Low-rank updates in place of full training."""
    init_adapter: str | None
    """Start from the low-rank updates of an adapter: a folder as PEFT or tunix.export writes it, or an ID of the
    Hugging Face hub. Sets rank, alpha, targets, use_rslora and use_dora of model.lora; its base is model.init_from."""
    attention: row_of(("auto", *KERNELS))  # type: ignore[valid-type]
    """Attention kernel: flash (our own; GPUs, 16-bit products), cudnn (GPUs, 16-bit products), xla (anywhere), or auto:
    the fastest one that is exact here. The start report says which, and why."""
    expert_products: row_of(("auto", FUSED, *GROUPED))  # type: ignore[valid-type]
    """Products of experts: fused (our own kernels, which take tokens by their indices and copy no rows; GPUs, 16-bit
    products; on CPUs operations of JAX stand for them), grouped (our own kernel of one product; GPUs, 16-bit products),
    xla (anywhere; on GPUs it multiplies all tokens with all experts), or auto: the fastest one that is exact here. The
    start report says which, and why."""
    expert_exchange: Literal[("auto", *EXPERT_EXCHANGES)]  # type: ignore[valid-type]
    """How tokens reach experts of other devices: gather (all tokens go to all devices; anywhere), rows (each token goes
    to its experts alone; GPUs), or auto: the one that sends fewer bytes. The start report says which, and why."""
    expert_buffer_factor: Positive | None
    """Rows for which a device has room in the exchange `rows`, as a multiple of those that come where loads are equal;
    what does not fit is dropped and counted (dropped_share). null: room for all, so no token is dropped."""
    cp_exchange: Literal[("auto", *CP_EXCHANGES)]  # type: ignore[valid-type]
    """How attention reaches the tokens that cp gives to other devices: ulysses (devices swap tokens for heads; any
    kernel; cp * tp divides num_heads), ring (keys and values go round), or auto: where the heads allow both, the one
    that is predicted to be faster; ulysses where the speed of the devices is not known."""
    layers_before_stages: Count | None
    """First layers, in which pp splits the batch and keeps weights. The stages of pp share the layers behind them: 2 of
    62 layers leave 60 for 4 stages. null: dense layers before experts alone."""
    mesh_shape: MeshShape
    """Device mesh: `[[sizes], [axis names]]` of the axes pp, dp, fsdp, ep, cp, tp in any order, one -1 to fill; or
    `auto`, all devices on fsdp."""

    _matches = field_validator("biases")(match_projections)

    @property
    def dims(self) -> dict[str, int]:
        """Size of each dimension of the weights by its letter (`tunix.sharding.table.DIMS`)."""
        # Most sizes are a key of the model. Those that follow from several keys are added here.
        dims = read_dims("model", self) | {"o": 1, "s": self.num_turns}
        if self.first_runs:
            dims |= {"L": len(self.runs[-1].layers), "δ": self.embed_dim}
        if self.latent is not None:
            # One projection makes keys and values of a latent. RoPE's part of the keys is apart: all heads share it.
            dims |= {"R": self.num_rotated, "O": self.head_dim - self.num_rotated + self.latent.value_dim}
        if self.labels is not None:
            dims["v"] = len(self.labels)
        if self.layer_inputs is not None:
            dims["l"] = self.num_layers
        if self.mtp is not None:
            dims["μ"] = 2 * self.embed_dim
        if self.vision is not None:
            dims |= self.vision.dims
        # Heads must be divisible by cp only in an exchange that splits them; `auto` may take one that does not.
        exchange = CP_EXCHANGES.get(self.cp_exchange)
        if exchange is None or not exchange.splits_heads:
            del dims["n"]
        if self.lora.quantize_base is not None:  # codes and scales take the place of the width D of a matrix
            dims["c"] = self.embed_dim // values_per_byte(self.lora.quantize_base)
            dims["e"] = self.embed_dim // weights_per_scale(self.embed_dim)
        return dims

    @property
    def num_outputs(self) -> int:
        """Numbers that the head gives: of a language model, a logit for each row of the vocabulary."""
        return self.vocab_size if self.labels is None else len(self.labels)

    def stack_of(self, layer: int) -> str:
        """Return the name of the stack of equal blocks that a layer is in.

        Layers with weights of the same shapes are one stack: their weights are one array [layers, ...], and a scan runs
        over it. A stack for each kind of layer, for example with global_every=3 and heads of global layers' own:

            layer    0               1               2       3               4               5
            stack    local_blocks_0  local_blocks_1  blocks  local_blocks_0  local_blocks_1  blocks
        """
        first = "first_" if layer < (self.layers_before_stages or 0) else ""
        if self.is_linear(layer):
            return f"{first}linear_blocks_{layer % self.global_every}"
        shared = "shared_" if self.is_shared(layer) else first
        if self.global_heads is not None and not self.is_global(layer):
            return f"{shared}local_blocks_{layer % self.global_every}"
        mlp = self.mlp
        if isinstance(mlp, ExpertsMlp) and (layer < mlp.dense_layers or (layer + 1) % mlp.every):
            return f"{first}dense_blocks"
        return f"{shared}blocks"

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Numbers of the layers of each stack, in the order of their first layers."""
        stacks: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_layers):
            name = self.stack_of(layer)
            stacks[name] = (*stacks.get(name, ()), layer)
        return stacks

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with experts, in a model that has some."""
        return tuple(layer for layer in range(self.num_layers) if not self.stack_of(layer).endswith("dense_blocks"))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All layers as runs (`list_runs`)."""
        return list_runs(self)

    def __copy__(self) -> Self:
        """A copy, which `model_copy` changes, finds its runs anew."""
        copied = super().__copy__()
        copied.__dict__.pop("runs", None)
        return copied

    @property
    def num_turns(self) -> int:
        """Number of equal parts of the layers, which stages of the mesh axis pp may share; 1 if no stages can.

        L G L G L G    3 turns, each a local and a global layer: 3 stages can share them, 2 or 6 cannot
        """
        last = self.runs[-1]
        if len(self.runs) > 1 + len(self.first_runs) or self.shared_kv is not None or self.layer_inputs is not None:
            return 1
        return len(last.layers) // len(last.pattern)

    @property
    def first_runs(self) -> tuple[Run, ...]:
        """Layers before those that stages share (`layers_before_stages`), which are the last run."""
        if self.layers_before_stages is not None:
            return tuple(run for run in self.runs if run.layers.start < self.layers_before_stages)
        *first, last = self.runs
        is_dense = [run.pattern for run in first] == [("dense_blocks",)] and "dense_blocks" not in last.pattern
        return tuple(first) if is_dense else ()

    @property
    def mtp_model(self) -> "Model":
        """A model of one layer, which is that of `mtp`: with attention to all earlier tokens, and with experts if this
        model has some."""
        parts: dict[str, Any] = {
            "num_layers": 1, "layers_before_stages": None, "global_every": 1, "linear_attention": None, "mtp": None,
        }  # fmt: skip
        if isinstance(self.mlp, ExpertsMlp):
            parts["mlp"] = self.mlp.model_copy(update={"dense_layers": 0, "every": 1})
        return self.model_copy(update=parts)

    @property
    def num_first_layers(self) -> int:
        return sum(len(run.layers) for run in self.first_runs)

    @property
    def architecture(self) -> dict[str, Any]:
        """The values of all keys that are part of the architecture; those of a section are a dict, as in the config."""
        values = self.model_dump()
        for key in list_keys_outside():
            section, _, name = key.rpartition(".")
            part = values[section] if section else values
            if part is not None:  # a section that this model lacks
                part.pop(name, None)
        if self.global_every == 1:  # no layer is local
            values["local_rope_theta"] = None
        return values

    @property
    def keeps_base(self) -> bool:
        """True where only low-rank updates beside the matrices are trained, and they begin at zero.

        Then the model without its updates is the model of step 0, and a run needs no second copy as its reference.
        """
        others = self.lora.train_also or self.init_adapter or self.labels
        return self.lora.rank > 0 and not (others or self.lora.use_dora)  # DoRA also trains norms of the base

    @property
    def num_rotated(self) -> int:
        """How many numbers of a head RoPE rotates, in layers with heads of `head_dim`."""
        return self.head_dim if self.rotated_dim is None else self.rotated_dim

    def heads_of(self, layer: int) -> HeadSizes:
        """Return the sizes of the heads of a layer with attention."""
        own = self.global_heads
        if own is not None and self.is_global(layer):
            return HeadSizes(own.num_kv_heads, own.head_dim, own.head_dim, "kh")
        value_dim = self.head_dim if self.latent is None else self.latent.value_dim
        return HeadSizes(self.num_kv_heads, self.head_dim, value_dim, "KH")

    @property
    def head_kinds(self) -> dict[HeadSizes, tuple[int, ...]]:
        """Layers with attention by the sizes of their heads."""
        kinds: dict[HeadSizes, tuple[int, ...]] = {}
        for layer in range(self.num_layers):
            if not self.is_linear(layer):
                kinds[self.heads_of(layer)] = (*kinds.get(self.heads_of(layer), ()), layer)
        return kinds

    @property
    def attention_options(self) -> dict[str, Any]:
        """Options of attention that this model needs in every pass (`models/attention.py`)."""
        capped = {} if self.attention_cap is None else {"cap": self.attention_cap}
        return capped | ({"with_sums": True} if self.attention_sinks else {})

    @property
    def future_keys(self) -> int:
        """Number of keys behind its own that a query may see: tokens of an image also see the later ones of it."""
        return self.vision.tokens_per_image - 1 if isinstance(self.vision, Gemma3Vision) else 0

    @property
    def kernel_options(self) -> dict[str, Any]:
        """Options of kernels of attention that this model needs for whole rows (`models/attention.py`)."""
        return self.attention_options | ({"future_keys": self.future_keys} if self.future_keys else {})

    def list_windows(self, length: int) -> list[int]:
        """Return how many tokens each layer attends to in a sequence of `length` tokens; 0 with linear attention."""
        local = length if self.sliding_window is None else min(length, self.sliding_window)
        local = local if self.linear_attention is None else 0
        return [length if self.is_global(layer) else local for layer in range(self.num_layers)]

    def is_global(self, layer: int) -> bool:
        return (layer + 1) % self.global_every == 0

    def is_linear(self, layer: int) -> bool:
        """Return whether the layer has linear attention."""
        return self.linear_attention is not None and not self.is_global(layer)

    @property
    def num_linear_layers(self) -> int:
        return sum(map(self.is_linear, range(self.num_layers)))

    def is_paged(self, layer: int) -> bool:
        """Return whether pages may hold the cache of the layer (sampling.cache): keys and values of all tokens."""
        sees_all = self.is_global(layer) or (self.sliding_window is None and self.linear_attention is None)
        return self.latent is None and sees_all

    def find_page_problem(self) -> str | None:
        """Return why no layer can have its cache in pages (sampling.cache=pages); None if one can."""
        if self.latent is not None:
            return "model.latent keeps latents, and no keys and values of heads"
        if not any(map(self.is_paged, range(self.num_layers))):
            return "no layer of the model keeps all tokens: each has a window or linear attention"
        return None

    def is_shared(self, layer: int) -> bool:
        """Return whether the layer takes keys and values of an earlier one."""
        return self.shared_kv is not None and layer >= self.num_layers - self.shared_kv.layers

    def is_rotated(self, layer: int) -> bool:
        """Return whether the layer rotates its queries and keys, where positions are rotations."""
        return self.unrotated_every is None or (layer + 1) % self.unrotated_every != 0

    @model_validator(mode="after")
    def _check(self) -> "Model":
        check_model_keys(self)
        if self.vision is None and self.family in FAMILIES and FAMILIES[self.family].sees:
            raise ValueError(f"model.family={self.family} has a tower: model.vision=null goes with another family")
        return self
