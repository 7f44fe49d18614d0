"""Write the table of families in docs/models.md from conf/model and the names of Hugging Face's files: `make docs`."""

import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from tunix.base.config_types import CONF
from tunix.base.errors import UserError
from tunix.config import Model
from tunix.config.compose import compose
from tunix.config.layers import ExpertsMlp
from tunix.huggingface.table import FAMILIES, Family
from tunix.sharding.table import axis_names, needed_dims
from tunix.training.train_spec import check_model_on_mesh

PAGE = Path("docs/models.md")
BEGIN, END = "<!-- families: made by make docs -->", "<!-- end of families -->"
COLUMNS = (
    "family", "sizes (`model=...`)", "norms", "positions", "attention", "MLP", "mesh", "refused in config.json",
)  # fmt: skip
NORMS = {
    "rms": "RMS",
    "rms_unit_offset": "RMS, 1 + scale",
    "layer": "LayerNorm",
    "layer_unit_offset": "LayerNorm, 1 + scale",
}
PLACES = {"pre": "before", "pre_and_post": "before and after", "post": "after"}
QK_NORMS = {
    "none": "",
    "per_head": "; queries and keys, per head",
    "all_heads": "; queries and keys, all heads together",
    "after_rotation": "; queries and keys, after the rotation, without weights",
}
GATES = {"gated": "gated {}", "plain": "{}"}
EVEN_LAYERS = 48  # two stages divide these, and layers that take turns make whole turns
OWN = ("tiny", "tiny_moe", "tiny_vision", "adder", "pretrained")  # sizes that nobody has published


def page(text: str) -> str:
    """Return the page with today's table between its two marks."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def table() -> str:
    """Return the table as Markdown: a row for each family, in the order of its name."""
    sizes = list_sizes()
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    rows += [tuple(_row(name, family, sizes[name])) for name, family in sorted(FAMILIES.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def list_sizes() -> dict[str, list[str]]:
    """Return the names of the published sizes of each family."""
    sizes: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for path in sorted((CONF / "model").glob("*.yaml")):
        defaults = OmegaConf.load(path).defaults if path.stem not in OWN else []
        for choice in defaults:
            if found := re.fullmatch(r"family/(\w+)@_here_", str(choice)):
                family = OmegaConf.load(CONF / "model" / "family" / f"{found[1]}.yaml").family
                sizes[family].append(path.stem)
    return sizes


def _row(name: str, family: Family, sizes: list[str]) -> Iterator[str]:
    model = compose([f"model={sizes[0]}", "model.mesh_shape=[[1],[fsdp]]"]).config.model
    yield f"`{name}` ({family_title(name)})"
    yield " ".join(f"`{size}`" for size in sizes)
    yield f"{NORMS[model.norm]}, {PLACES[model.norm_placement]}{QK_NORMS[model.qk_norm]}"
    yield "; ".join(_positions(model, family))
    yield "; ".join(_attention(model, family)) or "grouped heads"
    yield _mlp(model) + ("; a scale of each layer" if model.layer_scale else "")
    yield _axes(model)
    refused = [f"`{key}` unless {' or '.join(map(str, values))}" for key, values in sorted(family.fixed.items())]
    yield ", ".join([*refused, "keys that are not understood"])


def family_title(name: str) -> str:
    """Return what the file of the family says that it is."""
    first = (CONF / "model" / "family" / f"{name}.yaml").read_text().splitlines()[0].removeprefix("# ")
    first = re.sub(r"^What (the |all |both |dense )*(sizes of )?|^all dense sizes of ", "", first)
    return re.split(r" share| \(|:", first)[0].removeprefix("dense sizes of ").removeprefix("sizes of ")


def _positions(model: Model, family: Family) -> Iterator[str]:
    if model.positions == "learned":
        yield "learned"
        return
    yield "RoPE" + ("" if model.rope_scaling.name == "none" else f", {model.rope_scaling.name}")
    if model.rotated_dim is not None:
        yield f"{model.rotated_dim} of {model.head_dim} numbers of a head"
    if model.rotated_pairs == "neighbours":
        yield "neighbours turn together"
    if model.unrotated_every is not None:
        yield f"none in one of {model.unrotated_every} layers"
    elif family.unrotated_global:
        yield "none in global layers, where there are local ones"
    if model.query_growth is not None:
        yield "queries grow with their position"


def _attention(model: Model, family: Family) -> Iterator[str]:
    if model.latent is not None:
        yield f"latents of {model.latent.query_dim} and {model.latent.dim} numbers"
    if model.linear_attention is not None:
        yield f"linear (gated delta rule), one of {model.global_every} layers with attention"
    elif model.global_every > model.num_layers:
        yield "every layer local"
    elif model.global_every > 1:
        chunks = f", others in chunks of {model.sliding_window}" if model.local_attention == "chunk" else ""
        yield f"one of {model.global_every} layers global{chunks}"
    elif "sliding_window" in family.keys.values():
        yield "windows where config.json has them"
    if model.global_heads is not None:
        wide, values = model.global_heads, ", values are keys" if model.global_heads.values_are_keys else ""
        yield f"{wide.num_kv_heads} global key/value heads of {wide.head_dim}, local ones of {model.head_dim}{values}"
    if model.value_norm:
        yield "norm of values"
    if model.attention_gate:
        yield "gated results"
    if model.attention_cap is not None:
        yield "capped scores"
    if model.attention_sinks:
        yield "sinks"
    if model.biases:
        yield f"biases of `{model.biases}`".replace("|", "\\|")


def _mlp(model: Model) -> str:
    mlp = model.mlp
    if not isinstance(mlp, ExpertsMlp):
        return GATES[mlp.kind].format(mlp.activation)
    parts = [f"{mlp.experts_per_token} of {mlp.num_experts} experts, {mlp.activation}"]
    parts += [f"a shared one{' with a gate' * mlp.shared_gate}"] if mlp.shared_dim else []
    parts += ["beside an MLP"] if mlp.beside_mlp else []
    parts += [f"{mlp.dense_layers} dense layers"] if mlp.dense_layers else []
    parts += ["weights of inputs"] if mlp.weighted == "inputs" else []
    parts += [f"in one of {mlp.every} layers"] if mlp.every > 1 else []
    parts += ["biases"] if mlp.biases else []
    return ", ".join(parts)


def _axes(model: Model) -> str:
    """Return the mesh axes that a model may have, and why it refuses the others, as the program says it."""
    first = model.mlp.dense_layers if isinstance(model.mlp, ExpertsMlp) else 0  # every stage has these
    model = model.model_copy(update={"num_layers": first + EVEN_LAYERS})
    allowed, refused = [], []
    useless = {axis for axis, dim_name in needed_dims().items() if dim_name not in model.dims}
    for axis in axis_names():
        if axis in useless:
            continue
        try:
            check_model_on_mesh(model, dict.fromkeys(axis_names(), 1) | {axis: 2})
            allowed.append(f"`{axis}`")
        except UserError as error:
            refused.append(f"not `{axis}`: {str(error).split('; ')[0]}")
    return "; ".join([" ".join(allowed), *refused])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
