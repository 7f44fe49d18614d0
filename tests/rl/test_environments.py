"""Environments: both forms of the protocol, tools with their schemas, formats of calls, and the rows of the table."""

import os
import random
import re
import tempfile
import time
from typing import Literal

import pytest
from support.harness import ROOT

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.rl.environments import Reply, describe_tools, gives_reward, join_tools, open_environment, split_options
from tunix.rl.table import ENVIRONMENTS, find_environment
from tunix.rl.tool_parsers import (
    TOOL_CALLS,
    Call,
    choose_tool_calls,
    find_reader,
    find_text_before_calls,
    keep_texts,
    make_call_ids,
)
from tunix.rl.tools import Calculator, Python, SearchFolder


class Counter:
    """As written for TRL."""

    def reset(self, target: int, **kwargs) -> str:
        self.counter, self.target = 0, target
        return f"Reach {target}."

    def increment(self, step: int, times: Literal[1, 2] = 1) -> str:
        """
        Increment the
        counter.

        Args:
            step (int): How much,
                each time.
            times: How often.

        Returns:
            The new value.
        """
        self.counter += step * times
        return str(self.counter)

    def no_tool(self):
        return "it has no docstring"

    def _hidden(self):
        """Private."""

    def get_reward(self) -> float:
        return float(self.counter == self.target)


class Gymnasium:
    def __init__(self, least=0):
        self.least = least

    def reset(self, *, seed):
        self.number = self.least + seed
        return f"above {self.number}?", {"information": 1}

    def step(self, text):
        right = int(text) > self.number
        return "no", float(right), right, False, {}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_public_methods_with_docstrings_are_tools():
    episode = open_environment(Counter, {}, "hermes")
    assert episode.reset(7, {"target": 5}) == Reply(["Reach 5."], 0.0, False)
    assert episode.step(call("increment", '{"step": 2}')) == Reply(["2"], 0.0, False, calls=[("increment", "")])
    two = episode.step(f"I think. {call('increment', '{}')} {call('no_tool', '{}')} <tool_call>{{")
    assert [text.partition(" missing")[0] for text in two.observations] == [
        "error: TypeError: Counter.increment()",
        "error: ValueError: there is no tool no_tool; the tools are increment",
        "error: ValueError: a call is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ]
    assert (two.done, two.tool_errors) == (False, 3)
    assert episode.step(call("increment", '{"step": 1, "times": 2}')).observations == ["4"]
    assert episode.finish() == 0.0, "what a budget ends is rewarded too"
    assert "schemas" not in vars(episode), "which need pydantic, and 0.3 s of the first call"
    episode.step(call("increment", '{"step": 1}'))
    assert episode.step("It is 5.") == Reply(None, 1.0, True)
    assert gives_reward(Counter)
    assert gives_reward(Gymnasium)
    assert not gives_reward(Calculator)


def test_an_own_format_of_calls_is_named_where_it_fails():
    episode = open_environment(Counter, {}, "support.own_environment:read_numbers")
    with pytest.raises(
        ValueError, match=r"task.tool_calls=support.own_environment:read_numbers fails: ValueError: inv"
    ) as error:
        episode.step("a")
    assert error.traceback[-1].name == "read_numbers"
    with pytest.raises(ValueError, match=r"read_numbers returned 7 \(int\), which is no Call"):
        episode.step("7")
    with pytest.raises(ValueError, match=r"returned Call\(.*, which is no Call whose name and id are texts"):
        episode.step("-7")  # it ended the run by a traceback


def test_schemas_of_tools():
    """The form that chat templates of Hugging Face take; transformers makes the same of such a method."""
    assert describe_tools(Counter) == [
        {
            "type": "function",
            "function": {
                "name": "increment",
                "description": "Increment the counter.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "step": {"type": "integer", "description": "How much, each time."},
                        "times": {"enum": [1, 2], "type": "integer", "description": "How often."},
                    },
                    "required": ["step"],
                },
            },
        }
    ]
    assert describe_tools(Gymnasium) == []
    for name in ("python", "calculator", "search_folder"):
        (tool,) = describe_tools(ENVIRONMENTS[name])
        assert all("description" in each for each in tool["function"]["parameters"]["properties"].values())

    class Untyped:
        def add(self, a):
            """Add."""

    with pytest.raises(UserError, match="the tool add has a parameter a without a type; write a: int"):
        describe_tools(Untyped)

    class Waits:
        async def wait(self):
            """Wait."""

    class Yields:
        def count(self):
            """Count."""
            yield "1"

    class Static:
        @staticmethod
        def add(a: int):
            """Add."""

    class OfClass:
        @classmethod
        def add(cls, a: int):
            """Add."""

    class ForTypeCheckers:
        def look(self, a: int) -> "Sequence[str]":  # noqa: F821 (as where TYPE_CHECKING imports it)
            """Look."""

    for kind, message in (
        (ForTypeCheckers, "look has a type that cannot be read: name 'Sequence' is not defined; import it"),
        (Waits, "wait is async or yields; write a def"),
        (Yields, "count is async"),
        (Static, "add is a staticmethod; give"),
        (OfClass, "add is a classmethod; give"),  # it was left out in silence
    ):
        with pytest.raises(UserError, match=f"the tool {message}"):
            describe_tools(kind)


