"""Global layers with heads of their own: meshes, low-rank updates, config.json; logits are in test_parity.py."""

import json

import numpy as np
import pytest
from models.test_parity import PARITY
from support.harness import ONE_DEVICE, SGD, SPLIT_MESHES, batch, program

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.costs.step import derive
from tunix.huggingface.config_json import read_config, translate_config, write_config
from tunix.models.layers import named
from tunix.sharding.table import axis_names
from tunix.training.choices import build_layout, build_mesh
from tunix.training.state import describe

TURNS = [
    "++model.global_heads={head_dim: 12, num_kv_heads: 1, values_are_keys: true}", "model.num_layers=4",
    "model.global_every=2", "model.value_norm=true", "model.layer_scale=true", "model.local_rope_theta=1e4",
    "++model.rope_scaling={name: proportional, share: 0.5}", "distributed.allow_idle_devices=true", *SGD,
]  # fmt: skip
TOLERANCE = 1e-5  # float32; sums in another order


def steps(*words: str) -> list[dict[str, float]]:
    return program(*TURNS, *words).run(batch(sequences=4), steps=2)


@pytest.fixture(scope="module")
def expected():
    return steps(ONE_DEVICE, "training.micro_batch_size=4")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        *SPLIT_MESHES,
        ["model.mesh_shape=[[2],[fsdp]]", "training.micro_batch_size=2", "training.overlap=prefetch"],
        ["model.mesh_shape=[[2],[dp]]", "training.micro_batch_size=2", "training.remat=full", "training.remat_every=2"],
    ],
)
def test_same_step_on_every_mesh(words, expected):
    found = steps(*words)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.mesh_shape=[[4],[pp]]"], "model.num_layers=4: layers of several kinds take turns"),
        (["model.global_every=5"], "model.global_every=5 leaves no local or no global layer of model.num_layers=4"),
        (
            ["model.global_heads.num_kv_heads=3"],
            "model.num_heads=4 is not divisible by model.global_heads.num_kv_heads=3",
        ),
        (["model.global_heads.head_dim=7"], "model.global_heads.head_dim=7 must be even"),
        (["model.rotated_dim=10"], "model.rotated_dim=10 is more than model.head_dim=8"),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        program(*TURNS, ONE_DEVICE, *words)


def test_projections_have_low_rank_updates_and_rest_quantized():
    """Global layers have none of values. Scales of layers and of norms stay numbers."""
    words = [*TURNS, ONE_DEVICE, "model.lora.rank=2", "model.lora.targets=attention", "model.lora.quantize_base=int8"]
    cfg = compose(words).config
    weights = dict(named(describe(cfg.model, build_layout(cfg, build_mesh(cfg))).weights))
    updated = {path.removesuffix(".lora.a") for path in weights if path.endswith(".lora.a")}
    local = {f"local_blocks_0.attention.{name}" for name in "qkvo"}
    assert updated == local | {f"blocks.attention.{name}" for name in "qko"}
    codes = {path.removesuffix("_scale") for path in weights if path.endswith(".w_scale")}
    assert {path for path, weight in weights.items() if path.endswith(".w")} == codes
    assert weights["blocks.scale.factor"].shape == (2, 1)


def test_costs_know_both_widths():
    """Scores are counted by width, and devices along cp swap the heads of each width."""
    sizes = dict.fromkeys(axis_names(), 1) | {"cp": 2}
    words = ["model.mesh_shape=[[2],[cp]]", "model.cp_exchange=ulysses", "model.global_heads.num_kv_heads=2"]

    def costs(head_dim: int):
        cfg = compose([*TURNS, *words, f"model.global_heads.head_dim={head_dim}"]).config
        costs = derive(cfg, sizes, with_activations=False)
        return costs, {each.kind: each.num_bytes for each in costs.transfers if each.kind == "all-to-all"}

    (narrow, narrow_swaps), (wide, wide_swaps) = costs(8), costs(24)
    assert wide.model_flops > narrow.model_flops
    assert wide_swaps["all-to-all"] == 3 * narrow_swaps["all-to-all"]


def raw_config(**changes: object) -> dict:
    return json.loads((PARITY / "gemma4" / "config.json").read_text()) | changes


def test_config_of_the_published_files():
    """They have no `per_layer_config`, and the decoder's keys in text_config of a model that sees."""
    text = raw_config(global_head_dim=10, num_global_key_value_heads=1, use_bidirectional_attention="vision")
    del text["per_layer_config"]
    found = translate_config({"model_type": "gemma4", "text_config": text, "vision_config": {}}, "config.json")
    assert found == read_config(PARITY / "gemma4")
    assert found["global_heads"] == {"head_dim": 10, "num_kv_heads": 1, "values_are_keys": True}
    del text["attention_k_eq_v"]  # then the number of global heads is that of local ones
    assert translate_config(text, "config.json")["global_heads"]["num_kv_heads"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention=all is not supported"),
        ({"per_layer_config": {"2": {"head_dim": 10}}}, "per_layer_config=.* is not understood"),
        ({"per_layer_config": {"1": {"head_dim": 10}}}, "per_layer_config=.* is not understood"),
        ({"per_layer_config": {n: {"head_dim": 10} for n in "012345"}}, "per_layer_config=.* is not understood"),
        ({"query_clip": 3}, "query_clip=3 is not understood"),
    ],
)
def test_keys_that_mean_another_model_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        translate_config(raw_config(**changes), "config.json")


def test_a_width_that_is_left_out_is_the_one_of_transformers():
    raw = raw_config()
    del raw["hidden_size_per_layer_input"]
    assert translate_config(raw | {"vocab_size_per_layer_input": 97}, "config.json")["layer_inputs"] == {"dim": 256}
    raw |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    with pytest.raises(UserError, match="hidden_size_per_layer_input=256 is not supported"):
        translate_config(raw, "config.json")  # models with experts have none


def test_config_is_written_without_keys_of_one_version():
    written = write_config(
        compose(["model=gemma4_31b", ONE_DEVICE, "distributed.allow_idle_devices=true"]).config.model
    )
    assert (written["global_head_dim"], written["num_global_key_value_heads"]) == (512, 4)
    assert "rope_theta" not in written
    assert "per_layer_config" not in written
