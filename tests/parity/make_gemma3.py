"""Make gemma3.npz: a tiny random Gemma 3 of transformers, its weights and its logits. Needs torch and transformers.

    pip install torch transformers numpy && python tests/parity/make_gemma3.py

The file is kept in the repository, so that the tests need neither. Every weight is random, norm scales too; windows
are shorter than the sequence, the global layers' positions are scaled, two query heads share a key/value head.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

config = transformers.Gemma3TextConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, sliding_window=5, query_pre_attn_scalar=24, rms_norm_eps=1e-6,
    layer_types=["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(7)],
    rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    attn_implementation="eager",
)  # fmt: skip
torch.manual_seed(0)
model = transformers.Gemma3ForCausalLM(config).float().eval()
with torch.no_grad():
    for name, weight in model.named_parameters():
        weight.normal_(std=0.3 if "norm" in name else 0.2)
    tokens = torch.randint(0, config.vocab_size, (2, 24))
    logits = model(tokens).logits
weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
about = f"transformers {transformers.__version__}, torch {torch.__version__}"
np.savez_compressed(
    Path(__file__).with_name("gemma3.npz"), tokens=tokens.numpy(), logits=logits.numpy(), about=about, **weights
)
print(about, sum(weight.size for weight in weights.values()), "parameters")
