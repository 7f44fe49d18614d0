"""Families with experts at Hugging Face, but for those of Gemma and Qwen. Imports no jax."""

from tunix.huggingface.families import (
    ALL_LOCAL,
    DEEPSEEK_FIXED,
    DEEPSEEK_KEYS,
    EVERY_MLP,
    EXPERT_KEYS,
    EXPERT_NAMES,
    LLAMA_ABSENT,
    LLAMA_KEYS,
    LLAMA_NAMES,
    NEXT_TOKENS,
    ROUTER_BIAS,
    SEEING_NAMES,
    SEEING_PARTS,
    SHARED_NAMES,
    Family,
    Name,
    expert_names,
    fused,
    like_llama,
    qk_norm,
    qkv_biases,
)

# DeepSeek-V3 and Kimi K2 at Hugging Face.

DEEPSEEK_V3 = Family(
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


# GLM-4.5 with experts at Hugging Face.

GLM4_MOE = like_llama(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    names=LLAMA_NAMES | qkv_biases() | qk_norm("H", "H") | EXPERT_NAMES | ROUTER_BIAS | SHARED_NAMES,
    keys=DEEPSEEK_KEYS,
    fixed=DEEPSEEK_FIXED,
    absent={
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
        "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1, "attention_bias": False, "use_qk_norm": False,
    },
    biases={"attention_bias": "attention.[qkv]"},
    ignored=NEXT_TOKENS,
)  # fmt: skip


# GPT-OSS at Hugging Face.


def gate_and_up(dims: str, parameter: str, tensor: str) -> dict[str, Name]:
    """Return the names of gates and of what they gate where one tensor holds both, number by number."""
    last = dims.count(",")
    return {
        f"blocks.mlp.{parameter.format(part)}": Name(tensor, dims, number, ("G", "G"), last, interleaved="G")
        for number, part in enumerate(("gate", "up"))
    }


GPT_OSS = like_llama(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names=LLAMA_NAMES | qkv_biases() | {
        "blocks.attention.o.bias.b": Name("model.layers.{}.self_attn.o_proj.bias", "D"),
        "blocks.attention.sinks.b": Name("model.layers.{}.self_attn.sinks", "N"),
        "blocks.mlp.router.w": Name("model.layers.{}.mlp.router.weight", "Y,D"),
        "blocks.mlp.router.logits_bias.b": Name("model.layers.{}.mlp.router.bias", "Y"),
        **gate_and_up("X,D,G", "expert_{}.w", "model.layers.{}.mlp.experts.gate_up_proj"),
        **gate_and_up("X,G", "{}_bias.b", "model.layers.{}.mlp.experts.gate_up_proj_bias"),
        "blocks.mlp.expert_down.w": Name("model.layers.{}.mlp.experts.down_proj", "X,G,D"),
        "blocks.mlp.down_bias.b": Name("model.layers.{}.mlp.experts.down_proj_bias", "X,D"),
    },
    keys=EXPERT_KEYS | EVERY_MLP | {
        "mlp.num_experts": "num_local_experts", "sliding_window": "sliding_window",
    },
    fixed={
        "attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,),
    },
    absent={
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64,
        "num_key_value_heads": 8, "sliding_window": 128, "sliding_window_pattern": 2, "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    synonyms={"experts_per_token": "num_experts_per_tok"},
)  # fmt: skip


# Llama 4's text decoder at Hugging Face.

MLP = "model.layers.{}.feed_forward"


def mlp_names(ours: str, theirs: str, width: str) -> dict[str, Name]:
    """Return the names of a gated MLP of this width."""
    dims = {"gate": f"{width},D", "up": f"{width},D", "down": f"D,{width}"}
    return {f"blocks.mlp.{ours}{part}.w": Name(f"{theirs}.{part}_proj.weight", each) for part, each in dims.items()}


LLAMA4 = like_llama(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    names=LLAMA_NAMES | mlp_names("", MLP, "F") | mlp_names("shared.", f"{MLP}.shared_expert", "U") | {
        # Experts lie in one tensor [experts, in, out]; torch's linear layers are [out, in].
        "blocks.mlp.router.w": Name(f"{MLP}.router.weight", "Y,D"),
        "blocks.mlp.expert_gate.w": Name(f"{MLP}.experts.gate_up_proj", "X,D,G", 0, ("G", "G"), fused_dim=2),
        "blocks.mlp.expert_up.w": Name(f"{MLP}.experts.gate_up_proj", "X,D,G", 1, ("G", "G"), fused_dim=2),
        "blocks.mlp.expert_down.w": Name(f"{MLP}.experts.down_proj", "X,G,D"),
    },
    keys={
        # intermediate_size is the width of an expert and of the shared one; layers without experts have another.
        "mlp_dim": "intermediate_size_mlp",
        "mlp.expert_dim": "intermediate_size", "mlp.shared_dim": "intermediate_size",
        "mlp.num_experts": "num_local_experts", "mlp.experts_per_token": "num_experts_per_tok",
        "mlp.every": "interleave_moe_layer_step", "sliding_window": "attention_chunk_size",
    },
    fixed={"attention_bias": (False,), "router_jitter_noise": (0.0,)},
    # Layers with positions attend to chunks of the text, those without positions to all of it: "unrotated".
    absent={
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "interleave_moe_layer_step": 1,
        "num_local_experts": 16, "num_experts_per_tok": 1, "attention_chunk_size": 8192, "no_rope_layer_interval": 4,
        "sliding_window_pattern": "unrotated", "use_qk_norm": True, "attn_temperature_tuning": True, "attn_scale": 0.1,
        "floor_scale": 8192, "intermediate_size_mlp": 16384,
    },
    renamed=SEEING_NAMES,
    ignored=(*SEEING_PARTS, r"(model\.)?vision_model\."),
    local_type="chunked_attention",
    qk_norm="after_rotation",
)  # fmt: skip


# Mixtral at Hugging Face.

MIXTRAL = like_llama(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    # w1 is the gate, w3 is up, w2 is down.
    names=LLAMA_NAMES | expert_names("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    keys=EXPERT_KEYS | EVERY_MLP | {
        "mlp.num_experts": "num_local_experts", "sliding_window": "sliding_window",
    },
    fixed={"router_jitter_noise": (0.0,)},
    absent=ALL_LOCAL | {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)  # fmt: skip


OLMOE = like_llama(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    names=LLAMA_NAMES | qk_norm("NH", "KH") | EXPERT_NAMES,
    keys=EXPERT_KEYS | EVERY_MLP | {"mlp.normalized": "norm_topk_prob"},
    fixed={"attention_bias": (False,), "clip_qkv": (None,)},
    absent={
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
)  # fmt: skip