def test_gymnasium_form():
    episode = open_environment(Gymnasium, {"least": 2}, "hermes")
    assert episode.reset(7, {"q": "not taken"}) == Reply(["above 9?"], 0.0, False)
    assert episode.step("3") == Reply(["no"], 0.0, False)
    assert episode.step("12") == Reply(["no"], 1.0, True)
    assert episode.finish() == 0.0
    with pytest.raises(ValueError, match="the data have a column seed, which is an argument of reset"):
        episode.reset(7, {"seed": 1})
    with pytest.raises(ValueError, match="reset takes the column target, which the data lack; their columns are q"):
        open_environment(type("Needy", (), {"reset": lambda self, target: None, "step": None}), {}, "hermes").reset(
            1, {"q": 2}
        )


def test_the_environments_of_the_page():
    """docs/agents.md has one of each form."""
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL):
        if "from openenv" in block:  # a package that no other test needs
            compile(block, "docs/agents.md", "exec")
        else:
            exec(block, names)
    game = open_environment(names["Game"], {}, "hermes")
    assert game.reset(1, {"answer": "4", "question": "?"}) == Reply(None, 0.0, False)
    assert game.step("3") == Reply(["no, try again"], 0.0, False)
    assert game.step(" 4 ") == Reply(["no, try again"], 1.0, True)
    counter = open_environment(names["Counter"], {}, "hermes")
    counter.reset(1, {"target": "2"})
    assert counter.step(call("increment", '{"step": 2}')).observations == ["2"]
    assert counter.step("done") == Reply(None, 1.0, True)
    (schema,) = describe_tools(names["Counter"])
    assert schema["function"]["parameters"]["properties"]["step"]["description"] == "By how much."


NONSENSE = {
    "a text": "step returned 'a text' (str), not (observation, reward, done)",
    ("a", 1.0): "step returned ('a', 1.0) (tuple), not (observation, reward, done)",
    ("a", None, True): "it returned None for a reward, not a number",
    ("a", float("nan"), True): "it returned nan for a reward, and one has at most 1e+30",
    ("a", -1e39, True): "it returned -1e+39 for a reward, and one has at most 1e+30",
    (3, 1.0, True): "it returned 3 (int) for an observation, not a text",
    ("a", 1.0, "no"): "step returned 'no' (str) for done, not True or False",
    ("a" * 1_000_001, 1.0, False): "it returned 1,000,001 characters for an observation; at most 1,000,000",
}


@pytest.mark.parametrize("result", NONSENSE, ids=lambda result: str(result)[:30])
def test_nonsense_is_named(result):
    kind = type("Odd", (), {"reset": lambda self: None, "step": lambda self, text: result})
    with pytest.raises(ValueError) as error:
        open_environment(kind, {}, "hermes").step("?")
    assert str(error.value) == NONSENSE[result]


