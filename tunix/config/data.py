"""Documents, tokens, and the task they serve."""

from typing import Annotated, Literal

from pydantic import Field

from tunix.config.base import Count, Section, Share


class PythonStdlib(Section):
    """The source of the running interpreter's standard library: real text on every machine."""

    source: Literal["python_stdlib"]
    """Where documents come from."""
    held_out_fraction: Share
    """Share of documents (files) kept for evaluation, chosen by hash of the name."""
    decode_errors: Literal["skip", "error", "replace"]
    """A file that is not UTF-8: left out and counted, refused, or read with U+FFFD."""
    cache_dir: str
    """Folder for trained tokenizers and tokenized corpora, named by content hash."""
    read_threads: Count
    """Threads that pack batches ahead of the step."""
    prefetch_batches: Count
    """Batches kept ready on the host."""


class TextFiles(PythonStdlib):
    """Text files below folders, one document a file."""

    source: Literal["text"]  # type: ignore[assignment]
    """Where documents come from."""
    paths: tuple[str, ...] = Field(min_length=1)
    """Files, folders or globs."""
    extensions: tuple[str, ...]
    """Endings of the files that are read below a folder."""


class Tokenizer(Section):
    """A byte-level BPE: read from a file, or trained on the corpus and cached."""

    path: str | None
    """A tokenizer.json of the tokenizers library; null trains one on the corpus."""
    vocab_size: Annotated[Count, Field(ge=259)]
    """Words of a tokenizer trained here; 256 bytes and 3 special tokens are among them."""
    train_bytes: Count
    """Bytes of training documents that a tokenizer trained here sees."""
    bos_token: str
    """Token put before each document."""
    eos_token: str
    """Token put after each document."""


class Task(Section):
    """What is learnt: where batches come from and which loss they get."""

    name: Literal["pretrain"]
    """pretrain: next-token loss on every token of packed documents."""


AnyData = Annotated[PythonStdlib | TextFiles, Field(discriminator="source")]
