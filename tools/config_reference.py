"""Write docs/config.md from the types in tunix/config and the values in conf/: `make docs`."""

import typing
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from tunix.base.config_types import Choices, list_options, read_descriptions
from tunix.config import Config, Section
from tunix.config.compose import compose
from tunix.config.mistakes import find_tag, find_tag_key, list_sections

HEAD = """# Config keys

This page lists every key of a run, for everybody who looks one up: its type, its default and its meaning.

- Set a key on the command line: `training.seq_len=512`. Choose a file of values by group and name: `optimizer=lion`.
- Defaults are those of `model=tiny`, the default model. `python run_training.py ... --cfg job` prints a whole config.
- `python -m tunix.generate --help` lists the keys of that command, and so do the other commands.

People set these keys most: `model`, `model.init_from`, `model.mesh_shape`, `data`, `data.paths`, `training.seq_len`,
`training.micro_batch_size`, `training.global_batch_size`, `training.max_steps`, `optimizer.learning_rate`,
`checkpoint.save_every_steps`, `evaluation.every_steps`, `resume`.

`make docs` makes this page from `tunix/config/` and `conf/`.
"""
PART = "{source: synthetic, held_out_fraction: 0.01, num_documents: 1, mean_document_bytes: 1}"
FUNCTION = "tunix.base.text:as_text"  # a dotted path is imported when it is checked
REQUIRED = {  # words that a choice does not compose without
    **{
        f"data={name}": ["data.paths=[PATH]"]
        for name in ("text", "jsonl", "csv", "parquet", "pairs", "labelled", "tokens")
    },
    "data=hf": ["data.path=NAME"],
    "data=reasoning_gym": ["data.tasks={chain_sum: {}}"],
    "data=custom": [f"data.function={FUNCTION}"],
    "data=mixture": [f"data.parts={{NAME: {PART}}}", "data.weights={NAME: 1}"],
    "optimizer=custom": [f"optimizer.function={FUNCTION}"],
    "task=grpo": ["sampling.max_new_tokens=64"],  # model=tiny trains on sequences of 128 tokens
    "task=classify": ["task.labels=null"],
    "launcher=kubernetes": ["launcher.image=NAME", "launcher.volume_claim=NAME"],
}
NAMES = {int: "integer", float: "number", bool: "true, false", str: "text", type(None): "null", Any: "mesh"}


def page() -> str:
    """The reference as Markdown."""
    parts = ["## Root\n", _table(Config, "", compose([]).config)]
    links = []
    for group, field in Config.model_fields.items():
        kinds = list_sections(field.annotation)
        for kind in kinds:
            choices = list_options(group)
            choice = find_tag(kind) if len(kinds) > 1 else None
            parts.append(f"## {group}{f'={choice}' if choice else ''}\n")
            if kind is kinds[0]:
                links.append(f"[{group}](#{group}{choice or ''})")  # a heading's "=" is not in its anchor
            offered = "" if choice else f" Choices: {', '.join(f'`{group}={c}`' for c in choices)}."
            parts.append(_about(kind) + offered + "\n")
            values = getattr(_config(group, choice), group)
            parts.append(_table(kind, f"{group}.", values))
            parts += _nested(kind, group, values)
    contents = f"Groups: [root](#root), {', '.join(links)}.\n"
    return "\n".join([HEAD, contents, *parts])


def _nested(section: type[Section], group: str, values: Section) -> list[str]:
    """Sections within a section; of a union, each member, with values where it is the one chosen."""
    parts = []
    for name, field in section.model_fields.items():
        kinds = list_sections(field.annotation)
        for kind in kinds:
            choice = f".{find_tag_key(kind)}={find_tag(kind)}" if len(kinds) > 1 else ""
            parts.append(f"### {group}.{name}{choice}\n\n{_about(kind)}\n")
            chosen = getattr(values, name)
            parts.append(_table(kind, f"{group}.{name}.", chosen if isinstance(chosen, kind) else None))
    return parts


def _about(kind: type[Section]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _config(group: str, tag: str | None) -> Config:
    choice = f"{group}={tag}"
    words = [choice, *REQUIRED.get(choice, [])] if tag else []
    return _compose(*words, "loading.cache_dir='~/.cache/tunix'")


@cache
def _compose(*words: str) -> Config:
    return compose(list(words)).config


def _table(kind: type[Section], prefix: str, values: Section | None) -> str:
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        if not list_sections(field.annotation):
            meaning = read_descriptions(kind).get(name, "")
            shown = f"`{_shown(getattr(values, name))}`".replace(FUNCTION, "MODULE:NAME") if values else ""
            cells = f"`{prefix}{field.alias or name}`", _takes_field(field), shown, meaning
            rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_shown(each)}' for name, each in value.items())}}}"
    if isinstance(value, Section):
        return "..."
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _takes_field(field: FieldInfo) -> str:
    """Return in words what a key takes."""
    for mark in field.metadata:
        if isinstance(mark, Choices):
            return ", ".join(f"`{choice}`" for choice in mark.names) + ", or a dotted path"
    return _takes(field.annotation)


def _takes(annotation: Any) -> str:
    """Return in words what a type takes."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _takes(parts[0])
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if origin in (tuple, dict):
        return {tuple: "list", dict: "mapping"}[origin]
    return " or ".join(dict.fromkeys(map(_takes, parts))) if parts else NAMES[annotation]


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "config.md").write_text(page())
