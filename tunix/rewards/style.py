"""Rewards for the form of answers, whatever they say."""

import re
from typing import Any

TAGS = (("<reasoning>", "</reasoning>"), ("<think>", "</think>"))  # a model uses one of these pairs
ANSWER = ("<answer>", "</answer>")


def format_tags(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    """Score 1 for `<reasoning>...</reasoning><answer>...</answer>` with nothing around it, each tag once.

    `<think>` counts like `<reasoning>`. An answer of another form gets an eighth for each tag that it has exactly once,
    so that a model learns the form step by step.
    """
    return [max(_score_form(completion.strip(), tags) for tags in TAGS) for completion in completions]


def _score_form(text: str, tags: tuple[str, str]) -> float:
    all_tags = (*tags, *ANSWER)
    once = sum(text.count(tag) == 1 for tag in all_tags)
    begin, end, answer, close = map(re.escape, all_tags)
    if once == 4 and re.fullmatch(rf"{begin}.*{end}\s*{answer}.*{close}", text, re.DOTALL):
        return 1.0
    return once / 8


def length(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    """Score minus one for each thousand characters: with a small weight, short answers are preferred."""
    return [-len(completion) / 1000 for completion in completions]
