"""The gradient of a table that rows are looked up in, by the kernel of GPUs, which is interpreted here."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tunix.models.table_gradient import sum_by_number


@pytest.mark.parametrize(("rows", "width", "dtype"), [(16, 24, "float32"), (40, 700, "bfloat16")])
def test_each_row_has_the_sum_of_its_tokens(rows, width, dtype):
    """On 8 devices: tp splits the table, and the others the tokens, whose parts are summed when the table is."""
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((2, 2, 2), ("dp", "fsdp", "tp"), axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        batch, table = jax.P(("dp", "fsdp"), None), jax.P("tp", None, reduced={"dp", "fsdp"})
        of_table = jax.typeof(jax.reshard(jnp.zeros((rows, width), dtype), table))
        numbers = jax.reshard(jnp.asarray(rng.integers(0, rows, (8, 33)), jnp.int32), batch)
        gradient = jax.reshard(jnp.asarray(rng.normal(size=(8, 33, width)), dtype), jax.P(*batch, None))

        @jax.jit
        def run(gradient, numbers):
            return jax.reshard(sum_by_number(gradient, numbers, of_table, interpret=True), jax.P("tp", None))

        found = np.asarray(run(gradient, numbers), np.float32)
    expected = np.zeros((rows, width), np.float32)
    np.add.at(expected, np.asarray(numbers).reshape(-1), np.asarray(gradient, np.float32).reshape(-1, width))
    np.testing.assert_allclose(found, expected, atol=2e-6 if dtype == "float32" else 0.05)


def test_a_frequent_token_loses_no_digits():
    """Added one after the other in bfloat16, 1,000 ones are 256."""
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        table = jax.typeof(jnp.zeros((4, 8), jnp.bfloat16))
        add_up = jax.jit(partial(sum_by_number, table=table, interpret=True))
        found = add_up(np.ones((1, 1000, 8), jnp.bfloat16), np.full((1, 1000), 2))
    np.testing.assert_array_equal(found, [[0] * 8, [0] * 8, [1000] * 8, [0] * 8])