def test_half_a_character_is_replaced():
    kind = type("Odd", (), {"reset": lambda self: None, "step": lambda self, text: (["a\ud83d", "b"], 0, False)})
    assert open_environment(kind, {}, "hermes").step("?").observations == ["a?", "b"]


ADD = ("add", {"a": 1, "b": "x"})
FORMATS = {
    "hermes": 'I add. <tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>',
    "xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>",
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}',
    "json": '[TOOL_CALLS][{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}]',
    "python": '[add(a=1, b="x")]',
    "glm": "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "gemma": '<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>',
    "harmony": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": "x"}',  # <|call|> stops the turn
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi": '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": "x"}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "apertus": '<|inner_prefix|>I add.<|inner_suffix|><|tools_prefix|>[{"add": {"a": 1, "b": "x"}}]<|tools_suffix|>',
}  # as the templates of the models write calls, and as the models do


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_formats_of_calls(name):
    (found,) = TOOL_CALLS[name].read(FORMATS[name])
    assert (found.name, found.arguments, found.problem) == (*ADD, "")
    assert TOOL_CALLS[name].read("The answer is [1, 2], or {x}.") == []
    assert TOOL_CALLS[name].read("") == []
    before = {"hermes": "I add.", "apertus": "<|inner_prefix|>I add.<|inner_suffix|>"}
    assert find_text_before_calls(name, FORMATS[name]).strip() == before.get(name, "")


