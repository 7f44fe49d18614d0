"""Experts of one device in fused kernels, which take rows of tokens by their indices and write no sorted copies.

All choices of experts by tokens are sorted by expert once, as whole numbers (`sort_rows`). With 3 tokens, 2 experts for
each token, and experts 0 and 1 on this device (2: of another device):

    experts [N, k]   1 0 | 2 1 | 0 2       choices, token by token
    order            1 4 | 0 3 | 2 5       choices sorted by expert: two of expert 0, two of expert 1, two of others
    ends [X]         2 4                   the row behind the last one of each expert
    row_index [N, k] 2 0 | - 3 | 1 -       the row of each choice; NOWHERE where the expert is on another device

A row r is then the token `order[r] // k`, and these kernels (Pallas, lowered by Triton) compute all else:

    up          a = x[token] Wg, b = x[token] Wu; hidden = gated(a, b) x weight of the router     [capacity, G]
    down        z = hidden Wd                                                                     [capacity, D]
    combine     y[t] = sum of z[row_index[t, j]] over the choices j of token t that are here          [N, D]

    d_hidden    dy[token] Wd^T, then gradients of a, of b and of the router's weight, and hidden once more
    d_down      the gradient of Wd: a sum over the rows of an expert of hidden^T dy[token]
    d_inputs    gradients of Wg and Wu: a sum of x[token]^T da and x[token]^T db
    d_rows      da Wg^T + db Wu^T, which `combine` adds up for each token: dx

Rows behind the last one of this device are neither computed nor read. SonicMoE (Guo et al. 2025, arXiv:2512.14080)
computes in the same way, and gets the gradient of the router's weight without the result of the last product, too.

Arrays of rows have room for `CAPACITY_FACTOR` times the rows of equal loads: the capacity of a round. Where more rows
arrive, further rounds of the same kernels compute them (`_add_rounds`), so no choice is dropped. With even loads there
is no further round.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tunix.models.flash_attention import shape_like
from tunix.models.grouped_matmul import (
    Tiles,
    are_before,
    call_on_tiles,
    count_parts,
    list_tiles,
    load_block,
    load_rows,
    load_vector,
    part_of,
    store_block,
    sum_products,
)
from tunix.models.kernels import (
    CAPACITY_FACTOR,
    EXPERT_BLOCKS,
    LONG_GATES,
    ExpertBlocks,
    GroupedBlock,
    find_row_of_chip,
    mesh_device,
)
from tunix.sharding.arrays import vary_alike

# Hidden rows [R, G] by what the router's weights [R, G] multiply (`weighted` of model.mlp), out of the function of the
# gate, a, b, and these weights. a and b are rows times the gate's matrix and times the other one.
HIDDEN: dict[str, Callable[..., jax.Array]] = {
    "results": lambda gated, a, b, prob: gated(a, b) * prob,  # the last product is linear
    "inputs": lambda gated, a, b, prob: gated(a * prob, b * prob),  # the first products are
}
NOWHERE = 2**30  # the row of a choice whose expert is on another device
FEW_ROWS = 4096  # for so many there is room in any case: a loop whose end is data makes a GPU wait for the host


class ExpertWeights(NamedTuple):
    """Weights of a device's experts; the bias of the last product is no matter of these kernels."""

    gate: jax.Array  # [X, D, G]
    up: jax.Array  # [X, D, G]
    down: jax.Array  # [X, G, D]
    gate_bias: jax.Array | None = None  # [X, G] float32
    up_bias: jax.Array | None = None  # [X, G] float32


class Rows(NamedTuple):
    """Rows of a device's experts: the choices of all tokens, sorted by expert. All are int32."""

    order: jax.Array  # [N k]: the choice (a position in the flattened [N, k]) of each row
    row_index: jax.Array  # [N, k]: the row of each choice; NOWHERE where the expert is on another device
    ends: jax.Array  # [X]: the row behind the last one of each expert


class KernelConfig(NamedTuple):
    """Constants of these kernels, for which they are compiled."""

    # (a, b, weights of the router), all [R, G] float32 -> hidden rows [R, G], which the last product takes
    hidden: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    capacity: int  # rows of a round
    blocks: ExpertBlocks | None  # None: JAX's own operations, for CPUs and comparisons
    interpret: bool = False  # kernels are interpreted: slow, on any device, for tests


