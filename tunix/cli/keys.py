"""Keys of the config as users type them, read from the pydantic types of `tunix.config`."""

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from tunix.base.section import read_descriptions
from tunix.config import Config, Section


def list_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key as users type it, with its description; for a union, the keys of each variant in turn."""
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        kinds = list_sections(field.annotation)
        for kind in kinds:
            yield from list_keys(kind, f"{key}.")
        if not kinds:
            yield key, read_descriptions(section).get(name, "")


def list_sections(annotation: Any) -> list[type[Section]]:
    """Return the section that a field holds, or the members of a union of sections; none for a plain value."""
    annotation = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
    return [kind for kind in _list_types(annotation) if isinstance(kind, type) and issubclass(kind, Section)]


def find_variants(section: type[BaseModel] = Config) -> dict[tuple[str, str], type[Section]]:
    """Return the members of all unions (data sources, optimizers), by the key and the value that tell them apart."""
    found: dict[tuple[str, str], type[Section]] = {}
    for field in section.model_fields.values():
        kinds = list_sections(field.annotation)
        found |= {(tag_key(kind), tag(kind)): kind for kind in kinds} if len(kinds) > 1 else {}
        for kind in kinds:
            found |= find_variants(kind)
    return found


def variant_of(values: Mapping[str, Any]) -> type[Section] | None:
    """Return the member of a union that has these values, or None."""
    members = (find_variants().get((name, str(values.get(name)))) for name in TAGS)
    return next(filter(None, members), None)


def without_tags(path: list[str], root: type[Section] = Config) -> tuple[list[str], type[Section] | None, bool]:
    """Return a path as users type it, the member of a union that it leads through, and whether null is legal there.

    In the path of an error pydantic puts the tag of a union's member before the member's keys: data, text, paths. A
    plain value of several types has the type that was tried behind its key: shared_filesystem, bool.
    """
    parts: list[str] = []
    rest, kinds = list(path), [root]
    member: type[Section] | None = None
    types_of_value: list[Any] = []
    while rest and kinds:
        if len(kinds) > 1:
            member = {tag(kind): kind for kind in kinds}.get(rest[0])
            kinds = [member] if member else []
            rest = rest[1:] if member else rest
            continue
        field = next((field for name, field in kinds[0].model_fields.items() if rest[0] in (name, field.alias)), None)
        parts.append(rest.pop(0))
        annotation: Any = field.annotation if field else None
        if rest and typing.get_origin(annotation) is dict:  # a name that the user chose comes next
            parts.append(rest.pop(0))
            annotation = typing.get_args(annotation)[1]
        kinds = list_sections(annotation)
        types_of_value = _list_types(annotation)
    if not kinds and len([kind for kind in types_of_value if kind is not type(None)]) > 1:
        rest = rest[1:]
    return [*parts, *rest], member, type(None) in types_of_value


def _list_types(annotation: Any) -> list[Any]:
    """Return the members of a union, and what is no union alone."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return list(typing.get_args(annotation)) if union else [annotation]


TAGS = ("source", "name", "kind")  # keys that tell the members of a union apart: a member has one of them


def tag_key(kind: type[Section]) -> str:
    """The key that tells a member of a union apart."""
    return next(name for name in TAGS if name in kind.model_fields)


def tag(kind: type[Section]) -> str:
    """The value of this key."""
    return typing.get_args(kind.model_fields[tag_key(kind)].annotation)[0]
