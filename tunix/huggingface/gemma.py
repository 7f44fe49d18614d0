"""Families of Gemma at Hugging Face. Imports no jax."""

from dataclasses import replace

from tunix.huggingface.family import (
    GEMMA_NAMES,
    LLAMA_KEYS,
    SEEING_NAMES,
    SEEING_PARTS,
    Family,
    Name,
    attention_names,
    fused_experts,
    mlp_names,
    qk_norm,
    tower_names,
)

FIXED: dict[str, tuple] = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,)}
ABSENT = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names=GEMMA_NAMES,
    keys=LLAMA_KEYS | {
        "query_scale": "query_pre_attn_scalar", "sliding_window": "sliding_window",
        "attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping",
    },
    fixed=FIXED | {"hidden_act": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (None, False)},
    absent=ABSENT | {
        "vocab_size": 256000, "max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 2, "rope_theta": 1e4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
)  # fmt: skip

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=GEMMA_NAMES | qk_norm("H", "H"),
    keys=LLAMA_KEYS | {"query_scale": "query_pre_attn_scalar", "sliding_window": "sliding_window"},
    fixed=FIXED | {
        "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    absent=ABSENT | {
        "vocab_size": 262208, "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    local_rope=True,
    renamed=SEEING_NAMES,
    ignored=SEEING_PARTS,
)  # fmt: skip

# Gemma 3 with its tower. Files begin names as those on the hub do; modules of transformers have had other names since.
DECODER, VISION_MODEL, PROJECTOR = "language_model.model.", "vision_tower.vision_model.", "multi_modal_projector."

GEMMA3_VISION = replace(
    GEMMA3,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    names={path: replace(name, tensor=name.tensor.replace("model.", DECODER, 1)) for path, name in GEMMA3.names.items()}
    | tower_names(VISION_MODEL) | {
        "vision.projector.norm.scale": Name(f"{PROJECTOR}mm_soft_emb_norm.weight", "d"),
        "vision.projector.product.w": Name(f"{PROJECTOR}mm_input_projection_weight", "d,D"),
        "head.table": Name("lm_head.weight", "V,D"),
    },
    renamed=(
        ("model.language_model.", DECODER), ("language_model.lm_head.", "lm_head."),
        ("model.vision_tower.vision_model.", VISION_MODEL), (VISION_MODEL, VISION_MODEL),
        ("model.vision_tower.", VISION_MODEL), ("vision_tower.", VISION_MODEL), (f"model.{PROJECTOR}", PROJECTOR),
    ),
    modules=(
        (DECODER, "model.language_model."), (VISION_MODEL, "model.vision_tower."), (PROJECTOR, f"model.{PROJECTOR}"),
    ),
    ignored=(),
    sees=True,
)  # fmt: skip

# Gemma 4: the text decoder of its dense models.
ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LAYER = "model.layers.{}"
# Parts of the last layers, which may share keys and values: a wider MLP (f), and local heads.
SHARED_NAMES = (
    mlp_names("shared_blocks.mlp.", "mlp", "f")
    | mlp_names("shared_local_blocks.mlp.", "mlp", "f")
    | attention_names("KH", "shared_local_blocks")
    | qk_norm("H", "H", "shared_local_blocks")
)
# Inputs of each layer: a table and a projection of all layers, and a gate in each.
INPUT_NAMES = {
    "layer_inputs.table": Name("model.embed_tokens_per_layer.weight", "V,lp"),
    "layer_inputs.projection.w": Name("model.per_layer_model_projection.weight", "lp,D"),
    "layer_inputs.norm.scale": Name("model.per_layer_projection_norm.weight", "p"),
    "blocks.input_gate.gate.w": Name(f"{LAYER}.per_layer_input_gate.weight", "p,D"),
    "blocks.input_gate.down.w": Name(f"{LAYER}.per_layer_projection.weight", "D,p"),
    "blocks.input_gate.norm.scale": Name(f"{LAYER}.post_per_layer_input_norm.weight", "D"),
}

GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    names=GEMMA_NAMES | qk_norm("h", "h") | attention_names("kh", "blocks") | attention_names("KH", "local_blocks") | {
        "blocks.scale.factor": Name("model.layers.{}.layer_scalar", "o"),
        **qk_norm("H", "H", "local_blocks"), **SHARED_NAMES, **INPUT_NAMES,
    },
    keys=LLAMA_KEYS | {"sliding_window": "sliding_window", "logits_cap": "final_logit_softcapping"},
    fixed=FIXED | {
        "use_bidirectional_attention": (None, "vision"),  # tokens of images alone see later ones
        "enable_moe_block": (False,), "num_experts": (None,), "top_k_experts": (None,),
        "moe_intermediate_size": (None,),
    },
    absent=ABSENT | {
        "vocab_size": 262144, "num_hidden_layers": 30, "max_position_embeddings": 131072, "sliding_window": 512,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
        "global_head_dim": 512, "num_global_key_value_heads": None, "attention_k_eq_v": False, "per_layer_config": None,
        "rope_theta": 1e6, "rope_parameters": ROPE,
    },
    local_rope=True,
    query_scale=1.0,
    renamed=SEEING_NAMES,
    ignored=(*SEEING_PARTS, r"(model\.)?(embed_vision|embed_audio|audio_tower|vision_embedder)\."),
)  # fmt: skip

# The text decoder of Gemma 4's models with experts, which have the model_type of the others.
NORMS = {
    "pre_dense": "pre_feedforward_layernorm", "post_dense": "post_feedforward_layernorm_1",
    "pre_experts": "pre_feedforward_layernorm_2", "post_experts": "post_feedforward_layernorm_2",
}  # fmt: skip
EXPERT_KEYS = {
    "mlp.num_experts": "num_experts", "mlp.experts_per_token": "top_k_experts",
    "mlp.expert_dim": "moe_intermediate_size",
}  # fmt: skip
# Parts of the small dense models, which models with experts do not have.
SHARED_KEYS: dict[str, tuple] = {"num_kv_shared_layers": (0,), "use_double_wide_mlp": (False,)}
NO_LAYER_PARTS = {"hidden_size_per_layer_input": (0, None), **SHARED_KEYS}

GEMMA4_MOE = replace(
    GEMMA4,
    signature={"enable_moe_block": True},
    names=GEMMA4.names | {
        **{f"blocks.mlp.{ours}.scale": Name(f"{LAYER}.{theirs}.weight", "D") for ours, theirs in NORMS.items()},
        **mlp_names("blocks.mlp.dense.", "mlp", "F"),
        "blocks.mlp.experts.router.w": Name(f"{LAYER}.router.proj.weight", "Y,D"),
        "blocks.mlp.experts.router.norm.scale": Name(f"{LAYER}.router.scale", "D"),
        "blocks.mlp.experts.router.expert_scales": Name(f"{LAYER}.router.per_expert_scale", "Y"),
        **fused_experts("experts.gate_up_proj", "X,G,D", "blocks.mlp.experts.expert_{}.w"),
        "blocks.mlp.experts.expert_down.w": Name(f"{LAYER}.experts.down_proj", "X,D,G"),
    },
    keys=GEMMA4.keys | EXPERT_KEYS,
    fixed={key: values for key, values in GEMMA4.fixed.items() if key not in EXPERT_KEYS.values()} | NO_LAYER_PARTS
    | {"enable_moe_block": (True,)},
    absent={key: value for key, value in GEMMA4.absent.items() if key not in SHARED_KEYS},
)  # fmt: skip

# Gemma 4's models without towers for images and sound: their text decoder has its own model_type.
# Keys of parts that models of this type never have.
LEFT_OUT = {
    "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts",
    "moe_intermediate_size",
}  # fmt: skip

GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    fixed={key: values for key, values in GEMMA4.fixed.items() if key not in LEFT_OUT} | SHARED_KEYS,
    absent={key: value for key, value in GEMMA4.absent.items() if key not in LEFT_OUT | SHARED_KEYS.keys()}
    | {"max_position_embeddings": 262144, "sliding_window": 1024},
)