def blocks_in_use(activation: str) -> ExpertBlocks | None:
    """Return the blocks for this gate (`model.mlp.activation`) on the devices of the mesh in use; None on CPUs."""
    device = mesh_device()
    blocks = None if device is None else find_row_of_chip(EXPERT_BLOCKS, device.device_kind)
    if blocks is None or activation not in LONG_GATES:
        return blocks
    return blocks._replace(d_hidden=blocks.d_hidden_long)


def count_capacity(mean_rows: int, max_rows: int) -> int:
    """Return the rows for which a device has room, of `mean_rows` with equal loads and `max_rows` in the worst case."""
    if max_rows <= FEW_ROWS:
        return max_rows
    return min(math.ceil(CAPACITY_FACTOR * mean_rows), max_rows)


def sort_rows(group: jax.Array, num_experts: int) -> Rows:
    """Return the rows of a device's experts; `group` [N, k] int32 are their numbers, and `num_experts` of no expert."""
    flat = group.reshape(-1)
    order = jnp.argsort(flat).astype(jnp.int32)
    row_index = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32), unique_indices=True)
    # A comparison in place of a scatter: it fuses.
    sizes = jnp.sum(flat[:, None] == jnp.arange(num_experts), 0, dtype=jnp.int32)
    row_index = jnp.where(group < num_experts, row_index.reshape(group.shape), NOWHERE)
    return Rows(order, row_index, jnp.cumsum(sizes))


def compute_experts(
    x: jax.Array, probs: jax.Array, weights: ExpertWeights, rows: Rows, config: KernelConfig
) -> jax.Array:
    """Return what this device's experts add to each token, [N, D].

    `x` [N, D] are the tokens, `probs` [N, k] the router's weights of their choices.
    """
    leaves, tree = jax.tree.flatten((x, probs.astype(jnp.float32), weights, rows))
    # Weights that vary over no axis get a gradient that is summed outside of the rule below, by JAX's types.
    return _compute(*jax.tree.unflatten(tree, vary_alike(*leaves)), config)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _compute(x, probs, weights, rows, config):
    return _forward(x, probs, weights, rows, config)[0]


def _forward(x, probs, weights, rows, config):
    y, saved = _forward_round(_take_window(0, probs, rows, config), x, probs, weights, config)
    saved = jax.tree.map(lambda each: checkpoint_name(each, "product"), saved)

    def add_round(number, y):
        window = _take_window(number, probs, rows, config)
        return y + _forward_round(window, x, probs, weights, config)[0]

    return _add_rounds(add_round, y, rows, config), (x, probs, weights, rows, saved)


def _backward(config, residuals, dy):
    x, probs, weights, rows, saved = residuals
    gradients = _backward_round(_take_window(0, probs, rows, config), saved, dy, x, probs, weights, config)

    def add_round(number, gradients):
        window = _take_window(number, probs, rows, config)
        saved = _up_plainly(x, weights, window) if config.blocks is None else _up(x, weights, window, config)[:2]
        more = _backward_round(window, saved, dy, x, probs, weights, config)
        return jax.tree.map(jnp.add, gradients, more)

    return (*_add_rounds(add_round, gradients, rows, config), None)


_compute.defvjp(_forward, _backward)


def _add_rounds(add_round: Callable[[jax.Array, Any], Any], first: Any, rows: Rows, config: KernelConfig) -> Any:
    """Return the sum of `first`, which is of round 0, and of further rounds while there are rows."""
    (num_tokens, per_token), num_experts = rows.row_index.shape, len(rows.ends)
    if config.capacity >= num_tokens * min(per_token, num_experts):
        return first
    last = rows.ends[-1]
    with jax.named_scope("further_rounds"):  # the predicted time knows them by this name
        return jax.lax.while_loop(
            lambda carry: carry[0] * config.capacity < last,
            lambda carry: (carry[0] + 1, add_round(*carry)),
            (jnp.ones_like(last), first),
        )[1]


class Window(NamedTuple):
    """Rows of one round: positions from 0 to `capacity`, of which the first ones are taken."""

    token: jax.Array  # [capacity] int32; behind the last row anything
    prob: jax.Array  # [capacity] float32: the router's weight; behind the last row anything
    begin: jax.Array  # [X] int32: first row of each expert
    end: jax.Array  # [X] int32: row behind its last one
    row_index: jax.Array  # [N, k] int32: NOWHERE also for rows of other rounds


