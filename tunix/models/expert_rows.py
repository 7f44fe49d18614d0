"""Rows of tokens on their way to the devices that have their experts, and back: who sends how many to whom, and where.

`jax.lax.ragged_all_to_all` moves rows whose numbers are data. It must be told where the rows for each device begin, and
at which place of the other device's buffer they arrive: a `Plan`, which each device makes out of the same counts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Trips(NamedTuple):
    """Rows that one device exchanges with each device, [devices] int32 each, as `ragged_all_to_all` takes them."""

    starts: jax.Array  # places of the first row for each device, among those that this device has
    sizes: jax.Array  # rows for each device
    places: jax.Array  # places that these rows get on the other device
    arriving: jax.Array  # rows from each device


class Plan(NamedTuple):
    """Plan of one device's exchange of rows."""

    there: Trips
    back: Trips
    group: jax.Array  # [room]: the own expert of each row that arrives; behind the last row, a number of no expert
    sent: jax.Array  # [X]: rows of this device that go to each expert; the others do not fit into its device's buffer


def plan_rows(counts: jax.Array, device: jax.Array | int, room: int) -> Plan:
    """Return the plan of a device, out of the choices of all devices for each expert: `counts` [devices, X] int32.

    Rows for device t leave device f in the order of t's experts. They arrive in the order of the devices f:

        sizes [f, t]    2 1     device 0 has   to 0, to 0, to 1          device 0 gets   of 0, of 0, of 1
                        1 3     device 1 has   to 0, to 1, to 1, to 1    device 1 gets   of 0, of 1, of 1, of 1
        starts [f, t]   0 2     sums along t of what comes before
        places [f, t]   0 0     sums along f of what comes before
                        2 1

    The way back has the same rows: what was a start is a place, and what was a place is a start.
    """
    num_devices = len(counts)
    sent = limit_to_room(counts, room)
    by_device = sent.reshape(num_devices, num_devices, -1)  # [from, to, experts of a device]
    sizes = jnp.sum(by_device, 2)
    starts, places = jnp.cumsum(sizes, 1) - sizes, jnp.cumsum(sizes, 0) - sizes
    there = Trips(starts[device], sizes[device], places[device], sizes[:, device])
    back = Trips(places[:, device], sizes[:, device], starts[:, device], sizes[device])
    # The own expert of each row. Rows arrive in runs: those of the first sender for own expert 0, for own expert 1, and
    # so on, then those of the second sender. The number of runs that have ended says in which run a place is:
    #
    #     rows of runs    2 1 | 0 3              two senders, two own experts; ends 2 3 3 6
    #     place           0 1 2 3 4 5 | 6 7
    #     run             0 0 1 3 3 3 | 4 4      ends at or before the place
    #     own expert      0 0 1 1 1 1 | 2 2      run mod 2; 2 is of none
    ends = jnp.cumsum(by_device[:, device].reshape(-1))
    run = jnp.cumsum(jnp.zeros(room, jnp.int32).at[ends].add(1, mode="drop"))
    num_own = by_device.shape[2]
    group = jnp.where(jnp.arange(room) < ends[-1], run % num_own, num_own)
    return Plan(there, back, group, sent[device])


def limit_to_room(counts: jax.Array, room: int) -> jax.Array:
    """Return the rows [devices, X] that are sent, so that at most `room` arrive on each device.

    Where more would arrive, each device and each expert gives up the same share of its rows, rounded up. So no device
    and no expert is preferred.
    """
    num_devices, num_experts = counts.shape
    arriving = jnp.sum(counts.reshape(num_devices, num_devices, -1), (0, 2))  # [to]
    # A little less than the share: float32 must not round a product up to the next whole number.
    share = jnp.repeat(room * (1 - 1e-6) / jnp.maximum(arriving, 1), num_experts // num_devices)
    fits = jnp.repeat(arriving <= room, num_experts // num_devices)
    return jnp.where(fits, counts, jnp.floor(counts * share).astype(counts.dtype))


def rank_in_group(group: jax.Array, counts: jax.Array) -> jax.Array:
    """Return how many earlier entries of `group` [n] have the same number; `counts` [X] are those of each number."""
    # JAX sorts in a stable way: entries of one number come in their order, from the first place of this number on.
    order = jnp.argsort(group)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(group)), unique_indices=True)
    return place - (jnp.cumsum(counts) - counts)[group]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def move_rows(rows: Any, trips: Trips, opposite: Trips, lengths: tuple[int, int], axes: tuple[str, ...]) -> Any:
    """Return the rows that come to this device, [lengths[0], ...], in the places of `trips`; 0 elsewhere.

    `rows` are [lengths[1], ...]. A gradient goes to where its row came from, by the trips of the way back, `opposite`.
    JAX's own rule would have the devices tell one another these places once more.
    """
    empty = jnp.zeros((lengths[0], *rows.shape[1:]), rows.dtype)
    empty = jax.lax.pcast(empty, tuple(sorted(jax.typeof(rows).manual_axis_type.varying)), to="varying")
    return jax.lax.ragged_all_to_all(rows, empty, *trips, axis_name=axes)


def _move_forward(rows, trips, opposite, lengths, axes):
    return move_rows(rows, trips, opposite, lengths, axes), (trips, opposite)


def _move_backward(lengths, axes, residuals, gradient):
    trips, opposite = residuals
    return move_rows(gradient, opposite, trips, lengths[::-1], axes), None, None


move_rows.defvjp(_move_forward, _move_backward)
