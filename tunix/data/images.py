"""Images of rows: found, checked once, kept compressed in the shards, and decoded for a batch.

A row names an image by a path beside its file, by an address, or has its bytes. In the text of a conversation an image
is the `mark` of the model's processor, by the chat template; the tokenizer gets all of its tokens
(data/image_processors.py). A batch has the pixels of its images in slots, and for each soft token the number of the
tower's result that belongs there.
"""

import base64
import binascii
import io
import math
import os
import time
import urllib.request
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from PIL import Image

from tunix.base.buckets import explain, filesystem, is_address, join
from tunix.base.errors import first_line
from tunix.base.files import expand_home, parse_json
from tunix.base.web import build_opener, read_page, try_again
from tunix.data.chat import Message
from tunix.data.files import BadRow, Columns
from tunix.data.image_processors import FORMATS, ImageProcessor, convert

# Pillow warns of images with more than half of its `Pixels`; `keep_image` compares with the limit itself.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

KEPT_FORMATS = ("JPEG", "PNG", "WEBP")  # whose files are kept as they are
KEPT_AREAS = 4  # an image with more than so many times the pixels that the tower sees is kept in the tower's size
DEEP_MODES = ("I", "F")  # with more than 8 bits a channel, which Pillow would cut off


def keep_image(
    data: bytes, name: str, processor: ImageProcessor, max_pixels: int, key: str = "data.max_image_pixels"
) -> bytes:
    """Return what the shards keep of an image: its file, or of a large one a PNG of the pixels that the tower sees.

    `ImageProcessor.decode` gives the same pixels for both. The image is decoded here once, so it can be read later.
    `key` sets `max_pixels`; messages name it.

    Raises:
        BadRow: it cannot be read, or has too many pixels, or the tower takes none of its shape.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            kind = image.format
            if width * height > max_pixels:
                raise BadRow(_describe_bomb(name, max_pixels, key, f", {width} x {height}"))
            if getattr(image, "is_animated", False) and kind != "MPO":  # a camera's MPO has a preview behind the photo
                raise BadRow(f"has an animation, {name}; give one image of it")
            _check_depth(image, name)
            pixels = convert(image)
    except BadRow:
        raise
    except Image.DecompressionBombError:
        raise BadRow(_describe_bomb(name, max_pixels, key)) from None
    except Image.UnidentifiedImageError:
        raise BadRow(f"has an image that is none of {', '.join(FORMATS)}, {name}") from None
    except Exception as error:  # decoders raise errors of many kinds for a file that is broken
        reason = first_line(error)[:200]
        raise BadRow(f"has a broken image, {name}: {reason}") from None
    try:
        processor.check(*pixels.size)
        area = math.prod(processor.fit(*pixels.size))
    except ValueError as error:
        raise BadRow(f"has an image {error}, {name}") from None
    if kind in KEPT_FORMATS and width * height <= KEPT_AREAS * area and len(data) <= 3 * area:
        return data
    file = io.BytesIO()
    processor.resize(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _check_depth(image: Image.Image, name: str) -> None:
    if image.mode.split(";")[0] in DEEP_MODES:
        raise BadRow(f"has an image of more than 8 bits a channel, {name}; store it with 8")


def _describe_bomb(name: str, max_pixels: int, key: str, size: str = "") -> str:
    return f"has an image of more than {key}={max_pixels} pixels, {name}{size}"


class ImageReader(NamedTuple):
    """Finds the images that the rows of one file name."""

    processor: ImageProcessor
    root: str  # folder, or address of a folder, that relative paths begin at
    max_bytes: int  # of the images of one row
    max_pixels: int  # of one image
    addresses: tuple[str, ...] = ()  # beginnings of the addresses that rows may name
    only_places: bool = False  # of a text that is read for its words, without the images
    folders: tuple[str, ...] | None = None  # of requests to a server: where files may be; None: anywhere
    deadline: float = math.inf  # of requests to a server, on the clock of `time.monotonic`
    # For messages: what bounds the bytes and the pixels, and what to give in place of an address that nothing allows.
    bounds: tuple[str, str] = ("data.max_document_bytes", "data.max_image_pixels")
    in_place: str = ""

    def read(self, references: list[Any]) -> list[bytes]:
        """Return what is kept of each image; a reference is a path, an address, a data URL, bytes, a mapping with one
        of these, or an image of Pillow.

        Raises:
            BadRow: an image cannot be found or read.
            TimeoutError: the deadline passes.
        """
        if self.only_places:
            return []
        images, left = [], self.max_bytes
        for reference in references:
            # A file of a kilobyte may have 25 million pixels, and a request thousands of such files.
            if time.monotonic() > self.deadline:
                raise TimeoutError("the images take too long")
            data, name = self._fetch(reference, left)
            left -= len(data)
            if left < 0:
                raise BadRow(f"has images that are longer than {self.bounds[0]}, {name}")
            images.append(keep_image(data, name, self.processor, self.max_pixels, self.bounds[1]))
        return images

    def _fetch(self, reference: Any, limit: int) -> tuple[bytes, str]:
        """Return at most `limit` + 1 bytes of an image, and its name for messages."""
        name = ""
        for _ in range(2):  # {"image_url": {"url": ...}} has one mapping in another
            if isinstance(reference, dict):
                name = name or _show(str(reference.get("path") or ""))
                key = next((key for key in REFERENCE_KEYS if reference.get(key) is not None), None)
                if key is None:
                    raise BadRow(f"has an image without any of {', '.join(REFERENCE_KEYS)}")
                reference = f"data:;base64,{reference[key]}" if key == "base64" else reference[key]
        if isinstance(reference, bytes):
            return reference, name or "in its bytes"
        if isinstance(reference, Image.Image):
            _check_depth(reference, "of Pillow")
            file = io.BytesIO()
            convert(reference).save(file, "PNG", compress_level=1)
            return file.getvalue(), "of Pillow"
        if not isinstance(reference, str):
            raise BadRow(f"has {type(reference).__name__} in place of an image")
        if reference.startswith("data:"):
            return _decode_url(reference), "in a data URL"
        if reference.startswith("file://"):
            return self._read_file(unquote(reference.removeprefix("file://")), limit), _show(reference)
        if is_address(reference):
            return self._download(reference, limit), _show(reference)
        return self._read_file(reference, limit), _show(reference)

    def _read_file(self, path: str, limit: int) -> bytes:
        if is_address(self.root):
            if path.startswith(("/", "~")) or ".." in path.split("/"):
                raise BadRow(f"names an image outside of {self.root}, {_show(path)}")
            return _open_address(join(self.root, path), limit)
        try:
            full = Path(self.root, expand_home(path))
            if self.folders is not None and not any(full.resolve().is_relative_to(each) for each in self.folders):
                raise BadRow(f"names a file outside of server.image_folders, {_show(path)}")
            if full.is_file():  # a pipe or a device has no end
                with full.open("rb") as file:
                    return file.read(limit + 1)
            exists = full.exists()
        except BadRow:
            raise
        except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have, a home that nobody has
            reason = getattr(error, "strerror", None) or error
            raise BadRow(f"has an image that cannot be read, {_show(path)}: {reason}") from None
        raise BadRow(f"has an image that is {'no file' if exists else 'not there'}, {_show(str(full))}")

    def _download(self, address: str, limit: int) -> bytes:
        if self.in_place:
            raise BadRow(f"names an image at an address; {self.in_place}")
        self.check_address(address)
        if address.startswith(("http://", "https://")):
            return _fetch_page(address, limit, self.check_address)
        return _open_address(address, limit)

    def check_address(self, address: str, source: str = "has an image at") -> None:
        """Raise `BadRow` for an address that begins with none of those that are allowed, or that a server may take for
        one: by `..`, whose dots may be encoded."""
        allowed = any(address.startswith(root.rstrip("/") + "/") for root in self.addresses)
        if not allowed or ".." in unquote(address).replace("\\", "/").split("/"):
            raise BadRow(
                f"{source} {_show(address)}, which begins with none of data.image_addresses="
                f"[{','.join(self.addresses)}]"
            )


DOWNLOAD_S, SILENCE_S = 120, 30  # of an image from a web server: in all, tries and pauses too, and without a byte
SAFE = "%/:?#[]@!$&'()*+,;=~"  # characters of an address that are sent as they are

# Keys of a mapping that stands for an image: Hugging Face's image feature, and message parts of it and of OpenAI.
REFERENCE_KEYS = ("bytes", "image", "path", "url", "image_url", "base64")


def _show(name: str) -> str:
    """Return a name for a message of one line."""
    return name[:300] if name.isprintable() else repr(name[:300])


def _open_address(address: str, limit: int) -> bytes:
    try:
        with filesystem(address, "data").open(address, "rb") as file:
            return file.read(limit + 1)
    except Exception as error:  # each file system has kinds of its own
        raise BadRow(f"has an image that cannot be read, {_show(address)}: {explain(error)}") from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a server to another address where that is allowed, too."""

    def __init__(self, check: Callable[[str, str], None]):
        self.check = check

    def redirect_request(self, *arguments: Any) -> Any:
        self.check(arguments[-1], "has an image that is redirected to")
        arguments[1].close()  # urllib would read all that comes with the redirect
        return super().redirect_request(*arguments)


