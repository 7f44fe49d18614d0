"""Tensors as files hold them: numbers, or codes with scales, which are numbers again when a slice of them is read.

fp8       DeepSeek-V3     NAME [out, in] of 8-bit floats, NAME_scale_inv: a scale for each block of 128 x 128
mxfp4     GPT-OSS         NAME_blocks [X, out, in / 32, 16] of two 4-bit floats in a byte, and
                          NAME_scales [X, out, in / 32]: exponents of two. The model has NAME [X, in, out].
"""

import json
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

Index = tuple[slice, ...]
SCALE_INV, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
FP8 = "F8_E4M3"  # as safetensors names it
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # numbers of the codes
PER_SCALE = 32  # 4-bit floats of one scale
BIAS = 127  # of an exponent that is stored as a byte
COMPUTED = "BF16"  # the dtype that such tensors stand for


class Stored(Protocol):
    """A tensor that slices are read from."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it

    def read(self, index: Index) -> np.ndarray:
        """Read a slice of the tensor, and nothing else of the file."""


class Plain:
    """A tensor of numbers in an open safetensors file."""

    def __init__(self, file: Any, name: str):
        self.file, self.name = file, name
        part = file.get_slice(name)
        self.shape, self.dtype = tuple(part.get_shape()), part.get_dtype()

    def read(self, index: Index) -> np.ndarray:
        """Read a slice."""
        return self.file.get_slice(self.name)[index]


class Fp8:
    """8-bit floats [out, in] with a scale for each block; `sizes` are those of a block."""

    dtype = COMPUTED

    def __init__(self, path: Path, codes: Plain, scales: Stored, sizes: tuple[int, int]):
        self.codes, self.scales, self.sizes, self.shape = _map_bytes(path, codes), scales, sizes, codes.shape

    def read(self, index: Index) -> np.ndarray:
        """Read a slice as float32."""
        places = [np.arange(size)[part] for size, part in zip(self.shape, index, strict=True)]
        rows, columns = (place // size for place, size in zip(places, self.sizes, strict=True))
        if not len(rows) or not len(columns):
            return np.zeros((len(rows), len(columns)), np.float32)
        first, last = (rows[0], columns[0]), (rows[-1] + 1, columns[-1] + 1)
        scales = self.scales.read(tuple(map(slice, first, last))).astype(np.float32)
        codes = self.codes[index].view(jnp.float8_e4m3fn).astype(np.float32)
        return codes * scales[rows - first[0]][:, columns - first[1]]


class Mxfp4:
    """4-bit floats [X, in, out], whose file has `in` last, with an exponent of two for each 32 of them."""

    dtype = COMPUTED

    def __init__(self, blocks: Stored, scales: Stored):
        self.blocks, self.scales = blocks, scales
        experts, rows, count, _ = blocks.shape
        self.shape: tuple[int, ...] = (experts, count * PER_SCALE, rows)

    def read(self, index: Index) -> np.ndarray:
        """Read a slice as float32."""
        experts, inner, rows = (slice(*part.indices(size)) for part, size in zip(index, self.shape, strict=True))
        first, last = inner.start // PER_SCALE, -(-inner.stop // PER_SCALE)  # blocks that the slice lies in
        blocks = self.blocks.read((experts, rows, slice(first, last), slice(None)))
        exponents = self.scales.read((experts, rows, slice(first, last))).astype(np.int32) - BIAS
        pairs = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], -1)  # the low half of a byte comes first
        numbers = np.ldexp(pairs.reshape(*blocks.shape[:3], PER_SCALE), exponents[..., None])
        numbers = numbers.reshape(*blocks.shape[:2], -1)
        begin = inner.start - first * PER_SCALE
        return np.swapaxes(numbers[..., begin : begin + inner.stop - inner.start], 1, 2)


def join_codes(tensors: dict[str, Plain], paths: dict[str, Path], fp8_sizes: tuple[int, int]) -> dict[str, Stored]:
    """Return tensors by name, in which codes and their scales are one tensor; `paths` are their files."""
    joined: dict[str, Stored] = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == FP8 and name + SCALE_INV in tensors:
            joined[name] = Fp8(paths[name], tensor, joined.pop(name + SCALE_INV), fp8_sizes)
        base = name.removesuffix(BLOCKS)
        if base != name and base + SCALES in tensors:
            joined[base] = Mxfp4(joined.pop(name), joined.pop(base + SCALES))
    return joined


def _map_bytes(path: Path, tensor: Plain) -> np.ndarray:
    """Return the bytes [out, in] of a tensor of 8-bit floats, which numpy has no name for, as a map of the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin = json.loads(file.read(length))[tensor.name]["data_offsets"][0]
    return np.memmap(path, np.uint8, "r", offset=8 + length + begin, shape=tensor.shape)
