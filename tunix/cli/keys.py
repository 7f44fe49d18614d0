"""The keys of the config as users type them, read off its types."""

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from tunix.config import Config, Section


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key as users type it, with its pydantic field; variants of a union one after the other."""
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        kinds = sections(field.annotation)
        for kind in kinds:
            yield from keys(kind, f"{key}.")
        if not kinds:
            yield key, field


def sections(annotation: Any) -> list[type[Section]]:
    """The section that a field holds, or the members of a union of them; none for a plain value."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def variants(section: type[BaseModel] = Config) -> dict[str, type[Section]]:
    """The sections that are members of a union (data sources, optimizers), by the value that tells them apart."""
    found: dict[str, type[Section]] = {}
    for field in section.model_fields.values():
        kinds = sections(field.annotation)
        found |= {tag(kind): kind for kind in kinds} if len(kinds) > 1 else {}
        for kind in kinds:
            found |= variants(kind)
    return found


def tag(kind: type[Section]) -> str:
    """The value that tells a member of a union apart."""
    field = kind.model_fields.get("source") or kind.model_fields["name"]
    return typing.get_args(field.annotation)[0]