def _fetch_page(address: str, limit: int, check: Callable[[str, str], None]) -> bytes:
    """Return at most `limit` + 1 bytes from a web server; `check` says where it may redirect to. fsspec follows every
    redirect, and takes a part of an answer of unknown length for the whole."""
    opener, deadline = build_opener(DOWNLOAD_S, _Redirects(check)), time.monotonic() + DOWNLOAD_S

    def request() -> bytes:
        with opener.open(quote(address, safe=SAFE), timeout=SILENCE_S) as page:
            return read_page(page, limit)

    try:
        return try_again(request, deadline)
    except BadRow:
        raise
    except (OSError, ValueError, HTTPException) as error:
        raise BadRow(f"has an image that cannot be read, {_show(address)}: {explain(error)}") from None


def _decode_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadRow("has a data URL that is not data:image/TYPE;base64,BYTES")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise BadRow("has a data URL whose bytes are not base64") from None


def find_root(path: str) -> str:
    """Return the folder, or its address, that paths in a file of rows begin at; the working folder where there is no
    such file."""
    if is_address(path):
        return path.rpartition("/")[0]
    if os.path.isdir(path):
        return path
    return os.path.dirname(path) or "." if os.path.isfile(path) else "."


def read_parts(content: list[Any]) -> str | list[dict[str, Any]]:
    """Return the parts of a turn: {"type": "text", "text"} or {"type": "image"}, with `image` where the part has its
    image. Texts alone are joined. Raises `BadRow` for a part of another kind."""
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in ("image", "image_url"):
            reference = {key: part[key] for key in REFERENCE_KEYS if part.get(key) is not None}
            parts.append({"type": "image", "image": reference} if reference else {"type": "image"})
        else:
            raise BadRow(f"has a content with a part that is neither text nor an image: {kind}")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def list_column(columns: Columns, row: dict[str, Any]) -> list[Any]:
    """Return the images in a row's column: one of them, a list, or a list as JSON."""
    name = columns.images
    if name == "images" and row.get(name) is None:
        name = "image"
    try:
        references = list_references(None if name is None else row.get(name))
    except ValueError:
        raise BadRow(f"has no list of images in column {name}") from None
    return [each for each in references if each is not None]


