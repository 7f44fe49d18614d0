"""The methods of a sink, and the facts that it gets at the start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Start:
    """A run, as it begins or goes on."""

    folder: Path
    config: dict[str, Any]  # every key: {"model": {"num_layers": 3, ...}, ...}
    step: int  # steps that are done already
    last_step: int


class Sink(Protocol):
    """A class that is made with a `Start` when the run begins."""

    def write(self, record: dict[str, Any], group: str) -> None:
        """Take a record of numbers by name, with its `step`; `group` is `train`, or the split of an evaluation."""

    def text(self, name: str, text: str, step: int) -> None:
        """Take a text of several lines."""

    def image(self, name: str, png: bytes, step: int) -> None:
        """Take a picture."""

    def close(self, error: BaseException | None) -> None:
        """End with the run: `error` is the one that ends it, None at its proper end."""


def give_table(sink: Sink, name: str, rows: list[dict[str, Any]], text: str, step: int) -> None:
    """Give rows with the same keys to a sink that has a method `table`, and `text`, which shows them, to another."""
    if hasattr(sink, "table"):
        sink.table(name, rows, text, step)
    else:
        sink.text(name, text, step)
