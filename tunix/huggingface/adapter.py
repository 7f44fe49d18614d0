"""Low-rank updates between PEFT's files and sharded arrays.

PEFT keeps the two factors of an update x a b * alpha / r as matrices of torch: lora_A [r, in], lora_B [out, r]. So
their place in the files follows from that of the matrix which they update:

    q.w of Llama 3     NAME.weight          "NH,D"
    q.lora.a           NAME.lora_A.weight   "r,D"
    q.lora.b           NAME.lora_B.weight   "NH,r"

Each expert has factors of its own, and the matrices of DoRA have their magnitudes, NAME.lora_magnitude_vector "NH". An
update of PiSSA, a b - a0 b0, is written as one of twice the rank: a and a0 are the rows of lora_A, b and -b0 are the
columns of lora_B.

PEFT writes the factors of all experts of a layer as one matrix where transformers keeps their weights so. They are read
as those of each expert; an adapter that is written has factors for each expert, which PEFT reads too.
"""

import itertools
import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tunix.base.errors import UserError, name_first
from tunix.base.files import read_json
from tunix.config import Model
from tunix.config.layers import EXPERT_PROJECTIONS
from tunix.huggingface.adapter_config import (
    CONFIG,
    MAGNITUDE,
    OTHERWISE,
    PACKED,
    PREFIX,
    WEIGHTS,
    list_packed,
    name_in_class,
)
from tunix.huggingface.family import SCORE
from tunix.huggingface.quantized_tensors import Index, Plain, Stored
from tunix.huggingface.table import Family, Name, find_family
from tunix.huggingface.weights import (
    FLOATS,
    Parameters,
    TensorFiles,
    layers_of,
    list_numbers,
    load_parameter,
    pack,
    shape_in_files,
    warn_of_no_numbers,
)
from tunix.models.layers import named, parameter_name
from tunix.sharding.arrays import replicate, replicate_part
from tunix.sharding.layout import Layout
from tunix.sharding.table import EXPERTS

log = logging.getLogger(__name__)


class FactorPart:
    """A slice of a factor, with zeros behind it up to `shape`."""

    tensors: tuple[Plain, ...] = ()  # read ahead: experts have parts of the same pages of a file

    def __init__(self, tensor: Stored, index: Index, shape: tuple[int, ...]):
        self.tensor, self.index, self.shape, self.dtype = tensor, index, shape, tensor.dtype

    def read(self, index: Index) -> np.ndarray:
        part = self.tensor.read(self.index)
        return np.pad(part, [(0, size - given) for size, given in zip(self.shape, part.shape, strict=True)])[index]


