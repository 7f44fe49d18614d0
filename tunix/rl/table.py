"""Rewards: functions that say how good answers are. A new one is a row of `REWARDS`; imports no jax.

A reward is `fn(prompts, completions, **columns) -> list[float]`: texts of prompts, texts of the answers to them, and
the columns of the data, each a list with a value for each answer. Read `reward` first: it calls one and checks what it
returns. `correctness` has rewards for right answers, `style` for their form, and `worker` is the process in which
`tunix.rl.scoring` runs them.
"""

from tunix.base.dotted_path import import_object, is_dotted
from tunix.rl.rewards import Reward, exact_match, format_tags, gsm8k, length, math_verify, reasoning_gym

__all__ = ["REWARDS", "Reward", "find_reward"]

REWARDS: dict[str, Reward] = {
    "gsm8k": gsm8k,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "exact_match": exact_match,
    "format": format_tags,
    "length": length,
}


def find_reward(name: str) -> Reward:
    """Return the reward of a row of the table, or the function of a dotted path.

    Raises:
        UserError: the module of a dotted path cannot be imported, or lacks the function.
    """
    return import_object(name) if is_dotted(name) else REWARDS[name]
