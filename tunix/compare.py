"""Compare runs: the keys that differ, their numbers, and their losses.

python -m tunix.compare RUN RUN ...                  tables and a picture in the terminal
python -m tunix.compare RUN RUN ... --html FILE      the same as a page that needs no other file
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunix.base.errors import UserError
from tunix.base.text import flat, print_table
from tunix.config.upgrade_saved import read_saved
from tunix.processes import exits

# Curves in a terminal: each character is a grid of 2 x 4 dots of braille.
#
# U+2800 + bits     1   8       bit of each dot, as Unicode numbers them: rows 1 to 3 came first,
#                   2  10       the fourth row was added later
#                   4  20
#                  40  80

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of the dot in a row and column of a character
TERMINAL_COLOURS = ("blue", "red", "green", "magenta", "yellow", "cyan", "white")

Curve = list[tuple[float, float]]


def plot_curves(curves: dict[str, Curve], title: str, width: int = 90, height: int = 16) -> Text:
    """Return curves by name as lines of text, with the ranges of both axes; `width` and `height` are in characters."""
    points = [point for curve in curves.values() for point in curve]
    (left, right), (low, high) = ((min(each), max(each)) for each in zip(*points, strict=True))
    grid = [[(0, "") for _ in range(width)] for _ in range(height)]
    for (_, curve), colour in zip(curves.items(), TERMINAL_COLOURS * len(curves), strict=False):
        for x, y in curve:
            column = round((x - left) / ((right - left) or 1) * (2 * width - 1))
            # Row 0 is the top of the picture, and the highest value.
            row = round((high - y) / ((high - low) or 1) * (4 * height - 1))
            # A character has one colour: where two curves meet in it, that of the later curve.
            bits, _ = grid[row // 4][column // 2]
            grid[row // 4][column // 2] = (bits | DOTS[row % 4][column % 2], colour)
    text = Text(f"{title}\n")
    for number, row_of_cells in enumerate(grid):
        edge = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}.get(number, "")
        text.append(f"{edge:>10} ")
        for bits, colour in row_of_cells:
            text.append(chr(0x2800 + bits) if bits else " ", colour)
        text.append("\n")
    text.append(f"{'':11}{left:<{width // 2}.4g}{right:>{width - width // 2}.4g}\n")
    for name, colour in zip(curves, TERMINAL_COLOURS * len(curves), strict=False):
        text.append(f"{'':11}{name}\n", colour)
    return text


# History of a run, read from its folder: config.yaml and metrics.jsonl.

Line = dict[str, Any]  # one line of metrics.jsonl: numbers by name
IGNORED = ("resume", "dry_run", "run_name")  # keys that say nothing about how a run trains
NEEDED = (
    "step",
    "tokens",
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
)  # in each line of training
AXES = {"step": "steps", "tokens": "tokens", "hours": "hours of steps"}  # of the picture, with their titles


@dataclass(frozen=True)
class History:
    """The config of a run, and the numbers that it logged."""

    name: str
    folder: Path
    keys: dict[str, Any]  # every key by its dotted name
    steps: list[Line]  # of training, one for each step; a step that ran twice has the newer line
    evaluations: list[Line]  # of held-out data, one for each evaluated step
    seconds: float  # sum of the times of all steps; a step that ran twice (a resumed run) counts twice

    @property
    def metric(self) -> str:
        """The number that the pictures show: the reward in a run with rewards, else the loss."""
        return "reward" if any("reward" in line for line in self.steps) else "loss"

    @property
    def num_devices(self) -> int:
        """Devices of the newest step; a run may be resumed on another number of them."""
        last = self.steps[-1]
        return round(last["tokens_per_s"] / last["tokens_per_s_per_device"])

    def curve(self, axis: str, split: str) -> list[tuple[float, float]]:
        """Return the points of `metric` over an axis of `AXES`; `split` is train or held_out.

        A held-out line has its step and no time. It stands where the training line of the same step stands.
        """
        hours, elapsed = {}, 0.0
        for line in self.steps:
            elapsed += line["step_time_s"] / 3600
            hours[line["step"]] = elapsed
        tokens = {line["step"]: line["tokens"] for line in self.steps}
        readers: dict[str, Callable[[int], float | None]] = {
            "step": float,
            "tokens": tokens.get,
            "hours": hours.get,
        }
        points = []
        for line in self.steps if split == "train" else self.evaluations:
            x, y = readers[axis](line["step"]), line.get(self.metric)
            if x is not None and y is not None:
                points.append((x, y))
        return points


def read_history(folder: Path) -> History:
    """Read a run's folder, whose name is the name of the run.

    Raises:
        UserError: it is no folder of a run, has no line of training, or one that lacks a number.
    """
    lines = folder / "metrics.jsonl"
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is no folder of a run: it has no config.yaml")
    # A run of older code gets today's keys, or each new key would be a difference.
    keys = flat(read_saved(folder))
    records = _read_lines(lines) if lines.is_file() else []
    steps = [record for record in records if "split" not in record]
    if not steps:
        raise UserError(f"{folder} has no line of training in metrics.jsonl, which logging.sinks=[jsonl] writes")
    for name in NEEDED:
        if any(name not in record for record in steps):
            raise UserError(f"{lines}: a line of training has no {name}, so the run cannot be compared")
    held_out = [record for record in records if record.get("split") == "held_out"]
    seconds = sum(record["step_time_s"] for record in steps)
    return History(folder.resolve().name, folder, keys, _keep_newest(steps), _keep_newest(held_out), seconds)


def _read_lines(file: Path) -> list[Line]:
    records = []
    for number, text in enumerate(file.read_text(errors="replace").splitlines(), 1):
        if not text.endswith("}"):  # the run is writing this line, or was killed while it wrote it
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:  # a crash has left a part of a line in the middle
            print(f"{file}, line {number}, is no JSON object: it is left out", file=sys.stderr)
    return records


def read_histories(folders: list[Path]) -> list[History]:
    """Read several runs. Each is named by its run_name or its folder; two with the same name, by their full paths."""
    found = [read_history(folder) for folder in folders]
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


def thin(curve: list[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """Return at most `limit` points: means of neighbours where there are more."""
    size = -(-len(curve) // limit)
    if size <= 1:
        return curve
    groups = [curve[first : first + size] for first in range(0, len(curve), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _format_number(history: History, number: Callable[[History], str]) -> str:
    """Return the text of a number; empty where the run does not have it."""
    try:
        return number(history)
    except (KeyError, IndexError, ValueError, TypeError, statistics.StatisticsError):
        return ""


def _format_best(history: History) -> str:
    """Return the best held-out number with its step: the highest reward, or the lowest loss."""
    lines = [line for line in history.evaluations if line.get(history.metric) is not None]
    better = max if history.metric == "reward" else min
    best = better(lines, key=lambda line: line[history.metric])
    return f"{best[history.metric]:.4f} (step {best['step']:,})"


def _find_median(history: History, key: str) -> float:
    """Return the median of a number over all steps but the first: that one may wait for the compiler."""
    lines = history.steps[1:] or history.steps
    return statistics.median(line[key] for line in lines if line[key] is not None)


# Rows of the table of numbers: a title, and what formats the number of one run. A row may fail where the run does not
# have its number, a loss on held-out data for example; the cell is then empty.
NUMBERS: dict[str, Callable[[History], str]] = {
    "steps": lambda run: (
        f"{run.steps[-1]['step']:,} of {int(run.keys['training.max_steps']):,}"
        if run.keys.get("training.max_steps")
        else f"{run.steps[-1]['step']:,}"
    ),
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
    "waiting for data": lambda run: f"{sum(line['data_wait_s'] for line in run.steps) / run.seconds:.1%}",
    "peak memory of a device": lambda run: f"{max(line['peak_memory_gib'] for line in run.steps):.2f} GiB",
    "devices": lambda run: f"{run.num_devices:,}",
    "hours of steps": lambda run: f"{run.seconds / 3600:.3g}",
    "device hours": lambda run: f"{run.seconds / 3600 * run.num_devices:.3g}",
}


def _keep_newest(lines: list[Line]) -> list[Line]:
    """Return the lines in the order of their steps; of several lines for one step, the last that was written."""
    # A resumed run repeats the steps behind its checkpoint. In a dict the later line replaces the earlier one.
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


def _as_text(value: Any) -> str:
    """Format a value of the config as users type it."""
    return "null" if value is None else json.dumps(value) if isinstance(value, list | bool) else str(value)


# A page of HTML about several runs, which needs no other file: tables, and curves as SVG.

PAGE_COLOURS = ("#2f6fde", "#d1495b", "#2e933c", "#8f4fbf", "#c77d0a", "#17808c", "#666666")
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 460, 300, 56, 16, 34, 12  # of a picture and its margins
MAX_POINTS = 400  # of a curve; a longer one is made of means

STYLE = """
:root { color-scheme: light dark; --ink: #1d1f24; --pale: #6a6f7a; --line: #d9dce2; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ee; --pale: #9aa0ab; --line: #363b45; --back: #16181d; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 24px auto;
  max-width: 1440px; padding: 0 20px; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin-top: 32px; }
