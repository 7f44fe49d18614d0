"""Runs of task=grpo on tiny models: the same on every mesh, after a resume, and as their files say."""

import json
import math
import os
import signal
import string
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from support.harness import ROOT, cli, cli_here, experts, metrics
from support.processes import Processes
from support.rollouts import ONE, TASK, WIDE
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tunix
from tunix.base.errors import Stopped, UserError
from tunix.checkpoints.checkpoint import check_cycle
from tunix.checkpoints.store import find_storage, read_about
from tunix.config import Evaluate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.config.data import Tokenizer
from tunix.config.task import Cycle
from tunix.data.batches import BEGINNING, Batch, BatchSource, DataSchedule, Position, Samples
from tunix.data.documents import Question
from tunix.data.prompts import Prompt, PromptOrder, _digest, load_prompts
from tunix.data.tokenizer import train_vocab
from tunix.evaluate import evaluate
from tunix.inference.engine import Answer, Engine
from tunix.inference.rollout import RolloutRequest, derive_seed
from tunix.models.vision import Images
from tunix.rl.ahead import RolloutGroup
from tunix.rl.episodes import Drawn
from tunix.rl.evaluation import HeldOutAnswers, _find_plain, select_best
from tunix.rl.rollouts import Rollouts, arrange_answers, score_together
from tunix.rl.samples_file import SamplesFile
from tunix.rl.scoring import Scores
from tunix.run.early_stopping import Moment, check_stop_request
from tunix.training.choices import build_mesh


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """Four steps on eight devices."""
    folder = tmp_path_factory.mktemp("wide") / "run"
    tunix.train([*TASK, WIDE, "training.max_steps=4", f"hydra.run.dir={folder}"])
    return folder


def test_the_files_of_a_run_agree(wide):
    """samples.jsonl gives the numbers of metrics.jsonl again; noise differs between steps, prompts and answers."""
    lines, answers = metrics(wide), samples(wide)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        own = [answer for answer in answers if answer["step"] == line["step"]]
        assert len(own) == 16
        rewards = np.array([answer["reward"] for answer in own]).reshape(4, 4)
        advantages = np.array([answer["advantage"] for answer in own]).reshape(4, 4)
        np.testing.assert_allclose(advantages, rewards - rewards.mean(1, keepdims=True), atol=1e-12)
        assert line["reward"] == line["reward_letters"] == pytest.approx(rewards.mean())
        assert line["no_signal"] == np.mean(np.ptp(rewards, axis=1) == 0)
        assert line["answer_tokens"] == np.mean([len(answer["tokens"]) for answer in own])
        assert line["truncated"] == np.mean([not answer["stopped"] for answer in own])
        assert (line["ratio_max"], line["clipped"], line["reward_errors"]) == (1, 0, 0)
        assert line["mismatch"] <= line["mismatch_max"] < 1e-5
        assert line["tokens"] == 16 * 16 * line["step"]
        assert line["entropy"] > 0
        assert line["grad_norm"] > 0
    assert any(answer["stopped"] for answer in answers)
    for answer in answers:  # the token that stops an answer is one of its tokens, and has a probability
        assert len(answer["tokens"]) == len(answer["log_probabilities"]) <= 6
        assert answer["stopped"] or len(answer["tokens"]) == 6
    assert len({tuple(answer["tokens"]) for answer in answers}) > 50
    assert [answer["sample"] for answer in answers[::4]] == list(range(16))
    evaluations = metrics(wide, "held_out")
    assert [line["step"] for line in evaluations] == [2, 4]
    assert all(0 <= line["accuracy"] <= line["reward"] + 1e-9 for line in evaluations)
    shown = [
        event.tensor_proto.string_val[0].decode() for event in EventAccumulator(str(wide)).Reload().Tensors("samples")
    ]
    assert len(shown) == 4
    assert shown[0].count(" >>> ") == 4  # answers of step 1, as text in TensorBoard


def test_evaluate_measures_what_the_run_did(wide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"checkpoint={wide}", "metric=reward", "step=[2,4]", "num_prompts=4", "reward_processes=1"]
    evaluate(read_settings(Evaluate, words, {"overrides": [ONE[0], ONE[1]]}))
    measured = {line["step"]: line for line in json.loads(Path("results.json").read_text())["steps"]}
    own = {line["step"]: line for line in metrics(wide, "held_out")}
    for step in (2, 4):
        same = ("reward", "reward_letters", "accuracy", "answer_tokens", "truncated", "prompts", "reward_errors")
        assert {name: measured[step][name] for name in same} == {name: own[step][name] for name in same}
    of_nan = Drawn([Answer([0], [math.nan], [math.nan], False)], [""])
    asked: list = []
    monkeypatch.setattr("tunix.rl.evaluation.draw_answers", lambda *given: asked.append(given[2].sampling) or of_nan)
    with pytest.raises(UserError, match="/2: the scores of tokens of text 1 are no numbers"):
        evaluate(read_settings(Evaluate, words, {"overrides": [ONE[0], ONE[1], "sampling=standard"]}))
    assert (asked[0].stop, asked[0].top_k) == (tuple("abcdefgh"), 50)  # a preset does not say where an answer ends
    with pytest.raises(UserError, match="metric=loss: task=grpo has no loss on held-out answers; set metric=reward"):
        evaluate(read_settings(Evaluate, [f"checkpoint={wide}"], {"overrides": []}))


def test_the_best_answer_of_each_prompt():
    """The first of equal ones, whole, scored, plain and good enough; with the tools of its prompt, and no other
    options."""
    turns, tools = [{"role": "user", "content": "a?"}], [{"name": "add"}]
    prompts = [Prompt([], "", {}, Question(turns, {}, options)) for options in ({"tools": tools, "x": 1}, {}, {})]
    rewards = (1.0, 3.0, 2.0, 2.0, 0.5, 0.75, 0.25, 4.0, 9.0, 8.0, 0.0, 0.0)
    rows = [{"answer": str(n), "stopped": n != 1, "reward": reward} for n, reward in enumerate(rewards)]
    rows[7] |= {"failed": True}  # by one of several rewards
    plain = [n not in (8, 9) for n in range(12)]
    first, second = select_best(prompts, rows, 4, 0.75, plain)
    assert first == {"messages": [*turns, {"role": "assistant", "content": "2"}], "tools": tools, "reward": 2.0}
    assert second == {"messages": [*turns, {"role": "assistant", "content": "5"}], "reward": 0.75}


