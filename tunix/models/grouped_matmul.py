"""Products of rows with the weights of their groups, for GPUs: each block of rows meets the weights of one group.

The rows are sorted by group, and how many rows a group has is data. Each group has its own blocks of rows, of which the
last one may not be full. A block knows its group, its first row, and the row behind its last one (`Tiles`):

    rows     0 1 2 3 4 5 6 7 8 9 10 11        sizes of the groups 5, 0, 4; three rows behind them
    group    0 0 0 0 0 2 2 2 2
    blocks   [  a  ] [b] [ c ] [ d ]          of 3 rows: a, b of group 0; c, d of group 2; none of group 1

The number of blocks is data too, and at most that of full blocks + the number of groups: a program behind the last
block has nothing to do. MegaBlocks (Gale et al. 2022, arXiv:2211.15841) computes in the same way. There are three
kernels, written in Pallas and lowered by Triton: the product; the gradient of rows, a product with the transposed
weights; the gradient of weights, a sum over the rows of a group. They take 16-bit operands and add up in float32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tunix.models.flash_attention import call_kernel, shape_like
from tunix.models.kernels import GROUPED_BLOCKS, GroupedBlock, GroupedBlocks, find_row_in_use

FULL_ARRAY = pl.BlockSpec()  # a program sees all of it, and loads the blocks that it needs


class Tiles(NamedTuple):
    """Blocks of rows of one group each: int32 arrays, or in a kernel the refs to the numbers of its own block."""

    group: Any
    begin: Any  # first row
    end: Any  # row behind the last one; equal to `begin` in blocks that are not needed


def grouped(rows: jax.Array, w: jax.Array, sizes: jax.Array, blocks: GroupedBlocks | None = None) -> jax.Array:
    """Return [R, out] of rows [R, in] sorted by group, weights [X, in, out] and the number of rows of each group [X].

    Results of rows behind the last group are undefined, and so are their gradients. With `blocks` given, the kernels
    are interpreted: slow, on any device, for tests.
    """
    return _multiply(rows, w, sizes, blocks or find_row_in_use(GROUPED_BLOCKS), blocks is not None)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(rows, w, sizes, blocks, interpret):
    return _product(rows, w, sizes, blocks.forward, interpret, transposed=False, name="grouped_forward")


def _multiply_backward(blocks, interpret, residuals, gradient):
    rows, w, sizes = residuals
    d_rows = _product(gradient, w, sizes, blocks.d_rows, interpret, transposed=True, name="grouped_d_rows")
    return d_rows, _weights_gradient(rows, gradient, w, sizes, blocks.d_weights, interpret), None


_multiply.defvjp(lambda rows, w, sizes, *more: (_multiply(rows, w, sizes, *more), (rows, w, sizes)), _multiply_backward)


def _product(rows, w, sizes, block: GroupedBlock, interpret: bool, transposed: bool, name: str) -> jax.Array:
    """Return rows [R, in] times the weights [X, in, out] of their groups; `transposed` weights are [X, out, in]."""
    tiles = list_tiles(sizes, len(rows), block.rows)
    return sum_products(tiles, (rows,), (w,), block, interpret, transposed=transposed, name=name)


def sum_products(
    tiles: Tiles,
    arrays: tuple[jax.Array, ...],
    factors: tuple[jax.Array, ...],
    block: GroupedBlock,
    interpret: bool,
    *,
    transposed: bool,
    name: str,
) -> jax.Array:
    """Return the sum [R, out] of products of arrays [R, in] with weights [X, in, out], those of the group of each row.

    With `transposed` the weights are [X, out, in].
    """
    (num_rows, width), dim = arrays[0].shape, factors[0].shape[1 if transposed else 2]

    def kernel(tile, array_refs, factor_refs, out_ref):
        group, begin, end = (each[...] for each in tile)
        rows, is_row = pl.ds(begin, block.rows), are_before(end, begin, block.rows)
        columns, is_column = part_of(pl.program_id(0), block.columns, dim)
        total = jnp.zeros((block.rows, block.columns), jnp.float32)
        for array_ref, w_ref in zip(array_refs, factor_refs, strict=True):

            def body(n, total, array_ref=array_ref, w_ref=w_ref):
                depth, is_depth = part_of(n, block.depth, width)
                factor = load_block(array_ref.at[rows, depth], is_row, is_depth)
                if transposed:
                    return total + triton.dot(
                        factor, load_block(w_ref.at[group, columns, depth], is_column, is_depth).T
                    )
                return total + triton.dot(factor, load_block(w_ref.at[group, depth, columns], is_depth, is_column))

            total = jax.lax.fori_loop(0, count_parts(width, block, tile), body, total)
        store_block(out_ref.at[rows, columns], total, is_row, is_column)

    # Programs that follow one another have the same rows, then the same weights: they find them in the cache.
    grid, result = (pl.cdiv(dim, block.columns), len(tiles.group)), shape_like(arrays[0], (num_rows, dim))
    return call_on_tiles(kernel, (tiles, arrays, factors), result, grid, block, interpret, name)


def call_on_tiles(kernel, arrays, results, grid: tuple[int, ...], block: GroupedBlock, interpret: bool, name: str):
    """Return the results of a kernel, whose programs see arrays and results whole, and one entry of `Tiles`."""
    tile_spec = pl.BlockSpec((None,), lambda _, tile: (tile,))

    def specs_of(array: Any) -> Any:
        return Tiles(*[tile_spec] * 3) if isinstance(array, Tiles) else jax.tree.map(lambda _: FULL_ARRAY, array)

    return call_kernel(
        kernel,
        arrays,
        out_shape=results,
        in_specs=tuple(map(specs_of, arrays)),
        out_specs=jax.tree.map(lambda _: FULL_ARRAY, results),
        grid=grid,
        block=block,
        interpret=interpret,
        name=name,
    )


def count_parts(length: int, block: GroupedBlock, tile: Tiles) -> Any:
    """Return the parts of a dimension that a program sums over: none in a program without rows."""
    return pl.cdiv(length, block.depth) * (tile.begin[...] < tile.end[...]).astype(jnp.int32)


def _weights_gradient(rows, gradient, w, sizes, block: GroupedBlock, interpret: bool) -> jax.Array:
    """Return for each group [X, in, out] the sum over its rows of rows [R, in] times their gradients [R, out]."""
    ends = jnp.cumsum(sizes)
    group_spec = pl.BlockSpec((None,), lambda _column, _row, group: (group,))
    return call_kernel(
        partial(_weights_kernel, block=block),
        (ends - sizes, ends, rows, gradient),
        out_shape=shape_like(rows, w.shape, w.dtype),
        in_specs=[group_spec, group_spec, FULL_ARRAY, FULL_ARRAY],
        out_specs=FULL_ARRAY,
        # A group has its own programs, with a loop over its rows: no two programs add to the same numbers.
        grid=(pl.cdiv(w.shape[2], block.columns), pl.cdiv(w.shape[1], block.rows), len(w)),
        block=block,
        interpret=interpret,
        name="grouped_d_weights",
    )


def list_tiles(sizes: jax.Array, num_rows: int, tile_rows: int) -> Tiles:
    """Return the blocks of `tile_rows` rows of groups with `sizes` [groups]: as many as may be needed, those without
    rows last.

    For 12 rows, groups of 5, 0 and 4 rows, and blocks of 3 (see above):

        counts    2 0 2         blocks of each group
        behind    2 2 4         block behind the last one of each group
        tile      0 1 2 3 | 4 5 6
        group     0 0 2 2 | 2 2 2        the number of groups whose blocks all come before
        begin     0 3 5 8 |              first row of the group + 3 for each earlier block of the group
        end       3 5 8 9 | = begin
    """
    num_groups = len(sizes)
    ends = jnp.cumsum(sizes)
    counts = -(-sizes // tile_rows)
    behind = jnp.cumsum(counts)
    tile = jnp.arange(num_rows // tile_rows + num_groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(tile[:, None] >= behind, 1, dtype=jnp.int32), num_groups - 1)
    begin = (ends - sizes)[group] + (tile - (behind - counts)[group]) * tile_rows
    end = jnp.minimum(begin + tile_rows, ends[group])
    return Tiles(group, begin, jnp.where(tile < behind[-1], end, begin))


def _weights_kernel(begin_ref, end_ref, rows_ref, gradient_ref, dw_ref, *, block: GroupedBlock):
    """A block of the gradient of one group's weights: the sum over the rows of the group, `block.depth` at a time."""
    group, begin, end = pl.program_id(2), begin_ref[...], end_ref[...]
    _, num_inputs, num_columns = dw_ref.shape
    inputs, is_input = part_of(pl.program_id(1), block.rows, num_inputs)
    columns, is_column = part_of(pl.program_id(0), block.columns, num_columns)

    def body(n, total):
        first = begin + n * block.depth
        rows, is_row = pl.ds(first, block.depth), are_before(end, first, block.depth)
        x = load_block(rows_ref.at[rows, inputs], is_row, is_input)
        return total + triton.dot(x.T, load_block(gradient_ref.at[rows, columns], is_row, is_column))

    num_blocks = pl.cdiv(end - begin, block.depth)
    total = jax.lax.fori_loop(0, num_blocks, body, jnp.zeros((block.rows, block.columns), jnp.float32))
    store_block(dw_ref.at[group, inputs, columns], total, is_input, is_column)


