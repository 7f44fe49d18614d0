"""Continue prompts, or answer them with chat=true: `python -m tunix.generate checkpoint=RUN_DIR|HF_DIR prompt=...`."""

import base64
import csv
import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from tunix.base.digests import hash_texts
from tunix.base.errors import UserError, escape_controls, mask_values
from tunix.base.files import (
    describing_refusal,
    expand_home,
    find_writable,
    parse_json,
    read_json,
    read_line,
    write_whole,
)
from tunix.base.progress import announcing
from tunix.config import Generate
from tunix.config.command_line import run_command
from tunix.config.saved_runs import find_run
from tunix.data.chat import join_parts
from tunix.data.image_slots import find_image_prompts
from tunix.data.images import list_references
from tunix.data.thoughts import split_thought
from tunix.data.tokenizer import decode, decode_behind, read_chat
from tunix.inference.engine import Answer
from tunix.inference.pretrained import Pretrained, find_checkpoint, load_language_model, reject_nan
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
    rows, file = peers.on_main(lambda: _open_files(command), "reading the prompts") or ([], None)
    source = command.checkpoint, command.dtype, command.mesh_shape, command.weights
    model = load_language_model(*source, family=command.family, adapter=command.adapter, mtp=command.by_mtp)
    speaker = Speaker(model, command)
    if command.prompt is None and command.input is None:
        _converse(speaker, command)
        return
    num_rows, num_answered = peers.agree([len(rows), file.num_rows if file else 0], "number of prompts")
    if num_answered:
        peers.print_progress(f"output={command.output} has {num_answered:,} answers already: going on behind them")
    for start in range(num_answered, num_rows, command.batch_size):
        batch = rows[start : start + command.batch_size]

        def read(batch: list[Row] = batch, start: int = start) -> list[Prompt]:
            return [speaker.read(row, start + number) for number, row in enumerate(batch, 1)]

        prompts = [Prompt(*each) for each in peers.decide(read, "reading the prompts of a batch")]
        work = f"answering prompts {start + 1} to {start + len(prompts)} of {num_rows}"
        with announcing(work, peers.print_progress):
            answers = speaker.answer(prompts, command.seed, start)
        answered = [
            row | {"prediction": text, "log_probability": sum(answer.log_probabilities)}
            for row, (text, answer) in zip(batch, answers, strict=False)  # only process 0 has rows
        ]
        peers.on_main(partial(_deliver, file, answered, start), "writing the answers")
    if file:
        file.finish()


def _deliver(file: "AnswerFile | None", answered: list[Row], start: int) -> None:
    if file:
        file.add(answered)
        return
    if start:
        print("---")
    show(*(row["prediction"] for row in answered), sep="\n---\n")


def show(*texts: str, sep: str = "\n") -> None:
    """Print texts of a model: as they are into a file or a pipe, and on a terminal without orders to it."""
    print(*(map(escape_controls, texts) if sys.stdout.isatty() else texts), sep=sep, flush=True)


def _open_files(command: Generate) -> tuple[list[Row], "AnswerFile | None"]:
    """Return the rows with the prompts, and the file that gets the answers, None where they are printed."""
    if command.input is None:
        rows: list[Row] = [{command.column: command.prompt}]
    else:
        rows = _read_rows(expand_home(command.input), command.column)
    if command.output is None:
        return rows, None
    output = expand_home(command.output)
    if command.input is not None and output.exists() and output.samefile(expand_home(command.input)):
        raise UserError(f"output={output} would take the place of the prompts, which are in it; name another file")
    return rows, AnswerFile(output, rows, _describe(command))


# Keys of which the answers do not depend.
NEUTRAL = {"input", "output", "batch_size", "cache_gib", "mesh_shape"}


def _describe(command: Generate) -> Row:
    """Return what the answers follow from, beside the prompts."""
    info = mask_values(command.model_dump(mode="json", exclude=NEUTRAL))
    if run := find_run(command.checkpoint):  # which may train on
        info["checkpoint"] = str(find_checkpoint(run[0] / "checkpoints", run[1]))
    return info


