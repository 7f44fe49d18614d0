"""Fused kernels of experts: their numbers, interpreted on CPUs; their programs, compiled for GPUs that are not there."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.test_flash import compile_kernels
from support.harness import experts as few_experts

from tunix.config.compose import compose
from tunix.models import fused_experts as fused
from tunix.models.experts import GATES, Experts
from tunix.models.kernels import EXPERT_BLOCKS, ExpertBlocks, GroupedBlock
from tunix.models.layers import Initializer
from tunix.training.choices import build_layout, build_mesh

BLOCK, PAIR = GroupedBlock(16, 32, 16, 1, 1), GroupedBlock(16, 16, 16, 1, 1)
SMALL_BLOCKS = ExpertBlocks(PAIR, BLOCK, BLOCK, PAIR, PAIR, BLOCK, PAIR, BLOCK)
TOKENS, PER_TOKEN, DIM, WIDTH, EXPERTS, FIRST, LOCAL = 24, 3, 48, 40, 9, 3, 3


def draw(case: str) -> np.ndarray:
    """Choices of 9 experts, of which this device has 3, 4 and 5: [tokens, per token]."""
    rng, pick = np.random.default_rng(0), np.arange(EXPERTS)
    others = np.setdiff1d(pick, np.arange(FIRST, FIRST + LOCAL))
    rows = {
        "uneven": lambda: rng.choice(pick, PER_TOKEN, replace=False),
        "an expert without rows": lambda: rng.choice(np.setdiff1d(pick, [4]), PER_TOKEN, replace=False),
        "all tokens to one expert": lambda: np.r_[5, rng.choice(others, PER_TOKEN - 1, replace=False)],
        "no token here": lambda: rng.choice(others, PER_TOKEN, replace=False),
        "all choices here": lambda: np.arange(FIRST, FIRST + LOCAL),
    }
    return np.stack([rows[case]() for _ in range(TOKENS)]).astype(np.int32)


def defined(x, probs, weights, group, hidden):
    """The definition: every token with every expert of this device, times the weight of its choice."""
    total = jnp.zeros_like(x)
    for expert in range(LOCAL):
        prob = jnp.sum(jnp.where(group == expert, probs, 0), 1)
        a, b = (
            jnp.einsum("nd,dg->ng", x, w[expert], precision="highest") + (0 if bias is None else bias[expert])
            for w, bias in ((weights.gate, weights.gate_bias), (weights.up, weights.up_bias))
        )
        rows = hidden(a, b, jnp.broadcast_to(prob[:, None], a.shape))
        # Where the weight multiplies inputs, a token that does not choose the expert gives 0 without biases.
        total += jnp.einsum("ng,gd->nd", rows, weights.down[expert], precision="highest")
    return total


@pytest.mark.nightly(
    but=[
        "kernels-clamped_silu-results-True-capacity 16",
        "plain-gelu-inputs-False-capacity 48",
    ]
)
@pytest.mark.parametrize("capacity", [16, 48, TOKENS * PER_TOKEN], ids="capacity {}".format)
@pytest.mark.parametrize(
    ("gate", "weighted", "has_biases"),
    [("silu", "results", False), ("gelu", "inputs", False), ("clamped_silu", "results", True)],
)
@pytest.mark.parametrize("blocks", [SMALL_BLOCKS, None], ids=["kernels", "plain"])
def test_numbers_are_those_of_the_definition(gate, weighted, has_biases, capacity, blocks):
    """Results and gradients of all arrays; the interpreter fills what nobody writes with NaN, so nothing undefined is read."""
    rng = np.random.default_rng(1)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    x, dy, probs = numbers(TOKENS, DIM), numbers(TOKENS, DIM), jnp.asarray(rng.uniform(size=(TOKENS, PER_TOKEN)))
    biases = [numbers(LOCAL, WIDTH) for _ in range(2)] if has_biases else []
    weights = fused.ExpertWeights(
        numbers(LOCAL, DIM, WIDTH), numbers(LOCAL, DIM, WIDTH), numbers(LOCAL, WIDTH, DIM), *biases
    )
    hidden = partial(fused.HIDDEN[weighted], GATES[gate])
    program = fused.KernelConfig(hidden, capacity, blocks, interpret=True)

    def results(compute):
        y, pull_back = jax.vjp(compute, x, probs.astype(jnp.float32), weights)
        return jax.tree.leaves((y, pull_back(dy)))

    @jax.jit
    def both(group):
        rows = fused.sort_rows(group, LOCAL)
        found = results(lambda *arrays: fused.compute_experts(*arrays, rows, program))
        return found, results(partial(defined, group=group, hidden=hidden))

    for case in ("uneven", "an expert without rows", "all tokens to one expert", "no token here", "all choices here"):
        choices = draw(case) - FIRST
        group = np.where((choices >= 0) & (choices < LOCAL), choices, LOCAL)
        for found, expected in zip(*both(group), strict=True):
            np.testing.assert_allclose(found, expected, atol=2e-6 * max(np.abs(expected).max(), 1e-3), err_msg=case)


def test_room_for_rows():
    assert fused.count_capacity(10_000, 80_000) == 12_500
    assert fused.count_capacity(10_000, 10_000) == 10_000  # one device has all experts: it gets all rows, and no more
    assert fused.count_capacity(500, 4000) == 4000  # few rows: no loop that makes a GPU wait for the host


FAMILIES = {
    "GPT-OSS": {"biases": True, "activation": "clamped_silu", "normalized": True},
    "DeepSeek": {"shared_dim": 8, "scores": "sigmoid", "scale": 2.0, "num_groups": 4, "groups_per_token": 2},
    "Llama 4": {
        "weighted": "inputs",
        "scores": "sigmoid",
        "experts_per_token": 1,
        "shared_dim": 8,
        "normalized": False,
    },
    "Gemma 4": {"activation": "gelu", "beside_mlp": True},
}


@pytest.mark.nightly(but=["GPT-OSS"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_on_a_mesh_is_that_of_products(family, monkeypatch):
    """Results and gradients, with further rounds, where devices have other experts and parts of their width."""
    monkeypatch.setattr(fused, "FEW_ROWS", 0)
    few = few_experts(**FAMILIES[family])
    x = np.random.default_rng(0).normal(size=(2, 8, 2, 12)).astype(np.float32)

    def results(products: str, mesh_shape: str) -> list:
        words = ["model.embed_dim=12", "training.mixed_precision=fp32", few, f"model.expert_products={products}"]
        cfg = compose([*words, f"model.mesh_shape={mesh_shape}", "distributed.allow_idle_devices=true"]).config
        mesh = build_mesh(cfg)
        with jax.set_mesh(mesh):
            layout = build_layout(cfg, mesh)
            graph, state = nnx.split(nnx.jit(lambda: Experts(cfg.model, layout, Initializer(jax.random.key(0))))())
            # Biases are 0 at first.
            state = jax.jit(lambda state: jax.tree.map(lambda w: jnp.where(w == 0, 0.1, w), state))(state)
            inputs, gradient = (jax.reshard(each, layout.activation("BtD")) for each in x)

            @jax.jit
            def run(state, inputs, gradient):
                y, pull_back = jax.vjp(lambda state, x: nnx.merge(graph, state)(x, None)[0], state, inputs)
                return y, *pull_back(gradient)

            return jax.tree.map(np.asarray, jax.tree.leaves(run(state, inputs, gradient)))

    expected = results("xla", "[[1],[fsdp]]")
    for found, value in zip(results("fused", "[[2,2],[ep,tp]]"), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5 * np.abs(value).max())


MODELS = ("qwen3_30b_a3b", "gpt_oss_20b", "gemma4_26b_a4b", "llama4_scout")
KERNELS = ("combine", "d_down", "d_hidden", "d_inputs", "d_rows", "down", "up")


@pytest.mark.nightly
@pytest.mark.parametrize(("chip", "model"), [(chip.lower(), model) for chip in EXPERT_BLOCKS for model in MODELS])
def test_blocks_fit_into_the_chip(chip, model, installs_dir):
    """XLA compiles the layer, forward and backward, and refuses kernels that spill registers or need more memory."""
    if (chip, model) == ("l40s", "gpt_oss_20b"):
        pytest.skip("16 bytes of a product of XLA's own (gemm_fusion_dot) spill there, and none of these kernels")
    found = json.loads(compile_kernels(chip, f"experts-{model}-fused", installs_dir))
    assert found["kernels"] == {f"experts_{name}": 1 + (name == "combine") for name in KERNELS}
    if model == "qwen3_30b_a3b":
        # Products with eight experts and the router's, forward and backward; half a block of 128 rows is empty.
        of_model = 3 * 2 * (3 * 8 * 4096 * 2048 * 768 + 4096 * 2048 * 128)
        assert of_model < found["flops"] < 1.26 * of_model
        assert found["temporary_bytes"] < 0.2 * 2**30
