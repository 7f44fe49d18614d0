"""Arrays that are made of pieces, on devices of this process's memory and on those with memory of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tunix.sharding import arrays
from tunix.sharding.mesh import device_mesh


@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_pieces_of_a_turned_array_lie_in_their_places(is_in_place, stored, dtype, monkeypatch):
    """The last pieces of a shard are smaller than the others, and devices along dp have the same shard."""
    assert arrays.is_in_place(NamedSharding(jax.make_mesh((1,), ("tp",)), PartitionSpec()))
    monkeypatch.setattr(arrays, "is_in_place", lambda sharding: is_in_place)
    numbers = np.random.default_rng(0).standard_normal((22, 30), np.float32).astype(jnp.dtype(stored))
    mesh = jax.make_mesh((2, 2, 2), ("dp", "fsdp", "tp"))
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp", "tp"))
    filled = arrays.fill((1, 30, 22), dtype, sharding, (1, 15, 4), lambda index: numbers.T[index[1:]][None])
    assert filled.sharding == sharding
    assert filled.dtype == dtype
    assert np.array_equal(np.asarray(filled)[0], numbers.T.astype(jnp.dtype(dtype)))


def test_no_device_shares_the_memory_of_another(monkeypatch):
    """JAX takes numpy's memory for a device's, without a copy, where it begins at a multiple of 64 bytes."""
    empty = np.empty

    def empty_aligned(shape, dtype):
        if np.dtype(dtype) == object:  # one of JAX
            return empty(shape, dtype)
        size = empty(shape, dtype).nbytes
        memory = empty(size + 64, np.uint8)
        first = -memory.ctypes.data % 64
        return memory[first : first + size].view(dtype).reshape(shape)

    monkeypatch.setattr(np, "empty", empty_aligned)
    numbers = np.arange(64, dtype=np.float32).reshape(8, 8)
    sharding = NamedSharding(jax.make_mesh((8,), ("fsdp",)), PartitionSpec("fsdp"))
    filled = arrays.fill((8, 8), "float32", sharding, (1, 4), lambda index: numbers[index])
    assert np.array_equal(np.asarray(filled), numbers)


def test_a_process_may_have_parts_of_two_shards_of_three(monkeypatch):
    """Two processes of three devices on dp=3 x tp=2: the shard in the middle is on both, which read its rows."""
    mesh = device_mesh(((3, 2), ("dp", "tp")), {}, allow_idle=True)
    monkeypatch.setattr(arrays, "local_rows", lambda mesh, num_rows: [*range(num_rows * 2 // 3)])  # of process 0
    monkeypatch.setattr(jax, "make_array_from_process_local_data", lambda sharding, rows, shape: shape)
    assert arrays.to_global({"tokens": np.zeros((1, 4, 8), np.int32)}, mesh) == {"tokens": (1, 6, 8)}
