"""Rewards: numbers in texts, the form of answers, and the call of a function with the columns of the data."""

import math
import re
import sys
import time
from fractions import Fraction

import pytest
from support.harness import ROOT

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.rl.rewards import find_marked, read_number
from tunix.rl.scoring import call_reward, score
from tunix.rl.table import REWARDS


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234", 1234), ("1,234,567.50", Fraction("1234567.5")), ("12,34", 34), ("1{,}234", 1234), ("1234", 1234),
        ("-5", -5), ("x = -5.", -5), ("(-5)", -5), ("\u22125", -5), ("10-5", 5), ("10.-5", 5), ("5 - 3", 3), ("+3", 3),
        ("$7.00", 7), ("-$7", -7), ("$-7", -7), ("\\$7", 7), ("$ 1,000", 1000), ("€5", 5),
        ("1/2", Fraction(1, 2)), ("-1/2", Fraction(-1, 2)), ("1/0", None),
        (". 42", 42), (".5", Fraction(1, 2)), ("42.", 42), ("42...", 42), ("**42.**", 42), ("3.50 dollars.", Fraction(7, 2)),
        ("3 and 4 make 7", 7), ("#### 42", 42), ("1e3", 1000), ("50%", 50), ("", None), ("no idea", None), ("...", None),
        ("1\u202f234", 1234), ("1\xa0234\u2009567.5", Fraction("1234567.5")), ("10\\,000", 10000), ("1 234", 234), ("1\u202f2345", 2345),
        ("\u20115", -5), ("gpt\u20115", 5),
        ("1" * 5000, None), ("5 and 1" + ",000" * 2000, 5), ("7 1/" + "1" * 5000, 7),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert read_number(text) == number


def test_an_answer_may_be_marked():
    assert find_marked("1 <answer> 2 </answer> 3 <answer>4\n</answer> 5") == "4"
    assert find_marked(r"so \boxed{\frac{1}{2}} of 3") == r"\frac{1}{2}"
    assert find_marked(r"\boxed{2}. Hence \boxed{\frac{\sqrt{3}}{2}}.") == r"\frac{\sqrt{3}}{2}"
    assert find_marked(r"{\boxed{\left\{1, \boxed{2} \right.} \boxed{3") == r"\left\{1, \boxed{2} \right."
    assert find_marked("6 * 7\n#### 42\nDone in 1 step.") == "42"
    assert find_marked(" 42 ") == "42"
    assert find_marked("<answer>4 <answer>2</answer>") == "4 <answer>2"


def test_a_marked_answer_of_a_text_that_repeats_itself_is_read_in_time():
    start = time.process_time()
    assert find_marked("<answer>" * 10_000 + "#### 42") == "42"
    assert time.process_time() - start < 1


def call(name, completions, **columns):
    return call_reward(REWARDS[name], [""] * len(completions), completions, columns)


def test_gsm8k():
    gold = "He makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 1,018"
    right = ["#### 1018", "It is $1,018.00.", "<answer>1018</answer> in 3 steps", "so 1018"]
    wrong = ["#### 18", "1018 or 5", "", "-1018", "1,0,18"]
    scores = call("gsm8k", right + wrong, answer=[gold] * 9)
    assert scores == [1.0] * 4 + [0.0] * 5
    assert call("gsm8k", ["0", "-5"], answer=[0, -5.0]) == [1.0, 1.0]  # numbers in the data
    for answer in (None, "no number"):
        with pytest.raises(ValueError, match="has no number"):
            call("gsm8k", ["1"], answer=[answer])
    with pytest.raises(ValueError, match="it takes the column answer, which the data lack; their columns are question"):
        call("gsm8k", ["1"], question=["?"])


def test_format():
    whole = "<reasoning>\n1 < 2\n</reasoning>\n<answer>2</answer>"
    cases = {
        whole: 1.0,
        f" {whole.replace('reasoning', 'think')}\n": 1.0,
        "Sure! " + whole: 0.5,
        whole + "<answer>": 3 / 8,
        "</answer></reasoning><answer><reasoning>": 0.5,
        "<answer>2</answer>": 0.25,
        "2": 0.0,
    }
    assert call("format", list(cases)) == list(cases.values())
    # Where the prompt begins the thought, the answer does not.
    rest = whole.replace("reasoning", "think").removeprefix("<think>")
    scores = call_reward(REWARDS["format"], ["assistant:\n<think>\n", "assistant:\n"], [rest] * 2, {})
    assert scores == [1.0, 3 / 8]


