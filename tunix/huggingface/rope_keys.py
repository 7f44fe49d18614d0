"""Keys of config.json that say how queries and keys are rotated (RoPE), to and from ours. Knows no jax."""

import math
from typing import Any

from tunix.config import Model
from tunix.config.layers import longrope_magnitude, yarn_magnitude
from tunix.huggingface.table import Family

# Keys of config.json about heads, to and from ours: those of global layers (Gemma 4), and latent ones (DeepSeek).
PER_LAYER = "per_layer_config"  # transformers 5.23 writes it in the place of the first two keys below
GLOBAL_HEADS = {"global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", PER_LAYER}
LATENT = {"qk_nope_head_dim", "qk_rope_head_dim", "rope_interleave"}
SIZES = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}  # theirs of one layer -> ours


def read_global_heads(raw: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `model.global_heads`; `values` are the keys of the section `model` that are read already.

    Raises:
        ValueError: layers that differ from one another in more ways than global layers from local ones.
    """
    values_are_keys, per_layer = raw["attention_k_eq_v"], raw[PER_LAYER]
    if per_layer is None:
        num_kv_heads = raw["num_global_key_value_heads"] if values_are_keys else None
        sizes = {"head_dim": raw["global_head_dim"], "num_kv_heads": num_kv_heads or values["num_kv_heads"]}
        return sizes | {"values_are_keys": values_are_keys}
    # It gives sizes to each global layer, the same to all, and to no others.
    every = values["global_every"]
    numbers = {str(layer) for layer in range(every - 1, values["num_layers"], every)}
    entries = {str(number): entry for number, entry in per_layer.items()}
    first: dict[str, int] = next(iter(entries.values()), {})
    is_understood = entries.keys() <= numbers and all(entries.get(number, {}) == first for number in numbers)
    if not is_understood or not first.keys() <= SIZES.keys():
        raise ValueError(
            f"{PER_LAYER}={per_layer} is not understood; it must give {' and '.join(SIZES)} to the layers with full "
            "attention, the same to each"
        )
    sizes = {ours: first.get(theirs, values[ours]) for theirs, ours in SIZES.items()}
    return sizes | {"values_are_keys": values_are_keys}


def write_global_heads(model: Model) -> dict[str, Any]:
    """Return the keys of config.json for the heads of global layers."""
    heads = model.global_heads  # None where they are like those of local layers
    return {
        "global_head_dim": (heads or model).head_dim,
        "num_global_key_value_heads": heads and heads.num_kv_heads,
        "attention_k_eq_v": heads is not None and heads.values_are_keys,
    }


def read_latent_heads(raw: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of latent attention whose numbers config.json has in parts."""
    plain, rotated = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    return {
        "head_dim": plain + rotated,
        "rotated_dim": rotated,
        "rotated_pairs": "neighbours" if raw["rope_interleave"] else "halves",
        "num_kv_heads": values["num_heads"],
    }


def write_latent_heads(model: Model) -> dict[str, Any]:
    """Return the keys of config.json for latent attention."""
    return {
        "qk_nope_head_dim": model.head_dim - model.num_rotated,
        "qk_rope_head_dim": model.num_rotated,
        "rope_interleave": model.rotated_pairs == "neighbours",
    }


FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
GROWTH = "llama_4_scaling_beta"  # queries grow with their position
# Of models that see: a token has positions in time, height and width. For text the three are equal.
MANY_AXES = {"mrope_section", "mrope_interleaved"}
PARTIAL = {"partial_rotary_factor"}  # share of a head that is rotated
UNSCALED = (("partial_rotary_factor", 1.0), ("truncate", True))  # values that change nothing, whatever the rope_type
# rope_type -> our name, and its keys: theirs -> (ours, the value if it is left out). "..." means: it must be given.
# The types are those of transformers' modeling_rope_utils.py.
SCALINGS: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": ("factor", ...)}),
    "llama3": ("llama3", {
        "factor": ("factor", ...), ORIGINAL: ("original_context", None),
        "low_freq_factor": ("low_freq_factor", ...), "high_freq_factor": ("high_freq_factor", ...),
    }),
    "yarn": ("yarn", {
        "factor": ("factor", ...), ORIGINAL: ("original_context", None), "beta_fast": ("beta_fast", 32.0),
        "beta_slow": ("beta_slow", 1.0), "attention_factor": ("attention_factor", None), "truncate": ("truncate", True),
    }),
    "longrope": ("longrope", {
        "short_factor": ("short_factors", ...), "long_factor": ("long_factors", ...),
        ORIGINAL: ("original_context", None), "attention_factor": ("attention_factor", None),
    }),
    "proportional": ("proportional", {"partial_rotary_factor": ("share", 1.0)}),
}  # fmt: skip
ROPE_SYNONYMS = {"su": "longrope"}  # rope_type in other versions -> the usual one


