"""Chat templates: turn a conversation into text, cut into prompts and answers.

A template is a Jinja text, as Hugging Face's tokenizers have them. The Jinja environment is the one of transformers, so
that a template gives the same text there and here.
"""

import datetime
import json
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tunix.base.dotted_path import time_limit
from tunix.base.errors import UserError

TIME_LIMIT_S = 10.0  # for the text of one conversation; templates take less than a millisecond

Message = dict[str, str]  # role, content

# The template of tokenizers that are trained here. A conversation becomes "<bos>user:\nHi\nassistant:\nHello<eos>".
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ '' if loop.first else '\n' }}{{ message.role }}:\n"
    "{{ message.content }}{{ eos_token if message.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}assistant:\n{% endif %}"
)


class GenerationBlock(Extension):
    """The block `{% generation %}...{% endgeneration %}`, with which a template marks answers: its body is rendered.

    transformers reads from it which tokens are learnt. Here `ChatTemplate.segments` finds the answers of any template.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 has it as an attribute of the object)

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        """`special_tokens` maps bos_token, eos_token and others to their text. A template with an error is refused."""
        extensions = [GenerationBlock, loopcontrols]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
        environment.globals |= {
            "raise_exception": _reject,
            "strftime_now": lambda pattern: datetime.datetime.now().strftime(pattern),
        }
        self.special_tokens = special_tokens
        try:
            with time_limit(TIME_LIMIT_S):
                self.template = environment.from_string(source)
        except Exception as error:  # a template is somebody's program: it may raise anything
            raise UserError(f"task.chat_template: {error}") from None

    def render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation; `add_generation_prompt` adds the text that asks for the next answer.

        Raises:
            UserError: the template fails, or its text has half of a pair of surrogates, which no tokenizer takes.
        """
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt, **self.special_tokens}
        try:
            with time_limit(TIME_LIMIT_S):
                text = self.template.render(values)
            text.encode()
        except Exception as error:  # as above
            raise UserError(f"task.chat_template refuses a conversation: {error}") from None
        return text

    def segments(self, messages: list[Message]) -> list[tuple[str, bool]]:
        """Cut the conversation's text into pieces; True marks an answer, which includes the end of its turn.

            user: 1+1?  assistant: 2  user: and 3+3?  assistant: 6
            |------ False ------|True|-------- False --------|True|

        A prompt ends where generation would begin. So training cuts the text into tokens at the same places as
        generation does.

        Raises:
            UserError: the text of a conversation does not begin with the text of its first turns.
        """
        pieces, done = [], ""  # `done` is the text up to the last answer
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self.render(messages[:number], add_generation_prompt=True)
                answered = self.render(messages[: number + 1])
                if not (prompt.startswith(done) and answered.startswith(prompt)):
                    raise UserError(
                        "task.chat_template: a conversation with its answer does not begin with the text before the "
                        f"answer, so the answer cannot be told from it: ...{prompt[-40:]!r} and ...{answered[-80:]!r}"
                    )
                pieces += [(prompt[len(done) :], False), (answered[len(prompt) :], True)]
                done = answered
        return pieces


def _reject(message: str) -> Any:
    raise TemplateError(message)
