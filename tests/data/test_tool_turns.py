"""Conversations with tools: what a template is given, which turns are learnt, and the text behind a turn of an episode."""

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from support.harness import SMALL, cli_here

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.data.chat import PLAIN, ChatTemplate
from tunix.data.dataset import find_units, load_corpus
from tunix.data.documents import Conversation, Document, read_documents
from tunix.data.prompts import load_prompts

# Small templates of the kinds that models have. Those of Qwen 3 and of models with thoughts drop what a model thought in
# earlier turns; Mistral's wants calls with names; Gemma's lets roles alternate and knows no tools; Phi 3's drops messages
# of other roles without a word.
CHATML = (
    "{{ today }}{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ (call.function or call) | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
THOUGHTS = CHATML.replace("{{ m.content }}{% for call", "{{ m.content.split('</think>')[-1].strip() }}{% for call")
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DROPS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n{% elif m.role == 'assistant' %}"
    "<|assistant|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NAMED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be 9 characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]{% else %}"
    "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
LAST_ONLY = "{{ messages[-1].content }}"
NOTHING = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
BEHIND = {  # role of an observation, and the text behind an answer where two observations say "7" and "8"
    "chatml": (
        CHATML, "tool", "<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "thoughts": (
        THOUGHTS, "tool", "<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "alternating": (
        ALTERNATING, "user", "<end_of_turn>\n<start_of_turn>user\n7\n\n8<end_of_turn>\n<start_of_turn>model\n",
    ),
    "drops": (DROPS, "user", "<|end|>\n<|user|>\n7\n\n8<|end|>\n<|assistant|>\n"),
    "named": (
        NAMED, "tool", '</s>[TOOL_RESULTS]{"content": "7", "call_id": "000000000"}[/TOOL_RESULTS][TOOL_RESULTS]{"content": '
        '"8", "call_id": "000000000"}[/TOOL_RESULTS]',
    ),
    "plain": (PLAIN, "tool", "</s>\ntool:\n7\ntool:\n8\nassistant:\n"),
}  # fmt: skip


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def test_calls_are_shown_by_a_template_that_wants_no_content_beside_them():
    """As DeepSeek R1's, which also adds the arguments to a text."""
    chat = template(
        "{% for m in messages %}{% if m.content is none %}{% for call in m.tool_calls %}<call>"
        "{{ call.function.name + call.function.arguments }}{% endfor %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    chat.check_tools(turns)
    assert chat.render(turns) == '<user>u<call>add{"a": 1}'
    assert template(CHATML).needs_null is template(PLAIN).needs_null is False


@pytest.mark.parametrize("name", BEHIND)
def test_the_text_behind_a_turn(name):
    source, role, behind = BEHIND[name]
    chat = template(source)
    assert chat.choose_observation_role() == role
    assert chat.text_after_turn(role, ["7", "8"]) == behind


@pytest.mark.parametrize("source", [LAST_ONLY, NOTHING, "{{ raise_exception('no') }}"])
def test_a_template_that_drops_what_tools_say_is_refused(source):
    with pytest.raises(UserError, match="shows neither a message of the role tool nor one of the role user"):
        template(source).choose_observation_role()


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TALK = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "name": "add", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is 3."},
]


READ = [TALK[0], {**TALK[1], "content": ""}, *TALK[2:]]  # as data/documents.py gives it
ADDS = {"role": "system", "content": "Call add(a, b)."}
HIDDEN = {  # template, turns, and what its refusal says; "": nothing is hidden
    "all": (CHATML, READ, ""),
    "thoughts": (THOUGHTS, READ, ""),
    "schemas": (DROPS, READ[:1], "does not show the tools of a conversation (add); name them in task.system, or give"),
    "named by the user": (PLAIN, [{"role": "user", "content": "add 1 and 2"}], "does not show the tools"),
    "named by the system": (PLAIN, [ADDS, *READ[:1]], ""),
    "calls": (CHATML.replace("m.tool_calls or []", "[]"), READ, "drops the calls of tools (tool_calls) of the assistant"),
    "calls in the text": (
        CHATML.replace("m.tool_calls or []", "[]"), [READ[0], {**READ[1], "content": "add(1, 2)"}, *READ[2:]], "",
    ),
    "results": (
        CHATML.replace("{{ m.content }}\n</tool", "</tool"), READ, "drops what tools say (turns of the role tool); give",
    ),
}  # fmt: skip


def test_arguments_are_json_where_a_template_takes_no_object():
    source = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}<{{ call.function.name + ' ' + "
    chat = template(source + "call.function.arguments }}>{% endfor %}{% endfor %}")
    assert chat.render(READ) == '1 + 2?<add {"a": 1, "b": 2}>3It is 3.'
    called = {"function": {"name": "say", "arguments": {"a": "\u00e9"}}}
    assert chat.render([READ[0], {**READ[1], "tool_calls": [called]}]) == '1 + 2?<say {"a": "\u00e9"}>'
    assert template(CHATML).render(READ[:2]).count('"arguments": {"a": 1, "b": 2}') == 1


def test_a_template_has_tools_and_documents_also_where_there_are_none():
    """As in transformers: templates ask whether they are none."""
    assert template("{% if tools is none and documents is none %}yes{% endif %}").render(READ[:1]) == "yes"
    accents = template("{{ messages[0].content|tojson }}{{ messages[0].content|tojson(ensure_ascii=True) }}")
    assert accents.render([{"role": "user", "content": "\u00e9"}]) == '"\u00e9""\\u00e9"'


def test_all_of_a_conversation_is_learnt_up_to_its_last_answer():
    """Turns behind it, which nobody has answered, are left out."""
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    source = "{% for m in messages %}{{ m.content }} {% endfor %}"
    assert template(source).split_answers(turns, learnt="all") == [[("user assistant ", True)]]
    assert template(source).split_answers(turns[:1], learnt="all") == [[("user ", True)]]


def test_a_template_may_show_tools_in_another_order():
    source = "{% for tool in (tools or [])|reverse %}{{ tool.name }} {% endfor %}{{ messages[0].content }}"
    template(source).check_tools(READ[:1], {"tools": [{"name": name} for name in ("add", "sub", "mul")]})


@pytest.mark.parametrize("name", HIDDEN)
def test_a_template_that_drops_tool_words_is_refused(name):
    source, talk, problem = HIDDEN[name]
    chat = template(source)
    if not problem:
        chat.check_tools(talk, {"tools": TOOLS})
        return
    with pytest.raises(UserError) as error:
        chat.check_tools(talk, {"tools": TOOLS})
    assert str(error.value).startswith(f"task.chat_template {problem}")
    assert str(error.value).endswith("give a template that shows them: task.chat_template=FILE")


def write(folder, talk=TALK, tools=TOOLS, **columns):
    rows = [{"messages": talk, "tools": tools, **columns}] * 30
    (folder / "talks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def learnt_texts(folder, *words: str, data=("data=jsonl", "data.paths=[FOLDER/talks.jsonl]")) -> tuple[str, list[str]]:
    """Return the text of the first conversation as it is trained on, and the parts of it that are learnt."""
    (folder / "own.jinja").write_text(CHATML)
    data = [word.replace("FOLDER", str(folder)) for word in data]
    cfg = compose(
        [*SMALL, "task=sft", *data, f"task.chat_template={folder}/own.jinja",
         "data.held_out_fraction=0", "tokenizer.vocab_size=259", f"loading.cache_dir={folder}/cache", *words]
    ).config  # fmt: skip
    corpus = load_corpus(cfg)
    (packed,) = corpus.train.values()
    shard = packed.stream.shard(0)
    tokens, answers = (np.array(each[: shard.starts[1]]) for each in (shard.tokens, shard.answers))
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], answers.astype(int), [0]])))
    parts = [corpus.tokenizer.decode(tokens[first:stop]) for first, stop in bounds.reshape(-1, 2)]
    return corpus.tokenizer.decode(tokens), parts


