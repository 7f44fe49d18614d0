"""Arrays that are made of pieces, on devices of this process's memory and on those with memory of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tunix.sharding import arrays


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
