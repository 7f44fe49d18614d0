"""Pairs of answers: TRL's losses, whatever rows the pairs are in; the data of task=dpo, and a run of it."""

import csv
import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.parquet
import pytest
from support.harness import PAIR as TWO_PROCESSES
from support.harness import ROOT, SMALL, metrics
from support.processes import Processes

import tunix
from tunix.base.errors import UserError
from tunix.config import Evaluate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.config.data import Tokenizer
from tunix.data.batches import stack_examples
from tunix.data.dataset import load_corpus
from tunix.data.documents import Document, Labelled, encode_labelled
from tunix.data.packing import _fill_pairs, _split_pairs
from tunix.data.shards import Arrays
from tunix.data.tokenizer import train_vocab
from tunix.evaluate import evaluate
from tunix.feeds import PairFeed
from tunix.models.layers import named
from tunix.rl import reference
from tunix.rl.reference import add_reference, digest_weights
from tunix.training.dpo import preference_loss, sum_answers
from tunix.training.kto import labelled_loss, make_kl_estimate
from tunix.training.logprobs import compute_token_log_probs
from tunix.training.loss import LOSSES

TRL = json.loads((ROOT / "tests" / "training" / "trl" / "losses.json").read_text())
TASK = compose(["task=dpo", "data=pairs", "data.paths=[none]", f"task.beta={TRL['beta']}"]).config.task
VARIANTS = {
    "sigmoid": {},
    "ipo": {"objective": "ipo"},
    "length_normalized": {"length_normalized": True},
    "smoothed": {"label_smoothing": TRL["label_smoothing"]},
    "robust": {"objective": "robust", "label_smoothing": TRL["label_smoothing"]},
    "simpo": {"objective": "simpo", "simpo_gamma": TRL["simpo_gamma"]},
    "orpo": {"objective": "orpo"},
}
ROWS = {"a pair a row": [[0], [1], [2], [3], [4]], "several pairs a row": [[4, 0], [2, 1], [3]]}


def shard_of(pairs, swapped=False):
    """The arrays of a shard with these pairs."""
    tokens, answers, starts, splits = [], [], [], []
    for pair in pairs:
        starts.append(len(tokens))
        for name in ("rejected_ids", "chosen_ids") if swapped else ("chosen_ids", "rejected_ids"):
            tokens += pair["prompt_ids"] + pair[name]
            answers += [False] * len(pair["prompt_ids"]) + [True] * len(pair[name])
            splits.append(len(tokens) - starts[-1])
    return Arrays(np.array(tokens), np.array(starts), np.array(answers), np.array(splits[::2]))


class Policy:
    """TRL's policy, and losses of its pairs in rows."""

    def __init__(self):
        self.model = tunix.load_pretrained(ROOT / "tests" / "models" / "parity" / "llama")
        self.reference = self.model.params
        head = {"table": self.reference["head"]["table"] * TRL["head"]}
        self.params = self.reference | {"head": head}
        self.sides = jax.jit(self._sides)
        self.value_and_grad = jax.jit(jax.value_and_grad(self.loss, has_aux=True), static_argnums=2)

    def batch(self, rows, swapped=False, shard=None):
        shard = shard or shard_of(TRL["pairs"], swapped)
        ends = [*shard.starts[1:], len(shard.tokens)]
        chunks = [[int(start), int(end - start) - 2] for start, end in zip(shard.starts, ends, strict=True)]

        def stacked(of_pairs):
            examples = [_fill_pairs(shard, _split_pairs(shard, [chunks[n] for n in row]), 64, of_pairs) for row in rows]
            return {name: jnp.asarray(field[0]) for name, field in stack_examples([examples]).items()}

        batch, table = stacked(None), np.zeros((len(chunks), 2), np.float32)
        sides = self.sides(self.reference, batch)
        for number, row in enumerate(rows):
            table[row] = np.stack([np.asarray(side)[number, : len(row)] for side in sides], -1)
        return stacked(table)

    def _sides(self, params, batch):
        log_probs, _ = compute_token_log_probs(self.model.arch.module(params), batch, None, chunk_size=64)
        return sum_answers(log_probs * batch["loss_mask"], batch)

    def loss(self, params, batch, task):
        loss = preference_loss(self.model.arch.module(params), batch, task=task, chunk_size=32)
        return loss.objective / loss.weight, {name: value / loss.weight for name, value in loss.sums.items()}

    def __call__(self, batch, task=TASK, params=None):
        with jax.set_mesh(self.model.mesh):
            return self.value_and_grad(self.params if params is None else params, batch, task)