def test_an_answer_with_special_tokens_is_no_best_one(caplog):
    """Its text lacks them. Those that mark a thought are none within: the row has the thought apart."""
    keys = {"path": None, "train": None, "vocab_size": 259, "train_bytes": 1, "bos_token": None, "eos_token": None}
    vocab = train_vocab(Tokenizer(**keys), ["a"])
    prompt = Prompt([], "", {}, Question([{"role": "user", "content": "a?"}], {}))
    rows = [{"answer": text, "stopped": True, "reward": reward} for text, reward in (("b", 2.0), ("c", 1.0))]
    bos, eos, letter = (vocab.backend.token_to_id(token) for token in ("<bos>", "<eos>", "b"))
    answers = [Answer(tokens, [], [], True) for tokens in ([letter, bos, eos], [letter, eos])]
    (best,) = select_best([prompt], rows, 2, None, _find_plain(vocab, answers))
    assert best["messages"][-1]["content"] == "c"
    assert "best: 1 answers are left out" in caplog.text
    vocab.backend.add_special_tokens(["[THINK]", "[/THINK]"])
    thinking = Answer([*vocab.backend.encode("[THINK]a[/THINK]b", add_special_tokens=False).ids, eos], [], [], True)
    rows = [{"answer": "b", "thought": "a", "stopped": True, "reward": 1.0}]
    (best,) = select_best([prompt], rows, 1, None, _find_plain(vocab, [thinking]))
    assert best["messages"][-1] == {"role": "assistant", "content": "b", "reasoning_content": "a"}
    # A call of GPT-OSS, of which the text is the arguments alone.
    vocab.backend.add_special_tokens(["<|start|>", "<|channel|>", "<|message|>", "<|end|>"])
    call = vocab.backend.encode("<|channel|>commentary to=functions.f<|message|>{}", add_special_tokens=False).ids
    of_gpt_oss = replace(vocab, chat_template="<|channel|>commentary")
    assert _find_plain(of_gpt_oss, [Answer([*call, eos], [], [], True)]) == [False]


@pytest.mark.nightly
def test_sft_learns_the_best_answers(wide, tmp_path, monkeypatch):
    """The file has the first best of the whole answers to each prompt, from `best_from` on; a run of task=sft reads it."""
    monkeypatch.chdir(tmp_path)
    words = [f"checkpoint={wide}", "metric=reward", "step=4", "num_prompts=8", "reward_processes=1", "num_samples=4"]
    words += ["samples=samples.jsonl", "best=best.jsonl", "best_from=0.5", "split=train"]
    own = ["sampling=default", "sampling.stop=[a,b,c,d,e,f,g,h]"]
    evaluate(read_settings(Evaluate, words, {"overrides": [*ONE[:2], *own]}))
    drawn, best = samples(tmp_path), list(map(json.loads, Path("best.jsonl").read_text().splitlines()))
    expected = []
    for number in range(0, 32, 4):
        whole = [row for row in drawn[number : number + 4] if row["stopped"] and row["reward"] >= 0.5]
        if whole:
            row = max(whole, key=lambda row: row["reward"])
            turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]
            expected.append({"messages": turns, "reward": row["reward"]})
    assert best == expected
    assert 0 < json.loads(Path("results.json").read_text())["best_rows"] == len(best) < 8
    common = [
        word for word in TASK if not word.startswith(("task.re", "task.gr", "task=", "sampling", "data", "evaluation"))
    ]
    sft = [
        "task=sft",
        "data=jsonl",
        "data.paths=[best.jsonl]",
        "data.held_out_fraction=0",
        "evaluation.every_steps=null",
    ]
    sft += ["loading.packing=pad", "training.global_batch_size=1", "training.micro_batch_size=1"]
    run = tunix.train([*common, *ONE[:2], *sft, "training.max_steps=1", "hydra.run.dir=sft"]).folder
    assert f"jsonl: {len(best)} documents" in (run / "train.log").read_text()


def test_mistakes_of_best(wide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"checkpoint={wide}", "metric=reward", "num_prompts=4", "reward_processes=1"]
    for more, message in (
        ("best=best.jsonl step=[2,4]", "best=best.jsonl: one checkpoint answers, and step names 2; name one step"),
        ("best=no/best.jsonl", "best=no/best.jsonl: there is no folder no"),
        ("best=best.jsonl metric=loss", "best=best.jsonl needs answers with rewards, and metric=loss"),
        ("best_from=1", "best_from=1 is of the file that `best` names, and best=null"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(read_settings(Evaluate, [*words, *more.split()], {"overrides": [*ONE[:2]]}))
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_one_device_draws_and_learns_the_same(wide, tmp_path):
    """With pages in the place of slots."""
    folder = tmp_path / "run"
    words = [*TASK, *ONE, "sampling.cache=pages", "training.max_steps=2", "checkpoint.save_every_steps=null"]
    tunix.train([*words, f"hydra.run.dir={folder}"])
    assert [each["tokens"] for each in samples(folder)] == [each["tokens"] for each in samples(wide)[:32]]
    for here, there in zip(metrics(folder), metrics(wide), strict=False):
        assert here["reward"] == there["reward"]
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5, abs=1e-7)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-5)


@pytest.mark.nightly
def test_a_resumed_run_has_the_same_digits(wide):
    tunix.train([f"resume={wide}/checkpoints/2"])
    before, after = metrics(wide)[2:4], metrics(wide)[4:]
    for one, two in zip(before, after, strict=True):
        same = [name for name in one if not name.endswith(("_s", "_per_device", "tflops"))]
        assert [one[name] for name in same] == [two[name] for name in same]
    assert samples(wide)[64:] == samples(wide)[32:64]


