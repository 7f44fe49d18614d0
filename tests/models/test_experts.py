"""Experts: the layer is its definition, and a step with experts is the same on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.harness import ONE_LAYER, SGD, Program, batch, program
from support.harness import experts as few_experts

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.costs.step import derive_costs
from tunix.models.experts import Experts
from tunix.models.layer_scan import LayerSlice
from tunix.models.layers import Initializer, Routing
from tunix.training.choices import build_layout, build_mesh
from tunix.training.optimizer import move_biases
from tunix.training.train_spec import assemble

ONE = "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"
# Every part of a router, and a shared expert; tests of parity have a dense layer too.
ALL_PARTS = {
    "biases": True, "shared_dim": 8, "shared_gate": True, "scores": "sigmoid", "scale": 2.0, "num_groups": 4,
    "groups_per_token": 2, "bias_rate": 0.25,
}  # fmt: skip


def experts(**changed) -> str:
    """Return the word that gives a model experts with every part."""
    return few_experts(**(ALL_PARTS | changed))


SMALL = [*SGD, *ONE_LAYER, "model.sliding_window=null", experts()]
STEPS = 3


def trained(*words: str, microbatches: int = 1) -> tuple[Program, list[dict]]:
    step = program(*SMALL, *words)
    return step, step.run(batch(sequences=8, microbatches=microbatches), steps=STEPS)


@pytest.fixture(scope="module")
def reference() -> tuple[Program, list[dict]]:
    return trained(*ONE)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        ["model.mesh_shape=[[2,2,2],[fsdp,ep,tp]]"],
        ["model.mesh_shape=[[2,2],[ep,cp]]", "distributed.allow_idle_devices=true",
         "training.gradient_accumulation_steps=2", "training.sharding_strategy=shard_grad_op"],
        # Two parts of each device's sequences take turns.
        ["model.mesh_shape=[[2,2],[fsdp,ep]]", "distributed.allow_idle_devices=true", "training.overlap=prefetch",
         "training.micro_batch_size=2", "training.global_batch_size=8", "model.expert_products=fused"],
    ],
    ids=["fsdp, ep, tp", "ep, cp, two microbatches, weights gathered once", "fsdp, ep, two parts, fused"],
)  # fmt: skip
def test_same_numbers_on_every_mesh(words, reference):
    """Penalties are sums over sequences and loads are counts: neither microbatches nor devices change them."""
    step, lines = trained(*words, microbatches=1 + any("accumulation_steps=2" in word for word in words))
    assert step.built.layout.batch_parts == 1 + ("training.overlap=prefetch" in words)
    for found, expected in zip(lines, reference[1], strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    bias = [np.asarray(each.state["params"]["blocks"]["mlp"]["router"]["bias"]) for each in (step, reference[0])]
    np.testing.assert_array_equal(*bias)


def test_numbers_of_a_step(reference):
    step, lines = reference
    first = lines[0]
    assert np.mean(first["expert_load"]) == pytest.approx(1)
    assert first["expert_load_max"] == max(first["expert_load"])  # one layer has experts
    assert first["expert_load_min"] == min(first["expert_load"])
    assert 0.9 * np.log(8) < first["router_entropy"] <= np.log(8)  # new routers have no preference
    assert first["balance_loss"] == pytest.approx(0.01, rel=0.1)
    assert first["router_z_loss"] > 0
    biases = np.asarray(step.state["params"]["blocks"]["mlp"]["router"]["bias"])[0]
    moves = [0.25 * np.sign(1 - np.array(line["expert_load"])) for line in lines]
    np.testing.assert_allclose(biases, np.sum(moves, 0))
    assert lines[-1]["loss"] < first["loss"]


def test_a_bias_follows_the_loads_of_its_own_layer():
    """Routing has the layers of all stacks in their order; here one stands before the stages, behind a dense one."""
    words = *SMALL[:-1], experts(dense_layers=1), "model.num_layers=4", "model.layers_before_stages=2"
    arch = program(*ONE, *words).arch
    params = jax.tree.map(lambda weight: np.zeros(weight.shape), arch.weights)
    loads = np.random.default_rng(0).integers(0, 9, (3, 8)).astype("float32")
    moved = move_biases(params, arch.weights, arch.model, Routing(loads, None, None), 0.25)
    biases = [moved[name]["mlp"]["router"]["bias"] for name in ("first_blocks", "blocks")]
    np.testing.assert_array_equal(np.concatenate(biases), 0.25 * np.sign(loads.mean(1, keepdims=True) - loads))


def test_active_parameters_are_counted(reference):
    arch = reference[0].arch
    inactive = (8 - 2) * (3 * 32 * 16 + 2 * 16 + 32)  # of one layer, with biases
    assert arch.num_parameters - arch.num_active == inactive
    assert arch.num_active - arch.num_active_trained == 8  # biases
    dense = program(*ONE, *SMALL[:-1]).arch
    experts_and_router = 3 * 32 * (2 * 16 + 8) + 2 * (2 * 16 + 32) + 32 * 8 + 2 * 8 + 32  # with the gate
    assert arch.num_active == dense.num_parameters - 3 * 32 * 64 + experts_and_router


def layer(**changed) -> tuple[Experts, dict]:
    """A layer of experts on one device, and its parameters by name as numpy arrays."""
    cfg = compose([*ONE, "model.embed_dim=12", "training.mixed_precision=fp32", experts(**changed)]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        made = nnx.jit(lambda: Experts(cfg.model, build_layout(cfg, mesh), Initializer(jax.random.key(0))))()
        if cfg.model.mlp.bias_rate is not None:
            made.router.bias[...] = jnp.asarray(np.linspace(-0.5, 0.5, 8, dtype=np.float32))
    return made, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(made)))


def defined(params: dict, x: np.ndarray, *, scores, groups, normalized, scale) -> np.ndarray:
    """The definition, one token at a time: x is [tokens, D]."""
    silu = lambda z: z / (1 + np.exp(-z))  # noqa: E731
    mlp = lambda part, x, *at: (silu(x @ part["gate"]["w"][at]) * (x @ part["up"]["w"][at])) @ part["down"]["w"][at]  # noqa: E731
    experts, out = {part: params[f"expert_{part}"] for part in ("gate", "up", "down")}, []
    for token in x:
        logits = token @ params["router"]["w"]
        value = 1 / (1 + np.exp(-logits)) if scores == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        rank = value + params["router"].get("bias", 0)
        if groups:
            best_two = np.sort(rank.reshape(4, 2)).sum(-1)
            closed = np.argsort(-best_two)[groups:]
            rank.reshape(4, 2)[closed] = -np.inf
        chosen = np.argsort(-rank)[:2]
        weights = value[chosen] / (value[chosen].sum() if normalized else 1) * scale
        y = sum(weight * mlp(experts, token, expert) for weight, expert in zip(weights, chosen, strict=True))
        if "shared" in params:
            y += mlp(params["shared"], token) / (1 + np.exp(-token @ params["shared_gate"]["w"]))
        out.append(y)
    return np.array(out)


@pytest.mark.parametrize(
    ("scores", "groups", "normalized", "more"),
    [
        ("sigmoid", 2, True, {}),
        ("softmax", 0, False, {"bias_rate": None, "shared_dim": None, "shared_gate": False, "scale": 1.0}),
    ],
)
def test_a_layer_is_its_definition(scores, groups, normalized, more):
    grouped = {} if groups else {"num_groups": 1, "groups_per_token": 1}
    made, params = layer(scores=scores, normalized=normalized, **grouped, **more)
    x = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
    with jax.set_mesh(made.router.w.get_value().sharding.mesh):
        y = jax.jit(lambda x: made(x, None)[0])(jax.reshard(x, made.layout.activation("BtD")))
    expected = defined(
        params, x.reshape(-1, 12), scores=scores, groups=groups, normalized=normalized, scale=more.get("scale", 2.0)
    )
    np.testing.assert_allclose(np.asarray(y).reshape(-1, 12), expected, rtol=1e-4, atol=1e-5)


def test_padding_counts_in_no_sum():
    """Loads, penalties and entropy of a row with padding are those of its tokens alone."""
    made, _ = layer(scores="sigmoid", balance_loss=0.1, z_loss=0.01)
    x = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
    spec = made.layout.activation("BtD")

    def find(x, is_text):
        return made.router(jax.reshard(x, spec), is_text)[1]

    with jax.set_mesh(made.router.w.get_value().sharding.mesh):
        padded, whole = (jax.jit(find)(x[:, :length], np.arange(length) < np.full((2, 1), 3)) for length in (5, 3))
    assert padded.routing.tokens == 6
    assert padded.routing.load.sum() == 6 * 2
    assert padded.penalties.keys() == {"balance_loss", "router_z_loss"}
    jax.tree.map(lambda *sums: np.testing.assert_allclose(*sums, rtol=1e-5), padded, whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([experts(experts_per_token=9)], "model.mlp.experts_per_token=9 is more than the 4 experts in"),
        ([experts(experts_per_token=9, num_groups=1, groups_per_token=1)], "model.mlp.experts_per_token=9 is more than model.mlp.num_experts=8; lower it"),
        ([experts(num_groups=3)], "model.mlp.num_experts=8 is not divisible by model.mlp.num_groups=3"),
        ([experts(groups_per_token=5)], "model.mlp.groups_per_token=5 is more than model.mlp.num_groups=4"),
        ([experts(dense_layers=6)], "model.mlp.dense_layers=6 leaves none of model.num_layers=6 layers to the experts; lower it, or take model.mlp=gated_silu"),
        ([experts(), "model.lora.rank=2", "model.lora.dropout=0.1"], "model.lora.dropout=0.1: updates of experts have none, as in PEFT, and model.lora.targets=attention|mlp matches mlp.expert_gate"),
        ([experts(), "model.biases=mlp"], "model.biases=mlp matches projections of the MLP: experts have no biases"),
        (["++model.mlp.num_experts=8"], "model.mlp"),
        (["model.mesh_shape=[[8],[ep]]"], "mesh axis ep=8 splits experts, of which this model has none; leave ep out of model.mesh_shape"),
        ([experts(num_experts=12), "model.mesh_shape=[[8],[ep]]"], "model.mlp.num_experts=12 is not divisible by mesh axis ep=8 (nearest ep: "),
        ([experts(), "model.mesh_shape=[[3],[tp]]", "distributed.allow_idle_devices=true", "model.num_heads=3",
          "model.num_kv_heads=3", "model.mlp_dim=3", "model.mlp.shared_dim=3"], "model.mlp.expert_dim=16 is not divisible by mesh axis tp=3"),
    ],
)  # fmt: skip
def test_mistakes(words, message):
    with pytest.raises(UserError) as error:
        build_mesh(compose(words).config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_derived_costs_know_experts():
    """Bytes of all experts, FLOPs of the active ones, one sum over tp for all experts of a token."""
    cfg = compose([*SMALL, "model.mesh_shape=[[2,2],[fsdp,tp]]", "distributed.allow_idle_devices=true"]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        built = assemble(cfg, mesh)
        costs = derive_costs(built)
    assert costs.num_bytes["weights"] > 4 * built.arch.num_active / 4
    dense = 6 * built.arch.num_active * costs.tokens_per_step / mesh.size
    assert costs.model_flops < 1.2 * dense


TURNS = [
    *SGD, "model.num_layers=4", "model.global_every=4", "model.sliding_window=5", "model.local_attention=chunk",
    "model.unrotated_every=4", "model.qk_norm=after_rotation",
    "model.query_growth={rate: 0.1, every: 3, offset: 1, layers: unrotated}",
    experts(every=2, weighted="inputs", normalized=False, num_groups=1, groups_per_token=1),
]  # fmt: skip


@pytest.fixture(scope="module")
def turns() -> list[dict]:
    return program(*TURNS, *ONE).run(batch(sequences=8))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        ["model.mesh_shape=[[2,2,2],[fsdp,ep,tp]]", "training.remat=full", "training.remat_every=2"],
        ["model.mesh_shape=[[8],[fsdp]]", "training.overlap=prefetch", "training.sync_gradients_every=1"],
        ["model.mesh_shape=[[2,2],[cp,tp]]", "distributed.allow_idle_devices=true"],
    ],
    ids=["one layer again, the next kept", "weights ahead", "sequences split"],
)
def test_dense_layers_between_those_with_experts(words, turns):
    """Layers take turns as in Llama 4, whose local layers attend within chunks and whose weights multiply inputs."""
    found = program(*TURNS, *words).run(batch(sequences=8))
    for name, value in turns[0].items():
        np.testing.assert_allclose(found[0][name], value, rtol=2e-5, err_msg=name)


@pytest.mark.nightly
def test_microbatches_add_to_the_gradients_of_the_same_layers():
    """Each turn has two layers of the dense stack. The gradients of one microbatch are those of autodiff; of several, a
    layer adds to its place in the sums."""
    words = [*SGD, *ONE, "model.num_layers=6", "model.global_every=1", "model.sliding_window=null", experts(every=3)]
    made = [program(*words, f"training.micro_batch_size={size}") for size in (4, 2)]
    for microbatches, each in enumerate(made, 1):
        each.run(batch(sequences=4, microbatches=microbatches))
    one, two = (jax.tree.leaves_with_path(each.state["params"]) for each in made)
    for (path, weight), (_, other) in zip(one, two, strict=True):
        np.testing.assert_allclose(weight, other, atol=1e-5, err_msg=str(path))


def test_layers_of_a_stack_that_stands_twice_in_a_turn():
    """Of D D E D D E, the second of the dense layers in a turn."""
    assert [LayerSlice("dense_blocks", first=1, step=2).layer(turn) for turn in (0, 1)] == [1, 3]
