"""Advantages: each answer compared with the others of its group, which are the G answers to one prompt.

rewards [1, 4]      1      0      0      1        mean 0.5, standard deviation 0.5
centered          0.5   -0.5   -0.5    0.5
group_std           1     -1     -1      1
leave_one_out     2/3   -2/3   -2/3    2/3        the first: 1 - (0 + 0 + 1) / 3
"""

from collections.abc import Callable

import numpy as np

# Rewards of a group that differ by less than this count as equal: the difference is a rounding error, not a signal.
EQUAL = 1e-6


def center(rewards: np.ndarray) -> np.ndarray:
    """Return rewards [P, G] less the mean of their group. (Dr. GRPO, arXiv:2503.20783)"""
    return rewards - rewards.mean(axis=1, keepdims=True)


def scale_by_deviation(rewards: np.ndarray) -> np.ndarray:
    """Return centred rewards [P, G] divided by the standard deviation of their group. (GRPO, arXiv:2402.03300)"""
    deviation = rewards.std(axis=1, keepdims=True)
    return np.where(deviation > EQUAL, center(rewards) / np.maximum(deviation, EQUAL), 0.0)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return rewards [P, G] less the mean of the others of their group. (RLOO, arXiv:2402.14740)"""
    # r - (sum - r) / (G - 1) = (G r - sum) / (G - 1) = (r - mean) G / (G - 1), where sum and mean are of all G answers.
    size = rewards.shape[1]
    return center(rewards) * size / (size - 1)


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "centered": center,
    "group_std": scale_by_deviation,
    "leave_one_out": leave_one_out,
}


def has_signal(rewards: np.ndarray) -> np.ndarray:
    """Return for each group of rewards [P, G] whether its answers are not all equally good, [P] bool."""
    return np.ptp(rewards, axis=1) > EQUAL
