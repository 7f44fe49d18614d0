"""Tensors as files hold them: numbers, or codes with scales, which are numbers again when a slice of them is read.

fp8       DeepSeek-V3     NAME [out, in] of 8-bit floats, NAME_scale_inv: a scale for each block of 128 x 128
          Ministral 3     the same with one scale for the matrix; scales of its inputs are left out
mxfp4     GPT-OSS         NAME_blocks [X, out, in / 32, 16] of two 4-bit floats in a byte, and
                          NAME_scales [X, out, in / 32]: exponents of two. The model has NAME [X, in, out].

`Enlarged` is a table of fewer tokens than the model has: the tokens that were added have the mean of the others.
"""

import json
import math
import mmap
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

Index = tuple[slice, ...]
SCALE_INV, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
INPUT_SCALES = ("activation_scale", "input_scale")  # of a layer whose inputs are 8-bit floats elsewhere
FP8 = "F8_E4M3"  # as safetensors names it
# Number of each 4-bit code: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, E2M1).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
PER_SCALE = 32  # 4-bit floats of one scale
BIAS = 127  # of an exponent that is stored as a byte
COMPUTED = "BF16"  # the dtype that such tensors stand for
# Dtypes of numbers and codes, as safetensors names them, and numpy's.
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, FP8: jnp.float8_e4m3fn,
    "U8": np.uint8, "I8": np.int8, "I32": np.int32,
}  # fmt: skip


class MappedFile:
    """A safetensors file in memory: its bytes are read from the disk when they are used.

    The file begins with the length of its header, 8 bytes, and the header, JSON. Offsets in the header count from its
    end (https://huggingface.co/docs/safetensors). `safe_open` must have accepted the file before.
    """

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._begin = 8 + int.from_bytes(self.bytes[:8], "little")
        self._header = json.loads(self.bytes[8 : self._begin])

    def find(self, name: str) -> tuple[int, int]:
        """Return where the bytes of a tensor begin and end."""
        first, last = self._header[name]["data_offsets"]
        return self._begin + first, self._begin + last


class Stored(Protocol):
    """A tensor that slices are read from."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it
    tensors: tuple["Plain", ...]  # of the files, that it is made of

    def read(self, index: Index) -> np.ndarray:
        """Return a slice of the tensor, an array of as many dimensions [...]; nothing else of the file is read."""


class Plain:
    """A tensor of numbers in a safetensors file, which `open_file` maps."""

    def __init__(self, file: Any, name: str, open_file: Callable[[], MappedFile]):
        part = file.get_slice(name)
        self.shape, self.dtype = tuple(part.get_shape()), part.get_dtype()
        self.name, self._open_file = name, open_file
        self.tensors: tuple[Plain, ...] = (self,)

    def read(self, index: Index) -> np.ndarray:
        """Return a slice [...] of the tensor as a view of the mapped file."""
        file = self._open_file()
        return np.ndarray(self.shape, DTYPES[self.dtype], file.bytes, file.find(self.name)[0])[index]

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor in the file."""
        begin, end = self._open_file().find(self.name)
        return end - begin

    def prefetch(self) -> None:
        """Let the system read the tensor from the disk in the background, since it will be needed soon.

        First its pages are taken out of the memory of this process; a later use maps them again. Otherwise the pages
        of a large file add up beside the arrays that are made of them.
        """
        file = self._open_file()
        begin, end = file.find(self.name)
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        for advice in (mmap.MADV_DONTNEED, mmap.MADV_WILLNEED):
            file.bytes.madvise(advice, page, end - page)