def _take_window(number: Any, probs: jax.Array, rows: Rows, config: KernelConfig) -> Window:
    capacity, low = config.capacity, number * config.capacity
    # A slice that reaches beyond the end of an array would be moved, so the array is filled up.
    order = jnp.pad(rows.order, (0, -len(rows.order) % capacity))
    order = order[:capacity] if isinstance(number, int) else jax.lax.dynamic_slice(order, (low,), (capacity,))
    starts = jnp.concatenate([jnp.zeros_like(rows.ends[:1]), rows.ends[:-1]])
    row_index = rows.row_index - low
    row_index = jnp.where((row_index >= 0) & (row_index < capacity), row_index, NOWHERE)
    begin, end = (jnp.clip(each - low, 0, capacity) for each in (starts, rows.ends))
    return Window(order // probs.shape[1], probs.reshape(-1)[order], begin, end, row_index)


def _forward_round(window, x, probs, weights, config):
    """Return what the rows of a window add to each token, and a and b [capacity, G], which the backward pass takes."""
    if config.blocks is None:
        a, b = _up_plainly(x, weights, window)
        return _down_plainly(a, b, probs, weights.down, window, config), (a, b)
    a, b, hidden = _up(x, weights, window, config)
    return _combine(_down(hidden, weights.down, window, config), window, config), (a, b)


def _backward_round(window, saved, dy, x, probs, weights, config):
    """Return the gradients of x, probs and weights from the rows of a window; dy [N, D] is that of the result."""
    a, b = saved
    if config.blocks is None:
        into, out = partial(_up_plainly, window=window), partial(_down_plainly, window=window, config=config)
        d_a, d_b, d_probs, d_down = jax.vjp(out, a, b, probs, weights.down)[1](dy)
        dx, d_weights = jax.vjp(into, x, weights)[1]((d_a, d_b))
        return dx, d_probs, d_weights._replace(down=d_down)
    d_a, d_b, hidden, d_prob = _d_hidden(dy, weights.down, a, b, window, config)
    d_down = _d_down(hidden, dy, weights.down, window, config)
    d_inputs = _d_inputs(x, d_a, d_b, weights, window, config)
    dx = _combine(_d_rows(d_a, d_b, weights, window, config), window, config)
    # Rows that nobody wrote have no index.
    d_probs = jnp.sum(d_prob, 0).at[window.row_index].get(mode="fill", fill_value=0)
    return dx, d_probs, ExpertWeights(d_inputs[0], d_inputs[1], d_down, *d_inputs[2:])


# The same by operations of JAX, which have gradients.


def _up_plainly(x: jax.Array, weights: ExpertWeights, window: Window) -> tuple[jax.Array, jax.Array]:
    """Return a and b, [capacity, G] each; 0 behind the last row. They do not take `weights.down`."""
    rows = jnp.where(_has_row(window), x[window.token], 0)
    group = jnp.sum(jnp.arange(len(window.token))[:, None] >= window.end, 1)

    def multiply(w: jax.Array, bias: jax.Array | None) -> jax.Array:
        product = _multiply_plainly(rows, w, window)
        return product if bias is None else (product + bias.at[group].get(mode="clip")).astype(x.dtype)

    return multiply(weights.gate, weights.gate_bias), multiply(weights.up, weights.up_bias)


def _down_plainly(
    a: jax.Array, b: jax.Array, probs: jax.Array, down: jax.Array, window: Window, config: KernelConfig
) -> Any:
    """Return the sums [N, D] of rows a and b [capacity, G], with the weights of the router [N, k]."""
    # The router's weight of a row by its index, so that it has a gradient.
    prob = jnp.zeros(len(a), probs.dtype).at[window.row_index].set(probs, mode="drop", unique_indices=True)[:, None]
    hidden = config.hidden(a.astype(jnp.float32), b.astype(jnp.float32), prob)
    z = _multiply_plainly(jnp.where(_has_row(window), hidden, 0).astype(a.dtype), down, window)
    sums = jnp.sum(z.at[window.row_index].get(mode="fill", fill_value=0).astype(jnp.float32), 1)
    return sums.astype(a.dtype)


def _has_row(window: Window) -> jax.Array:
    """Return which of the positions of a window are taken, [capacity, 1]."""
    return (jnp.arange(len(window.token)) < window.end[-1])[:, None]


def _multiply_plainly(rows: jax.Array, w: jax.Array, window: Window) -> jax.Array:
    """Return rows [capacity, in] times the weights [X, in, out] of their experts; 0 behind the last row."""
    return jnp.where(_has_row(window), jax.lax.ragged_dot(rows, w, window.end - window.begin), 0)


# Kernels. A block of rows has rows of one expert (`Tiles`, grouped_matmul.py). Those of products that sum over D or G
# are programs of a grid (columns, blocks of rows). Operands have 16 bits, sums are float32.


def _tiles(window: Window, capacity: int, block: GroupedBlock) -> Tiles:
    return list_tiles(window.end - window.begin, capacity, block.rows)


def _up(x: jax.Array, weights: ExpertWeights, window: Window, config: KernelConfig) -> list[jax.Array]:
    """Return a, b and hidden rows, [capacity, G] each; the gate takes rounded a and b, as the backward pass will."""
    assert config.blocks is not None
    block, (_, _, width) = config.blocks.up, weights.gate.shape
    tiles, result = _tiles(window, config.capacity, block), shape_like(x, (config.capacity, width))

    def kernel(tile, token_ref, prob_ref, x_ref, refs, a_ref, b_ref, hidden_ref):
        group, begin, end = (each[...] for each in tile)
        rows, is_row = pl.ds(begin, block.rows), are_before(end, begin, block.rows)
        columns, is_column = part_of(pl.program_id(0), block.columns, width)
        token = load_vector(token_ref.at[rows], is_row)

        def body(n, sums):
            depth, is_depth = part_of(n, block.depth, x_ref.shape[1])
            factor = load_rows(x_ref, token, depth, None, is_depth)
            return tuple(
                total + triton.dot(factor, load_block(ref.at[group, depth, columns], is_depth, is_column))
                for total, ref in zip(sums, (refs.gate, refs.up), strict=True)
            )

        zero = jnp.zeros((block.rows, block.columns), jnp.float32)
        a, b = jax.lax.fori_loop(0, count_parts(x_ref.shape[1], block, tile), body, (zero, zero))
        if refs.gate_bias is not None:
            a += load_vector(refs.gate_bias.at[group, columns], is_column)[None, :]
            b += load_vector(refs.up_bias.at[group, columns], is_column)[None, :]
        a, b = (each.astype(x_ref.dtype).astype(jnp.float32) for each in (a, b))
        prob = load_vector(prob_ref.at[rows], is_row)
        hidden = config.hidden(a, b, jnp.broadcast_to(prob[:, None], a.shape))
        for ref, values in ((a_ref, a), (b_ref, b), (hidden_ref, hidden)):
            store_block(ref.at[rows, columns], values, is_row, is_column)

    grid, arrays = (pl.cdiv(width, block.columns), len(tiles.group)), (window.token, window.prob, x, weights)
    return call_on_tiles(kernel, (tiles, *arrays), [result] * 3, grid, block, config.interpret, "experts_up")


def _down(hidden: jax.Array, down: jax.Array, window: Window, config: KernelConfig) -> jax.Array:
    """Return hidden rows [capacity, G] times the weights [X, G, D] of their experts: [capacity, D]."""
    assert config.blocks is not None
    return _multiply_rows((hidden,), (down,), config.blocks.down, window, config, transposed=False, name="down")


def _d_rows(d_a: jax.Array, d_b: jax.Array, weights: ExpertWeights, window: Window, config: KernelConfig) -> jax.Array:
    """Return the gradient of each row's token, [capacity, D]."""
    assert config.blocks is not None
    factors = (weights.gate, weights.up)
    return _multiply_rows((d_a, d_b), factors, config.blocks.d_rows, window, config, transposed=True, name="d_rows")


def _multiply_rows(arrays, factors, block, window, config, transposed: bool, name: str) -> jax.Array:
    """Return the sum of products of arrays with the weights of their experts; see `sum_products`."""
    tiles = _tiles(window, config.capacity, block)
    return sum_products(tiles, arrays, factors, block, config.interpret, transposed=transposed, name=f"experts_{name}")


def _combine(z: jax.Array, window: Window, config: KernelConfig) -> jax.Array:
    """Return for each token the sum [N, D] of its rows of z [capacity, D], in the order of its choices."""
    assert config.blocks is not None
    block, (num_tokens, per_token), dim = config.blocks.combine, window.row_index.shape, z.shape[1]

    def kernel(row_index_ref, z_ref, y_ref):
        tokens, is_token = part_of(pl.program_id(1), block.rows, num_tokens)
        columns, is_column = part_of(pl.program_id(0), block.columns, dim)
        total = jnp.zeros((block.rows, block.columns), jnp.float32)
        for choice in range(per_token):
            row_index = load_vector(row_index_ref.at[tokens, jnp.full((), choice, jnp.int32)], is_token, other=NOWHERE)
            is_row = row_index < NOWHERE
            rows = load_rows(z_ref, jnp.where(is_row, row_index, 0), columns, is_row, is_column)
            total += rows.astype(jnp.float32)
        store_block(y_ref.at[tokens, columns], total, is_token, is_column)

    grid = pl.cdiv(dim, block.columns), pl.cdiv(num_tokens, block.rows)
    return call_on_tiles(
        kernel,
        (window.row_index, z),
        shape_like(z, (num_tokens, dim)),
        grid,
        block,
        config.interpret,
        "experts_combine",
    )


def _d_hidden(dy, down, a, b, window: Window, config: KernelConfig) -> tuple[jax.Array, ...]:
    """Return gradients of a and of b, hidden rows, all [capacity, G], and parts [parts, capacity] of the router's.

    `dy` is [N, D], `down` [X, G, D].
    """
    assert config.blocks is not None
    block, (_, width, dim) = config.blocks.d_hidden, down.shape
    tiles, result = _tiles(window, config.capacity, block), shape_like(a, (config.capacity, width))
    num_parts = pl.cdiv(width, block.columns)

    def kernel(tile, token_ref, prob_ref, dy_ref, down_ref, a_ref, b_ref, d_a_ref, d_b_ref, hidden_ref, d_prob_ref):
        group, begin, end = (each[...] for each in tile)
        rows, is_row = pl.ds(begin, block.rows), are_before(end, begin, block.rows)
        columns, is_column = part_of(pl.program_id(0), block.columns, width)
        token = load_vector(token_ref.at[rows], is_row)

        def body(n, total):
            depth, is_depth = part_of(n, block.depth, dim)
            factor = load_rows(dy_ref, token, depth, None, is_depth)
            return total + triton.dot(factor, load_block(down_ref.at[group, columns, depth], is_column, is_depth).T)

        zero = jnp.zeros((block.rows, block.columns), jnp.float32)
        total = jax.lax.fori_loop(0, count_parts(dim, block, tile), body, zero)
        a, b = (load_block(ref.at[rows, columns], is_row, is_column).astype(jnp.float32) for ref in (a_ref, b_ref))
        prob = jnp.broadcast_to(load_vector(prob_ref.at[rows], is_row)[:, None], total.shape)
        hidden, pull_back = jax.vjp(config.hidden, a, b, prob)
        d_a, d_b, d_prob = pull_back(total)
        triton.store(d_prob_ref.at[pl.program_id(0), rows], jnp.sum(d_prob, 1), mask=is_row)
        for ref, values in ((d_a_ref, d_a), (d_b_ref, d_b), (hidden_ref, hidden)):
            store_block(ref.at[rows, columns], values, is_row, is_column)

    results = (result, result, result, shape_like(a, (num_parts, config.capacity), jnp.float32))
    arrays, grid = (tiles, window.token, window.prob, dy, down, a, b), (num_parts, len(tiles.group))
    return call_on_tiles(kernel, arrays, results, grid, block, config.interpret, "experts_d_hidden")


def _d_down(hidden: jax.Array, dy: jax.Array, down: jax.Array, window: Window, config: KernelConfig) -> jax.Array:
    """Return the gradient [X, G, D] of the weights of the last product, of hidden rows [capacity, G] and dy [N, D]."""
    assert config.blocks is not None
    block, (num_experts, width, dim) = config.blocks.d_down, down.shape

    def kernel(begin_ref, end_ref, token_ref, hidden_ref, dy_ref, dw_ref):
        group = pl.program_id(2)
        inputs, is_input = part_of(pl.program_id(1), block.rows, width)
        columns, is_column = part_of(pl.program_id(0), block.columns, dim)

        def body(n, total):
            rows, is_row, token = _part_of_rows(n, begin_ref[group], end_ref[group], block, token_ref)
            factor = load_block(hidden_ref.at[rows, inputs], is_row, is_input).T
            return total + triton.dot(factor, load_rows(dy_ref, token, columns, None, is_column))

        zero = jnp.zeros((block.rows, block.columns), jnp.float32)
        num_blocks = pl.cdiv(end_ref[group] - begin_ref[group], block.depth)
        total = jax.lax.fori_loop(0, num_blocks, body, zero)
        store_block(dw_ref.at[group, inputs, columns], total, is_input, is_column)

    grid = pl.cdiv(dim, block.columns), pl.cdiv(width, block.rows), num_experts
    arrays, result = (window.begin, window.end, window.token, hidden, dy), shape_like(hidden, down.shape, down.dtype)
    return call_on_tiles(kernel, arrays, result, grid, block, config.interpret, "experts_d_down")


def _d_inputs(x, d_a, d_b, weights: ExpertWeights, window: Window, config: KernelConfig) -> tuple[jax.Array, ...]:
    """Return the gradients of the gate's and the other weights [X, D, G], and of their biases [X, G] if there are some.

    `x` is [N, D]; those of a and of b are [capacity, G].
    """
    assert config.blocks is not None
    block, (num_experts, dim, width) = config.blocks.d_inputs, weights.gate.shape
    biases = [bias for bias in weights[3:] if bias is not None]

    def kernel(begin_ref, end_ref, token_ref, x_ref, side_refs, *refs):
        group = pl.program_id(2)
        inputs, is_input = part_of(pl.program_id(1), block.rows, dim)
        columns, is_column = part_of(pl.program_id(0), block.columns, width)
        num_blocks = pl.cdiv(end_ref[group] - begin_ref[group], block.depth)

        def body(n, sums):
            # Rows behind the last one are those of some token: what they meet is 0.
            rows, is_row, token = _part_of_rows(n, begin_ref[group], end_ref[group], block, token_ref)
            factor = load_rows(x_ref, token, inputs, None, is_input).T
            return tuple(
                total + triton.dot(factor, load_block(ref.at[rows, columns], is_row, is_column))
                for total, ref in zip(sums, side_refs, strict=True)
            )

        zero = jnp.zeros((block.rows, block.columns), jnp.float32)
        sums = jax.lax.fori_loop(0, num_blocks, body, (zero, zero))
        for ref, total in zip(refs, sums, strict=False):
            store_block(ref.at[group, inputs, columns], total, is_input, is_column)
        is_first = pl.program_id(1) == 0  # of the programs with these columns

        def add_biases(n, sums):
            rows, is_row, _ = _part_of_rows(n, begin_ref[group], end_ref[group], block, token_ref)
            parts = (load_block(ref.at[rows, columns], is_row, is_column) for ref in side_refs)
            return tuple(total + jnp.sum(each.astype(jnp.float32), 0) for total, each in zip(sums, parts, strict=True))

        if biases:
            zeros = (jnp.zeros(block.columns, jnp.float32),) * 2
            sums = jax.lax.fori_loop(0, num_blocks * is_first.astype(jnp.int32), add_biases, zeros)
            mask = is_first if is_column is None else is_first & is_column
            for ref, total in zip(refs[2:], sums, strict=True):
                triton.store(ref.at[group, columns], total, mask=jnp.broadcast_to(mask, total.shape))

    grid = pl.cdiv(width, block.columns), pl.cdiv(dim, block.rows), num_experts
    results = tuple(shape_like(x, each.shape, each.dtype) for each in (weights.gate, weights.up, *biases))
    arrays = (window.begin, window.end, window.token, x, (d_a, d_b))
    return call_on_tiles(kernel, arrays, results, grid, block, config.interpret, "experts_d_inputs")


def _part_of_rows(n, begin, end, block: GroupedBlock, token_ref) -> tuple[Any, jax.Array, jax.Array]:
    """Return the positions of the n-th part of an expert's rows, which of them it has, and their tokens."""
    first = begin + n * block.depth
    rows, is_row = pl.ds(first, block.depth), are_before(end, first, block.depth)
    return rows, is_row, load_vector(token_ref.at[rows], is_row)
