"""The loss of GRPO on models so small that all answers can be listed, and its parts on numbers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import reshard
from support.harness import ONE_LAYER, ROOT, SGD, SMALL, batch, program

import tunix
from tunix.config.compose import compose
from tunix.config.task import Grpo
from tunix.inference.engine import Answer
from tunix.rl.rollouts import ADVANTAGES, arrange_answers, count_microbatches, has_signal, plan_rows
from tunix.sharding.arrays import to_global
from tunix.training.choices import build_layout, build_mesh
from tunix.training.grpo import compute_gains, policy_loss, weigh_answers
from tunix.training.logprobs import Max, Mean, add_sums, compute_token_log_probs, report_sums
from tunix.training.state import describe

ONE = "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"
TASK = compose([*SMALL, *ONE, "task=grpo", "training.global_batch_size=8", "sampling.max_new_tokens=8"]).config.task
SAMPLING = compose([*SMALL, *ONE, "sampling.temperature=1", "sampling.max_new_tokens=2"]).config.sampling
VOCABULARY, PROMPT = 16, [3, 1, 4]
ROUNDING = 1e-5  # nats: the sampler and the loss are two programs, which may add up in another order


def task(**values) -> Grpo:
    assert isinstance(TASK, Grpo)
    return TASK.model_copy(update=values)


class World:
    """A model with a vocabulary of 16, and all of its 256 answers of two tokens to one prompt."""

    def __init__(self):
        cfg = compose([*SMALL, *ONE_LAYER, *ONE, "training.remat=none"]).config
        cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"vocab_size": VOCABULARY})})
        self.mesh = build_mesh(cfg)
        first, second = np.divmod(np.arange(VOCABULARY**2), VOCABULARY)
        text = np.concatenate([np.tile(PROMPT, (VOCABULARY**2, 1)), first[:, None], second[:, None]], 1).astype(
            np.int32
        )
        rows, length = len(text), text.shape[1] - 1
        self.mask = np.zeros((rows, length), np.float32)
        self.mask[:, len(PROMPT) - 1 :] = 1
        self.fields = {
            "tokens": text[:, :-1],
            "targets": text[:, 1:],
            "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
            "segment_ids": np.ones((rows, length), np.int32),
            "loss_mask": self.mask,
            "reference_log_probs": np.zeros((rows, length), np.float32),
        }
        with jax.set_mesh(self.mesh):
            arch = describe(cfg.model, build_layout(cfg, self.mesh))
            self.model, self.chosen = arch.module, (first, second)
            weights = jax.tree.leaves(arch.weights)
            rng = np.random.default_rng(0)
            values = [jnp.asarray(0.3 * rng.normal(size=weight.shape), jnp.float32) for weight in weights]
            self.params = jax.tree.unflatten(jax.tree.structure(arch.weights), values)
            batch = self.on_device(self.fields)

            def log_probs(params):
                return compute_token_log_probs(arch.module(params), batch, None, chunk_size=64)[0]

            self.log_probs = np.asarray(jax.jit(log_probs)(self.params))
            self.probabilities = np.exp((self.log_probs * self.mask).sum(1))

            @jax.jit
            def gradient(params, batch):
                def objective(params):
                    loss = policy_loss(
                        arch.module(params), batch, task=task(), sampling=SAMPLING, chunk_size=64, z_loss=0.0
                    )
                    return loss.objective, (loss.weight, loss.sums)

                return jax.grad(objective, has_aux=True)(params)

            self.gradient, self.by_hand = gradient, jax.jit(self._by_hand)

    def on_device(self, fields):
        return {name: leaf[0] for name, leaf in to_global({k: v[None] for k, v in fields.items()}, self.mesh).items()}

    def learn(self, advantages, **fields):
        """Gradient, weight and sums of the loss for these advantages of all answers."""
        of_tokens = np.broadcast_to(advantages[:, None], self.mask.shape).astype(np.float32)
        given = {"advantages": of_tokens, "log_probs": self.log_probs, **fields}
        with jax.set_mesh(self.mesh):
            gradient, (weight, sums) = self.gradient(self.params, self.on_device(self.fields | given))
        return gradient, float(weight), sums

    def expectation(self, value):
        """Gradient of the expected value [answers] of an answer, by hand: softmax, product, sum over all answers."""
        with jax.set_mesh(self.mesh):
            return self.by_hand(self.params, value)

    def _by_hand(self, params, value):
        tokens, (first, second) = self.fields["tokens"], self.chosen

        def expected(params):
            shares = reshard(jax.nn.softmax(self.model(params)(tokens), -1), jax.P())
            one, two = (
                jnp.sum(shares[:, index] * jax.nn.one_hot(chosen, VOCABULARY), -1)
                for index, chosen in ((len(PROMPT) - 1, first), (len(PROMPT), second))
            )
            return jnp.sum(one * two * value)

        return jax.grad(expected)(params)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def distance(a, b) -> float:
    """Norm of the difference of two trees, as a share of the norm of the second; on the host, in float64."""
    one, other = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)], dtype=float) for tree in (a, b))
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def test_the_gradient_is_that_of_the_expected_reward(world):
    """Over all answers, each weighted by its probability; a baseline changes nothing; KL as a reward is exact."""
    rewards = np.random.default_rng(0).normal(size=VOCABULARY**2)
    truth = world.expectation(rewards)
    for baseline in (0.0, 0.7):
        gradient, weight, sums = world.learn(world.probabilities * (rewards - baseline))
        assert distance(jax.tree.map(np.negative, gradient), truth) < 1e-5
        numbers = report_sums(sums, weight)
        assert float(numbers["ratio_max"]) == 1
        assert float(numbers["clipped"]) == 0
        assert 0 <= float(numbers["mismatch"]) <= float(numbers["mismatch_max"]) < ROUNDING
        assert weight == 2 * VOCABULARY**2
    reference = world.log_probs + 0.3 * np.random.default_rng(1).normal(size=world.log_probs.shape)
    penalty = ((world.log_probs - reference) * world.mask).sum(1)  # k1 of each answer
    gradient, *_ = world.learn(world.probabilities * penalty)
    # d KL = d sum p (log p - log q) = sum dp (log p - log q), because sum dp = 0
    assert distance(jax.tree.map(np.negative, gradient), world.expectation(penalty)) < 1e-5


def test_what_does_not_count_changes_nothing(world):
    """Fields where the mask is 0; a group of equal rewards has no gradient."""
    rewards = world.probabilities * np.random.default_rng(0).normal(size=VOCABULARY**2)
    strange = np.where(world.mask > 0, world.log_probs, 1e4).astype(np.float32)
    one, _, sums = world.learn(rewards)
    two, _, other = world.learn(rewards, log_probs=strange)
    assert distance(one, two) == 0
    assert float(sums["mismatch_max"].value) == float(other["mismatch_max"].value) < ROUNDING
    for advantage in ADVANTAGES.values():
        nothing, *_ = world.learn(advantage(np.full((32, 8), 0.7)).reshape(-1))
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(nothing)) < 1e-12
    masked, weight, sums = world.learn(rewards, loss_mask=np.zeros_like(world.mask))
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(masked))
    # Without a weight the step changes nothing, nor do decay and momentum, and its loss is null.
    assert weight == 0
    assert [name for name, value in report_sums(sums, weight).items() if not np.isfinite(float(value))] == ["loss"]


def test_importance_weights_are_measured_and_capped(world):
    """The sampler was less sure of every token by log 1.5, or by log 5: weights 1.5, and the cap 2."""
    rewards = world.probabilities * np.random.default_rng(0).normal(size=VOCABULARY**2)
    plain, *_ = world.learn(rewards)
    for factor, weight in ((1.5, 1.5), (5.0, 2.0)):
        gradient, _, sums = world.learn(rewards, log_probs=world.log_probs - np.float32(np.log(factor)))
        assert distance(gradient, jax.tree.map(lambda g, w=weight: w * np.asarray(g), plain)) < 1e-5
        mismatch = sums["mismatch"]
        assert float(mismatch.total / mismatch.divisor) == pytest.approx(np.log(factor), rel=1e-5)


def test_parts_of_the_loss_have_the_share_of_their_answers(world):
    """z_loss and entropy at the temperature of the answers, of answers of one and of two tokens that count equally."""
    mask = world.mask.copy()
    mask[::3, -1] = 0
    zeros = dict.fromkeys(("advantages", "log_probs"), np.zeros_like(mask))
    batch = world.on_device(world.fields | zeros | {"loss_mask": mask})
    sampling = SAMPLING.model_copy(update={"temperature": 0.7})

    @jax.jit
    def compute(params):
        keys = {"task": task(divide_by="answers"), "sampling": sampling, "chunk_size": 64, "z_loss": 0.1}
        return policy_loss(world.model(params), batch, **keys), world.model(params)(world.fields["tokens"])

    with jax.set_mesh(world.mesh):
        loss, logits = jax.device_get(compute(world.params))
    log_z = np.log(np.exp(logits / 0.7).sum(-1))
    log_probs = logits / 0.7 - log_z[..., None]
    assert loss.weight == len(mask)
    assert loss.objective == pytest.approx(0.1 * np.sum(log_z**2 * mask / mask.sum(1, keepdims=True)), rel=1e-5)
    entropy = -np.sum(np.exp(log_probs) * log_probs, -1)
    assert report_sums(loss.sums, loss.weight)["entropy"] == pytest.approx(
        np.sum(entropy * mask) / mask.sum(), rel=1e-5
    )


MASK = np.array([[0, 1, 1, 1], [1, 1, 0, 0]], np.float32)
OLD = np.array([[-9, -1, -2, -3], [-1, -2, -9, -9]], np.float32)
MOVE = np.array([[0, 0.5, -0.5, 0.1], [1.5, -0.1, 3, 3]], np.float32)  # log p - log p_old
ADVANTAGE = np.array([[1.0] * 4, [-2.0] * 4], np.float32)
FIELDS = {"loss_mask": MASK, "advantages": ADVANTAGE, "log_probs": OLD, "reference_log_probs": OLD - 0.2}
FIELDS["segment_ids"] = np.ones_like(MASK, np.int32)


@pytest.mark.parametrize("ratio", ["token", "answer"])
@pytest.mark.parametrize("clip", ["ratio", "weights"])
def test_clipped_gradients_are_those_of_the_formula(ratio, clip):
    """With two steps on a rollout. By hand: the factor that multiplies the gradient of each token's log-probability."""
    settings = task(steps_per_rollout=2, ratio=ratio, clip=clip, max_importance=3.0)

    def total(log_probs):
        gains = compute_gains(log_probs, FIELDS, settings)
        return jnp.sum(gains.gain), gains

    slope, gains = jax.jit(jax.grad(total, has_aux=True))(OLD + MOVE)
    logs = MOVE * MASK
    if ratio == "answer":
        logs = logs.sum(1, keepdims=True) / MASK.sum(1, keepdims=True) * MASK
    value, advantage = np.exp(logs), ADVANTAGE
    if clip == "weights":
        requested = np.clip(value, 0.8, 1.28) * advantage
    else:
        free = np.where(advantage > 0, value <= 1.28, (value >= 0.8) & (value <= 3.0))
        requested = value * advantage * free
        if ratio == "answer":  # each token has its share of the gradient of the answer's ratio
            requested = (requested * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True)
    np.testing.assert_allclose(slope, requested * MASK, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gains.ratio, value * MASK, rtol=1e-6)
    outside = np.where(advantage > 0, value > 1.28, value < 0.8)
    np.testing.assert_array_equal(gains.is_clipped, outside * MASK)


