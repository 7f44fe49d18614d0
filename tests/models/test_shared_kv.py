"""Layers that take keys and values of earlier ones, and inputs of each layer: meshes, refusals, config.json, costs.

Logits and greedy tokens are in test_parity.py.
"""

import json

import numpy as np
import pytest
from models.test_parity import PARITY
from support.harness import ONE_DEVICE, SPLIT_MESHES, batch, program

from tunix.base.errors import UserError
from tunix.config.layers import find_donors
from tunix.huggingface.config_json import read_config, translate_config
from tunix.models.layers import named

LAYERS = [
    "++model.global_heads={head_dim: 12, num_kv_heads: 1, values_are_keys: false}", "model.num_layers=6",
    "model.global_every=2", "++model.shared_kv={layers: 2, mlp_dim: 128}", "model.mlp_dim=64",
    "++model.layer_inputs={dim: 6}", "model.local_rope_theta=1e4", "distributed.allow_idle_devices=true",
]  # fmt: skip
TWO = "training.gradient_accumulation_steps=2"
TOLERANCE = 1e-5  # float32; sums in another order


def steps(*words: str) -> list[dict[str, float]]:
    """Two steps of SGD: the second one has the weights that the gradients of the first one have made. Adam's first
    update is the sign of a gradient, and many numbers of the gates have gradients close to 0 at first."""
    microbatches = 2 if TWO in words else 1
    return program(*LAYERS, "optimizer=sgd", *words).run(batch(sequences=4, microbatches=microbatches), steps=2)


@pytest.fixture(scope="module")
def expected():
    return steps(ONE_DEVICE, "training.micro_batch_size=4")


# Layers that gather ahead, and layers that add to sums of two microbatches.
AHEAD = [
    ["model.mesh_shape=[[2],[fsdp]]", "training.micro_batch_size=1", TWO],
    ["model.mesh_shape=[[2,2],[fsdp,tp]]", "training.micro_batch_size=2", "training.overlap=prefetch"],
    [
        "model.mesh_shape=[[2,2,2],[dp,fsdp,cp]]",
        "training.micro_batch_size=1",
        "training.overlap=prefetch",
        "training.remat=full",
    ],
]


@pytest.mark.nightly
@pytest.mark.parametrize("words", [*AHEAD, *SPLIT_MESHES])
def test_same_step_on_every_mesh(words, expected):
    """The second loss has the weights that the first gradients have made. Its own gradients are steep in these weights:
    a last digit of the first ones is 2e-5 of their norm."""
    found = steps(*words)
    np.testing.assert_allclose([m["loss"] for m in found], [m["loss"] for m in expected], rtol=TOLERANCE)
    np.testing.assert_allclose(found[0]["grad_norm"], expected[0]["grad_norm"], rtol=TOLERANCE)


@pytest.mark.nightly
def test_gradients_of_shared_keys_and_of_inputs_where_layers_gather_ahead():
    """Two turns of layers share keys in one scan, whose gradients of these are a sum."""
    words = [
        "model.shared_kv.layers=4",
        "model.mesh_shape=[[2],[fsdp]]",
        "training.micro_batch_size=2",
        "training.sync_gradients_every=1",
    ]
    plain, ahead = (steps(*words, f"training.overlap={each}") for each in ("none", "prefetch"))
    np.testing.assert_allclose([m["loss"] for m in ahead], [m["loss"] for m in plain], rtol=TOLERANCE)
    np.testing.assert_allclose(ahead[0]["grad_norm"], plain[0]["grad_norm"], rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.mesh_shape=[[4],[pp]]"], "model.shared_kv gives a layer arrays that .*; leave pp out of"),
        (["model.mesh_shape=[[2],[pp]]"], "model.shared_kv gives a layer arrays that do not travel from stage to"),
        (["model.mesh_shape=[[2],[pp]]", "model.shared_kv=null"], "model.layer_inputs gives a layer arrays"),
        (["model.shared_kv.layers=5"], "model.shared_kv.layers=5 leaves fewer than model.global_every=2 of"),
        (["model.shared_kv.mlp_dim=100"], "model.shared_kv.mlp_dim=100 must be model.mlp_dim=64, or twice as much"),
        (["model.global_heads=null"], "model.shared_kv needs model.global_heads"),
        (["training.remat_every=2"], "training.remat_every=2 does not divide"),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        program(*LAYERS, ONE_DEVICE, *words)


def test_shared_layers_have_queries_alone_and_no_cache():
    one = program(*LAYERS, ONE_DEVICE)
    model = one.cfg.model
    assert find_donors(model) == {"KH": 2, "kh": 3}
    assert [(run.layers, run.pattern) for run in model.runs] == [
        (range(1), ("local_blocks_0",)),
        (range(1, 2), ("blocks",)),
        (range(2, 4), ("local_blocks_0", "blocks")),
        (range(4, 5), ("shared_local_blocks_0",)),
        (range(5, 6), ("shared_blocks",)),
    ]
    weights = dict(named(one.arch.weights))
    attention = {path for path in weights if path.startswith("shared_") and ".attention." in path}
    assert {path.split(".")[2] for path in attention} == {"q", "q_norm", "o"}
    assert weights["shared_blocks.mlp.up.w"].shape[-1] == 128
    assert weights["blocks.mlp.up.w"].shape[-1] == 64


def raw_config(**changes: object) -> dict:
    return json.loads((PARITY / "gemma4_small" / "config.json").read_text()) | changes


def test_config_of_the_files():
    found = read_config(PARITY / "gemma4_small")
    assert found["shared_kv"] == {"layers": 3, "mlp_dim": 96}
    assert found["layer_inputs"] == {"dim": 5}
    narrow = translate_config(raw_config(use_double_wide_mlp=False, hidden_size_per_layer_input=0), "config.json")
    assert narrow["shared_kv"] == {"layers": 3, "mlp_dim": 48}
    assert narrow["layer_inputs"] is None
    with pytest.raises(UserError, match="vocab_size_per_layer_input=96 is not supported; it must be vocab_size"):
        translate_config(raw_config(vocab_size_per_layer_input=96), "config.json")
