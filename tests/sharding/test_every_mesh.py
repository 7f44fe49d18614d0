"""Loss and gradients are the same on every mesh: each axis beside each pair of others, dense models and experts.

Other files have the meshes that are not here: one and two axes in training/test_step.py, parts of a batch on stages in
training/test_pipeline.py, three axes with experts in models/test_experts.py.
"""

from functools import cache

import jax
import numpy as np
import pytest
from support.harness import SMALL, batch, experts, loss_and_norm_of

from tunix.config.compose import compose
from tunix.models import matmul
from tunix.sharding.arrays import to_global
from tunix.training.choices import build_mesh
from tunix.training.train_spec import assemble

TOLERANCE = 1e-5  # float32; sums in another order
# Two layers; few kinds of operations, because a program is compiled for each mesh.
TINY = [
    *SMALL,
    "model.num_layers=2",
    "model.global_every=1",
    "model.sliding_window=null",
    "training.loss_chunk_size=32",
]
EXPERTS = experts(num_experts=4)


@pytest.fixture(autouse=True)
def matrices_of_any_size(monkeypatch):
    """Arrays of these tests are small; large ones are multiplied as matrices."""
    monkeypatch.setattr(matmul, "MANY_NUMBERS", 0)


def loss_and_norm(mesh_shape: str, *words: str) -> dict[str, float]:
    """Loss, gradient norm and penalties of the first batch, from weights that the seed makes on any mesh."""
    rows = batch(16, length=32)
    cfg = compose([*TINY, *words, f"model.mesh_shape={mesh_shape}", "distributed.allow_idle_devices=true"]).config
    mesh = build_mesh(cfg)
    sequences = 16 // np.prod([mesh.shape[axis] for axis in ("pp", "dp", "fsdp", "ep")])
    training = cfg.training.model_copy(update={"micro_batch_size": int(sequences)})
    with jax.set_mesh(mesh):
        step = assemble(cfg.model_copy(update={"training": training}), mesh)
        params = jax.tree.map(
            lambda leaf, weight: jax.device_put(leaf, jax.NamedSharding(mesh, step.layout.stored(weight.equation))),
            weights(*words[:1]), step.arch.weights,
        )  # fmt: skip
        return loss_and_norm_of(step, params, to_global(rows, mesh))


@cache
def weights(*words: str) -> dict:
    """Parameters on the host, drawn once: another test holds that they are the same on every mesh."""
    from support.harness import program

    return jax.tree.map(np.asarray, program(*TINY, *words, *ONE).state["params"])


ONE = "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"


@cache
def reference(*words: str) -> dict[str, float]:
    return loss_and_norm("[[1],[fsdp]]", *words)


@pytest.mark.nightly(but=["pp,fsdp,cp-words3"])
@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("pp,dp,fsdp", []), ("pp,dp,cp", []), ("pp,dp,tp", []), ("pp,fsdp,cp", []), ("pp,cp,tp", []),
        ("dp,cp,tp", []), ("dp,cp,tp", ["training.sequence_parallel=false"]),
    ],
)  # fmt: skip
def test_dense(axes, words):
    assert_same(loss_and_norm(f"[[2,2,2],[{axes}]]", "seed=0", *words), reference("seed=0"))


@pytest.mark.nightly(but=["fsdp,ep,cp-words7"])
@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("pp,dp,ep", []), ("pp,fsdp,ep", []), ("pp,ep,cp", []), ("pp,ep,tp", []), ("dp,fsdp,ep", []),
        ("dp,ep,cp", []), ("dp,ep,tp", []), ("fsdp,ep,cp", []), ("ep,cp,tp", []),
    ],
)  # fmt: skip
def test_experts(axes, words):
    assert_same(loss_and_norm(f"[[2,2,2],[{axes}]]", EXPERTS, *words), reference(EXPERTS))


def assert_same(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, err_msg=name)
