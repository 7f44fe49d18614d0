"""config.json, as Hugging Face writes it for each family, to and from the keys of our model section. Knows no jax."""

from operator import attrgetter
from pathlib import Path
from typing import Any

from tunix.base.disk import read_json
from tunix.base.errors import UserError
from tunix.config import Model
from tunix.config.mlp import ExpertsMlp
from tunix.hf.names import FAMILIES

# Keys of config.json that say nothing about what the decoder computes. Dropout is not among our parts; those rates
# concern training elsewhere.
NOT_THE_DECODER = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "use_cache", "initializer_range", "attention_dropout", "pretraining_tp",
    "cache_implementation", "_name_or_path", "max_window_layers", "n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "task_specific_params", "id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict",
    "residual_dropout", "original_max_position_embeddings",
    "router_aux_loss_coef", "output_router_logits",
    "chunk_size_feed_forward", "is_encoder_decoder", "problem_type", "tokenizer_class", "unsloth_fixed",
}  # fmt: skip
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"}
LAYER_KEYS = {
    "layer_types", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layers",
    "no_rope_layer_interval", "mlp_only_layers",
}  # fmt: skip
# rope_type -> our name, and its keys: theirs -> (ours, what it means to leave it out).
SCALINGS: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": ("factor", ...)}),
    "llama3": (
        "llama3",
        {
            "factor": ("factor", ...),
            "original_max_position_embeddings": ("original_context", None),
            "low_freq_factor": ("low_freq_factor", ...),
            "high_freq_factor": ("high_freq_factor", ...),
        },
    ),
    "yarn": (
        "yarn",
        {
            "factor": ("factor", ...),
            "original_max_position_embeddings": ("original_context", None),
            "beta_fast": ("beta_fast", 32.0),
            "beta_slow": ("beta_slow", 1.0),
            "attention_factor": ("attention_factor", None),
        },
    ),
}
MAX_LAYERS = 10_000  # a number beyond is a damaged file
FULL, SLIDING = "full_attention", "sliding_attention"


def read_config(folder: Path) -> dict[str, Any]:
    """Read the keys of the section `model` that config.json decides; conf/model/family decides the others.

    Raises:
        UserError: there is no config.json, or it has a key or value that is not understood; the message names it.
    """
    where = f"{folder}/config.json"
    try:
        return understood(read_json(folder / "config.json"), where)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise UserError(f"{where}: a key has a value of the wrong type ({error})") from None


