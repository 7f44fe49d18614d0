"""Rollouts drawn ahead: weights of a fixed age, whatever takes how long, on devices of their own, after a resume too."""

import base64
import json
import threading
import time
import zlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support.harness import ROOT, metrics
from support.processes import Processes
from support.rollouts import AGENT, TASK

import tunix
from tunix.base.errors import RolloutFailed, Stopped, UserError
from tunix.base.files import list_numbers
from tunix.checkpoints.store import find_storage
from tunix.config.compose import compose
from tunix.costs.devices import read_topology
from tunix.data.prompts import Prompt
from tunix.inference.engine import Answer
from tunix.plan.ranking import leave_to_learning, rank
from tunix.plan.report import format_text
from tunix.rl.ahead import RolloutGroup, RolloutsAhead, pack, unpack
from tunix.rl.episodes import Episode, Played
from tunix.rl.rollouts import Rollouts
from tunix.rl.scoring import Scores
from tunix.sharding.table import axis_names
from tunix.training.choices import build_mesh, build_rollout_mesh, select_rollout_sizes
from tunix.training.grpo import IMPORTANCE, locate_answers

APART = "model.mesh_shape=[[2],[fsdp]]", "distributed.allow_idle_devices=true", "training.micro_batch_size=4"
WORDS = [
    *TASK, *APART, "task.staleness=2", "task.rollout_devices=2", "evaluation.every_steps=4",
    "checkpoint.save_every_steps=2", "checkpoint.max_to_keep=9", "training.max_steps=5",
]  # fmt: skip


def read(folder: Path) -> tuple[list[dict], list[tuple]]:
    """Numbers that no time changes, of each step, and its answers."""
    names = "loss", "grad_norm", "reward", "mismatch", "mismatch_max", "staleness", "entropy"
    lines = [{"step": line["step"]} | {name: line[name] for name in names} for line in metrics(folder)]
    samples = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return lines, [(answer["step"], answer["tokens"], answer["log_probabilities"]) for answer in samples]


