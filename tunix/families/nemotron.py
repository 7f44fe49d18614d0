"""Nemotron at Hugging Face."""

from tunix.families.family import Family, Name
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, PLAIN_NAMES

FAMILY = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    names=PLAIN_NAMES | {
        "blocks.pre_attention.bias.b": Name("model.layers.{}.input_layernorm.bias", "D"),
        "blocks.pre_mlp.bias.b": Name("model.layers.{}.post_attention_layernorm.bias", "D"),
        "final_norm.bias.b": Name("model.norm.bias", "D"),
    },
    keys=LLAMA_KEYS | {"norm_eps": "norm_eps"},
    fixed={"hidden_act": ("relu2",), "attention_bias": (False,), "mlp_bias": (False,)},
    absent=LLAMA_ABSENT | {"max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    synonyms={"rope_percent": "partial_rotary_factor", "rope_percentage": "partial_rotary_factor"},
)  # fmt: skip
