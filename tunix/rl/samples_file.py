"""The file samples.jsonl: the answers that a run has learnt from, one JSON object a line, to be read by people."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tunix.base.files import open_lines
from tunix.processes import peers
from tunix.rl.ahead import RolloutGroup
from tunix.run.metrics import Metrics

SHOWN = 4  # answers of a step that other sinks get as text
WIDTH = 300  # characters of a prompt or an answer there


class SamplesFile:
    """The file samples.jsonl in the run's folder, which process 0 writes; a resumed run appends to it."""

    def __init__(self, folder: Path, every_steps: int, steps_per_rollout: int, metrics: Metrics):
        """Steps 1, 1 + every_steps, ... are due; of a rollout for several steps, one of them."""
        self.every_steps, self.steps_per_rollout, self.metrics = every_steps, steps_per_rollout, metrics
        self.file = open_lines(folder / "samples.jsonl") if peers.is_main() else None

    def write(self, step: int, samples: Sequence[int], rollouts: RolloutGroup, advantages: np.ndarray) -> None:
        """Write the answers that `step` begins to learn from.

        Args:
            samples: numbers of the prompts in the order of all samples.
            advantages: [P, G]; not a number for an answer that is not trained on.
        """
        if self.file is None or (1 - step) % self.every_steps >= self.steps_per_rollout:  # steps until one is due
            return
        records = []
        for row, (answer, text) in enumerate(zip(rollouts.answers, rollouts.texts, strict=True)):
            group, member = divmod(row, rollouts.group_size)
            advantage = float(advantages[group, member])
            records.append(
                {
                    "step": step,
                    "sample": samples[group],
                    "prompt": rollouts.prompts[group].text,
                    "answer": text,
                    "reward": rollouts.scores.total[row],
                    **{f"reward_{label}": values[row] for label, values in rollouts.scores.values.items()},
                    "advantage": advantage if math.isfinite(advantage) else None,
                    "stopped": answer.stopped,
                    "tokens": answer.tokens,
                    "log_probabilities": answer.sampled_log_probabilities,
                    **({} if rollouts.played is None else rollouts.played.episodes[row].describe()),
                }
            )
        # One line an answer: a file that a kill cuts short loses its last line and no more.
        with self.metrics.writing():
            for record in records:
                self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.metrics.table("samples", records, "\n".join(map(_shorten, records[:SHOWN])), step)

    def close(self) -> None:
        if self.file is not None:
            with self.metrics.writing():
                self.file.close()


def _shorten(record: dict) -> str:
    prompt, answer = (str(record[key])[:WIDTH] for key in ("prompt", "answer"))
    return f"{prompt} >>> {answer}   reward {record['reward']:g}"
