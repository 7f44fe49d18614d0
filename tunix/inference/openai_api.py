"""OpenAI's API: what requests may say, and the objects that answer them. It knows nothing of sockets or of the engine.

The names and shapes are those of https://platform.openai.com/docs/api-reference: chat/completions and completions. A
parameter that OpenAI has and tunix does not is refused by its name, unless its value changes nothing. `top_k`, `min_p`
and `chat_template_kwargs` are tunix's own, with the names that vLLM has for them.
"""

import codecs
import json
import re
import time
import uuid
from bisect import bisect_left
from collections.abc import Sequence
from itertools import compress
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer

from tunix.base.config_types import Temperature
from tunix.data.chat import THOUGHTS, read_function
from tunix.data.files import BadRow
from tunix.data.images import read_parts
from tunix.data.thoughts import ANSWER, PartReader
from tunix.data.tokenizer import TokenBytes, decode, decode_behind
from tunix.rl.tool_parsers import Call

# Requests.

Zero = Annotated[float, Field(ge=0, le=0)]
Few = Annotated[int, Field(ge=1, le=1024)]
# Lists and objects are refused with their first wrong item: 8 MB of them would have errors of a gigabyte.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


def _to_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_format(value: dict[str, Any]) -> dict[str, Any]:
    if value != {"type": "text"}:
        raise ValueError('{"type": "text"} alone is served')
    return value


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class Parameters(BaseModel):
    """Parameters of chats and of completions; None is what the server was started with."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # 0 and -1: all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Few | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]],
        Field(max_length=16, fail_fast=True),
        BeforeValidator(_to_list),
    ] | None = None  # fmt: skip
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Values of parameters of OpenAI's and vLLM's that change nothing; benchmarks of servers send them.
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    ignore_eos: Literal[False] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens the answer shows in each place."""
        return 0

    @property
    def wants_logprobs(self) -> bool:
        return False