table { border-collapse: collapse; } .scroll { overflow-x: auto; }
th, td { text-align: left; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
th { font-weight: 600; } td:first-child, th:first-child { white-space: nowrap; color: var(--pale); font-weight: 400; }
figure { margin: 0; } .pictures { display: flex; flex-wrap: wrap; gap: 12px; } svg { max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--pale); } svg .axis { stroke: var(--line); }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px; }
.note { color: var(--pale); }
"""


def make_page(histories: list[History]) -> str:
    """Return the page as text."""
    names = [
        f'<span class="swatch" style="background:{colour}"></span>{escape(each.name)}'
        for each, colour in zip(histories, PAGE_COLOURS * len(histories), strict=False)
    ]
    metric = histories[0].metric
    pictures = "".join(f"<figure>{_plot(histories, axis)}</figure>" for axis in AXES)
    folders = "".join(f"<li>{name} <span class='note'>{escape(str(each.folder))}</span></li>"
                      for name, each in zip(names, histories, strict=True))  # fmt: skip
    differences = list_differences(histories)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{len(histories)} runs</title><style>{STYLE}</style></head><body>
<h1>{len(histories)} runs</h1>
<ul>{folders}</ul>
<h2>Numbers</h2>
{_html_table("", names, list_results(histories))}
<h2>{metric.capitalize()}</h2>
<p class="note">Solid: training. Dashed: held out.</p>
<div class="pictures">{pictures}</div>
<h2>Keys that differ</h2>
{_html_table("key", names, differences) if differences else "<p>The configs are equal.</p>"}
</body></html>
"""


