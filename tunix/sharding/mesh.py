"""The device mesh, and a table of its devices."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from tunix.base.errors import UserError
from tunix.sharding.dims import axis_names, data_axes
from tunix.sharding.mesh_shape import MeshShape, resolve

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
    idle_hosts = {device.process_index for device in devices} - {device.process_index for device in used}
    if idle_hosts:
        raise UserError(f"the mesh leaves processes {sorted(idle_hosts)} without a device; start fewer processes")
    return jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(names), devices=used)


def device_table(mesh: Mesh) -> list[list[str]]:
    """Rows of device ids, the process in brackets: a row for each data shard, a column for each place in a shard."""
    shard_axes = data_axes()
    place_axes = tuple(axis for axis in mesh.axis_names if axis not in shard_axes)
    shards, places = (list(np.ndindex(*(mesh.shape[axis] for axis in axes))) for axes in (shard_axes, place_axes))
    order = [mesh.axis_names.index(axis) for axis in shard_axes + place_axes]
    grid = mesh.devices.transpose(order).reshape(len(shards), len(places))
    columns = [", ".join(f"{axis}={n}" for axis, n in zip(place_axes, place, strict=True)) for place in places]
    table = [[", ".join(shard_axes), *columns]]
    for shard, row in zip(shards[:MAX_ROWS], grid, strict=False):
        table.append([", ".join(map(str, shard)), *(f"{device.id} (process {device.process_index})" for device in row)])
    if len(grid) > MAX_ROWS:
        table.append([f"... {len(grid) - MAX_ROWS} more", *([""] * len(columns))])
    return table
