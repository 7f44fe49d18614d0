"""Ministral 3 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import ALL_LOCAL, LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES, SEEING_NAMES, SEEING_PARTS

FAMILY = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    names=LLAMA_NAMES,
    keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
    fixed={"hidden_act": ("silu",)},
    absent=LLAMA_ABSENT | ALL_LOCAL | {
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8,
        "llama_4_scaling_beta": None,
    },
    renamed=SEEING_NAMES,
    ignored=SEEING_PARTS,
)  # fmt: skip
