"""Runs of task=grpo with an environment: what their files say, the same on every mesh, after kill -9, with any tools."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from support.harness import ROOT, cli, cli_here, metrics
from support.processes import Processes
from support.rollouts import AGENT, ONE, WIDE

import tunix
from tunix.base.errors import UserError
from tunix.config import Evaluate, Play
from tunix.config.batch import BatchShape
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.evaluate import evaluate
from tunix.inference.engine import Answer
from tunix.play import play
from tunix.rl import evaluation
from tunix.rl.ahead import RolloutGroup
from tunix.rl.episodes import Episode, Played, Player, credit_turns
from tunix.rl.rollouts import Rollouts, arrange_answers, center, leave_one_out
from tunix.rl.scoring import Scores


def samples(folder: Path) -> list[dict]:
    """Return the lines of samples.jsonl, without the seconds that tools took."""
    answers = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for answer in answers:
        for turn in answer.get("turns", ()):
            turn.pop("seconds", None)
    return answers


def same_numbers(line: dict) -> dict:
    """Return the numbers of a line of metrics.jsonl that do not depend on time, or on processes that were lost."""
    return {
        name: value
        for name, value in line.items()
        if not name.endswith(("_s", "_per_device", "tflops")) and name not in ("environment_lost", "tool_s")
    }


# Words of runs whose rollouts are drawn ahead, by name.
AHEAD = {
    "turn by turn": [],
    "ahead": ["task.staleness=2"],
    "ahead, apart": ["task.staleness=2", "task.rollout_devices=2", "model.mesh_shape=[[2],[fsdp]]",
                     "training.max_steps=8"],
}  # fmt: skip


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Path:
    """Four steps with an environment that behaves."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    tunix.train([*AGENT, *ONE, "training.max_steps=4", f"hydra.run.dir={folder}"])
    return folder


def test_the_files_of_a_run_agree(calm):
    lines, answers = metrics(calm), samples(calm)
    assert len(answers) == 64
    for line in lines:
        own = [answer for answer in answers if answer["step"] == line["step"]]
        turns = [[turn for turn in answer["turns"] if turn["role"] == "assistant"] for answer in own]
        assert line["turns"] == np.mean(list(map(len, turns)))
        assert line["answer_tokens"] == np.mean([sum(answer["learnt"]) for answer in own])
        assert line["seen_tokens"] == np.mean([answer["learnt"].count(0) for answer in own])
        assert line["reward"] == pytest.approx(np.mean([answer["reward"] for answer in own]))
        assert line["reward"] == pytest.approx(line["reward_letters"] + line["reward_environment"])
        assert (line["reward_errors"], line["tool_errors"], line["environment_lost"]) == (0, 0, 0)
        assert line["tool_s"] > 0
        assert line["mismatch_max"] < 1e-5, "the cache is kept over what the environment says"
    (held_out, *_) = metrics(calm, "held_out")
    assert held_out["turns"] >= 1
    assert held_out["reward"] == pytest.approx(held_out["reward_letters"] + held_out["reward_environment"])
    for answer in answers:
        assert len(answer["learnt"]) == len(answer["tokens"]) == len(answer["log_probabilities"]) <= 24
        assert answer["answer"].startswith(answer["turns"][0]["content"])
        if answer["stopped"]:
            given = sum(turn.get("reward", 0) for turn in answer["turns"])
            assert answer["reward_environment"] == pytest.approx(given)
    assert {answer["turns"][1]["content"][0] for answer in answers if len(answer["turns"]) > 2} == {"="}
    assert {len(answer["turns"]) for answer in answers} > {1, 3}
    assert any(not answer["stopped"] for answer in answers)


def test_a_checkpoint_plays(calm, capsys):
    play(read_settings(Play, [f"checkpoint={calm}", "episodes=2"]))
    said = capsys.readouterr().out
    assert said.count("prompt\n") == 2
    assert said.count("\nreward ") == 2
    assert "\nassistant\n" in said
    assert ", environment " in said


