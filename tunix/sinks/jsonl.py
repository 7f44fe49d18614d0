"""metrics.jsonl: one JSON object a line, for each record of numbers."""

import json
from typing import Any

from tunix.sinks.sink import Start


class Jsonl:
    """The file metrics.jsonl in the run's folder; a resumed run appends to it."""

    def __init__(self, start: Start):
        # Line by line (buffering=1): a run that is killed has lost no line, and `tail -f` shows each step.
        self.file = (start.folder / "metrics.jsonl").open("a", buffering=1)

    def write(self, record: dict[str, Any], group: str) -> None:
        self.file.write(json.dumps(record) + "\n")

    def text(self, name: str, text: str, step: int) -> None:
        """Texts are in the log."""

    def image(self, name: str, png: bytes, step: int) -> None:
        """Pictures are files of their own."""

    def close(self, error: BaseException | None) -> None:
        self.file.close()
