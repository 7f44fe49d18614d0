"""Gemma 4's models without towers for images and sound at Hugging Face: their text decoder has its own model_type."""

from dataclasses import replace

from tunix.families.gemma4 import FAMILY as GEMMA4
from tunix.families.gemma4_moe import SHARED_KEYS

# Keys of parts that models of this type never have.
LEFT_OUT = {
    "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts", "top_k_experts",
    "moe_intermediate_size",
}  # fmt: skip

FAMILY = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    fixed={key: values for key, values in GEMMA4.fixed.items() if key not in LEFT_OUT} | SHARED_KEYS,
    absent={key: value for key, value in GEMMA4.absent.items() if key not in LEFT_OUT | SHARED_KEYS.keys()}
    | {"max_position_embeddings": 262144, "sliding_window": 1024},
)