@pytest.fixture(scope="module")
def ahead(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ahead") / "run"
    tunix.train([*WORDS, f"hydra.run.dir={folder}"])
    return folder


def test_weights_have_a_fixed_age(ahead):
    lines, answers = read(ahead)
    assert [line["staleness"] for line in lines] == [0, 1, 2, 2, 2]
    assert lines[0]["mismatch_max"] < 1e-5
    assert all(line["mismatch"] > 1e-5 for line in lines[1:])  # the weights have moved since the answers were drawn
    assert [step for step, *_ in answers] == [step for step in range(1, 6) for _ in range(16)]
    report = (ahead / "train.log").read_text()
    assert (
        '2 rollout(s) beside learning, on [[2],["fsdp"]], the last 2 devices of each host, by weights 2 step(s) old'
        in report
    )


def test_a_resumed_run_learns_from_the_same_answers(ahead):
    """Also where the answers that waited are drawn and scored at other times."""
    before, drawn = read(ahead)
    tunix.train([f"resume={ahead}/checkpoints/2"])
    after, again = read(ahead)
    first, *_ = [line for line in metrics(ahead, "held_out") if line["step"] == 4]
    assert all(line["reward"] == first["reward"] for line in metrics(ahead, "held_out") if line["step"] == 4)
    assert after[5:] == before[2:]
    assert again[80:] == drawn[32:]


def test_answers_that_wait_belong_to_the_keys_of_their_rewards():
    """Beside names and weights: a resume with another buffer draws them anew."""
    digests = set()
    for buffer in (2, 3):
        cfg = compose([*TASK, f"task.rewards=[{{function: overlong, buffer: {buffer}}}]"]).config
        source = Rollouts.__new__(Rollouts)
        source.cfg, source.task = cfg, cfg.task
        digests.add(source._digest_request([Prompt([1], "", {})]))
    assert len(digests) == 2


@pytest.mark.nightly
def test_no_time_changes_a_token(ahead, tmp_path):
    """Rewards wait for random times; the same devices learn and draw."""
    folder = tmp_path / "run"
    words = [word for word in WORDS if "rollout_devices" not in word]
    tunix.train([*words, "task.rewards=[support.own_reward:slow_letters]", f"hydra.run.dir={folder}"])
    (lines, answers), (expected, drawn) = read(folder), read(ahead)
    assert [(step, tokens) for step, tokens, _ in answers[:80]] == [(step, tokens) for step, tokens, _ in drawn[:80]]
    for line, other in zip(lines, expected, strict=False):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.nightly
def test_episodes_wait_too(tmp_path):
    """With their turns: a resumed run learns from the same ones, also where fewer are drawn at one time."""
    folder = tmp_path / "run"
    words = ["task.staleness=2", "training.max_steps=4", "checkpoint.max_to_keep=9", "checkpoint.save_every_steps=2"]
    tunix.train([*AGENT, *APART, *words, "evaluation.every_steps=2", f"hydra.run.dir={folder}"])
    before, drawn = read(folder)
    assert "3 at one time have a cache" in (folder / "train.log").read_text()
    tunix.train([f"resume={folder}/checkpoints/2", "task.rollout_rows=16", "task.environment_processes=1"])
    assert "1 at one time have a cache" in (folder / "train.log").read_text()
    after, again = read(folder)
    assert [line["staleness"] for line in before] == [0, 1, 2, 2]
    assert after[4:] == before[2:]
    assert again[64:] == drawn[32:]


@pytest.mark.nightly
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "together"])
def test_two_processes_draw_ahead(apart, tmp_path):
    """Of 4 devices each, they learn from the answers of one process with 8.

    After kill -9 of process 1 the run goes on with the same digits; two rollouts wait in the checkpoint.
    """
    words = [word for word in WORDS if not word.startswith(("model.mesh_shape", "task.rollout_devices"))]
    words += ["training.max_steps=6", f"training.micro_batch_size={4 if apart else 2}"]
    words += ["model.mesh_shape=[[4],[fsdp]]"] if apart else ["model.mesh_shape=[[8],[fsdp]]"]
    together, alone = (["task.rollout_devices=2"], ["task.rollout_devices=4"]) if apart else ([], [])
    start = partial(Processes, folder=tmp_path, count=2, devices=4, PYTHONPATH=f"{ROOT}:{ROOT}/tests")

    def run(*words):
        with start(*words) as processes:
            ends = processes.ends()
        assert [end.code for end in ends] == [0, 0], ends[0].stderr

    run(*words, *together, "hydra.run.dir=run")
    tunix.train([*words, *alone, f"hydra.run.dir={tmp_path}/alone"])
    (lines, answers), (expected, drawn) = read(tmp_path / "run"), read(tmp_path / "alone")
    assert [line["staleness"] for line in lines] == [0, 1, 2, 2, 2, 2]
    assert [(step, tokens) for step, tokens, _ in answers] == [(step, tokens) for step, tokens, _ in drawn]
    for line, other in zip(lines, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-6)

    killed, slowly = tmp_path / "killed", "task.rewards=[support.own_reward:slow_letters]"
    with start(*words, *together, slowly, "hydra.run.dir=killed", fork=False) as processes:
        processes.wait_for_step(killed, 3)
        processes.started[1].kill()
        assert processes.ends()[0].code == 76
    saved = list_numbers(killed / "checkpoints")
    assert saved, "before the kill"
    record = json.loads(find_storage(killed / "checkpoints" / str(saved[-1]))[0].read(saved[-1], "run/metadata"))
    waiting = json.loads(zlib.decompress(base64.b64decode(record["position"]["waiting"])))
    assert sorted(map(int, waiting)) == [saved[-1] + 1, saved[-1] + 2]
    before = len(read(killed)[0])
    run("resume=killed")
    again, redrawn = read(killed)
    assert [line["step"] for line in again[before:]] == list(range(saved[-1] + 1, 7))
    assert again == [lines[line["step"] - 1] for line in again]
    assert redrawn[-16 * (6 - saved[-1]) :] == answers[16 * saved[-1] :]


def go_on():
    """A run that is not asked to stop."""


def test_a_stop_waits_for_no_answers_before_the_first_checkpoint(monkeypatch):
    """An environment may take longer than a cluster waits; what is drawn later is added to the checkpoint."""
    mesh, is_slow, may_end = build_mesh(compose([*TASK, *APART]).config), {3, 4}, threading.Event()

    def draw(params, first_step):
        assert first_step not in is_slow or may_end.wait(60)
        return RolloutGroup([], [], [], Scores({}, [], {}, 0.0), 1.0)

    def stop():
        raise Stopped("SIGTERM")

    monkeypatch.setattr("tunix.rl.ahead.CHECK_S", 0.01)
    rollouts = RolloutsAhead(draw, mesh, range(1, 9), 2, {})
    for step in range(2):
        rollouts.take({}, step + 1, go_on)
    with pytest.raises(Stopped):
        rollouts.take({}, 3, stop)
    assert rollouts.find_waiting(2, waits=False) == {}
    may_end.set()
    assert [*rollouts.find_waiting(2)] == [3, 4]
    rollouts.close()


