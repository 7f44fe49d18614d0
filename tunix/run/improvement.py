"""Improvement of the held-out loss over the evaluations of a run; a part of each checkpoint."""

from dataclasses import dataclass

from tunix.config import Evaluation


@dataclass(frozen=True)
class Improvement:
    """The lowest held-out loss so far, and the evaluations in a row that did not lower it.

    The names of the fields are in saved checkpoints.
    """

    best: float | None = None
    without: int = 0  # evaluations since `best`

    def after(self, cost: float, evaluation: Evaluation) -> "Improvement":
        """Return the improvement after one more evaluation, whose held-out number is `cost`."""
        if self.best is None or cost < self.best - evaluation.min_improvement:
            return Improvement(cost, 0)
        return Improvement(self.best, self.without + 1)

    def is_over(self, evaluation: Evaluation) -> bool:
        """Return True where `evaluation.patience` says that the run should end."""
        return evaluation.patience is not None and self.without >= evaluation.patience
