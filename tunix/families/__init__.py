"""Families of models: the names of their tensors and of their keys at Hugging Face, one file for each.

A family is a file here, whose `FAMILY` says its names, and a file of values, conf/model/family/NAME.yaml, which says
its parts. Both may be somebody's own (docs/extending.md). Imports no jax.
"""

from importlib import import_module
from pathlib import Path

from tunix.base.dotted import import_object, is_dotted
from tunix.families.family import Family, Name

__all__ = ["FAMILIES", "Family", "Name", "find_family"]

NO_FAMILIES = {"__init__", "family", "shared_names"}  # files of this folder that are not families
FAMILIES: dict[str, Family] = {
    path.stem: import_module(f"{__name__}.{path.stem}").FAMILY
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem not in NO_FAMILIES
}


def find_family(name: str) -> Family:
    """Return the family of a name in `FAMILIES`, or of a dotted path."""
    found = import_object(name, Family) if is_dotted(name) else FAMILIES[name]
    assert isinstance(found, Family)
    return found