@pytest.fixture(scope="module")
def policy():
    return Policy()


@pytest.fixture(scope="module")
def batches(policy):
    with jax.set_mesh(policy.model.mesh):
        return {name: policy.batch(rows) for name, rows in ROWS.items()}


@pytest.mark.nightly(but=[f"{variant}-several pairs a row" for variant in VARIANTS])
@pytest.mark.parametrize(
    ("variant", "rows"), [(v, r) for v in VARIANTS for r in ROWS if v not in ("simpo", "orpo") or r != "a pair a row"]
)
def test_losses_and_gradients_are_trls(variant, rows, policy, batches):
    task, batch = TASK.model_copy(update=VARIANTS[variant]), batches[rows]
    if not task.has_reference:
        batch = batch | {"reference_log_probs": jnp.zeros_like(batch["reference_log_probs"])}
    (loss, _), grads = policy(batch, task)
    requested = TRL["losses"][variant]
    assert float(loss) == pytest.approx(requested["loss"], rel=2e-5)
    assert float(optax.tree.norm(grads)) == pytest.approx(requested["grad_norm"], rel=1e-4)


def test_at_step_0_nothing_is_known_and_swapped_answers_turn_the_gradient(policy, batches):
    (loss, sums), grads = policy(batches["several pairs a row"], params=policy.reference)
    assert float(loss) == pytest.approx(math.log(2), abs=1e-6)
    assert abs(float(sums["margin"])) < 1e-5
    with jax.set_mesh(policy.model.mesh):
        swapped = policy.batch(ROWS["several pairs a row"], swapped=True)
    _, turned = policy(swapped, params=policy.reference)
    scale = float(optax.tree.norm(grads))
    assert float(optax.tree.norm(jax.tree.map(jnp.add, grads, turned))) < 1e-5 * scale


def test_reported_numbers_of_pairs_are_their_means(policy, batches):
    """By hand, of TRL's pairs; one of which a rejected answer has no tokens left is none."""
    batch = batches["several pairs a row"]
    cut = np.array(batch["loss_mask"])
    cut[2, np.asarray(batch["segment_ids"])[2] == 2] = 0
    with jax.set_mesh(policy.model.mesh):
        now, before = (policy.sides(params, batch) for params in (policy.params, policy.reference))
        less = batch | {"loss_mask": jnp.asarray(cut)}
        ends, zeros = batch["reference_log_probs"] != 0, jnp.zeros_like(batch["reference_log_probs"])
        equal = batch | {"loss_mask": ends.astype(jnp.float32), "reference_log_probs": zeros}
        flat = policy.params | {"head": {"table": jnp.zeros_like(policy.params["head"]["table"])}}
    gains = np.stack([np.asarray(a - b)[[0, 0, 1, 1, 2], [0, 1, 0, 1, 0]] for a, b in zip(now, before, strict=True)])
    for given, (chosen, rejected) in ((batch, gains), (less, gains[:, :4])):
        (_, sums), _ = policy(given)
        rewards = {"reward_chosen": TASK.beta * chosen, "reward_rejected": TASK.beta * rejected}
        expected = rewards | {"margin": TASK.beta * (chosen - rejected), "accuracy": chosen > rejected}
        found = {name: float(sums[name]) for name in expected}
        assert found == pytest.approx({name: float(np.mean(each)) for name, each in expected.items()}, rel=1e-4)
    (_, sums), _ = policy(equal, params=flat)  # all tokens are as likely, and each answer is one
    assert (float(sums["margin"]), float(sums["accuracy"])) == (0, 0.5)