class Fp8:
    """8-bit floats [out, in] with one scale, or with a scale for each block; `sizes` are those of a block."""

    dtype = COMPUTED

    def __init__(self, quantized: Plain, scales: Plain, sizes: tuple[int, int]):
        self.quantized, self.scales, self.sizes, self.shape = quantized, scales, sizes, quantized.shape
        self.tensors: tuple[Plain, ...] = (quantized, scales)

    def read(self, index: Index) -> np.ndarray:
        """Return a slice [rows, columns] of the matrix [out, in], float32."""
        if math.prod(self.scales.shape) == 1:
            scale = self.scales.read((slice(None),) * len(self.scales.shape)).astype(np.float32).reshape(())
            return self.quantized.read(index).astype(np.float32) * scale
        # The scales of the blocks that the slice touches, then one for each of its rows and columns.
        indices = [np.arange(size)[part] for size, part in zip(self.shape, index, strict=True)]
        rows, columns = (position // size for position, size in zip(indices, self.sizes, strict=True))
        if not len(rows) or not len(columns):
            return np.zeros((len(rows), len(columns)), np.float32)
        first, last = (rows[0], columns[0]), (rows[-1] + 1, columns[-1] + 1)
        scales = self.scales.read(tuple(map(slice, first, last))).astype(np.float32)
        quantized = self.quantized.read(index).astype(np.float32)
        return quantized * scales[rows - first[0]][:, columns - first[1]]


class Mxfp4:
    """4-bit floats [X, in, out], whose file has `in` last, with an exponent of two for each 32 of them."""

    dtype = COMPUTED

    def __init__(self, blocks: Plain, scales: Plain):
        self.blocks, self.scales = blocks, scales
        self.tensors: tuple[Plain, ...] = (blocks, scales)
        experts, rows, count, _ = blocks.shape
        self.shape: tuple[int, ...] = (experts, count * PER_SCALE, rows)

    def read(self, index: Index) -> np.ndarray:
        """Return a slice [experts, in, out] of the matrices, float32."""
        experts, inner, rows = (slice(*part.indices(size)) for part, size in zip(index, self.shape, strict=True))
        first, last = inner.start // PER_SCALE, -(-inner.stop // PER_SCALE)  # blocks that the slice lies in
        blocks = self.blocks.read((experts, rows, slice(first, last), slice(None)))
        exponents = self.scales.read((experts, rows, slice(first, last))).astype(np.int32) - BIAS
        # Whole blocks are read, made numbers, and cut to the slice at the end.
        pairs = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], -1)  # the low half of a byte comes first
        numbers = np.ldexp(pairs.reshape(*blocks.shape[:3], PER_SCALE), exponents[..., None])
        numbers = numbers.reshape(*blocks.shape[:2], -1)
        begin = inner.start - first * PER_SCALE
        return np.swapaxes(numbers[..., begin : begin + inner.stop - inner.start], 1, 2)


class Enlarged:
    """A table [V, D] with more rows than its file: each new row is the mean of the file's rows.

    A token with that row gets a logit near the mean of the others, so that the probabilities of the old tokens hardly
    change (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
    """

    AT_ONCE = 4096  # rows of a file that are added up at one time

    def __init__(self, table: Stored, num_rows: int):
        self.table, self.dtype, self.tensors = table, table.dtype, table.tensors
        self.shape: tuple[int, ...] = (num_rows, table.shape[1])

    @cached_property
    def mean(self) -> np.ndarray:
        """Mean of the file's rows [D], in float32."""
        rows, width = self.table.shape
        total = np.zeros(width)
        for first in range(0, rows, self.AT_ONCE):
            part = self.table.read((slice(first, min(first + self.AT_ONCE, rows)), slice(0, width)))
            total += part.astype(np.float32).sum(0, dtype=np.float64)
        return (total / rows).astype(np.float32)

    def read(self, index: Index) -> np.ndarray:
        """Return a slice [rows, columns] of the table [V, D]; one with new rows is float32."""
        rows, columns = index
        first, last, _ = rows.indices(self.shape[0])
        in_file = self.table.shape[0]
        if last <= in_file:
            return self.table.read((slice(first, last), columns))
        old = self.table.read((slice(min(first, in_file), in_file), columns)).astype(np.float32)
        new = np.broadcast_to(self.mean[columns], (last - max(first, in_file), old.shape[1]))
        return np.concatenate([old, new])


def concat_quantized(tensors: Mapping[str, Stored], fp8_sizes: tuple[int, int]) -> dict[str, Stored]:
    """Return tensors by name, in which codes and their scales are one tensor."""
    joined: dict[str, Stored] = dict(tensors)
    plain = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Plain)}
    for name, tensor in plain.items():
        if tensor.dtype == FP8 and (scales := plain.get(name + SCALE_INV)):
            joined[name] = Fp8(tensor, scales, fp8_sizes)
            del joined[name + SCALE_INV]
            for scale in INPUT_SCALES:
                joined.pop(name.removesuffix("weight") + scale, None)
        base = name.removesuffix(BLOCKS)
        if base != name and (scales := plain.get(base + SCALES)):
            joined[base] = Mxfp4(tensor, scales)
            del joined[name], joined[base + SCALES]
    return joined
