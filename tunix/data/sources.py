"""Sources: each lists its units and reads one of them, in a fixed order. A new source is a row in `SOURCES`."""

import csv
import io
import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tunix.base.errors import UserError
from tunix.config.data import Csv, HuggingFace, Jsonl, Parquet, PythonDocstrings, PythonStdlib, Synthetic, TextFiles
from tunix.data.docstrings import module_name, questions
from tunix.data.files import Unit, find_files, line_number, opened, split, whole_file


class Item(NamedTuple):
    """What a source read at one place: a text, a row as columns, or why there is neither."""

    name: str  # the same wherever the unit begins: held-out documents are chosen by it
    content: str | dict[str, Any] | None
    problem: str = ""
    where: Callable[[], str] = str  # file and line, looked up only to be told


class Reader(NamedTuple):
    units: Callable[[Any, int], list[Unit]]  # (config, bytes in one unit, if it can be split)
    read: Callable[[Any, Unit], Iterator[Item]]


def _stdlib_files(cfg: PythonStdlib | PythonDocstrings, unit_bytes: int) -> list[Unit]:
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    ours = [name for name in names if not {"site-packages", "dist-packages"} & set(name.parts)]
    return [whole_file(root / name, name.as_posix()) for name in ours]


def _documented_files(cfg: PythonDocstrings, unit_bytes: int) -> list[Unit]:
    """The library without its own tests."""
    units = _stdlib_files(cfg, unit_bytes)
    return [unit for unit in units if not {"test", "tests", "idle_test"} & {*unit.name.split("/")}]


def _whole_files(cfg: TextFiles | Csv, unit_bytes: int) -> list[Unit]:
    return find_files(cfg.paths, cfg.extensions)


def _read_text(cfg: PythonStdlib, unit: Unit) -> Iterator[Item]:
    with opened(unit.path) as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig", errors="replace" if cfg.decode_errors == "replace" else "strict")
    except UnicodeDecodeError as error:
        if cfg.decode_errors == "error":
            raise UserError(
                f"data: {unit.path} is not UTF-8 (byte {error.start}); "
                "data.decode_errors=skip leaves such files out, replace reads them"
            ) from None
        yield Item(unit.name, None, "not UTF-8")
    else:
        yield Item(unit.name, text)


def _read_docstrings(cfg: PythonDocstrings, unit: Unit) -> Iterator[Item]:
    with opened(unit.path) as file:
        text = file.read()
    try:
        for row in questions(text, module_name(unit.name)):
            yield Item(row["name"], row, "", partial("{}, {},".format, unit.path, row["name"]))
    except SyntaxError:
        yield Item(unit.name, None, "is not Python", lambda: unit.path)


def _line_ranges(cfg: Jsonl, unit_bytes: int) -> list[Unit]:
    return [part for file in find_files(cfg.paths, cfg.extensions) for part in split(file, unit_bytes)]


def _read_jsonl(cfg: Jsonl, unit: Unit) -> Iterator[Item]:
    """Lines whose first byte is in the unit."""
    with opened(unit.path) as file:
        if unit.start:
            file.seek(unit.start - 1)
            file.readline()
        packed = unit.path.endswith((".gz", ".zst"))
        begin = file.tell() if unit.start else 0
        while (packed or begin < unit.stop) and (line := file.readline()):
            here, begin = begin, begin + len(line)
            if not line.strip():
                continue
            name, where = f"{unit.name}@{here}", partial(_line, unit.path, here)
            try:
                row = json.loads(line)
            except ValueError as error:
                yield Item(name, None, f"is not JSON ({str(error).split(': line')[0]})", where)
            else:
                problem = "" if isinstance(row, dict) else "is not a JSON object"
                yield Item(name, None if problem else row, problem, where)


def _line(path: str, offset: int) -> str:
    return f"{path}, line {line_number(path, offset)},"


