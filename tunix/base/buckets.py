"""Files in buckets and on web servers, by addresses like s3://BUCKET/NAME, gs://BUCKET/NAME and https://HOST/NAME.

fsspec does the work. Its packages find credentials as the providers' own tools do (AWS_PROFILE, AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS, ...). fsspec and the package of a scheme are imported when an address is used.
"""

import hashlib
import importlib
import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from tunix.base.errors import UserError, first_line
from tunix.base.files import MAX_TEXT, describing_refusal, expand_home, read_json, replacing, resolve_below, write_whole
from tunix.base.forms import CACHE_FORMS

log = logging.getLogger(__name__)
# gcsfs logs its errors with their traceback, and `explaining` says them. Without a handler, Python prints them.
logging.getLogger("gcsfs").addHandler(logging.NullHandler())
logging.getLogger("gcsfs").propagate = False

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "https": "aiohttp", "http": "aiohttp"}  # package that fsspec needs, by scheme
BUCKETS = ("s3", "gs")  # schemes that can be written
VERSIONS = ".versions.json"  # in a mirrored folder: which version of each object is there
MAX_LISTING = 1 << 26  # bytes of all pages of a web server that are read to list a folder of it
READ_WHOLE = (".json", ".jinja", ".txt", ".yaml", ".model")  # ends of the names of files that hold at most MAX_TEXT
WEB_DEPTH = 8  # folders below each other that are listed on a web server, whose pages may name folders without end

# Reasons for an error of a server, by the name of its class; a subclass stands before its base.
REASONS = {
    "NoCredentialsError": "there are no credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)",
    "PermissionError": "access is denied: the credentials are wrong, or do not allow it",
    "FileNotFoundError": "there is no such bucket or object",
    "EndpointConnectionError": "the server cannot be reached",
    "ClientConnectorError": "the server cannot be reached",
    "NonHttpUrlRedirectClientError": "it leads to an address that is not read",
    "TooManyRedirects": "it leads from one address to the next, without end",
}
# Reasons for an error whose class says nothing, by words in its text: those of Google, tensorstore and gcsfs.
PATTERNS = {
    "Anonymous caller": "there are no credentials (GOOGLE_APPLICATION_CREDENTIALS)",
    "NOT_FOUND": REASONS["FileNotFoundError"],
    "Not Found": "there is no such file",  # of a web server
    "PERMISSION_DENIED": REASONS["PermissionError"],
    "Forbidden": REASONS["PermissionError"],
    "Unauthorized": REASONS["PermissionError"],
}


def is_address(path: str) -> bool:
    """Return whether a path is an address with a scheme, and no path of this machine.

    s3:/NAME lacks a slash: it is an address that nothing can read or write, not a folder `s3:` of this machine.
    """
    return "://" in path or path.startswith(tuple(f"{scheme}:/" for scheme in BUCKETS))


def is_bucket(path: str) -> bool:
    """Return whether a path is an address that can be written: of a known scheme, with the name of a bucket."""
    scheme, _, remaining = path.partition("://")
    return scheme in BUCKETS and remaining.partition("/")[0] != ""


def join(address: str, *names: str) -> str:
    """Return the address of something below a folder."""
    return "/".join([address.rstrip("/"), *names])


def filesystem(address: str, key: str) -> Any:
    """Return fsspec's file system of an address; `key` is for messages. It lists a web server within `MAX_LISTING`.

    Raises:
        UserError: a scheme that is not known, no name of a bucket, or a package that is missing.
    """
    scheme = address.partition("://")[0]
    if scheme not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise UserError(f"{key}={address}: an address begins with one of {known}")
    if scheme in BUCKETS and not is_bucket(address):
        raise UserError(f"{key}={address} names no bucket; write {scheme}://BUCKET/NAME")
    try:
        fsspec = importlib.import_module("fsspec")
        importlib.import_module(PACKAGES[scheme])
    except ImportError:
        raise UserError(f"{key}={address} needs {PACKAGES[scheme]}: pip install 'tunix-trainer[buckets]'") from None
    options: dict[str, Any] = {"use_listings_cache": False}  # it would not show what other processes write
    if scheme not in BUCKETS:
        options |= {"client_kwargs": {"response_class": _bound_pages(MAX_LISTING)}, "skip_instance_cache": True}
    return fsspec.filesystem(scheme, **options)


def _bound_pages(left: int) -> type:
    """Return the class of aiohttp's answers whose texts, in which fsspec finds links, have `left` bytes in all.

    A page of 3 MB may unpack to 3 GB, and pages may name folders without end.
    """

    class Answer(importlib.import_module("aiohttp").ClientResponse):  # type: ignore[misc]
        async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
            nonlocal left
            page = bytearray()
            async for block in self.content.iter_chunked(1 << 16):
                left -= len(block)
                if left < 0:
                    raise ValueError(f"its pages that list files are longer than {MAX_LISTING >> 20} MiB")
                page += block
            return page.decode(encoding or "utf-8", errors)

    return Answer


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
    if type(error.__cause__).__module__.startswith("aiohttp"):  # fsspec calls all that a web server refuses missing
        error = error.__cause__ or error
    if isinstance(error, TimeoutError) and not str(error):  # of tensorstore
        return "the server does not answer"
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = first_line(error)[:300]
    by_kind = (reason for kind, reason in REASONS.items() if kind in kinds)
    by_text = (reason for pattern, reason in PATTERNS.items() if pattern in text)
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
            entries = files.ls(address, detail=False)
        except FileNotFoundError:
            return []
    return sorted({name.rstrip("/").rpartition("/")[2] for name in entries} - {""})


