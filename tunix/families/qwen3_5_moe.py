"""Qwen 3.5 with experts at Hugging Face: the text decoder."""

from tunix.families.family import Family
from tunix.families.shared_names import (
    EXPERT_KEYS,
    EXPERT_NAMES,
    GATED_QUERIES,
    GATED_SHARED_NAMES,
    LINEAR_ABSENT,
    LINEAR_KEYS,
    LLAMA_ABSENT,
    LLAMA_KEYS,
    LLAMA_NAMES,
    SEEING_NAMES,
    linear_names,
    qk_norm,
)

FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    names=LLAMA_NAMES | qk_norm("H", "H") | GATED_QUERIES | linear_names() | EXPERT_NAMES | GATED_SHARED_NAMES,
    keys=LLAMA_KEYS | LINEAR_KEYS | EXPERT_KEYS | {
        "mlp_dim": "moe_intermediate_size",  # no layer has another MLP
        "mlp.expert_dim": "moe_intermediate_size", "mlp.shared_dim": "shared_expert_intermediate_size",
    },
    fixed={
        "hidden_act": ("silu",), "attention_bias": (False,), "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32",),
    },
    absent=LLAMA_ABSENT | LINEAR_ABSENT,
    synonyms={"num_local_experts": "num_experts"},
    local_type="linear_attention",
    renamed=SEEING_NAMES,
    ignored=(r"(model\.)?visual\.", r"mtp\."),
)  # fmt: skip
