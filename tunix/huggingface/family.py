"""Names of tensors and keys of config.json that several families share. Imports no jax."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Name:
    """Place of a weight in the files.

    `dims` are its dimensions there, by letter (sharding/table.py): a matrix "NH,D" has num_heads * head_dim rows. One
    tensor may hold several weights, one after the other along its dimension `fused_dim`. Then `fused` has their sizes
    along it, and the weight is number `part` of them:

        qkv_proj [NH + KH + KH, D], fused = ("NH", "KH", "KH"), fused_dim = 0:   | q | k | v |  are its rows

    Weights may be `interleaved` along a dimension, given by its letter: the tensor has the rows of the first entry of
    each weight, then those of its second entry, and so on:

        gate_up_proj, interleaved = "G"      | gate 0 | up 0 | gate 1 | up 1 | ...
        in_proj_qkvz, interleaved = "I"      | q 0 | k 0 | v 0 v 1 | z 0 z 1 | q 1 | k 1 | v 2 v 3 | ...   J = 2 I
    """

    tensor: str  # {} is the number of the layer, a second {} that of the expert
    dims: str
    part: int = 0
    fused: tuple[str, ...] = ()
    fused_dim: int = 0
    interleaved: str = ""

    @property
    def numbered(self) -> str:
        """Dimensions of the weight that are numbers in the tensor's name, by letter: there is a tensor for each."""
        return "LX"[: self.tensor.count("{}")]


