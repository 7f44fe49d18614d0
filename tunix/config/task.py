"""Tasks: which documents a run learns from, and which loss their batches get."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tunix.base.dotted import NameOrPath
from tunix.base.section import Section


class Task(Section):
    """The task of a run: its documents and its loss."""

    documents: ClassVar[Literal["text", "conversation", "prompt"]]  # what a document of the data is
    default_loss: ClassVar[str]  # a key of LOSSES in training/losses.py

    name: str
    """Which task."""
    chat_template: str | None
    """A Jinja file that turns a conversation into text; null takes the tokenizer's own."""
    loss: NameOrPath | None
    """Name of a loss, or `package.module:name` of your own (docs/extending.md); null takes the loss of the task."""


class Pretrain(Task):
    """Next-token loss on every token of documents."""

    documents = "text"
    default_loss = "next_token"

    name: Literal["pretrain"]  # type: ignore[assignment]
    """What is learnt."""


class Sft(Task):
    """Next-token loss on the answers of conversations alone."""

    documents = "conversation"
    default_loss = "next_token"

    name: Literal["sft"]  # type: ignore[assignment]
    """What is learnt."""


class Prompted(Task):
    """The model writes the answers to the prompts of the data itself."""

    documents = "prompt"

    system: str | None
    """Message of the system before each prompt that has none of its own; null for none."""


AnyTask = Annotated[Pretrain | Sft, Field(discriminator="name")]
