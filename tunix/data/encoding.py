"""Documents to tokens: a text, a conversation, a prompt or a pair becomes what a shard keeps of it.

text           <bos> text <eos>
conversation   the turns by the chat template; `answers` marks the tokens of the assistant
prompt         the turns by the chat template, up to where an answer begins
pair           prompt, chosen answer, prompt, rejected answer; `split` is where the second prompt begins
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tunix.data.documents import Document, Pair, Question, encode_json
from tunix.tokenizer.vocabulary import Vocabulary


class Encoded(NamedTuple):
    """One document as a shard keeps it."""

    text_bytes: int
    tokens: list[int]
    answers: Sequence[bool] = ()  # of a conversation or a pair: which tokens are answers
    split: int = 0  # of a pair: where the rejected answer begins, with its prompt
    row: bytes = b""  # of a prompt: its text and its columns, as JSON


def encode_texts(vocabulary: Vocabulary, documents: list[Document]) -> Iterator[Encoded]:
    before = [] if vocabulary.bos is None else [vocabulary.bos]
    texts = [str(document.content) for document in documents]
    # With this, "<eos>" within a text is text, and does not end the document.
    vocabulary.backend.encode_special_tokens = True
    encodings = vocabulary.backend.encode_batch_fast(texts, add_special_tokens=False)
    for text, encoding in zip(texts, encodings, strict=True):
        yield Encoded(len(text.encode()), [*before, *encoding.ids, vocabulary.eos])


def encode_conversations(vocabulary: Vocabulary, documents: list[Document]) -> Iterator[Encoded]:
    conversations = [vocabulary.chat.segments(document.content) for document in documents]  # type: ignore[arg-type]
    # Here "<eos>" comes from the chat template, and is the special token.
    vocabulary.backend.encode_special_tokens = False
    # A conversation is tokenized in pieces, cut where an answer begins and ends: no token belongs to both sides.
    pieces = [text for segments in conversations for text, _ in segments]
    encoded = iter(vocabulary.backend.encode_batch_fast(pieces, add_special_tokens=False))
    for segments in conversations:
        tokens: list[int] = []
        answers: list[bool] = []
        for _, is_answer in segments:
            ids = next(encoded).ids
            tokens += ids
            answers += [is_answer] * len(ids)
        yield Encoded(sum(len(text.encode()) for text, _ in segments), tokens, answers)


def encode_prompts(vocabulary: Vocabulary, documents: list[Document]) -> Iterator[Encoded]:
    """Yield the tokens up to where an answer begins, as `tunix.generate` asks for one."""
    questions: list[Question] = [document.content for document in documents]  # type: ignore[misc]
    texts = [vocabulary.chat.render(question.messages, add_generation_prompt=True) for question in questions]
    vocabulary.backend.encode_special_tokens = False
    encodings = vocabulary.backend.encode_batch_fast(texts, add_special_tokens=False)
    for text, encoding, question in zip(texts, encodings, questions, strict=True):
        yield Encoded(len(text.encode()), encoding.ids, row=encode_json({"text": text, "columns": question.columns}))


def encode_pairs(vocabulary: Vocabulary, documents: list[Document]) -> Iterator[Encoded]:
    """Yield both answers, each after the prompt. Earlier answers in the prompt are not learnt."""
    pairs: list[Pair] = [document.content for document in documents]  # type: ignore[misc]
    both = [Document("", [*pair.prompt, *answer]) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    encoded = encode_conversations(vocabulary, both)
    # One iterator given twice: each pair takes two of its items, the chosen answer and the rejected one.
    for pair, chosen, rejected in zip(pairs, encoded, encoded, strict=False):
        num_earlier = sum(turn["role"] == "assistant" for turn in pair.prompt)
        yield Encoded(
            chosen.text_bytes + rejected.text_bytes,
            [*chosen.tokens, *rejected.tokens],
            [*_without_first(chosen.answers, num_earlier), *_without_first(rejected.answers, num_earlier)],
            len(chosen.tokens),
        )


def _without_first(answers: Sequence[bool], count: int) -> list[bool]:
    """Return which tokens are answers, without the first `count` answers.

    answers, count=1     0 1 1 0 0 1 1 1
    result               0 0 0 0 0 1 1 1
    """
    begins = [here and not before for here, before in zip(answers, [False, *answers], strict=False)]
    numbers = np.cumsum(begins)
    return [is_answer and number > count for is_answer, number in zip(answers, numbers.tolist(), strict=True)]