SCORE = {"score.w": Name("score.weight", "v,D")}  # of the classes of all families that give scores
# Classes with scores in transformers, of architectures for which it has another name than usual, or none.
CLASSIFIERS = {
    "Gemma3ForCausalLM": "Gemma3TextForSequenceClassification",
    "Qwen3_5ForCausalLM": "Qwen3_5TextForSequenceClassification",
} | dict.fromkeys(
    (
        "ApertusForCausalLM", "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM", "Glm4MoeForCausalLM",
        "GraniteForCausalLM", "Llama4ForCausalLM", "OlmoeForCausalLM", "Qwen3_5MoeForCausalLM",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Form of one family at Hugging Face: names of tensors, keys of config.json."""

    model_type: str
    architecture: str  # class in transformers
    names: dict[str, Name]  # parameter -> tensor
    keys: dict[str, str]  # our key -> key of config.json
    fixed: dict[str, tuple]  # key of config.json -> values that our layers can compute, the usual one first
    absent: dict[str, Any] = field(default_factory=dict)  # key of config.json -> its value where the file leaves it out
    # (beginning of a tensor name in other classes and versions, the usual beginning)
    renamed: tuple[tuple[str, str], ...] = ()
    synonyms: dict[str, str] = field(default_factory=dict)  # key of config.json in other versions -> the usual key
    also: tuple[str, ...] = ()  # other values of model_type that mean the same
    biases: dict[str, str] = field(default_factory=dict)  # flag of config.json -> `model.biases` where it is true
    local_rope: bool = False  # local layers have rotations of their own, which no scaling changes
    scaled_rope: bool = False  # transformers stretches rotations where config.json does not say how
    unrotated_global: bool = False  # where there are local layers, the global ones have no positions
    # Keys of config.json with these values tell this family from others of its model_type.
    signature: dict[str, Any] = field(default_factory=dict)
    query_scale: float | None = None  # `model.query_scale` where no key of config.json says it; None for head_dim
    local_type: str = "sliding_attention"  # word for a local layer in layer_types of config.json
    qk_norm: str = "per_head"  # `model.qk_norm` where use_qk_norm of config.json is true
    # Patterns of the names of tensors that are not weights of the decoder; {num_layers} is the number of its layers.
    ignored: tuple[str, ...] = ()
    # The layer of multi-token prediction (`model.mtp`): a pattern of its tensors, and names of its parameters. Those of
    # its block are named as in other layers, or begin with `mtp_block`.
    mtp_tensors: str | None = None
    mtp_names: dict[str, Name] = field(default_factory=dict)
    mtp_block: str | None = None
    mtp_copies: dict[str, str] = field(default_factory=dict)  # tensor -> parameter that it has a second time
    constants: dict[str, float] = field(default_factory=dict)  # tensor -> the number that our layers have in its place
    published_code: bool = False  # auto_map names code that computes what transformers' own class computes
    many_axes: bool = False  # `model.rope_sections` is in its parameters of RoPE
    sees: bool = False  # has a tower (`model.vision`); its config.json has text_config and vision_config
    # (beginning of a tensor's name, beginning of its module's name in transformers), where these differ
    modules: tuple[tuple[str, str], ...] = ()
    # Names in the place of those of `names` in published files, and so in exports; both are read.
    published: dict[str, Name] = field(default_factory=dict)
    # The family's parts, or a YAML file of them, which may name `defaults`; None for conf/model/family/NAME.yaml.
    values: dict[str, Any] | Path | None = None

    def name(self, path: str) -> Name | None:
        """Return the place of a parameter in the files, or None if it has none.

        A model may have several stacks of layers. A part that differs in one kind of stack has a name of its own, any
        other part has that of `blocks`:

            linear_blocks_1.mlp.up.w    looked up as linear_blocks.mlp.up.w, then as blocks.mlp.up.w
            first_blocks.mlp.up.w       looked up as blocks.mlp.up.w
        """
        if path.startswith("mtp."):
            part = path.removeprefix("mtp.")
            found = self.mtp_names.get(part) or self.names.get(part)
            if found is None or self.mtp_block is None:
                return found
            return replace(found, tensor=found.tensor.replace("model.layers.{}.", self.mtp_block, 1))
        stack, _, part = path.removeprefix("first_").partition(".")
        if not stack.startswith(("dense_blocks", "linear_blocks", "local_blocks", "shared_")):
            return self.names.get(path.removeprefix("first_")) or SCORE.get(path)
        kind = stack.rstrip("_0123456789")
        return self.names.get(f"{kind}.{part}") or self.names.get(f"blocks.{part}")

    def as_in(self, tensors: Collection[str] | None) -> "Family":
        """Return the family with the names that its files with these tensors have; None: published ones."""
        is_published = tensors is None or any(name.tensor.format(0) in tensors for name in self.published.values())
        return replace(self, names=self.names | self.published) if is_published else self

    def usual_name(self, tensor: str) -> str:
        """Return the name in `names` of a tensor whose class or version begins its names otherwise."""
        for old, new in self.renamed:
            if tensor.startswith(old):
                return new + tensor.removeprefix(old)
        return tensor

    def module_name(self, tensor: str) -> str:
        """Return how transformers names a tensor inside of the model, given its name in the files."""
        for old, new in self.modules:
            if tensor.startswith(old):
                return new + tensor.removeprefix(old)
        return tensor

    @property
    def classifier(self) -> str | None:
        """Class in transformers that gives scores in the place of logits; None where there is none."""
        usual = re.sub("(ForCausalLM|LMHeadModel)$", "ForSequenceClassification", self.architecture)
        return CLASSIFIERS.get(self.architecture, usual)

    @property
    def tables(self) -> set[str]:
        """Names of the tensors that have a row for each token."""
        return {name.tensor for name in self.names.values() if name.dims.startswith("V,")}


LLAMA_NAMES = {
    "embedding.table": Name("model.embed_tokens.weight", "V,D"),
    "blocks.pre_attention.scale": Name("model.layers.{}.input_layernorm.weight", "D"),
    "blocks.attention.q.w": Name("model.layers.{}.self_attn.q_proj.weight", "NH,D"),
    "blocks.attention.k.w": Name("model.layers.{}.self_attn.k_proj.weight", "KH,D"),
    "blocks.attention.v.w": Name("model.layers.{}.self_attn.v_proj.weight", "KH,D"),
    "blocks.attention.o.w": Name("model.layers.{}.self_attn.o_proj.weight", "D,NH"),
    # Named after the part behind which it stands: it is the norm before the MLP.
    "blocks.pre_mlp.scale": Name("model.layers.{}.post_attention_layernorm.weight", "D"),
    "blocks.mlp.gate.w": Name("model.layers.{}.mlp.gate_proj.weight", "F,D"),
    "blocks.mlp.up.w": Name("model.layers.{}.mlp.up_proj.weight", "F,D"),
    "blocks.mlp.down.w": Name("model.layers.{}.mlp.down_proj.weight", "D,F"),
    "final_norm.scale": Name("model.norm.weight", "D"),
    "head.table": Name("lm_head.weight", "V,D"),
}
LLAMA_KEYS = {
    "vocab_size": "vocab_size", "embed_dim": "hidden_size", "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "context_length": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}  # fmt: skip
LLAMA_ABSENT = {
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4,
    "num_key_value_heads": None, "head_dim": None,
}  # fmt: skip
QKV = ("NH", "KH", "KH")  # queries, keys and values in one tensor


def fused(tensor: str, *parts: tuple[str, str], stack: str = "blocks", interleaved: str = "") -> dict[str, Name]:
    """Return the names of weights, given as (parameter, rows), that lie in one tensor of each layer (see `Name`)."""
    rows = tuple(dim_names for _, dim_names in parts)
    template = f"model.layers.{{}}.{tensor}.weight"
    return {
        f"{stack}.{path}.w": Name(template, f"{dim_names},D", part, rows, interleaved=interleaved)
        for part, (path, dim_names) in enumerate(parts)
    }


def fused_experts(
    tensor: str, dims: str, path: str = "blocks.mlp.expert_{}.w", interleaved: str = ""
) -> dict[str, Name]:
    """Return the names of the gates of all experts and of what they gate, which lie in one tensor (see `Name`)."""
    dim = dims.split(",").index("G")
    return {
        path.format(part): Name(f"model.layers.{{}}.{tensor}", dims, number, ("G", "G"), dim, interleaved)
        for number, part in enumerate(("gate", "up"))
    }


def qkv_biases() -> dict[str, Name]:
    """Return the names of the biases of queries, keys and values."""
    return {
        f"blocks.attention.{x}.bias.b": Name(f"model.layers.{{}}.self_attn.{x}_proj.bias", dim_names)
        for x, dim_names in zip("qkv", QKV, strict=True)
    }


def linear_names() -> dict[str, Name]:
    """Return the names of the parts of linear attention: queries, keys and values are one tensor, their filters too."""
    layer, channels, names = "model.layers.{}.linear_attn", ("IE", "IE", "JM"), {}
    for part, (x, dim_names) in enumerate(zip("qkv", channels, strict=True)):
        names[f"{x}.w"] = Name(f"{layer}.in_proj_qkv.weight", f"{dim_names},D", part, channels)
        names[f"{x}_filter.w"] = Name(f"{layer}.conv1d.weight", f"{dim_names},o,Z", part, channels)
    names |= {
        "gate.w": Name(f"{layer}.in_proj_z.weight", "JM,D"),
        "beta.w": Name(f"{layer}.in_proj_b.weight", "J,D"),
        "decay.w": Name(f"{layer}.in_proj_a.weight", "J,D"),
        "rate.shift.b": Name(f"{layer}.dt_bias", "J"),
        "rate.log_rate": Name(f"{layer}.A_log", "J"),
        "out_norm.scale": Name(f"{layer}.norm.weight", "M"),
        "o.w": Name(f"{layer}.out_proj.weight", "D,JM"),
    }
    return {f"linear_blocks.attention.{path}": name for path, name in names.items()}


# Attention with gated results beside linear attention, as in Qwen 3.5 and Qwen 3 Next.
GATED_QUERIES = fused("self_attn.q_proj", ("attention.q", "NH"), ("attention.gate", "NH"), interleaved="N")
LINEAR_KEYS = {
    "linear_attention.num_key_heads": "linear_num_key_heads",
    "linear_attention.num_value_heads": "linear_num_value_heads",
    "linear_attention.key_dim": "linear_key_head_dim",
    "linear_attention.value_dim": "linear_value_head_dim",
    "linear_attention.filter_size": "linear_conv_kernel_dim",
}
LINEAR_ABSENT = {
    "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
# Families whose config.json has one window for all layers, or null. The pattern 0 means: no layer is global.
ALL_LOCAL = {"sliding_window": None, "sliding_window_pattern": 0}


def attention_names(dim_names: str, stack: str) -> dict[str, Name]:
    """Return the names of the projections of a stack's layers, whose keys have these two dimensions, like "KH"."""
    width = dim_names[-1]
    dims = {"q": f"N{width},D", "k": f"{dim_names},D", "v": f"{dim_names},D", "o": f"D,N{width}"}
    return {
        f"{stack}.attention.{x}.w": Name(f"model.layers.{{}}.self_attn.{x}_proj.weight", each)
        for x, each in dims.items()
    }


def qk_norm(queries: str, keys: str, stack: str = "blocks") -> dict[str, Name]:
    """Return the names of the norms of queries and of keys, whose scales have these dimensions."""
    return {
        f"{stack}.attention.{x}_norm.scale": Name(f"model.layers.{{}}.self_attn.{x}_norm.weight", dim_names)
        for x, dim_names in (("q", queries), ("k", keys))
    }


def mlp_names(path: str, tensor: str, width: str) -> dict[str, Name]:
    """Return the names of the matrices of a gated MLP of this width; `path` begins its parameters: "blocks.mlp."."""
    dims = {"gate": f"{width},D", "up": f"{width},D", "down": f"D,{width}"}
    return {
        f"{path}{part}.w": Name(f"model.layers.{{}}.{tensor}.{part}_proj.weight", each) for part, each in dims.items()
    }


def renamed(names: dict[str, Name], **tensors: str) -> dict[str, Name]:
    """Replace the names of the norms before and after each part; a norm without a new name is left out."""
    norms = {f"blocks.{norm}.scale": Name(f"model.layers.{{}}.{name}.weight", "D") for norm, name in tensors.items()}
    return {path: name for path, name in names.items() if not re.match(r"blocks\.(pre|post)", path)} | norms


def expert_names(router: str, expert: str, gate: str, up: str, down: str) -> dict[str, Name]:
    """Return the names of a router and of the three matrices of each expert."""
    parts = {"gate": (gate, "G,D"), "up": (up, "G,D"), "down": (down, "D,G")}
    return {"blocks.mlp.router.w": Name(f"model.layers.{{}}.{router}.weight", "Y,D")} | {
        f"blocks.mlp.expert_{part}.w": Name(f"model.layers.{{}}.{expert}.{{}}.{tensor}.weight", dims)
        for part, (tensor, dims) in parts.items()
    }


EXPERT_NAMES = expert_names("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
# All experts of a layer in one tensor, as transformers has them in memory.
WHOLE_EXPERT_NAMES = fused_experts("mlp.experts.gate_up_proj", "X,G,D") | {
    "blocks.mlp.expert_down.w": Name("model.layers.{}.mlp.experts.down_proj", "X,D,G"),
}
EXPERT_KEYS = {"mlp.num_experts": "num_experts", "mlp.experts_per_token": "num_experts_per_tok"}
# Widths of families where every layer has experts: the key of the MLP's width gives that of an expert.
EVERY_MLP = {"mlp_dim": "intermediate_size", "mlp.expert_dim": "intermediate_size"}
NO_BIASES: dict[str, tuple] = {"attention_bias": (False,), "mlp_bias": (False,)}
WINDOW = {"sliding_window": "sliding_window"}
# OLMo has norms of the results of attention and MLP, and none of their inputs.
OLMO_NAMES = renamed(
    LLAMA_NAMES, post_attention="post_attention_layernorm", post_mlp="post_feedforward_layernorm"
) | qk_norm("NH", "KH")

GEMMA_NAMES = renamed(
    LLAMA_NAMES,
    pre_attention="input_layernorm",
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)
PLAIN_NAMES = {path: name for path, name in LLAMA_NAMES.items() if path != "blocks.mlp.gate.w"}

ROUTER_BIAS = {"blocks.mlp.router.bias": Name("model.layers.{}.mlp.gate.e_score_correction_bias", "Y")}
SHARED_NAMES = mlp_names("blocks.mlp.shared.", "mlp.shared_experts", "U")
# A shared expert with a gate, as Qwen has it.
GATED_SHARED_NAMES = mlp_names("blocks.mlp.shared.", "mlp.shared_expert", "U") | {
    "blocks.mlp.shared_gate.w": Name("model.layers.{}.mlp.shared_expert_gate.weight", "o,D"),
}
# Experts as DeepSeek-V3 has them: a sigmoid for each, groups, a bias in the choice, a shared one, dense first layers.
DEEPSEEK_KEYS = {
    "mlp.num_experts": "n_routed_experts", "mlp.experts_per_token": "num_experts_per_tok",
    "mlp.expert_dim": "moe_intermediate_size", "mlp.dense_layers": "first_k_dense_replace",
    "mlp.normalized": "norm_topk_prob", "mlp.scale": "routed_scaling_factor", "mlp.num_groups": "n_group",
    "mlp.groups_per_token": "topk_group",
}  # fmt: skip
DEEPSEEK_FIXED = {
    "hidden_act": ("silu",), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
}  # fmt: skip
NEXT_TOKENS = r"model\.layers\.{num_layers}\."
MTP_NAMES = {
    "token_norm.scale": Name("model.layers.{num_layers}.enorm.weight", "D"),
    "state_norm.scale": Name("model.layers.{num_layers}.hnorm.weight", "D"),
    "projection.w": Name("model.layers.{num_layers}.eh_proj.weight", "D,μ"),
    "norm.scale": Name("model.layers.{num_layers}.shared_head.norm.weight", "D"),
}
# The layer has no tables of its own, but the files have those of the model a second time.
MTP_COPIES = {
    "model.layers.{num_layers}.embed_tokens.weight": "embedding.table",
    "model.layers.{num_layers}.shared_head.head.weight": "head.table",
}


def linear(path: str, tensor: str, outer: str, inner: str, part: int = 0, rows=()) -> dict[str, Name]:
    """Return the names of a matrix and its bias, which may be a part of a tensor (see `Name`)."""
    return {
        f"{path}.w": Name(f"{tensor}.weight", f"{outer},{inner}", part, rows),
        f"{path}.bias.b": Name(f"{tensor}.bias", outer, part, rows),
    }


def norm_with_bias(path: str, tensor: str, dims: str = "d") -> dict[str, Name]:
    """Return the names of a norm's scale and bias."""
    return {f"{path}.scale": Name(f"{tensor}.weight", dims), f"{path}.bias.b": Name(f"{tensor}.bias", dims)}


def gpt2_names() -> dict[str, Name]:
    """Return the names of GPT-2, which stores matrices as [in, out], and q, k and v side by side in one tensor."""

    def turned(path: str, tensor: str, inner: str, outer: str, part: int = 0, fused=()) -> dict[str, Name]:
        return {
            f"blocks.{path}.w": Name(
                f"transformer.h.{{}}.{tensor}.weight", f"{inner},{outer}", part, fused, fused_dim=1
            ),
            f"blocks.{path}.bias.b": Name(f"transformer.h.{{}}.{tensor}.bias", outer, part, fused),
        }

    return {
        "embedding.table": Name("transformer.wte.weight", "V,D"),
        "positions.table": Name("transformer.wpe.weight", "P,D"),
        **norm_with_bias("blocks.pre_attention", "transformer.h.{}.ln_1", "D"),
        **turned("attention.q", "attn.c_attn", "D", "NH", 0, QKV),
        **turned("attention.k", "attn.c_attn", "D", "KH", 1, QKV),
        **turned("attention.v", "attn.c_attn", "D", "KH", 2, QKV),
        **turned("attention.o", "attn.c_proj", "NH", "D"),
        **norm_with_bias("blocks.pre_mlp", "transformer.h.{}.ln_2", "D"),
        **turned("mlp.up", "mlp.c_fc", "D", "F"),
        **turned("mlp.down", "mlp.c_proj", "F", "D"),
        **norm_with_bias("final_norm", "transformer.ln_f", "D"),
        "head.table": Name("lm_head.weight", "V,D"),
    }


# Of models that also see: beginnings of the decoder's tensors in their files, and the tensors of their other parts.
SEEING_NAMES = (("language_model.", ""), ("model.language_model.", "model."))
SEEING_PARTS = (r"(model\.)?vision_tower\.", r"(model\.)?multi_modal_projector\.")


def tower_names(tower: str) -> dict[str, Name]:
    """Return the names of a SigLIP tower; tensors begin with `tower`."""
    layer = f"{tower}encoder.layers.{{}}."

    names = {
        "patches.product.w": Name(f"{tower}embeddings.patch_embedding.weight", "d,z,a,b"),
        "patches.bias.b": Name(f"{tower}embeddings.patch_embedding.bias", "d"),
        "patches.positions": Name(f"{tower}embeddings.position_embedding.weight", "i,d"),
        **norm_with_bias("blocks.pre_attention", f"{layer}layer_norm1"),
        **norm_with_bias("blocks.pre_mlp", f"{layer}layer_norm2"),
        **linear("blocks.attention.q", f"{layer}self_attn.q_proj", "qw", "d"),
        **linear("blocks.attention.k", f"{layer}self_attn.k_proj", "qw", "d"),
        **linear("blocks.attention.v", f"{layer}self_attn.v_proj", "qw", "d"),
        **linear("blocks.attention.o", f"{layer}self_attn.out_proj", "d", "qw"),
        **linear("blocks.mlp.up", f"{layer}mlp.fc1", "m", "d"),
        **linear("blocks.mlp.down", f"{layer}mlp.fc2", "d", "m"),
        **norm_with_bias("norm", f"{tower}post_layernorm"),
    }
    return {f"vision.tower.{path}": name for path, name in names.items()}


def merging_tower_names(visual: str) -> dict[str, Name]:
    """Return the names of the tower and the mergers of Qwen 3 VL; tensors begin with `visual`."""
    layer, qkv = f"{visual}blocks.{{}}.", ("qw", "qw", "qw")

    def merger(path: str, tensor: str, dims: str) -> dict[str, Name]:
        return {
            **norm_with_bias(f"{path}.norm", f"{tensor}norm", dims),
            f"{path}.up.w": Name(f"{tensor}linear_fc1.weight", "λ,ψd"),
            f"{path}.up_bias.b": Name(f"{tensor}linear_fc1.bias", "λ"),
            f"{path}.down.w": Name(f"{tensor}linear_fc2.weight", "D,λ"),
            f"{path}.down_bias.b": Name(f"{tensor}linear_fc2.bias", "D"),
        }

    tower = {
        "patches.product.w": Name(f"{visual}patch_embed.proj.weight", "d,z,φ,a,b"),
        "patches.bias.b": Name(f"{visual}patch_embed.proj.bias", "d"),
        "patches.positions": Name(f"{visual}pos_embed.weight", "i,d"),
        **norm_with_bias("blocks.pre_attention", f"{layer}norm1"),
        **norm_with_bias("blocks.pre_mlp", f"{layer}norm2"),
        **{
            path: name
            for part, x in enumerate("qkv")
            for path, name in linear(f"blocks.attention.{x}", f"{layer}attn.qkv", "qw", "d", part, qkv).items()
        },
        **linear("blocks.attention.o", f"{layer}attn.proj", "d", "qw"),
        **linear("blocks.mlp.up", f"{layer}mlp.linear_fc1", "m", "d"),
        **linear("blocks.mlp.down", f"{layer}mlp.linear_fc2", "d", "m"),
    }
    return {f"vision.tower.{path}": name for path, name in tower.items()} | {
        **merger("vision.projector.merger", f"{visual}merger.", "d"),
        **merger("vision.projector.deepstack", f"{visual}deepstack_merger_list.{{}}.", "ψd"),
    }


def like_llama(
    model_type: str,
    architecture: str,
    names: dict[str, Name] = LLAMA_NAMES,
    keys: dict[str, str] | None = None,
    fixed: dict[str, tuple] | None = None,
    absent: dict[str, Any] | None = None,
    **others: Any,
) -> Family:
    """Return a family that differs from Llama by what is given; `others` are further fields of `Family`."""
    fixed = {"hidden_act": ("silu",)} | (fixed or {})
    return Family(
        model_type, architecture, names, LLAMA_KEYS | (keys or {}), fixed, LLAMA_ABSENT | (absent or {}), **others
    )
