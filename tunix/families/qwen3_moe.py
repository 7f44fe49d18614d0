"""Qwen 3 with experts at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import EXPERT_KEYS, EXPERT_NAMES, LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES, qk_norm

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=LLAMA_NAMES | qk_norm("H", "H") | EXPERT_NAMES,
    keys=LLAMA_KEYS | EXPERT_KEYS | {
        "mlp.expert_dim": "moe_intermediate_size", "mlp.normalized": "norm_topk_prob",
    },
    fixed={
        "hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
    },
    absent=LLAMA_ABSENT | {
        "max_position_embeddings": 32768, "head_dim": 128, "norm_topk_prob": False, "mlp_only_layers": None,
    },
    synonyms={"num_local_experts": "num_experts"},  # of transformers 5
)  # fmt: skip
