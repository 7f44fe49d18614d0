"""Move arrays between the host memory of processes and the devices of a mesh."""

import ctypes
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh, reshard

from tunix.sharding.layout import activation_spec
from tunix.sharding.mesh import data_shards

AnyMesh = Mesh | AbstractMesh  # of devices, or of shapes alone, where a program is derived without the devices
POOL = ThreadPoolExecutor(2, "tunix-pieces")  # makes pieces; one for all arrays: new threads keep memory of their own
AHEAD = 1  # pieces that are made or waiting while one is put into its place

Index = tuple[slice, ...]


def fill(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding,
    piece: tuple[int, ...],
    part: Callable[[Index], np.ndarray],
) -> jax.Array:
    """Return an array of `shape`, with the values that `part` gives for each index, in any dtype and with any
    strides.

    `piece` is the size of a piece in each dimension of a shard. A device has a few pieces of its own shard at a time,
    beside the array. JAX transposes a piece, if its strides ask for it, while it copies it to the device: on CPUs this
    is several times as fast as a transposing copy by numpy or by a compiled program. A CPU's array is written where it
    lies, before anybody else has it; other devices put a piece into its place by a program.

             shard of a device                 host
          +----+----+----+----+
          |done|done| <- |    |     put      | piece |   made by a thread
          +----+----+----+----+              | piece |   made by another, ...
    """
    local = sharding.shard_shape(shape)
    starts_at = {
        device: [part.indices(size)[0] for part, size in zip(index, shape, strict=True)]
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    }

    def views(start: tuple[int, ...]) -> Iterator[tuple[jax.Device, np.ndarray]]:
        sizes = [min(step, size - first) for step, size, first in zip(piece, local, start, strict=True)]
        for device, begin in starts_at.items():
            firsts = [offset + first for offset, first in zip(begin, start, strict=True)]
            yield device, part(tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True)))

    def make(start: tuple[int, ...], change: Callable[[np.ndarray], np.ndarray] = lambda view: view) -> jax.Array:
        arrays = [jax.device_put(change(view), device) for device, view in views(start)]
        # One array of the pieces of all devices, which lie side by side as their shards do.
        sizes = arrays[0].shape
        together = tuple(size * (full // own) for size, full, own in zip(sizes, shape, local, strict=True))
        return jax.make_array_from_single_device_arrays(together, sharding, arrays)

    if piece == local:  # nothing to put together: a copy of its own, because a view may be one of a file
        return make((0,) * len(shape), lambda view: np.array(view, dtype))
    starts = itertools.product(*(range(0, size, step) for size, step in zip(local, piece, strict=True)))
    if is_in_place(sharding):
        # One array of numpy's for each device: JAX takes one that begins at a multiple of 64 bytes as the device's
        # memory, also with `may_alias=False`, and all devices would write into the same.
        shards = {device: jax.device_put(np.empty(local, jnp.dtype(dtype)), device) for device in starts_at}
        jax.block_until_ready([*shards.values()])
        # Before the threads: two that ask for the address of one array at the same time can get an error.
        memory = {device: _memory_of(shard) for device, shard in shards.items()}

        def write(start: tuple[int, ...]) -> None:
            index = tuple(slice(first, first + step) for first, step in zip(start, piece, strict=True))
            for device, view in views(start):
                memory[device][index] = jax.device_put(view, device)

        deque(POOL.map(write, starts), 0)
        return jax.make_array_from_single_device_arrays(shape, sharding, [*shards.values()])
    array = jnp.zeros(shape, dtype, device=sharding)
    made: deque[tuple[tuple[int, ...], Future[jax.Array]]] = deque()
    for start in starts:
        made.append((start, POOL.submit(make, start)))
        if len(made) > AHEAD:
            array = _put_first(array, made)
    while made:
        array = _put_first(array, made)
    return array


def is_in_place(sharding: NamedSharding) -> bool:
    """Return whether the memory of arrays is memory of this process."""
    devices: Any = sharding.addressable_devices
    return all(device.platform == "cpu" for device in devices)


def _memory_of(array: jax.Array) -> np.ndarray:
    """Return the memory of an array on one CPU, for numpy to write."""
    num_bytes = math.prod(array.shape) * array.dtype.itemsize
    memory = (ctypes.c_uint8 * num_bytes).from_address(array.unsafe_buffer_pointer())
    return np.ndarray(array.shape, array.dtype, memoryview(memory))


def _put_first(array: jax.Array, made: deque[tuple[tuple[int, ...], Future[jax.Array]]]) -> jax.Array:
    """Put the oldest piece into its place. The piece's memory is free when this returns."""
    start, piece = made.popleft()
    return jax.block_until_ready(_put(array, piece.result(), np.array(start, np.int32)))


# XLA's CPU compiler turns an update of a bfloat16 array into one of a float32 array, and so rewrites all of it for each
# piece. The pass is for arithmetic, of which there is none here.
@partial(jax.jit, donate_argnums=0, compiler_options={"xla_disable_hlo_passes": "float-normalization-bf16"})
def _put(array: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
    """Return the array with a piece [..] in the shard of each device, from index `start` of the shard on."""
    sharding = jax.typeof(array).sharding
    spec = sharding.spec

    def update(shard, piece, start):
        return jax.lax.dynamic_update_slice(shard, piece.astype(shard.dtype), tuple(start))

    specs = (spec, spec, PartitionSpec())
    return jax.shard_map(update, mesh=sharding.mesh, in_specs=specs, out_specs=spec)(array, piece, start)


HOST = "pinned_host"  # JAX's name for memory of the host that devices can read


def local_rows(mesh: Mesh, num_rows: int) -> list[int]:
    """Return the rows of a batch of `num_rows` sequences that live on this process's devices, in order."""
    rows: set[int] = set()
    for index in NamedSharding(mesh, activation_spec("B")).addressable_devices_indices_map((num_rows,)).values():
        assert index is not None
        rows.update(range(*index[0].indices(num_rows)))
    return sorted(rows)


def to_global(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Return global arrays [A, B, ...] of this process's rows, before the copy to the devices is done."""
    # Processes that have parts of the same sequences have the same rows. So we count data shards, not processes. A
    # process may have parts of two shards of three.
    num_shards = data_shards(mesh.shape)
    num_local = len(local_rows(mesh, num_shards))

    def put(rows: np.ndarray) -> jax.Array:
        # Fields with more dimensions than A, B and T have others in the place of T, which no axis splits.
        sharding = NamedSharding(mesh, activation_spec("ABT" if rows.ndim == 3 else "AB"))
        shape = rows.shape[0], rows.shape[1] * num_shards // num_local, *rows.shape[2:]
        return jax.make_array_from_process_local_data(sharding, rows, shape)

    return {name: put(rows) for name, rows in batch.items()}


def rows_to_global(rows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Return rows [B, ...], known to every process, as a global array; rows of zeros fill it up to the data shards."""
    shards = data_shards(mesh.shape)
    padded = np.zeros((-(-len(rows) // shards) * shards, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return to_global({"rows": padded[local_rows(mesh, len(padded))][None]}, mesh)["rows"][0]


def abstract_results(mesh: AnyMesh, function: Callable, *arguments: Any) -> Any:
    """Return shapes, dtypes and shardings on the mesh of what a function returns for these arrays, or their shapes.

    An array that the function puts into the host's memory has a sharding of this kind of memory.
    """

    def put_leaf(leaf: jax.ShapeDtypeStruct, result: Any) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding else PartitionSpec()
        kind = HOST if result.memory_space == jax.memory.Space.Host else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind))

    # `eval_shape` gives shapes and shardings; the memory that an array is in stands in the types of the jaxpr alone.
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, map(put_leaf, leaves, program.out_avals))


def to_host_memory(tree: Any) -> Any:
    """Return arrays in the host's pinned memory, from which devices read them at full speed; scalars stay."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim else leaf, tree)


def to_device_memory(tree: Any) -> Any:
    """Return arrays in the memory of the devices; those that are in the host's memory are copied; scalars stay."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if leaf.ndim else leaf, tree)


def has_host_memory(mesh: Mesh) -> bool:
    """Return whether the devices of a mesh can read arrays in the host's pinned memory.

    Devices that are only described (a plan compiles for them) do not say; only CUDA's are described, and they can.
    """
    kinds = {memory.kind for memory in mesh.devices.flat[0].addressable_memories()}
    return HOST in kinds or not kinds


def copy_to(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return a copy of an array of any shape [...] on these devices, its own or others.

    JAX sends nothing between devices of several processes that are not the same on both sides. So there each process
    copies what its own devices have: both sides must be split alike.
    """
    if sharding.is_fully_addressable or leaf.sharding.device_set == sharding.device_set:
        return jax.device_put(leaf, sharding, may_alias=False)
    parts = {str(part.index): part.data for part in leaf.addressable_shards}
    places = sharding.addressable_devices_indices_map(leaf.shape).items()
    local = [jax.device_put(parts[str(index)], device) for device, index in places]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, local)


def lay_out(tree: Any, mesh: Mesh) -> Any:
    """Return arrays, or shapes of arrays, on another mesh, with the specs that they have.

    Where each device keeps its part, nothing is copied.
    """

    def move(leaf: Any) -> Any:
        sharding = NamedSharding(mesh, leaf.sharding.spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return copy_to(leaf, sharding)
        parts = [part.data for part in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

    return jax.tree.map(move, tree)


def bring_to(array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Return an array of any shape laid out as `spec`. One that lies so already adds no operation to the program."""
    return array if jax.typeof(array).sharding.spec == spec else reshard(array, spec)


def map_on_devices(function: Callable[..., jax.Array], arrays: Sequence[jax.Array], spec: PartitionSpec) -> jax.Array:
    """Return what a function makes of each device's own arrays, laid out as `spec`: over `unreduced` axes, each device
    has its part of a sum."""
    # jax 0.10.2 cannot lower such a result where all these axes have one device; then nothing is left to be summed.
    sizes = get_abstract_mesh().shape
    is_open = any(sizes[axis] > 1 for axis in spec.unreduced)
    out_specs = spec if is_open else PartitionSpec(*spec.partitions, reduced=spec.reduced)
    in_specs = tuple(jax.typeof(each).sharding.spec for each in arrays)
    mapped = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return bring_to(mapped(*arrays), spec)


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Return the arrays, of any shapes, as types that vary over the same mesh axes, as JAX's own operations take them.

    The casts stand outside of the rule of the gradient, so JAX sums gradients over the axes where that is due.
    """
    types = [jax.typeof(x).manual_axis_type for x in arrays]
    axes = frozenset().union(*(each.varying for each in types))
    results = []
    for x, each in zip(arrays, types, strict=True):
        missing = axes - each.varying
        for part in (missing & each.reduced, missing - each.reduced):
            x = jax.lax.pcast(x, tuple(sorted(part)), to="varying")
        results.append(x)
    return results


def bytes_per_device(tree: object) -> int:
    """Return the bytes that one device has of a tree of arrays or shapes; of a leaf without a sharding, all.

    Arrays in the host's memory take none of the device's.
    """

    def size(leaf: jax.Array) -> int:
        if leaf.sharding and leaf.sharding.memory_kind == HOST:
            return 0
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


@jax.jit
def replicate(array: jax.Array) -> jax.Array:
    """Return an array of any shape with all of it on every device of its mesh; every process calls this."""
    return reshard(array, NamedSharding(jax.typeof(array).sharding.mesh, PartitionSpec()))


@jax.jit
def replicate_part(array: jax.Array, *index: int) -> jax.Array:
    """Return the part [...] of an array [first dimensions, ...] at this index on every device, to all processes."""
    if not index:
        return replicate(array)
    # Indices as arrays make a gather, which sums over the devices that split these dimensions: only the part travels.
    sharding = jax.typeof(array).sharding
    part_sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[len(index) :]))
    part = array.at[tuple(jnp.reshape(each, 1) for each in index)].get(out_sharding=part_sharding)
    return replicate(part)[0]


def to_main(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state as numpy arrays on process 0, None on the others. Leaves travel one after the other."""

    def gather(leaf: jax.Array) -> np.ndarray | None:
        array = multihost_utils.process_allgather(leaf, tiled=True)
        return array if jax.process_index() == 0 else None

    arrays = jax.tree.map(gather, state)
    return arrays if jax.process_index() == 0 else None


def from_main(state: dict[str, Any] | None, abstract: dict[str, Any]) -> dict[str, Any]:
    """Return the state, given as numpy arrays on process 0 and None on the others, laid out as `abstract` says.

    Leaves travel as bytes, so that every bit stays the same.
    """

    def distribute(target: jax.ShapeDtypeStruct, array: np.ndarray | None) -> jax.Array:
        if array is None:
            sent = np.zeros(math.prod(target.shape) * target.dtype.itemsize, np.uint8)
        else:
            sent = np.frombuffer(array.tobytes(), np.uint8)
        received = np.asarray(multihost_utils.broadcast_one_to_all(sent))
        values = np.frombuffer(received.tobytes(), target.dtype).reshape(target.shape)
        return jax.make_array_from_callback(target.shape, target.sharding, lambda index: values[index])

    if state is None:
        return jax.tree.map(lambda target: distribute(target, None), abstract)
    return jax.tree.map(distribute, abstract, state)
