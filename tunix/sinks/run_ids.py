"""Ids under which other programs know a run; a resumed run keeps them. They stand in run_ids.json of its folder."""

import json
from pathlib import Path


def read_id(folder: Path, sink: str) -> str | None:
    """Return the id that a sink has given to the run; None if it has none yet."""
    path = folder / "run_ids.json"
    return json.loads(path.read_text()).get(sink) if path.is_file() else None


def keep_id(folder: Path, sink: str, value: str) -> None:
    """Write the id that a sink has given to the run."""
    path = folder / "run_ids.json"
    ids = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(ids | {sink: value}, indent=1) + "\n")
