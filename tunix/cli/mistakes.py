"""Error messages for wrong config: one line with the key, the value and the way out.

Hydra, OmegaConf and pydantic find the errors; this file rewrites their messages.
"""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from tunix.base.errors import UserError, did_you_mean
from tunix.cli.foreign import find_key, find_value
from tunix.cli.keys import drop_tags, find_tag, find_variant, is_mapping, list_keys, list_members
from tunix.cli.saved import GONE
from tunix.config import Config, ParameterGroup, Section

S = TypeVar("S", bound=Section)
IN_QUOTES = re.compile(r"'([^']*)'")


def validate(section: type[S], values: dict[Any, Any], *above: str) -> S:
    """Check plain `values` and return the section; `above` is the section's own key, for messages.

    Raises:
        UserError: a line for each value that is wrong.
    """
    try:
        return section.model_validate(values)
    except ValidationError as errors:
        # A value that may be of several types gives an error for each of them: one line for all errors of a place.
        by_place: dict[str, list[_Mistake]] = {}
        for error in errors.errors():
            mistake = _explain({**error, "loc": (*above, *error["loc"])})
            by_place.setdefault(mistake.place or mistake.message, []).append(mistake)
        raise UserError("\n".join(map(_join, by_place.values()))) from None


@contextmanager
def explain_errors(root: type[Section] = Config) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a `UserError` of one line; `root` is the section with the legal keys."""
    try:
        yield
    except MissingConfigException as error:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        options = list(error.options or [])
        if not group:
            raise UserError(f"{error}".splitlines()[0]) from None
        raise UserError(
            f"{group}={choice}: conf/{group} has no such file; "
            f"choose from {', '.join(options)}{find_value(group, choice) or did_you_mean(choice, options)}"
        ) from None
    except OverrideParseException as error:
        # The lines of the message that are neither a marker (^^^) nor a link; the last one says what is wrong.
        lines = [line for line in str(error).splitlines() if line.strip(" ^") and "https://" not in line]
        hint = "values with special characters need quotes within quotes: \"key='<a b>'\""
        override = str(error.override).replace("\n", "\\n")
        raise UserError(f"cannot read {override}: {lines[-1]}; {hint}") from None
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        descriptions = dict(reversed([*list_keys(root)]))  # reversed: where several variants have a key, the first wins
        known = key if key in descriptions else f"data.{key.rpartition('.')[2]}"  # data.parts.NAME.KEY of a mixture
        description = descriptions[known]
        raise UserError(f"{key} must be given: {description[0].lower()}{description[1:]}") from None
    except (HydraException, OmegaConfBaseException) as error:
        # Hydra raises one type for all of this; what is wrong stands in its text, or in OmegaConf's error behind it.
        cause: Any = error.__cause__
        unknown = getattr(cause, "full_key", None) if "not in struct" in str(cause) else None
        first = str(error).splitlines()[0] if str(error) else repr(cause)
        if unknown:
            parent: Any = getattr(cause, "parent_node", None) or {}
            variant = find_variant(parent)
            raise UserError(explain_unknown_key(unknown, variant, root)) from None
        if "No match in the defaults list" in first:
            raise UserError(f"{first.split('. ')[0]}; write +{IN_QUOTES.findall(first)[0]}=...") from None
        if first.startswith("Could not append"):
            found = re.search(r"'([\w.]+)'|key (\S+)", f"{first} {error}")
            name = next(filter(None, found.groups()), "") if found else "the key"
            raise UserError(f"+{name}: the config has this key already; write it without +") from None
        if first.startswith("Ambiguous value"):
            word = re.findall("'(.*)'", first)[0]
            key, _, values = word.partition("=")
            raise UserError(f"{word}: --multirun runs each of them; as a list it is {key}=[{values}]") from None
        if first.startswith("Error merging override "):
            form = "a list like [a,b]" if "object_type=list" in str(cause) else "a mapping like {a:b}"
            raise UserError(f"{first.removeprefix('Error merging override ')}: expected {form}") from None
        raise UserError(first) from None


# Messages in place of pydantic's, by the type of the error. A limit comes from the error's `ctx`.
EXPECTED = {
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "tuple_type": "expected a list like [a,b]",
    "model_type": "expected a mapping like {{key: value}}",
    "too_short": "give at least one",
    "greater_than_equal": "expected a number of at least {ge}",
    "greater_than": "expected a number above {gt}",
    "less_than_equal": "expected a number of at most {le}",
    "less_than": "expected a number below {lt}",
}


class _Mistake(NamedTuple):
    """A pydantic error in words."""

    place: str  # KEY=VALUE; empty where the message names the keys itself
    message: str
    hint: str = ""
    takes_null: bool = False  # null is legal too


def _join(mistakes: list[_Mistake]) -> str:
    """Return one line for the mistakes of one place.

    A value that may be of several types has one for each of them; together they say what is legal.
    """
    place, *_ = mistakes[0]
    legal = list(dict.fromkeys(mistake.message for mistake in mistakes))
    legal[1:] = [message.removeprefix("expected ").removeprefix("one of ") for message in legal[1:]]
    if any(mistake.takes_null for mistake in mistakes):
        legal.append("null")
    text = " or ".join(filter(None, [", ".join(legal[:-1]), legal[-1]]))
    return f"{f'{place}: ' if place else ''}{text}{''.join(dict.fromkeys(mistake.hint for mistake in mistakes))}"


def _explain(error: dict[str, Any]) -> _Mistake:
    """Return an error of pydantic as a message: the key, the value, the way out."""
    # Where a value may be of several types, pydantic adds the type that it tried to the key, like `literal['auto']`.
    path, variant, takes_null = drop_tags([str(part) for part in error["loc"] if "[" not in str(part)])
    key, value, kind = ".".join(path), error["input"], error["type"]
    message = error["msg"].removeprefix("Value error, ")
    if kind in EXPECTED:
        message = EXPECTED[kind].format(**error.get("ctx", {}))
    if kind == "extra_forbidden":
        return _Mistake("", explain_unknown_key(key, variant))
    if kind == "missing":
        return _Mistake("", f"{key} is missing")
    if kind in ("literal_error", "union_tag_invalid"):
        context = error["ctx"]
        choices = IN_QUOTES.findall(context.get("expected") or context["expected_tags"])
        if kind == "union_tag_invalid":
            discriminator = context["discriminator"].strip("'")
            key, value = f"{key}.{discriminator}", context["tag"]
        hint = find_value(key, str(value)) or did_you_mean(str(value), choices)
        return _Mistake(f"{key}={value}", f"expected one of {', '.join(choices)}", hint, takes_null)
    if isinstance(value, dict | BaseModel):  # a check across several keys: its own message names them
        return _Mistake("", message)
    return _Mistake(f"{key}={value}", message[0].lower() + message[1:], "", takes_null and kind in EXPECTED)


def explain_unknown_key(key: str, variant: type[Section] | None = None, root: type[Section] = Config) -> str:
    """Return the message for a key that does not exist, with the most similar legal key."""
    if key in GONE:
        return f"{key} is gone: {GONE[key]}"
    legal = [name for name, _ in list_keys(root)]
    head, _, leaf = key.rpartition(".")
    if root is Config and key not in legal and (hint := find_key(key)):
        return f"unknown key {key}; {hint}"
    if root is Config and is_mapping(head):
        return f"{head} has no {leaf} yet; write +{key}=VALUE to add it"
    if variant and leaf in variant.model_fields:  # the new variant has the key, the one in the config has not
        return f"{head} is changed as a whole by ++{head}={{...}}"
    if variant and key in legal:  # a key of another variant
        others = [find_tag(kind) for kind in list_members(head) if leaf in kind.model_fields]
        way_out = f"; {head}={' or '.join(others)} has {leaf}" if others else ""
        return (
            f"unknown key {key}: {head}={find_tag(variant)} has none; "
            f"its keys are {', '.join(variant.model_fields)}{way_out}"
        )
    if head.startswith("optimizer.groups."):
        legal = [f"{head}.{name}" for name in ParameterGroup.model_fields]
    # `leaves` has one key for each last part, whatever its section; `here` has those of the section that was typed.
    leaves = {name.rpartition(".")[2]: name for name in legal}
    here = {name.rpartition(".")[2]: name for name in legal if name.rpartition(".")[0] == head}
    if not head:
        here |= {name: name for name in root.model_fields}  # `legal` has the keys of sections, and not their names
    full = {name: name for name in [*legal, *root.model_fields]}
    # What to compare, with which keys, and how similar they must be (0 to 1, as difflib counts). The first match wins:
    # the surest guesses come first, so that a right name in a wrong section is not answered with a similar one here.
    # The less a guess has to go on, the more similar its words must be.
    guesses = [
        (leaf, leaves, 1.0),  # the right name in another section
        (leaf, here, 0.7),  # a typo in the name
        (leaf, leaves, 0.8),  # both
    ]
    if not (head and here):
        guesses.append((key, full, 0.75))  # a typo in the section's name
    for word, choices, cutoff in guesses:
        if near := difflib.get_close_matches(word, choices, n=1, cutoff=cutoff):
            return f"unknown key {key}; did you mean {choices[near[0]]}?"
    listed = "docs/config.md lists all keys" if root is Config else f"keys are {', '.join(legal)}"
    return f"unknown key {key}; {listed}"
