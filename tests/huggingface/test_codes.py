"""Files whose weights are codes with scales: 8-bit floats of DeepSeek-V3, 4-bit floats of GPT-OSS."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.harness import ROOT

import tunix
from tunix.base.errors import UserError
from tunix.huggingface.table import FAMILIES
from tunix.huggingface.weights import TensorFiles
from tunix.models.layers import named

PARITY = ROOT / "tests" / "models" / "parity"
SIZES = (8, 5)  # of a block, which divide nothing


def copy_of(name: str, folder: Path, **keys) -> dict[str, np.ndarray]:
    """Copy a model's config.json, with more keys, and return its tensors."""
    config = json.loads((PARITY / name / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | keys))
    return load_file(PARITY / name / "model.safetensors")


def test_eight_bit_floats_with_a_scale_for_each_block(tmp_path):
    """Every matrix of the layers is read as the numbers that its codes and scales stand for."""
    tensors = copy_of(
        "deepseek_v3", tmp_path / "codes", quantization_config={"quant_method": "fp8", "weight_block_size": SIZES}
    )
    copy_of("deepseek_v3", tmp_path / "numbers")
    codes, numbers = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if weight.ndim < 2 or "layers" not in name:
            continue
        wide, scales = weight.astype(np.float32), []
        for begin in range(0, wide.shape[0], SIZES[0]):
            rows = wide[begin : begin + SIZES[0]]
            scales.append([np.abs(rows[:, at : at + SIZES[1]]).max() / 448 for at in range(0, wide.shape[1], SIZES[1])])
        scale = np.array(scales, np.float32)
        spread = np.repeat(np.repeat(scale, SIZES[0], 0), SIZES[1], 1)[: wide.shape[0], : wide.shape[1]]
        codes[name] = (wide / spread).astype(ml_dtypes.float8_e4m3fn)
        codes[f"{name}_scale_inv"] = scale
        numbers[name] = codes[name].astype(np.float32) * spread
    save_file(codes, tmp_path / "codes" / "model.safetensors")
    save_file(numbers, tmp_path / "numbers" / "model.safetensors")
    shape = ((2, 2), ("fsdp", "tp"))
    found, expected = (dict(named(tunix.load_pretrained(tmp_path / name, mesh_shape=shape).params)) for name in
                       ("codes", "numbers"))  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value), err_msg=name)


@pytest.mark.parametrize("form", ["float8_e8m0fnu", "uint8"])
def test_scales_that_are_exponents(form, tmp_path):
    """Those of scale_fmt=ue8m0, as numbers of 8 bits or as their bytes."""
    tensors = copy_of("llama", tmp_path / "it", quantization_config={"quant_method": "fp8", "weight_block_size": SIZES})
    name = "model.layers.0.self_attn.q_proj.weight"
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(32, 32)).astype(ml_dtypes.float8_e4m3fn)
    exponents = rng.integers(118, 130, (4, 7)).astype(np.uint8)
    scales = exponents if form == "uint8" else exponents.view(ml_dtypes.float8_e8m0fnu)
    save_file(tensors | {name: codes, f"{name}_scale_inv": scales}, tmp_path / "it/model.safetensors")
    spread = np.repeat(np.repeat(2.0 ** (exponents.astype(int) - 127), SIZES[0], 0), SIZES[1], 1)[:, :32]
    with TensorFiles(tmp_path / "it", FAMILIES["llama"]) as files:
        for index in ((slice(None),) * 2, (slice(3, 20), slice(4, 31))):
            np.testing.assert_array_equal(files.read(name, index), (codes.astype(np.float32) * spread)[index])


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            np.ones((4, 4), np.float32),
            r"q_proj.weight_scale_inv is \[4, 4\], which does not fit .* in blocks of \[8, 5\]",
        ),
        (np.ones((4, 7), np.int32), "q_proj.weight_scale_inv holds I32, not BF16 or F16 or F32 or F8_E8M0 or U8"),
    ],
)
def test_scales_that_do_not_fit_are_named(scales, message, tmp_path):
    tensors = copy_of("llama", tmp_path / "it", quantization_config={"quant_method": "fp8", "weight_block_size": SIZES})
    name = "model.layers.0.self_attn.q_proj.weight"
    codes = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors | {name: codes, f"{name}_scale_inv": scales}, tmp_path / "it/model.safetensors")
    with pytest.raises(UserError, match=message), TensorFiles(tmp_path / "it", FAMILIES["llama"]):
        pass


def test_eight_bit_floats_with_one_scale(tmp_path):
    tensors = copy_of(
        "llama", tmp_path / "codes", quantization_config={"quant_method": "fp8", "weight_block_size": None}
    )
    copy_of("llama", tmp_path / "numbers")
    codes, numbers = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        codes[name] = (tensors[name].astype(np.float32) * 100).astype(ml_dtypes.float8_e4m3fn)
        codes[f"{name}_scale_inv"] = np.array(0.01, np.float32)
        codes[name.replace("weight", "activation_scale")] = np.array(3, np.float32)
        numbers[name] = codes[name].astype(np.float32) * np.float32(0.01)
    save_file(codes, tmp_path / "codes" / "model.safetensors")
    save_file(numbers, tmp_path / "numbers" / "model.safetensors")
    found, expected = (tunix.load_pretrained(tmp_path / name).params for name in ("codes", "numbers"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_four_bit_floats_with_an_exponent_for_thirty_two(tmp_path):
    tensors = copy_of("gpt_oss", tmp_path / "model", quantization_config={"quant_method": "mxfp4"})
    rng, name = np.random.default_rng(0), "model.layers.0.mlp.experts.gate_up_proj"
    blocks = rng.integers(0, 256, (4, 6, 3, 16)).astype(np.uint8)
    scales = rng.integers(118, 130, (4, 6, 3)).astype(np.uint8)
    del tensors[name]
    tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    expected = np.zeros((4, 96, 6), np.float32)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for expert, row, block, byte in np.ndindex(blocks.shape):
        both = int(blocks[expert, row, block, byte])
        for half, code in enumerate((both % 16, both // 16)):
            number = magnitudes[code % 8] * (-1 if code >= 8 else 1) * 2.0 ** (int(scales[expert, row, block]) - 127)
            expected[expert, block * 32 + byte * 2 + half, row] = number
    with TensorFiles(tmp_path / "model", FAMILIES["gpt_oss"]) as files:
        assert files.tensors[name].shape == expected.shape
        for index in (
            (slice(None),) * 3,
            (slice(1, 3), slice(31, 70), slice(2, 5)),
            (slice(0, 1), slice(64, 96), slice(0, 6)),
        ):
            np.testing.assert_array_equal(files.read(name, index), expected[index])
