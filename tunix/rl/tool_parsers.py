"""How a model writes calls of tools: tables of formats, and the one that fits a chat template. Imports no jax."""

import ast
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a tool; `problem` says what is wrong with one that cannot be read."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""
    # The arguments as they are written, in formats that do not tell a text from a number: 42, and not "42"
    texts: dict[str, str] | None = None
    id: str = ""  # as the model has written it, in formats that have one


def _malformed(problem: str, name: str = "") -> Call:
    return Call(name, {}, problem)


def _read_object(value: Any) -> Call:
    """Return the call that a JSON object describes."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed('a call is an object like {"name": ..., "arguments": {...}}')
    name, given = value["name"], (value.get(key) for key in ("arguments", "parameters"))
    arguments: Any = next((each for each in given if each is not None), {})
    if isinstance(arguments, str):  # some models write the object once more as a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return _malformed("the arguments are no JSON object", name)
    if not isinstance(arguments, dict):
        return _malformed("the arguments are no JSON object", name)
    if not _is_json(arguments):
        return _malformed("an argument is no number of JSON, like NaN or 1e999", name)
    return Call(name, arguments, id=str(value.get("id") or ""))


def _is_json(value: Any) -> bool:
    """Return whether JSON has a value. Python's parser also takes NaN, and 1e999 as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _read_json(text: str, read: Callable[[Any], Call] = _read_object) -> list[Call]:
    """Return the calls of a JSON value or of a list of them, each of which `read` understands."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [_malformed(f"a call is no JSON: {str(error)[:100]}")]
    return [read(each) for each in (value if isinstance(value, list) else [value])]


HERMES = re.compile(
    r"(?:<tool_call>|<\|tool_call\|>|<TOOLCALL>|functools(?=\[))(.*?)"
    r"(?:</tool_call>|<\|/tool_call\|>|</TOOLCALL>|$)",
    re.DOTALL,
)


def read_hermes(text: str) -> list[Call]:
    """Return the calls between `<tool_call>` tags, or those of a list: behind `<|tool_call|>` (Granite 3), between
    `<TOOLCALL>` tags (Nemotron), behind `functools` (Phi 4 mini)."""
    return [call for inside in HERMES.findall(text) for call in _read_json(inside)]


FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)(</function>|$)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_xml(text: str) -> list[Call]:
    """Return the calls `<function=NAME>` with their `<parameter=KEY>` values; a value that is JSON is read as such."""
    cut = _malformed("the call has no end: </function> is missing")
    return [
        _read_tags(PARAMETER, "</parameter>", name, inside) if end else cut
        for name, inside, end in FUNCTION.findall(text)
    ]


def _read_tags(parameter: re.Pattern[str], end: str, name: str, inside: str) -> Call:
    """Return a call whose arguments stand between tags, the last of which is `end`."""
    # Of a tag that is not closed, as in an answer that is cut. It is looked for behind the last end first: where such a
    # tag is repeated, the pattern would take the square of the text's length.
    if "<" in inside.rpartition(end)[2] or "<" in parameter.sub("", inside):
        return _malformed("an argument has no end")
    texts = {key.strip(): value for key, value in parameter.findall(inside)}
    return Call(name.strip(), {key: _read_value(value) for key, value in texts.items()}, texts=texts or None)


# Qwen's template writes these values as Python does, so its models do too.
PYTHON_NAMES = {"True": True, "False": False, "None": None}


def _read_value(text: str) -> Any:
    if text in PYTHON_NAMES:
        return PYTHON_NAMES[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) or not _is_json(value) else value


def read_llama(text: str) -> list[Call]:
    """Return the calls of a turn that is JSON and nothing else; several are separated by semicolons."""
    tag, _, after = text.rpartition("<|python_tag|>")
    body = (after if tag or text.startswith("<|python_tag|>") else text).strip()
    if not body.startswith("{"):
        return []
    decoder, position = json.JSONDecoder(), 0
    calls: list[Call] = []
    while position < len(body):
        try:
            value, position = decoder.raw_decode(body, position)
        except (ValueError, RecursionError) as error:
            return [*calls, _malformed(f"a call is no JSON: {str(error)[:100]}")]
        calls.append(_read_object(value))
        while position < len(body) and body[position] in "; \n\t":
            position += 1
    return calls


JSON_BLOCK = re.compile(r"```(?:json)?\s*([\[{].*?)```", re.DOTALL)
# Mistral's newer form, one call behind each mark: NAME[ARGS]{...}, or NAME[CALL_ID]ID[ARGS]{...}
MISTRAL = re.compile(r"([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def read_json(text: str) -> list[Call]:
    """Return the calls of a turn that is JSON and nothing else, those behind `[TOOL_CALLS]`, or in blocks of JSON."""
    body = text.strip()
    if body.startswith(("{", '[{"')):  # first: an argument may have a block
        return _read_json(body)
    if marked := [part.strip() for part in text.split("[TOOL_CALLS]")[1:]]:
        calls = []
        for part in marked:
            named = MISTRAL.fullmatch(part)
            calls += [_read_named(named[1], named[3], named[2] or "")] if named else _read_json(part)
        return calls
    return [call for block in JSON_BLOCK.findall(text) for call in _read_json(block)]


PYTHON_BLOCK = re.compile(
    r"```(?:tool_code|python)(.*?)```|<function_calls>(.*?)(?:</function_calls>|$)"
    r"|<\|(?:python|tool_call)_start\|>(.*?)(?:<\|(?:python|tool_call)_end\|>|$)",
    re.DOTALL,
)


def read_python(text: str) -> list[Call]:
    """Return the calls of a turn that is a list of calls and nothing else, or those that stand as Python in a block."""
    if re.match(r"\s*\[\s*[A-Za-z_][\w.]*\(", text):  # first: an argument may have a block
        return _read_python(text)
    blocks = ["".join(groups) for groups in PYTHON_BLOCK.findall(text)]  # one of them matches
    return [call for block in blocks for call in _read_python(block)]


def _read_python(text: str) -> list[Call]:
    try:
        nodes = [statement.value for statement in ast.parse(text.strip()).body if isinstance(statement, ast.Expr)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [_malformed(f"a call is no Python: {str(error)[:100]}")]
    calls = [each for node in nodes for each in (node.elts if isinstance(node, ast.List) else [node])]
    return [_read_node(node) for node in calls] or [_malformed("there is no call")]


JSON_NAMES = {"true": True, "false": False, "null": None}  # as the template of Olmo 3 writes values


class _ReadNames(ast.NodeTransformer):
    """Puts the values of JSON's names in their place."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


