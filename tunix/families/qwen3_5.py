"""Qwen 3.5 at Hugging Face: the text decoder of its dense models."""

from tunix.families.family import Family, Name
from tunix.families.shared_names import (
    LLAMA_ABSENT,
    LLAMA_KEYS,
    LLAMA_NAMES,
    SEEING_NAMES,
    linear_names,
    qk_norm,
)

FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    names=LLAMA_NAMES | qk_norm("H", "H") | linear_names() | {
        f"blocks.attention.{part}.w": Name(
            "model.layers.{}.self_attn.q_proj.weight", "NH,D", number, ("NH", "NH"), interleaved=True
        )
        for number, part in enumerate(("q", "gate"))
    },
    keys=LLAMA_KEYS | {
        "linear_attention.num_key_heads": "linear_num_key_heads",
        "linear_attention.num_value_heads": "linear_num_value_heads",
        "linear_attention.key_dim": "linear_key_head_dim",
        "linear_attention.value_dim": "linear_value_head_dim",
        "linear_attention.filter_size": "linear_conv_kernel_dim",
    },
    fixed={
        "hidden_act": ("silu",), "attention_bias": (False,), "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32",),
    },
    absent=LLAMA_ABSENT | {
        "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
    local_type="linear_attention",
    renamed=SEEING_NAMES,
    ignored=(r"(model\.)?visual\.", r"mtp\."),
)  # fmt: skip
