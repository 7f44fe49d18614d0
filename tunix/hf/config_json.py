"""config.json, as Hugging Face writes it for each family, to and from the keys of our model section. Knows no jax."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from tunix.base.disk import read_json
from tunix.base.errors import UserError
from tunix.config import Model
from tunix.config.mlp import ExpertsMlp
from tunix.families import FAMILIES, Family, find_family
from tunix.hf.head_keys import GLOBAL_HEADS, read_global_heads, write_global_heads
from tunix.hf.layer_keys import LAYER_PARTS, read_layer_parts, write_layer_parts
from tunix.hf.rope_keys import FULL, LATENT, PARTIAL, read_rope, write_rope

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
    "auto_map", "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "ep_size", "seq_aux", "aux_loss_alpha",
    "for_llm_compressor",
}  # fmt: skip
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"}
LAYER_KEYS = {
    "layer_types", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layers",
    "no_rope_layer_interval", "mlp_only_layers", "moe_layers",
}  # fmt: skip
# Keys of config.json that say the same as one of ours in another way: ours out of theirs, theirs out of ours.
CONVERSIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attention_multiplier": (lambda multiplier: multiplier**-2, lambda scale: scale**-0.5),  # Granite's query_scale
}
QUANTIZATION, READ_CODES = "quantization_config", ("fp8", "mxfp4")
MAX_LAYERS = 10_000  # a number beyond is a damaged file


def read_config(folder: Path, family: str | None = None) -> dict[str, Any]:
    """Read the keys of the section `model` that config.json decides; the family's file of values decides the others.

    `family` is a name or a dotted path; None finds the one of tunix's that has the file's model_type.

    Raises:
        UserError: there is no config.json, or it has a key or value that is not understood; the message names it.
    """
    where = f"{folder}/config.json"
    try:
        return understood(read_json(folder / "config.json"), where, family)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise UserError(f"{where}: a key has a value of the wrong type ({error})") from None


def understood(raw: dict[str, Any], where: str, family_name: str | None = None) -> dict[str, Any]:
    """Return the keys of the section `model` that `raw`, the content of config.json, decides; see `read_config`.

    `where` is the file's path, for messages.
    """
    raw = _decoder(raw)
    kind = raw.get("model_type")
    families = FAMILIES if family_name is None else {family_name: find_family(family_name)}
    name = _find_family(raw, families)
    if "auto_map" in raw and not (name and families[name].published_code):
        raise UserError(f"{where}: auto_map asks for code of the model's own, which is never run")
    if name is None:
        known = ", ".join(family.model_type for family in families.values())
        own = "" if family_name else ", and a family of your own: model.family=package.module:name"
        raise UserError(f"{where}: model_type={kind} is not understood; understood are {known}{own}")
    family = families[name]
    _check_codes(raw.get(QUANTIZATION), where)
    raw = {family.synonyms.get(key, key): value for key, value in raw.items() if key != QUANTIZATION}
    keys = {
        *family.keys.values(), *family.fixed, *family.biases, *NOT_THE_DECODER, *LAYER_KEYS, *ROPE_KEYS,
        *DERIVED & family.absent.keys(),
    }  # fmt: skip
    for key, value in raw.items():
        if key not in keys:
            raise UserError(f"{where}: {key}={value} is not understood for model_type={kind}")
    raw = family.absent | raw
    for key, value in raw.items():
        if key in family.fixed and value not in family.fixed[key]:
            usual = " or ".join(map(str, family.fixed[key]))
            raise UserError(f"{where}: {key}={value} is not supported; it must be {usual}")
    missing = [key for key in family.keys.values() if key not in raw]
    if missing:
        raise UserError(f"{where}: {', '.join(missing)} is missing")
    values = {ours: _converted(theirs, raw[theirs], 0) for ours, theirs in family.keys.items()}
    if not isinstance(values["num_layers"], int) or not 0 < values["num_layers"] <= MAX_LAYERS:
        raise UserError(f"{where}: {family.keys['num_layers']}={values['num_layers']} is no number of layers")
    try:
        values |= _layers(raw, values["num_layers"], family)
        if "mlp.num_experts" in values:
            values.setdefault("mlp.dense_layers", _dense_layers(raw))
            if raw.get("moe_layers") is not None:
                values["mlp.every"] = _experts_every(raw["moe_layers"], values["num_layers"])
        if SHARED in raw:
            values["mlp.shared_dim"] = raw[SHARED] * values["mlp.expert_dim"] or None
        if QK_NORM in raw:
            values["qk_norm"] = family.qk_norm if raw[QK_NORM] else "none"
        if TEMPERATURE in raw:
            values["query_growth"] = _temperature(raw)
        if family.biases:
            values["biases"] = "|".join(names for key, names in family.biases.items() if raw.get(key)) or None
        if family.absent.keys() >= LATENT:
            values |= _latent_heads(raw, values)
        values = _derived(values, family)
        if family.absent.keys() >= GLOBAL_HEADS:
            values["global_heads"] = read_global_heads(raw, values)
        if family.absent.keys() >= LAYER_PARTS:
            values |= read_layer_parts(raw, values)
        if ROPE_KEYS & family.absent.keys():
            values |= read_rope(raw, values, family)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return {"family": name} | _by_section(values)


def _find_family(raw: dict[str, Any], families: Mapping[str, Family]) -> str | None:
    """Return the name of the family of a config.json, None for none: of several, the one that more keys tell."""
    fitting = [
        name
        for name, family in families.items()
        if raw.get("model_type") in (family.model_type, *family.also)
        and all(raw.get(key) == value for key, value in family.told_by.items())
    ]
    return max(fitting, key=lambda name: len(families[name].told_by), default=None)


def _decoder(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the decoder, of a config.json that may be of a model for images and text."""
    if not isinstance(raw.get("text_config"), dict):
        return raw
    return {"model_type": f"{raw.get('model_type')}_text", **raw["text_config"]}


