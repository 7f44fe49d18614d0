"""Prompts: conversations up to the answer that the model is to give, with the columns of their rows."""

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from support.harness import SMALL

from tunix.base import progress
from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.compose import compose
from tunix.config.task import Cycle, Prompted
from tunix.data.batches import BEGINNING, DataSchedule, Samples
from tunix.data.documents import encode_json
from tunix.data.files import BadRow
from tunix.data.prompts import gather_columns, load_prompts
from tunix.prepare import prepare
from tunix.rl.scoring import call_reward

WORDS = [*SMALL, "task=sft", "tokenizer.train_bytes=300"]
FOUR = DataSchedule(BEGINNING, Cycle(4, 1), ())  # samples a step
FILE = ["data=jsonl", "data.paths=[a.jsonl]", "data.held_out_fraction=0.2"]
PAIRS = ["data.columns.prompt=question", "data.columns.completion=solution"]
TURNS = ["data.columns.prompt=turns", "data.columns.completion=solution"]


def prompted(*words: str, system: str | None = None) -> Config:
    """Config of a run whose model writes the answers."""
    source = [] if any(word.startswith("data=") for word in words) else FILE
    cfg = compose([*WORDS, *source, *words]).config
    task = Prompted(name="ask", chat_template=None, chat_template_kwargs=None, loss=None, system=system)
    return cfg.model_copy(update={"task": task})


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """20 questions with a solution, a level, and the same as messages."""
    monkeypatch.chdir(tmp_path)
    made = [
        {"question": f"{n} + 1?" + " Please." * (n % 3), "solution": f"#### {n + 1}", "level": n}
        for n in range(20)
    ]  # fmt: skip
    for row in made:
        row["messages"] = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["solution"]},
        ]
        row["turns"] = row["messages"][:1]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, made)))
    return made


def everything(corpus):
    """All prompts of a corpus of one source, by their level."""
    (train,), (held_out,) = corpus.train.values(), corpus.held_out.values()
    found = [part[n] for part in (train, held_out) for n in range(len(part))]
    return sorted(found, key=lambda prompt: prompt.columns["level"])


@pytest.mark.parametrize("words", [PAIRS, [], TURNS], ids=["prompt and completion", "messages", "turns and completion"])
def test_a_prompt_ends_where_the_answer_begins_and_keeps_the_columns(rows, words):
    corpus = load_prompts(prompted(*words), 100)
    found = everything(corpus)
    assert len(found) == 20
    assert len(corpus.held_out["jsonl"]) > 0
    for row, prompt in zip(rows, found, strict=True):
        assert prompt.text == f"<bos>user:\n{row['question']}\nassistant:\n"
        assert corpus.vocab.backend.decode(prompt.tokens, skip_special_tokens=False) == prompt.text
        assert prompt.columns == {"answer": row["solution"], **row}


def test_a_prompt_of_parquet_is_read_again_as_it_was_tokenized(tmp_path):
    """Arrow gives each object the keys of all; what `reset` of an environment and reward models read has none of them."""
    tools = [{"name": "add", "parameters": {key: "int"}} for key in "ab"]
    rows = [
        {"messages": [{"role": "user", "content": f"{number}?"}], "tools": [tool], "level": number}
        for number, tool in enumerate(tools)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    template = "{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}"
    cfg = prompted("data=parquet", f"data.paths=[{tmp_path}]", "data.held_out_fraction=0")
    cfg = cfg.model_copy(update={"task": cfg.task.model_copy(update={"chat_template": template})})
    corpus = load_prompts(cfg, 100)
    for prompt, tool in zip(everything(corpus), tools, strict=True):
        assert prompt.question.options == {"tools": [tool]}
        assert prompt.columns["tools"][0]["parameters"].keys() == {"a", "b"}, "rewards get the row as it is"
        assert corpus.vocab.chat.render(prompt.question.messages, True, prompt.question.options) == prompt.text


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_stands_before_prompts_that_have_none(rows, tmp_path, role):
    own = [{"role": role, "content": "Mine."}, {"role": "user", "content": "And?"}]
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"messages": own, "level": 99}))  # nobody has answered: all of it is the prompt
    with_system, without = (load_prompts(prompted(system=system), 100) for system in ("Think.", None))
    assert with_system.fingerprint != without.fingerprint
    *_, nineteenth, last = everything(with_system)
    assert nineteenth.text.startswith("<bos>system:\nThink.\nuser:\n19 + 1?")
    assert last.text == f"<bos>{role}:\nMine.\nuser:\nAnd?\nassistant:\n"
    assert last.columns == {"messages": own, "level": 99}
    assert gather_columns([nineteenth, last])["answer"] == ["#### 20", None]
    assert set(with_system.column_names) == {"answer", *rows[0]}


@pytest.mark.parametrize("words", [PAIRS, ["data.columns.messages=talk"]], ids=["prompt and completion", "messages"])
def test_rewards_may_ask_for_the_turns_of_a_prompt(rows, tmp_path, words):
    """Also where the default column of a conversation is not there: a column for the prompt is taken in its place."""
    others = [{name: value for name, value in row.items() if name != "messages"} for row in rows]
    lines = [json.dumps(other | {"talk": row["messages"]}) for other, row in zip(others, rows, strict=True)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))

    def count_turns(prompts, completions, messages):
        return [len(turns) for turns in messages]

    def other_names(messages, completions, level):
        return [text.endswith("assistant:\n") for text in messages]

    for system, turns in ((None, []), ("Think.", [{"role": "system", "content": "Think."}])):
        found = everything(load_prompts(prompted(*words, system=system), 100))
        for row, prompt in zip(rows, found, strict=True):
            assert prompt.columns["messages"] == [*turns, {"role": "user", "content": row["question"]}]
        columns, texts = gather_columns(found), [prompt.text for prompt in found]
        assert call_reward(count_turns, texts, texts, columns) == [len(turns) + 1] * 20
        assert call_reward(other_names, texts, texts, columns) == [1] * 20  # the first two are given by place


