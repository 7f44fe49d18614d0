"""Keys of config.json about heads, to and from ours: those of global layers (Gemma 4), and latent ones (DeepSeek).

Knows no jax.
"""

from typing import Any

from tunix.config import Model

PER_LAYER = "per_layer_config"  # transformers 5.23 writes it in the place of the first two keys below
GLOBAL_HEADS = {"global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", PER_LAYER}
LATENT = {"qk_nope_head_dim", "qk_rope_head_dim", "rope_interleave"}
SIZES = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}  # theirs of one layer -> ours


def read_global_heads(raw: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `model.global_heads`; `values` are the keys of the section `model` that are read already.

    Raises:
        ValueError: layers that differ from one another in more ways than global layers from local ones.
    """
    values_are_keys = raw["attention_k_eq_v"]
    like_local = {ours: values[ours] for ours in SIZES.values()}
    if raw[PER_LAYER] is not None:
        return like_local | _read_layers(raw[PER_LAYER], values) | {"values_are_keys": values_are_keys}
    num_kv_heads = raw["num_global_key_value_heads"] if values_are_keys else None
    return {
        "head_dim": raw["global_head_dim"],
        "num_kv_heads": num_kv_heads or values["num_kv_heads"],
        "values_are_keys": values_are_keys,
    }


def _read_layers(per_layer: dict[str, Any], values: dict[str, Any]) -> dict[str, int]:
    """Return the sizes that config.json gives to each global layer, where they are the same and no others have any."""
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
    return {ours: first[theirs] for theirs, ours in SIZES.items() if theirs in first}


def write_global_heads(model: Model) -> dict[str, Any]:
    """Return the keys of config.json for the heads of global layers."""
    heads = model.global_heads
    if heads is None:  # like those of local layers
        return {"global_head_dim": model.head_dim, "num_global_key_value_heads": None, "attention_k_eq_v": False}
    return {
        "global_head_dim": heads.head_dim,
        "num_global_key_value_heads": heads.num_kv_heads,
        "attention_k_eq_v": heads.values_are_keys,
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
