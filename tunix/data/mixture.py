"""The source of each sample of a run, computed from the sample's number alone.

A mixture trains on several sources (parts) with given weights, in stages. Nothing is drawn at random: the samples of a
stage are dealt out so that after any number of them each part has its share, up to one sample. So a resumed run, and
any number of processes, see the same order.
"""

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import grain
import numpy as np
from rich.table import Table

from tunix.base.errors import UserError
from tunix.base.tables import as_text
from tunix.config.data import Mixture
from tunix.data.course import Course

PRECISION = 10**6  # shares are whole millionths


class SamplePart(Protocol):
    """Samples of one source, packed sequences or prompts: any of them at the same cost."""

    def __len__(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Tokens in all samples, without padding."""

    @property
    def documents_per_sequence(self) -> float:
        """Documents in one sample, on average."""


@dataclass(frozen=True)
class Stage:
    """A period of the run with constant shares. (The run's fingerprint holds this class as text: rename nothing.)"""

    name: str
    first_sample: int
    shares: tuple[int, ...]  # of samples, one for each part, in millionths


def split_samples(count: int, shares: tuple[int, ...]) -> list[int]:
    """Return how many of the first `count` samples of a stage are of each part: `count * share / sum(shares)`, rounded.

    Parts are split off one after the other, as Grain's own `mix` does, so no table of samples is needed. From one
    count to the next exactly one part grows, by one sample.

        shares 1 : 1 : 2     samples    1    2    3    4    5    6    7    8
                             counts    100  110  111  112  212  222  223  224
    """
    left, total, counts = count, sum(shares), []
    for share in shares:
        # Whole numbers are exact after any number of samples. With rounded ones a resumed run might count differently.
        rest = left * (total - share) // total if total else left
        counts.append(left - rest)
        left, total = rest, total - share
    return counts


class SampleOrder(grain.transforms.DatasetSelectionMap):
    """Map from a sample's number to its part and its number within the part, over all stages of a run."""

    def __init__(self, stages: list[Stage]):
        self.stages = stages
        self.firsts = [stage.first_sample for stage in stages]
        self.before = [[0] * len(stages[0].shares)]  # samples of each part before each stage
        for stage, after in pairwise(stages):
            counts = split_samples(after.first_sample - stage.first_sample, stage.shares)
            self.before.append([a + b for a, b in zip(self.before[-1], counts, strict=True)])

    def __len__(self) -> int:
        return sys.maxsize  # Grain asks for a length; the run ends by its steps

    def count_by_part(self, count: int) -> list[int]:
        """Return how many of the first `count` samples of the run are of each part."""
        number = bisect_right(self.firsts, max(0, count - 1)) - 1  # the stage of the last of these samples
        stage = self.stages[number]
        counts = split_samples(count - stage.first_sample, stage.shares)
        return [a + b for a, b in zip(self.before[number], counts, strict=True)]

    def __getitem__(self, sample: int) -> tuple[int, int]:
        # The sample belongs to the part whose count grows by it.
        before, after = self.count_by_part(sample), self.count_by_part(sample + 1)
        part = next(part for part, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        return part, before[part]


def read_stages(mixture: Mixture | None, parts: Mapping[str, SamplePart], course: Course, seq_len: int) -> list[Stage]:
    """Return the stages of a run, in samples; None, a single source, is a mixture of one part with one stage.

    Raises:
        UserError: the stages are out of order.
    """
    if mixture is None:
        return [Stage("all", 0, (PRECISION,))]
    stages = [Stage("start", 0, _compute_shares(mixture, mixture.weights, parts))]
    for stage in mixture.stages:
        if stage.from_tokens is not None:
            first = -(-stage.from_tokens // seq_len)
        else:
            first = course.taken(stage.from_step or 0)
        if first <= stages[-1].first_sample:
            raise UserError(
                f"data.stages: stage {stage.name} begins at sample {first}, not after stage {stages[-1].name} "
                f"(sample {stages[-1].first_sample}); put the stages in order"
            )
        stages.append(Stage(stage.name, first, _compute_shares(mixture, stage.weights, parts)))
    return stages


def _compute_shares(mixture: Mixture, weights: dict[str, float], parts: Mapping[str, SamplePart]) -> tuple[int, ...]:
    """Convert the weights, which are of samples, tokens or documents, to shares of samples in millionths."""
    per_sample = {
        "sample": lambda part: 1.0,
        "token": lambda part: part.num_tokens / len(part),
        "document": lambda part: part.documents_per_sequence,
    }[mixture.weight_unit]
    # A part whose samples have twice the tokens needs half as many samples for the same weight in tokens.
    samples = [weights[name] / per_sample(part) for name, part in parts.items()]
    return tuple(round(PRECISION * number / sum(samples)) for number in samples)


def count_read(order: SampleOrder, first: int, end: int, left_out: Sequence[Sequence[int]]) -> list[int]:
    """Return how many of the samples [first, end) are of each part, without those that were left out.

    `left_out` has ranges of samples [first, end) that do not overlap.
    """

    def count(first: int, end: int) -> np.ndarray:
        return np.subtract(order.count_by_part(end), order.count_by_part(first))

    counts = count(first, end)
    for gap_first, gap_end in left_out:
        begin, stop = max(first, gap_first), min(end, gap_end)
        if begin < stop:
            counts = counts - count(begin, stop)
    return [int(each) for each in counts]


def stage_table(
    order: SampleOrder,
    mixture: Mixture,
    parts: Mapping[str, SamplePart],
    num_steps: int,
    course: Course,
    seq_len: int,
    left_out: Sequence[Sequence[int]] = (),
) -> str:
    """Format the stages of a run of `num_steps`: where each begins, and the samples and epochs of each part.

    The samples [first, end) that the run leaves out do not count, and the run takes as many more behind them.

    Raises:
        UserError: a part would be repeated more often than data.max_epochs allows.
    """
    num_samples = course.taken(num_steps) + sum(end - first for first, end in left_out)
    total = dict(zip(parts, count_read(order, 0, num_samples, left_out), strict=True))
    for name, most in (mixture.max_epochs or {}).items():
        epochs = total[name] / len(parts[name])
        if epochs > most:
            raise UserError(
                f"data.max_epochs: the run would read {name} {epochs:.2f} times, more than {most:g}; "
                f"lower its weight, shorten the run, give it more data (it has {len(parts[name]):,} sequences, "
                f"{total[name]:,} are asked for), or raise the cap"
            )
    # A stage that begins behind the end of the run is in the table with no samples.
    table = Table(box=None)
    for column in ("stage", "from step", "from token", *(f"{name}: samples (epochs)" for name in parts)):
        table.add_column(column, justify="left" if column == "stage" else "right")
    ends = [*order.firsts[1:], num_samples]
    for stage, end in zip(order.stages, ends, strict=True):
        first = min(stage.first_sample, num_samples)
        counts = count_read(order, first, max(first, min(end, num_samples)), left_out)
        cells = [f"{count:,} ({count / len(part):.2f})" for count, part in zip(counts, parts.values(), strict=True)]
        table.add_row(stage.name, f"{course.steps_of(first):,.4g}", f"{first * seq_len:,}", *cells)
    return as_text(table)
