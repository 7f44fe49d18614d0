"""Hugging Face's names, one entry per family: the keys of config.json and the tensors in the files. Imports no jax.

To add a family: its values in conf/model/family/NAME.yaml, an entry in `FAMILIES`, and a tiny model of it in
tests/models/parity/make.py.
"""

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Name:
    """Place of a weight in the files.

    `dims` are its dimensions there, by letter (sharding/dims.py): a matrix "NH,D" has num_heads * head_dim rows. One
    tensor may hold several weights, one after the other along its dimension `fused_dim`. Then `fused` has their sizes
    along it, and the weight is number `part` of them:

        qkv_proj [NH + KH + KH, D], fused = ("NH", "KH", "KH"), fused_dim = 0:   | q | k | v |  are its rows

    Of weights that are `interleaved`, all of one size, the tensor has the first numbers of each, then the second ones.
    """

    tensor: str  # {} is the number of the layer, a second {} that of the expert
    dims: str
    part: int = 0
    fused: tuple[str, ...] = ()
    fused_dim: int = 0
    interleaved: bool = False

    @property
    def numbered(self) -> str:
        """Dimensions of the weight that are numbers in the tensor's name, by letter: there is a tensor for each."""
        return "LX"[: self.tensor.count("{}")]


@dataclass(frozen=True)
class Family:
    """Form of one family at Hugging Face: names of tensors, keys of config.json."""

    model_type: str
    architecture: str  # class in transformers
    names: dict[str, Name]  # parameter -> tensor
    keys: dict[str, str]  # our key -> key of config.json
    fixed: dict[str, tuple]  # key of config.json -> values that our layers can compute, the usual one first
    absent: dict[str, Any] = field(default_factory=dict)  # key of config.json -> its value where the file leaves it out
    renamed: tuple[
        tuple[str, str], ...
    ] = ()  # (beginning of a tensor name in other classes and versions, the usual beginning)
    synonyms: dict[str, str] = field(default_factory=dict)  # key of config.json in other versions -> the usual key
    also: tuple[str, ...] = ()  # other values of model_type that mean the same
    biases: dict[str, str] = field(default_factory=dict)  # flag of config.json -> `model.biases` where it is true
    local_rope: bool = False  # local layers have rotations of their own, which no scaling changes
    unrotated_global: bool = False  # where there are local layers, the global ones have no positions
    # Patterns of the names of tensors that are not weights of the decoder; {num_layers} is the number of its layers.
    ignored: tuple[str, ...] = ()
    constants: dict[str, float] = field(default_factory=dict)  # tensor -> the number that our layers have in its place
    published_code: bool = False  # auto_map names code that computes what transformers' own class computes

    def name(self, path: str) -> Name | None:
        """Return the place of a parameter in the files, or None if it has none; all stacks have the same names."""
        return self.names.get(path.replace("dense_blocks.", "blocks.", 1))

    def usual_name(self, tensor: str) -> str:
        """Return the name in `names` of a tensor whose class or version begins its names otherwise."""
        for old, new in self.renamed:
            if tensor.startswith(old):
                return new + tensor.removeprefix(old)
        return tensor

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


def fused(names: dict[str, Name], tensor: str, *parts: tuple[str, str]) -> dict[str, Name]:
    """Put weights, given as (parameter, rows), into one tensor of each layer, one after the other."""
    rows = tuple(letters for _, letters in parts)
    return names | {
        f"blocks.{path}.w": Name(f"model.layers.{{}}.{tensor}.weight", f"{letters},D", part, rows)
        for part, (path, letters) in enumerate(parts)
    }


def qkv_biases() -> dict[str, Name]:
    """Return the names of the biases of queries, keys and values."""
    return {
        f"blocks.attention.{x}.bias.b": Name(f"model.layers.{{}}.self_attn.{x}_proj.bias", letters)
        for x, letters in zip("qkv", QKV, strict=True)
    }


# Families whose config.json has one window for all layers, or null.
ALL_LOCAL = {"sliding_window": None, "sliding_window_pattern": 0}


