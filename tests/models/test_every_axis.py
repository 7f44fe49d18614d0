"""One step of a tiny model of every family is the same on one device and on meshes with every axis that it allows.

A family has two meshes of eight devices, which together have all of its axes. Values of the sizes are those of the tiny
models of test_parity.py; weights are drawn once, on one device.
"""

import json
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from models.test_parity import PARITY
from support.harness import batch, loss_and_norm_of

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.compose import compose
from tunix.config.layers import ExpertsMlp
from tunix.huggingface.config_json import write_config
from tunix.huggingface.table import FAMILIES
from tunix.huggingface.weights import save_weights
from tunix.inference.pretrained import load_init_from
from tunix.sharding.arrays import to_global
from tunix.sharding.table import axis_names
from tunix.training.choices import build_mesh
from tunix.training.train_spec import assemble, check_model_on_mesh

TOLERANCE = 1e-5  # float32; sums in another order
SEQUENCES, LENGTH = 8, 16
SHORT = [
    f"training.seq_len={LENGTH}", f"training.loss_chunk_size={LENGTH}", "training.mixed_precision=fp32",
    "training.remat=none", "tokenizer.vocab_size=300", "distributed.allow_idle_devices=true",
]  # fmt: skip
# Axes of two meshes for a kind of model, which leave out the axes that it refuses.
MESHES = {
    "dense": ("pp,fsdp,tp", "dp,cp,tp"),
    "experts": ("pp,ep,tp", "dp,fsdp,cp"),
    "dense first": ("pp,ep,tp", "dp,fsdp,cp"),
    "seeing": ("fsdp,cp,tp", "dp,cp,tp"),
}
NO_EXPERTS = {"ep": "splits experts, of which this model has none"}
REFUSED = {
    "dense": NO_EXPERTS,
    "experts": {},
    "seeing": NO_EXPERTS | {"pp": "stages do not take images"},
    "dense first": {},
}


