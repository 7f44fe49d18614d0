"""Mixtral at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import (
    ALL_LOCAL,
    EVERY_MLP,
    EXPERT_KEYS,
    LLAMA_ABSENT,
    LLAMA_KEYS,
    LLAMA_NAMES,
    expert_names,
)

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    # w1 is the gate, w3 is up, w2 is down.
    names=LLAMA_NAMES | expert_names("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    keys=LLAMA_KEYS | EXPERT_KEYS | EVERY_MLP | {
        "mlp.num_experts": "num_local_experts", "sliding_window": "sliding_window",
    },
    fixed={"hidden_act": ("silu",), "router_jitter_noise": (0.0,)},
    absent=LLAMA_ABSENT | ALL_LOCAL | {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)  # fmt: skip
