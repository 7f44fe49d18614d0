"""Rewards that users bring by dotted path, for tests."""


def letters(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Score any text by its characters: answers of a model that has learnt nothing get unlike scores."""
    return [sum(map(ord, text)) % 5 / 4 for text in completions]


def digits(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Return the share of 6 characters that are digits: of 264 tokens, 10 are."""
    return [sum(character.isdigit() for character in text) / 6 for text in completions]


def places(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Score answers by their places in the list, whatever they say: nothing is to be learnt."""
    return [(place % 4) / 3 for place in range(len(completions))]