def read_num_rows(folder: Path, family: Family) -> int:
    """Return the rows of the tables of a folder, one for each token."""
    raw = family.absent | _decoder(read_json(folder / "config.json"))
    return int(raw[family.keys["vocab_size"]])


def _check_codes(quantization: dict[str, Any] | None, where: str) -> None:
    """Raise `UserError` for weights that rest as codes which are not read."""
    method = (quantization or {}).get("quant_method")
    if method is not None and method not in READ_CODES:
        raise UserError(
            f"{where}: {QUANTIZATION} says quant_method={method}, whose codes are not read (those of "
            f"{' and '.join(READ_CODES)} are); take the model's files in 16 bits, or write them: load this folder with "
            "transformers, then model.dequantize() and model.save_pretrained(DIR). model.lora.quantize_base trains on "
            "codes of our own"
        )


def fp8_block_sizes(folder: Path) -> tuple[int, int]:
    """Return rows and columns of the blocks that share a scale, in a folder whose weights are 8-bit floats."""
    raw = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    sizes = (raw.get(QUANTIZATION) or {}).get("weight_block_size") or (128, 128)
    return int(sizes[0]), int(sizes[1])


def _converted(theirs: str, value: Any, direction: int) -> Any:
    """Return the value of a key of config.json as our key has it (direction 0), or the other way round (1)."""
    return CONVERSIONS[theirs][direction](value) if theirs in CONVERSIONS and value is not None else value


