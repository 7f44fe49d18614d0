"""Sharded arrays out of safetensors files under Hugging Face's names, a slice at a time."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError

from tunix.base.errors import UserError
from tunix.config import Model
from tunix.families import Family, Name, find_family
from tunix.hf.tensor_files import TensorFiles
from tunix.models.paths import named, parameter_name
from tunix.models.quantized import stack_codes
from tunix.sharding.dims import EXPERTS, LAYERS
from tunix.sharding.equations import Equation
from tunix.sharding.filling import Index, fill
from tunix.sharding.layout import Layout

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
                files, name, cfg, equation, NamedSharding(mesh, layout.at_rest(equation)), layers, dtype
            )

        try:
            for path, name, weight in list_in_files(weights, family):
                layers = layers_of(path, cfg)
                if weight.equation.is_quantized:
                    equation = weight.equation.dequantized()
                    matrices = (load(name, equation, "float32", layers[n : n + 1]) for n in range(len(layers)))
                    loaded[path], loaded[f"{path}_scale"] = stack_codes(matrices, equation, cfg, layout)
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
    return list(itertools.product(*(ranges[letter] for letter in name.numbered)))


def check_weights(folder: Path, cfg: Model, weights: Mapping[str, Any]) -> None:
    """Check names and shapes as `load_weights` does, with its errors; reads only the headers of the files."""
    with TensorFiles(folder, find_family(cfg.family), cfg.vocab_size) as files:
        _check(files, cfg, weights)


def shape_in_files(name: Name, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a tensor in the files: "NH,D" is [num_heads * head_dim, embed_dim]."""
    shape = [math.prod(dims[letter] for letter in group) for group in name.dims.split(",")]
    if name.fused:
        shape[name.fused_dim] = sum(_list_fused_sizes(name, dims))
    return tuple(shape)


def _list_fused_sizes(name: Name, dims: Mapping[str, int]) -> list[int]:
    """Return the sizes of the weights that one tensor holds one after the other."""
    return [math.prod(dims[letter] for letter in group) for group in name.fused]