class AnswerFile:
    """The file `output`: rows of the input with their answers, whole batches at a time.

    OUTPUT.unfinished beside it says, until all answers are there, how many there are and what they follow from. With
    it, a start after a kill goes on behind them. A prompt that has no answer yet may be another one.

    Raises:
        UserError: the file cannot be written, or has answers of another command that did not come to its end.
    """

    def __init__(self, path: Path, rows: list[Row], info: Row):
        if path.suffix not in FORMATS:
            raise UserError(f"output={path} must end in {' or '.join(FORMATS)}")
        find_writable("output", str(path))  # now, and not after hours
        self.path, self.note = path, path.with_name(f"{path.name}.unfinished")
        # JSON rows may differ in their columns.
        self.columns = list(dict.fromkeys([*(name for row in rows for name in row), "prediction", "log_probability"]))
        self.info = info | {"columns": self.columns if path.suffix == ".csv" else None}
        self.rows, self.digest = rows, ""  # of the prompts that have answers: one behind them may be mended
        self.num_rows = self.num_bytes = 0
        if not (self.note.exists() and path.exists()):
            return
        found = read_json(self.note)
        before, counts = found.get("info"), [found.get(name, -1) for name in ("num_rows", "num_bytes")]
        if not isinstance(before, dict) or not all(type(count) is int and count >= 0 for count in counts):
            raise UserError(
                f"{self.note} is damaged: it does not say how many answers there are; remove it to replace them"
            )
        self.num_rows, self.num_bytes = counts
        self._digest(rows[: self.num_rows])
        differing = [key for key, value in self.info.items() if before.get(key) != value]
        differing += ["prompts"] if found.get("digest") != self.digest else []
        differing += ["length"] if path.stat().st_size < self.num_bytes else []
        if differing:
            raise UserError(
                f"output={path} has {self.num_rows:,} answers of a command that did not come to its end, and differs "
                f"in {' and '.join(differing)}; name another file, or remove {self.note} to replace them"
            )

    def _digest(self, rows: list[Row]) -> None:
        for row in rows:
            self.digest = hash_texts(self.digest, json.dumps(row, sort_keys=True))

    def add(self, rows: list[Row]) -> None:
        """Write the next rows. Rows that the disk refuses are printed."""
        data = FORMATS[self.path.suffix](rows, self.columns, self.num_rows == 0).encode("utf-8", "backslashreplace")
        with describing_refusal(f"output={self.path}", ": the answers are printed as lines of JSON"):
            try:
                with self.path.open("r+b" if self.num_rows else "wb") as file:
                    if self.num_rows:
                        file.seek(self.num_bytes)
                        file.truncate()  # a kill may have left a part of rows
                    file.write(data)
            except OSError:
                print(*map(json.dumps, rows), sep="\n")  # they have taken hours, perhaps
                with suppress(OSError):
                    os.truncate(self.path, self.num_bytes)
                raise
        self._digest(self.rows[self.num_rows : self.num_rows + len(rows)])
        self.num_rows, self.num_bytes = self.num_rows + len(rows), self.num_bytes + len(data)
        note = {"num_rows": self.num_rows, "num_bytes": self.num_bytes, "digest": self.digest, "info": self.info}
        with describing_refusal(str(self.note)):
            write_whole(self.note, json.dumps(note, indent=2) + "\n")

    def finish(self) -> None:
        """Remove the note: all answers are there."""
        self.note.unlink(missing_ok=True)


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


def _format_csv(rows: list[Row], columns: list[str], with_head: bool) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    if with_head:
        writer.writeheader()
    for row in rows:  # a value of JSON that is no text or number is JSON again
        nested = {name: value for name, value in row.items() if isinstance(value, dict | list | bool)}
        writer.writerow(row | {name: json.dumps(value, ensure_ascii=False) for name, value in nested.items()})
    return text.getvalue()


FORMATS: dict[str, Callable[[list[Row], list[str], bool], str]] = {  # (rows, columns, whether they are the first)
    ".csv": _format_csv,
    ".jsonl": lambda rows, columns, with_head: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
}


if __name__ == "__main__":
    sys.exit(run_command(Generate, generate))
