"""Qwen 3.5 with experts at Hugging Face: the text decoder."""

from dataclasses import replace

from tunix.families.qwen3_5 import FAMILY as DENSE
from tunix.families.shared_names import EXPERT_KEYS, EXPERT_NAMES, GATED_SHARED_NAMES

FAMILY = replace(
    DENSE,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    names=DENSE.names | EXPERT_NAMES | GATED_SHARED_NAMES,
    keys=DENSE.keys | EXPERT_KEYS | {
        "mlp_dim": "moe_intermediate_size",  # no layer has another MLP
        "mlp.expert_dim": "moe_intermediate_size", "mlp.shared_dim": "shared_expert_intermediate_size",
    },
    synonyms={"num_local_experts": "num_experts"},
)  # fmt: skip