def test_exact_match_and_length():
    assert call("exact_match", [" 4 ", "4."], answer=["4", "4"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="a row of the data has no answer"):
        call("exact_match", ["4", "None"], answer=["4", None])
    assert call("length", ["", "x" * 500]) == [0.0, -0.5]


def test_formulas():
    for gold, right, wrong in (
        ("1,234", "so $1,234.00$", "1.234"),
        ("-5", "<answer>-5</answer> of 7", "5"),
        (r"\frac{1}{2}", r"It is \boxed{0.5}.", r"\boxed{2}"),
        ("$x^2 + 1$", "#### 1 + x^2", "#### x^2 + 2"),
        ("x^2 + 1", "$1 + x^2$", "1"),
        ("half of it is #### 1/2", "1/2", ""),
        ("18", r"\boxed{\$18}", r"\boxed{\$81}"),
        ("18", "#### **18**", "#### **81**"),
        ("18", "<answer>18 dollars</answer>", "<answer>18 or 19 dollars</answer>"),
        ("1234", "#### 1\u202f234", "#### 234"),
        ("2", "<answer>The answer is 2.</answer>", "<answer>2 sin x</answer>"),
    ):
        assert call("math_verify", [right, wrong], answer=[gold] * 2) == [1.0, 0.0], gold
    for gold in ("", None):
        with pytest.raises(ValueError, match="math-verify does not understand the data's answer"):
            call("math_verify", ["1"], answer=[gold])


def test_formulas_of_no_end_do_not_make_other_answers_late():
    answers = [r"\boxed{3}", r"\boxed{9^{9^{9^9}}}", "7 " * 40_000, r"\boxed{3}"]
    start = time.monotonic()
    assert call("math_verify", answers, answer=["3"] * 4) == [1.0, 0.0, 0.0, 1.0]
    assert time.monotonic() - start < 8, "math-verify takes 5 s for each by itself"


def test_problems_of_the_library_check_their_answers():
    cfg = compose(["data=reasoning_gym", "data.tasks={chain_sum: {max_terms: 3}}", "data.num_problems=5"]).config
    (unit,) = cfg.data.units(10**6)
    rows = [item.content for item in cfg.data.read(unit)]
    columns = {name: [row[name] for row in rows] for name in ("task", "config", "index", "question")}
    assert call("reasoning_gym", [f"So\n<answer>{row['answer']}</answer>" for row in rows], **columns) == [1.0] * 5
    assert call("reasoning_gym", ["0", "", "no", "1", "9"], **columns) == [0.0] * 5
    for tasks, message in (
        ("{chain_sums: {}}", "data.tasks: reasoning-gym has no chain_sums; did you mean chain_sum?"),
        ("{chain_sum: {terms: 3}}", "data.tasks.chain_sum: .* unexpected keyword argument 'terms'"),
        ("{chain_sum: {max_terms: 0}}", "data.tasks.chain_sum: max_terms must be >= min_terms"),
    ):
        with pytest.raises(UserError, match=message):
            compose(["data=reasoning_gym", f"data.tasks={tasks}"]).config.data.try_out()


def test_a_missing_library_of_problems_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as where it is not installed
    data = compose(["data=reasoning_gym", "data.tasks={chain_sum: {}}"]).config.data
    with pytest.raises(UserError, match=r"needs the library: pip install 'tunix-trainer\[reasoning\]'"):
        data.try_out()


def test_a_missing_extra_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"math-verify is not installed: pip install 'tunix-trainer\[math\]'"):
        call("math_verify", ["1"], answer=["1"])


