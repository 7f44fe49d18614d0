"""adapter_config.json of PEFT, to and from the keys of `model.lora`. Imports no jax."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tunix.base.errors import UserError, name_first
from tunix.base.files import read_json
from tunix.base.forms import naming_writer
from tunix.config import Model
from tunix.config.layers import EXPERT_PROJECTIONS, UPDATED, ExpertsMlp
from tunix.config.vision import TOWER
from tunix.huggingface.table import Family, find_family

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # begins the names of all tensors
LAYERS = "layers."  # begins the modules of AutoModel; those of a class with a head begin with `model.layers.`
MAGNITUDE = "lora_magnitude_vector"
HEAD = f"{PREFIX}score.weight"  # of a model that gives scores: it is trained whole, beside the updates
HEADS = {"score", "classifier"}  # names that PEFT gives to modules_to_save of such a model
FACTOR = re.compile(rf"(.+)\.(?:lora_[AB]\.weight|{MAGNITUDE})")
# Factors of all experts of a layer in one matrix: `.base_layer` are those of gates and what they gate.
PACKED = re.compile(r".+\.(?P<layer>\d+)\.mlp\.experts(?P<gate_up>\.base_layer)?\.(?P<factor>lora_[AB])\.weight")
# Keys that say where an adapter comes from, or how it was initialised and trained; and keys that repeat others.
IGNORED = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "megatron_core", "qalora_group_size",
    "eva_config",
}  # fmt: skip
# Values of other keys with which an adapter is what our updates are. A key that is not here must be off.
FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base's matrices too
}
READ = {"r", "lora_alpha", "use_rslora", "use_dora"}
# PEFT's keys for experts where transformers keeps their weights as two tensors. That of gates and what they gate has
# twice the rank and alpha of other matrices if PEFT was told the names of linear layers.
EXPERT_KEYS = {"target_parameters", "rank_pattern", "alpha_pattern"}
EXPERT_PARAMETERS = {"down_proj", "gate_up_proj"}
GATE_UP = r".*\.gate_up_proj"
OTHERWISE = "give a folder of the whole model: tunix.export writes it with merge_lora=true, PEFT with merge_and_unload"


def read_adapter(folder: Path, family: str) -> dict[str, Any]:
    """Return rank, alpha and targets of an adapter, as keys of `model.lora`, out of its config and its tensors' names.

    Raises:
        UserError: a key or a tensor that is not understood: it is named.
    """
    with naming_writer(folder):
        return _read_adapter(folder, family)


def _read_adapter(folder: Path, family: str) -> dict[str, Any]:
    source = f"{folder}/{CONFIG}"
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} has no {CONFIG}: it is no adapter of PEFT")
    raw = read_json(folder / CONFIG)
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or bool in (type(rank), type(alpha)):
        raise UserError(f"{source}: r={rank!r:.50} and lora_alpha={alpha!r:.50} must be numbers")
    if rank < 1 or not 0 < alpha < 1e6:
        raise UserError(f"{source}: r={rank} and lora_alpha={str(alpha)[:50]} must be numbers above 0")
    parameters = raw.get("target_parameters")
    if isinstance(parameters, list):
        others = [name for name in map(str, parameters) if name.rpartition(".")[2] not in EXPERT_PARAMETERS]
        if others:
            raise UserError(
                f"{source}: target_parameters={name_first(others)} is no matrix of experts (PEFT's all-linear adds "
                f"those of routers, which have no updates here); {OTHERWISE}"
            )
    understood = {*FIXED, *IGNORED, *READ, *(EXPERT_KEYS if _updates_packed_experts(raw) else ())}
    if isinstance(saved := raw.get("modules_to_save"), list) and {*map(str, saved)} <= HEADS:
        understood.add("modules_to_save")
    for key, value in raw.items():
        if key in FIXED and value not in FIXED[key]:
            usual = " or ".join(map(str, FIXED[key]))
            raise UserError(f"{source}: {key}={value} is not supported; it must be {usual}, or {OTHERWISE}")
        if value and key not in understood:
            raise UserError(f"{source}: {key}={value} is not understood; {OTHERWISE}")
    if not (folder / WEIGHTS).is_file():  # whoever opens a pipe waits for ever
        raise UserError(f"{folder} has no {WEIGHTS}: it is no adapter of PEFT")
    try:
        with safe_open(folder / WEIGHTS, framework="np") as file:
            tensors = list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} is no safetensors file: {error}") from None
    modules, found = list_projections(find_family(family)), set[str]()
    for tensor in tensors:
        if tensor == HEAD:
            continue
        factor = FACTOR.fullmatch(find_family(family).usual_name(name_in_class(tensor)))
        module = re.sub(r"\.\d+\.", ".{}.", factor[1]) if factor else ""
        packed = PACKED.fullmatch(tensor)
        if not (updated := set(list_packed(packed, find_family(family))) if packed else modules.get(module)):
            raise UserError(
                f"{folder / WEIGHTS}: {tensor} is no low-rank update of a projection of a {family}; {OTHERWISE}"
            )
        found |= updated
    multiple = 2 if raw.get("rank_pattern") else 1  # the other matrices get zeros behind their factors
    return {
        "rank": multiple * rank,
        "alpha": float(multiple * alpha),
        "use_rslora": bool(raw.get("use_rslora")),
        "use_dora": bool(raw.get("use_dora")),
        "targets": f"^({'|'.join(name for name in UPDATED if name in found)})$",
    }


def find_labels(folder: Path, labels: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the labels of a model with an adapter: its own, or LABEL_0, LABEL_1, ... where the adapter has a head with
    another number of scores, which it does not name."""
    own = None if labels is None else tuple(labels)
    with safe_open(folder / WEIGHTS, framework="np") as file:
        num_scores = file.get_slice(HEAD).get_shape()[0] if HEAD in file.keys() else 0  # noqa: SIM118
    return own if num_scores in (0, len(own or ())) else tuple(f"LABEL_{number}" for number in range(num_scores))


