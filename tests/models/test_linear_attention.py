"""Linear attention between layers of attention: meshes, low-rank updates, config.json; logits are in test_parity.py."""

import json

import jax
import numpy as np
import pytest
from models.test_family_flops import products
from models.test_parity import PARITY
from support.harness import SGD, batch, experts, program

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.huggingface.config_json import translate_config
from tunix.models.flops import chunk_flops_per_token
from tunix.models.layers import named
from tunix.models.linear_attention import run_shard
from tunix.sharding.mesh import device_mesh
from tunix.training.choices import build_layout, build_mesh
from tunix.training.state import describe

LINEAR = "{num_key_heads: 2, num_value_heads: 4, key_dim: 8, value_dim: 8, filter_size: 4}"
HYBRID = [
    f"++model.linear_attention={LINEAR}", "model.num_layers=2", "model.global_every=2", "model.sliding_window=null",
    "model.attention_gate=true", "distributed.allow_idle_devices=true",
]  # fmt: skip
TOLERANCE = 1e-5  # float32; sums in another order


def one_step(*words: str) -> list[dict[str, float]]:
    return program(*HYBRID, *words).run(batch(sequences=4), steps=2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sizes", "axes", "words"),
    [
        ("2,2", "fsdp,tp", "training.sharding_strategy=full_shard"),
        ("2,2", "dp,tp", "training.sharding_strategy=shard_grad_op"),
        # Rows of 32 tokens, with documents of many lengths.
        ("2,2,2", "fsdp,cp,tp", "training.remat=dots"),
        ("8", "cp", "training.remat=full"),
        ("2,2,2", "pp,cp,tp", "model.num_layers=4"),
    ],
)
def test_same_step_on_one_device_and_on_several(sizes, axes, words):
    """The second loss has the weights that the first gradients have made; its own gradients are steep in these."""
    words = [*SGD, words, "training.micro_batch_size=4"]
    expected = one_step("model.mesh_shape=[[1],[fsdp]]", *words)
    shards = 2 if {"pp", "dp", "fsdp"} & {*axes.split(",")} else 1
    found = one_step(f"model.mesh_shape=[[{sizes}],[{axes}]]", *words, f"training.micro_batch_size={4 // shards}")
    np.testing.assert_allclose([m["loss"] for m in found], [m["loss"] for m in expected], rtol=TOLERANCE)
    np.testing.assert_allclose(found[0]["grad_norm"], expected[0]["grad_norm"], rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.mesh_shape=[[2],[pp]]"],
            "layers of several kinds take turns, and 2 stages do not have the same whole turns",
        ),
        (
            ["model.mesh_shape=[[2],[pp]]", "model.num_layers=8", "model.layers_before_stages=2"],
            r"model.layers_before_stages=2: layers .* turns; take 3 stages, .*, or change model.layers_before_stages$",
        ),
        (["model.mesh_shape=[[4],[tp]]"], "model.linear_attention.num_key_heads=2 is not divisible"),
        (["model.linear_attention.num_value_heads=3"], "model.linear_attention.num_value_heads=3 is not divisible by"),
        (["model.sliding_window=8"], "there are no local layers with model.linear_attention"),
        (["model.global_every=3"], "model.global_every=3 leaves no layer of model.num_layers=2"),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        program(*HYBRID, "model.mesh_shape=[[1],[fsdp]]", *words)


def test_projections_have_low_rank_updates():
    """All seven of linear attention, under one pattern with those of attention; filters and rates have none."""
    words = [*HYBRID, "model.mesh_shape=[[1],[fsdp]]", "model.lora.rank=2", "model.lora.targets=attention"]
    cfg = compose(words).config
    weights = describe(cfg.model, build_layout(cfg, build_mesh(cfg))).weights
    updated = {path.removesuffix(".lora.a") for path, _ in named(weights) if path.endswith(".lora.a")}
    linear = {f"linear_blocks_0.attention.{name}" for name in ("q", "k", "v", "gate", "beta", "decay", "o")}
    assert updated == linear | {f"blocks.attention.{name}" for name in ("q", "k", "v", "gate", "o")}


