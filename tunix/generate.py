"""Continue or answer prompts: `python -m tunix.generate checkpoint=RUN_DIR|HF_DIR prompt=...`."""

import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunix.base.disk import read_json
from tunix.base.errors import UserError
from tunix.cli import command
from tunix.config import Generate
from tunix.inference.pretrained import Pretrained, load_pretrained
from tunix.inference.sampling import Answer, Sampling
from tunix.tokenizer.vocabulary import read_chat

Row = dict[str, Any]


def generate(cfg: Generate) -> None:
    """Answer one prompt, a file of them, or a user at the terminal."""
    rows = [{cfg.column: cfg.prompt}] if cfg.input is None else _read(Path(cfg.input).expanduser(), cfg.column)
    write = None if cfg.output is None else _writer(Path(cfg.output).expanduser())
    model = load_pretrained(cfg.checkpoint, cfg.dtype, cfg.mesh_shape, cfg.weights)
    speaker = Speaker(model, cfg)
    if cfg.prompt is None and cfg.input is None:
        _converse(speaker, cfg)
        return
    try:
        for start in range(0, len(rows), cfg.batch_size):
            part = rows[start : start + cfg.batch_size]
            answers = speaker.answer([_message(row, cfg) for row in part], cfg.seed + start)
            for row, answer in zip(part, answers, strict=True):
                row["prediction"], row["log_probability"] = speaker.text(answer), sum(answer.log_probabilities)
    finally:  # what is answered is kept, whatever ends it
        answered = [row for row in rows if "prediction" in row]
        if write and answered:
            write(answered)
    if not write:
        print(*(row["prediction"] for row in rows), sep="\n" if cfg.input is None else "\n---\n")


class Speaker:
    """A model that takes text and gives text."""

    def __init__(self, model: Pretrained, cfg: Generate):
        if model.tokenizer is None:
            raise UserError(f"checkpoint={cfg.checkpoint} has no tokenizer.json")
        self.model, self.cfg, self.tokenizer = model, cfg, model.tokenizer
        self.template = read_chat(model.tokenizer_files, cfg.chat_template) if cfg.chat else None
        stop = [*stop_ids(model), *(self._id(word) for word in cfg.stop)]
        self.how = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p, tuple(stop))

    def answer(self, prompts: list[str] | list[list[Row]], seed: int) -> list[Answer]:
        """An answer to each text, or to each conversation."""
        return self.model.sample([self._encode(prompt) for prompt in prompts], self.how, seed)

    def text(self, answer: Answer) -> str:
        tokens = answer.tokens[:-1] if answer.stopped else answer.tokens
        return self.tokenizer.decode(tokens)

    def _encode(self, prompt: str | list[Row]) -> list[int]:
        if not isinstance(prompt, str):
            assert self.template is not None
            text = self.template.render(prompt, add_generation_prompt=True)
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        vocabulary = self.model.vocabulary
        if vocabulary is None or self.model.files is not None:
            return self.tokenizer.encode(prompt).ids
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids  # as its documents were
        return ids if vocabulary.bos is None else [vocabulary.bos, *ids]

    def _id(self, word: str) -> int:
        index = self.tokenizer.token_to_id(word)
        if index is None:
            raise UserError(f"stop={word} is not a token of the tokenizer")
        return index


def stop_ids(model: Pretrained) -> list[int]:
    """As generation_config.json or config.json say; of a run, the token that ends a document too."""
    own = [] if model.vocabulary is None else [model.vocabulary.eos]
    for file in (model.files / name for name in ("generation_config.json", "config.json")) if model.files else ():
        said = read_json(file).get("eos_token_id") if file.is_file() else None
        if said is not None:
            return sorted({*own, *(said if isinstance(said, list) else [said])})
    return own


def _message(row: Row, cfg: Generate) -> Any:
    """The prompt of a row as the model takes it: text, or a conversation that it begins."""
    return [*_conversation(cfg), {"role": "user", "content": row[cfg.column]}] if cfg.chat else row[cfg.column]


def _conversation(cfg: Generate) -> list[Row]:
    return [] if cfg.system is None else [{"role": "system", "content": cfg.system}]


def _converse(speaker: Speaker, cfg: Generate) -> None:
    """Turn by turn at the terminal, until an empty line or the end of input."""
    messages = _conversation(cfg)
    for turn, line in enumerate(_lines()):
        messages.append({"role": "user", "content": line})
        text = speaker.text(speaker.answer([messages], cfg.seed + turn)[0])
        messages.append({"role": "assistant", "content": text})
        print(text, flush=True)


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            return
        yield line


def _read(path: Path, column: str) -> list[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = READERS.get(path.suffix, _read_text)(file, column)
    except OSError as error:
        raise UserError(f"input={path} cannot be read: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise UserError(f"input={path} cannot be read: {error}") from None
    if not rows:
        raise UserError(f"input={path} is empty")
    for number, row in enumerate(rows, 1):
        if problem := _problem(row, column):
            raise UserError(f"input={path} {problem} in row {number}; column=NAME says which column holds the prompts")
    return rows


def _problem(row: Any, column: str) -> str | None:
    """What keeps a row from being a prompt, if something does."""
    if not isinstance(row, dict):
        return "has no JSON object"
    if None in row:
        return "has more cells than columns"
    if not row.get(column):
        return f"has no {column}"
    if not isinstance(row[column], str):
        return f"has {type(row[column]).__name__} for {column}, not text,"
    return None


def _read_text(file: Any, column: str) -> list[Row]:
    return [{column: line.rstrip("\n")} for line in file if line.strip()]


def _read_csv(file: Any, column: str) -> list[Row]:
    csv.field_size_limit(2**31 - 1)
    return list(csv.DictReader(file, strict=True))


READERS = {
    ".csv": _read_csv,
    ".jsonl": lambda file, column: [json.loads(line) for line in file if line.strip()],
}


def _write_csv(file: Any, rows: list[Row]) -> None:
    columns = dict.fromkeys(name for row in rows for name in row)  # rows of JSON may have others than the first
    writer = csv.DictWriter(file, list(columns))
    writer.writeheader()
    writer.writerows(rows)


WRITERS = {
    ".csv": _write_csv,
    ".jsonl": lambda file, rows: file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
}


def _writer(path: Path) -> Any:
    """A function that writes rows; refused before the model is loaded where that could not work."""
    if path.suffix not in WRITERS:
        raise UserError(f"output={path} must end in {' or '.join(WRITERS)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"output={path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"output={path} cannot be written: it is {'a folder' if path.is_dir() else 'write-protected'}")

    def write(rows: list[Row]) -> None:
        with path.open("w", encoding="utf-8", newline="") as file:
            WRITERS[path.suffix](file, rows)

    return write


if __name__ == "__main__":
    sys.exit(command.command_line(Generate, generate))
