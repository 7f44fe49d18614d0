"""The device mesh, where weights and activations live on it, and host data as global arrays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from tunix.config import Config, Model, UserError
from tunix.layout import AXES, DATA_AXES, LETTERS, MESH_AXES, Equation, data_shards, resolve, whole_letters

BATCH = PartitionSpec(None, DATA_AXES)  # [A, B, ...]: sequences are split over the data shards
MAX_ROWS = 16  # of a table at the start: what is larger is cut off


@dataclass(frozen=True)
class Strategy:
    """A ZeRO stage: what is split over the fsdp axis between uses, and how long gathered weights live."""

    params: bool
    gradients: bool  # the accumulator of a step
    optimizer: bool
    gathered_for: str  # "block": gathered in each block's forward and again in its backward pass; "step": once


STRATEGIES = {
    #                           params  gradients optimizer
    "full_shard": Strategy(True, True, True, gathered_for="block"),  # ZeRO 3
    "shard_grad_op": Strategy(True, True, True, gathered_for="step"),  # ZeRO 2
    "shard_optimizer": Strategy(False, False, True, gathered_for="step"),  # ZeRO 1
    "no_shard": Strategy(False, False, False, gathered_for="step"),  # plain data parallelism
}


@dataclass(frozen=True)
class Layout:
    """How a run keeps its weights: where (the table of layout.py) and in which dtypes.

    Weights rest in `param` dtype. A matrix product takes them from `gather`: in `compute` dtype, whole on the data
    axes. JAX types such an array `reduced` over the axes that split the batch, so that its cotangent is `unreduced`:
    each device's own part of the gradient, not summed yet.
    """

    strategy: Strategy
    whole: frozenset[str]  # letters of dimensions that every device keeps whole: their axis does not divide them
    param: str
    compute: str
    reduce: str

    def rest(self, equation: Equation, sharded: bool | None = None) -> PartitionSpec:
        """Where a weight lives between uses; with `sharded` given, its gradient or moments, split over fsdp or not."""
        sharded = self.strategy.params if sharded is None else sharded
        return PartitionSpec(*(axis if axis != "fsdp" or sharded else None for axis in self._weight_axes(equation)))

    def activation(self, letters: str) -> PartitionSpec:
        """Where an activation of these dimensions lives."""
        return PartitionSpec(*(self._axis(letter, 1) for letter in letters))

    def gathered(self, equation: Equation) -> PartitionSpec:
        """Where a weight lives while it is used."""
        return PartitionSpec(*self._gathered_axes(equation), reduced=self._gradient_axes(equation))

    def own_part(self, equation: Equation) -> PartitionSpec:
        """Where the gradient of a gathered weight lives before it is summed over devices."""
        return PartitionSpec(*self._gathered_axes(equation), unreduced=self._gradient_axes(equation))

    def gather(self, weight: jax.Array, equation: Equation) -> jax.Array:
        """The weight as a matrix product takes it; a weight that is gathered already passes as it is.

        The cast comes before the gather, so that half the bytes travel; backward, the sum over devices is taken in
        `reduce` dtype and leaves each device its own shard.
        """
        rest, dtype = jax.typeof(weight).sharding.spec, weight.dtype
        if rest == self.gathered(equation):
            return weight

        @jax.custom_vjp
        def gather(weight):
            used = weight if equation.is_quantized else weight.astype(self.use_dtype(equation))
            return reshard(used, self.gathered(equation))

        def backward(_, gradient):
            return (self.summed(gradient, rest).astype(dtype),)

        gather.defvjp(lambda weight: (gather(weight), None), backward)
        return checkpoint_name(gather(weight), "gathered")

    def summed(self, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A gradient summed over devices and laid out as `spec`: first inside a replica, then over replicas."""
        gradient = gradient.astype(self.reduce)
        if "fsdp" in spec:
            gradient = reshard(gradient, PartitionSpec(*spec, unreduced={"dp"}))
        return reshard(gradient, spec)

    def own_kv_head(self, heads: jax.Array, num_local_queries: int) -> jax.Array:
        """Of replicated heads [B, T, K, H], the one [B, T, 1, H] that serves this device's query heads.

        Inside a `shard_map`. There is one, because K divides tp.
        """
        queries_per_head = num_local_queries * jax.lax.axis_size("tp") // heads.shape[2]
        mine = jax.lax.axis_index("tp") * num_local_queries // queries_per_head
        return jax.lax.dynamic_slice_in_dim(heads, mine, 1, axis=2)

    def use_dtype(self, equation: Equation) -> str:
        """Vectors (norm scales, biases) are used in float32, matrices in the compute dtype."""
        return "float32" if equation.is_vector else self.compute

    def _weight_axes(self, equation: Equation) -> list:
        """Vectors are whole on the data axes: too small to be worth a gather."""
        axes = [self._axis(letter, 0) for letter in equation.w]
        return [None if equation.is_vector and axis in DATA_AXES else axis for axis in axes]

    def _gathered_axes(self, equation: Equation) -> list:
        return [None if axis == "fsdp" else axis for axis in self._weight_axes(equation)]

    def _gradient_axes(self, equation: Equation) -> set[str]:
        """Mesh axes over which a gradient is a sum: those that split the dimensions the weight lacks."""
        axes: set[str] = set()
        for letter in "" if equation.is_quantized else equation.batch:
            axis = self._axis(letter, 1)
            axes |= set(axis) if isinstance(axis, tuple) else {axis} if axis else set()
        return axes

    def _axis(self, letter: str, column: int) -> str | tuple[str, ...] | None:
        return None if letter in self.whole else AXES[LETTERS[letter]][column]


