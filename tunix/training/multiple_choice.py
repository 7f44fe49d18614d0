"""Questions with several choices, asked while a model trains: which choice does the model find likeliest?

A file of `evaluation.choices` has a question in each line:

    {"prompt": "The sky is", "choices": [" blue", " green"], "answer": 0}

Each choice is scored behind the prompt, and its own tokens count, as in EleutherAI's harness. Several of these texts
share a row, each as a document of its own.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, reshard

from tunix.base.digests import hash_texts
from tunix.base.errors import UserError
from tunix.base.files import expand_home, parse_json
from tunix.config import Config
from tunix.data.batches import Batch, Example, add_fields, empty_example, image_fields
from tunix.data.packing import pack_best_fit
from tunix.data.tokenizer import Vocab
from tunix.processes import peers
from tunix.sharding.arrays import local_rows, to_global
from tunix.training.logprobs import compute_token_log_probs
from tunix.training.state import Architecture

MAX_BYTES = 1 << 28  # of a file


class Question(NamedTuple):
    """A row of a file."""

    prompt: str
    choices: list[str]
    answer: int  # index of the right choice


def read_questions(name: str, path: str) -> list[Question]:
    """Read the file of a key of evaluation.choices. Raises `UserError` where the file cannot be read, is empty or too
    large, or has a line that is no question."""
    key, file = f"evaluation.choices.{name}={path}", expand_home(path)
    try:
        found = file.stat()
        if found.st_size > MAX_BYTES:
            raise UserError(f"{key} is larger than {MAX_BYTES >> 20} MiB; take fewer questions")
        return _read_file(key, file.resolve(), found.st_mtime_ns)
    except OSError as error:
        raise UserError(f"{key} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{key} is no text in UTF-8") from None


@cache  # a run looks at its questions before the data are read, and `make_choices` takes them from here
def _read_file(key: str, file: Path, changed_ns: int) -> list[Question]:
    """Read a file that was changed at this time."""
    lines = file.read_text(encoding="utf-8-sig").split("\n")  # JSON may have other ends of lines in its texts
    questions = [_read_question(line, f"{key}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UserError(f"{key} has no question")
    return questions


def _read_question(line: str, location: str) -> Question:
    try:
        row = parse_json(line)
        question = Question(row["prompt"], row["choices"], row["answer"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f'{location} is not {{"prompt": TEXT, "choices": [TEXT, TEXT], "answer": INDEX}}') from None
    prompt, choices, answer = question
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f"{location}: prompt is no text that something can follow")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) and each for each in choices):
        raise UserError(f"{location}: choices are not two texts or more")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise UserError(f"{location}: answer={str(answer)[:40]} is no index of {len(choices)} choices, from 0")
    return question


class MultipleChoice:
    """The questions of a file on the devices. The numbers are the same on every mesh."""

    def __init__(self, name: str, cfg: Config, vocab: Vocab, arch: Architecture, mesh: Mesh, num_rows: int):
        """`num_rows` are the sequences of a microbatch. Every process calls this. Raises `UserError` where a question
        does not fit a sequence, or processes have different files."""
        path = cfg.evaluation.choices[name]
        questions = read_questions(name, path)
        key = hash_texts(json.dumps(questions))
        peers.reject_others(key, f"evaluation.choices.{name}={path}", "questions")
        self.answers = np.array([each.answer for each in questions])
        self.first = np.cumsum([0, *(len(each.choices) for each in questions)])  # choice of each question, of all
        self.num_bytes = np.array([len(text.encode()) for each in questions for text in each.choices])
        texts = [text for each in questions for text in _encode(each, vocab)]
        seq_len = cfg.training.seq_len
        sizes = np.array([len(ids) for ids, _ in texts])
        for is_wrong, problem in (
            (sizes > seq_len + 1, f"are more than training.seq_len={seq_len}; leave it out, or raise it"),
            (sizes < 2, "have none that another one predicts; leave it out"),
        ):
            if is_wrong.any():
                document = int(np.argmax(sizes * is_wrong))
                number = int(np.searchsorted(self.first, document, side="right"))
                raise UserError(
                    f"evaluation.choices.{name}, question {number}: {sizes[document]} tokens with a choice {problem}"
                )
        batch, self.owners = _arrange(texts, num_rows, seq_len)
        rows = list(local_rows(mesh, num_rows))
        local = {field: values[:, rows] for field, values in batch.items()}
        self.batches = to_global(add_fields(local, image_fields(cfg)), mesh)

        @jax.jit
        def score(params: Any, batches: Batch) -> jax.Array:
            def microbatch(_: None, batch: Batch) -> tuple[None, jax.Array]:
                chunk = cfg.training.loss_chunk_size
                return None, compute_token_log_probs(arch.module(params), batch, None, chunk_size=chunk)[0]

            return reshard(jax.lax.scan(microbatch, None, batches)[1], PartitionSpec())

        self.score = score

    def evaluate(self, params: Any) -> dict[str, float]:
        """Return the share of questions whose right choice is the likeliest, by its sum and by its mean of a byte.

        Both are NaN where a score is: the weights are not finite then, and no choice is the likeliest.
        """
        totals = self.sum_choices(params)
        return {
            "accuracy": self._count_right(totals),
            "accuracy_per_byte": self._count_right(totals / self.num_bytes),
            "questions": len(self.answers),
        }

    def sum_choices(self, params: Any) -> np.ndarray:
        """Return the log-probability [choices of all questions] of each choice behind its prompt, in nats."""
        log_probs = np.asarray(self.score(params, self.batches), np.float64)
        counted = self.owners >= 0
        return np.bincount(self.owners[counted], log_probs[counted], len(self.num_bytes))

    def _count_right(self, scores: np.ndarray) -> float:
        if np.isnan(scores).any():
            return math.nan
        spans = zip(self.first, self.first[1:], self.answers, strict=False)
        return float(np.mean([np.argmax(scores[begin:end]) == answer for begin, end, answer in spans]))

    def cost(self, record: dict[str, float]) -> float:
        """Return the number that is lowest for the best model."""
        return -record["accuracy"]

    def describe(self, record: dict[str, float]) -> str:
        """Return an evaluation in a few words for the log."""
        return f"accuracy {record['accuracy']:.4f}, per byte {record['accuracy_per_byte']:.4f}"


def make_choices(cfg: Config, vocab: Vocab, arch: Architecture, mesh: Mesh, num_rows: int) -> dict[str, MultipleChoice]:
    """Return the questions of each key of evaluation.choices."""
    choices = {name: MultipleChoice(name, cfg, vocab, arch, mesh, num_rows) for name in cfg.evaluation.choices}
    _read_file.cache_clear()  # texts of a large file, which nothing needs now
    return choices


def _encode(question: Question, vocab: Vocab) -> list[tuple[list[int], int]]:
    """Return for each choice the tokens of the whole text, and how many of them are its own."""
    # Spaces at the end of a prompt belong to the first token of a choice.
    prompt = question.prompt.rstrip()
    choices = [question.prompt[len(prompt) :] + text for text in question.choices]
    context, *texts = (each.tolist() for each in vocab.encode([prompt, *(prompt + text for text in choices)]))
    start = [] if vocab.bos is None else [vocab.bos]
    return [(start + ids, max(1, len(ids) - len(context))) for ids in texts]


def _arrange(texts: list[tuple[list[int], int]], num_rows: int, seq_len: int) -> tuple[Example, np.ndarray]:
    """Return texts in rows, [A, B, T] in each field, and of which text each target is a part that counts; else -1."""
    rows = list(pack_best_fit(np.array([len(ids) - 1 for ids, _ in texts]), seq_len))
    shape = -(-len(rows) // num_rows), num_rows, seq_len
    batch = {name: np.broadcast_to(value, shape).copy() for name, value in empty_example(seq_len).items()}
    flat = {name: value.reshape(-1, seq_len) for name, value in batch.items()}
    owners = np.full(shape, -1)
    for row, members in enumerate(rows):
        end = 0
        for segment, number in enumerate(members, 1):
            ids, count = texts[number]
            begin, end = end, end + len(ids) - 1
            flat["tokens"][row, begin:end], flat["targets"][row, begin:end] = ids[:-1], ids[1:]
            flat["positions"][row, begin:end] = np.arange(end - begin)
            flat["segment_ids"][row, begin:end] = segment
            flat["loss_mask"][row, end - count : end] = 1
            owners.reshape(-1, seq_len)[row, end - count : end] = number
    return batch, owners
