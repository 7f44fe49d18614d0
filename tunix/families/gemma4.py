"""Gemma 4 at Hugging Face: the text decoder of its dense models."""

from tunix.families.family import Family, Name
from tunix.families.shared_names import GEMMA_NAMES, LLAMA_KEYS, SEEING_NAMES, SEEING_PARTS, attention_names, qk_norm

ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

LAYER = "model.layers.{}"
# Parts of the last layers, which may share keys and values: a wider MLP (f), and local heads.
SHARED_NAMES = {
    f"{stack}.mlp.{part}.w": Name(f"{LAYER}.mlp.{part}_proj.weight", dims)
    for stack in ("shared_blocks", "shared_local_blocks")
    for part, dims in (("gate", "f,D"), ("up", "f,D"), ("down", "D,f"))
} | attention_names("KH", "shared_local_blocks") | qk_norm("H", "H", "shared_local_blocks")  # fmt: skip
# Inputs of each layer: a table and a projection of all layers, and a gate in each.
INPUT_NAMES = {
    "layer_inputs.table": Name("model.embed_tokens_per_layer.weight", "V,lp"),
    "layer_inputs.projection.w": Name("model.per_layer_model_projection.weight", "lp,D"),
    "layer_inputs.norm.scale": Name("model.per_layer_projection_norm.weight", "p"),
    "blocks.input_gate.gate.w": Name(f"{LAYER}.per_layer_input_gate.weight", "p,D"),
    "blocks.input_gate.down.w": Name(f"{LAYER}.per_layer_projection.weight", "D,p"),
    "blocks.input_gate.norm.scale": Name(f"{LAYER}.post_per_layer_input_norm.weight", "D"),
}

FAMILY = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    names=GEMMA_NAMES | qk_norm("h", "h") | attention_names("kh", "blocks") | attention_names("KH", "local_blocks") | {
        "blocks.scale.factor": Name("model.layers.{}.layer_scalar", "o"),
        **qk_norm("H", "H", "local_blocks"), **SHARED_NAMES, **INPUT_NAMES,
    },
    keys=LLAMA_KEYS | {"sliding_window": "sliding_window", "logits_cap": "final_logit_softcapping"},
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,),
        "use_bidirectional_attention": (None, "vision"),  # tokens of images alone see later ones
        "enable_moe_block": (False,), "num_experts": (None,), "top_k_experts": (None,),
        "moe_intermediate_size": (None,),
    },
    absent={
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 512, "sliding_window_pattern": 6,
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
