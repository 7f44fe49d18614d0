"""Documents: items of a source become texts, conversations, prompts or pairs, and these become tokens.

`DOCUMENTS` is the table of their kinds: what a task learns from. A row of it names the function that reads a document
and the one that makes its tokens. All of these functions are in this file.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from tunix.base.errors import UserError
from tunix.base.text import as_typed
from tunix.config import Task
from tunix.config.task import Classify, Embed, Prompted, Sft
from tunix.data.chat import (
    NO_OPTIONS,
    THOUGHTS,
    LearntTurns,
    Message,
    Options,
    Pieces,
    RefusedConversation,
    change_calls,
    join_parts,
    read_function,
)
from tunix.data.files import TOO_LONG, BadRow, Columns, Item, Limited, Rows, Source, Unit, is_longer
from tunix.data.image_processors import ImageProcessor
from tunix.data.images import IMAGE_IN_ANSWER, ImageReader, find_root, list_column, map_ahead, read_parts, take_images
from tunix.data.pieces import count_bytes
from tunix.data.tokenizer import Vocab
from tunix.data.words import count_threads

PROMPT_ROLES = {"system", "developer", "user", "tool"}  # the model learns nothing from turns of these roles
ASKING = PROMPT_ROLES - {"tool"}  # roles of turns with which no answer begins


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
    options: Options  # of the chat template


class Labelled(NamedTuple):
    """An answer to a prompt, as turns of a conversation, and whether it is desirable."""

    prompt: list[Message]
    answer: list[Message]
    label: bool
    options: Options  # of the chat template


class Example(NamedTuple):
    """A text or a conversation, and what it is: the number of its class, or a number of its own."""

    content: str | Conversation
    label: float


class Group(NamedTuple):
    """A query, the document that answers it, and documents that do not."""

    texts: list[str]


class Document(NamedTuple):
    name: str
    content: str | Conversation | Question | Pair | Labelled | Example | Group
    images: Sequence[bytes] = ()  # as shards keep them (data/images.py), in the order of their places in the turns
    source: Callable[[], str] = str  # as of an `Item`

    @property
    def text(self) -> str:
        """Text of the document without a template: what a tokenizer learns from."""
        content = self.content.content if isinstance(self.content, Example) else self.content
        if isinstance(content, str | Group):
            return content if isinstance(content, str) else "\n".join(content.texts)
        return "\n".join(text for turn in list_turns(content) for text in _list_texts(turn))


def _list_texts(turn: Message) -> list[str]:
    """Return what a template may show of a turn: its thoughts, its content, and its calls of tools as JSON."""
    thoughts = [turn[key] for key in THOUGHTS if isinstance(turn.get(key), str)][:1]
    calls = (call.get("function", call) for call in turn.get("tool_calls") or [])
    return [*thoughts, join_parts(turn["content"]), *(json.dumps(x, ensure_ascii=False, default=str) for x in calls)]


def list_turns(content: str | Conversation | Question | Pair | Labelled | Example | Group) -> list[Message]:
    """Return all turns of a document; a text has none."""
    if isinstance(content, str | Group):
        return []
    if isinstance(content, Example):
        return list_turns(content.content)
    if isinstance(content, Pair):
        return [*content.prompt, *content.chosen, *content.rejected]
    if isinstance(content, Labelled):
        return [*content.prompt, *content.answer]
    return content.messages


class LeftOut(NamedTuple):
    """An item of a source that gives no document."""

    name: str
    reason: str  # "empty", "not UTF-8", "bad row", `TOO_LONG`, `NOT_SPLIT` and `REFUSED` (data/shards.py)


def read_documents(
    source: Source, task: Task, unit: Unit, processor: ImageProcessor | None = None, with_images: bool = True
) -> Iterator[Document | LeftOut]:
    """Yield the documents of one unit in order, and a `LeftOut` in place of each item that gives none.

    `processor` is that of a model that sees. Without `with_images` the places of images alone are read. Raises
    `UserError` where a file cannot be read, or a row is bad and data.bad_rows=error.
    """
    limit = source.max_document_bytes if isinstance(source, Limited) else None
    if isinstance(source, Rows) and task.documents != "text":
        with source.naming_keys():
            _check_columns(source.columns)
    reader = None
    if processor is not None and isinstance(source, Rows):
        rules = limit or 1 << 31, source.max_image_pixels, source.image_addresses
        reader = ImageReader(processor, find_root(unit.path), *rules, only_places=not with_images)
    read = partial(_read_item, source, task, reader, DOCUMENTS[task.documents].read, limit)
    is_prompt = task.documents == "prompt" and isinstance(source, Rows)
    items = source.read_all_columns(unit) if is_prompt else source.read(unit)  # type: ignore[attr-defined]
    with source.naming_keys():
        yield from map(read, items) if reader is None else map_ahead(read, items, count_threads())


def _check_columns(columns: Columns) -> None:
    """Raise `UserError` for a column that would be left out, because others hold the conversation."""
    system, prompt, learnt = columns.system, columns.prompt, columns.learnt_turns
    if system is not None and prompt is None:
        raise UserError(
            f"data.columns.system={system} stands before data.columns.prompt, which is null: messages have it as their "
            'first turn; set data.columns.system=null, and write it there: `jq -c \'.messages = [{role: "system", '
            f"content: .{system}}}] + .messages' FILE`"
        )
    if learnt is not None and prompt is not None:
        raise UserError(
            f"data.columns.learnt_turns={learnt} is of the turns of data.columns.messages, and data.columns.prompt="
            f"{prompt} is read in their place; set one of the two to null"
        )


HALF = re.compile("[\ud800-\udfff]")  # half of a pair of surrogates: no file has one, a text of Python may


def _read_item(
    source: Source, task: Task, reader: ImageReader | None, read: Callable[..., Any], limit: int | None, item: Item
) -> Document | LeftOut:
    if item.problem == TOO_LONG:
        document: Document | LeftOut = LeftOut(item.name, TOO_LONG)
    elif isinstance(item.content, str):
        if not task.supports_text:
            raise UserError(
                f"task={task.name} needs rows with columns, of jsonl, csv, parquet or hf, or those that a function of "
                f"data=custom yields as {{column: value}}; {item.name} of data.source={source.source} is a text"
            )
        document = Document(item.name, item.content) if item.content else LeftOut(item.name, "empty")
        if isinstance(source, Rows) and HALF.search(item.content):  # of data=custom: what files hold is text
            document = LeftOut(item.name, "half of a character")
    elif isinstance(source, Rows):
        document = _read_row(source, task, item, read, reader)
    else:
        assert item.content is None
        document = LeftOut(item.name, item.problem)
    if limit and isinstance(document, Document) and is_longer(document.text, limit):
        document = LeftOut(item.name, TOO_LONG)
    return document


def _read_row(
    source: Rows, task: Task, item: Item, read: Callable[..., Any], reader: ImageReader | None
) -> Document | LeftOut:
    images: Sequence[bytes] = ()
    try:
        if not isinstance(item.content, dict):
            raise BadRow(item.problem)
        content = read(source.columns, drop_padding(source, item.content), task)
        if isinstance(content, Question):  # rewards get the row as it is
            content = content._replace(columns=content.columns | item.content)
        if content and not isinstance(content, str):
            references = take_images(list_turns(content), list_column(source.columns, item.content), reader)
            images = reader.read(references) if reader else ()
            if references and isinstance(content, Question):
                content = _drop_images(content, source.columns)
        elif content and reader and list_column(source.columns, item.content):
            raise BadRow(
                f"has images, and task={task.name} learns from texts: task=sft reads images in conversations; "
                "data.columns.images=null leaves their column out"
            )
        # Fails for text that is not UTF-8: half of a character, as JSON's "\ud83d" is.
        count_bytes(content) if isinstance(content, str) else encode_json(content)
    except (BadRow, UnicodeEncodeError, RecursionError) as error:
        if source.bad_rows == "error":
            problems = {UnicodeEncodeError: "is not UTF-8", RecursionError: "is nested too deep"}
            raise refuse_row(item, problems.get(type(error), error)) from None
        return LeftOut(item.name, "bad row")
    return Document(item.name, content, images, item.source) if content else LeftOut(item.name, "empty")


def refuse_row(row: Item | Document, problem: object) -> UserError:
    """Return the error for a row that gives no document, where data.bad_rows=error."""
    return UserError(
        f"data: {row.source() or row.name} {problem}; data.bad_rows=skip leaves such rows out and counts them"
    )


def _drop_images(question: Question, columns: Columns) -> Question:
    """Return a question whose columns, which rewards get, have the places of images and not the images."""
    kept = {name: value for name, value in question.columns.items() if name not in (columns.images, "image")}
    name = columns.messages if columns.prompt is None else columns.prompt
    if name is not None and (turns := _find_turns(kept.get(name))):
        # The row's own turns: neither those of the system, which others give, nor without the answer.
        num_asked = len(turns) - (turns[-1]["role"] == "assistant")
        kept[name] = [*question.messages[-num_asked:], *turns[num_asked:]]
    return question._replace(columns=kept)


def encode_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8. A value of a type that JSON lacks, like a date, is written as str() gives it.
    Raises `BadRow` for a key that JSON lacks, or a list within itself, of data=custom."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError) as error:
        raise BadRow(f"is not JSON ({error})") from None
    return text.encode()


def read_text(columns: Columns, row: dict[str, Any], task: Task) -> str:
    return _read_cell(columns, "text", row)


def read_conversation(columns: Columns, row: dict[str, Any], task: Task) -> Conversation | None:
    """Return a row's conversation; None if it has no answer."""
    options = _read_options(columns, row, task)
    learnt = task.learnt_turns if isinstance(task, Sft) else "assistant"
    if columns.prompt is None:
        value = _read_cell(columns, "messages", row, (str, list))
        messages = _read_messages(value, columns.messages)
        if not any(message["role"] == "assistant" for message in messages):
            return None
        if columns.learnt_turns is None and learnt == "assistant":
            _refuse_marks(_find_turns(value) or (), columns.messages, OF_MESSAGES)
        return Conversation(messages, options, _read_learnt(columns, row, len(messages)) or learnt)
    prompt = _read_turns(columns, "prompt", row, "user") or [{"role": "user", "content": ""}]
    answer = _drop_prompt(_read_turns(columns, "completion", row, "assistant"), prompt, columns.completion)
    if not any(message["role"] == "assistant" for message in answer):
        return None
    if learnt == "assistant":
        _refuse_marks(
            _find_turns(_read_cell(columns, "completion", row, (str, list))) or (), columns.completion, OF_COMPLETION
        )
    turns = [*_read_system(columns, row), *prompt]
    # A prompt may have answers of its own, which are not learnt, as in TRL.
    of_turns = [False] * len(turns) + [True] * len(answer)
    return Conversation([*turns, *answer], options, of_turns if learnt == "assistant" else learnt)