class AdapterFiles(TensorFiles):
    """Tensors of an adapter's folder, under the names of its family's table: each expert has factors of its own."""

    def __init__(self, folder: Path, cfg: Model):
        super().__init__(folder, find_family(cfg.family))
        self.cfg = cfg

    def __enter__(self) -> "AdapterFiles":
        super().__enter__()
        for name in list(self.tensors):
            if packed := PACKED.fullmatch(name):
                self.tensors |= self._split(packed, self.tensors.pop(name))
        if (rank := read_json(self.folder / CONFIG)["r"]) < self.cfg.lora.rank:  # that of gates and what they gate
            for name, tensor in self.tensors.items():
                shape, side = list(tensor.shape), 0 if name.endswith(".lora_A.weight") else 1
                if shape[side] == rank:
                    shape[side] = self.cfg.lora.rank
                    self.tensors[name] = FactorPart(tensor, (slice(None), slice(None)), tuple(shape))
        return self

    def _split(self, packed: re.Match[str], tensor: Stored) -> dict[str, Stored]:
        """Return the factors of each expert: rows of lora_A [X r, in], columns of lora_B [out, r X].

        Gates are the first half of the rows of lora_B, and what they gate the other one.
        """
        modules, num_experts = list_packed(packed, self.family), self.cfg.dims.get(EXPERTS, 1)
        parts: dict[str, Stored] = {}
        for (which, module), expert in itertools.product(enumerate(modules.values()), range(num_experts)):
            if packed["factor"] == "lora_A":
                shape = (tensor.shape[0] // num_experts, tensor.shape[1])
                index = (slice(expert * shape[0], (expert + 1) * shape[0]), slice(None))
            else:
                shape = (tensor.shape[0] // len(modules), tensor.shape[1] // num_experts)
                index = (slice(which * shape[0], (which + 1) * shape[0]), slice(expert, None, num_experts))
            name = f"{module.format(packed['layer'], expert)}.{packed['factor']}.weight"
            parts[name] = FactorPart(tensor, index, shape)
        return parts

    @property
    def paths(self) -> list[Path]:
        return [self.folder / WEIGHTS]

    def _canonical(self, name: str) -> str:
        return super()._canonical(name_in_class(name))


def check_adapter(folder: Path, cfg: Model, weights: Parameters) -> None:
    """Compare names and shapes of an adapter's tensors with those of the model's updates; reads headers alone.

    Raises:
        UserError: a tensor is missing, of another shape, or not of floats.
    """
    with AdapterFiles(folder, cfg) as files:
        left_out = _find_matrices_left_out(files, cfg, weights)
        requested = {
            name.tensor.format(*numbers): shape_in_files(name, cfg.dims)
            for path, name, _ in _list_factors(cfg, weights)
            if _find_matrix(path) not in left_out
            for numbers in list_numbers(path, name, cfg)
        }
        requested |= {name.tensor: shape_in_files(name, cfg.dims) for _, name, _ in _list_heads(files, weights)}
        if missing := sorted(requested.keys() - files.tensors.keys()):
            raise UserError(
                f"{folder} lacks {name_first(missing)}; every layer must have the same updates, or {OTHERWISE}"
            )
        if extra := sorted(files.tensors.keys() - requested.keys()):
            base = str(read_json(folder / CONFIG).get("base_model_name_or_path"))
            raise UserError(
                f"{folder} has {name_first(extra)}, of a layer that the base does not have; give the base that the "
                f"adapter was made for: its {CONFIG} says base_model_name_or_path={base:.200}"
            )
        for name, shape in requested.items():
            stored = files.tensors[name]
            if stored.shape != shape:
                raise UserError(
                    f"{folder}: tensor {name} has shape {list(stored.shape)}, but the base weight needs {list(shape)}; "
                    "is it an adapter of another model?"
                )
            if stored.dtype not in FLOATS:
                raise UserError(f"{folder}: {name} holds {stored.dtype}, not {', '.join(FLOATS)}")


def remark_on_base(made_for: object, init_from: str | None) -> str:
    """Return a remark for an adapter that was made for a model of another name than its base; names may differ by an
    owner, a folder above and what stands behind them (Llama-3.2-1B, Llama-3.2-1B-bnb-4bit)."""
    if not isinstance(made_for, str) or not made_for or init_from is None:
        return ""
    # A snapshot in the cache of the hub is models--OWNER--NAME/snapshots/COMMIT.
    hub_names = [re.search(r"models--.+?--([^/]+)", name) for name in (made_for, init_from)]
    paths = (made_for, init_from)
    one, two = (found[1] if found else Path(path).name for found, path in zip(hub_names, paths, strict=True))
    if one.lower() in two.lower() or two.lower() in one.lower():
        return ""
    return (
        f"the adapter was made for base_model_name_or_path={made_for:.200}, and its base is {init_from}: with other "
        "weights the answers are wrong"
    )


def _find_matrix(path: str) -> str:
    """Return the path of the matrix, like `linear_blocks.attention.q`, that a factor updates."""
    return path.rpartition(".lora.")[0]


def _find_matrices_left_out(files: TensorFiles, cfg: Model, weights: Parameters) -> set[str]:
    """Return the matrices that an adapter updates in no layer of their kind; none with DoRA, which has norms of all.

    PEFT updates modules by name: q_proj is a part of layers with attention, and layers with linear attention have
    another name for it, which the adapter may not have. For us both are `attention.q`.
    """
    found: dict[str, bool] = {}
    for path, name, _ in _list_factors(cfg, weights):
        tensors = {name.tensor.format(*numbers) for numbers in list_numbers(path, name, cfg)}
        matrix = _find_matrix(path)
        found[matrix] = found.get(matrix, cfg.lora.use_dora) or not tensors.isdisjoint(files.tensors)
    return {matrix for matrix, is_there in found.items() if not is_there}


def _list_heads(files: TensorFiles, weights: Parameters) -> list[tuple[str, Name, Any]]:
    """Return the head of scores with its place in an adapter's files, if the model and the files have one."""
    return [
        (path, SCORE[path], weight)
        for path, weight in named(weights)
        if path in SCORE and SCORE[path].tensor in files.tensors
    ]


def write_updates(
    params: Parameters, folder: Path, cfg: Model, weights: Parameters, layout: Layout, mesh: Mesh
) -> dict[str, Any]:
    """Return parameters whose low-rank updates, None in `params`, are those of an adapter; see `load_weights`.

    The head of an adapter that gives scores takes the place of that of `params`.

    A matrix that the adapter does not update has factors of 0, which stay so in training: each has the other as its
    gradient's factor.
    """
    check_adapter(folder, cfg, weights)
    if remark := remark_on_base(read_json(folder / CONFIG).get("base_model_name_or_path"), cfg.init_from):
        log.warning("%s: %s", folder, remark)
    updates: dict[str, jax.Array] = {}
    with AdapterFiles(folder, cfg) as files:
        left_out = _find_matrices_left_out(files, cfg, weights)
        load = partial(load_parameter, files, cfg, lambda equation: NamedSharding(mesh, layout.stored(equation)))
        for path, name, weight in _list_factors(cfg, weights):
            if _find_matrix(path) in left_out:
                sharding = NamedSharding(mesh, layout.stored(weight.equation))
                updates[path] = jnp.zeros(weight.shape, weight.dtype, device=sharding)
            else:
                updates[path] = load(name, weight.equation, weight.dtype, layers_of(path, cfg))
        for path, name, weight in _list_heads(files, weights):
            updates[path] = load(name, weight.equation, weight.dtype, layers_of(path, cfg))
    warn_of_no_numbers(folder, updates)
    return jax.tree.map_with_path(
        lambda path, leaf: updates.get(parameter_name(path), leaf), params, is_leaf=lambda leaf: leaf is None
    )


def gather_adapter(
    params: Parameters, cfg: Model, weights: Parameters, dtype: str
) -> tuple[dict[str, np.ndarray], set[str]]:
    """Return the tensors of an adapter with PEFT's names, and the last names of the modules that they update.

    They have PEFT's shapes: A [r, in] and B [out, r] of a matrix [out, in] of the files.

    Raises:
        UserError: the family keeps several projections in one tensor, or PEFT would leave out an update.
    """
    tensors, modules, family = {}, set(), find_family(cfg.family)
    leaves, of_experts = dict(named(params)), _list_expert_modules(family)
    for path, name, weight in _list_factors(cfg, weights):
        if name.fused or (EXPERTS in weight.equation.w) > (EXPERTS in name.numbered):
            raise UserError(
                f"{cfg.family} keeps several projections in one tensor, which an adapter cannot follow; "
                "set merge_lora=true"
            )
        module = name.tensor.partition(".lora_")[0].rpartition(".")[2]
        if module in of_experts and EXPERTS not in name.numbered:
            raise UserError(
                f"PEFT takes updates of {module} for those of experts alone in a {cfg.family}, and drops those of its "
                "other MLPs; set merge_lora=true"
            )
        modules.add(module)
        layers, start = layers_of(path, cfg), leaves.get(f"{path}_start")
        for numbers in list_numbers(path, name, cfg):
            at = (layers.index(numbers[0]), *numbers[1:])
            parts = [pack(np.asarray(replicate_part(leaves[path], *at)), name, weight)]
            if start is not None:
                sign = 1 if path.endswith(".a") else -1
                parts.append(sign * pack(np.asarray(replicate_part(start, *at)), name, weight))
            factor = np.concatenate(parts, 0 if path.endswith(".a") else -1).astype(jnp.dtype(dtype))
            tensors[PREFIX + family.module_name(name.tensor.format(*numbers))] = np.ascontiguousarray(factor)
    return tensors, modules


def _list_expert_modules(family: Family) -> set[str]:
    """Return the last names of the modules of one expert: PEFT looks for modules of these names in experts alone."""
    published = family.as_in(None)
    matrices = [published.names.get(f"blocks.{projection}.w") for projection in EXPERT_PROJECTIONS]
    return {name.tensor.split(".")[-2] for name in matrices if name is not None and EXPERTS in name.numbered}


def gather_score(params: Parameters) -> np.ndarray:
    """Return the head of scores [v, D], as torch has it."""
    return np.asarray(replicate(params["score"]["w"])).T


def _list_factors(cfg: Model, weights: Parameters) -> list[tuple[str, Name, Any]]:
    """Return the parameters of low-rank updates with their places in an adapter's files."""
    family, factors = find_family(cfg.family), []
    for path, weight in named(weights):
        matrix, is_factor, which = path.rpartition(".lora.")
        if not is_factor or which.endswith("_start"):
            continue
        updated = family.name(f"{matrix}.w")
        assert updated is not None, path
        module = updated.tensor.removesuffix(".weight")
        # A factor has one side of its matrix: "NH,D" of q has the groups NH and D, and of them lora.a, "LDr", has D.
        side = next(group for group in updated.dims.split(",") if set(group) <= set(weight.equation.w))
        if which == "magnitude":
            factors.append((path, replace(updated, tensor=f"{module}.{MAGNITUDE}", dims=side, fused_dim=0), weight))
            continue
        if which == "a":  # weights in one tensor have the same inputs: PEFT's one lora_A is the first factor of each
            name = Name(f"{module}.lora_A.weight", f"r,{side}")
        else:
            name = replace(updated, tensor=f"{module}.lora_B.weight", dims=f"{side},r", fused_dim=0)
        factors.append((path, name, weight))
    return factors
