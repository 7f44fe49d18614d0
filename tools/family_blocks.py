"""Write docs/families.md, what the block of each family computes, from conf/model: `make docs`."""

import re
from collections.abc import Callable
from pathlib import Path

from tools.model_table import family_title, list_sizes
from tunix.config import PROJECTIONS, Model
from tunix.config.compose import compose
from tunix.config.layers import ExpertsMlp
from tunix.config.vision import AnyVision, Gemma3Vision, SmolVision

PAGE = Path("docs/families.md")
HEAD = """# Blocks of families

This page is for everybody who asks what a model computes. Each section is a family of `conf/model/family/`: the formula
of its decoder, its parts, and the numbers of its published sizes. Where sizes differ in a part, the row names them.
[Models](models.md) says how to use a family, and on which meshes.

In the formulas, `x` is the residual stream [B, T, D], and each `norm` has weights of its own. N is the number of query
heads, K that of key/value heads, H the width of a head, s a score of attention.

<!-- made by make docs: edit conf/model or tools/family_blocks.py, not this page -->
"""
NORMS = {
    "rms": "RMSNorm",
    "rms_unit_offset": "RMSNorm with scale 1 + w",
    "layer": "LayerNorm with bias",
    "layer_unit_offset": "LayerNorm with scale 1 + w and bias",
}
PLACES = {
    "pre": "before attention and MLP",
    "post": "after attention and MLP, none before",
    "pre_and_post": "before and after attention and MLP (sandwich)",
}
QK_NORMS = {
    "none": "no QK norm",
    "per_head": "QK norm of each head",
    "all_heads": "QK norm of all heads together",
    "after_rotation": "QK norm after RoPE, without weights, in layers with RoPE",
}
GATED = {"silu": "SwiGLU", "gelu": "GeGLU", "clamped_silu": "clamped SwiGLU"}
PLAIN = {"gelu": "GELU", "relu2": "squared ReLU", "xielu": "xIELU, with two trained numbers", "silu": "SiLU"}
NUMBERS = {
    "layers": "num_layers",
    "width D": "embed_dim",
    "MLP width": "mlp_dim",
    "heads N": "num_heads",
    "KV heads K": "num_kv_heads",
    "head H": "head_dim",
    "vocabulary": "vocab_size",
    "context": "context_length",
}


def page() -> str:
    """Return docs/families.md as Markdown: a section for each family, in the order of its name."""
    sections = []
    for name, sizes in sorted(list_sizes().items()):
        models = {size: load_model(size) for size in sizes}
        sections.append(f"\n## {family_title(name)} (`{name}`)\n\n{describe_family(models)}")
    return HEAD + "".join(sections)


def load_model(size: str) -> Model:
    """Return the section `model` of the config of a published size."""
    return compose([f"model={size}", "model.mesh_shape=[[1],[fsdp]]"]).config.model


def describe_family(models: dict[str, Model]) -> str:
    """Return the section of a family without its title; `models` are its sizes."""
    formulas = _group(models, list_formula)
    parts = []
    for formula, sizes in formulas.items():
        title = f"{_quote(sizes)}:\n\n" if len(formulas) > 1 else ""
        parts.append(f"{title}```text\n{formula}\n```\n")
    rows = ["| part | |\n|---|---|"]
    for part, describe in PARTS.items():
        texts = _group(models, describe)
        said = (
            [f"{_quote(sizes)}: {text or 'none'}" for text, sizes in texts.items()] if len(texts) > 1 else list(texts)
        )
        rows += [f"| {part} | {'<br>'.join(said)} |"] if any(said) else []
    parts.append("\n".join(rows) + "\n")
    numbers = [f"| size | {' | '.join(NUMBERS)} |", "|---|" + "---:|" * len(NUMBERS)]
    for size, model in models.items():
        values = {title: f"{getattr(model, key):,}" for title, key in NUMBERS.items()}
        values["MLP width"] = values["MLP width"] if _has_mlp(model) else ""
        numbers.append(f"| `{size}` | {' | '.join(values.values())} |")
    return "\n".join([*parts, "\n".join(numbers) + "\n"])