def read_prompt(columns: Columns, row: dict[str, Any], task: Task) -> Question | None:
    """Return a row's conversation up to its last answer, and its columns; None if it or its answer is empty.

    If the last turn is not the assistant's, all turns are the prompt, and the data have no answer to it. An episode
    with an environment begins after the last turn of the user: what follows is a demonstration.
    """
    assert isinstance(task, Prompted)
    answer: str | None = None
    if columns.prompt is None:
        messages = _read_messages(_read_cell(columns, "messages", row, (str, list)), columns.messages)
        if messages and messages[-1]["role"] == "assistant":
            last = messages.pop()
            if not _says_something(last):
                return None
            if isinstance(last["content"], list):
                raise BadRow(IMAGE_IN_ANSWER)
            answer = last["content"] or None  # calls alone are no text that a reward may compare with
        while task.has_environment and messages and messages[-1]["role"] in ("assistant", "tool"):
            messages.pop()
    else:
        prompt = _read_turns(columns, "prompt", row, "user")
        if prompt and prompt[-1]["role"] == "assistant":
            raise BadRow(
                f"has turns in column {columns.prompt} that end with the assistant's: an answer would be another"
            )
        messages = [*_read_system(columns, row), *prompt] if prompt else []
        answer = _read_cell(columns, "completion", row) if columns.completion in row else None
        if answer == "":
            return None
    if not messages:
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
        asks = chosen and rejected and any(turns[0]["role"] in ASKING for turns in (chosen, rejected))
        if asks or (not prompt and (chosen or rejected)):
            raise BadRow(
                f"has conversations in columns {columns.chosen} and {columns.rejected} that differ before an answer; "
                "set data.columns.prompt to the column of their prompt"
            )
    else:
        prompt = _read_turns(columns, "prompt", row, "user")
        chosen = _drop_prompt(chosen, prompt, columns.chosen)
        rejected = _drop_prompt(rejected, prompt, columns.rejected)
        prompt = [*_read_system(columns, row), *prompt]
    if not prompt:
        raise BadRow("has no prompt")
    if chosen == rejected:
        raise BadRow(f"has the same answer in columns {columns.chosen} and {columns.rejected}")
    for name, answer in ((columns.chosen, chosen), (columns.rejected, rejected)):
        if not any(map(_says_something, answer)):
            raise BadRow(f"has no answer in column {name}")
    return Pair(prompt, chosen, rejected, _read_options(columns, row, task))


