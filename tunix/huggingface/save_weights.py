"""Sharded arrays written as safetensors files under Hugging Face's names, with all processes."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tunix.base.errors import UserError
from tunix.config import Model
from tunix.huggingface.table import Name, find_family
from tunix.huggingface.weights import (
    INDEX,
    SINGLE,
    entry_sizes,
    first_names,
    layers_of,
    list_constants,
    list_in_files,
    list_numbers,
    shape_in_files,
)
from tunix.models.layers import named
from tunix.processes import peers
from tunix.processes.joining import find_blind
from tunix.sharding.arrays import replicate, replicate_part


def save_weights(folder: Path, params: Mapping[str, Any], cfg: Model, weights: Any, dtype: str, shard_gb: float) -> int:
    """Write `params` as safetensors files of at most `shard_gb` GB, with an index if there are several.

    Returns the bytes of all tensors. Files are written in rounds: in a round, each process that sees the folder writes
    one file, whose tensors are all that its host has at that time. Every process calls this.
    """
    tensors = _list_tensors(params, cfg, weights)
    size = sum(math.prod(shape) for _, shape, _ in tensors) * jnp.dtype(dtype).itemsize
    files: list[list[Any]] = [[]]
    budget = shard_gb * 1e9
    for tensor in tensors:
        bytes_ = math.prod(tensor[1]) * jnp.dtype(dtype).itemsize
        if files[-1] and bytes_ > budget:
            files.append([])
            budget = shard_gb * 1e9
        files[-1].append(tensor)
        budget -= bytes_
    names = [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    if len(files) == 1:
        names = [SINGLE]
    else:
        weight_map = {tensor: file for file, part in zip(names, files, strict=True) for tensor, _, _ in part}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        peers.on_main(lambda: (folder / INDEX).write_text(json.dumps(index, indent=2)), "writing the index")
    # Processes that do not see the folder help to gather tensors, and write nothing.
    blind = find_blind(folder.parent) if jax.process_count() > 1 else []
    writers = [rank for rank in range(jax.process_count()) if rank not in blind]
    for start in range(0, len(files), len(writers)):  # the last round may have fewer files than writers
        _write_round(folder, dict(zip(writers, zip(names[start:], files[start:], strict=True), strict=False)), dtype)
    return size


def _write_round(folder: Path, files: dict[int, tuple[str, list[Any]]], dtype: str) -> None:
    """Write a file on each process of `files`, which has its name and its tensors. Every process calls this."""
    local: dict[str, np.ndarray] = {}
    for writer, (_, tensors) in files.items():
        is_local = writer == jax.process_index()
        made = [(name, make(dtype, is_local)) for name, _, make in tensors]  # every process takes part
        local |= {name: tensor for name, tensor in made if is_local}

    def write() -> None:
        if local:
            _write_file(folder / files[jax.process_index()][0], local)

    peers.together(write, "writing weights", peers.NO_LIMIT_S)


def _write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {error}") from None


def _list_tensors(params: Mapping[str, Any], cfg: Model, weights: Any) -> list[tuple[str, tuple[int, ...], Any]]:
    """Return name, shape and a function for each tensor in the files, ordered by layer.

    The function of (dtype, is_local) gathers the tensor, with all processes, and returns it, None without `is_local`.
    """
    family = find_family(cfg.family)
    chunks_of: dict[str, list[Any]] = {}
    leaves = dict(named(params))
    if nameless := [path for path in leaves if ".lora." not in path and family.name(path) is None]:
        raise UserError(f"model.family={cfg.family} has no name for {first_names(nameless)}, which its parts have")
    for path, name, weight in list_in_files(weights, family):
        layers = layers_of(path, cfg)
        for numbers in list_numbers(path, name, cfg):
            # Layer 7 may be the third of its stack: `numbers` are those in the tensor's name, `at` is the index in
            # the stacked parameter.
            at = (layers.index(numbers[0]), *numbers[1:]) if numbers else ()
            chunks_of.setdefault(name.tensor.format(*numbers), []).append((numbers, at, name, leaves[path], weight))

    # A function for each tensor, because all tensors at once would not fit into the memory of a host.
    def maker(parts):
        def make(dtype, is_local):
            values = [replicate_part(leaf, *at) if at else replicate(leaf) for _, at, _, leaf, _ in parts]
            if not is_local:
                return None
            chunks = [
                # The router's bias moves by steps that 16 bits do not resolve.
                pack(np.asarray(value), name, weight).astype("float32" if weight.equation.is_choice else dtype)
                for value, (_, _, name, _, weight) in zip(values, parts, strict=True)
            ]
            return np.ascontiguousarray(_fuse(chunks, parts[0][2], cfg.dims))

        return make

    for parts in chunks_of.values():
        parts.sort(key=lambda part: part[2].part)
    constants: list[Any] = [
        (tensor, (), lambda dtype, _, number=number: np.asarray(number, jnp.dtype(dtype)))
        for tensor, number in list_constants(family, cfg).items()
    ]
    return [
        *((tensor, shape_in_files(parts[0][2], cfg.dims), maker(parts)) for tensor, parts in _sort_by_layer(chunks_of)),
        *constants,
    ]


def _fuse(chunks: list[np.ndarray], name: Name, dims: Mapping[str, int]) -> np.ndarray:
    """Return the weights of one tensor one after the other, or entry by entry."""
    dim, shape = name.fused_dim, chunks[0].shape
    if not name.interleaved:
        return np.concatenate(chunks, dim)
    rows = entry_sizes(name, dims)
    by_entry = [
        piece.reshape(*shape[:dim], -1, local, *shape[dim + 1 :]) for piece, local in zip(chunks, rows, strict=True)
    ]
    return np.concatenate(by_entry, dim + 1).reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _sort_by_layer(chunks_of: Mapping[str, list]) -> Iterator[tuple[str, list]]:
    """Yield tensors with what they are made of, ordered by layer; those of no layer come first."""

    def layer(item: tuple[str, list]) -> tuple[int, ...]:
        numbers, *_ = item[1][0]  # of the first piece: (), (layer,) or (layer, expert)
        return numbers[:1]

    yield from sorted(chunks_of.items(), key=layer)


def pack(value: np.ndarray, name: Name, weight) -> np.ndarray:
    """Return one layer of a parameter (of one expert) with the dimensions that the files have."""
    ours = "".join(dim_name for dim_name in weight.equation.w if dim_name not in name.numbered)
    dim_names = name.dims.replace(",", "")
    sizes = dict(zip(ours, value.shape, strict=True))
    shape = [math.prod(sizes[dim_name] for dim_name in group) for group in name.dims.split(",")]
    return value.transpose([ours.index(dim_name) for dim_name in dim_names]).reshape(shape)
