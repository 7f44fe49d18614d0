"""One shard of a tokenized corpus: one process reads some units, tokenizes their documents and writes the arrays."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tunix.base.digests import list_files, write_digests
from tunix.base.errors import UserError
from tunix.config import Task
from tunix.data.documents import Document, LeftOut, Pair, Question, encode_json, read_documents
from tunix.data.stream import SPLITS, map_tokens
from tunix.sources import Source, Tokens
from tunix.sources.files import Unit
from tunix.tokenizer.vocabulary import Vocabulary, load_vocabulary

BATCH_CHARS = 1 << 20  # characters of text that are tokenized at one time
HASH_BITS = 64
BLOCK = 1 << 24  # elements of an array that are read at one time


@dataclass(frozen=True)
class ShardPlan:
    """Everything that a process needs to know to make one shard."""

    name: str
    units: tuple[Unit, ...]
    source: Source
    task: Task
    tokenizer: Path  # folder of the tokenizer's files
    held_out_below: int  # a document is held out if the hash of its name is less than this


def document_hash(name: str) -> int:
    """Return a number from 0 to 2^64 - 1 that depends on the name alone.

    The numbers are a fixed random order of documents. Adding or removing documents does not change those of others.
    """
    encoded = name.encode(errors="surrogateescape")  # a file's name need not be UTF-8
    return int.from_bytes(hashlib.sha256(encoded).digest()[: HASH_BITS // 8], "big")


@dataclass
class Part:
    """Documents of one split of a shard, while they are collected."""

    documents: str  # kind of the documents: text, conversation, prompt or pair
    tokens: list[np.ndarray] = field(default_factory=list)  # an array for each document
    answers: list[np.ndarray] = field(default_factory=list)  # an array for each conversation or pair
    splits: list[int] = field(default_factory=list)  # tokens of the first answer of each pair, with its prompt
    rows: list[bytes] = field(default_factory=list)  # JSON for each prompt
    bytes: int = 0  # of text

    def add(self, encoded: "Encoded", dtype: type) -> None:
        self.tokens.append(np.array(encoded.tokens, dtype))
        self.answers.append(np.array(encoded.answers, bool))
        self.splits.append(encoded.split)
        self.rows.append(encoded.row)
        self.bytes += encoded.text_bytes

    def save(self, folder: Path, split: str, dtype: type) -> dict[str, Any]:
        """Write the arrays (`stream.Arrays`) to `folder`; return their counts and digest."""
        lengths = np.array([len(document) for document in self.tokens], np.int64)
        starts = np.cumsum(lengths) - lengths
        tokens = np.concatenate([np.zeros(0, dtype), *self.tokens])
        arrays = {"tokens": tokens, "starts": starts}
        if self.documents in ("conversation", "pair"):
            arrays["answers"] = np.concatenate([np.zeros(0, bool), *self.answers])
        if self.documents == "pair":
            arrays["splits"] = np.array(self.splits, np.int64)
        if self.documents == "prompt":
            arrays["rows"] = np.frombuffer(b"".join(self.rows), np.uint8)
            arrays["row_ends"] = np.cumsum([len(row) for row in self.rows], dtype=np.int64)
        for name, array in arrays.items():
            np.save(folder / f"{split}.{name}.npy", array)
        return {"tokens": len(tokens), "documents": len(starts), "bytes": self.bytes, "digest": _digest(arrays)}


def make_shard(plan: ShardPlan, folder: Path) -> None:
    """Make a shard in `folder`: the arrays of each split, counts.npy with a count for each token, facts, digests."""
    folder.mkdir()
    vocabulary = _load_vocabulary(plan.tokenizer)
    if isinstance(plan.source, Tokens):
        facts, counts = _scan_tokens(plan, folder, vocabulary)
    else:
        facts, counts = _tokenize(plan, folder, vocabulary)
    np.save(folder / "counts.npy", counts)
    facts["name"] = plan.name
    (folder / "facts.json").write_text(json.dumps(facts))
    write_digests(folder, list_files(folder))


def _tokenize(plan: ShardPlan, folder: Path, vocabulary: Vocabulary) -> tuple[dict[str, Any], np.ndarray]:
    dtype = np.uint16 if vocabulary.num_tokens <= 2**16 else np.uint32
    parts = {split: Part(plan.task.documents) for split in SPLITS}
    left_out: Counter[str] = Counter()
    examples: list[str] = []
    smallest = 2**HASH_BITS
    for documents in _read_batches(plan, left_out, examples):
        hashes = [document_hash(document.name) for document in documents]
        smallest = min([smallest, *hashes])
        encode = ENCODE[plan.task.documents]
        for number, encoded in zip(hashes, encode(vocabulary, documents) if documents else (), strict=True):
            parts["held_out" if number < plan.held_out_below else "train"].add(encoded, dtype)
    facts = {split: part.save(folder, split, dtype) for split, part in parts.items()}
    counts = np.zeros(vocabulary.num_tokens, np.int64)
    for _, block in _read_blocks(np.load(folder / "train.tokens.npy", mmap_mode="r")):
        counts += np.bincount(block, minlength=len(counts))
    return {**facts, "left_out": left_out, "left_out_names": examples, "smallest_hash": smallest}, counts


def _read_batches(plan: ShardPlan, left_out: Counter[str], examples: list[str]) -> Iterator[list[Document]]:
    """Yield the documents in order, about `BATCH_CHARS` of text at a time.

    `left_out` counts the items that give no document by reason; `examples` gets the names of the first five.
    """
    batch: list[Document] = []
    size = 0
    for unit in plan.units:
        for document in read_documents(plan.source, plan.task, unit):
            if isinstance(document, LeftOut):
                left_out[document.reason] += 1
                if document.reason != "empty" and len(examples) < 5:
                    examples.append(document.name.encode(errors="replace").decode())  # a name that can be printed
                continue
            batch.append(document)
            size += len(document.text)
            if size >= BATCH_CHARS:
                yield batch
                batch, size = [], 0
    yield batch


class Encoded(NamedTuple):
    """One document as a shard keeps it."""

    text_bytes: int
    tokens: list[int]
    answers: Sequence[bool] = ()  # of a conversation or a pair: which tokens are answers
    split: int = 0  # of a pair: where the rejected answer begins, with its prompt
    row: bytes = b""  # of a prompt: its text and its columns, as JSON


def _encode_texts(vocabulary: Vocabulary, documents: list[Document]) -> Iterator[Encoded]:
    before = [] if vocabulary.bos is None else [vocabulary.bos]
    texts = [str(document.content) for document in documents]
    vocabulary.backend.encode_special_tokens = True  # "<eos>" within a text is text, and does not end the document
    encodings = vocabulary.backend.encode_batch_fast(texts, add_special_tokens=False)
    for text, encoding in zip(texts, encodings, strict=True):
        yield Encoded(len(text.encode()), [*before, *encoding.ids, vocabulary.eos])


def _encode_conversations(vocabulary: Vocabulary, documents: list[Document]) -> Iterator[Encoded]:
    conversations = [vocabulary.chat.segments(document.content) for document in documents]  # type: ignore[arg-type]
    vocabulary.backend.encode_special_tokens = False  # "<eos>" comes from the chat template, and is the special token
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


def _encode_prompts(vocabulary: Vocabulary, documents: list[Document]) -> Iterator[Encoded]:
    """Yield the tokens up to where an answer begins, as `tunix.generate` asks for one."""
    questions: list[Question] = [document.content for document in documents]  # type: ignore[misc]
    texts = [vocabulary.chat.render(question.messages, add_generation_prompt=True) for question in questions]
    vocabulary.backend.encode_special_tokens = False
    encodings = vocabulary.backend.encode_batch_fast(texts, add_special_tokens=False)
    for text, encoding, question in zip(texts, encodings, questions, strict=True):
        yield Encoded(len(text.encode()), encoding.ids, row=encode_json({"text": text, "columns": question.columns}))


def _encode_pairs(vocabulary: Vocabulary, documents: list[Document]) -> Iterator[Encoded]:
    """Yield both answers, each after the prompt. Earlier answers in the prompt are not learnt."""
    pairs: list[Pair] = [document.content for document in documents]  # type: ignore[misc]
    whole = [Document("", [*pair.prompt, *answer]) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    encoded = _encode_conversations(vocabulary, whole)
    for pair, chosen, rejected in zip(pairs, encoded, encoded, strict=False):
        num_earlier = sum(turn["role"] == "assistant" for turn in pair.prompt)
        yield Encoded(
            chosen.text_bytes + rejected.text_bytes,
            [*chosen.tokens, *rejected.tokens],
            [*_without_first(chosen.answers, num_earlier), *_without_first(rejected.answers, num_earlier)],
            len(chosen.tokens),
        )


def _without_first(answers: Sequence[bool], count: int) -> list[bool]:
    """Return which tokens are answers, without the first `count` answers: runs of True."""
    begins = [here and not before for here, before in zip(answers, [False, *answers], strict=False)]
    numbers = np.cumsum(begins)
    return [is_answer and number > count for is_answer, number in zip(answers, numbers.tolist(), strict=True)]


ENCODE: dict[str, Callable[[Vocabulary, list[Document]], Iterator[Encoded]]] = {
    "text": _encode_texts,
    "conversation": _encode_conversations,
    "prompt": _encode_prompts,
    "pair": _encode_pairs,
}


def _scan_tokens(plan: ShardPlan, folder: Path, vocabulary: Vocabulary) -> tuple[dict[str, Any], np.ndarray]:
    """Make a shard of a file of tokens (data.source=tokens), which stays where it is.

    The file's documents are found and its tokens are counted. The documents at the end of the file are held out.
    """
    source, (unit,) = plan.source, plan.units
    assert isinstance(source, Tokens)
    place = locate_tokens(source, Path(unit.path))
    tokens = map_tokens(**place)
    counts, ends = np.zeros(vocabulary.num_tokens, np.int64), []
    for first, block in _read_blocks(tokens):
        least, most = int(block.min()), int(block.max())
        if least < 0 or most >= len(counts):
            raise UserError(
                f"data: {unit.path} has token {min(least, 0) or most}, the tokenizer has {len(counts)}; "
                "give the tokenizer that made it, or the right data.dtype and data.skip_bytes"
            )
        counts += np.bincount(block, minlength=len(counts))
        if source.document_end is not None:
            ends.append(np.flatnonzero(block == source.document_end) + first)
    starts = np.concatenate([np.zeros(1, np.int64), *(end + 1 for end in ends)])
    starts = starts[starts < len(tokens)]
    # Tokens from `cut` on are held out. Where documents are known, the cut moves to the next start of a document.
    cut = len(tokens) - round(source.held_out_fraction * len(tokens))
    if source.document_end is None:
        starts = np.array([start for start in (0, cut) if start < len(tokens)], np.int64)
    elif len(starts) <= 1:  # a single document is not cut in two
        cut = len(tokens)
    elif source.held_out_fraction > 0:
        cut = int(starts[min(int(np.searchsorted(starts, cut)), len(starts) - 1)])
    facts: dict[str, Any] = {"left_out": {}, "left_out_names": [], "smallest_hash": 0}
    for split, first, stop in (("train", 0, cut), ("held_out", cut, len(tokens))):
        own = starts[(starts >= first) & (starts < stop)] - first
        np.save(folder / f"{split}.starts.npy", own)
        own_place = place | {"offset": place["offset"] + first * tokens.itemsize, "count": stop - first}
        digest = _digest({"tokens": map_tokens(**own_place), "starts": own})
        facts[split] = {"tokens": stop - first, "documents": len(own), "digest": digest, "flat": own_place}
    facts["train"]["bytes"] = None  # `tokenize` computes them from the counts of tokens
    return facts, counts


def locate_tokens(source: Tokens, path: Path) -> dict[str, Any]:
    """Return where the numbers of a file of tokens are, as arguments of `map_tokens`. A .npy file says so itself.

    Raises:
        UserError: the file is damaged, or is no array of tokens.
    """
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            try:
                array = np.load(path, mmap_mode="r")
            except ValueError as error:
                raise UserError(f"data: {path} is damaged or ends early: {error}") from None
            if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32, np.int32):
                raise UserError(f"data: {path} holds {array.ndim} dimensions of {array.dtype}, not one of tokens")
            return {"path": str(path), "dtype": str(array.dtype), "offset": array.offset, "count": len(array)}
    size = path.stat().st_size - source.skip_bytes
    width = np.dtype(source.dtype).itemsize
    if size < 0 or size % width:
        raise UserError(
            f"data: {path} has {path.stat().st_size} bytes, which is not data.skip_bytes={source.skip_bytes} and a "
            f"number of whole data.dtype={source.dtype}; the file ends early or is of another type"
        )
    return {"path": str(path.absolute()), "dtype": source.dtype, "offset": source.skip_bytes, "count": size // width}


def _read_blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the parts of an array that may be larger than memory, each with its first index."""
    for first in range(0, len(array), BLOCK):
        yield first, array[first : first + BLOCK]


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}\0{array.dtype}\0{len(array)}\0".encode())
        for _, block in _read_blocks(array):
            digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()


@lru_cache(1)  # a process makes many shards with one tokenizer
def _load_vocabulary(folder: Path) -> Vocabulary:
    return load_vocabulary(str(folder))
