"""Answers of web servers: read up to a bound, in time, and asked for again where a server fails for now."""

import re
import time
from collections.abc import Callable
from http.client import HTTPException
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


def read_page(page: Any, limit: int, timeout_s: float) -> bytes:
    """Return at most `limit` + 1 bytes of the answer of a web server, as urllib opens one.

    Raises:
        TimeoutError: reading takes longer.
        ConnectionError: the answer ends before the end that it has announced.
    """
    data, deadline = bytearray(), time.monotonic() + timeout_s
    while len(data) <= limit and (block := page.read1(min(1 << 16, limit + 1 - len(data)))):
        data += block
        if time.monotonic() > deadline:
            raise TimeoutError(f"it takes more than {timeout_s:.1f} s")
    if len(data) <= limit and page.length:
        raise ConnectionError(f"the server ended {page.length:,} bytes before the end")
    return bytes(data)
