"""Error messages for wrong config: one line with the key, the value and the way out.

Hydra, OmegaConf and pydantic find the errors; this file rewrites their messages. A key of another program is answered
by its row of conf/foreign_names.yaml.
"""

import difflib
import re
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from tunix.base.config_types import CONF, list_options, read_descriptions, read_version
from tunix.base.errors import UserError, did_you_mean, first_line, name_choices, name_first
from tunix.base.files import read_json
from tunix.base.text import as_typed, flat
from tunix.config import Config, Section
from tunix.config.foreign_names import SAYS_LITTLE, find_key, find_value, list_single_keys, normalize
from tunix.config.saved_runs import GONE
from tunix.sharding.table import axis_names

# Keys of the config as users type them, read from the pydantic types of `tunix.config`.


def list_keys(section: type[Section] = Config) -> Iterator[tuple[str, str]]:
    """Yield every key as users type it, with its description.

    A union of sections (data sources, optimizers, tasks) gives the keys of all its members, so a key may come twice.
    """
    for key, name, holder in _list_leaves(section):
        yield key, read_descriptions(holder).get(name, "")


def _list_leaves(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, str, type[Section]]]:
    """Yield every key as users type it, the name of its field and the section that has it."""
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        kinds = list_sections(field.annotation)
        for kind in kinds:
            yield from _list_leaves(kind, f"{key}.")
        if not kinds:
            yield key, name, section


def _list_beginnings(key: str) -> list[str]:
    """Return the sections that a dotted key lies in: a and a.b for a.b.c."""
    parts = key.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def reject_newer(values: Mapping[str, Any], run_dir: Path) -> None:
    """Raise `UserError` for the saved config of a run with keys that nobody reads here: a newer version wrote it."""
    leaves = {key for key, _, _ in _list_leaves(Config)}
    sections = {begin for key in leaves for begin in _list_beginnings(key)}  # one may be null
    unknown = [key for key in flat(dict(values)) if key not in sections and not leaves & {key, *_list_beginnings(key)}]
    if not unknown:
        return
    try:
        theirs = read_json(run_dir / "environment.json")["versions"]["tunix"]
    except (UserError, KeyError, TypeError):
        theirs = "another version"
    raise UserError(
        f"{run_dir}/config.yaml was written by tunix {theirs}, and this is tunix {read_version()}, which does not "
        f"know {name_first(unknown)}; go on with a version that does"
    )


def list_sections(annotation: Any) -> list[type[Section]]:
    """Return the section that a field holds, or the members of a union of sections; none for a plain value."""
    return [kind for kind in _list_types(annotation) if isinstance(kind, type) and issubclass(kind, Section)]


def list_members(key: str) -> list[type[Section]]:
    """Return the sections that a key of the config may hold: several for a union, none for a plain value.

    An entry of a list or of a mapping has a key, too: optimizer.groups.0, data.parts.NAME.
    """
    kinds: list[type[Section]] = [Config]
    entries: list[type[Section]] = []  # sections that the list or mapping before may hold
    for part in key.split("."):
        if entries:
            kinds, entries = entries, []
            continue
        fields = [field for kind in kinds for name, field in kind.model_fields.items() if part in (name, field.alias)]
        annotation = fields[0].annotation if fields else None
        kinds = list_sections(annotation)
        inner = [each for kind in _list_types(annotation) for each in typing.get_args(kind)]
        entries = [section for each in inner for section in list_sections(each)]
    return kinds


def is_entry(key: str) -> bool:
    """Return whether a key of the config names a section in a list or mapping: optimizer.groups.0, data.parts.NAME."""
    above = key.rpartition(".")[0]
    return bool(above and list_members(key)) and not list_members(above)


def is_mapping(key: str) -> bool:
    """Return whether a key of the config takes names that the user chooses, like training.compiler_options."""
    section, _, name = key.rpartition(".")
    fields = [kind.model_fields[name] for kind in list_members(section) if name in kind.model_fields]
    kinds = [kind for field in fields for kind in (field.annotation, *typing.get_args(field.annotation))]
    return any(typing.get_origin(kind) is dict for kind in kinds)


