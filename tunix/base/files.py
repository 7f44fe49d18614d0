"""Files and folders: written whole or not at all, read with one line about what is wrong."""

import errno
import fcntl
import glob
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import yaml

from tunix.base.errors import UserError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A terminal that is closed sends SIGHUP. Where `nohup` lets a command ignore it, it stays ignored.
HANGUP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, *HANGUP)  # they ask a run to stop: it saves, and ends with exit code 75
MAX_NAME = 255  # bytes of one part of a path: what Linux and macOS take


def is_plain(name: str) -> bool:
    """Return whether a name from outside can only be a file below a folder, as far as its text tells.

    It is not absolute, has no part that is empty, `.`, `..` or too long for a file system, no backslash, drive letter
    or control character, and can be written as UTF-8.
    """
    parts = name.split("/")
    try:
        if max(len(part.encode()) for part in parts) > MAX_NAME:
            return False
    except UnicodeEncodeError:
        return False
    has_control = any(char < " " or char == "\x7f" for char in name)
    return not {"", ".", ".."} & set(parts) and "\\" not in name and parts[0][1:2] != ":" and not has_control


def resolve_below(folder: Path, name: str, source: str) -> Path:
    """Return the place of `name` in `folder`, for writing; `source` says who gave the name, for the message.

    Raises:
        UserError: the name is not plain, or a link in the folder leads its place out of the folder.
    """
    if is_plain(name) and (folder / name).resolve().is_relative_to(folder.resolve()):
        return folder / name
    raise UserError(f"{source} names {name[:200]!r}, which is not a file below its folder; it is not written")


def is_whole_number(text: str) -> bool:
    """Return whether a text is a whole number of at most 18 decimal digits: `str.isdigit` is true for ² as well."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


MAX_TEXT = 1 << 27  # bytes of a file that is read whole: of JSON, a template, a tokenizer; the largest have 35 MB


def check_size(path: Path) -> Path:
    """Return the path of a file that is read whole; raises `ValueError` for one of more than `MAX_TEXT` bytes, and for
    a pipe or a device, which have no size and perhaps no end."""
    if path.exists() and not path.is_file():
        raise ValueError("it is a folder, a pipe or a device, and no file")
    if (size := path.stat().st_size) > MAX_TEXT:
        raise ValueError(f"it has {size:,} bytes, and such files have at most {MAX_TEXT:,}")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises `UserError` where there is none."""
    try:
        value = parse_json(check_size(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; raises `ValueError` where it is none, or is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def write_tokenizer(folder: Path, tokenizer: "Tokenizer") -> None:
    """Write tokenizer.json. Not by the library's `save`, whose error for a full disk is no `OSError`."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def read_line() -> str:
    """Return the next line of stdin, which a terminal is asked for; raises `EOFError` behind the last one.

    Raises:
        UserError: it is no text.
    """
    try:
        return input("> " if sys.stdin.isatty() else "")
    except UnicodeDecodeError as error:
        raise UserError(f"stdin is no text in {error.encoding} ({error.reason}); give it in this encoding") from None


def read_json_lines(file: Path, report: Callable[[int], object] = lambda number: None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a file that may be written meanwhile, or that a crash has cut.

    A line without its end is left out; so is any other that is no object, and `report` gets its number.
    """
    with file.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            text = line.rstrip("\n")
            if not text.endswith("}"):  # it is being written, or whoever wrote it was killed
                continue
            try:
                value = parse_json(text)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield value
            else:
                report(number)


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text; raises `ValueError`, of one line, where it is none, or is nested too deep."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date like 2026-99-99
        raise ValueError(first_line(error)) from None


def list_numbers(folder: Path) -> list[int]:
    """Return the numbers after which folders in a folder are named, in order, like the steps of its checkpoints."""
    return sorted(int(path.name) for path in folder.glob("*") if is_whole_number(path.name) and path.is_dir())


def open_lines(path: Path) -> TextIO:
    """Open a file of lines to append to it. Each line is on disk when it is written.

    A last line without its end, which a crash or a full disk has left, is cut off: whatever wrote it writes it again.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        if path.is_file():
            with path.open("r+b") as file:
                file.truncate(find_end_of_lines(file))
        return path.open("a", buffering=1, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None


def find_end_of_lines(file: BinaryIO) -> int:
    """Return the number of bytes up to the end of the last whole line of a file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - 65536)
        file.seek(begin)
        if found := file.read(end - begin).rfind(b"\n") + 1:
            return begin + found
        end = begin
    return 0


_unfinished: dict[str, int] = {}  # folder -> the process that made it; forks of that process have this too


@contextmanager
def temporary_folder(prefix: str, beside: Path | None = None) -> Iterator[str]:
    """Make a folder in /tmp, or beside a path, and remove it at the end, also where a signal ends the process.

    Signals that the program handles itself stay as they are.
    """
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    with tempfile.TemporaryDirectory(dir=beside and beside.parent, prefix=prefix) as folder:
        _unfinished[folder] = os.getpid()
        try:
            with handling_signals(numbers, end_by_signal):
                yield folder
        finally:
            del _unfinished[folder]


@contextmanager
def handling_signals(numbers: Iterable[int], handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Handle these signals in the block, in place of what they did before. Python does so in the main thread alone."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in (numbers if is_main else ())}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def end_by_signal(number: int, _frame: object) -> None:
    """End this process by a signal that it handles: without its temporary folders."""
    remove_unfinished()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def follow_parent(parent: int) -> None:
    """Start a thread that ends this process when its parent has ended: the kernel then gives it another parent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        remove_unfinished()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def remove_unfinished() -> None:
    """Remove temporary folders, before the process ends without an exception."""
    for folder in [folder for folder, process in _unfinished.items() if process == os.getpid()]:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` to make a file or a folder at; it takes the place of `target` at the end.

    When the block raises, or a signal ends the process, nothing is left of it; behind a kill `remove_left` removes it.
    `target` may be a file, or an empty folder.

    A reader sees the old content or the new one, and never a part: `os.replace` changes one entry of the folder, which
    file systems do at once. It works within one file system only, so the new content is made beside the target, and not
    in /tmp.
    """
    with temporary_folder(_find_prefix(target), beside=target) as temporary, _locking(Path(temporary)):
        new = Path(temporary) / target.name
        yield new
        os.replace(new, target)


def remove_left(target: Path) -> None:
    """Remove what killed processes of this host have left of `target` in `replacing`. Reads the names of its folder."""
    for left in target.parent.glob(f"{glob.escape(_find_prefix(target))}*"):
        # Whoever made it was killed, or has made it in this moment and locks it next.
        with suppress(OSError), _locking(left) as is_locked:
            if is_locked and time.time() - left.stat().st_mtime > 1:
                shutil.rmtree(left)


def _find_prefix(target: Path) -> str:
    """Return how the names of temporary folders beside `target` begin: locks are those of one host."""
    return f".{target.name}-{platform.node()}-"


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


# What a user can do about a disk that refuses, by the number of its error.
WAYS_OUT = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f, quota)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (ulimit -n)",
}


