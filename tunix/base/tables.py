"""Tables as text."""

import io

from rich.console import Console
from rich.table import Table


def print_table(table: Table) -> None:
    """Print the table; a file or a pipe gets lines as wide as the table needs, where a terminal would cut cells."""
    console = Console()
    if console.is_terminal:
        console.print(table)
    else:
        print(as_text(table, width=10_000), end="")


def as_text(table: Table, width: int = 160) -> str:
    """Format the table as lines of at most `width` characters."""
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
