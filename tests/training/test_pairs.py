"""Every two options go together: a step with both is traced on meshes with all axes, or refused by name.

A wrong layout is an error while tracing, so nothing is compiled. What is computed is held by other tests.
"""

from itertools import combinations

import jax
import pytest
from models.test_linear_attention import HYBRID
from support.harness import SGD, batch, experts, program

from tunix.base.errors import UserError

EXPERTS = experts(num_experts=4)
MESHES = ["[[2,2,2],[pp,fsdp,tp]]", "[[2,2,2],[pp,cp,tp]]", "[[2,2,2],[dp,fsdp,tp]]", "[[2,2,2],[fsdp,cp,tp]]"]
MESH_OF_EXPERTS = "[[2,2,2],[ep,cp,tp]]"
BASE = (
    "model.num_layers=4", "model.global_every=2", "training.gradient_accumulation_steps=2",
    "training.micro_batch_size=2", "distributed.allow_idle_devices=true",
)  # fmt: skip
OPTIONS = {
    "experts": [EXPERTS],
    "lora": ["model.lora.rank=2"],
    "dora": ["model.lora.rank=2", "model.lora.use_dora=true", "model.lora.dropout=0.3"],
    "nf4": ["model.lora.rank=2", "model.lora.quantize_base=nf4", "model.lora.targets=attention.q|mlp.up"],
    "fp8": ["training.matmul_dtype=fp8"],
    "bf16": ["training.mixed_precision=bf16", "training.param_dtype=bfloat16"],
    "linear attention": HYBRID,
    "layer norm": [
        "model.norm=layer",
        "model.qk_norm=none",
        "model.biases=.",
        "model.norm_placement=post",
        "model.attention_sinks=true",
        "model.attention_gate=true",
        "model.layer_scale=true",
    ],
    "xielu": ["model.mlp={kind: plain, activation: xielu}"],
    "ring": ["model.cp_exchange=ring"],
    "zero 1": ["training.sharding_strategy=shard_optimizer"],
    "prefetch": ["training.overlap=prefetch", "training.sync_gradients_every=1"],
    "groups": ["training.remat_every=2"],
    "muon": ["optimizer=muon", "optimizer.moments=int8"],
    "qk clip": ["optimizer=muon", "optimizer.qk_clip=100", "model.qk_norm=none"],
    "copies": ["training.ema_decay=0.9", "training.spike_deviations=6", "logging.layer_norms_every=1"],
    "dpo": ["task=dpo"],
    "grpo": ["task=grpo", "sampling.max_new_tokens=16"],
    "embed": ["task=embed", "task.negatives=1", "loading.packing=pad"],
    "classify": ["task=classify", "task.labels=[a,b,c]", "model.labels=[a,b,c]"],
}
BUGS = ("experts", "lora"), ("dora", "zero 1"), ("embed", "groups")  # pairs that failed once


def check_pair(first: str, second: str, meshes: list[str]) -> int:
    """Return on how many meshes a step with both options is traced; it is refused on the others."""
    traced = 0
    for mesh in meshes:
        try:
            made = program(*BASE, f"model.mesh_shape={mesh}", *OPTIONS[first], *OPTIONS[second])
            with jax.set_mesh(made.mesh):
                jax.eval_shape(made.step, made.built.abstract, made.built.abstract_batch)
        except UserError:
            continue
        traced += 1
    return traced


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), BUGS)
def test_pairs_that_failed_once(first, second):
    assert check_pair(first, second, MESHES[:3]) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("first", OPTIONS)
def test_every_pair(first):
    """One mesh for each pair, another one for the next."""
    pairs = [pair for pair in combinations(OPTIONS, 2) if pair[0] == first]
    meshes = [MESH_OF_EXPERTS, *MESHES] if first == "experts" else MESHES
    traced = [check_pair(*pair, [meshes[number % len(meshes)]]) for number, pair in enumerate(pairs)]
    assert any(traced) or len(pairs) < 3  # two tasks never go together


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [MESHES[2], MESH_OF_EXPERTS])
def test_updates_of_experts_are_the_same_on_a_mesh(mesh):
    """With factors that are not zero from the start."""
    words = *BASE[:2], *SGD, EXPERTS, *OPTIONS["lora"], "model.lora.init=pissa", BASE[-1]
    one = program(*words, "model.mesh_shape=[[1],[fsdp]]", "training.micro_batch_size=8").run(batch(8))
    many = program(*words, f"model.mesh_shape={mesh}", "training.micro_batch_size=2").run(batch(8))
    for before, after in zip(one, many, strict=True):
        for name in ("loss", "grad_norm"):
            assert after[name] == pytest.approx(before[name], rel=1e-5)
