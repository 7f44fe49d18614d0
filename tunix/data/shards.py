"""Shards of a tokenized corpus: written by workers, mapped into memory when they are read.

Reading any place of any shard costs one page of the file:

    FOLDER/index.json                counts, digests and names of the shards; written when all of them are there
    FOLDER/digests.json              digests of these files; each shard has its own; written last
    FOLDER/tokenizer/                files of the tokenizer
    FOLDER/00000/train.tokens.npy    an array of `Arrays`; which ones there are depends on the kind of the documents
    FOLDER/00000/held_out.*.npy      the same for the held-out documents
    FOLDER/00001/ ...
    FOLDER/00001-held-out/           in place of 00001, where `dataset.prepare` held a document out afterwards

A process makes a shard: units (files, or parts of large files) -> documents -> tokens -> arrays of train and held_out.
A shard depends on its plan alone, so any process of any host can make it, and shards are made side by side.
"""

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tunix.base.digests import hash_texts, list_files, write_digests
from tunix.base.errors import UserError
from tunix.base.files import find_way_out, follow_parent, make_once, read_json
from tunix.base.forms import CACHE_FORMS, naming_writer
from tunix.base.progress import is_watched, repeating
from tunix.config import Loading, Task
from tunix.data.chat import RefusedConversation
from tunix.data.documents import DOCUMENTS, Document, Encoded, LeftOut, read_documents, refuse_row
from tunix.data.files import Limited, Rows, Source, Unit
from tunix.data.image_processors import ImageProcessor
from tunix.data.pieces import Cutter, find_max_piece_bytes
from tunix.data.sources import Tokens
from tunix.data.tokenizer import Vocab, add_images, load_vocab

log = logging.getLogger(__name__)

BLOCK = 1 << 24  # elements of an array that are read at one time
MIN_HALVES = 64  # numbers of a file of tokens from which on small ones in every second place are no chance
# Open at one time, of all streams. Each array of a shard takes a file descriptor, of which many systems allow 1,024.
OPEN_SHARDS = 64
FORMAT = str(CACHE_FORMS["tokens"])  # in the index: a folder of the cache may be copied to a place of the user's own
READABLE = {"2", FORMAT}  # formats of copied folders; those of 2 name the kind of their documents in several ways
SPLITS = ("train", "held_out")
DTYPES = {
    "answers": bool, "splits": np.int64, "labels": bool, "label_values": np.float32, "rows": np.uint8,
    "row_ends": np.int64, "images": np.uint8, "image_ends": np.int64, "image_places": np.int64,
    "image_spans": np.int64,
}  # fmt: skip
# Count of the index that is the length of an array.
LENGTHS = dict.fromkeys(("tokens", "answers"), "tokens")
LENGTHS |= dict.fromkeys(("starts", "splits", "labels", "label_values", "row_ends"), "documents")
IMAGE_ARRAYS = ("images", "image_ends", "image_places", "image_spans")  # of documents for a model that sees


@dataclass(frozen=True)
class Arrays:
    """The arrays of one shard of a split: its documents, one after the other."""

    tokens: np.ndarray  # [tokens] uint16 or uint32
    starts: np.ndarray  # [documents] int64: where each document begins
    # Of conversations and pairs, [tokens] bool: the tokens of answers, which are learnt; None means all of them.
    answers: np.ndarray | None = None
    splits: np.ndarray | None = None  # of pairs, [documents] int64: tokens of the first answer with its prompt
    labels: np.ndarray | None = None  # of labelled answers, [documents] bool: true for a desirable one
    label_values: np.ndarray | None = None  # [documents] float32, of examples and groups (`Encoded.label`)
    rows: np.ndarray | None = None  # of prompts, [bytes] uint8: text and columns of each as JSON
    row_ends: np.ndarray | None = None  # [documents] int64: where the JSON of each prompt ends
    images: np.ndarray | None = None  # [bytes] uint8: files of images, one after the other
    image_ends: np.ndarray | None = None  # [images] int64: where each of them ends
    image_places: np.ndarray | None = None  # [images] int64: the first of the soft tokens that stand for each of them
    image_spans: np.ndarray | None = None  # [images] int64: tokens from that one to the last of them


