"""Copies of the trained parameters that the state carries beside them, like their moving averages.

`state["ema"]` is {name: tree}; it is not there where the config asks for no copy. A copy starts as the parameters,
and is laid out as the optimizer works on them. A new kind of copy is a function here, and its row in `EMA`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.config import Training
from tunix.sharding.arrays import to_device_memory, to_host_memory

Tree = dict[str, Any]
Update = Callable[[Tree, Tree], Tree]  # (copy, trained parameters after the step) -> copy after the step


class Copy(NamedTuple):
    """A copy of the parameters: how a step changes it, the dtype in which it is kept, and where between two steps."""

    update: Update
    dtype: str = "float32"
    on_host: bool = False


def _make_averages(training: Training) -> dict[str, Copy]:
    """Make exponential moving averages over steps, one for each of `training.ema_decay`."""
    on_host = training.ema_memory == "host"

    def average(decay: float) -> Copy:
        share = 1 - decay

        def move(a: jax.Array, p: jax.Array) -> jax.Array:
            """Move the average by a share 1 - decay to the parameter, in float32.

            The same as decay * a + (1 - decay) * p, with less rounding where both are nearly equal.
            """
            now = a.astype(jnp.float32)
            return (now + share * (p - now)).astype(a.dtype)

        return Copy(lambda average, params: jax.tree.map(move, average, params), training.ema_dtype, on_host)

    return {name: average(decay) for name, decay in training.ema_names.items()}


# Each takes the training section: the update of its copy in float32, copies by name, or None where there is none.
EMA: dict[str, Callable[[Training], Update | dict[str, Copy] | None]] = {"ema": _make_averages}


def make_ema(training: Training) -> dict[str, Copy]:
    """Make the copies that the config asks for, by name."""
    ema: dict[str, Copy] = {}
    for name, make in EMA.items():
        made = make(training)
        if isinstance(made, dict):
            ema |= made
        elif made is not None:
            ema[name] = Copy(made)
    return ema


def init_ema(ema: dict[str, Copy], params: Tree) -> dict[str, Any]:
    """Return new copies of the trained parameters as a part of the state: {} or {"copies": {name: tree}}."""
    # `d=copy.dtype` binds the value now: a lambda sees the variable of the loop as it is when it is called.
    trees = {name: jax.tree.map(lambda p, d=copy.dtype: p.astype(d), params) for name, copy in ema.items()}
    return write_ema(ema, {"copies": trees} if trees else {})


def read_ema(ema: dict[str, Copy], state: dict[str, Any]) -> dict[str, Tree]:
    """Return the copies of a state by name, all in the memory of the devices."""
    trees = state.get("copies", {})
    return {name: to_device_memory(tree) if ema[name].on_host else tree for name, tree in trees.items()}


def update_ema(ema: dict[str, Copy], trees: dict[str, Tree], params: Tree) -> dict[str, Any]:
    """Return the copies after a step that came to `params`, as a part of the state: {} or {"copies": {name: tree}}."""
    new = {name: ema[name].update(tree, params) for name, tree in trees.items()}
    return {"copies": new} if new else {}


def write_ema(ema: dict[str, Copy], state: dict[str, Any]) -> dict[str, Any]:
    """Return the copies of a state where they are kept between two steps: {} or {"copies": {name: tree}}."""
    if "copies" not in state:
        return {}
    trees = state["copies"]
    return {"copies": {name: to_host_memory(tree) if ema[name].on_host else tree for name, tree in trees.items()}}
