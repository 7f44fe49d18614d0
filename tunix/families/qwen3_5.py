"""Qwen 3.5 at Hugging Face: the text decoder of its dense models."""

from tunix.families.family import Family
from tunix.families.shared_names import (
    GATED_QUERIES,
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
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    names=LLAMA_NAMES | qk_norm("H", "H") | GATED_QUERIES | linear_names(),
    keys=LLAMA_KEYS | LINEAR_KEYS,
    fixed={
        "hidden_act": ("silu",), "attention_bias": (False,), "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32",),
    },
    absent=LLAMA_ABSENT | LINEAR_ABSENT,
    local_type="linear_attention",
    renamed=SEEING_NAMES,
    ignored=(r"(model\.)?visual\.", r"mtp\."),  # the part that sees, and layers that predict further tokens
)  # fmt: skip
