"""Llama at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=LLAMA_NAMES,
    keys=LLAMA_KEYS,
    fixed={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    absent=LLAMA_ABSENT,
)  # fmt: skip
