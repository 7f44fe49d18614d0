"""Conversations and low-rank updates together, from a Hugging Face directory; and what they are measured to be."""

import csv
import json
import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import write_corpus
from omegaconf import OmegaConf
from support.extending import my_parts
from support.harness import ONE_LAYER, RUN, batch, cli, metrics, program

import tunix
from tunix.base.errors import UserError
from tunix.config import Evaluate, Export, Generate
from tunix.config.batch import count_parts
from tunix.config.command_line import read_settings, run_command
from tunix.config.compose import compose, to_yaml
from tunix.data.dataset import load_corpus
from tunix.data.tokenizer import read_backend
from tunix.evaluate import evaluate, make_config
from tunix.export import export
from tunix.generate import Prompt, Speaker
from tunix.inference.pretrained import check_init_from, load_init_from, load_pretrained
from tunix.models.layers import named
from tunix.rl.evaluation import estimate_pass
from tunix.sharding.arrays import to_global
from tunix.sharding.table import axis_names
from tunix.training.choices import build_mesh
from tunix.training.loss import next_token_loss
from tunix.training.train_spec import assemble

LORA = ["model.lora.rank=4", "model.lora.dropout=0.2", "optimizer.learning_rate=2e-2"]
SFT = [
    "task=sft", "data=conversations_csv", "data.paths=[talk.csv]", "data.held_out_fraction=0.2", "loading.packing=pad",
    "training.seq_len=64", "training.loss_chunk_size=64", "training.micro_batch_size=2", "training.mixed_precision=fp32",
    "training.max_steps=30", "evaluation.every_steps=10", "evaluation.sample_tokens=0", "model.mesh_shape=[[2],[fsdp]]",
    "distributed.allow_idle_devices=true", "hydra.run.dir=run", "checkpoint.save_every_steps=15",
]  # fmt: skip

NUMBERS = ("loss", "perplexity", "bits_per_byte", "eval_tokens")


def write_talk(folder: Path) -> None:
    with (folder / "talk.csv").open("w", newline="") as file:
        rows = [("Be brief.", f"{n}: a few words?", "merged") for n in range(60)]
        csv.writer(file).writerows([("system_prompt", "user_prompt", "prediction"), *rows])


