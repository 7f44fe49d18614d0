"""Phi-3 and Phi-4 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import ALL_LOCAL, LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES, fused

FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names=fused(
        fused(
            LLAMA_NAMES, "self_attn.qkv_proj", ("attention.q", "NH"), ("attention.k", "KH"), ("attention.v", "KH")
        ),
        "mlp.gate_up_proj", ("mlp.gate", "F"), ("mlp.up", "F"),
    ),
    keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
    fixed={"hidden_act": ("silu",), "attention_bias": (False,)},
    absent=LLAMA_ABSENT | ALL_LOCAL | {
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
    },
    published_code=True,
)  # fmt: skip
