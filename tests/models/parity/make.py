"""Make the models of this folder: tiny, random, by transformers, with what transformers says of them.

    make parity TRANSFORMERS_PYTHON=python        (one that has torch and transformers; the tests need neither)

Each folder is a model as Hugging Face keeps one (config.json, model.safetensors) beside `expected.safetensors`: tokens
[B, T], segments and positions of the same rows packed, float32 logits of both, and what greedy generation says after
prompts of unequal length. Weights are bfloat16 numbers, so that every dtype holds them exactly; norms and biases are
random too.
"""

import argparse
import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
TWO = SIZE | {"num_hidden_layers": 2}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
EVERY_THIRD = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(7)]
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LLAMA_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
OLMO_ROPE = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


def gemma3(window: int, layers: list[str] = EVERY_THIRD) -> transformers.PreTrainedConfig:
    sizes = SIZE | {"num_hidden_layers": len(layers)}
    return transformers.Gemma3TextConfig(
        **sizes, vocab_size=96, num_key_value_heads=2, head_dim=16, sliding_window=window, layer_types=layers,
        query_pre_attn_scalar=24, rope_parameters=GEMMA_ROPE,
    )  # fmt: skip


def gemma3_vision() -> transformers.PreTrainedConfig:
    """An image is 24 x 24 pixels, 36 patches and 9 soft tokens, more than a window."""
    tower = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=24, patch_size=4,
        vision_use_head=False,
    )  # fmt: skip
    return transformers.Gemma3Config(
        text_config=gemma3(5, EVERY_THIRD[:3]), vision_config=tower, mm_tokens_per_image=9, boi_token_index=90,
        eoi_token_index=91, image_token_index=IMAGE,
    )  # fmt: skip


BEGIN, END, IMAGE, IMAGE_TOKENS = 90, 91, 92, 9  # tokens around images, and of one
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


def qwen3_vl() -> transformers.PreTrainedConfig:
    """A tower for images of any size, which gives features behind two of its four layers."""
    tower = {
        "depth": 4, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4, "out_hidden_size": 32,
        "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    text = SIZE | {
        "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": QWEN_ROPE,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return transformers.Qwen3VLConfig(
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=93, vision_start_token_id=BEGIN,
        vision_end_token_id=END, tie_word_embeddings=True,
    )  # fmt: skip


def smolvlm(kind: type) -> transformers.PreTrainedConfig:
    """Tiles of 26 x 26 pixels, of which 36 patches see 24 x 24, and 9 soft tokens."""
    tower = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 26,
        "patch_size": 4,
    }  # fmt: skip
    text = TWO | {
        "model_type": "llama", "vocab_size": 97, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": PLAIN_ROPE,
    }  # fmt: skip
    return kind(text_config=text, vision_config=tower, image_token_id=IMAGE, scale_factor=2)


HALF_ROPE = PLAIN_ROPE | {"partial_rotary_factor": 0.5}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.5, 3.0, 9.0],
}  # fmt: skip
MINISTRAL_ROPE = YARN | {
    "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1, "max_position_embeddings": 64,
}  # fmt: skip
PROPORTIONAL_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "sliding_attention": PLAIN_ROPE,
}

