"""Documents become tokens, as a shard keeps them: one function for each kind of documents (data/table.py)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tunix.data.documents import Conversation, Document, Example, Group, Labelled, Pair, Question, encode_json
from tunix.data.pieces import count_bytes
from tunix.data.tokenizer import Vocab

NO_ANSWERS, NO_SPANS = np.zeros(0, bool), np.zeros(0, np.int64)


class Encoded(NamedTuple):
    """One document as a shard keeps it.

    text           <bos> text <eos>
    conversation   the turns by the chat template; `answers` marks the tokens of the assistant
    prompt         the turns by the chat template, up to where an answer begins
    pair           prompt, chosen answer, prompt, rejected answer; `split` is where the second prompt begins
    labelled       prompt, answer, prompt, answer of another document; `split` as of a pair
    comparison     as a pair, with <eos> behind each answer, which is never read: `answers` marks it alone
    example        <bos> text, or the turns by the chat template; then <eos>, as of a comparison
    """

    text_bytes: int
    tokens: Sequence[np.ndarray]  # parts of its tokens, one after the other
    # All fields below are empty where the kind of documents has no such thing.
    answers: np.ndarray = NO_ANSWERS  # [T] bool of a conversation or a pair: which tokens are answers
    split: int = 0  # of a pair: where the rejected answer begins, with its prompt
    label: float = False  # of a labelled answer: true for a desirable one; of an example: its class or number
    row: bytes = b""  # of a prompt: its text and its columns, as JSON
    images: Sequence[bytes] = ()  # in the order of their places
    # [images, 2] int64: the first soft token of each, and the place behind its last; counted from the document's first.
    image_spans: np.ndarray = NO_SPANS


def encode_texts(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    before, after = (np.array([token], vocab.dtype) for token in (vocab.bos or 0, vocab.eos))
    texts = [str(document.content) for document in documents]
    # With this, "<eos>" within a text is text, and does not end the document.
    vocab.backend.encode_special_tokens = True
    for text, tokens in zip(texts, vocab.encode(texts), strict=True):
        parts = (tokens, after) if vocab.bos is None else (before, tokens, after)
        yield Encoded(count_bytes(text), parts)


def encode_conversations(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    contents: list[Conversation] = [document.content for document in documents]  # type: ignore[misc]
    conversations = [vocab.chat.segments(*content) for content in contents]
    # Here "<eos>" comes from the chat template, and is the special token.
    vocab.backend.encode_special_tokens = False
    # A conversation is tokenized in pieces, cut where an answer begins and ends: no token belongs to both sides.
    pieces = [
        text
        for document, segments in zip(documents, conversations, strict=True)
        for text in vocab.expand_images([text for text, _ in segments], document.images)
    ]
    encoded = vocab.encode(pieces)
    for document, segments in zip(documents, conversations, strict=True):
        tokens = [next(encoded) for _ in segments]
        answers = [np.full(len(own), is_answer) for own, (_, is_answer) in zip(tokens, segments, strict=True)]
        size = sum(count_bytes(text) for text, _ in segments)
        learnt = np.concatenate([NO_ANSWERS, *answers])
        image_spans = vocab.find_images(tokens, document.images)
        if len(image_spans):  # with learnt_turns=all
            learnt &= ~vocab.is_of_image(np.concatenate(tokens))
        yield Encoded(size, tokens, learnt, images=document.images, image_spans=image_spans)


def encode_prompts(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield the tokens up to where an answer begins, as `tunix.generate` asks for one."""
    questions: list[Question] = [document.content for document in documents]  # type: ignore[misc]
    texts = [vocab.chat.render(question.messages, True, question.options) for question in questions]
    vocab.backend.encode_special_tokens = False
    expanded = (vocab.expand_images([text], each.images) for text, each in zip(texts, documents, strict=True))
    encoded = vocab.encode([text for (text,) in expanded])
    for text, tokens, question, document in zip(texts, encoded, questions, documents, strict=True):
        turns = {"messages": question.messages} if document.images else {}
        row = encode_json({"text": text, "columns": question.columns, **turns})
        image_spans = vocab.find_images([tokens], document.images)
        yield Encoded(count_bytes(text), (tokens,), row=row, images=document.images, image_spans=image_spans)


