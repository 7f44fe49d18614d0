"""Keys of the config as users type them, read from the pydantic types of `tunix.config`."""

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from tunix.base.section import read_descriptions
from tunix.config import Config, Section


def list_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key as users type it, with its description.

    A union of sections (data sources, optimizers, tasks) gives the keys of all its members, so a key may come twice.
    """
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


def list_members(key: str) -> list[type[Section]]:
    """Return the sections that a key of the config may hold: several for a union, none for a plain value."""
    kinds: list[type[Section]] = [Config]
    for part in key.split("."):
        fields = [field for kind in kinds for name, field in kind.model_fields.items() if part in (name, field.alias)]
        kinds = list_sections(fields[0].annotation) if fields else []
    return kinds


def is_mapping(key: str) -> bool:
    """Return whether a key of the config takes names that the user chooses, like training.compiler_options."""
    section, _, name = key.rpartition(".")
    fields = [kind.model_fields[name] for kind in list_members(section) if name in kind.model_fields]
    return any(typing.get_origin(field.annotation) is dict for field in fields)


def find_variants(section: type[BaseModel] = Config) -> dict[tuple[str, str], type[Section]]:
    """Return the members of all unions (data sources, optimizers), by the key and the value that tell them apart."""
    found: dict[tuple[str, str], type[Section]] = {}
    for field in section.model_fields.values():
        kinds = list_sections(field.annotation)
        found |= {(find_tag_key(kind), find_tag(kind)): kind for kind in kinds} if len(kinds) > 1 else {}
        for kind in kinds:
            found |= find_variants(kind)
    return found


def find_variant(values: Mapping[str, Any]) -> type[Section] | None:
    """Return the section that these values are meant for, by their tag; None if they have no known tag."""
    members = (find_variants().get((name, str(values.get(name)))) for name in TAGS)
    return next(filter(None, members), None)


def drop_tags(path: list[str], root: type[Section] = Config) -> tuple[list[str], type[Section] | None, bool]:
    """Return a path as users type it, the member of a union that it leads through, and whether null is legal there.

    pydantic adds two kinds of words to the path of an error, which are no keys:

        data, text, paths                      the tag of a union's member      the user types data.paths
        distributed, shared_filesystem, bool   the type that it tried           ... distributed.shared_filesystem
    """
    parts: list[str] = []
    rest, kinds = list(path), [root]
    member: type[Section] | None = None
    types_of_value: list[Any] = []
    while rest and kinds:
        if len(kinds) > 1:
            member = {find_tag(kind): kind for kind in kinds}.get(rest[0])
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


def find_tag_key(kind: type[Section]) -> str:
    """Return the key that tells a member of a union apart: `source` of the data sources."""
    return next(name for name in TAGS if name in kind.model_fields)


def find_tag(kind: type[Section]) -> str:
    """Return the value of this key: `jsonl` of a source that reads such files."""
    return typing.get_args(kind.model_fields[find_tag_key(kind)].annotation)[0]
