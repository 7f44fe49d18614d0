"""A judge: a language model behind an OpenAI-like address, which rates answers (`{function: judge}` of task.rewards).

    answers of a rollout ──> texts for the judge ──> known ratings                              cache on disk
                                                └──> POST .../chat/completions, some at a time ──> [[7]]

The server may be down, slow or rude. An answer without a rating when the time is over has no score, and the others
keep theirs. Ratings are written to the cache as they come: equal answers are asked once, and a run that was killed
asks for nothing that it has paid for.
"""

import hashlib
import json
import logging
import os
import queue
import re
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError

from tunix.base.digests import hash_texts
from tunix.base.errors import MASK, UserError
from tunix.base.files import open_lines, parse_json, read_json_lines
from tunix.base.web import NoRedirects, build_opener, find_pause, read_page, try_again
from tunix.config.rewards import JudgeTerm
from tunix.data.chat import join_parts
from tunix.data.prompts import Prompt

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20  # of a reply
MAX_SHOWN = 200  # characters of a reply in a message
GRACE_S = 1.0  # after the deadline, for requests that end by it
NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
RATING = re.compile(rf"\[\[\s*{NUMBER}\s*\]\]")
NUMBER_ALONE = re.compile(rf"\s*{NUMBER}\s*")
FIELD = re.compile(r"\{(\w+)\}")


class Judgement(NamedTuple):
    """Rating of one text by the judge, and what it took."""

    rating: float | str  # or why there is none
    calls: int = 0
    read: int = 0  # tokens
    written: int = 0


class Failure(Exception):
    """A request without a rating."""

    def __init__(self, text: str, pause_s: float | None = 0.0):
        """`pause_s` are the seconds before the next try; None: no try would help."""
        super().__init__(text)
        self.pause_s = pause_s


