"""Digests: a file written beside others tells later whether they are still what was written.

    FOLDER/digests.json   {"files": {"d/0f3a": {"size": 70000000, "crc32": [a, b]}, ...}, ...}

They are in every checkpoint, export and prepared corpus.

A digest is the size and a CRC-32 for each block of 64 MiB. CRC-32 finds every change of up to 32 neighbouring bits, and
overlooks one in four billion of larger ones; it is in the standard library, and faster than a restore
(benchmarks/results.md). Digests find damage; they are no protection against somebody who changes them too.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunix.base.errors import UserError
from tunix.base.files import check_size, is_plain, write_whole

FILE = "digests.json"
BLOCK = 1 << 26  # bytes with a CRC of their own
READ = 1 << 22  # bytes read at a time
SAMPLE = 1 << 16  # bytes of a block of `sample_files`
VERIFIED = "verified"  # a file that says that the folder was checked, and which one: copies of it are other folders


class Damaged(Exception):
    """Files of a folder are not what was written; the message names the first."""


def hash_texts(*texts: str) -> str:
    """Return 20 digits that stand for some texts, in this order: the key of something in a cache, a fingerprint."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def sample_files(folder: Path, files: Iterable[Path], num_blocks: int) -> str:
    """Return 20 digits that stand for some files of a folder: their names, sizes and so many blocks of each.

    To read all weights of a model may take an hour, and two models differ nearly everywhere.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\0".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(SAMPLE, size // num_blocks)):
                file.seek(start)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:20]


def write_digests(folder: Path, files: Iterable[Path], name: str = FILE, **info: Any) -> None:
    """Write the digests of some files of a folder to its file `name`, as a whole; `info` is written beside them."""
    digests = {}
    for path in sorted(files):
        size = path.stat().st_size
        crcs = [_crc(path, start)[0] for start in _starts(size)]
        digests[str(path.relative_to(folder))] = {"size": size, "crc32": crcs}
    write_whole(folder / name, json.dumps({**info, "files": digests}))


def list_files(folder: Path) -> list[Path]:
    """Return every file below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_digests(file: Path) -> dict[str, Any]:
    """Return what a file of digests says.

    Raises:
        Damaged: the file is not one that `write_digests` has written.
    """
    try:
        record = json.loads(check_size(file).read_text())
        well_formed = all(
            isinstance(digest["size"], int) and isinstance(digest["crc32"], list) for digest in record["files"].values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{file} cannot be read ({type(error).__name__})") from None
    if not well_formed:
        raise Damaged(f"{file} holds no digests")
    return record


def check_files(files: Iterable[Path], share: int = 0, num_shares: int = 1) -> int:
    """Compare the files that some files of digests name with them; return the bytes that were read.

    A file of digests may name others: FOLDER/digests.json names FOLDER/00000/digests.json. Sizes are compared first.
    Blocks are read by several threads; of `num_shares` processes, each reads a share.

    Raises:
        Damaged: a file is missing, has another size, or other bytes.
    """
    # First all names and sizes, then the bytes: a missing file is found before gigabytes are read.
    blocks = [block for path, digest in walk_digests(files) for block in _list_blocks(path, digest)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        # Every n-th block and not every n-th file: one file may be most of a checkpoint.
        return sum(pool.map(lambda block: _check_block(*block), blocks[share::num_shares]))


def walk_digests(files: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each file that some files of digests name, with its digest; of a further file of digests its own ones too.

    Raises:
        Damaged: a name is not that of a file below the folder, or a file is not one of digests, or is named twice: it
            would be read without an end.
    """
    waiting, met = list(files), set[Path]()
    while waiting:
        file = waiting.pop()
        if file.resolve() in met:
            raise Damaged(f"{file} is named twice among the files of digests")
        met.add(file.resolve())
        for name, digest in read_digests(file)["files"].items():
            if not is_plain(name):
                raise Damaged(f"{file} names {name!r}, which is not a file below its folder")
            path = file.parent / name
            yield path, digest
            waiting += [path] if path.match("digests*.json") else []


def _list_blocks(path: Path, digest: dict[str, Any]) -> list[tuple[Path, int, int]]:
    """Return file, first byte and CRC of each block of a file; `Damaged` where its size is another."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    starts = _starts(size)
    if size != digest["size"] or len(digest["crc32"]) != len(starts):
        raise Damaged(f"{path} has {size:,} bytes, {digest['size']:,} were written")
    return [(path, start, crc) for start, crc in zip(starts, digest["crc32"], strict=True)]


def _check_block(path: Path, start: int, crc: int) -> int:
    try:
        found, size = _crc(path, start)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    if found != crc:
        raise Damaged(f"{path} has other bytes than were written (from byte {start:,} to {start + size:,})")
    return size


def digest_bytes(data: bytes | memoryview) -> dict[str, Any]:
    """Return the digest of a file with these bytes, before it is written."""
    view = memoryview(data)
    return {"size": len(view), "crc32": [zlib.crc32(view[start : start + BLOCK]) for start in _starts(len(view))]}


def _starts(size: int) -> range:
    """Return where the blocks of a file begin."""
    return range(0, size, BLOCK)


def _crc(path: Path, start: int) -> tuple[int, int]:
    """Return the CRC-32 of the block that begins at `start`, and its bytes."""
    crc, size, buffer = 0, 0, memoryview(bytearray(READ))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size < BLOCK and (count := file.readinto(buffer[: BLOCK - size])):
            crc, size = zlib.crc32(buffer[:count], crc), size + count
    return crc, size


def reject_damaged(folder: Path, key: str, hint: str) -> None:
    """Raise `UserError` if the files of a folder are not those of its digests; a folder without digests passes."""
    if (folder / FILE).is_file():
        try:
            check_files([folder / FILE])
        except Damaged as damage:
            raise UserError(f"{key}: {damage}; {hint}") from None


def verify_folder(folder: Path, verify: str, key: str, hint: str) -> None:
    """Do as `reject_damaged` where `verify` asks for it: "always", "once" for each folder, or "never"."""
    mark = folder / FILE
    if verify == "always" or (verify == "once" and not is_verified(folder, mark)):
        reject_damaged(folder, key, hint)
        if verify == "once":
            record_verified(folder, mark)


def is_verified(folder: Path, file: Path) -> bool:
    """Return whether `record_verified` was called for this folder, and not for one that it was copied from."""
    with suppress(OSError):
        return (folder / VERIFIED).read_text() == _identity(file)
    return False


def record_verified(folder: Path, file: Path) -> None:
    """Remember in a folder that its files were compared with `file`, where the folder can be written."""
    with suppress(OSError):
        (folder / VERIFIED).write_text(_identity(file))


def _identity(file: Path) -> str:
    status = file.stat()
    return f"{status.st_dev} {status.st_ino} {status.st_ctime_ns}\n"  # no copy has the same time of change
