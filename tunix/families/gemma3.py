"""Gemma 3 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import GEMMA_NAMES, LLAMA_KEYS, SEEING_NAMES, SEEING_PARTS, qk_norm

FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=GEMMA_NAMES | qk_norm("H", "H"),
    keys=LLAMA_KEYS | {"query_scale": "query_pre_attn_scalar", "sliding_window": "sliding_window"},
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,),
        "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    absent={
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    local_rope=True,
    renamed=SEEING_NAMES,
    ignored=SEEING_PARTS,
)  # fmt: skip