def list_references(value: Any) -> list[Any]:
    """Return the images in a cell: one of them, a list, or a list as JSON; none where it is empty. Raises `ValueError`
    for a text that begins like a list and is none."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value)
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]


IMAGE_IN_ANSWER = "has an image in an answer, and a model answers with text"


def take_images(turns: list[Message], column: list[Any], reader: ImageReader | None) -> list[Any]:
    """Take the images out of the turns, where {"type": "image"} stays; return them in the order of their places.

    A part without an image of its own takes the next one of the row's column. Where no turn has a part, the images
    of the column stand at each mark of the processor in the text, or before the text of the first turn of the user.

    Raises:
        BadRow: more places than images or fewer, an image in an answer, a text with a token that stands for
            images, or images without a reader: for a model that sees none.
    """
    if reader is None:
        if column or any(isinstance(turn["content"], list) for turn in turns):
            raise BadRow(
                "has an image, and the model takes none (model.vision=null, or training.images_per_row=0): choose one "
                "that does; data.columns.images=null leaves a column of images out"
            )
        return []
    if column and not any(isinstance(turn["content"], list) for turn in turns):
        _place(turns, len(column), reader.processor.mark)
    found, rest = [], iter(column)
    for turn in turns:
        content = turn["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            if part["type"] == "text":
                if token := next((token for token in reader.processor.tokens if token in part["text"]), None):
                    raise BadRow(f"has {token} in its text where there is no image")
                continue
            if turn["role"] == "assistant":
                raise BadRow(IMAGE_IN_ANSWER)
            image = part.pop("image", None)
            found.append(next(rest, None) if image is None else image)
    num_missing, num_left = sum(each is None for each in found), len(list(rest))
    if num_missing or num_left:
        raise BadRow(f"has {len(found)} places for images and {len(found) - num_missing + num_left} images")
    return found


def _place(turns: list[Message], count: int, mark: str) -> None:
    """Put places for `count` images into turns of text."""
    if not any(mark in turn["content"] for turn in turns):
        first = next((turn for turn in turns if turn["role"] == "user"), None)
        if first is None:
            raise BadRow("has images and no turn of the user")
        image_parts = [{"type": "image"} for _ in range(count)]
        first["content"] = [*image_parts, {"type": "text", "text": first["content"]}]
        return
    for turn in turns:
        if mark in turn["content"]:
            turn["content"] = list(_split(turn["content"], mark))


def _split(text: str, mark: str) -> Iterator[dict[str, Any]]:
    for number, piece in enumerate(text.split(mark)):
        if number:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


AHEAD = 4  # items of each thread that are read before their turn


def map_ahead(work: Callable[[Any], Any], items: Iterable[Any], num_threads: int) -> Iterator[Any]:
    """Yield `work(item)` in the order of the items; threads do the work of the next ones. Pillow leaves Python's lock
    while it decodes."""
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[Future[Any]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > num_threads * AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
