"""The mesh: its shape as users write it, read, resolved for the devices and checked against the model; and the device
mesh of that shape. Its axes are the rows of `MESH` (sharding/table.py).

The config is made of shapes, so this file imports jax only inside of the functions that make a mesh.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tunix.base.errors import UserError, did_you_mean
from tunix.base.files import read_yaml
from tunix.sharding.table import (
    DIMS,
    LAYERS,
    MESH,
    Dim,
    Whole,
    axis_names,
    data_axes,
    keeping_axes,
    needed_dims,
    stream_axes,
    suggested_axes,
    token_axes,
)

if TYPE_CHECKING:
    import jax
    from jax.sharding import AbstractMesh, Mesh

TYPE_HINT = '[[sizes], [axis names]] like [[4,2],["fsdp","tp"]], or auto'
Shape = tuple[tuple[int, ...], tuple[str, ...]]  # sizes and axis names
MeshShape = Shape | str
AUTO: Shape = ((-1,), keeping_axes()[:1])  # all devices on the axis that keeps weights
ONE_DEVICE: Shape = ((1,), keeping_axes()[:1])
MAX_ROWS = 16  # of a table in the start report; longer ones are cut off


def parse(value: object) -> MeshShape:
    """Return `auto`, or sizes and axis names.

    Raises:
        ValueError: a wrong form, an axis that is unknown or named twice, a size that is no count, more than one -1.
    """
    if value == "auto":
        return "auto"
    if isinstance(value, str):  # a list within quotes
        with suppress(ValueError):
            value = read_yaml(value)
    pair = list(value) if isinstance(value, list | tuple) else []
    if len(pair) != 2 or not all(isinstance(part, list | tuple) for part in pair):
        raise ValueError(f"expected {TYPE_HINT}")
    sizes, axes = (tuple(part) for part in pair)
    if not axes or len(sizes) != len(axes):
        raise ValueError(f"{len(sizes)} sizes for {len(axes)} axes; expected {TYPE_HINT}")
    for axis in axes:
        if axis not in axis_names():
            meant = [each.name for each in MESH if axis in each.elsewhere]
            hint = f"; did you mean {meant[0]}?" if meant else did_you_mean(str(axis), list(axis_names()))
            raise ValueError(f"unknown axis {axis!r}; axes are {', '.join(axis_names())}{hint}")
        if axes.count(axis) > 1:
            raise ValueError(f"axis {axis} is named twice; name each axis once")
    for size, axis in zip(sizes, axes, strict=True):
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(
                f"size {axis}={size!r} must be a whole number from 1 up, or -1 for the devices that are left"
            )
    if sizes.count(-1) > 1:
        raise ValueError("two sizes are -1; only one axis can take the devices that are left")
    return sizes, axes


def format_mesh_shape(sizes: Mapping[str, int], axes: Iterable[str] | None = None) -> str:
    """Return the mesh as users write it, `[[4,2],["fsdp","tp"]]`: these axes, or those larger than 1."""
    names = list(axes or [axis for axis in axis_names() if sizes[axis] > 1] or keeping_axes()[:1])
    return f"[[{','.join(str(sizes[axis]) for axis in names)}],[" + ",".join(f'"{axis}"' for axis in names) + "]]"


def explicit_sizes(mesh_shape: MeshShape) -> dict[str, int] | None:
    """Return the size of every mesh axis (1 where unnamed), or None where the devices decide (`auto`, -1)."""
    if isinstance(mesh_shape, str) or -1 in mesh_shape[0]:
        return None
    named = dict(zip(mesh_shape[1], mesh_shape[0], strict=True))
    return {axis: named.get(axis, 1) for axis in axis_names()}


def resolve(
    mesh_shape: MeshShape, num_devices: int, dims: Mapping[str, int], allow_idle: bool, which: str = "visible"
) -> dict[str, int]:
    """Return the size of every mesh axis on `num_devices` devices; `which` says in messages which devices these are.

    `dims` are the sizes of dimensions by letter; dimensions that it lacks are not checked.

    Raises:
        UserError: sizes that do not fit the devices or do not divide the model, with the nearest that do.
    """
    sizes, axes = AUTO if isinstance(mesh_shape, str) else mesh_shape
    named = dict(zip(axes, sizes, strict=True))
    fixed = math.prod(size for size in sizes if size != -1)
    product = " x ".join(f"{axis}={size}" for axis, size in named.items())
    if -1 in sizes:
        if num_devices % fixed:
            raise UserError(
                f"model.mesh_shape {product}: {fixed} does not divide the {num_devices} devices that are {which}; "
                f"{_suggest_meshes(named, num_devices, dims)}"
            )
        named = {axis: num_devices // fixed if size == -1 else size for axis, size in named.items()}
    elif fixed > num_devices or (fixed < num_devices and not allow_idle):
        can_idle = fixed < num_devices and which == "visible"
        idle = ", or distributed.allow_idle_devices=true to leave the rest idle" if can_idle else ""
        if which == "visible" and fixed > num_devices and fixed % num_devices == 0:
            times = fixed // num_devices
            idle = f"; or start {times} times as many processes, as with --nnodes={times} (docs/distributed.md)"
        raise UserError(
            f"model.mesh_shape {product} needs {fixed} devices, {num_devices} are {which}; "
            f"{_suggest_meshes(named, num_devices, dims)}{idle}"
        )
    resolved = {axis: named.get(axis, 1) for axis in axis_names()}
    try:
        check_divides(dims, resolved)
    except UserError as error:
        raise UserError(f"{error}; {_suggest_meshes(named, num_devices, dims)}") from None
    return resolved


def check_divides(dims: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Raise `UserError`, naming the key and the sizes that would do, where mesh axes do not divide a dimension."""
    for axis, dim_name in needed_dims().items():
        if dim_name not in dims and sizes[axis] > 1:
            raise UserError(
                f"mesh axis {axis}={sizes[axis]} splits {DIMS[dim_name].name}, of which this model has none; leave "
                f"{axis} out of model.mesh_shape"
            )
    for dim, axes in _list_uneven(dims, sizes):
        num_entries, size = dims[dim.dim_name], count_devices(sizes, axes)
        if _allows(dim, num_entries, size):
            continue
        # A number that divides this dimension is no way out where another dimension on the same axes refuses it.
        on_axes = [DIMS[dim_name] for dim_name in dims if axes in _list_splits(DIMS[dim_name], sizes)]
        divisors = list_divisors(num_entries)
        near = nearest([n for n in divisors if all(_allows(each, dims[each.dim_name], n) for each in on_axes)], size)
        together = " x ".join(f"{axis}={sizes[axis]}" for axis in axes) + (f" = {size}" if len(axes) > 1 else "")
        raise UserError(
            f"{dim.key or dim.name}={num_entries} is not divisible by mesh ax{'e' if len(axes) > 1 else 'i'}s "
            f"{together} (nearest {' x '.join(axes)}: {_join_text(near)})"
        )


