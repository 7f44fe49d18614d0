"""Rewards: functions that say how good completions are. `scoring.py` calls them, and checks what they return."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from functools import cache
from typing import Any

Reward = Callable[..., list[float]]  # (prompts, completions, **columns) -> a score for each completion
# Largest score, also of a turn: float32, in which advantages are learnt, holds 3e38, and terms have weights and sums.
MAX_SCORE = 1e30


# Rewards for right answers: 1 for each answer that is that of the data, else 0.

# A number in a text. A minus is a sign unless it follows a digit, a letter or a bracket: 10-5 holds 10 and 5. Commas
# count only between groups of three digits: 1,234 is one number, 1,2 are two.
NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w).])[-+])?
    (?:[$€£]\s?(?P<late_sign>-)?)?                      # $5, -$5, $-5
    (?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))    # 1,234 or 1234, or nothing before .5
    (?P<rest>(?:\.\d+)?(?:[eE][-+]?\d{1,2}\b)?)         # .50, e3
    (?:/(?P<below>\d+))?                                # 1/2
    """,
    re.VERBOSE,
)
# What stands between groups of three digits beside commas: LaTeX's 1\,234, and spaces of typesetting, which some models
# write (GPT-OSS: U+202F).
GROUPING = re.compile(r"(?<=\d)(?:\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
WORD = re.compile(r"(?:^|\s)[A-Za-z]{4,}(?:[\s.,;:]|$)")  # shorter ones may be functions, like sin
# Time of math-verify for one answer. Its own 5 s each would make all answers of a process late for the sake of two that
# repeat a number 10,000 times or are powers like 9^{9^{9^9}}; others take 0.1 s to read, and less than 1 s to compare.
READING_S, COMPARING_S = 1, 2
BRACES = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)  # of LaTeX, where \{ and \} are signs


def find_boxed(text: str) -> list[str]:
    """Return what stands in each box \\boxed{...} of a text, in the order of their ends; braces may be nested."""
    open_braces: list[int | None] = []  # where a box begins, None of other braces
    found: list[str] = []
    for match in BRACES.finditer(text):
        if match[0].endswith("{") and match[0] != r"\{":
            open_braces.append(None if match[0] == "{" else match.end())
        elif match[0] == "}" and open_braces and (begin := open_braces.pop()) is not None:
            found.append(text[begin : match.start()])
    return found


ANSWER = ("<answer>", "</answer>")


def find_tagged(text: str) -> list[str]:
    """Return what stands between <answer> and the next </answer> of a text, in their order."""
    # No regular expression: of a text that repeats <answer> without an end, it would take the square of the length.
    (begin, end), found, at = ANSWER, list[str](), 0
    while (first := text.find(begin, at)) >= 0 and (at := text.find(end, first)) >= 0:
        found.append(text[first + len(begin) : at])
    return found


MARKS: tuple[Callable[[str], list[str]], ...] = (  # of an answer in a longer text; the first kind is taken that occurs
    find_tagged,
    find_boxed,
    re.compile(r"####\s*([^\n]*)").findall,
)


def find_marked(text: str) -> str:
    """Return the answer that a text marks by <answer> tags, a LaTeX box or `####`, the last of them; the whole text if
    it marks none."""
    for find in MARKS:
        if found := find(text):
            return found[-1].strip()
    return text.strip()


def read_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly: 1,234 · -5 · $7.00 · 1/2 · .5; None if there is none."""
    # Marks of typesetting: LaTeX's 1{,}234, \$5 and \!.
    text = _use_plain_signs(text).replace("{,}", ",").replace("\\$", "$").replace("\\!", "")
    for match in reversed([*NUMBER.finditer(text)]):
        digits = match["whole"].replace(",", "") + match["rest"]
        negative = match["sign"] == "-" or match["late_sign"] == "-"
        # Neither 1/0 is a number, nor are more digits than Python reads (4,300), as of a model that repeats itself.
        with suppress(ZeroDivisionError, ValueError):
            # A fraction is exact: 0.5, 1/2 and 5e-1 are equal, and 16-digit numbers that differ stay different.
            return Fraction(digits) / int(match["below"] or 1) * (-1 if negative else 1)
    return None


def _use_plain_signs(text: str) -> str:
    """Return a text whose minus signs are hyphens, and whose digits stand together or in groups by commas."""
    return GROUPING.sub("", text).replace("\u2212", "-").replace("\u2011", "-")


def gsm8k(prompts: list[str], completions: list[str], answer: list[Any], **columns: list[Any]) -> list[float]:
    """Score 1 where the answer's number is that of the data, like the 18 of `...they make #### 18`.

    An answer's number is the last one in what it marks (`find_marked`), or else in its whole text.

    Raises:
        ValueError: an answer of the data has no number.
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        right = None if expected is None else read_number(find_marked(str(expected)))
        if right is None:
            raise ValueError(f"the data's answer {str(expected)[:80]!r} has no number")
        scores.append(float(read_number(find_marked(completion)) == right))
    return scores