def test_columns_are_given_by_name():
    def takes_one(prompts, completions, level):
        return level

    def takes_some(prompts, completions, level, missing=7, **others):
        return [missing + len(others)] * len(level)

    def takes_other_names(questions, answers):
        return [len(questions)] * len(answers)

    def takes_turned(completions, prompts, level):
        return [float(text == "c") for text in completions]

    def takes_completions(completions, **columns):  # TRL's
        return [len(columns["answer"]) + float(text == "c") for text in completions]

    def takes_names(*, prompts, completions, level):
        return level

    columns = {"level": [3, 4], "answer": ["a", "b"]}
    for function, expected in ((takes_turned, [1, 0]), (takes_completions, [3, 2]), (takes_names, [3, 4])):
        assert call_reward(function, ["p", "p"], ["c", "d"], columns) == expected
    with pytest.raises(ValueError, match=r"takes no completions; its parameters are to be \(prompts, completions"):
        call_reward(lambda prompts: prompts, [""], [""], {})
    with pytest.raises(ValueError, match="solution"):
        call_reward(lambda completions, solution: solution, ["", ""], ["", ""], columns)
    for function, expected in ((takes_one, [3, 4]), (takes_some, [8, 8]), (takes_other_names, [2, 2])):
        assert call_reward(function, ["", ""], ["", ""], columns) == expected
    with pytest.raises(ValueError, match="the data have a column prompts, which is an argument of every reward"):
        call_reward(takes_one, [""], [""], {"level": [1], "prompts": [""]})


def test_the_reward_of_the_page():
    page = (ROOT / "docs" / "post_training.md").read_text()
    made: dict = {}
    exec(next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def near" in code), made)
    assert call_reward(made["near"], [""] * 3, ["5", "4", "five"], {"answer": ["5"] * 3}) == [1.0, 0.5, 0.0]


def test_what_a_reward_returns_is_checked():
    def returning(values):
        return lambda prompts, completions: values

    odd = call_reward(returning([1, True, None, math.nan, math.inf, "x", 10**5000, -1e39, 0.5]), [""] * 9, [""] * 9, {})
    assert [odd[0], odd[1], odd[8]] == [1.0, 1.0, 0.5]
    assert odd[2:8] == [
        "returned None for an answer", "returned nan for an answer", "returned inf for an answer",
        "returned 'x' (str) for an answer, not a number", "returned a number beyond 1e+30 for an answer",
        "returned -1e+39 for an answer, beyond 1e+30",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="returned 1 scores for 2 answers"):
        call_reward(returning([1]), ["", ""], ["", ""], {})
    for value in ({0: 1.0, 1: 0.5}, "11", {1, 2}, b"11"):  # as many keys or characters as answers
        with pytest.raises(ValueError, match="not a list with a score for each of the 2 answers"):
            call_reward(returning(value), ["", ""], ["", ""], {})
    with pytest.raises(ValueError, match=r"returned 1.0 \(float\), not a list with a score for each of the 2 answers"):
        call_reward(returning(1.0), ["", ""], ["", ""], {})


def test_a_reward_that_empties_its_columns_fails_one_group():
    def takes_out(prompts, completions, level):
        scores = [level.pop(0) for _ in completions]
        if "bad" in completions:
            raise ValueError("no")
        return scores

    scores = score(takes_out, [""] * 4, ["a", "bad", "c", "d"], {"level": [1, 2, 3, 4]}, 2)
    assert [isinstance(each, str) for each in scores] == [True, True, False, False]
    assert scores[2:] == [3, 4]


def test_an_error_costs_the_scores_of_one_group():
    def refuses(prompts, completions, level):
        if "bad" in completions:
            raise SystemExit("no")
        return level

    scores = score(refuses, [""] * 6, ["a", "b", "c", "bad", "e", "f"], {"level": [1, 2, 3, 4, 5, 6]}, 2)
    assert scores[:2] + scores[4:] == [1, 2, 5, 6]
    assert all(text.startswith("SystemExit: no (") and "test_rewards.py, line" in text for text in scores[2:4])


def test_an_error_names_a_line_of_the_user_or_none():
    def takes_solution(prompts, completions, solution):
        return solution

    def short(prompts, completions):
        return [1.0]

    def asks_tunix(prompts, completions, level):
        return REWARDS["gsm8k"](prompts, completions, answer=["none"] * 2)

    def errors_of(function):
        return score(function, [""] * 2, ["a", "b"], {"level": [1, 2]}, 2)

    missing = "ValueError: it takes the column solution, which the data lack; their columns are level"
    assert errors_of(takes_solution) == [missing] * 2
    assert errors_of(short) == ["ValueError: returned 1 scores for 2 answers"] * 2
    assert re.search(r"has no number \(.*test_rewards.py, line \d+\)$", errors_of(asks_tunix)[0])