def test_other_ways_of_writing_calls():
    read = {name: row.read for name, row in TOOL_CALLS.items()}
    two = '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"a": 2}}'
    assert [call.arguments for call in read["llama"](two)] == [{}, {"a": 2}]
    assert [call.name for call in read["json"]('```json\n{"name": "add"}\n```')] == ["add"]
    assert [call.name for call in read["json"]('{"name": "add"}')] == ["add"]
    for mark in ("python", "tool_call"):
        text = f'I add.<|{mark}_start|>[add(a=1), say(text="]")]<|{mark}_end|>'
        assert read["python"](text) == [Call("add", {"a": 1}), Call("say", {"text": "]"})]
    assert [call.name for call in read["python"]("```tool_code\nadd(a=1)\nmath.sub(b=-2)\n```")] == ["add", "math.sub"]
    assert [call.arguments for call in read["python"]("[add(a=1), add(a=[2, 3])]")] == [{"a": 1}, {"a": [2, 3]}]
    thought = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
    assert read["harmony"](thought + '<|message|>{"a": 2}') == [Call("add", {"a": 2})]
    named = thought.replace("I add.", "I call to=functions.sub.")
    assert read["harmony"](named + '<|message|>{"a": 2}') == [Call("add", {"a": 2})], (
        "a thought that names a tool calls none"
    )
    assert (
        read["harmony"](named.replace("commentary to=functions.add <|constrain|>json", "final") + "<|message|>It is 2.")
        == []
    )
    nested = '<|tool_call>call:f{a:{<|"|>k, k<|"|>:[<|"|>x: {y:1}<|"|>,null,true]}}<tool_call|><|tool_call>call:g{}<tool_call|>'
    assert read["gemma"](nested) == [Call("f", {"a": {"k, k": ["x: {y:1}", None, True]}}), Call("g", {})]
    old = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 3}\n```<｜tool▁call▁end｜>'
    assert read["deepseek"](old + old) == [Call("add", {"a": 3})] * 2
    assert read["glm"]("<tool_call>f</tool_call>\n<tool_call>g") == [Call("f", {}), Call("g", {})]
    assert read["hermes"]('<|tool_call|>[{"name": "f"}, {"name": "g"}]') == [Call("f", {}), Call("g", {})], "Granite 3"
    for begin, end in (("<TOOLCALL>", "</TOOLCALL>"), ("functools", ""), ("<|tool_call|>", "<|/tool_call|>")):
        two = f'I look.{begin}[{{"name": "f"}}, {{"name": "g", "arguments": {{"a": [1]}}}}]{end}'
        assert read["hermes"](two) == [Call("f", {}), Call("g", {"a": [1]})], "Nemotron, Phi 4 mini"
        assert find_text_before_calls("hermes", two) == "I look."
    for middle in ("[ARGS]", "", "[CALL_ID]Ab1[ARGS]"):
        two = f'I add.[TOOL_CALLS]add{middle}{{"a": {{"b": 1}}}}[TOOL_CALLS]sub{middle}{{}}'
        calls = [Call("add", {"a": {"b": 1}}), Call("sub", {})]
        id = "Ab1" if "ID" in middle else ""
        assert read["json"](two) == [call._replace(id=id) for call in calls], "Mistral's newer form"
    assert read["json"]("[TOOL_CALLS]add[ARGS]{1}")[0].problem
    assert read["python"]("[f(a=true, b=[null, {'c': false}])]") == [Call("f", {"a": True, "b": [None, {"c": False}]})]
    of_python = [
        f"<parameter={key}>\n{value}\n</parameter>" for key, value in zip("abc", ("True", "False", "None"), strict=True)
    ]
    (call,) = read["xml"](f"<function=f>{''.join(of_python)}</function>")
    assert call.arguments == {"a": True, "b": False, "c": None}, "Qwen's template writes them so"
    problems = {
        "gemma": "<|tool_call>call:f{a:}<tool_call|>",
        "hermes": '<tool_call>{"name": 3}</tool_call>',
        "llama": '{"name": "add"',
        "json": '[TOOL_CALLS]{"name": "add", "arguments": "x"}',
        "python": "[add(1)]",
        "apertus": '<|tools_prefix|>[{"add": {}, "sub": {}}]',
    }
    assert all(read[name](text)[0].problem for name, text in problems.items())
    for value in ("open('x')", "{[1]: 2}", "{1, 2}", "b'x'", "[1j]", "{'a': ...}", "1e999", "{(1,): 2}"):
        assert "plain value" in read["python"](f"[add(a={value})]")[0].problem
    assert read["hermes"]("<tool_call>" + "[" * 100_000)[0].problem
    for value in ("NaN", "[-Infinity]", "1e999"):
        assert (
            "no number of JSON"
            in read["hermes"](f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}')[0].problem
        )
        (call,) = read["xml"](f"<function=f><parameter=a>{value}</parameter></function>")
        assert call.arguments == {"a": value}, "a text"
    for more in ('"id": null', '"arguments": null', '"parameters": null', '"arguments": null, "parameters": {}'):
        assert read["hermes"](f'<tool_call>{{"name": "f", {more}}}') == [Call("f", {})]


WORDS = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>", "{", "}",
    "<arg_key>a</arg_key><arg_value>", "</arg_value>", "<|tool_call>call:f{", '<|"|>', "to=functions.f", "<|message|>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<|tool_call_begin|>f<|tool_call_argument_begin|>", '<|tools_prefix|>[{"f":',
    "[TOOL_CALLS]", "<|python_start|>", "<|tool_call_end|>", "[", "]", "```tool_code", "```json", "```", '"name"', ":", '"arguments"', "f(", "a=", "1", ")", ",", "\n", "\x00", '"',
]  # fmt: skip


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_whatever_a_model_writes_is_read(name):
    """Any text gives calls, each of which can be made or says what is wrong with it."""
    draw = random.Random(name)
    for _ in range(300):
        for call in TOOL_CALLS[name].read("".join(draw.choices(WORDS, k=draw.randint(1, 12)))):
            assert isinstance(call.arguments, dict)
            assert isinstance(call.name, str)
            assert call.problem or call.name


