"""Chat templates: turn a conversation into text, cut into prompts and answers.

A template is a Jinja text, as Hugging Face's tokenizers have them. The Jinja environment is the one of transformers, so
that a template gives the same text there and here.
"""

import datetime
import functools
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal

from jinja2 import TemplateError
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Concat, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tunix.base.dotted_path import time_limit
from tunix.base.errors import FEW, UserError

TIME_LIMIT_S = 10.0  # for the text of one conversation; templates take less than a millisecond

# Characters of a text that a template makes: of short conversations, and more as a multiple of what it was given. A
# template that shows each message five times would take the memory of the machine with a document of its largest size.
SHORT, MAX_COPIES = 1 << 24, 4
MAX_DIGITS = 5000  # of a whole number that a template computes
# Turns that a template may write to cut one conversation: for each answer it writes all turns before it, with the
# answer and without. For 2,900 turns, every second one an answer, these are so many, and take half a minute. Ten times
# the turns would take an hour.
MAX_TURNS_WRITTEN = 1 << 22
# Characters of all sequences that are made of one conversation, as many as the longest document has bytes. Each answer
# with a thought begins a sequence of its own: 400 of them made 400 MB of a conversation of 2 MB.
MAX_WRITTEN = 1 << 28
MAX_ROLES_KEPT = 100  # names of roles that a template has shown; who sends a conversation makes them up

# Role and content, and what a template may know of thoughts (`THOUGHTS`) and of calls: tool_calls, tool_call_id, name.
Message = dict[str, Any]
# Variables of a template beside the messages: `tools`, and those of task.chat_template_kwargs.
Options = Mapping[str, Any]
NO_OPTIONS: Options = {}
LearntTurns = Literal["all", "last", "assistant"]
Pieces = list[tuple[str, bool]]  # texts that are one text together; True marks one that is learnt


def join_parts(content: str | Sequence[Mapping[str, Any]], mark: str = "") -> str:
    """Return the text of a turn's content, with `mark` for each of its images."""
    if isinstance(content, str):
        return content
    return "".join(mark if part["type"] == "image" else part["text"] for part in content)


# The template of tokenizers that are trained here. A conversation becomes "<bos>user:\nHi\nassistant:\nHello<eos>".
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ '' if loop.first else '\n' }}{{ message.role }}:\n"
    "{{ message.content }}{{ eos_token if message.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' if messages else '' }}assistant:\n{% endif %}"
)

# Stands before a template that takes texts alone, where a processor of transformers reads it: it makes the parts of a
# turn one text, as `join_parts` does, and leaves texts as they are.
JOIN_PARTS = (
    "{% set joined = namespace(turns=[]) %}{% for turn in messages %}{% set parts = turn.content %}"
    "{% if parts is defined and parts is iterable and parts is not string %}{% set content = namespace(text='') %}"
    "{% for part in parts %}"
    "{% set content.text = content.text ~ ('MARK' if part.type == 'image' else part.text) %}"
    "{% endfor %}{% set joined.turns = joined.turns + [dict(turn, content=content.text)] %}"
    "{% else %}{% set joined.turns = joined.turns + [turn] %}{% endif %}{% endfor %}{% set messages = joined.turns %}"
)


class GenerationBlock(Extension):
    """The block `{% generation %}...{% endgeneration %}`, with which a template marks answers: its body is rendered.

    transformers reads from it which tokens are learnt. Here `ChatTemplate.split_answers` finds answers in any template.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 has it as an attribute of the object)

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Generator(CodeGenerator):
    """Compiles `~`, which joins texts, to a call that may be refused."""

    def visit_Concat(self, node: Concat, frame: Any) -> None:
        self.write("environment.join_texts((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of Jinja, in which no value has more than `max_length` characters, items or digits.

    Jinja's own bounds the length of `range` alone: `'a' * 10**10` ends in the kernel's out-of-memory killer.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    max_length = SHORT

    def refuse_longer(self, length: int) -> None:
        if length > self.max_length:
            raise TemplateError(f"it makes more than {self.max_length:,} characters of a conversation")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.refuse_longer(_bound_length(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def join_texts(self, parts: Sequence[Any]) -> str:
        texts = [str(part) for part in parts]
        self.refuse_longer(sum(map(len, texts)))
        return "".join(texts)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check_width(args, kwargs)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `format`
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str) and name == "replace":
            __self.refuse_longer(_bound_replaced(text, *args))
        if isinstance(text, str) and name in ("format", "format_map"):
            __self.refuse_longer(_find_width(text))
        return super().call(__context, __obj, *args, **kwargs)

    def check_width(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a number that may be the width of a text: `'a'.center(10**9)`."""
        for each in (*args, *kwargs.values()):
            if isinstance(each, int):
                self.refuse_longer(each)


