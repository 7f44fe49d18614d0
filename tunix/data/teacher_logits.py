"""A teacher on disk: its likeliest tokens, from which a run learns in the place of a teacher in memory.

    FOLDER/teacher_logits.json       what the files were made of (`LogitsInfo`)
    FOLDER/PART/00000/ids.npy        [n, k] uint16 or uint32: the likeliest tokens of each learnt position
    FOLDER/PART/00000/log_probs.npy  [n, k] float16 or float32: their log-probabilities
    FOLDER/PART/00000/rest.npy       [n] float32: probability of all other tokens together
    FOLDER/PART/00000/ends.npy       [rows] int64: learnt positions up to the end of each row
    FOLDER/PART/00000/digests.json   digests of these files
    FOLDER/PART/00001/ ...

A part has rows of one split of one source, by their numbers in its `Sequences`; its name is a hash of their data.
Steps, batches and meshes do not enter. A piece appears whole or not at all, so work that was interrupted goes on.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tunix.base.digests import FILE, list_files, record_verified, verify_folder, write_digests
from tunix.base.errors import UserError
from tunix.base.files import make_once
from tunix.base.forms import sign
from tunix.config import Config, Loading
from tunix.config.pretrained_config import LOGITS_FILE, TEACHER, LogitsInfo
from tunix.data.batches import Example, Field, Fields
from tunix.data.packing import Sequences
from tunix.data.shards import load_mapped

OPEN_PIECES = 32  # mapped at one time, of all parts; each takes four file descriptors
NO_TOKEN = -1e30  # log-probability of a token that has no probability

# Fields of a batch. The k numbers of a position stand side by side in the dimension of tokens.
IDS, LOG_PROBS, REST = "teacher_ids", "teacher_log_probs", "teacher_rest"


def logits_fields(top_k: int) -> Fields:
    """Return the fields of a batch that a teacher on disk fills."""
    return {
        IDS: Field("ABT", "int32", per_token=top_k),
        LOG_PROBS: Field("ABT", "float32", per_token=top_k),
        REST: Field("ABT", "float32"),
    }


class TopK(NamedTuple):
    """A teacher's likeliest tokens at each position: arrays of numpy [n, ...], or of jax [B, T, ...]."""

    ids: Any  # [n, k]
    log_probs: Any  # [n, k], nats, the largest first
    rest: Any  # [n]: probability of all other tokens together


def count_position_bytes(top_k: int, num_rows: int, dtype: str) -> int:
    """Return the bytes on disk of a learnt position; the vocabulary has `num_rows` rows."""
    return top_k * (np.dtype(dtype).itemsize + _id_dtype(num_rows).itemsize) + 4


def describe_logits(cfg: Config, num_rows: int) -> str:
    """Return in words what the files of a run's teacher have; the vocabulary has `num_rows` rows."""
    top_k = cfg.task.offline_top_k
    assert top_k is not None
    num_bytes = count_position_bytes(top_k, num_rows, logits_dtype(cfg.training.dtypes["compute"]))
    return f"its {top_k} likeliest tokens from disk, {num_bytes:,} bytes for each learnt token"


def logits_dtype(compute: str) -> Literal["float16", "float32"]:
    """Return the dtype of log-probabilities on disk: products of 16 bits round more than float16 does."""
    return "float32" if compute == "float32" else "float16"


def _id_dtype(num_rows: int) -> np.dtype:
    return np.dtype("uint16" if num_rows <= 1 << 16 else "uint32")


