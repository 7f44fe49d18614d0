"""EXAONE 4 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import LLAMA_ABSENT, LLAMA_KEYS, LLAMA_NAMES, qk_norm, renamed

FAMILY = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    names=renamed(
        LLAMA_NAMES, post_attention="post_attention_layernorm", post_mlp="post_feedforward_layernorm"
    ) | qk_norm("H", "H"),
    keys=LLAMA_KEYS | {"sliding_window": "sliding_window"},
    fixed={"hidden_act": ("silu",)},
    absent=LLAMA_ABSENT | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    unrotated_global=True,
)  # fmt: skip
