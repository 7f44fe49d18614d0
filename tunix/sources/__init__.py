"""Sources of documents: the choices of the group `data`. Each is one class: its keys, and how it is read.

To add one, write its class and add it to `SOURCES`. Nothing here imports jax: the config is made of these classes.
"""

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from tunix.sources.arithmetic import Arithmetic
from tunix.sources.custom import Custom
from tunix.sources.docstrings import PythonDocstrings
from tunix.sources.hugging_face import HuggingFace
from tunix.sources.reasoning_gym import ReasoningGym
from tunix.sources.rows import Columns, Csv, Jsonl, Parquet, Rows
from tunix.sources.source import Item, Source
from tunix.sources.synthetic import Synthetic
from tunix.sources.text_files import PythonStdlib, TextFiles
from tunix.sources.tokens import Tokens

__all__ = ["SOURCES", "AnySource", "Columns", "Custom", "Item", "Rows", "Source", "Tokens"]

SOURCES = (
    PythonStdlib, TextFiles, Jsonl, Csv, Parquet, PythonDocstrings, HuggingFace, ReasoningGym, Tokens, Synthetic,
    Arithmetic, Custom,
)  # fmt: skip

# A type checker needs a type that it can read. At run time pydantic chooses the class by the value of the key `source`.
if TYPE_CHECKING:
    AnySource = Source
else:
    AnySource = Annotated[Union[SOURCES], Field(discriminator="source")]  # noqa: UP007
