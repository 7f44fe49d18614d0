"""Rewards of the newest rollouts beside those of the first: a run whose answers become worse warns."""

import math
from collections import deque

import numpy as np

WINDOW = 50  # steps whose mean rewards are compared
ERRORS = 2.0  # standard errors by which the newest rewards must be below the first ones


class RewardTrend:
    """Mean rewards of the rollouts since the program began; a resumed run begins anew."""

    def __init__(self, steps_per_rollout: int):
        self.window = max(2, WINDOW // steps_per_rollout)
        self.first: list[float] = []
        self.newest: deque[float] = deque(maxlen=self.window)
        self.num_since_warning = 0  # rollouts

    def add(self, reward: float) -> str:
        """Take the mean reward of a rollout; return a warning if the newest are below the first, else nothing.

        Nothing is compared before both windows are full, and no rollout is in both. After a warning, the next one comes
        `window` rollouts later at the earliest.
        """
        if len(self.first) < self.window:
            self.first.append(reward)
            return ""
        self.newest.append(reward)
        self.num_since_warning += 1
        if len(self.newest) < self.window or self.num_since_warning < self.window:
            return ""
        before, now = float(np.mean(self.first)), float(np.mean(self.newest))
        # Standard error of the difference of two means, each of `window` rewards.
        error = math.sqrt((np.var(self.first, ddof=1) + np.var(self.newest, ddof=1)) / self.window)
        if now >= before - ERRORS * error:
            return ""
        self.num_since_warning = 0
        return (
            f"the reward falls: its mean over the last {self.window} rollouts is {now:.4g}, over the first "
            f"{self.window} it was {before:.4g}; try a lower optimizer.learning_rate, or task.kl_coefficient "
            '(docs/post_training.md, "What the numbers say")'
        )
