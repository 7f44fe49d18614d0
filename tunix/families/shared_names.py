"""Names of tensors and keys of config.json that several families share. Imports no jax."""

import re
from dataclasses import replace

from tunix.families.family import Name

LLAMA_NAMES = {
    "embedding.table": Name("model.embed_tokens.weight", "V,D"),
    "blocks.pre_attention.scale": Name("model.layers.{}.input_layernorm.weight", "D"),
    "blocks.attention.q.w": Name("model.layers.{}.self_attn.q_proj.weight", "NH,D"),
    "blocks.attention.k.w": Name("model.layers.{}.self_attn.k_proj.weight", "KH,D"),
    "blocks.attention.v.w": Name("model.layers.{}.self_attn.v_proj.weight", "KH,D"),
    "blocks.attention.o.w": Name("model.layers.{}.self_attn.o_proj.weight", "D,NH"),
    # Named after the part behind which it stands: it is the norm before the MLP.
    "blocks.pre_mlp.scale": Name("model.layers.{}.post_attention_layernorm.weight", "D"),
    "blocks.mlp.gate.w": Name("model.layers.{}.mlp.gate_proj.weight", "F,D"),
    "blocks.mlp.up.w": Name("model.layers.{}.mlp.up_proj.weight", "F,D"),
    "blocks.mlp.down.w": Name("model.layers.{}.mlp.down_proj.weight", "D,F"),
    "final_norm.scale": Name("model.norm.weight", "D"),
    "head.table": Name("lm_head.weight", "V,D"),
}
LLAMA_KEYS = {
    "vocab_size": "vocab_size", "embed_dim": "hidden_size", "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "context_length": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}  # fmt: skip
LLAMA_ABSENT = {
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4,
    "num_key_value_heads": None, "head_dim": None,
}  # fmt: skip


QKV = ("NH", "KH", "KH")  # queries, keys and values in one tensor


def fused(names: dict[str, Name], tensor: str, *parts: tuple[str, str]) -> dict[str, Name]:
    """Put weights, given as (parameter, rows), into one tensor of each layer, one after the other."""
    rows = tuple(letters for _, letters in parts)
    return names | {
        f"blocks.{path}.w": Name(f"model.layers.{{}}.{tensor}.weight", f"{letters},D", part, rows)
        for part, (path, letters) in enumerate(parts)
    }


def qkv_biases() -> dict[str, Name]:
    """Return the names of the biases of queries, keys and values."""
    return {
        f"blocks.attention.{x}.bias.b": Name(f"model.layers.{{}}.self_attn.{x}_proj.bias", letters)
        for x, letters in zip("qkv", QKV, strict=True)
    }


def linear_names() -> dict[str, Name]:
    """Return the names of the parts of linear attention: queries, keys and values are one tensor, their filters too."""
    layer, channels, names = "model.layers.{}.linear_attn", ("IE", "IE", "JM"), {}
    for part, (x, letters) in enumerate(zip("qkv", channels, strict=True)):
        names[f"{x}.w"] = Name(f"{layer}.in_proj_qkv.weight", f"{letters},D", part, channels)
        names[f"{x}_filter.w"] = Name(f"{layer}.conv1d.weight", f"{letters},o,Z", part, channels)
    names |= {
        "gate.w": Name(f"{layer}.in_proj_z.weight", "JM,D"),
        "beta.w": Name(f"{layer}.in_proj_b.weight", "J,D"),
        "decay.w": Name(f"{layer}.in_proj_a.weight", "J,D"),
        "rate.shift.b": Name(f"{layer}.dt_bias", "J"),
        "rate.log_rate": Name(f"{layer}.A_log", "J"),
        "out_norm.scale": Name(f"{layer}.norm.weight", "M"),
        "o.w": Name(f"{layer}.out_proj.weight", "D,JM"),
    }
    return {f"linear_blocks.attention.{path}": name for path, name in names.items()}


# Linear attention beside attention with gated results, as in Qwen 3.5 and Qwen 3 Next.
GATED_QUERIES = {
    f"blocks.attention.{part}.w": Name(
        "model.layers.{}.self_attn.q_proj.weight", "NH,D", number, ("NH", "NH"), interleaved="N"
    )
    for number, part in enumerate(("q", "gate"))
}
LINEAR_KEYS = {
    "linear_attention.num_key_heads": "linear_num_key_heads",
    "linear_attention.num_value_heads": "linear_num_value_heads",
    "linear_attention.key_dim": "linear_key_head_dim",
    "linear_attention.value_dim": "linear_value_head_dim",
    "linear_attention.filter_size": "linear_conv_kernel_dim",
}
LINEAR_ABSENT = {
    "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
# Families whose config.json has one window for all layers, or null. The pattern 0 means: no layer is global.
ALL_LOCAL = {"sliding_window": None, "sliding_window_pattern": 0}


def attention_names(letters: str, stack: str) -> dict[str, Name]:
    """Return the names of the projections of a stack's layers, whose keys have these two dimensions, like "KH"."""
    width = letters[-1]
    dims = {"q": f"N{width},D", "k": f"{letters},D", "v": f"{letters},D", "o": f"D,N{width}"}
    return {
        f"{stack}.attention.{x}.w": Name(f"model.layers.{{}}.self_attn.{x}_proj.weight", each)
        for x, each in dims.items()
    }


def qk_norm(queries: str, keys: str, stack: str = "blocks") -> dict[str, Name]:
    """Return the names of the norms of queries and of keys, whose scales have these dimensions."""
    dims = queries, keys
    return {
        f"{stack}.attention.{x}_norm.scale": Name(f"model.layers.{{}}.self_attn.{x}_norm.weight", letters)
        for x, letters in zip("qk", dims, strict=True)
    }


def renamed(names: dict[str, Name], **tensors: str) -> dict[str, Name]:
    """Replace the names of the norms before and after each part; a norm without a new name is left out."""
    norms = {f"blocks.{norm}.scale": Name(f"model.layers.{{}}.{name}.weight", "D") for norm, name in tensors.items()}
    return {path: name for path, name in names.items() if not re.match(r"blocks\.(pre|post)", path)} | norms


def expert_names(router: str, expert: str, gate: str, up: str, down: str) -> dict[str, Name]:
    """Return the names of a router and of the three matrices of each expert."""
    parts = {"gate": (gate, "G,D"), "up": (up, "G,D"), "down": (down, "D,G")}
    return {"blocks.mlp.router.w": Name(f"model.layers.{{}}.{router}.weight", "Y,D")} | {
        f"blocks.mlp.expert_{part}.w": Name(f"model.layers.{{}}.{expert}.{{}}.{tensor}.weight", dims)
        for part, (tensor, dims) in parts.items()
    }


EXPERT_NAMES = expert_names("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
EXPERT_KEYS = {"mlp.num_experts": "num_experts", "mlp.experts_per_token": "num_experts_per_tok"}
# Widths of families where every layer has experts: the key of the MLP's width gives that of an expert.
EVERY_MLP = {"mlp_dim": "intermediate_size", "mlp.expert_dim": "intermediate_size"}
# OLMo has norms of the results of attention and MLP, and none of their inputs.
OLMO_NAMES = renamed(
    LLAMA_NAMES, post_attention="post_attention_layernorm", post_mlp="post_feedforward_layernorm"
) | qk_norm("NH", "KH")

GEMMA_NAMES = renamed(
    LLAMA_NAMES,
    pre_attention="input_layernorm",
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)
PLAIN_NAMES = {path: name for path, name in LLAMA_NAMES.items() if path != "blocks.mlp.gate.w"}

ROUTER_BIAS = {"blocks.mlp.router.bias": Name("model.layers.{}.mlp.gate.e_score_correction_bias", "Y")}
SHARED_NAMES = {
    f"blocks.mlp.shared.{part}.w": Name(f"model.layers.{{}}.mlp.shared_experts.{part}_proj.weight", dims)
    for part, dims in (("gate", "U,D"), ("up", "U,D"), ("down", "D,U"))
}
# A shared expert with a gate, as Qwen has it.
GATED_SHARED_NAMES = {
    **{path: replace(name, tensor=name.tensor.replace("experts", "expert")) for path, name in SHARED_NAMES.items()},
    "blocks.mlp.shared_gate.w": Name("model.layers.{}.mlp.shared_expert_gate.weight", "o,D"),
}
# Experts as DeepSeek-V3 has them: a sigmoid for each, groups, a bias in the choice, a shared one, dense first layers.
DEEPSEEK_KEYS = {
    "mlp.num_experts": "n_routed_experts", "mlp.experts_per_token": "num_experts_per_tok",
    "mlp.expert_dim": "moe_intermediate_size", "mlp.dense_layers": "first_k_dense_replace",
    "mlp.normalized": "norm_topk_prob", "mlp.scale": "routed_scaling_factor", "mlp.num_groups": "n_group",
    "mlp.groups_per_token": "topk_group",
}  # fmt: skip
DEEPSEEK_FIXED = {
    "hidden_act": ("silu",), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
}  # fmt: skip
NEXT_TOKENS = (r"model\.layers\.{num_layers}\.",)  # layers behind the last one, which predict further tokens

# Of models that also see: beginnings of the decoder's tensors in their files, and the tensors of their other parts.
SEEING_NAMES = (("language_model.", ""), ("model.language_model.", "model."))
SEEING_PARTS = (r"(model\.)?vision_tower\.", r"(model\.)?multi_modal_projector\.")