FIRST = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>\n'
SECOND = "It is 3.<|im_end|>\n"


def test_a_template_gets_tools_and_calls(tmp_path):
    write(tmp_path)
    text, parts = learnt_texts(tmp_path)
    assert parts == [FIRST, SECOND]
    assert text.startswith(f"<|im_start|>system\n{json.dumps(TOOLS[0])}\n<|im_end|>\n<|im_start|>user\n1 + 2?")
    assert "<tool_response>\n3\n</tool_response>" in text
    assert learnt_texts(tmp_path, "task.chat_template_kwargs={today: Monday}") == (f"Monday{text}", parts)


def test_a_tokenizer_learns_from_thoughts_and_calls():
    """They are most of such a corpus: without them each of their characters was a token."""
    talk = [READ[0], {**READ[1], "reasoning_content": "I add."}, *READ[2:]]
    texts = ["1 + 2?", "I add.", "", json.dumps(CALL["function"]), "3", "It is 3."]
    assert Document("a", Conversation(talk, {}, "assistant")).text == "\n".join(texts)


def test_calls_as_openai_writes_them(tmp_path):
    """Arguments are JSON in a string; a list may be JSON itself."""
    function = {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}
    talk = [TALK[0], {**TALK[1], "tool_calls": [{"type": "function", "function": function}], "name": None}, *TALK[2:]]
    write(tmp_path, json.dumps(talk), json.dumps(TOOLS))
    assert learnt_texts(tmp_path)[1] == [FIRST, SECOND]