TRL = json.loads((ROOT / "tests" / "training" / "trl" / "policy.json").read_text())
SHARED = {"steps_per_rollout": 2, "max_importance": None}
OF_REFERENCE = SHARED | {"divide_by": "answers", "kl_coefficient": TRL["kl_coefficient"]}
TRL_TASKS = {
    "tokens": SHARED,
    "answers": SHARED | {"divide_by": "answers"},
    "constant": SHARED | {"divide_by": "constant"},
    "divergence": OF_REFERENCE | {"kl": "loss"},
    "weighted": OF_REFERENCE | {"kl": "weighted"},
    "bounded": SHARED | {"max_importance": TRL["delta"]},
    "cispo": SHARED | {"clip": "weights", "clip_low": 1.0},
    "gspo": SHARED | {"divide_by": "answers", "ratio": "answer"},
    "gspo_tokens": SHARED | {"ratio": "answer"},
    "sapo": SHARED | {"divide_by": "answers", "clip": "soft"},
    "on_policy": OF_REFERENCE | {"steps_per_rollout": 1, "kl": "weighted"},
    "token_truncate": {"importance": "truncate"},
    "token_mask": {"importance": "mask"},
    "sequence_truncate": {"importance": "sequence"},
    "sequence_mask": {"importance": "sequence_mask"},
}