@pytest.mark.parametrize("end", ["</think>", "[/THINK]", "<channel|>"])
@pytest.mark.parametrize("name", TOOL_CALLS)
def test_a_call_within_a_thought_is_none(name, end):
    """Whether the mark of its beginning stands in the prompt or not; one that has not ended is read as a text."""
    thought, call = f"I could write {FORMATS[name]}\n{end}\n\n", FORMATS[name]
    read = find_reader(name)
    assert read(f"{thought}It is 3.") == []
    assert read(f"{thought}{call}") == TOOL_CALLS[name].read(call)
    assert find_reader("json")(f'```json\n{{"name": "add"}}\n```{end}It is 3.') == [], "a block begins no answer"
    before = find_text_before_calls(name, call)
    assert find_text_before_calls(name, f"{thought}{call}").rstrip() == f"{thought}{before}".rstrip()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("llama", '{"name": "add", "parameters": {"a": "VALUE"}}', "<tool_call> ```python 1``` </think>"),
        ("json", '{"name": "add", "arguments": {"a": "VALUE"}}', "```json{1}``` </think>"),
        ("python", '[add(a="VALUE")]', "```python 1``` <tool_call> </think>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "VALUE"}}</tool_call>', "to=functions. </think>"),
    ],
)
def test_marks_in_an_argument_are_a_part_of_it(name, text, value):
    """They were read as the ends of thoughts, or as calls of other formats: the call was lost, or its beginning was shown as content."""
    text = text.replace("VALUE", value)
    assert find_reader(name)(text) == [Call("add", {"a": value})]
    assert find_text_before_calls(name, text) == ""


@pytest.mark.parametrize("name", TOOL_CALLS)
def test_the_mark_of_a_thought_in_an_argument_behind_a_text(name):
    """The call was lost: what stands before the mark was taken for a thought."""
    call = re.sub(r"\bx\b", "a </think> b", FORMATS[name])
    text = f"I look. ```python\n{call}\n```" if name == "python" else f"I look. {call}"
    (found,) = find_reader(name)(text)
    assert (found.name, found.arguments, found.problem) == ("add", {"a": 1, "b": "a </think> b"}, "")
    assert find_text_before_calls(name, text).startswith("I look.")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("xml", "<function=" * 20_000),
        ("xml", "<function=f>" + "<parameter=a>" * 5_000 + "</function>"),
        ("xml", "<function=f>" + "<parameter=" * 10_000 + "</parameter></function>"),
        ("python", "```python" + "\n" * 40_000),
        ("glm", "<tool_call>f" + "<arg_key>" * 20_000),
        ("glm", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 5_000),
        ("python", "<function_calls>" * 5_000),
        ("harmony", "to=functions." * 10_000),
        ("harmony", "to=functions." + "a" * 40_000),
    ],
)
def test_a_text_that_repeats_itself_is_read_in_time(name, text):
    start = time.process_time()
    assert all(call.problem for call in TOOL_CALLS[name].read(text))
    assert time.process_time() - start < 1


def test_a_call_that_is_cut_says_so():
    """Wherever that is; only between two arguments of GLM's it looks whole, because </tool_call> may stop a turn."""
    for name, end in (("xml", "</function>"), ("glm", "</arg_value>\n</tool_call>")):
        text, read = FORMATS[name], TOOL_CALLS[name].read
        places = range(text.index("\n", 20) + 1, text.index(end) + len("</function>"))
        whole = [text[:place].strip()[-12:] for place in places if not read(text[:place])[0].problem]
        assert whole == {"xml": [], "glm": ["</arg_value>"] * 2}[name]


class Notes:
    def reset(self, seed):
        pass

    def note(self, a: str, b: str | None, c: int, d: Literal["1", "x"]) -> str:
        "Note it."
        return repr((a, b, c, d))


@pytest.mark.parametrize("name", ["xml", "glm"])
def test_a_text_that_looks_like_another_value_stays_a_text(name):
    """Where the tool takes one: a version 1.10 is not 1.1."""
    begin, argument, end = {
        "xml": ("<function=note>", "<parameter={}>\n{}\n</parameter>", "</function>"),
        "glm": ("<tool_call>note", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "</tool_call>"),
    }[name]
    for b, expected in (("[1,2]", "[1,2]"), ("null", None)):
        text = begin + "".join(argument.format(*pair) for pair in (("a", "1.10"), ("b", b), ("c", 3), ("d", 1))) + end
        reply = open_environment(Notes, {}, name).step(text)
        assert reply.observations == [repr(("1.10", expected, 3, "1"))]