def test_cross_entropy_of_the_chosen_answer_is_added(policy, batches):
    batch = batches["several pairs a row"]
    (before, _), _ = policy(batch)
    (loss, sums), _ = policy(batch, TASK.model_copy(update={"sft_weight": 0.5}))
    with jax.set_mesh(policy.model.mesh):
        chosen = np.asarray(policy.sides(policy.params, batch).chosen)[[0, 1, 1, 2, 0], [1, 1, 0, 0, 0]]
    sft_loss = np.mean(
        [-float(total) / len(pair["chosen_ids"]) for total, pair in zip(chosen, TRL["pairs"], strict=True)]
    )
    assert float(sums["sft_loss"]) == pytest.approx(sft_loss, rel=1e-5)
    assert float(loss - before) == pytest.approx(0.5 * sft_loss, rel=1e-5)


@pytest.fixture(scope="module")
def labelled(policy):
    """Loss and gradient of the answers with labels in rows of 2, 2 and 1, as (head of the policy) -> numbers of a step.

    The second answer of each is that of the answer before, as TRL's trainer sees them.
    """
    kto, pairs = TRL["kto"], TRL["pairs"]
    others = [
        pair | {"rejected_ids": before["chosen_ids"]} for pair, before in zip(pairs, pairs[-1:] + pairs, strict=False)
    ]
    words = ["task=kto", "data=labelled", "data.paths=[none]", f"task.beta={TRL['beta']}"]
    cfg = compose([*words, "training.loss_chunk_size=32"]).config
    task = cfg.task.model_copy(update={"undesirable_weight": kto["undesirable_weight"]})
    rows = ROWS["several pairs a row"]
    with jax.set_mesh(policy.model.mesh):
        batch = policy.batch(rows, shard=replace(shard_of(others), labels=np.array(kto["labels"])))
    batch = {name: field[None] for name, field in batch.items()}
    add_kl = jax.jit(make_kl_estimate(cfg, policy.model.arch.module))

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def step(params, batch):
        loss = labelled_loss(policy.model.arch.module(params), batch, task=task, chunk_size=32)
        return loss.objective / loss.weight, loss

    def numbers(head, kl=None):
        table = policy.reference["head"]["table"] * head
        params = policy.reference | {"head": {"table": table}}
        with jax.set_mesh(policy.model.mesh):
            full = add_kl(params, batch)
            full |= {} if kl is None else {"kl": jnp.full_like(full["kl"], kl)}
            (loss, parts), grads = step(params, {name: field[0] for name, field in full.items()})
            flat = {name: field[0] for name, field in batch.items()}
            now, before = (policy.sides(each, flat).chosen for each in (params, policy.reference))
        gains = np.asarray(now - before)[[0, 1, 1, 2, 0], [1, 1, 0, 0, 0]]  # in the order of the labels
        return {"loss": loss, "kl": full["kl"][0, 0], "grad_norm": optax.tree.norm(grads)}, parts, gains

    return numbers


@pytest.mark.parametrize("requested", TRL["kto"]["losses"], ids=lambda numbers: f"head {numbers['head']}")
def test_the_loss_of_labels_is_trls(requested, labelled):
    found, parts, gains = labelled(requested["head"])
    labels = np.array(TRL["kto"]["labels"])
    assert float(parts.weight) == len(labels)
    for name, value in found.items():
        assert float(value) == pytest.approx(requested[name], rel=1e-4, abs=1e-6), name
    numbers = LOSSES["kto"].evaluate(parts.sums, parts.weight, 0)
    expected = {
        "kl": requested["kl"],
        "accuracy": np.mean((gains > requested["kl"]) == labels),
        "reward_desirable": TRL["beta"] * gains[labels].mean(),
        "reward_undesirable": TRL["beta"] * gains[~labels].mean(),
    }
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_an_answer_is_right_on_its_side_of_the_divergence(labelled):
    """Here all gains are below it: undesirable answers alone are right."""
    *_, gains = labelled(1.2)
    _, parts, _ = labelled(1.2, kl=gains.max() + 1)
    assert float(parts.sums["accuracy"]) == TRL["kto"]["labels"].count(False)


def test_at_step_0_an_answer_is_worth_half_its_weight(labelled):
    found, parts, _ = labelled(1.0)
    mean_weight = (3 * 1.0 + 2 * TRL["kto"]["undesirable_weight"]) / 5
    assert float(found["loss"]) == pytest.approx(mean_weight / 2, rel=1e-5)
    numbers = LOSSES["kto"].evaluate(parts.sums, parts.weight, 0)
    assert abs(numbers["reward_desirable"]) < 1e-5
    assert numbers["eval_answers"] == 5


