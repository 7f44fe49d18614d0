"""Layers dealt out to stages in turn: each stage gets every S-th chunk of the layers, in the place of a run of them.

    layers at rest     stage 0:  0 1 2 3     stage 1:  4 5 6 7          S = 2 stages, v = 2 chunks, L = 8
    dealt out          stage 0:  0 1 4 5     stage 1:  2 3 6 7

Shape and sharding of an array stay, so nothing outside of a step knows of the order: checkpoints, exports, averages and
evaluations have the layers in their own order. Each stage sends each of its chunks to one stage, in v permutes.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def deal_out(x: jax.Array, axes: tuple[str, ...], num_stages: int, num_chunks: int) -> jax.Array:
    """[L, ...], whose first dimension `axes` split, with the layers in the order of the stages' chunks."""
    return _exchange(x, axes, num_stages, num_chunks, to_chunks=True)


def take_back(x: jax.Array, axes: tuple[str, ...], num_stages: int, num_chunks: int) -> jax.Array:
    """The inverse of `deal_out`."""
    return _exchange(x, axes, num_stages, num_chunks, to_chunks=False)


def _exchange(x: jax.Array, axes: tuple[str, ...], num_stages: int, num_chunks: int, *, to_chunks: bool) -> jax.Array:
    spec = jax.typeof(x).sharding.spec

    def on_each_stage(x: jax.Array) -> jax.Array:
        chunks = x.reshape(num_chunks, -1, *x.shape[1:])
        result = jnp.zeros_like(chunks)
        stage = jax.lax.axis_index(axes)
        for each in range(num_chunks):
            # A permute sends one array from each device and brings one to each: so v permutes, of a chunk each.
            trips = list_trips(num_stages, num_chunks, each)
            if not to_chunks:  # the same trips, from their end to their beginning
                trips = [(target, slot, source, place) for source, place, target, slot in trips]
            # All stages run one program, in which the number of the stage is data: tables say which chunk it sends, and
            # where it puts the one that it gets.
            places, slots = _by_stage([trip[:2] for trip in trips]), _by_stage([trip[2:] for trip in trips])
            chunk = jax.lax.dynamic_index_in_dim(chunks, places[stage], keepdims=False)
            chunk = jax.lax.ppermute(chunk, axes, [(source, target) for source, _, target, _ in trips])
            result = jax.lax.dynamic_update_index_in_dim(result, chunk, slots[stage], 0)
        return result.reshape(x.shape)

    return jax.shard_map(on_each_stage, in_specs=spec, out_specs=spec)(x)


def list_trips(num_stages: int, num_chunks: int, number: int) -> list[tuple[int, int, int, int]]:
    """Return the trips of one permute: stage and place of a chunk at rest, stage and place where it is dealt to.

    Chunk g = p v + i is the i-th at rest on stage p, and belongs to stage g mod S. Each permute takes one chunk of each
    stage, so that each stage gets one. p v mod S repeats after S / d stages, where d is the greatest common divisor of
    v and S; from one such run of stages to the next, i moves on by one, which fills the gaps. For S = v = 2:

        permute 0    stage 0 sends chunk 0 to stage 0    stage 1 sends chunk 3 to stage 1
                1    stage 0 sends chunk 1 to stage 1    stage 1 sends chunk 2 to stage 0
    """
    run = num_stages // math.gcd(num_stages, num_chunks)
    trips = []
    for stage in range(num_stages):
        place = (number + stage // run) % num_chunks
        chunk = stage * num_chunks + place
        trips.append((stage, place, chunk % num_stages, chunk // num_stages))
    return trips


def _by_stage(pairs: Sequence[tuple[int, ...]]) -> jax.Array:
    """Return the place of each stage, [S], of pairs of a stage and a place."""
    return jnp.asarray([place for _, place in sorted(pairs)])
