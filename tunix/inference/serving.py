"""The engine of a server: requests of many clients draw on the rows of one cache, each by its own choices.

    submit      a request waits, first come first served, until rows are free
    _admit      its answers get rows; each that ends makes room for the next, whatever the others do
    emit        after every few tokens each answer hands out what it has drawn
    cancel      its rows are free again after the tokens that are being drawn

One thread owns the engine and the devices. The others put requests into a queue, and get what is drawn by a function
that they give. The tokens of an answer depend on its prompt, its choices and its seed alone (inference/engine.py).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tunix.inference.engine import Answer, Engine
from tunix.inference.lm_eval import TokenScorer, TopScores
from tunix.inference.pretrained import Pretrained
from tunix.inference.rollout import RowSizes
from tunix.inference.sampling import NO_MIN_P, NO_TOP_K, NO_TOP_P, TOKENS_UNCHECKED, RowChoices, Sampling
from tunix.models.vision import Images

log = logging.getLogger(__name__)
CHUNK = TOKENS_UNCHECKED  # tokens of a row between two looks at the queue, and in a piece of a stream
MAX_TOP = 20  # likeliest tokens in each place that a request may ask for: as many as in OpenAI's API


@dataclass(frozen=True)
class Piece:
    """Tokens that one answer has drawn since its last piece."""

    index: int  # of the answer in its request
    tokens: list[int]  # with the id that stops it, if finish is stop
    log_probs: list[float]  # of each of them under the model
    finish: str | None  # stop, length or error: nothing follows; None: more follows
    num_guessed: int = 0  # of the tokens


@dataclass(eq=False)
class Request:
    """Answers to one prompt. Answer n draws by the seed and by the number `first_number` + n, as `Sampler.rollout`."""

    prompt: list[int]
    num_answers: int
    max_new_tokens: int
    sampling: Sampling  # temperature, top_k, top_p and min_p
    seed: int
    first_number: int
    emit: Callable[[Piece], None]  # called by the thread of the engine
    images: Images | None = None  # of the prompt (`Engine.admit`)
    num_admitted: int = 0
    cancelled: set[int] = field(default_factory=set)  # answers that nobody waits for


class QueueFull(Exception):
    """A request that does not fit into the queue; it may be sent again after `retry_after_s`."""

    def __init__(self, retry_after_s: int):
        super().__init__(f"the queue is full; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


@dataclass
class _Held:
    """A row that an answer has."""

    request: Request
    index: int
    begun: float
    num_sent: int = 0
    num_guessed: int = 0  # of those that are sent


class Serving:
    """A thread with the engine of a model, and the queue before it."""

    def __init__(
        self,
        model: Pretrained,
        drawing: Sampling,
        max_rows: int,
        max_length: int,
        max_waiting: int,
        cache_gib: float | None = None,
    ):
        """`drawing` has what all requests share: tokens that end an answer, guesses, the dtype of the cache.

        `cache_gib` is that of `Sampler.bound_cache`.
        """
        self.model, self.drawing, self.max_length = model, drawing, max_length
        num_shards = model.sampler.programs.num_shards
        self.num_rows = max(1, max_rows // num_shards) * num_shards
        sizes = RowSizes(self.num_rows, max_length, max_length)
        self.bound = model.sampler.bound_cache(model.params, drawing, sizes, cache_gib, "server.max_length")
        self.max_waiting = max_waiting
        self.engine = self._make_engine()
        self.free = deque(range(self.num_rows))  # numbers of rows that no answer has: places in `choices`
        self.held: dict[int, _Held] = {}
        self.choices = RowChoices(
            *(np.zeros(self.num_rows, dtype) for dtype in ("int32", "int32", "float32", "int32", "float32", "float32"))
        )
        self.waiting: deque[Request] = deque()
        self.scorings: deque[tuple[list[int], Images | None, Future]] = deque()
        self.changed, self.is_closing = threading.Condition(), False
        self.seconds_per_answer = 1.0  # of late, for Retry-After
        self.scorer: TokenScorer | None = None
        self.thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.thread.start()

    # What other threads call.

    @property
    def capacity(self) -> int:
        """Answers that can be held or wait at one time."""
        return self.num_rows + self.max_waiting

    @property
    def num_waiting(self) -> int:
        """Answers that wait for a row."""
        return sum(each.num_answers - each.num_admitted for each in list(self.waiting))

    @property
    def num_running(self) -> int:
        """Answers that draw, or wait for pages alone."""
        return len(self.held)

    def submit(self, requests: list[Request]) -> None:
        """Put requests into the queue, all of them or none. Raises `QueueFull` where more answers would wait than
        may."""
        with self.changed:
            self._refuse_more(self.num_waiting + sum(each.num_answers for each in requests) - len(self.free))
            self.waiting.extend(requests)
            self.changed.notify()

    def _refuse_more(self, num_waiting: int) -> None:
        if num_waiting > self.max_waiting:
            late = self.seconds_per_answer * (self.num_waiting + 1) / self.num_rows
            raise QueueFull(min(60, max(1, round(late))))

    def cancel(self, request: Request, index: int | None = None) -> None:
        """Give up an answer of a request, or all of them; nothing is said about those that have ended."""
        with self.changed:
            request.cancelled |= set(range(request.num_answers)) if index is None else {index}
            if len(request.cancelled) == request.num_answers and request in self.waiting:
                self.waiting.remove(request)
            self.changed.notify()

    def score(self, tokens: list[int], images: Images | None) -> "Future[TopScores]":
        """Return the scores of all tokens but the first, and of the likeliest in their places (`score_with_top`).
        Raises `QueueFull` where more texts would wait than answers may."""
        scoring: Future[TopScores] = Future()
        with self.changed:
            self._refuse_more(len(self.scorings))
            self.scorings.append((tokens, images, scoring))
            self.changed.notify()
        return scoring

    def close(self, timeout_s: float) -> None:
        """End the thread, with the answers that it holds."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()
        self.thread.join(timeout_s)

    # The thread of the engine.

    def _make_engine(self) -> Engine:
        # The choices of rows are data; those of the engine say nothing.
        sizes = self.max_length, self.num_rows
        engine = self.model.sampler.engine(self.model.gathered, self.drawing, 0, *sizes, num_pages=self.bound.num_pages)
        engine.chunk = CHUNK
        return engine

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.held or self.scorings or self.is_closing)
                if self.is_closing:
                    return
                scoring = self.scorings.popleft() if self.scorings else None
            if scoring is not None:  # one at a time: the rows draw between two of them
                self._score(*scoring)
            try:
                self._draw()
            except Exception:  # too little memory, or a bug: those that draw lose their answers, the server goes on
                log.exception("the engine failed; %d answers are lost", len(self.held))
                for held in self.held.values():
                    held.request.emit(Piece(held.index, [], [], "error"))
                self.held.clear()
                self.free = deque(range(self.num_rows))
                self.engine = self._make_engine()

    def _draw(self) -> None:
        """Let all rows draw a few tokens, and hand them out."""
        with self.changed:
            for number, held in list(self.held.items()):
                # One that waits inside the engine for a row of its data shard is released when it has drawn.
                if held.index in held.request.cancelled and self.engine.peek(number) is not None:
                    self._release(number)
            self._admit()
        ended = dict(self.engine.run())
        for number, held in list(self.held.items()):
            answer = ended.get(number) or self.engine.peek(number)
            if answer is not None:
                self._emit(held, answer, is_done=number in ended)
            if number in ended:
                self._release(number)

    def _admit(self) -> None:
        """Give the rows that are free to the requests that wait, in their order."""
        while self.waiting and self.free:
            request = self.waiting[0]
            left = [n for n in range(request.num_admitted, request.num_answers) if n not in request.cancelled]
            numbers = []
            for index in left[: len(self.free)]:
                number = self.free.popleft()
                self.held[number] = _Held(request, index, time.monotonic())
                self._choose(number, request, index)
                numbers.append(number)
            if numbers:
                request.num_admitted = self.held[numbers[-1]].index + 1
                self.engine.admit(request.prompt, numbers, request.max_new_tokens, request.images, one_turn=True)
            if len(numbers) < len(left):
                return
            self.waiting.popleft()

    def _choose(self, number: int, request: Request, index: int) -> None:
        """Write the choices of an answer into the place of its row."""
        keys, choices = request.sampling, self.choices
        choices.seed[number], choices.answer[number] = request.seed, request.first_number + index
        choices.temperature[number] = keys.temperature
        choices.top_k[number] = NO_TOP_K if keys.top_k is None else keys.top_k
        choices.top_p[number] = NO_TOP_P if keys.top_p is None else keys.top_p
        choices.min_p[number] = NO_MIN_P if keys.min_p is None else keys.min_p
        self.engine.key = RowChoices(*(each.copy() for each in choices))

    def _emit(self, held: _Held, answer: Answer, is_done: bool) -> None:
        tokens, log_probs = answer.tokens[held.num_sent :], answer.log_probabilities[held.num_sent :]
        held.num_sent += len(tokens)
        if held.index not in held.request.cancelled and (tokens or is_done):
            finish = None if not is_done else "stop" if answer.stopped else "length"
            guessed = (answer.num_guessed or 0) - held.num_guessed
            held.num_guessed += guessed
            held.request.emit(Piece(held.index, tokens, log_probs, finish, guessed))

    def _release(self, number: int) -> None:
        self.engine.release(number)
        held = self.held.pop(number)
        self.free.append(number)
        self.seconds_per_answer += 0.1 * (time.monotonic() - held.begun - self.seconds_per_answer)

    def _score(self, tokens: list[int], images: Images | None, scoring: Future) -> None:
        if not scoring.set_running_or_notify_cancel():  # it came too late for its request
            return
        try:
            if self.scorer is None:
                self.scorer = TokenScorer(self.model, num_top=MAX_TOP)
            scoring.set_result(self.scorer.score_with_top(tokens, images))
        except Exception as error:
            scoring.set_exception(error)