def _says_something(turn: Message) -> bool:
    """Return whether a turn is an answer: a text, or calls of tools."""
    return turn["role"] == "assistant" and bool(turn["content"] or turn.get("tool_calls"))


def _drop_prompt(turns: list[Message], prompt: list[Message], column: str | None) -> list[Message]:
    """Return the turns of an answer, of which some data have the prompt's before them (UltraFeedback)."""
    answer = turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns
    if answer and (role := answer[0]["role"]) in ASKING:
        raise BadRow(
            f"begins with a turn of the {role} in column {column} that is not that of the prompt, so the model would "
            "read both; data.columns.prompt=null takes the prompt from the conversations"
        )
    if answer and prompt and prompt[-1]["role"] == answer[0]["role"] == "assistant":
        raise BadRow(
            f"begins with a turn of the assistant in column {column} behind one of the prompt, with which TRL goes on; "
            "here it is a turn of its own: write both texts into the answer"
        )
    return answer


# As files of CSV have them, and columns of pandas that have held an empty cell.
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def read_labelled(columns: Columns, row: dict[str, Any], task: Task) -> Labelled:
    """Return a row's answer with its label. Without a column for the prompt, the answer is the last turn of the
    messages."""
    if columns.prompt is None:
        messages = _read_messages(_read_cell(columns, "messages", row, (str, list)), columns.messages)
        prompt, answer, name = messages[:-1], messages[-1:], columns.messages
    else:
        prompt = _read_turns(columns, "prompt", row, "user")
        name = columns.completion
        answer = _drop_prompt(_read_turns(columns, "completion", row, "assistant"), prompt, name)
        prompt = [*_read_system(columns, row), *prompt]
    if not prompt:
        raise BadRow("has no prompt")
    if not any(map(_says_something, answer)):
        raise BadRow(f"has no answer in column {name}")
    value = str(_read_cell(columns, "label", row, (str, bool, int, float))).lower()
    if value not in LABELS:
        raise BadRow(f"has no label in column {columns.label}: {value!r:.40} is neither true nor false")
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
        texts += _read_texts(columns, "rejected", row)[: task.negatives]
    if not all(isinstance(text, str) and text for text in texts):
        raise BadRow("has a query or a document that is empty, or no text")
    return Group(texts)