def _group(models: dict[str, Model], describe: Callable[[Model], str]) -> dict[str, list[str]]:
    """Return the sizes of each text that `describe` gives for them."""
    groups: dict[str, list[str]] = {}
    for size, model in models.items():
        groups.setdefault(describe(model), []).append(size)
    return groups


def _quote(sizes: list[str]) -> str:
    return ", ".join(f"`{size}`" for size in sizes)


def _has_mlp(model: Model) -> bool:
    """Return whether some layer has an MLP of width `mlp_dim`: not where all layers have experts alone."""
    mlp = model.mlp
    return not isinstance(mlp, ExpertsMlp) or mlp.beside_mlp or mlp.dense_layers > 0 or mlp.every > 1


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def list_formula(model: Model) -> str:
    """Return the decoder's formula, a few lines of pseudocode."""
    pre = "norm({})" if model.norm_placement != "post" else "{}"
    post = "norm({})" if model.norm_placement != "pre" else "{}"
    residual = "" if model.residual_multiplier == 1 else f"{model.residual_multiplier:g} * "
    is_expert = isinstance(model.mlp, ExpertsMlp)
    mlp = f"{'experts' if is_expert else 'MLP'}({pre.format('x')})"
    if isinstance(model.mlp, ExpertsMlp) and model.mlp.beside_mlp:
        mlp = "norm(MLP(norm(x))) + norm(experts(norm(x)))"
    scale = " * sqrt(D)" * model.scaled_embedding
    scale += "" if model.embedding_multiplier == 1 else f" * {model.embedding_multiplier:g}"
    lines = [f"x = embedding[token]{scale}{' + position[p]' if model.positions == 'learned' else ''}"]
    if model.layer_inputs is not None:
        lines.append(
            "inputs = (norm(projection(x) / sqrt(D)) + table[token] * sqrt(p)) / sqrt(2)    # [layers, B, T, p]"
        )
    attention = f"attention({pre.format('x')})"
    lines += [
        "in each layer:",
        f"    x = x + {residual}{post.format(attention)}",
        f"    x = x + {residual}{post.format(mlp)}",
    ]
    if model.layer_inputs is not None:
        lines.append(f"    x = x + norm(down({model.mlp.activation}(gate(x)) * inputs[layer]))")
    if model.layer_scale:
        lines.append("    x = scale[layer] * x")
    logits = "head(norm(x))" + (" / logits_divisor" if model.logits_divisor != 1 else "")
    if model.logits_cap is not None:
        logits = f"{model.logits_cap:g} * tanh({logits} / {model.logits_cap:g})"
    return "\n".join([*lines, f"logits = {logits}"])


def _norms(model: Model) -> str:
    parts = [f"{NORMS[model.norm]}, eps {model.norm_eps:g}, {PLACES[model.norm_placement]}", QK_NORMS[model.qk_norm]]
    parts += ["norm of values, without weights"] * model.value_norm
    return "; ".join(parts)


def _heads(model: Model) -> str:
    parts = []
    if (latent := model.latent) is not None:
        queries = "" if latent.query_dim is None else f", queries of one of {latent.query_dim}"
        parts.append(
            f"MLA: keys and values of a latent of {latent.dim} numbers{queries}; values of {latent.value_dim} a head"
        )
    else:
        kinds = {1: "MQA", model.num_heads: "MHA"}
        parts.append(f"{kinds.get(model.num_kv_heads, 'GQA')}")
    if (wide := model.global_heads) is not None:
        parts.append(f"global layers have {_count(wide.num_kv_heads, 'key/value head')} of {wide.head_dim} numbers")
        parts += ["their values are their keys"] * wide.values_are_keys
    if (shared := model.shared_kv) is not None:
        parts.append(
            f"KV sharing: the last {shared.layers} layers take keys and values of the last layer of their kind (local, "
            "global) before them"
        )
    return "; ".join(parts)