class LogitFiles:
    """The pieces of one part: of the sequences with the numbers `rows`, in order."""

    def __init__(self, folder: Path, info: LogitsInfo, sequences: Sequences, rows: Sequence[int], name: str):
        """`name` is that of the part in messages."""
        self.info, self.sequences, self.rows, self.name = info, sequences, np.asarray(rows, np.int64), name
        digest = hashlib.sha256(f"{sequences.stream.fingerprint} {len(sequences)}".encode() + self.rows.tobytes())
        self.folder = folder / digest.hexdigest()[:20]

    @property
    def pieces(self) -> list[Path]:
        """Folders of all pieces, whether they are there or not."""
        return [self._piece(number) for number in range(-(-len(self.rows) // self.info.rows_per_piece))]

    @property
    def missing(self) -> list[int]:
        """Numbers of the pieces that are to be made."""
        return [number for number, piece in enumerate(self.pieces) if not piece.is_dir()]

    def rows_of(self, number: int) -> list[int]:
        """Return the rows of a piece."""
        first = number * self.info.rows_per_piece
        return self.rows[first : first + self.info.rows_per_piece].tolist()

    def estimate_bytes(self, numbers: Sequence[int]) -> int:
        """Return the bytes of some pieces, whose rows have as many learnt positions as the mean of all rows."""
        num_rows, info = sum(len(self.rows_of(number)) for number in numbers), self.info
        of_position = count_position_bytes(info.top_k, info.num_rows, info.dtype)
        return round(self.sequences.num_learnt * num_rows / max(1, len(self.sequences)) * of_position)

    def write(self, number: int, rows: Sequence[TopK]) -> None:
        """Write a piece: the learnt positions of each of its rows."""
        joined = TopK(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))
        arrays = {
            "ids": joined.ids.astype(_id_dtype(self.info.num_rows)),
            "log_probs": joined.log_probs.astype(self.info.dtype),
            "rest": joined.rest.astype(np.float32),
            "ends": np.cumsum([len(row.rest) for row in rows], dtype=np.int64),
        }

        def make(piece: Path) -> None:
            piece.mkdir()
            for name, array in arrays.items():
                np.save(piece / f"{name}.npy", array)
            write_digests(piece, list_files(piece))
            record_verified(piece, piece / FILE)

        make_once(self._piece(number), make, "loading.cache_dir or task.teacher")

    def verify(self, loading: Loading) -> None:
        """Compare the pieces with their digests, if `loading.verify` asks for it. Raises `UserError` where a file is
        damaged, or ends early."""
        for piece in self.pieces:
            verify_folder(piece, loading.verify, TEACHER, f"remove {piece}, and it is made again")

    def read(self, index: int, loss_mask: np.ndarray) -> Example:
        """Return the fields of the sequence `index`, whose learnt positions are those of `loss_mask` [T]."""
        learnt, k = np.flatnonzero(loss_mask), self.info.top_k
        ids = np.zeros((len(loss_mask), k), np.int32)
        log_probs = np.full((len(loss_mask), k), NO_TOKEN, np.float32)
        rest = np.zeros(len(loss_mask), np.float32)
        at = int(np.searchsorted(self.rows, index))
        if at < len(self.rows) and self.rows[at] == index:  # of what is held out, other sequences are not evaluated
            number, row = divmod(at, self.info.rows_per_piece)
            piece = _open_piece(self._piece(number))
            span = slice(int(piece["ends"][row - 1]) if row else 0, int(piece["ends"][row]))
            if span.stop - span.start != len(learnt):
                raise _unreadable(
                    self._piece(number), f"row {row} has {span.stop - span.start} positions, not {len(learnt)}"
                )
            ids[learnt], rest[learnt] = piece["ids"][span], piece["rest"][span]
            log_probs[learnt] = np.maximum(piece["log_probs"][span], np.float32(NO_TOKEN))
        return {IDS: ids.reshape(-1), LOG_PROBS: log_probs.reshape(-1), REST: rest}

    def _piece(self, number: int) -> Path:
        return self.folder / f"{number:05}"


@lru_cache(OPEN_PIECES)
def _open_piece(piece: Path) -> dict[str, np.ndarray]:
    try:
        return {name: load_mapped(piece / f"{name}.npy") for name in ("ids", "log_probs", "rest", "ends")}
    except (OSError, ValueError) as error:
        raise _unreadable(piece, str(error)) from None


def _unreadable(piece: Path, reason: str) -> UserError:
    return UserError(f"{TEACHER}: cannot read {piece}: {reason}; remove it, and it is made again")


def write_info(folder: Path, info: LogitsInfo) -> None:
    """Make the folder of a teacher's logits."""

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / LOGITS_FILE).write_text(json.dumps({**sign("teacher"), **info.model_dump()}, indent=1))

    make_once(folder, make, "loading.cache_dir or task.teacher")


def check_disk_space(folder: Path, num_bytes: int) -> None:
    """Raise `UserError` where the disk of a folder has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UserError(
            f"loading.cache_dir: the teacher's logits take {num_bytes / 2**30:.2f} GiB, and the disk of {folder} has "
            f"{free / 2**30:.2f}; make room, name another folder, or lower task.teacher_top_k"
        )