@pytest.mark.parametrize("error", [RolloutFailed("the judge is away"), RuntimeError("RESOURCE_EXHAUSTED")], ids=str)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_checkpoint_leaves_out_answers_that_failed(num_processes, error, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: num_processes)

    def draw(params, first_step):
        if first_step == 3:
            raise error
        return RolloutGroup([], [], [], Scores({}, [], {}, 0.0), 1.0)

    rollouts = RolloutsAhead(draw, build_mesh(compose([*TASK, *APART]).config), range(1, 9), 2, {})
    for step in range(2):  # steps before it learn
        rollouts.take({}, step + 1, go_on)
    assert [*rollouts.find_waiting(1)] == [2]
    with pytest.raises(type(error), match=str(error)):
        rollouts.take({}, 3, go_on)
    rollouts.close()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_order_of_work(num_processes, monkeypatch, caplog):
    """Each rollout gets the weights of its time, though the first ones take longest; a checkpoint keeps those that wait.

    Of several processes the main thread draws.
    """
    monkeypatch.setattr("jax.process_count", lambda: num_processes)
    cfg = compose([*TASK, *APART]).config
    mesh, task, prompts = build_mesh(cfg), cfg.task, [Prompt([1], "a", {})]

    def draw(params, first_step):
        time.sleep(0.02 * (first_step < 4))
        answer = Answer([int(params["w"])], [-0.1], [-1 / 3], True)
        turns, spans = [{"role": "assistant", "content": "b"}], [(0, 1)]
        episode = Episode(0, prompts[0], 5, [1], answer.tokens, [True], [-0.1], [-1 / 3], turns, spans, [0.5])
        scores = Scores({"a": [1.0]}, [1.0], {"a": 0}, 0.1)
        return RolloutGroup(prompts, [answer], ["b"], scores, 1.0, Played([episode], 0.1, 0, task), request="asked")

    def weights(step):
        return {"w": jax.device_put(jnp.full((), step), NamedSharding(mesh, jax.P()))}

    def tokens(drawn):
        return drawn.weights_step, drawn.answers[0].tokens

    rollouts = RolloutsAhead(draw, mesh, range(1, 9), 2, {})
    taken = [tokens(rollouts.take(weights(step), step + 1, go_on)) for step in range(5)]
    assert taken == [(0, [0]), (0, [0]), (0, [0]), (1, [1]), (2, [2])]
    assert [*rollouts.rollouts] == [5, 6, 7]  # those that were learnt are gone
    waiting = unpack(pack(rollouts.find_waiting(4)), [5, 6], task, lambda step: prompts, lambda prompts: "asked")
    assert waiting == rollouts.find_waiting(4)
    assert not caplog.text
    # A run that was killed between a stop's checkpoint and the answers that it adds.
    assert unpack("", [5, 6], task, lambda step: prompts, lambda prompts: "asked") == {}
    assert "wait for step 5, 6: they are drawn by its weights" in caplog.text
    # Other groups or prompts than those of the checkpoint: the answers are those of other places.
    assert unpack(pack(waiting), [5, 6], task, lambda step: [], lambda prompts: "asked" if prompts else "else") == {}
    older = json.loads(zlib.decompress(base64.b64decode(pack(waiting))))
    assert all(rollout.pop("request") == "asked" for rollout in older.values())
    text = base64.b64encode(zlib.compress(json.dumps(older).encode())).decode()
    assert unpack(text, [5, 6], task, lambda step: prompts, lambda prompts: "asked") == waiting, (
        "of a version without digests"
    )
    assert {step: tokens(drawn) for step, drawn in waiting.items()} == {5: (2, [2]), 6: (3, [3])}
    resumed = RolloutsAhead(draw, mesh, range(5, 9), 2, waiting)
    again = [tokens(resumed.take(weights(step), step + 1, go_on)) for step in range(4, 8)]
    assert again == [(2, [2]), (3, [3]), (4, [4]), (5, [5])]
    for each in (rollouts, resumed):
        each.close()


