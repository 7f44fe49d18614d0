"""Gemma 4 at Hugging Face: the text decoder of its models with experts, which have the model_type of the others."""

from dataclasses import replace

from tunix.families.family import Name
from tunix.families.gemma4 import FAMILY as GEMMA4

LAYER = "model.layers.{}"
NORMS = {
    "pre_dense": "pre_feedforward_layernorm", "post_dense": "post_feedforward_layernorm_1",
    "pre_experts": "pre_feedforward_layernorm_2", "post_experts": "post_feedforward_layernorm_2",
}  # fmt: skip
DENSE = {"gate": "F,D", "up": "F,D", "down": "D,F"}
EXPERT_KEYS = {
    "mlp.num_experts": "num_experts", "mlp.experts_per_token": "top_k_experts",
    "mlp.expert_dim": "moe_intermediate_size",
}  # fmt: skip
# Parts of the small dense models, which models with experts do not have.
SHARED_KEYS: dict[str, tuple] = {"num_kv_shared_layers": (0,), "use_double_wide_mlp": (False,)}
NO_LAYER_PARTS = {"hidden_size_per_layer_input": (0, None), **SHARED_KEYS}

FAMILY = replace(
    GEMMA4,
    signature={"enable_moe_block": True},
    names=GEMMA4.names | {
        **{f"blocks.mlp.{ours}.scale": Name(f"{LAYER}.{theirs}.weight", "D") for ours, theirs in NORMS.items()},
        **{f"blocks.mlp.dense.{x}.w": Name(f"{LAYER}.mlp.{x}_proj.weight", dims) for x, dims in DENSE.items()},
        "blocks.mlp.experts.router.w": Name(f"{LAYER}.router.proj.weight", "Y,D"),
        "blocks.mlp.experts.router.norm.scale": Name(f"{LAYER}.router.scale", "D"),
        "blocks.mlp.experts.router.expert_scales": Name(f"{LAYER}.router.per_expert_scale", "Y"),
        "blocks.mlp.experts.expert_gate.w": Name(f"{LAYER}.experts.gate_up_proj", "X,G,D", 0, ("G", "G"), fused_dim=1),
        "blocks.mlp.experts.expert_up.w": Name(f"{LAYER}.experts.gate_up_proj", "X,G,D", 1, ("G", "G"), fused_dim=1),
        "blocks.mlp.experts.expert_down.w": Name(f"{LAYER}.experts.down_proj", "X,D,G"),
    },
    keys=GEMMA4.keys | EXPERT_KEYS,
    fixed={key: values for key, values in GEMMA4.fixed.items() if key not in EXPERT_KEYS.values()} | NO_LAYER_PARTS
    | {"enable_moe_block": (True,)},
    absent={key: value for key, value in GEMMA4.absent.items() if key not in SHARED_KEYS},
)  # fmt: skip