@pytest.fixture(scope="session")
def tuned(hf_dir, tmp_path_factory):
    """A run with low-rank updates on conversations that all have one answer."""
    folder = tmp_path_factory.mktemp("tuned")
    write_talk(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, tunix.train([f"model.init_from={hf_dir}", *SFT, *LORA])


def test_the_base_stays_and_the_answers_are_learnt(tuned, hf_dir):
    _, result = tuned
    held_out = [line["loss"] for line in metrics(result.folder, "held_out")]
    assert held_out == sorted(held_out, reverse=True)
    assert held_out[-1] < metrics(result.folder)[0]["loss"] / 2
    before, after = tunix.load_pretrained(hf_dir), tunix.load_pretrained(result.folder)
    trained = dict(named(after.params))
    for name, weight in named(before.params):
        assert np.array_equal(np.asarray(weight), np.asarray(trained[name])), name
    assert any(".lora." in name for name in trained)


def test_an_adapter_goes_on(tuned, hf_dir, monkeypatch, capsys):
    """A run from an export begins with the weights of the run that was exported; the export is measured like the run."""
    folder, result = tuned
    monkeypatch.chdir(folder)
    export(read_settings(Export, ["checkpoint=run", "output=adapter"]))
    cfg = compose([f"model.init_from={hf_dir}", "model.init_adapter=adapter", *SFT]).config
    assert (cfg.model.lora.rank, cfg.model.lora.targets) == (4, "attention|mlp")
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        built = assemble(cfg, mesh)
        check_init_from(cfg, built.arch)
        params = built.new_params(1, load_init_from(built, mesh))
    trained = dict(named(tunix.load_pretrained("run").params))
    for name, weight in named(params):
        assert np.array_equal(np.asarray(weight), np.asarray(trained[name])), name
    base = [f"checkpoint={hf_dir}", *(word for word in SFT if not word.startswith("hydra"))]
    code, error, numbers = command(monkeypatch, capsys, *base, "model.init_adapter=adapter")
    assert code == 0, error
    assert numbers["loss"] == pytest.approx(result.held_out["loss"], rel=1e-5)
    answers = ["metric=exact_match", "max_new_tokens=4", "num_prompts=4"]
    code, error, numbers = command(monkeypatch, capsys, *base, "model.init_adapter=adapter", *answers)
    assert (code, numbers["exact_match"]) == (0, 1.0), error
    code, error, _ = command(monkeypatch, capsys, *base, "model.lora.rank=4")
    assert code == 2
    assert "has no low-rank updates; leave it out, or give model.init_adapter=ADAPTER" in error


def test_a_run_is_asked_as_it_was_trained(tuned, hf_dir, tmp_path):
    """Its answers have ended at its own tokens, and its template had variables."""
    run = shutil.copytree(tuned[1].folder, tmp_path / "run")
    saved = OmegaConf.load(run / "config.yaml")
    saved.task.chat_template_kwargs, saved.sampling.stop = {"mood": "calm "}, [read_backend(hf_dir).id_to_token(40)]
    OmegaConf.save(saved, run / "config.yaml")
    model = load_pretrained(run)
    assert 40 in model.find_stop_ids()
    for words, mood in ((), "calm "), (["chat_template_kwargs={mood: 'merged '}"], "merged "):
        asked = [f"checkpoint={run}", "chat=true", "chat_template='{{ mood }}{{ messages[0].content }}'", *words]
        speaker = Speaker(model, read_settings(Generate, asked))
        assert speaker._encode(Prompt([{"role": "user", "content": "a"}]))[0] == model.encode_rendered(f"{mood}a")


def test_the_loss_is_of_answers_alone_in_the_words_of_the_folder(tuned, hf_dir, monkeypatch):
    folder, _ = tuned
    monkeypatch.chdir(folder)
    corpus = load_corpus(compose([f"model.init_from={hf_dir}", *SFT]).config)
    (sequences,) = corpus.train.values()
    learnt = {corpus.tokenizer.decode(row["targets"][row["loss_mask"] > 0], skip_special_tokens=False)
              for row in map(sequences.__getitem__, range(len(sequences)))}  # fmt: skip
    assert learnt == {" merged<eos>"}
    assert corpus.tokenizer.to_str() == tunix.load_pretrained(hf_dir).tokenizer.to_str()


@pytest.mark.nightly
def test_the_experiment(tmp_path):
    """Shortened: its held-out loss falls."""
    words = ["training.max_steps=12", "evaluation.every_steps=4", "hydra.run.dir=run"]
    # A model of real size: its steps take less time optimized than the compiler needs for that.
    done = cli("+experiment=sft_lora", *words, cwd=tmp_path, devices=1, optimized=True)
    assert done.returncode == 0, done.stderr
    held_out = [line["loss"] for line in metrics(tmp_path / "run", "held_out")]
    assert held_out == sorted(held_out, reverse=True)
    assert held_out[-1] < held_out[0] - 0.2


def test_pissa_of_a_rank_above_a_side_of_a_matrix():
    """All singular values are then in the update: 16 of keys, whose rank is asked to be 24."""
    words = ["model.lora.rank=24", "model.lora.init=pissa", "model.lora.targets=attention.k", *ONE_LAYER]
    small = program(*words, "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", fresh=True)
    with jax.set_mesh(small.mesh):
        keys = jax.tree.map(np.asarray, small.built.new_params(0)["blocks"]["attention"]["k"])
    a, b = keys["lora"]["a"][0], keys["lora"]["b"][0]  # [D, r], [r, K, H]
    assert (a[:, 16:] == 0).all()
    np.testing.assert_allclose(np.tensordot(a, b, 1) * small.cfg.model.lora.scale, keys["w"][0], atol=1e-5)


@pytest.mark.nightly
def test_dropout_is_of_training_alone():
    small = program("model.lora.rank=2", "model.lora.dropout=0.5", "model.mesh_shape=[[1],[fsdp]]",
                    "distributed.allow_idle_devices=true")  # fmt: skip
    without = program("model.lora.rank=2", "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true")
    with jax.set_mesh(small.mesh):
        params = jax.tree.map(lambda leaf: leaf + 0.1, small.state["params"])  # the second factors are 0 at first
        rows = jax.tree.map(lambda leaf: leaf[0], to_global(batch(), small.mesh))

        @jax.jit
        def losses(params):
            return [
                next_token_loss(each.arch.module(params), rows, seed, chunk_size=16, z_loss=0.0).objective
                for each, seed in ((small, None), (without, None), (without, 0), (small, 0), (small, 1))
            ]

        evaluated, plain, seed_without_dropout, first, second = map(float, losses(params))
    assert evaluated == plain == seed_without_dropout
    assert len({evaluated, first, second}) == 3


def command(monkeypatch, capsys, *words):
    """Exit code and error of the command line, and what it wrote."""
    monkeypatch.setattr(sys, "argv", ["evaluate", *words])
    monkeypatch.setattr(logging, "raiseExceptions", False)  # a run of this process logs to a stream of an earlier test
    code, path = run_command(Evaluate, evaluate), "results.json"
    said = capsys.readouterr()
    return code, said.err, json.load(open(path)) if code == 0 else said.out


@pytest.mark.nightly
def test_a_tuned_run(tuned, hf_dir, tmp_path, monkeypatch, capsys):
    folder, result = tuned
    monkeypatch.chdir(folder)
    code, _, numbers = command(monkeypatch, capsys, "checkpoint=run")
    assert code == 0
    assert {name: numbers[name] for name in NUMBERS} == {name: result.held_out[name] for name in NUMBERS}

    (folder / "my_parts.py").write_text(my_parts())
    code, _, numbers = command(
        monkeypatch, capsys, "checkpoint=run", "metric=my_parts:shared_words", "max_new_tokens=4", "reward_processes=1"
    )
    num_held_out = numbers["prompts"]
    assert (code, numbers["reward"]) == (0, 1.0)
    (folder / "other.csv").write_text(
        "system_prompt,user_prompt,prediction\n"
        + "Be brief.,1: a few words?,merged\nBe brief.,2: a few words?,no\n" * 9
    )
    other = ["data.paths=[other.csv]", "split=all", "metric=exact_match", "max_new_tokens=4", "num_prompts=12"]
    code, _, numbers = command(monkeypatch, capsys, "checkpoint=run", *other)
    assert (code, numbers["exact_match"], numbers["prompts"]) == (0, 0.5, 12)
    assert 0 < num_held_out < 60


@pytest.mark.nightly
def test_several_answers_to_each_prompt(tuned, monkeypatch, capsys):
    folder, _ = tuned
    monkeypatch.chdir(folder)
    sampled = ["data.paths=[talk.csv]", "num_samples=5", "temperature=1", "num_prompts=8", "metric=exact_match"]
    code, _, numbers = command(monkeypatch, capsys, "checkpoint=run", "max_new_tokens=4", *sampled)
    assert code == 0
    assert 0 < numbers["exact_match"] < numbers["pass@2"] < numbers["pass@4"] <= 1
    assert numbers["exact_match"] == numbers["accuracy"] == numbers["reward"] < numbers["best_of_5"]


@pytest.mark.nightly
def test_a_sweep_over_checkpoints(tuned, monkeypatch, capsys):
    folder, result = tuned
    monkeypatch.chdir(folder)
    code, _, numbers = command(monkeypatch, capsys, "checkpoint=run", "step=all")
    assert (code, [each["step"] for each in numbers["steps"]]) == (0, [15, 30])
    assert [each["loss"] for each in numbers["steps"]][1] == result.held_out["loss"] < numbers["steps"][0]["loss"]

    rewards = "rewards=[exact_match,{function: length, weight: 100}]"
    words = ["metric=reward", rewards, "max_new_tokens=4", "num_prompts=5", "step=[30,15]"]
    code, _, numbers = command(monkeypatch, capsys, "checkpoint=run", *words, "samples=samples.jsonl")
    last = numbers["steps"][0]
    length = -len(" merged") / 1000
    assert (code, last["step"], last["prompts"]) == (0, 30, 5)
    assert (last["accuracy"], last["reward_exact_match"], last["truncated"], last["reward_errors"]) == (1, 1, 0, 0)
    assert last["reward_length"] == pytest.approx(length)
    assert last["reward"] == pytest.approx(1 + 100 * length)
    assert last["answer_tokens"] == 2  # the word and the end
    lines = [json.loads(line) for line in Path("samples.jsonl").read_text().splitlines()]
    assert [Path(line["checkpoint"]).name for line in lines] == ["30"] * 5 + ["15"] * 5
    assert "a few words?" in lines[0]["prompt"]
    assert (lines[0]["answer"], lines[0]["stopped"], lines[0]["num_tokens"]) == (" merged", True, 2)
    code, _, numbers = command(monkeypatch, capsys, "checkpoint=run", "step=15")
    assert (numbers["step"], "steps" in numbers) == (15, False)


def test_a_hugging_face_directory(tuned, hf_dir, monkeypatch, capsys):
    """The base of the run: worse than the run at what the run has learnt."""
    folder, result = tuned
    monkeypatch.chdir(folder)
    words = ["task=sft", "data=conversations_csv", "data.paths=[talk.csv]", "data.held_out_fraction=0.2",
             "loading.packing=pad", "training.seq_len=64", "training.loss_chunk_size=64", "model.mesh_shape=[[1],[tp]]",
             "distributed.allow_idle_devices=true"]  # fmt: skip
    code, _, numbers = command(monkeypatch, capsys, f"checkpoint={hf_dir}", *words)
    assert code == 0
    assert numbers["eval_tokens"] == result.held_out["eval_tokens"]
    assert numbers["loss"] > result.held_out["loss"] + 1


@pytest.mark.nightly
def test_a_run_with_a_tokenizer_of_its_own_on_other_data(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*RUN, *ONE_LAYER, "data=text", f"data.paths=[{corpus}]", "hydra.run.dir=run", "evaluation.sample_tokens=0"]
    result = tunix.train([*words, "checkpoint.save_every_steps=null"])
    code, _, numbers = command(monkeypatch, capsys, "checkpoint=run")
    assert (code, numbers["loss"]) == (0, result.held_out["loss"])
    write_corpus(tmp_path / "other", 6, seed=1)
    code, _, numbers = command(monkeypatch, capsys, "checkpoint=run", "data.paths=[other]", "split=all")
    assert (code, numbers["split"]) == (0, "all")
    assert numbers["loss"] > result.held_out["loss"]


@pytest.mark.nightly
def test_a_new_model_keeps_the_tokenizer_and_template_that_it_learnt_with(hf_dir, tmp_path, monkeypatch):
    """Answers, and leaves as Hugging Face's files, with the tokens and the template of its training."""
    monkeypatch.chdir(tmp_path)
    write_talk(tmp_path)
    shutil.copytree(hf_dir, "words", ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    Path("own.jinja").write_text("{% for m in messages %}<bos>({{ m.role }}) {{ m.content }}<eos>{% endfor %}"
                                 "{% if add_generation_prompt %}<bos>(assistant) {% endif %}")  # fmt: skip
    words = [
        *RUN,
        *ONE_LAYER,
        *SFT,
        "model.vocab_size=384",
        "tokenizer.path=words",
        "task.chat_template=own.jinja",
        "training.max_steps=2",
    ]
    tunix.train([*words, "evaluation.every_steps=null"])
    shutil.rmtree("words")
    assert export(read_settings(Export, ["checkpoint=run", "output=out"]))
    info = json.loads(Path("out/tokenizer_config.json").read_text())
    assert (info["bos_token"], info["eos_token"], info["chat_template"]) == (
        "<bos>",
        "<eos>",
        Path("own.jinja").read_text(),
    )
    config = json.loads(Path("out/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    prompts = {}
    for source in ("run", "out"):
        speaker = Speaker(load_pretrained(source), read_settings(Generate, [f"checkpoint={source}", "chat=true"]))
        assert speaker.sampling.stop == (2,)
        prompts[source], _ = speaker._encode(Prompt([{"role": "user", "content": "hi"}]))
        assert speaker.tokenizer.decode(prompts[source], False) == "<bos>(user) hi<eos><bos>(assistant) "
    assert prompts["run"] == prompts["out"]
    assert prompts["run"][0] == 1


@pytest.mark.nightly
def test_an_adapter_of_a_run_that_began_with_a_run(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*RUN, "data=text", f"data.paths=[{corpus}]", "training.max_steps=1", "evaluation.every_steps=null"]
    tunix.train([*words, "hydra.run.dir=first"])
    tunix.train([*words, "model=pretrained", "model.init_from=first", "model.lora.rank=2", "hydra.run.dir=second"])
    export(read_settings(Export, ["checkpoint=second", "output=out"]))
    assert Path("out/adapter_config.json").is_file()


@pytest.mark.nightly
def test_a_model_that_its_family_cannot_say_is_not_written(corpus, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    words = [*RUN, "data=text", f"data.paths=[{corpus}]", "model.mlp=gated_silu", "training.max_steps=1"]
    tunix.train([*words, "hydra.run.dir=run", "evaluation.every_steps=null"])
    assert (
        "cannot write this model as a gemma3: model.mlp={kind:gated,activation:silu}"
        in Path("run/train.log").read_text()
    )
    with pytest.raises(
        UserError, match=r"model.mlp={kind:gated,activation:silu} \(a gemma3 has {kind:gated,activation:gelu}\)"
    ):
        export(read_settings(Export, ["checkpoint=run", "output=out"]))
    assert not Path("out").exists()


def test_a_task_that_the_words_choose_takes_the_length_of_the_command(hf_dir):
    """The longest answer of a rollout, 512 tokens, would leave no room for a prompt."""
    given = {"checkpoint": str(hf_dir), "overrides": ["task=grpo", "data=arithmetic", "training.seq_len=12"]}
    settings = read_settings(Evaluate, ["checkpoint=given", "metric=reward", "max_new_tokens=4"], given)
    assert make_config(settings).sampling.max_new_tokens == 4


def test_the_microbatch_of_an_evaluation_has_no_others_to_sum_gradients_with(hf_dir):
    """As the saved config of a run may say; an evaluation has no gradients."""
    words = ["training.seq_len=12", "training.gradient_accumulation_steps=4", "training.sync_gradients_every=2"]
    settings = read_settings(Evaluate, ["checkpoint=given"], {"checkpoint": str(hf_dir), "overrides": words})
    shape = make_config(settings).training.batch_shape(dict.fromkeys(axis_names(), 1))
    assert shape.num_microbatches == 1


def test_the_batch_of_a_run_need_not_fit_the_devices_that_measure_it(tmp_path):
    words = ["training.global_batch_size=4", "training.batch_stages=[{until_step: 2, global_batch_size: 2}]"]
    (tmp_path / "config.yaml").write_text(to_yaml(compose([*words, "training.micro_batch_size=1"]).config))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    others = ["training.micro_batch_size=8", 'model.mesh_shape=[[8],["fsdp"]]']
    settings = read_settings(Evaluate, ["checkpoint=given"], {"checkpoint": str(tmp_path), "overrides": others})
    assert make_config(settings).training.batch_shape(dict.fromkeys(axis_names(), 1) | {"fsdp": 8}).num_sequences == 64
    typed = {"checkpoint": str(tmp_path), "overrides": [*others, "training.global_batch_size=4"]}
    with pytest.raises(UserError, match="training.global_batch_size=4 is not divisible by 64"):
        make_config(read_settings(Evaluate, ["checkpoint=given"], typed))


def test_the_parts_of_a_microbatch_that_a_run_chose_are_not_those_of_an_evaluation(hf_dir):
    """Stages split the one sequence of an evaluation as it is, not into as many parts as the run's microbatch."""
    words = ["training.seq_len=12", "training.micro_batch_size=auto", "training.global_batch_size=8"]
    words += ["training.pipeline_microbatches=6", 'model.mesh_shape=[[3],["pp"]]']
    settings = read_settings(Evaluate, ["checkpoint=given"], {"checkpoint": str(hf_dir), "overrides": words})
    assert count_parts(make_config(settings).training, dict.fromkeys(axis_names(), 1) | {"pp": 3}) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint=run", "tokenizer.path=x"], "tokenizer.path=x: a run is measured with the tokenizer that it was"),
        (["checkpoint=nowhere"], "checkpoint=nowhere is neither a folder nor the ID of a model"),
        ([], "checkpoint must be given: a run's folder"),
        (["checkpoint=run", "metric=exact"], "metric=exact: expected one of loss, reward, lm_eval, gsm8k, math_verify, reasoning_gym, exact_match, format, length, or package.module:name; did you mean exact_match?"),
        (["checkpoint=run", "num_promts=3"], "unknown key num_promts"),
        (["checkpoint=run", "metric=exact_match", "num_samples=3"], "num_samples=3 answers are all the same at temperature=0"),
        (["checkpoint=run", "output=none/results.json"], "output=none/results.json: there is no folder none"),
        (["checkpoint=run", "output=run"], "output=run is a folder; name a file to write"),
        (["checkpoint=run", "data.held_out_fraction=0"], "data.held_out_fraction=0 holds out nothing; split=all"),
        (["checkpoint=run/checkpoints/7"], "has no checkpoint of step 7; it has 15, 30"),
        (["checkpoint=run", "step=7"], "step=7: run/checkpoints has no checkpoint of 7; it has 15, 30"),
        (["checkpoint=run/checkpoints/30", "step=all"], "checkpoint=run/checkpoints/30 is one checkpoint; give the folder of a run"),
        (["checkpoint=run", "metric=reward"], "metric=reward: task=sft has no rewards; name them: rewards=[gsm8k,format]"),
        (["checkpoint=run", "metric=reward", "task=grpo", "task.rewards=[]", "task.teacher=run", "task.group_size=4", "model.lora.dropout=0", "max_new_tokens=4"], "metric=reward: nothing scores answers (task.rewards=[]); name some: task.rewards=[gsm8k,format]"),
        (["checkpoint=run", "metric=gsm8k", "rewards=[format]"], "rewards are given, and metric=gsm8k; set metric=reward"),
        (["checkpoint=run", "metric=reward", "rewards=[gsmk]"], "rewards.0.function=gsmk: expected one of gsm8k, "),
        (["checkpoint=run", "metric=gsm8k", "max_new_tokens=4"], "rewards: gsm8k fails: ValueError: the data's answer 'merged' has no number"),
        (["checkpoint=run", "metric=exact_match", "sampling.max_new_tokens=5"], "sampling.max_new_tokens=5: this command has the key max_new_tokens for it"),
        (["checkpoint=run", "metric=exact_match", "evaluation.num_sequences=4"], "evaluation.num_sequences=4: metric=exact_match does not read it; write num_prompts=4"),
        (["checkpoint=run", "sampling=standard"], "sampling=standard: metric=loss draws no answers; set metric=reward"),
        (["checkpoint=run", "metric=exact_match", "sampling=gready"], "sampling=gready: conf/sampling has no such file; choose from default, greedy, liberal, standard; did you mean greedy?"),
        (["checkpoint=HF", "metric=exact_match"], "metric=exact_match asks the questions of conversations, and data=python_stdlib has none"),
    ],
)  # fmt: skip
def test_mistakes(words, message, tuned, hf_dir, monkeypatch, capsys):
    monkeypatch.chdir(tuned[0])
    small = ["training.seq_len=64", "training.loss_chunk_size=64"] if "checkpoint=HF" in words else []
    code, error, out = command(monkeypatch, capsys, *(word.replace("HF", str(hf_dir)) for word in words), *small)
    assert (code, out) == (2, "")
    assert message in error
    assert error.count("\n") == 1


def test_a_loss_that_is_no_number_is_null_in_the_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tunix.evaluate.make_config", lambda _: SimpleNamespace(data=SimpleNamespace(source="text")))
    monkeypatch.setattr("tunix.evaluate.evaluate_loss", lambda *_: [{"loss": float("nan"), "tokens": 3}])
    evaluate(read_settings(Evaluate, ["checkpoint=run", "output=results.json"]))
    results = (tmp_path / "results.json").read_text()
    assert json.loads(results) == {"checkpoint": "run", "data": "text", "split": "held_out", "loss": None, "tokens": 3}
    monkeypatch.setattr("tunix.evaluate._list_steps", lambda _: {3: "run/checkpoints/3"})
    evaluate(read_settings(Evaluate, ["checkpoint=run", "step=[3]", "output=list.json"]))
    results = json.loads((tmp_path / "list.json").read_text())
    assert results["steps"] == [{"step": 3, "loss": None, "tokens": 3}]  # a list, also of one


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer():
    rng, right = np.random.default_rng(0), np.array([0, 1, 3, 6])
    initializer = [[rng.choice(6, 2, replace=False) < count for _ in range(20_000)] for count in right]
    assert estimate_pass(2, right, 6) == pytest.approx(
        np.mean([each.any() for row in initializer for each in row]), abs=0.01
    )
    assert estimate_pass(1, right, 6) == pytest.approx(right.mean() / 6)
