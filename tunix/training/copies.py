"""Copies of the trained parameters that the state carries beside them, like their moving average.

`state["copies"]` is {name: tree}; it is not there where the config asks for no copy. A copy starts as the parameters,
in float32, and is laid out as the optimizer works on them. A new copy is a function here, and its row in `COPIES`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tunix.config import Training

Tree = dict[str, Any]
Update = Callable[[Tree, Tree], Tree]  # (copy, trained parameters after the step) -> copy after the step


def _moving_average(training: Training) -> Update | None:
    """Exponential moving average over steps: each moves it by a share 1 - `training.ema_decay` to the parameters."""
    if training.ema_decay is None:
        return None
    share = 1 - training.ema_decay
    return lambda average, params: jax.tree.map(lambda a, p: a + share * (p - a), average, params)


# Each takes the training section; None where it asks for no such copy.
COPIES: dict[str, Callable[[Training], Update | None]] = {"ema": _moving_average}


def make_updates(training: Training) -> dict[str, Update]:
    """The update of each copy that the config asks for, by name."""
    updates = {name: make(training) for name, make in COPIES.items()}
    return {name: update for name, update in updates.items() if update is not None}


def start_copies(names: list[str], params: Tree) -> dict[str, Tree]:
    """New copies of the trained parameters, as a part of the state: {} or {"copies": {name: tree}}."""
    copies = {name: jax.tree.map(lambda p: p.astype(jnp.float32), params) for name in names}
    return {"copies": copies} if copies else {}


def update_copies(updates: dict[str, Update], copies: dict[str, Tree], params: Tree) -> dict[str, Any]:
    """The copies after a step that came to `params`, as a part of the state: {} or {"copies": {name: tree}}."""
    new = {name: updates[name](copy, params) for name, copy in copies.items()}
    return {"copies": new} if new else {}
