"""Rewards and environments by name: functions that say how good answers are, and classes that a model talks with. A new
one is a row of `REWARDS` or `ENVIRONMENTS`; imports no jax.

A reward is `fn(prompts, completions, **columns) -> list[float]`: texts of prompts, texts of the answers to them, and
the columns of the data, each a list with a value for each answer. `tunix.rl.scoring` calls one and checks what it
returns. `tunix.rl.environments` says what an environment is.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.base.dotted_path import import_object, is_dotted
from tunix.rl.environments import join_tools, split_options
from tunix.rl.rewards import Reward, exact_match, format_tags, gsm8k, length, math_verify, reasoning_gym
from tunix.rl.tools import Calculator, LookUp, OpenEnv, Python, SearchFolder

REWARDS: dict[str, Reward] = {
    "gsm8k": gsm8k,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "exact_match": exact_match,
    "format": format_tags,
    "length": length,
}


def find_reward(name: str) -> Reward:
    """Return the reward of a row of the table, or the function of a dotted path. Raises `UserError` where the module of
    a dotted path cannot be imported, or lacks the function."""
    return import_object(name) if is_dotted(name) else REWARDS[name]


# Environments by name; `task.environment_options` are the arguments of the class.
ENVIRONMENTS: dict[str, type] = {
    "python": Python,
    "calculator": Calculator,
    "search_folder": SearchFolder,
    "look_up": LookUp,
    "openenv": OpenEnv,
}


def format_environment(name: str | Sequence[str] | None) -> str:
    """Return the name of an environment, or several names, as they are typed."""
    return str(name) if name is None or isinstance(name, str) else f"[{','.join(name)}]"


def find_environment(name: str | Sequence[str]) -> type:
    """Return the class of a row of the table, or that of a dotted path; of several names one with all of their tools.
    Raises `UserError` where the module of a dotted path cannot be imported, or lacks the class; or several do not go
    together."""
    if isinstance(name, str):
        return import_object(name) if is_dotted(name) else ENVIRONMENTS[name]
    return join_tools({each: find_environment(each) for each in name})


def check_options(name: str | Sequence[str], options: Mapping[str, Any]) -> None:
    """Compare the options of an environment, or of each of several, with the arguments of its class. Raises
    `ValueError` where the class does not take an option, or needs one that is not given."""
    if not isinstance(name, str):
        for each, part in split_options(name, options).items():
            check_options(each, part)
        return
    try:
        signature = inspect.signature(find_environment(name))
    except ValueError:  # of a class in C
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        taken = ", ".join(signature.parameters) or "none"
        raise ValueError(f"task.environment_options: {name}: {error}; its options: {taken}") from None
