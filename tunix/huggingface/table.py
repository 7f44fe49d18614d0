"""Families of models at Hugging Face by the name that `model.family` takes; a new family is a row. Imports no jax."""

from tunix.base.dotted_path import import_object, is_dotted
from tunix.huggingface import experts, gemma, qwen
from tunix.huggingface.families import (
    ALL_LOCAL,
    LLAMA_NAMES,
    NO_BIASES,
    OLMO_NAMES,
    PLAIN_NAMES,
    SEEING_NAMES,
    SEEING_PARTS,
    WINDOW,
    Family,
    Name,
    fused,
    gpt2_names,
    like_llama,
    qk_norm,
    qkv_biases,
    renamed,
)

__all__ = ["FAMILIES", "Family", "Name", "find_family"]

# The row of a family like Llama says what differs from it; others stand where their parts do.
FAMILIES: dict[str, Family] = {
    "apertus": like_llama(
        "apertus", "ApertusForCausalLM",
        renamed(PLAIN_NAMES, pre_attention="attention_layernorm", pre_mlp="feedforward_layernorm")
        | qk_norm("H", "H") | {
            "blocks.mlp.activation.positive": Name("model.layers.{}.mlp.act_fn.alpha_p", "o"),
            "blocks.mlp.activation.negative": Name("model.layers.{}.mlp.act_fn.alpha_n", "o"),
        },
        fixed=NO_BIASES | {"hidden_act": ("xielu",), "post_norm": (False,), "qk_norm": (True,)},
        absent={"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 1.2e7},
        constants={"model.layers.{}.mlp.act_fn.beta": 0.5, "model.layers.{}.mlp.act_fn.eps": -1e-6},
    ),
    "deepseek_v3": experts.DEEPSEEK_V3,
    "exaone4": like_llama(
        "exaone4", "Exaone4ForCausalLM",
        renamed(LLAMA_NAMES, post_attention="post_attention_layernorm", post_mlp="post_feedforward_layernorm")
        | qk_norm("H", "H"), WINDOW,
        absent={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        unrotated_global=True,
    ),
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "gemma4": gemma.GEMMA4,
    "gemma4_moe": gemma.GEMMA4_MOE,
    "gemma4_unified": gemma.GEMMA4_UNIFIED,
    "glm4": like_llama(
        "glm4", "Glm4ForCausalLM",
        fused(
            renamed(  # post_attention_layernorm is the norm before the MLP, as in Llama
                LLAMA_NAMES,
                pre_attention="input_layernorm",
                post_attention="post_self_attn_layernorm",
                pre_mlp="post_attention_layernorm",
                post_mlp="post_mlp_layernorm",
            ),
            "mlp.gate_up_proj", ("mlp.gate", "F"), ("mlp.up", "F"),
        ) | qkv_biases(),
        absent={
            "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "head_dim": 128, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5, "attention_bias": True,
        },
        biases={"attention_bias": "attention.[qkv]"},
    ),
    "glm4_moe": experts.GLM4_MOE,
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
    "gpt_oss": experts.GPT_OSS,
    "granite": like_llama(
        "granite", "GraniteForCausalLM",
        keys={
            "query_scale": "attention_multiplier", "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier", "logits_divisor": "logits_scaling",
        },
        fixed=NO_BIASES,
        absent={
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
    ),
    "llama": like_llama("llama", "LlamaForCausalLM", fixed=NO_BIASES),
    "llama4": experts.LLAMA4,
    "ministral3": like_llama(
        "ministral3", "Ministral3ForCausalLM", keys=WINDOW,
        absent=ALL_LOCAL | {
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8,
            "llama_4_scaling_beta": None,
        },
        renamed=SEEING_NAMES, ignored=SEEING_PARTS,
    ),
    "mistral": like_llama(
        "mistral", "MistralForCausalLM", keys=WINDOW, absent=ALL_LOCAL | {"max_position_embeddings": 131072}
    ),
    "mixtral": experts.MIXTRAL,
    "nemotron": like_llama(
        "nemotron", "NemotronForCausalLM",
        PLAIN_NAMES | {
            "blocks.pre_attention.bias.b": Name("model.layers.{}.input_layernorm.bias", "D"),
            "blocks.pre_mlp.bias.b": Name("model.layers.{}.post_attention_layernorm.bias", "D"),
            "final_norm.bias.b": Name("model.norm.bias", "D"),
        },
        {"norm_eps": "norm_eps"},
        NO_BIASES | {"hidden_act": ("relu2",)},
        {"max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        synonyms={"rope_percent": "partial_rotary_factor", "rope_percentage": "partial_rotary_factor"},
    ),
    "olmo2": like_llama(
        "olmo2", "Olmo2ForCausalLM", OLMO_NAMES, fixed={"attention_bias": (False,)}, absent={"rms_norm_eps": 1e-5}
    ),
    "olmo3": like_llama(
        "olmo3", "Olmo3ForCausalLM", OLMO_NAMES, WINDOW, {"attention_bias": (False,)},
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        local_rope=True,
    ),
    "olmoe": experts.OLMOE,
    "phi3": like_llama(
        "phi3", "Phi3ForCausalLM",
        fused(
            fused(
                LLAMA_NAMES, "self_attn.qkv_proj", ("attention.q", "NH"), ("attention.k", "KH"), ("attention.v", "KH")
            ),
            "mlp.gate_up_proj", ("mlp.gate", "F"), ("mlp.up", "F"),
        ),
        WINDOW, {"attention_bias": (False,)},
        ALL_LOCAL | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        published_code=True,
    ),
    "qwen2": like_llama(
        "qwen2", "Qwen2ForCausalLM", LLAMA_NAMES | qkv_biases(), fixed={"use_sliding_window": (False,)},
        absent={"max_position_embeddings": 32768},
    ),
    "qwen3": like_llama(
        "qwen3", "Qwen3ForCausalLM", LLAMA_NAMES | qk_norm("H", "H"),
        fixed={"attention_bias": (False,), "use_sliding_window": (False,)},
        absent={"max_position_embeddings": 32768, "head_dim": 128},
    ),
    "qwen3_5": qwen.QWEN3_5,
    "qwen3_5_moe": qwen.QWEN3_5_MOE,
    "qwen3_moe": qwen.QWEN3_MOE,
    "qwen3_next": qwen.QWEN3_NEXT,
    "seed_oss": like_llama(
        "seed_oss", "SeedOssForCausalLM", LLAMA_NAMES | qkv_biases(),
        fixed={"attention_bias": (True,), "attention_out_bias": (False,), "mlp_bias": (False,)},
        absent={"max_position_embeddings": 524288, "head_dim": 128},
    ),
    "smollm3": like_llama(
        "smollm3", "SmolLM3ForCausalLM", fixed=NO_BIASES | {"use_sliding_window": (False, None)},
        absent={
            "max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
        },
    ),
}  # fmt: skip


def find_family(name: str) -> Family:
    """Return the family of a name in `FAMILIES`, or of a dotted path."""
    found = import_object(name, Family) if is_dotted(name) else FAMILIES[name]
    assert isinstance(found, Family)
    return found
