"""Sinks: where the numbers, texts and pictures of a run go. Process 0 writes them; `logging.sinks` names them.

To add one, write its class and add it to `SINKS`. Nothing here imports jax: the config asks for the names.
"""

from collections.abc import Callable

from tunix.base.errors import did_you_mean
from tunix.sinks.jsonl import Jsonl
from tunix.sinks.sink import Sink, Start
from tunix.sinks.tensorboard import TensorBoard
from tunix.sinks.terminal import Terminal

__all__ = ["SINKS", "Sink", "Start", "check_name"]

SINKS: dict[str, Callable[[Start], Sink]] = {"jsonl": Jsonl, "tensorboard": TensorBoard, "terminal": Terminal}


def check_name(name: str) -> str:
    """The name of a sink; raises `ValueError` for another."""
    if name not in SINKS:
        raise ValueError(f"expected one of {', '.join(SINKS)}{did_you_mean(name, list(SINKS))}")
    return name