def _read_texts(columns: Columns, meaning: str, row: dict[str, Any]) -> list[Any]:
    """Return the texts in a column: one of them, a list, or that list as JSON; none where it is empty."""
    value = _read_cell(columns, meaning, row, (list, str))
    texts = _parse_list(value)
    if isinstance(value, list) or (texts is not None and all(isinstance(text, str) for text in texts)):
        return texts
    return [value] if value else []


def _parse_list(value: Any) -> Any:
    """Return a cell that is a list, or a list in JSON, as in a CSV file; None of other text."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return value if isinstance(value, list) else None


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
    """Return the variables that the chat template gets for a row: task.chat_template_kwargs, and schemas of tools. The
    tools are those of the row's column, else those of the task's environment."""
    options = dict(task.chat_template_kwargs or {})
    tools: Any = task.describe_tools()
    if columns.tools is not None and row.get(columns.tools):
        tools = _parse_list(row[columns.tools])
        if tools is None or not all(isinstance(tool, dict) for tool in tools):
            raise BadRow(f"has no list of tools in column {columns.tools}")
    return options | {"tools": tools} if tools else options


def drop_padding(source: Rows, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose columns that are read have no nulls of Arrow (`Rows.has_padded_objects`)."""
    if not source.has_padded_objects:
        return row
    return row | {name: _drop_nulls(row[name]) for name in source.columns.list_names() if name in row}


def _drop_nulls(value: Any) -> Any:
    """Return a value without keys that are None."""
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _read_learnt(columns: Columns, row: dict[str, Any], num_turns: int) -> list[bool] | None:
    """Return for each turn whether it is learnt, as the row's column says; None without a column."""
    if columns.learnt_turns is None:
        return None
    value = _parse_list(_read_cell(columns, "learnt_turns", row, (str, list)))
    if value is None or len(value) != num_turns or not all(each in (0, 1) for each in value):
        raise BadRow(
            f"has no list of {num_turns} times true or false, one for each turn, in column {columns.learnt_turns}"
        )
    return list(map(bool, value))


def _read_turns(columns: Columns, meaning: str, row: dict[str, Any], role: str) -> list[Message]:
    """Return the turns in a column: a list of {role, content}, that list as JSON, or text, which is one turn of `role`.
    Without a column for the prompt, text is refused: it does not say where the answer begins."""
    name = getattr(columns, meaning)
    if isinstance(row.get(name), dict):
        raise BadRow(f"holds one turn in column {name}, not a list; `jq -c '.{name} |= [.]' FILE` writes it so")
    value = _read_cell(columns, meaning, row, (str, list))
    if (turns := _find_turns(value)) is not None:
        return _read_messages(turns, name)
    if columns.prompt is None:
        raise BadRow(f"has text in column {name}, not a conversation; set data.columns.prompt to the prompt's column")
    return [{"role": role, "content": value}] if value else []


