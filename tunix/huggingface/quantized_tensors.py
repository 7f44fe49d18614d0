"""Tensors as files hold them: numbers, or codes with scales, which are numbers again when a slice of them is read.

fp8       DeepSeek-V3     NAME [out, in] of 8-bit floats, NAME_scale_inv: a scale for each block of 128 x 128
          Ministral 3     the same with one scale for the matrix; scales of its inputs are left out
          scale_fmt=ue8m0 the same with scales that are exponents of two in 8 bits, also as bytes
mxfp4     GPT-OSS         NAME_blocks [X, out, in / 32, 16] of two 4-bit floats in a byte, and
                          NAME_scales [X, out, in / 32]: exponents of two. The model has NAME [X, in, out].

Other libraries pack matrices [out, in] under other names:

bitsandbytes, 4 bits   NAME.weight: two codes in a byte, row by row, the high half first. A scale (NAME.weight.absmax)
                       for each block of, say, 64 codes of all rows together, in 8 bits with double quantization.
bitsandbytes, 8 bits   NAME.weight [out, in] int8, and NAME.SCB: the largest number of each row, which 127 stands for
gptq                   NAME.qweight [in / codes, out]: int32 of the codes of neighbouring inputs, lowest bits first
awq                    NAME.qweight [in, out / 8]: int32 of eight outputs, in the order of `AWQ_ORDER`
both of these          NAME.scales and NAME.qzeros of each group of inputs; of gptq g_idx, the group of each input:
                       number = scale (code - zero point)

A slice of these is in the dtype in which the library computes it, with the library's numbers to the bit: float16 or
bfloat16 of the file, float32 of 8 bits. Only headers, states and g_idx are read before.

`Enlarged` is a table of fewer tokens than the model has: the tokens that were added have the mean of the others.
"""

import copy
import json
import math
import mmap
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from tunix.base.errors import UserError
from tunix.base.files import parse_json
from tunix.huggingface.config_json import OTHERWISE, Quantization

Index = tuple[slice, ...]
SCALE_INV, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
INPUT_SCALES = ("activation_scale", "input_scale")  # of a layer whose inputs are 8-bit floats elsewhere
FP8 = "F8_E4M3"  # as safetensors names it
EXPONENTS = ("F8_E8M0", "U8")  # scales of two to this power, less `BIAS`
# Number of each 4-bit code: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, E2M1).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
PER_SCALE = 32  # 4-bit floats of one scale
BIAS = 127  # of an exponent that is stored as a byte
COMPUTED = "BF16"  # the dtype that such tensors stand for
# Dtypes of numbers and codes, as safetensors names them, and numpy's.
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, FP8: jnp.float8_e4m3fn,
    "F8_E8M0": jnp.float8_e8m0fnu, "U8": np.uint8, "I8": np.int8, "I32": np.int32,
}  # fmt: skip