class Stream:
    """A split of a corpus: a list of shards, each opened when it is first read."""

    def __init__(self, sizes: list[tuple[int, int]], open_shard: Callable[[int], Arrays], fingerprint: str):
        """`sizes` are the numbers of tokens and documents of each shard; `fingerprint` identifies all of their data."""
        self.sizes, self.fingerprint, self.open_shard = sizes, fingerprint, open_shard

    def shard(self, number: int) -> Arrays:
        return _open_shard(self.open_shard, number)

    @property
    def num_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.sizes)

    @property
    def num_documents(self) -> int:
        return sum(documents for _, documents in self.sizes)


@lru_cache(OPEN_SHARDS)
def _open_shard(open_shard: Callable[[int], Arrays], number: int) -> Arrays:
    return open_shard(number)


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
        return "conversation" if self.index.get("answers") else "text"

    @property
    def has_images(self) -> bool:
        """True where a document has an image."""
        return any(shard[split].get("images") for shard in self.index["shards"] for split in SPLITS)

    def stream(self, split: str) -> Stream:
        """Return the stream of a split, "train" or "held_out"."""
        shards = [shard[split] for shard in self.index["shards"]]
        digest = hash_texts("".join(shard["digest"] for shard in shards))
        sizes = [(shard["tokens"], shard["documents"]) for shard in shards]
        return Stream(sizes, lambda number: self._open(number, split), digest)

    def _open(self, number: int, split: str) -> Arrays:
        shard = self.index["shards"][number]
        folder = self.folder / shard["name"]
        flat_path = shard[split].get("flat")  # data.source=tokens: the tokens stay in the user's own file
        arrays = {"tokens": map_tokens(**flat_path)} if flat_path else {}
        names = ("tokens", "starts", *list_arrays(self.documents, "images" in self.index))
        arrays |= {name: map_array(folder / f"{split}.{name}.npy") for name in names if name not in arrays}
        for name, array in arrays.items():
            if name in LENGTHS and array.shape != ((count := shard[split][LENGTHS[name]]),):
                raise UserError(
                    f"data: {split}.{name}.npy of {folder} has {array.size:,} numbers, and index.json says {count:,}; "
                    f"remove {self.folder}, and prepare it again"
                )
        return Arrays(**arrays)


def list_arrays(documents: str, with_images: bool) -> tuple[str, ...]:
    """Return the names of the arrays that a shard has beside tokens and starts; `documents` is a key of `DOCUMENTS`."""
    return DOCUMENTS[documents].arrays + (IMAGE_ARRAYS if with_images else ())


def open_prepared(folder: Path) -> Prepared:
    """Open the folder of a tokenized corpus. Raises `UserError` where the index is damaged, or of a version whose form
    is not read here."""
    with naming_writer(folder):
        index = read_json(folder / "index.json")
        if str(index.get("format")) not in READABLE:
            raise UserError(
                f"{folder}/index.json is of format {index.get('format')!r:.50}, not {FORMAT}; remove the folder and "
                "prepare it again"
            )
    return Prepared(folder, index)


def map_tokens(path: str, dtype: str, offset: int, count: int) -> np.ndarray:
    """Map `count` numbers of a file, from the byte `offset` on, as an array [count]."""
    if count == 0:
        return np.zeros(0, dtype)  # an empty range cannot be mapped
    try:
        return np.memmap(path, dtype, "r", offset, (count,))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


# In Python 3.11 before 3.11.8 and 3.12 before 3.12.2, threads that parse at the same time may fail: "AST constructor
# recursion depth mismatch" (gh-106905). np.load parses the head of a file, and threads read the samples of a run.
_parsing = threading.Lock()


def load_mapped(path: Path) -> np.memmap:
    """Map a .npy file, in any thread; raises `OSError` or `ValueError` where it cannot be read."""
    try:
        with _parsing:
            return np.load(path, mmap_mode="r")
    except TokenError as error:  # of a head that is cut
        raise ValueError(f"its head cannot be read: {error.args[0]}") from None


def map_array(path: Path) -> np.ndarray:
    """Map a .npy file; raises `UserError` where it cannot be read."""
    try:
        return load_mapped(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def read_blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the parts [at most BLOCK, ...] of an array that may be larger than memory, each with its first index."""
    for first in range(0, len(array), BLOCK):
        yield first, array[first : first + BLOCK]


def digest_arrays(arrays: dict[str, np.ndarray]) -> str:
    """Return a hash of the names, dtypes, lengths and numbers of some arrays of any shape."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}\0{array.dtype}\0{len(array)}\0".encode())
        for _, block in read_blocks(array):
            digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()


