"""Names of other programs, and what they are here: the rows of conf/foreign_names.yaml."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tunix.base.config_types import CONF
from tunix.sharding.table import axis_names

# The answer to a value that is the default: words for it would undo those for another name of the same key.
LEFT_OUT = "leave it out, a run does so without a word"


@dataclass(frozen=True)
class ForeignName:
    """Names of another program that mean the same, and what they are here; conf/foreign_names.yaml has the fields."""

    project: str
    there: tuple[str, ...]
    value: str | None = None  # an example
    here: str = ""
    unit: str = ""
    values: dict[str, str] | None = None  # by their value in lower case
    shown: tuple[str, ...] = ()  # values that the page lists: of the row's own table, the first of each entry
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
        if value.startswith("["):
            entries = entries.replace("[VALUE]", value)
        return entries.replace("VALUE", value)

    def is_default(self, value: str) -> bool:
        """Return whether a value of theirs is what a run does without a word."""
        return (self.values or {}).get(value.strip("'\"").lower()) == ""

    def answer(self, value: str) -> str:
        """Return what the name is here, with the value of theirs, as the end of a message."""
        # A link of the page is named by its file.
        unit, remark = (re.sub(r"\[\w+\]\(([^)#]+)[^)]*\)", r"docs/\1", text) for text in (self.unit, self.remark))
        if not self.here and not self.values:
            return f"tunix has none: {remark}"
        if self.is_default(value):
            return LEFT_OUT
        if entries := self.translate(value):
            return f"here it is {entries}{f' ({remark})' if remark else ''}"
        # The task whose key it is stays; other values are examples.
        keys = re.sub(r"(?<!task)=\S+|=\S+$", "", self.here or next(iter((self.values or {}).values())))
        return f"here it is {keys}{f': {unit}' if unit else ', whose values docs/config.md lists'}"


@cache
def read_values() -> dict[str, dict[str, str]]:
    """Return for each key of ours our words by the value of another program, in lower case."""
    return {key: _split_names(table) for key, table in _read_file()["values"].items()}


def _split_names(table: Mapping[Any, str]) -> dict[str, str]:
    """Return a table of values with a key for each of their words, in lower case."""
    return {theirs: ours for names, ours in table.items() for theirs in str(names).lower().split()}


@cache
def read_rows() -> list[ForeignName]:
    """Read all rows, in the order of the file."""
    rows = []
    for project in _read_file()["projects"]:
        for row in project["rows"]:
            own = row.get("values")
            values = read_values()[own] if isinstance(own, str) else own and _split_names(own)
            others: Any = {name: str(row[name]) for name in row.keys() - {"there", "values"}}
            shown = tuple(str(names).lower().split()[0] for names in own) if isinstance(own, dict) else ()
            others |= {"values": values, "shown": shown}
            rows.append(ForeignName(project["name"], tuple(row["there"].split()), **others))
    return rows


@cache
def _read_file() -> dict:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster
    return yaml.load((CONF / "foreign_names.yaml").read_text(), loader)


# Last parts of names that say nothing without their section: wandb.enabled is no profile.enabled.
SAYS_LITTLE = (
    *("enabled", "enable", "value", "interval", "freq", "keep", "mode", "name", "type", "format", "path", "paths"),
    *("n", "id", "args", "every", *axis_names()),
)


@cache
def _index_rows() -> tuple[dict[str, ForeignName], dict[str, ForeignName]]:
    """Return the rows by their names, and by the last part of names with points; the first row of a name wins."""
    names: dict[str, ForeignName] = {}
    leaves: dict[str, ForeignName] = {}
    for row in read_rows():
        for name in map(normalize, row.there):
            names.setdefault(name, row)
            leaves.setdefault(name.rpartition(".")[2], row)
    return names, {name: row for name, row in leaves.items() if name in names or name not in SAYS_LITTLE}


@cache
def list_single_keys() -> dict[str, str]:
    """Return the names of other programs that are one key here, with this key."""
    keys = {name: re.fullmatch(r"([\w.]+)=VALUE", row.here) for name, row in _index_rows()[1].items()}
    return {name: key[1] for name, key in keys.items() if key}


def find_row(key: str, own_leaves: Collection[str]) -> ForeignName | None:
    """Return the row of a name: the longest end of it that is a name of theirs, else its last part alone.

    `own_leaves` are last parts of keys of ours, which do not answer alone.
    """
    names, leaves = _index_rows()
    remaining = normalize(key)
    leaf = remaining.rpartition(".")[2]
    while remaining:
        if remaining in names:
            return names[remaining]
        remaining = remaining.partition(".")[2]
    return None if leaf in own_leaves else leaves.get(leaf)


def find_key(key: str, value: str | None, own_leaves: Collection[str]) -> str:
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
