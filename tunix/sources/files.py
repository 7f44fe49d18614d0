"""Files of a source: find them in a fixed order, describe them as units of work, and open them, packed or not."""

import glob
import gzip
import hashlib
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from tunix.base.buckets import BUCKETS, explain, explaining, filesystem, is_address, version_of
from tunix.base.errors import UserError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".zst": zstd.open}


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
        path = Path(pattern).expanduser()
        # A path that exists is not a glob, even if its name has a * or a [ in it.
        matches = [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not matches:
            raise UserError(f"data.paths: {pattern} does not exist")
        for match in matches:
            below = [match] if match.is_file() else sorted(p for p in match.rglob("*") if p.name.endswith(endings))
            for path in below:
                if path.is_file():
                    name = path.name if match.is_file() else path.relative_to(match).as_posix()
                    found.setdefault(path.resolve(), make_file_unit(path, name))
    if not found:
        raise UserError(f"data.paths={list(paths)}: no file that ends in {', '.join(extensions)} (data.extensions)")
    return list(found.values())


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
        for match, about in sorted(matches.items()):
            below, root = {match: about}, match.rpartition("/")[0]
            if about["type"] == "directory":
                listed = files.find(match, detail=True)
                below = {name: each for name, each in sorted(listed.items()) if name.endswith(endings)}
                root = files._strip_protocol(match.rstrip("/"))  # as the names in `listed` are: without s3://
            for name, each in below.items():
                address = name if is_address(name) else f"{scheme}://{name}"
                size = each.get("size") or 0  # a web server may not say it; then the file is not split
                units[address] = Unit(name.removeprefix(f"{root}/"), address, 0, size, size, version_of(each))
    return units


def make_file_unit(path: Path, name: str) -> Unit:
    """Describe a whole file as one unit."""
    stat = path.stat()
    return Unit(name, str(path), 0, stat.st_size, stat.st_size, str(stat.st_mtime_ns))


def is_packed(path: str) -> bool:
    return Path(path).suffix in PACKED


def split_unit(unit: Unit, size: int) -> list[Unit]:
    """Split a file of lines into ranges of about `size` bytes. A packed file stays one unit: it has to be unpacked from
    its first byte on."""
    if is_packed(unit.path) or unit.size <= size:
        return [unit]
    cuts = [*range(0, unit.size, size), unit.size]
    return [Unit(unit.name, unit.path, start, stop, stop - start, unit.version) for start, stop in pairwise(cuts)]


@contextmanager
def open_unpacked(path: str) -> Iterator[IO[bytes]]:
    """Open a file for reading its bytes, unpacked.

    Raises:
        UserError: an error while the file is opened or read; the message names the file.
    """
    try:
        with ExitStack() as stack:
            place: Any = path
            if is_address(path):
                place = stack.enter_context(filesystem(path, "data.paths").open(path, "rb"))
                if getattr(place, "size", 0) is None:  # a stream of unknown length, which fsspec cannot read by lines
                    place = io.BytesIO(place.read())
            unpack = PACKED.get(Path(path).suffix)
            if unpack is None:
                yield place if place is not path else stack.enter_context(open(path, "rb"))
            else:
                yield stack.enter_context(unpack(place, "rb"))
    except (EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError) as error:
        raise UserError(f"data: {path} is damaged or ends early: {error}") from None
    except OSError as error:
        why = explain(error) if is_address(path) else error.strerror or error
        raise UserError(f"data: cannot read {path}: {why}") from None


def find_line_number(path: str, offset: int) -> int:
    """Return the number, from 1, of the line that begins at byte `offset` of the unpacked file."""
    with open_unpacked(path) as file:
        lines = 1
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            lines, offset = lines + block.count(b"\n"), offset - len(block)
    return lines
