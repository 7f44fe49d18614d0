"""The table of the sources of data, `SOURCES`. A new one is a row. Imports no jax."""

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from tunix.data.files import Columns, Csv, Item, Jsonl, Rows, Source, TextFiles
from tunix.data.parquet import Parquet
from tunix.data.shapes import Shapes
from tunix.data.sources import (
    Arithmetic,
    Custom,
    HuggingFace,
    LookUp,
    PythonDocstrings,
    PythonStdlib,
    ReasoningGym,
    Synthetic,
    Tokens,
)

__all__ = ["SOURCES", "AnySource", "Columns", "Custom", "Item", "Rows", "Source", "Tokens"]

# Sources of documents: the choices of the group `data`. Each is one class: its keys, and how it is read.
#
# To add one, write its class and add it to `SOURCES`. Nothing here imports jax: the config is made of these classes.

SOURCES = (
    PythonStdlib, TextFiles, Jsonl, Csv, Parquet, PythonDocstrings, HuggingFace, ReasoningGym, Tokens, Synthetic,
    Arithmetic, LookUp, Shapes, Custom,
)  # fmt: skip

# A type checker needs a type that it can read. At run time pydantic chooses the class by the value of the key `source`.
if TYPE_CHECKING:
    AnySource = Source
else:
    AnySource = Annotated[Union[SOURCES], Field(discriminator="source")]  # noqa: UP007
