"""Errors that users see."""

import difflib


def did_you_mean(value: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


class UserError(ValueError):
    """What the user asked for cannot be done. Shown as it is, without a traceback; exit code 2."""
