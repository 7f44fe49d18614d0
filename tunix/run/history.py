"""History of a run, as its folder has it: its keys, and the lines of metrics.jsonl. The folder may be a copy."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix.base.errors import UserError
from tunix.base.files import read_json_lines
from tunix.base.text import flat
from tunix.config.saved_runs import read_saved
from tunix.run.goodput import SPLIT

Line = dict[str, Any]  # one line of metrics.jsonl: numbers by name
NEEDED = ("step", "tokens", "step_time_s", "tokens_per_s", "tokens_per_s_per_device")  # in each line of training


@dataclass(frozen=True)
class History:
    """The config of a run, and the numbers that it logged."""

    name: str
    folder: Path
    keys: dict[str, Any]  # every key by its dotted name
    steps: list[Line]  # of training, one for each step; a step that ran twice has the newer line; maybe none yet
    evaluations: list[Line]  # of held-out data, one for each evaluated step
    goodput: Line | None  # the newest line about where its time went (run/goodput.py)
    seconds: float  # sum of the times of all steps; a step that ran twice (a resumed run) counts twice

    @property
    def metric(self) -> str:
        """The number by which models are compared: the reward in a run with rewards, else the loss."""
        return "reward" if any("reward" in line for line in self.steps) else "loss"

    @property
    def num_devices(self) -> int:
        """Devices of the newest step; a run may be resumed on another number of them."""
        last = self.steps[-1]
        return round(last["tokens_per_s"] / last["tokens_per_s_per_device"])


def read_history(folder: Path) -> History:
    """Read a run's folder, whose name is the name of the run.

    Raises:
        UserError: it is no folder of a run, or has a line of training that lacks a number.
    """
    lines = folder / "metrics.jsonl"
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is no folder of a run: it has no config.yaml")
    # A run of older code gets today's keys, or each new key would be a difference.
    keys = flat(read_saved(folder))

    def report(number: int) -> None:  # a crash has left a part of a line in the middle
        print(f"{lines}, line {number}, is no JSON object: it is left out", file=sys.stderr)

    records = [_keep_numbers(line) for line in read_json_lines(lines, report)] if lines.is_file() else []
    steps = [record for record in records if "split" not in record]
    for name in NEEDED:
        if any(record.get(name) is None for record in steps):
            raise UserError(f"{lines}: a line of training has no {name}, so the run cannot be compared")
    if any(record.get("step") is None for record in records):
        raise UserError(f"{lines}: a line of {SPLIT} or of held-out data has no step, so the run cannot be compared")
    current: list[Line] = []
    for record in records:
        # Lines behind a step from which the run went on later are left out: that model is another one.
        while current and current[-1]["step"] > record["step"]:
            current.pop()
        current.append(record)
    steps_now = [record for record in current if "split" not in record]
    held_out = [record for record in current if record.get("split") == "held_out"]
    goodput = next((record for record in reversed(records) if record.get("split") == SPLIT), None)
    seconds = sum(record["step_time_s"] for record in steps)
    name = folder.resolve().name
    return History(name, folder, keys, _keep_latest(steps_now), _keep_latest(held_out), goodput, seconds)


def _keep_numbers(line: Line) -> Line:
    """Return what a line has of numbers that can be computed with, and its split; a damaged one may have anything."""
    return {
        sys.intern(key): value  # one text for all lines, not one in each
        for key, value in line.items()
        if value is None or key == "split" or type(value) is float or (type(value) is int and abs(value) < 1e300)
    }


def _keep_latest(lines: list[Line]) -> list[Line]:
    """Return the lines in the order of their steps; of several lines for one step, the last that was written."""
    # A resumed run repeats the steps behind its checkpoint. In a dict the later line replaces the earlier one.
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]
