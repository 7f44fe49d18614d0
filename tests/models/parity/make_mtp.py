"""Make `mtp.safetensors` of three models of this folder: a random layer of multi-token prediction, and what torch says.

    make parity TRANSFORMERS_PYTHON=python        (one that has torch and transformers; the tests need neither)

transformers has no such layer, but it has its parts: the block is one of its decoder layers, the norms are its norms.
They are put together here as DeepSeek-V3's report says (arXiv:2412.19437, section 2.2). The file has the layer under
its published names, and as `expected.*` the loss of the tokens after the next ones, over packed documents, and its
gradients by the layer and by both tables.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent
OWN = {"token": "enorm", "state": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
NEXT = {"token": "pre_fc_norm_embedding", "state": "pre_fc_norm_hidden", "projection": "fc", "norm": "norm"}


def make_layer(model: torch.nn.Module) -> torch.nn.ModuleDict:
    """Return the parts of the layer, of the model's own classes, with random weights."""
    cfg, last = model.config, model.model.layers[-1]
    norm = type(model.model.norm)
    block = type(last)(
        cfg, cfg.num_hidden_layers - 1
    )  # a number in `layer_types` of a layer with attention and experts
    parts = {name: norm(cfg.hidden_size, eps=cfg.rms_norm_eps) for name in ("token", "state", "norm")}
    projection = torch.nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False)
    layer = torch.nn.ModuleDict(parts | {"projection": projection, "block": block})
    generator = torch.Generator().manual_seed(7)
    around = 0.0 if cfg.model_type == "qwen3_next" else 1.0
    with torch.no_grad():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            values = torch.randn(tensor.shape, generator=generator) * (
                0.3 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5
            )
            is_scale = tensor.ndim == 1 and "bias" not in name
            tensor.copy_((values + around if is_scale else values).bfloat16().float())
    return layer


def published_name(name: str, kind: str, number: int) -> str:
    part, _, rest = name.partition(".")
    if kind == "qwen3_next":
        return f"mtp.layers.0.{rest}" if part == "block" else f"mtp.{NEXT[part]}.{rest}"
    return f"model.layers.{number}.{rest}" if part == "block" else f"model.layers.{number}.{OWN[part]}.{rest}"


def split_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor of all experts as the tensors of each, which published files have."""
    before, is_whole, part = name.partition("mlp.experts.")
    if not is_whole:
        return {name: tensor}
    pieces = (
        {"down_proj": tensor}
        if part == "down_proj"
        else dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True))
    )
    return {
        f"{before}mlp.experts.{n}.{key}.weight": matrix.clone()
        for key, each in pieces.items()
        for n, matrix in enumerate(each)
    }


def make(name: str) -> None:
    folder = FOLDER / name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    layer, cfg = make_layer(model).double().eval(), model.config
    rows = load_file(folder / "expected.safetensors")
    tokens, segments = (rows[key].long() for key in ("tokens", "segments"))
    for each in (*layer.parameters(), model.model.embed_tokens.weight, model.lm_head.weight):
        each.requires_grad_(True)
    total = 0.0
    for row in range(len(tokens)):  # each document alone
        for number in segments[row].unique():
            document = tokens[row][segments[row] == number][None]
            if document.shape[1] < 3:
                continue
            states = model.model(input_ids=document).last_hidden_state[:, :-1]
            vectors = model.model.embed_tokens(document)[:, 1:]
            x = layer["projection"](torch.cat([layer["token"](vectors), layer["state"](states)], -1))
            length = x.shape[1]
            places = torch.arange(length)[None]
            mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)[None, None]
            x = layer["block"](
                x, attention_mask=mask, position_ids=places, position_embeddings=model.model.rotary_emb(x, places)
            )
            x = x[0] if isinstance(x, tuple) else x
            logits = model.lm_head(layer["norm"](x))[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, document[0, 2:], reduction="sum")
    total.backward()
    saved = {"expected.loss": total.detach()[None].float()}
    for key, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        published = published_name(key, cfg.model_type, cfg.num_hidden_layers)
        is_bias = "e_score_correction_bias" in key
        saved |= {
            n: t.float().contiguous() if is_bias else t.bfloat16().contiguous()
            for n, t in split_experts(published, tensor.detach()).items()
        }
        if tensor.grad is not None:
            saved |= {f"expected.{n}": t.float().contiguous() for n, t in split_experts(published, tensor.grad).items()}
    saved["expected.model.embed_tokens.weight"] = model.model.embed_tokens.weight.grad.float()
    saved["expected.lm_head.weight"] = model.lm_head.weight.grad.float()
    save_file(saved, folder / "mtp.safetensors")


for each in sys.argv[1:] or ("deepseek_v3", "glm4_moe", "qwen3_next"):
    make(each)
