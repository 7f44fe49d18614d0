"""GLM-4.5 with experts at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import (
    DEEPSEEK_FIXED,
    DEEPSEEK_KEYS,
    EXPERT_NAMES,
    LLAMA_ABSENT,
    LLAMA_KEYS,
    LLAMA_NAMES,
    NEXT_TOKENS,
    ROUTER_BIAS,
    SHARED_NAMES,
    qk_norm,
    qkv_biases,
)

FAMILY = Family(
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
)  # fmt: skip
