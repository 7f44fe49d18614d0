"""The device mesh, and functions that are mapped over the stages of a pipeline."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import api
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from tunix.base.errors import UserError
from tunix.sharding.mesh_shape import MeshShape, resolve, token_shards
from tunix.sharding.table import axis_names, data_axes, keeping_axes, token_axes

MAX_ROWS = 16  # of a table in the start report; longer ones are cut off


def device_mesh(
    mesh_shape: MeshShape, dims: Mapping[str, int], allow_idle: bool, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Return a mesh of all axes of the table, outermost first, unnamed ones of size 1.

    Neighbours on the last axis are neighbours in a node. `dims` are the sizes of dimensions by letter.

    Raises:
        UserError: a shape that does not fit the devices or the model, with the nearest that do.
    """
    devices = list(devices or jax.devices())
    sizes = resolve(mesh_shape, len(devices), dims, allow_idle)
    names = axis_names()
    shape = [sizes[axis] for axis in names]
    used = devices[: math.prod(shape)]
    # A device may be idle, but no process: each takes part in collectives and waits for the others at barriers.
    idle_hosts = {device.process_index for device in devices} - {device.process_index for device in used}
    if idle_hosts:
        raise UserError(f"the mesh leaves processes {sorted(idle_hosts)} without a device; start fewer processes")
    return jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(names), devices=used)


def whole_sequences(mesh: Mesh | AbstractMesh) -> Any:
    """Return a mesh of the same devices on which each device has whole sequences: for one token after the other.

    The devices of the axes that split tokens join the first axis that keeps weights. Where these axes are neighbours
    in the table, weights at rest stay on their devices: eight parts over fsdp=2 x cp=4 are those over fsdp=8.
    """
    if token_shards(mesh.shape) == 1:
        return mesh
    names, inner, outer = mesh.axis_names, token_axes(), keeping_axes()[0]
    sizes = dict(mesh.shape) | dict.fromkeys(inner, 1) | {outer: mesh.shape[outer] * token_shards(mesh.shape)}
    shape = tuple(sizes[axis] for axis in names)
    if isinstance(mesh, AbstractMesh):
        return mesh.update(axis_sizes=shape)
    # Several axes become one: the inner ones are put behind the outer one, and the reshape joins them.
    order = [axis for axis in names if axis not in inner]
    index = order.index(outer) + 1
    order[index:index] = inner
    devices = mesh.devices.transpose([names.index(axis) for axis in order]).reshape(shape)
    return Mesh(devices, names, axis_types=mesh.axis_types)


def device_table(mesh: Mesh) -> list[list[str]]:
    """Return a table of device ids, the process in brackets.

    It has a row for each data shard, and a column for each place in a shard. Axes of size 1 are left out:

        fsdp  tp=0           tp=1                fsdp  device
        0     0 (process 0)  1 (process 0)       0     0 (process 0)
        1     2 (process 1)  3 (process 1)       1     1 (process 0)
    """
    shard_axes = tuple(axis for axis in data_axes() if mesh.shape[axis] > 1) or keeping_axes()[:1]
    other_axes = tuple(axis for axis in mesh.axis_names if axis not in data_axes() and mesh.shape[axis] > 1)
    # `ndindex` over no axes yields one empty index: a shard of one device has one column.
    shards, indices = (list(np.ndindex(*(mesh.shape[axis] for axis in axes))) for axes in (shard_axes, other_axes))
    left_out = tuple(axis for axis in mesh.axis_names if axis not in shard_axes + other_axes)
    order = [mesh.axis_names.index(axis) for axis in shard_axes + other_axes + left_out]
    grid = mesh.devices.transpose(order).reshape(len(shards), len(indices))
    columns = [", ".join(f"{axis}={n}" for axis, n in zip(other_axes, at, strict=True)) or "device" for at in indices]
    table = [[", ".join(shard_axes), *columns]]
    for shard, row in zip(shards[:MAX_ROWS], grid, strict=False):
        table.append([", ".join(map(str, shard)), *(f"{device.id} (process {device.process_index})" for device in row)])
    if len(grid) > MAX_ROWS:
        table.append([f"... {len(grid) - MAX_ROWS} more", *([""] * len(columns))])
    return table


def stage_shard_map(
    function: Callable, in_specs: Any, out_specs: Any, axes: tuple[str, ...], stand_in: Callable | None = None
) -> Callable:
    """Return `jax.shard_map(function, ...)`, which may be vmapped over stages where `axes` split them.

    `jax.vmap` of a plain `shard_map` leaves the axes of the stages to the compiler, which cannot split a kernel. Here
    they are axes of the `shard_map` too, and the function gets the arrays of one stage. `vmap` must come before
    autodiff: differentiate the vmapped function, do not vmap a gradient.

    `vmap` traces the `shard_map` for the types of its results before it asks for the rule, with the axes of the stages
    outside. There jax 0.10.2 refuses `reduced` arguments, and operations that have no rule for shardings. `stand_in` is
    then traced in its place: a function of the same arguments whose results have the same types. It never runs.
    """
    plain = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)
    if not axes:
        return plain
    traced = stand_in or plain
    # In a lambda, because custom_vmap asks a function for the default values of its arguments, and passes them, too.
    mapped = custom_vmap(lambda *arguments: traced(*arguments))

    def split(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(axes, *spec.partitions, reduced=spec.reduced, unreduced=spec.unreduced)

    @mapped.def_vmap
    def over_stages(_, is_batched, *arguments):
        leaves, tree = jax.tree.flatten(arguments)
        flags = jax.tree.leaves(is_batched)
        plain_specs = jax.tree.leaves(jax.tree.broadcast(in_specs, arguments))
        specs = tuple(split(spec) if flag else spec for spec, flag in zip(plain_specs, flags, strict=True))

        def one_stage(*leaves):
            local = [leaf[0] if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
            return jax.tree.map(lambda x: x[None], function(*jax.tree.unflatten(tree, local)))

        results = jax.shard_map(one_stage, in_specs=specs, out_specs=jax.tree.map(split, out_specs))(*leaves)
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _find_mapped_axes(arguments: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """Return the mesh axes that split the mapped dimension, which must be the same in all arguments of `jax.vmap`."""
    entries = []
    for argument, dim in zip(arguments, dims, strict=True):
        sharding = getattr(jax.typeof(argument), "sharding", None)
        if dim is not None:
            entries.append(None if sharding is None else sharding.spec.partitions[dim])
    if len(set(entries)) > 1:
        raise ValueError(f"vmap: the mapped dimensions of the arguments are split in different ways: {entries}")
    axes = entries[0] if entries else None
    return (axes,) if isinstance(axes, str) else axes


# JAX 0.10.2, the version that is locked, asks the arguments of `vmap` for `spec[dim]`. Weights that are gathered for
# the whole step refuse that, because their spec has `reduced` axes; `spec.partitions[dim]` is the answer.
api._mapped_axis_spec = _find_mapped_axes
