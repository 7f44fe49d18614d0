"""Attention on ranges: its numbers, interpreted on CPUs; its programs, compiled for GPUs that are not there."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gpu_compiler import compile_for_gpu
from support.harness import batch, cli, cli_here, errors, program

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.models.attention import plain
from tunix.models.attention_mask import row_mask_rule
from tunix.models.flash_attention import flash
from tunix.models.kernels import (
    FLASH_BLOCKS,
    FlashBlock,
    FlashBlocks,
    computed_pairs,
    computed_pairs_in_ring,
    select_kernel,
)
from tunix.models.ring import RINGS, FlashRing, ring_attention
from tunix.models.vision import find_ends
from tunix.run.start_report import _describe_attention
from tunix.sharding.table import MESH
from tunix.training.choices import build_layout, build_mesh, select
from tunix.training.kernel_check import check_attention

KERNEL_NAMES = ["attention_d_keys", "attention_d_queries", "attention_forward"]
SMALL_BLOCKS = {8: FlashBlocks(FlashBlock(64, 32, 1, 1), FlashBlock(64, 32, 1, 1), FlashBlock(32, 64, 1, 1))}


def interpreted(q, k, v, seen, **options):
    return flash(q, k, v, seen, FLASH_BLOCKS["H100"] if q.shape[3] > 8 else SMALL_BLOCKS, **options)


@pytest.mark.nightly(but=["grouped heads", "filled up, capped, with sums"])
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "dim", "window", "options"),
    [
        (256, 4, 2, 64, 256, {}),
        (200, 3, 1, 100, 70, {"cap": 1.5, "with_sums": True}),
        (256, 2, 2, 256, 17, {}),
    ],
    ids=["grouped heads", "filled up, capped, with sums", "large heads"],
)
def test_numbers_are_those_of_the_plain_kernel(length, heads, kv_heads, dim, window, options):
    """Outputs and gradients in float32, with documents that begin anywhere."""
    rng = np.random.default_rng(0)
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, length))), jnp.int32)
    seen = row_mask_rule(segments, jnp.int32(window))
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(2, length, n, dim)), jnp.float32) for n in (heads, kv_heads, kv_heads, heads)
    )

    @partial(jax.jit, static_argnums=0)
    def results(kernel, q, k, v):
        out, pull_back = jax.vjp(lambda *qkv: kernel(*qkv, seen, **options), q, k, v)
        return *jax.tree.leaves(out), *pull_back((d_out, d_out[..., 0]) if options else d_out)

    for one, other in zip(*(results(kernel, q * dim**-0.5, k, v) for kernel in (interpreted, plain)), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6 * np.abs(other).max())


@pytest.mark.nightly(but=["shorter than an image"])
@pytest.mark.parametrize("window", [13, 256], ids=["shorter than an image", "whole rows"])
def test_tokens_of_a_image_see_one_another(window):
    """Images of 40 tokens, one cut by the end of its row; both kernels compute what the mask says."""
    length, tokens, future_keys = 200, 40, 39
    rng = np.random.default_rng(0)
    index, segments = np.full((2, length), -1, np.int32), np.zeros((2, length), np.int32)
    for row, start, slot in ((0, 3, 0), (0, 60, 1), (0, 180, 2), (1, 101, 0)):
        end = min(start + tokens, length)
        index[row, start:end] = slot * tokens + np.arange(end - start)
        segments[row, start - 1 :] += 1
    seen = row_mask_rule(jnp.asarray(segments), jnp.int32(window), find_ends(jnp.asarray(index), tokens))
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(2, length, n, 8)), jnp.float32) for n in (4, 2, 2, 4))

    def masked(q, k, v, rule, future_keys):
        return jax.nn.dot_product_attention(q, k, v, mask=rule.mask(), scale=1.0)

    @partial(jax.jit, static_argnums=0)
    def results(kernel, q, k, v):
        out, pull_back = jax.vjp(lambda *qkv: kernel(*qkv, seen, future_keys=future_keys), q, k, v)
        return out, *pull_back(d_out)

    expected = results(masked, q, k, v)
    for kernel in (interpreted, plain):
        for one, other in zip(results(kernel, q, k, v), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=3e-6 * np.abs(other).max())


def test_a_ring_of_kernels_computes_what_plain_blocks_do(monkeypatch):
    """Three devices of 96 tokens, filled up to 128; documents and windows end in blocks of other devices."""
    rng = np.random.default_rng(1)
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, 288))), jnp.int32)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(2, 288, n, 8)), jnp.float32) for n in (4, 2, 2, 4))
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((3,), ("cp",), axis_types=automatic, devices=jax.devices()[:3])
    split = jax.P(None, "cp")

    def results(q, k, v):
        @partial(
            jax.shard_map, mesh=mesh, in_specs=(split,) * 3 + (jax.P(),), out_specs=(split, split), check_vma=False
        )
        def attended(q, k, v, segments):
            return ring_attention("xla", q, k, v, row_mask_rule(segments, 120), cap=1.5, with_sums=True)

        out, pull_back = jax.vjp(lambda *qkv: attended(*qkv, segments), q, k, v)
        return *out, *pull_back((d_out, d_out[..., 0]))

    expected = jax.jit(results)(q, k, v)
    monkeypatch.setitem(RINGS, "xla", partial(FlashRing, blocks=SMALL_BLOCKS))
    for one, other in zip(jax.jit(lambda *qkv: results(*qkv))(q, k, v), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6 * np.abs(other).max())


@pytest.mark.nightly
def test_a_step_is_that_of_the_plain_kernel(monkeypatch):
    """In a shard_map over explicit axes, with windows, documents, and more devices on tp than key/value heads."""
    # Pallas' interpreter does not know types of arrays that vary over a mesh; on GPUs they are checked.
    monkeypatch.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))
    mesh = ["model.mesh_shape=[[2,4],[fsdp,tp]]", "training.remat=attention"]
    steps = [
        program(*mesh, f"model.attention={kernel}").run(batch(sequences=4), steps=2)
        for kernel in ("xla", f"{__name__}:interpreted")
    ]
    for one, other in zip(*steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_pairs_that_are_computed():
    """Both triangles are 1024 x 1024; blocks at the diagonal and at the edge of a window count whole."""
    block = FlashBlock(128, 64, 8, 2)
    assert computed_pairs(1024, [1024], block) == 128 * sum(range(128, 1025, 128))
    assert computed_pairs(1024, [1], block) == 1024 * 128
    mixed = computed_pairs(1024, [1024, 1], block)
    assert mixed == (computed_pairs(1024, [1024], block) + 1024 * 128) / 2
    # The last of four devices with 256 tokens each: its own triangle, then whole blocks, or what is left of a window.
    own = computed_pairs(256, [1024], block)
    assert list(computed_pairs_in_ring(256, 4, 1024, block)) == [own, *[256 * 256] * 3]
    assert list(computed_pairs_in_ring(256, 4, 129, block)) == [128 * 128 + 128 * 256, 128 * 128, 0, 0]


def device(kind: str, platform: str = "gpu") -> jax.sharding.AbstractDevice:
    return jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform=platform)


@pytest.mark.parametrize(
    ("kind", "platform", "head_dim", "dtype", "name", "reason"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", 128, "bfloat16", "flash", "exact here"),
        ("NVIDIA A100-SXM4-80GB", "gpu", 80, "float16", "flash", "exact here"),
        ("NVIDIA H200", "gpu", 128, "float32", "xla", "products are float32"),
        ("NVIDIA H200", "gpu", 512, "bfloat16", "xla", "at most 256 numbers, not of 512"),
        ("Tesla T4", "gpu", 64, "float16", "xla", "not for Tesla T4"),
        ("cpu", "cpu", 64, "bfloat16", "xla", "not for cpu"),
    ],
)
def test_auto_takes_the_fastest_kernel_that_is_exact(kind, platform, head_dim, dtype, name, reason):
    choice = select_kernel("auto", head_dim, dtype, device(kind, platform))
    assert choice.name == name
    assert reason in choice.reason


def test_the_start_report_names_the_kernel_of_a_ring():
    cfg = compose(["model=gemma3_270m", "model.mesh_shape=[[2],[cp]]", "model.cp_exchange=ring"]).config
    names = tuple(axis.name for axis in MESH)
    sizes, types = tuple(2 if name == "cp" else 1 for name in names), (jax.sharding.AxisType.Explicit,) * len(names)
    mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=types, abstract_device=device("NVIDIA H100"))
    said = _describe_attention(select(cfg, mesh))
    assert said == "flash attention (exact here, and skips keys that no query sees) by ring"


@pytest.mark.parametrize(
    ("name", "kind", "head_dim", "dtype", "message"),
    [
        ("cudnn", "cpu", 64, "bfloat16", "model.attention=cudnn: cuDNN needs an NVIDIA GPU, not cpu"),
        ("cudnn", "NVIDIA H100", 64, "float32", "cuDNN multiplies 16-bit numbers, and products are float32"),
        ("cudnn", "NVIDIA H100", 100, "bfloat16", "cuDNN takes heads of a multiple of 8 numbers, not of 100"),
        ("flash", "cpu", 64, "bfloat16", "model.attention=flash: flash has block sizes for H100"),
        ("flash", "NVIDIA H100", 64, "float32", "model.attention=auto takes the fastest kernel that is exact"),
    ],
)
def test_kernels_are_refused_where_they_are_not_exact(name, kind, head_dim, dtype, message):
    with pytest.raises(UserError, match=message):
        select_kernel(name, head_dim, dtype, device(kind, "cpu" if kind == "cpu" else "gpu"))


def test_a_kernel_that_lacks_what_the_model_needs_is_refused():
    h100 = device("NVIDIA H100")
    with pytest.raises(UserError, match="cudnn has no cap of scores .* set model.attention=auto"):
        select_kernel("cudnn", 64, "bfloat16", h100, {"cap": 50.0})
    assert select_kernel("auto", 64, "bfloat16", h100, {"cap": 50.0, "with_sums": True}).name == "flash"


def test_a_run_says_which_kernel_computes_and_refuses_one_that_does_not_run(tmp_path):
    done = cli_here("dry_run=true", cwd=tmp_path)
    assert "xla attention (flash has block sizes for H100, H200, A100, B200, L40S, not for cpu)" in done.stdout
    refused = cli("dry_run=true", "model.attention=cudnn", cwd=tmp_path)
    assert (refused.returncode, len(errors(refused))) == (2, 1)


def wrong(q, k, v, seen):
    """Forgets the window."""
    return plain(q, k, v, seen._replace(window=jnp.int32(10**6)))


def broken(q, k, v, seen):
    raise ValueError("no such block")


def test_a_kernel_is_compared_with_the_plain_one_before_the_first_step():
    def compared(kernel: str, *more: str) -> str | None:
        words = ["model.mesh_shape=[[4,2],[fsdp,tp]]", f"model.attention={kernel}", *more]
        cfg = compose(words).config
        mesh = build_mesh(cfg)
        with jax.set_mesh(mesh):
            return check_attention(cfg, build_layout(cfg, mesh), mesh)

    assert compared("auto") is None  # which is the plain one here
    assert "agrees with the plain kernel within" in (compared("tunix.models.attention:plain") or "")
    with pytest.raises(
        UserError, match=r"differ from the plain kernel's by .*% on cpu.*answers of the model, and exports"
    ):
        compared(f"{__name__}:wrong")
    with pytest.raises(
        UserError, match=r"model\.attention=.*:broken fails: ValueError: no such block \(.*, line \d+\)"
    ):
        compared(f"{__name__}:broken")
    said = compared(f"{__name__}:wrong", "training.check_attention=false") or ""
    assert "wrong attention is not compared: answers of the model, and exports, have the attention of tunix" in said
    assert compared("auto", "training.check_attention=false") is None


def compile_kernels(chip: str, label: str, installs_dir) -> str:
    """Return what tests/support/compile_kernels.py prints last."""
    return compile_for_gpu("compile_kernels.py", chip, label, installs_dir=installs_dir)[-1]


# Programs of the H200 are compiled in tests/costs/test_gpu_program.py.
@pytest.mark.nightly(but=["b200-256"])
@pytest.mark.parametrize(("chip", "dim"), [(chip.lower(), dim) for chip, rows in FLASH_BLOCKS.items() for dim in rows])
def test_blocks_fit_into_the_chip(chip, dim, installs_dir):
    """XLA refuses a kernel that needs more shared memory, or tensor memory, than the chip has."""
    names = compile_kernels(chip, str(dim), installs_dir).split()
    assert names == KERNEL_NAMES


@pytest.mark.nightly
@pytest.mark.parametrize("chip", ["h100", "l40s"])
def test_soft_caps_and_sinks_compile_for_a_gpu(chip, installs_dir):
    """With heads as wide as those of Gemma 2: the cap and the sums of a sink need more registers in each block."""
    assert compile_kernels(chip, "256-capped", installs_dir).split() == KERNEL_NAMES
    assert compile_kernels(chip, "256-images", installs_dir).split() == KERNEL_NAMES


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("exchange", "suffixes", "collective"),
    [("ulysses", "", "all-to-all"), ("ring", "_before _own", "collective-permute")],
)
def test_attention_of_devices_that_share_a_sequence_compiles_for_a_gpu(exchange, suffixes, collective, installs_dir):
    """Ulysses runs the kernels on whole sequences; a ring on the device's own block and on those before it."""
    found = json.loads(compile_kernels("h100", exchange, installs_dir))
    assert found["kernels"] == sorted(name + suffix for name in KERNEL_NAMES for suffix in suffixes.split() or [""])
    assert collective in found["collectives"]
