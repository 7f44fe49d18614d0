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
    """

    tensor: str  # {} is the number of the layer, a second {} that of the expert
    dims: str
    part: int = 0
    fused: tuple[str, ...] = ()
    fused_dim: int = 0

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
    ignored: tuple[str, ...] = ()  # patterns of the names of tensors that are not weights of the decoder

    def name(self, path: str) -> Name | None:
        """Return the place of a parameter in the files, or None if it has none; all stacks have the same names."""
        return self.names.get(path.replace("dense_blocks.", "blocks.", 1))


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

FAMILIES = {
    "gemma3": Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        names=renamed(
            LLAMA_NAMES,
            pre_attention="input_layernorm",
            post_attention="post_attention_layernorm",
            pre_mlp="pre_feedforward_layernorm",
            post_mlp="post_feedforward_layernorm",
        )
        | qk_norm("H", "H"),
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
        renamed=(("language_model.", ""), ("model.language_model.", "model.")),  # of the models that also see
        ignored=(r"(model\.)?vision_tower\.", r"(model\.)?multi_modal_projector\."),
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
        fixed={"hidden_act": ("silu",), "attention_bias": (False,), "partial_rotary_factor": (1.0,)},
        absent=LLAMA_ABSENT | ALL_LOCAL | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
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
