"""Products of 8-bit floats: exact where 8 bits are enough, alike on every mesh, refused where no chip has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gpu_compiler import compile_for_gpu
from support.harness import SGD, SMALL, Program, batch, program

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.costs.devices import compute_peak_tflops, read_device_kinds
from tunix.costs.step import check_matmul_dtype, derive
from tunix.models.matmul import product
from tunix.models.remat import Remat, make_policy
from tunix.sharding.arrays import to_global
from tunix.sharding.table import Equation, axis_names
from tunix.training.choices import build_layout, build_mesh, select

FP8 = "training.matmul_dtype=fp8"
ROUNDING = 2**-4  # of a number with three bits of fraction, at most


def gradients(text: str, layout, kind: str):
    """Return a function of x, w and the gradient g of the result, which gives the result and both gradients."""
    equation = Equation(text)

    @jax.jit
    def run(x, w, g):
        def multiply(x, w):
            return product(equation, x, layout.gather(w, equation), layout, kind)

        y, back = jax.vjp(multiply, x, w)
        return y, *back(g)

    return run


@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_small_integers_are_multiplied_exactly(kind):
    """Forward and backward, at any scale, with parts of the sums on other devices; zeros and what is not finite too."""
    cfg = compose([*SMALL, "model.mesh_shape=[[2,2,2],[dp,fsdp,tp]]"]).config
    mesh = build_mesh(cfg)
    layout = build_layout(cfg, mesh)
    rng = np.random.default_rng(0)
    x, w, g = (
        rng.integers(-4, 5, shape).astype(np.float32) * scale
        for shape, scale in (((4, 6, 32), 2.0**-40), ((32, 64), 2.0**20), ((4, 6, 64), 2.0**-9))
    )
    with jax.set_mesh(mesh):
        equation = Equation("BTD,DF->BTF")
        specs = layout.activation("BTD"), layout.stored(equation), layout.activation("BTF")
        run = gradients(equation.text, layout, kind)

        def results(*arrays):
            placed = (jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True))
            return [np.asarray(each) for each in run(*placed)]

        y, d_x, d_w = results(x, w, g)
        assert np.array_equal(y, np.einsum("btd,df->btf", x, w))
        assert np.array_equal(d_x, np.einsum("btf,df->btd", g, w))
        assert np.array_equal(d_w, np.einsum("btd,btf->df", x, g))
        assert not any(each.any() for each in results(x * 0, w * 0, g * 0))
        assert not any(np.isfinite(each).all() for each in results(x, np.where(w == w.max(), np.inf, w), g)[:2])


def test_blocks_keep_small_numbers_beside_large_ones():
    """With one scale for all, three numbers of 2^-12 beside one of 2^12 are zeros."""
    cfg = compose([*SMALL, "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]).config
    mesh = build_mesh(cfg)
    layout = build_layout(cfg, mesh)
    x = np.full((1, 1, 64), 2.0**-12, np.float32)
    x[..., 32:] = 2.0**12
    w = np.zeros((64, 32), np.float32)
    w[:3] = 1.0  # 3 small numbers, and no large one
    with jax.set_mesh(mesh):
        specs = layout.activation("BTD"), layout.stored(Equation("BTD,DF->BTF")), layout.activation("BTF")
        arrays = x, w, np.ones((1, 1, 32), np.float32)
        placed = [jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
        y = {kind: gradients("BTD,DF->BTF", layout, kind)(*placed)[0] for kind in ("fp8", "mxfp8")}
    assert np.all(y["mxfp8"] == 3 * 2.0**-12)
    assert not np.any(y["fp8"])


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, np.ndarray]:
    return first_steps("[[1],[fsdp]]", 16)


def first_steps(mesh: str, num_rows: int, *words: str) -> dict[str, np.ndarray]:
    """Return the metrics of the first step on each of nine batches of 32 sequences."""
    small = build(mesh, num_rows, *words)
    at_start, shardings = jax.tree.map(np.asarray, small.state), jax.tree.map(lambda leaf: leaf.sharding, small.state)
    step, metrics = small.compile(batch(32, 2)), []
    for seed in range(9):
        with jax.set_mesh(small.mesh):
            state = jax.device_put(at_start, shardings)
            metrics.append(step(state, to_global(batch(32, 2, seed=seed), small.mesh))[1])
    return {name: np.array([float(each[name]) for each in metrics]) for name in ("loss", "grad_norm")}


def build(mesh: str, num_rows: int, *words: str, dtype: str = "fp8") -> Program:
    """Return a step on 32 sequences; a device has `num_rows` of a microbatch."""
    return program(
        f"training.matmul_dtype={dtype}", "model.num_layers=2", "model.global_every=1", "model.sliding_window=null", "training.global_batch_size=32",
        f"training.micro_batch_size={num_rows}", f"model.mesh_shape={mesh}", "distributed.allow_idle_devices=true", *SGD, *words,
    )  # fmt: skip


MESHES: dict[str, tuple[int, tuple[str, ...]]] = {  # sequences of a device in a microbatch, and other words
    "[[2,2,2],[dp,fsdp,tp]]": (4, ("training.overlap=prefetch", "training.remat=dots")),
    "[[2,2,2],[fsdp,cp,tp]]": (8, ("training.sequence_parallel=false",)),
    "[[2,4],[fsdp,tp]]": (8, ("training.sharding_strategy=shard_grad_op",)),
    "[[2,2,2],[pp,fsdp,tp]]": (4, ()),
}


@pytest.mark.nightly
def test_blocks_are_the_same_on_every_mesh():
    """Each device has whole blocks of 32 numbers, so they are rounded alike."""
    words = "training.matmul_dtype=mxfp8", "model.embed_dim=64", "model.mlp_dim=128", "model.head_dim=32"
    losses = [
        first_steps(mesh, num_rows, *words)["loss"]
        for mesh, num_rows in (("[[1],[fsdp]]", 16), ("[[2,2],[dp,fsdp]]", 4), ("[[2,2],[fsdp,tp]]", 8))
    ]
    for there in losses[1:]:
        assert np.median(np.abs(there / losses[0] - 1)) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
def test_same_loss_on_every_mesh(mesh, on_one_device):
    """The scales are those of all devices. Each part of a batch on stages has its own, so there it is within rounding.

    A mesh changes the order of sums, so the last bit of a float32. In about one batch of ten, this bit decides to which
    of two 8-bit numbers a number is rounded, and the gradient of a sequence changes by up to this rounding. So most
    batches agree much better than all do.
    """
    num_rows, words = MESHES[mesh]
    here = first_steps(mesh, num_rows, *words)
    for name, there in on_one_device.items():
        differences = np.abs(here[name] / there - 1)
        assert differences.max() < ROUNDING / 4, name
        assert "pp" in mesh or np.median(differences) < 1e-5, (name, differences)


@pytest.mark.nightly
def test_a_frozen_base_in_4_bits_is_rounded_again():
    """Low-rank updates keep the compute dtype; the base's products have the gradient of x alone."""
    words = "model.embed_dim=64", "model.lora.rank=2", "model.lora.quantize_base=nf4"
    programs = [build("[[1],[fsdp]]", 16, *words, dtype=dtype) for dtype in ("null", "fp8")]
    losses = [[step["loss"] for step in each.run(batch(32, 2), 2)] for each in programs]
    np.testing.assert_allclose(*losses, rtol=0.01)
    assert losses[0] != losses[1]


