"""Tokenized documents on disk, read by memory mapping: any place of any shard at the cost of a page."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tunix.base.disk import read_json
from tunix.base.errors import UserError

OPEN_SHARDS = 256  # at one time; each holds up to three file descriptors
FORMAT = "2"  # of the files; part of their hash
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Arrays:
    """One shard of a split: documents one after the other."""

    tokens: np.ndarray  # [tokens] uint16 or uint32
    starts: np.ndarray  # [documents] int64: where each begins
    answers: np.ndarray | None = None  # [tokens] bool: tokens to be learnt; None is all


class Stream:
    """A split of a corpus as shards that are opened when they are read."""

    def __init__(self, sizes: list[tuple[int, int]], open_shard: Callable[[int], Arrays], fingerprint: str):
        """`sizes` are the tokens and documents of each shard; `fingerprint` is of all of them."""
        self.sizes, self.fingerprint = sizes, fingerprint
        self.shard = lru_cache(OPEN_SHARDS)(open_shard)

    @property
    def num_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.sizes)

    @property
    def num_documents(self) -> int:
        return sum(documents for _, documents in self.sizes)


@dataclass(frozen=True)
class Prepared:
    """A folder of `prepare.py`: tokenizer files, shards, and the index that is written last."""

    folder: Path
    index: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return self.index["fingerprint"]

    def stream(self, split: str) -> Stream:
        shards = [shard[split] for shard in self.index["shards"]]
        digest = hashlib.sha256("".join(shard["digest"] for shard in shards).encode()).hexdigest()[:20]
        sizes = [(shard["tokens"], shard["documents"]) for shard in shards]
        return Stream(sizes, lambda number: self._open(number, split), digest)

    def _open(self, number: int, split: str) -> Arrays:
        shard = self.index["shards"][number]
        folder = self.folder / shard["name"]
        place = shard[split].get("flat")
        tokens = flat_tokens(**place) if place else _mapped(folder / f"{split}.tokens.npy")
        answers = _mapped(folder / f"{split}.answers.npy") if self.index["answers"] else None
        return Arrays(tokens, _mapped(folder / f"{split}.starts.npy"), answers)


def open_prepared(folder: Path) -> Prepared:
    """Raises `UserError` where the index is damaged or of another version."""
    index = read_json(folder / "index.json")
    if index.get("format") != FORMAT:
        raise UserError(
            f"{folder}/index.json is of format {index.get('format')}, not {FORMAT}; remove the folder and prepare it "
            "again"
        )
    return Prepared(folder, index)


def flat_tokens(path: str, dtype: str, offset: int, count: int) -> np.ndarray:
    """`count` numbers of a file from a byte on."""
    if count == 0:
        return np.zeros(0, dtype)
    with _explained(path):
        return np.memmap(path, dtype, "r", offset, (count,))


def _mapped(path: Path) -> np.ndarray:
    with _explained(path):
        return np.load(path, mmap_mode="r")


class _explained:
    """Turns a shard that is gone or cut off into one line."""

    def __init__(self, path: str | Path):
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | ValueError):
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UserError(
                f"data: cannot read the tokens in {self.path}: {reason}; the folder was changed after it was made. "
                "Remove it, and it is made again"
            ) from None
