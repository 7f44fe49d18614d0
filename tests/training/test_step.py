"""The step computes the same on every mesh, however it is cut up."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.devices import OLDER_EMITTER
from support.harness import ONE_LAYER, SGD, batch, program

from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.table import keeping_axes
from tunix.training.train_spec import TrainSpec

ONE = "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"
TOLERANCE = 1e-5  # float32; sums in another order

LIMIT = 0.05  # of the gradient's norm, which is above it
CLIPPED = [*SGD, "optimizer.learning_rate=1", f"training.max_grad_norm={LIMIT}"]

MESHES = [
    "[[8],[fsdp]]",
    "[[8],[dp]]",
    "[[4,2],[fsdp,tp]]",
    "[[2,4],[fsdp,tp]]",
    "[[2,2,2],[dp,fsdp,tp]]",
    "[[2,4],[dp,tp]]",
    "[[2,4],[fsdp,cp]]",  # more devices than key/value heads
    "[[2,2,2],[dp,fsdp,cp]]",
    "[[2,2,2],[fsdp,cp,tp]]",
]


@pytest.fixture(scope="module")
def reference() -> list[dict[str, float]]:
    return program(*ONE, *CLIPPED).run(batch(), steps=3)


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=TOLERANCE)


@pytest.mark.nightly(but=["[[2,2,2],[fsdp,cp,tp]]"])
@pytest.mark.parametrize("mesh", MESHES)
def test_same_loss_and_gradient_norm_on_every_mesh(mesh, reference):
    """Clipping is by the norm over all shards: in the first step the weights move by rate x clipped gradient."""
    step = program(f"model.mesh_shape={mesh}", *CLIPPED)
    before = jax.tree.map(np.asarray, step.state["params"])
    found = step.run(batch(), steps=1)
    moved = jax.tree.map(lambda a, b: np.sum((np.asarray(a, np.float64) - b) ** 2), step.state["params"], before)
    assert found[0]["grad_norm"] > LIMIT
    assert np.sqrt(sum(jax.tree.leaves(moved))) == pytest.approx(LIMIT, rel=1e-4)
    assert_same([*found, *step.run(batch(), steps=2)], reference)


@pytest.mark.nightly(but=["[[2,2,2],[fsdp,cp,tp]]-words1"])
@pytest.mark.parametrize(
    ("mesh", "words"),
    [("[[8],[cp]]", []), ("[[2,2,2],[fsdp,cp,tp]]", ["model.cp_exchange=ring"])],  # 8 devices do not divide 4 heads
)
def test_keys_that_go_round_in_a_ring(mesh, words, reference, monkeypatch):
    """A device has 4 or 16 tokens, and computes with those 2 at a time: whole blocks and parts of blocks are skipped."""
    monkeypatch.setattr("tunix.models.context_parallel.MAX_QUERIES", 2)
    assert_same(program(f"model.mesh_shape={mesh}", *CLIPPED, *words).run(batch(), steps=3), reference)


@pytest.mark.nightly
def test_capped_scores_and_sinks_on_every_exchange():
    """In a ring, and where devices swap tokens for heads; sinks that are not 0 move with their gradients."""
    words = ["model.attention_cap=0.5", "model.attention_sinks=true", "model.logits_cap=2.0"]
    words += [*ONE_LAYER, *SGD]
    expected = program(*ONE, *words).run(batch(), steps=3)
    for mesh, exchange in (("[[2],[cp]]", "ring"), ("[[2,2],[cp,tp]]", "ulysses")):
        step = program(f"model.mesh_shape={mesh}", ONE[1], *words, f"model.cp_exchange={exchange}")
        assert_same(step.run(batch(), steps=3), expected)


@pytest.mark.nightly
def test_more_devices_on_tp_than_key_value_heads(reference):
    wide = ["model.num_heads=8", "model.head_dim=4", "model.num_kv_heads=2", *CLIPPED]
    expected = program(*ONE, *wide).run(batch())
    assert_same(program("model.mesh_shape=[[8],[tp]]", *wide).run(batch()), expected)
    assert expected[0]["loss"] != reference[0]["loss"]


# How a step may be cut up, several ways at once. The cases below have the rest of each matrix.
CUTS = {
    "full_shard, one reduction": [
        "training.sharding_strategy=full_shard", "training.gradient_accumulation_steps=2",
        "training.sync_gradients_every=2", "training.remat=dots",
    ],
    "shard_optimizer, a reduction each": [
        "training.sharding_strategy=shard_optimizer", "training.gradient_accumulation_steps=4",
        "training.sync_gradients_every=1",
    ],
    "no_shard, a reduction each": [
        "training.sharding_strategy=no_shard", "training.gradient_accumulation_steps=4",
        "training.sync_gradients_every=1",
    ],
    "shard_grad_op, two reductions": [
        "training.sharding_strategy=shard_grad_op", "training.gradient_accumulation_steps=4",
        "training.sync_gradients_every=2", "training.remat_every=3",
    ],
}  # fmt: skip


@pytest.mark.nightly(but=["shard_optimizer, a reduction each"])
@pytest.mark.parametrize("words", CUTS.values(), ids=list(CUTS))
def test_cuts_leave_the_result_unchanged(words, reference):
    """Strategies; accumulation equals one batch under a random mask; what is kept for the backward pass."""
    cut = program("model.mesh_shape=[[2,2,2],[dp,fsdp,tp]]", *CLIPPED, *words)
    assert_same(cut.run(batch(microbatches=cut.cfg.training.gradient_accumulation_steps), steps=3), reference)


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "sync"), [("shard_grad_op", 1), ("shard_optimizer", 2), ("no_shard", 2)])
def test_strategies_and_sync_leave_the_result_unchanged(strategy, sync, reference):
    cut = program(
        "model.mesh_shape=[[2,2,2],[dp,fsdp,tp]]", *CLIPPED, f"training.sharding_strategy={strategy}",
        "training.gradient_accumulation_steps=4", f"training.sync_gradients_every={sync}",
    )  # fmt: skip
    assert_same(cut.run(batch(microbatches=4), steps=3), reference)


@pytest.mark.nightly
@pytest.mark.parametrize(("microbatches", "sync"), [(2, 1), (4, 2), (4, 4)])
def test_accumulation_equals_one_batch_under_a_random_mask(microbatches, sync, reference):
    cut = program("model.mesh_shape=[[4],[fsdp]]", "distributed.allow_idle_devices=true", *CLIPPED, f"training.sync_gradients_every={sync}",
                  f"training.gradient_accumulation_steps={microbatches}")  # fmt: skip
    assert_same(cut.run(batch(microbatches=microbatches), steps=3), reference)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        [  # other parts, weights gathered for the step, chunks of the loss that end in the middle of a device's tokens
            "model.positions=learned", "model.norm=layer", "model.biases=.", "model.qk_norm=none", "model.mlp.kind=plain",
            "model.tied_head=false", "training.sharding_strategy=shard_grad_op", "training.sync_gradients_every=2",
            "training.loss_chunk_size=3",
        ],
        ["model.lora.rank=2", "model.lora.targets=attention.o|mlp.up", "model.lora.quantize_base=nf4", "training.remat=none", "training.loss_chunk_size=5"],
    ],
    ids=["gpt2", "lora"],
)  # fmt: skip
def test_sequences_that_lie_on_several_devices(words):
    words = [*words, *SGD, "training.gradient_accumulation_steps=2"]
    expected = program(*ONE, *words).run(batch(microbatches=2))
    assert_same(program("model.mesh_shape=[[2,2,2],[dp,fsdp,cp]]", *words).run(batch(microbatches=2)), expected)


@pytest.mark.nightly(but=["words2"])
@pytest.mark.parametrize(
    "words",
    [
        ["training.remat=none"],
        ["training.remat=attention", "training.offload=activations"],
        [
            "training.remat=projections", "training.remat_every=3", "training.offload=optimizer",
            "training.gradient_accumulation_steps=4", "training.sync_gradients_every=1",
        ],
    ],
)  # fmt: skip
def test_what_is_kept_and_where_leaves_the_result_unchanged(words, reference):
    step = program("model.mesh_shape=[[4,2],[fsdp,tp]]", *CLIPPED, *words)
    assert_same(step.run(batch(microbatches=step.cfg.training.gradient_accumulation_steps or 1), steps=3), reference)
    moments = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(step.state["opt_state"]) if leaf.ndim}
    assert moments == {"pinned_host" if step.cfg.training.offload == "optimizer" else "device"}


@pytest.mark.nightly(but=["full"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_scores_of_long_sequences_are_not_kept(remat, reference, monkeypatch):
    """Of more tokens than a block of queries; the result is the same."""
    monkeypatch.setattr("tunix.models.attention.select_query_block", lambda length: 4)
    blocked = program(*ONE, *CLIPPED, f"training.remat={remat}")
    assert_same(blocked.run(batch(), steps=3), reference)
    assert all(shape[-2:] != (4, 32) for shape in blocked.kept_shapes())  # scores of a block


def test_initial_state_on_every_mesh(monkeypatch):
    """The same weights, and moments sharded like them.

    With the loops that users get: the quick compiler of these tests rounds a vector's remainder another way.
    """
    if OLDER_EMITTER:
        monkeypatch.setattr(jax, "jit", partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": True}))
    one, state = (program(*mesh, fresh=True).state for mesh in (ONE, ["model.mesh_shape=[[4,2],[fsdp,tp]]"]))
    jax.tree.map(np.testing.assert_array_equal, one["params"], state["params"])
    assert state.keys() == {"params", "opt_state", "step", "skipped"}
    (adam,) = [
        part for part in jax.tree.leaves(state["opt_state"], is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu")
    ]
    for moments in (adam.mu, adam.nu):
        assert jax.tree.map(lambda x: x.sharding, moments) == jax.tree.map(lambda x: x.sharding, state["params"])
    query = state["params"]["blocks"]["attention"]["q"]["w"]
    assert query.sharding.spec == jax.P(None, keeping_axes(), "tp", None)
    assert query.addressable_shards[0].data.size == query.size // 8


@pytest.mark.parametrize(
    ("strategy", "params", "moments"),
    [("full_shard", 8, 8), ("shard_grad_op", 8, 8), ("shard_optimizer", 8, 8), ("no_shard", 1, 1)],
)
def test_bytes_per_device_of_each_strategy(strategy, params, moments):
    """Divisors of the whole, up to the norms' vectors, which every device keeps."""
    state = program("model.mesh_shape=[[8],[fsdp]]", f"training.sharding_strategy={strategy}").state
    vectors = sum(leaf.nbytes for path, leaf in jax.tree.leaves_with_path(state["params"]) if path[-1].key == "scale")
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state["params"]))
    assert bytes_per_device(state["params"]) == (whole - vectors) // params + vectors
    counter = 4
    assert bytes_per_device(state["opt_state"]) == 2 * ((whole - vectors) // moments + vectors) + counter


def test_a_step_that_is_not_finite_or_learns_nothing_changes_only_its_counters_and_training_lowers_the_loss():
    trained = program("model.mesh_shape=[[4,2],[fsdp,tp]]", "scheduler=constant", "optimizer.learning_rate=3e-3")
    before = jax.tree.map(np.asarray, trained.state)
    bad = batch()
    bad["loss_mask"][0, 3, 5] = np.nan
    first, second = trained.run(bad, steps=2)
    assert (first["skipped"], second["skipped"]) == (1, 2)
    assert np.isnan(first["loss"])
    empty = batch()
    empty["loss_mask"][:] = 0  # no token is learnt
    (line,) = trained.run(empty, steps=1)
    assert (line["skipped"], line["grad_norm"], np.isnan(line["loss"])) == (0, 0, True)
    for name in ("params", "opt_state"):
        assert all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(before[name]), jax.tree.leaves(trained.state[name]), strict=True)
        )
    assert (int(trained.state["step"]), int(trained.state["skipped"])) == (3, 0)
    good = trained.run(batch(), steps=10)
    assert good[0]["skipped"] == 0
    assert good[-1]["loss"] < 0.8 * good[0]["loss"]