def test_the_schema_of_a_request_says_which_arguments_are_texts():
    """As clients of a server give it: a number of a house is a text where the schema says so."""
    kinds = {
        "a": {"type": "string"}, "b": {"type": ["string", "null"]}, "c": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        "d": {"type": "integer"}, "e": {}, "f": 3, "g": {"enum": ["42", "43"]}, "h": {"enum": [42, "all"]}, "i": {"const": "42"},
        "j": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/House"}]}, "k": {"allOf": [{"$ref": "#/$defs/Own"}], "$defs": {"Own": {"type": "string"}}},
        "l": {"$ref": "#/$defs/Loop"},
    }  # fmt: skip
    text = "".join(f"<parameter={name}>42</parameter>" for name in kinds)
    definitions = {"House": {"enum": ["42"]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 9}}
    function = {"name": "note", "parameters": {"type": "object", "properties": kinds, "$defs": definitions}}
    tools = [{"function": function}]
    for given, expected in (
        (tools, ["42", "42", 42, 42, 42, 42, "42", 42, "42", "42", "42", 42]),
        ([{}, {"function": function | {"parameters": 1}}], [42] * 12),
    ):
        (call,) = TOOL_CALLS["xml"].read(f"<function=note>{text}</function>")
        assert [*keep_texts(call, given).arguments.values()] == expected


def test_ids_of_calls_count_those_of_the_conversation():
    """Kimi K2's template shows what a tool says under the id of its call: two of one number would be one."""
    calls = [Call("add", {}), Call("sub", {})]
    assert make_call_ids("kimi", calls, 3) == ["functions.add:3", "functions.sub:4"]
    assert len({*make_call_ids("json", calls, 3)}) == 2


def test_the_format_follows_from_the_template():
    templates = {
        "<tool_call>{...}</tool_call>": "hermes", "<tool_call>\n<function=name>": "xml", "[TOOL_CALLS]": "json",
        '{"name": , "parameters": }': "llama", "```tool_code": "python", "<|tool_call_start|>[": "python", "{{ message.content }}": "hermes",
        "<tool_call>{name}\n<arg_key>": "glm", "'<|tool_call>call:' + name": "gemma", "'functions.' + name + '<|channel|>commentary'": "harmony",
        "'<｜tool▁call▁begin｜>' + name": "deepseek", "<|tool_call_begin|>": "kimi", "<|tools_prefix|>[": "apertus",
    }  # fmt: skip
    assert {text: choose_tool_calls(text) for text in templates} == templates


def test_look_up():
    """Each demonstration of the data is an episode that the environment would play."""
    source = compose(["data=look_up", "data.num_rows=200", "task=sft"]).config.data
    (unit,) = source.units(1000)
    right = 0
    for item in source.read(unit):
        (user, *turns), key, value = (item.content[name] for name in ("messages", "key", "value"))
        assert user["content"] == f"{key}>"
        episode = open_environment(ENVIRONMENTS["look_up"], {}, "hermes")
        episode.reset(1, {"key": key, "value": value, "messages": turns})
        while turns:
            reply = episode.step(turns.pop(0)["content"])
            assert reply.observations == ([turns.pop(0)["content"]] if turns else None)
        assert reply.done
        right += reply.reward
    assert 60 < right < 110, "four of ten, and a tenth of the others by chance"


def test_calculator():
    calculate = Calculator().calculate
    sums = {"1 + 2*3": "7", "6 / 2": "3", "7 // 2": "3", "2 ** 0.5": "1.4142135623730951", "max(1, sqrt(16))": "4", "round(7/3, 2)": "2.33", "-pi": "-3.141592653589793"}  # fmt: skip
    assert {text: calculate(text) for text in sums} == sums
    for text in ("9 ** 9 ** 9", "10 ** 60 * 10 ** 60", "__import__('os')", "(-8) ** 0.5", "'a' * 9", "[].x", "(" * 999,
                 "round(5, -10 ** 9)"):  # fmt: skip
        with pytest.raises((ValueError, SyntaxError, MemoryError)):
            calculate(text)