@pytest.mark.nightly  # kill -9 of a run is in test_cli.py, tools that die in test_environment_pool.py
@pytest.mark.parametrize("ahead", AHEAD)
def test_a_run_killed_with_tools_that_sleep_and_die_is_the_same(ahead, request, tmp_path, monkeypatch):
    """Tools end their processes in each rollout; kill -9 strikes while an environment answers, after step 2.

    What was not saved by then runs again, with the same digits, also where rollouts of later steps are under way.
    """
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests")
    words = [*AGENT, *ONE, "training.max_steps=4", *AHEAD[ahead]]
    if not AHEAD[ahead]:
        calm = request.getfixturevalue("calm")
    else:
        calm = tmp_path / "calm"
        tunix.train([*words, f"hydra.run.dir={calm}"])
    words += ["hydra.run.dir=run", "task.environment_options={wild: true}"]
    assert cli(*words, cwd=tmp_path).returncode == -signal.SIGKILL
    assert (tmp_path / "struck").is_dir()
    assert cli_here("resume=run", cwd=tmp_path).returncode == 0
    folder = tmp_path / "run"
    answers = samples(calm)
    for number, answer in enumerate(samples(folder)[:32]):
        assert answer == answers[number]
    assert samples(folder)[-32:] == answers[-32:], "with the same bits, after kill -9"
    expected = {line["step"]: same_numbers(line) for line in metrics(calm)}
    lines = metrics(folder)
    assert {line["step"]: same_numbers(line) for line in lines} == expected
    assert sum(line["environment_lost"] for line in lines) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("words", [[WIDE], [*ONE, "task.rollout_rows=4", "task.environment_processes=1"]])
def test_neither_mesh_nor_rows_change_an_episode(calm, tmp_path, words):
    tunix.train([*AGENT, *words, "training.max_steps=1", f"hydra.run.dir={tmp_path}/run"])
    names = "tokens", "learnt", "turns", "reward", "stopped"
    for one, two in zip(samples(calm)[:16], samples(tmp_path / "run"), strict=True):
        assert [one[name] for name in names] == [two[name] for name in names]


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes_play_the_same_episodes(tmp_path):
    words = [
        *AGENT, "training.micro_batch_size=4", "training.max_steps=2", "evaluation.every_steps=null",
        "distributed.allow_idle_devices=true", "model.mesh_shape=[[2],[fsdp]]",
    ]  # fmt: skip
    tunix.train([*words, f"hydra.run.dir={tmp_path}/alone"])
    with Processes(*words, "hydra.run.dir=run", folder=tmp_path, count=2, PYTHONPATH=f"{ROOT}:{ROOT}/tests") as run:
        assert [end.code for end in run.ends()] == [0, 0]
    alone, together = samples(tmp_path / "alone"), samples(tmp_path / "run")
    assert [each["tokens"] for each in alone[:16]] == [each["tokens"] for each in together[:16]]
    assert [each["turns"] for each in alone[:16]] == [each["turns"] for each in together[:16]]
    assert len(together) == 32


@pytest.mark.parametrize("more", [[], ["task.environment=null"]], ids=["episodes", "answers"])
def test_answers_of_an_evaluation_are_written_as_they_come(calm, tmp_path, monkeypatch, more):
    """What ends an evaluation loses one part of the answers; those of parts are those of one rollout."""
    monkeypatch.chdir(tmp_path)
    words = [f"checkpoint={calm}", "metric=reward", "num_prompts=4", "num_samples=2", "batch_size=2"]
    words += ["rewards=[length]", "reward_processes=1", "samples=samples.jsonl"]
    overrides = {"overrides": [*ONE[:2], "sampling=default", *more]}
    evaluate(read_settings(Evaluate, words, overrides))
    whole, numbers = samples(tmp_path), json.loads(Path("results.json").read_text())
    monkeypatch.setattr(evaluation, "ROUNDS", 2)
    evaluate(read_settings(Evaluate, words, overrides))
    parts = json.loads(Path("results.json").read_text())
    assert [row["answer"] for row in samples(tmp_path)] == [row["answer"] for row in whole]
    assert parts | {"tool_s": None} == numbers | {"tool_s": None}
    draw, drawn = evaluation.draw_answers, []

    def draw_one(*arguments):
        if drawn:
            raise KeyboardInterrupt
        drawn.append(draw(*arguments))
        return drawn[0]

    monkeypatch.setattr(evaluation, "draw_answers", draw_one)
    with pytest.raises(KeyboardInterrupt):
        evaluate(read_settings(Evaluate, words, overrides))
    assert samples(tmp_path) == whole[:4]


