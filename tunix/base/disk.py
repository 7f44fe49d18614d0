"""Files and folders: written whole or not at all, read with one line about what is wrong."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tunix.base.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises `UserError` where there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


def list_numbers(folder: Path) -> list[int]:
    """Return the names in a folder that are numbers, in order, like the steps of its checkpoints."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` to make a file or a folder at; it takes the place of `target` at the end.

    When the block raises, nothing is left of it. `target` may be a file, or an empty folder.

    A reader sees the old content or the new one, and never a part: `os.replace` changes one entry of the folder, which
    file systems do at once. It works within one file system only, so the new content is made beside the target, and not
    in /tmp.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        new = Path(temporary) / target.name
        yield new
        os.replace(new, target)


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as new:
        new.write_text(text)


def create_file(path: Path, text: str) -> None:
    """Write a new text file; raises `FileExistsError` where there is one. Of two processes that try, one makes it."""
    try:
        # "x" makes the file or fails, as one operation of the file system.
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise
    except OSError:
        # A full disk may leave half a file, and the next process that tries would find it taken.
        with suppress(OSError):
            path.unlink()
        raise


def make_once(target: Path, make: Callable[[Path], object], key: str = "loading.cache_dir") -> Path:
    """Return `target`, made by `make(path)` if it is not there yet. Of two processes that make it, one wins.

    Raises:
        UserError: the disk cannot be written; it names the `key` that chooses the folder.
    """
    if target.exists():
        return target
    # There is no lock: two processes may both make it. The second cannot replace a folder with files in it, which is an
    # OSError, and takes what the first has made.
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as new:
            make(new)
    except OSError as error:
        if not target.exists():
            raise UserError(f"{key}: cannot write {target}: {error.strerror}; set {key} to a writable folder") from None
    return target


def find_writable(key: str, name: str) -> Path:
    """Return the path of a file to write; raises `UserError` where there can be none."""
    path = Path(name).expanduser()
    if not path.absolute().parent.is_dir():
        raise UserError(f"{key}={path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{key}={path} is a folder; name a file to write")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"{key}={path} is write-protected; name another file")
    return path
