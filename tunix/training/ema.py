"""Copies of the trained parameters that the state carries beside them, like their moving averages.

`state["copies"]` is {name: tree}; it is not there where the config asks for no copy. A copy starts as the parameters,
and is laid out as the optimizer works on them. A new kind of copy is a function here, and its row in `EMA`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.config import Training
from tunix.sharding.arrays import to_host_memory

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


# Each takes the training section and returns copies by name.
EMA: dict[str, Callable[[Training], dict[str, Copy]]] = {"ema": _make_averages}


def make_ema(training: Training) -> dict[str, Copy]:
    """Make the copies that the config asks for, by name."""
    return {name: copy for make in EMA.values() for name, copy in make(training).items()}


def init_ema(ema: dict[str, Copy], params: Tree) -> dict[str, Tree]:
    """Return new copies of the trained parameters by name, where they are kept between two steps."""
    # `d=copy.dtype` binds the value now: a lambda sees the variable of the loop as it is when it is called.
    trees = {name: jax.tree.map(lambda p, d=copy.dtype: p.astype(d), params) for name, copy in ema.items()}
    return move_ema(ema, trees, to_host_memory)


def move_ema(ema: dict[str, Copy], trees: dict[str, Tree], move: Callable[[Tree], Tree]) -> dict[str, Tree]:
    """Return copies by name, moved by `to_host_memory` or `to_device_memory` where they are kept on the host."""
    return {name: move(tree) if ema[name].on_host else tree for name, tree in trees.items()}
