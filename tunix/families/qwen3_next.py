"""Qwen 3 Next at Hugging Face: linear attention beside attention, experts in every layer."""

from tunix.families.family import Family, Name
from tunix.families.shared_names import (
    EXPERT_KEYS,
    EXPERT_NAMES,
    GATED_QUERIES,
    GATED_SHARED_NAMES,
    LINEAR_ABSENT,
    LINEAR_KEYS,
    LLAMA_ABSENT,
    LLAMA_KEYS,
    LLAMA_NAMES,
    linear_names,
    qk_norm,
)


def by_key_head(tensor: str, *parts: tuple[str, str]) -> dict[str, Name]:
    """Return the names of weights, given as (parameter, rows), in a tensor that has the rows of a key head together."""
    rows = tuple(letters for _, letters in parts)
    place = f"model.layers.{{}}.linear_attn.{tensor}.weight"
    return {
        f"linear_blocks.attention.{path}.w": Name(place, f"{letters},D", part, rows, interleaved="I")
        for part, (path, letters) in enumerate(parts)
    }


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names=LLAMA_NAMES | qk_norm("H", "H") | GATED_QUERIES | EXPERT_NAMES | GATED_SHARED_NAMES | linear_names()
    | by_key_head("in_proj_qkvz", ("q", "IE"), ("k", "IE"), ("v", "JM"), ("gate", "JM"))
    | by_key_head("in_proj_ba", ("beta", "J"), ("decay", "J")),
    keys=LLAMA_KEYS | LINEAR_KEYS | EXPERT_KEYS | {
        "mlp.expert_dim": "moe_intermediate_size", "mlp.shared_dim": "shared_expert_intermediate_size",
        "mlp.normalized": "norm_topk_prob",
    },
    fixed={"hidden_act": ("silu",), "attention_bias": (False,), "decoder_sparse_step": (1,)},
    absent=LLAMA_ABSENT | LINEAR_ABSENT | {"norm_topk_prob": True, "mlp_only_layers": None},
    synonyms={"num_local_experts": "num_experts"},
    local_type="linear_attention",
    ignored=(r"mtp\.",),  # layers that predict further tokens
)  # fmt: skip
