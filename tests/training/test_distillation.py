"""Distillation: TRL's losses, rows of vocabulary that one model lacks, and runs with a teacher."""

import json
import math
import re
import shutil
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from support.harness import ROOT, metrics
from support.images import SEES
from support.processes import Processes
from support.rollouts import ONE, TASK, WIDE

import tunix
from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.costs.devices import read_topology
from tunix.data.batches import TEACHER
from tunix.inference.teacher import _fit_rows, check_tokenizers
from tunix.models.layers import named
from tunix.plan.ranking import rank
from tunix.rl.reference import make_teacher_scorer
from tunix.sharding.arrays import to_global
from tunix.training.grpo import policy_loss
from tunix.training.loss import next_token_loss
from tunix.training.state import describe
from tunix.training.teacher import Teacher, check_images, compute_divergence

PARITY = ROOT / "tests" / "models" / "parity"
TRL = ROOT / "tests" / "training" / "trl"
EXPECTED = json.loads((TRL / "distillation.json").read_text())
PAIRS = json.loads((TRL / "losses.json").read_text())["pairs"]


def make_batch() -> dict[str, np.ndarray]:
    """The batch of make_distillation.py: prompts with their answers."""
    rows = [(pair["prompt_ids"], pair["chosen_ids"]) for pair in PAIRS]
    shape = len(rows), max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    fields = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segment_ids")}
    fields |= {"positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))}
    fields |= {"loss_mask": np.zeros(shape, np.float32)}
    for row, (prompt, answer) in enumerate(rows):
        text, end = prompt + answer, len(prompt) + len(answer) - 1
        fields["tokens"][row, :end], fields["targets"][row, :end] = text[:-1], text[1:]
        fields["segment_ids"][row, :end] = 1
        fields["loss_mask"][row, len(prompt) - 1 : end] = 1
    return fields


class Student:
    """TRL's student, and its losses."""

    def __init__(self):
        self.model = tunix.load_pretrained(PARITY / "llama")
        head = {"table": self.model.params["head"]["table"] * EXPECTED["head"]}
        self.params = self.model.params | {"head": head}
        self.teacher = tunix.load_pretrained(PARITY / "gpt2")
        self.batch = make_batch()
        self.value_and_grad = jax.jit(jax.value_and_grad(self._loss, has_aux=True), static_argnums=(3, 4))

    def describe(self, beta, temperature) -> Teacher:
        return Teacher("gpt2", self.teacher.cfg, self.teacher.arch, beta, temperature, True)

    def losses(self, beta, temperature, chunk_size=4, weight=1.0):
        """Mean of the objective, its gradient, and the sums over tokens."""
        with jax.set_mesh(self.model.mesh):
            (value, sums), gradient = self.value_and_grad(self.params, temperature, weight, beta, chunk_size)
        return float(value), gradient, {name: float(total) for name, total in sums.items()}

    def _loss(self, params, temperature, weight, beta, chunk_size):
        loss = next_token_loss(
            self.model.arch.module(params), self.batch | {TEACHER: self.teacher.params}, chunk_size=chunk_size,
            z_loss=0.0, teacher=self.describe(beta, temperature), teacher_weight=weight,
        )  # fmt: skip
        return loss.objective / loss.weight, {name: total / loss.weight for name, total in loss.sums.items()}


@pytest.fixture(scope="module")
def student() -> Student:
    return Student()


def norm(gradient) -> float:
    return np.linalg.norm(np.concatenate([np.ravel(leaf) for _, leaf in named(gradient)]).astype(float))


@pytest.mark.nightly(but=["0.3, 1.0"])
@pytest.mark.parametrize("expected", EXPECTED["losses"], ids=lambda each: f"{each['beta']}, {each['temperature']}")
def test_divergences_are_those_of_trl(student, expected):
    """A GPT-2 teaches a Llama: the loss of GKDTrainer, and the gradient of DistillationTrainer's chunks."""
    value, gradient, sums = student.losses(expected["beta"], expected["temperature"])
    assert value == pytest.approx(expected["loss"], rel=2e-5)
    assert norm(gradient) == pytest.approx(expected["grad_norm"], rel=2e-5)
    assert sums["teacher_kl"] == pytest.approx(value, rel=1e-6)


def test_cross_entropy_has_the_rest_of_the_weight(student):
    alone, _, sums = student.losses(0.0, 1.0)
    mixed, *_ = student.losses(0.0, 1.0, weight=0.25)
    assert mixed == pytest.approx(0.75 * sums["loss"] + 0.25 * alone, rel=1e-5)


def test_own_answers_have_the_same_divergence(student):
    """The loss of task=grpo with task.teacher_loss=full, at the temperature of sampling; without rewards it is all."""
    words = ["task.teacher=tests/models/parity/gpt2", "task.teacher_loss=full", "task.teacher_weight=0.5"]
    cfg = compose([*TASK, *ONE, *words, "sampling.temperature=2", "task.rewards=[]", "task.teacher_beta=0.3"]).config
    zeros = np.zeros_like(student.batch["loss_mask"])
    fields = dict.fromkeys(("advantages", "log_probs", "reference_log_probs"), zeros)
    batch = student.batch | fields | {TEACHER: student.teacher.params}

    def loss(params, batch=batch, divide_by="tokens"):
        model, task = student.model.arch.module(params), cfg.task.model_copy(update={"divide_by": divide_by})
        loss = policy_loss(
            model, batch, task=task, sampling=cfg.sampling, chunk_size=4, z_loss=0.0,
            teacher=student.describe(0.3, cfg.sampling.temperature),
        )  # fmt: skip
        return loss.objective / loss.weight, loss.sums["teacher_kl"]

    with jax.set_mesh(student.model.mesh):
        (value, mean), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(student.params)
    (expected,) = (each for each in EXPECTED["losses"] if (each["beta"], each["temperature"]) == (0.3, 2.0))
    assert float(value) == pytest.approx(0.5 * expected["loss"], rel=2e-5)
    assert float(mean.total / mean.divisor) == pytest.approx(expected["loss"], rel=2e-5)
    assert norm(gradient) == pytest.approx(0.5 * expected["grad_norm"], rel=2e-5)
    # Of answers of two tokens each, the mean over answers is that over tokens.
    mask = student.batch["loss_mask"]
    two = batch | {"loss_mask": mask * (np.cumsum(mask, 1) <= 2)}
    assert two["loss_mask"].sum(1).tolist() == [2] * len(mask)
    with jax.set_mesh(student.model.mesh):
        means = jax.jit(lambda params: [loss(params, two, by)[0] for by in ("tokens", "answers")])(student.params)
    assert float(means[0]) == pytest.approx(float(means[1]), rel=1e-5)


def test_logits_of_all_tokens_never_exist(student):
    """Of neither model: the largest array of the traced gradient has one chunk of them."""
    rows, length = student.batch["tokens"].shape
    with jax.set_mesh(student.model.mesh):
        gradient = jax.grad(student._loss, has_aux=True)
        text = str(jax.make_jaxpr(gradient, static_argnums=(3, 4))(student.params, 1.0, 0.5, 0.3, 2))
    sizes = [[re.match(r"\d+", size) for size in found.split(",")] for found in re.findall(r"f32\[(\d[^\]]*)\]", text)]
    shapes = [[int(size[0]) for size in found if size] for found in sizes]
    with_vocabulary = [shape for shape in shapes if 97 in shape and len(shape) > 2]
    assert [rows, 2, 97] in with_vocabulary
    assert max(map(np.prod, with_vocabulary)) < rows * length * 97


def test_rows_that_one_model_lacks_have_no_probability(student):
    """A teacher with 96 rows of vocabulary for a model with 97: its distribution is the one that it has alone."""
    teacher = tunix.load_pretrained(PARITY / "qwen3")
    fitted = teacher.cfg.model_copy(update={"vocab_size": 97})

    def compute_probabilities(params, tokens):
        module = described.module(params)
        vocab_weights = module.vocab_weights()
        hidden, _ = module.hidden(vocab_weights, tokens)
        return jax.nn.softmax(module.logits(vocab_weights, hidden), -1)

    with jax.set_mesh(teacher.mesh):
        arch = describe(fitted, teacher.layout)
        params = jax.tree.map(partial(_fit_rows, teacher.layout), teacher.params, teacher.arch.weights, arch.weights)
        described = Teacher("qwen3", teacher.cfg, arch, 1.0, 1.0, True)
        tokens = student.batch["tokens"] % 96
        own = jax.jit(compute_probabilities)(params, tokens)
    np.testing.assert_allclose(own[..., :96], jax.nn.softmax(teacher(tokens), -1), atol=1e-6)
    assert not np.asarray(own[..., 96]).any()

    # A drawn token of that row says nothing of the teacher: its log-probability there would be -1e30.
    cfg = compose([*TASK, *ONE]).config
    batch = student.batch | {"tokens": tokens, "log_probs": np.full(tokens.shape, -1.5, np.float32)}
    batch["targets"] = np.where(np.arange(tokens.shape[1]) == 3, 96, batch["targets"] % 96)
    with jax.set_mesh(teacher.mesh):
        score = make_teacher_scorer(cfg, SimpleNamespace(teacher=described), params)
        rows = to_global({name: field[None] for name, field in batch.items()}, teacher.mesh)
        found = np.asarray(score(rows))[0]
    assert (found[:, 3] == -1.5).all()
    expected = np.take_along_axis(np.asarray(own), batch["targets"][..., None], 2)[..., 0]
    others = (batch["loss_mask"] > 0) & (batch["targets"] < 96)
    np.testing.assert_allclose(np.exp(found[others]), expected[others], rtol=1e-5)


def test_divergences_by_hand():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.6, 0.3])
    kl = lambda a, b: float((a * np.log(a / b)).sum())  # noqa: E731
    m = 0.25 * q + 0.75 * p
    for beta, expected in ((0, kl(q, p)), (1, kl(p, q)), (0.25, 0.25 * kl(q, m) + 0.75 * kl(p, m))):
        assert float(compute_divergence(jnp.log(p), jnp.log(q) + 3, beta)) == pytest.approx(expected, rel=1e-5)