def _latent_heads(raw: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of latent attention whose numbers config.json has in parts."""
    plain, rotated = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    return {
        "head_dim": plain + rotated,
        "rotated_dim": rotated,
        "rotated_pairs": "neighbours" if raw["rope_interleave"] else "halves",
        "num_kv_heads": values["num_heads"],
    }


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


def _experts_every(with_experts: list[int], num_layers: int) -> int:
    """Return n where every n-th layer has experts."""
    every = with_experts[0] + 1 if with_experts else num_layers + 1
    if with_experts != list(range(every - 1, num_layers, every)):
        raise ValueError(f"moe_layers={with_experts} is not understood; it must be every n-th layer")
    return every


def _temperature(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return how Llama 4's queries grow in layers without positions."""
    if not raw[TEMPERATURE]:
        return None
    return {"rate": raw["attn_scale"], "every": int(raw["floor_scale"]), "offset": 1, "layers": "unrotated"}


def _derived(values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Dimensions that follow from others where config.json leaves them open."""
    heads, dim = values["num_heads"], values["embed_dim"]
    values["num_kv_heads"] = values.get("num_kv_heads") or heads
    values["head_dim"] = values.get("head_dim") or dim // heads
    values["mlp_dim"] = values["mlp_dim"] or 4 * dim
    values.setdefault("query_scale", family.query_scale or values["head_dim"])
    return values


def _layers(raw: dict[str, Any], num_layers: int, family: Family) -> dict[str, Any]:
    """Return n of every n-th layer that attends to everything, and of every n-th that has no positions."""
    every = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern"))
    if every == UNROTATED:
        every = _unrotated(raw, num_layers) or 0
    if isinstance(every, str):  # EXAONE's LLLG: three local layers, then a global one
        if every != "L" * (len(every) - 1) + "G":
            raise ValueError(f"sliding_window_pattern={every} is not understood; it must end with its only G")
        every = len(every)
    if every == 0:  # no layer attends to everything
        every = num_layers + 1
    window = raw.get(family.keys.get("sliding_window", "sliding_window"))
    if every is None or window is None:
        every = raw.get(FULL_EVERY, 1)
    types, local = raw.get("layer_types"), family.local_type
    if types is not None:
        every = types.index(FULL) + 1 if FULL in types else num_layers + 1
        if types != [local if (layer + 1) % every else FULL for layer in range(num_layers)]:
            raise ValueError(f"layer_types={types} is not understood; every n-th layer must be {FULL}")
    window = window if every > 1 else None
    unrotated = every if family.unrotated_global and window is not None else _unrotated(raw, num_layers)
    return {"global_every": every, "sliding_window": window, "unrotated_every": unrotated}


def _unrotated(raw: dict[str, Any], num_layers: int) -> int | None:
    """Return n where every n-th layer has no positions; None where all have."""
    every = raw.get("no_rope_layer_interval")
    rotated = raw.get("no_rope_layers")  # despite its name, 1 for a layer that is rotated
    if rotated:
        every = rotated.index(0) + 1 if 0 in rotated else None
        if rotated != [int(every is None or (layer + 1) % every != 0) for layer in range(num_layers)]:
            raise ValueError(f"no_rope_layers={rotated} is not understood; every n-th layer must be 0")
    return every


FULL_EVERY = "full_attention_interval"  # one of so many layers attends to everything, where layer_types is not given
SHARED = "n_shared_experts"  # whose width together is that of one shared expert
QK_NORM = "use_qk_norm"
TEMPERATURE = "attn_temperature_tuning"  # queries grow in layers without positions, by attn_scale and floor_scale
UNROTATED = "unrotated"  # in the place of sliding_window_pattern: the layers without positions are the global ones
WHOLE = {"query_pre_attn_scalar"}  # keys that are integers there and numbers here
# Keys that say in another way what ours say.
DERIVED = (
    PARTIAL
    | LATENT
    | GLOBAL_HEADS
    | {FULL_EVERY, SHARED, QK_NORM, TEMPERATURE, "attn_scale", "floor_scale", "head_dim", "qk_head_dim"}
    | LAYER_PARTS
)


def write_config(model: Model) -> dict[str, Any]:
    """config.json of a model, in the keys that all versions of transformers read."""
    family = find_family(model.family)
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {
        theirs: _typed(theirs, _converted(theirs, attrgetter(ours)(model), 1)) for ours, theirs in family.keys.items()
    }
    config |= {key: names in (model.biases or "").split("|") for key, names in family.biases.items()}
    if "mlp_only_layers" in family.absent and isinstance(model.mlp, ExpertsMlp):
        config["mlp_only_layers"] = list(range(model.mlp.dense_layers))
    config |= {theirs: usual for theirs, (usual, *_) in family.fixed.items()}
    if SHARED in family.absent and isinstance(model.mlp, ExpertsMlp):
        config[SHARED] = (model.mlp.shared_dim or 0) // model.mlp.expert_dim
    if QK_NORM in family.absent:
        config[QK_NORM] = model.qk_norm != "none"
    if TEMPERATURE in family.absent:
        growth = model.query_growth
        config |= {TEMPERATURE: growth is not None}
        config |= {"attn_scale": growth.rate, "floor_scale": growth.every} if growth else {}
    if family.absent.keys() >= LATENT:
        config |= {
            "qk_nope_head_dim": model.head_dim - model.num_rotated,
            "qk_rope_head_dim": model.num_rotated,
            "rope_interleave": model.rotated_pairs == "neighbours",
        }
    if family.absent.keys() >= GLOBAL_HEADS:
        config |= write_global_heads(model)
    if family.absent.keys() >= LAYER_PARTS:
        config |= write_layer_parts(model)
    if model.positions == "learned":
        return config
    config |= write_rope(model, family)
    if "no_rope_layer_interval" in family.absent:
        if model.unrotated_every is not None:
            config["no_rope_layer_interval"] = model.unrotated_every
        config["no_rope_layers"] = [int(model.is_rotated(layer)) for layer in range(model.num_layers)]
    if family.absent.get("sliding_window_pattern") or FULL_EVERY in family.absent:
        local = family.local_type
        config["layer_types"] = [FULL if model.is_global(layer) else local for layer in range(model.num_layers)]
    return config


def _typed(key: str, value: Any) -> Any:
    """Return a value as transformers checks it: whole numbers of the keys `WHOLE` without a point, others with it."""
    return int(value) if key in WHOLE and float(value).is_integer() else value