# Of matrices that other libraries pack.
STATE = ".quant_state.bitsandbytes__"  # ends with the kind of codes
MAX_STATE_BYTES = 4096
STATE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
FLOATS: dict[str, Any] = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32}
ONE_OF_127 = np.float32(1 / 127)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the codes of outputs 0 to 7 in an int32, from the lowest bits on


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
        """Return a slice [...] of the tensor as a view of the mapped file; raises `UserError` for an unknown type."""
        if self.dtype not in DTYPES:
            raise UserError(f"{self.name} holds {self.dtype}, which is none of {', '.join(DTYPES)}; convert it first")
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
        if scales.dtype not in (*FLOATS, *EXPONENTS):
            known = " or ".join((*FLOATS, *EXPONENTS))
            raise ValueError(f"{scales.name} holds {scales.dtype}, not {known}; {OTHERWISE}")
        needed = tuple(-(-size // block) for size, block in zip(self.shape, sizes, strict=False))
        if math.prod(scales.shape) != 1 and (scales.shape != needed or len(self.shape) != 2):
            raise ValueError(
                f"{scales.name} is {list(scales.shape)}, which does not fit {quantized.name} {list(self.shape)} in "
                f"blocks of {list(sizes)}; {OTHERWISE}"
            )

    def _read_scales(self, index: Index) -> np.ndarray:
        scales = self.scales.read(index)
        return (scales.view(jnp.float8_e8m0fnu) if scales.dtype == np.uint8 else scales).astype(np.float32)

    def read(self, index: Index) -> np.ndarray:
        """Return a slice [rows, columns] of the matrix [out, in], float32."""
        if math.prod(self.scales.shape) == 1:
            scale = self._read_scales((slice(None),) * len(self.scales.shape)).reshape(())
            return self.quantized.read(index).astype(np.float32) * scale
        # The scales of the blocks that the slice touches, then one for each of its rows and columns.
        indices = [np.arange(size)[part] for size, part in zip(self.shape, index, strict=True)]
        rows, columns = (position // size for position, size in zip(indices, self.sizes, strict=True))
        if not len(rows) or not len(columns):
            return np.zeros((len(rows), len(columns)), np.float32)
        first, last = (rows[0], columns[0]), (rows[-1] + 1, columns[-1] + 1)
        scales = self._read_scales(tuple(map(slice, first, last)))
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
        exponents = self.scales.read((experts, rows, slice(first, last))).view(np.uint8).astype(np.int32) - BIAS
        # Whole blocks are read, made numbers, and cut to the slice at the end.
        pairs = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], -1)  # the low half of a byte comes first
        numbers = np.ldexp(pairs.reshape(*blocks.shape[:3], PER_SCALE), exponents[..., None])
        numbers = numbers.reshape(*blocks.shape[:2], -1)
        begin = inner.start - first * PER_SCALE
        return np.swapaxes(numbers[..., begin : begin + inner.stop - inner.start], 1, 2)


class Bnb4:
    """Codes of 4 bits with a scale for each block of all rows together."""

    def __init__(self, parts: "Parts", name: str):
        state = _read_state(parts, name)
        self.shape: tuple[int, ...] = tuple(state["shape"])
        self.block, self.dtype = state["blocksize"], STATE_DTYPES[state["dtype"]]
        num_codes = math.prod(self.shape)
        # Codes of a row and a block: a slice of columns is read from the first to the last of these.
        self.step = math.gcd(self.shape[1], self.block)
        if self.step % 2:
            raise ValueError(f"{name}: rows of {self.shape[1]} codes in blocks of {self.block} share a byte")
        blocks = -(-num_codes // self.block)
        self.codes = parts.take_bytes(name, (self.shape[0], self.shape[1] // 2))
        self.numbers = parts.take(f"{name}.quant_map", ["F32"], (16,))
        self.nested_block, self.offset = state.get("nested_blocksize"), np.float32(state.get("nested_offset", 0))
        self.absmax = parts.take(f"{name}.absmax", ["F32" if self.nested_block is None else "U8"], (blocks,))
        self.tensors: tuple[Plain, ...] = (self.codes, self.numbers, self.absmax)
        if self.nested_block is not None:
            self.nested_numbers = parts.take(f"{name}.nested_quant_map", ["F32"], (256,))
            shape = (-(-blocks // self.nested_block),)
            self.nested_absmax = parts.take(f"{name}.nested_absmax", ["F32"], shape)
            self.tensors += (self.nested_numbers, self.nested_absmax)

    def read(self, index: Index) -> np.ndarray:
        """Return a slice [rows, columns] of the matrix [out, in], float32."""
        rows, columns = _slices(index, self.shape)
        first, last = columns.start // self.step, -(-columns.stop // self.step)
        packed = self.codes.read((rows, slice(first * self.step // 2, last * self.step // 2)))
        # Two numbers for each byte: one look into a table of 8 bytes.
        numbers = self.numbers.read((slice(None),))
        pairs = np.stack([np.repeat(numbers, 16), np.tile(numbers, 16)], 1).view(np.complex64)[:, 0]
        values = pairs[packed].view(np.float32).reshape(len(packed), last - first, self.step)
        starts = np.arange(rows.start, rows.stop)[:, None] * self.shape[1] + np.arange(first, last) * self.step
        values *= self._scales(starts // self.block)[..., None]
        begin = first * self.step
        values = values.reshape(len(packed), (last - first) * self.step)
        values = values[:, columns.start - begin : columns.stop - begin]
        return values.astype(FLOATS[self.dtype])

    def _scales(self, blocks: np.ndarray) -> np.ndarray:
        """Return the scales of blocks of these numbers, float32."""
        scales = self.absmax.read((slice(None),))[blocks]
        if self.nested_block is None:
            return scales
        nested = self.nested_absmax.read((slice(None),))[blocks // self.nested_block]
        return self.nested_numbers.read((slice(None),))[scales] * nested + self.offset


class Bnb8:
    """Codes of 8 bits with a scale for each row."""

    dtype = "F32"

    def __init__(self, parts: "Parts", name: str):
        base = name.removesuffix("weight")
        self.codes = parts.take(name, ["I8"], None)
        self.shape: tuple[int, ...] = self.codes.shape
        self.largest = parts.take(f"{base}SCB", ["F32"], self.shape[:1])
        if (order := parts.pop(f"{base}weight_format")) is not None and int(order.read(())) != 0:
            raise ValueError(f"{base}weight_format is not 0: codes in the order of a GPU's kernel are not read")
        self.tensors: tuple[Plain, ...] = (self.codes, self.largest)

    def read(self, index: Index) -> np.ndarray:
        """Return a slice [rows, columns] of the matrix [out, in], float32."""
        return self.codes.read(index).astype(np.float32) * self.largest.read(index[:1])[:, None] * ONE_OF_127


class Integers:
    """Integers with a scale and a zero point for each group of inputs and each output (gptq, awq)."""

    def __init__(self, parts: "Parts", name: str, quantization: Quantization):
        base, self.quantization = name.removesuffix("qweight"), quantization
        self.per_word = per_word = 32 // quantization.bits
        self.scales = parts.take(f"{base}scales", list(FLOATS), None)
        groups, num_out = self.scales.shape
        self.in_rows = quantization.method == "gptq"  # whether a word has codes of neighbouring inputs, or of outputs
        words = parts.take(name, ["I32"], None)
        num_in = words.shape[0] * (per_word if self.in_rows else 1)
        self.shape: tuple[int, ...] = (num_out, num_in)
        if words.shape != (num_in // per_word, num_out) and words.shape != (num_in, num_out // per_word):
            raise ValueError(f"{name} is {list(words.shape)}, which does not fit {base}scales {[groups, num_out]}")
        size = max(1, num_in if quantization.group_size == -1 else min(quantization.group_size, num_in))
        if groups != -(-num_in // size) or num_out % per_word:
            raise ValueError(f"{base}scales is {[groups, num_out]}, for {num_in} inputs in groups of {size}")
        self.words, self.dtype, self.group_size = words, self.scales.dtype, size
        self.zeros = parts.take(f"{base}qzeros", ["I32"], (groups, num_out // per_word))
        self.tensors: tuple[Plain, ...] = (words, self.scales, self.zeros)
        self.group_of = np.arange(num_in) // size
        if f"{base}g_idx" in parts.tensors:
            self.group_of = parts.take(f"{base}g_idx", ["I32"], (num_in,)).read((slice(None),)).copy()
            if self.group_of.min(initial=0) < 0 or self.group_of.max(initial=0) >= groups:
                raise ValueError(f"{base}g_idx names a group beyond the {groups} of {base}scales")

    def read(self, index: Index) -> np.ndarray:
        """Return a slice [rows, columns] of the matrix [out, in], as numbers."""
        rows, columns = _slices(index, self.shape)
        # Words are read whole, and their codes are cut to the slice.
        words, outputs = self._find_words(rows)
        if self.in_rows:
            in_words, inputs = self._find_words(columns)
            codes = self._unpack(self.words.read((in_words, outputs)), 0)
            codes = codes[columns.start - inputs.start : columns.stop - inputs.start]
        else:
            codes = self._unpack(self.words.read((columns, words)), 1)
        groups = self.group_of[columns]
        zeros = self._unpack(self.zeros.read((slice(None), words)), 1) + np.uint8(self.quantization.added_zero)
        zeros = (zeros & np.uint8(2**self.quantization.bits - 1)).astype(np.float32)
        scales = self.scales.read((slice(None), outputs)).astype(np.float32)
        numbers = codes.astype(np.float32)
        numbers -= zeros[groups]
        numbers *= scales[groups]
        with np.errstate(over="ignore"):
            numbers = numbers.astype(FLOATS[self.dtype])
        return numbers[:, rows.start - outputs.start : rows.stop - outputs.start].T

    def _find_words(self, part: slice) -> tuple[slice, slice]:
        """Return the words that have these codes, and all codes in them."""
        words = slice(part.start // self.per_word, -(-part.stop // self.per_word))
        return words, slice(words.start * self.per_word, words.stop * self.per_word)

    def _unpack(self, words: np.ndarray, dim: int) -> np.ndarray:
        """Return the codes uint8 in int32 [n, m], whose dimension `dim` they make longer."""
        places = AWQ_ORDER if self.quantization.method == "awq" else range(self.per_word)
        before, behind = words.shape[: dim + 1], words.shape[dim + 1 :]
        codes = np.empty((*before, self.per_word, *behind), np.uint8)
        for codes_of_place, place in zip(np.moveaxis(codes, dim + 1, 0), places, strict=True):
            shifted = words.view(np.uint32) >> np.uint32(place * self.quantization.bits)
            codes_of_place[...] = shifted & np.uint32(2**self.quantization.bits - 1)
        return codes.reshape(*before[:-1], before[-1] * self.per_word, *behind)


class Parts:
    """Tensors of the files; those that are parts of a matrix are taken out."""

    def __init__(self, tensors: Mapping[str, Plain]):
        self.tensors = dict(tensors)

    def pop(self, name: str) -> Plain | None:
        """Take a tensor, if it is there."""
        return self.tensors.pop(name, None)

    def take(self, name: str, dtypes: list[str], shape: tuple[int, ...] | None) -> Plain:
        """Take a tensor of one of these dtypes, of this shape, or of any with two dimensions."""
        tensor = self.pop(name)
        if tensor is None:
            raise ValueError(f"{name} is missing")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} holds {tensor.dtype}, not {' or '.join(dtypes)}")
        if len(tensor.shape) != 2 if shape is None else tensor.shape != shape:
            expected = "a matrix" if shape is None else list(shape)
            raise ValueError(f"{name} is {list(tensor.shape)}, and must be {expected}")
        return tensor

    def take_bytes(self, name: str, shape: tuple[int, ...]) -> Plain:
        """Take a tensor of any dtype as bytes of this shape."""
        tensor = self.pop(name)
        if tensor is None or tensor.num_bytes != math.prod(shape):
            raise ValueError(f"{name} has not the {math.prod(shape)} bytes of its state")
        tensor = copy.copy(tensor)
        tensor.shape, tensor.dtype = shape, "U8"
        return tensor


def _slices(index: Index, shape: tuple[int, ...]) -> list[slice]:
    return [slice(*part.indices(size)) for part, size in zip(index, shape, strict=True)]


def _read_state(parts: Parts, name: str) -> dict[str, Any]:
    """Return what the files say of codes of 4 bits, JSON in a tensor."""
    key = next(key for key in (f"{name}{STATE}nf4", f"{name}{STATE}fp4") if key in parts.tensors)
    tensor = parts.tensors.pop(key)
    try:
        if tensor.num_bytes > MAX_STATE_BYTES:
            raise ValueError(f"{tensor.num_bytes} bytes")
        state = parse_json(tensor.read((slice(None),)).tobytes())
        rows, columns = state["shape"]
        counts = [rows, columns, state["blocksize"], state.get("nested_blocksize", 1)]
        if not all(isinstance(count, int) and 0 < count < 2**40 for count in counts):
            raise ValueError(f"sizes {counts}")
        if state["dtype"] not in STATE_DTYPES or not math.isfinite(state.get("nested_offset", 0)):
            raise ValueError(f"dtype {state['dtype']}, offset {state.get('nested_offset')}")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{key} is not understood: {error}") from None
    return state


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


def join_scales(tensors: Mapping[str, Stored], fp8_sizes: tuple[int, int]) -> dict[str, Stored]:
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


def join_packed(tensors: Mapping[str, Plain], quantization: Quantization) -> dict[str, Stored]:
    """Return tensors by name, in which the parts of a packed matrix are one, NAME.weight.

    Raises:
        ValueError: a part is missing, or of another shape or dtype.
    """
    parts, joined = Parts(tensors), dict[str, Stored]()
    for name in tensors:
        base, _, last = name.rpartition(".")
        if quantization.method in ("gptq", "awq") and last == "qweight":
            joined[f"{base}.weight"] = Integers(parts, name, quantization)
        elif quantization.method == "bitsandbytes" and name.endswith((f"{STATE}nf4", f"{STATE}fp4")):
            matrix = name.partition(STATE)[0]
            joined[matrix] = Bnb4(parts, matrix)
        elif quantization.method == "bitsandbytes" and tensors[name].dtype == "I8":
            joined[name] = Bnb8(parts, name)
    return parts.tensors | joined