def _find_turns(value: Any) -> Any:
    """Return the turns of a cell that is a list, or a list of turns in JSON; None of other text."""
    turns = _parse_list(value)
    if isinstance(value, list) or (turns and all(isinstance(turn, dict) and "role" in turn for turn in turns)):
        return turns
    return None


SHAREGPT = (
    ', but of {from, value}; `jq -c \'.COLUMN |= map({role: ({human: "user", gpt: "assistant"}[.from] // .from), '
    "content: .value})' FILE` writes it so"
)


def _read_messages(value: Any, column: str | None) -> list[Message]:
    """Return the turns of a list of {role, content}, or of such a list written as JSON."""
    try:
        turns = json.loads(value) if isinstance(value, str) else value
        messages = [_read_message(turn, column) for turn in turns]
    except BadRow:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_sharegpt = isinstance(value, list) and value and isinstance(value[0], dict) and "from" in value[0]
        hint = SHAREGPT.replace("COLUMN", str(column)) if is_sharegpt else ""
        raise BadRow(f"has no list of {{role, content}} in column {column}{hint}") from None
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


MARKS = ("weight", "train", "training")  # of a turn that OpenAI's files, or those of axolotl, leave out of the loss
OF_MESSAGES = (
    "data.columns.learnt_turns=learnt reads which turns are learnt, as `jq -c '.learnt = [.COLUMN[] | .role == "
    '"assistant" and .MARK]\' FILE` writes them'
)
OF_COMPLETION = (
    "data.columns.learnt_turns reads which turns of a column of messages are learnt: write the prompt's turns and "
    "these into one"
)


def _refuse_marks(turns: Iterable[Any], column: str | None, way_out: str) -> None:
    """Raise `BadRow` if a turn of the assistant says that it is not learnt: it would be learnt."""
    for turn in turns:
        for key in MARKS:
            if turn["role"] == "assistant" and turn.get(key) == 0:
                mark = json.dumps(turn[key])
                way_out = way_out.replace("COLUMN", str(column)).replace("MARK", f"{key} != {mark}")
                raise BadRow(f"has a turn with {key}={mark} in column {column}; {way_out}")


TEMPLATE_KEYS = ("name", "tool_calls", "tool_call_id", *THOUGHTS)  # of a message, beside its role and content


def _read_message(turn: Any, column: str | None) -> Message:
    """Return a turn with the keys that templates read.

    Raises:
        BadRow: its calls of tools cannot be read.
        KeyError: it has no role, or neither a content nor calls of tools.
    """
    message = {key: turn[key] for key in TEMPLATE_KEYS if turn.get(key) is not None}
    content = turn.get("content") if "tool_calls" in message else turn["content"]
    if "tool_calls" in message:
        try:
            message |= change_calls({"tool_calls": list(message["tool_calls"])}, read_function)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise BadRow(
                f"has tool_calls in column {column} that are not a list of {{function: {{name, arguments}}}} with "
                "arguments as an object or as JSON"
            ) from None
    return {"role": turn["role"], "content": "" if content is None and "tool_calls" in message else content, **message}


# What may stand in the place of a column that a row lacks.
OTHER_COLUMNS = {
    "messages": "; data.columns.prompt=COLUMN reads a prompt, and data.columns.completion=COLUMN its answer",
    "prompt": "; data.columns.prompt=null takes the prompt from the conversations",
}


def _read_cell(columns: Columns, meaning: str, row: dict[str, Any], kinds: tuple[type, ...] = (str,)) -> Any:
    """Return the row's value in the column that data.columns names for `meaning`; None is read as an empty value."""
    name = getattr(columns, meaning)
    if name is None:
        raise UserError(f"data.columns.{meaning} is not set; name the column that holds it")
    if name not in row:
        listed = ", ".join(map(str, row))
        marks = [mark for mark in ";|\t" if len(row) == 1 and mark in listed]  # of a table with another delimiter
        hint = f' ("data.delimiter={marks[0]!r}" splits them)' if marks else ""
        hint += OTHER_COLUMNS.get(meaning, "")
        raise BadRow(f"has no column {name} (data.columns.{meaning}); its columns are {listed}{hint}")
    value = row[name]
    if value is None:
        return kinds[0]()
    if not isinstance(value, kinds):
        raise BadRow(f"holds {type(value).__name__} in column {name}, not text")
    return value


# Documents become tokens, as a shard keeps them.

NO_ANSWERS, NO_SPANS = np.zeros(0, bool), np.zeros(0, np.int64)