@pytest.fixture(scope="module")
def of_trl():
    """TRL's answers in rows, their log-probabilities, and the norm of the gradient of a loss of these."""
    model = tunix.load_pretrained(ROOT / "tests" / "models" / "parity" / "llama")
    head = json.loads((ROOT / "tests" / "training" / "trl" / "losses.json").read_text())["head"]
    params = model.params | {"head": {"table": model.params["head"]["table"] * head}}
    rows = TRL["answers"]
    answers = [Answer(row["answer"], row["sampled"], row["sampled"], True) for row in rows]
    fields = arrange_answers([row["prompt"] for row in rows], answers, 16, None)
    reference = np.zeros_like(fields["log_probs"])
    reference[fields["loss_mask"] > 0] = np.concatenate([row["reference"] for row in rows])
    advantages = np.array(TRL["advantages"], np.float32)[:, None] * fields["loss_mask"]
    fields |= {"reference_log_probs": reference, "advantages": advantages}

    def score(params):
        keys = {"chunk_size": 8, "temperature": TRL["temperature"]}
        return compute_token_log_probs(model.arch.module(params), fields, None, **keys)[0]

    def norm(slope):
        return optax.tree.norm(jax.vjp(score, params)[1](slope)[0])

    with jax.set_mesh(model.mesh):
        log_probs, norm = jax.jit(score)(params), jax.jit(norm)
        yield fields, np.asarray(log_probs), lambda slope: float(norm(reshard(slope, jax.typeof(log_probs).sharding)))


