"""Numbers that blocks return beside their result: penalties, which a loss adds to its own, and tokens per expert."""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard


class Routing(NamedTuple):
    """Tokens sent to experts by one layer: float32 counts without a gradient. Of several layers, with an L."""

    load: jax.Array  # [X]: tokens of each expert
    tokens: jax.Array  # number of tokens
    entropy: jax.Array  # sum over tokens of the entropy of the router's scores, in nats
    dropped: jax.Array | None = None  # choices of tokens that found no room; None where there is room for all


class BlockSums(NamedTuple):
    """Numbers of blocks, summed over their tokens and layers."""

    # [B] float32 by name in metrics.jsonl: a mean over the tokens of each sequence. A loss minimises these penalties
    # with its own, each sequence with the weight that it has in the loss.
    penalties: dict[str, jax.Array]
    routing: Routing | None  # None without experts


NO_SUMS = BlockSums({}, None)


def join_layers(sums: BlockSums) -> BlockSums:
    """Return the numbers of layers, whose arrays come with a first dimension L: penalties added up, counts apart."""
    return sums._replace(penalties={name: value.sum(0) for name, value in sums.penalties.items()})


def join_pattern(places: list[BlockSums]) -> BlockSums:
    """Return the numbers of stacks that take turns, given those of each place; routing in the order of layers.

    place 0    layers 0 2 4
    place 1    layers 1 3 5        --> 0 1 2 3 4 5: stacked along a second dimension, then joined with the first
    """
    routings = [sums.routing for sums in places if sums.routing is not None]
    sums = reduce(join_runs, (sums._replace(routing=None) for sums in places))
    if not routings:
        return sums
    in_turns = jax.tree.map(lambda *each: jnp.stack(each, 1).reshape(-1, *each[0].shape[1:]), *routings)
    return sums._replace(routing=in_turns)


def join_stages(routing: Routing | None) -> Routing | None:
    """Return the routing of all layers, [L, ...] on every device, out of that of each stage's layers, [S, L / S, ...].

    It travels once a microbatch or a step, and is small.
    """
    return jax.tree.map(lambda x: reshard(x, PartitionSpec()).reshape(-1, *x.shape[2:]), routing)


def join_runs(first: BlockSums, second: BlockSums) -> BlockSums:
    """Return the numbers of two runs of layers, one after the other."""
    penalties = dict(first.penalties)
    for name, value in second.penalties.items():
        penalties[name] = penalties[name] + value if name in penalties else value
    if first.routing is None or second.routing is None:
        return BlockSums(penalties, first.routing or second.routing)
    return BlockSums(penalties, jax.tree.map(lambda *both: jnp.concatenate(both), first.routing, second.routing))
