"""Where a run is in its data."""

from dataclasses import dataclass, field, replace

from tunix.data.batches import TrainBatches


@dataclass(frozen=True)
class Position:
    """Where a run is, apart from its arrays. Random numbers follow from the seed and the step."""

    step: int
    next_sample: int  # place in the shuffled sequence of training data
    data: str  # fingerprint of that data
    tokenizer: str  # digest
    source_tokens: dict[str, int] = field(default_factory=dict)  # of a mixture: what each source gave so far

    def after(self, step: int, data: TrainBatches) -> "Position":
        """Where the run is after `step`, having started here."""
        next_sample = self.next_sample + (step - self.step) * data.batch_size
        return replace(self, step=step, next_sample=next_sample, source_tokens=data.source_tokens(next_sample))
