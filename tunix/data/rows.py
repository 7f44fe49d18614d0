"""Rows of a source: what their columns say of a text, a conversation, a prompt, a pair.

`DOCUMENTS` (documents.py) names the function here that reads the rows of each kind.
"""

import json
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from tunix.base.errors import UserError
from tunix.base.text import as_typed
from tunix.config import Task
from tunix.config.task import Classify, Embed, Prompted, Sft
from tunix.data.chat import NO_OPTIONS, LearntTurns, Message, Options
from tunix.data.files import BadRow, Columns
from tunix.data.images import read_parts

PROMPT_ROLES = {"system", "developer", "user", "tool"}  # the model learns nothing from turns of these roles


class Conversation(NamedTuple):
    """Turns with their answers."""

    messages: list[Message]
    options: Options = NO_OPTIONS  # of the chat template
    learnt: LearntTurns | list[bool] = "assistant"


class Question(NamedTuple):
    """A conversation that ends before the answer that the model is to give."""

    messages: list[Message]
    columns: dict[str, Any]  # of the row, for rewards; `answer` is the answer in the data if no column has that name
    options: Options = NO_OPTIONS  # of the chat template


class Pair(NamedTuple):
    """Two answers to one prompt, as turns of a conversation."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    options: Options = NO_OPTIONS  # of the chat template


class Labelled(NamedTuple):
    """An answer to a prompt, as turns of a conversation, and whether it is desirable."""

    prompt: list[Message]
    answer: list[Message]
    label: bool
    options: Options = NO_OPTIONS  # of the chat template


class Example(NamedTuple):
    """A text or a conversation, and what it is: the number of its class, or a number of its own."""

    content: str | Conversation
    label: float


class Group(NamedTuple):
    """A query, the document that answers it, and documents that do not."""

    texts: list[str]


def list_turns(content: Conversation | Question | Pair | Labelled | Example | Group) -> list[Message]:
    """Return all turns of a document; a text has none."""
    if isinstance(content, Group):
        return []
    if isinstance(content, Example):
        return [] if isinstance(content.content, str) else content.content.messages
    if isinstance(content, Pair):
        return [*content.prompt, *content.chosen, *content.rejected]
    if isinstance(content, Labelled):
        return [*content.prompt, *content.answer]
    return content.messages


def read_text(columns: Columns, row: dict[str, Any], task: Task) -> str:
    return _read_cell(columns, "text", row)


def read_conversation(columns: Columns, row: dict[str, Any], task: Task) -> Conversation | None:
    """Return a row's conversation; None if it has no answer."""
    options = _read_options(columns, row, task)
    learnt = task.learnt_turns if isinstance(task, Sft) else "assistant"
    if columns.prompt is None:
        messages = _read_messages(_read_cell(columns, "messages", row, (str, list)), columns.messages)
        if not any(message["role"] == "assistant" for message in messages):
            return None
        return Conversation(messages, options, _read_learnt(columns, row, len(messages)) or learnt)
    prompt, answer = _read_cell(columns, "prompt", row), _read_cell(columns, "completion", row)
    turns = [*_read_system(columns, row), {"role": "user", "content": prompt}]
    return Conversation([*turns, {"role": "assistant", "content": answer}], options, learnt) if answer else None


def read_prompt(columns: Columns, row: dict[str, Any], task: Task) -> Question | None:
    """Return a row's conversation up to its last answer, and its columns; None if it or its answer is empty.

    If the last turn is not the assistant's, all turns are the prompt, and the data have no answer to it. An episode
    with an environment begins after the last turn of the user: what follows is a demonstration.
    """
    assert isinstance(task, Prompted)
    answer: str | None
    if columns.prompt is None:
        messages = _read_messages(_read_cell(columns, "messages", row, (str, list)), columns.messages)
        answer = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
        while task.has_environment and messages and messages[-1]["role"] in ("assistant", "tool"):
            messages.pop()
    else:
        prompt = _read_cell(columns, "prompt", row)
        messages = [*_read_system(columns, row), {"role": "user", "content": prompt}] if prompt else []
        answer = _read_cell(columns, "completion", row) if columns.completion in row else None
    if not messages or answer == "":
        return None
    if task.system is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": task.system})
    columns_of_row = row if answer is None else {"answer": answer, **row}
    return Question(messages, columns_of_row, _read_options(columns, row, task))