def _allows(dim: Dim, num_entries: int, size: int) -> bool:
    """Return whether so many devices may share a dimension: they divide it, or each may keep all of it."""
    is_divisor = dim.may_stay_whole is Whole.AS_DIVISOR and size % num_entries == 0
    return num_entries % size == 0 or dim.may_stay_whole is Whole.ALWAYS or is_divisor


def _list_splits(dim: Dim, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the axes that split a dimension, of weights and of activations, without those of size 1."""
    pairs = dict.fromkeys((dim.weight_axes, dim.activation_axes))
    return [tuple(axis for axis in axes if sizes[axis] > 1) for axes in pairs]


def unsplit_dims(dims: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the dimensions that every device keeps whole, by letter, each with the axes that would split it.

    Fewer key/value heads than devices, an odd vocabulary, ... `check_divides` has refused the others.
    """
    return {dim.dim_name: axes for dim, axes in _list_uneven(dims, sizes)}


def _list_uneven(dims: Mapping[str, int], sizes: Mapping[str, int]) -> Iterator[tuple[Dim, tuple[str, ...]]]:
    """Yield each dimension that axes should split and do not divide, with those of the axes that are larger than 1."""
    for dim_name in dims:
        for axes in _list_splits(DIMS[dim_name], sizes):
            if dims[dim_name] % count_devices(sizes, axes):
                yield DIMS[dim_name], axes


def count_devices(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """Return the number of devices along some axes of a mesh of these sizes."""
    return math.prod(sizes[axis] for axis in axes)


def data_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of parts that the batch is split into."""
    return count_devices(sizes, data_axes())


def token_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of parts that the tokens of a sequence are split into."""
    return count_devices(sizes, token_axes())


def stream_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of devices that may split the tokens that one device has in a branch."""
    return count_devices(sizes, stream_axes())


def num_stages(sizes: Mapping[str, int]) -> int:
    """Return the number of stages that the layers are split into."""
    return count_devices(sizes, DIMS[LAYERS].weight_axes)


def meshes(num_devices: int, dims: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield every way to spread the devices over the mesh axes that split something of a model with these dimensions.

    `check_divides` tells which of them the model allows.
    """
    names = [axis for axis in axis_names() if needed_dims().get(axis) in (None, *dims)]
    for split in _list_factorizations(num_devices, len(names)):
        yield dict.fromkeys(axis_names(), 1) | dict(zip(names, split, strict=True))


def _suggest_meshes(named: Mapping[str, int], num_devices: int, dims: Mapping[str, int]) -> str:
    """Return in words the three legal shapes nearest to the one asked for, of its axes and `suggested_axes`."""
    # A message proposes the axes that the user named, and those that help every model; the others need a reason.
    axes = [*named, *(axis for axis in suggested_axes() if axis not in named)]
    target = {axis: max(1, named.get(axis, 1)) for axis in axes}

    # Sizes differ by their ratio: from 4 to 8 is as far as from 2 to 4. An axis of -1 takes any size.
    def distance(sizes: Mapping[str, int]) -> float:
        return sum(abs(math.log(sizes[axis] / target[axis])) for axis in axes if named.get(axis) != -1)

    valid = []
    for split in _list_factorizations(num_devices, len(axes)):
        sizes = dict.fromkeys(axis_names(), 1) | dict(zip(axes, split, strict=True))
        try:
            check_divides(dims, sizes)
        except UserError:
            continue
        valid.append(sizes)
    if not valid:
        return f"no mesh of {num_devices} devices divides this model"
    best = sorted(valid, key=distance)[:3]
    shapes = [format_mesh_shape(sizes, [axis for axis in axes if axis in named or sizes[axis] > 1]) for sizes in best]
    return f"legal here: {_join_text(shapes)}"


def nearest(valid: Iterable[int], target: int) -> list[int]:
    """Return the three of these numbers that are nearest to one, by their ratio, in order."""
    return sorted(sorted(valid, key=lambda number: abs(math.log(number / target)))[:3])


def list_divisors(number: int, least: int = 1) -> list[int]:
    """Return the numbers from `least` on that divide a number; of one above 10^12, those that are found in a second."""
    small = [n for n in range(1, min(math.isqrt(number), 1_000_000) + 1) if number % n == 0]
    return sorted(n for n in {*small, *(number // n for n in small)} if n >= least)


def _list_factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product: 4 of 2 parts is (1, 4), (2, 2), (4, 1)."""
    if parts == 1:
        yield (number,)
        return
    for first in list_divisors(number):
        for remaining in _list_factorizations(number // first, parts - 1):
            yield (first, *remaining)


def _join_text(items: list) -> str:
    """Return items as a message lists them: 1, 2 or 4."""
    return " or ".join(filter(None, [", ".join(map(str, items[:-1])), str(items[-1])]))


# The device mesh.


def device_mesh(
    mesh_shape: MeshShape, dims: Mapping[str, int], allow_idle: bool, devices: "Sequence[jax.Device] | None" = None
) -> "Mesh":
    """Return a mesh of all axes of the table, outermost first, unnamed ones of size 1.

    Neighbours on the last axis are neighbours in a node. `dims` are the sizes of dimensions by letter.

    Raises:
        UserError: a shape that does not fit the devices or the model, with the nearest that do.
    """
    import jax
    from jax.sharding import AxisType

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


def whole_sequences(mesh: "Mesh | AbstractMesh") -> Any:
    """Return a mesh of the same devices on which each device has whole sequences: for one token after the other.

    The devices of the axes that split tokens join the first axis that keeps weights. Where these axes are neighbours
    in the table, weights at rest stay on their devices: eight parts over fsdp=2 x cp=4 are those over fsdp=8.
    """
    from jax.sharding import AbstractMesh, Mesh

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


def device_table(mesh: "Mesh") -> list[list[str]]:
    """Return a table of device ids, the process in brackets.

    It has a row for each data shard, and a column for each place in a shard. Axes of size 1 are left out:

        fsdp  tp=0           tp=1                fsdp  device
        0     0 (process 0)  1 (process 0)       0     0 (process 0)
        1     2 (process 1)  3 (process 1)       1     1 (process 0)
    """
    import numpy as np

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
