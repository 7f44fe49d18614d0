"""Files of Parquet: row groups as units, rows read a few at a time, so that what is in memory is bounded."""

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal

from tunix.base.buckets import filesystem, is_address
from tunix.base.errors import UserError, first_line
from tunix.data.files import NO_TIME, TOO_LONG, Files, Item, Rows, Unit, find_files

ROWS_BYTES = 1 << 29  # of the rows of a Parquet file that are in memory at a time
# A list of a billion equal values is a few bytes of a Parquet file. Arrow takes 14 bytes for each, and Python more.
LIST_VALUES, OBJECT_BYTES = 1 << 28, 32


class Parquet(Files, Rows):
    """Parquet files (needs pyarrow, of the extra `hf`)."""

    has_padded_objects = True

    source: Literal["parquet"]
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
        return self._read_columns(unit, self.columns.list_names())

    def read_all_columns(self, unit: Unit) -> Iterator[Item]:
        return self._read_columns(unit, None)

    def _read_columns(self, unit: Unit, columns: list[str] | None) -> Iterator[Item]:
        """Yield the rows of a row group with the columns that are asked for; None asks for all."""
        file = _open_again(unit.path, unit.version)
        present = file.schema_arrow.names
        self.refuse_twice(unit.path, present)
        requested = present if columns is None else [name for name in columns if name in present]
        try:
            rows = (row for batch in self._read_batches(unit, file, requested) for row in self._convert(batch))
            for number, row in enumerate(rows):
                # If none of the columns is there, the row has their names alone: an error message lists them.
                content = row if requested else dict.fromkeys(present)
                source = partial("{}, row {} of row group {},".format, unit.path, number, unit.start)
                problem = TOO_LONG if row is None else ""
                yield Item(f"{unit.name}@{unit.start}.{number}", None if problem else content, problem, source)
        except UserError:
            raise
        except (OverflowError, LookupError) as error:
            raise UserError(f"data: {unit.path} {NO_TIME} ({first_line(error)})") from None
        except (OSError, ValueError, NotImplementedError) as error:
            raise UserError(f"data: {unit.path} is damaged or ends early: {first_line(error)}") from None

    def _read_batches(self, unit: Unit, file: Any, requested: list[str]) -> Iterator[Any]:
        """Yield the columns of a row group in batches of Arrow, a few rows at a time. One row may name one long text a
        million times. So texts in lists are read as dictionaries, which have each text once and hold those of all
        batches so far. Where they grow in a large group, its texts are no longer named, but written out as often as
        they come: the other rows are read without dictionaries, one at a time."""
        group = file.metadata.row_group(unit.start)
        schema = [file.schema.column(at) for at in range(group.num_columns)]
        sizes = {column.path: group.column(at).total_uncompressed_size for at, column in enumerate(schema)}
        for at, column in enumerate(schema):
            # Batches of smaller columns are large enough without a look at their pages.
            if column.max_repetition_level == 0 and sizes[column.path] > ROWS_BYTES // 32:
                sizes[column.path] = _find_max_page_bytes(unit.path, group.column(at))  # no value is longer
        in_lists = [
            (at, column)
            for at, column in enumerate(schema)
            if column.max_repetition_level > 0 and any(f"{column.path}.".startswith(f"{name}.") for name in requested)
        ]
        of_text = [column for _, column in in_lists if column.physical_type == "BYTE_ARRAY"]
        lists = [column.path for column in of_text if column.logical_type.type != "DECIMAL"]
        if (values := max([0, *(group.column(at).num_values for at, _ in in_lists)])) > LIST_VALUES:
            raise UserError(
                f"data: {unit.path}, row group {unit.start}, has {values} values in lists of a column, and at most "
                f"{LIST_VALUES} are read at a time; write groups of fewer rows (pyarrow: row_group_size=10000)"
            )
        length = sum(sizes[path] for path in lists)
        is_large = length > ROWS_BYTES
        rows_at_first = max(1, min(64, group.num_rows * ROWS_BYTES // 16 // length)) if is_large else 1024

        def count_rows(max_rows: int, left_out: Sequence[str] = ()) -> int:
            """Return how many rows fit into `ROWS_BYTES` if all were as long as their column, or its longest page. A
            column that names one long text a million times is short on disk."""
            lengths = [size for path, size in sizes.items() if path not in left_out]
            return min(max_rows, max(1, ROWS_BYTES // max([1, *lengths])))

        num_read, at_first = 0, None
        if lists:
            named = _open_again(unit.path, unit.version, tuple(lists))
            for batch in named.iter_batches(count_rows(rows_at_first, lists), [unit.start], requested):
                yield batch
                num_read += len(batch)
                texts = sum(map(_count_dictionaries, batch.columns))
                at_first = texts if at_first is None else at_first  # with what the file has as its dictionary
                if is_large and texts - at_first > ROWS_BYTES // 32:
                    break
            else:
                return
        for batch in file.iter_batches(count_rows(1024), [unit.start], requested or None):
            num_known = min(num_read, len(batch))
            num_read -= num_known
            yield batch.slice(num_known)

    def _convert(self, batch: Any) -> Iterator[dict[str, Any] | None]:
        """Yield the rows of a batch of Arrow; None for one that is longer than a document may be."""
        limit = self.max_document_bytes or sys.maxsize
        sizes = sum(map(_count_bytes, batch.columns))
        if sizes.sum() <= min(ROWS_BYTES, limit):
            yield from batch.to_pylist()
        else:
            for number, size in enumerate(sizes):
                yield None if size > limit else batch.slice(number, 1).to_pylist()[0]


def _find_max_page_bytes(path: str, chunk: Any) -> int:
    """Return the bytes of the longest page of a column, unpacked; those of the column where a header cannot be read."""
    whole = max(chunk.total_uncompressed_size, chunk.total_compressed_size)
    at = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)
    end, longest = at + chunk.total_compressed_size, 0
    with filesystem(path, "data.paths").open(path, "rb") if is_address(path) else open(path, "rb") as file:
        while at < end:
            file.seek(at)
            header = io.BytesIO(file.read(8192))
            try:
                fields = _read_thrift(header)
                unpacked, packed = fields[2], fields[3]
            except (IndexError, KeyError, RecursionError):
                return whole
            if min(unpacked, packed) < 0:
                return whole
            at, longest = at + header.tell() + packed, max(longest, unpacked, packed)
    return longest


def _read_thrift(data: io.BytesIO) -> dict[int, int]:
    """Read a struct of Thrift's compact protocol, and return its numbers by their field; `IndexError` where it is cut.
    https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md"""

    def read_number() -> int:
        number = shift = 0
        while (byte := data.read(1)[0]) & 128:
            number, shift = number | (byte & 127) << shift, shift + 7
        return number | byte << shift

    def skip(length: int) -> None:
        if len(data.read(length)) < length:
            raise IndexError

    fields, field = {}, 0
    while head := data.read(1)[0]:
        kind, step = head & 15, head >> 4
        signed = 0 if step else read_number()
        field = field + step if step else (signed >> 1) ^ -(signed & 1)
        if kind in (4, 5, 6):  # integers of 16, 32 and 64 bits
            number = read_number()
            fields[field] = (number >> 1) ^ -(number & 1)
        elif kind == 8:  # bytes
            skip(read_number())
        elif kind == 12:
            _read_thrift(data)
        elif kind in (3, 7):  # a byte, a float
            skip({3: 1, 7: 8}[kind])
        elif kind not in (1, 2):  # not a truth value: lists and maps, which no header of a page has
            raise IndexError
    return fields


def _list_parts(array: Any) -> list[Any]:
    """Return the arrays that a nested array of Arrow is made of; none for another one."""
    import pyarrow as pa

    if pa.types.is_struct(array.type):
        return [array.field(at) for at in range(array.type.num_fields)]
    if pa.types.is_map(array.type):
        return [array.keys, array.items]
    return [array.values] if pa.types.is_nested(array.type) and hasattr(array, "offsets") else []


def _count_dictionaries(array: Any) -> int:
    """Return the bytes of all dictionaries inside of an array of Arrow."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        return array.dictionary.nbytes
    return sum(map(_count_dictionaries, _list_parts(array)))


def _count_bytes(array: Any) -> Any:
    """Return the bytes [rows] of each row of an array of Arrow, without making its texts; 8 for a number. What is in a
    list counts as `OBJECT_BYTES` at least."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    kind = array.type
    if pa.types.is_dictionary(kind):
        sizes = np.append(_count_bytes(array.dictionary), 1)  # the last for null
        return sizes[array.indices.fill_null(len(sizes) - 1).to_numpy(zero_copy_only=False)]
    if parts := _list_parts(array):
        inner = sum(map(_count_bytes, parts))
        if pa.types.is_struct(kind):
            return inner
        ends = np.append(0, np.cumsum(np.maximum(inner, OBJECT_BYTES)))  # of the values of lists and maps
        return np.diff(ends[array.offsets.to_numpy()])
    try:
        return compute.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    except pa.ArrowNotImplementedError:  # a number
        return np.full(len(array), 8)


def _open_parquet(path: str, dictionaries: Sequence[str] = ()) -> Any:
    """Open a `pyarrow.parquet.ParquetFile`, which reads the columns of these paths as dictionaries."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError("data.source=parquet needs pyarrow: pip install 'tunix-trainer[hf]'") from None
    try:
        file = filesystem(path, "data.paths").open(path, "rb") if is_address(path) else path
        return parquet.ParquetFile(file, read_dictionary=list(dictionaries))
    except (OSError, ValueError) as error:
        raise UserError(f"data: {path} cannot be read as Parquet: {first_line(error)}") from None


@lru_cache(2)
def _open_again(path: str, version: str, dictionaries: tuple[str, ...] = ()) -> Any:
    """Return a file that `_open_parquet` opens, the same one for all of its row groups. Opened for each group, 1,000
    groups took 13 GB: what a file says of its groups grows with them, and pyarrow's metadata and schema hold each other
    until garbage is collected."""
    return _open_parquet(path, dictionaries)
