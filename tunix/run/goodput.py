"""Goodput: the share of a run's wall time in which it trained, over all its restarts, and where the rest went.

    start         from the start of the program until it waits for the compiler: joining, data, weights, a checkpoint
    compile       waiting for the compiler
    data          steps that waited for their batch
    checkpoint    steps that waited while a checkpoint was begun, and the end of the last one
    evaluation    held-out data
    stops         between the last sign of one start and the next start
    lost_steps    steps behind the checkpoint that a restart went on from: they were trained again
    other         what is left: writing, traces, tables

Each line of `metrics.jsonl` with `"split": "goodput"` has the seconds of the whole run up to then. A restart reads the
newest one, and the times of the steps behind it; so nothing else is kept.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunix.base.files import read_json_lines

SPLIT = "goodput"
COUNTED = ("start", "compile", "data", "checkpoint", "evaluation", "stops", "lost_steps")


class Goodput:
    """Seconds of a run by what they went to. Process 0 has the numbers of its run; the others count their own."""

    def __init__(self, elapsed_s: float):
        """`elapsed_s` are the seconds since this program began."""
        self.started_at = time.time() - elapsed_s
        self.before_s = 0.0  # from the begin of the run to this start
        # A clock that is set while the run trains would give negative seconds: those of this start are counted without.
        self.start_time = time.monotonic() - elapsed_s
        self.seconds = dict.fromkeys(("train", *COUNTED), 0.0)

    def go_on(self, file: Path, step: int) -> None:
        """Add what earlier starts have written into metrics.jsonl; this one goes on behind `step`."""
        latest: dict[str, Any] | None = None
        behind: list[dict[str, Any]] = []  # lines of steps behind the newest line of goodput
        lost: list[dict[str, Any]] = []  # lines of steps behind `step`, which this start trains again, in order
        for line in read_json_lines(file) if file.is_file() else ():
            number = line.get("step")
            if not isinstance(number, int):
                continue
            if line.get("split") == SPLIT and _has_numbers(line, [*(f"{name}_s" for name in self.seconds), *CLOCK]):
                latest, behind = line, []
                # A start goes on behind the step of this line. Later steps that stand before it are counted as lost.
                while lost and lost[-1]["step"] > number:
                    lost.pop()
            elif "split" not in line and _has_numbers(line, ("step_time_s", "data_wait_s")):
                behind.append(line)
                if number > step:
                    lost.append(line)
        if latest is None:
            return
        for name in self.seconds:
            self.seconds[name] += latest[f"{name}_s"]
        for line in behind:
            self.record_step(line)
        for line in lost:
            self.seconds["train"] -= line["step_time_s"] - line["data_wait_s"]
            self.seconds["data"] -= line["data_wait_s"]
            self.seconds["lost_steps"] += line["step_time_s"]
        until_last_sign_s = latest["total_s"] + sum(line["step_time_s"] for line in behind)
        stop_s = max(0.0, self.started_at - latest["began_at"] - until_last_sign_s)
        self.seconds["stops"] += stop_s
        self.before_s = until_last_sign_s + stop_s

    def record_step(self, line: dict[str, Any]) -> None:
        """Count a step of this start by its line of metrics.jsonl."""
        self.seconds["train"] += line["step_time_s"] - line["data_wait_s"]
        self.seconds["data"] += line["data_wait_s"]

    def end_start(self) -> None:
        """Count the time since the program began as its start."""
        self.seconds["start"] += time.monotonic() - self.start_time

    @contextmanager
    def count(self, name: str) -> Iterator[None]:
        """Count the seconds of a block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin

    def record(self, step: int) -> dict[str, Any]:
        """Return the line of metrics.jsonl after `step`."""
        total = self.before_s + time.monotonic() - self.start_time
        seconds = {f"{name}_s": value for name, value in self.seconds.items()}
        other = max(0.0, total - sum(seconds.values()))
        share = min(1.0, max(0.0, self.seconds["train"] / max(total, 1e-9)))
        return {
            "step": step, "split": SPLIT, "goodput": share, **seconds, "other_s": other, "total_s": total,
            "began_at": time.time() - total,  # by the clock of now: the next start counts from now, by the same clock
        }  # fmt: skip


CLOCK = ("total_s", "began_at")


def _has_numbers(line: dict[str, Any], keys: Iterable[str]) -> bool:
    """Return whether a line of metrics.jsonl has these numbers; a damaged one may lack them."""
    return all(isinstance(line.get(key), int | float) for key in keys)


def describe(line: dict[str, Any]) -> str:
    """Return the share of a line, and its causes by size: "81% (compile 9%, start 6%, lost steps 4%)"."""
    total = max(line["total_s"], 1e-9)
    causes = {name: line[f"{name}_s"] / total for name in (*COUNTED, "other")}
    main_causes = sorted((name for name in causes if causes[name] >= 0.005), key=lambda name: -causes[name])
    texts = [f"{name.replace('_', ' ')} {causes[name]:.0%}" for name in main_causes]
    return f"{line['goodput']:.0%}" + (f" ({', '.join(texts)})" if texts else "")
