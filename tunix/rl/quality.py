"""Quality of answers: how many are right, how good and how long they are."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Numbers = dict[str, float]
RIGHT = 1.0  # an answer is right where the first reward gives it at least this
Row = dict[str, Any]  # an answer: prompt, answer, reward, reward_LABEL for each reward, num_tokens, stopped


def summarise(rows: Sequence[Row], labels: Sequence[str], num_samples: int) -> Numbers:
    """Return means over answers, and pass@k for k = 2, 4, 8, ... up to the answers to each prompt.

    `rows` are all answers to the first prompt, then those to the second, and so on. An answer is right if the first
    reward gives it 1 or more.
    """

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows], float).reshape(-1, num_samples)

    reward = column("reward")
    best = {f"best_of_{num_samples}": float(reward.max(1).mean())} if num_samples > 1 else {}
    return {
        "reward": float(reward.mean()),
        **{f"reward_{label}": float(column(f"reward_{label}").mean()) for label in labels},
        **best,
        **count_right(column(f"reward_{labels[0]}")),
        "answer_tokens": float(column("num_tokens").mean()),
        "truncated": float(1 - column("stopped").mean()),
        "prompts": len(reward),
    }


def count_right(first_scores: np.ndarray) -> Numbers:
    """Return accuracy, and pass@k for k = 2, 4, 8, ... up to G, of scores [P, G] by the first reward."""
    right, num_samples = first_scores >= RIGHT, first_scores.shape[1]
    chances = {f"pass@{k}": estimate_pass(k, right.sum(1), num_samples) for k in list_powers_of_two(num_samples)[1:]}
    return {"accuracy": float(right.mean())} | chances


def estimate_pass(k: int, num_right: np.ndarray, num_samples: int) -> float:
    """Return the chance that one of k answers is right (Chen et al. 2021, arXiv:2107.03374).

    `num_right` [P] says how many of the `num_samples` answers to each prompt are right.
    """
    # The chance that none of k answers is right, drawn from the n without putting any back: of the C(n, k) choices,
    # C(n - right, k) have no right answer. With n = 4, 1 right, k = 2 it is 3 / 6. `comb` is 0 where k > n - right.
    chances = [1 - math.comb(num_samples - right, k) / math.comb(num_samples, k) for right in num_right.tolist()]
    return float(np.mean(chances))


def list_powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to `limit`."""
    return [1 << n for n in range(limit.bit_length())]
