"""Thoughts: what a model writes before its answer, where special tokens mark it.

    <|channel|>analysis<|message|>2 + 3<|end|><|start|>assistant<|channel|>final<|message|>It is 5.      GPT-OSS
    |--------- header -----------|thought|-------------------- header ------------------|-answer-|

    <|channel>thought\\n2 + 3<channel|>It is 5.                                                          Gemma 4
    |----- header ----|thought|      |-answer-|

Texts lack special tokens: without these marks nobody could tell the thought from the answer. Marks that are text, as
the `<think>` of Qwen 3, stay in the answer.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend

from tunix.data.tokenizer import decode

ANSWER, THOUGHT, HEADER = "answer", "thought", "header"

# Special tokens, and what stands behind them; a row counts where a tokenizer has all of its tokens.
MARKS = (
    # GPT-OSS. Behind `<|message|>` stands a thought where its channel is `analysis`.
    {"<|start|>": HEADER, "<|channel|>": HEADER, "<|message|>": ANSWER, "<|end|>": HEADER},
    {"<|channel>": HEADER, "<channel|>": ANSWER},  # Gemma 4, whose header ends with its line
    {"[THINK]": THOUGHT, "[/THINK]": ANSWER},  # Mistral
    {"<|inner_prefix|>": THOUGHT, "<|inner_suffix|>": ANSWER, "<|tools_prefix|>": ANSWER},  # Apertus
    {"<seed:think>": THOUGHT, "</seed:think>": ANSWER},
    {"<think>": THOUGHT, "</think>": ANSWER},
)
BEHIND = {name: part for row in MARKS for name, part in row.items()}
NUM_LAST = 4  # tokens of a prompt, of which one may begin a thought


class PartReader:
    """Tells token by token which part of a model's turn is drawn: a thought, the answer, or the header of one."""

    def __init__(self, backend: Backend, prompt: Sequence[int] = ()):
        """`prompt` stands before the turn; it may begin the thought."""
        self.marks: dict[int, str] = {}
        for row in MARKS:
            ids = {index: name for name in row if (index := backend.token_to_id(name)) is not None}
            if len(ids) == len(row) and not decode(backend, list(ids)):  # texts lack them
                self.marks |= ids
        self.backend, self.part, self.mark, self.header = backend, ANSWER, "", list[int]()
        for token in prompt[-NUM_LAST:] if self.marks else ():
            self.read(token)
        if self.part == HEADER:  # `<|start|>assistant`: a turn without marks is the answer
            self.part = ANSWER

    def read(self, token: int) -> str:
        """Return the part that a token belongs to; marks belong to headers."""
        mark = self.marks.get(token)
        if mark is not None:
            names_thought = decode(self.backend, self.header).strip() == "analysis"
            self.part = THOUGHT if mark == "<|message|>" and names_thought else BEHIND[mark]
            self.mark, self.header = mark, []
            return HEADER
        part = self.part
        if part == HEADER:
            self.header.append(token)
            if self.mark == "<|channel>" and "\n" in decode(self.backend, [token]):
                self.part = THOUGHT
        return part


def split_thought(backend: Backend, tokens: Sequence[int], prompt: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """Return the tokens of the thought and of the answer of a model's turn; without marks all are of the answer."""
    reader = PartReader(backend, prompt)
    parts = [reader.read(token) for token in tokens] if reader.marks else [ANSWER] * len(tokens)
    thought, answer = (
        [token for token, part in zip(tokens, parts, strict=True) if part == name] for name in (THOUGHT, ANSWER)
    )
    return thought, answer
