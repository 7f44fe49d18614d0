"""The gradient of a table of which rows are looked up (`look_up`), for GPUs: the same digits in each run.

JAX's own gradient of `table[numbers]` adds up the gradients of equal numbers in the dtype of the table, and on a GPU in
the order in which threads come: two runs differ in their last digits, and so does a run that goes on after a kill. Here
a program of a kernel has one row of the table, and adds up its gradients in the order of the tokens, in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec

from tunix.models.flash_attention import call_kernel, shape_like
from tunix.models.grouped_matmul import FULL_ARRAY, are_before, load_rows, load_vector, part_of
from tunix.models.kernels import GroupedBlock
from tunix.sharding.arrays import bring_to, map_on_devices
from tunix.sharding.layout import gradient_spec

BLOCK = GroupedBlock(rows=8, columns=512, depth=1, warps=4, stages=2)  # rows of gradients


def sum_by_number(gradient: jax.Array, numbers: jax.Array, table: Any, interpret: bool = False) -> jax.Array:
    """Return the gradient of a table, of whose type [V, ...] is `table`: sums of gradients [B, T, ...] of its rows with
    numbers [B, T]."""
    spec = gradient_spec(table.sharding.spec)
    of_numbers = PartitionSpec(*jax.typeof(gradient).sharding.spec.partitions[: numbers.ndim])
    axes = spec.partitions[0]

    def sum_local(gradient: jax.Array, numbers: jax.Array) -> jax.Array:
        num_rows = table.shape[0] // (1 if axes is None else jax.lax.axis_size(axes))
        first = 0 if axes is None else jax.lax.axis_index(axes) * num_rows
        flat = gradient.reshape(numbers.size, -1)
        return _sum_rows(flat, numbers.reshape(-1) - first, num_rows, interpret).reshape(-1, *table.shape[1:])

    return map_on_devices(sum_local, (gradient, bring_to(numbers, of_numbers)), spec)


def _sum_rows(rows: jax.Array, numbers: jax.Array, count: int, interpret: bool) -> jax.Array:
    """Return [count, D]: for each number the sum of the rows [N, D] that have it in `numbers` [N]."""
    order = jnp.argsort(numbers).astype(jnp.int32)  # of equal numbers in the order of the tokens
    bounds = jnp.searchsorted(numbers[order], jnp.arange(count + 1), method="scan_unrolled").astype(jnp.int32)
    width = rows.shape[1]

    def kernel(order_ref, begin_ref, end_ref, rows_ref, out_ref):
        begin, end = begin_ref[...], end_ref[...]
        columns, is_column = part_of(pl.program_id(1), BLOCK.columns, width)

        def add(n, total):
            position = begin + n * BLOCK.rows
            is_row = are_before(end, position, BLOCK.rows)
            row = load_vector(order_ref.at[pl.ds(position, BLOCK.rows)], is_row)
            return total + load_rows(rows_ref, row, columns, is_row, is_column).astype(jnp.float32)

        nothing = jnp.zeros((BLOCK.rows, BLOCK.columns), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(end - begin, BLOCK.rows), add, nothing)
        total = jnp.sum(total, 0).astype(out_ref.dtype)
        triton.store(out_ref.at[pl.program_id(0), columns], total, mask=is_column)

    number = pl.BlockSpec((None,), lambda row, _: (row,))
    return call_kernel(
        kernel,
        (order, bounds[:-1], bounds[1:], rows),
        out_shape=shape_like(rows, (count, width)),
        in_specs=[FULL_ARRAY, number, number, FULL_ARRAY],
        out_specs=FULL_ARRAY,
        grid=(count, pl.cdiv(width, BLOCK.columns)),
        block=BLOCK,
        interpret=interpret,
        name="table_gradient",
    )
