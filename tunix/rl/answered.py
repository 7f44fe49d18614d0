"""Held-out prompts, answered by the model in training."""

import math
from typing import Any

import numpy as np

from tunix.config import Config
from tunix.data.prompts import PromptCorpus
from tunix.rl.asking import Asker, derive_seed

CORRECT = 1.0  # an answer is right where the first reward of the task gives it at least this


class HeldOutAnswers:
    """The same held-out prompts at every evaluation, and the scores of the answers to them."""

    def __init__(self, cfg: Config, corpus: PromptCorpus, asker: Asker):
        self.cfg, self.asker = cfg, asker
        self.prompts = corpus.spread("held_out", cfg.evaluation.num_prompts)

    def evaluate(self, params: Any) -> dict[str, float]:
        """Mean scores of the answers by their names in metrics.jsonl, and the share of right ones.

        With several answers to each prompt, pass@k is the chance that one of k answers is right.
        """
        size = self.cfg.evaluation.num_samples
        seed = derive_seed(self.cfg.seed, "held_out")
        asked = self.asker.ask(params, self.prompts, self.cfg.evaluation.sampling, size, seed)
        first = np.array(next(iter(asked.scores.values.values()))).reshape(-1, size)
        correct = (first >= CORRECT).sum(axis=1)
        ks = [1 << n for n in range(size.bit_length())][1:]
        return {
            **asked.numbers(),
            "accuracy": float(correct.mean() / size),
            **{f"pass@{k}": pass_at(k, correct, size) for k in ks},
            "prompts": len(self.prompts),
            "rollout_s": asked.rollout_s,
        }

    def cost(self, record: dict[str, float]) -> float:
        """Return the number that is lowest for the best model: the reward, with its sign turned."""
        return -record["reward"]

    def describe(self, record: dict[str, float]) -> str:
        """Return the evaluation in a few words for the log."""
        return f"accuracy {record['accuracy']:.4f}, reward {record['reward']:.4f}"


def pass_at(k: int, correct: np.ndarray, num_samples: int) -> float:
    """Chance that one of k answers is right, from `num_samples` of each (Chen et al. 2021, arXiv:2107.03374)."""
    return float(np.mean([1 - math.comb(num_samples - c, k) / math.comb(num_samples, k) for c in correct.tolist()]))
