"""Layers that share keys and values of earlier layers, inputs of each layer (both of Gemma 4), and runs of layers."""

from typing import TYPE_CHECKING, NamedTuple

from tunix.base.section import Count, Section
from tunix.config.mlp import ExpertsMlp

if TYPE_CHECKING:
    from tunix.config.model import Model


class SharedKv(Section):
    """Last layers, which have no keys and values of their own. A local one takes those of the last local layer before
    all of them, a global one those of the last global layer."""

    layers: Count
    """Number of these layers."""
    mlp_dim: Count
    """Hidden width of their MLP (f): model.mlp_dim, or twice as much."""


class LayerInputs(Section):
    """A vector of each token for each layer: a row of a table, and a projection of the token's embedding."""

    dim: Count
    """Width of the vector (p)."""


class Run(NamedTuple):
    """Layers in a row whose stacks take turns in an order that repeats: one scan of the program."""

    layers: range
    pattern: tuple[str, ...]  # the stacks of its first layers, by name; the other layers repeat this order


def list_runs(model: "Model") -> tuple[Run, ...]:
    """Return all layers of a model as runs.

    Layers whose keys and values are shared later are in a run of one turn, just before the layers that take them. Then
    the scan over the other layers does not return keys and values, which would take the memory of all its layers.

        global_every=3, 4 of 10 layers are shared    0 1 2 | 3 4 5 | 6 7 8 9
                                                     local layers 6, 7 and 9 take those of 4, global layer 8 those of 5
    """
    names = [model.stack_of(layer) for layer in range(model.num_layers)]
    if model.shared_kv is None:
        return _list_runs(names, 0)
    first = model.num_layers - model.shared_kv.layers
    turn = range(first - model.global_every, first)
    before, shared = _list_runs(names[: turn.start], 0), _list_runs(names[first:], first)
    return (*before, Run(turn, tuple(names[turn.start : first])), *shared)


def _list_runs(names: list[str], start: int) -> tuple[Run, ...]:
    """Return one run if the layers repeat a pattern, else a run for each group of neighbours of one stack.

    `names` are the stacks of the layers from number `start` on: L L G L L G is one run with the pattern L L G, and
    D E E E is two runs, D and E.
    """
    # The shortest pattern is found first. One that does not repeat at least twice is no pattern.
    for size in range(1, len(names) // 2 + 1):
        if names == names[:size] * (len(names) // size):
            return (Run(range(start, start + len(names)), tuple(names[:size])),)
    changes = [layer for layer in range(1, len(names)) if names[layer] != names[layer - 1]]
    ends = zip([0, *changes], [*changes, len(names)], strict=True) if names else []
    return tuple(Run(range(start + first, start + last), (names[first],)) for first, last in ends)


def find_donors(model: "Model") -> dict[str, int]:
    """Return the layers that give their keys and values to the shared layers, by the letters of their heads.

    {} in a model without shared layers.
    """
    if model.shared_kv is None:
        return {}
    # The last layer of each kind: a later one replaces an earlier one in the dict.
    return {model.heads_of(layer).letters: layer for layer in range(model.num_layers - model.shared_kv.layers)}


def check_shared_layers(model: "Model") -> None:
    """Raise ValueError where shared keys and values, or inputs of each layer, do not go with the rest of the model."""
    shared = model.shared_kv
    if model.layer_inputs is not None and model.norm.startswith("layer"):
        raise ValueError(f"model.layer_inputs needs an RMSNorm, not model.norm={model.norm}; set it to null")
    if shared is None:
        return
    if model.global_heads is None or isinstance(model.mlp, ExpertsMlp) or model.mlp.kind != "gated":
        raise ValueError(
            "model.shared_kv needs model.global_heads, and a gated MLP in each layer; set model.shared_kv=null"
        )
    if shared.layers > model.num_layers - model.global_every:
        raise ValueError(
            f"model.shared_kv.layers={shared.layers} leaves fewer than model.global_every={model.global_every} of "
            f"model.num_layers={model.num_layers} layers with keys and values of their own; lower it"
        )
    if shared.mlp_dim not in (model.mlp_dim, 2 * model.mlp_dim):
        raise ValueError(
            f"model.shared_kv.mlp_dim={shared.mlp_dim} must be model.mlp_dim={model.mlp_dim}, or twice as much: "
            "config.json has no word for another width"
        )