@pytest.mark.parametrize("name", TRL_TASKS)
def test_losses_and_gradients_are_trls(name, of_trl):
    fields, log_probs, norm = of_trl
    limits = {"clip_low": TRL["clip_low"], "clip_high": TRL["clip_high"], "max_importance": TRL["cap"]}
    settings = task(**limits | {"divide_by": "tokens"} | TRL_TASKS[name])
    share, weights = weigh_answers(fields, settings, TRL["max_new_tokens"])

    @jax.jit
    def loss(log_probs):
        gains = compute_gains(log_probs, fields, settings)
        return -jnp.sum(gains.gain * fields["loss_mask"] * share) / jnp.sum(weights), gains

    (value, gains), slope = jax.value_and_grad(loss, has_aux=True)(log_probs)
    numbers = {"loss": value, "grad_norm": norm(slope), "clipped": np.sum(gains.is_clipped) / fields["loss_mask"].sum()}
    if gains.kl is not None:
        numbers["kl"] = np.sum(gains.kl) / fields["loss_mask"].sum()
    if settings.clip == "soft":
        assert not np.any(gains.is_clipped)
    for key, value in TRL["losses"][name].items():
        assert float(numbers[key]) == pytest.approx(value, rel=2e-5, abs=1e-6), key


def test_a_step_in_microbatches_has_the_same_gradient():
    """Of answers of unequal lengths: a mean of the means of microbatches would be another number."""
    rows, length, rng = 8, 32, np.random.default_rng(0)
    given = batch(rows)
    masks = (np.arange(length) < rng.integers(1, length, (rows, 1))).astype(np.float32)
    given |= {"loss_mask": masks[None], "advantages": rng.normal(size=(1, rows, length)).astype(np.float32)}
    given |= {
        name: rng.normal(-5, 0.1, (1, rows, length)).astype(np.float32) for name in ("log_probs", "reference_log_probs")
    }
    numbers = []
    for count in (1, 2, 4):
        words = [f"training.micro_batch_size={rows // count}", "model.num_layers=1"]
        step = program(
            *ONE,
            "task=grpo",
            "sampling.max_new_tokens=8",
            "training.global_batch_size=8",
            "model.global_every=1",
            *SGD,
            *words,
        )
        cut = {name: field.reshape(count, rows // count, *field.shape[2:]) for name, field in given.items()}
        numbers.append(step.run(cut, steps=1)[0])
    for other in numbers[1:]:
        for name in ("loss", "grad_norm", "entropy", "mismatch", "ratio_max"):
            assert other[name] == pytest.approx(numbers[0][name], rel=1e-5), name


def test_divisors():
    shares = {name: weigh_answers(FIELDS, task(divide_by=name), 10) for name in ("tokens", "answers", "constant")}
    assert [float(weights.sum()) for _, weights in shares.values()] == [5, 2, 20]
    np.testing.assert_allclose(shares["answers"][0], [[1 / 3] * 4, [1 / 2] * 4])
    np.testing.assert_array_equal(shares["tokens"][0], shares["constant"][0])


def test_divergence_in_the_loss_is_k3():
    settings = task(kl="loss", kl_coefficient=0.5)
    gains, plain = (compute_gains(jnp.array(OLD), FIELDS, each) for each in (settings, task()))
    assert plain.kl is None
    k3 = (np.exp(-0.2) - 1 + 0.2) * MASK
    np.testing.assert_allclose(gains.kl, k3, rtol=1e-4)
    np.testing.assert_allclose(plain.gain - gains.gain, 0.5 * k3, rtol=1e-4)
    rewarded = compute_gains(jnp.array(OLD), FIELDS, task(kl="advantage", kl_coefficient=0.5))  # it is in the rewards
    np.testing.assert_array_equal(rewarded.gain, plain.gain)
    np.testing.assert_array_equal(rewarded.kl, gains.kl)


def test_sums_of_microbatches():
    total = add_sums(
        {"loss": jnp.float32(3), "kl": Mean(jnp.float32(1), jnp.float32(4)), "most": Max(jnp.float32(2))},
        {"loss": jnp.float32(1), "kl": Mean(jnp.float32(1), jnp.float32(6)), "most": Max(jnp.float32(1))},
    )
    numbers = {name: float(value) for name, value in report_sums(total, jnp.float32(8)).items()}
    assert numbers == pytest.approx({"loss": 0.5, "kl": 0.2, "most": 2})


def test_advantages_of_groups():
    rewards = np.array([[1.0, 0, 0, 1], [2, 2, 2, 2]])
    np.testing.assert_array_equal(ADVANTAGES["centered"](rewards), [[0.5, -0.5, -0.5, 0.5], [0] * 4])
    np.testing.assert_array_equal(ADVANTAGES["group_std"](rewards), [[1, -1, -1, 1], [0] * 4])
    np.testing.assert_allclose(
        ADVANTAGES["batch_std"](rewards), 0.5 / rewards.std() * np.array([[1, -1, -1, 1], [0] * 4])
    )
    np.testing.assert_allclose(ADVANTAGES["leave_one_out"](rewards)[0], [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert has_signal(ADVANTAGES["centered"](rewards)).tolist() == [True, False]


@pytest.mark.parametrize(
    "values",
    [
        {"divide_by": "tokens"},
        {"divide_by": "answers", "ratio": "answer", "steps_per_rollout": 2},
        {"divide_by": "constant", "importance": "sequence"},
    ],
    ids=["tokens", "ratio of answers", "weights of answers"],
)
def test_answers_that_share_rows_have_the_same_gains(values):
    """Four answers alone, and in rows of three and one: numbers of each token, shares and the divisor."""
    rng, lengths = np.random.default_rng(0), np.array([4, 3, 8, 1])
    here = (np.arange(8) < lengths[:, None]).astype(np.int32)
    alone = {
        "segment_ids": here,
        "loss_mask": (here * (np.arange(8) > 0)).astype(np.float32),
        **{name: rng.normal(size=(4, 8)).astype(np.float32) * here for name in ("advantages", "log_probs")},
        "reference_log_probs": np.zeros((4, 8), np.float32),
    }
    log_probs = rng.normal(size=(4, 8)).astype(np.float32) * here
    plan = plan_rows(lengths, 8, 3)
    assert plan.num_rows == 2
    packed = plan.pack(alone | {"now": log_probs}, 3)  # the third row is padding
    one, two = task(**values, answers_per_row=1), task(**values, answers_per_row=3)
    before = jax.jit(lambda: compute_gains(log_probs, alone, one))()
    after = jax.jit(lambda: compute_gains(packed["now"], packed, two))()
    for name in ("gain", "ratio", "is_clipped", "gap"):
        found = plan.unpack(np.asarray(getattr(after, name)))
        np.testing.assert_allclose(found, getattr(before, name), rtol=1e-5, atol=1e-6, err_msg=name)
    share, weights = jax.jit(lambda: weigh_answers(alone, one, 10))()
    packed_share, packed_weights = jax.jit(lambda: weigh_answers(packed, two, 10))()
    np.testing.assert_allclose(plan.unpack(np.asarray(packed_share)) * here, share * here, rtol=1e-6)
    assert float(packed_weights.sum()) == float(weights.sum())


def test_rows_and_microbatches_of_a_plan():
    plan = plan_rows(np.array([4, 3, 8, 2]), 9, 1)
    assert (plan.rows.tolist(), plan.starts.tolist(), plan.numbers.tolist()) == ([0, 1, 2, 3], [0] * 4, [1] * 4)
    assert plan_rows(np.array([2, 2, 2, 2]), 8, 3).numbers.tolist() == [1, 2, 3, 1]  # at most three in a row
    assert [count_microbatches(rows, 4, 32, 1) for rows in (1, 16, 17, 128)] == [4, 4, 8, 32]
    assert [count_microbatches(rows, 4, 6, 3) for rows in (1, 12, 13)] == [3, 3, 6]