def _bound_length(operator: str, left: Any, right: Any) -> int:
    """Return how many characters or items the result of an operator may have; 0 for a number. Raises `TemplateError`
    where a number may have more than `MAX_DIGITS` digits."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and operator == "*" and isinstance(other, str | list | tuple):
            return len(other) * max(0, one)
    if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_DIGITS * 3:
            raise TemplateError(f"it computes a number of more than {MAX_DIGITS:,} digits")
    if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        return len(left) + len(right)
    if operator == "%" and isinstance(left, str):
        stars = [each for each in (right if isinstance(right, tuple) else (right,)) if isinstance(each, int)]
        return max([_find_width(left), *(stars if "*" in left else [])])
    return 0


def _find_width(text: str) -> int:
    """Return the largest number of a format."""
    return max((int(digits[:12]) for digits in re.findall(r"\d+", text)), default=0)


def _bound_replaced(text: str, old: Any = "", new: Any = "", *_: Any) -> int:
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _count_characters(value: Any) -> int:
    """Return the characters of all texts in nested lists and mappings."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_count_characters, (*value.keys(), *value.values())))
    return sum(map(_count_characters, value)) if isinstance(value, list | tuple) else 0


# Of all corpora, so that they have the same tokens on each day: what the template of Llama 3.2 writes without a date.
CORPUS_DATE = datetime.datetime(2024, 7, 26)


