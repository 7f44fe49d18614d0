"""The key `quantization_config` of config.json: how the matrices of a folder are packed. Knows no jax."""

from typing import Any, NamedTuple

QUANTIZATION = "quantization_config"
UNPACKED = ("fp8", "mxfp4", "bitsandbytes", "gptq", "awq")  # values of quant_method whose codes are read
FORMS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}  # that are read; the first is that of files that name none
BITS = {"gptq": (2, 4, 8), "awq": (4,)}
OTHERWISE = (
    "take the model's files in 16 bits, or write them: load this folder with transformers, then model.dequantize() and "
    "model.save_pretrained(DIR)"
)


class Quantization(NamedTuple):
    """How the codes of a folder make numbers."""

    method: str | None = None  # of `UNPACKED`; None where the folder has numbers
    bits: int = 4  # of a code of gptq and awq
    group_size: int = -1  # inputs of a matrix that share a scale; -1: all of them
    added_zero: int = 0  # to zero points: format `gptq` stores them less 1
    block_sizes: tuple[int, int] = (128, 128)  # rows and columns of fp8 that share a scale


def read_quantization(raw: dict[str, Any]) -> Quantization:
    """Return what a config.json says of the codes of its folder.

    Raises:
        ValueError: codes that are not read; the message names the key.
    """
    keys = raw.get(QUANTIZATION) or {}
    method = keys.get("quant_method")
    if method is None:
        return Quantization()
    if method not in UNPACKED:
        raise ValueError(
            f"{QUANTIZATION} says quant_method={method}, whose codes are not read (those of {', '.join(UNPACKED)} "
            f"are); {OTHERWISE}. model.lora.quantize_base trains on codes of our own"
        )
    if method in ("gptq", "awq"):
        return _read_integers(keys, method)
    rows, columns = keys.get("weight_block_size") or Quantization().block_sizes
    if min(int(rows), int(columns)) < 1:
        raise ValueError(f"{QUANTIZATION} says weight_block_size={[rows, columns]}; both must be above 0")
    return Quantization(method, block_sizes=(int(rows), int(columns)))


def _read_integers(keys: dict[str, Any], method: str) -> Quantization:
    """Return the form of integers with a scale and a zero point for each group, under old names of keys too."""
    bits: Any = keys.get("bits", keys.get("w_bit"))
    group_size = keys.get("group_size", keys.get("q_group_size"))
    quantization = keys.get("checkpoint_format", keys.get("version", keys.get("format", FORMS[method][0])))
    quantization = "marlin" if keys.get("is_marlin_format") else str(quantization).lower()
    read: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "bits": (bits, BITS[method]),
        "checkpoint_format" if method == "gptq" else "version": (quantization, FORMS[method]),
        "pack_dtype": (keys.get("pack_dtype", "int32"), ("int32",)),
        "zero_point": (keys.get("zero_point", True), (True,)),
    }
    says = f"{QUANTIZATION} of {method} says"
    for key, (value, usual) in read.items():
        if value not in usual:
            raise ValueError(
                f"{says} {key}={value}, which is not read ({' or '.join(map(str, usual))} is); {OTHERWISE}"
            )
    if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise ValueError(f"{says} group_size={group_size}; it must be -1 or above 0")
    return Quantization(method, bits, group_size, added_zero=1 if quantization == "gptq" else 0)
