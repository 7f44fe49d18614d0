"""OLMo 3 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, OLMO_NAMES

FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    names=OLMO_NAMES,
    keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
    fixed={"hidden_act": ("silu",), "attention_bias": (False,)},
    absent=LLAMA_ABSENT | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    local_rope=True,
)  # fmt: skip