def read_rope(raw: dict[str, Any], values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return our keys of RoPE out of config.json, as transformers 5 writes it (`rope_parameters`) or older versions do.

    `values` are the keys of the section `model` that are read already.

    Raises:
        ValueError: a key or value that is not understood.
    """
    params, nearby = _find_parameters(raw, family)
    theta = params.pop("rope_theta", raw["rope_theta"])
    kind = params.pop("rope_type", params.pop("type", "default"))
    kind = ROPE_SYNONYMS.get(kind, kind)
    if kind not in SCALINGS:
        raise ValueError(f"rope_type={kind} is not understood; understood are {', '.join(SCALINGS)}")
    params.pop("type", None)
    rotated: dict[str, Any] = {}  # how many of a head's numbers are rotated, None for all
    (share,) = PARTIAL
    if share in family.absent:
        if kind == "proportional":  # its share of the pairs has the same key, and means other numbers of a head
            raise ValueError(f"rope_type={kind} is not understood in a family of which a share of each head is rotated")
        rotated_dim = int(values["head_dim"] * params.pop(share, raw[share]))
        rotated = {"rotated_dim": None if rotated_dim == values["head_dim"] else rotated_dim}
    # Phi's files have it beside the parameters of RoPE, where transformers 5 takes it for every family but these.
    if ORIGINAL in SCALINGS[kind][1] and raw.get(ORIGINAL) is not None and not family.local_rope:
        params[ORIGINAL] = raw[ORIGINAL]
    if kind == "longrope" and (factor := params.pop("factor", None)) and params.get("attention_factor") is None:
        original = params.get(ORIGINAL) or values["context_length"]
        # `attention_factor` by default follows from the ratio of the contexts. Another `factor` replaces that ratio.
        if factor != values["context_length"] / original:
            params["attention_factor"] = longrope_magnitude(factor, original)
    grown: dict[str, Any] = {}
    if GROWTH in family.absent:
        rate, original = params.pop(GROWTH, None), params.get(ORIGINAL) or values["context_length"]
        growth = {"rate": rate, "every": original, "offset": 0, "layers": "all"}
        grown = {"query_growth": growth if rate else None}
        params.pop("max_position_embeddings", None)  # a copy of the key of the whole file
    if kind == "yarn":
        of_all_dims = _merge_magnitudes(params)
        # DeepSeek multiplies scores by m * m: queries and keys by m each. Our factor of scores is query_scale ** -0.5.
        if family.absent.keys() >= LATENT and of_all_dims:
            grown["query_scale"] = values["query_scale"] / yarn_magnitude(params["factor"], of_all_dims) ** 4
    name, keys = SCALINGS[kind]
    scaling = {"name": name}
    for theirs, (ours, otherwise) in keys.items():
        value = params.pop(theirs, otherwise)
        if value is ...:
            raise ValueError(f"rope_type={kind} needs {theirs}")
        scaling[ours] = values["context_length"] if value is None and ours == "original_context" else value
    unknown = {key: value for key, value in params.items() if (key, value) not in UNSCALED and key not in MANY_AXES}
    if unknown:
        raise ValueError(f"rope_type={kind}: {', '.join(f'{k}={v}' for k, v in unknown.items())} is not understood")
    sections: dict[str, Any] = {}
    if family.many_axes:
        sections = {"rope_sections": params.get("mrope_section", [24, 20, 20])}
        if not params.get("mrope_interleaved", True):
            raise ValueError("mrope_interleaved=False is not supported; it must be true")
    local = (nearby.get("rope_theta") or theta) if values["global_every"] > 1 and family.local_rope else None
    return {"rope_theta": theta, "local_rope_theta": local, "rope_scaling": scaling} | rotated | grown | sections


def _find_parameters(raw: dict[str, Any], family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of RoPE as config.json has them: of all or of global layers, and of local layers."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key), dict | None):
            raise ValueError(f"{key}={raw[key]} is not a JSON object")
    given, scaling = raw.get("rope_parameters") or family.absent.get("rope_parameters"), raw.get("rope_scaling") or {}
    nearby = {"rope_theta": raw.get("rope_local_base_freq")}
    # As in transformers 5: of both, rope_scaling is taken; it is part of what layers with full attention have, where
    # the parameters stand by the kind of layer. Families that never had another form take rope_parameters alone.
    if not given or (scaling and not family.local_rope):
        everywhere = {"rope_theta": raw["rope_theta"], **scaling}
    else:
        everywhere = given.get(FULL, given) | ({} if "rope_parameters" in family.absent else scaling)
        nearby = given.get(SLIDING, nearby)
    if nearby.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters of {SLIDING}: rope_type={nearby['rope_type']} is not understood")
    return dict(everywhere), nearby


def _merge_magnitudes(params: dict[str, Any]) -> float | None:
    """Replace DeepSeek's two keys of YaRN's magnitude by the one factor that queries and keys are multiplied by.

    Returns the second key, which DeepSeek's scores have as a factor of their own.
    """
    if "mscale_all_dim" not in params:
        return None
    mscale, of_all_dims = params.pop("mscale", None), params.pop("mscale_all_dim")
    if mscale and of_all_dims and params.get("attention_factor") is None:
        magnitude, of_scores = (yarn_magnitude(params["factor"], each) for each in (mscale, of_all_dims))
        params["attention_factor"] = magnitude / of_scores
    return of_all_dims


def write_rope(model: Model, family: Family) -> dict[str, Any]:
    """Return the keys of config.json that say how a model rotates its queries and keys."""
    scaling = model.rope_scaling.model_dump()
    kind, keys = next((kind, keys) for kind, (name, keys) in SCALINGS.items() if name == scaling["name"])
    config: dict[str, Any] = {}
    params = {theirs: scaling[ours] for theirs, (ours, _) in keys.items() if scaling[ours] is not None}
    if family.absent.keys() >= LATENT and kind == "yarn" and model.query_scale != model.head_dim:
        # The factor of DeepSeek's scores as its config.json has it: the inverse of `_merge_magnitudes`.
        magnitude = (model.head_dim / model.query_scale) ** 0.25
        params["mscale_all_dim"] = round((magnitude - 1) / (0.1 * math.log(params["factor"])), 6)
        if params.get("attention_factor") == 1:
            del params["attention_factor"]
            params["mscale"] = params["mscale_all_dim"]
    if GROWTH in family.absent:
        params[GROWTH] = model.query_growth.rate if model.query_growth else 0.0
    if kind == "longrope":  # Phi's own code reads the whole file's key, transformers 5 asks for the factor
        config[ORIGINAL] = params[ORIGINAL]
        params["factor"] = model.context_length / params[ORIGINAL]
    if family.many_axes and model.rope_sections is not None:
        params |= {"mrope_section": list(model.rope_sections), "mrope_interleaved": True}
    if "rope_parameters" not in family.absent:
        config["rope_theta"] = model.rope_theta
        config["rope_scaling"] = {"rope_type": kind, **params} if params or family.scaled_rope else None
    if not PARTIAL.isdisjoint(family.absent):
        config["partial_rotary_factor"] = model.num_rotated / model.head_dim
    if model.global_every > 1 and family.local_rope:
        if "rope_local_base_freq" in family.absent:
            config["rope_local_base_freq"] = model.local_rope_theta
        else:  # transformers 5 would give local layers the rotations that it has by default
            config["rope_parameters"] = {
                FULL: {"rope_type": kind, "rope_theta": model.rope_theta, **params},
                SLIDING: {"rope_type": "default", "rope_theta": model.local_rope_theta},
            }
    return config