# A block at the edge of an array or of a group reaches beyond it. What lies there is read as 0 and not written. `None`
# in place of a mask says that all of a block is there: Triton then loads it without a comparison for each number.


def are_before(end: Any, begin: Any, size: int) -> jax.Array:
    """Return which of the positions begin ... begin + size - 1 lie before `end`: [size] bool."""
    return begin + jnp.arange(size) < end


def part_of(n: Any, size: int, length: int) -> tuple[Any, jax.Array | None]:
    """Return positions of the n-th part of a dimension, and which it has, [size] bool; None if all parts are full."""
    return pl.ds(n * size, size), None if length % size == 0 else are_before(length, n * size, size)


def _mask(is_row: jax.Array | None, is_column: jax.Array | None) -> jax.Array | None:
    """Return the mask of a block [rows, columns], out of those of its rows and of its columns; None if all is there."""
    if is_row is None:
        return None if is_column is None else is_column[None, :]
    return is_row[:, None] if is_column is None else is_row[:, None] & is_column[None, :]


def load_block(ref: Any, is_row: jax.Array | None, is_column: jax.Array | None) -> jax.Array:
    """Return the numbers [rows, columns] of a block; 0 where the masks [rows] or [columns] are false."""
    mask = _mask(is_row, is_column)
    return ref[...] if mask is None else triton.load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=0.0)


