"""Products and attention in the forms that XLA's library for CPUs (YNN) multiplies.

XLA gives a product to its library, or else to slower loops, which widen factors of 16 bits to float32 first. In jaxlib
0.10.2 the library takes

    factors      both bfloat16 or both float32
    result       float32; a bfloat16 result is computed in float32, with widened factors
    first one    lies in row-major order and is summed over its last dimensions
    second one   is summed over its first or over its last dimensions
    batches      stand first in both

XLA decides early that the library takes a product of bfloat16, and does not widen its factors. If a later pass turns
the result, nothing can compute the product, and the program ends with an error when it runs. So the rule for all
products here: the result is cast, or stands behind a barrier, before anything turns it.

The choice depends on dtypes, shapes and the platform, not on the processor: the library chooses its instructions.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from tunix.models.kernels import has_product_library
from tunix.sharding.layout import drop_reduced, gradient_spec
from tunix.sharding.table import Equation

MANY_MULTIPLICATIONS = 2**22  # of a product, from which on it takes the library; small ones keep the digits of old runs
PARTS = 8  # into which a single dimension is split, so that a sum over it becomes one over two


def supports_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Return whether the library computes attention of queries [B, T, N, H] to keys and values [B, S, K, H]."""
    rows = q.shape[1] * q.shape[2] // k.shape[2]
    return has_product_library(q.dtype, k.dtype, v.dtype) and rows % PARTS == 0


def supports_matmul(equation: Equation, x: jax.Array, w: jax.Array) -> bool:
    """Return whether the library multiplies x [B, T, ..] and w of an equation, forward and backward."""
    rows, summed = equation.batch, equation.summed
    out = "".join(dim_name for dim_name in equation.y if dim_name not in rows)
    num_out = math.prod(w.shape[equation.w.index(dim_name)] for dim_name in out if dim_name in equation.w)
    return (
        has_product_library(x.dtype, w.dtype)
        and len(rows) == 2
        and equation.x == rows + summed
        and equation.y == rows + out
        and equation.w in (summed + out, out + summed)
        and x.size * num_out >= MANY_MULTIPLICATIONS
    )


def supports_few_rows(*factors: jax.Array) -> bool:
    """Return whether the library multiplies factors as they are that XLA would widen: those of 16 bits."""
    dtypes = [factor.dtype for factor in factors]
    return dtypes[0] == jnp.bfloat16 and has_product_library(*dtypes)


def multiply(equation: Equation, x: jax.Array, w: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Return y of `x,w->y`, laid out as `spec`; the library computes y and both gradients.

        forward              x [B, T, D] . w [D, F]    -> y [B, T, F]
        backward, of x       g [B, T, F] . w [D, F]    -> [B, T, D]
        backward, of w       x [B, T, D] . g [B, T, F] -> [D, F]         copies x to [D, BT]

    XLA copies a factor that is summed over its first two dimensions, B and T, into another order. With one dimension,
    [BT], it would leave the turn to the product, which the library does not take then. The smaller factor comes first,
    because it is the one that is copied.
    """
    x_spec, w_spec = (jax.typeof(each).sharding.spec for each in (x, w))
    dtype, tokens = x.dtype, equation.batch[1]

    def dot(text: str, a: jax.Array, b: jax.Array, out_spec: PartitionSpec) -> jax.Array:
        return jnp.einsum(text, a, b, preferred_element_type=jnp.float32, out_sharding=out_spec).astype(dtype)

    @jax.custom_vjp
    def product(x, w):
        return dot(equation.text, x, w, spec)

    def backward(factors, g):
        # Gradients of `reduced` factors are sums still open, of factors that are no longer `reduced`.
        x, w, g = map(drop_reduced, (*factors, g))
        d_x = dot(equation.transposed().text, g, w, gradient_spec(x_spec))
        factors = [(_split_tokens(each), dims) for each, dims in ((x, equation.x), (g, equation.y))]
        (first, first_dims), (second, second_dims) = sorted(factors, key=lambda factor: factor[0].size)
        # The dimensions of the first factor come first in the result.
        out = "".join(dim_name for dim_name in first_dims + second_dims if dim_name in equation.w)
        text = f"{first_dims},{second_dims}->{out}"
        if first.ndim > len(first_dims):  # `_split_tokens` made two dimensions of T
            text = text.replace(tokens, f"{tokens}_")
        d_w = dot(text, first, second, _turn(gradient_spec(w_spec), equation.w, out))
        if out != equation.w:
            # Without a barrier XLA would turn the product, not its result.
            d_w = jnp.einsum(f"{out}->{equation.w}", jax.lax.optimization_barrier(d_w))
        return d_x, d_w

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    return product(x, w)


def _turn(spec: PartitionSpec, dim_names: str, turned: str) -> PartitionSpec:
    """Return where an array with dimensions `dim_names` lies when they stand in the order of `turned`."""
    partitions = dict(zip(dim_names, spec.partitions, strict=False))  # a spec may end before the dimensions do
    return PartitionSpec(*(partitions.get(dim_name) for dim_name in turned), unreduced=spec.unreduced)


def _split_tokens(x: jax.Array) -> jax.Array:
    """Return x [B, T, ..] as [B, T / 8, 8, ..] where a device has one sequence; as it is where it has several.

    XLA drops the dimension of one sequence, and then a sum over B and T is one over one dimension; see `multiply`.
    """
    sharding = jax.typeof(x).sharding
    batch, tokens, *others = sharding.spec.partitions
    sequences, length = (
        size // math.prod(sharding.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))
        for size, axes in zip(x.shape, (batch, tokens), strict=False)
    )
    if sequences > 1 or length % PARTS:
        return x
    # Axes of size 1 stay in the spec: it says over which axes the gradient is a sum.
    spec = PartitionSpec(batch, tokens, None, *others)
    return jax.lax.reshape(x, (x.shape[0], x.shape[1] // PARTS, PARTS, *x.shape[2:]), out_sharding=spec)


def weigh_values(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, cap: float | None, with_sums: bool) -> Any:
    """Return attention of queries [B, T, N, H] to keys and values [B, S, K, H] under a mask [B, 1, T, S].

    Arguments and results are those of `attention._weigh_values`, and so is the arithmetic. All products are those of
    the library, on arrays [B, K, rows, columns]: the rows are the queries of a token that share a key/value head,
    beside one another. The backward pass takes the logs of the sums of exp(score), and so computes exp once.
    """
    batch, length, num_heads, _ = q.shape
    kv_heads = k.shape[2]

    def fold(x: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [B, K, rows, H]."""
        x = x.reshape(batch, length, kv_heads, -1, x.shape[-1])
        return jnp.moveaxis(x, 2, 1).reshape(batch, kv_heads, -1, x.shape[-1])

    def unfold(x: jax.Array) -> jax.Array:
        """[B, K, rows, H] -> [B, T, N, H]."""
        x = x.reshape(batch, kv_heads, length, -1, x.shape[-1])
        return jnp.moveaxis(x, 1, 2).reshape(batch, length, num_heads, -1)

    out, sums = _attend(fold(q), *(jnp.moveaxis(x, 2, 1) for x in (k, v)), mask, cap)
    return (unfold(out), unfold(sums)[..., 0]) if with_sums else unfold(out)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, cap: float | None) -> tuple[jax.Array, ...]:
    """Return results [B, K, rows, H] and the logs of the sums of exp(score) [B, K, rows, 1] float32."""
    return _attend_forward(q, k, v, mask, cap)[0]