# Runs.

NOTHING_ELSE = ("evaluation.every_steps=null", "data.held_out_fraction=0", "checkpoint.save_every_steps=1")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run whose model is another one."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    tunix.train([*TASK, *ONE, *NOTHING_ELSE, "seed=5", "training.max_steps=1", f"hydra.run.dir={folder}"])
    return folder


JUDGED = [
    *TASK, *NOTHING_ELSE, "task.rewards=[]", "training.max_steps=2", "task.steps_per_rollout=2",
    "checkpoint.save_every_steps=2", "seed=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def judged(teacher, tmp_path_factory):
    """Two steps of one rollout, of which a teacher alone says what is good."""
    folder = tmp_path_factory.mktemp("judged") / "run"
    tunix.train([*JUDGED, *ONE, f"task.teacher={teacher}", f"hydra.run.dir={folder}"])
    return folder


def test_sampled_tokens_are_judged(judged, teacher):
    """The divergence of metrics.jsonl is the mean gap of all tokens in samples.jsonl, whatever the steps of a rollout
    have of them; no reward is named without rewards."""
    line, _ = metrics(judged)
    assert not {"reward", "no_signal"} & line.keys()
    assert not metrics(judged, "held_out")
    model, gaps = tunix.load_pretrained(teacher), []
    answers = [json.loads(text) for text in (judged / "samples.jsonl").read_text().splitlines()]
    prompts = [model.vocab.backend.encode(answer["prompt"], add_special_tokens=False).ids for answer in answers]
    rows = np.zeros((len(answers), 16), np.int32)
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        row[: len(prompt) + len(answer["tokens"])] = prompt + answer["tokens"]
    log_probs = np.asarray(jax.nn.log_softmax(model(rows), -1))
    for of_row, prompt, answer in zip(log_probs, prompts, answers, strict=True):
        places = len(prompt) - 1 + np.arange(len(answer["tokens"]))
        gaps += (np.array(answer["log_probabilities"]) - of_row[places, answer["tokens"]]).tolist()
    assert len(gaps) > 32
    assert line["teacher_kl"] == pytest.approx(np.mean(gaps), abs=1e-5)


@pytest.mark.nightly
def test_another_mesh_judges_alike(judged, teacher, tmp_path):
    tunix.train(
        [*JUDGED, WIDE, "training.micro_batch_size=2", f"task.teacher={teacher}", f"hydra.run.dir={tmp_path}/run"]
    )
    (line, _), (other, _) = metrics(judged), metrics(tmp_path / "run")
    for name in ("teacher_kl", "loss", "grad_norm"):
        assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-7)