def read_pair(columns: Columns, row: dict[str, Any], task: Task) -> Pair:
    """Return a row's prompt with its two answers.

    Without a column for the prompt, each answer is a conversation from its first turn on. The prompt is the turns with
    which both conversations begin.
    """
    chosen, rejected = (_read_turns(columns, meaning, row, "assistant") for meaning in ("chosen", "rejected"))
    if columns.prompt is None:
        alike = 0
        while alike < min(len(chosen), len(rejected)) and chosen[alike] == rejected[alike]:
            alike += 1
        prompt, chosen, rejected = chosen[:alike], chosen[alike:], rejected[alike:]
        if not prompt and (chosen or rejected):
            raise BadRow(
                f"has conversations in columns {columns.chosen} and {columns.rejected} that do not begin alike; set "
                "data.columns.prompt to the column of their prompt"
            )
    else:
        prompt = _read_turns(columns, "prompt", row, "user")
        chosen, rejected = (_drop_prompt(turns, prompt) for turns in (chosen, rejected))
        prompt = [*_read_system(columns, row), *prompt]
    if not prompt:
        raise BadRow("has no prompt")
    if chosen == rejected:
        raise BadRow(f"has the same answer in columns {columns.chosen} and {columns.rejected}")
    for name, answer in ((columns.chosen, chosen), (columns.rejected, rejected)):
        if not any(turn["role"] == "assistant" and turn["content"] for turn in answer):
            raise BadRow(f"has no answer in column {name}")
    return Pair(prompt, chosen, rejected, _read_options(columns, row, task))


def _drop_prompt(turns: list[Message], prompt: list[Message]) -> list[Message]:
    """Return the turns of an answer, of which some data have the prompt's before them (UltraFeedback)."""
    return turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns


LABELS = {"true": True, "1": True, "false": False, "0": False}  # as a CSV file has them


def read_labelled(columns: Columns, row: dict[str, Any], task: Task) -> Labelled:
    """Return a row's answer with its label. Without a column for the prompt, the answer is the last turn of the
    messages."""
    if columns.prompt is None:
        messages = _read_messages(_read_cell(columns, "messages", row, (str, list)), columns.messages)
        prompt, answer, name = messages[:-1], messages[-1:], columns.messages
    else:
        prompt = _read_turns(columns, "prompt", row, "user")
        answer, name = _drop_prompt(_read_turns(columns, "completion", row, "assistant"), prompt), columns.completion
        prompt = [*_read_system(columns, row), *prompt]
    if not prompt:
        raise BadRow("has no prompt")
    if not any(turn["role"] == "assistant" and turn["content"] for turn in answer):
        raise BadRow(f"has no answer in column {name}")
    value = str(_read_cell(columns, "label", row, (str, bool, int))).lower()
    if value not in LABELS:
        raise BadRow(f"has no label in column {columns.label}: true or false")
    return Labelled(prompt, answer, LABELS[value], _read_options(columns, row, task))


def read_example(columns: Columns, row: dict[str, Any], task: Task) -> Example | None:
    """Return a row's text or conversation with its label; None if it is empty.

    A column for the prompt, if there is one, makes a conversation of it and the completion; else the row has a text, or
    the messages of a conversation.
    """
    assert isinstance(task, Classify)
    content: str | Conversation
    if columns.prompt is not None:
        turns = [*_read_system(columns, row), *_read_turns(columns, "prompt", row, "user")]
        if columns.completion in row:
            turns += _read_turns(columns, "completion", row, "assistant")
        content = Conversation(turns, _read_options(columns, row, task))
    elif columns.text is not None and (columns.text in row or columns.messages not in row):
        content = _read_cell(columns, "text", row)
    else:
        messages = _read_messages(_read_cell(columns, "messages", row, (str, list)), columns.messages)
        content = Conversation(messages, _read_options(columns, row, task))
    if not content or (isinstance(content, Conversation) and not content.messages):
        return None
    return Example(content, _read_class(columns, row, task))


def read_group(columns: Columns, row: dict[str, Any], task: Task) -> Group:
    """Return a row's query and documents: the columns of the prompt, the chosen and the rejected answers."""
    assert isinstance(task, Embed)
    texts = [_read_cell(columns, meaning, row) for meaning in ("prompt", "chosen")]
    if task.negatives:
        wrong = _read_cell(columns, "rejected", row, (list, str))
        texts += ([wrong] if isinstance(wrong, str) else wrong)[: task.negatives]
    if not all(isinstance(text, str) and text for text in texts):
        raise BadRow("has a query or a document that is empty, or no text")
    return Group(texts)


MAX_LABEL = float(np.finfo(np.float32).max)  # shards keep labels in float32


def _read_class(columns: Columns, row: dict[str, Any], task: Classify) -> float:
    """Return the number of a row's class among task.labels, or without these the number in its column."""
    value = _read_cell(columns, "label", row, (str, bool, int, float))
    if task.labels is None:
        with suppress(ValueError, OverflowError):
            number = float("nan" if isinstance(value, bool) else value)
            if abs(number) <= MAX_LABEL:
                return number
        raise BadRow(f"has {value!r:.40} in column {columns.label}, no number; task.labels names classes")
    text = as_typed(value)
    if text not in task.labels:
        raise BadRow(f"has {text!r:.80} in column {columns.label}, which is none of task.labels={list(task.labels)}")
    return task.labels.index(text)


