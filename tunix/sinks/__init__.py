"""Sinks: where the numbers, texts and pictures of a run go. Process 0 writes them; `logging.sinks` names them.

To add one, write its class and add it to `SINKS`. Nothing here imports jax: the config asks for the names.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from tunix.base.dotted import blame_user, import_object, is_dotted
from tunix.sinks.jsonl import Jsonl
from tunix.sinks.sink import Sink, Start
from tunix.sinks.tensorboard import TensorBoard
from tunix.sinks.terminal import Terminal

__all__ = ["SINKS", "Sink", "Start", "find_sink", "try_out"]

SINKS: dict[str, Callable[[Start], Sink]] = {"jsonl": Jsonl, "tensorboard": TensorBoard, "terminal": Terminal}


def find_sink(name: str) -> Callable[[Start], Sink]:
    """Return the class of a row of the table, or of a dotted path."""
    return import_object(name) if is_dotted(name) else SINKS[name]


def try_out(name: str) -> None:
    """Raise `UserError` where the sink of a dotted path cannot take what a run gives it, in a temporary folder."""
    if not is_dotted(name):
        return
    with blame_user("logging.sinks", name), tempfile.TemporaryDirectory() as folder:
        sink = find_sink(name)(Start(Path(folder), config={}, step=0, last_step=1))
        sink.write({"step": 1, "loss": 1.0}, "train")
        sink.text("report", "a made-up text", 1)
        sink.image("picture", b"a made-up picture", 1)
        sink.close(None)