@pytest.mark.nightly
@pytest.mark.parametrize("loss", ["sampled", "full"])
def test_processes_share_a_teacher(loss, teacher, tmp_path):
    """Two processes with a device each give the numbers of one with both."""
    words = [
        *JUDGED, "model.mesh_shape=[[2],[fsdp]]", "training.micro_batch_size=4", f"task.teacher={teacher}",
        f"task.teacher_loss={loss}", "checkpoint.save_every_steps=null",
    ]  # fmt: skip
    with Processes(*words, "hydra.run.dir=run", folder=tmp_path, count=2) as run:
        assert [end.code for end in run.ends()] == [0, 0]
    tunix.train([*words, "distributed.allow_idle_devices=true", f"hydra.run.dir={tmp_path}/alone"])
    (together, _), (alone, _) = metrics(tmp_path / "run"), metrics(tmp_path / "alone")
    for name in ("teacher_kl", "loss", "grad_norm"):
        assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-7)


@pytest.mark.nightly
def test_a_resumed_run_has_the_same_teacher(teacher, tmp_path):
    """Whole distributions in the loss beside rewards: the same digits, though the teacher's run has gone on."""
    folder = tmp_path / "run"
    tunix.train(
        [*TASK, *ONE, *NOTHING_ELSE, f"task.teacher={teacher}", "task.teacher_loss=full", "training.max_steps=2",
         "checkpoint.max_to_keep=2", f"hydra.run.dir={folder}"]
    )  # fmt: skip
    saved = (folder / "config.yaml").read_text()
    assert f"teacher: {teacher}/checkpoints/1" in saved
    tunix.train([f"resume={folder}/checkpoints/1"])
    _, before, after = metrics(folder)
    assert before["teacher_kl"] > 0
    for name in ("loss", "grad_norm", "teacher_kl", "reward"):
        assert before[name] == after[name]


