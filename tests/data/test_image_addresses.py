"""Images on web servers: real ones, that answer well, badly, or for ever."""

import threading
import time
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.parse import unquote

import pytest
from PIL import Image
from support.images import draw, save

from tunix.base import web
from tunix.data import images
from tunix.data.files import BadRow
from tunix.data.image_processors import SquareProcessor
from tunix.data.images import ImageReader

FORM = SquareProcessor(8, 4)
IMAGE = save(Image.fromarray(draw(40, 30)))
LIMIT = 100_000  # data.max_document_bytes


class Server(ThreadingHTTPServer):
    """Answers by the last part of a path, and remembers the paths that it was asked for."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked, self.num_sent, self.other = [], 0, ""
        self.root = f"http://127.0.0.1:{self.server_port}/photos"

    def handle_error(self, request, client_address):
        """Leave out the traceback of a client that has read enough."""


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.asked.append(self.path)
        self.close_connection = True
        name = unquote(Path(self.path).name)
        getattr(self, f"answer_{name.partition('.')[0]}", self.answer_image)()

    def send(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def answer_image(self):
        self.send(200, IMAGE, **{"Content-Length": str(len(IMAGE))})

    def answer_parts(self):
        """Of unknown length, in parts that arrive one after the other."""
        self.send(200, **{"Transfer-Encoding": "chunked"})
        for first in range(0, len(IMAGE), 700):
            part = IMAGE[first : first + 700]
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
            time.sleep(0.01)
        self.wfile.write(b"0\r\n\r\n")

    def answer_moved(self):
        self.send(302, Location="/photos/image.png", **{"Content-Length": "0"})

    def answer_elsewhere(self):
        self.send(302, Location=f"{self.server.other}/secret.png", **{"Content-Length": "0"})

    def answer_above(self):
        self.send(302, Location="/photos/%2e%2e/secret.png", **{"Content-Length": "0"})

    def answer_local(self):
        self.send(302, Location="file:///etc/passwd", **{"Content-Length": "0"})

    def answer_loop(self):
        self.send(302, Location="/photos/loop.png", **{"Content-Length": "0"})

    def answer_gone(self):
        self.send(404, **{"Content-Length": "0"})

    def answer_busy(self):
        """An image at the third try."""
        tries = len(self.server.asked)
        if tries > 2:
            self.answer_image()
        else:
            self.send(503 if tries == 1 else 429, **{"Retry-After": "0", "Content-Length": "0"})

    def answer_down(self):
        self.send(503, **{"Content-Length": "0"})

    def answer_later(self):
        self.send(429, **{"Retry-After": "3600", "Content-Length": "0"})

    def answer_cut(self):
        self.send(200, IMAGE[:500], **{"Content-Length": str(len(IMAGE))})

    def answer_endless(self):
        self.send(200, Connection="close")
        while True:
            self.wfile.write(bytes(10_000))
            self.server.num_sent += 10_000

    def answer_silent(self):
        time.sleep(5)

    def answer_slow(self):
        self.send(200, Connection="close")
        for _ in range(100):
            self.wfile.write(b"a")
            self.wfile.flush()
            time.sleep(0.05)

    def answer_head(self):
        """A head that never ends, a byte at a time."""
        for _ in range(100):
            self.wfile.write(b"a")
            time.sleep(0.05)

    def answer_chunk(self):
        """The length of a part, a digit at a time."""
        self.send(200, **{"Transfer-Encoding": "chunked"})
        self.answer_head()

    def answer_more(self):
        """A redirect with a page without end."""
        self.send(302, Location="/photos/image.png", Connection="close")
        while True:
            self.wfile.write(bytes(10_000))
            self.server.num_sent += 10_000


@pytest.fixture
def server():
    with Server() as server, Server() as other:
        server.other = other.root
        for each in (server, other):
            threading.Thread(target=each.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        assert other.asked == []
        for each in (server, other):
            each.shutdown()


def read(server, name):
    (kept,) = ImageReader(FORM, ".", LIMIT, 10_000, (server.root,)).read([f"{server.root}/{name}"])
    return kept


@pytest.mark.parametrize("name", ["image.png", "a b ü.png?size=1", "parts.png", "moved.png", "more.png"])
def test_images_are_fetched(server, name):
    assert read(server, name) == read(server, "image.png")
    assert server.num_sent < 50 * LIMIT


@pytest.mark.parametrize(
    ("name", "tries", "status"), [("busy", 3, 0), ("down", 4, 503), ("later", 1, 429), ("gone", 1, 404)]
)
def test_a_server_that_fails_for_now_is_asked_again(server, name, tries, status, monkeypatch):
    """A few times, and not where it wants a longer pause than an image may take."""
    monkeypatch.setattr(web, "PAUSE_S", 0.01)
    if status:
        with pytest.raises(BadRow, match=f"has an image that cannot be read, .*/{name}.png: .*HTTP Error {status}"):
            read(server, f"{name}.png")
    else:
        assert read(server, f"{name}.png")
    assert len(server.asked) == tries


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "elsewhere.png",
            "has an image that is redirected to {other}/secret.png, which begins with none of data.image_",
        ),
        ("above.png", "has an image that is redirected to .*/photos/%2e%2e/secret.png, which begins with none of"),
        ("local.png", "has an image that cannot be read, {root}/local.png: .*file:///etc/passwd' is not allowed"),
        ("loop.png", "has an image that cannot be read, {root}/loop.png: .*infinite loop"),
        ("cut.png", "has an image that cannot be read, {root}/cut.png: the server ended [0-9,]+ bytes before the end"),
        ("endless.png", "has images that are longer than data.max_document_bytes, {root}/endless.png"),
        ("silent.png", "has an image that cannot be read, {root}/silent.png: timed out"),
        ("slow.png", "has an image that cannot be read, {root}/slow.png: it takes more than 0.3 s"),
        ("head.png", "has an image that cannot be read, {root}/head.png: it takes more than 0.3 s"),
        ("chunk.png", "has an image that cannot be read, {root}/chunk.png: it takes more than 0.3 s"),
        ("a\nb\0.png", "has an image that is none of JPEG"),
    ],
)
def test_a_server_that_answers_badly(server, name, message, monkeypatch):
    """In one line, soon, and with no more bytes than a row may have."""
    monkeypatch.setattr(web, "PAUSE_S", 0.01)
    # One limit at a time: on a busy machine a server is silent for a while, too.
    slow = dict.fromkeys(("slow.png", "head.png", "chunk.png"), ("DOWNLOAD_S", 0.3))
    limits = {"silent.png": ("SILENCE_S", 0.5), **slow}
    if name in limits:
        monkeypatch.setattr(images, *limits[name])
    if "\n" in name:
        monkeypatch.setattr(Answer, "answer_image", lambda self: self.send(200, b"?", **{"Content-Length": "1"}))
    with pytest.raises(BadRow, match=message.format(root=server.root, other=server.other)) as error:
        read(server, name)
    assert "\n" not in str(error.value)
    assert server.num_sent < 50 * LIMIT  # what fits into the buffers of both ends
    assert not any("secret" in path for path in server.asked)


@pytest.mark.parametrize("name", ["%2e%2e/secret.png", "%2E./secret.png", "..\\secret.png", "a/%2e%2e%5csecret.png"])
def test_encoded_ways_out_are_not_asked_for(server, name):
    with pytest.raises(BadRow, match="has an image at .*, which begins with none of data.image_addresses"):
        read(server, name)
    assert server.asked == []


def test_a_server_that_is_not_there(server, monkeypatch):
    monkeypatch.setattr(web, "PAUSE_S", 0.01)
    server.shutdown()
    server.server_close()
    with pytest.raises(BadRow, match="has an image that cannot be read, .*refused"):
        read(server, "image.png")


@pytest.mark.parametrize(
    ("error", "deadline", "pauses"),
    [
        (OSError("gone"), 100, [0.5, 1, 2]),
        (OSError("gone"), 1.0, [0.5]),  # the next try would begin behind the deadline
        (HTTPError("a", 503, "", Message(), None), 100, [0.5, 1, 2]),
        (HTTPError("a", 429, "", Message(), None), 100, [0.5, 1, 2]),
        (HTTPError("a", 404, "", Message(), None), 100, []),
        (ValueError("no reply"), 100, []),
    ],
)
def test_when_a_server_is_asked_again(error, deadline, pauses, monkeypatch):
    clock, waited, tries = [0.0], [], []

    def sleep(seconds):
        waited.append(seconds)
        clock[0] += seconds

    def request():
        tries.append(clock[0])
        raise error

    monkeypatch.setattr(web, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with pytest.raises(type(error)):
        web.try_again(request, deadline)
    assert (waited, len(tries)) == (pauses, len(pauses) + 1)


def test_a_server_says_when_it_is_asked_again(monkeypatch):
    """A number of seconds; a date is not read. The answer of the next try counts."""
    waited, errors = [], []
    for after in ("7", "0", "Wed, 21 Oct 2026 07:28:00 GMT"):
        (head := Message())["Retry-After"] = after
        errors.append(HTTPError("a", 503, "", head, None))

    def request():
        if errors:
            raise errors.pop(0)
        return "said"

    monkeypatch.setattr(web, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=waited.append))
    assert web.try_again(request, 100) == "said"
    assert waited == [7, 1, 2]
