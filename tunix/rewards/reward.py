"""Call of a reward: the columns that it takes, and a check of what it returns."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Reward = Callable[..., list[float]]  # (prompts, completions, **columns) -> a score for each completion
Columns = Mapping[str, Sequence[Any]]  # {name: a value for each completion}

BATCH_NAMES = ("prompts", "completions")


def select_columns(function: Reward, columns: Columns) -> dict[str, Sequence[Any]]:
    """Return the columns that the function takes: those of its parameters, or all where it has **columns.

    Raises:
        ValueError: it has a parameter without a default that is no column of the data, or a column has the name of one
            of its first two parameters.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    reserved = {*BATCH_NAMES, *positional[:2]}  # the first two are given by position, whatever their names
    if taken := [name for name in columns if name in reserved]:
        raise ValueError(f"the data have a column {taken[0]}, which is an argument of every reward; rename the column")
    keywords = [each for each in parameters if each.name not in positional[:2]]
    for each in keywords:
        required = each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if required and each.name not in columns:
            present = ", ".join(columns) or "none"
            raise ValueError(f"it takes the column {each.name}, which the data lack; their columns are {present}")
    if any(each.kind is each.VAR_KEYWORD for each in keywords):
        return dict(columns)
    return {each.name: columns[each.name] for each in keywords if each.name in columns}


def call_reward(
    function: Reward, prompts: Sequence[str], completions: Sequence[str], columns: Columns
) -> list[float | str]:
    """Return for each completion its score, or in place of a score the text that says what is wrong with it.

    Raises:
        ValueError: the function returns no list with one value for each completion; and whatever it raises.
    """
    values: Any = function(list(prompts), list(completions), **select_columns(function, columns))
    try:
        values = list(values)
    except TypeError:
        raise ValueError(
            f"returned {_name_type(values)}, not a list with a score for each of the {len(completions)} answers"
        ) from None
    if len(values) != len(completions):
        raise ValueError(f"returned {len(values)} scores for {len(completions)} answers")
    return [_read_score(value) for value in values]


def _read_score(value: Any) -> float | str:
    if value is None:
        return "returned None for an answer"
    try:
        score = float(value)
    except (TypeError, ValueError):
        return f"returned {_name_type(value)} for an answer, not a number"
    return score if math.isfinite(score) else f"returned {score} for an answer"


def _name_type(value: Any) -> str:
    return "None" if value is None else f"{value!r:.40} ({type(value).__name__})"
