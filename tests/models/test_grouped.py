"""Grouped products: their numbers, interpreted on CPUs; their programs, compiled for GPUs that are not there."""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.test_experts import SMALL, STEPS
from models.test_flash import compile_kernels
from models.test_fused_experts import SMALL_BLOCKS as SMALL_EXPERT_BLOCKS
from support.harness import batch, cli_here, program
from support.harness import experts as few_experts

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.models.grouped_matmul import grouped
from tunix.models.kernels import GROUPED_BLOCKS, GroupedBlock, GroupedBlocks, empty_rows, select_expert_matmul
from tunix.training import kernel_check
from tunix.training.choices import build_layout, build_mesh
from tunix.training.kernel_check import check_expert_matmul

EXACT = ["distributed.allow_idle_devices=true", "training.mixed_precision=fp32"]
SMALL_BLOCKS = GroupedBlocks(
    GroupedBlock(16, 32, 16, 1, 1), GroupedBlock(32, 16, 32, 1, 1), GroupedBlock(16, 16, 32, 1, 1)
)


def interpreted(rows, w, sizes):
    return grouped(rows, w, sizes, SMALL_BLOCKS)


def results(kernel, rows, w, sizes, gradient):
    """Products and gradients, 0 for rows behind the last group."""
    has_group = (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]
    out, pull_back = jax.vjp(lambda rows, w: jnp.where(has_group, kernel(rows, w, sizes), 0), rows, w)
    d_rows, d_w = pull_back(gradient)
    return out, jnp.where(has_group, d_rows, 0), d_w


def test_numbers_are_those_of_ragged_dot():
    """One program for all loads of experts: none, one row, all rows, rows behind the last group; sizes that fit badly."""
    rng = np.random.default_rng(0)
    rows, w, gradient = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((75, 40), (6, 40, 50), (75, 50)))
    both = jax.jit(lambda *arrays: (results(interpreted, *arrays), results(jax.lax.ragged_dot, *arrays)))
    for loads in ([5, 0, 33, 20, 0, 1], [0, 0, 0, 0, 0, 75], [16, 16, 16, 16, 11, 0], [0] * 6):
        for one, other in zip(*both(rows, w, jnp.array(loads, jnp.int32), gradient), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6 * max(np.abs(other).max(), 1))


@pytest.mark.nightly
@pytest.mark.parametrize("words", [["model.mesh_shape=[[2,2,2],[fsdp,ep,tp]]"]])
def test_a_step_is_that_of_ragged_dot(words, monkeypatch):
    """In a shard_map over explicit axes, with rows of other devices' experts behind the last group."""
    # Pallas' interpreter does not know types of arrays that vary over a mesh; on GPUs they are checked.
    monkeypatch.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))
    steps = [
        program(*SMALL, *words, f"model.expert_products={kernel}").run(batch(sequences=8), steps=STEPS)
        for kernel in ("xla", f"{__name__}:interpreted")
    ]
    for one, other in zip(*steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "dtype", "name", "reason"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", "fused", "copies no row"),
        ("NVIDIA L40S", "float16", "fused", "exact here"),
        ("NVIDIA H200", "float32", "xla", "multiplies 16-bit numbers, and products are float32"),
        ("Tesla T4", "float16", "xla", "block sizes for H100, H200, A100, B200, L40S, not for Tesla T4"),
        ("cpu", "bfloat16", "xla", "not for cpu"),
    ],
)
def test_auto_takes_the_kernel_where_it_is_exact(kind, dtype, name, reason):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="cpu" if kind == "cpu" else "gpu")
    choice = select_expert_matmul("auto", dtype, device)
    assert choice.name == name
    assert reason in choice.reason
    assert select_expert_matmul("xla", dtype, device).name == "xla"
    if name == "xla":
        for refused in ["grouped"] if kind == "cpu" else ["grouped", "fused"]:
            with pytest.raises(UserError, match=f"model.expert_products={refused}: .*set model.expert_products=auto"):
                select_expert_matmul(refused, dtype, device)


def test_auto_takes_products_where_the_fused_kernels_lack_a_part():
    """Biases are added behind the weights of the router, which these experts multiply before."""
    lora = ["model.lora.rank=2", "model.lora.targets=mlp.expert_up"]
    for words, lack in (
        ([few_experts(biases=True, weighted="inputs")], r"add no biases \(model.mlp.biases\) to weighted inputs"),
        ([few_experts(), *lora], r"add no low-rank updates to experts \(model.lora.targets\)"),
    ):
        model = compose(words).config.model
        for kind in ("gpu", "cpu"):
            device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform=kind)
            choice = select_expert_matmul("auto", "bfloat16", device, model)
            assert choice.name == "grouped"
            assert re.search(lack, choice.reason)
            with pytest.raises(UserError, match=f"model.expert_products=fused: the fused kernels {lack}"):
                select_expert_matmul("fused", "bfloat16", device, model)