def _html_table(corner: str, names: list[str], rows: list[tuple[str, list[str]]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in [corner, *names])
    body = ""
    for title, values in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for value in [title, *values])
        body += f"<tr>{cells}</tr>\n"
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def _plot(histories: list[History], axis: str) -> str:
    """Return the curves of all runs over one axis as SVG."""
    metric = histories[0].metric
    curves = {
        (each.name, split): thin(each.curve(axis, split), MAX_POINTS)
        for each in histories
        for split in ("train", "held_out")
    }
    points = [point for curve in curves.values() for point in curve]
    xs, ys = sorted(x for x, _ in points), sorted(y for _, y in points)
    # A loss begins at 10 and ends near 3: with the first steps in the picture, all later ones would be one flat line.
    # So the highest 3 % of the points are cut off. The clip path below cuts the lines that leave the frame.
    high = ys[-1] if metric == "reward" else ys[min(len(ys) - 1, round(0.97 * len(ys)))]
    x, y = _scale(xs[0], xs[-1], LEFT, WIDTH - RIGHT), _scale(ys[0], high, HEIGHT - BOTTOM, TOP)
    parts = []
    for value in ticks(ys[0], high):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(xs[0], xs[-1], 4):
        parts.append(
            f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{shorten(value)}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{AXES[axis]}</text>')
    frame = f'x="{LEFT}" y="{TOP - 4}" width="{WIDTH}" height="{HEIGHT - BOTTOM - TOP + 8}"'
    parts.append(f'<clipPath id="clip-{axis}"><rect {frame}/></clipPath><g clip-path="url(#clip-{axis})">')
    for number, ((name, split), curve) in enumerate(curves.items()):  # two curves a run, in one colour
        if curve:
            line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in curve)
            title = f"{name}, {split.replace('_', ' ')}: {curve[-1][1]:.4f} at the end"
            parts.append(
                _polyline(line, PAGE_COLOURS[number // 2 % len(PAGE_COLOURS)], title, dashed=split == "held_out")
            )
    label = f"{metric} by {AXES[axis]}"
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{label}">{body}</g></svg>'


def _polyline(points: str, colour: str, title: str, dashed: bool) -> str:
    """Return a curve of SVG."""
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    style = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"{dashes}'
    return f'<polyline points="{points}" {style}><title>{escape(title)}</title></polyline>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers between two, for the labels of an axis: ticks(0, 9) is 0, 2, 4, 6, 8."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    first = -(-low // size)  # rounded up: the first tick lies within the axis
    return [round(size * n, 12) for n in range(int(first), int(high // size) + 1)]


def shorten(value: float) -> str:
    """Return a number as a label: 1,500,000 as 1.5M."""
    for unit, char in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{char}"
    return f"{value:g}"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear map from [low, high] to [start, end]."""
    return lambda value: start + (value - low) / ((high - low) or 1) * (end - start)


def main() -> int:
    """Compare the runs of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m tunix.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument("--by", choices=tuple(AXES), default="step", help="axis of the picture in the terminal")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page")
    parser.add_argument("--json", action="store_true", help="print numbers and keys as JSON")
    arguments = parser.parse_args()

    def work() -> None:
        histories = read_histories([path.expanduser() for path in arguments.runs])
        if arguments.json:
            print(json.dumps(as_json(histories), indent=1))
        else:
            show(histories, arguments.by)
        if arguments.html:
            try:
                arguments.html.write_text(make_page(histories))
            except OSError as error:
                raise UserError(f"--html {arguments.html} cannot be written: {error.strerror}") from None
            print(f"written: {arguments.html}", file=sys.stderr)

    return exits.report_errors(work)


def show(histories: list[History], axis: str) -> None:
    """Print numbers, keys that differ, and the losses over `axis`."""
    names = [each.name for each in histories]
    print_table(_table("numbers", names, list_results(histories)))
    print()
    if differences := list_differences(histories):
        print_table(_table("keys that differ", names, differences))
    else:
        print("the configs are equal")
    print("\n")
    # 160 points are enough: a picture of 90 characters has 180 dots side by side.
    curves = {each.name: thin(each.curve(axis, "train"), 160) for each in histories}
    title = f"{histories[0].metric} by {AXES[axis]}"
    # A narrower console would break the lines of the picture.
    Console(width=max(110, Console().width)).print(plot_curves(curves, title), end="")


def as_json(histories: list[History]) -> dict:
    """Return what `show` prints in tables, as values for JSON."""
    return {
        "runs": [{"name": each.name, "folder": str(each.folder)} for each in histories],
        "numbers": dict(list_results(histories)),
        "differences": dict(list_differences(histories)),
    }


def _table(title: str, names: list[str], rows: list[tuple[str, list[str]]]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for key, values in rows:
        table.add_row(key, *values)
    return table


if __name__ == "__main__":
    sys.exit(main())
