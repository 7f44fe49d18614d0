"""Documents, tokens, and the task they serve."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunix.config.base import Count, CountOrZero, Flag, PositiveOrZero, Section, Share

Paths = Annotated[tuple[str, ...], Field(min_length=1)]


class Source(Section):
    """Where documents come from."""

    held_out_fraction: Share
    """Share of documents kept for evaluation, chosen by a hash of file name and place; at least one if not 0."""


class PythonStdlib(Source):
    """The source of the running interpreter's standard library: real text on every machine."""

    source: Literal["python_stdlib"]
    """Where documents come from."""
    decode_errors: Literal["skip", "error", "replace"]
    """A file that is not UTF-8: left out and counted, refused, or read with U+FFFD."""


class TextFiles(PythonStdlib):
    """Text files, one document each; those that end in .gz or .zst are unpacked."""

    source: Literal["text"]  # type: ignore[assignment]
    """Where documents come from."""
    paths: Paths
    """Files, folders or globs."""
    extensions: tuple[str, ...]
    """Endings of the files that are read below a folder, also with .gz or .zst behind them."""


class Columns(Section):
    """Names of the columns that hold a document. The task says which are read: pretrain the text; sft the prompt and
    its completion if `prompt` is set, else the messages."""

    text: str | None
    """Column of a document's text."""
    messages: str | None
    """Column of a conversation: a list of {role, content}, or that list as JSON."""
    prompt: str | None
    """Column of what the user says."""
    completion: str | None
    """Column of the answer to it."""
    system: str | None
    """Column of the system prompt before it; null for none."""


class Rows(Source):
    """Documents that are rows of a table."""

    columns: Columns
    """Which columns are read."""
    bad_rows: Literal["error", "skip"]
    """A row that is not JSON, lacks a column, or holds no text or conversation in it: refused, or left out and
    counted."""


class Jsonl(Rows):
    """Files with one JSON object a line; those that end in .gz or .zst are unpacked."""

    source: Literal["jsonl"]
    """Where documents come from."""
    paths: Paths
    """Files, folders or globs."""
    extensions: tuple[str, ...]
    """Endings of the files that are read below a folder, also with .gz or .zst behind them."""