@pytest.mark.nightly
def test_answers_are_drawn_with_the_rotations_that_learn(tmp_path):
    """LongRoPE has others above 18 tokens: rows of training have 16, and padded prompts with their answers 22."""
    rope = "{name:longrope,original_context:18,short_factors:[1,1,1,1],long_factors:[4,4,4,4],attention_factor:1}"
    words = ["training.max_steps=1", "evaluation.every_steps=null", "checkpoint.save_every_steps=null"]
    tunix.train([*TASK, *ONE, *words, f"++model.rope_scaling={rope}", f"hydra.run.dir={tmp_path}/run"])
    (line,) = metrics(tmp_path / "run")
    assert line["mismatch_max"] < 1e-5


@pytest.mark.nightly
def test_several_steps_on_a_rollout(tmp_path):
    """Two steps on one rollout, more prompts than they take, a divergence from the start, cut answers masked.

    The reference is made anew by a resumed run, with the same bits.
    """
    folder = tmp_path / "run"
    words = [
        *TASK, *ONE, "checkpoint.save_first=true", "checkpoint.max_to_keep=3",
        "task.steps_per_rollout=2", "task.oversample=1.5", "task.kl_coefficient=0.1", "task.truncated=mask",
        "task.samples_every_steps=2", "training.max_steps=4", "evaluation.every_steps=null", "optimizer.learning_rate=0.001", f"hydra.run.dir={folder}",
    ]  # fmt: skip
    tunix.train(words)
    lines, answers = metrics(folder), samples(folder)
    assert [line["ratio_max"] > 1.0001 for line in lines] == [False, True, False, True]
    assert [line["kl"] > 1e-8 for line in lines] == [False, True, True, True]
    assert [("rollout_s" in line, "reward" in line) for line in lines] == [(True, True), (False, False)] * 2
    # Also those of step 3, which are drawn before the save of step 2.
    assert all(line["step_time_s"] > line.get("rollout_s", 0) for line in lines)
    assert len(answers) == 2 * 12 * 4
    # Groups of which some answers are learnt: a cut one has no advantage.
    groups = [answers[first : first + 4] for first in range(0, len(answers), 4)]
    trained = [each for group in groups if any(one["advantage"] is not None for one in group) for each in group]
    assert 2 * 4 * 4 < len(trained) <= 2 * 8 * 4
    assert [answer["sample"] for answer in answers[::4]] == list(range(24))
    # By hand: each reward less 0.1 x (log p - log p of the reference), summed over an answer, also one that is masked.
    rewards = np.array([answer["reward"] for answer in trained])
    sampled = np.array([sum(answer["log_probabilities"]) for answer in trained])
    penalized = rewards - 0.1 * (sampled - score_answers(folder / "checkpoints" / "0", trained))
    advantages = np.array([answer["advantage"] for answer in trained], float)  # None becomes not a number
    stopped = np.array([answer["stopped"] for answer in trained])
    is_first = np.array([answer["step"] == 1 for answer in trained])
    np.testing.assert_allclose(advantages, np.where(stopped, center(penalized), np.nan), atol=1e-5)
    moved = np.abs(advantages - center(rewards))
    assert np.nanmax(moved[is_first]) < 1e-5  # of the rollout of step 1, where nothing diverges yet
    assert np.nanmax(moved[~is_first]) > 1e-4
    tunix.train([f"resume={folder}/checkpoints/2"])
    for one, two in zip(lines[2:], metrics(folder)[4:], strict=True):
        assert [one[name] for name in ("loss", "kl", "grad_norm")] == [
            two[name] for name in ("loss", "kl", "grad_norm")
        ]


def center(rewards: np.ndarray) -> np.ndarray:
    """Rewards [P x 4] less the mean of their group of four."""
    return (rewards.reshape(-1, 4) - rewards.reshape(-1, 4).mean(1, keepdims=True)).reshape(-1)


