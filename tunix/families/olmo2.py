"""OLMo 2 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, OLMO_NAMES

FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names=OLMO_NAMES,
    keys=LLAMA_KEYS,
    fixed={"hidden_act": ("silu",), "attention_bias": (False,)},
    absent=LLAMA_ABSENT | {"rms_norm_eps": 1e-5},
)  # fmt: skip
