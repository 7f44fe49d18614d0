"""Fill arrays on devices from host memory, a piece at a time."""

import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

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
    """Return an array of the values that `part` gives for each index, in any dtype and with any strides.

    `piece` is the size of a piece in each dimension of a shard. A device has a few pieces of its own shard at a time,
    beside the array. JAX transposes a piece, if its strides ask for it, while it copies it to the device: on CPUs this
    is several times as fast as a transposing copy by numpy or by a compiled program.

             shard of a device                 host
          +----+----+----+----+
          |done|done| <- |    |     put      | piece |   made by a thread
          +----+----+----+----+              | piece |   made by another, ...
    """
    local = sharding.shard_shape(shape)
    begins = {
        device: [place.indices(size)[0] for place, size in zip(index, shape, strict=True)]
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    }

    def make(start: tuple[int, ...], change: Callable[[np.ndarray], np.ndarray] = lambda view: view) -> jax.Array:
        sizes = [min(step, size - first) for step, size, first in zip(piece, local, start, strict=True)]
        arrays = []
        for device, begin in begins.items():
            firsts = [offset + first for offset, first in zip(begin, start, strict=True)]
            index = tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))
            arrays.append(jax.device_put(change(part(index)), device))
        # One array of the pieces of all devices, which lie side by side as their shards do.
        together = tuple(size * (full // own) for size, full, own in zip(sizes, shape, local, strict=True))
        return jax.make_array_from_single_device_arrays(together, sharding, arrays)

    if piece == local:  # nothing to put together: a copy of its own, because a view may be one of a file
        return make((0,) * len(shape), lambda view: np.array(view, dtype))
    array = jnp.zeros(shape, dtype, device=sharding)
    starts = itertools.product(*(range(0, size, step) for size, step in zip(local, piece, strict=True)))
    made: deque[tuple[tuple[int, ...], Future[jax.Array]]] = deque()
    for start in starts:
        made.append((start, POOL.submit(make, start)))
        if len(made) > AHEAD:
            array = _put_first(array, made)
    while made:
        array = _put_first(array, made)
    return array


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
