"""Files in buckets and on web servers, by addresses like s3://BUCKET/NAME, gs://BUCKET/NAME and https://HOST/NAME.

fsspec does the work. Its packages find credentials as the providers' own tools do (AWS_PROFILE, AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS, ...). fsspec and the package of a scheme are imported when an address is used.
"""

import importlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tunix.base.disk import write_whole
from tunix.base.errors import UserError

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "https": "aiohttp", "http": "aiohttp"}  # package that fsspec needs, by scheme
BUCKETS = ("s3", "gs")  # schemes that can be written
VERSIONS = ".versions.json"  # in a mirrored folder: which version of each object is there

# Reasons for an error of a server, by the name of its class; a subclass stands before its base.
REASONS = {
    "NoCredentialsError": "there are no credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)",
    "PermissionError": "access is denied: the credentials are wrong, or do not allow it",
    "FileNotFoundError": "there is no such bucket or object",
    "EndpointConnectionError": "the server cannot be reached",
    "ClientConnectorError": "the server cannot be reached",
}
# Reasons for an error whose class says nothing, by words in its text: those of Google, tensorstore and gcsfs.
WORDS = {
    "Anonymous caller": "there are no credentials (GOOGLE_APPLICATION_CREDENTIALS)",
    "NOT_FOUND": REASONS["FileNotFoundError"],
    "PERMISSION_DENIED": REASONS["PermissionError"],
    "Forbidden": REASONS["PermissionError"],
}


def is_address(path: str) -> bool:
    """Return whether a path is an address with a scheme, and no path of this machine."""
    return "://" in path


def is_bucket(path: str) -> bool:
    """Return whether a path is an address that can be written."""
    return path.partition("://")[0] in BUCKETS and is_address(path)


def join(address: str, *names: str) -> str:
    """Return the address of something below a folder."""
    return "/".join([address.rstrip("/"), *names])


def filesystem(address: str, key: str) -> Any:
    """Return fsspec's file system of an address; `key` is for messages.

    Raises:
        UserError: a scheme that is not known, or a package that is missing.
    """
    scheme = address.partition("://")[0]
    if scheme not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise UserError(f"{key}={address}: an address begins with one of {known}")
    try:
        fsspec = importlib.import_module("fsspec")
        importlib.import_module(PACKAGES[scheme])
        # gcsfs logs its errors with their traceback; without a handler, Python prints them before a run has a log.
        logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    except ImportError:
        raise UserError(f"{key}={address} needs {PACKAGES[scheme]}: pip install 'tunix-trainer[buckets]'") from None
    # A listing that is kept would not show what other processes write.
    return fsspec.filesystem(scheme, use_listings_cache=False)


@contextmanager
def explaining(address: str, key: str) -> Iterator[None]:
    """Turn an error of the server in this block into a `UserError` of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each file system has kinds of its own
        raise UserError(f"{key}={address}: {explain(error)}") from None


def explain(error: BaseException) -> str:
    """Return in one line what an error of a server means."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = (str(error).strip() or repr(error)).splitlines()[0][:300]
    by_kind = (reason for kind, reason in REASONS.items() if kind in kinds)
    by_text = (reason for words, reason in WORDS.items() if words in text)
    reason = next(by_kind, "") or next(by_text, "")
    return f"{reason} ({text})" if reason else text


def read_text(address: str, key: str) -> str | None:
    """Read a text file; None if it does not exist."""
    files = filesystem(address, key)
    with explaining(address, key):
        try:
            return files.cat_file(address).decode()
        except FileNotFoundError:
            return None


def list_names(address: str, key: str) -> list[str]:
    """Return the names in a folder of a bucket; none if there is no such folder."""
    files = filesystem(address, key)
    with explaining(address, key):
        try:
            listed = files.ls(address, detail=False)
        except FileNotFoundError:
            return []
    return sorted({name.rstrip("/").rpartition("/")[2] for name in listed} - {""})


def find_objects(address: str, key: str) -> dict[str, dict[str, Any]]:
    """Return what fsspec knows of every object below a folder, by its name there; {} if there is none."""
    files = filesystem(address, key)
    with explaining(address, key):
        root = files._strip_protocol(address.rstrip("/")) + "/"
        found = files.find(address, detail=True)
    return {name.removeprefix(root): about for name, about in found.items() if name.startswith(root)}


def version_of(about: dict[str, Any]) -> str:
    """Return a text that changes when an object does, of what fsspec knows of it; empty where the server says none."""
    return str(about.get("ETag") or about.get("etag") or about.get("LastModified") or about.get("mtime") or "")


def mirror(address: str, patterns: tuple[str, ...], key: str) -> Path:
    """Return a folder of this machine with the objects below an address whose names, or last parts, match a pattern.

    The folder is kept in `loading.cache_dir`; only objects that have changed are fetched again.

    Raises:
        UserError: no object matches, or the server refuses; the message names `key`.
    """
    files, found = filesystem(address, key), find_objects(address, key)
    wanted = {
        name: about
        for name, about in found.items()
        if any(fnmatch(name, pattern) or fnmatch(name.rpartition("/")[2], pattern) for pattern in patterns)
    }
    if not wanted:
        raise UserError(f"{key}={address}: there is no {' or '.join(patterns)}")
    folder = local_copy(address)
    folder.mkdir(parents=True, exist_ok=True)
    notes = folder / VERSIONS
    before = json.loads(notes.read_text()) if notes.is_file() else {}
    now = {name: [about.get("size"), version_of(about)] for name, about in wanted.items()}
    for name, version in now.items():
        target = folder / name
        if before.get(name) == version and version[1] and target.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # Fetched beside its place and renamed: several processes of a host may mirror the same address at once.
        part = target.with_name(f".{target.name}.{os.getpid()}")
        with explaining(join(address, name), key):
            files.get_file(join(address, name), str(part))
        os.replace(part, target)
    for name in before.keys() - found.keys():
        (folder / name).unlink(missing_ok=True)
    write_whole(notes, json.dumps({**{name: before[name] for name in before if name in found}, **now}))
    return folder


def local_copy(address: str) -> Path:
    """Return the folder of this machine for copies of what is below an address."""
    cache = os.environ.get("TUNIX_CACHE_DIR", "~/.cache/tunix")  # as loading.cache_dir has it by default
    return Path(cache).expanduser() / "buckets" / address.rstrip("/").replace("://", "/")


def upload(folder: Path, address: str, key: str, last: str = "") -> None:
    """Write the files of a folder below an address; the file named `last` comes after all others."""
    files = filesystem(address, key)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    for name in sorted(names, key=lambda name: name == last):
        with explaining(join(address, name), key):
            files.put_file(str(folder / name), join(address, name))
