"""Gemma 2 at Hugging Face."""

from tunix.families.family import Family
from tunix.families.shared_names import GEMMA_NAMES, LLAMA_KEYS

FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names=GEMMA_NAMES,
    keys=LLAMA_KEYS | {
        "query_scale": "query_pre_attn_scalar", "sliding_window": "sliding_window",
        "attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping",
    },
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",), "hidden_act": ("gelu_pytorch_tanh",),
        "attention_bias": (False,), "use_bidirectional_attention": (None, False),
    },
    absent={
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 2, "rope_theta": 1e4, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)  # fmt: skip
