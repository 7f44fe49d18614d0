"""Granite 3 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES

FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    names=LLAMA_NAMES,
    keys=LLAMA_KEYS | {
        "query_scale": "attention_multiplier", "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier", "logits_divisor": "logits_scaling",
    },
    fixed={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    absent=LLAMA_ABSENT | {
        "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
    },
)  # fmt: skip