def encode_pairs(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield both answers, each after the prompt. Earlier answers in the prompt are not learnt."""
    pairs: list[Pair] = [document.content for document in documents]  # type: ignore[misc]
    return _encode_pairs(vocab, pairs, [document.images for document in documents])


def encode_comparisons(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield both answers, each after the prompt, and behind each one a token that only marks its end.

    A sequence does not read the last token of a document, and here the model has to read the whole answer.
    """
    for pair in encode_pairs(vocab, documents):
        tokens = np.concatenate(pair.tokens)
        halves = [_with_end(vocab, half) for half in (tokens[: pair.split], tokens[pair.split :])]
        answers = np.concatenate([mark for _, mark in halves])
        image_spans = pair.image_spans + (pair.image_spans >= pair.split)
        pair = pair._replace(tokens=[half for half, _ in halves], answers=answers, image_spans=image_spans)
        yield pair._replace(split=pair.split + 1)


def encode_examples(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield each text or conversation with a token behind it that only marks its end, as in `encode_comparisons`."""
    examples: list[Example] = [document.content for document in documents]  # type: ignore[misc]
    is_text = [isinstance(example.content, str) for example in examples]
    contents = [document._replace(content=document.content.content) for document in documents]  # type: ignore[union-attr]
    texts = encode_texts(vocab, [each for each, own in zip(contents, is_text, strict=True) if own])
    turns = encode_conversations(vocab, [each for each, own in zip(contents, is_text, strict=True) if not own])
    # Both set what the tokenizer takes for a special token, so one of them ends before the other begins.
    texts, turns = iter(list(texts)), iter(list(turns))
    for example, own in zip(examples, is_text, strict=True):
        encoded = next(texts if own else turns)
        tokens = np.concatenate(encoded.tokens[:-1] if own else encoded.tokens)  # a text has <eos> already
        tokens, mark = _with_end(vocab, tokens)
        yield encoded._replace(tokens=(tokens,), answers=mark, label=example.label)


def encode_groups(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield the texts of each group, with a token behind each that only marks its end, as in `encode_comparisons`.

    A text ends with <eos> before that token: the model reads it, and its vector may be that of the text.
    """
    groups: list[Group] = [document.content for document in documents]  # type: ignore[misc]
    texts = encode_texts(vocab, [Document("", text) for group in groups for text in group.texts])
    for group in groups:
        own = [next(texts) for _ in group.texts]
        ended = [_with_end(vocab, np.concatenate(each.tokens)) for each in own]
        yield Encoded(
            sum(each.text_bytes for each in own),
            [tokens for tokens, _ in ended],
            np.concatenate([mark for _, mark in ended]),
            label=len(own),
        )


def _with_end(vocab: Vocab, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [T + 1] with <eos> behind them, and a mark [T + 1] bool of that token."""
    with_end = np.append(tokens, np.array(vocab.eos, tokens.dtype))
    return with_end, np.arange(len(with_end)) == len(tokens)


def encode_labelled(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield each answer after its prompt, and after the same prompt the answer of the document before.

    Such pairs of a prompt and an unrelated answer measure how far a model has moved (KTO). The first document gets the
    answer of the last, as in TRL; documents come about `BATCH_CHARS` of text at a time (data/shards.py).
    """
    answers: list[Labelled] = [document.content for document in documents]  # type: ignore[misc]
    before = [*answers[-1:], *answers[:-1]]
    pairs = [
        Pair(own.prompt, own.answer, other.answer, own.options) for own, other in zip(answers, before, strict=True)
    ]
    images = [document.images for document in documents]
    for own, encoded in zip(answers, _encode_pairs(vocab, pairs, images), strict=True):
        yield encoded._replace(label=own.label)


def _encode_pairs(vocab: Vocab, pairs: list[Pair], images: Sequence[Sequence[bytes]]) -> Iterator[Encoded]:
    """Yield pairs; `images` are those of each prompt, which both of its answers follow."""
    both = [
        Document("", Conversation([*pair.prompt, *answer], pair.options), own)
        for pair, own in zip(pairs, images, strict=True)
        for answer in (pair.chosen, pair.rejected)
    ]
    encoded = encode_conversations(vocab, both)
    # One iterator given twice: each pair takes two of its items, the chosen answer and the rejected one.
    for pair, chosen, rejected in zip(pairs, encoded, encoded, strict=False):
        num_earlier = sum(turn["role"] == "assistant" for turn in pair.prompt)
        split = sum(map(len, chosen.tokens))
        yield Encoded(
            chosen.text_bytes + rejected.text_bytes,
            (*chosen.tokens, *rejected.tokens),
            np.concatenate([_without_first(each.answers, num_earlier) for each in (chosen, rejected)]),
            split,
            images=(*chosen.images, *rejected.images),
            image_spans=np.concatenate([chosen.image_spans, rejected.image_spans + split]),
        )


def _without_first(answers: np.ndarray, count: int) -> np.ndarray:
    """Return which tokens are answers, without the first `count` answers.

    answers, count=1     0 1 1 0 0 1 1 1
    result               0 0 0 0 0 1 1 1
    """
    starts = answers & ~np.concatenate([[False], answers])[:-1]
    return answers & (np.cumsum(starts) > count)
