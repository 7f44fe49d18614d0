"""Continue prompts, or answer them with chat=true: `python -m tunix.generate checkpoint=RUN_DIR|HF_DIR prompt=...`."""

import base64
import csv
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from tunix.base.errors import UserError, escape_controls
from tunix.base.files import (
    STOP_SIGNALS,
    describing_refusal,
    end_by_signal,
    expand_home,
    find_writable,
    handling_signals,
    parse_json,
    read_line,
)
from tunix.base.progress import announcing
from tunix.config import Generate
from tunix.config.command_line import run_command
from tunix.data.chat import join_parts
from tunix.data.image_slots import find_image_prompts
from tunix.data.images import list_references
from tunix.data.thoughts import split_thought
from tunix.data.tokenizer import decode, decode_behind, read_chat
from tunix.inference.engine import Answer
from tunix.inference.pretrained import Pretrained, load_language_model, reject_nan
from tunix.inference.rollout import CacheBound, Request
from tunix.inference.sampling import select_sampling
from tunix.models.vision import Images
from tunix.processes import peers

Row = dict[str, Any]


def generate(command: Generate) -> None:
    """Answer one prompt, a file of prompts, or a user at the terminal.

    Where there are several processes, all draw the answers together; process 0 alone reads prompts and writes answers.
    """
    # Files first: a mistake in them is reported before a model is loaded, which takes minutes.
    rows, write = peers.on_main(lambda: _open_files(command), "reading the prompts") or ([], None)
    source = command.checkpoint, command.dtype, command.mesh_shape, command.weights
    model = load_language_model(*source, family=command.family, adapter=command.adapter, mtp=command.by_mtp)
    speaker = Speaker(model, command)
    if command.prompt is None and command.input is None:
        _converse(speaker, command)
        return
    num_rows = int(peers.agree(str(len(rows)), "number of prompts"))
    answered: list[Row] = []  # apart from `rows`, which may have a column `prediction` of their own
    with _keeping(answered, write):
        for start in range(0, num_rows, command.batch_size):
            batch = rows[start : start + command.batch_size]

            def read(batch: list[Row] = batch, start: int = start) -> str:
                return json.dumps([speaker.read(row, start + number) for number, row in enumerate(batch, 1)])

            own = peers.on_main(read, "reading the prompts of a batch") or ""
            prompts = [Prompt(*each) for each in json.loads(peers.agree(own, "prompts of a batch"))]
            work = f"answering prompts {start + 1} to {start + len(prompts)} of {num_rows}"
            with announcing(work, peers.print_progress):
                answers = speaker.answer(prompts, command.seed, start)
            for row, (text, answer) in zip(batch, answers, strict=False):  # only process 0 has rows
                answered.append(row | {"prediction": text, "log_probability": sum(answer.log_probabilities)})
    if not write and peers.is_main():
        show(*(row["prediction"] for row in answered), sep="\n" if command.input is None else "\n---\n")


def show(*texts: str, sep: str = "\n") -> None:
    """Print texts of a model: as they are into a file or a pipe, and on a terminal without orders to it."""
    print(*(map(escape_controls, texts) if sys.stdout.isatty() else texts), sep=sep, flush=True)


@contextmanager
def _keeping(answered: list[Row], write: Any) -> Iterator[None]:
    """Write the answers that exist at the end, also where an error, Ctrl-C or a stop signal ends the command."""

    def save() -> None:
        if write and answered:
            try:
                write(answered)
            except UserError:
                answered.clear()  # not tried again
                raise

    def end(number: int, frame: object) -> None:
        save()
        end_by_signal(number, frame)

    with handling_signals(STOP_SIGNALS if write else (), end):
        try:
            yield
        finally:
            save()


def _open_files(command: Generate) -> tuple[list[Row], Any]:
    """Return the rows with the prompts, and the function that writes the answers, None where they are printed."""
    if command.input is None:
        rows: list[Row] = [{command.column: command.prompt}]
    else:
        rows = _read_rows(expand_home(command.input), command.column)
        output = None if command.output is None else expand_home(command.output)
        if output is not None and output.exists() and output.samefile(expand_home(command.input)):
            raise UserError(f"output={output} would take the place of the prompts, which are in it; name another file")
    return rows, None if command.output is None else _make_writer(expand_home(command.output))


class Prompt(NamedTuple):
    """A conversation to answer, or a text to continue."""

    turns: list[Row]  # of a conversation; of a text that is to be continued one turn, whose role says nothing
    files: list[str] = []  # noqa: RUF012  files of its images, as base64


