"""Mistral at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import ALL_LOCAL, LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=LLAMA_NAMES,
    keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
    fixed={"hidden_act": ("silu",)},
    absent=LLAMA_ABSENT | ALL_LOCAL | {"max_position_embeddings": 131072},
)  # fmt: skip
