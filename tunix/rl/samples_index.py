"""Index of samples.jsonl: where the answers to each prompt stand in the file, and their rewards.

The file may have gigabytes. It is read once, a line at a time, and the index keeps one row for each group, which is the
answers to one prompt in one step. Its lines are parsed when a group is chosen.

    line     {"step": 1, "sample": 0, "prompt": "1+1=", "answer": "2", "reward": 1.0, ...}
    row      step 1, sample 0, digest of the prompt, bytes 0 to 4,096, 8 answers, rewards from 0 to 1

A resumed run writes the steps behind its checkpoint again; what it had written of them before does not count.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tunix.base.errors import UserError

MAX_LINE = 32 * 2**20  # bytes; a longer line is left out
FIELDS = np.dtype(
    [("step", "i8"), ("sample", "i8"), ("prompt", "u8"), ("start", "i8"), ("end", "i8"), ("answers", "i4"),
     ("lowest", "f8"), ("highest", "f8"), ("total", "f8"), ("block", "i4")]
)  # fmt: skip

# A quote inside of a JSON string has a backslash before it, so these match keys of the line and nothing in its texts.
HEAD = re.compile(rb'\{"step": (\d{1,15}), "sample": (\d{1,15}), ')
PROMPT = re.compile(rb'"prompt": ("[^"\\]*(?:\\.[^"\\]*)*")')
REWARD = re.compile(rb', "reward": (-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|NaN|-?Infinity)[,}]')


class Head(NamedTuple):
    """Part of a line that the index keeps."""

    step: int
    sample: int
    prompt: bytes  # as JSON
    reward: float


@dataclass(frozen=True)
class SamplesIndex:
    """Groups of a file samples.jsonl, in the order of their steps and samples."""

    file: Path
    groups: np.ndarray  # [groups], of FIELDS
    num_lines: int
    num_broken: int  # lines that are left out: no JSON object of an answer, or too long
    torn: bool  # the last line has no end: the run is writing it, or was killed while it wrote it

    @property
    def steps(self) -> np.ndarray:
        """[steps]: numbers of the steps whose answers are in the file, in order."""
        return np.unique(self.groups["step"])

    def read(self, row: int) -> list[dict[str, Any]]:
        """Return the records of a group; lines that are broken are left out."""
        group, found = self.groups[row], []
        with self.file.open("rb") as file:
            file.seek(int(group["start"]))
            while file.tell() < group["end"] and (line := file.readline(MAX_LINE)):
                record = parse(line)
                if record and (record.get("step"), record.get("sample")) == (group["step"], group["sample"]):
                    found.append(record)
        return found


def read_index(file: Path, group_size: int | None) -> SamplesIndex:
    """Read a file once; `group_size` is the number of answers to a prompt, as far as it is known. Raises `UserError`
    where the file is not there, cannot be read, or has no whole line."""
    try:
        with file.open("rb") as lines:
            return _Builder(file, group_size).build(lines)
    except FileNotFoundError:
        why = "task=grpo writes it, where task.samples_every_steps is not null"
        raise UserError(f"{file.parent} has no samples.jsonl; {why}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None


class _Builder:
    """Rows of an index while the file is read."""

    def __init__(self, file: Path, group_size: int | None):
        self.file, self.group_size = file, group_size
        self.parts: list[np.ndarray] = []
        self.rows: list[tuple] = []
        self.group: list | None = None  # the newest row, to which lines are added
        self.block = 0
        self.num_lines, self.num_broken, self.torn = 0, 0, False

    def build(self, lines: BinaryIO) -> SamplesIndex:
        for start, line in self._read_lines(lines):
            head = read_head(line)
            if head is None:
                self.num_broken += 1
            else:
                self._add(start, start + len(line), head)
        self._end_group()
        self._pack()
        if not self.parts:
            raise UserError(f"{self.file} has no whole line with an answer")
        groups = keep_latest(np.concatenate(self.parts))
        return SamplesIndex(self.file, groups, self.num_lines, self.num_broken, self.torn)

    def _read_lines(self, lines: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield the place of each whole line, and its bytes."""
        start = 0
        while line := lines.readline(MAX_LINE):
            length, too_long = len(line), False
            while not line.endswith(b"\n") and (more := lines.readline(MAX_LINE)):
                line, length, too_long = more, length + len(more), True
            self.torn = not line.endswith(b"\n")
            self.num_lines += not self.torn
            self.num_broken += too_long and not self.torn
            if not self.torn and not too_long:
                yield start, line
            start += length

    def _add(self, start: int, end: int, head: Head) -> None:
        group, reward = self.group, head.reward
        same = group is not None and (group[0], group[1]) == (head.step, head.sample)
        # A group of one prompt that is written again follows itself.
        if group is None or not same or group[5] == self.group_size:
            if group is not None and (group[0] != head.step or head.sample <= group[1]):
                self.block += 1
            self._end_group()
            digest = int.from_bytes(blake2b(head.prompt, digest_size=8).digest(), "little")
            self.group = [head.step, head.sample, digest, start, end, 1, reward, reward, reward, self.block]
            return
        group[4], group[5] = end, group[5] + 1
        group[6], group[7], group[8] = min(group[6], reward), max(group[7], reward), group[8] + reward

    def _end_group(self) -> None:
        if self.group is not None:
            self.rows.append(tuple(self.group))
        self.group = None
        if len(self.rows) >= 10_000:
            self._pack()

    def _pack(self) -> None:
        """Move rows into an array: as Python's objects they take ten times the memory."""
        if self.rows:
            self.parts.append(np.array(self.rows, FIELDS))
        self.rows = []


def keep_latest(groups: np.ndarray) -> np.ndarray:
    """Return those groups [n] that no later block has replaced, by step and sample.

    A block is a part of the file with one step and rising samples. Where the run goes on from a checkpoint, its steps
    replace all those behind it, also those that it does not write again: they are of a model that is left.
    """
    steps = groups["step"][np.unique(groups["block"], return_index=True)[1]]  # of each block
    lowest = np.minimum.accumulate(steps[::-1])[::-1]  # of a block and all later ones
    is_kept = np.append(steps[:-1] < lowest[1:], True)
    kept = groups[is_kept[groups["block"]]]
    return kept[np.lexsort((kept["sample"], kept["step"]))]


def read_head(line: bytes) -> Head | None:
    """Return what the index needs of a line, by patterns where it has the usual form; None for a broken line."""
    head = HEAD.match(line)
    prompt = head and PROMPT.match(line, head.end())
    reward = prompt and REWARD.search(line, prompt.end())
    if head and prompt and reward and line.endswith(b"}\n"):
        value = float(reward[1])
        return Head(int(head[1]), int(head[2]), prompt[1], value if math.isfinite(value) else 0.0)
    record = parse(line)
    if record is None:
        return None
    step, sample, number = record.get("step"), record.get("sample"), as_number(record.get("reward"))
    if type(step) is not int or type(sample) is not int or not (0 <= step < 2**62 and 0 <= sample < 2**62):
        return None
    prompt_json = json.dumps(record.get("prompt"), ensure_ascii=False).encode(errors="replace")
    return Head(step, sample, prompt_json, number or 0.0)


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None where there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def as_number(value: Any) -> float | None:
    """Return a finite number, else None: JSON has no others, and a page gets no text where it formats a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None
