"""Rewards that users bring by dotted path, for tests."""

import os
import random
import signal
import time
from pathlib import Path


def letters(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Score any text by its characters: answers of a model that has learnt nothing get unlike scores."""
    return [sum(map(ord, text)) % 5 / 4 for text in completions]


def striking(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Score like `letters`. In step 3, kill the run that asks; when it asks again, stop it."""
    answers = Path("run") / "samples.jsonl"
    if len(completions) == 16 and answers.exists() and len(answers.read_text().splitlines()) == 32:
        for number in (signal.SIGKILL, signal.SIGTERM):
            strike = Path(number.name)
            if not strike.exists():
                strike.touch()
                os.kill(os.getppid(), number)
                break
    return letters(prompts, completions)


def digits(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Return the share of 6 characters that are digits: of 264 tokens, 10 are."""
    return [sum(character.isdigit() for character in text) / 6 for text in completions]


def places(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Score answers by their places in the list, whatever they say: nothing is to be learnt."""
    return [(index % 4) / 3 for index in range(len(completions))]


def slow_letters(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Score like `letters`, after a time that nobody can foresee."""
    time.sleep(random.SystemRandom().random())
    return letters(prompts, completions)


def some_letters(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Score like `letters`, but for a third of the prompts 1 whatever the answer is."""
    scores = letters(prompts, completions)
    return [1.0 if sum(map(ord, prompt)) % 3 == 0 else score for prompt, score in zip(prompts, scores, strict=True)]
