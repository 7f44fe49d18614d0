"""Held-out prompts, answered by the model in training."""

from typing import Any

import numpy as np

from tunix.config import Config
from tunix.data.prompts import PromptCorpus
from tunix.rl.asking import Asker, derive_seed
from tunix.rl.quality import count_right


class HeldOutAnswers:
    """Held-out prompts, the same at every evaluation; `evaluate` has them answered, and the answers scored."""

    def __init__(self, cfg: Config, corpus: PromptCorpus, asker: Asker):
        self.cfg, self.asker = cfg, asker
        self.prompts = corpus.spread("held_out", cfg.evaluation.num_prompts)

    def evaluate(self, params: Any) -> dict[str, float]:
        """Return mean scores of the answers by their names in metrics.jsonl, and the share of right ones.

        With several answers to each prompt, pass@k is the chance that one of k answers is right.
        """
        size = self.cfg.evaluation.num_samples
        # The same noise at every evaluation: two evaluations differ by their parameters alone.
        seed = derive_seed(self.cfg.seed, "held_out")
        asked = self.asker.ask(params, self.prompts, self.cfg.evaluation.sampling, size, seed)
        # The first reward of task.rewards says which answers are right; the others may reward their form.
        first = np.array(next(iter(asked.scores.values.values()))).reshape(-1, size)
        return {
            **asked.numbers(),
            **count_right(first),
            "prompts": len(self.prompts),
            "rollout_s": asked.rollout_s,
        }

    def cost(self, record: dict[str, float]) -> float:
        """Return the number that is lowest for the best model: the reward, with its sign turned."""
        return -record["reward"]

    def describe(self, record: dict[str, float]) -> str:
        """Return the evaluation in a few words for the log."""
        return f"accuracy {record['accuracy']:.4f}, reward {record['reward']:.4f}"
