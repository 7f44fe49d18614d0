"""Ids under which other programs know a run; a resumed run keeps them. They are in run_ids.json of its folder:

{"wandb": "9c1f2ab0", "mlflow": "5d0e..."}
"""

import json
import threading
from pathlib import Path

from tunix.base.disk import write_whole

_changing = threading.Lock()  # each sink has a thread of its own, and each adds its id to the same file


def read_id(folder: Path, sink: str) -> str | None:
    """Return the id that a sink has given to the run; None if it has none yet."""
    path = folder / "run_ids.json"
    return json.loads(path.read_text()).get(sink) if path.is_file() else None


def keep_id(folder: Path, sink: str, value: str) -> None:
    """Write the id that a sink has given to the run."""
    path = folder / "run_ids.json"
    with _changing:
        ids = json.loads(path.read_text()) if path.is_file() else {}
        write_whole(path, json.dumps(ids | {sink: value}, indent=1) + "\n")