def understood(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the keys of the section `model` that `raw`, the content of config.json, decides; see `read_config`.

    `where` is the file's path, for messages.
    """
    if isinstance(raw.get("text_config"), dict):  # a model for images and text: take its decoder
        raw = {"model_type": f"{raw.get('model_type')}_text", **raw["text_config"]}
    if "auto_map" in raw:
        raise UserError(f"{where}: auto_map asks for code of the model's own, which is never run")
    kind = raw.get("model_type")
    name = next((name for name, family in FAMILIES.items() if family.model_type == kind), None)
    if name is None:
        known = ", ".join(family.model_type for family in FAMILIES.values())
        raise UserError(f"{where}: model_type={kind} is not understood; understood are {known}")
    family = FAMILIES[name]
    raw = {family.synonyms.get(key, key): value for key, value in raw.items()}
    keys = {*family.keys.values(), *family.fixed, *NOT_THE_DECODER, *LAYER_KEYS, *ROPE_KEYS}
    for key, value in raw.items():
        if key not in keys:
            raise UserError(f"{where}: {key}={value} is not understood for model_type={kind}")
        if key in family.fixed and value not in family.fixed[key]:
            usual = " or ".join(map(str, family.fixed[key]))
            raise UserError(f"{where}: {key}={value} is not supported; it must be {usual}")
    raw = family.absent | raw
    missing = [key for key in family.keys.values() if key not in raw]
    if missing:
        raise UserError(f"{where}: {', '.join(missing)} is missing")
    values = {ours: raw[theirs] for ours, theirs in family.keys.items()}
    if not isinstance(values["num_layers"], int) or not 0 < values["num_layers"] <= MAX_LAYERS:
        raise UserError(f"{where}: {family.keys['num_layers']}={values['num_layers']} is no number of layers")
    try:
        values |= _layers(raw, values["num_layers"])
        if "mlp.num_experts" in values:
            values["mlp.dense_layers"] = _dense_layers(raw)
        if ROPE_KEYS & family.absent.keys():
            values |= _rope(raw, values)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return {"family": name} | _by_section(_derived(values))


def _by_section(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of keys like `mlp.num_experts` as sections: {"mlp": {"num_experts": 8}}."""
    sections: dict[str, Any] = {}
    for key, value in values.items():
        section, dot, name = key.partition(".")
        if dot:
            sections.setdefault(section, {})[name] = value
        else:
            sections[key] = value
    return sections


def _dense_layers(raw: dict[str, Any]) -> int:
    """Return the number of first layers that have one MLP and no experts."""
    dense = raw.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers={dense} is not understood; it must be the first layers: 0, 1, ...")
    return len(dense)


def _derived(values: dict[str, Any]) -> dict[str, Any]:
    """Dimensions that follow from others where config.json leaves them open."""
    heads, dim = values["num_heads"], values["embed_dim"]
    values["num_kv_heads"] = values.get("num_kv_heads") or heads
    values["head_dim"] = values.get("head_dim") or dim // heads
    values["mlp_dim"] = values["mlp_dim"] or 4 * dim
    values.setdefault("query_scale", values["head_dim"])
    return values


def _layers(raw: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return n of every n-th layer that attends to everything, and of every n-th that has no positions."""
    every = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern"))
    if every == 0:  # no layer attends to everything
        every = num_layers + 1
    if every is None or raw.get("sliding_window") is None:
        every = 1
    types = raw.get("layer_types")
    if types is not None:
        every = types.index(FULL) + 1 if FULL in types else num_layers + 1
        if types != [SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)]:
            raise ValueError(f"layer_types={types} is not understood; every n-th layer must be {FULL}")
    window = raw.get("sliding_window") if every > 1 else None
    return {"global_every": every, "sliding_window": window, "unrotated_every": _unrotated(raw, num_layers)}


def _unrotated(raw: dict[str, Any], num_layers: int) -> int | None:
    """Return n where every n-th layer has no positions; None where all have."""
    every = raw.get("no_rope_layer_interval")
    rotated = raw.get("no_rope_layers")  # despite its name, 1 for a layer that is rotated
    if rotated is not None:
        every = rotated.index(0) + 1 if 0 in rotated else None
        if rotated != [int(every is None or (layer + 1) % every != 0) for layer in range(num_layers)]:
            raise ValueError(f"no_rope_layers={rotated} is not understood; every n-th layer must be 0")
    return every


def _rope(raw: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """RoPE as transformers 5 writes it (`rope_parameters`) or as older versions do."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key), dict | None):
            raise ValueError(f"{key}={raw[key]} is not a JSON object")
    everywhere = raw.get("rope_parameters") or {"rope_theta": raw["rope_theta"], **(raw.get("rope_scaling") or {})}
    nearby = {"rope_theta": raw.get("rope_local_base_freq")}
    if FULL in everywhere:
        everywhere, nearby = everywhere[FULL], everywhere[SLIDING]
    if nearby.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters of {SLIDING}: rope_type={nearby['rope_type']} is not understood")
    given = dict(everywhere)
    theta = given.pop("rope_theta", raw["rope_theta"])
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind not in SCALINGS:
        raise ValueError(f"rope_type={kind} is not understood; understood are {', '.join(SCALINGS)}")
    name, keys = SCALINGS[kind]
    scaling = {"name": name}
    for theirs, (ours, otherwise) in keys.items():
        value = given.pop(theirs, otherwise)
        if value is ...:
            raise ValueError(f"rope_type={kind} needs {theirs}")
        scaling[ours] = values["context_length"] if value is None and ours == "original_context" else value
    unknown = {key: value for key, value in given.items() if (key, value) not in UNSCALED}
    if unknown:
        raise ValueError(f"rope_type={kind}: {', '.join(f'{k}={v}' for k, v in unknown.items())} is not understood")
    local = (nearby.get("rope_theta") or theta) if values["global_every"] > 1 else None
    return {"rope_theta": theta, "local_rope_theta": local, "rope_scaling": scaling}


UNSCALED = (("partial_rotary_factor", 1.0), ("truncate", True))  # said by some, and as if not said


def write_config(model: Model) -> dict[str, Any]:
    """config.json of a model, in the keys that all versions of transformers read."""
    family = FAMILIES[model.family]
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {theirs: _whole(attrgetter(ours)(model)) for ours, theirs in family.keys.items()}
    if "mlp_only_layers" in family.absent and isinstance(model.mlp, ExpertsMlp):
        config["mlp_only_layers"] = list(range(model.mlp.dense_layers))
    config |= {theirs: usual for theirs, (usual, *_) in family.fixed.items()}
    if model.positions == "learned":
        return config
    scaling = model.rope_scaling.model_dump()
    kind, keys = next((kind, keys) for kind, (name, keys) in SCALINGS.items() if name == scaling["name"])
    given = {theirs: scaling[ours] for theirs, (ours, _) in keys.items() if scaling[ours] is not None}
    config["rope_theta"] = model.rope_theta
    config["rope_scaling"] = {"rope_type": kind, **given} if given else None
    if model.unrotated_every is not None:
        config["no_rope_layer_interval"] = model.unrotated_every
        config["no_rope_layers"] = [int(model.is_rotated(layer)) for layer in range(model.num_layers)]
    if model.global_every > 1 and family.absent.get("sliding_window_pattern") != 0:
        if "rope_local_base_freq" in family.absent:
            config["rope_local_base_freq"] = model.local_rope_theta
        else:  # transformers 5 would give local layers the rotations that it has by default
            config["rope_parameters"] = {
                FULL: {"rope_type": kind, "rope_theta": model.rope_theta, **given},
                SLIDING: {"rope_type": "default", "rope_theta": model.local_rope_theta},
            }
        config["layer_types"] = [FULL if model.is_global(layer) else SLIDING for layer in range(model.num_layers)]
    return config


def _whole(value: Any) -> Any:
    """A whole number without its point, as transformers wants it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