def _tokens(model: Model) -> str:
    """Return to which tokens a layer attends."""
    every, window = model.global_every, model.sliding_window
    others = "all layers" if every > model.num_layers else f"{every - 1} of {every} layers"
    remaining = "" if every > model.num_layers else "; the others attend to all earlier tokens"
    if (linear := model.linear_attention) is not None:
        return (
            f"linear attention (gated delta rule) in {others}: {linear.num_key_heads} key heads of {linear.key_dim}, "
            f"{linear.num_value_heads} value heads of {linear.value_dim}, "
            f"filters of {linear.filter_size} tokens{remaining}"
        )
    if every == 1 or window is None:
        return "every layer attends to all earlier tokens"
    kind = "sliding window" if model.local_attention == "window" else "chunks"
    return f"{kind} of {window:,} tokens in {others}{remaining}"


def _scores(model: Model) -> str:
    scale = f"sqrt({model.query_scale:g})" if model.query_scale != model.head_dim else "sqrt(H)"
    parts = [f"divided by {scale}" if model.query_scale != 1 else "not divided"]
    if (growth := model.query_growth) is not None:
        where = " in layers without RoPE" if growth.layers == "unrotated" else ""
        parts.append(
            f"queries times 1 + {growth.rate:g} log(1 + floor((position + {growth.offset}) / {growth.every:,})){where}"
        )
    parts += [f"capped: {model.attention_cap:g} tanh(s / {model.attention_cap:g})"] if model.attention_cap else []
    parts += ["a sink for each head: one more score, without a value"] * model.attention_sinks
    parts += ["results times the sigmoid of a gate"] * model.attention_gate
    return "; ".join([*parts, *_biases(model, "attention")])


def _biases(model: Model, part: str) -> list[str]:
    """Return which projections of attention or of the MLP have a bias, in one text at most."""
    # The first seven are those of ordinary attention and of the MLP.
    names = [name for name in PROJECTIONS[:7] if model.biases and re.search(model.biases, name)]
    names = [name.partition(".")[2] for name in names if name.startswith(part)]
    if part == "mlp" and model.mlp.kind == "plain" and "gate" in names:
        names.remove("gate")
    return [f"biases of {', '.join(names)}"] if names else []


def _positions(model: Model) -> str:
    if model.positions == "learned" or model.rope_theta is None:
        return "learned, one vector for each position"
    local = model.local_rope_theta
    both = "" if local is None or local == model.rope_theta else f" in global layers, {local:,.0f} in local ones"
    parts = [f"RoPE, base {model.rope_theta:,.0f}{both}"]
    if (scaling := model.rope_scaling).name != "none":
        values = scaling.model_dump(exclude={"name"}).items()
        keys = [
            f"{key} {value:g}"
            for key, value in values
            if isinstance(value, float | int) and not isinstance(value, bool)
        ]
        parts.append(f"scaling `{scaling.name}` ({', '.join(keys)}){' in global layers' * (local is not None)}")
    if model.rope_sections is not None:
        time, rows, columns = model.rope_sections
        parts.append(
            f"of a head, {time} pairs rotate by the position in time, {rows} by the row of an image and {columns} by "
            "its column, in turns"
        )
    if model.rotated_dim is not None:
        which = "last" if model.latent is not None else "first"
        parts.append(f"the {which} {model.rotated_dim} of {model.head_dim} numbers of a head rotate")
    parts += ["neighbours rotate together, not halves"] * (model.rotated_pairs == "neighbours")
    parts += [f"none (NoPE) in 1 of {model.unrotated_every} layers"] if model.unrotated_every else []
    return "; ".join(parts)


