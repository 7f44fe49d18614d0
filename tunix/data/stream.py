"""Tokenized documents on disk, read by memory mapping: reading any place of any shard costs one page of the file.

FOLDER/index.json                 counts, digests and names of the shards; written last
FOLDER/digests.json               digests of these files; each shard has its own
FOLDER/tokenizer/                 files of the tokenizer
FOLDER/00000/train.tokens.npy     [tokens] uint16 or uint32: the documents of the shard, one after the other
FOLDER/00000/train.starts.npy     [documents] int64: where each document begins
FOLDER/00000/train.answers.npy    [tokens] bool: tokens of answers; only of conversations and pairs
FOLDER/00000/train.splits.npy     [documents] int64: tokens of the chosen answer with its prompt; only of pairs
FOLDER/00000/train.rows.npy       [bytes] uint8: text and columns of each prompt, as JSON; only of prompts
FOLDER/00000/train.row_ends.npy   [documents] int64: where the JSON of each prompt ends
FOLDER/00000/held_out.*.npy       the same for the held-out documents
FOLDER/00001/ ...
FOLDER/00001-held-out/            in place of 00001, where `tokenize.prepare` held a document out afterwards
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tunix.base.disk import read_json
from tunix.base.errors import UserError
from tunix.config.document_kinds import DOCUMENTS

BLOCK = 1 << 24  # elements of an array that are read at one time
OPEN_SHARDS = 256  # open at one time; each takes up to three file descriptors
FORMAT = "2"  # version of the files; part of the hash that names their folder
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Arrays:
    """The arrays of one shard of a split: its documents, one after the other."""

    tokens: np.ndarray  # [tokens] uint16 or uint32
    starts: np.ndarray  # [documents] int64: where each document begins
    answers: np.ndarray | None = None  # [tokens] bool: the tokens to learn; None means all of them
    splits: np.ndarray | None = None  # [documents] int64: of pairs, the tokens of the chosen answer with its prompt
    rows: np.ndarray | None = None  # [bytes] uint8: of prompts, text and columns as JSON
    row_ends: np.ndarray | None = None  # [documents] int64


class Stream:
    """A split of a corpus: a list of shards, each opened when it is first read."""

    def __init__(self, sizes: list[tuple[int, int]], open_shard: Callable[[int], Arrays], fingerprint: str):
        """`sizes` are the numbers of tokens and documents of each shard; `fingerprint` identifies all of their data."""
        self.sizes, self.fingerprint = sizes, fingerprint
        self.shard = lru_cache(OPEN_SHARDS)(open_shard)

    @property
    def num_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.sizes)

    @property
    def num_documents(self) -> int:
        return sum(documents for _, documents in self.sizes)


def locate(index: Any, ends: np.ndarray) -> tuple[int, int]:
    """Return the number of the shard that has sample `index` of a split, and the sample's number in that shard.

    `ends[n]` is the number of the first sample behind shard n:  ends 3 3 7, index 5  ->  shard 2, sample 2
    """
    number = int(np.searchsorted(ends, index, side="right"))  # side="right" passes shards without samples
    return number, int(index) - (int(ends[number - 1]) if number else 0)


@dataclass(frozen=True)
class Prepared:
    """The folder of a tokenized corpus and its index (see the top of this file)."""

    folder: Path
    index: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return self.index["fingerprint"]

    @property
    def documents(self) -> str:
        """Kind of the documents, a key of `DOCUMENTS`."""
        if "kind" in self.index:
            return self.index["kind"]
        for kind, word in (("prompt", "prompts"), ("pair", "pairs")):  # words of earlier versions; 0.1.0 lacks them
            if self.index.get(word):
                return kind
        return "conversation" if self.index["answers"] else "text"

    def stream(self, split: str) -> Stream:
        """Return the stream of a split, "train" or "held_out"."""
        shards = [shard[split] for shard in self.index["shards"]]
        digest = hashlib.sha256("".join(shard["digest"] for shard in shards).encode()).hexdigest()[:20]
        sizes = [(shard["tokens"], shard["documents"]) for shard in shards]
        return Stream(sizes, lambda number: self._open(number, split), digest)

    def _open(self, number: int, split: str) -> Arrays:
        shard = self.index["shards"][number]
        folder = self.folder / shard["name"]
        place = shard[split].get("flat")  # data.source=tokens: the tokens stay in the user's own file
        tokens = map_tokens(**place) if place else _map_array(folder / f"{split}.tokens.npy")
        starts = _map_array(folder / f"{split}.starts.npy")
        names = DOCUMENTS[self.documents].arrays
        return Arrays(tokens, starts, **{name: _map_array(folder / f"{split}.{name}.npy") for name in names})


def open_prepared(folder: Path) -> Prepared:
    """Open the folder of a tokenized corpus.

    Raises:
        UserError: the index is damaged or of another version.
    """
    index = read_json(folder / "index.json")
    if index.get("format") != FORMAT:
        raise UserError(
            f"{folder}/index.json is of format {index.get('format')}, not {FORMAT}; remove the folder and prepare it "
            "again"
        )
    return Prepared(folder, index)


def map_tokens(path: str, dtype: str, offset: int, count: int) -> np.ndarray:
    """Map `count` numbers of a file, from the byte `offset` on."""
    if count == 0:
        return np.zeros(0, dtype)  # an empty range cannot be mapped
    try:
        return np.memmap(path, dtype, "r", offset, (count,))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _map_array(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def read_blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the parts of an array that may be larger than memory, each with its first index."""
    for first in range(0, len(array), BLOCK):
        yield first, array[first : first + BLOCK]


def digest_arrays(arrays: dict[str, np.ndarray]) -> str:
    """Return a hash of the names, dtypes, lengths and numbers of some arrays."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}\0{array.dtype}\0{len(array)}\0".encode())
        for _, block in read_blocks(array):
            digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()


def _unreadable(path: str | Path, error: OSError | ValueError) -> UserError:
    """Return the error for a shard that is missing or cut off."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UserError(
        f"data: cannot read the tokens in {path}: {reason}; the folder was changed after it was made. "
        "Remove it, and it is made again"
    )