def test_each_microbatch_of_each_step_has_a_seed_of_its_own(monkeypatch):
    """So dropout draws other numbers in each."""

    def report_seeds(params, batch, seeds):
        sums = {"loss": jnp.zeros(()), "first": seeds[0].astype("float32"), "last": seeds[-1].astype("float32")}
        return jax.tree.map(jnp.zeros_like, params), jnp.ones(()), sums

    monkeypatch.setattr(TrainSpec, "gradients", lambda self: report_seeds)
    rows = {"tokens": np.zeros((3, 2, 32), np.int32)}
    lines = program(*ONE, *ONE_LAYER, *SGD).run(rows, steps=2)
    assert [(line["first"], line["last"]) for line in lines] == [(0, 2), (3, 5)]


def test_z_loss_is_added_and_reported(reference):
    plain = reference[0]
    weighted = program(*ONE, *CLIPPED, "training.z_loss=0.1").run(batch(), steps=1)[0]
    assert weighted["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert plain["z_loss"] == 0
    assert weighted["z_loss"] > 1
    assert weighted["grad_norm"] > plain["grad_norm"]


def test_bf16_computes_in_bf16_over_float32_weights(reference):
    mixed = program(*ONE, *CLIPPED, "training.mixed_precision=bf16")
    assert {leaf.dtype for leaf in jax.tree.leaves(mixed.state["params"])} == {jnp.dtype("float32")}
    text = mixed.compile(batch()).as_text()
    assert "bf16[" in text
    exact, rounded = reference[0]["loss"], mixed.run(batch(), steps=1)[0]["loss"]
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=1e-2)


