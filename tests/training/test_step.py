"""The step computes the same on every mesh, however it is cut up."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.harness import batch, program

from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.dims import keeping_axes
from tunix.training.losses import loss_kind

ONE = "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"
TOLERANCE = 1e-5  # float32; sums in another order

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
    return program(*ONE).run(batch(), steps=3)


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=TOLERANCE)


@pytest.mark.nightly(but=["[[8],[fsdp]]", "[[2,2,2],[dp,fsdp,tp]]", "[[2,2,2],[fsdp,cp,tp]]"])
@pytest.mark.parametrize("mesh", MESHES)
def test_same_loss_and_gradient_norm_on_every_mesh(mesh, reference):
    assert_same(program(f"model.mesh_shape={mesh}").run(batch(), steps=3), reference)


@pytest.mark.nightly(but=["[[2,2,2],[fsdp,cp,tp]]-words1"])
@pytest.mark.parametrize(
    ("mesh", "words"),
    [("[[8],[cp]]", []), ("[[2,2,2],[fsdp,cp,tp]]", ["model.cp_exchange=ring"])],  # 8 devices do not divide 4 heads
)
def test_keys_that_go_round_in_a_ring(mesh, words, reference, monkeypatch):
    """A device has 4 or 16 tokens, and computes with those 2 at a time: whole blocks and parts of blocks are skipped."""
    monkeypatch.setattr("tunix.models.ring_plain.MOST_QUERIES", 2)
    assert_same(program(f"model.mesh_shape={mesh}", *words).run(batch(), steps=3), reference)


@pytest.mark.nightly
def test_capped_scores_and_sinks_on_every_exchange():
    """In a ring, and where devices swap tokens for heads; sinks that are not 0 move with their gradients."""
    words = ["model.attention_cap=0.5", "model.attention_sinks=true", "model.logits_cap=2.0"]
    words += ["model.num_layers=1", "model.global_every=1"]
    expected = program(*ONE, *words).run(batch(), steps=3)
    for mesh, exchange in (("[[2],[cp]]", "ring"), ("[[2,2],[cp,tp]]", "ulysses")):
        step = program(f"model.mesh_shape={mesh}", ONE[1], *words, f"model.cp_exchange={exchange}")
        assert_same(step.run(batch(), steps=3), expected)


@pytest.mark.nightly
def test_more_devices_on_tp_than_key_value_heads(reference):
    wide = ["model.num_heads=8", "model.head_dim=4", "model.num_kv_heads=2"]
    expected = program(*ONE, *wide).run(batch())
    assert_same(program("model.mesh_shape=[[8],[tp]]", *wide).run(batch()), expected)
    assert expected[0]["loss"] != reference[0]["loss"]


@pytest.mark.nightly(but=["1-no_shard", "1-shard_optimizer", "2-shard_grad_op"])
@pytest.mark.parametrize("strategy", ["shard_grad_op", "shard_optimizer", "no_shard"])
@pytest.mark.parametrize("sync", [1, 2])
def test_strategies_and_sync_leave_the_result_unchanged(strategy, sync, reference):
    cut = program(
        "model.mesh_shape=[[2,2,2],[dp,fsdp,tp]]", f"training.sharding_strategy={strategy}",
        "training.gradient_accumulation_steps=4", f"training.sync_gradients_every={sync}",
    )  # fmt: skip
    assert_same(cut.run(batch(microbatches=4), steps=3), reference)


@pytest.mark.nightly(but=["2-2", "4-1"])
@pytest.mark.parametrize(("microbatches", "sync"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_accumulation_equals_one_batch_under_a_random_mask(microbatches, sync, reference):
    cut = program("model.mesh_shape=[[4],[fsdp]]", "distributed.allow_idle_devices=true", f"training.sync_gradients_every={sync}",
                  f"training.gradient_accumulation_steps={microbatches}")  # fmt: skip
    assert_same(cut.run(batch(microbatches=microbatches), steps=3), reference)


@pytest.mark.nightly(but=["lora"])
@pytest.mark.parametrize(
    "words",
    [
        [  # other parts, weights gathered for the step, chunks of the loss that end in the middle of a device's tokens
            "model.positions=learned", "model.norm=layer", "model.biases=.", "model.qk_norm=none", "model.mlp.kind=plain",
            "model.tied_head=false", "training.sharding_strategy=shard_grad_op", "training.sync_gradients_every=2",
            "training.loss_chunk_size=3",
        ],
        ["model.lora.rank=2", "model.lora.quantize_base=nf4", "training.remat=none", "training.loss_chunk_size=5"],
    ],
    ids=["gpt2", "lora"],
)  # fmt: skip
def test_sequences_that_lie_on_several_devices(words):
    words = [*words, "training.gradient_accumulation_steps=2"]
    expected = program(*ONE, *words).run(batch(microbatches=2))
    assert_same(program("model.mesh_shape=[[2,2,2],[dp,fsdp,cp]]", *words).run(batch(microbatches=2)), expected)


@pytest.mark.nightly(but=["words1", "words3"])
@pytest.mark.parametrize(
    "words",
    [
        ["training.remat=none"],
        ["training.remat=dots"],
        ["training.remat=attention", "training.offload=activations"],
        ["training.remat=projections", "training.remat_every=3", "training.offload=optimizer"],
    ],
)
def test_what_is_kept_and_where_leaves_the_result_unchanged(words, reference):
    step = program("model.mesh_shape=[[4,2],[fsdp,tp]]", *words)
    assert_same(step.run(batch(), steps=3), reference)
    moments = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(step.state["opt_state"]) if leaf.ndim}
    assert moments == {"pinned_host" if step.cfg.training.offload == "optimizer" else "device"}


@pytest.mark.nightly(but=["full"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_scores_of_long_sequences_are_not_kept(remat, reference, monkeypatch):
    """Of more tokens than a block of queries; the result is the same."""
    monkeypatch.setattr("tunix.models.attention.query_block", lambda length: 4)
    blocked = program(*ONE, f"training.remat={remat}")
    assert_same(blocked.run(batch(), steps=3), reference)
    loss, rows = loss_kind(blocked.cfg).make(blocked.cfg), {name: leaf[0] for name, leaf in batch().items()}

    def kept(params):
        return jax.vjp(lambda params: loss(blocked.arch.module(params), rows, None).objective, params)[1]

    with jax.set_mesh(blocked.mesh):
        shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(kept, blocked.state["params"]))]
    assert all(shape[-2:] != (4, 32) for shape in shapes)  # scores of a block


def test_moments_are_sharded_like_parameters():
    state = program("model.mesh_shape=[[4,2],[fsdp,tp]]", fresh=True).state
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
    [("full_shard", 8, 8), ("shard_grad_op", 8, 8), ("shard_optimizer", 1, 8), ("no_shard", 1, 1)],
)
def test_bytes_per_device_of_each_strategy(strategy, params, moments):
    """Divisors of the whole, up to the norms' vectors, which every device keeps."""
    state = program("model.mesh_shape=[[8],[fsdp]]", f"training.sharding_strategy={strategy}").state
    vectors = sum(leaf.nbytes for path, leaf in jax.tree.leaves_with_path(state["params"]) if path[-1].key == "scale")
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state["params"]))
    assert bytes_per_device(state["params"]) == (whole - vectors) // params + vectors
    counter = 4
    assert bytes_per_device(state["opt_state"]) == 2 * ((whole - vectors) // moments + vectors) + counter


def test_same_initial_weights_on_every_mesh(monkeypatch):
    """With the loops that users get: the quick compiler of these tests rounds a vector's remainder another way."""
    monkeypatch.setattr(jax, "jit", partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": True}))
    one, many = (program(*mesh, fresh=True).state["params"] for mesh in (ONE, ["model.mesh_shape=[[2,4],[fsdp,tp]]"]))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True))