def math_verify(prompts: list[str], completions: list[str], answer: list[Any], **columns: list[Any]) -> list[float]:
    """Score 1 where the library math-verify finds the answer equal to that of the data: formulas, sets, intervals.

    Raises:
        ImportError: the library is not installed.
        ValueError: it does not understand an answer of the data.
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ImportError("math-verify is not installed: pip install 'tunix-trainer[math]'") from None

    def read(text: str, seconds: int) -> list[Any]:
        marked = find_marked(text)
        if "$" in marked.replace("\\$", "") or marked == text.strip():
            return parse(marked, parsing_timeout=seconds)
        # The library reads formulas only within dollar signs.
        return parse(f"${marked.strip('*')}$", parsing_timeout=seconds)

    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        # With `####` before it, the data's answer counts as marked: `read` then takes a bare \frac{1}{2} for a formula.
        right = [] if expected is None else read(f"#### {find_marked(str(expected))}", 5)
        if not right:
            raise ValueError(f"math-verify does not understand the data's answer {str(expected)[:80]!r}")
        text = _use_plain_signs(completion)
        is_right = verify(right, read(text, READING_S), timeout_seconds=COMPARING_S)
        if not is_right and is_number_with_words(marked := find_marked(text)):
            is_right = verify(right, parse(marked, parsing_timeout=READING_S), timeout_seconds=COMPARING_S)
        scores.append(float(is_right))
    return scores


def is_number_with_words(text: str) -> bool:
    """Return whether a text is one number with words, like `18 dollars`. As a formula it is a product of letters."""
    return "\\" not in text and len(NUMBER.findall(text)) == 1 and WORD.search(text) is not None


def reasoning_gym(
    prompts: list[str],
    completions: list[str],
    task: list[str],
    config: list[dict[str, Any]],
    index: list[int],
    **columns: list[Any],
) -> list[float]:
    """Score from 0 to 1 what reasoning-gym says of the answer to a problem of `data=reasoning_gym`.

    The columns make the problem again; the answer is what a text marks (`find_marked`), or else the whole text.

    Raises:
        UserError: the library is not installed.
    """
    scores = []
    for completion, name, arguments, number in zip(completions, task, config, index, strict=True):
        problems = _make_problems(name, json.dumps(arguments))
        scores.append(float(problems.score_answer(find_marked(completion), problems[number])))
    return scores


@cache  # `config` is JSON, because a dictionary is no key of a cache
def _make_problems(task: str, config: str) -> Any:
    from tunix.data.sources import make_problems  # here, because other rewards need no sources

    return make_problems(task, json.loads(config))


def exact_match(prompts: list[str], completions: list[str], answer: list[Any], **columns: list[Any]) -> list[float]:
    """Score 1 where the answer is that of the data word for word, but for white space around both.

    Raises:
        ValueError: a row of the data has no answer.
    """
    if None in answer:
        raise ValueError("a row of the data has no answer")
    pairs = zip(completions, answer, strict=True)
    return [float(completion.strip() == str(expected).strip()) for completion, expected in pairs]


TAGS = (("<reasoning>", "</reasoning>"), ("<think>", "</think>"))  # a model uses one of these pairs


def format_tags(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    """Score 1 for `<reasoning>...</reasoning><answer>...</answer>` with nothing around it, each tag once.

    `<think>` counts like `<reasoning>`. An answer of another form gets an eighth for each tag that it has exactly once,
    so that a model learns the form step by step. The first tag may end the prompt, as chat templates of models that
    think write it.
    """
    pairs = zip(prompts, completions, strict=True)
    return [max(_score_form(prompt, completion, tags) for tags in TAGS) for prompt, completion in pairs]


def _score_form(prompt: str, completion: str, tags: tuple[str, str]) -> float:
    all_tags = (*tags, *ANSWER)
    text = (tags[0] if prompt.rstrip().endswith(tags[0]) else "") + completion.strip()
    once = sum(text.count(tag) == 1 for tag in all_tags)
    begin, end, answer, close = map(re.escape, all_tags)
    if once == 4 and re.fullmatch(rf"{begin}.*{end}\s*{answer}.*{close}", text, re.DOTALL):
        return 1.0
    return once / 8


def length(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    """Score minus one for each thousand characters: with a small weight, short answers are preferred."""
    return [-len(completion) / 1000 for completion in completions]
