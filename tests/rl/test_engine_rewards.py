"""Rewards that a run computes itself: a reward model, and the punishment of long answers."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support.harness import ROOT, metrics
from support.rollouts import ONE, TASK

import tunix
from tunix.base.errors import UserError
from tunix.config import Evaluate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.config.pretrained_config import check_gives_reward
from tunix.config.rewards import ModelTerm
from tunix.data.documents import Question
from tunix.data.prompts import Prompt
from tunix.inference.engine import Answer
from tunix.rl.engine_rewards import AnswersToScore, EngineRewards, Found, score_length
from tunix.rl.episodes import Drawn, Episode, Played
from tunix.rl.scoring import Scores

CHAT = 'task.chat_template="{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"'


def test_the_punishment_of_long_answers_is_that_of_dapo():
    """Equation 13 of arXiv:2503.14476 with answers of at most 10 tokens and a buffer of 4."""
    lengths = [1, 6, 7, 8, 10]
    assert score_length(4, AnswersToScore([], [], lengths, 10)).scores == [0, 0, -0.25, -0.5, -1]


def test_terms_of_the_run_join_those_of_functions():
    """In the order of task.rewards, with its environment last; an episode that has failed counts 0, and nan is an error."""
    cfg = compose([*TASK, "task.rewards=[{function: overlong, buffer: 4, weight: 2}, length]"]).config
    rewards = EngineRewards(cfg.task.rewards, {}, "zero", 10, cfg)
    given = Scores(
        {"length": [0.5] * 3, "environment": [1.0, 0.0, 1.0]}, [1.5, 0.0, 1.5], {"length": 0, "environment": 1}, 0.1,
        failed=[False, True, False],
    )  # fmt: skip
    answers = [Answer([1] * 7, [0.0] * 7, [0.0] * 7, True)] * 3
    episodes = [Episode(0, None, 0), Episode(1, None, 0, problem="late"), Episode(2, None, 0)]
    prompts, drawn = [Prompt([], "", {})] * 3, Drawn(answers, [""] * 3)
    played = drawn._replace(played=Played(episodes, 0.0, 0, cfg.task))
    scores = rewards.add(given, prompts, played, 8)
    assert list(scores.values) == ["overlong", "length", "environment"]
    assert (scores.values["overlong"], scores.total) == ([-0.75] * 3, [0.0, 0.0, 0.0])
    assert rewards.add(given, prompts, drawn, 12).total == [1.5, 0.0, 1.5]  # an evaluation may have longer answers
    rewards.scores = [lambda answered: Found([1.0, float("nan"), float("-inf")])]
    scores = rewards.add(given, prompts, drawn, 8)
    assert (scores.values["overlong"], scores.errors["overlong"], scores.total) == ([1.0, 0.0, 0.0], 2, [3.5, 0.0, 1.5])
    assert scores.failed == [False, True, True]
    rewards.errors = "stop"
    with pytest.raises(UserError, match="rewards: overlong fails: returned nan for an answer"):
        rewards.add(given, prompts, drawn, 8)
    lengths = {"sampling.max_new_tokens": 8, "evaluation.sampling.max_new_tokens": 3}
    with pytest.raises(UserError, match=r"buffer=4 of overlong is longer than an answer \(evaluation.sampling.max_new"):
        EngineRewards(cfg.task.rewards, lengths, "zero", 10, cfg)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ("[{function: overlong}]", "the reward overlong needs buffer"),
        ("[model]", "the reward model needs path"),
        ("[{function: exact_match, path: RUN}]", "path=RUN is of the reward model, not of exact_match"),
        ("[{function: overlong, buffer: 0}]", "task.rewards.0.buffer=0"),
        ("[{function: judge, model: small}]", "the reward judge needs url"),
        ("[{function: judge, model: small, url: 'ftp://a/v1'}]", "task.rewards.0.url=ftp://a/v1: expected an address"),
        ("[{function: judge, model: small, url: 'http://a:secret@b/v1'}]", "leave the password out"),
        (
            "[{function: exact_match, wieght: 2}]",
            "unknown key wieght of the reward exact_match; its keys are function, ",
        ),
        ("[exact_match, {function: length, name: exact_match}]", "exact_match stands there twice"),
        ("[{weight: 2}]", "the reward None needs function"),
        ("[exact_mach]", "did you mean exact_match?"),
        *(
            (f"[{{function: length, name: {name}}}]", f"a reward named {name} would hide the run's own reward_{name}")
            for name in ("environment", "errors", "s")
        ),
    ],
)
def test_mistakes_of_terms(terms, message):
    with pytest.raises(UserError) as error:
        compose([*TASK, f"task.rewards={terms}"])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_saved_reward_may_have_keys_of_others():
    """Which were null for every reward once."""
    (term,) = compose(
        [*TASK, "task.rewards=[{function: overlong, buffer: 3, path: null, weight: 2}]"]
    ).config.task.rewards
    assert str(term) == "{function:overlong,weight:2.0,name:null,buffer:3}"


@pytest.mark.parametrize(
    ("has_images", "message"),
    [(False, "a model reads turns, and data=tokens keeps the tokens"), (True, "a model reads texts alone, and prompts have images")],
)  # fmt: skip
def test_what_a_reward_model_cannot_read_is_refused_at_the_start(has_images, message):
    """Also where the first prompt has no image, and a later one has."""
    rewards = EngineRewards.__new__(EngineRewards)
    model = SimpleNamespace(encode=lambda prompts, answers: [[1]])
    rewards.models, rewards.judges = [("x", model)], []
    question = Question([{"role": "user", "content": "a?"}], {})
    rewards.try_out(Prompt([], "", {}, question), False)
    with pytest.raises(UserError, match=f"task.rewards: {message}"):
        rewards.try_out(Prompt([], "", {}, question if has_images else None), has_images)
    model.encode = lambda prompts, answers: ["task.chat_template refuses it"]
    with pytest.raises(UserError, match="path=x cannot read the first prompt: task.chat_template refuses it"):
        rewards.try_out(Prompt([], "", {}, question), False)


def test_a_reward_model_that_does_not_fit_the_mesh_is_named():
    """The model that answers may have the experts that it lacks."""
    cfg, path = compose([*TASK, "model.mesh_shape=[[2],[ep]]"]).config, ROOT / "tests/models/parity/llama"
    term = ModelTerm.model_construct(function="model", path=str(path), name=None)
    with pytest.raises(UserError, match=f"task.rewards: path={path}: mesh axis ep=2 splits experts"):
        EngineRewards([term], {}, "zero", 10, cfg)


@pytest.mark.nightly
def test_a_run_learns_from_a_reward_model_and_resumes(tmp_path, monkeypatch):
    """The rewards are the scores of the model for question and answer; a resumed run has the same digits."""
    monkeypatch.chdir(tmp_path)
    of_pairs = ["data.wrong_share=0.5", "loading.packing=pad"]
    common = [word for word in TASK if not word.startswith(("task", "sampling", "evaluation"))]
    reward = ["task=reward", *of_pairs, "training.max_steps=2", "evaluation.sample_tokens=0", "hydra.run.dir=reward"]
    tunix.train([*common, *ONE, CHAT, *reward])
    terms = "task.rewards=[{function: model, path: reward, weight: 2}, {function: overlong, buffer: 3}]"
    run = tunix.train([*TASK, *ONE, CHAT, terms, "training.max_steps=4", "hydra.run.dir=run"]).folder
    assert "checkpoints/2" in (run / "config.yaml").read_text()  # the checkpoint of the reward model, by its step
    lines = metrics(run)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    model = tunix.load_pretrained("reward")
    eos = model.vocab.eos_token
    model.vocab.backend.encode_special_tokens = False
    rows = [
        model.vocab.backend.encode(f"{each['prompt'].removesuffix(eos)}{eos}{each['answer']}{eos}").ids
        for each in samples[:8]
    ]
    np.testing.assert_allclose([each["reward_model"] for each in samples[:8]], model.score(rows)[:, 0], atol=1e-5)
    for each in samples:
        assert each["reward"] == pytest.approx(2 * each["reward_model"] + each["reward_overlong"], abs=1e-9)
        assert each["reward_overlong"] == pytest.approx(-max(0, len(each["tokens"]) - 3) / 3)
    tunix.train(["resume=run/checkpoints/2"])
    again = metrics(run)[4:]
    assert [line["loss"] for line in again] == [line["loss"] for line in lines[2:]]
    assert [line["reward_model"] for line in again] == [line["reward_model"] for line in lines[2:]]


def test_a_language_model_is_no_reward(hf_dir):
    terms = f"task.rewards=[{{function: model, path: '{hf_dir}'}}]"
    with pytest.raises(UserError, match="gives logits, not one number; train one with task=reward"):
        compose([*TASK, terms])
    model = compose([]).config.model
    with pytest.raises(UserError, match="^the model gives bad, good, not one number; train one with task=reward$"):
        check_gives_reward(model.model_copy(update={"labels": ("bad", "good")}))
    check_gives_reward(model.model_copy(update={"labels": ("reward",)}))


@pytest.fixture(scope="module")
def reward_dir(hf_dir, tmp_path_factory):
    """The folder of a reward model, as transformers writes one."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    shutil.copytree(hf_dir, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for path in hf_dir.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            tensors |= {
                name: file.get_tensor(name).astype(np.float32)
                for name in sorted(file.keys())
                if name != "lm_head.weight"
            }
    head = np.random.default_rng(0).normal(size=(1, 32)).astype(np.float32)
    save_file(tensors | {"score.weight": head}, folder / "model.safetensors")
    config = json.loads((hf_dir / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "reward"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_answer_is_read_by_the_template_of_the_reward_model(reward_dir):
    """Also where answers are scored a few at a time; a prompt that is too long has no score."""
    cfg = compose([*TASK, f"task.rewards=[{{function: model, path: {reward_dir}}}]"]).config
    terms = read_settings(
        Evaluate, ["checkpoint=x", "metric=reward", f"rewards=[{{function: model, path: {reward_dir}, weight: 3}}]"]
    ).rewards
    rewards = EngineRewards(terms, {}, "zero", 10, cfg)
    questions = [Question([{"role": "user", "content": text}], {}) for text in ("a few", "words " * 60)]
    prompts = [Prompt([], "", {}, question) for question in questions]
    texts = ["merged", "to be", "words", "few"]
    answers = [Answer([1, 2], [0.0, 0.0], [0.0, 0.0], True)] * 4
    none = Scores({"length": [1.0] * 4}, [0.5] * 4, {"length": 0}, 0.1, failed=[False] * 4)
    scores = rewards.add(none, prompts, Drawn(answers, texts), 10)
    model = tunix.load_pretrained(reward_dir)
    rows = [model.tokenizer.encode(f"<bos>user: a few<eos><bos>assistant: {text}<eos>").ids for text in texts[:2]]
    np.testing.assert_allclose(scores.values["model"], [*model.score(rows)[:, 0], 0, 0], atol=1e-4)
    np.testing.assert_allclose(scores.total, 0.5 + 3 * np.array(scores.values["model"]))
    assert scores.errors == {"length": 0, "model": 2}
    # An answer that the template of the reward model refuses has no score, and ends no run: Qwen 3's </think>.
    (score,) = (score.args[0] for score in rewards.scores)
    refusing = "{{ raise_exception('thoughts') if '</think>' in messages[-1].content }}"
    score.vocab = dataclasses.replace(score.vocab, chat_template=refusing + score.vocab.chat_template)
    texts[1] = "be</think>"
    again = rewards.add(none, prompts, Drawn(answers, texts), 10)
    np.testing.assert_allclose(again.values["model"], [scores.values["model"][0], 0, 0, 0], atol=1e-5)
    assert again.errors == {"length": 0, "model": 3}
    # Nor has one that does not follow what asks for it: the template may show another text than the answer's.
    model_template = score.vocab.chat_template.removeprefix(refusing)
    score.vocab = dataclasses.replace(
        score.vocab, chat_template=model_template + "{{ '<answer>' if add_generation_prompt }}"
    )
    assert rewards.add(none, prompts, Drawn(answers, texts), 10).errors == {"length": 0, "model": 4}
    with pytest.raises(
        UserError, match="rewards: model fails: it has .* tokens with its prompt, more than model.context_"
    ):
        EngineRewards(terms, {}, "stop", 10, cfg).add(none, prompts, Drawn(answers, texts), 10)
