"""Ranges of steps as users write them."""

from typing import Annotated

from pydantic import AfterValidator


def read_steps(text: str) -> range:
    """Return the steps of `1200:1250`, both ends included, or of `1200`.

    Raises:
        ValueError: the text is neither.
    """
    first, _, last = text.partition(":")
    if not first.isdecimal() or not (last or first).isdecimal() or not 1 <= int(first) <= int(last or first):
        raise ValueError("expected a step, or a range of steps FIRST:LAST that includes both")
    return range(int(first), int(last or first) + 1)


def _check_steps(text: str) -> str:
    read_steps(text)
    return text


Steps = Annotated[str, AfterValidator(_check_steps)]
