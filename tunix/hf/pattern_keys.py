"""Keys of config.json that say which layers are of which kind, to and from ours. Knows no jax.

config.json has several ways to say which layers are of one kind. We have one number n: every n-th layer is of it.

    sliding_window_pattern: 3                         every third layer attends to everything
    sliding_window_pattern: "LLG"                     the same
    layer_types: [sliding, sliding, full, ...]        the same
    no_rope_layers: [1, 1, 1, 0, ...]                 every fourth layer has no positions
    mlp_only_layers: [0, 1]                           the first two layers have no experts
    moe_layers: [1, 3, 5, ...]                        every second layer has experts

A list that is not of every n-th layer is refused.
"""

from typing import Any

from tunix.config import Model
from tunix.config.mlp import ExpertsMlp
from tunix.families import Family
from tunix.hf.rope_keys import FULL

LAYER_KEYS = {
    "layer_types", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layers",
    "no_rope_layer_interval", "mlp_only_layers", "moe_layers",
}  # fmt: skip
FULL_EVERY = "full_attention_interval"  # one of so many layers attends to everything, where layer_types is not given
UNROTATED = "unrotated"  # in the place of sliding_window_pattern: the layers without positions are the global ones


def read_attention_layers(raw: dict[str, Any], num_layers: int, family: Family) -> dict[str, Any]:
    """Return n of every n-th layer that attends to everything, the window of the others, and n of every n-th layer
    that has no positions.

    Raises:
        ValueError: layers that are not every n-th one.
    """
    every = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern"))
    if every == UNROTATED:
        every = _read_unrotated(raw, num_layers) or 0
    if isinstance(every, str):  # EXAONE's LLLG: three local layers, then a global one
        if every != "L" * (len(every) - 1) + "G":
            raise ValueError(f"sliding_window_pattern={every} is not understood; it must end with its only G")
        every = len(every)
    if every == 0:  # no layer attends to everything
        every = num_layers + 1
    # Without a window, or without a pattern, every layer attends to everything, or one in FULL_EVERY.
    window = raw.get(family.keys.get("sliding_window", "sliding_window"))
    if every is None or window is None:
        every = raw.get(FULL_EVERY, 1)
    types, local = raw.get("layer_types"), family.local_type  # newer files have the list, and it wins
    if types is not None:
        every = types.index(FULL) + 1 if FULL in types else num_layers + 1
        if types != [local if (layer + 1) % every else FULL for layer in range(num_layers)]:
            raise ValueError(f"layer_types={types} is not understood; every n-th layer must be {FULL}")
    window = window if every > 1 else None  # some files name a window that no layer has
    unrotated = every if family.unrotated_global and window is not None else _read_unrotated(raw, num_layers)
    return {"global_every": every, "sliding_window": window, "unrotated_every": unrotated}


def _read_unrotated(raw: dict[str, Any], num_layers: int) -> int | None:
    """Return n where every n-th layer has no positions; None where all have."""
    every = raw.get("no_rope_layer_interval")
    rotated = raw.get("no_rope_layers")  # despite its name, 1 for a layer that is rotated
    if rotated:
        every = rotated.index(0) + 1 if 0 in rotated else None
        if rotated != [int(every is None or (layer + 1) % every != 0) for layer in range(num_layers)]:
            raise ValueError(f"no_rope_layers={rotated} is not understood; every n-th layer must be 0")
    return every


def read_dense_layers(raw: dict[str, Any]) -> int:
    """Return the number of first layers that have one MLP and no experts."""
    dense = raw.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers={dense} is not understood; it must be the first layers: 0, 1, ...")
    return len(dense)


def read_experts_every(with_experts: list[int], num_layers: int) -> int:
    """Return n where every n-th layer has experts."""
    every = with_experts[0] + 1 if with_experts else num_layers + 1
    if with_experts != list(range(every - 1, num_layers, every)):
        raise ValueError(f"moe_layers={with_experts} is not understood; it must be every n-th layer")
    return every


def write_attention_layers(model: Model, family: Family) -> dict[str, Any]:
    """Return the keys of config.json that say which layers attend to everything, and which have no positions."""
    keys: dict[str, Any] = {}
    if "no_rope_layer_interval" in family.absent:
        if model.unrotated_every is not None:
            keys["no_rope_layer_interval"] = model.unrotated_every
        keys["no_rope_layers"] = [int(model.is_rotated(layer)) for layer in range(model.num_layers)]
    if family.absent.get("sliding_window_pattern") or FULL_EVERY in family.absent:
        local = family.local_type
        keys["layer_types"] = [FULL if model.is_global(layer) else local for layer in range(model.num_layers)]
    return keys


def write_dense_layers(model: Model, family: Family) -> dict[str, Any]:
    """Return the key of config.json that says which layers have no experts; {} for a family without it."""
    if "mlp_only_layers" in family.absent and isinstance(model.mlp, ExpertsMlp):
        return {"mlp_only_layers": list(range(model.mlp.dense_layers))}
    return {}
