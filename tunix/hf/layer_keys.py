"""Keys of config.json about shared keys and values, and inputs of layers, to and from ours (Gemma 4). No jax."""

from typing import Any

from tunix.config import Model

LAYER_PARTS = {
    "num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
}  # fmt: skip


def read_layer_parts(raw: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return `model.shared_kv` and `model.layer_inputs`; `values` are keys of the section `model` read already.

    Raises:
        ValueError: a table of inputs with other rows than the table of embeddings.
    """
    layers, width = raw["num_kv_shared_layers"], raw["hidden_size_per_layer_input"]
    rows = raw["vocab_size_per_layer_input"]
    if width and rows != values["vocab_size"]:
        raise ValueError(f"vocab_size_per_layer_input={rows} is not supported; it must be vocab_size")
    mlp_dim = values["mlp_dim"] * (2 if raw["use_double_wide_mlp"] else 1)
    return {
        "shared_kv": {"layers": layers, "mlp_dim": mlp_dim} if layers else None,
        "layer_inputs": {"dim": width} if width else None,
    }


def write_layer_parts(model: Model) -> dict[str, Any]:
    """Return the keys of config.json for shared keys and values and for inputs of each layer."""
    shared, inputs = model.shared_kv, model.layer_inputs
    keys: dict[str, Any] = {
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.dim,
        "num_kv_shared_layers": 0 if shared is None else shared.layers,
        "use_double_wide_mlp": shared is not None and shared.mlp_dim > model.mlp_dim,
    }
    return keys if inputs is None else keys | {"vocab_size_per_layer_input": model.vocab_size}
