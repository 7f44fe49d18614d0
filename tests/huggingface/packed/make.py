"""Make the folders beside this file: a tiny random Llama as other libraries pack it, and `expected.json`.

    python tests/huggingface/packed/make.py AUTO_GPTQ AUTO_AWQ        (a Python with torch, transformers and bitsandbytes)

The arguments are folders with the sources of auto-gptq 0.7.1 (its unpacked wheel) and autoawq 0.2.9. Neither needs to be
installed: of both only the layers are imported, which pack and unpack without a GPU. `expected.json` has the SHA-256 of
each matrix [out, in] as the library makes it of its codes, in float32.
"""

import hashlib
import importlib
import json
import sys
import tempfile
import types
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
CONFIG = transformers.LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
BITSANDBYTES = {
    "nf4": FOUR_BITS | {"bnb_4bit_quant_type": "nf4"},
    "nf4_double": FOUR_BITS | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4_in_bfloat16": FOUR_BITS | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}
GPTQ = {  # bits, inputs of a group, whether inputs are taken in another order
    "gptq": (4, 32, False),
    "gptq_act": (4, 16, True),
    "gptq_8": (8, -1, False),
}
AWQ_GROUP = 32


def digest(matrix: torch.Tensor) -> str:
    return hashlib.sha256(matrix.float().contiguous().numpy().tobytes()).hexdigest()


def import_layer(folder: str, package: str, module: str):
    """Return a module of a package whose own __init__ files, which want a GPU, are not run."""
    parts = module.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        stub = types.ModuleType(name)
        stub.__path__ = [str(Path(folder, *parts[:end]))]
        sys.modules[name] = stub
    return importlib.import_module(module)


def make_bitsandbytes(source: Path, output: Path, keys: dict) -> dict[str, str]:
    from bitsandbytes.functional import QuantState

    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=transformers.BitsAndBytesConfig(**keys), device_map="cpu", dtype=torch.bfloat16
    )
    model.save_pretrained(output)
    with safe_open(output / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    digests = {}
    for name, weight in tensors.items():
        if not name.endswith("proj.weight"):
            continue
        if weight.dtype == torch.int8:
            scales = tensors[name.removesuffix("weight") + "SCB"]
            matrix = torch.ops.bitsandbytes.int8_vectorwise_dequant(weight, scales)
        else:
            parts = {other: value for other, value in tensors.items() if other.startswith(f"{name}.")}
            matrix = dequantize(weight, QuantState.from_dict(parts, device=torch.device("cpu")))
        digests[name] = digest(matrix)
    return digests


def dequantize(weight: torch.Tensor, state) -> torch.Tensor:
    """Return the numbers of codes of 4 bits, as the implementation for all devices makes them.

    That for CPUs takes each row to begin with a block, which is wrong for rows of 96 in blocks of 64 (0.50.2).
    """
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.backends.utils import _get_4bit_code
    from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise

    absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    code = _get_4bit_code(state.quant_type, weight.device)
    packed = weight.view(torch.uint8).reshape(-1)
    matrix = _dequantize_4bit_compute(packed, absmax, code, state.blocksize, state.shape, state.dtype)
    if state.shape[1] % state.blocksize == 0:
        assert torch.equal(matrix, dequantize_4bit(weight, state))
    return matrix


def find_scales(weight: torch.Tensor, group_of: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points [out, groups] that reach from the lowest to the highest number of a group."""
    groups = range(int(group_of.max()) + 1)
    low = torch.stack([weight[:, group_of == group].min(1).values for group in groups], 1)
    high = torch.stack([weight[:, group_of == group].max(1).values for group in groups], 1)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, torch.round(-low / scales).clamp(1, 2**bits - 1)


def make_gptq(layers, tensors: dict, output: Path, bits: int, group: int, reorder: bool) -> dict[str, str]:
    packed, digests = dict(tensors), {}
    for name, weight in tensors.items():
        if not name.endswith("proj.weight"):
            continue
        base, (rows, columns) = packed.pop(name) is None or name.removesuffix("weight"), weight.shape
        linear = torch.nn.Linear(columns, rows, bias=False, dtype=torch.float16)
        linear.weight.data = weight.half()
        size = columns if group == -1 else group
        group_of = torch.arange(columns) // size
        if reorder:
            group_of = group_of[torch.randperm(columns)]
        scales, zeros = find_scales(weight.float(), group_of, bits)
        # Numbers that lie at the ends of a group may round beyond them, which the packing does not cut.
        steps = torch.round(weight.float() / scales[:, group_of] + zeros[:, group_of]).clamp(0, 2**bits - 1)
        linear.weight.data = ((steps - zeros[:, group_of]) * scales[:, group_of]).half()
        layer = layers.QuantLinear(bits, group, columns, rows, bias=True, weight_dtype=torch.float16)
        layer.pack(linear, scales.half(), zeros.clone(), group_of.int())
        packed |= {f"{base}{part}": value for part, value in layer.state_dict().items()}  # a bias of zeros too
        with torch.no_grad():
            digests[name] = digest(layer(torch.eye(columns, dtype=torch.float16)).T)
    save(packed, output, {"bits": bits, "group_size": group, "desc_act": reorder, "sym": False, "quant_method": "gptq"})
    return digests


def make_awq(layers, packing, tensors: dict, output: Path) -> dict[str, str]:
    packed, digests = dict(tensors), {}
    for name, weight in tensors.items():
        if not name.endswith("proj.weight"):
            continue
        base, (rows, columns) = packed.pop(name) is None or name.removesuffix("weight"), weight.shape
        group_of = torch.arange(columns) // AWQ_GROUP
        scales, zeros = find_scales(weight.float(), group_of, 4)
        steps = torch.round(weight.float() / scales[:, group_of] + zeros[:, group_of]).clamp(0, 15)
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = (steps - zeros[:, group_of]) * scales[:, group_of]
        layer = layers.WQLinear_GEMM.from_linear(
            linear, 4, AWQ_GROUP, False, scales.T.contiguous(), zeros.T.contiguous()
        )
        parts = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
        packed |= {f"{base}{part}": value for part, value in parts.items()}
        digests[name] = digest(packing.dequantize_gemm(**parts, bits=4, group_size=AWQ_GROUP).T)
    keys = {"bits": 4, "group_size": AWQ_GROUP, "quant_method": "awq", "version": "gemm", "zero_point": True}
    save(packed, output, keys)
    return digests


def save(tensors: dict, output: Path, quantization: dict) -> None:
    output.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, output / "model.safetensors")
    config = CONFIG.to_dict() | {"quantization_config": quantization, "torch_dtype": "float16"}
    (output / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    auto_gptq, auto_awq = sys.argv[1:]
    torch.manual_seed(0)
    source = Path(tempfile.mkdtemp())
    transformers.LlamaForCausalLM(CONFIG).bfloat16().save_pretrained(source)
    expected = {name: make_bitsandbytes(source, HERE / name, keys) for name, keys in BITSANDBYTES.items()}
    tensors = load_file(source / "model.safetensors")
    gptq = import_layer(auto_gptq, "auto_gptq", "auto_gptq.nn_modules.qlinear.qlinear_cuda")
    for name, (bits, group, reorder) in GPTQ.items():
        expected[name] = make_gptq(gptq, tensors, HERE / name, bits, group, reorder)
    packing = import_layer(auto_awq, "awq", "awq.utils.packing_utils")
    expected["awq"] = make_awq(import_layer(auto_awq, "awq", "awq.modules.linear.gemm"), packing, tensors, HERE / "awq")
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
