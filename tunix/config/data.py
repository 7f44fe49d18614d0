"""Mixtures of sources, and the way from documents to batches."""

from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field, model_validator

from tunix.base.config_types import Count, CountOrZero, Flag, NonNegative, Section
from tunix.data.files import Source
from tunix.data.sources import SOURCES, AnySource


class Stage(Section):
    """Weights that hold from a point of the run on. Give one of the two points."""

    name: str
    """Name shown in the table of stages."""
    from_step: CountOrZero | None = Field(default=None)
    """First optimizer step of the stage, from 0."""
    from_tokens: CountOrZero | None = Field(default=None)
    """Tokens of the run before the stage."""
    weights: dict[str, NonNegative]
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
    """Sources by name, each with the keys of its kind; docs/data.md shows some (Mixtures)."""
    weights: dict[str, NonNegative]
    """Share of each part; the shares add up to 1."""
    weight_unit: Literal["token", "sample", "document"]
    """What the shares are shares of: tokens that are not padding, packed sequences, or documents."""
    max_epochs: dict[str, NonNegative] | None
    """Times that a part may be repeated; a run that needs more is refused before it starts. Parts not named here
    may be repeated without end; null names none."""
    stages: tuple[Stage, ...]
    """Later stages with weights of their own, in order."""

    @model_validator(mode="after")
    def _check(self) -> "Mixture":
        for name, part in self.parts.items():
            part._key = f"data.parts.{name}"
        for label, weights in (("data.weights", self.weights), *((f"stage {s.name}", s.weights) for s in self.stages)):
            if weights.keys() != self.parts.keys():
                raise ValueError(f"{label} names {_names(weights)}, data.parts are {_names(self.parts)}; name the same")
            total = sum(weights.values())
            if total == 0:
                raise ValueError(f"{label} add up to 0, not to 1; give a part a share")
            if abs(total - 1) > 1e-6:
                shares = ", ".join(f"{name}: {weight / total:.7g}" for name, weight in weights.items())
                raise ValueError(f"{label} add up to {total:g}, not to 1; scaled: {{{shares}}}")
        if unknown := (self.max_epochs or {}).keys() - self.parts.keys():
            raise ValueError(f"data.max_epochs names {_names(unknown)}, data.parts are {_names(self.parts)}")
        return self

    def try_out(self) -> None:
        """Raise `UserError` where code that a user brings for a part does not work."""
        for part in self.parts.values():
            part.try_out()


def _names(names: object) -> str:
    return ", ".join(sorted(names)) or "none"  # type: ignore[call-overload]


class Loading(Section):
    """From documents to batches."""

    packing: Literal["concat", "best_fit", "pad"]
    """How documents fill sequences: end to end, cut where a sequence is full; whole, each where it fits best
    (arXiv:2404.10830); or one in each sequence. Documents never see one another."""
    cache_dir: Annotated[str, Field(min_length=1)]
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
    verify: Literal["always", "once", "never"]
    """Compare a tokenized corpus with the digests of its files: at each start, only once (a copy is another corpus), or
    never."""
    allow_changed_data: Flag
    """Let resume go on with another corpus, tokenized form or mixture at the same sample number, or with other held-out
    documents; else refused."""


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


if TYPE_CHECKING:
    AnyData = Source | Mixture
else:
    AnyData = Annotated[Union[(*SOURCES, Mixture)], Field(discriminator="source")]