@pytest.mark.parametrize("arguments", ["", " ", None, "null", "left out", {"a": None, "b": 1}, '{"a": null, "b": 1}'])
def test_arguments_are_kept(tmp_path, arguments):
    """A call that has none is one with an empty object; a null within them stays."""
    function = {"name": "add"} | ({} if arguments == "left out" else {"arguments": arguments})
    write(tmp_path, [TALK[0], {**TALK[1], "tool_calls": [{"function": function}]}, *TALK[2:]])
    expected = '{"a": null, "b": 1}' if "b" in (arguments or ()) else "{}"
    assert f'{{"name": "add", "arguments": {expected}}}' in learnt_texts(tmp_path)[1][0]


ARROW = {
    "parquet": ["data=parquet", "data.paths=[FOLDER/talks.parquet]"],
    "hf": ["data=hf", "data.path=parquet", "data.data_files=[FOLDER/talks.parquet]"],
}


@pytest.mark.parametrize("source", ARROW)
def test_keys_of_other_objects_are_dropped(tmp_path, source):
    """Arrow gives all objects the keys of all: arguments of other calls, properties of other tools."""
    other = {"type": "function", "function": {"name": "say", "arguments": {"text": "hello"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "say", "strict": True}}]
    calls = {**TALK[1], "tool_calls": [CALL, other]}
    table = pyarrow.Table.from_pylist([{"messages": [TALK[0], calls, *TALK[2:]], "tools": tools}] * 30)
    parquet.write_table(table, tmp_path / "talks.parquet")
    text, (first, _) = learnt_texts(tmp_path, data=ARROW[source])
    assert text.startswith(f"<|im_start|>system\n{json.dumps(tools[0])}\n{json.dumps(tools[1])}\n<|im_end|>")
    assert '{"name": "add", "arguments": {"a": 1, "b": 2}}' in first
    assert '{"name": "say", "arguments": {"text": "hello"}}' in first


