"""Mesh shapes as users write them: read, resolved for the devices, checked against the model. Knows no jax."""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import yaml

from tunix.base.errors import UserError
from tunix.sharding.dims import AXES, DATA_AXES, KEYS, LETTERS, MESH_AXES

TYPE_HINT = '[[sizes], [axis names]] like [[4,2],["fsdp","tp"]], or auto'
MeshShape = tuple[tuple[int, ...], tuple[str, ...]] | str


def parse(value: object) -> MeshShape:
    """`auto`, or sizes and axis names checked for form: known axes, none twice, one -1 at most."""
    if value == "auto":
        return "auto"
    if isinstance(value, str):  # a list within quotes
        with suppress(yaml.YAMLError):
            value = yaml.safe_load(value)
    pair = list(value) if isinstance(value, list | tuple) else []
    if len(pair) != 2 or not all(isinstance(part, list | tuple) for part in pair):
        raise ValueError(f"expected {TYPE_HINT}")
    sizes, axes = (tuple(part) for part in pair)
    if not axes or len(sizes) != len(axes):
        raise ValueError(f"{len(sizes)} sizes for {len(axes)} axes; expected {TYPE_HINT}")
    for axis in axes:
        if axis not in MESH_AXES:
            near = difflib.get_close_matches(str(axis), MESH_AXES, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"unknown axis {axis!r}; {hint}axes are {', '.join(MESH_AXES)}")
        if axes.count(axis) > 1:
            raise ValueError(f"axis {axis} is named twice; name each axis once")
    for size, axis in zip(sizes, axes, strict=True):
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"size {axis}={size!r} must be a whole number from 1 up, or -1 to fill")
    if sizes.count(-1) > 1:
        raise ValueError("two sizes are -1; only one axis can fill")
    return sizes, axes


def shown(sizes: Mapping[str, int], axes: Iterable[str] | None = None) -> str:
    """The mesh as users write it: `[[4,2],["fsdp","tp"]]`."""
    names = list(axes or [axis for axis in MESH_AXES if sizes[axis] > 1] or ["fsdp"])
    return f"[[{','.join(str(sizes[axis]) for axis in names)}],[" + ",".join(f'"{axis}"' for axis in names) + "]]"


def explicit_sizes(mesh_shape: MeshShape) -> dict[str, int] | None:
    """Size of every mesh axis (1 where unnamed), or None where the devices decide (`auto`, -1)."""
    if isinstance(mesh_shape, str) or -1 in mesh_shape[0]:
        return None
    named = dict(zip(mesh_shape[1], mesh_shape[0], strict=True))
    return {axis: named.get(axis, 1) for axis in MESH_AXES}


def resolve(
    mesh_shape: MeshShape, num_devices: int, dims: Mapping[str, int], allow_idle: bool, which: str = "visible"
) -> dict[str, int]:
    """Size of every mesh axis on `num_devices` devices; `which` devices they are is for messages.

    Raises:
        UserError: sizes that do not fit the devices or do not divide the model, with the nearest that do.
    """
    if isinstance(mesh_shape, str):
        mesh_shape = ((-1,), ("fsdp",))
    sizes, axes = mesh_shape
    named = dict(zip(axes, sizes, strict=True))
    fixed = math.prod(size for size in sizes if size != -1)
    product = " x ".join(f"{axis}={size}" for axis, size in named.items())
    if -1 in sizes:
        if num_devices % fixed:
            raise UserError(
                f"model.mesh_shape {product}: {fixed} does not divide the {num_devices} devices that are {which}; "
                f"{_nearest(named, num_devices, dims)}"
            )
        named = {axis: num_devices // fixed if size == -1 else size for axis, size in named.items()}
    elif fixed > num_devices or (fixed < num_devices and not allow_idle):
        can_idle = fixed < num_devices and which == "visible"
        idle = ", or distributed.allow_idle_devices=true to leave the rest idle" if can_idle else ""
        raise UserError(
            f"model.mesh_shape {product} needs {fixed} devices, {num_devices} are {which}; "
            f"{_nearest(named, num_devices, dims)}{idle}"
        )
    resolved = {axis: named.get(axis, 1) for axis in MESH_AXES}
    try:
        check_divides(dims, resolved)
    except UserError as error:
        raise UserError(f"{error}; {_nearest(named, num_devices, dims)}") from None
    return resolved


def check_divides(dims: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Raise `UserError`, naming the key and the sizes that would do, where an axis does not divide a dimension."""
    for letter, key in KEYS.items():
        for axis in {AXES[LETTERS[letter]][0], AXES[LETTERS[letter]][1]} - {None}:
            dim, size = dims[letter], sizes[axis]  # type: ignore[index]
            if dim % size and not (letter == "K" and size % dim == 0):
                legal = [n for n in range(1, dim + 1) if dim % n == 0]
                near = sorted(sorted(legal, key=lambda n: abs(math.log(n / size)))[:3])
                raise UserError(
                    f"{key}={dim} is not divisible by mesh axis {axis}={size} (nearest {axis}: {_or(near)})"
                )


def data_shards(sizes: Mapping[str, int]) -> int:
    """Parts that the batch is split into: the product of the data axes."""
    return math.prod(sizes[axis] for axis in DATA_AXES)


def meshes(num_devices: int) -> Iterator[dict[str, int]]:
    """Every way to spread the devices over the mesh axes; `check_divides` says which of them a model allows."""
    for split in _factorizations(num_devices, len(MESH_AXES)):
        yield dict(zip(MESH_AXES, split, strict=True))


def _nearest(named: Mapping[str, int], num_devices: int, dims: Mapping[str, int]) -> str:
    """The three legal shapes of these axes nearest to the one asked for, in words."""
    axes = [*named, *(axis for axis in ("fsdp", "tp") if axis not in named)]
    wanted = {axis: max(1, named.get(axis, 1)) for axis in axes}

    def distance(sizes: Mapping[str, int]) -> float:
        return sum(abs(math.log(sizes[axis] / wanted[axis])) for axis in axes if named.get(axis) != -1)

    legal = []
    for split in _factorizations(num_devices, len(axes)):
        sizes = dict.fromkeys(MESH_AXES, 1) | dict(zip(axes, split, strict=True))
        try:
            check_divides(dims, sizes)
        except UserError:
            continue
        legal.append(sizes)
    if not legal:
        return f"no mesh of {num_devices} devices divides this model"
    best = sorted(legal, key=distance)[:3]
    shapes = [shown(sizes, [axis for axis in axes if axis in named or sizes[axis] > 1]) for sizes in best]
    return f"legal here: {_or(shapes)}"


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        for rest in _factorizations(number // first, parts - 1):
            yield (first, *rest)


def _or(items: list) -> str:
    return " or ".join(filter(None, [", ".join(map(str, items[:-1])), str(items[-1])]))