def score_answers(run: Path, answers: list[dict]) -> np.ndarray:
    """Log-probability of each answer under the model of a run, without the losses of training."""
    model = tunix.load_pretrained(run)
    assert model.vocab is not None
    encode = model.vocab.backend.encode
    prompts = [encode(answer["prompt"], add_special_tokens=False).ids for answer in answers]
    texts = [prompt + answer["tokens"] for prompt, answer in zip(prompts, answers, strict=True)]
    logits = np.asarray(model([text + [0] * (16 - len(text)) for text in texts]), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scores = []
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        scores.append(sum(log_probs[row, index - 1, text[index]] for index in range(len(prompt), len(text))))
    return np.array(scores)


def test_answers_are_placed_after_their_prompts():
    answer = Answer([7, 8, 2], [-9.0] * 3, [-0.1, -0.2, -0.3], True)
    fields = arrange_answers([[4, 5, 6]] * 2, [answer] * 2, 8, [[True] * 3, [False] * 3])
    assert fields["tokens"][0].tolist() == [4, 5, 6, 7, 8, 0, 0, 0]
    assert fields["targets"][0].tolist() == [5, 6, 7, 8, 2, 0, 0, 0]  # the stop token is learnt
    assert fields["loss_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0] * 8]
    np.testing.assert_allclose(fields["log_probs"][0], [0, 0, -0.1, -0.2, -0.3, 0, 0, 0])
    assert fields["segment_ids"][0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert fields["positions"][0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


# Four prompts with two answers each, of which a step learns from two prompts: answer n is `n, <end>` after `5, prompt`.
FOUR_GROUPS = [
    *TASK, "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", "training.global_batch_size=4",
    "training.micro_batch_size=1", "task.group_size=2", "task.oversample=2", "task.advantage=centered",
]  # fmt: skip
REWARDS = [1.0, 1.0, 0.0, 1.0, 3.0, 3.0, 1.0, 2.0]


@contextmanager
def answering(
    *words: str,
    rewards: list[float] = REWARDS,
    reference: Any = None,
    teacher: Any = None,
    start: Position = BEGINNING,
) -> Iterator[Rollouts]:
    """Rollouts of a model that gives these answers, of which the last one is cut."""
    cfg = compose([*FOUR_GROUPS, *words]).config
    mesh = build_mesh(cfg)

    def ask(_: Any, request: RolloutRequest) -> RolloutGroup:
        answers = [Answer([n, 2], [-1.0, -1.0], [-n / 10, 0.0], n < 7) for n in range(8)]
        return RolloutGroup(request.prompts, answers, ["x"] * 8, Scores({"a": rewards}, rewards, {"a": 0}, 0.0), 1.0)

    samples: Any = [Prompt([5, number], "x", {}) for number in range(99)]
    engine: Any = SimpleNamespace(mesh=mesh, ask=ask)
    shape = cfg.training.batch_shape(mesh.shape)
    with jax.set_mesh(mesh):
        yield Rollouts(cfg, shape, samples, engine, reference, start, None, teacher)


def list_learnt(batch: Batch) -> list[tuple[int, int, list[float], list[float]]]:
    """Return prompt, answer, masks and advantages of each answer in a batch."""
    fields = {name: np.asarray(leaf).reshape(-1, 16) for name, leaf in batch.items()}
    found = []
    for row, segments in enumerate(fields["segment_ids"]):
        for number in range(1, segments.max() + 1):
            tokens, targets, mask, advantages = (
                fields[name][row][segments == number].tolist()
                for name in ("tokens", "targets", "loss_mask", "advantages")
            )
            assert (tokens[0], mask[0], targets[-1]) == (5, 0, 2)
            found.append((tokens[1], targets[1], mask[1:], advantages[1:]))
    return found


def learn(*words: str, **given: Any) -> list[tuple[int, int, list[float], list[float]]]:
    with answering(*words, **given) as rollouts:
        return list_learnt(rollouts.next({"params": None})[0])


def test_batches_of_a_rollout_come_in_turn():
    """The line of a step counts the tokens of the steps before, which may have had another batch."""
    steps = "task.steps_per_rollout=2", "task.passes_per_rollout=2", "checkpoint.save_every_steps=4"
    keys = "task.oversample=1", "evaluation.every_steps=4", *steps
    with answering(*keys, start=replace(BEGINNING, step=4, next_sample=16)) as rollouts:
        found = [rollouts.next({"params": None}) for _ in range(5)]
    assert [[prompt for prompt, *_ in list_learnt(batch)][::2] for batch, _ in found] == [
        [16, 17], [18, 19], [16, 17], [18, 19], [20, 21],
    ]  # fmt: skip
    assert [numbers["tokens"] for _, numbers in found] == [64 * steps for steps in range(17, 22)]


@pytest.mark.parametrize("words", [(), ("task.answers_per_row=2",)], ids=["alone", "in shared rows"])
def test_a_step_learns_from_the_groups_that_teach(words):
    """In the order of the prompts. Rewards, and what is learnt of an answer that was cut, are as the keys say."""
    places = [(1, 2), (1, 3), (3, 6), (3, 7)]
    kl = "task.kl=advantage", "task.kl_coefficient=2"
    for more, gains in {
        (): [-0.5, 0.5, -0.5, 0.5],
        ("task.truncated=mask",): [-0.5, 0.5, -0.5, 0],
        ("task.truncated=zero",): [-0.5, 0.5, 0.5, -0.5],
        kl: [-0.4, 0.4, -0.4, 0.4],  # log q of answer n is -n / 10, and under the reference it is -n / 5
        (*kl, "task.truncated=mask"): [-0.4, 0.4, -0.4, 0],
    }.items():
        found = learn(*words, *more, reference=(lambda _, batch: -batch["targets"] / 5) if more[:2] == kl else None)
        assert [each[:2] for each in found] == places
        for (_, _, mask, advantages), gain in zip(found, gains, strict=True):
            assert mask == [gain != 0] * 2
            assert advantages == pytest.approx([gain] * 2)
    found = learn(*words, teacher=lambda batch: jnp.zeros_like(batch["log_probs"]))
    for (_, answer, _, advantages), gain in zip(found, [-0.5, 0.5, -0.5, 0.5], strict=True):
        assert advantages == pytest.approx([gain + answer / 10, gain])  # a teacher gives each token log p - log q
    found = learn(*words, rewards=[1.0] * 5 + [2.0] * 3)  # one group teaches, and the first of the others is taken
    assert [prompt for prompt, *_ in found] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("every", "of_rollout", "written"), [(3, 1, [1, 4, 7, 10]), (3, 2, [1, 3, 7, 9]), (2, 4, [1, 5, 9])]
)
def test_which_answers_are_written(every, of_rollout, written, tmp_path):
    """Those of a rollout of which one step is due: every third step of rollouts for two was every sixth."""
    file = SamplesFile(tmp_path, every, of_rollout, SimpleNamespace(writing=nullcontext, table=lambda *_: None))
    answer = Answer([5], [0.0], [0.0], True)
    rollouts = RolloutGroup([Prompt([5], "a", {})], [answer], ["b"], Scores({}, [0.0], {}, 0.0), 0.0)
    for step in range(1, 11, of_rollout):
        file.write(step, [0], rollouts, np.zeros((1, 1)))
    file.close()
    assert [answer["step"] for answer in samples(tmp_path)] == written


def test_written_answers_have_the_numbers_of_their_prompts(tmp_path):
    """Further prompts may be asked than the next ones; an answer that is not trained on has no advantage."""
    file = SamplesFile(tmp_path, 1, 1, SimpleNamespace(writing=nullcontext, table=lambda *_: None))
    answers = [Answer([number], [-1.0], [-2.0], number < 8) for number in (5, 6, 7, 8)]
    scores = Scores({"a": [0.0, 1.0, 2.0, 3.0]}, [0.0, 0.5, 1.0, 1.5], {}, 0.0)
    rollouts = RolloutGroup([Prompt([5], "x", {}), Prompt([5], "y", {})], answers, ["e", "f", "g", "h"], scores, 0.0)
    file.write(1, [3, 9], rollouts, np.array([[-1.0, 1.0], [0.5, np.nan]]))
    file.close()
    keys = "sample", "prompt", "answer", "reward", "reward_a", "advantage", "stopped", "tokens", "log_probabilities"
    assert [tuple(line[key] for key in keys) for line in samples(tmp_path)] == [
        (3, "x", "e", 0.0, 0.0, -1.0, True, [5], [-2.0]), (3, "x", "f", 0.5, 1.0, 1.0, True, [6], [-2.0]),
        (9, "y", "g", 1.0, 2.0, 0.5, True, [7], [-2.0]), (9, "y", "h", 1.5, 3.0, None, False, [8], [-2.0]),
    ]  # fmt: skip


def test_seeds_depend_on_every_part():
    assert len({derive_seed(seed, index) for seed in range(3) for index in range(100)}) == 300
    assert 0 <= derive_seed("anything") < 2**31


def test_a_stop_waits_for_the_end_of_a_rollout(monkeypatch):
    class Halfway(BatchSource):
        def can_stop(self, step: int) -> bool:
            return step % 2 == 0

    monkeypatch.setattr("tunix.processes.watchdog.stop_requested", lambda: "SIGTERM")
    cfg = compose([*TASK, *ONE]).config
    ends = [check_stop_request(Moment(cfg, Path("run"), step, {}, {}, Halfway())) for step in (3, 4)]  # type: ignore[abstract]
    assert ends[0] is None
    assert "saved after step 4" in str(ends[1])


BAD = {
    "task.group_size=3": "task.group_size=3 does not divide the 16 answers of a step",
    "sampling.temperature=0": "gives all answers of a group the same tokens",
    "sampling.top_p=0.9": "sampling.top_p=0.9 with task.max_importance=2: a filtered distribution",
    "sampling.max_new_tokens=16": "leaves no room for a prompt within training.seq_len=16",
    "model.lora.rank=2 model.lora.dropout=0.1": "set model.lora.dropout=0",
    "task.passes_per_rollout=2 training.max_steps=3": "training.max_steps=3 is within a rollout, which serves 2 steps",
    "task.passes_per_rollout=2 training.hard_stop=3": "training.hard_stop=3 is within a rollout, which serves 2 steps",
    "task.passes_per_rollout=2 checkpoint.save_at_steps=[2,5]": "checkpoint.save_at_steps=5 is within a rollout",
    "evaluation.num_samples=4": "evaluation.num_samples=4 answers are all the same",
    "task.rewards=[nothing:here]": "module nothing cannot be imported",
    "task.rewards=[]": "name a reward, or give task.teacher=RUN",
}


@pytest.mark.parametrize("words", BAD)
def test_contradictions_are_named(words):
    with pytest.raises(UserError, match=r".*") as refused:
        compose([*TASK, *ONE, *words.split()])
    assert BAD[words] in str(refused.value)


def test_what_only_the_data_tell_is_refused_before_anything_is_written(tmp_path):
    folder = tmp_path / "run"
    for words, message in (
        (["training.global_batch_size=640"], "one rollout needs 160; add data"),
        (["sampling.max_new_tokens=13"], "prompts of arithmetic have more than the 3 tokens"),
        (["sampling.stop=[nothing]"], "sampling.stop=nothing is not a token"),
    ):
        with pytest.raises(UserError, match=message):
            tunix.train([*TASK, *ONE, *words, f"hydra.run.dir={folder}"])
        assert not folder.exists()


def test_held_out_answers_have_room_behind_their_prompts():
    """Those that are held out; an episode has the longest that training has room for, because `reset` may say more."""
    cfg = compose([*TASK, "evaluation.sampling.max_new_tokens=8190"]).config
    corpus = SimpleNamespace(spread=lambda *_: [Prompt([1] * length, "", {}) for length in (3, 5)])
    for player, message in ((None, "of 5 tokens is more .*; lower it to 8187"), (True, "of 10 tokens .* to 8182")):
        with pytest.raises(
            UserError, match=f"evaluation.sampling.max_new_tokens=8190 behind a held-out prompt {message}"
        ):
            HeldOutAnswers(cfg, corpus, SimpleNamespace(player=player))


def test_a_stop_gives_up_held_out_answers(monkeypatch):
    """Their environment may take minutes, and a cluster waits seconds."""
    corpus = SimpleNamespace(spread=lambda *_: [Prompt([1], "", {})])
    engine = SimpleNamespace(player=None, ask=lambda params, request: request.between_chunks())
    monkeypatch.setattr("tunix.processes.watchdog.stop_requested", lambda: "SIGTERM")
    with pytest.raises(Stopped, match="SIGTERM: given up while held-out prompts were answered"):
        HeldOutAnswers(compose(TASK).config, corpus, engine).evaluate({})


@pytest.mark.parametrize(("missing", "cost"), [(0, 0.5), (7, 0.5), (8, math.nan)])
def test_held_out_answers_without_a_score_are_never_the_best(missing, cost):
    """0 stands for each, which is more than a reward below 0."""
    cfg = SimpleNamespace(evaluation=SimpleNamespace(num_samples=2))
    record = {"reward": -0.5, "accuracy": 0.0, "reward_errors": missing, "prompts": 4}
    assert HeldOutAnswers.cost(SimpleNamespace(cfg=cfg), record) == pytest.approx(cost, nan_ok=True)
    assert (", 8 scores are missing" in HeldOutAnswers.describe(None, record)) == (missing == 8)


def test_held_out_answers_have_their_own_ends_of_answers(tmp_path):
    """Half of the answers of training end with a letter, and nearly none of those that are held out."""
    words = f"sampling.stop=[{','.join(string.ascii_letters)}]", "evaluation.sampling.stop=[]"
    often = "evaluation.num_samples=8", "evaluation.sampling.temperature=1", "evaluation.every_steps=1"
    tunix.train([*TASK, *ONE, *words, *often, "training.max_steps=1", f"hydra.run.dir={tmp_path / 'run'}"])
    (line,), (held_out,) = metrics(tmp_path / "run"), metrics(tmp_path / "run", "held_out")
    assert line["truncated"] < 0.7 < 0.9 < held_out["truncated"]


@pytest.mark.parametrize(("words", "nearest"), [(["steps_per_rollout=4"], "3 or 6"), (["passes_per_rollout=9"], "6")])
def test_a_resume_within_a_rollout_is_refused(words, nearest):
    """Step 6 would end none; from there on every save would lie within one."""
    for fitting in (["steps_per_rollout=3"], ["steps_per_rollout=1", "passes_per_rollout=2"], words):
        keys = [f"task.{word}" for word in fitting]
        cfg = compose([*TASK, *keys, "checkpoint.save_every_steps=36", "training.max_steps=72"]).config
        if fitting is words:
            with pytest.raises(UserError, match=f"{keys[0]}.* step 6 is within one .* nearest: {nearest}$"):
                check_cycle(cfg, 6)
        else:
            check_cycle(cfg, 6)


@pytest.mark.nightly
def test_a_run_that_is_killed_and_stopped_while_answers_are_scored(wide, tmp_path, monkeypatch):
    """After kill -9 it goes on from step 2; after SIGTERM it has saved the step that was scored. No digit changes."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests")
    words = [word for word in TASK if not word.startswith("task.rewards")]
    words += [WIDE, "task.rewards=[support.own_reward:striking]", "training.max_steps=4", "hydra.run.dir=run"]
    codes = [cli(*words, cwd=tmp_path).returncode, cli("resume=run", cwd=tmp_path).returncode]
    assert codes == [-signal.SIGKILL, 75]
    assert cli_here("resume=run", cwd=tmp_path).returncode == 0  # nothing strikes it any more
    expected = {line["step"]: line for line in metrics(wide)[:4]}
    lines = metrics(tmp_path / "run")
    assert {line["step"] for line in lines} == {1, 2, 3, 4}
    for line in lines:
        for name in ("loss", "reward", "grad_norm", "entropy"):
            assert line[name] == expected[line["step"]][name], (line["step"], name)


def test_a_stop_gives_up_the_answers_that_are_being_drawn(wide, tmp_path, monkeypatch):
    """SIGTERM within the third rollout: its answers are neither finished nor scored, and step 2 is saved."""
    run, begun, folder = Engine.run, [], tmp_path / "run"

    def run_and_strike(self):
        if not self.rows:  # a rollout begins
            begun.append(self.num_working)
            assert self.final_length == 16, "training.seq_len, and not the length of a padded prompt with its answer"
            if begun == [16, 16, 16]:
                os.kill(os.getpid(), signal.SIGTERM)
        return run(self)

    monkeypatch.setattr(Engine, "run", run_and_strike)
    words = ["training.max_steps=4", "checkpoint.save_every_steps=null", "evaluation.every_steps=null"]
    with pytest.raises(Stopped, match="SIGTERM: saved after step 2; go on with resume="):
        tunix.train([*TASK, WIDE, *words, f"hydra.run.dir={folder}"])
    assert begun == [16, 16, 16]
    assert samples(folder) == samples(wide)[:32]
    assert [line["grad_norm"] for line in metrics(folder)] == [line["grad_norm"] for line in metrics(wide)[:2]]
    position = read_about(*find_storage(folder.absolute() / "checkpoints" / "2"))["position"]
    assert (position["step"], position["next_sample"]) == (2, 8)


def test_a_process_gives_its_rewards_the_columns_of_all_prompts(monkeypatch):
    """Its share of them may lack one that a reward takes."""
    given = []

    def score(*arguments: Any) -> Scores:
        given.append(arguments)
        return Scores({}, [0.0, 0.0], {}, 0.0)

    monkeypatch.setattr("tunix.processes.peers.share", lambda size: range(1, size))
    prompts = [Prompt([1], "a", {"hint": "this"}), Prompt([1], "b", {"level": 2})]
    drawn = Drawn([Answer([1], [0.0], [0.0], True)] * 4, ["0", "1", "2", "3"])
    score_together(SimpleNamespace(score=score), prompts, drawn, group_size=2)
    assert given == [(["b", "b"], ["2", "3"], {"hint": [None, None], "level": [2, 2]}, 2)]


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes_killed_and_resumed_are_one_run(tmp_path):
    """Each process scores the answers to its own prompts; after kill -9, one process goes on with the same answers."""
    words = [
        *TASK, "training.micro_batch_size=4", "training.max_steps=4", "evaluation.every_steps=null",
        "distributed.allow_idle_devices=true", "model.mesh_shape=[[2],[fsdp]]",
    ]  # fmt: skip
    tunix.train([*words, f"hydra.run.dir={tmp_path}/alone"])
    folder = tmp_path / "run"
    with Processes(*words, "hydra.run.dir=run", folder=tmp_path, count=2, PYTHONPATH=f"{ROOT}:{ROOT}/tests") as run:
        run.wait_for_file(folder / "checkpoints" / "2")
        run.wait_for_step(folder, 2)
    tunix.train([f"resume={folder}"])
    alone, resumed = samples(tmp_path / "alone"), samples(folder)[-32:]
    assert [each["tokens"] for each in resumed] == [each["tokens"] for each in alone[32:]]
    assert [each["tokens"] for each in samples(folder)[:32]] == [each["tokens"] for each in alone[:32]]
    by_step = {line["step"]: line for line in metrics(folder)}  # the newest line of a step that ran again
    for line in metrics(tmp_path / "alone"):
        assert by_step[line["step"]]["reward"] == line["reward"]
        assert by_step[line["step"]]["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-5)


@pytest.mark.nightly
def test_low_rank_updates_of_a_run_have_it_as_their_reference(wide, tmp_path):
    """model.init_from takes the run, at its newest step; the reference is the policy without its updates.

    Held-out prompts get eight answers each, drawn; cut answers have the reward 0. The answers of the first batch have no
    advantage, so the third batch is the first one that meets a changed policy.
    """
    folder = tmp_path / "run"
    words = [
        "task.kl_coefficient=0.1", "task.kl=loss", "task.truncated=zero", "model.lora.rank=2", "training.max_steps=3",
        "evaluation.every_steps=3", "evaluation.num_samples=8", "sampling@evaluation.sampling=default",
        f"model.init_from={wide}", f"hydra.run.dir={folder}",
    ]  # fmt: skip
    own = [word for word in TASK if not word.startswith("model.")]
    tunix.train([*own, *ONE, *words])
    first, second, third = metrics(folder)
    assert 0 <= first["kl"] < 1e-8 < third["kl"]
    assert max(line["mismatch_max"] for line in (first, second, third)) < 1e-5
    rewards = np.array([answer["reward"] * answer["stopped"] for answer in samples(folder)])
    np.testing.assert_allclose([answer["advantage"] for answer in samples(folder)], center(rewards), atol=1e-12)
    (held_out,) = metrics(folder, "held_out")
    assert 0 < held_out["accuracy"] <= held_out["pass@2"] <= held_out["pass@4"] <= held_out["pass@8"]
    assert held_out["pass@8"] in (0.25, 0.5, 0.75, 1)  # of four prompts
    saved = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert saved["init_from"] == f"{wide}/checkpoints/4"
    with pytest.raises(UserError, match="has low-rank updates beside its matrices; add them first"):
        compose([*own, *ONE, f"model.init_from={folder}"])
    with pytest.raises(UserError, match="model.num_layers=2, but .* says 1; leave it out"):
        compose([*own, *ONE, f"model.init_from={wide}", "model.num_layers=2"])


# Answers of 7 and fewer tokens with their prompts take two or more to a row of 32.
SHARED = [
    *TASK, "distributed.allow_idle_devices=true", "training.micro_batch_size=1", "training.seq_len=32",
    "task.divide_by=answers", "evaluation.every_steps=null", "training.max_steps=3",
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        ["model.mesh_shape=[[1],[fsdp]]"],
        ["model.mesh_shape=[[2,2,2],[fsdp,tp,cp]]"],
        ["model.mesh_shape=[[2],[pp]]", "model.num_layers=2", "training.micro_batch_size=2"],
        ["model.mesh_shape=[[2],[ep]]", experts(balance_loss=0.0, z_loss=0.0)],
        ["model.mesh_shape=[[1],[fsdp]]", "task.kl=loss", "task.kl_coefficient=0.1"],
    ],
    ids=["one", "split", "stages", "experts", "kl"],
)
def test_answers_that_share_rows_teach_the_same(tmp_path, words):
    """Three steps: fewer rows, and the loss and the gradient of answers with rows of their own."""
    lines = {}
    for number in (1, 3):
        folder = tmp_path / str(number)
        tunix.train([*SHARED, *words, f"task.answers_per_row={number}", f"hydra.run.dir={folder}"])
        lines[number] = metrics(folder)
    assert min(packed["rows_used"] for packed in lines[3]) < 16
    for alone, packed in zip(lines[1], lines[3], strict=True):
        for name in ("loss", "grad_norm", "entropy", "reward"):
            assert packed[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name


@pytest.mark.nightly
def test_a_run_whose_answers_share_rows_goes_on_to_the_digit(tmp_path):
    folder = tmp_path / "run"
    tunix.train([*SHARED, "model.mesh_shape=[[1],[fsdp]]", "task.answers_per_row=3", f"hydra.run.dir={folder}"])
    tunix.train([f"resume={folder}/checkpoints/2"])
    *_, before, after = metrics(folder)
    for name in ("step", "loss", "grad_norm", "entropy", "reward", "rows_used", "tokens"):
        assert after[name] == before[name], name


def test_rows_are_shared_by_answers_alone_and_where_microbatches_can_be_left_out(tmp_path):
    words = [*SHARED, "model.mesh_shape=[[1],[fsdp]]", "task.answers_per_row=2", f"hydra.run.dir={tmp_path}"]
    with pytest.raises(UserError, match="answers_per_row=2: a step has one microbatch.*lower training.micro_batch"):
        tunix.train([*words, "training.micro_batch_size=16", "dry_run=true"])


# Prompts that depend on earlier answers.

ADAPTIVE = [
    *TASK, *ONE, "task.rewards=[support.own_reward:some_letters]", "checkpoint.max_to_keep=9", "evaluation.every_steps=null",
    "data.below=4", "data.held_out_fraction=0",
]  # fmt: skip


def ask_in_order(folder: Path) -> list[list[int]]:
    """Samples that each step has asked."""
    steps: dict[int, list[int]] = {}
    for answer in samples(folder)[::4]:
        steps.setdefault(answer["step"], []).append(answer["sample"])
    return list(steps.values())


@pytest.fixture(scope="module")
def refilled(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("refilled") / "run"
    return tunix.train([*ADAPTIVE, "task.refill=2", "training.max_steps=4", f"hydra.run.dir={folder}"]).folder


@pytest.mark.nightly
def test_groups_without_a_signal_are_replaced(refilled):
    """By the prompts that come next, a bounded number of times; a resumed run asks the same ones."""
    run, lines, answers = refilled, metrics(refilled), samples(refilled)
    asked = ask_in_order(run)
    assert [number for step in asked for number in step] == list(range(sum(map(len, asked))))
    assert [line["refilled"] for line in lines] == [len(step) - 4 for step in asked]
    assert sum(line["refilled"] for line in lines) > 0
    for line in lines:
        own = [answer for answer in answers if answer["step"] == line["step"]]
        groups = np.array([answer["reward"] for answer in own]).reshape(-1, 4)
        signal = np.ptp(groups, axis=1) > 0
        used = np.array([answer["advantage"] is not None for answer in own]).reshape(-1, 4)
        assert (used.all(1) == used.any(1)).all()
        assert used.all(1).sum() == 4
        # Groups without a signal are used only where the tries are over.
        assert (used[:, 0] & ~signal).sum() == max(0, 4 - signal.sum())
        assert signal.sum() >= 4 or len(groups) > 4
    about = read_about(*find_storage(run.absolute() / "checkpoints" / "2"))["position"]
    assert about["next_sample"] == asked[2][0]
    assert about["num_extra"] == sum(line["refilled"] for line in lines[:2])
    tunix.train([f"resume={run}/checkpoints/2"])
    again = metrics(run)[4:]
    assert [line["loss"] for line in again] == [line["loss"] for line in lines[2:]]
    assert samples(run)[len(answers) :] == [answer for answer in answers if answer["step"] > 2]


@pytest.mark.nightly
def test_another_mesh_replaces_the_same_groups(refilled, tmp_path):
    words = [word for word in ADAPTIVE if word not in ONE]
    other = tunix.train([*words, WIDE, "task.refill=2", "training.max_steps=2", f"hydra.run.dir={tmp_path}/run"]).folder
    drawn = [each["tokens"] for each in samples(refilled) if each["step"] <= 2]
    assert [each["tokens"] for each in samples(other)] == drawn
    assert ask_in_order(other) == ask_in_order(refilled)[:2]


@pytest.mark.nightly
def test_a_curriculum_leaves_prompts_out(tmp_path):
    """Those that were solved, for some of their turns; the checkpoint keeps which, so a resumed run goes on alike."""
    words = [*ADAPTIVE, "task.curriculum.solved=0.5", "task.curriculum.turns=1", "training.max_steps=8"]
    run = tunix.train([*words, f"hydra.run.dir={tmp_path}/run"]).folder
    lines, answers = metrics(run), samples(run)
    # The order of all prompts, walked as docs/post_training.md says.
    cfg = compose(words).config
    order = Samples(load_prompts(cfg, 10).train, cfg, DataSchedule(BEGINNING, Cycle(4, 1), ()), 1)
    number, left_out = 0, set()
    for step, line in enumerate(lines, 1):
        own, asked, first = [answer for answer in answers if answer["step"] == step], [], number
        while len(asked) < 4:
            if (text := order[number].text) in left_out:
                left_out.remove(text)
            else:
                asked.append((number, text))
            number += 1
        assert [(answer["sample"], answer["prompt"]) for answer in own[::4]] == asked
        assert line["left_out"] == number - first - 4
        right = np.array([answer["reward"] >= 1 for answer in own]).reshape(4, 4).mean(1)
        left_out |= {text for (_, text), share in zip(asked, right, strict=True) if share >= 0.5}
    assert number > 32
    tunix.train([f"resume={run}/checkpoints/6"])
    assert [line["loss"] for line in metrics(run)[8:]] == [line["loss"] for line in lines[6:]]
    assert samples(run)[len(answers) :] == [answer for answer in answers if answer["step"] > 6]


def test_an_order_of_prompts():
    """What is left out comes back after its turns, at the latest when too many in a row would be left out."""
    prompts = [Prompt([], str(number % 6), {}) for number in range(3000)]
    words = [*ADAPTIVE, "task.curriculum.solved=1", "task.curriculum.unsolved=0", "task.curriculum.turns=2"]
    task = compose(words).config.task
    order = PromptOrder(prompts, task, BEGINNING)
    order.begin(1)
    taken, number = order.take(0, 4)
    assert (list(taken), number) == ([0, 1, 2, 3], 4)
    order.note(list(taken.values()), np.array([[1, 1], [0, 1], [0, 0], [1, 0.5]]))  # 0 and 2 are left out twice
    order.end(1, range(4), number)
    order.begin(2)
    taken, number = order.take(number, 4)
    assert (list(taken), number, order.num_left_out) == ([4, 5, 7, 9], 10, 2)
    order.end(2, range(4, 8), number)
    position = order.complete(Position(2, 8, "", ""), 3)
    assert (position.next_sample, position.num_extra, position.num_samples) == (10, 2, 8)
    assert (order.ranges[2], order.complete(Position(1, 4, "", ""), 2).next_sample) == (range(4, 10), 4)
    again = PromptOrder(prompts, task, position)
    for each, first in ((order, 8), (again, 10)):  # a resumed run plans from where it begins
        each.begin(3)
        taken, number = each.take(10, 5)
        assert (list(taken), number) == ([10, 11, 13, 15, 16], 17)
        each.end(3, range(first, first + 5), number)
    rest = order.complete(Position(3, 13, "", ""), 4), again.complete(replace(position, step=3, next_sample=15), 4)
    assert [(end.next_sample, end.num_extra, end.num_samples) for end in rest] == [(17, 4, 13)] * 2
    again.turns_left = {_digest(prompt): 1000 for prompt in prompts[:6]}
    assert list(again.take(0, 2)[0]) == [200, 201]


@pytest.mark.parametrize("differing", ["images", "columns"])
def test_prompts_of_one_text_are_left_out_each_by_itself(differing):
    """Where images differ, or the columns that an environment begins with."""
    prompts = [
        Prompt(
            [],
            "how many?",
            {"level": n if differing == "columns" else 0},
            images=Images(np.full(4, n if differing == "images" else 0), None, None),
        )
        for n in range(4)
    ]
    order = PromptOrder(prompts, compose([*ADAPTIVE, "task.curriculum.solved=1"]).config.task, BEGINNING)
    order.note(prompts[:1], np.array([[1, 1]]))
    assert list(order.take(0, 3)[0]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("task.refill=1 task.staleness=1", "task.refill=1 chooses prompts by answers that rollouts ahead do not have"),
        ("task.curriculum.solved=1 task.staleness=1", "task.curriculum.solved=1.0 chooses prompts by answers"),
        ("task.refill=1 training.num_epochs=2", "training.num_epochs=2: task.refill=1 reads more prompts than"),
        ("task.refill=-1", "task.refill=-1: expected a number of at least 0"),
        ("task.curriculum.unsolved=1", "task.curriculum.unsolved=1: expected a number below 1"),
        ("task.curriculum.solvd=1", "did you mean task.curriculum.solved"),
        (
            "task.curriculum.solved=0.5 task.curriculum.unsolved=0.5",
            "task.curriculum.unsolved=0.5 and task.curriculum.solved=0.5 leave every prompt out; give a smaller",
        ),
    ],
)
def test_mistakes_of_adaptive_prompts(words, message):
    with pytest.raises(UserError) as error:
        compose([*TASK, *words.split()])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