QUESTION, GOOD, BAD = "what is it", "a few good words", "bad words"
TURNS = [{"role": "user", "content": QUESTION}]
ANSWERS = [[{"role": "assistant", "content": text}] for text in (GOOD, BAD)]
SYSTEM = {"role": "system", "content": "Answer briefly."}


def read(folder, rows, *words, kind=("task=dpo", "data=pairs")):
    """The corpus of task=dpo from rows of JSON."""
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [*kind, f"data.paths=[{path}]", "data.held_out_fraction=0", "training.seq_len=64"]
    return load_corpus(compose([*SMALL, *own, *words]).config)


def test_text_turns_and_whole_conversations_are_the_same_pair(tmp_path):
    whole = [{"chosen": TURNS + ANSWERS[0], "rejected": TURNS + ANSWERS[1]}]
    forms = (
        ([{"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}], []),
        ([{"prompt": TURNS, "chosen": ANSWERS[0], "rejected": json.dumps(ANSWERS[1])}], []),
        (whole, ["data.columns.prompt=null"]),
        ([{"prompt": QUESTION, **whole[0]}], []),  # as UltraFeedback has them
    )
    examples = []
    for number, (rows, words) in enumerate(forms):
        (tmp_path / str(number)).mkdir()
        corpus = read(tmp_path / str(number), rows, *words)
        part = corpus.train["jsonl"]
        part.of_pairs = [np.array([[-3.0, -5.0]], np.float32)].__getitem__
        examples.append(part[0])
    for name, field in examples[0].items():
        assert all(np.array_equal(field, other[name]) for other in examples), name
    example = examples[0]
    for segment, text, value in ((1, GOOD, -3.0), (2, BAD, -5.0)):
        learnt = (example["segment_ids"] == segment) & (example["loss_mask"] > 0)
        assert corpus.tokenizer.decode(example["targets"][learnt].tolist()).strip() == text
        assert np.flatnonzero(example["reference_log_probs"] == value).tolist() == [np.flatnonzero(learnt)[-1]]
    assert set(example["segment_ids"].tolist()) == {0, 1, 2}


PAIR = {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}
MISTAKES = [
    (PAIR | {"rejected": GOOD}, [], "line 1, has the same answer in columns chosen and rejected"),
    ({"prompt": QUESTION, "chosen": GOOD}, [], "has no column rejected (data.columns.rejected)"),
    (PAIR | {"rejected": ""}, [], "has no answer in column rejected"),
    (PAIR | {"prompt": ""}, [], "has no prompt"),
    (
        {"prompt": QUESTION + " ", "chosen": TURNS + ANSWERS[0], "rejected": TURNS + ANSWERS[1]},
        [],
        "begins with a turn of the user in column chosen that is not that of the prompt",
    ),
    (
        {"chosen": [SYSTEM, *TURNS, *ANSWERS[0]], "rejected": [SYSTEM, TURNS[0] | {"content": "?"}, *ANSWERS[1]]},
        ["data.columns.prompt=null"],
        "has conversations in columns chosen and rejected that differ before an answer; set data.columns.prompt",
    ),
    (PAIR, ["data.columns.prompt=null"], "has text in column chosen, not a conversation; set data.columns.prompt"),
    (PAIR | {"chosen": "words " * 90}, [], "1 of 1 pairs are longer than training.seq_len=64 tokens"),
    (PAIR, ["loading.packing=concat"], "loading.packing=concat cuts pairs of task=dpo in two"),
    (PAIR, ["task.objective=ipo", "task.label_smoothing=0.1"], "task.label_smoothing=0.1 belongs to task.objective=sigmoid"),
    (PAIR, ["task.objective=orpo", "task.label_smoothing=0.1"], "belongs to task.objective=sigmoid or robust or simpo"),
]  # fmt: skip


def test_pairs_of_csv_and_parquet_are_those_of_json(tmp_path):
    """Also where the answers of a CSV file are turns, written as JSON, and a Parquet file has lists of them."""
    rows = [{"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}]
    turns = [{"prompt": TURNS, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}]
    cells = [{name: json.dumps(value) for name, value in row.items()} for row in turns]
    for name, table in (("a", rows), ("b", cells)):
        with (tmp_path / f"{name}.csv").open("w") as file:
            writer = csv.DictWriter(file, PAIR)
            writer.writeheader()
            writer.writerows(table)
    for name, table in (("a", rows), ("b", turns)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / f"{name}.parquet")
    example = read(tmp_path, rows).train["jsonl"][0]
    for kind in ("csv", "parquet"):
        for name in ("a", "b"):
            own = [f"data={kind}", f"data.paths=[{tmp_path}/{name}.{kind}]", "data.columns.prompt=prompt"]
            ((_, part),) = read(tmp_path, rows, *own).train.items()
            for field, value in example.items():
                np.testing.assert_array_equal(part[0][field], value, err_msg=f"{name}.{kind}: {field}")


@pytest.mark.parametrize(("row", "words", "message"), MISTAKES)
def test_mistakes(row, words, message, tmp_path):
    with pytest.raises(UserError) as error:
        read(tmp_path, [row], *words)
    assert message in str(error.value)


LABELLED = ("task=kto", "data=labelled")
ANSWER = {"prompt": QUESTION, "completion": GOOD, "label": True}


def test_an_answer_with_a_label_has_the_one_before_beside_it(tmp_path):
    """Text, turns, and labels as numbers or as words are the same documents."""
    rows = [ANSWER | {"label": "True"}, ANSWER | {"completion": BAD, "label": False}]
    other = [
        {"messages": TURNS + ANSWERS[0], "label": 1},
        {"messages": json.dumps(TURNS + ANSWERS[1]), "label": 0.0},
    ]
    corpora = []
    for number, (table, words) in enumerate(
        ((rows, []), (other, ["data.columns.prompt=null", "data.columns.messages=messages"]))
    ):
        (tmp_path / str(number)).mkdir()
        corpora.append(read(tmp_path / str(number), table, "loading.packing=pad", *words, kind=LABELLED))
    part = corpora[0].train["jsonl"]
    for index, (own, before, sign) in enumerate(((GOOD, BAD, 1), (BAD, GOOD, -1))):
        example = part[index]
        for name, field in corpora[1].train["jsonl"][index].items():
            np.testing.assert_array_equal(field, example[name], err_msg=name)
        for segment, text in ((1, own), (2, before)):
            learnt = (example["segment_ids"] == segment) & (example["loss_mask"] > 0)
            assert corpora[0].tokenizer.decode(example["targets"][learnt].tolist()).strip() == text
        last = np.flatnonzero((example["segment_ids"] == 1) & (example["loss_mask"] > 0))[-1]
        assert np.flatnonzero(example["labels"]).tolist() == [last]
        assert example["labels"][last] == sign


@pytest.mark.parametrize(("prompts", "before"), [("aabbbc", "345012"), ("abc", "201"), ("aa", "10"), ("a", "0")])
def test_the_answer_beside_one_with_a_label_is_to_another_prompt(prompts, before):
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    answers = [[{"role": "assistant", "content": str(number)}] for number in range(len(turns))]
    documents = [Document("", Labelled(*each, True, {})) for each in zip(turns, answers, strict=True)]
    keys = {"path": None, "train": None, "vocab_size": 259, "train_bytes": 1, "bos_token": None, "eos_token": None}
    vocab = train_vocab(Tokenizer(**keys), ["a"])
    found = [vocab.backend.decode(each.tokens[-1].tolist()) for each in encode_labelled(vocab, documents)]
    assert [text.split(":")[-1].strip() for text in found] == list(before)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ANSWER] * 2, "all answers to train on have the label true (data.columns.label)"),
        (
            [ANSWER, ANSWER | {"label": "maybe"}],
            "line 2, has no label in column label: 'maybe' is neither true nor false",
        ),
        ([ANSWER | {"label": None}], "has no label in column label"),
        ([{"prompt": QUESTION, "completion": GOOD}], "has no column label (data.columns.label)"),
        ([ANSWER | {"completion": ""}], "has no answer in column completion"),
    ],
)
def test_mistakes_of_labels(rows, message, tmp_path):
    with pytest.raises(UserError) as error:
        read(tmp_path, rows, kind=LABELLED)
    assert message in str(error.value)


@pytest.mark.nightly
def test_a_run_with_labels_is_the_same_in_other_microbatches_and_on_other_meshes(tmp_path, monkeypatch):
    """It learns which answers are good, and goes on from a checkpoint with the same digits."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"say {n}", "completion": ("yes, this", "no")[n % 2], "label": n % 2 == 0} for n in range(24)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = [
        *SMALL, *LABELLED, "data.paths=[answers.jsonl]", "data.held_out_fraction=0.2", "training.seq_len=96", "loading.packing=pad",
        "training.mixed_precision=fp32", "training.max_steps=4", "training.global_batch_size=8", "optimizer.learning_rate=1e-2",
        "logging.every_steps=1", "loading.cache_dir=cache", "evaluation.num_sequences=4", "evaluation.sample_tokens=0",
        "checkpoint.save_every_steps=2", "distributed.allow_idle_devices=true",
    ]  # fmt: skip
    shapes = {"one": ("[[1],[fsdp]]", 8), "cut": ("[[1],[fsdp]]", 2), "mesh": ("[[2,2],[fsdp,tp]]", 2)}
    found = {}
    for name, (mesh, size) in shapes.items():
        words = [f"model.mesh_shape={mesh}", f"training.micro_batch_size={size}", f"hydra.run.dir={name}"]
        found[name] = metrics(tunix.train([*run, *words]).folder)
    assert found["one"][0]["loss"] == pytest.approx(0.5, abs=1e-5)
    assert found["one"][-1]["loss"] < 0.49
    held_out = {name: metrics(tmp_path / name, "held_out")[-1] for name in shapes}
    for name in ("cut", "mesh"):
        for line, other in zip(found["one"], found[name], strict=True):
            for key in ("loss", "grad_norm", "kl"):
                assert other[key] == pytest.approx(line[key], rel=1e-4, abs=1e-5), (name, key)
        assert held_out[name]["loss"] == pytest.approx(held_out["one"]["loss"], rel=1e-4)
    tunix.train(["resume=one/checkpoints/2"])
    assert [line["loss"] for line in metrics(tmp_path / "one")][4:] == [line["loss"] for line in found["one"][2:]]


def load_pairs(folder, *words):
    """Four pairs, some of them held out: the config with these words, and the corpus."""
    rows = [PAIR | {"prompt": f"{QUESTION} {n}"} for n in range(4)]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["task=dpo", "data=pairs", f"data.paths=[{path}]", "data.held_out_fraction=0.3", *words]
    cfg = compose([*SMALL, *own, "training.seq_len=64", f"loading.cache_dir={folder}/cache"]).config
    return cfg, load_corpus(cfg)


def test_held_out_pairs_that_are_all_too_long_are_refused_before_the_others_are_scored():
    corpus = SimpleNamespace(num_held_out=1, held_out=[])
    with pytest.raises(UserError, match="the held-out documents make no sequence"):
        PairFeed(None, corpus, None, None, None)


def test_without_a_reference_nothing_is_scored(tmp_path):
    """The answers of ORPO have zeros in the place of the reference, and no model is asked for them."""
    cfg, corpus = load_pairs(tmp_path, "task.objective=orpo")
    add_reference(cfg, corpus, None, None)
    for part in (corpus.train["jsonl"], corpus.held_out_parts["jsonl"]):
        assert not part[0]["reference_log_probs"].any()
        assert part[0]["loss_mask"].any()
    assert not (tmp_path / "cache" / "reference").exists()


def test_a_reference_belongs_to_the_dtype_of_products(tmp_path, monkeypatch):
    """A run with 8-bit products does not take the log-probabilities that one without them has kept."""
    computed = []

    def compute(part, *_):
        computed.append(part)
        return [np.zeros((documents, 2), np.float32) for _, documents in part.stream.sizes]

    monkeypatch.setattr(reference, "_compute", compute)
    monkeypatch.setattr(reference, "digest_weights", lambda *_, **__: "weights")
    monkeypatch.setattr(reference, "load_init_from", lambda *_: None)
    layout, batch = SimpleNamespace(compute="bfloat16"), SimpleNamespace(num_rows=1)
    spec = SimpleNamespace(layout=layout, batch=batch, new_params=lambda *_: None, arch=SimpleNamespace(module=None))
    counts = []
    for words in ([], ["training.matmul_dtype=fp8"], ["training.matmul_dtype=fp8"], []):
        cfg, corpus = load_pairs(tmp_path, *words)
        add_reference(cfg, corpus, spec, None)
        counts.append(len(computed))
    assert counts == [2, 4, 4, 4]


@pytest.mark.nightly
def test_a_run_with_low_rank_updates(hf_dir, tmp_path, monkeypatch, caplog):
    """It learns the order of held-out pairs; its base stays; the reference is found again, on another mesh too."""
    monkeypatch.chdir(tmp_path)
    words = ("a few words", "merged", "words few a")
    rows = [{"prompt": f"{words[n % 3]} {n}", "chosen": words[0], "rejected": words[2]} for n in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = [
        "task=dpo", "data=pairs", "data.paths=[pairs.jsonl]", "data.held_out_fraction=0.2", f"model.init_from={hf_dir}",
        "model.lora.rank=2", "training.seq_len=64", "training.loss_chunk_size=32", "training.micro_batch_size=1",
        "training.mixed_precision=fp32", "training.max_steps=6", "optimizer.learning_rate=2e-2", "logging.every_steps=1", "loading.cache_dir=cache",
        "evaluation.num_sequences=4", "evaluation.sample_tokens=0", "checkpoint.save_every_steps=3",
        "model.mesh_shape=[[2,2],[fsdp,tp]]", "distributed.allow_idle_devices=true", "hydra.run.dir=run",
    ]  # fmt: skip
    result = tunix.train(run)
    lines = metrics(result.folder)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.05
    assert lines[-1]["margin"] > 0
    held_out = metrics(result.folder, "held_out")[-1]
    assert (held_out["accuracy"], held_out["eval_pairs"] > 0) == (1.0, True)
    before, after = tunix.load_pretrained(hf_dir), dict(named(tunix.load_pretrained("run").params))
    assert all(np.array_equal(leaf, after[name]) for name, leaf in named(before.params))
    tables = sorted(path.stat().st_mtime_ns for path in tmp_path.glob("cache/reference/*/*.npy"))
    assert len(tables) == 2  # of the training and of the held-out pairs

    tunix.train(["resume=run/checkpoints/3"])
    assert [line["loss"] for line in metrics(result.folder)][6:] == [line["loss"] for line in lines[3:]]
    other = tunix.load_pretrained(hf_dir, mesh_shape=((2, 2), ("fsdp", "tp")))
    digests = set()
    for model in (before, other):
        with jax.set_mesh(model.mesh):
            digests.add(digest_weights(model.params))
    assert len(digests) == 1
    evaluate(read_settings(Evaluate, ["checkpoint=run", "output=measured.json"]))
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert {name: measured[name] for name in ("loss", "accuracy")} == {
        name: held_out[name] for name in ("loss", "accuracy")
    }
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.glob("cache/reference/*/*.npy")) == tables


@pytest.mark.nightly
def test_two_processes_are_one_run(tmp_path):
    """Each scores and learns the pairs of its own rows; process 0 keeps the reference."""
    rows = [{"prompt": f"say {n}", "chosen": "yes, this", "rejected": "no"} for n in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *TWO_PROCESSES, "task=dpo", "data=pairs", f"data.paths=[{tmp_path}/pairs.jsonl]", "training.max_steps=2",
        "training.seq_len=96", "evaluation.every_steps=null", "tokenizer=bytes", "loading.packing=pad", "checkpoint.save_every_steps=null",
        "distributed.allow_idle_devices=true",
    ]  # fmt: skip
    with Processes(*words, "loading.cache_dir=two", folder=tmp_path, count=2) as run:
        assert [end.code for end in run.ends()] == [0, 0]
    tunix.train([*words, f"loading.cache_dir={tmp_path}/one", f"hydra.run.dir={tmp_path}/alone"])
    one, two = (
        {path.name: np.load(path) for path in (tmp_path / name).glob("reference/*/*.npy")} for name in ("one", "two")
    )
    assert one.keys() == two.keys() != set()
    for name, table in one.items():
        np.testing.assert_allclose(two[name], table, rtol=1e-5)
    for alone, together in zip(metrics(tmp_path / "alone"), metrics(tmp_path / "run"), strict=True):
        for name in ("loss", "grad_norm", "margin"):
            assert together[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6)
