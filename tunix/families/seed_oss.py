"""Seed-OSS at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES, qkv_biases

FAMILY = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    names=LLAMA_NAMES | qkv_biases(),
    keys=LLAMA_KEYS,
    fixed={
        "hidden_act": ("silu",), "attention_bias": (True,), "attention_out_bias": (False,), "mlp_bias": (False,),
    },
    absent=LLAMA_ABSENT | {"max_position_embeddings": 524288, "head_dim": 128},
)  # fmt: skip
