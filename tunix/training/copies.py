"""Copies of the trained parameters that the state carries beside them, like their moving averages.

`state["copies"]` is {name: tree}; it is not there where the config asks for no copy. A copy starts as the parameters,
and is laid out as the optimizer works on them. A new kind of copy is a function here, and its row in `COPIES`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.config import Training

Tree = dict[str, Any]
Update = Callable[[Tree, Tree], Tree]  # (copy, trained parameters after the step) -> copy after the step


class Copy(NamedTuple):
    """A copy of the parameters: how a step changes it, and the dtype in which it is kept."""

    update: Update
    dtype: str = "float32"


def _moving_averages(training: Training) -> dict[str, Copy]:
    """Exponential moving averages over steps, one for each of `training.ema_decay`."""

    def average(decay: float) -> Copy:
        share = 1 - decay

        def move(a: jax.Array, p: jax.Array) -> jax.Array:
            """Move the average by a share 1 - decay to the parameter, in float32."""
            now = a.astype(jnp.float32)
            return (now + share * (p - now)).astype(a.dtype)

        return Copy(lambda average, params: jax.tree.map(move, average, params), training.ema_dtype)

    return {name: average(decay) for name, decay in training.ema_names.items()}


# Each takes the training section: the update of its copy in float32, copies by name, or None where there is none.
COPIES: dict[str, Callable[[Training], Update | dict[str, Copy] | None]] = {"ema": _moving_averages}


def make_copies(training: Training) -> dict[str, Copy]:
    """The copies that the config asks for, by name."""
    copies: dict[str, Copy] = {}
    for name, make in COPIES.items():
        made = make(training)
        if isinstance(made, dict):
            copies |= made
        elif made is not None:
            copies[name] = Copy(made)
    return copies


def start_copies(dtypes: dict[str, str], params: Tree) -> dict[str, Tree]:
    """New copies of the trained parameters, by name, as a part of the state: {} or {"copies": {name: tree}}."""
    copies = {name: jax.tree.map(lambda p, d=dtype: p.astype(d), params) for name, dtype in dtypes.items()}
    return {"copies": copies} if copies else {}


def update_copies(copies: dict[str, Copy], trees: dict[str, Tree], params: Tree) -> dict[str, Any]:
    """The copies after a step that came to `params`, as a part of the state: {} or {"copies": {name: tree}}."""
    new = {name: copies[name].update(tree, params) for name, tree in trees.items()}
    return {"copies": new} if new else {}