class Judge:
    """Rates answers by a server. Threads may call it side by side."""

    def __init__(self, term: JudgeTerm, timeout_s: float, cache_dir: Path):
        """`timeout_s` is the time for the answers of one batch. Raises `UserError` where the variable with the key is
        not set, or the cache cannot be written."""
        self.term, self.timeout_s, self.has_warned = term, timeout_s, False
        self.key = os.environ.get(term.api_key_variable, "") if term.api_key_variable else None
        if self.key == "":
            raise UserError(
                f"task.rewards: api_key_variable={term.api_key_variable} names an environment variable that is not set"
            )
        settings = json.dumps([term.url, term.model, term.options, term.max_rating], sort_keys=True)
        folder = cache_dir / "judge"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror})") from None
        path = folder / f"{hash_texts(settings)}.jsonl"
        self.file, self.lock = open_lines(path), threading.Lock()
        lines = read_json_lines(path)
        self.ratings = {line.get("text"): line["rating"] for line in lines if isinstance(line.get("rating"), float)}
        log.info("judge: %s at %s, %d ratings are known from before", term.model, term.url, len(self.ratings))

    def score(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> tuple[list[float | str], dict[str, float]]:
        """Return for each answer its rating from 0 to 1, or why it has none; and what it has cost."""
        deadline = time.monotonic() + self.timeout_s
        if not self.has_warned and any(prompt.images is not None for prompt in prompts):
            self.has_warned = True
            log.warning("judge: %s rates answers to prompts with images by the texts alone", self.term.label)
        texts = [self._fill(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        digests = [hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32] for text in texts]
        cached = {digest: self.ratings[digest] for digest in digests if digest in self.ratings}
        missing = {digest: text for digest, text in zip(digests, texts, strict=True) if digest not in cached}
        judgements = self._ask_all(missing, deadline)
        late = Judgement(f"the judge gave no answer within {self.timeout_s:g} s")
        ratings = cached | {digest: judgements.get(digest, late).rating for digest in missing}
        calls, read, written = (
            sum(getattr(each, name) for each in judgements.values()) for name in ("calls", "read", "written")
        )
        kept = len(texts) - len(missing)
        numbers: dict[str, float] = {"calls": calls, "cached": kept, "tokens_read": read, "tokens_written": written}
        if self.term.usd_per_million_tokens is not None:
            prices = self.term.usd_per_million_tokens
            numbers["usd"] = (read * prices[0] + written * prices[1]) / 1e6
        best = self.term.max_rating
        found = [ratings[digest] for digest in digests]
        return [each if isinstance(each, str) else each / best for each in found], numbers

    def try_out(self, prompt: Prompt) -> None:
        """Rate an answer to a prompt. Raises `UserError` where that fails, or the prompt of the judge names a column
        that the row lacks."""
        names = {*prompt.columns, "prompt", "completion"}
        if unknown := [name for name in FIELD.findall(self.term.prompt) if name not in names]:
            raise UserError(
                f"task.rewards: the prompt of {self.term.label} names {{{unknown[0]}}}, and the data have "
                f"{', '.join(sorted(names))}"
            )
        (score,), _ = self.score([prompt], [str(prompt.columns.get("answer", "42"))])
        if isinstance(score, str):
            raise UserError(f"rewards: {self.term.label} fails: {score}")

    def close(self) -> None:
        self.file.close()

    def _fill(self, prompt: Prompt, answer: str) -> str:
        """Return the text that the judge reads."""
        messages = [] if prompt.question is None else prompt.question.messages
        turns = [join_parts(each.get("content") or "") for each in messages]
        if len(turns) > 1:
            turns = [f"{each['role']}: {text}" for each, text in zip(messages, turns, strict=True)]
        values = {**prompt.columns, "prompt": "\n".join(turns) or prompt.text, "completion": answer}
        return FIELD.sub(lambda match: str(values.get(match[1], "")), self.term.prompt)

    def _ask_all(self, texts: dict[str, str], deadline: float) -> dict[str, Judgement]:
        """Return the judgements that come before the deadline, by the digests of their texts."""
        todo: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[str, Judgement]] = queue.SimpleQueue()
        for item in texts.items():
            todo.put(item)

        def work() -> None:
            with suppress(queue.Empty):
                while time.monotonic() < deadline:
                    digest, text = todo.get_nowait()
                    done.put((digest, self._ask(text, deadline)))

        # Threads that nobody waits for: a server may keep one busy with a byte now and then.
        for _ in range(min(self.term.num_parallel, len(texts))):
            threading.Thread(target=work, daemon=True, name="judge").start()
        judgements: dict[str, Judgement] = {}
        with suppress(queue.Empty):
            while len(judgements) < len(texts):
                digest, judgement = done.get(timeout=max(0.0, deadline + GRACE_S - time.monotonic()))
                judgements[digest] = judgement
                if not isinstance(judgement.rating, str):
                    self.ratings[digest] = judgement.rating
                    self._keep(digest, judgement.rating)
        return judgements

    def _keep(self, digest: str, rating: float) -> None:
        """Write a rating for a resumed run. A disk that refuses it, as a full one, is said once: the run goes on."""
        with self.lock:
            try:
                self.file.write(json.dumps({"text": digest, "rating": rating}) + "\n")
            except OSError as error:
                log.warning(
                    "judge: %s cannot be written (%s): a resumed run asks for the ratings that follow again",
                    self.file.name, error.strerror,
                )  # fmt: skip
                with suppress(OSError):  # what is left of the line
                    self.file.close()
                self.file = open(os.devnull, "w")  # noqa: SIM115

    def _ask(self, text: str, deadline: float) -> Judgement:
        """Return the judgement of one text; a request that fails for now is made again."""
        body = {"model": self.term.model, "messages": [{"role": "user", "content": text}], **self.term.options}
        data = json.dumps(body).encode()
        calls = 0

        def request() -> tuple[float | str, int, int]:
            nonlocal calls
            calls += 1
            return self._post(data, deadline)

        try:
            rating, read, written = try_again(request, deadline, lambda failure: failure.pause_s)
        except Failure as failure:
            return Judgement(str(failure), calls)
        return Judgement(rating, calls, read, written)

    def _post(self, data: bytes, deadline: float) -> tuple[float | str, int, int]:
        """Return the rating of a reply, and the tokens that the server has read and written. Raises `Failure` where
        there is no reply, or it is none of a language model."""
        headers = {"Content-Type": "application/json", "User-Agent": "tunix"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self.term.url}/chat/completions", data, headers)
        remaining = max(0.1, deadline - time.monotonic())
        try:
            with build_opener(remaining, NoRedirects).open(request, timeout=remaining) as page:
                reply = read_page(page, MAX_BYTES)
            if len(reply) > MAX_BYTES:
                raise Failure(f"the judge's reply is longer than {MAX_BYTES >> 20} MiB", None)
        except HTTPError as error:
            raise self._explain(error) from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise Failure(f"the judge at {self.term.url} does not answer: {self._show(reason)}") from None
        return self._read(reply)

    def _read(self, reply: bytes) -> tuple[float | str, int, int]:
        try:
            values = parse_json(reply)
            text = values["choices"][0]["message"]["content"]
            usage = values.get("usage") or {}
            counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, LookupError, TypeError, AttributeError):
            text = reply.decode(errors="replace")
            raise Failure(f"the judge's reply is no chat completion: {self._show(text)}") from None
        read, written = (each if type(each) is int and 0 <= each < 1 << 40 else 0 for each in counts)
        text = text if isinstance(text, str) else ""
        found = RATING.findall(text)
        if alone := NUMBER_ALONE.fullmatch(text):
            found = [alone[1]]
        if not found:
            return f"the judge's reply has no rating like [[5]]: {self._show(text)}", read, written
        rating = float(found[-1])
        if rating > self.term.max_rating:
            return f"the judge's rating {rating:g} is above max_rating={self.term.max_rating:g}", read, written
        return rating, read, written

    def _explain(self, error: HTTPError) -> Failure:
        """Return what an answer that is an error says."""
        text = ""
        with error, suppress(OSError, HTTPException, ValueError):
            text = read_page(error, MAX_BYTES).decode(errors="replace")
        if 300 <= error.code < 400 and (location := error.headers.get("Location")):
            address = location.removesuffix("/chat/completions")
            text = f"it redirects to {address}, which is not followed; give that address as url"
        return Failure(f"the judge answers with HTTP {error.code}: {self._show(text)}", find_pause(error))

    def _show(self, text: object) -> str:
        """Return what a server has said, for a message: one line without the key."""
        line = " ".join(str(text).split())
        if self.key:
            line = line.replace(self.key, MASK)
        line = "".join(each if each.isprintable() else "?" for each in line)
        return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