def test_a_run_says_which_products_and_a_dense_model_refuses_them(tmp_path):
    done = cli_here(*SMALL, "dry_run=true", cwd=tmp_path)
    assert "products by xla (the grouped kernel has block sizes for H100" in " ".join(done.stdout.split())
    with pytest.raises(UserError, match="model.expert_products=xla: model.mlp.kind=gated has no experts"):
        compose(["model.expert_products=xla"])


def wrong(rows, w, sizes):
    """Gives the last group a row too many."""
    return jax.lax.ragged_dot(rows, w, sizes.at[0].add(-1).at[-1].add(1))


def test_products_are_compared_with_ragged_dot_before_the_first_step():
    def compared(kernel: str, *more: str) -> str | None:
        cfg = compose([*SMALL, "model.mesh_shape=[[4,2],[ep,tp]]", f"model.expert_products={kernel}", *more]).config
        mesh = build_mesh(cfg)
        with jax.set_mesh(mesh):
            return check_expert_matmul(cfg, build_layout(cfg, mesh), mesh)

    assert compared("auto") is None  # which is ragged_dot here
    assert "products of experts agrees with the plain kernel within" in (compared("jax.lax:ragged_dot") or "")
    with pytest.raises(UserError, match=r"(outputs|gradients of \w+) differ .* train with model.expert_products=xla"):
        compared(f"{__name__}:wrong")
    assert compared(f"{__name__}:wrong", "training.check_attention=false") is None
    assert compared("fused") is None  # operations of JAX stand for the kernels


@pytest.mark.nightly
@pytest.mark.parametrize("is_wrong", [False, True])
def test_fused_kernels_are_compared_before_the_first_step(is_wrong, monkeypatch):
    """The kernels are interpreted; a wrong one takes the weights of the router twice."""
    monkeypatch.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))
    monkeypatch.setattr(kernel_check, "blocks_in_use", lambda activation: SMALL_EXPERT_BLOCKS)
    kernels = kernel_check.KernelConfig

    def interpreted_config(hidden, capacity, blocks):
        twice = lambda a, b, probs: hidden(a, b, probs * probs)  # noqa: E731
        return kernels(twice if is_wrong and blocks else hidden, capacity, blocks, interpret=True)

    monkeypatch.setattr(kernel_check, "KernelConfig", interpreted_config)
    cfg = compose([*SMALL, "model.mesh_shape=[[1],[fsdp]]", "model.expert_products=fused", *EXACT]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        if is_wrong:
            with pytest.raises(UserError, match=r"fused: its \w+.* differ .* train with model.expert_products=xla"):
                check_expert_matmul(cfg, build_layout(cfg, mesh), mesh)
        else:
            found = check_expert_matmul(cfg, build_layout(cfg, mesh), mesh)
            assert "fused products of experts agrees with the plain kernel within 0.00%" in (found or "")


def test_rows_that_are_computed_beside_those_of_the_groups():
    """Half a block of each group, on average."""
    blocks = GroupedBlocks(GroupedBlock(64, 1, 1, 1, 1), GroupedBlock(32, 1, 1, 1, 1), GroupedBlock(1, 1, 16, 1, 1))
    assert list(empty_rows(blocks).values()) == [32, 16, 8]


@pytest.mark.nightly
@pytest.mark.parametrize("chip", [chip.lower() for chip in GROUPED_BLOCKS])
def test_blocks_fit_into_the_chip(chip, installs_dir):
    """XLA refuses a kernel that needs more shared memory, or tensor memory, than the chip has.

    The layer of Qwen 3 30B-A3B, forward and backward: three products with three kernels each, and no product beside them.
    """
    found = json.loads(compile_kernels(chip, "experts-qwen3_30b_a3b-grouped", installs_dir))
    assert found["kernels"] == {"grouped_d_rows": 3, "grouped_d_weights": 3, "grouped_forward": 3}
    # Products with eight experts and the router's, forward and backward. XLA's own product of one of the three matrices
    # would have 16 times as many FLOPs as all of these, and 16 GiB of copies of the rows.
    num_rows, size = 8 * 4096, 2048 * 768
    of_model = 3 * 2 * (3 * num_rows * size + 4096 * 2048 * 128)
    assert of_model < found["flops"] < 1.26 * of_model  # half a block of 256 rows is empty
    assert found["temporary_bytes"] < 1.5 * 2**30