def qk_norm(*dims: str) -> dict[str, Name]:
    """Return the names of the norms of queries and of keys, whose scales have these dimensions."""
    return {
        f"blocks.attention.{x}_norm.scale": Name(f"model.layers.{{}}.self_attn.{x}_norm.weight", letters)
        for x, letters in zip("qk", dims, strict=True)
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


def gate_and_up(dims: str, parameter: str, tensor: str) -> dict[str, Name]:
    """Return the names of gates and of what they gate where one tensor holds both, number by number."""
    last = dims.count(",")
    return {
        f"blocks.mlp.{parameter.format(part)}": Name(tensor, dims, number, ("G", "G"), last, interleaved=True)
        for number, part in enumerate(("gate", "up"))
    }


def gpt2_names() -> dict[str, Name]:
    """Return the names of GPT-2, which stores matrices transposed, and q, k and v side by side in one tensor."""

    def linear(path: str, tensor: str, inner: str, outer: str, part: int = 0, fused=()) -> dict[str, Name]:
        return {
            f"blocks.{path}.w": Name(
                f"transformer.h.{{}}.{tensor}.weight", f"{inner},{outer}", part, fused, fused_dim=1
            ),
            f"blocks.{path}.bias.b": Name(f"transformer.h.{{}}.{tensor}.bias", outer, part, fused),
        }

    def norm(path: str, tensor: str) -> dict[str, Name]:
        return {
            f"{path}.scale": Name(f"transformer.{tensor}.weight", "D"),
            f"{path}.bias.b": Name(f"transformer.{tensor}.bias", "D"),
        }

    return {
        "embedding.table": Name("transformer.wte.weight", "V,D"),
        "positions.table": Name("transformer.wpe.weight", "P,D"),
        **norm("blocks.pre_attention", "h.{}.ln_1"),
        **linear("attention.q", "attn.c_attn", "D", "NH", 0, QKV),
        **linear("attention.k", "attn.c_attn", "D", "KH", 1, QKV),
        **linear("attention.v", "attn.c_attn", "D", "KH", 2, QKV),
        **linear("attention.o", "attn.c_proj", "NH", "D"),
        **norm("blocks.pre_mlp", "h.{}.ln_2"),
        **linear("mlp.up", "mlp.c_fc", "D", "F"),
        **linear("mlp.down", "mlp.c_proj", "F", "D"),
        **norm("final_norm", "ln_f"),
        "head.table": Name("lm_head.weight", "V,D"),
    }


EXPERT_NAMES = expert_names("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
EXPERT_KEYS = {"mlp.num_experts": "num_experts", "mlp.experts_per_token": "num_experts_per_tok"}
EVERY_MLP = {"mlp_dim": "intermediate_size", "mlp.expert_dim": "intermediate_size"}  # no dense layers: one width
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
SHARED_NAMES = {
    f"blocks.mlp.shared.{part}.w": Name(f"model.layers.{{}}.mlp.shared_experts.{part}_proj.weight", dims)
    for part, dims in (("gate", "U,D"), ("up", "U,D"), ("down", "D,U"))
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
NEXT_TOKENS = (r"model\.layers\.{num_layers}\.",)  # layers behind the last one, which predict further tokens

FAMILIES = {
    "gemma3": Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        names=GEMMA_NAMES | qk_norm("H", "H"),
        keys=LLAMA_KEYS | {"query_scale": "query_pre_attn_scalar", "sliding_window": "sliding_window"},
        fixed={
            "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,),
            "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        absent={
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
        local_rope=True,
        renamed=(("language_model.", ""), ("model.language_model.", "model.")),  # of the models that also see
        ignored=(r"(model\.)?vision_tower\.", r"(model\.)?multi_modal_projector\."),
    ),
    "gemma2": Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        names=GEMMA_NAMES,
        keys=LLAMA_KEYS | {
            "query_scale": "query_pre_attn_scalar", "sliding_window": "sliding_window",
            "attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping",
        },
        fixed={
            "hidden_activation": ("gelu_pytorch_tanh",), "hidden_act": ("gelu_pytorch_tanh",),
            "attention_bias": (False,), "use_bidirectional_attention": (None, False),
        },
        absent={
            "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "sliding_window_pattern": 2, "rope_theta": 1e4, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "llama": Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        names=LLAMA_NAMES,
        keys=LLAMA_KEYS,
        fixed={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        absent=LLAMA_ABSENT,
    ),
    "qwen3": Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        names=LLAMA_NAMES | qk_norm("H", "H"),
        keys=LLAMA_KEYS,
        fixed={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
        absent=LLAMA_ABSENT | {"max_position_embeddings": 32768, "head_dim": 128},
    ),
    "qwen2": Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        names=LLAMA_NAMES | qkv_biases(),
        keys=LLAMA_KEYS,
        fixed={"hidden_act": ("silu",), "use_sliding_window": (False,)},
        absent=LLAMA_ABSENT | {"max_position_embeddings": 32768},
    ),
    "seed_oss": Family(
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        names=LLAMA_NAMES | qkv_biases(),
        keys=LLAMA_KEYS,
        fixed={
            "hidden_act": ("silu",), "attention_bias": (True,), "attention_out_bias": (False,), "mlp_bias": (False,),
        },
        absent=LLAMA_ABSENT | {"max_position_embeddings": 524288, "head_dim": 128},
    ),
    "mistral": Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        names=LLAMA_NAMES,
        keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
        fixed={"hidden_act": ("silu",)},
        absent=LLAMA_ABSENT | ALL_LOCAL | {"max_position_embeddings": 131072},
    ),
    "phi3": Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        names=fused(
            fused(
                LLAMA_NAMES, "self_attn.qkv_proj", ("attention.q", "NH"), ("attention.k", "KH"), ("attention.v", "KH")
            ),
            "mlp.gate_up_proj", ("mlp.gate", "F"), ("mlp.up", "F"),
        ),
        keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
        fixed={"hidden_act": ("silu",), "attention_bias": (False,)},
        absent=LLAMA_ABSENT | ALL_LOCAL | {
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
        },
        published_code=True,
    ),
    "smollm3": Family(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        names=LLAMA_NAMES,
        keys=LLAMA_KEYS,
        fixed={
            "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
            "use_sliding_window": (False, None),
        },
        absent=LLAMA_ABSENT | {
            "max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
        },
    ),
    "olmo3": Family(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        names=OLMO_NAMES,
        keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
        fixed={"hidden_act": ("silu",), "attention_bias": (False,)},
        absent=LLAMA_ABSENT | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        local_rope=True,
    ),
    "olmo2": Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        names=OLMO_NAMES,
        keys=LLAMA_KEYS,
        fixed={"hidden_act": ("silu",), "attention_bias": (False,)},
        absent=LLAMA_ABSENT | {"rms_norm_eps": 1e-5},
    ),
    "qwen3_moe": Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        names=LLAMA_NAMES | qk_norm("H", "H") | EXPERT_NAMES,
        keys=LLAMA_KEYS | EXPERT_KEYS | {
            "mlp.expert_dim": "moe_intermediate_size", "mlp.normalized": "norm_topk_prob",
        },
        fixed={
            "hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,),
            "decoder_sparse_step": (1,),
        },
        absent=LLAMA_ABSENT | {
            "max_position_embeddings": 32768, "head_dim": 128, "norm_topk_prob": False, "mlp_only_layers": None,
        },
        synonyms={"num_local_experts": "num_experts"},  # of transformers 5
    ),
    "olmoe": Family(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        names=LLAMA_NAMES | qk_norm("NH", "KH") | EXPERT_NAMES,
        keys=LLAMA_KEYS | EXPERT_KEYS | EVERY_MLP | {"mlp.normalized": "norm_topk_prob"},
        fixed={"hidden_act": ("silu",), "attention_bias": (False,), "clip_qkv": (None,)},
        absent=LLAMA_ABSENT | {
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        names=LLAMA_NAMES | expert_names("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
        keys=LLAMA_KEYS | EXPERT_KEYS | EVERY_MLP | {
            "mlp.num_experts": "num_local_experts", "sliding_window": "sliding_window",
        },
        fixed={"hidden_act": ("silu",), "router_jitter_noise": (0.0,)},
        absent=LLAMA_ABSENT | ALL_LOCAL | {
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "glm4": Family(
        model_type="glm4",
        architecture="Glm4ForCausalLM",
        names=fused(
            renamed(
                LLAMA_NAMES,
                pre_attention="input_layernorm",
                post_attention="post_self_attn_layernorm",
                pre_mlp="post_attention_layernorm",
                post_mlp="post_mlp_layernorm",
            ),
            "mlp.gate_up_proj", ("mlp.gate", "F"), ("mlp.up", "F"),
        ) | qkv_biases(),
        keys=LLAMA_KEYS,
        fixed={"hidden_act": ("silu",)},
        absent=LLAMA_ABSENT | {
            "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "head_dim": 128, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5, "attention_bias": True,
        },
        biases={"attention_bias": "attention.[qkv]"},
    ),
    "nemotron": Family(
        model_type="nemotron",
        architecture="NemotronForCausalLM",
        names=PLAIN_NAMES | {
            "blocks.pre_attention.bias.b": Name("model.layers.{}.input_layernorm.bias", "D"),
            "blocks.pre_mlp.bias.b": Name("model.layers.{}.post_attention_layernorm.bias", "D"),
            "final_norm.bias.b": Name("model.norm.bias", "D"),
        },
        keys=LLAMA_KEYS | {"norm_eps": "norm_eps"},
        fixed={"hidden_act": ("relu2",), "attention_bias": (False,), "mlp_bias": (False,)},
        absent=LLAMA_ABSENT | {"max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        synonyms={"rope_percent": "partial_rotary_factor", "rope_percentage": "partial_rotary_factor"},
    ),
    "granite": Family(
        model_type="granite",
        architecture="GraniteForCausalLM",
        names=LLAMA_NAMES,
        keys=LLAMA_KEYS | {
            "query_scale": "attention_multiplier", "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier", "logits_divisor": "logits_scaling",
        },
        fixed={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        absent=LLAMA_ABSENT | {
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
    ),
    "exaone4": Family(
        model_type="exaone4",
        architecture="Exaone4ForCausalLM",
        names=renamed(
            LLAMA_NAMES, post_attention="post_attention_layernorm", post_mlp="post_feedforward_layernorm"
        ) | qk_norm("H", "H"),
        keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
        fixed={"hidden_act": ("silu",)},
        absent=LLAMA_ABSENT | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        unrotated_global=True,
    ),
    "ministral3": Family(
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        names=LLAMA_NAMES,
        keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
        fixed={"hidden_act": ("silu",)},
        absent=LLAMA_ABSENT | ALL_LOCAL | {
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8,
            "llama_4_scaling_beta": None,
        },
        renamed=(("language_model.", ""), ("model.language_model.", "model.")),  # of the models that also see
        ignored=(r"(model\.)?vision_tower\.", r"(model\.)?multi_modal_projector\."),
    ),
    "gpt_oss": Family(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        names=LLAMA_NAMES | qkv_biases() | {
            "blocks.attention.o.bias.b": Name("model.layers.{}.self_attn.o_proj.bias", "D"),
            "blocks.attention.sinks.b": Name("model.layers.{}.self_attn.sinks", "N"),
            "blocks.mlp.router.w": Name("model.layers.{}.mlp.router.weight", "Y,D"),
            "blocks.mlp.router.logits_bias.b": Name("model.layers.{}.mlp.router.bias", "Y"),
            **gate_and_up("X,D,G", "expert_{}.w", "model.layers.{}.mlp.experts.gate_up_proj"),
            **gate_and_up("X,G", "{}_bias.b", "model.layers.{}.mlp.experts.gate_up_proj_bias"),
            "blocks.mlp.expert_down.w": Name("model.layers.{}.mlp.experts.down_proj", "X,G,D"),
            "blocks.mlp.down_bias.b": Name("model.layers.{}.mlp.experts.down_proj_bias", "X,D"),
        },
        keys=LLAMA_KEYS | EXPERT_KEYS | EVERY_MLP | {
            "mlp.num_experts": "num_local_experts", "sliding_window": "sliding_window",
        },
        fixed={
            "hidden_act": ("silu",), "attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,),
        },
        absent=LLAMA_ABSENT | {
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64,
            "num_key_value_heads": 8, "sliding_window": 128, "sliding_window_pattern": 2, "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        synonyms={"experts_per_token": "num_experts_per_tok"},
    ),
    "deepseek_v3": Family(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        names={path: name for path, name in LLAMA_NAMES.items() if not path.startswith("blocks.attention.")} | {
            "blocks.attention.q_down.w": Name("model.layers.{}.self_attn.q_a_proj.weight", "Q,D"),
            "blocks.attention.q_norm.scale": Name("model.layers.{}.self_attn.q_a_layernorm.weight", "Q"),
            "blocks.attention.q.w": Name("model.layers.{}.self_attn.q_b_proj.weight", "NH,Q"),
            "blocks.attention.kv_norm.scale": Name("model.layers.{}.self_attn.kv_a_layernorm.weight", "C"),
            "blocks.attention.kv_up.w": Name("model.layers.{}.self_attn.kv_b_proj.weight", "NO,C"),
            "blocks.attention.o.w": Name("model.layers.{}.self_attn.o_proj.weight", "D,NW"),
        } | fused({}, "self_attn.kv_a_proj_with_mqa", ("attention.kv_down", "C"), ("attention.k", "R"))
        | EXPERT_NAMES | ROUTER_BIAS | SHARED_NAMES,
        keys={ours: theirs for ours, theirs in LLAMA_KEYS.items() if ours != "head_dim"} | DEEPSEEK_KEYS | {
            "latent.query_dim": "q_lora_rank", "latent.dim": "kv_lora_rank", "latent.value_dim": "v_head_dim",
        },
        fixed=DEEPSEEK_FIXED | {"attention_bias": (False,)},
        absent=LLAMA_ABSENT | {
            "max_position_embeddings": 4096, "q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": None, "rope_interleave": True,
            "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
        },
        also=("kimi_k2",),
        ignored=NEXT_TOKENS,
        published_code=True,
    ),
    "apertus": Family(
        model_type="apertus",
        architecture="ApertusForCausalLM",
        names=renamed(PLAIN_NAMES, pre_attention="attention_layernorm", pre_mlp="feedforward_layernorm")
        | qk_norm("H", "H") | {
            "blocks.mlp.activation.positive": Name("model.layers.{}.mlp.act_fn.alpha_p", "o"),
            "blocks.mlp.activation.negative": Name("model.layers.{}.mlp.act_fn.alpha_n", "o"),
        },
        keys=LLAMA_KEYS,
        fixed={"hidden_act": ("xielu",), "attention_bias": (False,), "mlp_bias": (False,), "post_norm": (False,),
               "qk_norm": (True,)},
        absent=LLAMA_ABSENT | {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 1.2e7},
        constants={"model.layers.{}.mlp.act_fn.beta": 0.5, "model.layers.{}.mlp.act_fn.eps": -1e-6},
    ),
    "glm4_moe": Family(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        names=LLAMA_NAMES | qkv_biases() | qk_norm("H", "H") | EXPERT_NAMES | ROUTER_BIAS | SHARED_NAMES,
        keys=LLAMA_KEYS | DEEPSEEK_KEYS,
        fixed=DEEPSEEK_FIXED,
        absent=LLAMA_ABSENT | {
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
            "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1, "attention_bias": False, "use_qk_norm": False,
        },
        biases={"attention_bias": "attention.[qkv]"},
        ignored=NEXT_TOKENS,
    ),
    "gpt2": Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        names=gpt2_names(),
        keys={
            "vocab_size": "vocab_size", "embed_dim": "n_embd", "mlp_dim": "n_inner", "num_layers": "n_layer",
            "num_heads": "n_head", "context_length": "n_positions", "norm_eps": "layer_norm_epsilon",
            "tied_head": "tie_word_embeddings",
        },
        fixed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False, True),
            "add_cross_attention": (False,),
        },
        absent={
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        },
        renamed=(("wte.", "transformer.wte."), ("wpe.", "transformer.wpe."), ("h.", "transformer.h."),
                 ("ln_f.", "transformer.ln_f.")),
        ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)$",),  # causal masks
    ),
}  # fmt: skip