def _read_node(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        return _malformed("there is something else than a call")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return _malformed("arguments are given by name: add(a=1)")
    try:
        arguments = {str(each.arg): ast.literal_eval(_ReadNames().visit(each.value)) for each in node.keywords}
        if _is_json(arguments):  # sets, bytes and further values of Python are none
            return Call(ast.unparse(node.func), arguments)
    except (TypeError, ValueError, RecursionError):
        pass
    return _malformed("an argument is no plain value")


GLM = re.compile(r"<tool_call>\s*([^\s<]+)(.*?)(?:</tool_call>|$)", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def read_glm(text: str) -> list[Call]:
    """Return the calls between `<tool_call>` tags with their pairs of keys and values, as `read_xml` reads them.

    The last one needs no end: </tool_call> may be the token that stops a turn, which is no part of the text.
    """
    return [_read_tags(ARGUMENT, "</arg_value>", name, inside) for name, inside in GLM.findall(text)]


GEMMA = re.compile(r"<\|tool_call>call:([\w.-]+)(\{.*?)(?:<tool_call\|>|$)", re.DOTALL)
KEY = re.compile(r"([{,]\s*)([\w.-]+)(\s*:)")


def read_gemma(text: str) -> list[Call]:
    """Return the calls in Gemma 4's form of JSON: keys stand as they are, and texts between `<|"|>`."""
    calls = []
    for name, inside in GEMMA.findall(text):
        parts = inside.split('<|"|>')  # every second one is a text
        parts = [json.dumps(part) if n % 2 else KEY.sub(r'\1"\2"\3', part) for n, part in enumerate(parts)]
        calls.append(_read_named(name, "".join(parts)))
    return calls


def _read_named(name: str, arguments: Any, id: str = "") -> Call:
    return _read_object({"name": name, "arguments": arguments})._replace(id=id)


# The header of a message names the tool; a name in the text of an earlier message, as of a thought, is no call. A name
# is whole, and its header ends before the next one: a text that repeats itself would take the square of its length.
HARMONY_HEADER = r"to=functions\.([\w.-]+)(?![\w.-])(?:(?!<\|(?:start|end|message)\|>|to=functions\.)[\s\S])*"
HARMONY = re.compile(rf"{HARMONY_HEADER}<\|message\|>(.*?)(?:<\|call\|>|$)", re.DOTALL)
DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>|\s*```json)(.*?)"
    r"(?:```\s*)?(?:<｜tool▁call▁end｜>|$)",
    re.DOTALL,
)
KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*((?:functions\.)?([\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>(.*?)"
    r"(?:<\|tool_call_end\|>|$)",
    re.DOTALL,
)


APERTUS = re.compile(r"<\|tools_prefix\|>(.*?)(?:<\|tools_suffix\|>|$)", re.DOTALL)


def read_apertus(text: str) -> list[Call]:
    """Return the calls of lists whose objects have the name of a tool as their only key."""
    return [call for inside in APERTUS.findall(text) for call in _read_json(inside, _read_pair)]


def _read_pair(value: Any) -> Call:
    if not isinstance(value, dict) or len(value) != 1:
        return _malformed('a call is {"NAME": {arguments}}')
    return _read_named(*value.popitem())


def read_kimi(text: str) -> list[Call]:
    """Return the calls that stand behind their ids, in which the names of the tools are."""
    return [_read_named(name, arguments, id) for id, name, arguments in KIMI.findall(text)]


def _reader(pattern: re.Pattern[str]) -> Callable[[str], list[Call]]:
    """Return a reader of calls whose names and arguments, a JSON object, are the two groups of a pattern."""
    return lambda text: [_read_named(*groups) for groups in pattern.findall(text)]


def _make_random_id(call: Call, number: int) -> str:
    """Return nine letters and digits: templates of Mistral refuse other ids."""
    return uuid.uuid4().hex[:9]


class CallFormat(NamedTuple):
    """How models write calls of tools: a row of `TOOL_CALLS`."""

    read: Callable[[str], list[Call]]  # text of a turn -> its calls
    example: str  # a call of a tool NAME with one argument
    marks: tuple[str, ...]  # words of a chat template; `auto` takes the first row of which one stands in the template
    begins: str  # regular expression of what calls begin with: the server shows the text before as that of the answer
    # (call, number of calls before it in the conversation) -> its id, as the template wants it back
    make_id: Callable[[Call, int], str] = _make_random_id


TOOL_CALLS = {
    # Qwen 3 Coder, Qwen 3.5
    "xml": CallFormat(
        read_xml, "<tool_call><function=NAME><parameter=ARGUMENT>VALUE</parameter></function></tool_call>",
        marks=("<function=",), begins="<tool_call>|<function="),
    # GLM 4.5
    "glm": CallFormat(
        read_glm, "<tool_call>NAME<arg_key>ARGUMENT</arg_key><arg_value>VALUE</arg_value></tool_call>",
        marks=("<arg_key>",), begins="<tool_call>"),
    # Gemma 4, which puts texts between <|"|>
    "gemma": CallFormat(
        read_gemma, "<|tool_call>call:NAME{ARGUMENT:VALUE}<tool_call|>",
        marks=("<|tool_call>call:",), begins=r"<\|tool_call>"),
    # GPT-OSS, with <|channel|>commentary before the message or before the name, and <|call|> behind it
    "harmony": CallFormat(
        _reader(HARMONY), 'to=functions.NAME<|message|>{"ARGUMENT": VALUE}',
        marks=("<|channel|>commentary",), begins=rf"{HARMONY_HEADER}<\|message\|>"),
    # DeepSeek V3
    "deepseek": CallFormat(
        _reader(DEEPSEEK), '<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"ARGUMENT": VALUE}<｜tool▁call▁end｜>',
        marks=("<｜tool▁call▁begin｜>",), begins="<｜tool▁calls?▁begin｜>"),
    # Kimi K2, whose template shows the id alone, with the name in it and the number of the call in the conversation
    "kimi": CallFormat(
        read_kimi,
        '<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"ARGUMENT": VALUE}<|tool_call_end|>',
        marks=("<|tool_call_begin|>",), begins=r"<\|tool_call(?:s_section)?_begin\|>",
        make_id=lambda call, number: f"functions.{call.name}:{number}"),
    # Apertus, whose calls may stand among its thoughts
    "apertus": CallFormat(
        read_apertus, '<|tools_prefix|>[{"NAME": {"ARGUMENT": VALUE}}]<|tools_suffix|>',
        marks=("<|tools_prefix|>",), begins=r"<\|tools_prefix\|>"),
    # Qwen 2.5 and 3, Hermes, Granite 4; Granite 3 writes <|tool_call|> and a list. A template without any mark gets it.
    "hermes": CallFormat(
        read_hermes, '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}</tool_call>',
        marks=("<tool_call>",), begins=r"<tool_call>|<TOOLCALL>|functools\[|<\|tool_call\|>"),
    # Mistral, whose newer models write [TOOL_CALLS]NAME[ARGS]{...}; also a block ```json
    "json": CallFormat(
        read_json, '[TOOL_CALLS][{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}]',
        marks=("[TOOL_CALLS]",), begins=r'\A\s*(?:\{|\[\{")|\[TOOL_CALLS\]|```(?:json)?\s*[\[{]'),
    # Olmo 3; Llama 4 between <|python_start|> and <|python_end|>, LFM2 with tool_call; also a block ```tool_code
    "python": CallFormat(
        read_python, "[NAME(ARGUMENT=VALUE)]",
        marks=("<function_calls>", "tool_code", "<|python_start|>", "<|tool_call_start|>", "<|tool_list_start|>"),
        begins=r"\A\s*\[\s*[A-Za-z_][\w.]*\(|```(?:tool_code|python)|<function_calls>|<\|(?:python|tool_call)_start\|>"),
    # Llama 3, with <|python_tag|> or not
    "llama": CallFormat(
        read_llama, '{"name": "NAME", "parameters": {"ARGUMENT": VALUE}}',
        marks=("<|python_tag|>", '"parameters"'), begins=r"\A\s*\{|<\|python_tag\|>"),
}  # fmt: skip


def choose_tool_calls(template: str) -> str:
    """Return the name of the format in which a chat template lets a model write its calls."""
    return next((name for name, row in TOOL_CALLS.items() if any(mark in template for mark in row.marks)), "hermes")


# The thought with which an answer begins, up to the mark of its end: of Qwen, GLM, DeepSeek and Kimi; Seed; Mistral;
# Gemma 4. The mark of its beginning may stand in the prompt.
THOUGHT = re.compile(r".*?(?:</think>|</seed:think>|\[/THINK\]|<channel\|>)", re.DOTALL)


def find_end_of_thought(name: str, text: str) -> int:
    """Return the place behind the thought with which an answer begins; 0 where no thought has ended, or where a call of
    the format `name` begins the answer: a mark is then a part of an argument. A thought may begin with a block of code.
    """
    read, begins, thought = TOOL_CALLS[name].read, TOOL_CALLS[name].begins, THOUGHT.match(text)
    call = re.match(rf"\s*(?:{begins})", text)
    if thought is None or (call is not None and "```" not in call[0]):
        return 0
    *_, call = None, *re.finditer(begins, thought[0])  # the last one before the mark
    if call is None:
        return thought.end()
    # Of a call behind a text the mark is a part too, if it can be read with the mark and not without what follows.
    whole, cut = read(text[call.start() :])[:1], read(text[call.start() : thought.end()])[:1]
    return 0 if whole and not whole[0].problem and whole != cut else thought.end()


def find_reader(name: str) -> Callable[[str], list[Call]]:
    """Return the function that reads a row of `TOOL_CALLS` in answers; a call that a thought weighs is none."""
    read = TOOL_CALLS[name].read
    return lambda text: read(text[find_end_of_thought(name, text) :])


# Kinds of values, as JSON schemas name them.
KINDS = {
    bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array", dict: "object",
}  # fmt: skip


def keep_texts(call: Call, tools: Sequence[Mapping[str, Any]]) -> Call:
    """Return a call with those arguments as they are written that the JSON schema of its tool wants as texts: "42".

    `tools` have the form that chat templates take. Those of a request to a server may be anything.
    """
    for tool in tools if call.texts else ():
        function = tool.get("function")
        if not isinstance(function, dict) or function.get("name") != call.name:
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        for name, text in (call.texts or {}).items():
            kinds = _list_kinds(properties.get(name) if isinstance(properties, dict) else None, parameters)
            if "string" in kinds and KINDS.get(type(call.arguments[name])) not in kinds:
                call.arguments[name] = text
    return call


def make_call_ids(name: str, calls: Sequence[Call], num_before: int) -> list[str]:
    """Return ids of calls as the templates of a format want them back; `num_before` calls stand before them."""
    return [TOOL_CALLS[name].make_id(call, num_before + index) for index, call in enumerate(calls)]


def is_named_object(call: Call, names: Sequence[str]) -> bool:
    """Return whether a call may be an object of an answer that has a name, like {"name": "Ada", "born": 1815}: it has
    no arguments, and is of no tool; `names` are those of the tools."""
    return not call.arguments and call.name not in names


def _list_kinds(schema: Any, parameters: Any) -> set[str]:
    """Return the kinds of values that a JSON schema allows, as far as it names them: by a type, by the values, or in
    other schemas that it has or refers to. `parameters` is the schema around it."""
    kinds, seen, waiting = set[str](), set[int](), [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:  # schemas may refer to one another
            continue
        seen.add(id(part))
        types, values = part.get("type"), part.get("enum")
        kinds |= {kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str)}
        listed = [*(values if isinstance(values, list) else []), *([part["const"]] if "const" in part else [])]
        kinds |= {KINDS[type(value)] for value in listed if type(value) in KINDS}
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += others if isinstance(others := part.get(key), list) else []
        if isinstance(reference := part.get("$ref"), str):
            waiting += [_find_definition(reference, root) for root in (schema, parameters)]
    return kinds | ({"integer"} if "number" in kinds else set())


def _find_definition(reference: str, root: Any) -> Any:
    """Return the schema that a reference like #/$defs/Color names; None where `root` lacks it."""
    for name in reference.removeprefix("#/").split("/"):
        root = root.get(name) if isinstance(root, dict) else None
    return root


def find_text_before_calls(name: str, text: str) -> str:
    """Return what stands before the calls of an answer, written in the format `name`; nothing where the whole answer is
    a call."""
    end = find_end_of_thought(name, text)
    begin = re.search(TOOL_CALLS[name].begins, text[end:])
    return text[: end + begin.start()] if begin else ""
