"""Apertus at Hugging Face."""

from tunix.families.family import Family, Name
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, PLAIN_NAMES, qk_norm, renamed

FAMILY = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    names=renamed(PLAIN_NAMES, pre_attention="attention_layernorm", pre_mlp="feedforward_layernorm")
    | qk_norm("H", "H") | {
        "blocks.mlp.activation.positive": Name("model.layers.{}.mlp.act_fn.alpha_p", "o"),
        "blocks.mlp.activation.negative": Name("model.layers.{}.mlp.act_fn.alpha_n", "o"),
    },
    keys=LLAMA_KEYS,
    fixed={"hidden_act": ("xielu",), "attention_bias": (False,), "mlp_bias": (False,), "post_norm": (False,),
           "qk_norm": (True,)},
    absent=LLAMA_ABSENT | {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 1.2e7},
    constants={"model.layers.{}.mlp.act_fn.beta": 0.5, "model.layers.{}.mlp.act_fn.eps": -1e-6},
)  # fmt: skip
