"""Write docs/config.md from the types in tunix/config and the values in conf/: `make docs`."""

import typing
from pathlib import Path
from typing import Any

from tunix.compose import CONF, compose, sections
from tunix.config import Config, Section

HEAD = """# Config keys

Made from `tunix/config/` and `conf/` by `make docs`. Any key can be set on the command line (`training.seq_len=512`);
a part of the config is chosen by name (`optimizer=lion`). Values are those of `model=tiny`, the default.
"""
NAMES = {int: "integer", float: "number", bool: "true, false", str: "text", type(None): "null", Any: "mesh"}


def page() -> str:
    """The reference as Markdown."""
    parts = [HEAD, "## Root\n", _table(Config, "", compose([]).config)]
    for group, field in Config.model_fields.items():
        for kind in sections(field.annotation):
            choices = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
            tag = _tag(kind) if len(sections(field.annotation)) > 1 else None
            parts.append(f"## {group}{f'={tag}' if tag else ''}\n")
            about = " ".join((kind.__doc__ or "").split())
            parts.append(about + ("" if tag else f" Choices: {', '.join(f'`{group}={c}`' for c in choices)}.") + "\n")
            parts.append(_table(kind, f"{group}.", getattr(_config(group, tag), group)))
    return "\n".join(parts)


def _config(group: str, tag: str | None) -> Config:
    words = [f"{group}={tag}"] if tag else []
    words += ["data.paths=[PATH]"] if tag == "text" else []
    return compose([*words, "data.cache_dir='~/.cache/tunix'"]).config


def _tag(kind: type[Section]) -> str:
    field = kind.model_fields.get("source") or kind.model_fields["name"]
    return typing.get_args(field.annotation)[0]


def _table(kind: type[Section], prefix: str, values: Section) -> str:
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        if not sections(field.annotation):
            meaning = " ".join((field.description or "").split())
            shown = _shown(getattr(values, name))
            rows.append(f"| `{prefix}{field.alias or name}` | {_takes(field.annotation)} | `{shown}` | {meaning} |")
    return "\n".join(rows) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _takes(annotation: Any) -> str:
    """What may be given, in words."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _takes(parts[0])
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if origin in (tuple, dict):
        return {tuple: "list", dict: "mapping"}[origin]
    return " or ".join(dict.fromkeys(map(_takes, parts))) if parts else NAMES[annotation]


if __name__ == "__main__":
    Path(__file__).with_name("config.md").write_text(page())
