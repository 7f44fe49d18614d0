"""Exchanges of experts: how tokens reach the devices that have their experts, and how the results come back.

Devices along some mesh axes have different experts and different tokens. An exchange runs inside a `shard_map`, on one
device's arrays: `Tokens` -> sums of the results of each token's experts [n, D], and the number of choices that were
dropped. With two devices that have two experts and two tokens each, and one expert for a token:

    gather   device 0, experts 0 1   tokens a b   gather   a b c d -> results of 0 1   reduce-scatter   sums of a b
             device 1, experts 2 3   tokens c d   ----->   a b c d -> results of 2 3   ------------->   sums of c d

    rows     device 0, experts 0 1   a:2  b:0     there    b         -> b0             back             a2 b0
             device 1, experts 2 3   c:3  d:2     ----->   a, d c    -> a2, d2 c3      ------------->   c3 d2

`gather` runs on every platform: each token travels to every device, whether its experts are there or not. `rows` sends
a token to each of its experts: less where a token has fewer experts than there are devices. `EXPERT_EXCHANGES` of
`models/table.py` has their names.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from tunix.base.errors import UserError
from tunix.config import Model
from tunix.config.layers import ExpertsMlp
from tunix.models.kernels import Choice
from tunix.models.table import EXPERT_EXCHANGES
from tunix.sharding.mesh import count_devices
from tunix.sharding.table import DIMS, EXPERTS


class Trips(NamedTuple):
    """Rows that one device exchanges with each device, [devices] int32 each, as `ragged_all_to_all` takes them."""

    starts: jax.Array  # positions of the first row for each device, among those that this device has
    sizes: jax.Array  # rows for each device
    offsets: jax.Array  # positions that these rows get on the other device
    arriving: jax.Array  # rows from each device


class Plan(NamedTuple):
    """Plan of one device's exchange of rows, which each device makes out of the same counts.

    `jax.lax.ragged_all_to_all` moves rows whose numbers are data. It must be told where the rows for each device begin,
    and at which position of the other device's buffer they arrive.
    """

    there: Trips
    back: Trips
    group: jax.Array  # [capacity]: the own expert of each row that arrives; behind the last row, a number of no expert
    sent: jax.Array  # [X]: rows of this device that go to each expert; the others do not fit into its device's buffer


def plan_rows(counts: jax.Array, device: jax.Array | int, capacity: int) -> Plan:
    """Return the plan of a device, out of the choices of all devices for each expert: `counts` [devices, X] int32.

    Rows for device t leave device f in the order of t's experts. They arrive in the order of the devices f:

        sizes [f, t]    2 1     device 0 has   to 0, to 0, to 1          device 0 gets   of 0, of 0, of 1
                        1 3     device 1 has   to 0, to 1, to 1, to 1    device 1 gets   of 0, of 1, of 1, of 1
        starts [f, t]   0 2     sums along t of what comes before
        offsets [f, t]  0 0     sums along f of what comes before
                        2 1

    The way back has the same rows: what was a start is an offset, and what was an offset is a start.
    """
    num_devices = len(counts)
    sent = limit_to_capacity(counts, capacity)
    by_device = sent.reshape(num_devices, num_devices, -1)  # [from, to, experts of a device]
    sizes = jnp.sum(by_device, 2)
    starts, offsets = jnp.cumsum(sizes, 1) - sizes, jnp.cumsum(sizes, 0) - sizes
    there = Trips(starts[device], sizes[device], offsets[device], sizes[:, device])
    back = Trips(offsets[:, device], sizes[:, device], starts[:, device], sizes[device])
    # The own expert of each row. Rows arrive in runs: those of the first sender for own expert 0, for own expert 1, and
    # so on, then those of the second sender. The number of runs that have ended says in which run a position is:
    #
    #     rows of runs    2 1 | 0 3              two senders, two own experts; ends 2 3 3 6
    #     position        0 1 2 3 4 5 | 6 7
    #     run             0 0 1 3 3 3 | 4 4      ends at or before the position
    #     own expert      0 0 1 1 1 1 | 2 2      run mod 2; 2 is of none
    ends = jnp.cumsum(by_device[:, device].reshape(-1))
    run = jnp.cumsum(jnp.zeros(capacity, jnp.int32).at[ends].add(1, mode="drop"))
    num_local = by_device.shape[2]
    group = jnp.where(jnp.arange(capacity) < ends[-1], run % num_local, num_local)
    return Plan(there, back, group, sent[device])


def limit_to_capacity(counts: jax.Array, capacity: int) -> jax.Array:
    """Return the rows [devices, X] that are sent, so that at most `capacity` arrive on each device.

    Where more would arrive, each device and each expert gives up the same share of its rows, rounded up. So no device
    and no expert is preferred.
    """
    num_devices, num_experts = counts.shape
    arriving = jnp.sum(counts.reshape(num_devices, num_devices, -1), (0, 2))  # [to]
    # A little less than the share: float32 must not round a product up to the next whole number.
    share = jnp.repeat(capacity * (1 - 1e-6) / jnp.maximum(arriving, 1), num_experts // num_devices)
    fits = jnp.repeat(arriving <= capacity, num_experts // num_devices)
    return jnp.where(fits, counts, jnp.floor(counts * share).astype(counts.dtype))


def rank_in_group(group: jax.Array, counts: jax.Array) -> jax.Array:
    """Return how many earlier entries of `group` [n] have the same number; `counts` [X] are those of each number."""
    # JAX sorts in a stable way: entries of one number come in their order, from the first position of this number on.
    order = jnp.argsort(group)
    position = jnp.zeros_like(order).at[order].set(jnp.arange(len(group)), unique_indices=True)
    return position - (jnp.cumsum(counts) - counts)[group]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def move_rows(rows: Any, trips: Trips, opposite: Trips, lengths: tuple[int, int], axes: tuple[str, ...]) -> Any:
    """Return the rows that come to this device, [lengths[0], ...], in the places of `trips`; 0 elsewhere.

    `rows` are [lengths[1], ...]. A gradient goes to where its row came from, by the trips of the way back, `opposite`.
    JAX's own rule would have the devices tell one another these positions once more.
    """
    empty = jnp.zeros((lengths[0], *rows.shape[1:]), rows.dtype)
    empty = jax.lax.pcast(empty, tuple(sorted(jax.typeof(rows).manual_axis_type.varying)), to="varying")
    return jax.lax.ragged_all_to_all(rows, empty, *trips, axis_name=axes)


def _move_backward(lengths, axes, residuals, gradient):
    trips, opposite = residuals
    return move_rows(gradient, opposite, trips, lengths[::-1], axes), None, None


move_rows.defvjp(lambda rows, trips, back, *more: (move_rows(rows, trips, back, *more), (trips, back)), _move_backward)


WITHOUT_ROWS = ("cpu",)  # platforms for which jax 0.10.2 does not compile `ragged_all_to_all`


def select_expert_exchange(model: Model, sizes: Mapping[str, int], platform: str | None) -> Choice:
    """Return the exchange of `model.expert_exchange` on a mesh of these sizes; `platform` None is not known.

    `auto` takes the exchange that sends fewer bytes. Of n tokens on a device, each with k experts, n x (ep - 1) arrive
    by `gather`, and n x k x (ep - 1) / ep rows by `rows` where loads are equal; as many results go back.
    """
    mlp, axes = model.mlp, DIMS[EXPERTS].weight_axes
    num_devices, together = count_devices(sizes, axes), " x ".join(axes)
    if num_devices == 1 or not isinstance(mlp, ExpertsMlp):
        return Choice("gather", "each device has all experts")
    if model.expert_exchange != "auto":
        return Choice(model.expert_exchange, f"model.expert_exchange={model.expert_exchange}")
    if model.expert_buffer_factor is not None:
        return Choice("rows", f"model.expert_buffer_factor={model.expert_buffer_factor:g} bounds its buffer")
    fewer = mlp.experts_per_token < num_devices
    compared = f"{mlp.experts_per_token} experts of a token, {together}={num_devices}"
    if platform is None or platform in WITHOUT_ROWS:
        return Choice("gather", f"runs on {platform or 'every platform'}")
    return Choice("rows" if fewer else "gather", f"sends fewer bytes: {compared}" if fewer else compared)


def check_expert_exchange(model: Model, name: str, device: AbstractDevice | None) -> None:
    """Raise `UserError` where the chosen exchange does not run on this device; None is not known."""
    if name != "rows" or device is None or device.platform not in WITHOUT_ROWS:
        return
    key, hint = f"model.expert_exchange={model.expert_exchange}", "set model.expert_exchange=gather"
    if model.expert_buffer_factor is not None:
        key = f"model.expert_buffer_factor={model.expert_buffer_factor:g}"
        hint = "set model.expert_buffer_factor=null and model.expert_exchange=gather"
    raise UserError(
        f"{key}: an exchange of rows (ragged_all_to_all) does not compile for {device.device_kind} in this version of "
        f"jax; {hint}"
    )


class Tokens(NamedTuple):
    """Tokens of one device, and the experts that are to compute them."""

    x: jax.Array  # [n, D]
    experts: jax.Array  # [n, k] int32: numbers of experts, of this device and of others
    probs: jax.Array  # [n, k] float32: weights of the experts' results


class LocalExperts(NamedTuple):
    """Experts of one device, for an exchange."""

    num_experts: int
    axes: tuple[str, ...]  # mesh axes that split the experts of a layer
    weighs_inputs: bool  # shares multiply what experts take, and not what they give
    # Rows of the buffer of `exchange_rows`, as a multiple of the choices of a device; None: for all choices.
    capacity: float | None
    # (rows [R, D], numbers of own experts [R]; `num_experts` is of none; weights [R] of the results, or None)
    # -> results [R, D], 0 of none
    compute: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]
    # With fused kernels: (tokens [n, D], numbers of own experts [n, k], weights of the router [n, k], rows of this
    # device with equal loads) -> sums of results [n, D]. None: `compute` takes the rows.
    compute_fused: Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array] | None
    after: tuple[jax.Array, ...]  # fused kernels begin when these are computed


def exchange_by_gather(tokens: Tokens, local: LocalExperts) -> tuple[jax.Array, jax.Array]:
    """Gather the tokens of all devices, compute own experts, and give each device its tokens' sums.

    Returns the sums [n, D] of the n own tokens, and the number of dropped choices, a float32 scalar: 0.

    With as many experts for a token as devices, it sends no more than `exchange_rows`.
    """
    x, experts, probs = _gather_tokens(tokens, local.axes)
    # Numbers from the first own expert on.
    group = experts - jax.lax.axis_index(local.axes) * local.num_experts
    group = jnp.where((group >= 0) & (group < local.num_experts), group, local.num_experts)
    if local.compute_fused is not None:
        if local.after:
            x, group, probs, *_ = jax.lax.optimization_barrier((x, group, probs, *local.after))
        sums = local.compute_fused(x, group, probs, tokens.experts.size)
        return jax.lax.psum_scatter(sums, local.axes, scatter_dimension=0, tiled=True), jnp.zeros(())
    # A row for each choice of a token, also of experts elsewhere: those have no group, and results of 0.
    rows = jnp.repeat(x, experts.shape[1], axis=0)
    if local.weighs_inputs:
        rows, probs = (rows * probs.reshape(-1, 1)).astype(rows.dtype), jnp.ones_like(probs)
    results = local.compute(rows, group.reshape(-1), None).reshape(*experts.shape, -1)
    sums = jnp.einsum("nkD,nk->nD", results, probs.astype(results.dtype))
    return jax.lax.psum_scatter(sums, local.axes, scatter_dimension=0, tiled=True), jnp.zeros(())


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_tokens(tokens: Tokens, axes: tuple[str, ...]) -> Tokens:
    """Return the tokens of all devices along the axes, [n x devices, ...].

    What the router says travels as one array: XLA would join two small gathers of it with those of other layers.
    """
    per_token = tokens.experts.shape[1]
    packed = jnp.concatenate([tokens.experts, jax.lax.bitcast_convert_type(tokens.probs, jnp.int32)], 1)
    packed = jax.lax.all_gather(packed, axes, tiled=True)
    probs = jax.lax.bitcast_convert_type(packed[:, per_token:], jnp.float32)
    return Tokens(jax.lax.all_gather(tokens.x, axes, tiled=True), packed[:, :per_token], probs)


def _gather_backward(axes: tuple[str, ...], _: None, gradient: Any) -> tuple[Any]:
    d_x, d_probs = (jax.lax.psum_scatter(each, axes, scatter_dimension=0, tiled=True) for each in gradient[::2])
    return (Tokens(d_x, None, d_probs),)  # type: ignore[arg-type]  # whole numbers have no gradient


_gather_tokens.defvjp(lambda tokens, axes: (_gather_tokens(tokens, axes), None), _gather_backward)


def exchange_rows(tokens: Tokens, local: LocalExperts) -> tuple[jax.Array, jax.Array]:
    """Send a row of each token to each of its experts, compute own experts, and send the results back.

    Returns the sums [n, D] of the n own tokens, and the number of dropped choices, a float32 scalar.

    A row travels with its share, so that its own device need not multiply results by shares: the backward pass of that
    product would need the results, which it would compute and send once more.

        tokens of a device      a:2,0     b:1,2           each with two experts
        rows, by expert         a0 | b1 | a2 b2           `order`; then to the devices of 0, 1, 2
        results, by token       a2 a0     b1 b2           the same order backward, then a sum for each token
    """
    num_devices, (num_tokens, per_token) = jax.lax.axis_size(local.axes), tokens.experts.shape
    choices, num_experts = tokens.experts.reshape(-1), num_devices * local.num_experts
    local_counts = jnp.bincount(choices, length=num_experts).astype(jnp.int32)
    counts = jax.lax.all_gather(local_counts, local.axes)
    capacity = count_rows(num_tokens, per_token, num_devices, local.num_experts, local.capacity)
    plan = plan_rows(counts, jax.lax.axis_index(local.axes), capacity)
    if local.capacity is not None:
        # Of each expert's tokens, those that come first in the batch are sent, and those behind them are dropped.
        rank = rank_in_group(choices, local_counts)
        choices = jnp.where(rank < plan.sent[choices], choices, num_experts)
    order = jnp.argsort(choices)  # by expert, so by device; what is dropped comes last, and is not sent

    def sort_by_expert(x: jax.Array) -> jax.Array:
        return x.at[order].get(unique_indices=True)

    def send(rows: jax.Array) -> jax.Array:
        return move_rows(sort_by_expert(rows), plan.there, plan.back, (capacity, len(choices)), local.axes)

    rows, probs = jnp.repeat(tokens.x, per_token, axis=0), tokens.probs.reshape(-1)
    if local.weighs_inputs:
        rows, probs_there = send((rows * probs[:, None]).astype(rows.dtype)), None
    else:
        rows, probs_there = send(rows), send(probs)
    if local.compute_fused is None:
        results = local.compute(rows, plan.group, probs_there)
    else:  # each row is a token with one expert
        if local.after:
            rows, *_ = jax.lax.optimization_barrier((rows, *local.after))
        probs_there = jnp.ones_like(plan.group, probs.dtype) if probs_there is None else probs_there
        results = local.compute_fused(rows, plan.group[:, None], probs_there[:, None], len(choices))
    results = move_rows(results, plan.back, plan.there, (len(choices), capacity), local.axes)
    results = jnp.zeros_like(results).at[order].set(results, unique_indices=True)
    dropped = jnp.sum(local_counts - plan.sent).astype(jnp.float32)
    return jnp.sum(results.reshape(num_tokens, per_token, -1), 1), dropped


def count_rows(num_tokens: int, per_token: int, num_devices: int, num_local: int, capacity: float | None) -> int:
    """Return the rows of the buffer of `exchange_rows`: all that may come, or at most `capacity` times the mean."""
    # All tokens of all devices may choose this device's experts; a token chooses an expert once at most.
    max_rows = num_devices * num_tokens * min(per_token, num_local)
    return max_rows if capacity is None else max(1, min(max_rows, math.ceil(capacity * num_tokens * per_token)))


def buffer_rows_per_token(model: Model, num_devices: int, exchange: str) -> float:
    """Return the rows for which the buffer of a device has room, for each token of the device."""
    mlp = model.mlp
    assert isinstance(mlp, ExpertsMlp)
    if not EXPERT_EXCHANGES[exchange].has_buffer:
        return num_devices * mlp.experts_per_token
    max_rows = num_devices * min(mlp.experts_per_token, mlp.num_experts // num_devices)
    factor = model.expert_buffer_factor
    return max_rows if factor is None else min(max_rows, factor * mlp.experts_per_token)


def experts_with_capacity(model: Model, sizes: Mapping[str, int], exchange: str) -> float:
    """Return for how many experts of equal loads a device's rows have room, on a mesh of these sizes."""
    assert isinstance(model.mlp, ExpertsMlp)
    num_devices = count_devices(sizes, DIMS[EXPERTS].weight_axes)
    # A multiple of the rows of own experts.
    capacity = buffer_rows_per_token(model, num_devices, exchange) / model.mlp.experts_per_token
    return max(1.0, capacity) * model.mlp.num_experts / num_devices
