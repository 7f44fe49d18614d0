"""Rewards: numbers that say how good an answer is. A new one is a row of `REWARDS`."""

import math
from collections.abc import Callable

from tunix.base.dotted import blame_user, import_object, is_dotted

Reward = Callable[[str, str], float]  # (answer of the model, answer in the data) -> reward


def exact_match(answer: str, reference: str) -> float:
    """Return 1 where the answer is that of the data word for word, but for white space around both, else 0."""
    return float(answer.strip() == reference.strip())


REWARDS: dict[str, Reward] = {"exact_match": exact_match}


def find_reward(name: str) -> Reward:
    """Return the reward of a row of the table, or the function of a dotted path.

    Raises:
        UserError: the function does not give a number for two made-up answers.
    """
    if not is_dotted(name):
        return REWARDS[name]
    reward = import_object(name)
    with blame_user("metric", name):
        for answer in ("42", ""):
            value = float(reward(answer, "42"))
            if not math.isfinite(value):
                raise ValueError(f"the reward of the answer {answer!r} is {value}")
    return reward
