"""Optimizers and schedules: the choices of the groups `optimizer` and `scheduler`, with what they compute.

To add an optimizer, write its class (`rules.py`) and add it to `OPTIMIZERS`; to add a schedule, add a shape to `SHAPES`
(`schedules.py`). Nothing here imports jax until it is called.
"""

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from tunix.optimizers.rules import SGD, Adafactor, AdamW, Custom, Lion, Muon, Optimizer, ParameterGroup
from tunix.optimizers.schedules import SHAPES, Scheduler

__all__ = ["OPTIMIZERS", "SHAPES", "AnyOptimizer", "Optimizer", "ParameterGroup", "Scheduler"]

OPTIMIZERS = (AdamW, Adafactor, Lion, Muon, SGD, Custom)

# A type checker needs a type that it can read. At run time pydantic chooses the class by the value of the key `name`.
if TYPE_CHECKING:
    AnyOptimizer = Optimizer
else:
    AnyOptimizer = Annotated[Union[OPTIMIZERS], Field(discriminator="name")]  # noqa: UP007