def _mlp(model: Model) -> str:
    mlp = model.mlp
    if not isinstance(mlp, ExpertsMlp):
        parts = [GATED[mlp.activation] if mlp.kind == "gated" else f"plain, {PLAIN[mlp.activation]}"]
        if model.shared_kv is not None and model.shared_kv.mlp_dim != model.mlp_dim:
            parts.append(f"width {model.shared_kv.mlp_dim:,} in layers with shared keys and values")
        return "; ".join([*parts, *_biases(model, "mlp")])
    parts = [
        f"{mlp.experts_per_token} of {mlp.num_experts} experts of width {mlp.expert_dim:,}, {GATED[mlp.activation]}"
    ]
    parts += (
        [f"a shared expert of width {mlp.shared_dim:,}{' with a gate' * mlp.shared_gate}"] if mlp.shared_dim else []
    )
    parts += ["added to an MLP"] * mlp.beside_mlp
    parts += [f"no experts but an MLP in the first {_count(mlp.dense_layers, 'layer')}"] if mlp.dense_layers else []
    parts += [f"experts in 1 of {mlp.every} layers, an MLP in the others"] if mlp.every > 1 else []
    return "; ".join(parts)


def _router(model: Model) -> str:
    mlp = model.mlp
    if not isinstance(mlp, ExpertsMlp):
        return ""
    parts = [f"{mlp.scores} scores", "divided by their sum" if mlp.normalized else "as they are"]
    parts += [f"times {mlp.scale:g}"] if mlp.scale != 1 else []
    parts += [f"from the best {mlp.groups_per_token} of {mlp.num_groups} groups"] if mlp.num_groups > 1 else []
    parts += ["a bias of each expert in the choice"] if mlp.bias_rate is not None else []
    parts += ["scores multiply the inputs of experts, not their results"] if mlp.weighted == "inputs" else []
    parts += ["biases of router and experts"] * mlp.biases
    parts += ["input is x with a norm of its own", "a trained scale of each expert"] * mlp.beside_mlp
    return "; ".join(parts)


def _embeddings(model: Model) -> str:
    parts = ["head tied to the embedding" if model.tied_head else "head of its own"]
    parts += ["embedding times sqrt(D)"] * model.scaled_embedding
    parts += [f"embedding times {model.embedding_multiplier:g}"] if model.embedding_multiplier != 1 else []
    parts += [f"logits divided by {model.logits_divisor:g}"] if model.logits_divisor != 1 else []
    parts += [f"logits capped at {model.logits_cap:g}"] if model.logits_cap is not None else []
    return "; ".join(parts)


def _special(model: Model) -> str:
    parts = []
    if model.layer_inputs is not None:
        parts.append(f"inputs of each layer: p = {model.layer_inputs.dim} numbers of each token, which a gate lets in")
    if (vision := model.vision) is not None:
        size = vision.patch_size
        parts.append(
            f"a tower that sees: {vision.num_layers} layers of width {vision.embed_dim}, {vision.num_heads} heads, MLP "
            f"width {vision.mlp_dim}, patches of {size} x {size} {_describe_images(vision)}"
        )
    parts += ["a trained scale of each layer's result"] * model.layer_scale
    parts += [f"residual branches times {model.residual_multiplier:g}"] if model.residual_multiplier != 1 else []
    return "; ".join(parts)


def _describe_images(vision: AnyVision) -> str:
    side = vision.image_size
    if isinstance(vision, Gemma3Vision):
        return f"of {side} x {side} pixels, {vision.tokens_per_image} soft tokens of an image, which see one another"
    if isinstance(vision, SmolVision):
        return (
            f"of tiles of {side} x {side} pixels, at most {vision.tiles_per_side} in a row of an image and one of "
            f"all of it, {vision.merge_size} x {vision.merge_size} patches a soft token"
        )
    layers = ", ".join(map(str, vision.deepstack_layers))
    return (
        f"of images in their own shape, {vision.merge_size} x {vision.merge_size} of them a soft token; places by "
        f"rotation and between those of {side} x {side} pixels; results of its layers {layers} are added behind the "
        "first layers of the decoder"
    )


PARTS: dict[str, Callable[[Model], str]] = {
    "norms": _norms,
    "attention: heads": _heads,
    "attention: tokens": _tokens,
    "attention: scores": _scores,
    "positions": _positions,
    "MLP": _mlp,
    "router": _router,
    "embeddings": _embeddings,
    "special": _special,
}


if __name__ == "__main__":
    PAGE.write_text(page())
