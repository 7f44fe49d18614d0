"""Requests of OpenAI's API -> jobs for the engine: texts and images become tokens, and limits are checked.

`openai_api.py` says what a request may have; here it meets the model, its tokenizer and the limits of the server.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tunix.base.errors import UserError, name_first
from tunix.base.files import expand_home
from tunix.config import Serve
from tunix.data.chat import ChatTemplate, read_tool_name
from tunix.data.files import BadRow
from tunix.data.image_slots import find_image_prompts
from tunix.data.images import ImageReader, take_images
from tunix.data.pieces import PIECE
from tunix.data.tokenizer import break_special_texts, compile_special_texts, decode, read_chat
from tunix.inference.openai_api import (
    ApiError,
    ChatParameters,
    CompletionParameters,
    Parameters,
    read_message,
    read_parameters,
)
from tunix.inference.pretrained import Pretrained
from tunix.inference.sampling import Sampling
from tunix.models.vision import Images
from tunix.rl.tool_parsers import Call, choose_tool_calls, find_reader, is_named_object, keep_texts

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Job:
    """A request as the engine gets it."""

    parameters: Parameters
    is_chat: bool
    prompts: list[list[int]]
    num_answers: int  # to each prompt
    max_new_tokens: int
    read_calls: Callable[[str], Any] | None  # of tools in the text of an answer
    arrived: float  # time.monotonic()
    texts: list[str] = field(default_factory=list)  # of the prompts, where they are echoed
    images: Images | None = None  # of the one prompt of a chat
    call_format: str = ""  # of the calls of tools in a chat (`TOOL_CALLS`)
    num_calls: int = 0  # of tools in the conversation so far


class RequestReader:
    """Reads the requests for one model under one name: at most `max_answers` each, of `max_length` tokens."""

    def __init__(self, model: Pretrained, name: str, command: Serve, max_length: int, max_answers: int):
        assert model.tokenizer is not None
        self.model, self.tokenizer, self.command, self.limits = model, model.tokenizer, command, command.server
        self.name, self.max_length, self.max_answers = name, max_length, max_answers
        # No longer text has room: a token has at most as many characters as its name.
        self.max_characters = max_length * max(map(len, model.tokenizer.get_vocab()))
        self.special = compile_special_texts(model.tokenizer)
        self.long_text = asyncio.Lock()
        self.templates: dict[bool, ChatTemplate] = {}  # by whether a conversation has tools
        self.images = find_image_prompts(model.cfg, model.tokenizer, self.limits.max_image_pixels)
        self.processor = None if self.images is None else self.images.processor
        try:
            for with_tools in (False, True):
                source = model.tokenizer_files, command.chat_template, self.processor
                self.templates[with_tools] = read_chat(*source, with_tools)
        except UserError:
            if command.chat_template is not None:
                raise
        self._warn_of_call_without_end()

    def _warn_of_call_without_end(self) -> None:
        """Warn where no token between a call and what its tool says, as the template writes them, ends an answer."""
        template = self.templates.get(True)
        text = "" if template is None else template.read_end_of_call()
        if text and set(self.model.find_stop_ids()).isdisjoint(self.model.encode_rendered(text)):
            log.warning(
                "the chat template writes %r between a call and what a tool says, and none of its tokens ends an "
                "answer: with tools the model would go on and make up what they say; name the token in eos_token_id of "
                "generation_config.json, which tunix.export writes for a run",
                text[-80:],
            )

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"there is no model {name[:100]}; this server has {self.name}"
            raise ApiError(404, message, "model", "model_not_found")

    async def read_chat(self, body: bytes, arrived: float) -> Job:
        parameters = read_parameters(ChatParameters, body)
        self.check_model(parameters.model)
        tools = None if parameters.tool_choice == "none" else parameters.tools
        template = self.templates.get(bool(tools))  # none also where that for tools cannot be read
        if template is None:
            raise ApiError(400, "the model has no chat template; ask /v1/completions, or start with chat_template=FILE")
        if parameters.top_logprobs and not parameters.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        self._check_answers(parameters, 1)
        # Each is a token at least. Templates write 300,000 messages, 9 MB, for seconds in which no stream goes on.
        calls = (each.get("tool_calls") for each in parameters.messages)
        count = len(parameters.messages) + len(tools or ()) + sum(len(each) for each in calls if isinstance(each, list))
        if count > self.max_length:
            message = f"{count} messages, calls and tools are more than {self.max_length} tokens"
            raise ApiError(400, message, "messages", "context_length_exceeded")
        names = list(map(read_tool_name, tools or ()))
        if not all(names):  # the model could not call it
            raise ApiError(400, f"tools.{names.index('')} has no name", "tools")
        messages = [self._break_special_texts(read_message(each, n)) for n, each in enumerate(parameters.messages)]
        options = self.model.template_options | (parameters.chat_template_kwargs or {})
        options |= {"tools": tools} if tools else {}
        files = await asyncio.to_thread(self._read_images, messages, arrived)
        # In this thread, which alone can end a template that takes too long.
        text = template.render(messages, add_generation_prompt=True, options=options)
        if role := template.find_dropped_role(messages, options):
            way_out = "send them as system or user, or start with chat_template=FILE"
            raise ApiError(400, f"the chat template drops messages of the role {role[:100]}: {way_out}", "messages")
        if names and not any(name in text for name in names):
            way_out = "leave tools out, name them in a message of the system, or start with chat_template=FILE"
            message = f"the chat template does not show the model its tools ({name_first(names)}): {way_out}"
            raise ApiError(400, message, "tools")
        prompt, images = await self._tokenize(len(text), partial(self._encode_chat, text, files))
        max_tokens = parameters.max_completion_tokens or parameters.max_tokens
        call_format = choose_tool_calls(template.source)
        read = find_reader(call_format)
        max_calls = 1 if parameters.parallel_tool_calls is False else None

        def read_calls(answer: str) -> list[Call]:
            calls = [keep_texts(call, tools or ()) for call in read(answer)]
            return [] if any(is_named_object(call, names) for call in calls) else calls[:max_calls]

        job = self._make_job(parameters, True, [prompt], max_tokens, read_calls if tools else None, arrived)
        job.images, job.call_format = images, call_format
        job.num_calls = sum(len(message.get("tool_calls", ())) for message in messages)
        return job

    def _break_special_texts(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in which no tool writes a special token, as in an episode of training."""
        if message["role"] != "tool":
            return message
        if isinstance(content := message["content"], str):
            return message | {"content": break_special_texts(content, self.special)}
        parts = [
            part | {"text": break_special_texts(part["text"], self.special)} if part["type"] == "text" else part
            for part in content
        ]
        return message | {"content": parts}

    def _read_images(self, messages: list[dict[str, Any]], arrived: float) -> list[bytes]:
        """Return the files of the images of messages, in which their places stay.

        Raises:
            ApiError: the model sees none, or one cannot be read, or is a file of a folder that is not allowed, or they
                take longer than a request may.
        """
        if self.processor is None:
            if any(isinstance(message["content"], list) for message in messages):
                raise ApiError(400, "parts other than text are not served: the model sees no images", "messages")
            return []
        limits = self.limits
        folders = tuple(str(expand_home(folder).resolve()) for folder in limits.image_folders)
        size = int(limits.max_body_mb * 1e6)  # of images in files too
        deadline = arrived + limits.request_timeout_s
        reader = ImageReader(
            self.processor, "/", size, limits.max_image_pixels, folders=folders, deadline=deadline,
            bounds=("server.max_body_mb", "server.max_image_pixels"),
            in_place="send a data URL, or name a file of server.image_folders",
        )  # fmt: skip
        try:
            references = take_images(messages, [], reader)
            if len(references) * self.processor.min_tokens > self.max_length:
                message = f"{len(references)} images are more tokens than {self.max_length}"
                raise ApiError(400, message, "messages", "context_length_exceeded")
            return reader.read(references)
        except BadRow as error:
            raise ApiError(400, f"the conversation {error}"[:500], "messages") from None
        except TimeoutError as error:
            raise ApiError(504, f"{error} for server.request_timeout_s={limits.request_timeout_s:g}") from None

    def _encode(self, text: str, encode: Callable[[str], list[int]], where: str) -> list[int]:
        """Return the tokens of a text; raises `ApiError` for one that has no room, whatever its tokens are."""
        if len(text) > self.max_characters:
            message = f"a prompt of {len(text)} characters is more than {self.max_length} tokens"
            raise ApiError(400, message, where, "context_length_exceeded")
        return encode(text)

    async def _tokenize(self, longest: int, work: Callable[[], T]) -> T:
        """Return what `work` makes of texts of at most `longest` characters, in a thread. Long ones are tokenized one
        after the other, since the library takes up to 280 times their size. Those that wait hold no thread: there are
        few, and short texts need them."""
        async with self.long_text if longest > PIECE else nullcontext():
            return await asyncio.to_thread(work)

    def _encode_chat(self, text: str, files: list[bytes]) -> tuple[list[int], Images | None]:
        def encode(text: str) -> list[int]:
            return self._encode(text, self.model.encode_rendered, "messages")

        if self.images is None:
            return encode(text), None
        try:
            return self.images.encode(text, files, encode)
        except UserError as error:
            raise ApiError(400, str(error), "messages") from None

    async def read_completion(self, body: bytes, arrived: float) -> Job:
        parameters = read_parameters(CompletionParameters, body)
        self.check_model(parameters.model)
        if parameters.best_of not in (None, parameters.n or 1):
            raise ApiError(400, "best_of is served where it is n", "best_of")
        given: Any = parameters.prompt
        prompts = given if isinstance(given, list) and not all(isinstance(each, int) for each in given) else [given]
        self._check_answers(parameters, len(prompts))

        def encode(prompt: str | list[int]) -> list[int]:
            return self._encode(prompt, self.model.encode, "prompt") if isinstance(prompt, str) else prompt

        longest = max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0)
        tokens = await self._tokenize(longest, lambda: list(map(encode, prompts)))
        job = self._make_job(parameters, False, tokens, parameters.max_tokens, None, arrived)
        if parameters.echo:
            job.texts = [each if isinstance(each, str) else decode(self.tokenizer, each) for each in prompts]
        return job

    def _check_answers(self, parameters: Parameters, num_prompts: int) -> None:
        if (count := (parameters.n or 1) * num_prompts) > self.max_answers:
            raise ApiError(400, f"{count} answers are more than {self.max_answers} of one request", "n")

    def _make_job(
        self,
        parameters: Parameters,
        is_chat: bool,
        prompts: list[list[int]],
        max_tokens: int | None,
        read_calls: Any,
        arrived: float,
    ) -> Job:
        """Return the job of a request; raises `ApiError` for one that is too large, or asks for what is not served."""
        echo = isinstance(parameters, CompletionParameters) and bool(parameters.echo)
        where = "messages" if is_chat else "prompt"
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, "prompt is empty: it has no token to continue from", where)
            if not 0 <= min(prompt) <= max(prompt) < self.model.cfg.vocab_size:
                raise ApiError(400, f"prompt has tokens outside of 0 to {self.model.cfg.vocab_size - 1}", where)
            if len(prompt) + (1 if max_tokens is None else max_tokens) > self.max_length:
                asked = f"a prompt of {len(prompt)} tokens and max_tokens={max_tokens or 1}"
                message = f"{asked} are more than {self.max_length}"
                raise ApiError(400, message, where, "context_length_exceeded")
        if max_tokens is None:
            max_tokens = min(self.command.max_new_tokens, self.max_length - max(map(len, prompts)))
        if max_tokens == 0 and not echo:
            raise ApiError(400, "max_tokens=0 asks for nothing; with echo=true it scores the prompt", "max_tokens")
        if parameters.stream and (parameters.num_top or echo):
            param = "top_logprobs" if is_chat else "echo" if echo else "logprobs"
            raise ApiError(400, f"{param} is served without stream", param)
        return Job(parameters, is_chat, prompts, parameters.n or 1, max_tokens, read_calls, arrived)

    def select_sampling(self, parameters: Parameters) -> Sampling:
        """Return the choice of tokens that a request asks for; values that leave every token in are no filters."""
        command = self.command
        temperature = command.temperature if parameters.temperature is None else parameters.temperature
        top_k = command.top_k if parameters.top_k is None else parameters.top_k
        top_p = command.top_p if parameters.top_p is None else parameters.top_p
        min_p = command.min_p if parameters.min_p is None else parameters.min_p
        top_k = None if top_k is None or top_k <= 0 else top_k
        return Sampling(0, temperature, top_k, None if top_p is None or top_p >= 1 else top_p, min_p or None)
