"""Environments: what a model talks with in an episode of several turns. Imports no jax.

One object is made for each episode. Its class has one of two forms:

    class Game:                                              # as in gymnasium
        def reset(self, seed, **columns): return None        # or a text that follows the prompt
        def step(self, text): return observation, reward, done      # gymnasium's five values are taken too

    class Counter:                                           # as in TRL's environment_factory: public methods are tools
        def reset(self, seed, **columns): ...
        def increment(self, step: int) -> str: "Increment the counter."
        def get_reward(self) -> float: ...

`seed` is the same for all episodes of a group, and `columns` are those of the prompt's row; a method gets those that it
names. `open_environment` gives both forms one face, an `OpenEnvironment`. An observation is a text, or a list of texts,
each of which is a message; None says nothing, and the model goes on at once.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from tunix.base.dotted_path import LateCall, describe_value, import_object, is_dotted, select_named
from tunix.base.errors import UserError
from tunix.rl.rewards import MAX_SCORE
from tunix.rl.tool_parsers import Call, find_reader, keep_texts

MAX_CHARACTERS = 1_000_000  # of an observation: more is an error of the environment
NOT_TOOLS = {"reset", "step", "get_reward", "close"}


class Reply(NamedTuple):
    """Reply of an environment to a turn."""

    observations: list[str] | None  # texts of messages; None for none
    reward: float
    done: bool
    tool_errors: int = 0  # calls of tools that failed; their errors are among the observations
    calls: Sequence[tuple[str, str]] = ()  # the name and the id of the call that each observation answers


class OpenEnvironment:
    """One environment, in either form."""

    def __init__(self, environment: Any, read_calls: Callable[[str], list[Call]]):
        self.environment, self.read_calls = environment, read_calls
        self.tools = None if hasattr(self.environment, "step") else find_tools(type(environment))

    @functools.cached_property
    def schemas(self) -> list[dict[str, Any]]:
        return describe_tools(type(self.environment))

    def reset(self, seed: int, columns: Mapping[str, Any]) -> Reply:
        observation = self.environment.reset(**select_arguments(self.environment.reset, seed, columns))
        if isinstance(observation, tuple) and len(observation) == 2:  # gymnasium: an observation, and a dict about it
            observation = observation[0]
        return Reply(_read_observation(observation), 0.0, False)

    def step(self, text: str) -> Reply:
        if self.tools is None:
            return read_step(self.environment.step(text))
        calls = self.read_calls(text)
        if not calls:  # an answer without calls is the last one
            return Reply(None, self.finish(), True)
        results, num_errors = [], 0
        for call in calls:
            try:
                if call.problem:
                    raise ValueError(call.problem)
                if call.name not in self.tools:
                    raise ValueError(f"there is no tool {call.name[:100]}; the tools are {', '.join(self.tools)}")
                arguments = (keep_texts(call, self.schemas) if call.texts else call).arguments
                results.append(str(getattr(self.environment, call.name)(**arguments)))
            except (LateCall, MemoryError):  # no more time for the turn, or no room for further ones: its episode ends
                raise
            except Exception as error:  # the model reads what it did wrong
                results.append(f"error: {type(error).__name__}: {str(error)[:1000]}")
                num_errors += 1
        return Reply(_read_observation(results), 0.0, False, num_errors, [(call.name, call.id) for call in calls])

    def finish(self) -> float:
        """Return the reward at the end of an episode, also of one that a budget has ended."""
        if self.tools is None or not hasattr(self.environment, "get_reward"):
            return 0.0
        return _read_reward(self.environment.get_reward())

    def close(self) -> None:
        if callable(close := getattr(self.environment, "close", None)):
            close()


def open_environment(make: Callable[..., Any], options: Mapping[str, Any], tool_calls: str) -> OpenEnvironment:
    """Return a new environment; `tool_calls` is a row of `TOOL_CALLS`, or the dotted path of such a function."""
    return OpenEnvironment(
        make(**options), _own_reader(tool_calls) if is_dotted(tool_calls) else find_reader(tool_calls)
    )


def _own_reader(name: str) -> Callable[[str], list[Call]]:
    """Return the function of a dotted path that reads calls; its errors name it, and not the environment."""
    function = import_object(name)

    def read(text: str) -> list[Call]:
        try:
            calls = list(function(text))
        except Exception as error:
            problem = ValueError(f"task.tool_calls={name} fails: {type(error).__name__}: {error}")
            raise problem.with_traceback(error.__traceback__) from None
        for call in calls:
            if not isinstance(call, Call) or not isinstance(call.name, str) or not isinstance(call.id, str):
                found = describe_value(call)
                raise ValueError(
                    f"task.tool_calls={name} returned {found}, which is no Call whose name and id are texts"
                )
        return calls

    return read


def select_arguments(reset: Callable[..., Any], seed: int, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `reset`: the seed and the columns that it names, or all where it has **columns. Raises
    `ValueError` where the data have a column `seed`, or lack a column that `reset` names."""
    if "seed" in columns:
        raise ValueError("the data have a column seed, which is an argument of reset; rename the column")
    return select_named("reset", inspect.signature(reset).parameters.values(), {"seed": seed, **columns}, columns)