def test_scales_are_kept_with_products(capsys):
    """Else the backward pass would ask all devices for the largest numbers again. Numbers in 8 bits are not kept."""
    cfg = compose([*SMALL, "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]).config
    mesh, equation = build_mesh(cfg), Equation("BTD,DF->BTF")
    layout = build_layout(cfg, mesh)
    with jax.set_mesh(mesh):

        def loss(x, w):
            return jnp.sum(jnp.sin(product(equation, x, layout.gather(w, equation), layout, "fp8")))

        policy = make_policy(Remat("dots"))
        jax.ad_checkpoint.print_saved_residuals(
            jax.checkpoint(loss, policy=policy), jnp.ones((2, 4, 8)), jnp.ones((8, 6))
        )
    kept = capsys.readouterr().out.splitlines()
    named = [line.split()[0] for line in kept if "named 'product'" in line]
    assert len(named) == 3, kept
    assert named.count("f32[]") == 2, kept
    assert not any(line.startswith("f8") for line in kept)


def test_only_chips_that_have_them():
    cfg = compose([*SMALL, FP8]).config
    for platform, kind in (("cpu", "cpu"), ("gpu", "NVIDIA H100 80GB HBM3"), ("gpu", "NVIDIA L40S")):
        check_matmul_dtype(cfg, platform, kind)
    for platform, kind in (("gpu", "NVIDIA A100-SXM4-80GB"), ("tpu", "TPU v5e")):
        with pytest.raises(
            UserError, match=rf"matmul_dtype=fp8: {kind} has no .* B200, H100, H100 PCIe, H200, L40S have"
        ):
            check_matmul_dtype(cfg, platform, kind)
        check_matmul_dtype(compose(SMALL).config, platform, kind)


def test_blocks_are_for_blackwell_and_not_for_stages():
    cfg = compose(
        [*SMALL, "training.matmul_dtype=mxfp8", "model.num_layers=2", "model.mesh_shape=[[2,4],[pp,fsdp]]"]
    ).config
    check_matmul_dtype(cfg, "gpu", "NVIDIA B200")
    with pytest.raises(UserError, match=r"matmul_dtype=mxfp8: NVIDIA H100 has no .* blocks .*; B200 have them"):
        check_matmul_dtype(cfg, "gpu", "NVIDIA H100")
    with pytest.raises(UserError, match=r"matmul_dtype=mxfp8 does not run on stages; leave pp out"):
        select(cfg, build_mesh(cfg))


def test_the_peak_is_that_of_each_product():
    kind = read_device_kinds()["h100"]
    assert [compute_peak_tflops(kind, "fp8", share) for share in (0.0, 1.0)] == pytest.approx([989, 1979])
    assert compute_peak_tflops(kind, None, 0.0) == 989
    assert compute_peak_tflops(kind, "fp8", 0.5) == pytest.approx(2 / (1 / 989 + 1 / 1979))
    for word, num_bits in ((FP8, 8), ("training.matmul_dtype=null", 16)):
        cfg = compose([*SMALL, word]).config
        sizes = dict.fromkeys(axis_names(), 1)
        costs = derive(cfg, sizes, "gpu", with_activations=False)
        in_blocks = 3 * (32 * (4 + 2 + 2 + 4) * 8 + 3 * 32 * 64)
        expected = 6 * in_blocks * costs.tokens_per_step / costs.model_flops if num_bits == 8 else 0.0
        assert costs.matmul_share == pytest.approx(expected)


def test_gpus_multiply_8_bits(installs_dir):
    """The compiled program of a product and its gradients for an H100: three products of 8-bit floats, and no other."""
    found = compile_for_gpu("compile_fp8.py", "h100", "fp8", installs_dir=installs_dir)
    assert found == ["f8e4m3fn f8e4m3fn", "f8e4m3fn f8e5m2", "f8e5m2 f8e4m3fn"]


@pytest.mark.nightly
def test_blackwell_multiplies_blocks(installs_dir):
    """The compiled program for a B200: factors of 8 bits with their scales, forward and backward."""
    found = compile_for_gpu("compile_fp8.py", "b200", "mxfp8", installs_dir=installs_dir)
    assert found == ["f8e4m3fn f8e4m3fn f8e8m0fnu f8e8m0fnu"] * 3
