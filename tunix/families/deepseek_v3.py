"""DeepSeek-V3 and Kimi K2 at Hugging Face."""

from tunix.families.family import Family, Name
from tunix.families.shared_names import (
    DEEPSEEK_FIXED,
    DEEPSEEK_KEYS,
    EXPERT_NAMES,
    LLAMA_ABSENT,
    LLAMA_KEYS,
    LLAMA_NAMES,
    NEXT_TOKENS,
    ROUTER_BIAS,
    SHARED_NAMES,
    fused,
)

FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    names={path: name for path, name in LLAMA_NAMES.items() if not path.startswith("blocks.attention.")} | {
        # Latent attention (DeepSeek-AI 2024, arXiv:2405.04434): queries come from a latent Q, or straight from the
        # stream (q_whole) if q_lora_rank is null; keys and values of all heads come from a latent C (kv_up).
        "blocks.attention.q_down.w": Name("model.layers.{}.self_attn.q_a_proj.weight", "Q,D"),
        "blocks.attention.q_norm.scale": Name("model.layers.{}.self_attn.q_a_layernorm.weight", "Q"),
        "blocks.attention.q.w": Name("model.layers.{}.self_attn.q_b_proj.weight", "NH,Q"),
        "blocks.attention.q_whole.w": Name("model.layers.{}.self_attn.q_proj.weight", "NH,D"),
        "blocks.attention.kv_norm.scale": Name("model.layers.{}.self_attn.kv_a_layernorm.weight", "C"),
        "blocks.attention.kv_up.w": Name("model.layers.{}.self_attn.kv_b_proj.weight", "NO,C"),
        "blocks.attention.o.w": Name("model.layers.{}.self_attn.o_proj.weight", "D,NW"),
    } | fused({}, "self_attn.kv_a_proj_with_mqa", ("attention.kv_down", "C"), ("attention.k", "R"))
    | EXPERT_NAMES | ROUTER_BIAS | SHARED_NAMES,
    keys={ours: theirs for ours, theirs in LLAMA_KEYS.items() if ours != "head_dim"} | DEEPSEEK_KEYS | {
        "latent.query_dim": "q_lora_rank", "latent.dim": "kv_lora_rank", "latent.value_dim": "v_head_dim",
    },
    fixed=DEEPSEEK_FIXED | {"attention_bias": (False,)},
    absent=LLAMA_ABSENT | {
        "max_position_embeddings": 4096, "q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": None, "rope_interleave": True,
        "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    also=("kimi_k2",),
    ignored=NEXT_TOKENS,
    published_code=True,
)  # fmt: skip
