"""Answers of web servers: read up to a bound, in time, and asked for again where a server fails for now."""

import io
import re
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from typing import Any, TypeVar
from urllib.error import HTTPError

Answer = TypeVar("Answer")

MAX_TRIES = 4
PAUSE_S = 0.5  # before the second try; doubled before each one after
TEMPORARY = (408, 409, 425, 429)  # statuses after which a request is made again, beside those from 500 on


def find_pause(error: Exception) -> float | None:
    """Return the seconds that a server asks for before the next try, 0 if it says none; None: no try would help.

    Of `Retry-After` seconds are read, and no date.
    """
    if not isinstance(error, HTTPError):
        return 0.0 if isinstance(error, OSError | HTTPException) else None
    if error.code not in TEMPORARY and error.code < 500:
        return None
    after = error.headers.get("Retry-After", "")
    return float(after) if re.fullmatch(r"\d{1,6}", after) else 0.0


def try_again(
    request: Callable[[], Answer], deadline: float, find_pause: Callable[[Any], float | None] = find_pause
) -> Answer:
    """Return what `request` returns, which is called up to `MAX_TRIES` times.

    Raises:
        Exception: that of the last call. `find_pause` says that no try would help, or the next one would begin after
            the deadline, on the clock of `time.monotonic`.
    """
    number = 1
    while True:
        try:
            return request()
        except Exception as error:
            asked_s = find_pause(error)
            if asked_s is None or number == MAX_TRIES:
                raise
            pause_s = max(asked_s, PAUSE_S * 2 ** (number - 1))
            if time.monotonic() + pause_s > deadline:
                raise
        time.sleep(pause_s)
        number += 1


class _Limited(io.RawIOBase):
    """Reads what a server sends until a deadline; it stands in the place of the connection's socket.

    The limit that a socket has is for one piece of an answer: a head of a byte at a time may take years.
    """

    def __init__(self, sock: Any, timeout_s: float, deadline: float):
        self.sock, self.timeout_s, self.deadline = sock, timeout_s, deadline
        self.silence_s, self.file = sock.gettimeout(), sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self.deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            self.sock.settimeout(min(left_s, self.silence_s))
            return self.file.readinto(buffer)
        except TimeoutError:
            if left_s > self.silence_s:
                raise
            raise TimeoutError(f"it takes more than {self.timeout_s:.1f} s") from None

    def close(self) -> None:
        self.file.close()
        super().close()


class _Handler(urllib.request.AbstractHTTPHandler):
    limits: tuple[float, float]

    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        def connect(*arguments: Any, **keywords: Any) -> Any:
            connection = http_class(*arguments, **keywords)
            connection.response_class = lambda sock, *more, **named: HTTPResponse(
                _Limited(sock, *self.limits),  # type: ignore[arg-type]
                *more,
                **named,
            )
            return connection

        return super().do_open(connect, req, **options)


class _Http(_Handler, urllib.request.HTTPHandler):
    pass


class _Https(_Handler, urllib.request.HTTPSHandler):
    pass


def build_opener(timeout_s: float, *handlers: Any) -> urllib.request.OpenerDirector:
    """Return an opener of urllib whose answers, with their heads, must be whole in `timeout_s` seconds from now on; one
    that is not raises `TimeoutError`."""
    limited = _Http(), _Https()
    for each in limited:
        each.limits = timeout_s, time.monotonic() + timeout_s
    return urllib.request.build_opener(*limited, *handlers)


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a key would go to the other host too, and urllib makes a GET without a body of a POST."""

    def redirect_request(self, *_: Any) -> None:
        return None


def read_page(page: Any, limit: int) -> bytes:
    """Return at most `limit` + 1 bytes of the answer of a web server, as an opener gives one.

    Raises:
        TimeoutError: it is not whole in the time of the opener.
        ConnectionError: the answer ends before the end that it has announced.
    """
    data = bytearray()
    while len(data) <= limit and (block := page.read1(min(1 << 16, limit + 1 - len(data)))):
        data += block
    if len(data) <= limit and page.length:
        raise ConnectionError(f"the server ended {page.length:,} bytes before the end")
    return bytes(data)