def find_way_out(error: OSError, otherwise: str) -> str:
    """Return what a user can do about an error of the disk. Libraries raise some that have a text and no number."""
    by_text = (hint for number, hint in WAYS_OUT.items() if os.strerror(number) in str(error))
    return WAYS_OUT.get(error.errno or 0) or next(by_text, otherwise)


@contextmanager
def describing_refusal(label: str, done: str = "", otherwise: str = "name another file") -> Iterator[None]:
    """Raise `UserError` for an error of the disk, while the file or folder `label`, like KEY=PATH, is written.

    `done` says what the block did in its place, `otherwise` what a user can do where the error does not tell.
    """
    try:
        yield
    except OSError as error:
        hint = find_way_out(error, otherwise)
        raise UserError(f"{label} cannot be written ({describe_refusal(error)}){done}; {hint}") from None


def describe_refusal(error: OSError) -> str:
    """Return why a folder cannot be made. Python says "File exists" where a file is in its way."""
    return "a file is in the way" if isinstance(error, FileExistsError) else error.strerror or str(error)


def make_once(target: Path, make: Callable[[Path], object], key: str = "loading.cache_dir") -> Path:
    """Return `target`, made by `make(path)` if it is not there yet. Of two processes that make it, one wins.

    Raises:
        UserError: the disk cannot be written; it names the `key` that chooses the folder.
    """
    if target.exists():
        return target
    # Nobody waits: two processes may both make it. The second cannot replace a folder with files in it, which is an
    # OSError, and takes what the first has made.
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_left(target)
        with replacing(target) as new:
            make(new)
    except OSError as error:
        if not target.exists():
            hint = find_way_out(error, f"set {key} to a writable folder")
            raise UserError(f"{key}: cannot write {target}: {error.strerror or error}; {hint}") from None
    return target


@contextmanager
def _locking(folder: Path) -> Iterator[bool]:
    """Lock a folder in the block, or yield False: another process of this host has it, or the file system has no locks.

    The system opens the lock when the process ends, also where a kill ends it.
    """
    with ExitStack() as opened:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def expand_home(name: str | Path) -> Path:
    """Return a path with `~` as the home of its user; `~nobody`, without a home here, is a name like others.

    Raises:
        UserError: the user has no home, as with an unknown number in a container: a folder named ~ would be made.
    """
    path = os.path.expanduser(name)
    if path == "~" or path.startswith("~/"):
        raise UserError(f"{path}: this user has no home; set the environment variable HOME")
    return Path(path)


def names_file(path: str) -> bool:
    """Return False for what may be the ID of something on the hub, NAME or ORGANISATION/NAME."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).suffix in (".json", ".model")


def describe_missing(name: str) -> str:
    """Return that a path does not exist, for a message; of a relative path also the folder below which it should be."""
    return f"{name} does not exist{'' if expand_home(name).is_absolute() else f' in {Path.cwd()}'}"


def find_existing(folder: Path) -> Path:
    """Return the folder, or the nearest place above it that exists: a folder, or a file that is in its way."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def find_writable(key: str, name: str) -> Path:
    """Return the path of a file to write; raises `UserError` where there can be none."""
    path = expand_home(name)
    if not path.absolute().parent.is_dir():
        raise UserError(f"{key}={path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{key}={path} is a folder; name a file to write")
    try:  # to write is the one way to know: disks are full or read-only, and root may do everything else
        with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.absolute().parent):
            return path
    except OSError as error:
        raise UserError(f"{key}={path} cannot be written ({error.strerror}); name another file") from None
