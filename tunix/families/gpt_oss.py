"""GPT-OSS at Hugging Face."""

from tunix.families.family import Family, Name
from tunix.families.shared_names import EVERY_MLP, EXPERT_KEYS, LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES, qkv_biases


def gate_and_up(dims: str, parameter: str, tensor: str) -> dict[str, Name]:
    """Return the names of gates and of what they gate where one tensor holds both, number by number."""
    last = dims.count(",")
    return {
        f"blocks.mlp.{parameter.format(part)}": Name(tensor, dims, number, ("G", "G"), last, interleaved="G")
        for number, part in enumerate(("gate", "up"))
    }


FAMILY = Family(
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
    keys=LLAMA_KEYS | EXPERT_KEYS | EVERY_MLP | {
        "mlp.num_experts": "num_local_experts", "sliding_window": "sliding_window",
    },
    fixed={
        "hidden_act": ("silu",), "attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,),
    },
    absent=LLAMA_ABSENT | {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64,
        "num_key_value_heads": 8, "sliding_window": 128, "sliding_window_pattern": 2, "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    synonyms={"experts_per_token": "num_experts_per_tok"},
)  # fmt: skip
