"""Families of models at Hugging Face by the name that `model.family` takes; a new family is a row. Imports no jax."""

from dataclasses import replace

from tunix.base.dotted_path import import_object, is_dotted
from tunix.base.errors import UserError, did_you_mean
from tunix.huggingface import gemma
from tunix.huggingface.family import (
    ALL_LOCAL,
    DEEPSEEK_FIXED,
    DEEPSEEK_KEYS,
    EVERY_MLP,
    EXPERT_KEYS,
    EXPERT_NAMES,
    GATED_QUERIES,
    GATED_SHARED_NAMES,
    LINEAR_ABSENT,
    LINEAR_KEYS,
    LLAMA_ABSENT,
    LLAMA_KEYS,
    LLAMA_NAMES,
    MTP_COPIES,
    MTP_NAMES,
    NEXT_TOKENS,
    NO_BIASES,
    OLMO_NAMES,
    PLAIN_NAMES,
    ROUTER_BIAS,
    SEEING_NAMES,
    SEEING_PARTS,
    SHARED_NAMES,
    WHOLE_EXPERT_NAMES,
    WINDOW,
    Family,
    Name,
    expert_names,
    fused,
    fused_experts,
    gpt2_names,
    like_llama,
    linear_names,
    merging_tower_names,
    mlp_names,
    qk_norm,
    qkv_biases,
    renamed,
    tower_names,
)

__all__ = ["FAMILIES", "Family", "Name", "find_family"]

