"""Layers of multi-token prediction: read, trained and written; losses and gradients are those of torch (`make parity`)."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.test_parity import PARITY
from safetensors.numpy import load_file, save_file
from support.harness import batch

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.huggingface.config_json import write_config
from tunix.huggingface.weights import save_weights
from tunix.inference.pretrained import load_init_from
from tunix.sharding.arrays import to_global
from tunix.training.choices import build_mesh
from tunix.training.logprobs import sum_further_tokens
from tunix.training.program import assemble

FAMILIES = ["deepseek_v3", "glm4_moe", "qwen3_next"]
COPIES = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
SHORT = [
    "training.seq_len=24", "training.loss_chunk_size=8", "training.mixed_precision=fp32", "tokenizer.vocab_size=300",
    "distributed.allow_idle_devices=true",
]  # fmt: skip
MTP = "model.mtp={loss_weight: 0.3}"


def write_folder(name: str, folder: Path) -> Path:
    """The tiny model of a family with the layer, as a published folder has it: with copies of both tables."""
    shutil.copytree(PARITY / name, folder)
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    layer = {key: value for key, value in load_file(folder / "mtp.safetensors").items() if "expected." not in key}
    if name != "qwen3_next":
        number = raw["num_hidden_layers"]
        layer |= {f"model.layers.{number}.{part}.weight": tensors[table] for part, table in COPIES.items()}
    save_file(tensors | layer, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return cache(lambda name: write_folder(name, tmp_path_factory.mktemp("mtp") / name))


def load(folder: Path, mesh: str, *words: str) -> tuple[Any, Any]:
    """A program on a mesh, and the weights of the folder in its layout."""
    cfg = compose([f"model.init_from={folder}", MTP, *SHORT, f"model.mesh_shape={mesh}", *words]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        program = assemble(cfg, mesh)
        return program, load_init_from(program, mesh)


@pytest.mark.nightly(but=["deepseek_v3"])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_torch(name, folder_of, tmp_path):
    """Packed documents; gradients by the layer and by both tables, under the files' names."""
    program, params = load(folder_of(name), "[[2,2],[fsdp,tp]]", "training.micro_batch_size=1")
    expected, rows = load_file(PARITY / name / "mtp.safetensors"), load_file(PARITY / name / "expected.safetensors")
    fields = {key: rows[key] for key in ("tokens", "positions")} | {"segment_ids": rows["segments"]}
    fields["targets"] = np.roll(rows["tokens"], -1, 1)
    fields["loss_mask"] = (np.roll(rows["segments"], -1, 1) == rows["segments"]).astype(np.float32)
    fields["loss_mask"][:, -1] = 0
    fields = to_global({key: value[None] for key, value in fields.items()}, program.mesh)

    def objective(params):
        model, one = program.arch.module(params), {key: value[0] for key, value in fields.items()}
        tables = model.tables()
        hidden, _ = model.hidden(tables, one["tokens"], one["positions"], one["segment_ids"])
        return sum_further_tokens(model, tables, hidden, one, 8)[0]

    with jax.set_mesh(program.mesh):
        loss, gradients = jax.jit(jax.value_and_grad(objective))(params)
    np.testing.assert_allclose(loss, expected["expected.loss"][0], rtol=1e-5)
    save_weights(tmp_path, gradients, program.cfg.model, program.arch.weights, "float32", shard_gb=5)
    found = load_file(tmp_path / "model.safetensors")
    names = [
        key.removeprefix("expected.") for key in expected if key.startswith("expected.") and key != "expected.loss"
    ]
    assert len(names) > 20
    for tensor in names:
        value = expected[f"expected.{tensor}"]
        np.testing.assert_allclose(found[tensor], value, atol=1e-5 * np.abs(value).max(), rtol=0, err_msg=tensor)


@pytest.mark.parametrize("name", FAMILIES)
def test_files_go_out_as_they_came(name, folder_of, tmp_path):
    program, params = load(folder_of(name), "[[1],[fsdp]]")
    with jax.set_mesh(program.mesh):
        save_weights(tmp_path, params, program.cfg.model, program.arch.weights, "bfloat16", shard_gb=5)
    before, after = load_file(folder_of(name) / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype, tensor
        assert value.tobytes() == after[tensor].tobytes(), tensor
    assert write_config(program.cfg.model)["num_nextn_predict_layers"] == 1


@pytest.mark.nightly  # a mesh of two axes is that of the case above
@pytest.mark.parametrize("axes", ["dp,fsdp,cp", "fsdp,tp", "ep,tp", "dp,cp,tp"])
def test_a_step_is_the_same_on_every_mesh(axes, folder_of):
    """Loss, that of the layer, and the gradient of all weights, over rows of several documents."""

    def step(names: str) -> dict[str, float]:
        count = names.count(",") + 1
        sizes = [1] if names == "fsdp" else [2] * count
        program, params = load(folder_of("glm4_moe"), f"[{sizes},[{names}]]".replace(" ", ""))
        shards = int(np.prod([program.mesh.shape[axis] for axis in ("dp", "fsdp", "ep")]))
        training = program.cfg.training.model_copy(update={"micro_batch_size": 8 // shards})
        with jax.set_mesh(program.mesh):
            program = assemble(program.cfg.model_copy(update={"training": training}), program.mesh)
            rows = to_global(batch(8, length=24, vocab=96), program.mesh)
            grads, weight, sums = jax.jit(program.gradients())(params, rows, jnp.zeros(1, jnp.int32))
        squares = sum(float(jnp.sum(leaf.astype(jnp.float32) ** 2)) for leaf in jax.tree.leaves(grads["mtp"]))
        of_all = sum(float(jnp.sum(leaf.astype(jnp.float32) ** 2)) for leaf in jax.tree.leaves(grads))
        further = sums["mtp_loss"]
        return {
            "loss": float(sums["loss"]), "mtp_loss": float(further.total), "divisor": float(further.divisor),
            "weight": float(weight), "of the layer": squares, "of all": of_all,
        }  # fmt: skip

    expected = step("fsdp")
    assert 0 < expected["divisor"] < expected["weight"]
    assert expected["of the layer"] > 0
    for name, value in step(axes).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)


def test_what_is_refused(folder_of, tmp_path):
    for words, message in (
        (["model=llama3_1b", MTP], "model.mtp: files of model.family=llama have no such layer"),
        (["model=deepseek_v3", MTP, "model.lora.rank=8"], "model.lora.rank=8 trains updates alone"),
        (["model=deepseek_v3", MTP, "task=dpo"], "model.mtp: task=dpo with its loss does not train"),
    ):
        with pytest.raises(UserError, match=message):
            compose(words)
    with pytest.raises(UserError, match="model.mtp: stages have no layer"):
        load(folder_of("glm4_moe"), "[[2,2],[pp,fsdp]]")
    with pytest.raises(UserError, match=r"lacks mtp.fc.weight.* and \d+ more; set model.mtp=null"):
        load(PARITY / "qwen3_next", "[[1],[fsdp]]")
    other = shutil.copytree(folder_of("glm4_moe"), tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if "shared_head.head" in name)
    save_file(tensors | {name: tensors[name] * 2}, other / "model.safetensors")
    with pytest.raises(UserError, match="is not equal to lm_head.weight, and model.mtp shares this table"):
        load(other, "[[1],[fsdp]]")
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace('predict_layers": 1', 'predict_layers": 2')
    )
    with pytest.raises(UserError, match="num_nextn_predict_layers=2, and model.mtp is 1 layer"):
        load(other, "[[1],[fsdp]]")
