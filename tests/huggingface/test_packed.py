"""Folders in the forms of bitsandbytes, GPTQ and AWQ: read to the bit, trained on, refused where a part is wrong."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.harness import ROOT, metrics

import tunix
from tunix.base.errors import UserError
from tunix.huggingface.config_json import read_config, read_quantization
from tunix.huggingface.table import FAMILIES
from tunix.huggingface.weights import TensorFiles
from tunix.models.layers import named

PACKED = ROOT / "tests" / "huggingface" / "packed"
EXPECTED = json.loads((PACKED / "expected.json").read_text())
QUERIES, DOWN = (f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.down_proj"))


@pytest.mark.parametrize("name", EXPECTED)
def test_every_matrix_has_the_numbers_of_its_library(name):
    with TensorFiles(PACKED / name, FAMILIES["llama"]) as files:
        for tensor, digest in EXPECTED[name].items():
            matrix = files.read(tensor, (slice(None), slice(None)))
            assert (
                str(matrix.dtype)
                == {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[files.tensors[tensor].dtype]
            )
            whole = np.ascontiguousarray(matrix.astype(np.float32))
            assert hashlib.sha256(whole.tobytes()).hexdigest() == digest, tensor
            for rows, columns in (
                (slice(3, 29), slice(5, 51)),
                (slice(8, 9), slice(32, 64)),
                (slice(0, 0), slice(0, 4)),
            ):
                np.testing.assert_array_equal(
                    files.read(tensor, (rows, columns)).astype(np.float32), whole[rows, columns]
                )


@pytest.mark.parametrize("name", ["nf4_double", "gptq_act", "awq"])
def test_a_mesh_reads_slices_of_the_numbers(name, tmp_path):
    """The same parameters as of a folder that has the numbers themselves, on a mesh that splits both dimensions."""
    with TensorFiles(PACKED / name, FAMILIES["llama"]) as files:
        others = {tensor for tensor in files.tensors if tensor not in EXPECTED[name] and not tensor.endswith("bias")}
        numbers = {tensor: np.asarray(files.read(tensor, (slice(None),) * len(files.tensors[tensor].shape))).astype(np.float32) for tensor in others}  # fmt: skip
        numbers |= {tensor: files.read(tensor, (slice(None),) * 2).astype(np.float32) for tensor in EXPECTED[name]}
    config = json.loads((PACKED / name / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({tensor: np.ascontiguousarray(each) for tensor, each in numbers.items()}, tmp_path / "model.safetensors")
    shape = ((2, 2), ("fsdp", "tp"))
    found, expected = (dict(named(tunix.load_pretrained(folder, "float32", mesh_shape=shape).params)) for folder in
                       (PACKED / name, tmp_path))  # fmt: skip
    for parameter, value in expected.items():
        np.testing.assert_array_equal(np.asarray(found[parameter]), np.asarray(value), err_msg=parameter)


@pytest.mark.nightly
def test_a_run_on_a_packed_base(hf_dir, corpus, tmp_path, monkeypatch):
    """Codes of GPTQ become codes of ours: a loss near that of a run which keeps their numbers, and the base is named."""
    monkeypatch.chdir(tmp_path)
    words = [
        f"model.init_from={PACKED / 'gptq_act'}", f"tokenizer.path={hf_dir}", "model.lora.rank=2", "data=text", f"data.paths=[{corpus}]", "model.vocab_size=auto",
        "training.seq_len=32", "training.loss_chunk_size=32", "training.micro_batch_size=2", "training.mixed_precision=fp32",
        "training.max_steps=2", "evaluation.num_sequences=4", "evaluation.sample_tokens=0", "logging.every_steps=1",
        "model.mesh_shape=[[2,2],[fsdp,tp]]", "distributed.allow_idle_devices=true",
    ]  # fmt: skip
    losses = []
    for name, more in (("numbers", []), ("codes", ["model.lora.quantize_base=int8"])):
        tunix.train([*words, *more, f"hydra.run.dir={name}"])
        losses.append([step["loss"] for step in metrics(tmp_path / name)])
    np.testing.assert_allclose(*losses, rtol=2e-3)
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quant_method": "aqlm"}, "quant_method=aqlm, whose codes are not read .* model.dequantize"),
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 8},
            r"gptq says bits=3, which is not read \(2 or 4 or 8 is\)",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 8, "is_marlin_format": True}, "checkpoint_format=marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "says group_size=x; it must be -1 or above 0"),
        ({"quant_method": "gptq", "bits": [4], "group_size": 0}, r"bits=\[4\]"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
            "awq says version=gemv, which is not",
        ),
        ({"quant_method": "awq", "w_bit": 8, "q_group_size": 128}, "awq says bits=8"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\]"),
    ],
)
def test_forms_of_others_are_refused_by_name(tmp_path, keys, message):
    config = json.loads((PACKED / "gptq" / "config.json").read_text()) | {"quantization_config": keys}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_old_names_of_keys_are_read():
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}
    new = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    found, expected = (read_quantization({"quantization_config": keys}) for keys in (old, new))
    assert found == expected
    assert expected.group_size == 64


def spoil(name: str, folder: Path, tensor: str, value: np.ndarray | None) -> Path:
    shutil.copytree(PACKED / name, folder, dirs_exist_ok=True)
    tensors = load_file(PACKED / name / "model.safetensors")
    if value is None:
        del tensors[tensor]
    else:
        tensors[tensor] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_group_larger_than_a_matrix_is_all_of_it(tmp_path):
    folder = shutil.copytree(PACKED / "gptq_8", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 10**30
    (folder / "config.json").write_text(json.dumps(config))
    found, expected = (tunix.load_pretrained(path).params for path in (folder, PACKED / "gptq_8"))
    for (name, value), (_, same) in zip(named(found), named(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(value), np.asarray(same), err_msg=name)


def state(**changed) -> np.ndarray:
    values = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64]} | changed
    return np.frombuffer(json.dumps(values).encode(), np.uint8)


STATE = f"{QUERIES}.quant_state.bitsandbytes__nf4"
QUERY = QUERIES.removesuffix("weight")


@pytest.mark.parametrize(
    ("name", "tensor", "value", "message"),
    [
        ("nf4", f"{QUERIES}.absmax", None, "q_proj.weight.absmax is missing"),
        ("nf4", f"{QUERIES}.absmax", np.zeros(3, np.float32), r"absmax is \[3\], and must be \[64\]"),
        ("nf4", f"{QUERIES}.quant_map", np.zeros(16, np.float16), "quant_map holds F16, not F32"),
        ("nf4", STATE, state(shape=[2**39, 64]), "has not the 17592186044416 bytes of its state"),
        ("nf4", STATE, state(shape=[64, 64, 64]), "is not understood: too many values"),
        ("nf4", STATE, state(blocksize=2**60), r"is not understood: sizes \[64, 64, 1152921504606846976, 1\]"),
        ("nf4", STATE, state(blocksize=2**30), r"absmax is \[64\], and must be \[1\]"),
        ("nf4", STATE, state(blocksize=7), "rows of 64 codes in blocks of 7 share a byte"),
        ("nf4", STATE, state(dtype="int4"), "dtype int4"),
        ("nf4", STATE, state(nested_offset=10**400), "is not understood: int too large"),
        ("nf4", STATE, state(extra="x" * 5000), "is not understood: 50"),
        ("nf4", STATE, np.frombuffer(b"[" * 3000, np.uint8), "is not understood"),
        ("nf4", STATE, None, "q_proj.weight"),
        ("nf4", "model.bitsandbytes__nf4", np.zeros(4, np.uint8), "has model.bitsandbytes__nf4, which a llama"),
        ("nf4_double", f"{QUERIES}.nested_absmax", None, "nested_absmax is missing"),
        ("int8", f"{QUERY}SCB", None, "q_proj.SCB is missing"),
        ("int8", f"{QUERY}weight_format", np.array(2, np.uint8), "weight_format is not 0"),
        ("gptq", f"{QUERY}scales", None, "q_proj.scales is missing"),
        ("gptq", f"{QUERY}scales", np.zeros((9, 64), np.float16), r"scales is \[9, 64\], for 64 inputs in groups of 32"),
        ("gptq", f"{QUERY}qzeros", np.zeros((2, 9), np.int32), r"qzeros is \[2, 9\], and must be \[2, 8\]"),
        ("gptq", f"{QUERY}qweight", np.zeros((0, 64), np.int32), r"scales is \[2, 64\], for 0 inputs in groups of 1"),
        ("gptq", f"{QUERY}qweight", np.zeros((8, 63), np.int32), r"qweight is \[8, 63\], which does not fit"),
        ("gptq", f"{QUERY}g_idx", np.full(64, 2, np.int32), "g_idx names a group beyond the 2"),
        ("gptq", f"{QUERY}bias", np.ones(64, np.float16), "has model.layers.0.self_attn.q_proj.bias, which a llama"),
        ("awq", f"{QUERY}qweight", None, "lacks model.layers.0.self_attn.q_proj.weight"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_in_one_line(tmp_path, name, tensor, value, message):
    folder = spoil(name, tmp_path, tensor, value)
    with pytest.raises(UserError, match=message) as error:
        tunix.load_pretrained(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