def find_variant(values: Mapping[str, Any], section: type[Section] = Config) -> type[Section] | None:
    """Return the member of a union below a section that these values are meant for; None if they have no known tag."""
    for field in section.model_fields.values():
        kinds = list_sections(field.annotation)
        for kind in kinds:
            if len(kinds) > 1 and str(values.get(find_tag_key(kind))) == find_tag(kind):
                return kind
            if found := find_variant(values, kind):
                return found
    return None


def drop_tags(path: list[str]) -> tuple[list[str], type[Section] | None, bool]:
    """Return a path as users type it, the member of a union that it leads through, and whether null is legal there.

    pydantic adds two kinds of words to the path of an error, which are no keys:

        data, text, paths                      the tag of a union's member      the user types data.paths
        distributed, shared_filesystem, bool   the type that it tried           ... distributed.shared_filesystem
    """
    parts: list[str] = []
    kinds: list[type[Section]] = [Config]
    remaining, member = list(path), None
    types_of_value: list[Any] = []
    while remaining and kinds:
        if len(kinds) > 1:
            member = {find_tag(kind): kind for kind in kinds}.get(remaining[0])
            kinds = [member] if member else []
            remaining = remaining[1:] if member else remaining
            continue
        fields = [field for name, field in kinds[0].model_fields.items() if remaining[0] in (name, field.alias)]
        parts.append(remaining.pop(0))
        annotation: Any = fields[0].annotation if fields else None
        if remaining and typing.get_origin(annotation) is dict:  # a name that the user chose comes next
            parts.append(remaining.pop(0))
            annotation = typing.get_args(annotation)[1]
        kinds = list_sections(annotation)
        types_of_value = _list_types(annotation)
    if not kinds and len([kind for kind in types_of_value if kind is not type(None)]) > 1:
        remaining = remaining[1:]
    return [*parts, *remaining], member, type(None) in types_of_value


def _list_types(annotation: Any) -> list[Any]:
    """Return the members of a union, also of one within it, and what is no union alone."""
    annotation = annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return [annotation]
    return [each for member in typing.get_args(annotation) for each in _list_types(member)]


TAGS = ("source", "name", "kind")  # keys that tell the members of a union apart: a member has one of them


def find_tag_key(kind: type[Section]) -> str:
    """Return the key that tells a member of a union apart: `source` of the data sources."""
    return next(name for name in TAGS if name in kind.model_fields)


def find_tag(kind: type[Section]) -> str:
    """Return the value of this key: `jsonl` of a source that reads such files."""
    return typing.get_args(kind.model_fields[find_tag_key(kind)].annotation)[0]


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
        by_location: dict[str, list[_Mistake]] = {}
        mixed = _find_mixed(errors.errors(), above)
        # A file of another program (--config-name) has keys that are answered, and lacks most of ours.
        kinds = [error["type"] for error in errors.errors() if len(error["loc"]) == 1]
        is_foreign = "extra_forbidden" in kinds and 2 * kinds.count("missing") > len(section.model_fields)
        for error in errors.errors():
            if is_foreign and error["type"] == "missing" and len(error["loc"]) == 1:
                continue
            if line := next((line for path, line in mixed.items() if error["loc"][: len(path)] == path), ""):
                by_location[line] = [_Mistake("", line)]
                continue
            below = [other["loc"] for other in errors.errors() if len(other["loc"]) > len(error["loc"])]
            if error["type"] == "too_short" and any(loc[: len(error["loc"])] == error["loc"] for loc in below):
                continue  # an entry that is wrong does not count for pydantic
            if error["type"] == "literal_error" and isinstance(error["input"], list | tuple):
                above_type = error["loc"][:-1]
                if any(loc[: len(above_type)] == above_type for loc in below):
                    continue  # the value is a list, and one of its entries is wrong
            mistake = _explain({**error, "loc": (*above, *error["loc"])}, Config if above else section)
            by_location.setdefault(mistake.prefix or mistake.message, []).append(mistake)
        raise UserError("\n".join(map(_join, by_location.values()))) from None


