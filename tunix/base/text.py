"""Tables as text, values as YAML text or packed, nested dicts as flat ones."""

import base64
import io
import json
import sys
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

# [/INST] is text, and so is :smile:. In a notebook rich shows a table itself, and writes nothing into the file.
AS_IT_IS: dict[str, Any] = {"markup": False, "emoji": False, "force_jupyter": False}


def print_table(table: Table) -> None:
    """Print the table; a file or a pipe gets lines as wide as the table needs, where a terminal would cut cells."""
    if sys.stdout.isatty():
        Console(**AS_IT_IS).print(table)
    else:
        print(as_text(table, width=10_000))


def as_text(table: Table, width: int = 160) -> str:
    """Format the table as lines of at most `width` characters."""
    out = io.StringIO()
    # FORCE_COLOR, which Jupyter and some services set, would put orders to a terminal into the text.
    Console(file=out, width=width, force_terminal=False, **AS_IT_IS).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def format_table(
    title: str, columns: Sequence[str], left: Collection[str], rows: Iterable[Sequence[str]], width: int = 190
) -> str:
    """Format rows of cells as lines of at most `width` characters; all columns but `left` are aligned to the right."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return as_text(table, width)


def format_rows(rows: Mapping[str, str], title: str | None = None) -> str:
    """Format names and texts as lines, the texts beside one another."""
    table = Table(show_header=False, box=None, title=title, title_justify="left")
    for name, text in rows.items():
        table.add_row(name, text)
    return as_text(table)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes by libyaml, where PyYAML has it: OmegaConf's own way takes ten times as long."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # a list that is there twice is written twice: easier to read and to change


def _represent_text(dumper: Any, text: str) -> yaml.ScalarNode:
    # PyYAML quotes what it would read as another type. OmegaConf reads more numbers, `1e5` among them, and other
    # readers of YAML more words for true and false.
    style = "'" if text in {"y", "Y", "n", "N"} else None
    with suppress(ValueError):
        float(text)
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def format_yaml(values: Any) -> str:
    """Return plain values, in their order, as YAML text that OmegaConf reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def as_typed(value: Any) -> str:
    """Return a value as users type it: null, true and false are not Python's words."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key: {"a": {"b": 1}} becomes {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def pack(values: dict[str, Any]) -> str:
    """Return values for JSON as a short text, of which `unpack` makes the same values, to the digit; "" of none."""
    return base64.b64encode(zlib.compress(json.dumps(values).encode())).decode() if values else ""


def unpack(text: str) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(text))) if text else {}