def _check(files: TensorFiles, cfg: Model, weights: Mapping[str, Any]) -> None:
    """Compare the tensors of the files with those that the parameters need.

    Raises:
        UserError: a tensor is missing, not needed, of another shape, or not of floats.
    """
    shapes, folder = files.shapes, files.folder
    wanted = {
        name.tensor.format(*numbers): shape_in_files(name, cfg.dims)
        for path, name, _ in list_in_files(weights, files.family)
        for numbers in list_numbers(path, name, cfg)
    }
    constants = list_constants(files.family, cfg)
    ignored = [pattern.replace("{num_layers}", str(cfg.num_layers)) for pattern in files.family.ignored]
    # Old versions of transformers saved the frequencies of RoPE. Some files have a tied head a second time.
    ignored += [*map(re.escape, constants), r".*rotary_emb\.inv_freq$", *([r"lm_head\."] if cfg.tied_head else [])]
    ignored += map(re.escape, _list_unused_names(files.family, cfg))
    missing = sorted(wanted.keys() - shapes.keys())
    extra = sorted(
        name for name in shapes.keys() - wanted.keys() if not any(re.match(pattern, name) for pattern in ignored)
    )
    if missing:
        raise UserError(f"{folder} lacks {first_names(missing)}")
    if extra:
        raise UserError(f"{folder} has {first_names(extra)}, which a {cfg.family} of its config.json does not have")
    for name, number in constants.items():
        # A file in bfloat16 has three digits of the number.
        if name in shapes and not math.isclose(number, stored := files.read(name, ()), rel_tol=0.01):
            raise UserError(f"{folder}: {name} is {stored}, and layers of a {cfg.family} compute with {number}")
    for name, shape in wanted.items():
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
    ours, letters = equation.w, name.dims.replace(",", "")
    sizes = cfg.dims | {LAYERS: len(layers)}
    shape = tuple(sizes[letter] for letter in ours)
    order = [letters.index(letter) for letter in ours if letter not in name.numbered]
    new_dims = tuple(ours.index(letter) for letter in name.numbered)
    numbers: dict[str, Sequence[int]] = {LAYERS: layers, EXPERTS: range(cfg.dims.get(EXPERTS, 0))}

    def part(index: Index) -> np.ndarray:
        ranges = {letter: (each.start, each.stop) for letter, each in zip(ours, index, strict=True)}
        wanted = [numbers[letter][slice(*ranges[letter])] for letter in name.numbered]
        where, unpacked = _find_slices(name, cfg.dims, ranges)
        entries = ranges[name.dims.split(",")[name.fused_dim][0]]
        views = []
        for which in itertools.product(*wanted):
            tensor = name.tensor.format(*which)
            files.release(tensor)  # what earlier pieces have read
            files.fetch(tensor)
            stored = files.read(tensor, where)
            if name.interleaved:
                stored = _take_entries(stored, name, cfg.dims, entries)
            views.append(stored.reshape(unpacked).transpose(order))
        if len(views) == 1:
            return np.expand_dims(views[0], new_dims)
        stacked = np.stack(views).reshape(*map(len, wanted), *views[0].shape)
        return np.moveaxis(stacked, range(len(wanted)), new_dims)

    # Pieces are small, so that the numbers on the host at one time are, whatever the size of a tensor; and they are
    # slices along the first dimension of the file, so that a piece is read from one place of the disk.
    local = dict(zip(ours, sharding.shard_shape(shape), strict=True))
    room = PIECE // len(sharding.addressable_devices)
    if math.prod(local.values()) <= room:
        return fill(shape, dtype, sharding, tuple(local.values()), part)
    rows = max(1, room // math.prod(local[letter] for letter in letters[1:]))
    piece = tuple(1 if letter in name.numbered else rows if letter == letters[0] else local[letter] for letter in ours)
    return fill(shape, dtype, sharding, piece, part)


def _find_slices(
    name: Name, dims: Mapping[str, int], ranges: Mapping[str, tuple[int, int]]
) -> tuple[tuple[slice, ...], list[int]]:
    """Return the slice of a tensor in the files that has these ranges of our dimensions, and its shape by letter."""
    where, unpacked = [], []
    for place, group in enumerate(name.dims.split(",")):
        inner = math.prod(dims[letter] for letter in group[1:])
        # Shards and pieces cut NH between heads, never within one: they cut the first letter of a group alone.
        assert all(ranges[letter] == (0, dims[letter]) for letter in group[1:]), f"{group} is split within"
        begin = sum(_list_fused_sizes(name, dims)[: name.part]) if place == name.fused_dim else 0
        first, last = ranges[group[0]]
        if name.interleaved and place == name.fused_dim:
            # Rows of up[2:4], in  gate 0 | up 0 | gate 1 | up 1 | ...: those of entries 2 and 3 of both, rows 4 to 7. A
            # range that begins or ends within an entry takes all of it; `_take_entries` cuts it.
            rows = entry_sizes(name, dims)
            own, of_all = rows[name.part], sum(rows)
            where.append(slice(first * inner // own * of_all, math.ceil(last * inner / own) * of_all))
        else:
            where.append(slice(begin + first * inner, begin + last * inner))
        unpacked += [last - first, *(dims[letter] for letter in group[1:])]
    return tuple(where), unpacked


def entry_sizes(name: Name, dims: Mapping[str, int]) -> list[int]:
    """Return how many rows an entry has in each of the weights that are interleaved."""
    return [size // dims[name.interleaved] for size in _list_fused_sizes(name, dims)]


def _take_entries(stored: np.ndarray, name: Name, dims: Mapping[str, int], entries: tuple[int, int]) -> np.ndarray:
    """Return the rows of one weight out of those of several that are interleaved.

    `entries` is the range of the weight's first dimension there, which may begin and end within what was read.
    """
    dim, rows = name.fused_dim, entry_sizes(name, dims)
    own, begin = rows[name.part], sum(rows[: name.part])
    before, behind = stored.shape[:dim], stored.shape[dim + 1 :]
    by_entry = stored.reshape(*before, -1, sum(rows), *behind)
    taken = by_entry.take(range(begin, begin + own), dim + 1).reshape(*before, -1, *behind)
    inner = math.prod(dims[letter] for letter in name.dims.split(",")[dim][1:])
    first = entries[0] * inner % own
    return taken.take(range(first, first + (entries[1] - entries[0]) * inner), dim)