def _find_mixed(errors: Sequence[Any], above: Sequence[str]) -> dict[tuple, str]:
    """Return a line for each section with a new tag (launcher.name=ray) and the keys of another kind, by its path."""
    lines, unknown = {}, [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
    for loc in {path[:-1] for path in unknown}:
        foreign = [str(path[-1]) for path in unknown if path[:-1] == loc]
        path, variant, _ = drop_tags([str(part) for part in (*above, *loc, foreign[0]) if "[" not in str(part)])
        group = ".".join(path[:-1])
        if variant and len(foreign) > 1 and find_tag(variant) in list_options(group):
            tag = f"{group}.{find_tag_key(variant)}={find_tag(variant)}"
            others = name_first(foreign)
            lines[loc] = f"{tag} has no keys {others}; {group}={find_tag(variant)} chooses the file with its own keys"
    return lines


# Keys of models, tokenizers, data and runs that are no file of conf/: their folders, or their names on the hub.
OUTSIDE = {
    "model": "model.init_from=", "tokenizer": "tokenizer.path=", "data": "data=hf data.path=", "checkpoint": "resume=",
}  # fmt: skip

# Keys of parts in Python, which are no file of conf/ either.
DOTTED = {
    "data": "data=custom data.function=", "optimizer": "optimizer=custom optimizer.function=",
    "scheduler": "scheduler.name=", "task": "task.loss=",
}  # fmt: skip


def _describe_choice(group: str, choice: str, options: list[str]) -> str:
    """Return what a choice that conf/ lacks is here, to end a message: a part, files, a name on the hub, or a typo."""
    suffix = choice.rpartition(".")[2]
    if not choice:
        return f"; {name_choices(choice, options)}"
    if group in DOTTED and re.fullmatch(r"[\w.]+:\w+", choice):
        return f"; here it is {DOTTED[group]}{choice}"
    if group == "data" and (suffix in options or choice.startswith((".", "/"))):
        return f"; here it is data={suffix if suffix in options else 'text'} data.paths=[{choice}]"
    far = group in ("tokenizer", "checkpoint") and not did_you_mean(choice, options)  # no typo
    if group in OUTSIDE and ("/" in choice or far):
        return f"; here it is {OUTSIDE[group]}{choice}"
    return f"; {name_choices(choice, options)}"


def quote_word(key: str, value: str) -> str:
    """Return KEY=VALUE in quotes for Hydra's grammar and for a shell: a text, or a list of texts.

    Empty where that is no word, as of brackets in brackets.
    """
    texts, is_list = [value], value[:1] == "[" and value[-1:] == "]"
    if is_list:
        texts = [text.strip() for text in value[1:-1].split(",")]
    if value[:1] in ("[", "{") and (not is_list or re.search(r"[][{}]", value[1:-1])):
        return ""
    mark = "'" if not re.search(r"[$`\"\\!]", value) or "'" in value else '"'
    quoted = ",".join(mark + text.replace(mark, f"\\{mark}") + mark for text in texts)
    word = f"{key}=[{quoted}]" if is_list else f"{key}={quoted}"
    try:
        if OverridesParser.create().parse_override(word).value() != (texts if is_list else value):
            return ""
    except HydraException:
        return ""
    word = word.replace("\n", "\\n")
    return shlex.quote(word) if mark == '"' or re.search(r"[$`\"!]|\\(?!')", word) else f'"{word}"'


def reject_number(override: Override, root: type[Section] = Config) -> None:
    """Raise `UserError` for a text that Hydra reads as a number, which is written otherwise: run_name=2024_11_30."""
    key, value = override.key_or_group, override.value()
    word = str(override.input_line).partition("=")[2]
    swept = isinstance(value, ChoiceSweep)
    if isinstance(value, ChoiceSweep):
        value = value.list if value.simple_form else []
    for text, number in zip(word.strip("[]").split(","), value if isinstance(value, list) else [value], strict=False):
        if isinstance(number, bool) or not isinstance(number, int | float) or str(number) == text.strip():
            continue
        fields = (kind.model_fields[name] for typed, name, kind in _list_leaves(root) if typed == key)
        if re.fullmatch(r"hydra\..*dir", key) or any(_takes_text(field.annotation) for field in fields):
            solution = f"as text it is {quote_word(key, word)}"
            if swept:
                choices = ",".join(f"'{each.strip()}'" for each in word.split(","))
                solution = f'as texts they are "{key}={choices}"'
            raise UserError(f"{key}={word}: {text.strip()} is read as the number {number}; {solution}")


def _takes_text(annotation: Any) -> bool:
    """Return whether a field takes text, or a list of texts, and no number."""
    kinds = set(_list_types(annotation))
    lists = [kind for kind in kinds if typing.get_origin(kind) is tuple]
    kinds |= {each for kind in lists for entry in typing.get_args(kind) for each in _list_types(entry)}
    return str in kinds and kinds.isdisjoint((int, float))


@contextmanager
def describe_errors(root: type[Section] = Config) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a `UserError` of one line; `root` is the section with the legal keys."""
    try:
        yield
    except MissingConfigException as error:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if group.partition("/")[0] in OUTSIDE and not (CONF / group).is_dir():  # model=OWNER/NAME
            group, _, choice = str(error.missing_cfg_file).partition("/")
        if error.missing_cfg_file is None:
            raise UserError(f"--config-path: {first_line(error)}") from None
        if not group:
            raise UserError(
                f"--config-name={choice}: there is no {choice}.yaml; --config-path names its folder"
            ) from None
        hint = find_value(group, choice) or _describe_choice(group, choice, list(error.options or list_options(group)))
        raise UserError(f"{group}={choice}: conf/{group} has no such file{hint}") from None
    except OverrideParseException as error:
        word, override = str(error.override), str(error.override).replace("\n", "\\n")
        key, mark, value = word.partition("=")
        if not mark:
            raise UserError(f"{override}: words have the form key=value") from None
        if quoted := quote_word(key, value):
            raise UserError(
                f"cannot read {override}: such a value needs quotes, within quotes for the shell: {quoted}"
            ) from None
        # The lines of the message that are neither a marker (^^^) nor a link; the last one says what is wrong.
        lines = [line for line in str(error).splitlines() if line.strip(" ^") and "https://" not in line]
        hint = "values with special characters need quotes within quotes: \"key='<a b>'\""
        raise UserError(f"cannot read {override}: {lines[-1]}; {hint}") from None
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        descriptions = dict(reversed([*list_keys(root)]))  # reversed: where several variants have a key, the first wins
        # A key of no section is data.parts.NAME.KEY of a mixture. A section has no description.
        description = descriptions.get(key) or descriptions.get(f"data.{key.rpartition('.')[2]}") or "null, or its keys"
        raise UserError(f"{key} must be given: {description[0].lower()}{description[1:]}") from None
    except (HydraException, OmegaConfBaseException) as error:
        # Hydra raises one type for all of this; what is wrong stands in its text, or in OmegaConf's error behind it.
        cause: Any = error.__cause__
        unknown = getattr(cause, "full_key", None) if "not in struct" in str(cause) else None
        first = str(error).splitlines()[0] if str(error) else repr(cause)
        if unknown:
            parent: Any = getattr(cause, "parent_node", None)
            values: Any = OmegaConf.to_container(parent, resolve=False) if parent else {}
            variant = find_variant(values)
            raise UserError(describe_unknown_key(unknown, variant, root)) from None
        if "No match in the defaults list" in first:
            raise UserError(f"{first.split('. ')[0]}; write +{IN_QUOTES.findall(first)[0]}=...") from None
        if first.startswith("Could not append"):
            found = re.search(r"'([\w.]+)'|key (\S+)", f"{first} {error}")
            name = next(filter(None, found.groups()), "") if found else "the key"
            raise UserError(f"+{name}: the config has this key already; write it without +") from None
        if first.startswith("Ambiguous value"):
            word = re.findall("'(.*)'", first)[0]
            key, _, values = word.partition("=")
            hint = "--multirun runs each of them; as a list it is " if root is Config else "a list is "
            raise UserError(f"{word}: {hint}{key}=[{values}], as one text {quote_word(key, values)}") from None
        if first.startswith("Sweep parameters") and root is not Config:  # the words of a text, like range(1,3)
            key, _, value = re.findall("'(.*)'", first)[0].partition("=")
            raise UserError(f"{key}={value} is a sweep; as a text it is {quote_word(key, value)}") from None
        if first.startswith("Error merging override "):
            form = "a list like [a,b]" if "object_type=list" in str(cause) else "a mapping like {a:b}"
            raise UserError(f"{first.removeprefix('Error merging override ')}: expected {form}") from None
        key = str(getattr(error, "full_key", None) or "")
        first = first.removeprefix("KeyError raised while resolving interpolation: ").strip('"')
        raise UserError(f"{key}: {first}" if key else first) from None
    except (RecursionError, ValueError) as error:  # of Hydra's parser: brackets in brackets, a number of 5,000 digits
        if isinstance(error, ValueError) and "integer string conversion" not in str(error):
            raise
        raise UserError(f"a word cannot be read: {first_line(error)}") from None


# Messages in place of pydantic's, by the type of the error. A limit comes from the error's `ctx`.
EXPECTED = {
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "string_too_short": "expected text that is not empty",
    "tuple_type": "expected a list like [a,b]",
    "model_type": "expected a mapping like {{key: value}}",
    "dict_type": "expected a mapping like {{key: value}}",
    "too_short": "give at least one",
    "greater_than_equal": "expected a number of at least {ge}",
    "greater_than": "expected a number above {gt}",
    "less_than_equal": "expected a number of at most {le}",
    "less_than": "expected a number below {lt}",
}


class _Mistake(NamedTuple):
    """A pydantic error in words."""

    prefix: str  # KEY=VALUE; empty where the message names the keys itself
    message: str
    hint: str = ""
    allows_null: bool = False  # null is legal too


def _join(mistakes: list[_Mistake]) -> str:
    """Return one line for the mistakes of one place. A value that may be of several types has one for each of them;
    together they say what is legal."""
    prefix, *_ = mistakes[0]
    own = [mistake for mistake in mistakes if not mistake.message.startswith("expected ")]
    if prefix and own:  # the value has one of these types, and a fault of its own
        mistakes = own[:1]
    valid = list(dict.fromkeys(mistake.message for mistake in mistakes))
    valid[1:] = [message.removeprefix("expected ").removeprefix("one of ") for message in valid[1:]]
    if any(mistake.allows_null for mistake in mistakes):
        valid.append("null")
    text = " or ".join(filter(None, [", ".join(valid[:-1]), valid[-1]]))
    return f"{f'{prefix}: ' if prefix else ''}{text}{''.join(dict.fromkeys(mistake.hint for mistake in mistakes))}"


def _explain(error: dict[str, Any], root: type[Section]) -> _Mistake:
    """Return an error of pydantic as a message: the key, the value, the way out. `root` has the legal keys."""
    # Where a value may be of several types, pydantic adds the type that it tried to the key, like `literal['auto']`.
    path, variant, allows_null = drop_tags([str(part) for part in error["loc"] if "[" not in str(part)])
    key, value, kind = ".".join(path), error["input"], error["type"]
    message = error["msg"].removeprefix("Value error, ")
    if kind in EXPECTED:
        message = EXPECTED[kind].format(**error.get("ctx", {}))
    if kind == "extra_forbidden":
        return _Mistake("", describe_unknown_key(key, variant, root, str(value)))
    if kind == "missing":
        return _Mistake("", f"{key} is missing")
    if kind == "union_tag_not_found":
        tag = error["ctx"]["discriminator"].strip("'")
        return _Mistake("", f"{key}.{tag} is missing")
    if kind in ("literal_error", "union_tag_invalid"):
        context = error["ctx"]
        choices = IN_QUOTES.findall(context.get("expected") or context["expected_tags"])
        if kind == "union_tag_invalid":
            discriminator = context["discriminator"].strip("'")
            key, value = f"{key}.{discriminator}", context["tag"]
        hint = find_value(key, str(value)) or did_you_mean(str(value), choices)
        return _Mistake(f"{key}={as_typed(value)}", f"expected one of {', '.join(choices)}", hint, allows_null)
    if isinstance(value, dict | BaseModel) and all(key != leaf for leaf, *_ in _list_leaves(root)):
        # A check across several keys: its own message names them.
        return _Mistake("", message)
    # A hint ends the line, also where other types add their words.
    message, mark, meant = message.partition("; did you mean ")
    hint = find_value(key, str(value)) or mark + meant
    if kind == "string_type" and isinstance(value, bool) and not key[-1].isdigit():  # that of an entry of a list
        hint = hint or f"; as text it is {quote_word(key, as_typed(value))}"
    if kind == "string_type" and isinstance(value, list | tuple):
        any_of = quote_word(key, "|".join(map(str, value)))
        hint = hint or f"; if it is a regular expression, {any_of} matches any of them"
    if kind == "tuple_type" and isinstance(value, str) and value:
        hint = hint or f"; a list of one is {key}=[{value}]"
    if kind in ("int_parsing", "float_parsing"):
        hint = hint or _write_out(key, str(value), kind == "int_parsing")
    prefix = f"{key}={as_typed(value)}" if key else ""  # empty where a file holds no mapping at all
    return _Mistake(prefix, message[0].lower() + message[1:], hint, allows_null and kind in EXPECTED)


def _write_out(key: str, text: str, is_whole: bool) -> str:
    """Return a number with a unit (4k, 1B, 10%, and 1h where the key counts seconds) in digits, to end a message."""
    number, unit = re.fullmatch(r"([0-9.]*)\s*(.*)", text.lower(), re.DOTALL).groups()  # type: ignore[union-attr]
    factors: dict[str, float] = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
    if not key.endswith("_s"):
        factors = {"%": 0.01, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    if (unit == "%" and is_whole) or unit not in factors or not re.fullmatch(r"\d+(\.\d+)?", number):
        return ""
    digits = f"{float(number) * factors[unit]:.15g}"
    return f"; in digits it is {key}={digits}{f' (or {float(number) * 1024:.15g})' if unit == 'k' else ''}"


def find_foreign(key: str, value: str | None) -> str:
    """Return what a key of another program is here, as the end of a message; empty for a key of ours or of nobody."""
    head, _, leaf = key.rpartition(".")
    kinds = list_members(head) if head else [Config]
    local = {each for kind in kinds for name, field in kind.model_fields.items() for each in (name, field.alias)}
    # Of a mapping or of an entry in a list, a key elsewhere would change all the others.
    if key in GONE or leaf in local or is_mapping(head) or is_entry(head):
        return ""
    return find_key(key, value, {name.rpartition(".")[2] for name, *_ in _list_leaves()})


def reject_flags(words: Sequence[str], local: Sequence[str]) -> None:
    """Raise `UserError`, a line for each, for flags that are not ours (`local`): keys are written without dashes."""
    flags = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, _, value = word.partition("=")
        meant = [known for known in local if known == flag] or [known for known in local if known.startswith(flag)]
        if not re.fullmatch(r"--[A-Za-z][\w.-]*", flag) or len(meant) == 1:  # argparse takes the beginning of one flag
            continue
        if not value:
            value = "true" if following.startswith("--") or re.match(r"[a-z_.]+=", following) else following or "true"
        flags.append((flag, _describe_flag(flag.lstrip("-").replace("-", "_"), value)))
    raise_answers("{}: there is no such flag; {}", flags)


def raise_answers(form: str, answers: Sequence[tuple[str, str]]) -> None:
    """Raise `UserError` with a line of this form for each name and its answer; axes of the mesh are one line."""
    axes: list[str] = []  # names that are axes
    sizes: dict[str, str] = {}  # of the axes that have a number
    open_axes: list[str] = []  # those that may take the other devices
    others = []
    for name, answer in answers:
        mesh = re.match(r"here it is model\.mesh_shape=\[\[([-\d,]+)\],\[([a-z,]+)\]\]", answer)
        shape = dict(zip(mesh[2].split(","), mesh[1].split(","), strict=True)) if mesh else {}
        numbers = {axis: size for axis, size in shape.items() if size != "-1"}
        if shape and all(sizes.get(axis, size) == size for axis, size in numbers.items()):
            axes.append(name)
            sizes |= numbers
            open_axes += shape.keys() - numbers.keys()
        else:
            others.append((name, answer))
    if len(axes) > 1:
        sizes |= dict([(axis, "-1") for axis in open_axes if axis not in sizes][:1])
        in_order = [axis for axis in axis_names() if axis in sizes]
        mesh_shape = f"[[{','.join(sizes[axis] for axis in in_order)}],[{','.join(in_order)}]]"
        answers = [(", ".join(axes), f"here it is model.mesh_shape={mesh_shape}"), *others]
    if lines := [form.format(*each) for each in answers]:
        raise UserError("\n".join(lines))


def _index_last_parts(keys: list[str]) -> dict[str, str]:
    """Return keys by their last part, whatever their section; of several keys the least deep, of these the first."""
    leaves: dict[str, str] = {}
    for key in sorted(keys, key=lambda key: key.count(".")):
        leaves.setdefault(key.rpartition(".")[2], key)
    return leaves


def _describe_flag(key: str, value: str) -> str:
    """Return our words for a flag, as the end of a message."""
    valid = [name for name, *_ in _list_leaves()]
    leaves = _index_last_parts(valid)
    if key in valid:
        return f"keys are written without dashes: {key}={value}"
    if hint := find_key(key, value, leaves):
        return hint
    if key in leaves:
        return f"here it is {leaves[key]}={value}"
    if value in list_options(key):
        return f"keys are written without dashes: {key}={value}"
    if key in Config.model_fields:
        hint = find_value(key, value) or did_you_mean(value, list_options(key))
        return f"{key} takes a file of conf/{key}{hint}"
    return describe_unknown_key(key).partition("; ")[2]


def describe_unknown_key(
    key: str, variant: type[Section] | None = None, root: type[Section] = Config, value: str | None = None
) -> str:
    """Return the message for a key that does not exist, with the most similar legal key."""
    if key in GONE:
        return f"{key} is gone: {GONE[key]}"
    if key == "step" and root is not Config and "checkpoint" in root.model_fields:
        return "unknown key step; checkpoint=RUN_DIR/checkpoints/STEP is the checkpoint of a step"
    valid = [name for name, *_ in _list_leaves(root)]
    head, _, leaf = key.rpartition(".")
    if root is Config and (hint := find_foreign(key, value)):
        return f"unknown key {key}; {hint}"
    if root is Config and is_mapping(head):
        alone = f"~{head} +{head}={{{leaf}:VALUE}} to set it alone"
        return f"{head} has no {leaf} yet; write +{key}=VALUE to add it, or {alone}"
    if variant and leaf in variant.model_fields:  # the new variant has the key, the one in the config has not
        return f"{head} is changed as a whole by ++{head}={{...}}"
    members = list_members(head)
    if variant is None and len(members) == 1 and key in valid:  # the section is null here
        return f"unknown key {key}: {head} is null; set it as a whole: {head}={{{leaf}: VALUE, ...}}"
    if (variant or members) and key in valid:  # a key of another variant
        others = [find_tag(kind) for kind in members if leaf in kind.model_fields]
        solution = f"; {head}={' or '.join(others)} has {leaf}" if others else ""
        if variant is None:  # its tag was changed to one that does not exist
            return f"unknown key {key}{solution}"
        return (
            f"unknown key {key}: {head}={find_tag(variant)} has none; "
            f"its keys are {', '.join(variant.model_fields)}{solution}"
        )
    if is_entry(head):
        kinds = [variant] if variant in members else members
        valid = [f"{head}.{name}" for name in dict.fromkeys(name for kind in kinds for name in kind.model_fields)]
    # `leaves` has one key for each last part, whatever its section; `local` has those of the section that was typed.
    leaves = _index_last_parts([name for name in valid if name.rpartition(".")[2] not in SAYS_LITTLE])
    theirs = list_single_keys() if root is Config and not is_entry(head) else {}
    local = {name.rpartition(".")[2]: name for name in valid if name.rpartition(".")[0] == head}
    if not head:
        local |= {name: name for name in root.model_fields}  # `valid` has the keys of sections, and not their names
    full = {name: name for name in [*valid, *root.model_fields]}
    # What to compare, with which keys, and how similar they must be (0 to 1, as difflib counts). The first match wins:
    # the surest guesses come first, so that a right name in a wrong section is not answered with a similar one here.
    # The less a guess has to go on, the more similar its words must be.
    guesses = [
        (leaf, leaves, 1.0),  # the right name in another section
        (leaf, local, 0.7),  # a typo in the name
        ("" if leaf in SAYS_LITTLE else normalize(leaf), theirs | leaves, 0.8),  # both, or a typo in a name of theirs
    ]
    if not (head and local):
        guesses.append((key, full, 0.75))  # a typo in the section's name
    for word, choices, cutoff in guesses:
        if near := difflib.get_close_matches(word, choices, n=1, cutoff=cutoff):
            return f"unknown key {key}; did you mean {choices[near[0]]}?"
    longer = [name for name in local if head and f"_{leaf}_" in f"_{name}_"]  # data.held_out
    if len(longer) == 1:
        return f"unknown key {key}; did you mean {local[longer[0]]}?"
    if is_entry(head):
        return f"unknown key {key}; its keys are {', '.join(local)}"
    entries = "docs/config.md lists all keys" if root is Config else f"keys are {', '.join(valid)}"
    return f"unknown key {key}; {entries}"