def build_layout(cfg: Config, mesh: Mesh) -> Layout:
    return Layout(
        STRATEGIES[cfg.training.sharding_strategy],
        whole=whole_letters(cfg.model.dims, mesh.shape),
        **cfg.training.dtypes,
    )


def build_mesh(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a run; see `device_mesh`."""
    return device_mesh(cfg.model, cfg.distributed.allow_idle_devices, devices)


def axis_sizes(cfg: Model, num_devices: int, allow_idle: bool, which: str = "visible") -> dict[str, int]:
    """Size of every axis of `model.mesh_shape` on so many devices; a shape that does not fit is a `UserError`."""
    try:
        return resolve(cfg.mesh_shape, num_devices, cfg.dims, allow_idle, which)
    except ValueError as error:
        raise UserError(str(error)) from None


def device_mesh(cfg: Model, allow_idle: bool, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh of all axes of `MESH_AXES` in that order, unnamed ones of size 1; neighbours on tp are neighbours in a node.

    Raises:
        UserError: a shape that does not fit the devices or the model, with the nearest that do.
    """
    devices = list(devices or jax.devices())
    sizes = axis_sizes(cfg, len(devices), allow_idle)
    shape = [sizes[axis] for axis in MESH_AXES]
    used = devices[: math.prod(shape)]
    idle_hosts = {device.process_index for device in devices} - {device.process_index for device in used}
    if idle_hosts:
        raise UserError(f"the mesh leaves processes {sorted(idle_hosts)} without a device; start fewer processes")
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES), devices=used)


def local_rows(mesh: Mesh, num_rows: int) -> list[int]:
    """Rows of a batch of `num_rows` sequences that live on this process's devices, in order."""
    rows: set[int] = set()
    sharding = NamedSharding(mesh, PartitionSpec(DATA_AXES))
    for index in sharding.addressable_devices_indices_map((num_rows,)).values():
        assert index is not None
        rows.update(range(*index[0].indices(num_rows)))
    return sorted(rows)


def to_global(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Global arrays [A, B, T] of this process's rows [A, B_local, T]; returns before the copy is done."""
    sharding = NamedSharding(mesh, BATCH)
    share = data_shards(mesh.shape) // len(local_rows(mesh, data_shards(mesh.shape)))

    def put(rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(
            sharding, rows, (rows.shape[0], rows.shape[1] * share, *rows.shape[2:])
        )

    return {name: put(rows) for name, rows in batch.items()}


def device_table(mesh: Mesh) -> list[list[str]]:
    """Rows of device ids: one row for each data shard, one column for each place on tp, the process in brackets."""
    grid = mesh.devices.reshape(-1, mesh.shape["tp"])
    table = [["dp, fsdp", *(f"tp={n}" for n in range(grid.shape[1]))]]
    for shard, row in enumerate(grid[:MAX_ROWS]):
        name = f"{shard // mesh.shape['fsdp']}, {shard % mesh.shape['fsdp']}"
        table.append([name, *(f"{device.id} (process {device.process_index})" for device in row)])
    if len(grid) > MAX_ROWS:
        table.append([f"... {len(grid) - MAX_ROWS} more", *([""] * grid.shape[1])])
    return table


def bytes_per_device(tree: object) -> int:
    """Bytes that one device holds of a tree of arrays or shapes with shardings; all, where there is none."""

    def size(leaf: jax.Array) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def to_main(state: dict[str, Any]) -> dict[str, Any] | None:
    """The state as numpy arrays on process 0, gathered leaf by leaf; None on the others."""

    def gathered(leaf: jax.Array) -> np.ndarray | None:
        whole = multihost_utils.process_allgather(leaf, tiled=True)
        return whole if jax.process_index() == 0 else None

    whole = jax.tree.map(gathered, state)
    return whole if jax.process_index() == 0 else None


def from_main(state: dict[str, Any] | None, abstract: dict[str, Any]) -> dict[str, Any]:
    """The state that process 0 has as numpy arrays, laid out as `abstract` says, bit by bit the same."""

    def spread(wanted: jax.ShapeDtypeStruct, given: np.ndarray | None) -> jax.Array:
        size = math.prod(wanted.shape) * wanted.dtype.itemsize
        mine = np.zeros(size, np.uint8) if given is None else np.frombuffer(given.tobytes(), np.uint8)
        sent = np.asarray(multihost_utils.broadcast_one_to_all(mine))
        whole = np.frombuffer(sent.tobytes(), wanted.dtype).reshape(wanted.shape)
        return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda index: whole[index])

    if state is None:
        return jax.tree.map(lambda wanted: spread(wanted, None), abstract)
    return jax.tree.map(spread, abstract, state)
