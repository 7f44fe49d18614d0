"""Files of a source: found in a fixed order, opened, cut into units of work, and read as rows."""

import csv
import glob
import gzip
import hashlib
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PrivateAttr

from tunix.base.buckets import BUCKETS, explain, explaining, filesystem, find_version, is_address
from tunix.base.config_types import Count, Section, Share
from tunix.base.errors import UserError
from tunix.base.files import describe_missing, expand_home
from tunix.data.pieces import count_bytes

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".zst": zstd.open}
NOT_READ = (".tar", ".tgz", ".zip", ".7z", ".bz2", ".xz", ".lz4")  # also with an ending of `PACKED` behind them


@dataclass(frozen=True)
class Unit:
    """A piece of work for one process: a file, a range of its bytes or rows, or a range of a data set's rows."""

    name: str  # path below the source's root, the same on every machine
    path: str
    start: int  # first byte, row group or row
    stop: int  # one after the last
    size: int  # bytes on disk
    version: str  # changes when the content may have changed; a file's time of change

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.name, self.start, self.stop, self.size, self.version)).encode()).hexdigest()


def find_files(paths: tuple[str, ...], extensions: tuple[str, ...]) -> list[Unit]:
    """Return the files that the paths, addresses, folders and globs name, each once.

    A folder stands for the files in it whose names end with one of the extensions.

    Raises:
        UserError: a path that does not exist, or no file at all.
    """
    found: dict[Path | str, Unit] = {}  # by real path: a file that two patterns name is read once
    endings = (*extensions, *(ending + packed for ending in extensions for packed in PACKED))
    for pattern in paths:
        if is_address(pattern):
            found.update(_find_objects(pattern, endings))
            continue
        path = expand_home(pattern)
        # A path that exists is not a glob, even if its name has a * or a [ in it.
        matches = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not matches:
            raise UserError(f"data.paths: {describe_missing(pattern)}")
        for match in matches:
            for path in [match] if match.is_file() else _find_below(match, endings):
                if path.is_file():
                    name = path.name if match.is_file() else path.relative_to(match).as_posix()
                    found.setdefault(path.resolve(), make_file_unit(path, name))
    if not found:
        raise UserError(f"data.paths={list(paths)}: no file that ends in {', '.join(extensions)} (data.extensions)")
    return list(found.values())


