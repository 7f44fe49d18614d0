"""Attention: which keys a query sees, and the kernels that compute it.

One function serves training, prefill and decoding. They differ only in `Seen`:

             queries                    keys                          segments
    train    T tokens of a row          the same tokens               one for each document of the row
    prefill  T tokens of a prompt       the same tokens               0 before the prompt begins, then 1
    decode   the newest token           the slots of a cache          1 where a slot holds a token of the row
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tunix.base.dotted import import_object
from tunix.config.model import KERNELS
from tunix.models.exchanges import EXCHANGES
from tunix.models.seen import Seen
from tunix.sharding.layout import Layout
from tunix.sharding.stages import stage_shard_map

QUERY_BLOCK = 512  # the plain kernel has the scores of at most this many queries at one time


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: Seen,
    layout: Layout,
    kernel: str,
    exchange: str = "none",
    **options: Any,
) -> Any:
    """Return [B, T, N, H] of queries [B, T, N, H], which come scaled, and keys and values [B, S, K, H].

    Scores and softmax are float32. `kernel` is a key of `config.model.KERNELS` or a dotted path; `exchange` is a key of
    `EXCHANGES`; `options` are those of `Model.attention_options`, the same for every layer. Places and segments of
    `seen` are those of whole sequences, on every device that has a part of them.
    """
    of_queries, of_keys, of_rows = (layout.activation(letters) for letters in ("BTNH", "BTKH", "BS"))
    of_seen: Any = Seen._make([jax.P(), jax.P(), of_rows, of_rows, jax.P()])
    kernel_function = import_object(KERNELS.get(kernel, kernel))

    def on_each_device(q, k, v, seen):
        k, v = (layout.own_kv_heads(x, q.shape[2]) for x in (k, v))
        return EXCHANGES[exchange](kernel_function, q, k, v, seen, **options)

    in_specs = (of_queries, of_keys, of_keys, of_seen)
    out_specs = (of_queries, layout.activation("BTN")) if "with_sums" in options else of_queries
    mapped = stage_shard_map(on_each_device, in_specs, out_specs, layout.stages_around)
    return mapped(q, k, v, seen._replace(window=jnp.asarray(seen.window, jnp.int32)))


# A kernel is a function of one device's arrays: (q [B, T, N, H], k and v [B, S, K, H], seen) -> [B, T, N, H].
#
# It may take options, which are given where the model needs them. With `cap` the softmax takes cap * tanh(score / cap).
# With `with_sums=True` the result is a pair, whose second array are the logs of the sums of exp(score), [B, T, N]
# float32 in nats.
#
# It gives its result the name "attention", by which remat policies keep it. If it has a backward rule of its own
# (jax.custom_vjp), its forward rule gives this name to all that the rule needs beside q, k and v: a value with no name
# is computed again.


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen, cap: float | None = None, with_sums: bool = False
) -> Any:
    """Attention in XLA's own operations, for a block of queries at a time (Rabe and Staats 2021, arXiv:2112.05682).

    The backward pass computes the scores of a block again. So memory grows with T, not with its square. A block attends
    to the keys up to its own end, which saves almost half of the scores, forward and backward:

        keys      0     1     2     3
        block 0   #
              1   #     #
              2   #     #     #
              3   #     #     #     #

    Each block is a piece of the program, as its number of keys is its own: eight of them for 4,096 tokens.
    """
    length = q.shape[1]
    if length <= QUERY_BLOCK:
        out = _weigh_values(q, k, v, seen.mask(), cap, with_sums)
        return checkpoint_name(out, "attention")
    assert k.shape[1] == length, "more queries than a block: they and the keys must be the same tokens"

    @partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
    def one_block(start, q, k, v, seen):
        end = min(start + QUERY_BLOCK, length)
        rule = seen.queries(start, end - start)
        rule = rule._replace(k_places=seen.k_places[:end], k_segments=seen.k_segments[:, :end])
        return _weigh_values(q[:, start:end], k[:, :end], v[:, :end], rule.mask(), cap, with_sums)

    blocks = [one_block(start, q, k, v, seen) for start in range(0, length, QUERY_BLOCK)]
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *blocks)
    return checkpoint_name(whole, "attention")


def _weigh_values(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, cap: float | None, with_sums: bool) -> Any:
    """Return the sum of values with the softmax of the scores, for a mask [B, 1, T, S]; see `plain`."""
    if cap is None and not with_sums and q.shape[3] == v.shape[3]:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=1.0)
    batch, length, num_heads, dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(batch, length, num_heads, -1)
    if not with_sums:
        return out
    sums = jax.nn.logsumexp(scores, axis=-1)
    return out, jnp.moveaxis(sums, -1, 1).reshape(batch, length, num_heads)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen) -> jax.Array:
    """The fused attention of cuDNN, for GPUs. It takes the rule as a mask [B, 1, T, S], which takes memory and time."""
    out = jax.nn.dot_product_attention(q, k, v, mask=seen.mask(), scale=1.0, implementation="cudnn")
    return checkpoint_name(out, "attention")
