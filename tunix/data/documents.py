"""What a source read, as documents of a task: a text, or the turns of a conversation."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tunix.base.errors import UserError
from tunix.config import Task
from tunix.sources import Columns, Item, Rows, Source
from tunix.sources.files import Unit
from tunix.tokenizer.chat import Message

ASKING = {"system", "developer", "user", "tool"}  # roles of which nothing is learnt


class Document(NamedTuple):
    name: str
    content: str | list[Message]


class LeftOut(NamedTuple):
    """A place in a source that gives no document."""

    name: str
    reason: str  # empty, not UTF-8, bad row


def read_documents(cfg: Source, task: Task, unit: Unit) -> Iterator[Document | LeftOut]:
    """Documents of one unit in order, and what had to be left out.

    Raises:
        UserError: a file that cannot be read, or a bad row where those are refused.
    """
    for item in cfg.read(unit):
        if isinstance(item.content, str):
            if task.documents == "conversation":
                raise UserError(
                    f"task={task.name} needs conversations: rows of jsonl, csv, parquet or hf, "
                    f"not data.source={cfg.source}"
                )
            yield Document(item.name, item.content) if item.content else LeftOut(item.name, "empty")
        elif isinstance(cfg, Rows):
            yield _of_row(cfg, task, item)
        else:
            assert item.content is None
            yield LeftOut(item.name, item.problem)


class BadRow(ValueError):
    """What is wrong with a row."""


def _of_row(cfg: Rows, task: Task, item: Item) -> Document | LeftOut:
    try:
        if not isinstance(item.content, dict):
            raise BadRow(item.problem)
        content = CONTENT[task.documents](cfg.columns, item.content)
        json.dumps(content, ensure_ascii=False).encode()
    except (BadRow, UnicodeEncodeError) as error:
        if cfg.bad_rows == "error":
            said = "is not UTF-8" if isinstance(error, UnicodeEncodeError) else error
            raise UserError(
                f"data: {item.where()} {said}; data.bad_rows=skip leaves such rows out and counts them"
            ) from None
        return LeftOut(item.name, "bad row")
    return Document(item.name, content) if content else LeftOut(item.name, "empty")


def _text(columns: Columns, row: dict[str, Any]) -> str:
    return _cell(columns, "text", row)


def _conversation(columns: Columns, row: dict[str, Any]) -> list[Message]:
    if columns.prompt is None:
        return _messages(_cell(columns, "messages", row, (str, list)), columns.messages)
    turns = [("user", _cell(columns, "prompt", row)), ("assistant", _cell(columns, "completion", row))]
    if columns.system is not None and (system := _cell(columns, "system", row)):
        turns.insert(0, ("system", system))
    return [{"role": role, "content": content} for role, content in turns] if turns[-1][1] else []


def _messages(value: Any, column: str | None) -> list[Message]:
    try:
        turns = json.loads(value) if isinstance(value, str) else value
        messages = [{"role": str(turn["role"]), "content": turn["content"]} for turn in turns]
    except (ValueError, TypeError, KeyError):
        raise BadRow(f"has no list of {{role, content}} in column {column}") from None
    if not all(isinstance(message["content"], str) for message in messages):
        raise BadRow(f"has a content in column {column} that is not text")
    roles = {message["role"] for message in messages}
    if "assistant" not in roles and (others := roles - ASKING):
        raise BadRow(f"has role {min(others)} in column {column} and no assistant, whose turns are the answers")
    return messages if "assistant" in roles else []


def _cell(columns: Columns, meaning: str, row: dict[str, Any], kinds: tuple[type, ...] = (str,)) -> Any:
    """The row's value of a column; None in it reads as nothing."""
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


CONTENT: dict[str, Callable[[Columns, dict[str, Any]], Any]] = {"text": _text, "conversation": _conversation}