@cache
def config(family: str) -> Config:
    """The tiny model of a family with as few layers as have all of its parts, so that two stages divide them."""
    cfg = compose([f"model.init_from={PARITY / family}", *SHORT]).config
    every = min(cfg.model.global_every, 2)
    unrotated = None if cfg.model.unrotated_every is None else 2
    layers = 2 * every if cfg.model.linear_attention is not None or cfg.model.global_heads is not None else 2
    if isinstance(cfg.model.mlp, ExpertsMlp) and family != "qwen3_moe":
        layers += cfg.model.mlp.dense_layers  # stages share those behind them
    changed = {"init_from": None, "num_layers": layers, "global_every": every, "unrotated_every": unrotated}
    if family == "qwen3_moe":  # the only one of these whose dense layers no published size has
        changed["mlp"] = cfg.model.mlp.model_dump() | {"dense_layers": 0}
    if cfg.model.vision is not None:
        vision = cfg.model.vision.model_dump()
        sizes = {"min_pixels": IMAGE_PIXELS // 4, "max_pixels": IMAGE_PIXELS}
        changed["vision"] = vision | {"freeze_tower": False} | {key: sizes[key] for key in sizes if key in vision}
    model = type(cfg.model).model_validate(cfg.model.model_dump() | changed)
    return cfg.model_copy(update={"model": model})


def kind(cfg: Config) -> str:
    if cfg.model.vision is not None:
        return "seeing"
    if not isinstance(cfg.model.mlp, ExpertsMlp):
        return "dense"
    return "dense first" if cfg.model.mlp.dense_layers else "experts"


def loss_and_norm(cfg: Config, axes: str) -> dict[str, float]:
    """Loss, gradient norm and penalties of one batch on a mesh of two devices along each of these axes."""
    names = tuple(axes.split(","))
    sizes = (1,) if names == ("fsdp",) else (2,) * len(names)
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"mesh_shape": (sizes, names)})})
    mesh = build_mesh(cfg)
    shards = int(np.prod([mesh.shape[axis] for axis in ("pp", "dp", "fsdp", "ep")]))
    training = cfg.training.model_copy(update={"micro_batch_size": SEQUENCES // shards})
    with jax.set_mesh(mesh):
        program = assemble(cfg.model_copy(update={"training": training}), mesh)
        params = weights(cfg.model.family, program)
        rows = batch(SEQUENCES, length=LENGTH, vocab=min(cfg.model.vocab_size, 96))
        rows = to_global(rows | images(cfg.model.family, program.abstract_batch), mesh)
        return loss_and_norm_of(program, params, rows)


_weights: dict[str, Any] = {}


IMAGE_PIXELS = 24 * 24  # of an image, which is 9 tokens
UNITS = {"qwen3_vl": 6}  # of an image, down and across: patches; of other families the image is one


def images(family: str, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of a model that sees: an image in every other row, from its third token on."""
    if "images" not in fields:
        return {}
    images = np.random.default_rng(0).integers(0, 256, fields["images"].shape).astype(np.uint8)
    index = np.full(fields["image_index"].shape, -1, np.int32)
    index[:, ::2, 2:11] = np.arange(9)
    grids = np.zeros(fields["image_grids"].shape, np.int32)
    grids[:, ::2, 0] = UNITS.get(family, 1)
    return {"images": images, "image_index": index, "image_grids": grids}


def weights(family: str, program: Any) -> Any:
    """The parameters of the seed on the mesh of a program; the first program of a family draws them."""
    if family not in _weights:
        _weights[family] = jax.tree.map(np.asarray, program.new_params(0))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract["params"])
    return jax.tree.map(jax.device_put, _weights[family], shardings)


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_one_step_on_every_axis(family):
    cfg = config(family)
    expected = loss_and_norm(cfg, "fsdp")
    for axes in MESHES[kind(cfg)]:
        found = loss_and_norm(cfg, axes)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, err_msg=f"{axes} {name}")


@pytest.mark.parametrize("family", ["llama", "gemma3_vision"])
def test_the_other_axes_are_refused(family):
    cfg = config(family)
    of_kind = kind(cfg)
    tried = {axis for axes in MESHES[of_kind] for axis in axes.split(",")}
    for axis in {*axis_names()} - tried:
        with pytest.raises(UserError, match=REFUSED[of_kind][axis]):
            check_model_on_mesh(cfg.model, dict.fromkeys(axis_names(), 1) | {axis: 2})


@pytest.mark.nightly
def test_files_of_layers_before_stages(tmp_path):
    """Weights that rest on stages are written as those of one device, and read to where they rest."""
    cfg = config("deepseek_v3")

    def on_mesh(mesh: Any, **changed: Any) -> Any:
        model = cfg.model.model_copy(update={"mesh_shape": mesh, **changed})
        training = cfg.training.model_copy(update={"micro_batch_size": 2})
        cfg_on_mesh = cfg.model_copy(update={"model": model, "training": training})
        mesh = build_mesh(cfg_on_mesh)
        with jax.set_mesh(mesh):
            return assemble(cfg_on_mesh, mesh)

    programs = [on_mesh(((1,), ("fsdp",))), on_mesh(((2, 2), ("pp", "fsdp")), init_from=str(tmp_path / "0"))]
    for number, program in enumerate(programs):
        with jax.set_mesh(program.mesh):
            params = weights("deepseek_v3", program)
            (tmp_path / str(number)).mkdir()
            save_weights(tmp_path / str(number), params, cfg.model, program.arch.weights, "float32", shard_gb=1.0)
    (tmp_path / "0/config.json").write_text(json.dumps(write_config(cfg.model)))
    one, staged = (sorted(tmp_path.glob(f"{number}/*.safetensors")) for number in (0, 1))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in staged] != []
    with jax.set_mesh(programs[1].mesh):
        read = load_init_from(programs[1], programs[1].mesh)
    query = read["dense_blocks"]["attention"]["q_down"]["w"]
    assert query.sharding.spec[1][:2] == ("pp", "fsdp")
    jax.tree.map(np.testing.assert_array_equal, read, params)