TEMPLATE = next(word for word in TASK if word.startswith("task.chat_template"))
OTHERS = [word for word in TASK if not word.startswith(("task.", "task=", "sampling"))]
TALK = [*OTHERS, *ONE, "task=sft", TEMPLATE, "loading.packing=pad", "checkpoint.save_every_steps=null"]


def test_documents_teach_beside_a_teacher(teacher, tmp_path):
    """task=sft: the held-out set has its divergence; the start report counts the teacher."""
    folder = tmp_path / "run"
    words = [f"task.teacher={teacher}", "training.max_steps=2", "evaluation.num_sequences=4", f"hydra.run.dir={folder}"]
    tunix.train([*TALK, *words])
    lines, (held_out,) = metrics(folder), metrics(folder, "held_out")
    assert all(line["teacher_kl"] > 0 for line in [*lines, held_out])
    assert re.search(
        r"teacher +/\S+/checkpoints/1: \w+, [\d,]+ parameters, [\d.]+ GiB", (folder / "train.log").read_text()
    )


@pytest.mark.nightly
@pytest.mark.filterwarnings("error:Some donated buffers")
def test_a_model_of_another_family_teaches(hf_dir, tmp_path):
    """A Llama of Hugging Face's with 320 rows of vocabulary; its tokenizer must be that of the run, where it has one."""
    llama, folder = shutil.copytree(hf_dir, tmp_path / "llama"), tmp_path / "run"
    words = [f"task.teacher={llama}", "training.max_steps=1", "evaluation.every_steps=null", f"hydra.run.dir={folder}"]
    with pytest.raises(
        UserError,
        match="has another tokenizer than the run: 277 tokens and 259; the first that differs is 'be', number 259",
    ):
        tunix.train([*TALK, *words])
    assert not folder.exists()
    (llama / "tokenizer.json").unlink()
    others = [word for word in TALK if word != "tokenizer=bytes"]
    tunix.train([*others, f"tokenizer.path={hf_dir}", "model.vocab_size=384", *words])
    (line,) = metrics(folder)
    assert 0 < line["teacher_kl"] < 10
    assert "has no tokenizer: its tokens are taken to be those of the run" in (folder / "train.log").read_text()


