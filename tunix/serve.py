"""Serve a model to clients of OpenAI's API: `python -m tunix.serve checkpoint=RUN|FOLDER|ID`.

    POST /v1/chat/completions    an answer in a conversation, whole or as a stream
    POST /v1/completions         continuations of texts, whole or as a stream
    GET  /v1/models              the model that is served
    GET  /health, /metrics       for those who look after the server; the second in Prometheus' text

The event loop reads requests, turns them into tokens, and tokens into texts. The engine draws in a thread of its own
(inference/serving.py).
"""

import asyncio
import hmac
import json
import math
import os
import re
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from tunix.base.errors import UserError
from tunix.base.files import expand_home, is_whole_number
from tunix.config import Serve
from tunix.config.command_line import run_command
from tunix.config.commands import is_loopback
from tunix.data.thoughts import ANSWER, THOUGHT, PartReader
from tunix.data.tokenizer import TokenBytes
from tunix.inference.openai_api import AnswerText, ApiError, TokenScores, make_envelope, show_calls, show_usage
from tunix.inference.openai_requests import Job, RequestReader
from tunix.inference.pretrained import Pretrained, load_language_model
from tunix.inference.sampling import select_sampling
from tunix.inference.serving import Piece, QueueFull, Request, Serving
from tunix.rl.tool_parsers import find_text_before_calls, make_call_ids

try:
    import prometheus_client
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
    print("error: tunix.serve needs a web server: pip install 'tunix-trainer[serve]'", file=sys.stderr)
    sys.exit(2)

SEEDS = 2**31  # of the noise
BACKLOG = 2048  # connections that wait until the server takes them
TAKEN = 32  # of them at a time: those that are one too many are closed before the process can open no more files
OWN_FILES = 192  # that are left for the server beside its connections: its own, and four times as many as it takes
DRAIN_RETRY_S = 5  # that clients are told to wait when the server ends
HEAD_S = 20  # that a connection has for the head of its next request, at least, and twice as many at most
HOST = re.compile(r"(\[.*\]|[^:]*)(?::\d*)?")  # name or address of a head, and the port
CLOSE_S = 2  # that the engine has for the tokens that are being drawn, when nobody waits for them any more


