"""Episodes that a person plays at a terminal: what environments get, what is printed, and what is refused."""

import io
import json
import re
from pathlib import Path

import pytest
from support.harness import ROOT, SMALL

from tunix.base.errors import UserError
from tunix.config import Play
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.play import play

CHATTY = "environment=support.own_environment:Chatty"


@pytest.fixture(autouse=True)
def own_module(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests")


def play_lines(monkeypatch, text: str, words: list[str], *overrides: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    play(read_settings(Play, words, {"overrides": list(overrides)}))


def data_of(tmp_path, *questions: str) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answer": "a"}) + "\n" for text in questions))
    columns = ["data.columns.prompt=question", "data.columns.completion=answer", f"loading.cache_dir={tmp_path}/cache"]
    return ["data=jsonl", f"data.paths=[{file}]", *columns]


def test_tools_by_hand(monkeypatch, capsys):
    """A call over two lines, a call that fails, and an answer without one, which ends the episode."""
    call = '<tool_call>{"name": "calculate", \\\n"arguments": {"expression": "6*7"}}</tool_call>\n'
    play_lines(monkeypatch, f"{call}{call.replace('6*7', 'six')}it is 42\nnever read\n", ["environment=calculator"])
    said = capsys.readouterr().out
    assert "tool calculate(expression): Compute an expression" in said
    assert "environment\n  42\n" in said
    assert "calls that failed: 1" in said
    assert said.endswith("the episode is over after 3 turns; the environment's reward is 0\n")


def test_a_game_says_how_it_is_played(tmp_path, monkeypatch, capsys):
    rows = f"loading.cache_dir={tmp_path}/cache", "data=look_up", "data.num_rows=4"
    play_lines(monkeypatch, "!x\n", ["environment=look_up"], *rows)
    said = capsys.readouterr().out
    assert said.startswith("look_up\n  A game for a model from scratch")
    assert '"?c" asks for the value of the key c, and "!7" answers' in said
    assert said.endswith("the episode is over after 1 turns; the environment's reward is 0\n")


def test_several_environments_by_hand(monkeypatch, capsys):
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>\n'
    play_lines(
        monkeypatch, call.replace("\n", "\\"), ["environment=[python,calculator]"]
    )  # the input ends within a turn
    said = capsys.readouterr().out
    assert "tool python(code)" in said
    assert "environment\n  42\n" in said
    play_lines(monkeypatch, "", [CHATTY.replace("Chatty", "RewardsAtTheEnd")])  # it is asked where the input ends
    assert capsys.readouterr().out.endswith("over after 0 turns; the environment's reward is 0.75\n")


def test_an_answer_may_have_an_end_of_a_line_that_json_does_not_escape(tmp_path, monkeypatch, capsys):
    row = {"prompt": "1?", "turns": [{"role": "assistant", "content": "a\u2028b"}], "reward": 1, "stopped": True}
    words = [
        "task=grpo",
        "task.environment=calculator",
        *data_of(tmp_path, "one"),
        "training.global_batch_size=8",
        "sampling.max_new_tokens=16",
    ]
    monkeypatch.setattr("tunix.play.make_config", lambda settings: compose([*SMALL, *words]).config)

    def write(settings, *_):
        line = json.dumps(row | {"num_tokens": 3}, ensure_ascii=False)
        yield Path(settings.samples).write_text(f"{line}\n", encoding="utf-8")

    monkeypatch.setattr("tunix.play.evaluate_answers", write)
    play(read_settings(Play, ["checkpoint=given"], {"overrides": []}))
    assert "reward 1 (), 3 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("task", "added"), [("task=sft", ["task=grpo"]), ("task=grpo", [])])
def test_a_model_of_another_task_plays_in_the_length_that_is_typed(task, added, tmp_path, monkeypatch):
    """The words reach the config of the evaluation, and the length its own key."""
    data = data_of(tmp_path, "one")
    seen, words = [], [*SMALL, *data, "training.global_batch_size=8"]

    def read_config(settings):
        seen.append(settings)
        chosen = [task] * ("task=grpo" not in settings.overrides)
        return compose([*words, *chosen, "sampling.max_new_tokens=16", *settings.overrides]).config

    monkeypatch.setattr("tunix.play.make_config", read_config)
    monkeypatch.setattr("tunix.play.evaluate_answers", lambda settings, *_: [Path(settings.samples).write_text("")])
    given = ["task.rewards=[]", "sampling.max_new_tokens=4"]
    play(read_settings(Play, ["checkpoint=given", CHATTY], {"overrides": given}))
    assert list(seen[-1].overrides) == [*added, f"task.{CHATTY}", "task.rewards=[]"]
    assert seen[-1].max_new_tokens == 4


def test_data_by_hand(tmp_path, monkeypatch, capsys):
    """Rows of the data, one episode after the other; the same seed is the same game; nothing steers the terminal."""
    data = data_of(tmp_path, "one\x1b[31m", "two", "three")
    for _ in range(2):
        play_lines(monkeypatch, "a\nb\n", [CHATTY, "episodes=2", "row=1"], "task.max_turns=1", *data)
    said = capsys.readouterr().out
    first, second = said[: len(said) // 2], said[len(said) // 2 :]
    assert first == second
    assert ("two" in first, "three" in first, "one" in first) == (True, True, False)
    assert first.count("the episode is over after 1 turns") == 2
    play_lines(monkeypatch, "", [CHATTY], *data)
    said = capsys.readouterr().out
    assert "one\\x1b[31m" in said
    assert "\x1b" not in said
    assert "over after 0 turns" in said
    with pytest.raises(UserError, match="row=7: the data have 3 prompts"):
        play_lines(monkeypatch, "", [CHATTY, "row=7"], *data)
    play_lines(monkeypatch, "a\na\n", [CHATTY, "episodes=2"], "task.max_turns=1", *data_of(tmp_path, "one", "one"))
    said = capsys.readouterr().out
    assert len({*re.findall(r"environment\n  (=\d\d)", said)}) == 2, "each episode has a seed of its own"


@pytest.mark.parametrize(
    ("words", "overrides", "message"),
    [
        ([], [], "nothing is to be played; give environment=NAME"),
        ([], ["enviroment=calculator"], "unknown key enviroment"),
        ([CHATTY], [], "reset takes the column question, which the data lack"),
        (["environment=calculator"], ["sampling.temperature=1"], "nothing is drawn where you play"),
        (["environment=calculator"], ["task=sft"], "task=sft"),
    ],
)
def test_what_is_refused(words, overrides, message, monkeypatch):
    with pytest.raises(UserError, match=message):
        play_lines(monkeypatch, "hello\n", words, *overrides)


def test_an_environment_that_fails_is_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"Failing fails: RuntimeError: out of order \(.*own_environment.py, line"):
        play_lines(monkeypatch, "x\n", [CHATTY.replace("Chatty", "Failing")], *data_of(tmp_path, "one"))


def test_what_an_environment_loads_at_its_first_call_is_not_late(tmp_path, monkeypatch, capsys):
    loads = "import functools, time\nload = functools.cache(lambda: time.sleep(0.7))\nclass Loads:\n"
    methods = "    def reset(self): load()\n    def step(self, text): return None, 1.0, True\n"
    (tmp_path / "loads.py").write_text(loads + methods)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    play_lines(monkeypatch, "x\n", ["environment=loads:Loads"], "task.environment_timeout_s=0.5")
    assert capsys.readouterr().out.endswith("the episode is over after 1 turns; the environment's reward is 1\n")
