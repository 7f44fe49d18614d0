"""A tiny random model of a config.json, by transformers, and what transformers says of it. Run as a file.

    PYTHON tiny_by_transformers.py FOLDER OUTPUT        PYTHON has torch and transformers; tunix is not imported

FOLDER has a config.json. OUTPUT gets the model, with weights and sizes of its own, and `expected.safetensors`: tokens
[2, T], their logits, prompts, greedy answers. OUTPUT/gradients has the gradients under the names of the weights, and
OUTPUT/depth/N the model of the first N layers, with its logits.
"""

import copy
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

LENGTH, PROMPT, NEW, VOCAB = 24, 6, 8, 96
SIZES = {  # where config.json has the key: (tiny size)
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48,
    "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 64, "sliding_window": 6,
    "moe_intermediate_size": 16, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 11, "kv_lora_rank": 9, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "attention_chunk_size": 6, "floor_scale": 4,
}  # fmt: skip
ORIGINAL, ORIGINAL_LENGTH = "original_max_position_embeddings", 16  # of RoPE that is stretched: below LENGTH
FACTORS = ("short_factor", "long_factor")  # of LongRoPE: one entry for each pair of a head's numbers
LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")  # one entry for each layer
MAX_LAYERS = 8


def shrink(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """Return the config with tiny sizes, and as many layers as show each of its kinds."""
    text = copy.deepcopy(config.get_text_config())
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    kinds = getattr(text, "layer_types", None) or [None]
    dense = getattr(text, "first_k_dense_replace", None)
    period = max(kinds.index(kind) for kind in set(kinds)) + 1
    num_layers = min(text.num_hidden_layers, MAX_LAYERS, max(2, period))
    for key, size in SIZES.items():
        if getattr(text, key, None) is not None:
            setattr(text, key, size)
    if getattr(text, "qk_rope_head_dim", None) is not None:  # transformers derives these two
        text.head_dim, text.qk_head_dim = text.qk_rope_head_dim, text.qk_nope_head_dim + text.qk_rope_head_dim
    if kv_heads is not None:
        text.num_key_value_heads = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    if dense:
        text.first_k_dense_replace = 1
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, key, None)
    if hasattr(text, "quantization_config"):
        del text.quantization_config
    shrink_rope(text)
    return reduce_depth(text, num_layers)


def shrink_rope(text: transformers.PreTrainedConfig) -> None:
    """Let the rotations fit into tiny heads, and the texts be longer than their original context."""
    if getattr(text, ORIGINAL, None) is not None:
        setattr(text, ORIGINAL, ORIGINAL_LENGTH)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):  # those of each kind of layers, in some families
        if not isinstance(each, dict):
            continue
        if ORIGINAL in each:
            each[ORIGINAL] = ORIGINAL_LENGTH
        num_pairs = int(head_dim * each.get("partial_rotary_factor", 1)) // 2
        each.update({key: each[key][:num_pairs] for key in FACTORS if key in each})


def reduce_depth(config: transformers.PreTrainedConfig, num_layers: int) -> transformers.PreTrainedConfig:
    """Return the config of the first layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = num_layers
    for key in LISTS:
        if getattr(config, key, None):
            setattr(config, key, getattr(config, key)[:num_layers])
    if getattr(config, "moe_layers", None):
        config.moe_layers = [layer for layer in config.moe_layers if layer < num_layers]
    return config


def make(config: transformers.PreTrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases, which start as zeros and ones
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def main() -> None:
    torch.set_num_threads(1)
    source, output = map(Path, sys.argv[1:])
    config = shrink(transformers.AutoConfig.from_pretrained(source))
    model = make(config)
    model.save_pretrained(output)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    expected = {"tokens": tokens.int(), "prompts": tokens[:, :PROMPT].int(), "logits": logits.detach()}
    # Gradients have the names that weights have in the files, so they are written as a model of its own.
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, of in zip(gradients.parameters(), model.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(of) if of.grad is None else of.grad)
    gradients.save_pretrained(output / "gradients")
    with torch.no_grad():
        drawn = model.generate(tokens[:, :PROMPT], max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        expected["greedy"] = drawn[:, PROMPT:].int()
        for depth in range(1, config.num_hidden_layers):
            shorter = make(reduce_depth(config, depth))
            shorter.load_state_dict(model.state_dict(), strict=False)
            shorter.save_pretrained(output / "depth" / str(depth))
            # Without a cache: transformers has none for layers of linear attention alone.
            logits = shorter(tokens, use_cache=False).logits
            save_file({"logits": logits}, output / "depth" / str(depth) / "expected.safetensors")
    save_file(expected, output / "expected.safetensors")


if __name__ == "__main__":
    main()
