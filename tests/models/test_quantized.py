"""A frozen base in 8 or 4 bits: read so, kept so, exported as matrices again."""

import re
import sys

import jax
import numpy as np
import pytest
from support.harness import SGD, batch, metrics, program

import tunix
from tunix.base.errors import UserError
from tunix.config import Export
from tunix.config.command_line import read_settings
from tunix.export import export
from tunix.inference.sampling import Sampling
from tunix.models.layers import named
from tunix.models.quantized import dequantize, quantize
from tunix.sharding.table import Equation

BYTES = {"int8": 1 + 2 / 32, "nf4": 0.5 + 2 / 32}  # of a weight: its code, and its part of a bfloat16 scale
LARGEST_ERROR = {  # of a weight, in parts of the largest of its block of 32
    "int8": 0.5 / 127.5,  # half a step
    "nf4": (1 - 0.6961928) / 2,  # half of the widest gap between two codes
}
ROUNDED = 2**-8  # of a scale in bfloat16


@pytest.mark.nightly(but=["int8-[[2,2],[fsdp,tp]]"])
@pytest.mark.parametrize(("qtype", "mesh"), [("int8", "[[2,2],[fsdp,tp]]"), ("nf4", "[[2,4],[tp,fsdp]]")])
def test_same_loss_on_every_mesh_and_a_frozen_base(qtype, mesh):
    """Two blocks of a scale split over two devices, and whole on four."""
    losses = []
    for each in (mesh, "[[1],[fsdp]]"):
        small = program("model.embed_dim=64", "model.lora.rank=4", "model.lora.targets=attention.o|mlp.up", f"model.lora.quantize_base={qtype}",
                        f"model.mesh_shape={each}", "distributed.allow_idle_devices=true", *SGD)  # fmt: skip
        before = jax.tree.map(np.asarray, small.arch.frozen(small.state["params"]))
        losses.append([step["loss"] for step in small.run(batch(16, 2))])
        after = dict(named(small.state["params"]))
        assert all(np.array_equal(leaf, after[name]) for name, leaf in named(before))
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("qtype", BYTES)
def test_no_weight_moves_by_more_than_half_a_step(qtype):
    weights = np.random.default_rng(0).normal(size=(2, 64, 30)).astype(np.float32)
    codes, scales = jax.jit(quantize, static_argnums=(1, 2))(weights, "NDH", qtype)
    assert codes.nbytes + scales.nbytes == weights.size * BYTES[qtype]
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        read = jax.jit(dequantize, static_argnums=(2, 3, 4, 5))(
            codes, scales, Equation("BTD,NDH->BTNH"), qtype, "float32", jax.P()
        )
    assert_near(np.asarray(read), weights, 1, qtype)


def assert_near(read, weights, axis, qtype):
    error, size = (np.abs(np.moveaxis(x, axis, -1).reshape(-1, 32)) for x in (read - weights, weights))
    assert error.any()
    assert (error <= size.max(1, keepdims=True) * (LARGEST_ERROR[qtype] + ROUNDED)).all()


@pytest.mark.nightly
def test_a_run(hf_dir, corpus, tmp_path, monkeypatch):
    """From Hugging Face's files to Hugging Face's files."""
    monkeypatch.chdir(tmp_path)
    words = [
        f"model.init_from={hf_dir}", "model.lora.rank=2", "model.lora.quantize_base=nf4", "model.lora.targets=attention",
        "data=text", f"data.paths=[{corpus}]", "training.seq_len=32", "training.loss_chunk_size=32", "training.micro_batch_size=2",
        "training.mixed_precision=fp32", "optimizer.learning_rate=1e-2", "training.max_steps=4", "checkpoint.save_every_steps=2",
        "logging.every_steps=1", "evaluation.num_sequences=4", "evaluation.sample_tokens=3", "hydra.run.dir=run",
        "model.mesh_shape=[[2,2],[fsdp,tp]]", "distributed.allow_idle_devices=true",
    ]  # fmt: skip
    tunix.train(words)
    before, run = tunix.load_pretrained(hf_dir), tunix.load_pretrained("run")
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    tunix.train(["resume=run/checkpoints/2"])
    assert [line["loss"] for line in metrics(tmp_path / "run")] == [*losses, *losses[2:]]

    export(read_settings(Export, ["checkpoint=run", "output=merged", "dtype=float32", "merge_lora=true"]))
    merged = tunix.load_pretrained("merged")
    tokens = np.random.default_rng(0).integers(0, 300, (3, 20))
    np.testing.assert_allclose(merged(tokens), run(tokens), atol=1e-4)
    sampling = Sampling(5, temperature=0)
    assert [answer.tokens for answer in merged.sample([[1, 5]], sampling)] == [
        answer.tokens for answer in run.sample([[1, 5]], sampling)
    ]

    base, num_quantized, remaining = dict(named(before.params)), 0, 0.0
    for name, leaf in named(merged.params):
        leaf, old = np.asarray(leaf), np.asarray(base[name])
        if ".attention." in name or ".mlp." in name:
            num_quantized += leaf.size
        else:
            remaining += leaf.nbytes / (1 if name.endswith("scale") else 4)
        if ".mlp." in name:  # without an update
            assert_near(leaf, old, old.shape.index(32), "nf4")
        elif ".attention." not in name:
            assert np.array_equal(leaf, old)
    told = re.search(
        r"frozen base +[\d,]+ parameters, ([\d.]+) MiB per device", (tmp_path / "run/train.log").read_text()
    )
    # One block is all of D: its scales are whole on fsdp. So are norms, on all axes.
    split = num_quantized * (0.5 / 4 + 2 / 32 / 2) + remaining
    assert float(told[1]) == pytest.approx(split / 2**20, abs=0.0006)


def test_mistakes(monkeypatch):
    for words, message in (
        ((), r"model.lora.quantize_base=nf4 freezes what model.lora.rank=0 trains; give a rank"),
        (("model.lora.rank=2", "model.lora.train_also=mlp"), r"train_also=mlp trains blocks.mlp.down.w, of which"),
    ):
        with pytest.raises(UserError, match=message):
            program("model.lora.quantize_base=nf4", *words)
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(
        UserError, match=r"model.lora.quantize_base needs qwix: pip install 'tunix-trainer\[quantize\]'"
    ):
        program("model.lora.quantize_base=nf4", "model.lora.rank=2")