class Csv(Rows):
    """Comma-separated files with a head line; those that end in .gz or .zst are unpacked."""

    source: Literal["csv"]
    """Where documents come from."""
    paths: Paths
    """Files, folders or globs."""
    extensions: tuple[str, ...]
    """Endings of the files that are read below a folder, also with .gz or .zst behind them."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)]
    """Character between columns."""


class Parquet(Rows):
    """Parquet files (needs pyarrow, of the extra `hf`)."""

    source: Literal["parquet"]
    """Where documents come from."""
    paths: Paths
    """Files, folders or globs."""
    extensions: tuple[str, ...]
    """Endings of the files that are read below a folder."""


class PythonDocstrings(Rows):
    """Questions about the running interpreter's standard library: what a function or class does, answered by the
    first line of its docstring. Columns: name, question, answer."""

    source: Literal["python_docstrings"]
    """Where documents come from."""


class HuggingFace(Rows):
    """A data set of the `datasets` library (the extra `hf`), from the hub or from files that it can read."""

    source: Literal["hf"]
    """Where documents come from."""
    path: str
    """Name on the hub, a folder, or a format (json, csv, parquet, text) with data_files."""
    name: str | None
    """Configuration of the data set; null for its default."""
    split: str
    """Split, also part of one: train[:10%]."""
    revision: str | None
    """Commit, tag or branch on the hub; null for the newest."""
    data_files: tuple[str, ...] | None
    """Files of the data set; null for all."""
    streaming: Flag
    """Read while it is tokenized, without a copy on disk."""


class Tokens(Source):
    """Tokens that exist already: a folder of `python -m tunix.prepare`, or flat files of nanoGPT and OLMo."""

    held_out_fraction: Share
    """Share of the tokens of each flat file, at its end, kept for evaluation; the cut moves to where a document
    begins, and a file of one document is not cut."""

    source: Literal["tokens"]
    """Where documents come from."""
    paths: Paths
    """One prepared folder; or flat files (.bin, .npy with a head or without), folders or globs of them."""
    dtype: Literal["uint16", "uint32"]
    """Type of the numbers in files without a head."""
    skip_bytes: CountOrZero
    """Bytes before the first token of files without a head (modded-nanogpt: 1024)."""
    document_end: CountOrZero | None
    """Token that ends each document; null takes each file for one document. Prepared folders know theirs."""


class Synthetic(Source):
    """Made-up words with the frequencies of a natural language (Zipf), for benchmarks: nothing to download."""

    source: Literal["synthetic"]
    """Where documents come from."""
    num_documents: Count
    """Documents."""
    mean_document_bytes: Count
    """Mean length of a document; lengths are exponentially distributed."""


AnySource = Annotated[
    PythonStdlib | TextFiles | Jsonl | Csv | Parquet | PythonDocstrings | HuggingFace | Tokens | Synthetic,
    Field(discriminator="source"),
]


class Stage(Section):
    """Weights that hold from a point of the run on. Give one of the two points."""

    name: str
    """Name shown in the table of stages."""
    from_step: CountOrZero | None = Field(default=None)
    """First optimizer step of the stage, from 0."""
    from_tokens: CountOrZero | None = Field(default=None)
    """Tokens of the run before the stage."""
    weights: dict[str, PositiveOrZero]
    """Share of each part; the shares add up to 1."""

    @model_validator(mode="after")
    def _check(self) -> "Stage":
        if (self.from_step is None) == (self.from_tokens is None):
            raise ValueError(f"data.stages: stage {self.name} needs one of from_step and from_tokens")
        return self


class Mixture(Section):
    """Several sources in one run, each with its share of it."""

    source: Literal["mixture"]
    """Where documents come from."""
    parts: Annotated[dict[str, AnySource], Field(min_length=1)]
    """Sources by name, each with the keys of its kind."""
    weights: dict[str, PositiveOrZero]
    """Share of each part; the shares add up to 1."""
    weight_unit: Literal["token", "sample", "document"]
    """What the shares are shares of: tokens that are not padding, packed sequences, or documents."""
    max_epochs: dict[str, PositiveOrZero] | None
    """Times that a part may be repeated; a run that needs more is refused before it starts. Parts not named here
    may be repeated without end; null names none."""
    stages: tuple[Stage, ...]
    """Later stages with weights of their own, in order."""

    @model_validator(mode="after")
    def _check(self) -> "Mixture":
        for where, weights in (("data.weights", self.weights), *((f"stage {s.name}", s.weights) for s in self.stages)):
            if weights.keys() != self.parts.keys():
                raise ValueError(f"{where} names {_names(weights)}, data.parts are {_names(self.parts)}; name the same")
            total = sum(weights.values())
            if total == 0:
                raise ValueError(f"{where} add up to 0, not to 1; give a part a share")
            if abs(total - 1) > 1e-6:
                shares = ", ".join(f"{name}: {weight / total:.4g}" for name, weight in weights.items())
                raise ValueError(f"{where} add up to {total:g}, not to 1; scaled: {{{shares}}}")
        if unknown := (self.max_epochs or {}).keys() - self.parts.keys():
            raise ValueError(f"data.max_epochs names {_names(unknown)}, data.parts are {_names(self.parts)}")
        return self


def _names(names: object) -> str:
    return ", ".join(sorted(names)) or "none"  # type: ignore[call-overload]


class Loading(Section):
    """From documents to batches."""

    packing: Literal["concat", "best_fit", "pad"]
    """How documents fill sequences: end to end, cut where a sequence is full; whole, each where it fits best
    (arXiv:2404.10830); or one in each sequence. Documents never see one another."""
    cache_dir: str
    """Folder for trained tokenizers, tokenized corpora and packing plans."""
    shard_bytes: Count
    """Text in one shard of a tokenized corpus: what a process tokenizes at a time, and what is done again after a
    kill."""
    prepare_processes: Count | None
    """Processes that tokenize; null for one a core."""
    read_threads: Count
    """Threads that pack batches ahead of the step."""
    prefetch_batches: Count
    """Batches kept ready on the host."""
    allow_changed_data: Flag
    """Let resume go on with another corpus, tokenized form or mixture at the same sample number; else refused."""


class Tokenizer(Section):
    """A tokenizer from a file or the hub, or a byte-level BPE trained on the corpus and cached."""

    path: str | None
    """A tokenizer.json, a folder that has one, a SentencePiece .model, or a name on the hub; null trains a BPE."""
    train: Flag | None
    """Train a BPE on the corpus, and write it to `path` if that is given; null: only where there is no path."""
    vocab_size: Annotated[Count, Field(ge=259)]
    """Words of a tokenizer trained here; 256 bytes and 3 special tokens are among them. 259 is one word a byte."""
    train_bytes: Count
    """Bytes of training documents that a tokenizer trained here sees."""
    bos_token: str | None
    """Token put before each document; null takes the tokenizer's own, if it has one."""
    eos_token: str | None
    """Token put after each document; null takes the tokenizer's own."""


class Task(Section):
    """What is learnt: where batches come from and which loss they get."""

    name: Literal["pretrain", "sft"]
    """pretrain: next-token loss on every token of documents; sft: on the answers of conversations alone."""
    chat_template: str | None
    """A Jinja file that turns a conversation into text; null takes the tokenizer's own."""


AnyData = Annotated[
    PythonStdlib | TextFiles | Jsonl | Csv | Parquet | PythonDocstrings | HuggingFace | Tokens | Synthetic | Mixture,
    Field(discriminator="source"),
]