def test_a_step_that_is_not_finite_changes_only_its_counters():
    trained = program("model.mesh_shape=[[4,2],[fsdp,tp]]")
    before = jax.tree.map(np.asarray, trained.state)
    bad = batch()
    bad["loss_mask"][0, 3, 5] = np.nan
    first, second = trained.run(bad, steps=2)
    assert (first["skipped"], second["skipped"]) == (1, 2)
    assert np.isnan(first["loss"])
    for name in ("params", "opt_state"):
        assert all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(before[name]), jax.tree.leaves(trained.state[name]), strict=True)
        )
    assert (int(trained.state["step"]), int(trained.state["skipped"])) == (2, 2)
    good = trained.run(batch(), steps=1)[0]
    assert good["skipped"] == 0
    assert np.isfinite(good["loss"])


def test_clipping_is_by_the_norm_over_all_shards():
    """Under SGD without momentum the parameters move by rate x clipped gradient: its norm is the limit."""
    moved = {}
    for mesh in ("[[8],[fsdp]]", "[[2,4],[fsdp,tp]]"):
        clipped = program(f"model.mesh_shape={mesh}", "optimizer=sgd", "optimizer.momentum=0", "optimizer.learning_rate=1",
                          "training.max_grad_norm=0.01", "scheduler=constant", "scheduler.warmup_ratio=0")  # fmt: skip
        before = jax.tree.map(np.asarray, clipped.state["params"])
        norm = clipped.run(batch(), steps=1)[0]["grad_norm"]
        assert norm > 0.1
        after = jax.tree.map(np.asarray, clipped.state["params"])
        squares = [
            np.sum((a - b).astype(np.float64) ** 2)
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        ]
        moved[mesh] = np.sqrt(sum(squares))
    np.testing.assert_allclose(list(moved.values()), 0.01, rtol=1e-4)


def test_z_loss_is_added_and_reported(reference):
    plain = reference[0]
    weighted = program(*ONE, "training.z_loss=0.1").run(batch(), steps=1)[0]
    assert weighted["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert plain["z_loss"] == 0
    assert weighted["z_loss"] > 1
    assert weighted["grad_norm"] > plain["grad_norm"]


def test_bf16_computes_in_bf16_over_float32_weights(reference):
    mixed = program(*ONE, "training.mixed_precision=bf16")
    assert {leaf.dtype for leaf in jax.tree.leaves(mixed.state["params"])} == {jnp.dtype("float32")}
    text = mixed.compile(batch()).as_text()
    assert "bf16[" in text
    exact, rounded = reference[0]["loss"], mixed.run(batch(), steps=1)[0]["loss"]
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=1e-2)


def test_training_lowers_the_loss():
    losses = [
        m["loss"] for m in program("model.mesh_shape=[[4,2],[fsdp,tp]]", "scheduler=constant").run(batch(), steps=40)
    ]
    assert losses[-1] < 0.8 * losses[0]


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
