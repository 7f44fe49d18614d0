"""From scored answers to a batch: their advantages, and the rows that hold them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tunix.data.batches import Example
from tunix.data.packing import pack_best_fit
from tunix.inference.engine import Answer

# Advantages: each answer compared with the others of its group, which are the G answers to one prompt.
#
# rewards [1, 4]      1      0      0      1        mean 0.5, standard deviation 0.5
# centered          0.5   -0.5   -0.5    0.5
# group_std           1     -1     -1      1
# leave_one_out     2/3   -2/3   -2/3    2/3        the first: 1 - (0 + 0 + 1) / 3

# Rewards of a group that differ by less than this count as equal: the difference is a rounding error, not a signal.
EQUAL = 1e-6


def center(rewards: np.ndarray) -> np.ndarray:
    """Return rewards [P, G] less the mean of their group. (Dr. GRPO, arXiv:2503.20783)"""
    return rewards - rewards.mean(axis=1, keepdims=True)


def scale_by_deviation(rewards: np.ndarray) -> np.ndarray:
    """Return centred rewards [P, G] divided by the standard deviation of their group. (GRPO, arXiv:2402.03300)"""
    deviation = rewards.std(axis=1, keepdims=True)
    return np.where(deviation > EQUAL, center(rewards) / np.maximum(deviation, EQUAL), 0.0)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return rewards [P, G] less the mean of the others of their group. (RLOO, arXiv:2402.14740)"""
    # r - (sum - r) / (G - 1) = (G r - sum) / (G - 1) = (r - mean) G / (G - 1), where sum and mean are of all G answers.
    size = rewards.shape[1]
    return center(rewards) * size / (size - 1)


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "centered": center,
    "group_std": scale_by_deviation,
    "leave_one_out": leave_one_out,
}


def has_signal(rewards: np.ndarray) -> np.ndarray:
    """Return for each group of rewards [P, G] whether its answers are not all equally good, [P] bool."""
    return np.ptp(rewards, axis=1) > EQUAL


# Rows of a batch made of answers: each answer after its prompt, alone in a row or with others behind one another.
#
# With task.answers_per_row=2 and T = 10, three answers (a, b, c) take two rows:
#
#     tokens         p p p a a p p b b .    p p p p p c . . . .
#     segment_ids    1 1 1 1 1 2 2 2 2 0    1 1 1 1 1 1 0 0 0 0


def arrange_answers(
    prompts: Sequence[list[int]],
    answers: Sequence[Answer],
    seq_len: int,
    masked: Sequence[bool],
    learnt: Sequence[list[bool]] | None = None,
) -> Example:
    """Return fields [rows, T] of answers after their prompts, then padding: those of `FIELDS`, and `log_probs`.

    `learnt` says of each token of an answer whether it was drawn: an environment has said the others.

        tokens      p p p a b      .  .        prompt p p p, answer a b c, T = 7
        targets     p p a b c      .  .        c is the token that stops the answer: it is learnt too
        loss_mask   0 0 1 1 1      0  0        all 0 where `masked` says so
        log_probs   0 0 x y z      0  0        of a, b, c in the distribution that they were drawn from
        segment_ids 1 1 1 1 1      0  0

    A prompt with its answer has at most T tokens.
    """
    shape = len(prompts), seq_len
    fields = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    fields |= {name: np.zeros(shape, np.float32) for name in ("loss_mask", "log_probs")}
    for row, (prompt, answer, is_masked) in enumerate(zip(prompts, answers, masked, strict=True)):
        text = [*prompt, *answer.tokens]
        # The target at a place is the token behind it, so the last token of the prompt predicts the answer's first one.
        end, answered = len(text) - 1, slice(len(prompt) - 1, len(text) - 1)
        fields["tokens"][row, :end], fields["targets"][row, :end] = text[:-1], text[1:]
        fields["positions"][row, :end] = np.arange(end)
        fields["segment_ids"][row, :end] = 1
        fields["loss_mask"][row, answered] = 0 if is_masked else (1 if learnt is None else learnt[row])
        fields["log_probs"][row, answered] = answer.sampled_log_probabilities
    return fields


class RowPlan(NamedTuple):
    """Where each answer of a step lies: its row, its first token there, its tokens, and its number in the row from 1.

    The answers of a row follow one another, and the rest of the row is padding.
    """

    rows: np.ndarray  # [answers]
    starts: np.ndarray  # [answers]
    lengths: np.ndarray  # [answers]
    numbers: np.ndarray  # [answers]

    @property
    def num_rows(self) -> int:
        return int(self.rows.max()) + 1

    def pack(self, fields: Example, num_rows: int) -> Example:
        """Return fields [answers, T] as rows [num_rows, T]; rows without an answer are padding."""
        packed = {name: np.zeros((num_rows, leaf.shape[1]), leaf.dtype) for name, leaf in fields.items()}
        for index, (row, start, length, number) in enumerate(zip(*self, strict=True)):
            for name, leaf in fields.items():
                packed[name][row, start : start + length] = leaf[index, :length]
            packed["segment_ids"][row, start : start + length] = number
        return packed

    def unpack(self, rows: np.ndarray) -> np.ndarray:
        """Return numbers of tokens [rows, T] as [answers, T]; 0 behind an answer."""
        answers = np.zeros((len(self.rows), rows.shape[1]), rows.dtype)
        for index, (row, start, length, _) in enumerate(zip(*self, strict=True)):
            answers[index, :length] = rows[row, start : start + length]
        return answers


def plan_rows(lengths: np.ndarray, seq_len: int, answers_per_row: int) -> RowPlan:
    """Return a plan for answers with `lengths` [answers], prompts included: best-fit decreasing, so many in a row at
    most.

    Rows are in the order of their first answers, and so are the answers of a row. With one answer in a row, row n has
    answer n.
    """
    rows, starts, numbers = np.zeros((3, len(lengths)), np.int64)
    for row, members in enumerate(sorted(map(sorted, pack_best_fit(lengths, seq_len, answers_per_row)))):
        rows[members], numbers[members] = row, np.arange(1, len(members) + 1)
        starts[members] = np.cumsum(lengths[members]) - lengths[members]
    return RowPlan(rows, starts, lengths, numbers)


def count_microbatches(num_rows: int, rows_per_microbatch: int, most: int, unit: int) -> int:
    """Return the microbatches of a step with so many rows: as few as have room, of at most eight numbers up to `most`.

    Each number of microbatches is a program, which has to be compiled. They are multiples of `unit`, which divides
    `most`.
    """
    needed = -(-num_rows // rows_per_microbatch)
    unit *= -(-most // (8 * unit))
    return min(most, -(-needed // unit) * unit)
