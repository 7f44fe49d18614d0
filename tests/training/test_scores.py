"""Heads of scores: logits of transformers, losses and gradients of TRL, files both ways, data, and runs."""

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.harness import ONE_DEVICE, ONE_LAYER, ROOT, RUN, SMALL, SPLIT_MESHES, metrics
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import tunix
from tunix.base.errors import UserError
from tunix.config import Evaluate, Export
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.data.batches import stack_examples
from tunix.data.dataset import load_corpus
from tunix.data.packing import _fill_examples, _fill_pairs, _split_pairs
from tunix.data.shards import Arrays
from tunix.evaluate import evaluate
from tunix.export import export
from tunix.huggingface.config_json import read_labels
from tunix.inference.pretrained import check_init_from, load_init_from
from tunix.training.choices import build_mesh
from tunix.training.scores import classification_loss, reward_loss
from tunix.training.train_spec import assemble

TRL = json.loads((ROOT / "tests" / "training" / "trl" / "scores.json").read_text())
LLAMA = ROOT / "tests" / "models" / "parity" / "llama"
CHOSEN = [pair["chosen_ids"] for pair in TRL["pairs"]]
CLASSES = ["a", "b", "c"]


def write_classifier(folder, labels):
    """Write the tiny Llama as transformers saves it with a head of scores, that of tests/training/trl/make_scores.py."""
    folder.mkdir()
    tensors = load_file(LLAMA / "model.safetensors")
    del tensors["lm_head.weight"]
    head = np.random.default_rng(len(labels)).normal(size=(len(labels), 32)).astype(np.float32)
    save_file(tensors | {"score.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((LLAMA / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    names = {str(number): label for number, label in enumerate(labels)}
    config |= {"id2label": names, "label2id": {label: int(number) for number, label in names.items()}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("models") / "classifier", CLASSES)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("models") / "scorer", ["LABEL_0"])


def test_scores_are_those_of_transformers(classifier, scorer):
    model = tunix.load_pretrained(classifier)
    assert model.cfg.labels == tuple(CLASSES)
    np.testing.assert_allclose(model.score(CHOSEN), TRL["scores"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(model.score(CHOSEN[3:]), TRL["scores"][3:], rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="gives a, b, c and no logits"):
        model([[1, 2]])
    with pytest.raises(UserError, match="gives LABEL_0 and no text"):
        tunix.load_pretrained(scorer).sampler  # noqa: B018
    with pytest.raises(UserError, match="gives logits and no scores"):
        tunix.load_pretrained(LLAMA).score(CHOSEN)


def pairs_shard():
    tokens, starts, splits = [], [], []
    for pair in TRL["pairs"]:
        starts.append(len(tokens))
        tokens += [*pair["chosen_ids"], 0, *pair["rejected_ids"], 0]
        splits.append(len(pair["chosen_ids"]) + 1)
    ends = np.zeros(len(tokens), bool)
    ends[np.array(starts) + splits - 1] = ends[np.array([*starts[1:], len(tokens)]) - 1] = True
    return Arrays(np.array(tokens), np.array(starts), ends, np.array(splits))


def examples_shard(labels):
    tokens = [token for row in CHOSEN for token in (*row, 0)]
    starts = np.cumsum([0, *(len(row) + 1 for row in CHOSEN[:-1])])
    ends = np.zeros(len(tokens), bool)
    ends[np.array([*starts[1:], len(tokens)]) - 1] = True
    return Arrays(np.array(tokens), starts, ends, label_values=np.array(labels, np.float32))


def batch_of(shard, fill, short_by):
    """All documents of a shard, in rows of 2, 2 and 1."""
    ends = [*shard.starts[1:], len(shard.tokens)]
    pieces = [[int(start), int(end - start) - short_by] for start, end in zip(shard.starts, ends, strict=True)]
    rows = [fill(shard, [pieces[n] for n in row], 64) for row in ([4, 0], [2, 1], [3])]
    return {name: jnp.asarray(field[0]) for name, field in stack_examples([rows]).items()}


def fill_pairs(shard, pieces, seq_len):
    return _fill_pairs(shard, _split_pairs(shard, pieces), seq_len, None)


def task_of(*words):
    return compose([*words, "data.paths=[none]"]).config.task


REWARD, CLASSIFY = ("task=reward", "data=pairs"), ("task=classify", "data=jsonl")
CENTERED = f"task.center_coefficient={TRL['center_coefficient']}"
CASES = {
    "reward": (REWARD, reward_loss),
    "centered": ((*REWARD, CENTERED), reward_loss),
    "classify": ((*CLASSIFY, "task.labels=[a,b,c]"), classification_loss),
    "regression": ((*CLASSIFY, "task.labels=null"), classification_loss),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_trl_and_transformers(case, classifier, scorer):
    words, loss_fn = CASES[case]
    task, model = task_of(*words), tunix.load_pretrained(classifier if case == "classify" else scorer)
    if case in ("reward", "centered"):
        batch = batch_of(pairs_shard(), fill_pairs, 2)
    else:
        labels = TRL["classes"] if case == "classify" else TRL["numbers"]
        batch = batch_of(examples_shard(labels), _fill_examples, 1)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def step(params, batch):
        loss = loss_fn(model.arch.module(params), batch, task=task)
        return loss.objective / loss.weight, loss

    with jax.set_mesh(model.mesh):
        (value, loss), grads = step(model.params, batch)
    assert float(loss.weight) == 5
    assert float(value) == pytest.approx(TRL[case]["loss"], rel=1e-4)
    assert float(optax.tree.norm(grads)) == pytest.approx(TRL[case]["grad_norm"], rel=1e-4)
    scores = np.asarray(model.score(CHOSEN))
    if case == "classify":
        expected = {"accuracy": np.argmax(scores, -1) == TRL["classes"]}
    elif case == "regression":
        expected = {"absolute_error": np.abs(scores[:, 0] - TRL["numbers"])}
    else:
        chosen, rejected = scores[:, 0], np.asarray(model.score([pair["rejected_ids"] for pair in TRL["pairs"]]))[:, 0]
        expected = {"margin": chosen - rejected, "accuracy": chosen > rejected}
        expected |= {"reward_chosen": chosen, "reward_rejected": rejected}
    means = {name: float(np.mean(each)) for name, each in expected.items()}
    assert {name: float(loss.sums[name]) / 5 for name in means} == pytest.approx(means, rel=1e-4, abs=1e-5)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TEMPLATE = 'task.chat_template="{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"'
FULL = ("model.sliding_window=null", "model.local_rope_theta=null")  # which gemma3 can write with one layer
OF_MODEL = [word for word in (*SMALL, *ONE_LAYER, *FULL) if word.startswith("model.")]
RUN_OF_CLASSES = [
    *RUN, *ONE_LAYER, *FULL, "task=classify", "task.labels=[no,yes]", "data=jsonl", "training.seq_len=32",
    "data.held_out_fraction=0.2", "training.global_batch_size=4", "optimizer.learning_rate=1e-2",
    "distributed.allow_idle_devices=true", "training.max_steps=6", "evaluation.num_sequences=4",
]  # fmt: skip


def write_classes(folder, count=80):
    rows = [
        {"text": "bad good"[4 * (n % 2) :][:4].strip() + f" {n}", "label": ("no", "yes")[n % 2]} for n in range(count)
    ]
    return write_rows(folder / "rows.jsonl", rows)


@pytest.mark.nightly
def test_a_run_learns_classes_resumes_and_is_exported(tmp_path, monkeypatch):
    """It begins with a language model of Hugging Face's form; the exported folder gives the scores of the run."""
    monkeypatch.chdir(tmp_path)
    path = write_classes(tmp_path)
    words = [*RUN_OF_CLASSES, f"data.paths=[{path}]", ONE_DEVICE]
    run = tunix.train([*words, "hydra.run.dir=run"]).folder
    lines, held_out = metrics(run), metrics(run, "held_out")
    assert lines[0]["loss"] == pytest.approx(np.log(2), rel=0.7)
    assert lines[-1]["loss"] < lines[0]["loss"]
    tunix.train(["resume=run/checkpoints/3"])
    assert [line["loss"] for line in metrics(run)][6:] == [line["loss"] for line in lines[3:]]

    evaluate(read_settings(Evaluate, [f"checkpoint={run}", "output=results.json"]))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["accuracy"] == held_out[-1]["accuracy"]

    export(read_settings(Export, [f"checkpoint={run}", "output=out"]))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3TextForSequenceClassification"]
    assert config["id2label"] == {"0": "no", "1": "yes"}
    rows = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    scores = tunix.load_pretrained(run).score(rows)
    np.testing.assert_allclose(tunix.load_pretrained("out").score(rows), scores, rtol=1e-5, atol=1e-6)
    # The folder is a start like the run: with its labels, and not with others.
    others = [word for word in words if word not in OF_MODEL]
    for source in ("out", "run"):
        start = [*others, f"model.init_from={source}"]
        assert compose(start).config.model.labels == ("no", "yes")
        with pytest.raises(UserError, match="task=classify learns a, b, and the model gives no, yes"):
            compose([*start, "task.labels=[a,b]"])
        with pytest.raises(UserError, match="task=sft needs a model that gives logits, and this one gives no, yes"):
            compose([*(word for word in start if not word.startswith("task")), "task=sft"])


QUESTION, GOOD, BAD = "what is it", "a few good words", "bad words"
READ = [*SMALL[:-1], "tokenizer=bytes", "data.held_out_fraction=0", "training.seq_len=96", TEMPLATE]


def read(folder, rows, *words):
    return load_corpus(compose([*READ, *words, f"data.paths=[{write_rows(folder / 'rows.jsonl', rows)}]"]).config)


def test_a_pair_is_read_to_the_end_of_both_answers(tmp_path):
    corpus = read(tmp_path, [{"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}], *REWARD)
    example = corpus.train["jsonl"][0]
    for segment, answer in ((1, GOOD), (2, BAD)):
        own = example["segment_ids"] == segment
        eos = corpus.vocab.eos_token
        decoded = corpus.tokenizer.decode(example["tokens"][own].tolist(), skip_special_tokens=False)
        assert decoded == f"{QUESTION}{eos}{answer}{eos}"
        assert example["loss_mask"][own].tolist() == [0] * (own.sum() - 1) + [1]
    assert example["loss_mask"].sum() == 2


def test_texts_and_conversations_have_their_class_at_the_last_token(tmp_path):
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": GOOD}]
    rows = [{"text": GOOD, "label": True}, {"messages": turns, "label": "false"}, {"text": BAD, "label": "maybe"}]
    corpus = read(tmp_path, rows, *CLASSIFY, "task.labels=[maybe,false,true]", "loading.packing=pad")
    part, eos = corpus.train["jsonl"], corpus.vocab.eos_token
    found = {}
    for number in range(len(part)):
        example = part[number]
        (last,) = np.flatnonzero(example["loss_mask"])
        text = corpus.tokenizer.decode(example["tokens"][: last + 1].tolist(), skip_special_tokens=False)
        found[text] = example["label_values"].tolist()[last]
        assert np.count_nonzero(example["label_values"]) <= 1
        assert not example["segment_ids"][last + 1 :].any()
    bos = corpus.vocab.bos_token or ""
    assert found == {f"{bos}{GOOD}": 2, f"{QUESTION}{eos}{GOOD}{eos}": 1, f"{bos}{BAD}": 0}


def test_a_text_without_a_token_is_left_out(tmp_path):
    """Tokenizers of words drop spaces: a document of no tokens gave its label to the one before it in the row."""
    words = Tokenizer(WordLevel({"</s>": 0, "good": 1, "bad": 2}))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    rows = [{"text": text, "label": text == "good"} for text in ("good", "bad")]
    own = [*CLASSIFY, "task.labels=[false,true]", f"tokenizer.path={tmp_path}/tokenizer.json"]
    corpus = read(tmp_path, [*rows, {"text": "  ", "label": True}], *own)
    example = corpus.train["jsonl"][0]
    assert [example[name][:3].tolist() for name in ("tokens", "label_values")] == [[1, 2, 0], [1, 0, 0]]
    assert corpus.prepared["jsonl"].index["left_out"] == {"empty": 1}


ROW = {"text": GOOD, "label": "a"}
MISTAKES = [
    ([ROW] * 2, "all documents to train on have the label a"),
    ([ROW | {"label": "z"}], "line 1, has 'z' in column label, which is none of task.labels=['a', 'b']"),
    ([{"text": GOOD}], "has no column label (data.columns.label)"),
    ([{"label": "a"}], "has no column text (data.columns.text)"),
    ([ROW, ROW | {"label": "b", "text": "words " * 90}], "1 of 2 documents are longer than training.seq_len=96"),
]


@pytest.mark.parametrize(("rows", "message"), MISTAKES)
def test_mistakes_of_classes(rows, message, tmp_path):
    with pytest.raises(UserError) as error:
        read(tmp_path, rows, *CLASSIFY, "task.labels=[a,b]")
    assert message in str(error.value)


def test_mistakes_of_numbers_and_of_keys(tmp_path):
    for label, shown in (("many", "'many'"), (10**400, f"1{'0' * 39}"), (1e300, r"1e\+300"), (-1e300, r"-1e\+300")):
        with pytest.raises(UserError, match=f"has {shown} in column label, no number; task.labels names classes"):
            read(tmp_path, [{"text": GOOD, "label": label}], *CLASSIFY, "task.labels=null")
    with pytest.raises(UserError, match="all documents to train on have the label 0.5"):
        read(tmp_path, [{"text": GOOD, "label": 0.5}, {"text": BAD, "label": "0.5"}], *CLASSIFY, "task.labels=null")
    with pytest.raises(UserError, match="task.labels=\\['a', 'a'\\] names a class twice"):
        task_of(*CLASSIFY, "task.labels=[a,a]")
    with pytest.raises(UserError, match="loading.packing=concat cuts documents of task=classify in two"):
        task_of(*CLASSIFY, "task.labels=null", "loading.packing=concat")


def test_an_adapter_with_a_head_of_scores_is_read(tmp_path):
    """As PEFT saves it: on a language model it gives the scores of the classifier with the same updates and head."""
    updates, adapter = ROOT / "tests" / "huggingface" / "adapters" / "llama", tmp_path / "adapter"
    classifier = write_classifier(tmp_path / "classifier", ["a", "b", "c"])
    with safe_open(classifier / "model.safetensors", framework="np") as file:
        head = file.get_tensor("score.weight")
    shutil.copytree(updates, adapter)
    tensors = load_file(adapter / "adapter_model.safetensors") | {"base_model.model.score.weight": head}
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    model = tunix.load_pretrained(LLAMA, adapter=adapter)
    assert model.cfg.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    expected = tunix.load_pretrained(classifier, adapter=updates)
    assert expected.cfg.labels == ("a", "b", "c")
    np.testing.assert_allclose(model.score(CHOSEN), expected.score(CHOSEN), rtol=1e-5, atol=1e-6)

    words = [f"model.init_from={LLAMA}", f"model.init_adapter={adapter}", *CLASSIFY, "training.seq_len=32"]
    words += ["training.loss_chunk_size=32", "data.paths=[rows.jsonl]", "distributed.allow_idle_devices=true"]
    cfg = compose([*words, "task.labels=[no,yes,both]", "training.micro_batch_size=1"]).config
    assert cfg.model.labels == ("no", "yes", "both")
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        train_spec = assemble(cfg, mesh)
        check_init_from(cfg, train_spec.arch)
        np.testing.assert_array_equal(load_init_from(train_spec, mesh)["score"]["w"].T, head)
    with pytest.raises(UserError, match=r"model.labels"):
        compose([*words, "task.labels=[no,yes]"])


@pytest.mark.nightly
def test_low_rank_updates_are_exported_with_the_head_and_merged(hf_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of_run = [word for word in RUN_OF_CLASSES if word not in (*OF_MODEL, SMALL[-1])]
    start = [f"model.init_from={hf_dir}", f"data.paths=[{write_classes(tmp_path, 20)}]", ONE_DEVICE]
    end = ["model.lora.rank=2", "training.max_steps=2", "checkpoint.save_every_steps=2", "evaluation.every_steps=2"]
    run = tunix.train([*of_run, *start, *end]).folder
    for words in (["output=adapter"], ["output=merged", "merge_lora=true"]):
        export(read_settings(Export, [f"checkpoint={run}", *words]))
    adapter = load_file("adapter/adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    assert config["modules_to_save"] == ["score"]
    with safe_open("merged/model.safetensors", framework="np") as merged:  # in bfloat16, as the base is
        np.testing.assert_allclose(
            adapter["base_model.model.score.weight"], merged.get_tensor("score.weight").astype(np.float32), rtol=2e-2
        )
    rows = [[5, 6, 7], [8]]
    np.testing.assert_allclose(
        tunix.load_pretrained("merged").score(rows), tunix.load_pretrained(run).score(rows), rtol=0.05, atol=0.02
    )
    np.testing.assert_allclose(
        tunix.load_pretrained(hf_dir, adapter="adapter").score(rows), tunix.load_pretrained(run).score(rows), rtol=1e-4
    )


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["reward", "classify"])
def test_a_run_is_the_same_on_every_mesh(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = [{"prompt": f"say {n}", "chosen": "yes, this", "rejected": "no"} for n in range(24)]
    path = write_rows(tmp_path / "rows.jsonl", pairs) if task == "reward" else write_classes(tmp_path)
    words = (
        [
            *RUN,
            "task=reward",
            "data=pairs",
            "tokenizer=bytes",
            TEMPLATE,
            "data.held_out_fraction=0.2",
            "training.seq_len=64",
        ]
        if task == "reward"
        else [*(word for word in RUN_OF_CLASSES if word not in (*ONE_LAYER, *FULL)), *SMALL]
    )
    words += ["training.global_batch_size=4", "training.max_steps=3", "optimizer.learning_rate=1e-2"]
    words += [f"data.paths=[{path}]", "distributed.allow_idle_devices=true", "evaluation.num_sequences=4"]
    stages = [
        "model.mesh_shape=[[2,2],[pp,fsdp]]",
        "training.micro_batch_size=1",
        "model.num_layers=4",
        "model.global_every=2",
    ]
    meshes = {
        "one": [ONE_DEVICE, "training.micro_batch_size=4"],
        **{str(n): each for n, each in enumerate(SPLIT_MESHES)},
    }
    found = {name: metrics(tunix.train([*words, *own, f"hydra.run.dir={name}"]).folder) for name, own in meshes.items()}
    for name, lines in found.items():
        for line, other in zip(lines, found["one"], strict=True):
            for key in ("loss", "grad_norm", "accuracy"):
                assert line[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), (name, key)
    if task == "reward":
        one = ["model.num_layers=4", "model.global_every=2", ONE_DEVICE, "training.micro_batch_size=4"]
        both = [
            metrics(tunix.train([*words, *own, f"hydra.run.dir=stages{n}"]).folder)
            for n, own in enumerate((one, stages))
        ]
        for line, other in zip(*both, strict=True):
            assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_labels_stand_in_the_order_of_their_numbers():
    """Files have these numbers as texts, in the order of texts: 10 before 2."""
    names = {str(number): f"label {number}" for number in sorted(range(12), key=str)}
    config = {"architectures": ["LlamaForSequenceClassification"], "id2label": names}
    assert read_labels(config) == [f"label {number}" for number in range(12)]
