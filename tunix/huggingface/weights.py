"""Sharded arrays out of safetensors files under Hugging Face's names, a slice at a time; and into such files."""

import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from stat import S_IMODE
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tunix.base.errors import UserError, name_first
from tunix.base.files import is_plain, read_json
from tunix.config import Model
from tunix.huggingface.config_json import MTP_DEPTH, find_quantization, read_labels, read_num_rows
from tunix.huggingface.family import SCORE
from tunix.huggingface.quantized_tensors import Enlarged, Integers, MappedFile, Plain, Stored, join_packed, join_scales
from tunix.huggingface.table import Family, Name, find_family
from tunix.models.layers import named, parameter_name
from tunix.models.quantized import stack_quantized
from tunix.processes import peers
from tunix.processes.peers import find_blind
from tunix.sharding.arrays import Index, fill, replicate, replicate_part
from tunix.sharding.layout import Layout
from tunix.sharding.table import EXPERTS, LAYERS, Equation

log = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BASE = "model."  # begins names in a class with a head; a model that AutoModel has saved has none, and no beginning
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class TensorFiles:
    """Tensors of a model's folder, under the names of its family's table. A context: it closes the files at its end.

    Of a family that has two sets of names, `family` becomes the one with the names of these files. Tables have
    `num_rows` rows, or as many as the files if it is None. Rows that the files lack are the mean of the others
    (`quantized_tensors.Enlarged`).
    """

    def __init__(self, folder: Path, family: Family, num_rows: int | None = None):
        self.folder, self.family, self.num_rows, self._open = folder, family, num_rows, ExitStack()
        self.tensors: dict[str, Stored] = {}

    def __enter__(self) -> "TensorFiles":
        tensors: dict[str, Plain] = {}
        for path in self.paths:
            try:
                file = self._open.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not a safetensors file: {error}") from None
            open_file = cache(partial(MappedFile, path))  # mapped when its first tensor is read
            for name in file.keys():  # noqa: SIM118
                if (usual := self._canonical(name)) in tensors:
                    raise UserError(f"{self.folder} has {usual} twice, again in {path.name}; write each tensor once")
                tensors[usual] = Plain(file, name, open_file)
        table = self.family.name("embedding.table")
        if table is not None and table.tensor not in tensors and table.tensor.removeprefix(BASE) in tensors:
            tensors = {BASE + name: tensor for name, tensor in tensors.items()}
        try:
            quantization = find_quantization(self.folder)
            self.tensors = join_scales(join_packed(tensors, quantization), quantization.block_sizes)
        except ValueError as error:
            raise UserError(f"{self.folder}: {error}") from None
        self.family = self.family.as_in(self.tensors)
        if self.num_rows is not None and (in_files := read_num_rows(self.folder, self.family)) < self.num_rows:
            # Tables have as many rows in the files as their config.json says.
            for name in self.family.tables & self.tensors.keys():
                if self.tensors[name].shape[:1] == (in_files,):
                    self.tensors[name] = Enlarged(self.tensors[name], self.num_rows)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self.tensors.clear()  # a file stays mapped until the last view of it is gone

    @property
    def paths(self) -> list[Path]:
        """The files that hold the tensors."""
        return weight_files(self.folder)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a tensor as numbers; of a tensor of numbers it is a view of the mapped file."""
        for part in self.tensors[name].tensors:
            part.prefetch()
        return self.tensors[name].read(index)

    def _canonical(self, name: str) -> str:
        """Return the name in the family's table of a tensor in the files."""
        return self.family.usual_name(name)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model.

    Raises:
        UserError: there are none, or one that the index names is missing.
    """
    if (folder / SINGLE).is_file():  # transformers takes it, too, where there is an index beside it
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"{folder / INDEX} has no weight_map of tensors and files")
        names = sorted({*weight_map.values()})
        if outside := [name for name in names if not is_plain(name) or "/" in name]:
            raise UserError(f"{folder / INDEX} names {outside[0]}, which is no file of this folder")
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise UserError(f"{folder} lacks {', '.join(missing)}, named in {INDEX}")
        return [folder / name for name in names]
    # A pickle names functions that are called while it is loaded.
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise UserError(
            f"{folder} has its weights as pickles ({', '.join(pickles[:3])}), which can run code and are not read; "
            "save them as safetensors"
        )
    raise UserError(f"{folder} has no {SINGLE} and no {INDEX}")


# The way out for a folder of tunix.export whose files are not those of its digests.
CHANGED = "export it again, or remove its digests.json if you have changed the file on purpose"
SCORE_TENSORS = {name.tensor for name in SCORE.values()}
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names what weights are read from
Parameters = Mapping[str, Any]  # a tree of arrays, or of `state.Weight`
WITHOUT_MTP = "set model.mtp=null, or guess_by=prompt_lookup"
PIECE = 2**20  # numbers of a tensor that are copied to the devices of this process at one time


def load_weights(folder: Path, cfg: Model, weights: Parameters, layout: Layout, mesh: Mesh) -> dict[str, Any]:
    """Load the parameters of a model, laid out at rest. What the files do not have is None: low-rank updates, and
    scores of a language model.

    `weights` is the tree of `state.Weight`. Each process reads the slices of its own devices and nothing else. It reads
    matrices that are to be quantized one layer at a time. Tables of fewer tokens than the model has get rows with the
    mean of theirs.

    Raises:
        UserError: tensors that are missing, too many, of another shape, or no floats: they are named.
    """
    check_weights(folder, cfg, weights)
    _check_copies(folder, cfg)
    loaded: dict[str, jax.Array] = {}
    names: dict[str, str] = {}  # of tensors, by the path of their parameter
    with TensorFiles(folder, find_family(cfg.family), cfg.vocab_size) as files:
        load = partial(load_parameter, files, cfg, lambda equation: NamedSharding(mesh, layout.stored(equation)))
        try:
            for path, name, weight in list_in_files(weights, files.family, cfg):
                layers = layers_of(path, cfg)
                if name.tensor in SCORE_TENSORS and name.tensor not in files.tensors:
                    continue  # of a language model, whose head of scores is new
                names[path] = name.tensor
                if weight.equation.is_quantized:
                    equation = weight.equation.dequantized()
                    matrices = (load(name, equation, "float32", layers[n : n + 1]) for n in range(len(layers)))
                    loaded[path], loaded[f"{path}_scale"] = stack_quantized(matrices, equation, cfg, layout)
                else:
                    loaded[path] = load(name, weight.equation, weight.dtype, layers)
        except SafetensorError as error:
            raise UserError(f"{folder}: {error}") from None
    warn_of_no_numbers(folder, {names.get(path, path): array for path, array in loaded.items()})
    return jax.tree.map_with_path(lambda path, _: loaded.get(parameter_name(path)), weights)


def warn_of_no_numbers(folder: Path, arrays: dict[str, jax.Array]) -> None:
    """Log the names of arrays with NaN or infinity, which may be a damaged file or a run that has diverged.

    It is no error: a row of a table whose token no text has changes nothing.
    """
    floats = {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
    names = [name.replace("{}", "*") for name, is_finite in _are_finite(floats).items() if not is_finite]
    if names and peers.is_main():
        log.warning("%s has numbers that are not finite (NaN or infinity): %s", folder, name_first(names))


@jax.jit
def _are_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    # NaN - NaN and infinity - infinity are NaN. On CPUs `isfinite` takes three times as long, and memory.
    return jax.tree.map(lambda array: jnp.sum(array - array, dtype="float32") == 0, arrays)


def list_in_files(weights: Parameters, family: Family, cfg: Model) -> list[tuple[str, Name, Any]]:
    """Return the parameters that have a name in the family's table: all but low-rank updates and scales."""
    all_names = [(path, family.name(path), weight) for path, weight in named(weights)]
    return [
        (path, replace(name, tensor=_after_layers(name.tensor, cfg)), weight)
        for path, name, weight in all_names
        if name is not None
    ]


