"""Tables of data: sources (`SOURCES`), kinds of documents (`DOCUMENTS`). A new one is a row. Imports no jax."""

from typing import TYPE_CHECKING, Annotated, NamedTuple, Union

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

# Kinds of documents by name: what a task learns from.
#
# Rows name functions as text, `module:function`, and `import_object` imports them when they are used. So this file, and
# with it the config, imports neither jax nor a tokenizer.
#
# a source -> row or text -- read --> document -- encode --> arrays of a shard -- load --> corpus -- feed --> batches


class DocumentKind(NamedTuple):
    """A kind of the data of a task, from a row of a source to the batches of a step."""

    read: str  # function from a row to a document, with the arguments of `read_text` (data/documents.py)
    encode: str  # function from documents to tokens, with the arguments of `encode_texts` (data/encoding.py)
    # The name of this kind in the hashes that name folders of the cache: that of the task that first used the kind.
    # Another name would tokenize every corpus again.
    in_hashes: str
    arrays: tuple[str, ...] = ()  # that a shard has beside tokens and starts (data/shards.py)
    load: str = "tunix.data.dataset:load_corpus"  # function that reads all data of a config
    feed: str = "tunix.batch_sources:CorpusFeed"  # class, a `Feed` (batch_sources.py): batches, and held-out data
    takes_text: bool = False  # a source may give plain text; otherwise it must give rows with columns
    asks_peers: bool = False  # the processes exchange data outside of the step to make a batch: rewards, for example


DOCUMENTS = {
    "text": DocumentKind(
        "tunix.data.documents:read_text", "tunix.data.encoding:encode_texts", "pretrain", takes_text=True
    ),
    "conversation": DocumentKind(
        "tunix.data.documents:read_conversation",
        "tunix.data.encoding:encode_conversations",
        "sft",
        arrays=("answers",),
    ),
    "prompt": DocumentKind(
        "tunix.data.documents:read_prompt",
        "tunix.data.encoding:encode_prompts",
        "prompt",
        arrays=("rows", "row_ends"),
        load="tunix.batch_sources:load_task_prompts",
        feed="tunix.batch_sources:PromptFeed",
        asks_peers=True,
    ),
    "pair": DocumentKind(
        "tunix.data.documents:read_pair",
        "tunix.data.encoding:encode_pairs",
        "pair",
        arrays=("answers", "splits"),
        feed="tunix.batch_sources:PairFeed",
        asks_peers=True,
    ),
    "labelled": DocumentKind(
        "tunix.data.documents:read_labelled",
        "tunix.data.encoding:encode_labelled",
        "labelled",
        arrays=("answers", "splits", "labels"),
        feed="tunix.batch_sources:PairFeed",
        asks_peers=True,
    ),
    "comparison": DocumentKind(
        "tunix.data.documents:read_pair",
        "tunix.data.encoding:encode_comparisons",
        "comparison",
        arrays=("answers", "splits"),
    ),
    "example": DocumentKind(
        "tunix.data.documents:read_example",
        "tunix.data.encoding:encode_examples",
        "example",
        arrays=("answers", "label_values"),
    ),
    "group": DocumentKind(
        "tunix.data.documents:read_group",
        "tunix.data.encoding:encode_groups",
        "group",
        arrays=("answers", "label_values"),
    ),
}


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