def find_objects(address: str, key: str) -> dict[str, dict[str, Any]]:
    """Return what fsspec knows of every object below a folder, by its name there; {} if there is none."""
    files = filesystem(address, key)
    with explaining(address, key):
        root = files._strip_protocol(address.rstrip("/")) + "/"
        depth = {} if is_bucket(address) else {"maxdepth": WEB_DEPTH}
        found = files.find(address, detail=True, **depth)
        if not found and not is_bucket(address):
            files.info(address)  # of a web server that cannot be reached fsspec lists nothing
    return {name.removeprefix(root): info for name, info in found.items() if name.startswith(root)}


# What fsspec knows of an object that changes when the object does: the first one that the server says is its version.
VERSION_KEYS = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified", "LastModified", "mtime")


def version_of(info: dict[str, Any]) -> str:
    """Return a text that changes when an object does, of what fsspec knows of it; empty where the server says none."""
    return str(next((info[key] for key in VERSION_KEYS if info.get(key)), ""))


def find_version(address: str, info: dict[str, Any], key: str) -> str:
    """Return the version of an object; where its server says none, read it whole for the hash of its bytes."""
    if version := version_of(info):
        return version
    log.warning(
        "%s=%s: the server sends no ETag and no Last-Modified, so each start reads the file whole to see whether it "
        "has changed", key, address,
    )  # fmt: skip
    digest = hashlib.sha256()
    with explaining(address, key), filesystem(address, key).open(address, "rb", block_size=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return f"sha256 {digest.hexdigest()}"


def mirror(address: str, patterns: tuple[str, ...], key: str) -> Path:
    """Return a folder of this machine with the objects below an address whose names, or last parts, match a pattern.

    The folder is kept in `loading.cache_dir`; only objects that have changed are fetched again.

    Raises:
        UserError: no object matches, or the server refuses; the message names `key`.
    """
    files, found = filesystem(address, key), find_objects(address, key)
    requested = {name: info for name, info in found.items() if _is_wanted(name, patterns, is_bucket(address))}
    if not requested:
        raise UserError(f"{key}={address}: there is no {' or '.join(patterns)}")
    folder = local_copy(address)
    writing_cache = partial(describing_refusal, str(folder), otherwise="set TUNIX_CACHE_DIR to a folder of your own")
    with writing_cache():
        folder.mkdir(parents=True, exist_ok=True)
    # All names are looked at before the first byte is fetched: a listing with one bad name is not to be trusted.
    paths = {name: resolve_below(folder, name, f"{key}={address}") for name in requested}
    # Which version of each object is in the folder; where that is not known, all are fetched again.
    notes, before = folder / VERSIONS, {}
    with suppress(UserError):
        before = read_json(notes)
    if not is_bucket(address):  # the page of a web server names its files, and says nothing else about them
        with explaining(address, key):
            requested = {name: files.info(join(address, name)) for name in requested}
    now = {name: [info.get("size"), version_of(info)] for name, info in requested.items()}
    if unknown := [name for name in now if not now[name][1]]:
        log.warning(
            "%s=%s: the server sends no ETag and no Last-Modified for %s%s, which is fetched again each time",
            key, address, unknown[0], f" and {len(unknown) - 1} more" if unknown[1:] else "",
        )  # fmt: skip
    for name, version in now.items():
        target = paths[name]
        if before.get(name) == version and version[1] and target.is_file():
            continue
        with explaining(join(address, name), key):
            target.parent.mkdir(parents=True, exist_ok=True)
            # Fetched beside its place and renamed: several processes of a host may mirror the same address at once.
            with replacing(target) as part:
                files.get_file(join(address, name), str(part), callback=_bound_file(name))
    for name in before.keys() - found.keys():
        resolve_below(folder, name, str(notes)).unlink(missing_ok=True)
    after = {**{name: before[name] for name in before if name in found}, **now}
    if after != before:  # else whoever may only read the cache goes on with what is there
        with writing_cache():
            write_whole(notes, json.dumps(after))
    return folder


def _bound_file(name: str) -> Any:
    """Return what fsspec tells how much of a file has come. A file that is read whole is refused when it is too long: a
    server may send one without an end."""
    left = MAX_TEXT if name.endswith(READ_WHOLE) else math.inf

    class Progress(importlib.import_module("fsspec.callbacks").Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            nonlocal left
            left -= inc
            if left < 0:
                raise ValueError(f"it has more than {MAX_TEXT:,} bytes, and such files have at most as many")

    return Progress()


def _is_wanted(name: str, patterns: tuple[str, ...], in_bucket: bool) -> bool:
    """Return whether an object of a listing is to be copied: an object whose name, or its last part, matches a pattern.

    Left out are objects that stand for folders, those with the name of our own notes, and links of a web server's page
    that are questions to the server (`?C=N;O=D` sorts the page).
    """
    last = name.rpartition("/")[2]
    if not last or last == VERSIONS or (not in_bucket and {"?", "#"} & set(name)):
        return False
    return any(fnmatch(name, pattern) or fnmatch(last, pattern) for pattern in patterns)


def local_copy(address: str) -> Path:
    """Return the folder of this machine for copies of what is below an address."""
    cache = os.environ.get("TUNIX_CACHE_DIR", "~/.cache/tunix")  # as loading.cache_dir has it by default
    name = "/".join(part for part in address.replace("://", "/").split("/") if part)
    return resolve_below(expand_home(cache) / "buckets", f"v{CACHE_FORMS['buckets']}-{name}", address)


def upload(folder: Path, address: str, key: str, last: str = "") -> None:
    """Write the files of a folder below an address; the file named `last` comes after all others."""
    files = filesystem(address, key)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    for name in sorted(names, key=lambda name: name == last):
        with explaining(join(address, name), key):
            files.put_file(str(folder / name), join(address, name))