def _find_below(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """Yield what is below a folder and ends so, in order; then what is below each folder that a link in it names."""
    folders, listed = [folder], set()
    for each in folders:  # it grows by the links that are found
        if (real := each.resolve()) in listed:  # a link back to a folder above it
            continue
        listed.add(real)
        paths = sorted(each.rglob("*"))  # which follows no links
        yield from (path for path in paths if path.name.endswith(endings))
        folders += [path for path in paths if path.is_symlink() and path.is_dir()]


def _find_objects(pattern: str, endings: tuple[str, ...]) -> dict[str, Unit]:
    """Return the objects that an address, a folder or a glob of a bucket names, by address."""
    files, scheme = filesystem(pattern, "data.paths"), pattern.partition("://")[0]
    with explaining(pattern, "data.paths"):
        # Web servers do not list their files, and * or ? may be part of a web address: only buckets have globs.
        if glob.has_magic(pattern) and scheme in BUCKETS:
            matches = files.glob(pattern, detail=True)
            if not matches:
                raise FileNotFoundError(pattern)
        else:
            matches = {pattern: files.info(pattern)}
        units: dict[str, Unit] = {}
        for match, info in sorted(matches.items()):
            below, root = {match: info}, match.rpartition("/")[0]
            if info["type"] == "directory":
                entries = files.find(match, detail=True)
                below = {name: each for name, each in sorted(entries.items()) if name.endswith(endings)}
                root = files._strip_protocol(match.rstrip("/"))  # as the names in `entries` are: without s3://
            for name, each in below.items():
                address = name if is_address(name) else f"{scheme}://{name}"
                size = each.get("size") or 0  # a web server may not say it; then the file is not split
                version = find_version(address, each, "data.paths")
                units[address] = Unit(name.removeprefix(f"{root}/"), address, 0, size, size, version)
    return units


def make_file_unit(path: Path, name: str) -> Unit:
    """Describe a whole file as one unit."""
    stat = path.stat()
    return Unit(name, str(path), 0, stat.st_size, stat.st_size, str(stat.st_mtime_ns))


def is_packed(path: str) -> bool:
    return Path(path).suffix in PACKED


@contextmanager
def open_unpacked(path: str) -> Iterator[IO[bytes]]:
    """Open a file for reading its bytes, unpacked.

    Raises:
        UserError: an archive, or an error while the file is opened or read; the message names the file.
    """
    stem, ending = os.path.splitext(path)
    if (stem if ending in PACKED else path).lower().endswith(NOT_READ):  # the head of a tar file is text
        raise UserError(
            f"data: {path} is of a form that is not read; unpack it, or pack each file in it as .gz or .zst"
        )
    try:
        with ExitStack() as stack:
            if is_address(path):
                file = io.BufferedReader(stack.enter_context(filesystem(path, "data.paths").open(path, "rb")))
            else:
                file = stack.enter_context(open(path, "rb"))
            unpack = PACKED.get(Path(path).suffix)
            # An empty file is not unpacked: zstd would call it cut off.
            yield stack.enter_context(unpack(file, "rb")) if unpack is not None and file.peek(1) else file
    except (EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError) as error:
        if "too much memory" in str(error):  # of zstd: the window that `--long=31` packs with takes 2 GiB
            raise UserError(
                f"data: {path} was packed with a window of more than 128 MiB (zstd --long); write it anew: "
                f"zstd -dc --long=31 {path} | zstd > OTHER.zst"
            ) from None
        raise UserError(f"data: {path} is damaged or ends early: {error}") from None
    except OSError as error:
        reason = explain(error) if is_address(path) else error.strerror or error
        raise UserError(f"data: cannot read {path}: {reason}") from None


def name_line(path: str, offset: int) -> str:
    """Return the path, and the number from 1 of the line that begins at byte `offset` of the unpacked file."""
    with open_unpacked(path) as file:
        lines = 1
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            lines, offset = lines + block.count(b"\n"), offset - len(block)
    return f"{path}, line {lines},"


# An empty path would be the current folder: "$X" gives one where X is not set.
Paths = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class Item(NamedTuple):
    """One thing that a source read: a text, a row with named columns, or the problem that it met."""

    name: str  # does not depend on where a unit begins: its hash decides whether the document is held out
    content: str | dict[str, Any] | None
    problem: str = ""  # why there is no content
    source: Callable[[], str] = str  # file and line for a message; a function, since counting lines takes time


class BadRow(ValueError):
    """A row that gives no document; the text says why, and begins with a verb: "has no column text"."""


Pixels = Annotated[Count, Field(le=178_956_970)]  # of an image: Pillow refuses larger ones

TOO_LONG = "longer than data.max_document_bytes"  # the problem of an item that is not read to its end
# The problem of a table whose columns of Arrow do not become values of Python: years beyond 9999, unknown time zones.
NO_TIME = "has a date or a time that Python does not have; write its column as text, or without it"


def is_longer(text: str, limit: int) -> bool:
    """Return whether a text has more than `limit` bytes in UTF-8."""
    return len(text) > limit or (len(text) * 4 > limit and count_bytes(text) > limit)


class Limited(Section):
    """Part of the keys of a source whose documents come from outside."""

    max_document_bytes: Count | None
    """Longest document: a longer one is left out and counted, and read no further. Of a JSON line all bytes count, of a
    row of Parquet those of the columns that are read, of other files the text, unpacked. A part of it that the
    tokenizer cannot cut, like a word, may have a 64th of it, or 1 MiB. null is no limit. Tokenizing a document takes
    about 4 times its bytes of memory."""


class Source(Section):
    """Origin of documents. A subclass adds its name, its keys, and the methods `units` and `read`.

    Both methods must give the same on every machine and in every run, in the same order: the position of a run in its
    data is one number (data/batches.py), which means the same documents only then.
    """

    if TYPE_CHECKING:  # each subclass declares the one value that it takes
        source: str

    _key: str = PrivateAttr("data")  # its place in the config, for messages; a mixture and evaluation.sets set theirs

    held_out_fraction: Share
    """Share of documents kept for evaluation, chosen by a hash of file name and place; at least one if not 0."""

    @contextmanager
    def naming_keys(self) -> Iterator[None]:
        """Name the keys of this source, in a `UserError` of the block, by where they stand in the config."""
        try:
            yield
        except UserError as error:
            keys = "|".join(type(self).model_fields)
            raise UserError(re.sub(rf"(?<![\w./-])data(?=: |\.(?:{keys})\b)", self._key, str(error))) from None

    def units(self, unit_bytes: int) -> list[Unit]:
        """List what there is to read, cut into units of about `unit_bytes` where a file can be cut."""
        raise NotImplementedError

    def read(self, unit: Unit) -> Iterator[Item]:
        """Yield the documents of one unit in order."""
        raise NotImplementedError

    def try_out(self) -> None:
        """Run the user's own code once, if the source has any; raise `UserError` if it does not work."""


class Files(Source):
    """Documents in files; those that end in .gz or .zst are unpacked."""

    source: str  # stands here, and again in each subclass, since the order of keys is part of the names of caches
    """Where documents come from."""
    paths: Paths
    """Files, folders, globs, or addresses of them: s3://, gs://, https://."""
    extensions: tuple[str, ...]
    """Endings of the files that are read below a folder, also with .gz or .zst behind them."""

    def units(self, unit_bytes: int) -> list[Unit]:
        return find_files(self.paths, self.extensions)


class Texts(Limited, Source):
    """Documents that are texts, each a file of its own."""

    source: str  # here as in `Files`
    """Where documents come from."""
    decode_errors: Literal["skip", "error", "replace"]
    """A file that is not UTF-8: left out and counted, refused, or read with U+FFFD."""

    def read(self, unit: Unit) -> Iterator[Item]:
        limit = self.max_document_bytes
        with open_unpacked(unit.path) as file:
            data = file.read(-1 if limit is None else limit + 1)
        if limit is not None and len(data) > limit:
            yield Item(unit.name, None, TOO_LONG)
            return
        try:
            text = data.decode("utf-8-sig", errors="replace" if self.decode_errors == "replace" else "strict")
        except UnicodeDecodeError as error:
            if self.decode_errors == "error":
                raise UserError(
                    f"data: {unit.path} is not UTF-8 (byte {error.start}); "
                    "data.decode_errors=skip leaves such files out, replace reads them"
                ) from None
            yield Item(unit.name, None, "not UTF-8")
        else:
            del data  # memory of a long file
            yield Item(unit.name, text)


class TextFiles(Files, Texts):
    """Text files, one document each; those that end in .gz or .zst are unpacked."""

    source: Literal["text"]
    """Where documents come from."""


class Columns(Section):
    """Names of the columns that hold a document. The task says which are read: pretrain the text; sft the prompt and
    its completion if `prompt` is set, else the messages; dpo and reward the prompt, chosen and rejected; kto what
    sft reads, and the label; classify the prompt if it is set, else the text or the messages, and the label;
    embed the prompt, chosen and rejected, as texts."""

    text: str | None
    """Column of a document's text."""
    messages: str | None
    """Column of a conversation: a list of {role, content}, or that list as JSON."""
    prompt: str | None
    """Column of what the user says: text, or a list of turns (not of task=embed)."""
    completion: str | None
    """Column of the answer to it: text, or a list of turns (of task=grpo text alone)."""
    system: str | None
    """Column of the system prompt before `prompt`; null for none."""
    chosen: str | None
    """Column of the better of two answers: text, or the list of its turns; without `prompt`, the whole conversation."""
    rejected: str | None
    """Column of the worse of two answers, in the same form."""
    label: str | None
    """Column that says whether an answer is desirable: true or false; of task=classify, the class or the number of a
    document."""
    tools: str | None
    """Column of the tools of a conversation: a list of JSON schemas, or that list as JSON. A row need not have it."""
    learnt_turns: str | None
    """Column that says for each turn of `messages` whether it is learnt: a list of true and false; null: as
    task.learnt_turns says."""
    images: str | None
    """Column of a row's images, for models that see: paths below the folder of the file, bytes, {bytes, path}; one
    or a list. Where it is `images` and a row has none, the column `image` is read."""

    def list_names(self) -> list[str]:
        """Return the names of all columns that may be read."""
        names = [name for name in self.model_dump().values() if name]
        return [*names, "image"] if self.images == "images" else names


class Rows(Limited, Source):
    """Documents that are rows of a table."""

    has_padded_objects: ClassVar[bool] = False  # Arrow gives each object the keys of all, with null where it had none

    columns: Columns
    """Which columns are read."""
    bad_rows: Literal["error", "skip"]
    """A row that is not JSON, lacks a column, or holds no text or conversation in it, or a conversation that the chat
    template refuses, or an image that is missing or broken: refused, or left out and counted."""
    max_image_pixels: Pixels
    """Pixels of the largest image, before it is resized: a small file may unpack to more than the memory has."""
    image_addresses: tuple[str, ...]
    """Beginnings of the addresses that rows may name for images: [https://example.org/photos/]."""

    def read_all_columns(self, unit: Unit) -> Iterator[Item]:
        """Yield the rows of one unit with every column, also those that `columns` does not name."""
        return self.read(unit)

    def refuse_twice(self, path: str, names: list[str]) -> None:
        """Raise `UserError` if a table has two columns of a name that is read: only the last one would be."""
        if twice := [name for name in self.columns.list_names() if names.count(name) > 1]:
            raise UserError(f"data: {path} has column {twice[0]} more than once; rename all but one")


class Jsonl(Files, Rows):
    """Files with one JSON object a line; those that end in .gz or .zst are unpacked."""

    source: Literal["jsonl"]

    def units(self, unit_bytes: int) -> list[Unit]:
        """List ranges of about `unit_bytes` bytes. A packed file is one unit: it is unpacked from its first byte on."""
        units = []
        for file in find_files(self.paths, self.extensions):
            if is_packed(file.path) or file.size <= unit_bytes:
                units.append(file)
                continue
            for start, stop in pairwise([*range(0, file.size, unit_bytes), file.size]):
                units.append(replace(file, start=start, stop=stop, size=stop - start))
        return units

    def read(self, unit: Unit) -> Iterator[Item]:
        """Read the lines whose first byte lies in the unit, so each line belongs to one unit.

        file   {"text": ...}\\n{"text": ...}\\n{"text": ...}\\n
        units  |----- first -----|------ second -----|        the second line belongs to the first unit
        """
        limit = self.max_document_bytes
        with open_unpacked(unit.path) as file:
            if unit.start:
                # Start one byte early: if that byte ends a line, `skip_line` reads only it, and no line is lost.
                file.seek(unit.start - 1)
                skip_line(file, unit.stop - unit.start + 1)  # no further: a line of many units is read once
            # A packed file is one unit, whose `stop` counts packed bytes: it says nothing about the lines. Neither does
            # a `stop` of 0, of a web server that does not say how long the file is.
            all_lines = is_packed(unit.path) or not unit.stop
            begin = file.tell() if unit.start else 0
            while (all_lines or begin < unit.stop) and (line := file.readline(-1 if limit is None else limit + 1)):
                offset, begin = begin, begin + len(line)
                is_truncated = limit is not None and len(line) > limit and not line.endswith(b"\n")
                if not is_truncated and line.isspace():
                    continue
                name, source = f"{unit.name}@{offset}", partial(name_line, unit.path, offset)
                if is_truncated:
                    begin += skip_line(file)
                    yield Item(name, None, TOO_LONG, source)
                    continue
                of_list = LIST if offset == 0 and line.lstrip().startswith(b"[") else ""
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield Item(name, None, of_list or f"is not JSON ({str(error).split(': line')[0]})", source)
                else:
                    problem = "" if isinstance(row, dict) else of_list or "is not a JSON object"
                    del line  # memory of a long one
                    yield Item(name, None if problem else row, problem, source)


# What is wrong with a file of JSON that holds one list of all rows.
LIST = "begins a list; each row has to be an object on a line of its own, as `jq -c '.[]' FILE` writes them"


def skip_line(file: IO[bytes], limit: int = sys.maxsize) -> int:
    """Read up to the end of the line, or `limit` bytes, and return the number of bytes, without keeping them."""
    size = 0
    while block := file.readline(min(1 << 20, limit - size)):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


_read_tab = BeforeValidator(lambda text: "\t" if text == r"\t" else text)


class Csv(Files, Rows):
    """Comma-separated files with a header line; those that end in .gz or .zst are unpacked."""

    source: Literal["csv"]
    delimiter: Annotated[str, Field(min_length=1, max_length=1), _read_tab]
    r"""Character between columns; \t is a tab."""

    def read(self, unit: Unit) -> Iterator[Item]:
        limit = self.max_document_bytes or 2**31 - 1
        csv.field_size_limit(limit)  # the module refuses cells of more than 128 KiB by default
        with open_unpacked(unit.path) as file:
            text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
            # Bytes that are not UTF-8 become surrogates, which `documents` finds row by row.
            lines = _read_short_lines(text, unit.path, limit)
            table, begin = csv.DictReader(lines, delimiter=self.delimiter, strict=True), 1
            try:
                head = list(table.fieldnames or ())
                self.refuse_twice(unit.path, head)
                for number, row in enumerate(table):
                    name, source = f"{unit.name}@{number}", partial("{}, line {},".format, unit.path, table.line_num)
                    if None in row or None in row.values():
                        yield Item(name, None, f"does not have the {len(head)} columns of the header line", source)
                    else:
                        yield Item(name, row, "", source)
                    begin = table.line_num + 1
            except csv.Error as error:  # where the next row begins is not known, so this row cannot be skipped
                if "field limit" in str(error):
                    raise _too_long_cell(unit.path, begin) from None
                raise UserError(
                    f"data: {unit.path}, line {begin}, is not CSV ({error}); close the quotes around its cells, and "
                    "write each quote within a cell twice"
                ) from None


def _read_short_lines(text: IO[str], path: str, limit: int) -> Iterator[str]:
    """Yield the lines of a text; raises `UserError` for one of more than `limit` characters, which is not read."""
    number = 0
    while line := text.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise _too_long_cell(path, number)
        yield line


def _too_long_cell(path: str, line: int) -> UserError:
    # Where the next row begins is not known, so this row cannot be left out.
    return UserError(
        f"data: {path}, line {line}, has a cell that is {TOO_LONG}; close the quotes around its cells, or raise the key"
    )
