"""Moments in fewer bits: between two updates they rest in bfloat16, or in 8 bits with a scale for each block.

An update turns them into numbers, computes in float32, and stores them again. So the rule is that of optax, and its
state is smaller. A moment in 8 bits is two arrays: a code for each number, and the largest number of each block of
numbers in a row ("8-bit Optimizers via Block-wise Quantization", Dettmers et al. 2021, arXiv:2110.02861).

Codes are finer near the largest number of a block, and reach far down. The leading bit of a code says in which power of
ten the number lies, and the bits behind it divide that range evenly:

    code      1xxxxxx    01xxxxx     001xxxx     ...   0000001      of the moment of gradients, with a sign
    number    0.1 to 1   0.01 to 0.1             ...                as a share of the largest one

The second moment is stored as its root: where a root is too small for its block's codes, the first moment is, too.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from tunix.sharding.table import DIMS, STACKED

BLOCK = 128  # numbers with one scale, or a smaller power of two that divides the dimension
LEAST_BLOCK = 8  # below that, scales would take much of what codes save
ROOTS = ("nu",)  # names of moments that are squares
MOMENTS = ("mu", "trace", *ROOTS)  # as optax's states name them; trace is the momentum of SGD


class Quantized(NamedTuple):
    """A moment in 8 bits."""

    quantized: jax.Array  # int8, of the moment's shape
    scales: jax.Array  # float32: one dimension counts blocks


class Block(NamedTuple):
    """Numbers that share a scale: so many in a row along one axis of the moment."""

    axis: int
    size: int


def store_moments(
    rule: optax.GradientTransformation, kind: str, weights: dict[str, Any]
) -> optax.GradientTransformation:
    """Return the rule with moments that rest as `kind` says: a key of `KINDS`.

    Moments of vectors, which are few, rest as they are. `weights` is the tree of `state.Weight`.
    """
    make, encode, decode = KINDS[kind]

    def over_moments(function: Callable, state: Any) -> Any:
        changed = {}
        for name in MOMENTS:
            if hasattr(state, name):

                def change(weight, moment, name=name):
                    block = _select_block(weight)
                    if block is None or isinstance(moment, optax.MaskedNode):  # of a weight that another rule updates
                        return moment
                    return function(moment, block, name in ROOTS, getattr(state, "count", None))

                changed[name] = jax.tree.map(change, weights, getattr(state, name))
        return state._replace(**changed)

    def init(params):
        return over_moments(make, rule.init(params))

    def update(gradients, state, params=None):
        direction, new = rule.update(gradients, over_moments(decode, state), params)
        return direction, over_moments(encode, new)

    return optax.GradientTransformation(init, update)


def _select_block(weight: Any) -> Block | None:
    """Return the block of a weight's moments; None for vectors, and where no dimension divides into blocks.

    Blocks lie along a dimension that no axis splits at rest, if one is large enough: then no block is on two devices.
    """
    dim_names = weight.equation.w
    if weight.equation.is_vector:
        return None
    blocks = [
        Block(axis, math.gcd(size, BLOCK))
        for axis, (dim_name, size) in enumerate(zip(dim_names, weight.shape, strict=True))
        if dim_name not in STACKED
    ]
    best = max(blocks, key=lambda block: (block.size >= 32 and not DIMS[dim_names[block.axis]].is_gathered, block.size))
    return best if best.size >= LEAST_BLOCK else None


def _to_half(moment: jax.Array, block: Block, is_square: bool, count: jax.Array) -> jax.Array:
    """Return a moment in bfloat16; a square is rounded up or down at random, so that its mean stays.

    With a decay of 0.999 a square changes by less than the spacing of bfloat16 in a step: rounded to the nearest
    number, it would never change.
    """
    if not is_square:
        return moment.astype(jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(moment.astype(jnp.float32), jnp.uint32)
    rounded = bits + (_hash(moment.shape, count) >> 16)  # float32 is bfloat16 with 16 more bits behind
    return jax.lax.bitcast_convert_type((rounded >> 16).astype(jnp.uint16), jnp.bfloat16)


def _hash(shape: tuple[int, ...], count: jax.Array) -> jax.Array:
    """Return a random uint32 for each place of an array and each step, the same on every mesh.

    The mixing function is "lowbias32" (Chris Wellons, "Prospecting for Hash Functions", 2018).
    """
    # The number of a place in the whole array, not in a shard: noise does not depend on the mesh.
    flat_index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        flat_index = flat_index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    x = flat_index ^ (count.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def _make_quantized(zeros: jax.Array, block: Block, is_square: bool, count: Any) -> Quantized:
    """Return the codes of a moment that is zero, laid out as the moment; scales are not split where blocks do not."""
    shape = [size // block.size if axis == block.axis else size for axis, size in enumerate(zeros.shape)]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return Quantized(jnp.zeros_like(zeros, jnp.int8), jnp.zeros(shape))
    spec = list(jax.typeof(zeros).sharding.spec.partitions)
    axes = spec[block.axis]
    split = math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))
    if shape[block.axis] % split:
        spec[block.axis] = None
    return Quantized(jnp.zeros_like(zeros, jnp.int8), jnp.zeros(shape, out_sharding=PartitionSpec(*spec)))


MAX_SCALE = 0.1 + 0.9 * 63.5 / 64  # share that the largest code stands for
DECADES = 7  # of codes 64 to 127, 32 to 63, ... and 1


def _encode(moment: jax.Array, block: Block, is_square: bool, count: Any) -> Quantized:
    # Codes 64 to 127 stand for shares from 0.1 to 1, codes 32 to 63 for 0.01 to 0.1, ... A code is the first one of its
    # power of ten, and the place of the share within that power is added.
    values = _split_blocks(jnp.sqrt(moment) if is_square else moment, block)
    scales = jnp.max(jnp.abs(values), block.axis + 1) / MAX_SCALE  # the largest number gets the last code
    ratios = jnp.abs(values) / jnp.expand_dims(jnp.where(scales > 0, scales, 1), block.axis + 1)
    decade = jnp.clip(jnp.floor(-jnp.log10(jnp.maximum(ratios, 1e-30))), 0, DECADES).astype(jnp.int32)
    steps = 64 >> jnp.minimum(decade, DECADES - 1)  # codes of this power of ten
    within = (ratios * jnp.power(10.0, decade) - 0.1) / 0.9 * steps
    size = jnp.where(decade < DECADES, steps + jnp.clip(jnp.floor(within).astype(jnp.int32), 0, steps - 1), 0)
    if is_square:  # up or down at random, as in `_to_half`, to one of the two codes around the share
        below = jnp.maximum(size - (_find_shares(size) > ratios), jnp.minimum(size, 1))  # no root becomes 0: it divides
        shares, above = _find_shares(below), _find_shares(below + 1)
        noise = _split_blocks(_hash(moment.shape, count), block) >> 8  # 24 bits, which float32 has
        size = below + (noise.astype(jnp.float32) * 2.0**-24 * (above - shares) < ratios - shares)
        size = jnp.minimum(size, 127)
    quantized = size * jnp.sign(values).astype(jnp.int32)
    return Quantized(quantized.astype(jnp.int8).reshape(moment.shape), scales)


def _find_shares(size: jax.Array) -> jax.Array:
    """Return the shares for which codes without their signs stand: the middle of the span of each."""
    leading = 31 - jax.lax.clz(jnp.maximum(size, 1))  # place of the leading bit: 6 in the highest power of ten
    steps = 1 << leading
    shares = jnp.power(10.0, leading - (DECADES - 1)) * (0.1 + 0.9 * ((size - steps) + 0.5) / steps)
    return jnp.where(size > 0, shares, 0.0)


def _decode(moment: Quantized, block: Block, is_square: bool, count: Any) -> jax.Array:
    quantized = _split_blocks(moment.quantized, block).astype(jnp.int32)
    shares = jnp.sign(quantized) * _find_shares(jnp.abs(quantized))
    values = shares * jnp.expand_dims(moment.scales, block.axis + 1)
    values = values.reshape(moment.quantized.shape)
    return values * values if is_square else values


def _split_blocks(array: jax.Array, block: Block) -> jax.Array:
    """Return an array with the axis of its blocks as two: blocks, and the numbers of each."""
    shape = array.shape
    return array.reshape(*shape[: block.axis], -1, block.size, *shape[block.axis + 1 :])


# How moments rest: functions that make them of zeros, store a moment, and read it. Arguments: the moment, its block,
# whether it is a mean of squares, the number of updates so far.
KINDS: dict[str, tuple[Callable, Callable, Callable]] = {
    "bfloat16": (lambda zeros, *_: zeros.astype(jnp.bfloat16), _to_half, lambda half, *_: half.astype(jnp.float32)),
    "int8": (_make_quantized, _encode, _decode),
}
