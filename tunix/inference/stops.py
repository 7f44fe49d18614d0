"""Tokens that end an answer."""

from pathlib import Path

from tunix.base.disk import read_json
from tunix.base.errors import UserError
from tunix.tokenizer.vocabulary import Vocabulary, special_tokens

SOURCES = ("generation_config.json", "config.json")  # files of a model that name such tokens, the first that does wins
TURNS = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]


def read_stop_ids(folder: Path) -> list[int]:
    """Return the ids that the files of Hugging Face's model name; none if they name none."""
    for file in (folder / name for name in SOURCES):
        ids = read_json(file).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return sorted({*ids} if isinstance(ids, list) else {ids})
    return []


def find_stop_ids(vocabulary: Vocabulary, words: tuple[str, ...], folder: Path | None) -> tuple[int, ...]:
    """Return the ids that end an answer in a chat, in order: each of them is a token of the answer, and is trained.

    They are the end of a document, the first special token after an answer in the chat template, those that the files
    of the model in `folder` name, and `words` (sampling.stop).

    Raises:
        UserError: one of `words` is not a token of the tokenizer.
    """
    ends = {vocabulary.eos, *(read_stop_ids(folder) if folder else ())}
    # The template renders a chat of two turns. Its last segment is the answer and what closes it, like `2<|im_end|>`.
    answered = vocabulary.chat.segments(TURNS)[-1][0]
    special = special_tokens(vocabulary.backend)
    ids = vocabulary.backend.encode(answered, add_special_tokens=False).ids
    ends |= set([token for token in ids if token in special][:1])
    for word in words:
        index = vocabulary.backend.token_to_id(word)
        if index is None:
            raise UserError(f"sampling.stop={word} is not a token of the tokenizer")
        ends.add(index)
    return tuple(sorted(ends))
