"""`tunix.parity`: a tiny Qwen 3 that transformers has made agrees; a changed layer, tensor or file is named."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import installs
from support.harness import ROOT

import tunix
from tunix import parity
from tunix.base.errors import UserError
from tunix.parity import _compare_gradients, compare, make_tiny, show

TINY = (
    ROOT / "tests/models/tiny_qwen3"
)  # python tunix/huggingface/tiny_by_transformers.py tests/models/parity/qwen3 ...


@pytest.fixture
def tiny(tmp_path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "tiny"))


def change(path: Path, name: str) -> None:
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name] + np.float32(0.1)}, path, metadata={"format": "pt"})


def test_a_family_agrees(capsys):
    checks = compare(TINY, None, 1e-4)
    assert [check.name for check in checks] == [
        "logits, one device", "gradients, one device", "logits, fsdp=2 tp=2", "gradients, fsdp=2 tp=2", "packed rows",
        "greedy answers", "round trip of the weights",
    ]  # fmt: skip
    assert show(checks) == 0, capsys.readouterr().out


@pytest.mark.nightly
def test_what_differs_is_named(tiny, capsys):
    """A weight of layer 1 that the files have otherwise than transformers, and one tensor of the gradients."""
    name = "model.layers.0.self_attn.q_norm.weight"
    change(tiny / "gradients" / "model.safetensors", name)
    tokens = load_file(tiny / "expected.safetensors")["tokens"]
    assert _compare_gradients(tunix.load_pretrained(tiny), tiny, tokens, "one device", 1e-4).location == name
    change(tiny / "model.safetensors", "model.layers.1.mlp.up_proj.weight")
    checks = {check.name: check for check in compare(tiny, None, 1e-4)}
    assert checks["logits, one device"].location == "in layer 1, the last one"
    assert checks["round trip of the weights"].location == ""
    assert show(list(checks.values())) == 1
    assert "in layer 1, the last one" in capsys.readouterr().out


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match="has no config.json; name the folder of a model"):
        make_tiny(tmp_path, tmp_path / "out", "python")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(UserError, match="--python /nowhere/python cannot be started: No such file"):
        make_tiny(tmp_path, tmp_path / "out", "/nowhere/python")
    with pytest.raises(UserError, match="--python false has not made a model of .*: it says nothing"):
        make_tiny(tmp_path, tmp_path / "out", "false")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tolerance", "nan"], "--tolerance nan must be 0 or more"),
        (["--family", "gema3"], "there is no family gema3; did you mean gemma3?"),
        (["--keep", "/proc/tiny"], "--keep=/proc/tiny cannot be written (No such file or directory)"),
    ],
)
def test_mistakes_are_found_before_a_model_is_made(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parity", str(tmp_path), "--python", "/nowhere/python", *words])
    assert parity.main() == 2
    assert said in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "deepseek_v3", "olmo2"])
def test_families_agree_with_a_model_that_is_made_now(name, tmp_path, installs_dir):
    python = installs.torch(installs_dir) / "python"
    make_tiny(ROOT / "tests/models/parity" / name, tmp_path / "tiny", str(python))
    assert show(compare(tmp_path / "tiny", None, 1e-4)) == 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama4_text"},  # which layers have experts, by their numbers
        {"model_type": "qwen3_next"},  # the first layers have linear attention alone
        {"model_type": "phi3", "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
         "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_a_tiny_model_of_a_published_config(config, installs_dir, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    make_tiny(tmp_path, tmp_path / "tiny", str(installs.torch(installs_dir) / "python"))
    expected = load_file(tmp_path / "tiny/expected.safetensors")
    logits = np.asarray(tunix.load_pretrained(tmp_path / "tiny")(expected["tokens"]))
    assert np.abs(logits - expected["logits"]).max() < 1e-4 * np.abs(logits).max()