def test_one_number_is_the_place_in_the_order(rows):
    corpus = load_prompts(prompted(*PAIRS), 100)
    size = len(corpus.train["jsonl"])
    cfg = prompted(*PAIRS, "seed=3")
    first, again = (Samples(corpus.train, cfg, FOUR, 32) for _ in range(2))
    levels = [first[n].columns["level"] for n in range(2 * size)]
    assert levels[size : 2 * size] == [again[n].columns["level"] for n in range(size, 2 * size)]
    assert sorted(levels[:size]) == sorted(levels[size:]) != levels[:size]
    assert levels[:size] != levels[size:]
    other = Samples(corpus.train, prompted(*PAIRS, "seed=4"), FOUR, 32)
    assert levels[:size] != [other[n].columns["level"] for n in range(size)]


def test_long_prompts_are_left_out_and_counted(rows, caplog):
    corpus = load_prompts(prompted(*PAIRS), 1000)
    lengths = [len(prompt.tokens) for prompt in everything(corpus)]
    limit = int(np.median(lengths))
    fewer = load_prompts(prompted(*PAIRS), limit)
    kept = everything(fewer)
    assert [len(prompt.tokens) for prompt in kept] == [length for length in lengths if length <= limit]
    assert f"left out: {20 - len(kept)} prompts of more than {limit} tokens" in caplog.text
    assert fewer.fingerprint != corpus.fingerprint
    assert [len(corpus.spread(split, 3)) for split in ("train", "held_out")] == [3, 3]
    with pytest.raises(
        UserError,
        match="prompts of jsonl have more than the 3 tokens that are left beside an answer; lower sampling.max_new_tokens",
    ):
        load_prompts(prompted(*PAIRS), 3)


def test_every_column_of_parquet_is_kept(rows, tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    words = ("data=parquet", "data.paths=[a.parquet]", "data.held_out_fraction=0.2")
    found = everything(load_prompts(prompted(*words, *PAIRS), 100))
    assert [prompt.columns for prompt in found] == [{"answer": row["solution"], **row} for row in rows]


def test_gsm8k_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [{"question": f"{n} + 1?", "answer": f"One more than {n}.\n#### {n + 1}"} for n in range(9)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ("data=gsm8k", "data.path=json", "data.name=null", f"data.data_files=[{tmp_path}/train.jsonl]")
    corpus = load_prompts(prompted(*words), 100)
    prompts = corpus.spread("train", 9) + corpus.spread("held_out", 9)
    asked = [line | {"messages": [{"role": "user", "content": line["question"]}]} for line in lines]
    assert sorted((prompt.columns for prompt in prompts), key=lambda row: row["question"]) == asked


def test_a_mixture_of_prompts(rows):
    part = {
        "source": "jsonl",
        "paths": ["a.jsonl"],
        "held_out_fraction": 0,
        "extensions": [".jsonl"],
        "bad_rows": "error",
    }
    columns = {"text": None, "messages": "messages", "prompt": None, "completion": None, "system": None}
    parts = json.dumps(
        {"a": part | {"columns": columns}, "b": part | {"columns": columns, "held_out_fraction": 0.5}}
    ).replace('"', "")
    cfg = prompted("data=mixture", f"data.parts={parts}", "data.weights={a:0.75,b:0.25}", "data.weight_unit=sample")
    samples = Samples(load_prompts(cfg, 100).train, cfg, FOUR, 32)
    assert samples.order.count_by_part(40) == [30, 10]
    assert samples.source_tokens(40) == {"a": 30 * 32, "b": 10 * 32}
    assert samples.stages(10, samples.data_schedule).splitlines()[2].split()[0] == "b"


def test_prompts_are_prepared_once(rows, capsys, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_S", 0.001)
    words = ["task=grpo", *FILE, *PAIRS, *(word for word in WORDS if word != "task=sft"), "sampling.max_new_tokens=4"]
    words += ["training.seq_len=128", "training.global_batch_size=8", "training.micro_batch_size=8"]
    cfg = compose(words).config
    prepare(cfg)
    printed = capsys.readouterr()
    assert "prompts to train on" in printed.out
    assert "preparing the data: 0 s so far" in printed.err
    before = load_prompts(cfg, 60)
    rows_file = next(iter(before.prepared.values())).folder / "00000" / "train.rows.npy"
    made = rows_file.stat().st_mtime_ns
    prepare(cfg)
    assert rows_file.stat().st_mtime_ns == made


def test_turns_that_end_with_the_assistant_are_no_prompt(rows):
    with pytest.raises(UserError, match="has turns in column messages that end with the assistant's"):
        load_prompts(prompted("data.columns.prompt=messages"), 100)


def test_data_without_rows_are_refused(rows):
    with pytest.raises(UserError, match="task=ask needs rows with columns, of jsonl, csv, parquet or hf"):
        load_prompts(prompted("data=synthetic"), 100)
    with pytest.raises(
        UserError, match=r"data: 0\+0 has no column x \(data.columns.prompt\); its columns are question"
    ):
        load_prompts(prompted("data=arithmetic", "data.columns.prompt=x"), 100)


def test_a_row_of_a_function_that_json_does_not_hold_is_a_bad_row():
    itself: list[object] = []
    itself.append(itself)
    for value, problem in (({(1, 2): 3}, "keys must be str, int"), (itself, "Circular reference")):
        with pytest.raises(BadRow, match=rf"is not JSON \({problem}"):
            encode_json({"column": value})
