"""The mesh of devices, and a table of it."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from tunix.base.errors import UserError
from tunix.sharding.dims import MESH_AXES
from tunix.sharding.mesh_shape import MeshShape, resolve

MAX_ROWS = 16  # of a table at the start: what is larger is cut off


def device_mesh(
    mesh_shape: MeshShape, dims: Mapping[str, int], allow_idle: bool, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Mesh of all axes of `MESH_AXES` in that order, unnamed ones of size 1; neighbours on tp are neighbours in a node.

    Raises:
        UserError: a shape that does not fit the devices or the model, with the nearest that do.
    """
    devices = list(devices or jax.devices())
    sizes = resolve(mesh_shape, len(devices), dims, allow_idle)
    shape = [sizes[axis] for axis in MESH_AXES]
    used = devices[: math.prod(shape)]
    idle_hosts = {device.process_index for device in devices} - {device.process_index for device in used}
    if idle_hosts:
        raise UserError(f"the mesh leaves processes {sorted(idle_hosts)} without a device; start fewer processes")
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES), devices=used)


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