def _read_csv(cfg: Csv, unit: Unit) -> Iterator[Item]:
    csv.field_size_limit(2**31 - 1)
    with opened(unit.path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")  # checked row by row
        table, begin = csv.DictReader(text, delimiter=cfg.delimiter, strict=True), 1
        try:
            head = table.fieldnames or ()
            if twice := [name for name in cfg.columns.model_dump().values() if list(head).count(name) > 1]:
                raise UserError(f"data: {unit.path} has column {twice[0]} more than once; rename all but one")
            for number, row in enumerate(table):
                name, where = f"{unit.name}@{number}", partial("{}, line {},".format, unit.path, table.line_num)
                if None in row or None in row.values():
                    yield Item(name, None, f"does not have the {len(head)} columns of the head line", where)
                else:
                    yield Item(name, row, "", where)
                begin = table.line_num + 1
        except csv.Error as error:  # where the next row begins is not known: none is skipped
            raise UserError(
                f"data: {unit.path}, line {begin}, is not CSV ({error}); close the quotes of its cells, and double "
                "those within"
            ) from None


def _row_groups(cfg: Parquet, unit_bytes: int) -> list[Unit]:
    units = []
    for file in find_files(cfg.paths, cfg.extensions):
        about = _parquet(file.path).metadata
        for group in range(about.num_row_groups):
            size = about.row_group(group).total_byte_size
            units.append(replace(file, start=group, stop=group + 1, size=size))
    return units


def _read_parquet(cfg: Parquet, unit: Unit) -> Iterator[Item]:
    file = _parquet(unit.path)
    wanted = [name for name in cfg.columns.model_dump().values() if name in file.schema_arrow.names]
    try:
        rows = file.read_row_group(unit.start, columns=wanted or None).to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(f"data: {unit.path} is damaged or ends early: {str(error).splitlines()[0]}") from None
    for number, row in enumerate(rows):
        place = f"row {number} of row group {unit.start},"
        found = row if wanted else dict.fromkeys(file.schema_arrow.names)
        yield Item(f"{unit.name}@{unit.start}.{number}", found, "", partial("{}, {}".format, unit.path, place))


def _parquet(path: str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError("data.source=parquet needs pyarrow: pip install 'tunix-trainer[hf]'") from None
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise UserError(f"data: {path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _hf_parts(cfg: HuggingFace, unit_bytes: int) -> list[Unit]:
    data = _hf_data(cfg)
    version = f"{getattr(data, '_fingerprint', '')} {cfg.revision} {data.info.version}"
    if cfg.streaming:
        return [Unit(cfg.path, cfg.path, part, part + 1, unit_bytes, version) for part in range(data.num_shards)]
    size = data.data.nbytes
    count = max(1, min(len(data), -(-size // unit_bytes)))
    cuts = [part * len(data) // count for part in range(count + 1)]
    return [Unit(cfg.path, cfg.path, start, stop, size // count, version) for start, stop in pairwise(cuts)]


def _read_hf(cfg: HuggingFace, unit: Unit) -> Iterator[Item]:
    data = _hf_data(cfg)
    rows, first = data.select(range(unit.start, unit.stop)) if not cfg.streaming else data, unit.start
    if cfg.streaming:
        rows, first = data.shard(data.num_shards, unit.start), 0
    prefix = f"{cfg.path}@{unit.start}." if cfg.streaming else f"{cfg.path}@"
    try:
        for number, row in enumerate(rows, first):
            yield Item(f"{prefix}{number}", row, "", partial("data set {}, row {},".format, cfg.path, number))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"data.path={cfg.path} ends early: {str(error).splitlines()[0]}") from None


def _hf_data(cfg: HuggingFace) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError("data.source=hf needs the datasets library: pip install 'tunix-trainer[hf]'") from None
    datasets.disable_progress_bars()
    files = list(cfg.data_files) if cfg.data_files else None
    try:
        return datasets.load_dataset(
            cfg.path, cfg.name, split=cfg.split, revision=cfg.revision, data_files=files, streaming=cfg.streaming
        )
    except Exception as error:  # the library raises whatever its own libraries raise
        raise UserError(f"data.path={cfg.path}: {(str(error) or repr(error)).splitlines()[0]}") from None


def _synthetic_parts(cfg: Synthetic, unit_bytes: int) -> list[Unit]:
    step = max(1, unit_bytes // cfg.mean_document_bytes)
    cuts = [*range(0, cfg.num_documents, step), cfg.num_documents]
    return [
        Unit("synthetic", "", start, stop, (stop - start) * cfg.mean_document_bytes, str(cfg.mean_document_bytes))
        for start, stop in pairwise(cuts)
    ]


def _read_synthetic(cfg: Synthetic, unit: Unit) -> Iterator[Item]:
    words = _made_up_words()
    mean_word = np.mean([len(word) + 1 for word in words[:1000]])
    for number in range(unit.start, unit.stop):
        rng = np.random.default_rng(number)
        count = 1 + int(rng.exponential(cfg.mean_document_bytes / mean_word))
        text = " ".join(words[rank % len(words)] for rank in rng.zipf(1.2, count))
        yield Item(f"synthetic@{number}", text)


@cache
def _made_up_words() -> list[str]:
    rng, letters = np.random.default_rng(0), np.array(list("etaoinshrdlu"))
    return ["".join(rng.choice(letters, 1 + number % 9)) for number in range(10_000)]


SOURCES: dict[str, Reader] = {
    "python_stdlib": Reader(_stdlib_files, _read_text),
    "text": Reader(_whole_files, _read_text),
    "jsonl": Reader(_line_ranges, _read_jsonl),
    "csv": Reader(_whole_files, _read_csv),
    "parquet": Reader(_row_groups, _read_parquet),
    "python_docstrings": Reader(_documented_files, _read_docstrings),
    "hf": Reader(_hf_parts, _read_hf),
    "synthetic": Reader(_synthetic_parts, _read_synthetic),
}
