"""GLM-4 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES, fused, qkv_biases, renamed

FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    names=fused(
        renamed(  # post_attention_layernorm is the norm before the MLP, as in Llama
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
)  # fmt: skip