class RefusedConversation(UserError):
    """A template does not take a conversation, and may take others."""


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        mark: str | None = None,
        date: datetime.datetime | None = None,
    ):
        """`special_tokens` maps bos_token, eos_token and others to their text. `mark` is what a template writes for an
        image, of a model that sees (data/image_processors.py). `date` is what the template takes for now; None is the
        time of the call. A template with an error is refused."""
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        environment.filters["tojson"] = lambda x, **options: json.dumps(x, **({"ensure_ascii": False} | options))
        environment.globals |= {
            "raise_exception": _reject,
            "strftime_now": lambda pattern: (date or datetime.datetime.now()).strftime(pattern),
        }
        environment.filters |= {name: _bounded(environment, name) for name in ("center", "indent", "replace", "format")}
        self.source, self.environment, self.special_tokens, self.mark = source, environment, special_tokens, mark
        self.shown: set[str] = set()  # kinds of tool words that `check_tools` has found
        self.shown_roles: set[str] = set()  # those that `find_dropped_role` has found
        try:
            with time_limit(TIME_LIMIT_S):
                self.template = environment.from_string(source)
        except Exception as error:  # a template is somebody's program: it may raise anything
            raise UserError(f"task.chat_template: {error}") from None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, options: Options = NO_OPTIONS
    ) -> str:
        """Return the text of a conversation; `add_generation_prompt` adds the text that asks for the next answer.
        Raises `RefusedConversation` where the template fails, its text is many times longer than the conversation, or
        has half of a pair of surrogates, which no tokenizer takes."""
        if "<|channel|>" in self.source:
            messages = list(map(_read_channels, messages))
        messages = list(map(_name_thoughts, messages))
        if any(isinstance(message.get("content"), list) for message in messages) and not self.supports_parts:
            assert self.mark is not None, "a model of text alone is given images"
            messages = [{**message, "content": join_parts(message["content"], self.mark)} for message in messages]
        elif self.needs_parts:
            messages = [{**message, "content": _as_parts(message.get("content"))} for message in messages]
        if any(message.get("tool_calls") for message in messages):
            messages = [self._adapt_calls(message) for message in messages]
        return self._generate(messages, add_generation_prompt, options)

    @property
    def source_for_processors(self) -> str:
        """The template for transformers, which gives it turns of parts as they are, of a model that sees."""
        if self.mark is None or self.supports_parts or self.needs_parts:
            return self.source
        first_line = "\n" if self.source.startswith("\n") else ""  # a line end behind a block is dropped
        return JOIN_PARTS.replace("MARK", self.mark) + first_line + self.source

    def _generate(self, messages: Sequence[Message], add_generation_prompt: bool, options: Options) -> str:
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt, **self.special_tokens}
        values |= {"tools": None, "documents": None, **options}  # transformers gives a template these two always
        parts, length = [], 0
        try:
            self.environment.max_length = SHORT + MAX_COPIES * _count_characters([*messages, dict(options)])
            with time_limit(TIME_LIMIT_S):
                for part in self.template.generate(values):
                    length += len(part)
                    self.environment.refuse_longer(length)
                    parts.append(part)
            text = "".join(parts)
            text.encode()
        except Exception as error:  # as above
            raise RefusedConversation(f"task.chat_template refuses a conversation: {error}") from None
        return text

    @cached_property
    def supports_parts(self) -> bool:
        """True where the template writes `mark` for a part {"type": "image"}; others get it in a turn's text."""
        text = self._show([{"type": "image"}, {"type": "text", "text": WORDS}])
        return self.mark is not None and text.count(self.mark) == 1 and WORDS in text and "'type'" not in text

    @cached_property
    def needs_parts(self) -> bool:
        """True where the template shows the text of parts and drops a content that is text alone, as SmolVLM's does."""
        return WORDS not in self._show(WORDS) and WORDS in self._show(_as_parts(WORDS))

    def _adapt_calls(self, message: Message) -> Message:
        """Return a message with its calls as the template takes them."""
        if message.get("tool_calls") and not message.get("content") and self.needs_null:
            message = {**message, "content": None}
        return _with_json(message) if self.needs_json else message

    @cached_property
    def needs_null(self) -> bool:
        """True where the template drops the calls of a turn whose content is an empty text, and not null, as DeepSeek
        R1's does."""
        called = [{"role": "assistant", "content": content, "tool_calls": [CALL]} for content in ("", None)]
        empty, null = (any(CALLED in self._show("?", form) for form in (each, _with_json(each))) for each in called)
        return null and not empty

    @cached_property
    def needs_json(self) -> bool:
        """True where the template takes arguments of a call as JSON, and fails for an object, as DeepSeek V3's does."""
        called = {"role": "assistant", "content": None if self.needs_null else "", "tool_calls": [CALL]}
        return not self._show("?", called) and bool(self._show("?", _with_json(called)))

    def _show(self, content: Any, *turns: Message) -> str:
        """Return the text of one turn of the user and those behind it, or nothing where the template fails."""
        try:
            return self._generate([{"role": "user", "content": content}, *turns], not turns, NO_OPTIONS)
        except UserError:
            return ""

    def split_answers(
        self,
        messages: Sequence[Message],
        options: Options = NO_OPTIONS,
        learnt: LearntTurns | Sequence[bool] = "assistant",
    ) -> list[Pieces]:
        """Cut the conversation's text into pieces; True marks an answer that is learnt, with the end of its turn.

            user: 1+1?  assistant: 2  user: and 3+3?  assistant: 6
            |------ False ------|True|-------- False --------|True|       learnt="assistant"
            |--------------------- False --------------------|True|       learnt="last"
            |------------------------- True ----------------------|       learnt="all"

        A list says for each turn whether it is learnt; turns of others than the assistant never are. A prompt ends
        where generation would begin. So training cuts the text into tokens at the same places as generation does.

        Many templates show an answer in another form when the conversation has gone on: that of Qwen 3 without its
        thoughts, that of Phi 3 without the end of the text. What follows is then a sequence of its own, so that the
        model learns each answer behind the text that it is given when it answers:

            user: 1+1?  assistant: <think>..</think>2
            user: 1+1?  assistant: 2  user: and 3+3?  assistant: <think>..</think>6
            |----------------------- False ---------------------|------ True -----|

        Returns:
            One list of pieces, or several, each with an answer that is learnt, if there is any.

        Raises:
            RefusedConversation: its text with an answer does not begin with the text before the answer, the template
                fails for it, or it has thousands of answers.
        """
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if learnt == "all":
            return [[(self.render(messages[: numbers[-1] + 1] if numbers else messages, options=options), True)]]
        numbers = numbers[-1:] if learnt == "last" else numbers
        problem = RefusedConversation(
            f"task.chat_template: it has {len(numbers):,} answers in {len(messages):,} turns, and the turns before an "
            "answer are written again for each; cut it into shorter ones, or learn its last answer "
            "(task.learnt_turns=last) or all of its text (task.learnt_turns=all)"
        )
        if sum(2 * number + 1 for number in numbers) > MAX_TURNS_WRITTEN:
            raise problem
        sequences: list[Pieces] = [[]]
        done, written = "", 0  # the text of the last sequence, and the characters of all
        for number in numbers:
            try:
                prompt = self.render(messages[:number], add_generation_prompt=True, options=options)
            except RefusedConversation as error:
                if number:
                    raise
                raise RefusedConversation(
                    f"{error}: it begins with an answer, and nothing asks for that one; task.learnt_turns=last learns "
                    "its last answer alone"
                ) from None
            answered = self.render(messages[: number + 1], options=options)
            if not answered.startswith(prompt):
                answered = prompt + self._find_answer(messages[:number], messages[number], options, prompt, answered)
            if not prompt.startswith(done):
                sequences.append([])
                done = ""
            written += len(answered) - len(done)
            if written > MAX_WRITTEN:
                raise problem
            is_learnt = isinstance(learnt, str) or learnt[number]
            sequences[-1] += [(prompt[len(done) :], False), (answered[len(prompt) :], is_learnt)]
            done = answered
        return [pieces for pieces in sequences if any(is_learnt for _, is_learnt in pieces)] or sequences[-1:]

    def _find_answer(
        self, before: Sequence[Message], answer: Message, options: Options, prompt: str, answered: str
    ) -> str:
        """Return the text of an answer of which the template shows the turns before it in another form.

        That of GPT-OSS drops the thoughts before calls of tools once the answer is there, and shows them while it is
        asked for. The answer begins behind the last text that asks for one, within what it shares with another answer:

            thought call result <|start|>assistant                                       the prompt
                    call result <|start|>assistant<|channel|>final<|message|>It is 5.    `answered`
                    call result <|start|>assistant<|channel|>final<|message|>MARK        with another answer

        That of DeepSeek R1 begins the thought in the prompt, and drops all thoughts of answers. The answer is then what
        the data say behind `<think>`, with the end of a turn.

        Raises:
            RefusedConversation: the text that asks for an answer does not stand before it.
        """

        def share(*turns: Message) -> str:
            """Return what the text with the answer shares with that of other turns."""
            other, sizes = self.render(turns, options=options), range(1, len(answered) + 1)
            return answered[: bisect_left(sizes, True, key=lambda size: not other.startswith(answered[:size]))]

        with suppress(RefusedConversation):
            history = self.render(before, options=options)
            request = prompt.removeprefix(history) if prompt.startswith(history) else ""
            shared = share(*before, ANSWER)
            # Two answers in a row may be one turn, as of Gemma 4: what asks for the first does not ask for the second.
            first = len(share(*before[:-1], ANSWER, answer)) if before and before[-1]["role"] == "assistant" else 0
            if request and (begin := shared.rfind(request)) >= first:
                return answered[begin + len(request) :]
        asked = prompt.rstrip()
        if asked.endswith("<think>"):
            content = _read_thought_and_answer(answer)
            if "</think>" in content:
                return content.removeprefix(prompt[len(asked) :]) + self.read_end(options)
            solution = (
                r"give its answers thoughts, <think>\n\n</think>\n\n where they have none, or another template, or "
                "what this one asks for in task.chat_template_kwargs, often {enable_thinking: false}"
            )
        else:
            solution = (
                "give another template, or what this one asks for in task.chat_template_kwargs, often "
                f"{{enable_thinking: {'true' if asked.endswith('</think>') else 'false'}}}"
            )
        raise RefusedConversation(
            "task.chat_template: a conversation with its answer does not begin with the text before the "
            f"answer, so the answer cannot be told from it: ...{prompt[-40:]!r} and ...{answered[-80:]!r}; {solution}"
        )

    def read_end(self, options: Options = NO_OPTIONS) -> str:
        """Return what the template writes behind the last answer of a conversation, like `<|im_end|>`."""
        _, mark, end = self.render([{"role": "user", "content": "?"}, ANSWER], options=options).rpartition(MARK)
        return end if mark else ""

    def read_end_of_call(self, options: Options = NO_OPTIONS) -> str:
        """Return what the template writes between a call and what its tool says, like `<|call|>`; "" where it shows no
        words of a tool."""
        with suppress(UserError):
            text, mark, _ = self.text_after_turn("tool", [WORDS], options, [("tool", NO_ID)]).partition(WORDS)
            return text if mark else ""
        return ""

    # The text behind a turn of an episode. Old turns are never rendered again: templates drop thoughts, trim text and
    # put it in another order, and what a model has drawn must stay as it was drawn. A small conversation is rendered in
    # their place, and what stands behind the mark is what follows any answer.
    #
    #     <|user|>?<|assistant|>MARK<|end|>\n<|tool|>the observation<|end|>\n<|assistant|>
    #                               |----------------- text_after_turn ----------------|
    #
    # Where the answer has called tools, its calls are in the small conversation too, with the mark as an argument: the
    # templates of GPT-OSS and Gemma 4 show what a tool says behind a call alone, that of Kimi K2 with the call's id.

    def text_after_turn(
        self, role: str, texts: Sequence[str], options: Options = NO_OPTIONS, calls: Sequence[tuple[str, str]] = ()
    ) -> str:
        """Return the text between an answer and the next one, where messages of this role say `texts`.

        `calls` are those that each of the texts answers: names and ids. With them the text begins within the last call.

        Raises:
            UserError: the template fails, or does not show the answer.
        """
        # Templates of alternating roles take one message of the user; a call has one message of its tool.
        contents = ["\n\n".join(texts)] if role == "user" and texts else texts
        names = calls or [("tool", NO_ID)] * len(contents)
        answer: Message = ANSWER
        if calls:
            made = [{"name": name, "arguments": {"a": MARK}} for name, _ in calls]
            answer = {"role": "assistant", "content": "", "tool_calls": [
                {"id": id, "type": "function", "function": each} for each, (_, id) in zip(made, calls, strict=True)
            ]}  # fmt: skip
        messages = [
            {"role": "user", "content": "?"},
            answer,
            *(
                {"role": role, "content": text, "name": name, "tool_call_id": id}
                for text, (name, id) in zip(contents, names, strict=True)
            ),
        ]
        text = self.render(messages, add_generation_prompt=True, options=options)
        if MARK not in text:
            raise UserError("task.chat_template does not show the content of an answer")
        return text[text.rindex(MARK) + len(MARK) :]

    def choose_observation_role(self, options: Options = NO_OPTIONS) -> str:
        """Return the role of an environment's messages: `tool` where the template shows its words, else `user`. Raises
        `UserError` where it shows neither: some drop a message of an unknown role without a word."""
        for role in ("tool", "user"):
            try:
                if WORDS in self.text_after_turn(role, [WORDS], options):
                    return role
            except UserError:
                continue
        raise UserError(
            "task.chat_template shows neither a message of the role tool nor one of the role user behind an answer, so "
            "a model could not read what an environment says; give another template"
        )

    # What a template leaves out of a conversation with tools, a model neither reads nor learns. Each of the three kinds
    # of words is looked for in the first conversation that has it: schemas by the names of the tools, calls and results
    # with a word in their place that no data have.

    def check_tools(self, messages: Sequence[Message], options: Options = NO_OPTIONS) -> None:
        """Raise `UserError` for a template that does not show the tools of a conversation, calls of them, or what they
        say. Tools that a turn of the system names need not be shown by the template."""
        kinds = {
            "tools": bool(options.get("tools")),
            "calls": any(message.get("tool_calls") for message in messages),
            "results": any(message["role"] == "tool" for message in messages),
        }
        for kind in [kind for kind, is_there in kinds.items() if is_there and kind not in self.shown]:
            if problem := getattr(self, f"_find_hidden_{kind}")(messages, options):
                raise UserError(f"task.chat_template {problem} a template that shows them: task.chat_template=FILE")
            self.shown.add(kind)

    def check_roles(self, messages: Sequence[Message], options: Options = NO_OPTIONS) -> None:
        """Raise `UserError` for a template that drops turns of a role."""
        if role := self.find_dropped_role(messages, options):
            raise UserError(
                f"task.chat_template drops turns of the role {role}; rename it in the data, or give a template that "
                "shows them: task.chat_template=FILE"
            )

    def check_thoughts(
        self, messages: Sequence[Message], options: Options, learnt: LearntTurns | Sequence[bool]
    ) -> None:
        """Raise `UserError` for a template that drops the thoughts of answers that are learnt: the model would learn to
        answer without them."""
        if "thoughts" in self.shown:
            return
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if learnt == "last":
            numbers = numbers[-1:]
        elif not isinstance(learnt, str):
            numbers = [number for number in numbers if learnt[number]]
        if not any(messages[number].get(key) for number in numbers for key in THOUGHTS):
            return
        thinking = {"role": "assistant", "content": "!", "reasoning_content": WORDS}
        with suppress(RefusedConversation):
            (pieces,) = self.split_answers([{"role": "user", "content": "?"}, thinking], options)
            if not any(WORDS in text for text, _ in pieces):
                raise UserError(
                    "task.chat_template drops the thoughts of answers (reasoning_content), so they would not be "
                    "learnt; write them into the content, leave them out of the data, or give a template that shows "
                    "them: task.chat_template=FILE"
                )
        self.shown.add("thoughts")

    def find_dropped_role(self, messages: Sequence[Message], options: Options = NO_OPTIONS) -> str:
        """Return a role of which the template shows no turn, or nothing. Those of Qwen know neither `human` nor
        `developer`, and leave out what such a turn says."""
        said = {each["role"] for each in messages if each["content"]} - {"user", "assistant", "tool"}
        roles = sorted(said - self.shown_roles)
        words = {role: f"{WORDS} {number}." for number, role in enumerate(roles)}
        marked = [{**each, "content": words.get(each["role"], each["content"])} for each in messages]
        # Templates of Mistral show the system before a prompt that ends with the user's turn alone. Each prompt has all
        # turns before it, so some are enough.
        answers = [place for place, each in enumerate(marked) if place and each["role"] == "assistant"]
        hidden = set(range(len(roles)))
        for end in (len(marked), *answers[:4], *answers[4:][-4:]):
            if hidden:
                text = self.render(marked[:end], marked[end - 1]["role"] != "assistant", options)
                hidden -= set(map(int, re.findall(rf"{WORDS} (\d{{1,9}})\.", text)))
        if hidden:
            return roles[min(hidden)]
        if len(self.shown_roles) + len(roles) <= MAX_ROLES_KEPT:
            self.shown_roles.update(roles)
        return ""

    def _find_hidden_tools(self, messages: Sequence[Message], options: Options) -> str:
        is_prompt = messages[-1]["role"] != "assistant"
        text = self.render(messages, is_prompt, options)
        if text == self.render(messages, is_prompt, {**options, "tools": None}):
            system = [each["content"] for each in messages if each["role"] in ("system", "developer")]
            text = "\n".join(map(join_parts, system))
        hidden, position = list[str](), 0
        for name in map(read_tool_name, options["tools"]):
            # Templates show them in their order, so each is looked for behind the one before.
            found = text.find(name, position)
            if found < 0 and name not in text:
                hidden.append(name)
                if len(hidden) == FEW:
                    break
            position = max(position, found)
        problem = f"does not show the tools of a conversation ({', '.join(hidden)}); name them in task.system, or give"
        return problem if hidden else ""

    def _find_hidden_calls(self, messages: Sequence[Message], options: Options) -> str:
        calls = [message for message in messages if message.get("tool_calls")]
        renamed = [change_calls(each, lambda function: {**function, "name": CALLED}) for each in messages]
        is_written = all(read_tool_name(each["tool_calls"][0]) in join_parts(each["content"]) for each in calls)
        is_shown = is_written or CALLED in self.render(renamed, options=options)
        return "" if is_shown else "drops the calls of tools (tool_calls) of the assistant; give"

    def _find_hidden_results(self, messages: Sequence[Message], options: Options) -> str:
        marked = [{**each, "content": WORDS} if each["role"] == "tool" else each for each in messages]
        is_shown = WORDS in self.render(marked, options=options)
        return "" if is_shown else "drops what tools say (turns of the role tool); give"