class Encoded(NamedTuple):
    """One document as a shard keeps it.

    text           <bos> text <eos>
    conversation   the turns by the chat template; `answers` marks the tokens of the assistant
    prompt         the turns by the chat template, up to where an answer begins
    pair           prompt, chosen answer, prompt, rejected answer; `split` is where the second prompt begins
    labelled       prompt, answer, prompt, answer of another document; `split` as of a pair
    comparison     as a pair, with <eos> behind each answer, which is never read: `answers` marks it alone
    example        <bos> text, or the turns by the chat template; then <eos>, as of a comparison
    group          <bos> text <eos> for each text; then <eos>, as of a comparison
    """

    text_bytes: int
    tokens: Sequence[np.ndarray]  # parts of its tokens, one after the other
    # All fields below are empty where the kind of documents has no such thing.
    answers: np.ndarray = NO_ANSWERS  # [T] bool of a conversation or a pair: which tokens are answers
    split: int = 0  # of a pair: where the rejected answer begins, with its prompt
    label: float = False  # of a labelled answer: true for a desirable one; example: class or number; group: its texts
    row: bytes = b""  # of a prompt: its text and its columns, as JSON
    images: Sequence[bytes] = ()  # in the order of their places
    # [images, 2] int64: the first soft token of each, and the place behind its last; counted from the document's first.
    image_spans: np.ndarray = NO_SPANS
    further: Sequence["Encoded"] = ()  # of a conversation: its further sequences, each a document of its own


