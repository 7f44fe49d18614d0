"""Sharded arrays out of safetensors files under Hugging Face's names, a slice at a time."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open

from tunix.base.errors import UserError
from tunix.base.files import is_plain, read_json
from tunix.config import Model
from tunix.huggingface.config_json import fp8_block_sizes, read_num_rows
from tunix.huggingface.quantized_tensors import MappedFile, Plain, Stored, concat_quantized, enlarge
from tunix.huggingface.table import Family, Name, find_family
from tunix.models.layers import named, parameter_name
from tunix.models.quantized import stack_quantized
from tunix.sharding.arrays import Index, fill
from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout
from tunix.sharding.table import EXPERTS, LAYERS

# Tensors of a folder of safetensors files.

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class TensorFiles:
    """Tensors of a model's folder, under the names of its family's table. A context: it closes the files at its end.

    Tables have `num_rows` rows, or as many as the files if it is None. Rows that the files lack are the mean of the
    others (`stored.Enlarged`).
    """

    def __init__(self, folder: Path, family: Family, num_rows: int | None = None):
        self.folder, self.family, self.num_rows, self._open = folder, family, num_rows, ExitStack()
        self._tensors: dict[str, Stored] = {}

    def __enter__(self) -> "TensorFiles":
        tensors: dict[str, Plain] = {}
        for path in self.paths:
            try:
                file = self._open.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not a safetensors file: {error}") from None
            open_file = cache(partial(MappedFile, path))  # mapped when its first tensor is read
            tensors |= {self._canonical(name): Plain(file, name, open_file) for name in file.keys()}  # noqa: SIM118
        self._tensors = concat_quantized(tensors, fp8_block_sizes(self.folder))
        if self.num_rows is not None and (in_files := read_num_rows(self.folder, self.family)) < self.num_rows:
            self._tensors = enlarge(self._tensors, self.family.tables, self.num_rows, in_files)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._tensors.clear()  # a file stays mapped until the last view of it is gone

    @property
    def paths(self) -> list[Path]:
        """The files that hold the tensors."""
        return weight_files(self.folder)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> str:
        """Return the dtype as safetensors names it."""
        return self._tensors[name].dtype

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a tensor as numbers; of a tensor of numbers it is a view of the mapped file."""
        return self._tensors[name].read(index)

    def fetch(self, name: str) -> None:
        """Let the system read a tensor from the disk in the background: it will be needed soon."""
        for tensor in self._tensors[name].tensors:
            tensor.fetch()

    def release(self, name: str) -> None:
        """Take the pages of a tensor out of the memory of this process; a later use maps them again."""
        for tensor in self._tensors[name].tensors:
            tensor.release()

    def _canonical(self, name: str) -> str:
        """Return the name in the family's table of a tensor in the files."""
        return self.family.usual_name(name)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model.

    Raises:
        UserError: there are none, or one that the index names is missing.
    """
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{folder / INDEX} has no weight_map of tensors and files")
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if not is_plain(name) or "/" in name]:
            raise UserError(f"{folder / INDEX} names {outside[0]}, which is no file of this folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder} lacks {', '.join(missing)}, named in {INDEX}")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:  # a pickle names functions that are called while it is loaded
        raise UserError(
            f"{folder} has its weights as pickles ({', '.join(pickles[:3])}), which can run code and are not read; "
            "save them as safetensors"
        )
    raise UserError(f"{folder} has no {SINGLE} and no {INDEX}")


# The way out for a folder of tunix.export whose files are not those of its digests.
CHANGED = "export it again, or remove its digests.json if you have changed the file on purpose"
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names what weights are read from
PIECE = 2**19  # numbers of a tensor that are copied to the devices of this process at one time


def load_weights(folder: Path, cfg: Model, weights: Mapping[str, Any], layout: Layout, mesh: Mesh) -> dict[str, Any]:
    """Load the parameters of a model, laid out at rest; low-rank updates, which the files do not have, are None.

    `weights` is the tree of `state.Weight`. Each process reads the slices of its own devices and nothing else. It reads
    matrices that are to be quantized one layer at a time. Tables of fewer tokens than the model has get rows with the
    mean of theirs.

    Raises:
        UserError: tensors that are missing, too many, of another shape, or no floats: they are named.
    """
    family = find_family(cfg.family)
    loaded: dict[str, jax.Array] = {}
    with TensorFiles(folder, family, cfg.vocab_size) as files:
        _check(files, cfg, weights)

        def load(name: Name, equation: Equation, dtype: Any, layers: Sequence[int]) -> jax.Array:
            """Load some layers of a parameter."""
            return load_parameter(
                files, name, cfg, equation, NamedSharding(mesh, layout.stored(equation)), layers, dtype
            )

        try:
            for path, name, weight in list_in_files(weights, family):
                layers = layers_of(path, cfg)
                if weight.equation.is_quantized:
                    equation = weight.equation.dequantized()
                    matrices = (load(name, equation, "float32", layers[n : n + 1]) for n in range(len(layers)))
                    loaded[path], loaded[f"{path}_scale"] = stack_quantized(matrices, equation, cfg, layout)
                else:
                    loaded[path] = load(name, weight.equation, weight.dtype, layers)
        except SafetensorError as error:
            raise UserError(f"{folder}: {error}") from None
    return jax.tree.map_with_path(lambda path, _: loaded.get(parameter_name(path)), weights)


def list_in_files(weights: Mapping[str, Any], family: Family) -> list[tuple[str, Name, Any]]:
    """Return the parameters that have a name in the family's table: all but low-rank updates and scales."""
    all_names = [(path, family.name(path), weight) for path, weight in named(weights)]
    return [(path, name, weight) for path, name, weight in all_names if name is not None]