class Speaker:
    """A model with its tokenizer: it takes text or conversations, and returns answers."""

    def __init__(self, model: Pretrained, command: Generate):
        self.command = command
        if model.tokenizer is None:
            raise UserError(f"checkpoint={command.checkpoint} has no tokenizer.json")
        self.model, self.tokenizer = model, model.tokenizer
        self.sampling = select_sampling(command, model.find_stop_ids(command.stop))
        self.images = find_image_prompts(model.cfg, self.tokenizer, command.max_image_pixels)
        processor = None if self.images is None else self.images.processor
        self.bound: CacheBound | None = None
        self.template = read_chat(model.tokenizer_files, command.chat_template, processor) if command.chat else None

    def read(self, row: Row, number: int) -> Prompt:
        """Return the prompt of a row of the input, or of the command line, with the files of its images.

        Raises:
            UserError: an image that cannot be read, or one for a model that sees none.
        """
        command = self.command
        turns = [*_begin_conversation(command), {"role": "user", "content": row[command.column]}]
        if command.image is None and command.image_column is None:
            return Prompt(turns)
        key = f"image={command.image}" if command.image else f"input={command.input}, row {number}"
        if self.images is None:
            raise UserError(f"{key}: checkpoint={command.checkpoint} is no model that sees images")
        try:
            column = [command.image] if command.image else list_references(row.get(str(command.image_column)))
        except ValueError:
            raise UserError(f"{key}: column {command.image_column} has no list of images") from None
        try:
            files = self.images.read(turns, column, command.input or "")
            return Prompt(turns, [base64.b64encode(data).decode() for data in files])
        except UserError as error:
            raise UserError(f"{key}: {error}") from None

    def answer(self, prompts: list[Prompt], seed: int, first_row: int = 0) -> list[tuple[str, Answer]]:
        """Return an answer to each prompt, with its text; they draw by the seed and their row.

        The token that stops an answer is no part of its text.
        """
        encoded = [self._encode(prompt) for prompt in prompts]
        tokens, images = [ids for ids, _ in encoded], [found for _, found in encoded]
        number, length = max(enumerate(map(len, tokens), first_row + 1), key=lambda each: each[1])
        room, context = self.sampling.max_new_tokens, self.model.cfg.context_length
        if self.command.input and length + room > context:
            raise UserError(
                f"input={self.command.input}, row {number}: a prompt of {length} tokens and max_new_tokens={room} are "
                f"more than the model's context of {context}; shorten it, or lower max_new_tokens"
            )
        request = Request(tokens, 1, seed, first_row, images)
        answers = self.model.rollout(request, self.sampling, cache_gib=self.command.cache_gib, say=self._report)
        log_probs = (answer.log_probabilities for answer in answers)
        reject_nan(log_probs, self.command.checkpoint, "dtype=float32", first_row + 1)
        return [(self._decode(ids, answer), answer) for ids, answer in zip(tokens, answers, strict=True)]

    def _decode(self, prompt: list[int], answer: Answer) -> str:
        if self.template is None:  # the text of the prompt goes on
            return decode_behind(self.tokenizer, prompt[-1], answer.text_tokens)
        return decode(self.tokenizer, split_thought(self.tokenizer, answer.text_tokens, prompt)[1])

    def _report(self, bound: CacheBound) -> None:
        """Print what bounds the cache, where it is new."""
        if bound.num_pages is not None and bound != self.bound:
            peers.print_progress(f"cache: {bound.text}")
        self.bound = bound

    def _encode(self, prompt: Prompt) -> tuple[list[int], Images | None]:
        """Return the tokens of a prompt, and its images; a text without a template is continued."""
        if self.template is not None:
            options = self.model.template_options | (self.command.chat_template_kwargs or {})
            if self.template.find_dropped_role(prompt.turns, options):
                raise UserError(
                    f"system={self.command.system}: the chat template drops it; put it into the prompt, or give a "
                    "template that shows it: chat_template=FILE"
                )
            text = self.template.render(prompt.turns, add_generation_prompt=True, options=options)
            tokenize = self.model.encode_rendered
        else:
            mark = "" if self.images is None else self.images.processor.mark
            text, tokenize = join_parts(prompt.turns[-1]["content"], mark), self.model.encode
        if self.images is None:
            return tokenize(text), None
        return self.images.encode(text, [base64.b64decode(file) for file in prompt.files], tokenize)


