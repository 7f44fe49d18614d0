"""Update rules are optax's, schedules have the shapes they are named after, groups do what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from support.harness import ONE_LAYER, SMALL, batch, program

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.optimizers.moments import Block, _decode, _encode, _select_block, _to_half
from tunix.optimizers.table import make_by_matrix
from tunix.sharding.table import Equation
from tunix.training.choices import build_layout, build_mesh
from tunix.training.optimizer import check_phases, count_phase_steps, make_optimizer, make_schedule
from tunix.training.state import Weight, describe

CONSTANT = ["scheduler=constant", "scheduler.warmup_ratio=0", "training.max_grad_norm=null"]


@pytest.fixture(scope="module")
def weights():
    cfg = compose([*SMALL, "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        return describe(cfg.model, build_layout(cfg, mesh)).weights


def random_tree(weights, seed: int, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda weight: jnp.asarray(rng.normal(size=weight.shape), dtype), weights)


def moved(weights, *words: str, steps: int = 2):
    """Parameters before and after some steps at the peak rate, with random gradients."""
    cfg = compose(list(words)).config
    tx = make_optimizer(cfg.optimizer, weights, None)
    before = params = random_tree(weights, 0)
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    for step in range(steps):
        direction, state = update(random_tree(weights, step + 1), state, params)
        params = jax.tree.map(
            lambda p, d: np.asarray(p) - cfg.optimizer.learning_rate * np.asarray(d), params, direction
        )
    return before, params


REFERENCES = {
    "adamw": lambda rate, matrices: optax.adamw(rate, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=matrices),
    "lion": lambda rate, matrices: optax.lion(rate, 0.9, 0.98, weight_decay=0.5, mask=matrices),
    "sgd": lambda rate, matrices: optax.sgd(rate, 0.9, nesterov=True),
    "adafactor": lambda rate, matrices: optax.adafactor(rate),
}


def split_layers(weights, tree):
    """Return a tree in which each array of all layers is a list of those of each layer."""
    return jax.tree.map(
        lambda weight, array: list(np.asarray(array)) if weight.equation.is_stacked else array, weights, tree
    )


def test_an_update_without_decay_does_not_read_parameters():
    """A product of 0 and a parameter would cost an array of zeros, and be no number where the parameter is none."""
    weights = {"w": Weight(Equation("BTD,DF->BTF"), (2, 2), "float32")}
    tx = make_optimizer(compose(["optimizer=sgd", "optimizer.weight_decay=0"]).config.optimizer, weights, None)
    params, gradients = {"w": np.full((2, 2), np.inf)}, {"w": np.ones((2, 2))}
    direction, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
    assert np.isfinite(direction["w"]).all()


@pytest.mark.parametrize("name", REFERENCES)
def test_steps_are_optaxs(name, weights):
    """Each layer by itself: its updates do not depend on the layers in the same array."""
    before, after = moved(weights, f"optimizer={name}", "optimizer.learning_rate=0.01")
    matrices = split_layers(
        weights, jax.tree.map(lambda weight: np.full(weight.shape[0], not weight.equation.is_vector), weights)
    )
    matrices = jax.tree.map(lambda mask: bool(np.all(mask)), matrices)
    expected = split_layers(weights, before)
    reference = REFERENCES[name](0.01, matrices)

    @jax.jit
    def take_step(gradients, state, params):
        updates, state = reference.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(reference.init)(expected)
    for step in range(2):
        expected, state = take_step(split_layers(weights, random_tree(weights, step + 1)), state, expected)
    after = split_layers(weights, after)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), after, expected)


def update_both(name, moments, weights):
    """Yield what an optimizer adds with whole and with small moments, and both states, after each of three steps."""
    rules = [compose([f"optimizer={name}", f"optimizer.moments={kind}"]).config.optimizer.rule(weights)
             for kind in ("param", moments)]  # fmt: skip
    params = random_tree(weights, 0)
    states, updates = [jax.jit(rule.init)(params) for rule in rules], [jax.jit(rule.update) for rule in rules]
    for step in range(3):
        gradients = random_tree(weights, step + 1)
        both = [update(gradients, state, params) for update, state in zip(updates, states, strict=True)]
        (whole, small), states = zip(*both, strict=True)
        yield whole, small, states


@pytest.mark.nightly(but=["int8-1.2-0.05"])
@pytest.mark.parametrize(("moments", "bytes_of_a_number", "tolerance"), [("bfloat16", 2, 0.01), ("int8", 1.2, 0.05)])
def test_smaller_moments_give_almost_the_same_direction(moments, bytes_of_a_number, tolerance, weights):
    """Norms and biases keep float32."""
    steps = list(update_both("adamw", moments, weights))
    for expected, direction, _ in steps:
        for a, b in zip(*map(jax.tree.leaves, jax.device_get((direction, expected))), strict=True):
            assert np.sqrt(np.mean((a - b) ** 2)) < tolerance
            assert np.max(np.abs(a)) < 1.5 * np.max(np.abs(b))
    states = steps[-1][2]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((states[1].mu["blocks"]["mlp"], states[1].nu["blocks"]["mlp"])))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(random_tree(weights, 0)["blocks"]["mlp"]))
    assert held <= 2 * numbers * bytes_of_a_number


@pytest.mark.nightly
@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_smaller_moments_are_the_same_on_every_mesh(moments):
    words = [f"optimizer.moments={moments}", "optimizer.learning_rate=1e-3", *CONSTANT, *ONE_LAYER]
    one = program("model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", *words).run(batch(), steps=3)
    many = program("model.mesh_shape=[[2,2,2],[dp,fsdp,tp]]", *words).run(batch(), steps=3)
    np.testing.assert_allclose([m["loss"] for m in many], [m["loss"] for m in one], rtol=2e-5)


def test_muon_is_optaxs(weights):
    """Its state too, so that checkpoints that were written with optax's own rule fit.

    In 64 bits, as the iterations of Muon enlarge the rounding of 32, in which CPUs add up in different orders.
    """

    def dims(weight):
        equation = weight.equation
        if equation.is_vector or "V" in equation.w:
            return None
        out = [n for n, dim_name in enumerate(equation.w) if dim_name not in equation.summed + equation.copies]
        return optax.contrib.MuonDimensionNumbers([equation.w.index(dim_name) for dim_name in equation.summed], out)

    ours = compose(["optimizer=muon"]).config.optimizer.rule(weights)
    places = jax.tree.map(dims, weights)
    reference = optax.contrib.muon(
        1.0, beta=0.95, adam_b1=0.9, adam_b2=0.95, muon_weight_dimension_numbers=places, consistent_rms=0.2
    )
    update, update_reference = jax.jit(ours.update), jax.jit(reference.update)
    with jax.enable_x64(True):
        params = random_tree(weights, 0, jnp.float64)
        state, expected = jax.jit(ours.init)(params), jax.jit(reference.init)(params)
        assert jax.tree.structure(state) == jax.tree.structure((expected, optax.EmptyState()))
        for step in range(2):
            gradients = random_tree(weights, step + 1, jnp.float64)
            direction, state = update(gradients, state, params)
            updates, expected = update_reference(gradients, expected, params)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(-a, b, rtol=1e-6, atol=1e-6), direction, updates)


@pytest.mark.parametrize("name", ["muon", "adafactor", "lion"])
def test_a_matrix_without_a_gradient_stays(name):
    """As that of an expert which no token has chosen."""
    weights = {"w": Weight(Equation("BTD,DF->BTF"), (4, 2), "float32")}
    rule, params = compose([f"optimizer={name}"]).config.optimizer.rule(weights), random_tree(weights, 0)
    direction, _ = jax.jit(rule.update)(jax.tree.map(jnp.zeros_like, params), rule.init(params), params)
    assert not np.any(direction["w"])


def test_each_expert_is_clipped_by_itself():
    weights = {"w": Weight(Equation("XCD,LXDF->XCF"), (2, 3, 4, 2), "float32")}
    updates = jnp.ones((2, 3, 4, 2)).at[1, 2].set(8)
    clipped, _ = make_by_matrix(optax.clip_by_block_rms(2.0), weights).update({"w": updates}, None, {"w": updates})
    np.testing.assert_array_equal(clipped["w"], updates.at[1, 2].set(2))


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((256, 64), Block(1, 64)),  # no axis splits F at rest but tp: no block is on two devices
        ((256, 16), Block(0, 128)),
        ((24, 6), Block(0, 8)),
        ((6, 10), None),  # scales would take as much as codes save
    ],
)
def test_blocks_of_8_bit_moments(shape, block):
    assert _select_block(Weight(Equation("BTD,DF->BTF"), shape, "float32")) == block


def test_muon_moves_matrices_along_orthogonal_directions(weights):
    """Each layer's matrix [fan-in, fan-out] is its own, whatever its dimensions; embeddings and norms are AdamW's."""
    before, after = moved(
        weights, "optimizer=muon", "optimizer.learning_rate=0.01", "optimizer.weight_decay=0", steps=1
    )
    change = jax.tree.map(lambda a, b: np.asarray(a - b), after, before)
    attention, mlp = change["blocks"]["attention"], change["blocks"]["mlp"]
    queries, outputs = attention["q"]["w"].reshape(3, 32, 32), attention["o"]["w"].reshape(3, 32, 32)
    for stack in (queries, outputs, mlp["down"]["w"], mlp["up"]["w"]):
        for matrix in stack:
            singular = np.linalg.svd(matrix, compute_uv=False)
            assert singular.max() / singular[-3] < 2.5  # those of a random square matrix span more than 20
    for adams in (
        change["embedding"]["table"],
        change["blocks"]["pre_mlp"]["scale"],
    ):  # its first step goes by sign alone
        np.testing.assert_allclose(np.abs(adams), np.abs(adams).max(), rtol=1e-3)


def test_no_decay_on_vectors(weights):
    decayed, plain = (moved(weights, f"optimizer.weight_decay={w}")[1] for w in (0.5, 0))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), decayed, plain)
    assert same == jax.tree.map(lambda weight: weight.equation.is_vector, weights)


def test_groups_set_decay_and_rate_of_what_they_match(weights):
    groups = (
        "optimizer.groups=[{params:'mlp[.]up',weight_decay:0},{params:embedding,learning_rate:0.001},"
        "{params:mlp,weight_decay:2},{params:final_norm,weight_decay:1}]"
    )
    base = ["optimizer.learning_rate=0.01", "optimizer.weight_decay=1"]
    before, plain = moved(weights, *base, steps=1)
    _, grouped = moved(weights, *base, groups, steps=1)

    def change(after, *path: str):
        old = before
        for key in path:
            old, after = old[key], after[key]
        return np.asarray(old), np.asarray(after - old)

    mlp = ("blocks", "mlp")
    old, up = change(grouped, *mlp, "up", "w")
    np.testing.assert_allclose(up, change(plain, *mlp, "up", "w")[1] + 0.01 * old, atol=1e-6)  # decay 0, not 1
    old, down = change(grouped, *mlp, "down", "w")
    np.testing.assert_allclose(down, change(plain, *mlp, "down", "w")[1] - 0.01 * old, atol=1e-6)  # decay 2, not 1
    np.testing.assert_allclose(
        change(grouped, "embedding", "table")[1], change(plain, "embedding", "table")[1] / 10, atol=1e-6
    )
    old, norm = change(grouped, "final_norm", "scale")
    np.testing.assert_allclose(
        norm, change(plain, "final_norm", "scale")[1] - 0.01 * old, atol=1e-6
    )  # asked for: vectors too
    np.testing.assert_array_equal(grouped["blocks"]["attention"]["q"]["w"], plain["blocks"]["attention"]["q"]["w"])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("[{params:nothing}]", r"params=nothing matches no parameter; parameters are blocks.attention"),
        ("[{params:embeddings.weight}]", r"matches no parameter; did you mean embedding\?; parameters are "),
        ("[{params:mlp},{params:'mlp[.]up'}]", r"groups.1.params=mlp\[.\]up matches blocks.mlp.up.w, which an earlier"),
    ],
)
def test_a_group_that_matches_nothing_is_an_error(groups, message, weights):
    cfg = compose([f"optimizer.groups={groups}"]).config.optimizer
    with pytest.raises(UserError, match=message):
        make_optimizer(cfg, weights, None)


def schedule(*overrides: str, steps: int = 100) -> np.ndarray:
    cfg = compose(list(overrides)).config.scheduler
    rate = make_schedule(cfg, 2.0, [(steps, 10)])
    return np.asarray(jax.jit(jax.vmap(rate))(jnp.arange(steps))) / 2.0


def test_schedules():
    warm = ["scheduler.warmup_steps=10"]
    for name in ("warmup_cosine", "warmup_linear", "constant", "wsd", "inverse_sqrt", "sqrt_decay", "cosine_hold"):
        rates = schedule(f"scheduler={name}", *warm)
        np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6, err_msg=name)
        assert (np.diff(rates[10:]) <= 1e-6).all(), name
    share = np.arange(90) / 90
    np.testing.assert_allclose(
        schedule("scheduler=warmup_cosine", *warm)[10:], 0.1 + 0.9 * (1 + np.cos(np.pi * share)) / 2, rtol=1e-5
    )
    np.testing.assert_allclose(schedule("scheduler=warmup_linear", *warm)[10:], 1 - share, atol=1e-6)
    np.testing.assert_allclose(schedule("scheduler=constant", *warm)[10:], 1)
    np.testing.assert_allclose(
        schedule("scheduler=inverse_sqrt", *warm)[10:], np.sqrt(10 / np.arange(10, 100)), rtol=1e-6
    )
    falling = np.arange(20) / 20
    wsd, root = (schedule(f"scheduler={name}", *warm, "scheduler.decay_steps=20") for name in ("wsd", "sqrt_decay"))
    np.testing.assert_allclose(wsd[10:], np.concatenate([np.ones(70), 1 - falling]), atol=1e-6)
    np.testing.assert_allclose(root[10:], np.concatenate([np.ones(70), 1 - np.sqrt(falling)]), atol=1e-6)
    held = schedule("scheduler=cosine_hold", *warm, "scheduler.decay_steps=20", "scheduler.final_ratio=0.2")
    np.testing.assert_allclose(
        held[10:], np.concatenate([np.ones(70), 0.2 + 0.4 * (1 + np.cos(np.pi * falling))]), atol=1e-6
    )
    np.testing.assert_allclose(schedule("scheduler=range_test"), 1e-5 ** (1 - np.arange(100) / 100), rtol=1e-4)


def test_phases_in_steps_tokens_and_ratio():
    def count(*words: str, phase: str = "warmup", spans=((200, 10),)) -> int:
        return count_phase_steps(compose(list(words)).config.scheduler, phase, spans)

    assert count("scheduler.warmup_ratio=0.1") == 20
    assert count("scheduler.warmup_tokens=500") == 50
    assert count("scheduler.warmup_steps=7") == 7
    assert count("scheduler.warmup_steps=0") == 0
    stages = ((10, 10), (20, 30))  # 10 steps of 10 tokens, then 20 of 30
    found = [count(f"scheduler.warmup_tokens={tokens}", spans=stages) for tokens in (70, 190, 1000)]
    assert found == [7, 10 + 3, 10 + 30]
    words = ["scheduler=wsd", "scheduler.decay_tokens=660"]  # which ends with the run
    assert count(*words, phase="decay", spans=stages) == 20 + 6
    assert schedule("scheduler=constant", "scheduler.warmup_steps=0")[0] == 1


@pytest.mark.parametrize(
    ("words", "steps", "told"),
    [
        ("scheduler.warmup_steps=50", 50, ""),
        ("scheduler.warmup_steps=50", 10, "warmup of 50 steps, of 10 in all; set scheduler.warmup_steps"),
        ("scheduler=wsd scheduler.warmup_tokens=60 scheduler.decay_steps=5", 10, "warmup of 6 and decay of 5 steps, of 10 in all"),
        ("scheduler=constant scheduler.warmup_steps=6 scheduler.decay_steps=5", 10, ""),
    ],
)  # fmt: skip
def test_a_schedule_longer_than_the_run_is_told_of(words, steps, told):
    said = check_phases(compose(words.split()).config.scheduler, [(steps, 10)])
    assert told in said
    assert bool(told) == bool(said)


@pytest.mark.nightly  # AdamW on meshes: with moments of 8 bits above, and in test_train.py
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_every_optimizer_gives_the_same_on_every_mesh(name):
    words = [f"optimizer={name}", "optimizer.learning_rate=1e-3", *CONSTANT]
    words += [] if name == "muon" else ONE_LAYER  # its matrices of several layers are dealt to the devices
    one = program("model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", *words).run(batch(), steps=3)
    many = program("model.mesh_shape=[[2,2,2],[dp,fsdp,tp]]", *words).run(batch(), steps=3)
    np.testing.assert_allclose([m["loss"] for m in many], [m["loss"] for m in one], rtol=2e-5)
    assert one[2]["loss"] < one[0]["loss"]


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_momenta_in_8_bits_of_other_rules(name, weights):
    """Muon has two rules, each for its own parameters; the iterations make small differences of a momentum larger."""
    *_, (expected, direction, states) = update_both(name, "int8", weights)
    for a, b in zip(jax.tree.leaves(direction), jax.tree.leaves(expected), strict=True):
        assert np.vdot(a, b) > 0.98 * np.linalg.norm(a) * np.linalg.norm(b)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(state)) for state in states]
    assert sizes[1] < 0.4 * sizes[0]


@pytest.mark.parametrize("root", [0.61, 0.0532, 0.0096, 2.5e-5])
def test_roots_of_squares_in_8_bits_are_right_in_the_mean(root):
    """Rounded to the nearest code, a mean of squares that decays by a thousandth in a step would never fall."""
    block = Block(0, 128)
    squares = jnp.full(128, root**2).at[:2].set(jnp.array([1, 2e-7**2]))  # the second is below the smallest code
    both = jax.jit(lambda count: _decode(_encode(squares, block, True, count), block, True, count))
    roots = np.sqrt([both(jnp.int32(count)) for count in range(100)])
    np.testing.assert_allclose(roots[:, 0], 1, rtol=1e-5)
    np.testing.assert_allclose(roots[:, 2:].mean(), root, rtol=0.003 if root > 1e-4 else 0.02)
    assert (roots > 0).all()  # the mean of gradients is divided by them


def test_squares_in_bfloat16_are_right_in_the_mean():
    """A quarter of the way to the next number, a quarter is rounded up: other places in each step."""
    squares = jnp.full((64, 64), 1 + 2**-9, jnp.float32)
    first, second = (_to_half(squares, None, True, jnp.int32(count)) > 1 for count in (1, 2))
    assert [float(each.mean()) for each in (first, second)] == pytest.approx([0.25, 0.25], abs=0.03)
    assert float((first & second).mean()) == pytest.approx(0.25**2, abs=0.02)
    assert not (_to_half(squares, None, False, None) > 1).any()  # a mean goes to the nearest one
