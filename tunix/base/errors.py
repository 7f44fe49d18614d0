"""Ends of a program that users see, each with its exit code; and secrets, which no message shows.

Any other exception is a bug.
"""

import argparse
import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any


def did_you_mean(value: str, choices: list[str]) -> str:
    """Return "; did you mean CHOICE?" for the choice nearest to `value`; empty if none is near."""
    by_lower = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(value.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[matches[0]]}?" if matches else ""


FEW = 20  # choices that a message names


def name_choices(value: str, choices: Sequence[str]) -> str:
    """Return "choose from A, B, C" as the end of a message; of many choices the three that are nearest to `value`."""
    if len(choices) <= FEW:
        return f"choose from {', '.join(choices)}{did_you_mean(value, list(choices))}"

    def compare(choice: str) -> tuple[bool, float]:
        ours, theirs = (re.sub(r"[^a-z0-9]", "", each.lower()) for each in (choice, value))
        return bool(theirs) and ours.startswith(theirs), difflib.SequenceMatcher(None, ours, theirs).ratio()

    return f"the nearest of its {len(choices)} are {', '.join(sorted(choices, key=compare, reverse=True)[:3])}"


def name_first(names: Sequence[object]) -> str:
    """Return the first four of some names, as a part of a message, and how many more there are."""
    return ", ".join(map(str, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; of one that says nothing, its kind."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def name_error(error: BaseException) -> str:
    """Return the kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def near_multiples(value: int, unit: int) -> str:
    """Return in words the multiples of `unit` on both sides of a value that is none: 256 or 384."""
    low = max(1, value // unit) * unit
    return f"{low} or {low + unit}"


# All but the tab and the end of a line; what turns the order of characters; halves of a pair, which cannot be printed.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Return a text for a terminal, which takes some characters for orders: they are written as their codes."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


MAX_MESSAGE = 10_000  # characters of a message


class Ending(Exception):
    """An end with an exit code of its own. Its message is for the user, and is shown without a traceback."""

    code: int
    is_failure = True  # its message goes to stderr, and the other processes of the run are told
    saves = False  # the state is saved before a run ends with it

    def __str__(self) -> str:
        """The message, without the passwords and signatures of addresses in it, with the escapes of a terminal as text,
        and without the middle of a long one: it may quote a file of anybody."""
        text = mask_secrets(super().__str__())
        if len(text) > MAX_MESSAGE:
            text = f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"
        return escape_controls(text)


class UserError(Ending, ValueError):
    """A request that cannot be carried out."""

    code = 2


class RolloutFailed(UserError):
    """Answers could not be drawn or scored, and nothing is to stand in their place; the same on every process."""

    saves = True


class FolderFull(UserError):
    """The numbers of a run cannot be written into its folder: it is saved, perhaps elsewhere, before it ends."""

    saves = True


class Stopped(Ending):
    """The run was asked to stop early (a stop signal, its time limit), and everything is saved: `resume` goes on."""

    code, is_failure, saves = 75, False, True


class Finished(Ending):
    """The run has come to its end before its last step, as the config asked (`evaluation.patience`)."""

    code, is_failure, saves = 0, False, True


class PeerLost(Ending):
    """Another process of the run did not come, has died or hangs."""

    code = 76


class Diverged(Ending):
    """Steps had to be skipped more often than the config allows: not finite (`training.max_skipped_steps`), or spikes
    (`training.max_spikes`)."""

    code = 77


# Secrets in texts: passwords and signatures of addresses, values of variables. Messages, files and logs get `***`.

MASK = "***"
SECRET_WORDS = "KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|WEBHOOK|JWT|SIG|COOKIE|SESSION"
SECRET_NAME = re.compile(SECRET_WORDS, re.IGNORECASE)  # of a variable, or of a parameter of an address
# https://USER:PASSWORD@HOST/x?name=1&X-Amz-Signature=VALUE: the user with the password, and the value.
URL_USER = re.compile(r"(?<=://)[^/\s?#'\"]+@")
# In time that grows as the text does, which anybody may have written: the `=` is looked for before the word, a name has
# no second `?`, and the value is taken up to its end and without the signs of a sentence there.
URL_PARAMETER = re.compile(
    rf"([?&](?=[^?=&#\s'\"]*=)[^?=&#\s'\"]*?(?:{SECRET_WORDS})[^?=&#\s'\"]*=)[^&#\s'\"]*[^&#\s'\":,.;)\]]",
    re.IGNORECASE,
)
MASKED = re.compile(rf"://{re.escape(MASK)}@|[?&][^?=&\s]*={re.escape(MASK)}")


def mask_secrets(text: str) -> str:
    """Return the text with `***` in place of the users, passwords and signatures of the addresses in it."""
    if "://" not in text:
        return text
    return URL_PARAMETER.sub(rf"\1{MASK}", URL_USER.sub(f"{MASK}@", text))


def mask_values(values: Any) -> Any:
    """Return plain values, as a config has them, with their texts masked."""
    if isinstance(values, dict):
        return {key: mask_values(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [mask_values(value) for value in values]
    return mask_secrets(values) if isinstance(values, str) else values


def mask_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with `***` for each whose name says that its value is a secret."""
    return {name: MASK if SECRET_NAME.search(name) else mask_secrets(value) for name, value in environment.items()}


def is_masked(text: str) -> bool:
    """Return whether a text is an address from which a secret was taken out."""
    return bool(MASKED.search(text))


class MaskingFilter(logging.Filter):
    """Masks the messages that a handler of a log gets, and shows a terminal's escapes in them as text: a model or a
    document may have written any."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if (masked := escape_controls(mask_secrets(text))) != text:
            record.msg, record.args = masked, None
        if record.exc_info and not record.exc_text:
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = escape_controls(mask_secrets(text))
        return True


class FlagParser(argparse.ArgumentParser):
    """Refuses `--flag=--` as any value that is missing; argparse gives it to the program, before Python 3.13 as []."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        parsed = super().parse_args(*args, **kwargs)
        for action in self._actions:
            if action.nargs is None and str(getattr(parsed, action.dest, None)) in ("[]", "--"):
                self.error(f"argument {'/'.join(action.option_strings)}: expected one argument")
        return parsed