@pytest.mark.nightly(but=["2"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_weights_and_moments_in_bfloat16_stay_so(microbatches, reference):
    """Gradients and updates are in float32; what rests is as the config says."""
    step = program(*ONE, "training.param_dtype=bfloat16", "scheduler=constant", "scheduler.warmup_ratio=0")
    before = jax.tree.map(lambda leaf: leaf.dtype, step.state)
    losses = [numbers["loss"] for numbers in step.run(batch(microbatches=microbatches), steps=3)]
    assert jax.tree.map(lambda leaf: leaf.dtype, step.state) == before
    assert {leaf.dtype for leaf in jax.tree.leaves(step.state["params"])} == {jnp.dtype("bfloat16")}
    assert losses[0] == pytest.approx(reference[0]["loss"], rel=1e-2)
    assert losses[2] < losses[0]


LOW_RANK = [
    "model.lora.rank=2", "model.lora.targets=attention.q|mlp", "model.lora.train_also=final_norm",
    "optimizer.learning_rate=0.1", "scheduler=constant", "scheduler.warmup_ratio=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def low_rank_reference() -> list[dict[str, float]]:
    return program(*ONE, *LOW_RANK).run(batch(sequences=4, microbatches=2), steps=3)


@pytest.mark.nightly(but=["full_shard"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
def test_low_rank_updates_learn_and_the_rest_stays(strategy, low_rank_reference):
    """Frozen parameters are the same bits after steps; the loss is the same under every strategy and accumulation."""
    many = program(
        "model.mesh_shape=[[2,2],[fsdp,tp]]", "distributed.allow_idle_devices=true", *LOW_RANK,
        f"training.sharding_strategy={strategy}", "training.gradient_accumulation_steps=2", "training.sync_gradients_every=2",
    )  # fmt: skip
    before = jax.tree.map(np.asarray, many.state["params"])
    found = many.run(batch(sequences=4, microbatches=2), steps=3)
    assert found[2]["loss"] < found[0]["loss"]
    for a, b in zip(low_rank_reference, found, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
    same = jax.tree.map(lambda x, y: np.array_equal(x, np.asarray(y)), before, many.state["params"])
    assert jax.tree.leaves(same) == [not trained for trained in jax.tree.leaves(many.arch.is_trained)]