def test_search_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("The cat sits.\n\nA dog barks at the cat.\n\n" + "Filler. " * 40)
    (tmp_path / "b" / "c.md").write_text("Whales swim in the sea.")
    (tmp_path / "d.bin").write_bytes(b"whales")
    search = SearchFolder(str(tmp_path), results=1, passage_characters=60).search
    assert search("where do whales swim?") == "b/c.md:\nWhales swim in the sea."
    assert search("dog").startswith("a.txt:\n")
    assert search("elephants") == search("") == "nothing is found"
    (tmp_path / "b" / "long.txt").write_text("-" * 1_500_000 + "\n\nOkapis hide.")
    assert (
        SearchFolder("~/b", passage_characters=10**6).search("okapis")
        == "long.txt:\n" + "-" * 500_000 + "\n\nOkapis hide."
    )
    with pytest.raises(ValueError, match="has no text files"):
        SearchFolder(str(tmp_path / "b" / "none"))


PROGRAMS = {
    "print(1 + 1)": "2",
    "x = 1": "the program has printed nothing",
    "1 / 0": "ZeroDivisionError: division by zero",
    "x = [0] * 10**9": "MemoryError",
    "open('f', 'wb').write(b'x' * 10**8)": "File too large",
    "print('a' * 10**6)": "... the rest is left out",
    "import os; print(os.listdir(), len(os.environ), os.getcwd())": "[] 3 /work",
    "import os; os.remove('../output'); os.symlink('/etc/hosts', '../output'); print(7)": "7",
    "import sys; sys.exit(3)": "the program ended with exit code 3",
}


def test_python_is_bounded():
    python = Python()
    python.reset(3)
    said = {code: python.python(code) for code in PROGRAMS}
    assert {code: text[-len(PROGRAMS[code]) :] for code, text in said.items()} == PROGRAMS
    assert all(len(text) < 5000 for text in said.values())
    assert 'File "program.py", line 1' in said["1 / 0"], "no name of this machine's folders"
    hashes = []
    for seed in (3, 3, 4):  # an episode that is played again says the same
        python.reset(seed)
        hashes.append(python.python("print(hash('a'))"))
    assert hashes[0] == hashes[1] != hashes[2]


def test_python_ends_with_all_that_it_has_started(tmp_path, monkeypatch):
    python = Python(timeout_s=1.0)
    python.reset(3)
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(9)"
    start_time = time.monotonic()
    assert python.python(code).endswith("the program was stopped after 1 s")
    assert python.python(code.replace("time.sleep(9)", "print(1)")) == "1"
    assert python.python("import os\nwhile True: os.fork()").endswith("the program was stopped after 1 s")
    deep = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\nprint(2)"
    patient = Python(timeout_s=60.0)
    patient.reset(3)
    assert patient.python(deep) == "2"
    time.sleep(max(0.0, start_time + 4 - time.monotonic()))
    assert not mark.exists()
    assert not os.listdir(folder)