def _unreadable(path: str | Path, error: OSError | ValueError) -> UserError:
    """Return the error for a file of a shard that is missing or cut off."""
    reason, hint = str(error), "the folder was changed after it was made. Remove it, and it is made again"
    if isinstance(error, OSError):
        reason, hint = error.strerror or reason, find_way_out(error, hint)
    return UserError(f"data: cannot read the tokens in {path}: {reason}; {hint}")


def scan_tokens(source: Tokens, unit: Unit, folder: Path, vocab: Vocab) -> tuple[dict[str, Any], np.ndarray]:
    """Make the shard of a file of tokens that another program has made (data.source=tokens).

    The tokens stay where they are: the shard has their place in the file. Only what is not in the file is computed:
    where documents begin, how often each token occurs, and which documents, those at its end, are held out.

    Returns:
        The facts of the shard, and counts [V] int64, one for each token of the vocabulary.

    Raises:
        UserError: a token that the tokenizer does not have; see also `locate_tokens`.
    """
    flat_path = locate_tokens(source, Path(unit.path))
    tokens = map_tokens(**flat_path)
    counts, ends = np.zeros(vocab.num_tokens, np.int64), []
    max_ids = [0, 0]  # of the numbers in even places, and of those in odd ones
    for first, block in read_blocks(tokens):  # the file may be larger than memory
        max_ids = [max(known, int(block[place::2].max(initial=0))) for place, known in enumerate(max_ids)]
        least, high = int(block.min()), int(block.max())
        if least < 0 or high >= len(counts):
            raise UserError(
                f"data: {unit.path} has token {least if least < 0 else high}, the tokenizer has {len(counts)}; "
                "give the tokenizer that made it, or the right data.dtype and data.skip_bytes"
            )
        counts += np.bincount(block, minlength=len(counts))
        if source.document_end is not None:
            ends.append(np.flatnonzero(block == source.document_end) + first)
    # Of a wider number that is read as two, the upper half is at most that of the last token, with few tokens 0.
    if len(tokens) >= MIN_HALVES and min(max_ids) <= (len(counts) - 1) >> 8 * tokens.itemsize < max(max_ids):
        raise UserError(
            f"data: {unit.path} has no number above {min(max_ids)} in every second place, as a file of wider numbers "
            f"has that is read as {tokens.dtype}; data.dtype=uint32 reads numbers of four bytes, and numbers of eight "
            "bytes are written anew with numpy: fromfile(FILE, 'int64').astype('uint32').tofile(FILE)"
        )
    starts = np.concatenate([np.zeros(1, np.int64), *(end + 1 for end in ends)])
    starts = starts[starts < len(tokens)]  # behind the last end there may be nothing
    # Tokens from `bound` on are held out. Where documents are known, the cut moves to the next start of a document.
    bound = len(tokens) - round(source.held_out_fraction * len(tokens))
    if source.document_end is None:
        starts = np.array([start for start in (0, bound) if start < len(tokens)], np.int64)
    elif len(starts) <= 1:  # a single document is not cut in two
        bound = len(tokens)
    elif source.held_out_fraction > 0:
        bound = int(starts[min(int(np.searchsorted(starts, bound)), len(starts) - 1)])
    info: dict[str, Any] = {"left_out": {}, "left_out_names": [], "smallest_hash": 0}
    for split, first, stop in (("train", 0, bound), ("held_out", bound, len(tokens))):
        local = starts[(starts >= first) & (starts < stop)] - first
        np.save(folder / f"{split}.starts.npy", local)
        local_path = flat_path | {"offset": flat_path["offset"] + first * tokens.itemsize, "count": stop - first}
        digest = digest_arrays({"tokens": map_tokens(**local_path), "starts": local})
        info[split] = {"tokens": stop - first, "documents": len(local), "digest": digest, "flat": local_path}
    info["train"]["bytes"] = None  # `dataset.prepare` computes them from the counts of tokens
    return info, counts