MARK = "\u241fanswer\u241f"  # stands for an answer; no template has it
ANSWER = {"role": "assistant", "content": MARK}
WORDS, CALLED = "seven of nine", "seven_of_nine"
NO_ID = "000000000"  # of a call that has none; the templates of Mistral refuse ids of other lengths
CALL = {"id": NO_ID, "type": "function", "function": {"name": CALLED, "arguments": {"a": 1}}}


THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of a turn's thoughts in files


def _name_thoughts(message: Message) -> Message:
    """Return a message with its thoughts under the two names that templates read: as transformers 5 does, so that a
    template drops none without a word. That of GPT-OSS reads `thinking`, most read `reasoning_content`."""
    thoughts = next((message[key] for key in THOUGHTS if message.get(key) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _read_thought_and_answer(message: Message) -> str:
    """Return what a turn says behind `<think>`: its thought, `</think>` and the answer; "" where it calls tools."""
    content = message.get("content")
    if message.get("tool_calls") or not isinstance(content, str):
        return ""
    thought = next((message[key] for key in THOUGHTS if message.get(key) is not None), None)
    return content.lstrip().removeprefix("<think>") if thought is None else f"\n{thought}\n</think>\n\n{content}"


def _read_channels(message: Message) -> Message:
    """Return a turn with the parts of its text apart, where that has the channels of GPT-OSS, as a turn of an episode:
    the thought, the calls, and what is said. Its template refuses channels within a content."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str) or "<|message|>" not in content:
        return message
    texts: dict[str, list[str]] = {"thinking": [], "content": []}
    calls = []
    for part in content.split("<|start|>"):
        header, _, body = part.partition("<|message|>")
        body = re.split(r"<\|(?:end|call|return)\|>", body, maxsplit=1)[0]
        if named := re.search(r"to=functions\.([\w.-]+)", header):
            try:
                function = {"name": named[1], "arguments": json.loads(body)}
            except (ValueError, RecursionError):
                return message
            calls.append({"id": NO_ID, "type": "function", "function": function})
        elif body:
            texts["thinking" if "<|channel|>analysis" in header else "content"].append(body)
    read = {key: "\n".join(parts) for key, parts in texts.items() if parts or key == "content"}
    return {**message, **read, **({"tool_calls": calls} if calls else {})}


def _with_json(message: Message) -> Message:
    """Return a message with the arguments of its calls as JSON."""

    def write(function: dict[str, Any]) -> dict[str, Any]:
        return {**function, "arguments": json.dumps(function.get("arguments", {}), ensure_ascii=False)}

    return change_calls(message, write)


def change_calls(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """Return a message with the functions of its calls changed; a call has its function, or is one."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {
        **message,
        "tool_calls": [
            {**call, "function": change(call["function"])} if "function" in call else change(call) for call in calls
        ],
    }


def read_function(function: dict[str, Any]) -> dict[str, Any]:
    """Return a called function with its arguments as an object, which templates want; OpenAI's form of files and
    requests has them as JSON. Where a function has no parameters, some write null, an empty text or no arguments.

    Raises:
        ValueError, RecursionError: the arguments are a text that is no JSON.
    """
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments.strip() or "{}")
    return function | {"arguments": {} if arguments is None else arguments}


def read_tool_name(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _bounded(environment: _Environment, name: str) -> Any:
    """Return a filter of Jinja that refuses to make a long text: a wide one, or one with long replacements."""
    work = environment.filters[name]

    def bounded(*args: Any, **kwargs: Any) -> Any:
        environment.check_width(args, kwargs)
        texts = [each for each in (*args, *kwargs.values()) if isinstance(each, str)]
        if name == "replace" and len(texts) > 2:
            environment.refuse_longer(_bound_replaced(*texts))
        if name == "indent" and len(texts) > 1 and len(args) > 1:
            environment.refuse_longer(texts[0].count("\n") * len(texts[1]))
        elif name == "indent" and texts:
            width = next((each for each in (*args[1:2], *kwargs.values()) if isinstance(each, int)), 4)
            environment.refuse_longer((texts[0].count("\n") + 1) * width)
        if name == "format" and texts:
            environment.refuse_longer(_bound_length("%", texts[0], args[1:]))
        return work(*args, **kwargs)

    return functools.wraps(work)(bounded)


def _reject(message: str) -> Any:
    raise TemplateError(message)
