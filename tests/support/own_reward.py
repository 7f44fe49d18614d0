"""Rewards that users bring by dotted path, for tests."""


def letters(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """Score any text by its characters: answers of a model that has learnt nothing get unlike scores."""
    return [sum(map(ord, text)) % 5 / 4 for text in completions]