def read_step(result: Any) -> Reply:
    """Return what `step` has returned: (observation, reward, done), or gymnasium's five values. Raises `ValueError`
    where it is something else."""
    if not isinstance(result, tuple | list) or len(result) not in (3, 5):
        raise ValueError(f"step returned {describe_value(result)}, not (observation, reward, done)")
    observation, reward, *rest = result
    ends = rest[:-1] if len(result) == 5 else rest  # terminated and truncated, or done
    for end in ends:
        if type(end).__name__ not in ("bool", "bool_"):  # numpy's has either name
            raise ValueError(f"step returned {describe_value(end)} for done, not True or False")
    return Reply(_read_observation(observation), _read_reward(reward), any(map(bool, ends)))


def _read_observation(value: Any) -> list[str] | None:
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"it returned {describe_value(value)} for an observation, not a text")
    if (num_characters := sum(map(len, texts))) > MAX_CHARACTERS:
        raise ValueError(f"it returned {num_characters:,} characters for an observation; at most {MAX_CHARACTERS:,}")
    # Half of a pair of surrogates, which no tokenizer takes, becomes a question mark.
    return [str(text).encode(errors="replace").decode() for text in texts] or None


def _read_reward(value: Any) -> float:
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"it returned {describe_value(value)} for a reward, not a number") from None
    if not abs(reward) <= MAX_SCORE:  # also nan
        raise ValueError(f"it returned {reward} for a reward, and one has at most {MAX_SCORE:g}")
    return reward


# Tools of a class, as a chat template shows them to the model.