class CompletionParameters(Parameters):
    """A request for continuations of texts, or of tokens."""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None  # likeliest tokens of each place, beside the drawn one
    echo: bool | None = None
    best_of: Few | None = None
    suffix: None = None

    @property
    def num_top(self) -> int:
        return self.logprobs or 0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class ChatParameters(Parameters):
    """A request for answers in a conversation."""

    messages: Annotated[Objects, Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Objects | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[dict[str, Any], AfterValidator(_check_format)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_top(self) -> int:
        return self.top_logprobs or 0

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


P = TypeVar("P", bound=Parameters)


class ApiError(Exception):
    """A request that gets an error, with the status of HTTP."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 503: "server_busy", 504: "timeout"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def read_parameters(kind: type[P], body: bytes) -> P:
    """Read the body of a request.

    Raises:
        ApiError: it is no JSON object, or a parameter is unknown or has a value that is not served.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is no JSON") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is no JSON object")
    values = {name: value for name, value in values.items() if value is not None or name in kind.model_fields}
    for name in values:
        if name not in kind.model_fields:
            raise ApiError(400, f"{name[:100]} is not a parameter that is served", name[:100])
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = [str(each)[:100] for each in first["loc"]]
        location = ".".join(each for each in place if not each.startswith(("list[", "function-")))
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{location}: {message}"[:500], place[0]) from None


def read_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a message as chat templates take it: a text or parts with images as content, and arguments of calls as
    objects.

    Raises:
        ApiError: it has no role, or a content that is neither text nor images.
    """
    location = f"messages.{index}"
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{location} has no role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        try:
            content = read_parts(content)
        except BadRow:
            raise ApiError(400, f"{location}: parts other than text and image_url are not served", "messages") from None
    # A turn of calls alone, or one that ended in its thoughts: clients send both back without a text.
    if content is None and message["role"] == "assistant" and not message.get("function_call"):
        content = ""
    if not isinstance(content, str | list):
        raise ApiError(400, f"{location} has no content that is a text", "messages")
    keys = ("name", "tool_call_id", *THOUGHTS)
    read = {"role": message["role"], "content": content} | {key: message[key] for key in keys if message.get(key)}
    if message.get("tool_calls"):
        read["tool_calls"] = _read_calls(message["tool_calls"], location)
    return read


def _read_calls(calls: Any, location: str) -> list[dict[str, Any]]:
    try:
        return [call | {"function": _put_name_first(read_function(call["function"]))} for call in calls]
    except (AttributeError, TypeError, KeyError, ValueError, RecursionError):
        message = f"{location}.tool_calls are no calls with a function and JSON arguments"
        raise ApiError(400, message, "messages") from None


def _put_name_first(function: dict[str, Any]) -> dict[str, Any]:
    """Return a called function, its name first, as models write calls. OpenAI's client puts the arguments first, and
    templates such as Mistral's write the object as it is."""
    return {key: function[key] for key in ("name",) if key in function} | function


# Texts of answers.

UNFINISHED = "\ufffd"  # at the end of a text: bytes of a character whose other bytes may follow
MAX_OPEN = 32  # newest tokens without a certain text: more of them are bytes of no character, or special tokens
MAX_CHARACTER = 4  # bytes, and so tokens, of one


class AnswerText:
    """The text of an answer that grows token by token, up to the first of the stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        keep_special: bool = False,
        behind: int | None = None,
        parts: PartReader | None = None,
        part: str = ANSWER,
    ):
        """With `keep_special` special tokens are in the text. `behind` is the last token of a text that goes on. With
        `parts` the text is that of one part: the answer, or the thought before it."""
        self.tokenizer, self.stop, self.skip, self.behind = tokenizer, tuple(stop), not keep_special, behind
        self.parts, self.part = parts, part
        self.tokens: list[int] = []
        self.shown: list[bool] = []  # of each token: it is of the part
        self.starts: list[int] = []  # place in the text of each token
        self.text, self.num_sent, self.is_stopped, self.is_closed = "", 0, False, False
        # The newest tokens of the part: the first `num_read` have text already, and are the context of the others.
        self.window: list[int] = []
        self.num_read, self.is_begin = 0, True  # the window begins with the text

    def add(self, tokens: Sequence[int]) -> str:
        """Take tokens, and return the text that is now certain, and was not before."""
        for token in tokens:
            if self.is_stopped:
                break
            self.tokens.append(token)
            self.shown.append(self.parts is None or self.parts.read(token) == self.part)
            self.starts.append(len(self.text))
            if self.shown[-1]:
                self.window.append(token)
                self._read_window()
        return self._send(len(self.text) if self.is_stopped else len(self.text) - self._count_held_back())

    def close(self) -> str:
        """Return the rest of the text: the answer has ended."""
        self.is_closed = True
        whole = self._decode_all()
        if not self.is_stopped and whole.startswith(self.text[: self.num_sent]):
            self._grow(whole)
        return self._send(len(self.text))

    def drop_special(self, text: str) -> str:
        """Return a text without the names of special tokens."""
        names = [token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special]
        return re.sub("|".join(map(re.escape, names)), "", text) if names else text

    def read_until(self, end: int, starts: Sequence[int]) -> str:
        """Return the text of the part's tokens whose places in the text of all tokens, `starts`, are before `end`."""
        return self._decode_all(bisect_left(starts, end))

    @property
    def num_tokens(self) -> int:
        """Tokens that have a part of the text that is sent; at the end all, unless a stop string cuts some off."""
        if self.is_closed and not self.is_stopped:
            return len(self.tokens)
        return bisect_left(self.starts, self.num_sent)

    def _read_window(self) -> None:
        """Add the text of the newest tokens, where it is certain."""
        window, size = self.window, len(self.window)
        before, now = (self._decode(tokens, self.is_begin) for tokens in (window[: self.num_read], window))
        if len(now) > len(before) and not now.endswith(UNFINISHED):
            self._move_window(before, now, size)
        elif size - self.num_read > MAX_OPEN:  # else each token would be read with all that stand before it
            for cut in range(size - 1, size - 1 - MAX_CHARACTER, -1):
                text = self._decode(window[:cut], self.is_begin)
                if text + self._decode(window[cut:]) == now:  # no character lies across the cut
                    self._move_window(before, text, cut)
                    break

    def _move_window(self, before: str, now: str, end: int) -> None:
        """Take the tokens before `end` as read: they make `now` of the text `before`."""
        if now == before:  # special tokens: what stands before them stays the context
            del self.window[self.num_read : end]
            return
        self._grow(self.text + now[len(before) :])
        self.is_begin = self.is_begin and self.num_read == 0
        del self.window[: self.num_read]
        self.num_read = end - self.num_read

    def _decode_all(self, end: int | None = None) -> str:
        return self._decode([*compress(self.tokens[:end], self.shown)], is_begin=True)

    def _decode(self, tokens: list[int], is_begin: bool = False) -> str:
        if is_begin and self.behind is not None:
            return decode_behind(self.tokenizer, self.behind, tokens)
        return decode(self.tokenizer, tokens, self.skip)

    def _grow(self, text: str) -> None:
        self.text = text
        positions = [place for word in self.stop if (place := text.find(word, max(0, self.num_sent))) >= 0]
        if positions:
            self.text, self.is_stopped = text[: min(positions)], True

    def _count_held_back(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        max_size = 0
        for word in self.stop:
            for size in range(1, min(len(word), len(self.text) + 1)):
                if self.text.endswith(word[:size]):
                    max_size = max(max_size, size)
        return max_size

    def _send(self, end: int) -> str:
        part = self.text[self.num_sent : end]
        self.num_sent = max(self.num_sent, end)
        return part


# Objects of answers.


class TokenScores:
    """Log-probabilities of tokens as both kinds of answers show them."""

    def __init__(
        self,
        read_bytes: TokenBytes,
        tokens: Sequence[int],
        log_probs: Sequence[float | None],
        tops: Any,
        text: str,
        offset: int = 0,
    ):
        """`tops` has (token, log-probability) pairs for each token, or is None. The tokens stand in `text` from the
        character `offset` on; special tokens are left out of it as a rule."""
        self.parts = [read_bytes(token) for token in tokens]
        self.texts = [_to_text(part) for part in self.parts]
        self.log_probs = list(log_probs)
        self.tops = None if tops is None else [[(read_bytes(t), p) for t, p in top] for top in tops]
        self.offsets, self.end = [], offset  # in the text, of each token and behind the last one
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # of a character of several tokens
        for token, part, whole in zip(tokens, self.parts, self.texts, strict=True):
            self.offsets.append(self.end)
            if token in read_bytes.added and not text.startswith(whole, self.end):
                continue
            size = len(decoder.decode(part))
            # Some tokenizers put a space before a text, which is none of its characters.
            is_added = self.end == 0 and whole.startswith(" ") and not text.startswith(" ")
            self.end += size - is_added

    def for_completion(self) -> dict[str, Any]:
        tops = None
        if self.tops is not None:
            tops = [
                None if own is None else _name_scores([*top, (part, own)])
                for part, own, top in zip(self.parts, self.log_probs, self.tops, strict=True)
            ]
        return {
            "tokens": self.texts, "token_logprobs": self.log_probs, "top_logprobs": tops, "text_offset": self.offsets,
        }  # fmt: skip

    def for_chat(self) -> dict[str, Any]:
        def show(part: bytes, log_prob: float | None) -> dict[str, Any]:
            return {"token": _to_text(part), "logprob": log_prob, "bytes": list(part)}

        tops = self.tops or [[] for _ in self.parts]
        content = [
            show(part, log_prob) | {"top_logprobs": [show(*pair) for pair in top]}
            for part, log_prob, top in zip(self.parts, self.log_probs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}


def _name_scores(scores: Sequence[tuple[bytes, float]]) -> dict[str, float]:
    """Return log-probabilities of the likeliest tokens, and of the drawn one behind them, by their texts. Several may
    have the same text, such as a byte that is no character: the likeliest of them counts."""
    named: dict[str, float] = {}
    for part, log_prob in scores:
        named.setdefault(_to_text(part), log_prob)
    return named


def _to_text(part: bytes) -> str:
    return part.decode(errors="replace")


def show_calls(calls: Sequence[Call], ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return calls of tools as a message has them."""
    return [
        {
            "id": each,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for each, call in zip(ids, calls, strict=True)
    ]


def make_envelope(is_chat: bool, is_stream: bool, model: str) -> dict[str, Any]:
    """Return what every object of one answer begins with."""
    kind = "text_completion"
    if is_chat:
        kind = "chat.completion.chunk" if is_stream else "chat.completion"
    prefix = "chatcmpl" if is_chat else "cmpl"
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def show_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