def test_an_evaluation_plays_episodes(calm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rollout, played = Player.rollout, []
    monkeypatch.setattr(Player, "rollout", lambda *arguments: played.append(rollout(*arguments)) or played[0])
    words = [f"checkpoint={calm}", "metric=reward", "num_prompts=4", "num_samples=2", "samples=played.jsonl"]
    evaluate(read_settings(Evaluate, words, {"overrides": [*ONE[:2], "sampling=default"]}))
    numbers = json.loads(Path("results.json").read_text())
    rows = [json.loads(line) for line in Path("played.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert numbers["reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))
    assert numbers["turns"] == np.mean([sum(turn["role"] == "assistant" for turn in row["turns"]) for row in rows])
    assert {"reward_environment", "reward_letters", "tool_s"} <= numbers.keys()
    assert numbers["answer_tokens"] == np.mean([sum(episode.learnt) for episode in played[0].episodes])
    # The name of a reward is short for this reward alone.
    monkeypatch.setattr(Player, "rollout", lambda *_: played[0])
    evaluate(
        read_settings(Evaluate, [words[0], "metric=length", *words[2:]], {"overrides": [*ONE[:2], "sampling=default"]})
    )
    numbers = json.loads(Path("results.json").read_text())
    assert numbers["length"] == numbers["reward_length"]
    assert numbers["reward"] == pytest.approx(numbers["length"] + numbers["reward_environment"])
    judge = "rewards=[{function: judge, url: http://127.0.0.1:1, model: m}]"
    with pytest.raises(UserError, match="a judge scores one answer, and task.environment makes episodes; leave it out"):
        evaluate(read_settings(Evaluate, [*words, judge], {"overrides": [*ONE[:2], "sampling=default"]}))


REFUSED = {
    "task.environment=support.own_environment:Forgetful": "has no method reset",
    "task.environment=support.own_environment:Failing": "Failing fails: RuntimeError: out of order (",
    "task.environment=nothing:Here": "module nothing cannot be imported",
    "task.environment=calculatr": "expected one of python, calculator, search_folder, look_up, openenv, or package.module:name",
    "task.environment_options={mild: true}": "unexpected keyword argument 'mild'",
    "task.chat_template='{{ messages[0].content }}'": "shows neither a message of the role tool nor one of the role user",
    "task.environment=calculator": "task.chat_template does not show the tools of a conversation (calculate); name them",
    "task.tool_calls=hermess": "did you mean hermes?",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_played_is_refused(word, tmp_path):
    """In one line, and nothing is written."""
    done = cli_here(*AGENT, *ONE, "training.max_steps=1", "hydra.run.dir=run", word, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert REFUSED[word] in line
    assert not (tmp_path / "run").exists()


def test_without_rewards_an_environment_must_reward(tmp_path):
    silent = "task.environment=support.own_environment:Silent"
    done = cli_here(*AGENT, *ONE, silent, "task.rewards=[]", cwd=tmp_path)
    assert "task.rewards=[] leaves nothing to learn from" in done.stderr
    assert "Silent rewards nothing itself" in done.stderr


def end_by_failing(after: int) -> None:
    """Train to the first failure of an environment that fails once the run has drawn so many answers."""
    words = [*AGENT, *ONE, "training.max_steps=4", "checkpoint.save_every_steps=4", "hydra.run.dir=run"]
    failing = ["task.environment=support.own_environment:FailingLater", f"task.environment_options={{after: {after}}}"]
    why = r"FailingLater fails: RuntimeError: out of order .*environment_errors=zero scores .*\. Saved after step 2; go on"
    with pytest.raises(UserError, match=why):
        tunix.train([*words, *failing, "task.environment_errors=stop"])


def test_an_environment_that_fails_may_end_the_run(tmp_path, monkeypatch):
    """In held-out episodes, before the first checkpoint was due."""
    monkeypatch.chdir(tmp_path)
    end_by_failing(after=48)
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["2"]


@pytest.mark.nightly
@pytest.mark.parametrize("after", [32, 48], ids=["in the third rollout", "in held-out episodes"])
def test_a_run_that_an_environment_has_ended_goes_on(calm, after, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end_by_failing(after)
    tunix.train(["resume=run", "task.environment_options={after: 99}"])
    for split in (None, "held_out"):
        lines, expected = (list(map(same_numbers, metrics(folder, split))) for folder in (Path("run"), calm))
        assert lines == expected


def episode(spans: list[tuple[int, int]], rewards: list[float], **values) -> Episode:
    count = spans[-1][1]
    learnt = [any(first <= place < stop for first, stop in spans) for place in range(count)]
    return Episode(
        0, None, 0, [1, 2], list(range(count)), learnt, [0.0] * count, [0.0] * count, [], spans, rewards, **values
    )


def test_held_out_episodes_have_the_bounds_of_training():
    given = compose(
        ["task=grpo", "sampling.max_turn_tokens=7", "sampling.max_new_tokens=30", "sampling.stop=[a]"]
    ).config
    found = given.evaluation.sampling
    assert (found.max_turn_tokens, found.max_new_tokens, found.stop) == (7, 30, ("a",))


def test_credit_of_turns():
    """Each turn has what is rewarded from it on, against the same turn of its group; tokens of tools have none."""
    group = [
        episode([(0, 2), (3, 5), (6, 7)], [0.0, 0.0, 1.0]),
        episode([(0, 1), (2, 4)], [0.5, 0.0]),
        episode([(0, 1)], [0.0], problem="late"),
    ]
    assert [each.reward for each in (*group, episode([(0, 1)], [1.0], problem="late"))] == [1.0, 0.5, 0.0, 0.0]
    rewards = np.array([[1.0, 0.5, 0.0]])
    found = credit_turns(group, rewards, [False] * 3, center, 10)
    answers = [Answer(each.tokens, [0.0] * len(each.tokens), [0.0] * len(each.tokens), True) for each in group]
    fields = arrange_answers([[1, 2]] * 3, answers, 10, [each.learnt for each in group])
    assert fields["loss_mask"][0].tolist() == [0, 1, 1, 0, 1, 1, 0, 1, 0, 0]
    np.testing.assert_allclose(found[0], [0, 0.5, 0.5, 0, 0.5, 0.5, 0, 0, 0, 0])
    np.testing.assert_allclose(found[1], [0, 0, 0, -0.5, -0.5, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(found[2], [0, -0.5, 0, 0, 0, 0, 0, 0, 0, 0])
    assert credit_turns(group, rewards, [False] * 3, leave_one_out, 10)[0].tolist()[7:] == [0, 0, 0]  # a turn alone
    # With rewards of the last turn (0.2), and an episode that is cut and counts as 0.
    found = credit_turns(group, np.array([[1.2, 0.0, 0.0]]), [False, True, False], center, 10)
    np.testing.assert_allclose(found[0], [0, 0.8, 0.8, 0, 0.6, 0.6, 0, 0, 0, 0])
    np.testing.assert_allclose(found[1], [0, -0.4, 0, -0.6, -0.6, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["task.credit=turns"], [True, False, True]),  # rewards of turns differ where their sums are equal
        ([], [False, False, True]),
        (["task.truncated=mask"], [False, False, False]),  # the only answers that differ from their mean are not learnt
    ],
    ids=["turns", "answer", "mask"],
)
def test_groups_that_teach_something(words, expected):
    task, spans = compose([*AGENT, *ONE, *words]).config.task, [(0, 1), (2, 3)]
    rewards = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]
    episodes = [episode(spans, each, stopped=number < 4) for number, each in enumerate(rewards)]
    scores = Scores({}, [sum(each) for each in rewards], {}, 0.0)
    answers = [each.to_answer() for each in episodes]
    source = Rollouts.__new__(Rollouts)
    source.task, source.shape = task, BatchShape(1, 6, 10)
    found = source._find_signal(RolloutGroup([None] * 3, answers, [], scores, 0.0, Played(episodes, 0.0, 0, task)))
    assert found.tolist() == expected


@pytest.mark.nightly
def test_a_run_with_credit_of_turns(tmp_path):
    folder = tmp_path / "run"
    tunix.train(
        [*AGENT, *ONE, "task.credit=turns", "task.rewards=[]", "training.max_steps=2", f"hydra.run.dir={folder}"]
    )
    assert [np.isfinite(line["grad_norm"]) for line in metrics(folder)] == [True, True]
    assert any(answer["advantage"] != 0 for answer in samples(folder))