def _read_system(columns: Columns, row: dict[str, Any]) -> list[Message]:
    """Return the system prompt of a row as a turn; no turn if it is empty, or if no column holds one."""
    content = "" if columns.system is None else _read_cell(columns, "system", row)
    return [{"role": "system", "content": content}] if content else []


def _read_options(columns: Columns, row: dict[str, Any], task: Task) -> Options:
    """Return the variables that the chat template gets for a row: task.chat_template_kwargs, and schemas of tools.

    The tools are those of the row's column, else those of the task's environment.
    """
    options = dict(task.chat_template_kwargs or {})
    tools: Any = task.describe_tools()
    if columns.tools is not None and row.get(columns.tools):
        value = row[columns.tools]
        try:
            tools = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            tools = None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise BadRow(f"has no list of tools in column {columns.tools}")
    return options | {"tools": tools} if tools else options


def drop_nulls(value: Any) -> Any:
    """Return a value without keys that are None (`Rows.has_padded_objects`)."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _read_learnt(columns: Columns, row: dict[str, Any], num_turns: int) -> list[bool] | None:
    """Return for each turn whether it is learnt, as the row's column says; None without a column."""
    if columns.learnt_turns is None:
        return None
    value = _read_cell(columns, "learnt_turns", row, (str, list))
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        value = []
    if not isinstance(value, list) or len(value) != num_turns or not all(each in (0, 1) for each in value):
        raise BadRow(
            f"has no list of {num_turns} times true or false, one for each turn, in column {columns.learnt_turns}"
        )
    return list(map(bool, value))


def _read_turns(columns: Columns, meaning: str, row: dict[str, Any], role: str) -> list[Message]:
    """Return the turns in a column: a list of {role, content}, that list as JSON, or text, which is one turn of `role`.

    Without a column for the prompt, text is refused: it does not say where the answer begins.
    """
    value, name = _read_cell(columns, meaning, row, (str, list)), getattr(columns, meaning)
    turns: Any = value
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            turns = json.loads(value)  # a JSON list of objects: turns in a CSV file
    if isinstance(value, list) or (turns and all(isinstance(turn, dict) and "role" in turn for turn in turns)):
        return _read_messages(turns, name)
    if columns.prompt is None:
        raise BadRow(f"has text in column {name}, not a conversation; set data.columns.prompt to the prompt's column")
    return [{"role": role, "content": value}] if value else []


def _read_messages(value: Any, column: str | None) -> list[Message]:
    """Return the turns of a list of {role, content}, or of such a list written as JSON."""
    try:
        turns = json.loads(value) if isinstance(value, str) else value
        messages = [_read_message(turn) for turn in turns]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadRow(f"has no list of {{role, content}} in column {column}") from None
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = read_parts(message["content"])
        if not isinstance(message["content"], str | list):
            raise BadRow(f"has a content in column {column} that is not text")
    if not all(isinstance(message["role"], str) and message["role"] for message in messages):
        raise BadRow(f"has a role in column {column} that is not text")
    roles = {message["role"] for message in messages}
    if "assistant" not in roles and (others := roles - PROMPT_ROLES):
        raise BadRow(f"has role {min(others)} in column {column} and no assistant, whose turns are the answers")
    return messages


CALL_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")  # of a message, for templates


def _read_message(turn: Any) -> Message:
    """Return a turn with the keys that templates read.

    Raises:
        KeyError: it has no role, or neither a content nor calls of tools.
    """
    message = {key: turn[key] for key in CALL_KEYS if turn.get(key) is not None}
    content = turn.get("content") if "tool_calls" in message else turn["content"]
    if "tool_calls" in message:
        message["tool_calls"] = [_read_call(call) for call in message["tool_calls"]]
    return {"role": turn["role"], "content": "" if content is None and "tool_calls" in message else content, **message}


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object, which templates want; OpenAI's files have them as JSON."""
    function = call.get("function", call)
    if isinstance(function.get("arguments"), str):
        function = function | {"arguments": json.loads(function["arguments"].strip() or "{}")}
    return call | {"function": function} if "function" in call else function


def _read_cell(columns: Columns, meaning: str, row: dict[str, Any], kinds: tuple[type, ...] = (str,)) -> Any:
    """Return the row's value in the column that data.columns names for `meaning`; None is read as an empty value."""
    name = getattr(columns, meaning)
    if name is None:
        raise UserError(f"data.columns.{meaning} is not set; name the column that holds it")
    if name not in row:
        raise BadRow(f"has no column {name} (data.columns.{meaning}); its columns are {', '.join(map(str, row))}")
    value = row[name]
    if value is None:
        return kinds[0]()
    if not isinstance(value, kinds):
        raise BadRow(f"holds {type(value).__name__} in column {name}, not text")
    return value