def layers_of(path: str, cfg: Model) -> tuple[int, ...]:
    """Return the numbers of the layers that a stacked parameter holds; of another parameter, none."""
    return cfg.stacks.get(path.partition(".")[0], ())


def list_numbers(path: str, name: Name, cfg: Model) -> list[tuple[int, ...]]:
    """Return the numbers in the names of a parameter's tensors: (), or (layer,), or (layer, expert) of each."""
    ranges: dict[str, Sequence[int]] = {LAYERS: layers_of(path, cfg), EXPERTS: range(cfg.dims.get(EXPERTS, 0))}
    return list(itertools.product(*(ranges[dim_name] for dim_name in name.numbered)))


def check_weights(folder: Path, cfg: Model, weights: Mapping[str, Any]) -> None:
    """Check names and shapes as `load_weights` does, with its errors; reads only the headers of the files."""
    with TensorFiles(folder, find_family(cfg.family), cfg.vocab_size) as files:
        _check(files, cfg, weights)


def shape_in_files(name: Name, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a tensor in the files: "NH,D" is [num_heads * head_dim, embed_dim]."""
    shape = [math.prod(dims[dim_name] for dim_name in group) for group in name.dims.split(",")]
    if name.fused:
        shape[name.fused_dim] = sum(_list_fused_sizes(name, dims))
    return tuple(shape)


def _list_fused_sizes(name: Name, dims: Mapping[str, int]) -> list[int]:
    """Return the sizes of the weights that one tensor holds one after the other."""
    return [math.prod(dims[dim_name] for dim_name in group) for group in name.fused]


def _check(files: TensorFiles, cfg: Model, weights: Mapping[str, Any]) -> None:
    """Compare the tensors of the files with those that the parameters need.

    Raises:
        UserError: a tensor is missing, not needed, of another shape, or not of floats.
    """
    shapes, folder = files.shapes, files.folder
    requested = {
        name.tensor.format(*numbers): shape_in_files(name, cfg.dims)
        for path, name, _ in list_in_files(weights, files.family)
        for numbers in list_numbers(path, name, cfg)
    }
    constants = list_constants(files.family, cfg)
    ignored = [pattern.replace("{num_layers}", str(cfg.num_layers)) for pattern in files.family.ignored]
    # Old versions of transformers saved the frequencies of RoPE. Some files have a tied head a second time.
    ignored += [*map(re.escape, constants), r".*rotary_emb\.inv_freq$", *([r"lm_head\."] if cfg.tied_head else [])]
    ignored += map(re.escape, _list_unused_names(files.family, cfg))
    missing = sorted(requested.keys() - shapes.keys())
    extra = sorted(
        name for name in shapes.keys() - requested.keys() if not any(re.match(pattern, name) for pattern in ignored)
    )
    if missing:
        raise UserError(f"{folder} lacks {first_names(missing)}")
    if extra:
        raise UserError(f"{folder} has {first_names(extra)}, which a {cfg.family} of its config.json does not have")
    for name, number in constants.items():
        # A file in bfloat16 has three digits of the number.
        if name in shapes and not math.isclose(number, stored := files.read(name, ()), rel_tol=0.01):
            raise UserError(f"{folder}: {name} is {stored}, and layers of a {cfg.family} compute with {number}")
    for name, shape in requested.items():
        if shapes[name] != shape:
            raise UserError(f"{folder}: {name} is {list(shapes[name])}, its config.json says {list(shape)}")
        if files.dtype(name) not in FLOATS:
            raise UserError(f"{folder}: {name} holds {files.dtype(name)}, not {', '.join(FLOATS)}; dequantize it first")


def _list_unused_names(family: Family, cfg: Model) -> list[str]:
    """Return the names of tensors that no layer uses: keys and values of layers that take those of earlier layers."""
    parts = [family.name(f"blocks.attention.{part}") for part in ("k.w", "v.w", "k_norm.scale")]
    shared = [layer for layer in range(cfg.num_layers) if cfg.is_shared(layer)]
    return [name.tensor.format(layer) for name in parts if name is not None for layer in shared]


def list_constants(family: Family, cfg: Model) -> dict[str, float]:
    """Return the tensors of the files that are numbers which our layers have in their code."""
    return {
        tensor.format(layer): number for layer in range(cfg.num_layers) for tensor, number in family.constants.items()
    }


def first_names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def load_parameter(
    files: TensorFiles,
    name: Name,
    cfg: Model,
    equation: Equation,
    sharding: NamedSharding,
    layers: Sequence[int],
    dtype: Any,
) -> jax.Array:
    """Load a parameter; of dimension L, only the layers of `layers`.

    The files have one tensor for each layer (and expert), with dimensions grouped and in another order than ours. A
    piece of a tensor is a view of the mapped file, whose strides are turned into our order while it is copied:

        q.w of Llama 3    files: "NH,D" [num_heads * head_dim, embed_dim]    ours: "LDNH"
        a piece           rows of some heads, seen as [n, H, D]              copied as [1, D, n, H] to the device
    """
    ours, dim_names = equation.w, name.dims.replace(",", "")
    sizes = cfg.dims | {LAYERS: len(layers)}
    shape = tuple(sizes[dim_name] for dim_name in ours)
    order = [dim_names.index(dim_name) for dim_name in ours if dim_name not in name.numbered]
    new_dims = tuple(ours.index(dim_name) for dim_name in name.numbered)
    numbers: dict[str, Sequence[int]] = {LAYERS: layers, EXPERTS: range(cfg.dims.get(EXPERTS, 0))}

    def part(index: Index) -> np.ndarray:
        ranges = {dim_name: (each.start, each.stop) for dim_name, each in zip(ours, index, strict=True)}
        requested = [numbers[dim_name][slice(*ranges[dim_name])] for dim_name in name.numbered]
        where, unpacked = _find_slices(name, cfg.dims, ranges)
        entries = ranges[name.dims.split(",")[name.fused_dim][0]]
        views = []
        for which in itertools.product(*requested):
            tensor = name.tensor.format(*which)
            files.release(tensor)  # what earlier pieces have read
            files.fetch(tensor)
            stored = files.read(tensor, where)
            if name.interleaved:
                stored = _take_entries(stored, name, cfg.dims, entries)
            views.append(stored.reshape(unpacked).transpose(order))
        if len(views) == 1:
            return np.expand_dims(views[0], new_dims)
        stacked = np.stack(views).reshape(*map(len, requested), *views[0].shape)
        return np.moveaxis(stacked, range(len(requested)), new_dims)

    # Pieces are small, so that the numbers on the host at one time are, whatever the size of a tensor; and they are
    # slices along the first dimension of the file, so that a piece is read from one place of the disk.
    local = dict(zip(ours, sharding.shard_shape(shape), strict=True))
    budget = PIECE // len(sharding.addressable_devices)
    if math.prod(local.values()) <= budget:
        return fill(shape, dtype, sharding, tuple(local.values()), part)
    rows = max(1, budget // math.prod(local[dim_name] for dim_name in dim_names[1:]))
    piece = tuple(
        1 if dim_name in name.numbered else rows if dim_name == dim_names[0] else local[dim_name] for dim_name in ours
    )
    return fill(shape, dtype, sharding, piece, part)


def _find_slices(
    name: Name, dims: Mapping[str, int], ranges: Mapping[str, tuple[int, int]]
) -> tuple[tuple[slice, ...], list[int]]:
    """Return the slice of a tensor in the files that has these ranges of our dimensions, and its shape by letter."""
    where, unpacked = [], []
    for index, group in enumerate(name.dims.split(",")):
        inner = math.prod(dims[dim_name] for dim_name in group[1:])
        # Shards and pieces cut NH between heads, never within one: they cut the first letter of a group alone.
        assert all(ranges[dim_name] == (0, dims[dim_name]) for dim_name in group[1:]), f"{group} is split within"
        begin = sum(_list_fused_sizes(name, dims)[: name.part]) if index == name.fused_dim else 0
        first, last = ranges[group[0]]
        if name.interleaved and index == name.fused_dim:
            # Rows of up[2:4], in  gate 0 | up 0 | gate 1 | up 1 | ...: those of entries 2 and 3 of both, rows 4 to 7. A
            # range that begins or ends within an entry takes all of it; `_take_entries` cuts it.
            rows = entry_sizes(name, dims)
            local, of_all = rows[name.part], sum(rows)
            where.append(slice(first * inner // local * of_all, math.ceil(last * inner / local) * of_all))
        else:
            where.append(slice(begin + first * inner, begin + last * inner))
        unpacked += [last - first, *(dims[dim_name] for dim_name in group[1:])]
    return tuple(where), unpacked


def entry_sizes(name: Name, dims: Mapping[str, int]) -> list[int]:
    """Return how many rows an entry has in each of the weights that are interleaved."""
    return [size // dims[name.interleaved] for size in _list_fused_sizes(name, dims)]


def _take_entries(stored: np.ndarray, name: Name, dims: Mapping[str, int], entries: tuple[int, int]) -> np.ndarray:
    """Return the rows of one weight out of those of several that are interleaved.

    `entries` is the range of the weight's first dimension there, which may begin and end within what was read.
    """
    dim, rows = name.fused_dim, entry_sizes(name, dims)
    local, begin = rows[name.part], sum(rows[: name.part])
    before, behind = stored.shape[:dim], stored.shape[dim + 1 :]
    by_entry = stored.reshape(*before, -1, sum(rows), *behind)
    taken = by_entry.take(range(begin, begin + local), dim + 1).reshape(*before, -1, *behind)
    inner = math.prod(dims[dim_name] for dim_name in name.dims.split(",")[dim][1:])
    first = entries[0] * inner % local
    return taken.take(range(first, first + (entries[1] - entries[0]) * inner), dim)