# Qwen 3.5: the text decoder of its dense models.
QWEN3_5 = like_llama(
    "qwen3_5_text", "Qwen3_5ForCausalLM",
    names=LLAMA_NAMES | qk_norm("H", "H") | GATED_QUERIES | linear_names(),
    keys=LINEAR_KEYS,
    fixed={"attention_bias": (False,), "attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)},
    absent=LINEAR_ABSENT | {"num_key_value_heads": 4},
    local_type="linear_attention",
    renamed=SEEING_NAMES,
    ignored=(r"(model\.)?visual\.", r"mtp\."),  # the part that sees, and layers that predict further tokens
)  # fmt: skip

# SmolVLM: a Llama with a tower.
SMOLVLM = like_llama(
    "idefics3", "Idefics3ForConditionalGeneration",
    {
        path: replace(name, tensor=name.tensor.replace("model.", "model.text_model.", 1))
        for path, name in LLAMA_NAMES.items()
    } | tower_names("model.vision_model.") | {
        "vision.projector.product.w": Name("model.connector.modality_projection.proj.weight", "D,ψd")
    },
    fixed=NO_BIASES | {"qk_layer_norms": (False,), "rope_interleaved": (False,), "use_resampler": (False,)},
    absent={"num_attention_heads": 32},
    sees=True,
)  # fmt: skip

# The row of a family like Llama says what differs from it.

FAMILIES: dict[str, Family] = {
    "apertus": like_llama(
        "apertus", "ApertusForCausalLM",
        renamed(PLAIN_NAMES, pre_attention="attention_layernorm", pre_mlp="feedforward_layernorm")
        | qk_norm("H", "H") | {
            "blocks.mlp.activation.positive": Name("model.layers.{}.mlp.act_fn.alpha_p", "o"),
            "blocks.mlp.activation.negative": Name("model.layers.{}.mlp.act_fn.alpha_n", "o"),
        },
        fixed=NO_BIASES | {"hidden_act": ("xielu",), "post_norm": (False,), "qk_norm": (True,)},
        absent={"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 1.2e7},
        scaled_rope=True,
        constants={"model.layers.{}.mlp.act_fn.beta": 0.5, "model.layers.{}.mlp.act_fn.eps": -1e-6},
    ),
    "deepseek_v3": Family(
        "deepseek_v3", "DeepseekV3ForCausalLM",
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
        } | fused("self_attn.kv_a_proj_with_mqa", ("attention.kv_down", "C"), ("attention.k", "R"))
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
        mtp_tensors=NEXT_TOKENS,
        mtp_names=MTP_NAMES,
        mtp_copies=MTP_COPIES,
        published_code=True,
    ),
    "exaone4": like_llama(
        "exaone4", "Exaone4ForCausalLM",
        renamed(LLAMA_NAMES, post_attention="post_attention_layernorm", post_mlp="post_feedforward_layernorm")
        | qk_norm("H", "H"), WINDOW,
        absent={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        unrotated_global=True,
    ),
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "gemma3_vision": gemma.GEMMA3_VISION,
    "gemma4": gemma.GEMMA4,
    "gemma4_moe": gemma.GEMMA4_MOE,
    "gemma4_unified": gemma.GEMMA4_UNIFIED,
    "glm4": like_llama(
        "glm4", "Glm4ForCausalLM",
        renamed(  # post_attention_layernorm is the norm before the MLP, as in Llama
            LLAMA_NAMES, pre_attention="input_layernorm", post_attention="post_self_attn_layernorm",
            pre_mlp="post_attention_layernorm", post_mlp="post_mlp_layernorm",
        ) | fused("mlp.gate_up_proj", ("mlp.gate", "F"), ("mlp.up", "F")) | qkv_biases(),
        absent={
            "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "head_dim": 128, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5, "attention_bias": True,
        },
        biases={"attention_bias": "attention.[qkv]"},
    ),
    "glm4_moe": like_llama(
        "glm4_moe", "Glm4MoeForCausalLM",
        names=LLAMA_NAMES | qkv_biases() | qk_norm("H", "H") | EXPERT_NAMES | ROUTER_BIAS | SHARED_NAMES,
        keys=DEEPSEEK_KEYS,
        fixed=DEEPSEEK_FIXED,
        absent={
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5, "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "attention_bias": False, "use_qk_norm": False,
        },
        biases={"attention_bias": "attention.[qkv]"},
        mtp_tensors=NEXT_TOKENS,
        mtp_names=MTP_NAMES,
        mtp_copies=MTP_COPIES,
    ),
    "gpt2": Family(
        "gpt2", "GPT2LMHeadModel",
        names=gpt2_names(),
        keys={
            "vocab_size": "vocab_size", "embed_dim": "n_embd", "mlp_dim": "n_inner", "num_layers": "n_layer",
            "num_heads": "n_head", "context_length": "n_positions", "norm_eps": "layer_norm_epsilon",
            "tied_head": "tie_word_embeddings",
        },
        fixed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False, True),
            "add_cross_attention": (False,),
        },
        absent={
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        },
        renamed=(("wte.", "transformer.wte."), ("wpe.", "transformer.wpe."), ("h.", "transformer.h."),
                 ("ln_f.", "transformer.ln_f.")),
        ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)$",),  # causal masks
    ),
    "gpt_oss": like_llama(
        "gpt_oss", "GptOssForCausalLM",
        names=LLAMA_NAMES | qkv_biases() | {
            "blocks.attention.o.bias.b": Name("model.layers.{}.self_attn.o_proj.bias", "D"),
            "blocks.attention.sinks.b": Name("model.layers.{}.self_attn.sinks", "N"),
            "blocks.mlp.router.w": Name("model.layers.{}.mlp.router.weight", "Y,D"),
            "blocks.mlp.router.logits_bias.b": Name("model.layers.{}.mlp.router.bias", "Y"),
            **fused_experts("mlp.experts.gate_up_proj", "X,D,G", interleaved="G"),
            **fused_experts("mlp.experts.gate_up_proj_bias", "X,G", "blocks.mlp.{}_bias.b", interleaved="G"),
            "blocks.mlp.expert_down.w": Name("model.layers.{}.mlp.experts.down_proj", "X,G,D"),
            "blocks.mlp.down_bias.b": Name("model.layers.{}.mlp.experts.down_proj_bias", "X,D"),
        },
        keys=EXPERT_KEYS | EVERY_MLP | {"mlp.num_experts": "num_local_experts", "sliding_window": "sliding_window"},
        fixed={"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        absent={
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64,
            "num_key_value_heads": 8, "sliding_window": 128, "sliding_window_pattern": 2, "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        scaled_rope=True,
        synonyms={"experts_per_token": "num_experts_per_tok"},
    ),
    "granite": like_llama(
        "granite", "GraniteForCausalLM",
        keys={
            "query_scale": "attention_multiplier", "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier", "logits_divisor": "logits_scaling",
        },
        fixed=NO_BIASES,
        absent={
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        },
    ),
    "llama": like_llama("llama", "LlamaForCausalLM", fixed=NO_BIASES | {"rope_interleaved": (False,)}),
    "llama4": like_llama(
        "llama4_text", "Llama4ForCausalLM",
        names=LLAMA_NAMES | mlp_names("blocks.mlp.", "feed_forward", "F")
        | mlp_names("blocks.mlp.shared.", "feed_forward.shared_expert", "U") | {
            # Experts lie in one tensor [experts, in, out]; torch's linear layers are [out, in].
            "blocks.mlp.router.w": Name("model.layers.{}.feed_forward.router.weight", "Y,D"),
            **fused_experts("feed_forward.experts.gate_up_proj", "X,D,G"),
            "blocks.mlp.expert_down.w": Name("model.layers.{}.feed_forward.experts.down_proj", "X,G,D"),
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
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128,
            "num_key_value_heads": 8, "num_local_experts": 16,
            "interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4, "no_rope_layers": None, "moe_layers": None,
            "sliding_window_pattern": "unrotated", "use_qk_norm": True,
            "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192, "intermediate_size_mlp": 16384,
        },
        renamed=SEEING_NAMES,
        ignored=(*SEEING_PARTS, r"(model\.)?vision_model\."),
        local_type="chunked_attention",
        qk_norm="after_rotation",
    ),
    "ministral3": like_llama(
        "ministral3", "Ministral3ForCausalLM", keys=WINDOW,
        absent=ALL_LOCAL | {
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8,
            "llama_4_scaling_beta": None,
        },
        renamed=SEEING_NAMES, ignored=SEEING_PARTS,
    ),
    "mistral": like_llama(
        "mistral", "MistralForCausalLM", keys=WINDOW,
        absent=ALL_LOCAL | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        renamed=SEEING_NAMES, ignored=SEEING_PARTS,
    ),
    "mixtral": like_llama(
        "mixtral", "MixtralForCausalLM",
        # w1 is the gate, w3 is up, w2 is down.
        names=LLAMA_NAMES | expert_names("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
        keys=EXPERT_KEYS | EVERY_MLP | {"mlp.num_experts": "num_local_experts", "sliding_window": "sliding_window"},
        fixed={"router_jitter_noise": (0.0,)},
        absent=ALL_LOCAL | {
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "nemotron": like_llama(
        "nemotron", "NemotronForCausalLM",
        PLAIN_NAMES | {
            "blocks.pre_attention.bias.b": Name("model.layers.{}.input_layernorm.bias", "D"),
            "blocks.pre_mlp.bias.b": Name("model.layers.{}.post_attention_layernorm.bias", "D"),
            "final_norm.bias.b": Name("model.norm.bias", "D"),
        },
        {"norm_eps": "norm_eps"},
        NO_BIASES | {"hidden_act": ("relu2",)},
        {"max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        synonyms={"rope_percent": "partial_rotary_factor", "rope_percentage": "partial_rotary_factor"},
    ),
    "olmo2": like_llama(
        "olmo2", "Olmo2ForCausalLM", OLMO_NAMES, fixed={"attention_bias": (False,)}, absent={"rms_norm_eps": 1e-5}
    ),
    "olmo3": like_llama(
        "olmo3", "Olmo3ForCausalLM", OLMO_NAMES, WINDOW, {"attention_bias": (False,)},
        {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
        local_rope=True,
    ),
    "olmoe": like_llama(
        "olmoe", "OlmoeForCausalLM",
        names=LLAMA_NAMES | qk_norm("NH", "KH") | EXPERT_NAMES,
        keys=EXPERT_KEYS | EVERY_MLP | {"mlp.normalized": "norm_topk_prob"},
        fixed={"attention_bias": (False,), "clip_qkv": (None,)},
        absent={
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
    "phi3": like_llama(
        "phi3", "Phi3ForCausalLM",
        LLAMA_NAMES | fused("mlp.gate_up_proj", ("mlp.gate", "F"), ("mlp.up", "F"))
        | fused("self_attn.qkv_proj", ("attention.q", "NH"), ("attention.k", "KH"), ("attention.v", "KH")),
        WINDOW, NO_BIASES | {"lm_head_bias": (False,)},
        ALL_LOCAL | {
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
        },
        published_code=True,
    ),
    "qwen2": like_llama(
        "qwen2", "Qwen2ForCausalLM", LLAMA_NAMES | qkv_biases(),
        fixed={"use_sliding_window": (False,), "use_mrope": (False,)},
        absent={"max_position_embeddings": 32768, "num_key_value_heads": 32},
    ),
    "qwen3": like_llama(
        "qwen3", "Qwen3ForCausalLM", LLAMA_NAMES | qk_norm("H", "H"),
        fixed={"attention_bias": (False,), "use_sliding_window": (False,)},
        absent={"max_position_embeddings": 32768, "head_dim": 128, "num_key_value_heads": 32},
    ),
    "qwen3_vl": like_llama(
        "qwen3_vl", "Qwen3VLForConditionalGeneration",
        {
            path: replace(name, tensor=name.tensor.replace("model.", "model.language_model.", 1))
            for path, name in (LLAMA_NAMES | qk_norm("H", "H")).items()
        } | merging_tower_names("model.visual."),
        fixed={"attention_bias": (False,)},
        absent={"max_position_embeddings": 128000, "head_dim": 128, "num_key_value_heads": 32, "rope_theta": 5e5},
        many_axes=True,
        sees=True,
    ),
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": replace(
        QWEN3_5, model_type="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM",
        names=QWEN3_5.names | EXPERT_NAMES | GATED_SHARED_NAMES,
        keys=QWEN3_5.keys | EXPERT_KEYS | {
            "mlp_dim": "moe_intermediate_size",  # no layer has another MLP
            "mlp.expert_dim": "moe_intermediate_size", "mlp.shared_dim": "shared_expert_intermediate_size",
        },
        absent=QWEN3_5.absent | {"num_key_value_heads": 2},
        synonyms={"num_local_experts": "num_experts"},
        published=WHOLE_EXPERT_NAMES,
    ),
    "qwen3_moe": like_llama(
        "qwen3_moe", "Qwen3MoeForCausalLM",
        names=LLAMA_NAMES | qk_norm("H", "H") | EXPERT_NAMES,
        keys=EXPERT_KEYS | {"mlp.expert_dim": "moe_intermediate_size", "mlp.normalized": "norm_topk_prob"},
        fixed={
            "attention_bias": (False,), "use_sliding_window": (False,), "decoder_sparse_step": (1,),
            "qkv_bias": (False,), "use_qk_norm": (True,), "shared_expert_intermediate_size": (0,),
        },
        absent={
            "max_position_embeddings": 32768, "num_key_value_heads": 4, "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
        synonyms={"num_local_experts": "num_experts"},  # of transformers 5
    ),
    "qwen3_next": like_llama(
        "qwen3_next", "Qwen3NextForCausalLM",
        names=LLAMA_NAMES | qk_norm("H", "H") | GATED_QUERIES | EXPERT_NAMES | GATED_SHARED_NAMES | linear_names()
        | fused(  # the rows of a key head lie together
            "linear_attn.in_proj_qkvz", ("q", "IE"), ("k", "IE"), ("v", "JM"), ("gate", "JM"),
            stack="linear_blocks.attention", interleaved="I",
        ) | fused(
            "linear_attn.in_proj_ba", ("beta", "J"), ("decay", "J"), stack="linear_blocks.attention", interleaved="I"
        ),
        keys=LINEAR_KEYS | EXPERT_KEYS | {
            "mlp.expert_dim": "moe_intermediate_size", "mlp.shared_dim": "shared_expert_intermediate_size",
            "mlp.normalized": "norm_topk_prob",
        },
        fixed={"attention_bias": (False,), "use_sliding_window": (False,), "decoder_sparse_step": (1,)},
        absent=LINEAR_ABSENT | {"num_key_value_heads": 2, "norm_topk_prob": True, "mlp_only_layers": None},
        synonyms={"num_local_experts": "num_experts"},
        local_type="linear_attention",
        mtp_tensors=r"mtp\.",
        mtp_names={
            "token_norm.scale": Name("mtp.pre_fc_norm_embedding.weight", "D"),
            "state_norm.scale": Name("mtp.pre_fc_norm_hidden.weight", "D"),
            "projection.w": Name("mtp.fc.weight", "D,μ"),
            "norm.scale": Name("mtp.norm.weight", "D"),
        },
        mtp_block="mtp.layers.{}.",
    ),
    "seed_oss": like_llama(
        "seed_oss", "SeedOssForCausalLM", LLAMA_NAMES | qkv_biases(),
        fixed={"attention_bias": (True,), "attention_out_bias": (False,), "mlp_bias": (False,)},
        absent={"max_position_embeddings": 524288, "head_dim": 128, "num_key_value_heads": 8},
    ),
    "smollm3": like_llama(
        "smollm3", "SmolLM3ForCausalLM", fixed=NO_BIASES | {"use_sliding_window": (False, None)},
        absent={
            "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6,
            "no_rope_layer_interval": 4, "no_rope_layers": None,
        },
    ),
    "smolvlm": SMOLVLM,
    "smolvlm2": replace(SMOLVLM, model_type="smolvlm", architecture="SmolVLMForConditionalGeneration"),
}  # fmt: skip


def find_family(name: str) -> Family:
    """Return the family of a name in `FAMILIES`, or of a dotted path."""
    if not is_dotted(name) and name not in FAMILIES:
        raise UserError(
            f"there is no family {name}{did_you_mean(name, list(FAMILIES))}; name one of docs/families.md, or one of "
            "your own: package.module:name"
        )
    found = import_object(name, Family) if is_dotted(name) else FAMILIES[name]
    assert isinstance(found, Family)
    return found