def test_the_plan_counts_the_teacher():
    """At rest on the mesh in the dtype of products: in steps and in rollouts, also where the loss does not take it."""

    def best(*words):
        mesh = "model.mesh_shape=[[4],[fsdp]]", "training.mixed_precision=bf16", "plan.num_compiled=0"
        return rank(compose([*TASK, *mesh, *words]).config, read_topology("h100:4")).fit[0]

    teacher = f"task.teacher={PARITY}/llama"
    alone, sampled, full = best(), best(teacher), best(teacher, "task.teacher_loss=full")
    weights = read_header_sizes(PARITY / "llama")
    for each in (sampled, full):
        assert 2 * weights / 4 < each.teacher_bytes == each.num_bytes["teacher"] < 2 * weights
        assert each.rollout_memory == alone.rollout_memory + each.teacher_bytes
    assert sampled.memory == max(alone.costs.memory + sampled.teacher_bytes, sampled.rollout_memory)
    assert full.costs.memory > sampled.costs.memory  # logits of two models


def read_header_sizes(folder) -> int:
    """Numbers in the weights of a folder of Hugging Face's."""
    with safe_open(folder / "model.safetensors", "numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def test_what_is_refused(teacher):
    for words, message in (
        (["task.rewards=[]"], r"task.rewards=\[\] leaves nothing to learn from"),
        (["task.teacher=/nowhere"], "task.teacher=/nowhere is neither a folder nor the ID"),
        (
            [f"task.teacher={teacher}", "task.refill=2", "task.rewards=[]"],
            r"task.refill=2 .* task.rewards=\[\] leaves none",
        ),
        (
            [f"task.teacher={teacher}", "task.refill=2", "task.rewards=[{function:exact_match,weight:0}]"],
            "task.refill=2 goes by rewards, and a weight of 0 for exact_match leaves none; name a reward",
        ),
        ([f"task.teacher={teacher}", "task.teacher_beta=0"], "task.teacher_beta=0 needs the whole distribution"),
        (
            [f"task.teacher={teacher}", "task.teacher_loss=full", "task.loss=next_token"],
            "task.loss=next_token knows nothing of task.teacher=",
        ),
    ):
        with pytest.raises(UserError, match=message):
            compose([*TASK, *words])
    seeing = compose([*TASK, *SEES]).config.model.vision
    check_images("x", seeing, seeing.model_copy(update={"embed_dim": 64, "image_mean": (0.0, 0.0, 0.0)}))
    check_images("x", None, seeing)  # rows of texts
    for other, message in (
        (None, "x sees no images, .*; where the data have no images, set training.images_per_row=0"),
        (seeing.model_copy(update={"image_size": 16}), "its model.vision.image_size is 16, and this model's is 8"),
    ):
        with pytest.raises(UserError, match=message):
            check_images("x", seeing, other)
    with pytest.raises(UserError, match="the first that differs is 'b', number 1"):
        check_tokenizers("x", {"a": 0, "b": 1}, {"a": 0, "c": 1, "d": 2})
