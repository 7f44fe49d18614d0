"""Llama 4's text decoder at Hugging Face."""

from tunix.families.family import Family, Name
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES, SEEING_NAMES, SEEING_PARTS

MLP = "model.layers.{}.feed_forward"


def mlp_names(ours: str, theirs: str, width: str) -> dict[str, Name]:
    """Return the names of a gated MLP of this width."""
    dims = {"gate": f"{width},D", "up": f"{width},D", "down": f"D,{width}"}
    return {f"blocks.mlp.{ours}{part}.w": Name(f"{theirs}.{part}_proj.weight", each) for part, each in dims.items()}


FAMILY = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    names=LLAMA_NAMES | mlp_names("", MLP, "F") | mlp_names("shared.", f"{MLP}.shared_expert", "U") | {
        # Experts lie in one tensor [experts, in, out]; torch's linear layers are [out, in].
        "blocks.mlp.router.w": Name(f"{MLP}.router.weight", "Y,D"),
        "blocks.mlp.expert_gate.w": Name(f"{MLP}.experts.gate_up_proj", "X,D,G", 0, ("G", "G"), fused_dim=2),
        "blocks.mlp.expert_up.w": Name(f"{MLP}.experts.gate_up_proj", "X,D,G", 1, ("G", "G"), fused_dim=2),
        "blocks.mlp.expert_down.w": Name(f"{MLP}.experts.down_proj", "X,G,D"),
    },
    keys=LLAMA_KEYS | {
        # intermediate_size is the width of an expert and of the shared one; layers without experts have another.
        "mlp_dim": "intermediate_size_mlp",
        "mlp.expert_dim": "intermediate_size", "mlp.shared_dim": "intermediate_size",
        "mlp.num_experts": "num_local_experts", "mlp.experts_per_token": "num_experts_per_tok",
        "mlp.every": "interleave_moe_layer_step", "sliding_window": "attention_chunk_size",
    },
    fixed={"hidden_act": ("silu",), "attention_bias": (False,), "router_jitter_noise": (0.0,)},
    # Layers with positions attend to chunks of the text, those without positions to all of it: "unrotated".
    absent=LLAMA_ABSENT | {
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
