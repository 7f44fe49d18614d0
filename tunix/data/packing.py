"""Sequences of T tokens made of documents: which parts of which documents, and the arrays of one of them."""

import bisect
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import grain
import numpy as np

from tunix.base.files import make_once
from tunix.base.forms import locate_cached
from tunix.data.batches import Example, empty_example
from tunix.data.image_slots import ImageSlots, has_images, list_image_spans
from tunix.data.shards import OPEN_SHARDS, Arrays, Stream, locate, map_array


class Sequences(grain.sources.RandomAccessDataSource):
    """A stream cut into sequences of T tokens; any of them at the same cost.

    Each shard is packed by itself. A sequence is a row of *chunks*, (first token, length) in the shard: `concat` takes
    one chunk of T tokens after the other through all documents; `best_fit` and `pad` take chunks that lie in one
    document each, from a plan that is made once and kept. In an example `segment_ids` tell documents apart (0 is
    padding), `positions` restart with each, and `loss_mask` is 0 where the next token is another document's, padding,
    or no part of an answer.

    A pair of answers is one chunk, which is never cut. It becomes two segments: the chosen answer after the prompt,
    with an odd number, and the rejected one after the same prompt, with the even number behind it. So both are in one
    row. A pair that is longer than a sequence is left out. A labelled answer is such a pair: its second answer is that
    of another document. A document with a label (`label_values`) is one chunk, too.

    For a model that sees, each example has the images of its chunks in slots (`ImageSlots`). No chunk ends within
    an image.
    """

    def __init__(self, stream: Stream, seq_len: int, packing: str, cache_dir: Path, slots: ImageSlots | None = None):
        """Raises `UserError` where an image would be cut, or has no room in a sequence."""
        self.stream, self.seq_len, self.packing, self.slots = stream, seq_len, packing, slots
        if slots is not None:
            image_spans = [list_image_spans(stream, number) for number in range(len(stream.sizes))]
            if max_image_tokens := max((int(np.diff(each).max()) for each in image_spans if len(each)), default=0):
                slots.check(seq_len, packing, max_image_tokens)
        # Of pairs, once the reference has scored them: number of a shard -> its log-probabilities (`_fill_pairs`).
        self.of_pairs: Callable[[int], np.ndarray] | None = None
        # Of a teacher on disk: (number of a sequence, its loss mask) -> fields (data/teacher_logits.py).
        self.of_teacher: Callable[[int, np.ndarray], Example] | None = None
        self.plans: list[Path] | None = None  # of each shard, the folder of its plan
        # A sequence of `concat` is T tokens and the token behind them, the target of the last one. The next sequence
        # begins with that token: a shard of n tokens has (n - 1) // T sequences.
        counts = [max(0, (tokens - 1) // seq_len) for tokens, _ in stream.sizes]
        if packing != "concat":
            self.plans = [_make_plan(stream, n, seq_len, packing, cache_dir, slots) for n in range(len(stream.sizes))]
            counts = [len(bounds) - 1 for _, bounds in map(_open_plan, self.plans)]
        self.ends = np.cumsum(counts)  # number of the first sequence behind each shard

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences, without padding."""
        if self.plans is None:
            return len(self) * self.seq_len
        if self._is_whole:
            return sum(int(chunks[:, 1].sum()) for chunks, _ in map(_open_plan, self.plans))
        return self.stream.num_tokens - self.stream.num_documents  # a document's last token is only a target

    @property
    def num_learnt(self) -> int:
        """Positions of all sequences that are learnt, at most: answers, or all tokens."""
        answers = [np.count_nonzero(mask) for mask in self._read_masks() if mask is not None]
        return int(sum(answers)) if answers else self.num_tokens

    @property
    def has_learnt(self) -> bool:
        """True where any token is learnt: one of an answer, where documents have answers."""
        return any(mask is None or mask.any() for mask in self._read_masks())

    def _read_masks(self) -> Iterator[np.ndarray | None]:
        """Yield `Arrays.answers` of each shard."""
        return (self.stream.shard(number).answers for number in range(len(self.stream.sizes)))

    @property
    def num_left_out(self) -> int:
        """Pairs, or documents with a label, that are longer than a sequence."""
        if self.plans is None or not self._is_whole:
            return 0
        return self.stream.num_documents - sum(len(chunks) for chunks, _ in map(_open_plan, self.plans))

    def pairs_of(self, index: int) -> tuple[int, np.ndarray]:
        """Return the number of the shard of a sequence, and the numbers [pairs] of its pairs in that shard, in their
        order."""
        assert self.plans is not None
        number, local = locate(index, self.ends)
        chunks, bounds = _open_plan(self.plans[number])
        return number, np.searchsorted(self.stream.shard(number).starts, chunks[bounds[local] : bounds[local + 1], 0])

    @property
    def _is_whole(self) -> bool:
        """True where documents are never cut."""
        if not self.stream.sizes:
            return False
        shard = self.stream.shard(0)
        return shard.splits is not None or shard.label_values is not None

    @property
    def utilisation(self) -> float:
        """Share of tokens that are not padding."""
        return self.num_tokens / max(1, len(self) * self.seq_len)

    @property
    def documents_per_sequence(self) -> float:
        return self.stream.num_documents / max(1, len(self))

    def __getitem__(self, index: Any) -> Example:
        example = self._read(index)
        return example if self.of_teacher is None else example | self.of_teacher(int(index), example["loss_mask"])

    def _read(self, index: Any) -> Example:
        number, local = locate(index, self.ends)
        shard = self.stream.shard(number)
        if self.plans is None:
            return _slice_window(shard, local * self.seq_len, self.seq_len) | self._fill_slots(shard, [])
        chunks, bounds = _open_plan(self.plans[number])
        local_chunks = chunks[bounds[local] : bounds[local + 1]].tolist()
        if shard.splits is None:
            fill = _fill_chunks if shard.label_values is None else _fill_examples
            return fill(shard, local_chunks, self.seq_len) | self._fill_slots(shard, local_chunks)
        of_pairs = None if self.of_pairs is None else self.of_pairs(number)
        halves = _split_pairs(shard, local_chunks)
        return _fill_pairs(shard, halves, self.seq_len, of_pairs) | self._fill_slots(shard, halves)

    def describe_decoding(self, rows_per_step: int, num_threads: int) -> str:
        """Say how long the images of a step take to decode, after a trial; empty where there are none."""
        shard = next((each for each in map(self.stream.shard, range(len(self.stream.sizes))) if has_images(each)), None)
        if self.slots is None or shard is None:
            return ""
        per_row = sum(len(list_image_spans(self.stream, n)) for n in range(len(self.stream.sizes))) / max(1, len(self))
        seconds = self.slots.time_decoding(shard)
        count = per_row * rows_per_step
        return (
            f"an image takes {1000 * seconds:.1f} ms to decode, the {count:.0f} of a step {count * seconds:.2g} s of "
            f"one core; loading.read_threads={num_threads} keep up with steps of {count * seconds / num_threads:.2g} s"
        )

    def _fill_slots(self, shard: Arrays, chunks: list[list[int]]) -> Example:
        return {} if self.slots is None else self.slots.fill(shard, chunks, self.seq_len)


def _slice_window(shard: Arrays, first: int, seq_len: int) -> Example:
    """Return the example of the T tokens from `first` on, whatever documents they are of.

    documents        a a a a a b b c c c c ...       T = 6, first = 3
    tokens                 a a b b c c
    targets                  a b b c c c             the tokens one place later
    positions              0 1 0 1 0 1               the part of `a` before the window is unknown to the model
    segment_ids            1 1 2 2 3 3
    loss_mask              1 0 1 0 1 1               0 where the target belongs to the next document
    """
    tokens = shard.tokens[first : first + seq_len + 1]
    indices = np.arange(first, first + seq_len + 1)
    # The documents of the window: from the one that `first` lies in to the last that begins within.
    opening = int(np.searchsorted(shard.starts, first, side="right")) - 1
    closing = int(np.searchsorted(shard.starts, first + seq_len, side="right"))
    starts = np.maximum(shard.starts[opening:closing], first)
    document = np.searchsorted(starts, indices, side="right") - 1
    learnt = document[1:] == document[:-1]
    if shard.answers is not None:
        learnt &= shard.answers[first + 1 : first + seq_len + 1]
    example = empty_example(seq_len)
    example["tokens"][:], example["targets"][:] = tokens[:-1], tokens[1:]
    example["positions"][:] = (indices - starts[document])[:-1]
    example["segment_ids"][:] = (document + 1)[:-1]
    example["loss_mask"][:] = learnt
    return example


def _fill_chunks(shard: Arrays, chunks: list[list[int]], seq_len: int) -> Example:
    """Return the example of chunks one after the other, then padding; each has its next token as last target."""
    example = empty_example(seq_len)
    offset = 0
    for segment, (first, length) in enumerate(chunks, 1):
        span = slice(offset, offset + length)
        tokens = shard.tokens[first : first + length + 1]
        example["tokens"][span], example["targets"][span] = tokens[:-1], tokens[1:]
        example["positions"][span], example["segment_ids"][span] = np.arange(length), segment
        example["loss_mask"][span] = 1 if shard.answers is None else shard.answers[first + 1 : first + length + 1]
        offset += length
    return example


def _fill_examples(shard: Arrays, chunks: list[list[int]], seq_len: int) -> Example:
    """Return the example of whole documents; the field `label_values` has the label of each at its last token. A
    document of several texts, a query with its documents, becomes a segment for each."""
    assert shard.label_values is not None
    chunks = _split_texts(shard, chunks)
    example = _fill_chunks(shard, chunks, seq_len)
    example["label_values"] = np.zeros(seq_len, np.float32)
    lasts = np.cumsum([length for _, length in chunks], dtype=np.int64) - 1
    documents = np.searchsorted(shard.starts, [first for first, _ in chunks], side="right") - 1
    example["label_values"][lasts] = shard.label_values[documents]
    return example


def _split_texts(shard: Arrays, chunks: list[list[int]]) -> list[list[int]]:
    """Return each text of documents as a chunk, without the token that only marks its end (`encode_examples`)."""
    assert shard.answers is not None
    texts = []
    for first, length in chunks:
        ends = first + np.flatnonzero(shard.answers[first : first + length + 1])
        starts = [first, *(ends[:-1] + 1).tolist()]
        texts += [[start, end - start] for start, end in zip(starts, ends.tolist(), strict=True)]
    return texts


def _split_pairs(shard: Arrays, chunks: list[list[int]]) -> list[list[int]]:
    """Return both halves of each pair as a chunk: the chosen answer after the prompt, the rejected one after it."""
    assert shard.splits is not None
    # A pair is one chunk of the shard: prompt, chosen, prompt, rejected. The last token of each half is only a target,
    # so a chunk is two tokens shorter than its document (`_make_plan`).
    halves = []
    for first, length in chunks:
        split = int(shard.splits[np.searchsorted(shard.starts, first)])
        halves += [[first, split - 1], [first + split, length - split + 1]]
    return halves


def _fill_pairs(shard: Arrays, halves: list[list[int]], seq_len: int, of_pairs: np.ndarray | None) -> Example:
    """Return the example of pairs one after the other, each as two segments, then padding. `of_pairs` [documents, 2]
    float32 are the log-probabilities of the answers under the reference. Each stands at the last token of its answer,
    in the field `reference_log_probs`. Where documents have labels, the field `labels` has 1 or -1 at the last token of
    each first answer."""
    example = _fill_chunks(shard, halves, seq_len)
    if shard.labels is not None:
        example["labels"] = np.zeros(seq_len, np.float32)
    if of_pairs is not None:
        example["reference_log_probs"] = np.zeros(seq_len, np.float32)
    offset = 0
    for number, (first, length) in enumerate(halves):
        offset += length
        # The document begins with its first half. The answer ends with the last token that is learnt, from the right.
        start = first if number % 2 == 0 else halves[number - 1][0]
        last = offset - 1 - int(np.argmax(example["loss_mask"][offset - length : offset][::-1] > 0))
        document = np.searchsorted(shard.starts, start)
        if of_pairs is not None:
            example["reference_log_probs"][last] = of_pairs[document, number % 2]
        if shard.labels is not None and number % 2 == 0:
            example["labels"][last] = 1 if shard.labels[document] else -1
    return example


def _make_plan(
    stream: Stream, number: int, seq_len: int, packing: str, cache_dir: Path, slots: ImageSlots | None
) -> Path:
    """Return the folder of the chunks of a shard (`_open_plan`), which is made if it is not there."""

    def make(folder: Path) -> None:
        folder.mkdir()
        shard, tokens = stream.shard(number), stream.sizes[number][0]
        lengths, starts = np.diff(shard.starts, append=tokens), np.asarray(shard.starts)
        image_spans = list_image_spans(stream, number)
        if shard.splits is not None or shard.label_values is not None:
            # Whole documents: their tokens but the last, or the last of each half, which are only targets.
            chunks = np.stack([starts, lengths - (1 if shard.splits is None else 2)], axis=1)
            chunks = chunks[chunks[:, 1] <= seq_len]
            chunks = chunks if slots is None else chunks[slots.fits(chunks, image_spans)]
        elif slots is None or not len(image_spans):
            chunks = _split_chunks(lengths, starts, seq_len)
        else:
            chunks = slots.split_chunks(lengths, starts, image_spans, seq_len)
        rooms = chunks[:, 1] if slots is None else slots.weigh(chunks, image_spans, seq_len)
        rows = list(PACKINGS[packing](rooms, seq_len))
        np.save(folder / "bounds.npy", np.cumsum([0, *map(len, rows)]))
        np.save(folder / "pieces.npy", chunks[np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int64)])

    suffix = "" if slots is None else slots.suffix
    plans = locate_cached(cache_dir, "packing", f"{stream.fingerprint}-{packing}-{seq_len}{suffix}")
    return make_once(plans / f"{number:05}", make)


@lru_cache(OPEN_SHARDS)
def _open_plan(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the chunks of a shard [chunks, 2] int64, and where those of each sequence begin [sequences + 1] int64.
    Chunks are in the order of sequences: sequence n has chunks[bounds[n] : bounds[n + 1]]. Every process maps the same
    files."""
    return map_array(folder / "pieces.npy"), map_array(folder / "bounds.npy")


def _split_chunks(lengths: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """Cut each document's tokens but the last, which is only a target, into chunks [chunks, 2] of at most T tokens.

        T = 4, a document of 10 tokens from 100 on: 9 tokens to read    (100, 4) (104, 4) (108, 1)

    All documents are cut at once: `document` and `offset` say which document each chunk is of, and where in it.
    """
    inputs = lengths - 1
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(lengths)), counts)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    return np.stack([starts[document] + offset, np.minimum(inputs[document] - offset, seq_len)], axis=1)


def pack_best_fit(lengths: np.ndarray, seq_len: int, max_chunks: int = sys.maxsize) -> Iterator[list[int]]:
    """Best-fit decreasing of chunks with `lengths` [chunks]: from the longest one down, each into the sequence that it
    fills up most; at most `max_chunks` in a sequence.

    Lengths are small whole numbers, so sequences are kept by the room that is left in them, and chunks of one length
    are placed together: the cost is linear in the chunks.

        T = 8, chunks of 6 5 3 2 2      6 | 6, 5 | 6, 5 3 | 6 2, 5 3 | 6 2, 5 3, 2
    """
    rows: list[list[int]] = []
    by_capacity: list[list[int]] = [[] for _ in range(seq_len + 1)]  # sequences, by the room in them
    order = np.argsort(-lengths, kind="stable")
    bounds = np.flatnonzero(np.diff(lengths[order], prepend=-1))
    rooms: list[int] = []  # the rooms that some sequence has, in order
    for group in np.split(order, bounds[1:]) if len(order) else []:
        length = int(lengths[group[0]])
        waiting = group.tolist()[::-1]
        while waiting:
            at = bisect.bisect_left(rooms, length)  # the least room that is enough
            if at == len(rooms):
                row, capacity = len(rows), seq_len
                rows.append([])
            else:
                capacity = rooms[at]
                row = by_capacity[capacity].pop()
                if not by_capacity[capacity]:
                    del rooms[at]
            # As many of this length as fit: each would choose the same sequence, whose room is still the least.
            while waiting and capacity >= length and len(rows[row]) < max_chunks:
                rows[row].append(waiting.pop())
                capacity -= length
            if capacity and len(rows[row]) < max_chunks:
                if not by_capacity[capacity]:
                    bisect.insort(rooms, capacity)
                by_capacity[capacity].append(row)
    yield from rows


# (lengths of chunks, T) -> the numbers of the chunks of each sequence.
PACKINGS: dict[str, Callable[[np.ndarray, int], Iterator[list[int]]]] = {
    "best_fit": pack_best_fit,
    "pad": lambda lengths, seq_len: ([chunk] for chunk in range(len(lengths))),
}
