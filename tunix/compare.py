"""Compare runs, `python -m tunix.compare RUN RUN ...`: the keys that differ, and their numbers side by side.

Everything comes from config.yaml and metrics.jsonl of the runs' folders, which may be copies. TensorBoard draws the
curves: `tensorboard --logdir outputs/`.
"""

import json
import statistics
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from tunix.base.errors import FlagParser, UserError
from tunix.base.files import expand_home
from tunix.base.text import as_typed, print_table
from tunix.processes import exits
from tunix.run.goodput import describe
from tunix.run.history import History, read_history

IGNORED = ("resume", "dry_run", "run_name")  # keys that say nothing about how a run trains


def read_histories(folders: list[Path]) -> list[History]:
    """Read several runs. Each is named by its run_name or its folder; two with the same name, by their full paths.

    Raises:
        UserError: a folder is none of a run, or has no line of training.
    """
    found = [read_history(folder) for folder in folders]
    if empty := next((each.folder for each in found if not each.steps), None):
        raise UserError(f"{empty} has no line of training in metrics.jsonl, which logging.sinks=[jsonl] writes")
    short = [str(each.keys.get("run_name") or each.name) for each in found]
    names = [name if short.count(name) == 1 else str(each.folder) for name, each in zip(short, found, strict=True)]
    return [replace(each, name=name) for name, each in zip(names, found, strict=True)]


def list_differences(histories: list[History]) -> list[tuple[str, list[str]]]:
    """Return the keys that are not the same in all runs, with the value in each run."""
    rows = []
    for key in sorted(set().union(*(each.keys for each in histories))):
        values = [_as_text(each.keys[key]) if key in each.keys else "" for each in histories]
        if key not in IGNORED and len(set(values)) > 1:
            rows.append((key, values))
    return rows


def list_results(histories: list[History]) -> list[tuple[str, list[str]]]:
    """Return the numbers that some run has, each with its title and its text for each run."""
    rows = [(title, [_format_number(each, number) for each in histories]) for title, number in NUMBERS.items()]
    return [(title, values) for title, values in rows if any(values)]


def _format_number(history: History, number: Callable[[History], str]) -> str:
    """Return the text of a number; empty where the run does not have it."""
    try:
        return number(history)
    except (KeyError, IndexError, ValueError, TypeError, ArithmeticError, statistics.StatisticsError):
        return ""


def _format_best(history: History) -> str:
    """Return the best held-out number with its step: the highest reward, or the lowest loss."""
    lines = [line for line in history.evaluations if line.get(history.metric) is not None]
    # Without any score the reward is 0, and no best one (`HeldOutAnswers.cost`).
    num_samples = history.keys.get("evaluation.num_samples", 1)
    lines = [line for line in lines if line.get("reward_errors", 0) < line.get("prompts", 1) * num_samples]
    better = max if history.metric == "reward" else min
    best = better(lines, key=lambda line: line[history.metric])
    return f"{best[history.metric]:.4f} (step {best['step']:,})"


def _find_median(history: History, key: str) -> float:
    """Return the median of a number over all steps but the first: that one may wait for the compiler."""
    lines = history.steps[1:] or history.steps
    return statistics.median(line[key] for line in lines if line[key] is not None)


def _sum(history: History, key: str) -> float:
    return sum(line[key] for line in history.steps)


def _format_steps(history: History) -> str:
    limit = history.keys.get("training.max_steps")
    return f"{history.steps[-1]['step']:,}" + (f" of {int(limit):,}" if limit else "")


# Rows of the table of numbers: a title, and what formats the number of one run. A row may fail where the run does not
# have its number, a loss on held-out data for example; the cell is then empty.
NUMBERS: dict[str, Callable[[History], str]] = {
    "steps": _format_steps,
    "tokens": lambda run: f"{run.steps[-1]['tokens']:,}",
    "final loss": lambda run: f"{run.steps[-1]['loss']:.4f}",
    "final reward": lambda run: f"{run.steps[-1]['reward']:.4f}",
    "final held-out loss": lambda run: f"{run.evaluations[-1]['loss']:.4f}",
    "final held-out reward": lambda run: f"{run.evaluations[-1]['reward']:.4f}",
    "best held out": _format_best,
    "final bits per byte": lambda run: f"{run.evaluations[-1]['bits_per_byte']:.4f}",
    "tokens/s (median)": lambda run: f"{_find_median(run, 'tokens_per_s'):,.0f}",
    "tokens/s of a device": lambda run: f"{_find_median(run, 'tokens_per_s_per_device'):,.0f}",
    "MFU (median)": lambda run: f"{_find_median(run, 'mfu'):.1%}",
    "waiting for data": lambda run: f"{_sum(run, 'data_wait_s') / _sum(run, 'step_time_s'):.1%}",
    "goodput": lambda run: describe(run.goodput or {}),
    "peak memory of a device": lambda run: f"{max(line['peak_memory_gib'] for line in run.steps):.2f} GiB",
    "devices": lambda run: f"{run.num_devices:,}",
    "hours of steps": lambda run: f"{run.seconds / 3600:.3g}",
    "device hours": lambda run: f"{run.seconds / 3600 * run.num_devices:.3g}",
}


def _as_text(value: Any) -> str:
    """Format a value of the config as users type it."""
    return json.dumps(value) if isinstance(value, list) else as_typed(value)


def main() -> int:
    """Compare the runs of the command line; returns the exit code."""
    parser = FlagParser("python -m tunix.compare", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument("--json", action="store_true", help="print numbers and keys as JSON")
    arguments = parser.parse_args()

    def work() -> None:
        histories = read_histories([expand_home(path) for path in arguments.runs])
        print(json.dumps(as_json(histories), indent=1)) if arguments.json else show(histories)

    return exits.report_errors(work)


def show(histories: list[History]) -> None:
    """Print numbers, and keys that differ."""
    names = [each.name for each in histories]
    print_table(_make_table("numbers", names, list_results(histories)))
    print()
    if differences := list_differences(histories):
        print_table(_make_table("keys that differ", names, differences))
    else:
        print("the configs are equal")


def _make_table(title: str, names: list[str], rows: list[tuple[str, list[str]]]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for key, values in rows:
        table.add_row(key, *values)
    return table


def as_json(histories: list[History]) -> dict:
    """Return what `show` prints in tables, as values for JSON."""
    return {
        "runs": [{"name": each.name, "folder": str(each.folder)} for each in histories],
        "numbers": dict(list_results(histories)),
        "differences": dict(list_differences(histories)),
    }


if __name__ == "__main__":
    sys.exit(main())
