"""Tables as text."""

import io

from rich.console import Console
from rich.table import Table


def as_text(table: Table, width: int = 160) -> str:
    """Format the table as lines of at most `width` characters."""
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