def test_episodes_that_wait_keep_their_prompts():
    task, prompts = compose([*TASK, "task.group_size=2"]).config.task, [Prompt([1], "a", {}), Prompt([2], "b", {})]
    episodes = [
        Episode(row, prompts[row // 2], 5, [1], [row], [True], [-0.1], [-0.2], [], [(0, 1)], [0.5]) for row in range(4)
    ]
    played = Played(episodes, 0.1, 0, task)
    waiting = {5: RolloutGroup(prompts, [], [], Scores({}, [], {}, 0.1), 1.0, played, 4, "asked")}
    assert unpack(pack(waiting), [5], task, lambda step: prompts, lambda prompts: "asked") == waiting


def test_weights_of_importance():
    logs = jnp.log(jnp.array([[0.5, 3.0, 1.0], [1.5, 1.5, 1.0]]))
    answers = locate_answers({"segment_ids": np.ones((2, 3), np.int32)}, 1)
    np.testing.assert_allclose(IMPORTANCE["truncate"](logs, 2.0, answers), [[0.5, 2, 1], [1.5, 1.5, 1]], rtol=1e-6)
    np.testing.assert_allclose(IMPORTANCE["mask"](logs, 2.0, answers), [[0.5, 0, 1], [1.5, 1.5, 1]], rtol=1e-6)
    np.testing.assert_allclose(IMPORTANCE["sequence"](logs, 2.0, answers), [[1.5] * 3, [2.0] * 3], rtol=1e-6)
    np.testing.assert_allclose(IMPORTANCE["sequence_mask"](logs, 2.0, answers), [[1.5] * 3, [0.0] * 3], rtol=1e-6)


def test_the_plan_knows_both_meshes():
    cluster = read_topology("h100:4")

    def best(*words):
        cfg = compose([*TASK, "plan.num_compiled=0", *words]).config
        return rank(cfg, leave_to_learning(cfg, cluster)).fit[0]

    between, beside, apart = best(), best("task.staleness=1"), best("task.staleness=1", "task.rollout_devices=2")
    assert apart.sizes["fsdp"] * apart.sizes["dp"] * apart.sizes["tp"] <= 2
    weights = beside.costs.num_bytes["weights"]
    assert beside.rollout.copy_bytes == 2 * weights  # one that waits, one that draws
    assert beside.memory >= between.costs.memory + beside.rollout.costs.memory + 2 * weights
    assert apart.rollout_memory == apart.rollout.costs.memory + apart.rollout.copy_bytes
    agents = best("task.staleness=1", "task.environment=look_up", "sampling.max_turn_tokens=2")
    held = [agents.rollout.costs.num_bytes[name] for name in ("gathered weights", "cache", "other cache")]
    assert (beside.rollout.at_once, agents.rollout.at_once) == (1, 2)
    assert agents.rollout.costs.num_bytes["other rollouts"] == sum(held)
    assert apart.tokens_per_s == apart.costs.tokens_per_step / max(apart.time.step_s, apart.rollout_s)


def test_the_plan_knows_what_lies_on_which_node():
    """Both meshes are over all nodes; weights are copied inside of nodes and gathered between them."""
    cluster, words = read_topology("h100:2x8"), ["plan.num_compiled=0", "task.staleness=1", "task.rollout_devices=4"]
    cfg = compose([*TASK, *words]).config
    ranking = rank(cfg, leave_to_learning(cfg, cluster))
    two = ranking.fit[0]
    assert dict(two.rollout.apart.shape) == two.sizes
    assert two.cluster.num_devices == two.rollout.apart.size == 8
    assert any("on 2 hosts the devices that draw" in reason for reason in ranking.refused.values())
    assert two.rollout.resting_bytes * 8 >= two.rollout.costs.num_bytes["gathered weights"]
    copy_s, in_node_s = two.rollout.predict_weights_s(read_topology("h100:8"))
    assert (two.weights_s[0], 0 < in_node_s < two.weights_s[1]) == (copy_s, True)  # the network is slower
    assert two.rollout_s > two.rollout.costs.predict_seconds(cluster.kind)
    line = (
        'of each of 2 node(s), devices 0 to 3 learn, on [[8],["fsdp"]] of all nodes, and 4 to 7 draw, on [[8],["fsdp"]]'
    )
    assert line in format_text(ranking, cluster, words)


def test_what_is_refused():
    with pytest.raises(UserError, match="task.rollout_devices=2 would wait for the devices that learn"):
        compose([*TASK, "task.rollout_devices=2"])
    cfg = compose([*TASK, "task.rollout_devices=8", "task.staleness=1"]).config
    with pytest.raises(UserError, match=r"task.rollout_devices=8 leaves none of 8 device\(s\) of a host to learn"):
        build_mesh(cfg)
    cfg = compose([*TASK, *APART, "task.rollout_devices=3", "task.staleness=1"]).config
    with pytest.raises(UserError, match="task.rollout_devices=3: "):
        build_rollout_mesh(cfg, build_mesh(cfg))
    cfg, learning = (
        compose([*TASK, "task.rollout_devices=2", "task.staleness=1"]).config,
        dict.fromkeys(axis_names(), 1),
    )
    with pytest.raises(UserError, match=r"on 2 hosts the devices that draw, .*\[4\].*, must be split like those"):
        select_rollout_sizes(cfg, learning | {"dp": 2, "fsdp": 2}, 2)
