"""A scan whose layers gather ahead computes the same numbers as a plain one, and keeps no gathered weight."""

import jax
import pytest
from support.harness import batch, program

from tunix.base.errors import UserError
from tunix.models import layer_scan
from tunix.training.choices import keep_known_options

NF4 = [
    "model.mesh_shape=[[8],[fsdp]]", "model.lora.rank=2", "model.lora.quantize_base=nf4", "model.num_layers=4",
    "model.global_every=1", "training.remat=full",
]  # fmt: skip
MESHES = {
    "dp x fsdp x tp, LoRA with dropout": [
        "model.mesh_shape=[[2,2,2],[dp,fsdp,tp]]", "training.remat=dots", "model.lora.rank=2", "model.lora.dropout=0.1",
        "training.gradient_accumulation_steps=2",
    ],
    "fsdp, QLoRA in nf4": NF4,
}  # fmt: skip


TWO_PARTS = [
    "model.mesh_shape=[[2,4],[fsdp,tp]]", "training.remat=full", "training.micro_batch_size=2",
    "training.gradient_accumulation_steps=2", "model.num_heads=4",
]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=pytest.mark.nightly) for words in MESHES.values()] + [TWO_PARTS],
    ids=[*MESHES, "fsdp x tp, two parts"],
)
def test_the_numbers_are_the_same(words):
    plain, ahead = (program(*words, f"training.overlap={overlap}", "training.sync_gradients_every=1")
                    for overlap in ("none", "prefetch"))  # fmt: skip
    assert ahead.built.layout.batch_parts == 1 + (words is TWO_PARTS)
    shape = plain.cfg.training.batch_shape(plain.mesh.shape)
    data = batch(sequences=shape.num_sequences, microbatches=shape.num_microbatches)
    # The same sums, which XLA may add up in another order.
    for expected, metrics in zip(plain.run(data, 2), ahead.run(data, 2), strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5)


def test_the_numbers_of_nf4_are_on_every_device():
    """A constant of the backward pass, which two layers of an iteration keep: JAX refused to stack it."""
    program(*NF4, "training.overlap=prefetch").lower(batch(sequences=8))


@pytest.mark.parametrize(
    "words",
    [
        ["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", "training.remat=full"],
        pytest.param(
            [
                "model.mesh_shape=[[8],[fsdp]]",
                "training.overlap=prefetch",
                "training.remat=dots",
                "training.gradient_accumulation_steps=2",
            ],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            [
                "model.mesh_shape=[[2,2,2],[fsdp,cp,tp]]",
                "training.sharding_strategy=shard_optimizer",
                "training.gradient_accumulation_steps=2",
            ],
            marks=pytest.mark.nightly,
        ),
        pytest.param(  # layers in groups leave their gradients to autodiff
            [
                "model.mesh_shape=[[8],[fsdp]]",
                "model.num_layers=4",
                "model.global_every=2",
                "training.remat_every=2",
                "training.sharding_strategy=shard_optimizer",
                "training.gradient_accumulation_steps=2",
            ],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_unrolled_layers_compute_the_same_numbers(words):
    rolled, unrolled = (program(*words, f"training.unroll_layers={unroll}") for unroll in (False, True))
    shape = rolled.cfg.training.batch_shape(rolled.mesh.shape)
    data = batch(sequences=shape.num_sequences, microbatches=shape.num_microbatches)
    for expected, metrics in zip(rolled.run(data, 2), unrolled.run(data, 2), strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("updates", [[], ["model.lora.rank=2"]], ids=["all weights", "LoRA"])
def test_gradients_that_products_add_to_their_sums_are_those_of_the_cpu(updates, monkeypatch):
    """What unrolled layers do on GPUs, run on CPUs: gradients are not rounded to 16 bits, and all else is the same."""
    words = ["model.mesh_shape=[[4,2],[fsdp,tp]]", "training.sharding_strategy=shard_optimizer", *updates]
    words += ["training.gradient_accumulation_steps=2", "training.unroll_layers=true", "training.mixed_precision=bf16"]
    rounded, asked = program(*words), []
    data = batch(sequences=rounded.cfg.training.batch_shape(rounded.mesh.shape).num_sequences, microbatches=2)
    expected = rounded.run(data, 2)
    monkeypatch.setattr(layer_scan, "products_add_to_sums", lambda: asked.append(True) or True)
    for before, metrics in zip(expected, program(*words).run(data, 2), strict=True):
        assert metrics == pytest.approx(before, rel=2e-3)
    assert asked


def kept_shapes(*words: str) -> list[tuple[int, ...]]:
    """Return the shapes of what the backward pass needs of three layers."""
    small = program("model.mesh_shape=[[8],[fsdp]]", "training.remat=dots", *words)
    return sorted(shape for shape in small.kept_shapes() if shape[:1] == (3,) and len(shape) > 3)


def test_no_gathered_weight_is_kept():
    """What the backward pass needs of each layer has no array of the size of a gathered weight."""
    plain, ahead = kept_shapes("training.overlap=none"), kept_shapes("training.overlap=prefetch")
    assert [shape for shape in ahead if shape not in plain] == []


def test_of_a_product_and_its_update_the_sum_alone_is_kept():
    """Beside what is kept of the tokens without updates there are the narrow arrays between the factors."""
    lora = ["model.lora.rank=2", "model.lora.train_also=."]
    without, updated = (
        [shape for shape in kept_shapes("training.overlap=none", *words) if shape[1:3] == (16, 32)]
        for words in ([], lora)
    )
    assert [shape for shape in updated if shape[-1] != 2] == without
    assert len(updated) > len(without) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.sharding_strategy=shard_grad_op"], "weights are gathered once for the step"),
        (["model.mesh_shape=[[2,4],[pp,fsdp]]", "model.num_layers=4", "model.global_every=2", "training.remat_every=2",
          "training.pipeline_recompute=true"],
         "training.remat_every=2 takes so many layers at a time"),
    ],
)  # fmt: skip
def test_where_layers_cannot_gather_ahead_it_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        program("training.overlap=prefetch", *words)


def test_an_option_that_the_compiler_does_not_know_is_left_out(caplog):
    mesh = program("model.mesh_shape=[[8],[fsdp]]").mesh
    with jax.set_mesh(mesh):
        options = keep_known_options({"xla_no_such_option": 8, "xla_cpu_enable_fast_math": False}, mesh)
    assert options == {"xla_cpu_enable_fast_math": False}
    assert "xla_no_such_option=8 is left out" in caplog.text
