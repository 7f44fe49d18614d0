"""Qwen 3 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES, qk_norm

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=LLAMA_NAMES | qk_norm("H", "H"),
    keys=LLAMA_KEYS,
    fixed={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
    absent=LLAMA_ABSENT | {"max_position_embeddings": 32768, "head_dim": 128},
)  # fmt: skip