def name_in_class(tensor: str) -> str:
    """Return the name of an adapter's tensor in a class with a head, also where the adapter is one of AutoModel."""
    name = tensor.removeprefix(PREFIX)
    return f"model.{name}" if name.startswith(LAYERS) else name


def name_in_auto_model(tensor: str) -> str:
    """Return the name of an adapter's tensor in AutoModel, which sentence-transformers loads: it has no head."""
    begin = f"{PREFIX}model.{LAYERS}"
    return f"{PREFIX}{LAYERS}{tensor.removeprefix(begin)}" if tensor.startswith(begin) else tensor


def _updates_packed_experts(raw: dict[str, Any]) -> bool:
    """Say whether the keys are those that PEFT writes for updates of experts, and of no routers."""
    parameters, rank, alpha = raw.get("target_parameters"), raw["r"], raw["lora_alpha"]
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        return False
    names = {name.rpartition(".")[2] for name in parameters}
    patterns = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
    is_doubled = patterns == ({GATE_UP: 2 * rank}, {GATE_UP: 2 * alpha}) and not raw.get("use_rslora")
    return {"down_proj"} <= names <= EXPERT_PARAMETERS and (is_doubled or patterns == ({}, {}))


def list_packed(packed: re.Match[str], family: Family) -> dict[str, str]:
    """Return the projections in a matrix of `PACKED`, in the order of their outputs, with the module of one expert.

    In the module's name are {} for the numbers of layer and expert. There is none where the files name no experts.
    """
    projections = EXPERT_PROJECTIONS[:2] if packed["gate_up"] else EXPERT_PROJECTIONS[2:]
    modules = {module: names for module, names in list_projections(family).items() if module.count("{}") == 2}
    return {projection: module for projection in projections for module in modules if projection in modules[module]}


def list_projections(family: Family) -> dict[str, set[str]]:
    """Return the projections in each module at Hugging Face that low-rank updates are for; one may hold several.

    In the module's name {} is the number of the layer, and a second {} that of the expert.
    """
    modules: dict[str, set[str]] = {}
    for projection in UPDATED:
        path = stack_of_projection(projection)
        for matrix in (path, path.replace("mlp.", "mlp.shared."), f"linear_{path}"):
            if name := family.names.get(f"{matrix}.w"):
                modules.setdefault(name.tensor.removesuffix(".weight"), set()).add(projection)
    return modules


TASK_TYPES: dict[str, dict[str, Any]] = {  # by what the model gives
    "logits": {"task_type": "CAUSAL_LM"},
    "scores": {"task_type": "SEQ_CLS", "modules_to_save": ["score"]},
    "vectors": {"task_type": "FEATURE_EXTRACTION"},
}


def stack_of_projection(name: str) -> str:
    """Return the parameter of a projection, without the end of its name: `blocks.attention.q` of `attention.q`."""
    return f"vision.{TOWER}.blocks.{name.removeprefix(TOWER + '.')}" if name.startswith(TOWER) else f"blocks.{name}"


def write_adapter_config(model: Model, modules: set[str], output: str) -> dict[str, Any]:
    """Return adapter_config.json for updates of modules with these last names; `output` is a key of `TASK_TYPES`."""
    lora, rank, alpha = model.lora, model.lora.rank, model.lora.alpha
    if lora.init == "pissa":  # with the factors that it started from, and the same scale
        rank, alpha = 2 * rank, alpha * (2**0.5 if lora.use_rslora else 2)
    use_rslora, has_experts = lora.use_rslora, isinstance(model.mlp, ExpertsMlp)
    if use_rslora and has_experts and any(re.search(lora.targets, name) for name in EXPERT_PROJECTIONS):
        # PEFT doubles rank and alpha of experts, whose gates and what they gate are one matrix there: right for
        # alpha / rank alone. So the same factor is written in that form.
        use_rslora, alpha = False, alpha * rank**0.5
    return {
        "peft_type": "LORA",
        **TASK_TYPES[output],
        "base_model_name_or_path": model.init_from,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": use_rslora,
        "use_dora": lora.use_dora,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
