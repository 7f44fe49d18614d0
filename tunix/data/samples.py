"""Endless shuffled sequence of samples, in an order that only the seed and the number of a sample decide."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import grain

from tunix.config import Config
from tunix.config.data import Mixture
from tunix.data.course import Course
from tunix.data.mixture import SampleOrder, SamplePart, count_read, read_stages, stage_table
from tunix.data.position import Position


class Samples:
    """The samples of a run, packed sequences or prompts: sample n is the same on every mesh and number of processes.

    Each part (source) is shuffled anew in each epoch. In a mixture, `SampleOrder` says which part gives sample n.
    """

    def __init__(self, parts: Mapping[str, SamplePart], cfg: Config, course: Course, tokens_per_sample: int):
        """`course` begins at step 0; it says at which sample a stage with `from_step` begins. A sample counts as
        `tokens_per_sample` tokens."""
        self.parts, self.course, self.tokens_per_sample = parts, course, tokens_per_sample
        self.mixture = cfg.data if isinstance(cfg.data, Mixture) else None
        self.order = SampleOrder(read_stages(self.mixture, parts, course, tokens_per_sample))
        shuffled = [grain.MapDataset.source(part).seed(cfg.seed).shuffle().repeat() for part in parts.values()]
        self.samples = grain.MapDataset.select_from_datasets(shuffled, self.order)

    def __getitem__(self, number: int) -> Any:
        return self.samples[number]

    def fingerprint(self, corpus: str) -> str:
        """Return the fingerprint of the samples and their order: that of the corpus, with the stages of a mixture."""
        if self.mixture is None:
            return corpus
        return hashlib.sha256(f"{corpus} {self.order.stages}".encode()).hexdigest()[:20]

    def stages(self, num_steps: int, left_out: Sequence[Sequence[int]] = ()) -> str:
        """Return a table of the samples that `num_steps` steps take of each source; empty for a single source.

        The samples [first, end) that training.skip_steps leaves out are not among them.

        Raises:
            UserError: more of a source than data.max_epochs allows.
        """
        if self.mixture is None:
            return ""
        return stage_table(
            self.order, self.mixture, self.parts, num_steps, self.course, self.tokens_per_sample, left_out
        )

    def position_after(self, step: int, start: Position, course: Course) -> Position:
        """Return the position after `step` of a course that began at `start`."""
        next_sample, left_out = course.next_sample(step), course.left_out(step)
        source_tokens = self.source_tokens(next_sample, left_out)
        return replace(start, step=step, next_sample=next_sample, source_tokens=source_tokens, left_out=left_out)

    def source_tokens(self, next_sample: int, left_out: Sequence[Sequence[int]] = ()) -> dict[str, int]:
        """Return the tokens of each source of a mixture in the samples before `next_sample`, padding included.

        The samples [first, end) that were left out do not count; the numbers add up to the tokens of the run.
        """
        if self.mixture is None:
            return {}
        counts = count_read(self.order, 0, next_sample, left_out)
        return {name: count * self.tokens_per_sample for name, count in zip(self.parts, counts, strict=True)}