def serve(command: Serve) -> None:
    """Load the model, and answer requests until SIGTERM or Ctrl-C; those that run then are answered."""
    if jax.process_count() > 1:
        raise UserError("tunix.serve runs in one process; mesh_shape spreads the model over the devices of its host")
    if missing := [folder for folder in command.server.image_folders if not expand_home(folder).is_dir()]:
        raise UserError(f"server.image_folders: there is no folder {missing[0]}")
    address = command.server.host, command.server.port
    sock = open_socket(*address)  # before the model is loaded, which takes minutes
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # while the model is loaded; `_run` takes over
    source = command.checkpoint, command.dtype, command.mesh_shape, command.weights
    model = load_language_model(*source, family=command.family, adapter=command.adapter, mtp=command.by_mtp)
    with _describing_address(*address):  # another program may have begun to listen
        sock.listen(BACKLOG)
    app = App(model, command)
    asyncio.run(_run(app, sock, command))
    if app.serving.thread.is_alive():
        # It is inside a compilation or a program, which nothing can end, and Python's own end would crash beside it.
        sys.stdout.flush()
        os._exit(0)


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket with the address, on which nobody listens yet. Raises `UserError` where the address is not one of
    this machine, or another program listens there."""
    with _describing_address(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    return sock


@contextmanager
def _describing_address(host: str, port: int) -> Iterator[None]:
    """Raise `UserError` in place of an error about an address."""
    try:
        yield
    except OSError as error:
        raise UserError(f"server.host={host} server.port={port} cannot be used: {error.strerror}") from None


class Connection(H11Protocol):
    """A connection that is closed where its client begins no request in time; one too many is closed at once.

    uvicorn waits for the end of a head forever, and whoever reaches the port may begin heads until the process can open
    no more files. Of its two protocols this one bounds a head: 64 KiB.
    """

    idle_since: Any = None  # the request before, at the last look; a connection without one has been idle since it came

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if num_files != resource.RLIM_INFINITY and len(self.connections) > max(TAKEN, num_files - OWN_FILES):
            transport.abort()
        self.look = self.loop.call_later(HEAD_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self.look.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if self.transport.is_closing():  # since the look before: the client does not read what is left
            self.transport.abort()
        elif is_idle and self.idle_since is self.cycle:
            self.transport.close()
        self.idle_since = self.cycle if is_idle else self
        self.look = self.loop.call_later(HEAD_S, self._look)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its handlers of signals: it would end by the signal, and not with exit code 0."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)  # Python lets as many wait as it takes at a time

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(app: "App", sock: socket.socket, command: Serve) -> None:
    patience = command.server.shutdown_timeout_s
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        access_log=False,
        log_level="warning",
        lifespan="off",
        backlog=TAKEN,
        timeout_graceful_shutdown=math.ceil(patience) + 1,  # for clients that do not read or write
    )
    server = _Uvicorn(config)

    loop = asyncio.get_running_loop()

    def end() -> None:
        if not app.is_draining:
            loop.call_later(patience, app.give_up)
        app.is_draining = server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    host, port = sock.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(f"serving {app.name} on http://{host}:{port}/v1 (Ctrl-C ends it)", flush=True)
    print(f"cache: {app.serving.bound.text}", flush=True)
    try:
        await server.serve([sock])
    finally:
        await asyncio.to_thread(app.serving.close, CLOSE_S)


SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)  # buckets of histograms


class Metrics:
    """Counters of the server, as Prometheus reads them."""

    def __init__(self, serving: Serving):
        self.registry = prometheus_client.CollectorRegistry()
        counter = partial(prometheus_client.Counter, registry=self.registry)
        histogram = partial(prometheus_client.Histogram, registry=self.registry, buckets=SECONDS)
        gauge = partial(prometheus_client.Gauge, registry=self.registry)
        self.requests = counter("tunix_requests", "Requests by status", ["path", "status"])
        self.prompt_tokens = counter("tunix_prompt_tokens", "Tokens of prompts")
        self.drawn_tokens = counter("tunix_generated_tokens", "Tokens drawn")
        self.guessed_tokens = counter("tunix_guessed_tokens", "Those of them that were guessed")
        self.first_s = histogram("tunix_first_token_seconds", "Until the first token")
        self.whole_s = histogram("tunix_request_seconds", "Until the last token")
        gauge("tunix_answers_running", "Answers that are drawn").set_function(lambda: serving.num_running)
        gauge("tunix_answers_waiting", "Answers that wait for a row").set_function(lambda: serving.num_waiting)


@dataclass
class _Answer:
    """One answer of a request, as far as it has come."""

    index: int
    prompt: list[int]
    text: AnswerText
    raw: AnswerText | None  # with special tokens, where calls of tools are read
    thought: AnswerText | None  # of a chat, if special tokens may mark it: what is no part of `text`
    log_probs: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    stop_token: list[int] = field(default_factory=list)  # the id that has ended it, if one has
    finish: str | None = None
    num_scored: int = 0  # tokens whose log-probabilities a stream has shown
    num_characters: int = 0  # of these tokens

    def list_tokens(self, is_chat: bool) -> list[int]:
        """Return the tokens that belong to the text so far; a completion shows the id that has ended it, too."""
        ending = [] if is_chat or self.text.is_stopped else self.stop_token
        return self.tokens[: self.text.num_tokens] + ending

    @property
    def num_drawn(self) -> int:
        """Tokens up to the end of the answer, with the id or the stop string that has ended it."""
        return len(self.text.tokens) + (0 if self.text.is_stopped else len(self.stop_token))

    def take(self, piece: Piece) -> tuple[str, str]:
        """Take what was drawn, and return the text that may be sent, and that of the thought."""
        if piece.finish == "error":
            raise ApiError(500, "the engine failed while it drew this answer; its log says why")
        _refuse_nan(piece.log_probs)
        num_tokens = len(piece.tokens) - (piece.finish == "stop")
        self.tokens += piece.tokens[:num_tokens]
        self.stop_token = piece.tokens[num_tokens:]
        self.log_probs += piece.log_probs
        sent = self.text.add(piece.tokens[:num_tokens])
        thought = "" if self.thought is None else self.thought.add(piece.tokens[:num_tokens])
        if self.raw is not None:
            self.raw.add(self.text.tokens[len(self.raw.tokens) :])
        self.finish = piece.finish
        if self.finish or self.text.is_stopped:
            sent += self.text.close()
            thought += "" if self.thought is None else self.thought.close()
            self.finish = "stop" if self.text.is_stopped else self.finish
        return sent, thought


def _refuse_nan(log_probs: Sequence[float]) -> None:
    if any(map(math.isnan, log_probs)):
        raise ApiError(500, "the scores of tokens are NaN: weights are not finite, or numbers overflow")


class App:
    """The web application: one model under one name."""

    def __init__(self, model: Pretrained, command: Serve):
        if model.tokenizer is None:
            raise UserError(f"checkpoint={command.checkpoint} has no tokenizer.json")
        self.tokenizer, self.limits = model.tokenizer, command.server
        self.read_bytes = TokenBytes(model.tokenizer)
        self.marks_thoughts = bool(PartReader(model.tokenizer).marks)
        path = expand_home(command.checkpoint)
        self.name = self.limits.model_name or (path.resolve().name if path.exists() else command.checkpoint)
        self.max_length = min(model.cfg.context_length, self.limits.max_length or model.cfg.context_length)
        drawing = select_sampling(command, model.find_stop_ids())
        bounds = self.limits.max_rows, self.max_length, self.limits.max_waiting, command.cache_gib
        self.serving = Serving(model, drawing, *bounds)
        self.reader = RequestReader(
            model, self.name, command, self.max_length, min(self.limits.max_answers, self.serving.capacity)
        )
        self.metrics, self.started, self.is_draining = Metrics(self.serving), int(time.time()), False
        self.key = None if self.limits.api_key is None else self.limits.api_key.get_secret_value().encode()
        routes = [
            Route("/v1/chat/completions", self._guard(partial(self._answer, True)), methods=["POST"]),
            Route("/v1/completions", self._guard(partial(self._answer, False)), methods=["POST"]),
            Route("/v1/models", self._guard(self._list_models)),
            Route("/v1/models/{name:path}", self._guard(self._show_model)),
            Route("/health", self._guard(self._show_health, is_open=True)),
            Route("/metrics", self._guard(self._show_metrics)),
        ]
        handlers: Any = {HTTPException: _show_http_error, Exception: _show_bug}
        self.starlette = Starlette(routes=routes, exception_handlers=handlers)
        self.open: set[_Answers] = set()  # of requests that wait for tokens

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request (ASGI)."""
        try:
            await self.starlette(scope, receive, send)
        except asyncio.CancelledError:  # by uvicorn, when the server ends
            if not self.is_draining:
                raise

    def give_up(self) -> None:
        """End the requests that still wait for tokens: the server ends."""
        for answers in self.open:
            answers.queue.put_nowait(_make_ending())

    # Who may ask, and what.

    def _guard(
        self, work: Callable[[HttpRequest], Awaitable[Response]], is_open: bool = False
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def endpoint(request: HttpRequest) -> Response:
            try:
                if not is_open:
                    self._check_client(request)
                response = await work(request)
            except ApiError as error:
                response = _Json(error.body, error.status, headers=error.headers)
            except UserError as error:
                response = _Json(ApiError(400, str(error)).body, 400)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it; in metrics, the number of nginx
            # The pattern and not the address, which a client may invent.
            self.metrics.requests.labels(request.scope["route"].path, response.status_code).inc()
            return response

        return endpoint

    def _check_client(self, request: HttpRequest) -> None:
        if self.key is None:
            # A web page that the user looks at must not reach the server, neither by a name that leads to this machine
            # nor by its address: a browser sends the page's own host as Origin. In `request.url` a name that Starlette
            # cannot read, like a{b.example, is the address of the server.
            hosts = [request.headers.get("host", "localhost")]  # HTTP 1.0 has none
            if "origin" in request.headers:
                hosts.append(request.headers["origin"].partition("://")[2])
            for host in (HOST.fullmatch(host.lower()) for host in hosts):
                if host is None or not is_loopback(host[1].strip("[]")):
                    raise ApiError(403, "this server has no key, and answers to the names of loopback alone")
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self.key):
            message = "wrong or no key: send `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _read_body(self, request: HttpRequest) -> bytes:
        limit = int(self.limits.max_body_mb * 1e6)
        too_large = ApiError(413, f"the body is larger than server.max_body_mb={self.limits.max_body_mb:g}")
        length = request.headers.get("content-length", "0")
        if not is_whole_number(length) or int(length) > limit:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.request_timeout_s):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time") from None
        return b"".join(parts)

    # Small answers.

    async def _list_models(self, request: HttpRequest) -> Response:
        return _Json({"object": "list", "data": [self._describe_model()]})

    async def _show_model(self, request: HttpRequest) -> Response:
        self.reader.check_model(request.path_params["name"])
        return _Json(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "tunix"}
        return model | {"max_model_len": self.max_length}

    async def _show_health(self, request: HttpRequest) -> Response:
        is_well = self.serving.thread.is_alive() and not self.is_draining
        return _Json({"status": "ok" if is_well else "ending"}, 200 if is_well else 503)

    async def _show_metrics(self, request: HttpRequest) -> Response:
        text = prometheus_client.generate_latest(self.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    # Requests for tokens.

    async def _answer(self, is_chat: bool, request: HttpRequest) -> Response:
        arrived = time.monotonic()
        if self.is_draining:
            raise _make_ending()
        body = await self._read_body(request)
        job = await (self.reader.read_chat(body, arrived) if is_chat else self.reader.read_completion(body, arrived))
        answers = self._submit(job, request)
        if job.parameters.stream:
            return StreamingResponse(self._stream(job, answers), media_type="text/event-stream", headers=NO_BUFFERS)
        return _Json(await self._collect(job, answers))

    def _submit(self, job: Job, request: HttpRequest) -> "_Answers":
        """Put a request into the queue, and return its answers, which are to come."""
        parameters = job.parameters
        answers = _Answers(self, job, request)
        if job.max_new_tokens:
            seed = secrets.randbelow(SEEDS) if parameters.seed is None else parameters.seed % SEEDS
            sampling = self.reader.select_sampling(parameters)
            for number, prompt in enumerate(job.prompts):
                first = number * job.num_answers
                work = (prompt, job.num_answers, job.max_new_tokens, sampling, seed, first)
                answers.requests.append(Request(*work, emit=partial(answers.emit, first), images=job.images))
            with answers.naming_limits():
                self.serving.submit(answers.requests)
        self.metrics.prompt_tokens.inc(sum(map(len, job.prompts)))
        return answers

    async def _collect(self, job: Job, answers: "_Answers") -> dict[str, Any]:
        """Return the object of a whole answer."""
        async with aclosing(answers.draw()) as pieces:
            async for _ in pieces:
                pass
        show = self._show_chat_choice if job.is_chat else self._show_completion_choice
        with answers.naming_limits():
            async with asyncio.timeout(answers.deadline - time.monotonic()):
                choices = [await show(job, answer) for answer in answers.all]
        return make_envelope(job.is_chat, False, self.name) | {"choices": choices, "usage": answers.show_usage()}

    async def _show_chat_choice(self, job: Job, answer: _Answer) -> dict[str, Any]:
        message, finish = _show_message(job, answer)
        scores = (await self._score(job, answer)).for_chat() if job.parameters.wants_logprobs else None
        return {"index": answer.index, "message": message, "logprobs": scores, "finish_reason": finish}

    async def _show_completion_choice(self, job: Job, answer: _Answer) -> dict[str, Any]:
        prefix = job.texts[answer.index // job.num_answers] if job.texts else ""
        scores = (await self._score(job, answer)).for_completion() if job.parameters.wants_logprobs else None
        text, finish = prefix + answer.text.text, answer.finish or "length"
        return {"index": answer.index, "text": text, "logprobs": scores, "finish_reason": finish}

    async def _score(self, job: Job, answer: _Answer) -> TokenScores:
        """Return the log-probabilities of an answer; those of a prompt and of other tokens are computed for it."""
        tokens = answer.list_tokens(job.is_chat)
        if not job.texts and not job.parameters.num_top:
            return TokenScores(self.read_bytes, tokens, answer.log_probs[: len(tokens)], None, answer.text.text)
        whole = [*answer.prompt, *tokens]
        text = (job.texts[answer.index // job.num_answers] if job.texts else "") + answer.text.text
        if len(whole) < 2:
            return TokenScores(self.read_bytes, whole, [None], [[]], text)
        scores = await asyncio.wrap_future(self.serving.score(whole, job.images))
        _refuse_nan(scores.log_probs.tolist())
        log_probs: list[float | None] = [None, *scores.log_probs.tolist()]
        pairs = zip(scores.top_tokens.tolist(), scores.top_log_probs.tolist(), strict=True)
        tops = [[], *(list(zip(*pair, strict=True))[: job.parameters.num_top] for pair in pairs)]
        start = 0 if job.texts else len(answer.prompt)
        return TokenScores(self.read_bytes, whole[start:], log_probs[start:], tops[start:], text)

    async def _stream(self, job: Job, answers: "_Answers") -> AsyncIterator[str]:
        """Yield the events of a stream: a piece of an answer each, then the usage if it is asked for, then the end."""
        envelope = make_envelope(job.is_chat, True, self.name)
        options = job.parameters.stream_options
        shows_usage = bool(options and options.include_usage)
        more = {"usage": None} if shows_usage else {}

        def event(choice: dict[str, Any]) -> str:
            return _to_event(envelope | {"choices": [choice]} | more)

        try:
            if job.is_chat:
                for answer in answers.all:
                    start = {"role": "assistant", "content": ""}
                    yield event({"index": answer.index, "delta": start, "logprobs": None, "finish_reason": None})
            async with aclosing(answers.draw()) as pieces:
                async for answer, text, thought in pieces:
                    for choice in self._show_piece(job, answer, text, thought):
                        yield event(choice)
            if shows_usage:
                yield _to_event(envelope | {"choices": [], "usage": answers.show_usage()})
        except ApiError as error:
            yield _to_event(error.body)
        except ClientDisconnect:
            return
        yield "data: [DONE]\n\n"

    def _show_piece(self, job: Job, answer: _Answer, text: str, thought: str) -> Iterator[dict[str, Any]]:
        """Yield the choices of a stream that show a piece of an answer, and its end."""
        finish = answer.finish
        if thought:
            part = {"index": answer.index, "delta": {"reasoning_content": thought}}
            yield part | {"logprobs": None, "finish_reason": None}
        if job.read_calls is not None and finish is None:  # whether it is a call shows at its end
            return
        scores = self._score_piece(job, answer) if job.parameters.wants_logprobs else None
        choice = {"index": answer.index, "logprobs": scores}
        if not job.is_chat:
            if text or scores or finish:
                yield choice | {"text": text, "finish_reason": finish}
            return
        if job.read_calls is not None:
            message, finish = _show_message(job, answer)
            delta = {"content": message["content"]}
            if calls := message.get("tool_calls"):
                delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
            yield choice | {"delta": delta, "finish_reason": None}
        elif text or scores:
            yield choice | {"delta": {"content": text}, "finish_reason": None}
        if finish:
            yield {"index": answer.index, "delta": {}, "logprobs": None, "finish_reason": finish}

    def _score_piece(self, job: Job, answer: _Answer) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens that a stream has not shown yet; None without such tokens."""
        first, tokens = answer.num_scored, answer.list_tokens(job.is_chat)
        if len(tokens) == first:
            return None
        log_probs = answer.log_probs[first : len(tokens)]
        scores = TokenScores(self.read_bytes, tokens[first:], log_probs, None, answer.text.text, answer.num_characters)
        answer.num_scored, answer.num_characters = len(tokens), scores.end
        return scores.for_chat() if job.is_chat else scores.for_completion()


NO_BUFFERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # a proxy passes each event on


def _make_ending() -> ApiError:
    """Return the error of requests that the end of the server meets."""
    return ApiError(503, "the server is ending", headers={"Retry-After": str(DRAIN_RETRY_S), "Connection": "close"})


class _Answers:
    """The answers to one request, as they come from the engine."""

    def __init__(self, app: App, job: Job, request: HttpRequest):
        self.app, self.job, self.request = app, job, request
        self.requests: list[Request] = []
        self.queue: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue()  # an exception ends all of them
        self.loop = asyncio.get_running_loop()
        self.deadline = job.arrived + app.limits.request_timeout_s
        stop = job.parameters.stop or []

        has_parts = job.is_chat and app.marks_thoughts  # else all of a turn is the answer
        raw_stop = [] if has_parts else stop  # a stop string within a thought ends nothing

        def show(prompt: list[int], part: str, stop: Sequence[str]) -> AnswerText:
            if not has_parts:
                return AnswerText(app.tokenizer, stop, behind=None if job.is_chat else prompt[-1])
            return AnswerText(app.tokenizer, stop, parts=PartReader(app.tokenizer, prompt), part=part)

        self.all = [
            _Answer(
                place * job.num_answers + index,
                prompt,
                show(prompt, ANSWER, stop),
                None if job.read_calls is None else AnswerText(app.tokenizer, raw_stop, keep_special=True),
                show(prompt, THOUGHT, ()) if has_parts else None,
            )
            for place, prompt in enumerate(job.prompts)
            for index in range(job.num_answers)
        ]

    @contextmanager
    def naming_limits(self) -> Iterator[None]:
        """Raise `ApiError` in place of the error of a limit of the server, of seconds or of what waits."""
        try:
            yield
        except QueueFull as full:
            raise ApiError(503, str(full), headers={"Retry-After": str(full.retry_after_s)}) from None
        except TimeoutError:
            limit = f"server.request_timeout_s={self.app.limits.request_timeout_s:g}"
            raise ApiError(504, f"the answer is not complete after {limit}") from None

    def emit(self, first: int, piece: Piece) -> None:
        """Take a piece; the thread of the engine calls it."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.queue.put_nowait, (first + piece.index, piece))

    async def draw(self) -> AsyncGenerator[tuple[_Answer, str, str], None]:
        """Yield answers with the text that each has got, and that of its thought, until all have ended.

        Raises:
            ApiError: it takes too long, the engine fails, or the server ends.
            ClientDisconnect: nobody waits for the answers.
        """
        metrics, job = self.app.metrics, self.job
        watch = asyncio.create_task(self._watch())
        left = len(self.all) if self.requests else 0
        is_first = True
        self.app.open.add(self)
        try:
            while left:
                with self.naming_limits():
                    async with asyncio.timeout(self.deadline - time.monotonic()):
                        event = await self.queue.get()
                if isinstance(event, Exception):
                    raise event
                answer, piece = self.all[event[0]], event[1]
                if answer.finish is not None:
                    continue
                if is_first:
                    metrics.first_s.observe(time.monotonic() - job.arrived)
                    is_first = False
                text, thought = answer.take(piece)
                metrics.drawn_tokens.inc(len(piece.tokens))
                metrics.guessed_tokens.inc(piece.num_guessed)
                if answer.finish is not None:
                    left -= 1
                    if piece.finish is None:  # by a stop string, of which the engine knows nothing
                        number, index = divmod(answer.index, job.num_answers)
                        self.app.serving.cancel(self.requests[number], index)
                yield answer, text, thought
            metrics.whole_s.observe(time.monotonic() - job.arrived)
        finally:
            self.app.open.discard(self)
            watch.cancel()
            self._cancel()

    async def _watch(self) -> None:
        """Give up the answers when the client goes."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self._cancel()
        self.queue.put_nowait(ClientDisconnect())

    def _cancel(self) -> None:
        for each in self.requests:
            self.app.serving.cancel(each)

    def show_usage(self) -> dict[str, int]:
        return show_usage(sum(map(len, self.job.prompts)), sum(answer.num_drawn for answer in self.all))


def _show_message(job: Job, answer: _Answer) -> tuple[dict[str, Any], str]:
    """Return the message of an answer in a chat, with its calls of tools, and why it ends."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text.text, "refusal": None}
    if answer.thought is not None and answer.thought.text:
        message["reasoning_content"] = answer.thought.text
    finish = answer.finish or "length"
    # An answer that is cut calls nothing, as a turn of an episode: the call may not be whole.
    if job.read_calls is None or answer.raw is None or finish == "length":
        return message, finish
    answer.raw.close()
    calls = job.read_calls(answer.raw.text)
    if not calls or any(call.problem for call in calls):  # text that is no call, or a call that cannot be read
        return message, finish
    before = find_text_before_calls(job.call_format, answer.raw.text)
    if answer.thought is not None:  # and headers between: of the tokens before, those of the answer are shown
        before = answer.text.read_until(len(before), answer.raw.starts)
    before = answer.raw.drop_special(before).rstrip()
    shown = show_calls(calls, make_call_ids(job.call_format, calls, job.num_calls))
    return message | {"content": before or None, "tool_calls": shown}, "tool_calls"


class _Json(JSONResponse):
    """JSON in ASCII: half of a surrogate pair, which a client may send, has no other form."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def _to_event(value: Any) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


async def _show_http_error(request: HttpRequest, error: Any) -> Response:
    """Return what there is for an address or a method that is not served."""
    message = f"{error.detail}: see /v1/models, /v1/completions, /v1/chat/completions, /health, /metrics"
    return _Json(ApiError(error.status_code, message).body, error.status_code, headers=error.headers)


async def _show_bug(request: HttpRequest, error: Exception) -> Response:
    return _Json(ApiError(500, "an error of the server; its log says more").body, 500)


if __name__ == "__main__":
    sys.exit(run_command(Serve, serve))
