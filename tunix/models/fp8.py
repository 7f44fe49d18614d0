"""Products of 8-bit floats ("FP8 Formats for Deep Learning", Micikevicius et al. 2022, arXiv:2209.05433).

Activations and weights are rounded to e4m3 (3 bits of fraction, largest 448), gradients to e5m2 (2 bits, largest
57,344). Each array is divided by one scale before it is rounded: a power of two that follows from its own largest
number ("current scaling"), so nothing is remembered between steps. All three products of a weight multiply 8-bit
numbers, and the scales of both factors multiply the result:

    x, w -> y           x [e4m3] . w [e4m3]    x scale of x . scale of w
    backward, of x      g [e5m2] . w [e4m3]    x scale of g . scale of w
    backward, of w      x [e4m3] . g [e5m2]    x scale of x . scale of g

The largest number is that of all devices, so the same numbers are rounded alike on every mesh. That is one all-reduce
of a scalar for each activation and each gradient of a product, and for each weight that is split in use (tp). A power
of two loses no bit, so it makes no difference when the result is multiplied.

Chips with products of 8-bit floats run them as they are (cuBLASLt's or Triton's). Elsewhere XLA widens both factors
before it multiplies, which gives the same sums in more time.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from tunix.sharding.equations import Equation

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def fp8_product(equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Return y of `x,w->y`, laid out as `spec`; y and both gradients are products of 8-bit floats."""
    x_spec, w_spec = (jax.typeof(each).sharding.spec for each in (x, w))
    dtype = x.dtype

    @jax.custom_vjp
    def multiply(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        rounded = _round(x, FORWARD), _round(w, FORWARD)
        return _multiply(equation.text, *rounded, dtype, spec), rounded

    def backward(rounded, gradient):
        x8, w8 = rounded
        g8 = _round(gradient, GRADIENT)
        d_x = _multiply(f"{equation.y},{equation.w}->{equation.x}", g8, w8, dtype, _gradient_spec(x_spec))
        d_w = _multiply(f"{equation.x},{equation.y}->{equation.w}", x8, g8, w.dtype, _gradient_spec(w_spec))
        return d_x, d_w

    multiply.defvjp(forward, backward)
    return multiply(x, w)


def _gradient_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return where the gradient of an array lies: over axes where the array is `reduced`, it is a sum still open."""
    return PartitionSpec(*spec.partitions, unreduced=spec.reduced)


Rounded = tuple[jax.Array, jax.Array]  # numbers in 8 bits, and the power of two that they were divided by (float32)


def _round(x: jax.Array, dtype: jnp.dtype) -> Rounded:
    """Return an array in 8 bits, and its scale."""
    x = reshard(x, PartitionSpec(*jax.typeof(x).sharding.spec.partitions))  # nothing differentiates what follows
    # Remat policies that keep products keep their scales: the backward pass asks no other device for them again.
    scale = checkpoint_name(_scale(jnp.max(jnp.abs(x)), dtype), "product")
    # Without a barrier XLA may widen the numbers at once, and drop both conversions: nothing would be rounded.
    return jax.lax.optimization_barrier((x / scale.astype(x.dtype)).astype(dtype)), scale


def _scale(largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the smallest power of two that brings `largest` below the largest power of two of `dtype`."""
    _, exponent = jnp.frexp(largest.astype(jnp.float32))  # largest is less than 2 to this power
    # e4m3: numbers up to 448, of which 256 = 2^8 is the largest power of two. A largest number of 1000 < 2^10 gets the
    # scale 2^(10 - 8) = 4, and becomes 250.
    power = exponent - (jnp.finfo(dtype).maxexp - 1)
    # Zeros have any scale. A number that is not finite leaves none in the result, and the step is skipped.
    scale = jnp.ldexp(jnp.float32(1), jnp.clip(power, -120, 120))
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _multiply(text: str, a: Rounded, b: Rounded, dtype: jnp.dtype, spec: PartitionSpec) -> jax.Array:
    """Return the product of two arrays in 8 bits times both scales, in `dtype`, laid out as `spec`."""
    (a8, scale_a), (b8, scale_b) = a, b
    y = jnp.einsum(text, a8, b8, preferred_element_type=dtype, out_sharding=spec)
    # A factor of a sum that is still open over some axes must be `reduced` over them.
    scale = reshard(scale_a * scale_b, PartitionSpec(reduced=spec.unreduced))
    return y * scale.astype(dtype)
