"""What names of other programs are here: the rows of conf/foreign_names.yaml, which says what their fields mean."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import yaml

from tunix.base.config_types import CONF


@dataclass(frozen=True)
class Row:
    """Names of another program that mean the same, and what they are here; conf/foreign_names.yaml has the fields."""

    project: str
    there: tuple[str, ...]
    value: str | None = None  # an example
    here: str = ""
    unit: str = ""
    values: dict[str, str] | None = None  # by their value in lower case
    lists_values: bool = False  # the values are the row's own, not those of a table that other rows share
    remark: str = ""
    axis: str = ""

    def translate(self, value: str) -> str:
        """Return our words for a value of theirs; empty where the value has no words here, or another unit."""
        if self.values and (word := value.strip("'\"").lower()) in self.values:
            return self.values[word]
        if self.values or self.unit:
            return ""
        parts = [part.strip() for part in value.strip("[()] ").split(",")]
        entries = re.sub(r"VALUE\.(\d)", lambda match: parts[min(int(match[1]), len(parts) - 1)], self.here)
        return entries.replace("VALUE", value)

    def answer(self, value: str) -> str:
        """Return what the name is here, with the value of theirs, as the end of a message."""
        # A link of the page is named by its file.
        unit, remark = (re.sub(r"\[\w+\]\(([^)#]+)[^)]*\)", r"docs/\1", text) for text in (self.unit, self.remark))
        if not self.here and not self.values:
            return f"tunix has none: {remark}"
        if entries := self.translate(value):
            return f"here it is {entries}{f' ({remark})' if remark else ''}"
        keys = re.sub(r"=\S+", "", self.here or next(iter((self.values or {}).values())))
        return f"here it is {keys}{f': {unit}' if unit else ', whose values docs/config.md lists'}"


@cache
def read_values() -> dict[str, dict[str, str]]:
    """Return for each key of ours our words by the value of another program, in lower case."""
    tables = _read_file()["values"]
    return {key: {theirs: ours for names, ours in table.items() for theirs in str(names).split()}
            for key, table in tables.items()}  # fmt: skip


@cache
def read_rows() -> list[Row]:
    """Read all rows, in the order of the file."""
    rows = []
    for project in _read_file()["projects"]:
        for row in project["rows"]:
            own = row.get("values")
            values = read_values()[own] if isinstance(own, str) else own and {str(k).lower(): v for k, v in own.items()}
            texts = {name: str(row[name]) for name in ("value", "here", "unit", "remark", "axis") if name in row}
            rows.append(
                Row(
                    project["name"],
                    tuple(row["there"].split()),
                    values=values,
                    lists_values=isinstance(own, dict),
                    **texts,  # type: ignore[arg-type]
                )
            )
    return rows


@cache
def _read_file() -> dict:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster
    return yaml.load((CONF / "foreign_names.yaml").read_text(), loader)


@cache
def _index() -> tuple[dict[str, Row], dict[str, Row]]:
    """Return the rows by their names, and by the last part of names with points; the first row of a name wins."""
    names: dict[str, Row] = {}
    leaves: dict[str, Row] = {}
    for row in read_rows():
        for name in map(normalize, row.there):
            names.setdefault(name, row)
            leaves.setdefault(name.rpartition(".")[2], row)
    return names, leaves


def find_row(key: str, own_leaves: Collection[str] = ()) -> Row | None:
    """Return the row of a name: the longest end of it that is a name of theirs, else its last part alone.

    `own_leaves` are last parts of keys of ours, which do not answer alone.
    """
    names, leaves = _index()
    remaining = normalize(key)
    leaf = remaining.rpartition(".")[2]
    while remaining:
        if remaining in names:
            return names[remaining]
        remaining = remaining.partition(".")[2]
    return None if leaf in own_leaves else leaves.get(leaf)


def find_key(key: str, value: str | None = None, own_leaves: Collection[str] = ()) -> str:
    """Return what a name of another program is here, as the end of a message; empty for an unknown name.

    A mapping is answered leaf by leaf: dp_config={name: hsdp, param_dtype: bfloat16}.
    """
    row = find_row(key, own_leaves)
    if value is not None and value.strip("'\"").startswith("{"):
        leaves = re.findall(r"(\w+) *: *([^\s,{}'\"]+)", value)
        answers = [find_key(f"{key}.{name}", each, own_leaves) for name, each in leaves]
        if any(answers) and (row is None or not row.unit):
            return "; ".join(filter(None, answers))
    return row.answer(row.value or "" if value is None else value) if row else ""


def find_value(key: str, value: str) -> str:
    """Return what the value of another program is here, as the end of a message; empty for an unknown value."""
    tables = read_values()
    entries = tables.get(key, tables.get(f"{key}.name", {})).get(value.lower())
    return f"; here it is {entries}" if entries else ""


def normalize(name: str) -> str:
    """Return a name as the rows are compared: in lower case, with underscores."""
    return name.lower().replace("-", "_")