def test_which_turns_are_learnt(tmp_path):
    own = {"learnt_turns": [0, 1, 0, 0]}  # a column that is called as its key
    write(tmp_path, marks=[0, 1, 0, 0], others=json.dumps([True, False, False, True]), bad=[1], **own)
    assert learnt_texts(tmp_path)[1] == [FIRST, SECOND]
    assert learnt_texts(tmp_path, "data.columns.learnt_turns=learnt_turns")[1] == [FIRST]
    text, parts = learnt_texts(tmp_path, "task.learnt_turns=all")
    assert parts == [text]
    assert learnt_texts(tmp_path, "task.learnt_turns=last")[1] == [SECOND]
    assert learnt_texts(tmp_path, "data.columns.learnt_turns=marks")[1] == [FIRST]
    assert learnt_texts(tmp_path, "data.columns.learnt_turns=others")[1] == [SECOND]
    with pytest.raises(UserError, match="has no list of 4 times true or false, one for each turn, in column bad"):
        learnt_texts(tmp_path, "data.columns.learnt_turns=bad")
    # Both columns would be left out without a word.
    with pytest.raises(UserError, match="data.columns.learnt_turns=marks is of the turns of data.columns.messages"):
        learnt_texts(tmp_path, "data.columns.learnt_turns=marks", "data.columns.prompt=prompt")
    with pytest.raises(UserError, match="data.columns.system=rules stands before data.columns.prompt, which is null"):
        learnt_texts(tmp_path, "data.columns.system=rules")
    # Marks in the turns contradict the usual choice alone.
    write(tmp_path, [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]])
    assert learnt_texts(tmp_path, "task.learnt_turns=last")[1] == [SECOND]


def test_a_column_of_tools_may_be_left_out(tmp_path):
    write(tmp_path)
    assert json.dumps(TOOLS[0]) in learnt_texts(tmp_path)[0]
    assert json.dumps(TOOLS[0]) not in learnt_texts(tmp_path, "data.columns.tools=null")[0]


def test_tools_of_an_environment_decide_the_tokens_without_a_column_of_tools(tmp_path):
    write(tmp_path, TALK[:1])
    (tmp_path / "own.jinja").write_text(CHATML)
    words = [
        *SMALL, "task=grpo", "data=jsonl", f"data.paths=[{tmp_path}/talks.jsonl]", "tokenizer=bytes",
        f"task.chat_template={tmp_path}/own.jinja", "sampling.max_new_tokens=8",
    ]  # fmt: skip
    texts = set()
    for environment in ("calculator", "python"):
        choices = [f"task.environment={environment}", "data.columns.tools=null"]
        (prompt,) = load_prompts(compose([*words, *choices]).config, 4000).spread("train", 1)
        texts.add(prompt.text)
    assert len(texts) == 2


def test_what_is_no_tool_is_refused(tmp_path):
    write(tmp_path, tools=["add"])
    with pytest.raises(UserError, match="has no list of tools in column tools"):
        learnt_texts(tmp_path)
    assert learnt_texts(tmp_path, "data.columns.tools=null")[1] == [FIRST, SECOND]
    for call in ("add", {"function": {"name": "add", "arguments": "{a: 1}"}}):
        write(tmp_path, [TALK[0], {**TALK[1], "tool_calls": [call]}])
        with pytest.raises(UserError, match="has tool_calls in column messages that are not a list of {function"):
            learnt_texts(tmp_path)


def test_nothing_is_written_with_a_template_that_drops_calls(tmp_path):
    write(tmp_path)
    words = ["task=sft", "data=jsonl", "data.paths=[talks.jsonl]", "hydra.run.dir=run", "tokenizer.vocab_size=259"]
    (tmp_path / "own.jinja").write_text(CHATML.replace("m.tool_calls or []", "[]"))
    done = cli_here(*SMALL, *words, f"task.chat_template={tmp_path}/own.jinja", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "task.chat_template drops the calls of tools" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("dpo", {"prompt": TALK[:1], "chosen": TALK[1:2], "rejected": [{"role": "assistant", "content": "3"}]}),
        ("kto", {"prompt": TALK[:1], "completion": TALK[1:2], "label": True}),
        ("sft", {"prompt": TALK[:3], "completion": TALK[3:4]}),
    ],
)
def test_calls_of_tools_are_an_answer(tmp_path, task, columns):
    write(tmp_path, **columns)
    words = [f"task={task}", "data.columns.prompt=prompt", "data.columns.completion=completion", "loading.packing=pad"]
    cfg = compose([*SMALL, *words, "data=jsonl", f"data.paths=[{tmp_path}]"]).config
    (unit,) = find_units(cfg.data, cfg.loading)
    document = next(iter(read_documents(cfg.data, cfg.task, unit)))
    if task == "sft":
        assert document.content[::2] == (READ[:4], [False, False, False, True]), "the prompt's own call is not learnt"
    else:
        assert (document.content.chosen if task == "dpo" else document.content.answer) == READ[1:2]