def _after_layers(text: str, cfg: Model) -> str:
    """Return the name of a tensor, or a pattern, with the number of the layer behind the last one in it."""
    return text.replace("{num_layers}", str(cfg.num_layers))


def _list_copies(family: Family, cfg: Model) -> dict[str, str]:
    """Return the tensors that have a parameter of a model with `mtp` a second time, with its path."""
    copies = family.mtp_copies if cfg.mtp is not None else {}
    return {_after_layers(tensor, cfg): "embedding.table" if cfg.tied_head else path for tensor, path in copies.items()}


def _check_copies(folder: Path, cfg: Model) -> None:
    """Raise `UserError` where a table that the files have a second time is not the one that the model computes with.

    These are the tables of the layer of `model.mtp`, and a head beside a table of embeddings that is the head too.
    """
    is_head = cfg.tied_head and cfg.labels is None
    if cfg.mtp is None and not is_head:
        return
    with TensorFiles(folder, find_family(cfg.family)) as files:
        copies = [
            (tensor, path, f"model.mtp shares this table; {WITHOUT_MTP}")
            for tensor, path in _list_copies(files.family, cfg).items()
        ]
        if is_head and (head := files.family.name("head.table")) is not None:
            reason = "tie_word_embeddings=true makes them one; set tie_word_embeddings=false in config.json"
            copies.append((head.tensor, "embedding.table", reason))
        for tensor, path, reason in copies:
            name = files.family.name(path)
            if name is None or tensor not in files.tensors:
                continue
            rows, width = files.tensors[name.tensor].shape
            parts = [(slice(n, n + PIECE // width + 1), slice(0, width)) for n in range(0, rows, PIECE // width + 1)]
            is_equal = files.tensors[tensor].shape == (rows, width) and all(
                np.array_equal(files.read(tensor, part), files.read(name.tensor, part)) for part in parts
            )
            if not is_equal:
                raise UserError(f"{folder}: {tensor} is not equal to {name.tensor}, and {reason}")


def layers_of(path: str, cfg: Model) -> tuple[int, ...]:
    """Return the numbers of the layers that a stacked parameter holds; of another parameter, none."""
    if cfg.vision is not None and path.startswith("vision.tower.blocks."):
        return tuple(range(cfg.vision.num_layers))
    if path.startswith("mtp.blocks."):
        return (cfg.num_layers if find_family(cfg.family).mtp_block is None else 0,)
    if cfg.vision is not None and path.startswith("vision.projector.deepstack."):
        return tuple(range(len(cfg.vision.deepstack_layers)))
    return cfg.stacks.get(path.partition(".")[0], ())


def list_numbers(path: str, name: Name, cfg: Model) -> list[tuple[int, ...]]:
    """Return the numbers in the names of a parameter's tensors: (), or (layer,), or (layer, expert) of each."""
    ranges: dict[str, Sequence[int]] = {LAYERS: layers_of(path, cfg), EXPERTS: range(cfg.dims.get(EXPERTS, 0))}
    return list(itertools.product(*(ranges[dim_name] for dim_name in name.numbered)))


def shape_in_files(name: Name, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a tensor in the files: "NH,D" is [num_heads * head_dim, embed_dim].

    Raises:
        UserError: the tensor has a dimension that the model has not; a family of a user's own may say so.
    """
    if unknown := [dim_name for dim_name in name.dims.replace(",", "") if dim_name not in dims]:
        raise UserError(
            f"{name.tensor} has dims={name.dims} in its family; the model has no dimension {unknown[0]}, "
            f"but {', '.join(dims)}"
        )
    shape = list_sizes(name.dims.split(","), dims)
    if name.fused:
        shape[name.fused_dim] = sum(list_sizes(name.fused, dims))
    return tuple(shape)


def list_sizes(groups: Iterable[str], dims: Mapping[str, int]) -> list[int]:
    """Return the size of each group of dimensions: num_heads * head_dim for "NH"."""
    return [math.prod(dims[dim_name] for dim_name in group) for group in groups]


def check_weights(folder: Path, cfg: Model, weights: Parameters) -> None:
    """Compare the tensors of the files with those that the parameters need; reads only the headers of the files.

    Raises:
        UserError: a tensor is missing, not needed, of another shape, or not of floats.
    """
    if cfg.mtp is not None and (depth := read_json(folder / "config.json").get(MTP_DEPTH, 1)) != 1:
        raise UserError(f"{folder}/config.json: {MTP_DEPTH}={depth}, and model.mtp is 1 layer; {WITHOUT_MTP}")
    with TensorFiles(folder, find_family(cfg.family), cfg.vocab_size) as files:
        family = files.family
        tensors, constants = files.tensors, list_constants(family, cfg)
        requested = {
            name.tensor.format(*numbers): shape_in_files(name, cfg.dims)
            for path, name, _ in list_in_files(weights, family, cfg)
            for numbers in list_numbers(path, name, cfg)
        }
        ignored = [*family.ignored, *map(re.escape, _list_copies(family, cfg))]
        if cfg.mtp is None and family.mtp_tensors is not None:
            ignored.append(_after_layers(family.mtp_tensors, cfg))
        # Old versions of transformers saved the frequencies of RoPE. Some files have a tied head a second time.
        ignored += [*map(re.escape, constants), r".*rotary_emb\.inv_freq$", *([r"lm_head\."] if cfg.tied_head else [])]
        # No layer uses the keys and values of layers that take those of earlier layers.
        unused = [family.name(f"blocks.attention.{part}") for part in ("k.w", "v.w", "k_norm.scale")]
        shared = [layer for layer in range(cfg.num_layers) if cfg.is_shared(layer)]
        ignored += [re.escape(name.tensor.format(layer)) for name in unused if name for layer in shared]
        if cfg.labels is not None:  # a language model has logits, and no scores: step 0 makes them
            ignored.append(r"lm_head\.")
            if read_labels(read_json(folder / "config.json")) is None:
                requested = {name: shape for name, shape in requested.items() if name not in SCORE_TENSORS}
        if missing := sorted(requested.keys() - tensors.keys()):
            is_further = cfg.mtp is not None and re.match(_after_layers(family.mtp_tensors or "$", cfg), missing[0])
            way_out = f"; {WITHOUT_MTP}" if is_further else ""
            if (head := family.name("head.table")) is not None and missing == [head.tensor]:
                way_out = (
                    "; AutoModel is saved without this head, which vectors (task=embed) do not need: set "
                    "tie_word_embeddings=true in its config.json, and take no logits of it"
                )
            raise UserError(f"{folder} lacks {name_first(missing)}{way_out}")
        extra = sorted(tensors.keys() - requested.keys() - _list_zero_biases(tensors))
        if extra := [name for name in extra if not any(re.match(pattern, name) for pattern in ignored)]:
            raise UserError(f"{folder} has {name_first(extra)}, which a {cfg.family} of its config.json does not have")
        for name, number in constants.items():
            # A file in bfloat16 has three digits of the number.
            if name not in tensors:
                continue
            value = files.read(name, ())
            if value.size != 1 or not math.isclose(number, value.item(), rel_tol=0.01):
                raise UserError(f"{folder}: {name} is {value}, and layers of a {cfg.family} compute with {number}")
        for name, shape in requested.items():
            stored, dtype = tensors[name].shape, tensors[name].dtype
            if stored != shape:
                raise UserError(f"{folder}: {name} is {list(stored)}, its config.json says {list(shape)}")
            if dtype not in FLOATS:
                raise UserError(f"{folder}: {name} holds {dtype}, not {', '.join(FLOATS)}; dequantize it first")


def _list_zero_biases(tensors: Mapping[str, Stored]) -> set[str]:
    """Return the biases that old files of gptq have beside each matrix, all of them 0."""
    biases = {f"{name.removesuffix('weight')}bias" for name, tensor in tensors.items() if isinstance(tensor, Integers)}
    return {name for name in biases & tensors.keys() if not tensors[name].read(()).any()}


def list_constants(family: Family, cfg: Model) -> dict[str, float]:
    """Return the tensors of the files that are numbers which our layers have in their code."""
    return {tensor.format(n): value for n in range(cfg.num_layers) for tensor, value in family.constants.items()}


def load_parameter(
    files: TensorFiles,
    cfg: Model,
    find_sharding: Callable[[Equation], NamedSharding],
    name: Name,
    equation: Equation,
    dtype: Any,
    layers: Sequence[int],
) -> jax.Array:
    """Load a parameter, laid out as `find_sharding` says; of dimension L, only the layers of `layers`.

    The files have one tensor for each layer (and expert), with dimensions grouped and in another order than ours. A
    piece of a tensor is a view of the mapped file, whose strides are turned into our order while it is copied:

        q.w of Llama 3    files: "NH,D" [num_heads * head_dim, embed_dim]    ours: "LDNH"
        a piece           rows of some heads, seen as [n, H, D]              copied as [1, D, n, H] to the device
    """
    sharding = find_sharding(equation)
    ours, dim_names = equation.in_files, name.dims.replace(",", "")
    sizes = cfg.dims | {LAYERS: len(layers)}
    shape = tuple(sizes[dim_name] for dim_name in ours)
    order = [dim_names.index(dim_name) for dim_name in ours if dim_name not in name.numbered]
    new_dims = tuple(ours.index(dim_name) for dim_name in name.numbered)
    numbers: dict[str, Sequence[int]] = {LAYERS: layers, EXPERTS: range(cfg.dims.get(EXPERTS, 0))}

    def part(index: Index) -> np.ndarray:
        ranges = {dim_name: (each.start, each.stop) for dim_name, each in zip(ours, index, strict=True)}
        requested = [numbers[dim_name][slice(*ranges[dim_name])] for dim_name in name.numbered]
        slices, unpacked, within = _find_slices(name, cfg.dims, ranges)
        entries = ranges[name.dims.split(",")[name.fused_dim][0]]
        views = []
        for which in itertools.product(*requested):
            tensor = name.tensor.format(*which)
            stored = files.read(tensor, slices)
            if name.interleaved:
                stored = _take_entries(stored, name, cfg.dims, entries)
            views.append(stored.reshape(unpacked)[within].transpose(order))
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
) -> tuple[tuple[slice, ...], list[int], tuple[slice, ...]]:
    """Return the slice of a tensor in the files that has these ranges of our dimensions, its shape by letter, and the
    ranges within that shape: of a group, as NH, a slice has whole entries of the first letter."""
    slices, unpacked, within = [], [], []
    for index, group in enumerate(name.dims.split(",")):
        inner = math.prod(dims[dim_name] for dim_name in group[1:])
        begin = sum(list_sizes(name.fused, dims)[: name.part]) if index == name.fused_dim else 0
        first, last = ranges[group[0]]
        if name.interleaved and index == name.fused_dim:
            # Rows of up[2:4], in  gate 0 | up 0 | gate 1 | up 1 | ...: those of entries 2 and 3 of both, rows 4 to 7. A
            # range that begins or ends within an entry takes all of it; `_take_entries` cuts it.
            rows = entry_sizes(name, dims)
            local, of_all = rows[name.part], sum(rows)
            slices.append(slice(first * inner // local * of_all, math.ceil(last * inner / local) * of_all))
        else:
            slices.append(slice(begin + first * inner, begin + last * inner))
        unpacked += [last - first, *(dims[dim_name] for dim_name in group[1:])]
        within += [slice(None), *(slice(*ranges[dim_name]) for dim_name in group[1:])]
    return tuple(slices), unpacked, tuple(within)


def entry_sizes(name: Name, dims: Mapping[str, int]) -> list[int]:
    """Return how many rows an entry has in each of the weights that are interleaved."""
    return [size // dims[name.interleaved] for size in list_sizes(name.fused, dims)]


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


def save_weights(
    folder: Path, params: Parameters, cfg: Model, weights: Any, dtype: str, shard_gb: float, like: Path | None = None
) -> int:
    """Write `params` as safetensors files of at most `shard_gb` GB, with an index if there are several.

    Names are those of the files in the folder `like`, None for those of published files. Returns the bytes of all
    tensors. Files are written in rounds: in a round, each process that sees the folder writes one file, whose tensors
    are all that its host has at that time. Every process calls this.
    """
    family = find_family(cfg.family).as_in(None)
    if like is not None:
        with TensorFiles(like, find_family(cfg.family)) as there:
            family = there.family
    tensors = list_tensors(params, cfg, weights, family)
    size = sum(math.prod(shape) for _, shape, _ in tensors) * jnp.dtype(dtype).itemsize
    files: list[list[Any]] = []
    budget = 0.0
    for tensor in tensors:
        num_bytes = math.prod(tensor[1]) * jnp.dtype(dtype).itemsize
        if not files or num_bytes > budget:
            files.append([])
            budget = shard_gb * 1e9
        files[-1].append(tensor)
        budget -= num_bytes
    names = [SINGLE]
    if len(files) > 1:
        names = [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
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
        made = {name: make(dtype, is_local) for name, _, make in tensors}  # every process takes part
        local |= made if is_local else {}

    def write() -> None:
        if local:
            for name, tensor in local.items():
                check_range(name, tensor)
            path = folder / files[jax.process_index()][0]
            try:
                save_tensors(local, path, {"format": "pt"})
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} cannot be written: {error}") from None

    peers.together(write, "writing weights")


def save_tensors(tensors: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
    """Write a file of safetensors with the permissions of any new file; the library lets its owner alone read it."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    if path.stat().st_mode != mode:  # disks without permissions do not let them be changed
        path.chmod(S_IMODE(mode))


def check_range(name: str, tensor: np.ndarray) -> None:
    """Raise `UserError` for numbers that float16 does not have: they would be infinite."""
    if tensor.dtype == np.float16 and np.isinf(tensor).any():
        raise UserError(f"dtype=float16: {name} has numbers above 65504, the largest of float16; take dtype=bfloat16")


def list_tensors(
    params: Parameters, cfg: Model, weights: Any, family: Family | None = None
) -> list[tuple[str, tuple[int, ...], Any]]:
    """Return name, shape and a function for each tensor in the files, ordered by layer.

    The function of (dtype, is_local) gathers the tensor, with all processes, and returns it, None without `is_local`.
    """
    family = family or find_family(cfg.family)
    chunks_of: dict[str, list[Any]] = {}
    leaves = dict(named(params))
    if nameless := [path for path in leaves if ".lora." not in path and family.name(path) is None]:
        raise UserError(f"model.family={cfg.family} has no name for {name_first(nameless)}, which its parts have")
    in_files = list_in_files(weights, family, cfg)
    for tensor, copied in _list_copies(family, cfg).items():
        in_files += [(path, replace(name, tensor=tensor), each) for path, name, each in in_files if path == copied]
    for path, name, weight in in_files:
        layers = layers_of(path, cfg)
        for numbers in list_numbers(path, name, cfg):
            # Layer 7 may be the third of its stack: `numbers` are those in the tensor's name, `at` is the index in
            # the stacked parameter.
            at = (layers.index(numbers[0]), *numbers[1:]) if numbers else ()
            chunks_of.setdefault(name.tensor.format(*numbers), []).append((numbers, at, name, leaves[path], weight))

    def make(parts: list[Any], dtype: str, is_local: bool) -> np.ndarray | None:
        values = [replicate_part(leaf, *at) if at else replicate(leaf) for _, at, _, leaf, _ in parts]
        if not is_local:
            return None
        chunks = [
            # The router's bias moves by steps that 16 bits do not resolve.
            pack(np.asarray(value), name, weight).astype("float32" if weight.equation.is_choice else dtype)
            for value, (_, _, name, _, weight) in zip(values, parts, strict=True)
        ]
        return np.ascontiguousarray(_fuse(chunks, parts[0][2], cfg.dims))

    # A function for each tensor, because all tensors at once would not fit into the memory of a host.
    made: list[tuple[str, tuple[int, ...], Any]] = []
    # By layer, the first of the numbers (layer,) or (layer, expert); tensors of no layer have () and come first.
    for tensor, parts in sorted(chunks_of.items(), key=lambda item: item[1][0][0][:1]):
        parts.sort(key=lambda part: part[2].part)
        made.append((tensor, shape_in_files(parts[0][2], cfg.dims), partial(make, parts)))
    for tensor, number in list_constants(family, cfg).items():
        made.append((tensor, (), lambda dtype, _, number=number: np.asarray(number, jnp.dtype(dtype))))
    return made


def _fuse(chunks: list[np.ndarray], name: Name, dims: Mapping[str, int]) -> np.ndarray:
    """Return the weights of one tensor one after the other, or entry by entry."""
    dim, shape = name.fused_dim, chunks[0].shape
    if not name.interleaved:
        return np.concatenate(chunks, dim)
    rows = entry_sizes(name, dims)
    by_entry = [x.reshape(*shape[:dim], -1, local, *shape[dim + 1 :]) for x, local in zip(chunks, rows, strict=True)]
    return np.concatenate(by_entry, dim + 1).reshape(*shape[:dim], -1, *shape[dim + 1 :])


def pack(value: np.ndarray, name: Name, weight) -> np.ndarray:
    """Return one layer of a parameter (of one expert) with the dimensions that the files have.

    `value` has those of its equation without layers and experts, like [D, N, H]; a matrix of the files is [out, in].
    """
    ours = "".join(dim_name for dim_name in weight.equation.in_files if dim_name not in name.numbered)
    dim_names = name.dims.replace(",", "")
    shape = list_sizes(name.dims.split(","), dict(zip(ours, value.shape, strict=True)))
    return value.transpose([ours.index(dim_name) for dim_name in dim_names]).reshape(shape)
