"""Rows of tables in files: JSON lines, CSV, Parquet."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from tunix.base.buckets import filesystem, is_address
from tunix.base.errors import UserError
from tunix.base.section import Section
from tunix.sources.files import Unit, find_files, find_line_number, is_packed, open_unpacked, split_unit
from tunix.sources.source import Item, Paths, Source


class Columns(Section):
    """Names of the columns that hold a document. The task says which are read: pretrain the text; sft the prompt and
    its completion if `prompt` is set, else the messages; dpo the prompt, chosen and rejected."""

    text: str | None
    """Column of a document's text."""
    messages: str | None
    """Column of a conversation: a list of {role, content}, or that list as JSON."""
    prompt: str | None
    """Column of what the user says."""
    completion: str | None
    """Column of the answer to it."""
    system: str | None
    """Column of the system prompt before it; null for none."""
    chosen: str | None
    """Column of the better of two answers: text, or the list of its turns; without `prompt`, the whole conversation."""
    rejected: str | None
    """Column of the worse of two answers, in the same form."""


class Rows(Source):
    """Documents that are rows of a table."""

    columns: Columns
    """Which columns are read."""
    bad_rows: Literal["error", "skip"]
    """A row that is not JSON, lacks a column, or holds no text or conversation in it: refused, or left out and
    counted."""

    def read_all_columns(self, unit: Unit) -> Iterator[Item]:
        """Yield the rows of one unit with every column, also those that `columns` does not name."""
        return self.read(unit)


class Jsonl(Rows):
    """Files with one JSON object a line; those that end in .gz or .zst are unpacked."""

    source: Literal["jsonl"]
    """Where documents come from."""
    paths: Paths
    """Files, folders, globs, or addresses of them: s3://, gs://, https://."""
    extensions: tuple[str, ...]
    """Endings of the files that are read below a folder, also with .gz or .zst behind them."""

    def units(self, unit_bytes: int) -> list[Unit]:
        return [part for file in find_files(self.paths, self.extensions) for part in split_unit(file, unit_bytes)]

    def read(self, unit: Unit) -> Iterator[Item]:
        """Read the lines whose first byte lies in the unit, so each line belongs to one unit.

        file   {"text": ...}\\n{"text": ...}\\n{"text": ...}\\n
        units  |----- first -----|------ second -----|        the second line belongs to the first unit
        """
        with open_unpacked(unit.path) as file:
            if unit.start:
                # Start one byte early: if that byte ends a line, `readline` reads only it, and no line is lost.
                file.seek(unit.start - 1)
                file.readline()
            # A packed file is one unit, whose `stop` counts packed bytes: it says nothing about the lines. Neither does
            # a `stop` of 0, of a web server that does not say how long the file is.
            all_lines = is_packed(unit.path) or not unit.stop
            begin = file.tell() if unit.start else 0
            while (all_lines or begin < unit.stop) and (line := file.readline()):
                here, begin = begin, begin + len(line)
                if not line.strip():
                    continue
                name, where = f"{unit.name}@{here}", partial(_name_line, unit.path, here)
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield Item(name, None, f"is not JSON ({str(error).split(': line')[0]})", where)
                else:
                    problem = "" if isinstance(row, dict) else "is not a JSON object"
                    yield Item(name, None if problem else row, problem, where)


def _name_line(path: str, offset: int) -> str:
    return f"{path}, line {find_line_number(path, offset)},"


class Csv(Rows):
    """Comma-separated files with a header line; those that end in .gz or .zst are unpacked."""

    source: Literal["csv"]
    """Where documents come from."""
    paths: Paths
    """Files, folders, globs, or addresses of them: s3://, gs://, https://."""
    extensions: tuple[str, ...]
    """Endings of the files that are read below a folder, also with .gz or .zst behind them."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)]
    """Character between columns."""

    def units(self, unit_bytes: int) -> list[Unit]:
        return find_files(self.paths, self.extensions)

    def read(self, unit: Unit) -> Iterator[Item]:
        csv.field_size_limit(2**31 - 1)  # the module refuses cells of more than 128 KiB by default
        with open_unpacked(unit.path) as file:
            text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
            # Bytes that are not UTF-8 become surrogates, which `documents` finds row by row.
            table, begin = csv.DictReader(text, delimiter=self.delimiter, strict=True), 1
            try:
                head = table.fieldnames or ()
                if twice := [name for name in self.columns.model_dump().values() if list(head).count(name) > 1]:
                    raise UserError(f"data: {unit.path} has column {twice[0]} more than once; rename all but one")
                for number, row in enumerate(table):
                    name, where = f"{unit.name}@{number}", partial("{}, line {},".format, unit.path, table.line_num)
                    if None in row or None in row.values():
                        yield Item(name, None, f"does not have the {len(head)} columns of the header line", where)
                    else:
                        yield Item(name, row, "", where)
                    begin = table.line_num + 1
            except csv.Error as error:  # where the next row begins is not known, so this row cannot be skipped
                raise UserError(
                    f"data: {unit.path}, line {begin}, is not CSV ({error}); close the quotes around its cells, and "
                    "write each quote within a cell twice"
                ) from None


class Parquet(Rows):
    """Parquet files (needs pyarrow, of the extra `hf`)."""

    source: Literal["parquet"]
    """Where documents come from."""
    paths: Paths
    """Files, folders, globs, or addresses of them: s3://, gs://, https://."""
    extensions: tuple[str, ...]
    """Endings of the files that are read below a folder."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """List the row groups of all files; `start` and `stop` count groups."""
        units = []
        for file in find_files(self.paths, self.extensions):
            metadata = _open_parquet(file.path).metadata
            for group in range(metadata.num_row_groups):
                size = metadata.row_group(group).total_byte_size
                units.append(replace(file, start=group, stop=group + 1, size=size))
        return units

    def read(self, unit: Unit) -> Iterator[Item]:
        """Read the columns that `columns` names, and no others: they may be large."""
        return self._read_columns(unit, [name for name in self.columns.model_dump().values() if name])

    def read_all_columns(self, unit: Unit) -> Iterator[Item]:
        return self._read_columns(unit, None)

    def _read_columns(self, unit: Unit, asked: list[str] | None) -> Iterator[Item]:
        """Yield the rows of a row group with the columns that are asked for; None asks for all."""
        file = _open_parquet(unit.path)
        present = file.schema_arrow.names
        wanted = present if asked is None else [name for name in asked if name in present]
        try:
            rows = file.read_row_group(unit.start, columns=wanted or None).to_pylist()
        except (OSError, ValueError) as error:
            raise UserError(f"data: {unit.path} is damaged or ends early: {str(error).splitlines()[0]}") from None
        for number, row in enumerate(rows):
            # If none of the columns is there, the row has their names alone: an error message lists them.
            place = f"row {number} of row group {unit.start},"
            content = row if wanted else dict.fromkeys(present)
            yield Item(f"{unit.name}@{unit.start}.{number}", content, "", partial("{}, {}".format, unit.path, place))


def _open_parquet(path: str) -> Any:
    """Open a `pyarrow.parquet.ParquetFile`."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError("data.source=parquet needs pyarrow: pip install 'tunix-trainer[hf]'") from None
    try:
        return parquet.ParquetFile(filesystem(path, "data.paths").open(path, "rb") if is_address(path) else path)
    except (OSError, ValueError) as error:
        raise UserError(f"data: {path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
