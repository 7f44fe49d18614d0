"""Rewards of the newest rollouts beside those of the first: a run that unlearns says so."""

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
        self.num_quiet = 0  # rollouts since the last warning

    def add(self, reward: float) -> str:
        """Take the mean reward of a rollout; return a warning if the newest are below the first, else nothing.

        Both windows have to be full, and apart. After a warning, a whole window passes before the next one.
        """
        if len(self.first) < self.window:
            self.first.append(reward)
            return ""
        self.newest.append(reward)
        self.num_quiet += 1
        if len(self.newest) < self.window or self.num_quiet < self.window:
            return ""
        before, now = float(np.mean(self.first)), float(np.mean(self.newest))
        error = math.sqrt((np.var(self.first, ddof=1) + np.var(self.newest, ddof=1)) / self.window)
        if now >= before - ERRORS * error:
            return ""
        self.num_quiet = 0
        return (
            f"the reward falls: its mean over the last {self.window} rollouts is {now:.4g}, over the first "
            f"{self.window} it was {before:.4g}; try a lower optimizer.learning_rate, or task.kl_coefficient "
            '(docs/post_training.md, "What the numbers say")'
        )
