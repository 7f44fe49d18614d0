"""Position of a run in its data.

The data of a run are one endless sequence of samples, whose order follows from the seed. The position is the number of
the next sample. It does not name a file, a process or a mesh. So a run also goes on with the next sample on another
number of devices, and none is lost or repeated.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Position:
    """Position of a run in its steps and its data. Random numbers follow from the seed and the step."""

    step: int
    next_sample: int  # place in the shuffled sequence of training data
    data: str  # fingerprint of that data
    tokenizer: str  # digest
    source_tokens: dict[str, int] = field(default_factory=dict)  # of a mixture: tokens of each source so far
    left_out: list[list[int]] = field(default_factory=list)  # samples [first, end) that no step took

    @property
    def num_samples(self) -> int:
        """Samples that the steps so far took."""
        return self.next_sample - sum(end - first for first, end in self.left_out)


BEGINNING = Position(0, 0, "", "")