def raw_config(**changes: object) -> dict:
    return json.loads((PARITY / "qwen3_5" / "config.json").read_text()) | changes


def test_config_of_a_model_that_sees():
    """The decoder's keys stand in text_config, with the rotations of images; layers may be given by their interval."""
    rope = {"mrope_interleaved": True, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.25, "rope_theta": 1e7}
    text = raw_config(rope_parameters=rope | {"rope_type": "default"}, mtp_num_hidden_layers=1, attn_output_gate=True)
    del text["layer_types"]
    seeing = {"model_type": "qwen3_5", "text_config": text | {"full_attention_interval": 2}, "vision_config": {}}
    found = translate_config(seeing, "config.json")
    assert (found["family"], found["global_every"], found["rotated_dim"]) == ("qwen3_5", 2, 4)
    assert found["linear_attention"]["filter_size"] == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]},
        {"attn_output_gate": False},
        {"linear_value_gate": True},
    ],
)
def test_keys_that_mean_another_model_are_refused(changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        translate_config(raw_config(**changes), "config.json")


def test_experts_beside_linear_attention():
    """Keys that mean other layers are refused by name; a config.json may begin with a dense layer, our layers may not."""
    raw = json.loads((PARITY / "qwen3_next" / "config.json").read_text())
    for key, value in (("decoder_sparse_step", 2), ("mtp_gate", True), ("mlp_only_layers", [1])):
        with pytest.raises(UserError, match=f"config.json: {key}="):
            translate_config(raw | {key: value}, "config.json")
    for words, message in (
        (["model.mlp.dense_layers=1"], "model.mlp.dense_layers=1 does not go with model.linear_attention"),
        (["model.mlp.bias_rate=0.1"], "model.mlp.bias_rate=0.1 does not go with .* set it to null"),
        (["model.mlp.shared_dim=null"], "model.mlp.shared_gate=true: there is no shared expert"),
    ):
        with pytest.raises(UserError, match=message):
            compose(["model=qwen3_next_80b_a3b", *words])


def test_flops_of_devices_that_share_a_row():
    """Those of its own tokens, traced: with rounds of `pass_memory` where there are more than two devices."""
    model, length = compose(["model=tiny", *HYBRID, "model.mesh_shape=[[1],[fsdp]]"]).config.model, 512
    linear, spec = model.linear_attention, jax.P(None, "cp")
    keys, values = (linear.num_key_heads, linear.key_dim), (linear.num_value_heads, linear.value_dim)
    shapes = [(1, length, *dims) for dims in (keys, keys, values, values[:1], values[:1])] + [(1, length)]
    for num_devices in (2, 8):
        mesh = device_mesh(((num_devices,), ("cp",)), {}, allow_idle=True)
        with jax.set_mesh(mesh):
            run = jax.shard_map(run_shard, in_specs=(*[spec] * 5, jax.P()), out_specs=spec)
            specs = (*[spec] * 5, jax.P())
            arrays = [
                jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, each))
                for shape, each, dtype in zip(shapes, specs, [np.float32] * 5 + [np.int32], strict=True)
            ]
            local = sum(products(jax.make_jaxpr(run)(*arrays).jaxpr))
        derived = 6 * linear.state_size + chunk_flops_per_token(model, length, num_devices)
        assert local / (length // num_devices) == pytest.approx(derived, rel=1e-3)


@pytest.mark.nightly
def test_experts_beside_linear_attention_on_meshes_that_keep_the_stream_whole():
    """XLA of jaxlib 0.10.2 did not compile slices of the segments, which are the same on all of these devices."""
    words = [*HYBRID, "model.num_layers=4", experts(num_experts=4), "model.mesh_shape=[[2,2],[cp,tp]]"]
    small = program(*words, "training.sequence_parallel=false", "training.micro_batch_size=4")
    with jax.set_mesh(small.mesh):
        shapes = small.built.abstract["params"], small.built.abstract_batch, jax.ShapeDtypeStruct((1,), "int32")
        jax.jit(small.built.gradients()).lower(*shapes).compile()
