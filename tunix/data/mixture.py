"""Which source each sample of a run comes from: a function of the sample's number alone."""

import sys
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import grain
from rich.table import Table

from tunix.base.errors import UserError
from tunix.base.tables import as_text
from tunix.config.data import Mixture
from tunix.data.packing import Sequences

PRECISION = 10**6  # shares are whole millionths


@dataclass(frozen=True)
class Stage:
    name: str
    first_sample: int
    shares: tuple[int, ...]  # of samples, one for each part


def drawn(count: int, shares: tuple[int, ...]) -> list[int]:
    """Of the first `count` samples of a stage, how many are of each part; off by less than one from the share.

    The parts before are split off one by one, as Grain's own `mix` does, so that this needs no table.
    """
    left, total, counts = count, sum(shares), []
    for share in shares:
        rest = left * (total - share) // total if total else left
        counts.append(left - rest)
        left, total = rest, total - share
    return counts


class SampleOrder(grain.transforms.DatasetSelectionMap):
    """Sample number -> (part, number within the part), for stages that follow one another."""

    def __init__(self, stages: list[Stage]):
        self.stages = stages
        self.firsts = [stage.first_sample for stage in stages]
        self.before = [[0] * len(stages[0].shares)]  # samples of each part before each stage
        for stage, after in pairwise(stages):
            counts = drawn(after.first_sample - stage.first_sample, stage.shares)
            self.before.append([a + b for a, b in zip(self.before[-1], counts, strict=True)])

    def __len__(self) -> int:
        return sys.maxsize

    def drawn(self, count: int) -> list[int]:
        """Samples of each part among the first `count` of the run."""
        number = bisect_right(self.firsts, max(0, count - 1)) - 1
        stage = self.stages[number]
        counts = drawn(count - stage.first_sample, stage.shares)
        return [a + b for a, b in zip(self.before[number], counts, strict=True)]

    def __getitem__(self, sample: int) -> tuple[int, int]:
        before, after = self.drawn(sample), self.drawn(sample + 1)
        part = next(part for part, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        return part, before[part]


def stages(cfg: Mixture | None, parts: dict[str, Sequences], batch_size: int, seq_len: int) -> list[Stage]:
    """Stages of a run in samples; one source is a mixture of one.

    Raises:
        UserError: stages out of order.
    """
    if cfg is None:
        return [Stage("all", 0, (PRECISION,))]
    found = [Stage("start", 0, _shares(cfg, cfg.weights, parts))]
    for stage in cfg.stages:
        first = (
            -(-stage.from_tokens // seq_len) if stage.from_tokens is not None else (stage.from_step or 0) * batch_size
        )
        if first <= found[-1].first_sample:
            raise UserError(
                f"data.stages: stage {stage.name} begins at sample {first}, not after stage {found[-1].name} "
                f"(sample {found[-1].first_sample}); put the stages in order"
            )
        found.append(Stage(stage.name, first, _shares(cfg, stage.weights, parts)))
    return found


def _shares(cfg: Mixture, weights: dict[str, float], parts: dict[str, Sequences]) -> tuple[int, ...]:
    """Shares of samples that give the shares of tokens or documents asked for."""
    unit = {
        "sample": lambda part: 1.0,
        "token": lambda part: part.num_tokens / len(part),
        "document": lambda part: part.documents_per_sequence,
    }[cfg.weight_unit]
    samples = [weights[name] / unit(part) for name, part in parts.items()]
    return tuple(round(PRECISION * each / sum(samples)) for each in samples)


def stage_table(
    order: SampleOrder, cfg: Mixture, parts: dict[str, Sequences], num_samples: int, batch_size: int, seq_len: int
) -> str:
    """The stages of a run of `num_samples` as a table: where each begins, what it takes, how often each part is seen.

    Raises:
        UserError: a part would be repeated more often than data.max_epochs allows.
    """
    total = dict(zip(parts, order.drawn(num_samples), strict=True))
    for name, most in (cfg.max_epochs or {}).items():
        epochs = total[name] / len(parts[name])
        if epochs > most:
            raise UserError(
                f"data.max_epochs: the run would read {name} {epochs:.2f} times, more than {most:g}; "
                f"lower its weight, shorten the run, give it more data (it has {len(parts[name]):,} sequences, "
                f"{total[name]:,} are asked for), or raise the cap"
            )
    table = Table(box=None)
    for column in ("stage", "from step", "from token", *(f"{name}: samples (epochs)" for name in parts)):
        table.add_column(column, justify="left" if column == "stage" else "right")
    ends = [*order.firsts[1:], num_samples]
    for stage, end in zip(order.stages, ends, strict=True):
        first = min(stage.first_sample, num_samples)
        counts = [
            b - a for a, b in zip(order.drawn(first), order.drawn(max(first, min(end, num_samples))), strict=True)
        ]
        cells = [f"{count:,} ({count / len(part):.2f})" for count, part in zip(counts, parts.values(), strict=True)]
        table.add_row(stage.name, f"{first / batch_size:,.4g}", f"{first * seq_len:,}", *cells)
    return as_text(table)
