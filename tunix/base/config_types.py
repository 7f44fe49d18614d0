"""Types of the values of a config, the base of its sections, and the folder that holds the values."""

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Collection
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from tunix.base.dotted_path import import_object, is_dotted, suggest_colon
from tunix.base.errors import did_you_mean
from tunix.base.files import is_plain

# The folder that holds the values of all keys.
PACKAGED = Path(__file__).parents[1] / "conf"  # in an installed wheel
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"  # in a clone


def read_version() -> str:
    """Return the version of tunix: of the clone, or of the installed wheel; "unknown" in a bare copy of the code."""
    if PYPROJECT.is_file():
        return tomllib.loads(PYPROJECT.read_text())["project"]["version"]
    try:
        return metadata.version("tunix-trainer")
    except metadata.PackageNotFoundError:
        return "unknown"


CONF = PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[2] / "conf"


def list_options(group: str) -> list[str]:
    """Return the names of the files of a group of values: conf/GROUP/NAME.yaml."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def reject_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


def _plain(name: str) -> str:
    if not is_plain(name):
        raise ValueError("must be a name of a folder below outputs/")
    return name


def _one_line(name: str) -> str:
    if len(name.splitlines()) > 1:  # scripts of launchers have the name in a comment
        raise ValueError("expected one line of text")
    return name


def _temperature(value: float) -> float:
    if 0 < value < 1e-6:  # logits divided by it are no numbers any more
        raise ValueError("must be 0, which takes the likeliest token, or at least 1e-6")
    return value


Count = Annotated[int, BeforeValidator(reject_bool), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(reject_bool), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(reject_bool), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(reject_bool), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(reject_bool), Field(ge=0, le=1)]
Decay = Annotated[float, BeforeValidator(reject_bool), Field(ge=0, lt=1)]  # at 1 an average would never move
Seed = Annotated[int, BeforeValidator(reject_bool), Field(ge=0, lt=2**31)]  # an int32 in compiled programs
Temperature = Annotated[NonNegative, AfterValidator(_temperature)]
Flag = Annotated[bool, Field(strict=True)]
ProjectName = Annotated[str, AfterValidator(_plain)]
RunName = Annotated[str, AfterValidator(_one_line)]
Regex = Annotated[str, AfterValidator(_regex)]


def _check_path(path: str, kind: type | None = None) -> str:
    import_object(path, kind)
    return path


DottedPath = Annotated[str, AfterValidator(lambda path: _check_path(path))]
# A name that is looked up later, in a table whose module imports jax; a dotted path is imported at once.
NameOrPath = Annotated[str, AfterValidator(lambda name: _check_path(name) if is_dotted(name) else name)]


class Choices(NamedTuple):
    """Mark of a type: names that it takes, for the page of keys."""

    names: tuple[str, ...]


def row_of(table: Collection[str], kind: type | None = None) -> Any:
    """Return the type of a key that takes the name of an entry of the table, or a dotted path (to a `kind`)."""

    def check(name: str) -> str:
        if is_dotted(name):
            return _check_path(name, kind)
        if name not in table:
            hint = suggest_colon(name) or did_you_mean(name, list(table))
            raise ValueError(f"expected one of {', '.join(table)}, or package.module:name{hint}")
        return name

    return Annotated[str, AfterValidator(check), Choices(tuple(table))]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    def __str__(self) -> str:
        """The values as a user types them: `{kind:gated,activation:silu}`."""
        values = self.model_dump(mode="json", by_alias=True)
        return "{" + ",".join(f"{name}:{'null' if value is None else value}" for name, value in values.items()) + "}"


@cache
def _read_classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the source of the classes of a module, parsed once: `inspect.getsource` parses the file for each class."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@cache
def read_descriptions(section: type[Section]) -> dict[str, str]:
    """Return the description of every key of a section: the string below the key in the source, on one line.

    pydantic can read them when it makes the class (`use_attribute_docstrings`). But it then parses the source of every
    section whenever a program starts, a tenth of a second or two, and only help and the reference page need them.
    """
    descriptions: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if not issubclass(kind, Section):
            continue
        for key, below in pairwise(_read_classes(kind.__module__)[kind.__name__].body):
            if isinstance(key, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(key.target, ast.Name)
                descriptions[key.target.id] = " ".join(ast.literal_eval(below.value).split())
    return descriptions
