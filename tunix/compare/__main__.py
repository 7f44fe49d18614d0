"""Compare runs: the keys that differ, their numbers, and their losses.

python -m tunix.compare RUN RUN ...                  tables and a picture in the terminal
python -m tunix.compare RUN RUN ... --html FILE      the same as a page that needs no other file
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tunix.base.errors import UserError
from tunix.base.tables import print_table
from tunix.compare.braille import draw_curves
from tunix.compare.history import AXES, History, list_differences, list_results, read_histories, thin
from tunix.compare.page import make_page
from tunix.processes import exits


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
    title = f"{histories[0].measure} by {AXES[axis]}"
    # A narrower console would break the lines of the picture.
    Console(width=max(110, Console().width)).print(draw_curves(curves, title), end="")


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
