"""Words behind a program of this folder: `name=value`, or names. A word that it does not know ends it with a line."""

import sys
from collections.abc import Iterable, Sequence


def read_values(words: Sequence[str], **values: str) -> dict[str, str]:
    """Return `values`, with those that the words `name=value` give in their place."""
    given = dict(word.split("=", 1) if "=" in word else (word, "") for word in words)
    check_names(given, [*values], "=...")
    return values | given


def check_names(names: Iterable[str], known: Sequence[str], behind: str = "") -> None:
    """End the program with a line that names the first of `names` that is not known; `behind` stands behind each."""
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no such word: {unknown[0]}; there are {', '.join(f'{name}{behind}' for name in known)}")