@pytest.mark.parametrize("talk", [TALK[:1], TALK[:2]], ids=["no answer", "an answer of calls alone"])
def test_a_prompt_shows_tools_of_its_row(tmp_path, talk):
    write(tmp_path, talk)
    (tmp_path / "own.jinja").write_text(CHATML)
    words = [
        "task=grpo",
        "data=jsonl",
        f"data.paths=[{tmp_path}/talks.jsonl]",
        f"task.chat_template={tmp_path}/own.jinja",
    ]
    thinking = "task.chat_template_kwargs={enable_thinking: false}"
    cfg = compose([*SMALL, *words, "sampling.max_new_tokens=8", "tokenizer.vocab_size=259", thinking]).config
    (prompt,) = load_prompts(cfg, 1000).spread("train", 1)
    text = prompt.text
    assert "answer" not in prompt.columns
    assert text.startswith("<|im_start|>system\n{")
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


# As that of GPT-OSS: thoughts before calls are dropped once the answer is there, and shown while it is asked for.
DROPS_THOUGHTS = (
    "{% set drops = messages[-1].role == 'assistant' and not messages[-1].tool_calls %}{% for m in messages %}"
    "<|start|>{{ m.role }}{% if m.thinking and (loop.last or not drops) %}<|channel|>analysis<|message|>{{ m.thinking }}"
    "<|end|><|start|>assistant{% endif %}{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_thousands_of_tools_are_found_in_one_pass(monkeypatch):
    """40,000 tools of a row, 2 MB, took 19 s: each was looked for from the begin of the text."""

    class Text(str):
        __slots__ = ()

        def __contains__(self, name):
            raise AssertionError(f"{name} is looked for in the whole text")

    texts = lambda self, messages, is_prompt, options: Text("add, sub, mul" if options["tools"] else "")  # noqa: E731
    monkeypatch.setattr(ChatTemplate, "render", texts)
    ChatTemplate(PLAIN, {}).check_tools(TALK[:1], {"tools": [{"name": name} for name in ("add", "sub", "mul")]})


def test_an_answer_is_learnt_behind_the_thought_of_its_call_which_the_template_then_drops():
    talk = [TALK[0], {**TALK[1], "reasoning_content": "Add."}, TALK[2], {**TALK[3], "reasoning_content": "Say."}]
    (pieces,) = ChatTemplate(DROPS_THOUGHTS, {}).split_answers(talk)
    # The turns of an episode have what the model wrote.
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}'
    texts = f"<|start|>assistant{call}", f"<|start|>assistant<|channel|>final<|message|>{TALK[3]['content']}"
    thought = "<|channel|>analysis<|message|>{}<|end|>{}"
    said = [
        {"role": "assistant", "content": thought.format(*pair)} for pair in zip(("Add.", "Say."), texts, strict=True)
    ]
    assert ChatTemplate(DROPS_THOUGHTS, {}).split_answers([talk[0], said[0], talk[2], said[1]]) == [pieces]
    assert [is_learnt for _, is_learnt in pieces] == [False, True, False, True]
    texts = [text for text, _ in pieces]
    assert texts[1] == "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant to=add<|call|>"
    assert texts[2].endswith("<|end|><|start|>assistant")
    assert texts[3].startswith("<|channel|>analysis<|message|>Say.<|end|><|start|>assistant<|channel|>final<|message|>")
