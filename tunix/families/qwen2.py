"""Qwen 2 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES, qkv_biases

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=LLAMA_NAMES | qkv_biases(),
    keys=LLAMA_KEYS,
    fixed={"hidden_act": ("silu",), "use_sliding_window": (False,)},
    absent=LLAMA_ABSENT | {"max_position_embeddings": 32768},
)  # fmt: skip
