"""Host data as global arrays, and back."""

import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from tunix.sharding.layout import activation_spec
from tunix.sharding.mesh_shape import data_shards


def local_rows(mesh: Mesh, num_rows: int) -> list[int]:
    """Rows of a batch of `num_rows` sequences that live on this process's devices, in order."""
    rows: set[int] = set()
    sharding = NamedSharding(mesh, activation_spec("B"))
    for index in sharding.addressable_devices_indices_map((num_rows,)).values():
        assert index is not None
        rows.update(range(*index[0].indices(num_rows)))
    return sorted(rows)


def to_global(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Global arrays [A, B, T] of this process's rows [A, B_local, T]; returns before the copy is done."""
    sharding = NamedSharding(mesh, activation_spec("ABT"))
    share = data_shards(mesh.shape) // len(local_rows(mesh, data_shards(mesh.shape)))

    def put(rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(
            sharding, rows, (rows.shape[0], rows.shape[1] * share, *rows.shape[2:])
        )

    return {name: put(rows) for name, rows in batch.items()}


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