def _begin_conversation(command: Generate) -> list[Row]:
    return [] if command.system is None else [{"role": "system", "content": command.system}]


def _converse(speaker: Speaker, command: Generate) -> None:
    """Answer turn by turn at the terminal, until an empty line or the end of input."""
    messages = _begin_conversation(command)
    for turn in count():
        line = ""
        if peers.is_main():
            with suppress(EOFError):
                line = read_line()
        line = peers.agree(line, "the next line")
        if not line.strip():
            return
        messages.append({"role": "user", "content": line})
        # The whole conversation is computed again at each turn. Another seed, or a repeated question would be answered
        # with the same noise.
        text, _ = speaker.answer([Prompt(messages)], command.seed + turn)[0]
        messages.append({"role": "assistant", "content": text})
        if peers.is_main():
            show(text)


def _read_rows(path: Path, column: str) -> list[Row]:
    """Read the rows of a file of prompts.

    Raises:
        UserError: the file cannot be read, is empty, or has a row without a prompt.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = READERS.get(path.suffix.lower(), READERS[".txt"])(file, column)
    except OSError as error:
        raise UserError(f"input={path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        kinds = ", ".join(READERS)
        raise UserError(f"input={path} is no text in UTF-8 (byte {error.start}); save it so, as {kinds}") from None
    except (ValueError, csv.Error) as error:
        raise UserError(f"input={path} cannot be read: {error}") from None
    if not rows:
        raise UserError(f"input={path} is empty")
    for number, row in enumerate(rows, 1):
        if problem := _find_problem(row, column):
            columns = f"; row {number} has the columns {', '.join(filter(None, row))}" if isinstance(row, dict) else ""
            hint = f"column=NAME says which column holds the prompts{columns}"
            raise UserError(f"input={path} {problem} in row {number}; {hint}")
    return rows


def _find_problem(row: Any, column: str) -> str | None:
    """Return why a row has no prompt; None if it has one."""
    if not isinstance(row, dict):
        return "has no JSON object"
    if None in row:
        return "has more cells than columns"
    if not row.get(column):
        return f"has no {column}"
    if not isinstance(row[column], str):
        return f"has {type(row[column]).__name__} for {column}, not text,"
    return None


def _read_csv(file: Any, column: str, delimiter: str = ",") -> list[Row]:
    csv.field_size_limit(2**31 - 1)  # the module refuses cells above 131072 characters otherwise
    rows = csv.DictReader(file, strict=True, delimiter=delimiter)
    head = list(rows.fieldnames or ())
    if twice := [name for name in head if head.count(name) > 1]:
        raise ValueError(f"its column {twice[0]} stands there more than once; rename all but one")
    return list(rows)


def _read_json_lines(file: Any, column: str) -> list[Any]:
    return [parse_json(line) for line in file if line.strip()]


def _read_json(file: Any, column: str) -> list[Any]:
    """Return the objects of a list, or those of a file with one a line."""
    text = file.read()
    return parse_json(text) if text.lstrip().startswith("[") else _read_json_lines(text.split("\n"), column)


READERS: dict[str, Callable[[Any, str], list[Any]]] = {
    ".txt": lambda file, column: [{column: line.rstrip("\r\n")} for line in file if line.strip()],
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
}


def _write_csv(file: Any, rows: list[Row]) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)  # of all rows: JSON rows may differ in their columns
    writer = csv.DictWriter(file, list(columns))
    writer.writeheader()
    writer.writerows({name: _to_cell(value) for name, value in row.items()} for row in rows)


def _to_cell(value: Any) -> Any:
    """Return what a cell of CSV has for a value of JSON: JSON again, where it is no text or number."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


WRITERS = {
    ".csv": _write_csv,
    ".jsonl": lambda file, rows: file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
}


def _make_writer(path: Path) -> Any:
    """Return a function that writes rows to a file. A file that cannot be written is refused now, not after hours."""
    if path.suffix not in WRITERS:
        raise UserError(f"output={path} must end in {' or '.join(WRITERS)}")
    find_writable("output", str(path))

    def write(rows: list[Row]) -> None:
        with describing_refusal(f"output={path}", ": the answers are printed as lines of JSON"):
            try:
                # Half of a surrogate pair, which a JSON row may have, is written as JSON's escape of it.
                with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                    WRITERS[path.suffix](file, rows)
            except OSError:
                print(*map(json.dumps, rows), sep="\n")  # they have taken hours, perhaps
                raise

    return write


if __name__ == "__main__":
    sys.exit(run_command(Generate, generate))