CONFIGS = {
    "gemma3": gemma3(window=5),
    "gemma3_vision": gemma3_vision(),
    "qwen3_vl": qwen3_vl(),
    "smolvlm": smolvlm(transformers.Idefics3Config),
    "smolvlm2": smolvlm(transformers.SmolVLMConfig),
    "gemma3_long_window": gemma3(window=100, layers=["sliding_attention", "full_attention"]),
    "llama": transformers.LlamaConfig(  # odd vocabulary, untied head
        **SIZE, vocab_size=97, num_key_value_heads=2, rms_norm_eps=1e-5, rope_parameters=LLAMA_ROPE,
    ),
    "llama_linear": transformers.LlamaConfig(  # tied head
        **TWO, vocab_size=96, num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ),
    "qwen3": transformers.Qwen3Config(
        **SIZE, vocab_size=96, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, rope_parameters=YARN,
    ),
    "olmo2": transformers.Olmo2Config(
        **SIZE, vocab_size=96, num_key_value_heads=2, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "qwen2": transformers.Qwen2Config(  # odd vocabulary, biases of queries, keys and values
        **TWO, vocab_size=97, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=PLAIN_ROPE,
    ),
    "seed_oss": transformers.SeedOssConfig(
        **TWO, vocab_size=96, num_key_value_heads=2, head_dim=16, residual_dropout=0.0, rope_parameters=PLAIN_ROPE,
    ),
    "mistral": transformers.MistralConfig(  # every layer local
        **TWO, vocab_size=96, num_key_value_heads=1, head_dim=16, sliding_window=5, rope_parameters=PLAIN_ROPE,
    ),
    "phi3": transformers.Phi3Config(  # q, k, v in one tensor, gate and up in another
        **TWO, vocab_size=96, num_key_value_heads=2, original_max_position_embeddings=64, rope_parameters=PLAIN_ROPE,
    ),
    "smollm3": transformers.SmolLM3Config(  # every other layer without positions
        **SIZE, vocab_size=97, num_key_value_heads=2, no_rope_layer_interval=2, rope_parameters=PLAIN_ROPE,
    ),
    "olmo3": transformers.Olmo3Config(
        **SIZE, vocab_size=96, num_key_value_heads=2, sliding_window=5, layer_types=EVERY_THIRD[:3],
        rope_parameters=OLMO_ROPE,
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(  # the first layer is dense
        **TWO, vocab_size=96, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[0], rope_parameters=PLAIN_ROPE,
    ),
    "olmoe": transformers.OlmoeConfig(  # weights of experts that do not add up to 1
        **TWO | {"intermediate_size": 16}, vocab_size=97, num_key_value_heads=2, num_experts=6, num_experts_per_tok=3,
        rope_parameters=PLAIN_ROPE,
    ),
    "mixtral": transformers.MixtralConfig(
        **TWO | {"intermediate_size": 16}, vocab_size=96, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        rope_parameters=PLAIN_ROPE,
    ),
    "gemma2": transformers.Gemma2Config(  # scores and logits well beyond their caps
        **TWO, vocab_size=97, num_key_value_heads=2, head_dim=16, sliding_window=5, query_pre_attn_scalar=1,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0, rope_parameters=PLAIN_ROPE,
    ),
    "glm4": transformers.Glm4Config(
        **TWO, vocab_size=96, num_key_value_heads=2, head_dim=16, rope_parameters=HALF_ROPE,
    ),
    "nemotron": transformers.NemotronConfig(
        **TWO, vocab_size=97, num_key_value_heads=1, rope_parameters=HALF_ROPE,
    ),
    "granite": transformers.GraniteConfig(
        **TWO, vocab_size=96, num_key_value_heads=2, tie_word_embeddings=True, attention_multiplier=0.25,
        embedding_multiplier=3.0, residual_multiplier=0.22, logits_scaling=2.0, rope_parameters=PLAIN_ROPE,
    ),
    "exaone4": transformers.Exaone4Config(  # the global layer has no positions
        **SIZE, vocab_size=96, num_key_value_heads=2, sliding_window=5, layer_types=EVERY_THIRD[:3],
        sliding_window_pattern="LLG", rope_parameters=PLAIN_ROPE,
    ),
    "ministral3": transformers.Ministral3Config(
        **TWO, vocab_size=97, num_key_value_heads=2, head_dim=16, rope_parameters=MINISTRAL_ROPE,
    ),
    "phi3_long": transformers.Phi3Config(  # the divisors of sequences that are longer than the original context
        **TWO, vocab_size=96, num_key_value_heads=2, original_max_position_embeddings=2, rope_parameters=LONG_ROPE,
    ),
    "phi3_short": transformers.Phi3Config(  # those of sequences that are not
        **TWO | {"num_hidden_layers": 1, "max_position_embeddings": 128}, vocab_size=96, num_key_value_heads=2,
        original_max_position_embeddings=64, rope_parameters=LONG_ROPE,
    ),
    "gpt_oss": transformers.GptOssConfig(  # the experts' gates reach the clamp
        **TWO | {"intermediate_size": 16}, vocab_size=97, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=5, rope_parameters=YARN | {"truncate": False},
    ),
    "deepseek_v3": transformers.DeepseekV3Config(  # latents whose widths nothing divides
        **TWO, vocab_size=97, num_key_value_heads=4, q_lora_rank=11, kv_lora_rank=9, qk_nope_head_dim=10,
        qk_rope_head_dim=6, v_head_dim=7, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1, num_mtp_layers=0,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v3_whole_queries": transformers.DeepseekV3Config(  # of the smaller models of its type
        **TWO, vocab_size=96, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=9, qk_nope_head_dim=10,
        qk_rope_head_dim=6, v_head_dim=16, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=1, num_mtp_layers=0, rope_parameters=PLAIN_ROPE,
    ),
    "apertus": transformers.ApertusConfig(
        **TWO, vocab_size=97, num_key_value_heads=2, rope_parameters=LLAMA_ROPE,
    ),
    "glm4_moe": transformers.Glm4MoeConfig(
        **TWO, vocab_size=96, num_key_value_heads=2, head_dim=16, moe_intermediate_size=16, n_routed_experts=6,
        num_experts_per_tok=3, n_group=3, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.5, num_mtp_layers=0,
        attention_bias=True, use_qk_norm=True, rope_parameters=HALF_ROPE,
    ),
    "llama4": transformers.Llama4TextConfig(  # chunks shorter than the sequences; weights of two experts
        **SIZE | {"intermediate_size": 16}, vocab_size=97, num_key_value_heads=2, head_dim=16, intermediate_size_mlp=48,
        num_local_experts=4, num_experts_per_tok=2, no_rope_layer_interval=3, attention_chunk_size=5, floor_scale=4,
        rope_parameters=LLAMA_ROPE,
    ),
    "llama4_turns": transformers.Llama4TextConfig(  # every other layer has experts
        **SIZE | {"intermediate_size": 16, "num_hidden_layers": 4}, vocab_size=96, num_key_value_heads=1, head_dim=16,
        intermediate_size_mlp=48, num_local_experts=4, interleave_moe_layer_step=2, use_qk_norm=False,
        attention_chunk_size=5, floor_scale=3, rope_parameters=PLAIN_ROPE,
    ),
    "qwen3_5": transformers.Qwen3_5TextConfig(  # linear attention in every other layer; widths that nothing divides
        **SIZE | {"num_hidden_layers": 4}, vocab_size=97, num_key_value_heads=2, head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=5, linear_value_head_dim=7, rope_parameters=HALF_ROPE,
    ),
    "qwen3_5_rest": transformers.Qwen3_5TextConfig(  # layers behind the last one with attention; a filter of 3 tokens
        **SIZE | {"num_hidden_layers": 4}, vocab_size=96, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_conv_kernel_dim=3, rope_parameters=HALF_ROPE,
    ),
    "gemma4": transformers.Gemma4TextConfig(  # wider global heads, fewer of them, whose values are their keys
        **SIZE | {"num_hidden_layers": 6}, vocab_size=97, num_key_value_heads=2, head_dim=6, global_head_dim=10,
        num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=5, layer_types=EVERY_THIRD[:6],
        final_logit_softcapping=3.0, hidden_size_per_layer_input=0, rope_parameters=PROPORTIONAL_ROPE,
    ),
    "gemma4_unified": transformers.Gemma4UnifiedTextConfig(  # as many global heads as local ones, with values
        **TWO, vocab_size=96, num_key_value_heads=2, head_dim=8, global_head_dim=16, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3_next": transformers.Qwen3NextConfig(  # three value heads for each key head
        **SIZE | {"num_hidden_layers": 4}, vocab_size=97, num_key_value_heads=2, head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=5, linear_value_head_dim=7, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24, rope_parameters=HALF_ROPE,
    ),
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=96, num_key_value_heads=1, head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=3, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, max_position_embeddings=64,
        rope_parameters=HALF_ROPE,
    ),
    "gemma4_moe": transformers.Gemma4TextConfig(  # experts beside an MLP
        **SIZE | {"num_hidden_layers": 4}, vocab_size=96, num_key_value_heads=2, head_dim=8, global_head_dim=12,
        num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=5, enable_moe_block=True, num_experts=6,
        top_k_experts=2, moe_intermediate_size=16, layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=0, rope_parameters=PROPORTIONAL_ROPE,
    ),
    "gemma4_small": transformers.Gemma4TextConfig(  # the last 3 of 6 layers share keys and values; inputs of each layer
        **SIZE | {"num_hidden_layers": 6}, vocab_size=97, num_key_value_heads=2, head_dim=6, global_head_dim=10,
        sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 3, vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=5, num_kv_shared_layers=3, use_double_wide_mlp=True, final_logit_softcapping=3.0,
        rope_parameters=PROPORTIONAL_ROPE,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_positions=64, n_embd=32, n_layer=3, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    ),
}  # fmt: skip
OFFSET_NORMS = ("gemma2", "gemma3", "nemotron", "qwen3_5", "qwen3_next")  # whose scales stand around 0
ROUTER_BIAS = "e_score_correction_bias"  # float32 in the files, whatever the weights are
PROMPTS, NEW_TOKENS = (3, 11, 7), 16


def _class_of(config: transformers.PreTrainedConfig) -> type:
    # AutoModelForCausalLM knows Gemma 3 alone of those that see.
    sees = config.model_type in ("qwen3_vl", "idefics3", "smolvlm")
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def random_model(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, None, None
    model = _class_of(config).from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = weight.ndim == 1 and name.endswith(("weight", "router.scale", "per_expert_scale"))
            around = 1.0 if is_norm and not config.model_type.startswith(OFFSET_NORMS) else 0.0
            weight.normal_(around, 0.3 if weight.ndim == 1 else 0.2)
            if config.model_type == "gpt_oss" and name.endswith("gate_up_proj"):
                weight.mul_(5)
            weight.copy_(weight.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith(ROUTER_BIAS):
                buffer.normal_(0.0, 0.3)
            if name.endswith("layer_scalar"):
                buffer.copy_(buffer.normal_(1.0, 0.3).bfloat16())
    return model


@torch.no_grad()
def expected(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    words = model.config.get_text_config().vocab_size
    tokens = torch.randint(0, words, (2, 24))
    lengths = torch.tensor([[9, 15], [20, 4]])
    segments = torch.stack([torch.repeat_interleave(torch.arange(2), row) for row in lengths])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    packed = torch.cat([
        torch.cat([model(part[None]).logits for part in row.split(cut.tolist())], 1)
        for row, cut in zip(tokens, lengths, strict=True)
    ])  # fmt: skip
    prompts = [torch.randint(0, words, (1, length)) for length in PROMPTS]
    greedy = [
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False)
        for prompt in prompts
    ]
    return {
        "tokens": tokens, "logits": model(tokens).logits, "segments": segments, "positions": positions,
        "packed_logits": packed, **{f"greedy_{n}": words[0] for n, words in enumerate(greedy)},
    }  # fmt: skip


def gradients(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the summed next-token loss of `tokens`."""
    model.zero_grad()
    logits = model(tokens).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    return {f"gradient.{name}": weight.grad.clone() for name, weight in model.named_parameters()}


def with_images(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Two rows with two images and with one: what it says of them, gradients, and greedy generation after one."""
    text, image = torch.randint(0, BEGIN, (2, 24)), [BEGIN, *[IMAGE] * IMAGE_TOKENS, END]
    tokens = text.clone()
    index = torch.full_like(text, -1)
    for row, start, slot in ((0, 1, 0), (0, 13, 1), (1, 5, 0)):
        tokens[row, start : start + len(image)] = torch.tensor(image)
        index[row, start + 1 : start + 1 + IMAGE_TOKENS] = slot * IMAGE_TOKENS + torch.arange(IMAGE_TOKENS)
    size = model.config.vision_config.image_size
    images = torch.randint(0, 256, (2, 2, size, size, 3), dtype=torch.uint8)
    pixels = ((images.float() / 255 - 0.5) / 0.5).permute(0, 1, 4, 2, 3)
    kinds = (index >= 0).long()
    if is_gemma := model.config.model_type == "gemma3":
        seen, one = torch.stack([pixels[0, 0], pixels[0, 1], pixels[1, 0]]), pixels[1, :1]
        both, second = {"token_type_ids": kinds}, {"token_type_ids": kinds[1:, :19]}
    else:
        seen, one, both, second = pixels.clone(), pixels[1:, :1], {}, {}
        seen[1, 1] = 0  # no image
    model.zero_grad()
    logits = model(tokens, pixel_values=seen, **both).logits
    log_probs = logits[:, :-1].log_softmax(-1)
    (-log_probs.gather(-1, tokens[:, 1:, None]).sum()).backward()
    gradients = {
        f"image_gradient.{published(name) if is_gemma else name}": weight.grad.clone()
        for name, weight in model.named_parameters()
        if not is_gemma or "vision_tower" in name or "multi_modal" in name
    }
    prompt = tokens[1:, :19]
    greedy = model.generate(
        prompt, pixel_values=one, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False,
        **second,
    )  # fmt: skip
    return gradients | {
        "image_tokens": tokens, "image_index": index, "images": images, "image_logits": logits.detach(),
        "image_greedy": greedy[0],
    }  # fmt: skip


GRIDS = (((4, 6), (2, 4)), ((4, 4),))  # of the images of each row: patches in a column and in a row


def with_images_of_any_size(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Two rows with two images and with one, as `with_images`; patches stand in the order in which they are merged."""
    text, slots = torch.randint(0, BEGIN, (2, 24)), 48
    tokens, index = text.clone(), torch.full_like(text, -1)
    patches = torch.zeros(2, slots, 3, 4, 4, dtype=torch.uint8)
    sizes = torch.zeros(2, 2, 2, dtype=torch.long)
    for row, (grids, starts) in enumerate(zip(GRIDS, ((1, 13), (5,)), strict=True)):
        first = 0
        for slot, ((rows, columns), start) in enumerate(zip(grids, starts, strict=True)):
            count = rows * columns
            patches[row, first : first + count] = torch.randint(0, 256, (count, 3, 4, 4))
            sizes[row, slot] = torch.tensor([rows, columns])
            image = [BEGIN, *[IMAGE] * (count // 4), END]
            tokens[row, start : start + len(image)] = torch.tensor(image)
            index[row, start + 1 : start + 1 + count // 4] = first // 4 + torch.arange(count // 4)
            first += count
    grid = torch.tensor([(1, *grid) for grids in GRIDS for grid in grids])
    counts = [sum(rows * columns for rows, columns in grids) for grids in GRIDS]
    pixels = (patches.float() / 255 - 0.5) / 0.5
    seen = torch.cat([pixels[row, :count] for row, count in enumerate(counts)])
    # Both frames of a patch in time are the same image.
    seen = seen[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)
    kinds = (index >= 0).long()
    model.zero_grad()
    logits = model(tokens, pixel_values=seen, image_grid_thw=grid, mm_token_type_ids=kinds).logits
    log_probs = logits[:, :-1].log_softmax(-1)
    (-log_probs.gather(-1, tokens[:, 1:, None]).sum()).backward()
    gradients = {f"image_gradient.{name}": weight.grad.clone() for name, weight in model.named_parameters()}
    positions, _ = model.model.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grid)
    prompt = tokens[1:, :19]
    greedy = model.generate(
        prompt, pixel_values=seen[counts[0] :], image_grid_thw=grid[2:], mm_token_type_ids=kinds[1:, :19],
        attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False,
    )  # fmt: skip
    return gradients | {
        "image_tokens": tokens, "image_index": index, "images": patches, "image_grids": sizes,
        "image_positions": positions.permute(1, 2, 0), "image_logits": logits.detach(),
        "image_greedy": greedy[0],
    }  # fmt: skip


def published(name: str) -> str:
    """Return the name in published files of a tensor that transformers 5 calls otherwise."""
    name = name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--only", nargs="+", default=list(CONFIGS), choices=CONFIGS, help="models to make")
    args = parser.parse_args()
    folder = args.folder
    warnings.simplefilter("ignore")
    info = {"made_by": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    for name in args.only:
        config = CONFIGS[name]
        model = random_model(config)
        tensors = expected(model)
        if name == "qwen3":
            tensors |= gradients(model, tensors["tokens"])
        if name in ("gemma3_vision", "smolvlm"):
            tensors |= with_images(model)
        if name == "qwen3_vl":
            tensors |= with_images_of_any_size(model)
        tensors = {key: value.int() if value.dtype == torch.int64 else value for key, value in tensors.items()}
        biases = {path: buffer.clone() for path, buffer in model.named_buffers() if path.endswith(ROUTER_BIAS)}
        model.bfloat16()
        for path, bias in biases.items():
            model.get_submodule(path.rpartition(".")[0])._buffers[ROUTER_BIAS] = bias
        # Published files of Qwen 3.5 have all experts of a layer in one tensor, which it keeps of files it has read.
        model.save_pretrained(folder / name, save_original_format=name != "qwen3_5_moe")
        if name == "gemma3_vision":  # transformers 5 leaves a part of the names out that published files have
            weights = folder / name / "model.safetensors"
            whole = {
                key.replace("vision_tower.", "vision_tower.vision_model."): x for key, x in load_file(weights).items()
            }
            save_file(whole, weights, {"format": "pt"})
        (folder / name / "generation_config.json").unlink(missing_ok=True)
        save_file(
            {key: value.contiguous() for key, value in tensors.items()}, folder / name / "expected.safetensors", info
        )
        size = sum(path.stat().st_size for path in (folder / name).iterdir())
        print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
