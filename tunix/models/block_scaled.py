"""Products of 8-bit floats with a scale for each block of 32 numbers: MXFP8 of the OCP Microscaling formats.

An array of one scale (`fp8_product` in models/matmul.py) gives small numbers beside a large one few bits, or none. Here
each 32 numbers in a row of a factor have a scale of their own, a power of two in 8 bits. The row is the dimension that
the product sums over, so a factor is rounded anew for each product that it enters:

    x, w -> y           x by rows of D, w by rows of D          D 0 .. 31 | 32 .. 63 | ...    numbers, e4m3
    backward, of x      g by rows of F, w by rows of F          1 scale   | 1 scale  |        e8m0
    backward, of w      x by rows of BT, g by rows of BT

All numbers are e4m3, gradients too: with 32 numbers to a scale there is no need for more powers of two ("Recipes for
Pre-training LLMs with MXFP8", Mishra et al. 2025, arXiv:2506.08027). A scale is that of numbers of one device, so no
device asks another for the largest number. Where the numbers of a row lie on several devices, each has whole blocks.

Blackwell multiplies such arrays as they are. Elsewhere XLA widens both factors and multiplies them by their scales.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tunix.sharding.arrays import map_on_devices
from tunix.sharding.layout import gradient_spec
from tunix.sharding.table import Equation

BLOCK = 32  # numbers of a scale
NUMBERS, SCALES = jnp.float8_e4m3fn, jnp.float8_e8m0fnu


def mxfp8_product(equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Return y of `x,w->y`, of the equation's shape, laid out as `spec`. All three products take blocks of 8 bits."""
    x_spec, w_spec = (jax.typeof(each).sharding.spec for each in (x, w))
    multiply_on_devices = partial(_multiply_on_devices, dtype=x.dtype)

    @jax.custom_vjp
    def multiply(x, w):
        return multiply_on_devices(equation.text, x, w, spec)

    def backward(arguments, gradient):
        x, w = arguments
        d_x = multiply_on_devices(f"{equation.y},{equation.w}->{equation.x}", gradient, w, gradient_spec(x_spec))
        d_w = multiply_on_devices(f"{equation.x},{equation.y}->{equation.w}", x, gradient, gradient_spec(w_spec))
        return d_x, d_w.astype(w.dtype)

    multiply.defvjp(lambda x, w: (multiply(x, w), (x, w)), backward)
    return multiply(x, w)


def _multiply_on_devices(text: str, a: jax.Array, b: jax.Array, spec: PartitionSpec, dtype: jnp.dtype) -> jax.Array:
    """Return the product `text`, laid out as `spec`: each device multiplies what it has, and sums that `spec` does not
    leave open are summed over the devices."""
    specs = tuple(jax.typeof(each).sharding.spec for each in (a, b))
    of_a, out = text.split(",")[0], text.split("->")[1]
    summed_axes = set[str]()
    for dim, axes in zip(of_a, specs[0].partitions, strict=True):
        if dim not in out and axes is not None:
            summed_axes |= {axes} if isinstance(axes, str) else set(axes)
    axes = tuple(sorted(summed_axes - spec.unreduced))

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        y = _multiply(text, a, b, dtype)
        return jax.lax.psum(y, axes) if axes else y

    return map_on_devices(multiply, (a, b), spec)


def _multiply(text: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the product `text` of one device's arrays in blocks, in `dtype`."""
    factors, out = text.split("->")
    of_a, of_b = factors.split(",")
    copies = [dim for dim in of_a if dim in of_b and dim in out]
    summed = [dim for dim in of_a if dim in of_b and dim not in out]
    sizes = dict(zip(of_a + of_b, a.shape + b.shape, strict=True))

    def as_blocks(dims: str, x: jax.Array) -> tuple[list[str], jax.Array, jax.Array]:
        rows = [dim for dim in dims if dim not in copies + summed]
        groups = [math.prod(sizes[dim] for dim in group) for group in (copies, rows, summed)]
        ordered = jnp.transpose(x, [dims.index(dim) for dim in copies + rows + summed]).reshape(groups)
        return rows, *_round(jnp.pad(ordered, ((0, 0), (0, 0), (0, -groups[2] % BLOCK))))

    (rows_a, a8, scales_a), (rows_b, b8, scales_b) = as_blocks(of_a, a), as_blocks(of_b, b)
    y = jax.lax.scaled_dot(
        a8, b8, lhs_scale=scales_a, rhs_scale=scales_b, preferred_element_type=dtype,
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
    )  # fmt: skip
    dims = copies + rows_a + rows_b
    return jnp.transpose(y.reshape([sizes[dim] for dim in dims]), [dims.index(dim) for dim in out])


def _round(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return [copies, rows, K] in 8 bits, and the scales of its blocks, [copies, rows, K / 32]."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK).astype(jnp.float32)
    max_abs = jnp.max(jnp.abs(blocks), -1, keepdims=True)
    # The smallest power of two by which no number of the block is above the largest of e4m3, 448.
    mantissa, exponent = jnp.frexp(max_abs / float(jnp.finfo(NUMBERS).max))
    power = jnp.clip(jnp.where(mantissa == 0.5, exponent - 1, exponent), -126, 126)
    # A block that is not finite gets a scale that is no number, so the result has none, and the step is skipped.
    scale = jnp.where(jnp.isfinite(max_abs), jnp.ldexp(jnp.float32(1), power), jnp.nan)
    rounded = (blocks / scale).astype(NUMBERS).reshape(x.shape)
    return rounded, jnp.squeeze(scale, -1).astype(SCALES)
