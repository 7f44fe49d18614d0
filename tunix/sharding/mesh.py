"""The device mesh, and a table of its devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from tunix.base.errors import UserError
from tunix.sharding.dims import axis_names, data_axes, keeping_axes, token_axes
from tunix.sharding.mesh_shape import MeshShape, resolve, token_shards

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
    place = order.index(outer) + 1
    order[place:place] = inner
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
    place_axes = tuple(axis for axis in mesh.axis_names if axis not in data_axes() and mesh.shape[axis] > 1)
    # `ndindex` over no axes yields one empty index: a shard of one device has one column.
    shards, places = (list(np.ndindex(*(mesh.shape[axis] for axis in axes))) for axes in (shard_axes, place_axes))
    left_out = tuple(axis for axis in mesh.axis_names if axis not in shard_axes + place_axes)
    order = [mesh.axis_names.index(axis) for axis in shard_axes + place_axes + left_out]
    grid = mesh.devices.transpose(order).reshape(len(shards), len(places))
    columns = [", ".join(f"{axis}={n}" for axis, n in zip(place_axes, at, strict=True)) or "device" for at in places]
    table = [[", ".join(shard_axes), *columns]]
    for shard, row in zip(shards[:MAX_ROWS], grid, strict=False):
        table.append([", ".join(map(str, shard)), *(f"{device.id} (process {device.process_index})" for device in row)])
    if len(grid) > MAX_ROWS:
        table.append([f"... {len(grid) - MAX_ROWS} more", *([""] * len(columns))])
    return table