def test_tools_of_several_environments():
    folder = str(ROOT / "docs" / "log")
    options = f"+task.environment_options={{search_folder:{{folder:'{folder}',results:1}}}}"
    tools = "task.environment=[calculator,search_folder]"
    task = compose(["+experiment=grpo_python_tool", tools, "~task.environment_options", options]).config.task
    kind = find_environment(task.environment)
    assert [tool["function"]["name"] for tool in task.describe_tools()] == ["calculate", "search"]
    assert task.describe_tools() == [*describe_tools(Calculator), *describe_tools(SearchFolder)]
    assert (gives_reward(kind), kind.replays) == (False, True)
    environment = open_environment(kind, task.environment_options, "hermes")
    assert environment.reset(3, {"question": "a"}).observations is None
    said = environment.step('<tool_call>{"name": "calculate", "arguments": {"expression": "6 * 7"}}</tool_call>')
    assert said.observations == ["42"]
    said = environment.step('<tool_call>{"name": "search", "arguments": {"query": "staleness"}}</tool_call>')
    assert "staleness" in said.observations[0]
    joined = open_environment(join_tools({"a": Counter, "b": Calculator}), {}, "hermes")
    assert joined.reset(3, {"target": 0}).observations == ["Reach 0."]
    assert joined.finish() == 1.0
    closed = []

    class Breaks(Calculator):
        def close(self):
            raise OSError("gone")

    class Closes:
        def reset(self): ...

        def close(self):
            closed.append(self)

    joined = open_environment(join_tools({"b": Breaks, "a": Closes}), {}, "hermes")
    with pytest.raises(OSError, match="gone"):
        joined.close()
    assert closed == [joined.environment.parts["a"]], "one that fails leaves no other open"
    with pytest.raises(ValueError, match=r"environment_options.a=5: expected a mapping like {OPTION: VALUE}"):
        split_options(["a", "b"], {"a": 5})
    with pytest.raises(ValueError, match=r"options of c, which is none of a, b"):
        open_environment(join_tools({"a": Counter, "b": Calculator}), {"c": {}}, "hermes")


@pytest.mark.parametrize(("names", "problem"), [
    ("look_up,calculator", "look_up has no tools, but a method step; it can only stand alone"),
    ("calculator,calculator", "expected names that differ"),
    ("calculator,nowhere", "expected one of python, calculator"),
])  # fmt: skip
def test_environments_that_do_not_go_together(names, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        compose(["+experiment=grpo_python_tool", f"task.environment=[{names}]", "task.environment_options=null"])


CLIENT = """
from types import SimpleNamespace

class GenericEnvClient:
    \"\"\"As that of openenv-core 0.3.0, without its server.\"\"\"

    def __init__(self, base_url): self.url = base_url
    def sync(self): return self
    def connect(self): self.said = []
    def close(self): self.said = None
    def reset(self, **given): return self._reply({"heard": str(given)})
    def step(self, action):
        self.said.append(action)
        words = {"nothing": None, "a board": [["x", None]]}.get(action["message"], action["message"])
        return self._reply({"heard": words}, 0.5, words == "end")
    def _reply(self, fields, reward=None, done=False):
        return SimpleNamespace(observation=fields | {"num": len(self.said)}, reward=reward, done=done)
"""


def test_a_server_of_openenv(tmp_path, monkeypatch):
    """By the library's client, which is played here; docs/log/rl.md says what was tried with a server."""
    options = {"url": "http://127.0.0.1:8000", "action": "message"}
    with pytest.raises(ValueError, match="needs OpenEnv: pip install openenv"):
        open_environment(ENVIRONMENTS["openenv"], options, "hermes")
    (tmp_path / "openenv" / "core").mkdir(parents=True)
    (tmp_path / "openenv" / "core" / "generic_client.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    episode = open_environment(ENVIRONMENTS["openenv"], options | {"observation": "heard"}, "hermes")
    assert episode.reset(5, {"question": "a"}).observations == ["{'seed': 5}"]
    assert episode.step("a") == Reply(["a"], 0.5, False)
    assert episode.step("nothing") == Reply(None, 0.5, False)  # a null is no words, and the model does not read "None"
    assert episode.step("a board") == Reply(['[["x", null]]'], 0.5, False)
    assert episode.step("end") == Reply(["end"], 0.5, True)
    episode.close()
    whole = open_environment(ENVIRONMENTS["openenv"], options, "hermes")
    whole.reset(5, {})
    assert whole.step("a").observations == ['{"heard": "a", "num": 1}']
    other = open_environment(ENVIRONMENTS["openenv"], options | {"observation": "seen"}, "hermes")
    with pytest.raises(ValueError, match="has no field seen; it has heard, num"):
        other.reset(5, {})