def load_rows(
    ref: Any, rows: jax.Array, columns: Any, is_row: jax.Array | None, is_column: jax.Array | None
) -> jax.Array:
    """Return a part of the rows with these numbers [rows], [rows, columns]; 0 where the masks are false."""
    mask = _mask(is_row, is_column)
    if mask is None:
        return ref[rows, columns]
    # A masked load takes the numbers of all its places.
    shape = len(rows), columns.size
    row = jnp.broadcast_to(rows[:, None], shape)
    column = jnp.broadcast_to((columns.start + jnp.arange(columns.size))[None, :], shape)
    return triton.load(ref.at[row, column], mask=jnp.broadcast_to(mask, shape), other=0.0)


def load_vector(ref: Any, is_there: jax.Array | None, other: float = 0) -> jax.Array:
    """Return the numbers [n] of a ref; `other` where the mask is false."""
    return ref[...] if is_there is None else triton.load(ref, mask=is_there, other=other)


def store_block(ref: Any, values: jax.Array, is_row: jax.Array | None, is_column: jax.Array | None) -> None:
    """Write numbers [rows, columns] where the masks [rows] and [columns] are true: another program writes the rest."""
    mask = _mask(is_row, is_column)
    mask = None if mask is None else jnp.broadcast_to(mask, ref.shape)
    triton.store(ref, values.astype(ref.dtype), mask=mask)
