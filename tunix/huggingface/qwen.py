"""Families of Qwen with experts or linear attention at Hugging Face. Imports no jax."""

from dataclasses import replace

from tunix.huggingface.families import (
    EXPERT_KEYS,
    EXPERT_NAMES,
    GATED_QUERIES,
    GATED_SHARED_NAMES,
    LINEAR_ABSENT,
    LINEAR_KEYS,
    LLAMA_NAMES,
    SEEING_NAMES,
    Name,
    like_llama,
    linear_names,
    qk_norm,
)

# Qwen 3 with experts at Hugging Face.

QWEN3_MOE = like_llama(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=LLAMA_NAMES | qk_norm("H", "H") | EXPERT_NAMES,
    keys=EXPERT_KEYS | {
        "mlp.expert_dim": "moe_intermediate_size", "mlp.normalized": "norm_topk_prob",
    },
    fixed={
        "attention_bias": (False,), "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
    },
    absent={
        "max_position_embeddings": 32768, "head_dim": 128, "norm_topk_prob": False, "mlp_only_layers": None,
    },
    synonyms={"num_local_experts": "num_experts"},  # of transformers 5
)  # fmt: skip


# Qwen 3 Next at Hugging Face: linear attention beside attention, experts in every layer.


def by_key_head(tensor: str, *parts: tuple[str, str]) -> dict[str, Name]:
    """Return the names of weights, given as (parameter, rows), in a tensor that has the rows of a key head together."""
    rows = tuple(dim_names for _, dim_names in parts)
    template = f"model.layers.{{}}.linear_attn.{tensor}.weight"
    return {
        f"linear_blocks.attention.{path}.w": Name(template, f"{dim_names},D", part, rows, interleaved="I")
        for part, (path, dim_names) in enumerate(parts)
    }


QWEN3_NEXT = like_llama(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names=LLAMA_NAMES | qk_norm("H", "H") | GATED_QUERIES | EXPERT_NAMES | GATED_SHARED_NAMES | linear_names()
    | by_key_head("in_proj_qkvz", ("q", "IE"), ("k", "IE"), ("v", "JM"), ("gate", "JM"))
    | by_key_head("in_proj_ba", ("beta", "J"), ("decay", "J")),
    keys=LINEAR_KEYS | EXPERT_KEYS | {
        "mlp.expert_dim": "moe_intermediate_size", "mlp.shared_dim": "shared_expert_intermediate_size",
        "mlp.normalized": "norm_topk_prob",
    },
    fixed={"attention_bias": (False,), "decoder_sparse_step": (1,)},
    absent=LINEAR_ABSENT | {"norm_topk_prob": True, "mlp_only_layers": None},
    synonyms={"num_local_experts": "num_experts"},
    local_type="linear_attention",
    ignored=(r"mtp\.",),  # layers that predict further tokens
)  # fmt: skip


# Qwen 3.5 at Hugging Face: the text decoder of its dense models.

QWEN3_5 = like_llama(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    names=LLAMA_NAMES | qk_norm("H", "H") | GATED_QUERIES | linear_names(),
    keys=LINEAR_KEYS,
    fixed={
        "attention_bias": (False,), "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32",),
    },
    absent=LINEAR_ABSENT,
    local_type="linear_attention",
    renamed=SEEING_NAMES,
    ignored=(r"(model\.)?visual\.", r"mtp\."),  # the part that sees, and layers that predict further tokens
)  # fmt: skip


QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    names=QWEN3_5.names | EXPERT_NAMES | GATED_SHARED_NAMES,
    keys=QWEN3_5.keys | EXPERT_KEYS | {
        "mlp_dim": "moe_intermediate_size",  # no layer has another MLP
        "mlp.expert_dim": "moe_intermediate_size", "mlp.shared_dim": "shared_expert_intermediate_size",
    },
    synonyms={"num_local_experts": "num_experts"},
)  # fmt: skip
