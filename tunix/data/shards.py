"""One shard of a tokenized corpus: one process reads some units, tokenizes their documents and writes the arrays.

    units (files, or parts of large files) -> documents -> tokens -> arrays of train, arrays of held_out

A shard depends on its plan alone, so any process of any host can make it, and shards are made side by side.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tunix.base.digests import list_files, write_digests
from tunix.base.dotted import import_object
from tunix.config import Task
from tunix.config.document_kinds import DOCUMENTS
from tunix.data.documents import Document, LeftOut, read_documents
from tunix.data.encoding import Encoded
from tunix.data.stream import SPLITS, digest_arrays, read_blocks
from tunix.data.token_files import scan_tokens
from tunix.sources import Source, Tokens
from tunix.sources.files import Unit
from tunix.tokenizer.vocabulary import Vocabulary, load_vocabulary

BATCH_CHARS = 1 << 20  # characters of text that are tokenized at one time
HASH_BITS = 64


@dataclass(frozen=True)
class ShardPlan:
    """Everything that a process needs to know to make one shard."""

    name: str
    units: tuple[Unit, ...]
    source: Source
    task: Task
    tokenizer: Path  # folder of the tokenizer's files
    held_out_below: int  # a document is held out if the hash of its name is less than this


def hash_document(name: str) -> int:
    """Return a number from 0 to 2^64 - 1 that depends on the name alone.

    The numbers are a fixed random order of documents. Documents whose number is below a limit are held out:

        0 |--held out--|--------------------- train ---------------------| 2^64

    Adding or removing documents does not move the others from one side to the other, so a model that was trained before
    a corpus grew has not seen what is held out afterwards.
    """
    encoded = name.encode(errors="surrogateescape")  # a file's name need not be UTF-8
    return int.from_bytes(hashlib.sha256(encoded).digest()[: HASH_BITS // 8], "big")


@dataclass
class Part:
    """Documents of one split of a shard, while they are collected."""

    documents: str  # kind of the documents, a key of `DOCUMENTS`
    tokens: list[np.ndarray] = field(default_factory=list)  # an array for each document
    answers: list[np.ndarray] = field(default_factory=list)  # an array for each conversation or pair
    splits: list[int] = field(default_factory=list)  # tokens of the first answer of each pair, with its prompt
    rows: list[bytes] = field(default_factory=list)  # JSON for each prompt
    bytes: int = 0  # of text

    def add(self, encoded: Encoded, dtype: type) -> None:
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
        others = {
            "answers": lambda: np.concatenate([np.zeros(0, bool), *self.answers]),
            "splits": lambda: np.array(self.splits, np.int64),
            "rows": lambda: np.frombuffer(b"".join(self.rows), np.uint8),
            "row_ends": lambda: np.cumsum([len(row) for row in self.rows], dtype=np.int64),
        }
        arrays = {"tokens": tokens, "starts": starts}
        arrays |= {name: others[name]() for name in DOCUMENTS[self.documents].arrays}
        for name, array in arrays.items():
            np.save(folder / f"{split}.{name}.npy", array)
        return {"tokens": len(tokens), "documents": len(starts), "bytes": self.bytes, "digest": digest_arrays(arrays)}


def make_shard(plan: ShardPlan, folder: Path) -> None:
    """Make a shard in `folder`: the arrays of each split, counts.npy with a count for each token, facts, digests."""
    folder.mkdir()
    vocabulary = _load_vocabulary(plan.tokenizer)
    if isinstance(plan.source, Tokens):
        (unit,) = plan.units
        facts, counts = scan_tokens(plan.source, unit, folder, vocabulary)
    else:
        facts, counts = _tokenize(plan, folder, vocabulary)
    np.save(folder / "counts.npy", counts)
    facts["name"] = plan.name
    (folder / "facts.json").write_text(json.dumps(facts))
    write_digests(folder, list_files(folder))


def _tokenize(plan: ShardPlan, folder: Path, vocabulary: Vocabulary) -> tuple[dict[str, Any], np.ndarray]:
    """Tokenize the documents of a plan; return the facts of the shard, and a count for each token of the vocabulary."""
    dtype = np.uint16 if vocabulary.num_tokens <= 2**16 else np.uint32
    parts = {split: Part(plan.task.documents) for split in SPLITS}
    left_out: Counter[str] = Counter()
    examples: list[str] = []
    smallest = 2**HASH_BITS  # of a small corpus, `tokenize.prepare` holds out the document with the smallest hash
    for documents in _read_batches(plan, left_out, examples):
        hashes = [hash_document(document.name) for document in documents]
        smallest = min([smallest, *hashes])
        encode = import_object(DOCUMENTS[plan.task.documents].encode)
        for number, encoded in zip(hashes, encode(vocabulary, documents) if documents else (), strict=True):
            parts["held_out" if number < plan.held_out_below else "train"].add(encoded, dtype)
    facts = {split: part.save(folder, split, dtype) for split, part in parts.items()}
    # Counted in the file, because the tokens of the parts are lists of small arrays.
    counts = np.zeros(vocabulary.num_tokens, np.int64)
    for _, block in read_blocks(np.load(folder / "train.tokens.npy", mmap_mode="r")):
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


@lru_cache(1)  # a process makes many shards with one tokenizer
def _load_vocabulary(folder: Path) -> Vocabulary:
    return load_vocabulary(str(folder))
