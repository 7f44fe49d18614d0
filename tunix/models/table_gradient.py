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
from jax.sharding import PartitionSpec, get_abstract_mesh

from tunix.models.flash_attention import call_kernel, shape_like
from tunix.models.grouped_matmul import are_before, part_of
from tunix.models.kernels import GroupedBlock
from tunix.sharding.arrays import bring_to
from tunix.sharding.layout import gradient_spec

BLOCK = GroupedBlock(rows=8, columns=512, depth=1, warps=4, stages=2)  # rows of gradients


def sum_by_number(gradient: jax.Array, numbers: jax.Array, table: Any, interpret: bool = False) -> jax.Array:
    """Return the gradient of a table, of whose type [V, ...] is `table`: sums of gradients [B, T, ...] of its rows with
    numbers [B, T]."""
    spec = gradient_spec(table.sharding.spec)
    of_rows = jax.typeof(gradient).sharding.spec
    sizes, axes = get_abstract_mesh().shape, spec.partitions[0]

    def sum_local(gradient: jax.Array, numbers: jax.Array) -> jax.Array:
        num_rows = table.shape[0] // (1 if axes is None else jax.lax.axis_size(axes))
        first = 0 if axes is None else jax.lax.axis_index(axes) * num_rows
        flat = gradient.reshape(numbers.size, -1)
        return _sum_rows(flat, numbers.reshape(-1) - first, num_rows, interpret).reshape(-1, *table.shape[1:])

    is_open = any(sizes[axis] > 1 for axis in spec.unreduced)
    out_spec = spec if is_open else PartitionSpec(*spec.partitions)
    in_specs = of_rows, PartitionSpec(*of_rows.partitions[: numbers.ndim])
    run = jax.shard_map(sum_local, in_specs=in_specs, out_specs=out_spec, check_vma=False)
    return bring_to(run(gradient, bring_to(numbers, in_specs[1])).astype(table.dtype), spec)


def _sum_rows(rows: jax.Array, numbers: jax.Array, count: int, interpret: bool) -> jax.Array:
    """Return [count, D]: for each number the sum of the rows [N, D] that have it in `numbers` [N]."""
    order = jnp.argsort(numbers).astype(jnp.int32)  # of equal numbers in the order of the tokens
    ends = jnp.searchsorted(numbers[order], jnp.arange(count + 1), method="scan_unrolled").astype(jnp.int32)
    width = rows.shape[1]

    def kernel(order_ref, begin_ref, end_ref, rows_ref, out_ref):
        begin, end = begin_ref[...], end_ref[...]
        columns, is_column = part_of(pl.program_id(1), BLOCK.columns, width)
        shape = BLOCK.rows, BLOCK.columns
        column = jnp.broadcast_to((columns.start + jnp.arange(BLOCK.columns))[None, :], shape)

        def add(n, total):
            position = begin + n * BLOCK.rows
            is_row = are_before(end, position, BLOCK.rows)
            row = triton.load(order_ref.at[pl.ds(position, BLOCK.rows)], mask=is_row, other=0)
            mask = is_row[:, None] if is_column is None else is_row[:, None] & is_column[None, :]
            where = jnp.broadcast_to(row[:, None], shape), column
            values = triton.load(rows_ref.at[where], mask=jnp.broadcast_to(mask, shape), other=0.0)
            return total + values.astype(jnp.float32)

        total = jax.lax.fori_loop(0, pl.cdiv(end - begin, BLOCK.rows), add, jnp.zeros(shape, jnp.float32))
        total = jnp.sum(total, 0).astype(out_ref.dtype)
        triton.store(out_ref.at[pl.program_id(0), columns], total, mask=is_column)

    number = pl.BlockSpec((None,), lambda row, _: (row,))
    everything = pl.BlockSpec()
    return call_kernel(
        kernel,
        (order, ends[:-1], ends[1:], rows),
        out_shape=shape_like(rows, (count, width)),
        in_specs=[everything, number, number, everything],
        out_specs=everything,
        grid=(count, pl.cdiv(width, BLOCK.columns)),
        block=BLOCK,
        interpret=interpret,
        name="table_gradient",
    )
