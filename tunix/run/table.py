"""Sinks: where the numbers, texts and images of a run go. Process 0 writes them; `logging.sinks` names them.

To add one, write its class and add it to `SINKS`. Nothing here imports jax: the config asks for the names.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunix.base.dotted_path import blame_user, import_object, is_dotted
from tunix.base.errors import UserError
from tunix.run.remote_sinks import Mlflow, Prometheus, Wandb, Webhook
from tunix.run.sinks import Background, Jsonl, Sink, Start, TensorBoard, Terminal

__all__ = ["SINKS", "Sink", "Start", "find_sink", "open_sink", "try_out"]

SINKS: dict[str, Callable[[Start], Sink]] = {
    "jsonl": Jsonl,
    "tensorboard": TensorBoard,
    "terminal": Terminal,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "webhook": Webhook,
    "prometheus": Prometheus,
}


def find_sink(name: str) -> Callable[[Start], Sink]:
    """Return the class of a row of the table, or of a dotted path."""
    return import_object(name) if is_dotted(name) else SINKS[name]


def open_sink(name: str, start: Start) -> Sink:
    """Return the sink of a row or a dotted path. One that may wait for a server works in a thread of its own."""
    make = find_sink(name)
    if is_dotted(name) or getattr(make, "in_background", False):
        return Background(name, make, start)
    return make(start)


def try_out(name: str, config: dict[str, Any]) -> None:
    """Raise `UserError` where a sink cannot work: a package or a key is missing, or the code of a user fails.

    A sink of a dotted path gets what a run gives it, in a temporary folder. `config` has the values of every key.
    """
    if not is_dotted(name):
        if check := getattr(find_sink(name), "check", None):
            check(config["logging"])
        return
    with blame_user("logging.sinks", name), tempfile.TemporaryDirectory() as folder:
        sink = find_sink(name)(Start(Path(folder), config, step=0, last_step=1))
        if missing := [method for method in ("write", "text", "image", "close") if not hasattr(sink, method)]:
            raise UserError(
                f"logging.sinks={name} has no {' and no '.join(missing)}; let the class derive from "
                "tunix.run.table.Sink, whose methods do nothing"
            )
        sink.write({"step": 1, "loss": 1.0}, "train")
        sink.text("report", "a made-up text", 1)
        sink.image("image", b"a made-up image", 1)
        sink.close(None)
