"""SmolLM 3 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES

FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    names=LLAMA_NAMES,
    keys=LLAMA_KEYS,
    fixed={
        "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
        "use_sliding_window": (False, None),
    },
    absent=LLAMA_ABSENT | {
        "max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
    },
)  # fmt: skip
