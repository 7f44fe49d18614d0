"""Random requests to `tunix.serve`, which must not end it: a kind of the tries of benchmarks/fuzz.py.

    python -m benchmarks.fuzz_requests checkpoint=run chat_template=chat.jinja requests=FILE

FILE has the requests as JSON: a list of bytes in base64. This program starts the server with the other words, sends
each request over a connection of its own, and looks at what comes back: a status below 500 or 503, an error of the
API's own form, and at the end a server that is well and leaves with exit code 0. It exits with 1 where something is
wrong.
"""

import base64
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

ANSWER_S = 90.0  # until an answer is complete; the first one compiles
TOGETHER = 4  # requests at one time
PATHS = "/v1/completions", "/v1/chat/completions"
OTHER_PATHS = (
    "/v1/models", "/v1/models/run", "/v1/models/..%2f..", "/health", "/metrics", "/", "/v1", "/nosuch", "/%ff", "*",
    "//v1/completions", "/v1/completions?x=1", "/v1/models/" + "a" * 3000, "http://other/v1/models",
)  # fmt: skip
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 1.5, -0.0, 1e300, 2**31, 2**63, 10**30, "", "a", "a b", "\u00e9", "\U0001f600",
    "\ud800", "\0", "x" * 5000, [], [""], ["a", "b"], [1, 2], [[1], [2]], [-1], [10**9], [None], {}, {"a": 1}, [[[]]],
    "auto", "none", "{{ 1/0 }}", "%s", "<script>", "../x",
]  # fmt: skip
KEYS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "stop", "seed", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "best_of", "tools", "tool_choice",
    "user", "response_format", "presence_penalty", "logit_bias", "chat_template_kwargs", "suffix", "nosuch",
)  # fmt: skip
ROLES = "system", "user", "assistant", "tool", "nosuch"
HEADERS = [
    "Content-Length: 0", "Content-Length: -1", "Content-Length: \u00b2", "Content-Length: 99999999999",
    "Expect: 100-continue", "Transfer-Encoding: chunked", "Transfer-Encoding: nosuch", "Content-Encoding: gzip",
    "Content-Type: text/html", "Authorization: Bearer x", "Authorization: Basic x", "Host: evil.example", "Host: ",
    "Upgrade: websocket", "A: " + "b" * 9000, ": x", "Connection: upgrade",
]  # fmt: skip


def make_requests(rng: random.Random, count: int, damage: Callable[[random.Random, bytes], bytes]) -> list[str]:
    """Return random requests in base64; `damage` changes some bytes."""
    return [base64.b64encode(make_request(rng, damage)).decode() for _ in range(count)]


def make_request(rng: random.Random, damage: Callable[[random.Random, bytes], bytes]) -> bytes:
    method = rng.choice(("POST",) * 8 + ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "NOSUCH"))
    path = rng.choice(PATHS * 5 + OTHER_PATHS)
    body = json.dumps(make_body(rng, "chat" in path)).encode()
    if rng.random() < 0.25:
        body = damage(rng, body)
    headers = [f"Content-Length: {len(body)}", "Content-Type: application/json", "Host: 127.0.0.1", "Connection: close"]
    if rng.random() < 0.2:
        headers[rng.randrange(3)] = rng.choice(HEADERS)
    whole = "\r\n".join([f"{method} {path} HTTP/1.1", *headers]).encode() + b"\r\n\r\n" + body
    return damage(rng, whole) if rng.random() < 0.1 else whole


def make_body(rng: random.Random, is_chat: bool) -> Any:
    """Return the object of a request: one that is answered, with a few other values."""
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 3))}
    if is_chat:
        count = rng.choice((1, 1, 2, 3))
        body["messages"] = [
            {"role": rng.choice(ROLES), "content": rng.choice(["a", "b c", *VALUES])} for _ in range(count)
        ]
    else:
        body["prompt"] = rng.choice(["a", "b c", *VALUES])
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        body[rng.choice(KEYS)] = rng.choice(VALUES)
    return rng.choice(VALUES) if rng.random() < 0.03 else body


def send(port: int, request: bytes) -> str:
    """Send a request, and return what is wrong with the answer; nothing where it is as it should be."""
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_S) as connection:
            with suppress(ConnectionError):  # the server may refuse it before all of it has come
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                answer += part
    except ConnectionError:
        pass
    except TimeoutError:
        return f"no end of the answer after {ANSWER_S:g} s"
    status = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
    if status is None:  # a client that leaves early, or whose request has no end, is not owed an answer
        return f"an answer that is no HTTP: {answer[:100]!r}" if answer else ""
    code, body = int(status[1]), answer.partition(b"\r\n\r\n")[2]
    if code >= 500 and code != 503:
        return f"status {code}: {body[:200]!r}"
    is_own = body and b"content-type: application/json" in answer.partition(b"\r\n\r\n")[0].lower()
    if code >= 400 and is_own and not isinstance(json.loads(body).get("error"), dict):
        return f"status {code} without an error: {body[:200]!r}"
    return ""


def main(words: list[str]) -> int:
    file = next(word.partition("=")[2] for word in words if word.startswith("requests="))
    command = [word for word in words if not word.startswith("requests=")]
    requests = [base64.b64decode(each) for each in json.loads(Path(file).read_text())]
    server = subprocess.Popen(
        [sys.executable, "-m", "tunix.serve", *command, "server.port=0"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    if (found := re.search(r"http://127\.0\.0\.1:(\d+)/", line)) is None:
        print(f"the server has not begun: {line}{server.stdout.read()}")
        return server.wait() or 1
    threading.Thread(target=server.stdout.read, daemon=True).start()
    port, begun = int(found[1]), time.monotonic()
    with ThreadPoolExecutor(TOGETHER) as pool:
        answers = pool.map(lambda request: send(port, request), requests)
        faults = [(request, wrong) for request, wrong in zip(requests, answers, strict=True) if wrong]
    if wrong := send(port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"):
        faults.append((b"GET /health", wrong))
    server.send_signal(signal.SIGTERM)
    try:
        code = server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()
        code = None
    if code:
        faults.append((b"SIGTERM", f"exit code {code}"))
    for request, wrong in faults:
        print(f"{wrong}\n  {request[:400]!r}")
    print(f"{len(requests)} requests in {time.monotonic() - begun:.1f} s, {len(faults)} answered wrongly")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