def encode_texts(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    before, after = (np.array([token], vocab.dtype) for token in (vocab.bos or 0, vocab.eos))
    texts = [str(document.content) for document in documents]
    # With this, "<eos>" within a text is text, and does not end the document.
    vocab.backend.encode_special_tokens = True
    for text, tokens in zip(texts, vocab.encode(texts), strict=True):
        parts = (tokens, after) if vocab.bos is None else (before, tokens, after)
        yield Encoded(count_bytes(text), parts)


SequenceWithImages = tuple[Pieces, Sequence[bytes]]  # a sequence of a conversation with the images of its turns


def encode_conversations(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield the first sequence of each conversation, with the others in its field `further`."""
    return _encode_sequences(vocab, [_split_conversation(vocab, document) for document in documents])


def encode_whole(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield each conversation as one sequence with all of its turns, for a model that reads it and learns no answer."""
    return _encode_sequences(vocab, [[_keep_all(vocab, document)] for document in documents])


def _encode_sequences(vocab: Vocab, conversations: list[list[SequenceWithImages]]) -> Iterator[Encoded]:
    # Here "<eos>" comes from the chat template, and is the special token.
    vocab.backend.encode_special_tokens = False
    # A conversation is tokenized in pieces, cut where an answer begins and ends: no token belongs to both sides.
    all_sequences = (sequence for sequences in conversations for sequence in sequences)
    encoded = vocab.encode_sequences(
        [vocab.expand_images([text for text, _ in pieces], images) for pieces, images in all_sequences]
    )
    for sequences in conversations:
        first, *further = [_join_pieces(vocab, pieces, next(encoded), images) for pieces, images in sequences]
        yield first._replace(further=further)


def _keep_all(vocab: Vocab, document: Document) -> SequenceWithImages:
    """Return a conversation as one sequence, with the turns behind the last answer, and all of its images."""
    content: Conversation = document.content  # type: ignore[assignment]
    # One whose answers cannot be told from what asks for them is refused here too: a template may show a part of them.
    pieces, _ = _split_conversation(vocab, document)[-1]
    text, begin = vocab.chat.render(content.messages, options=content.options), "".join(text for text, _ in pieces)
    if not text.startswith(begin):
        return [(text, False)], document.images
    return [*pieces, (text[len(begin) :], False)], document.images


def _split_conversation(vocab: Vocab, document: Document) -> list[SequenceWithImages]:
    """Return the sequences of a conversation."""
    content: Conversation = document.content  # type: ignore[assignment]
    vocab.chat.check_tools(content.messages, content.options)
    vocab.chat.check_roles(content.messages, content.options)
    vocab.chat.check_thoughts(*content)
    sequences = vocab.chat.split_answers(*content)
    if vocab.images is None or not document.images:
        return [(pieces, document.images) for pieces in sequences]
    mark, num_images = vocab.images.mark, len(document.images)
    counts = [sum(text.count(mark) for text, _ in pieces) for pieces in sequences]
    if counts[-1] < num_images:  # turns behind the last answer that is learnt may have the others
        whole = vocab.chat.render(content.messages, options=content.options)
        if whole.count(mark) != num_images:  # refused where tokens take the places of images
            counts[-1] = num_images
    return [(pieces, document.images[:count]) for pieces, count in zip(sequences, counts, strict=True)]


def _join_pieces(vocab: Vocab, pieces: Pieces, tokens: list[np.ndarray], images: Sequence[bytes]) -> Encoded:
    """Return one sequence of a conversation, by the tokens [T] of each of its pieces; those of answers are marked."""
    answers = [np.full(len(own), is_answer) for own, (_, is_answer) in zip(tokens, pieces, strict=True)]
    learnt = np.concatenate([NO_ANSWERS, *answers])
    image_spans = vocab.find_images(tokens, images)
    if len(image_spans):  # with learnt_turns=all
        learnt &= ~vocab.is_of_image(np.concatenate(tokens))
    size = sum(count_bytes(text) for text, _ in pieces)
    return Encoded(size, tokens, learnt, images=images, image_spans=image_spans)


def encode_prompts(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield the tokens up to where an answer begins, as `tunix.generate` asks for one."""
    questions: list[Question] = [document.content for document in documents]  # type: ignore[misc]
    for question in questions:
        vocab.chat.check_tools(question.messages, question.options)
        vocab.chat.check_roles(question.messages, question.options)
    texts = [vocab.chat.render(question.messages, True, question.options) for question in questions]
    vocab.backend.encode_special_tokens = False
    expanded = (vocab.expand_images([text], each.images) for text, each in zip(texts, documents, strict=True))
    encoded = vocab.encode([text for (text,) in expanded])
    for text, tokens, question, document in zip(texts, encoded, questions, documents, strict=True):
        turns = {"messages": question.messages} if document.images else {}
        row = encode_json({"text": text, "columns": question.columns, **turns})
        image_spans = vocab.find_images([tokens], document.images)
        yield Encoded(count_bytes(text), (tokens,), row=row, images=document.images, image_spans=image_spans)


def encode_pairs(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield both answers, each after the prompt. Earlier answers in the prompt are not learnt."""
    pairs: list[Pair] = [document.content for document in documents]  # type: ignore[misc]
    return _encode_pairs(vocab, pairs, [document.images for document in documents])


def encode_comparisons(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield both answers, each after the prompt, and behind each one a token that only marks its end.

    A sequence does not read the last token of a document, and here the model has to read the whole answer.
    """
    for pair in encode_pairs(vocab, documents):
        tokens = np.concatenate(pair.tokens)
        halves = [_with_end(vocab, half) for half in (tokens[: pair.split], tokens[pair.split :])]
        answers = np.concatenate([mark for _, mark in halves])
        image_spans = pair.image_spans + (pair.image_spans >= pair.split)
        pair = pair._replace(tokens=[half for half, _ in halves], answers=answers, image_spans=image_spans)
        yield pair._replace(split=pair.split + 1)


def encode_examples(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield each text or conversation with a token behind it that only marks its end, as in `encode_comparisons`."""
    examples: list[Example] = [document.content for document in documents]  # type: ignore[misc]
    is_text = [isinstance(example.content, str) for example in examples]
    contents = [document._replace(content=document.content.content) for document in documents]  # type: ignore[union-attr]
    texts = encode_texts(vocab, [each for each, own in zip(contents, is_text, strict=True) if own])
    turns = encode_whole(vocab, [each for each, own in zip(contents, is_text, strict=True) if not own])
    # Both set what the tokenizer takes for a special token, so one of them ends before the other begins.
    texts, turns = iter(list(texts)), iter(list(turns))
    for example, own in zip(examples, is_text, strict=True):
        encoded = next(texts if own else turns)
        tokens = np.concatenate(encoded.tokens[:-1] if own else encoded.tokens)  # a text has <eos> already
        tokens, mark = _with_end(vocab, tokens)
        yield encoded._replace(tokens=(tokens,), answers=mark, label=example.label)


def encode_groups(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield the texts of each group, with a token behind each that only marks its end, as in `encode_comparisons`.

    A text ends with <eos> before that token: the model reads it, and its vector may be that of the text.
    """
    groups: list[Group] = [document.content for document in documents]  # type: ignore[misc]
    texts = encode_texts(vocab, [Document("", text) for group in groups for text in group.texts])
    for group in groups:
        encoded = [next(texts) for _ in group.texts]
        ended = [_with_end(vocab, np.concatenate(each.tokens)) for each in encoded]
        yield Encoded(
            sum(each.text_bytes for each in encoded),
            [tokens for tokens, _ in ended],
            np.concatenate([mark for _, mark in ended]),
            label=len(encoded),
        )


def _with_end(vocab: Vocab, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [T + 1] with <eos> behind them, and a mark [T + 1] bool of that token."""
    with_end = np.append(tokens, np.array(vocab.eos, tokens.dtype))
    return with_end, np.arange(len(with_end)) == len(tokens)


def encode_labelled(vocab: Vocab, documents: list[Document]) -> Iterator[Encoded]:
    """Yield each answer after its prompt, and after the same prompt the answer of an earlier document.

    Such pairs of a prompt and an unrelated answer measure how far a model has moved (KTO). It is the answer of the
    document before, or of the one as many documents before as follow one another with the same prompt:

        prompts                 a  b  c        a  a  b  b  b  c
        answer of document      2  0  1        3  4  5  0  1  2

    The first documents get the answers of the last, as in TRL; documents come about `BATCH_CHARS` of text at a time
    (data/shards.py).
    """
    answers: list[Labelled] = [document.content for document in documents]  # type: ignore[misc]
    distance = max(len(list(equal)) for _, equal in groupby(answers, key=lambda each: each.prompt))
    distance = distance if distance < len(answers) else 1  # there is one prompt alone
    others = [answers[number - distance] for number in range(len(answers))]
    pairs = [
        Pair(own.prompt, own.answer, other.answer, own.options) for own, other in zip(answers, others, strict=True)
    ]
    images = [document.images for document in documents]
    for own, encoded in zip(answers, _encode_pairs(vocab, pairs, images), strict=True):
        yield encoded._replace(label=own.label)


def _encode_pairs(vocab: Vocab, pairs: list[Pair], images: Sequence[Sequence[bytes]]) -> Iterator[Encoded]:
    """Yield pairs; `images` are those of each prompt, which both of its answers follow."""
    both = []
    for pair, own in zip(pairs, images, strict=True):
        for answer in (pair.chosen, pair.rejected):
            learnt = [False] * len(pair.prompt) + [True] * len(answer)
            both.append(Document("", Conversation([*pair.prompt, *answer], pair.options, learnt), own))
    encoded = encode_conversations(vocab, both)
    # One iterator given twice: each pair takes two of its items, the chosen answer and the rejected one.
    for chosen, rejected in zip(encoded, encoded, strict=True):
        if chosen.further or rejected.further:
            raise RefusedConversation(
                "task.chat_template: an answer of a pair has several turns of the assistant, which the template shows "
                "in another form when the conversation goes on; give another template"
            )
        split = sum(map(len, chosen.tokens))
        yield Encoded(
            chosen.text_bytes + rejected.text_bytes,
            (*chosen.tokens, *rejected.tokens),
            np.concatenate([chosen.answers, rejected.answers]),
            split,
            images=(*chosen.images, *rejected.images),
            image_spans=np.concatenate([chosen.image_spans, rejected.image_spans + split]),
        )


# Kinds of documents.


class DocumentKind(NamedTuple):
    """A kind of the data of a task, from a row of a source to the batches of a step.

    source -> row or text -- read --> document -- encode --> arrays of a shard -- load --> corpus -- feed --> batches

    `load` and `feed` are named as text, because they stand above this file.
    """

    read: Callable[[Columns, dict[str, Any], Task], Any]  # from a row to a document; None: the row has none
    encode: Callable[[Vocab, list[Document]], Iterator[Encoded]]
    # The name of this kind in the hashes that name folders of the cache: that of the task that first used the kind.
    # Another name would tokenize every corpus again.
    in_hashes: str
    arrays: tuple[str, ...] = ()  # that a shard has beside tokens and starts (data/shards.py)
    load: str = "tunix.data.dataset:load_corpus"  # function that reads all data of a config
    feed: str = "tunix.feeds:CorpusFeed"  # class, a `Feed` (feeds.py): batches, and held-out data
    asks_peers: bool = False  # the processes exchange data outside of the step to make a batch: rewards, for example


DOCUMENTS = {
    "text": DocumentKind(read_text, encode_texts, "pretrain"),
    "conversation": DocumentKind(read_conversation, encode_conversations, "sft", ("answers",)),
    "prompt": DocumentKind(read_prompt, encode_prompts, "prompt", ("rows", "row_ends"),
                           "tunix.data.prompts:load_prompts", "tunix.feeds:PromptFeed", asks_peers=True),
    "pair": DocumentKind(read_pair, encode_pairs, "pair", ("answers", "splits"),
                         feed="tunix.feeds:PairFeed", asks_peers=True),
    "labelled": DocumentKind(read_labelled, encode_labelled, "labelled with other prompts",
                             ("answers", "splits", "labels"), feed="tunix.feeds:PairFeed", asks_peers=True),
    "comparison": DocumentKind(read_pair, encode_comparisons, "comparison", ("answers", "splits")),
    "example": DocumentKind(read_example, encode_examples, "example with all turns", ("answers", "label_values")),
    "group": DocumentKind(read_group, encode_groups, "group", ("answers", "label_values")),
}  # fmt: skip
