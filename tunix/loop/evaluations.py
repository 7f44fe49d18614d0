"""Evaluations of a run: the held-out set, and the sets of `evaluation.sets`."""

import logging
from typing import Any

from tunix.config import Evaluation
from tunix.loop.progress import Progress
from tunix.processes.watchdog import Watchdog
from tunix.rl.feeds import Feed, Measure
from tunix.run.metrics import Metrics

log = logging.getLogger(__name__)


class Evaluations:
    """Measures the model on every set, and notes how its held-out loss goes. `newest` is the last held-out line.

    The cost of a model is the held-out number that is lowest for the best one: the loss, or the reward with its sign
    turned.
    """

    def __init__(self, feed: Feed, progress: Progress, evaluation: Evaluation, metrics: Metrics, watchdog: Watchdog):
        self.held_out, self.sets, self.progress, self.evaluation = feed.held_out, feed.sets, progress, evaluation
        self.metrics, self.watchdog = metrics, watchdog
        self.newest: dict[str, Any] = {}

    def run(self, step: int) -> None:
        """Write and log a line of metrics.jsonl for each set, of the model after `step`."""
        for name, measure in self.sets.items():
            self._measure(measure, step, name, f"sets/{name}", name)
        if self.held_out:
            self.newest = self._measure(self.held_out, step, "held_out", "held_out", "held out")
            cost = self.held_out.cost(self.newest)
            self.progress.improvement = self.progress.improvement.after(cost, self.evaluation)

    def make_up(self, last: int) -> None:
        """Measure the model after the last step, where a stop prevented that."""
        if self.held_out and self.newest.get("step") != last:
            self.run(last)

    def cost(self, step: int) -> float | None:
        """Return the number after `step` that is lowest for the best model; None where it was not measured then."""
        return self.held_out.cost(self.newest) if self.held_out and self.newest.get("step") == step else None

    def _measure(self, measure: Measure, step: int, split: str, group: str, words: str) -> dict[str, Any]:
        with self.watchdog.phase("evaluation"):
            numbers = measure.evaluate(self.progress.state["params"])
        record: dict[str, Any] = {"step": step, "split": split, **numbers}
        self.metrics.write(record, group)
        log.info("step %d  %s: %s", step, words, measure.describe(record))
        return record
