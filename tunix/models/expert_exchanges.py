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
`config/exchange_tables.py` has their names.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from tunix.base.dotted import import_object
from tunix.base.errors import UserError
from tunix.config import Model
from tunix.config.exchange_tables import EXPERT_EXCHANGES
from tunix.config.mlp import ExpertsMlp
from tunix.models.expert_rows import move_rows, plan_rows, rank_in_group
from tunix.models.kernels import Choice
from tunix.sharding.dims import DIMS, EXPERTS
from tunix.sharding.mesh_shape import count_devices

WITHOUT_ROWS = ("cpu",)  # platforms for which jax 0.10.2 does not compile `ragged_all_to_all`


def choose_expert_exchange(model: Model, sizes: Mapping[str, int], platform: str | None) -> Choice:
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
    key, way_out = f"model.expert_exchange={model.expert_exchange}", "set model.expert_exchange=gather"
    if model.expert_buffer_factor is not None:
        key = f"model.expert_buffer_factor={model.expert_buffer_factor:g}"
        way_out = "set model.expert_buffer_factor=null and model.expert_exchange=gather"
    raise UserError(
        f"{key}: an exchange of rows (ragged_all_to_all) does not compile for {device.device_kind} in this version of "
        f"jax; {way_out}"
    )


class Tokens(NamedTuple):
    """Tokens of one device, and the experts that are to compute them."""

    x: jax.Array  # [n, D]
    experts: jax.Array  # [n, k] int32: numbers of experts, of this device and of others
    shares: jax.Array  # [n, k] float32: weights of the experts' results


class OwnExperts(NamedTuple):
    """Experts of one device, for an exchange."""

    num_experts: int
    axes: tuple[str, ...]  # mesh axes that split the experts of a layer
    weighs_inputs: bool  # shares multiply what experts take, and not what they give
    room: float | None  # rows of the buffer of `rows`, as a multiple of the choices of a device; None: for all choices
    # (rows [R, D], numbers of own experts [R]; `num_experts` is of none; weights [R] of the results, or None)
    # -> results [R, D], 0 of none
    compute: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]


def exchange_by_gather(tokens: Tokens, own: OwnExperts) -> tuple[jax.Array, jax.Array]:
    """Gather the tokens of all devices, compute own experts, and give each device its tokens' sums. Nothing is dropped.

    With as many experts for a token as devices, it sends no more than `exchange_rows`.
    """
    x, experts, shares = (jax.lax.all_gather(each, own.axes, tiled=True) for each in tokens)
    group = experts.reshape(-1) - jax.lax.axis_index(own.axes) * own.num_experts  # numbers from the first own expert on
    group = jnp.where((group >= 0) & (group < own.num_experts), group, own.num_experts)
    # A row for each choice of a token, also of experts elsewhere: those have no group, and results of 0.
    rows = jnp.repeat(x, experts.shape[1], axis=0)
    if own.weighs_inputs:
        rows, shares = rows * shares.reshape(-1, 1).astype(rows.dtype), jnp.ones_like(shares)
    results = own.compute(rows, group, None).reshape(*experts.shape, -1)
    sums = jnp.einsum("nkD,nk->nD", results, shares.astype(results.dtype))
    return jax.lax.psum_scatter(sums, own.axes, scatter_dimension=0, tiled=True), jnp.zeros(())


def exchange_rows(tokens: Tokens, own: OwnExperts) -> tuple[jax.Array, jax.Array]:
    """Send a row of each token to each of its experts, compute own experts, and send the results back.

    A row travels with its share, so that its own device need not multiply results by shares: the backward pass of that
    product would need the results, which it would compute and send once more.

        tokens of a device      a:2,0     b:1,2           each with two experts
        rows, by expert         a0 | b1 | a2 b2           `order`; then to the devices of 0, 1, 2
        results, by token       a2 a0     b1 b2           the same order backward, then a sum for each token
    """
    num_devices, (num_tokens, per_token) = jax.lax.axis_size(own.axes), tokens.experts.shape
    choices, num_experts = tokens.experts.reshape(-1), num_devices * own.num_experts
    own_counts = jnp.bincount(choices, length=num_experts).astype(jnp.int32)
    counts = jax.lax.all_gather(own_counts, own.axes)
    room = count_rows(num_tokens, per_token, num_devices, own.num_experts, own.room)
    plan = plan_rows(counts, jax.lax.axis_index(own.axes), room)
    if own.room is not None:
        # Of each expert's tokens, those that come first in the batch are sent, and those behind them are dropped.
        rank = rank_in_group(choices, own_counts)
        choices = jnp.where(rank < plan.sent[choices], choices, num_experts)
    order = jnp.argsort(choices)  # by expert, so by device; what is dropped comes last, and is not sent

    def sort_by_expert(x: jax.Array) -> jax.Array:
        return x.at[order].get(unique_indices=True)

    def send(rows: jax.Array) -> jax.Array:
        return move_rows(sort_by_expert(rows), plan.there, plan.back, (room, len(choices)), own.axes)

    rows, shares = jnp.repeat(tokens.x, per_token, axis=0), tokens.shares.reshape(-1)
    if own.weighs_inputs:
        results = own.compute(send(rows * shares[:, None].astype(rows.dtype)), plan.group, None)
    else:
        results = own.compute(send(rows), plan.group, send(shares))
    results = move_rows(results, plan.back, plan.there, (len(choices), room), own.axes)
    results = jnp.zeros_like(results).at[order].set(results, unique_indices=True)
    dropped = jnp.sum(own_counts - plan.sent).astype(jnp.float32)
    return jnp.sum(results.reshape(num_tokens, per_token, -1), 1), dropped


Exchange = Callable[[Tokens, OwnExperts], tuple[jax.Array, jax.Array]]


def find_expert_exchange(name: str) -> Exchange:
    """Return the exchange with this key of `EXPERT_EXCHANGES`."""
    return import_object(EXPERT_EXCHANGES[name].function)


def count_rows(num_tokens: int, per_token: int, num_devices: int, num_own: int, room: float | None) -> int:
    """Return the rows of the buffer of `exchange_rows`: all that may come, or at most `room` times the mean."""
    # All tokens of all devices may choose this device's experts; a token chooses an expert once at most.
    most = num_devices * num_tokens * min(per_token, num_own)
    return most if room is None else max(1, min(most, math.ceil(room * num_tokens * per_token)))


def buffer_rows_per_token(model: Model, num_devices: int, exchange: str) -> float:
    """Return the rows for which the buffer of a device has room, for each token of the device."""
    mlp = model.mlp
    assert isinstance(mlp, ExpertsMlp)
    if not EXPERT_EXCHANGES[exchange].has_buffer:
        return num_devices * mlp.experts_per_token
    most = num_devices * min(mlp.experts_per_token, mlp.num_experts // num_devices)
    factor = model.expert_buffer_factor
    return most if factor is None else min(most, factor * mlp.experts_per_token)


def experts_with_room(model: Model, sizes: Mapping[str, int], exchange: str) -> float:
    """Return for how many experts of equal loads a device's rows have room, on a mesh of these sizes."""
    assert isinstance(model.mlp, ExpertsMlp)
    num_devices = count_devices(sizes, DIMS[EXPERTS].weight_axes)
    room = buffer_rows_per_token(model, num_devices, exchange) / model.mlp.experts_per_token
    return max(1.0, room) * model.mlp.num_experts / num_devices  # `room` is a multiple of the rows of own experts