def _attend_forward(q, k, v, mask, cap):
    scores = _score(q, k, mask, cap)
    max_score = jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(scores - max_score)
    total = jnp.sum(weights, -1, keepdims=True)
    out = (_dot(weights.astype(v.dtype), v, 2) / total).astype(v.dtype)
    out, sums = (checkpoint_name(x, "attention") for x in (out, max_score + jnp.log(total)))
    return (out, sums), (q, k, v, mask, out, sums)


def _attend_backward(cap, saved, gradients):
    q, k, v, mask, out, sums = saved
    g, g_sums = gradients
    scores = _score(q, k, mask, cap)
    weights = jnp.exp(scores - sums)
    # The gradient of a softmax: each score's own gradient less their mean, which is also that of the result.
    mean = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), -1, keepdims=True) - g_sums
    d_scores = weights * (_dot(g, v, 3) - mean)
    if cap is not None:  # that of cap * tanh(x / cap); masked scores are beyond the cap, and have none
        d_scores = jnp.where(jnp.abs(scores) <= cap, d_scores * (1 - (scores / cap) ** 2), 0)
    d_scores = d_scores.astype(q.dtype)
    d_q = _dot(d_scores, k, 2).astype(q.dtype)
    # The narrower factor comes first, because XLA copies it: the small result is turned, and no array of scores.
    return d_q, _dot_over_rows(q, d_scores), _dot_over_rows(g, weights.astype(v.dtype)), None


_attend.defvjp(_attend_forward, _attend_backward)


def _score(q: jax.Array, k: jax.Array, mask: jax.Array, cap: float | None) -> jax.Array:
    """Return scores [B, K, rows, S] float32; one of a key that its query does not see is the least finite number."""
    scores = _dot(q, k, 3)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    by_token = scores.reshape(*scores.shape[:2], mask.shape[2], -1, scores.shape[3])
    return jnp.where(mask[:, :, :, None], by_token, jnp.finfo(jnp.float32).min).reshape(scores.shape)


def _dot(a: jax.Array, b: jax.Array, dim_of_b: int) -> jax.Array:
    """Return the product of a and b [B, K, ..], summed over the last dimension of a and one of b, in float32."""
    dims = (((3,), (dim_of_b,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _dot_over_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the sum over rows of a [B, K, rows, H] and b [B, K, rows, S]: [B, K, S, H], in the dtype of b."""
    # In two dimensions, for the same reason as in `multiply`.
    a, b = (x.reshape(*x.shape[:2], PARTS, -1, x.shape[3]) for x in (a, b))
    y = jax.lax.dot_general(a, b, (((2, 3), (2, 3)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
    return jnp.swapaxes(y.astype(b.dtype), 2, 3)