def find_tools(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the tools of a class: its public methods that have a docstring. Raises `UserError` where one of them is
    static or of the class, or returns no text because it is async or a generator."""
    tools: dict[str, Callable[..., Any]] = {
        name: method
        for name, method in inspect.getmembers(kind, lambda each: inspect.isfunction(each) or inspect.ismethod(each))
        if not name.startswith("_") and name not in NOT_TOOLS and method.__doc__
    }
    for name, method in tools.items():
        if isinstance(found := inspect.getattr_static(kind, name), staticmethod | classmethod):
            form = type(found).__name__
            raise UserError(f"the tool {name} is a {form}; give it self, or a name that begins with _ if it is no tool")
        kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
        if any(is_kind(method) for is_kind in kinds):
            raise UserError(f"the tool {name} is async or yields; write a def that returns a text")
    return tools


def describe_tools(kind: type) -> list[dict[str, Any]]:
    """Return the JSON schemas of a class's tools, in the form that chat templates take; none for one with `step`.

    The first paragraph of a docstring describes a tool, and the lines of its section `Args:` describe the parameters.

    Raises:
        UserError: a parameter has no type, or one that JSON lacks or that cannot be read; see also `find_tools`.
    """
    return [] if hasattr(kind, "step") else [_describe_tool(*item) for item in find_tools(kind).items()]


def _describe_tool(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    from pydantic import TypeAdapter  # here: processes of environments need none, and begin a third sooner

    text = inspect.getdoc(method) or ""
    descriptions, properties, required = _read_arguments(text), {}, []
    try:
        types = typing.get_type_hints(method)
    except Exception as error:  # a type as a text, of `from __future__ import annotations` too, is read here
        raise UserError(
            f"the tool {name} has a type that cannot be read: {error}; import it, and not for TYPE_CHECKING alone"
        ) from None
    for each in list(inspect.signature(method).parameters.values())[1:]:  # without self
        if each.name not in types or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            raise UserError(f"the tool {name} has a parameter {each.name} without a type; write {each.name}: int")
        try:
            schema = TypeAdapter(types[each.name]).json_schema()
        except Exception as error:  # pydantic has several kinds of errors for types that it does not know
            raise UserError(f"the tool {name} has a parameter {each.name} of a type that JSON lacks: {error}") from None
        if each.name in descriptions:
            schema["description"] = descriptions[each.name]
        properties[each.name] = schema
        if each.default is each.empty:
            required.append(each.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = " ".join(text.split("\n\n")[0].split())
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _read_arguments(text: str) -> dict[str, str]:
    """Return what the section `Args:` of a docstring says of each parameter."""
    found: dict[str, str] = {}
    name, inside = "", False
    for line in text.splitlines():
        if line.strip() == "Args:":
            inside = True
        elif inside and line.strip():
            if not line.startswith(" "):  # the next section
                break
            first, colon, rest = line.strip().partition(":")
            if colon and first.split(" ")[0].isidentifier() and (" " not in first or "(" in first):
                name = first.split(" ")[0]
                found[name] = rest.strip()
            elif name:
                found[name] += f" {line.strip()}"
    return found


def split_options(names: Collection[str], options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the options of each of several environments; {} for one that has none. Raises `ValueError` where there are
    options of another environment, or a value that is no mapping."""
    if unknown := options.keys() - set(names):
        raise ValueError(
            f"task.environment_options has options of {min(unknown)}, which is none of {', '.join(names)}; give "
            "{NAME: {...}}"
        )
    for name, part in options.items():
        if not isinstance(part, Mapping):
            raise ValueError(f"task.environment_options.{name}={part}: expected a mapping like {{OPTION: VALUE}}")
    return {name: options.get(name, {}) for name in names}


def join_tools(kinds: Mapping[str, type]) -> type:
    """Return a class that has the tools of several: a method `reset` of each is called, and rewards are added up.

    Its arguments are those of the classes, as {name: {argument: value}}.

    Raises:
        UserError: one of them has no tools, or two have a tool of one name.
    """
    owners: dict[str, str] = {}
    members: dict[str, Any] = {"replays": all(getattr(kind, "replays", True) for kind in kinds.values())}
    for name, kind in kinds.items():
        if hasattr(kind, "step"):
            raise UserError(f"task.environment: {name} has no tools, but a method step; it can only stand alone")
        for tool, method in find_tools(kind).items():
            if tool in owners:
                raise UserError(f"task.environment: {owners[tool]} and {name} both have a tool {tool}; rename one")
            owners[tool], members[tool] = name, _forward(name, tool, method)

    def __init__(self: Any, **options: Mapping[str, Any]) -> None:
        self.parts = {name: kinds[name](**part) for name, part in split_options(kinds, options).items()}

    def reset(self: Any, seed: int, **columns: Any) -> list[str] | None:
        texts = []
        for part in self.parts.values():
            found = part.reset(**select_arguments(part.reset, seed, columns))
            texts += _read_observation(found[0] if isinstance(found, tuple) else found) or []
        return texts or None

    def close(self: Any) -> None:
        with ExitStack() as stack:  # one that fails leaves no other open
            for part in self.parts.values():
                if callable(end := getattr(part, "close", None)):
                    stack.callback(end)

    def get_reward(self: Any) -> float:
        return sum(float(part.get_reward()) for part in self.parts.values() if hasattr(part, "get_reward"))

    members |= {"__init__": __init__, "reset": reset, "close": close}
    if any(map(gives_reward, kinds.values())):
        members["get_reward"] = get_reward
    return type("JoinedTools", (), members)


def _forward(name: str, tool: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a tool of the part `name`; it has the tool's types and docstring."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.parts[name], tool)(*arguments, **keywords)

    return call


def gives_reward(kind: type) -> bool:
    """Return whether an environment rewards by itself: tools without `get_reward` do not."""
    return hasattr(kind, "step") or hasattr(kind, "get_reward")