def locate_tokens(source: Tokens, path: Path) -> dict[str, Any]:
    """Return where the numbers of a file of tokens are, as arguments of `map_tokens`. A .npy file says so itself.

    Raises:
        UserError: the file is damaged, or is no array of tokens.
    """
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            try:
                array = load_mapped(path)
            except ValueError as error:
                raise UserError(f"data: {path} is damaged or ends early: {error}") from None
            if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32, np.int32):
                raise UserError(
                    f"data: {path} is an array of shape {list(array.shape)} and dtype {array.dtype}; tokens are one "
                    "row of uint16, uint32 or int32"
                )
            found = {"dtype": str(array.dtype), "offset": array.offset, "count": len(array)}
            return {"path": str(path.absolute()), **found}
    size = path.stat().st_size - source.skip_bytes
    width = np.dtype(source.dtype).itemsize
    if size < 0 or size % width:
        raise UserError(
            f"data: {path} has {path.stat().st_size} bytes, which is not data.skip_bytes={source.skip_bytes} and a "
            f"number of whole data.dtype={source.dtype}; the file ends early or is of another type"
        )
    return {"path": str(path.absolute()), "dtype": source.dtype, "offset": source.skip_bytes, "count": size // width}


BATCH_CHARS = 1 << 20  # characters of text that are tokenized at one time
IMAGE_BYTES_PER_CHAR = 64  # bytes of images that count as a character there: 64 MiB are in memory at one time
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
    images: ImageProcessor | None  # of a model that sees


def hash_document(name: str) -> int:
    """Return a number from 0 to 2^64 - 1 that depends on the name alone.

    The numbers are a fixed random order of documents. Documents whose number is below a limit are held out:

        0 |--held out--|--------------------- train ---------------------| 2^64

    Adding or removing documents does not move the others from one side to the other, so a model that was trained before
    a corpus grew has not seen what is held out afterwards.
    """
    encoded = name.encode(errors="surrogateescape")  # a file's name need not be UTF-8
    return int.from_bytes(hashlib.sha256(encoded).digest()[: HASH_BITS // 8], "big")


class ArrayFile:
    """A .npy file of one row of numbers that grows: what it holds need not fit into memory."""

    def __init__(self, path: Path, dtype: Any):
        self.dtype, self.count, self.file = np.dtype(dtype), 0, path.open("wb")
        self._write_head()

    def append(self, numbers: np.ndarray) -> None:
        """Add numbers [n]."""
        self.file.write(np.ascontiguousarray(numbers, self.dtype).data)
        self.count += len(numbers)

    def close(self) -> None:
        self.file.seek(0)  # the head is as long for every number of numbers
        self._write_head()
        self.file.close()

    def _write_head(self) -> None:
        head = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, head)


class Part:
    """One split of a shard, written document by document."""

    def __init__(self, documents: str, folder: Path, split: str, dtype: np.dtype, with_images: bool):
        """`documents` is their kind, a key of `DOCUMENTS`; `dtype` that of the tokens."""
        self.bytes = 0  # of text
        arrays = list_arrays(documents, with_images)
        dtypes = {"tokens": dtype, "starts": np.int64} | {name: DTYPES[name] for name in arrays}
        self.paths = {name: folder / f"{split}.{name}.npy" for name in dtypes}
        self.files = {name: ArrayFile(path, dtypes[name]) for name, path in self.paths.items()}

    def add(self, encoded: Encoded) -> None:
        files, row = self.files, np.frombuffer(encoded.row, np.uint8)
        starts = np.array([files["tokens"].count])
        for tokens in encoded.tokens:
            files["tokens"].append(tokens)
        arrays = {"starts": starts, "answers": encoded.answers, "splits": np.array([encoded.split]), "rows": row}
        arrays["labels"] = arrays["label_values"] = np.array([encoded.label])
        for name in arrays.keys() & files.keys():
            files[name].append(arrays[name])
        if "rows" in files:
            files["row_ends"].append(np.array([files["rows"].count]))
        for image, span in zip(encoded.images, encoded.image_spans, strict=True):
            files["images"].append(np.frombuffer(image, np.uint8))
            files["image_ends"].append(np.array([files["images"].count]))
            files["image_places"].append(starts + span[:1])
            files["image_spans"].append(np.diff(span))
        self.bytes += encoded.text_bytes

    def close(self) -> dict[str, Any]:
        """End the files (`Arrays`); return their counts and digest."""
        for file in self.files.values():
            file.close()
        arrays = {name: map_array(path) for name, path in self.paths.items()}
        counts = {"tokens": self.files["tokens"].count, "documents": self.files["starts"].count}
        return {**counts, "bytes": self.bytes, "digest": digest_arrays(arrays)}


_load_vocab = lru_cache(1)(load_vocab)  # a process makes many shards with one tokenizer


def make_shard(plan: ShardPlan, folder: Path) -> None:
    """Make a shard in `folder`: the arrays of each split, counts.npy with a count for each token, facts, digests."""
    folder.mkdir()
    vocab = add_images(_load_vocab(str(plan.tokenizer)), plan.images)
    if isinstance(plan.source, Tokens):
        (unit,) = plan.units
        info, counts = scan_tokens(plan.source, unit, folder, vocab)
    else:
        info, counts = _tokenize(plan, folder, vocab)
    np.save(folder / "counts.npy", counts)
    (folder / "facts.json").write_text(json.dumps(info | {"name": plan.name}))
    write_digests(folder, list_files(folder))


def _tokenize(plan: ShardPlan, folder: Path, vocab: Vocab) -> tuple[dict[str, Any], np.ndarray]:
    """Tokenize the documents of a plan; return the facts of the shard, and a count for each token of the vocabulary."""
    has_images = plan.images is not None
    parts = {split: Part(plan.task.documents, folder, split, vocab.dtype, has_images) for split in SPLITS}
    left_out: Counter[str] = Counter()
    examples: list[str] = []
    smallest = 2**HASH_BITS  # of a small corpus, `dataset.prepare` holds out the document with the smallest hash
    for documents in _read_batches(plan, vocab, left_out, examples):
        for document, first in _encode(plan, vocab, documents, left_out, examples):
            if plan.task.documents == "example" and len(first.answers) == 1:  # nothing stands before its end
                _count_left_out(LeftOut(document.name, "empty"), left_out, examples)
                continue
            number = hash_document(document.name)
            smallest = min(smallest, number)
            for encoded in (first, *first.further):
                parts["held_out" if number < plan.held_out_below else "train"].add(encoded)
    info = {split: part.close() for split, part in parts.items()}
    if has_images:
        for split, part in parts.items():
            info[split]["images"] = part.files["image_ends"].count
    counts = np.zeros(vocab.num_tokens, np.int64)
    for _, block in read_blocks(np.load(folder / "train.tokens.npy", mmap_mode="r")):
        counts += np.bincount(block, minlength=len(counts))
    return {**info, "left_out": left_out, "left_out_names": examples, "smallest_hash": smallest}, counts


NOT_SPLIT = "with a part that the tokenizer cannot cut, longer than a 64th of data.max_document_bytes"


def can_split(source: Source, document: Document, cutter: Cutter | None) -> bool:
    """Return whether the tokenizer takes a document in pieces that are short enough for `data.max_document_bytes`.

    The library takes more than 100 times the bytes of a piece: a hostile document is one word of hundreds of MB.
    """
    if not isinstance(source, Limited) or source.max_document_bytes is None:
        return True
    limit = max(1 << 20, source.max_document_bytes // 64)
    text = document.text
    return len(text) * 4 <= limit or find_max_piece_bytes(text, cutter) <= limit


def _read_batches(plan: ShardPlan, vocab: Vocab, left_out: Counter[str], names: list[str]) -> Iterator[list[Document]]:
    """Yield the documents in order, about `BATCH_CHARS` of text at a time. `left_out` counts the items that give no
    document by reason; `names` gets the names of the first five."""
    batch: list[Document] = []
    size = 0
    for unit in plan.units:
        for document in read_documents(plan.source, plan.task, unit, plan.images):
            if isinstance(document, Document) and not can_split(plan.source, document, vocab.cutter):
                document = LeftOut(document.name, NOT_SPLIT)
            if isinstance(document, LeftOut):
                _count_left_out(document, left_out, names)
                continue
            batch.append(document)
            size += len(document.text) + sum(map(len, document.images)) // IMAGE_BYTES_PER_CHAR
            if size >= BATCH_CHARS:
                yield batch
                batch, size = [], 0
    yield batch


REFUSED = "refused by task.chat_template"


def _encode(
    plan: ShardPlan, vocab: Vocab, documents: list[Document], left_out: Counter[str], examples: list[str]
) -> list[tuple[Document, Encoded]]:
    """Return the documents with their tokens, without those that the chat template refuses if data.bad_rows=skip."""
    encode = DOCUMENTS[plan.task.documents].encode
    if not documents:
        return []
    with contextlib.suppress(RefusedConversation):
        return list(zip(documents, encode(vocab, documents), strict=True))
    # Which ones it refuses is found one by one: nearly all corpora have none.
    accepted = []
    for each in documents:
        try:
            list(encode(vocab, [each]))
            accepted.append(each)
        except RefusedConversation as error:
            if not isinstance(plan.source, Rows) or plan.source.bad_rows == "error":
                reason = str(error).partition(": ")[2]
                with plan.source.naming_keys():
                    raise refuse_row(each, f"has a conversation that task.chat_template refuses: {reason}") from None
            _count_left_out(LeftOut(each.name, REFUSED), left_out, examples)
    return list(zip(accepted, encode(vocab, accepted), strict=True)) if accepted else []


def _count_left_out(item: LeftOut, left_out: Counter[str], examples: list[str]) -> None:
    """Count an item that gives no document by its reason, and keep the names of the first five."""
    left_out[item.reason] += 1
    if item.reason != "empty" and len(examples) < 5:
        examples.append(item.name.encode(errors="replace").decode())  # a name that can be printed


# Shards made side by side, by a worker process on each core.


def make_shards(plans: list[ShardPlan], folder: Path, loading: Loading) -> list[dict]:
    """Make the shards that are missing, on all cores; return the facts of all."""
    missing = [plan for plan in plans if not (folder / plan.name).exists()]
    if 0 < len(missing) < len(plans):
        log.info("%d of %d shards are there already", len(plans) - len(missing), len(plans))
    num_workers = min(len(missing), loading.prepare_processes or os.cpu_count() or 1)
    sizes = {plan.name: sum(unit.size for unit in plan.units) for plan in missing}
    text = TextColumn("tokenizing, {task.description}")
    start_time = time.perf_counter()
    columns = text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with_bar = is_watched()
    with Progress(*columns, transient=True, disable=not with_bar) as progress:
        bar = progress.add_task("0.0 MB of tokens", total=sum(sizes.values()))

        def report() -> None:
            megabytes = _count_array_bytes(folder, "tokens") / 1e6
            text = f"{megabytes:.1f} MB of tokens"
            if num_images := _count_array_bytes(folder, "image_ends") // 8:
                text += f", {num_images:,} images, {num_images / (time.perf_counter() - start_time):.0f} a second"
            progress.update(bar, description=text)
            if not with_bar and round(megabytes, 1):  # the first of a long document come at its end
                log.info("tokenizing, %s so far", text)

        with repeating(report, lambda _: REPORT_EVERY_S):
            for name in _make_missing(missing, folder, num_workers):
                progress.advance(bar, sizes[name])
    return [json.loads((folder / plan.name / "facts.json").read_text()) for plan in plans]


REPORT_EVERY_S = 4.0  # while a shard is made, so that nobody thinks that the process is stuck


def _count_array_bytes(folder: Path, array: str) -> int:
    """Return the bytes of the files of one array in all shards of a folder, also of those that are not done."""
    size = 0
    with contextlib.suppress(OSError):  # a folder that goes away while it is listed
        for path in folder.rglob(f"*.{array}.npy"):
            with contextlib.suppress(OSError):  # of a shard that has just got its name
                size += path.stat().st_size
    return size


def _make_missing(plans: list[ShardPlan], folder: Path, num_workers: int) -> Iterator[str]:
    """Make shards in worker processes and yield the name of each when it is done. With one worker, this process makes
    them all, and the tokenizer uses a thread for each core."""
    if num_workers <= 1:
        yield from (_make_one(plan, folder) for plan in plans)
        return
    # "spawn" starts a new interpreter. "fork" would copy this process, whose other threads (JAX, a tokenizer) may hold
    # locks; the copy has no such thread, so its locks would never open.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (os.getpid(),)) as pool:
        futures = [pool.submit(_make_one, plan, folder) for plan in plans]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise UserError(
                "a process that tokenizes was killed, perhaps because memory ran out; run fewer at a time: "
                f"loading.prepare_processes={max(1, num_workers // 2)}. Finished shards are kept"
            ) from None
        except BaseException:
            # Without this, leaving the block waits for every shard that has not begun yet.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make_one(plan: ShardPlan, folder: Path) -> str:
    make_once(folder / plan.name, lambda path: make_shard(plan, path))
    return plan.name


def _start_worker(parent: int) -> None:
    """Prepare a worker process: it uses one core, and it ends when its parent has ended."""
    # The tokenizer's threads (Rayon) are one for each core; so many in each worker would only wait for one another.
    os.environ["RAYON_NUM_THREADS"] = "1"
    follow_parent(parent)  # a parent that is killed cannot end its workers
