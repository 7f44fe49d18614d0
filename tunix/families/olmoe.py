"""OLMoE at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import (
    EVERY_MLP,
    EXPERT_KEYS,
    EXPERT_NAMES,
    LLAMA_ABSENT,
    LLAMA_KEYS,
    LLAMA_NAMES,
    qk_norm,
)

FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    names=LLAMA_NAMES | qk_norm("NH", "KH") | EXPERT_NAMES,
    keys=LLAMA_KEYS | EXPERT_KEYS | EVERY_MLP | {"mlp.normalized": "norm_topk_prob"},
    fixed={"hidden_act": ("silu",), "attention_bias": (False,), "clip_qkv": (None,)},
    absent=LLAMA_ABSENT | {
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
)  # fmt: skip
