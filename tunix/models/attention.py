"""Attention: which keys a query sees, and the kernels that compute it.

One function serves training, prefill and decoding. They differ only in `Seen`:

             queries                    keys                          segments
    train    T tokens of a row          the same tokens               one for each document of the row
    prefill  T tokens of a prompt       the same tokens               0 before the prompt begins, then 1
    decode   the newest token           the slots of a cache          1 where a slot holds a token of the row
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tunix.models.exchanges import find_attention_exchange
from tunix.models.kernels import branches_are_cheap
from tunix.models.seen import Seen
from tunix.models.soft_cap import soft_cap
from tunix.sharding.layout import Layout
from tunix.sharding.stages import stage_shard_map

FEWEST_QUERIES, MOST_QUERIES = 128, 512  # of a block of the plain kernel, which has the scores of one block at a time
SPANS = (512, 1024)  # windows up to which the plain kernel skips the keys before them: those of Gemma 3
NEAR_BLOCK = 256  # queries of a block there: a smaller block has fewer keys that none of its queries sees


class Method(NamedTuple):
    """How attention is computed, for all layers of a model."""

    kernel: str  # key of `KERNELS`, or a dotted path
    exchange: str  # key of `CP_EXCHANGES`, or "none"
    options: Mapping[str, Any]  # of the kernel (`Model.attention_options`)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen, layout: Layout, method: Method, kv_letter: str = "K"
) -> Any:
    """Return [B, T, N, H] of queries [B, T, N, H], which come scaled, and keys and values [B, S, K, H].

    Scores and softmax are float32. `kv_letter` is that of the dimension of key/value heads, by which the layout splits
    them. Places and segments of `seen` are those of whole sequences, on every device that has a part of them.
    """
    q_spec, kv_spec, segments = (layout.activation(letters) for letters in ("BTNH", f"BT{kv_letter}H", "BS"))
    seen_spec: Any = Seen._make([jax.P(), jax.P(), segments, segments, jax.P()])

    def attend_on_device(q, k, v, seen):
        k, v = (layout.own_kv_heads(x, q.shape[2], kv_letter) for x in (k, v))
        return find_attention_exchange(method.exchange)(method.kernel, q, k, v, seen, **method.options)

    in_specs = (q_spec, kv_spec, kv_spec, seen_spec)
    out_specs = (q_spec, layout.activation("BTN")) if "with_sums" in method.options else q_spec
    mapped = stage_shard_map(attend_on_device, in_specs, out_specs, layout.stages_around)
    return mapped(q, k, v, seen._replace(window=jnp.asarray(seen.window, jnp.int32)))


# A kernel is a function of one device's arrays: (q [B, T, N, H], k and v [B, S, K, H], seen) -> [B, T, N, H].
#
# It may take options, which are given where the model needs them. With `cap` the softmax takes cap * tanh(score / cap).
# With `with_sums=True` the result is a pair, whose second array are the logs of the sums of exp(score), [B, T, N]
# float32 in nats.
#
# It gives its result the name "attention", by which remat policies keep it. If it has a backward rule of its own
# (jax.custom_vjp), its forward rule gives this name to all that the backward rule needs beside q, k and v: a value
# without a name is computed again.


def choose_query_block(length: int) -> int:
    """Return the number of queries in a block of the plain kernel: an eighth of the sequence, within bounds.

    A smaller block has fewer keys that none of its queries sees, and more blocks make a longer program.
    """
    eighth = -(-length // (8 * FEWEST_QUERIES)) * FEWEST_QUERIES
    return min(eighth, MOST_QUERIES)


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

    Each block is a piece of the program, as its number of keys is its own: at most eight of them for
    4,096 tokens and fewer.

    Where a branch is cheap, a layer whose window is small goes another way (`_near`), which skips the keys before the
    window too. The window is data, so that a scan over layers is one program: it has both ways once, at any depth.
    """
    length = q.shape[1]
    if length <= choose_query_block(length):
        out = _weigh_values(q, k, v, seen.mask(), cap, with_sums)
        return checkpoint_name(out, "attention")
    assert k.shape[1] == length, "more queries than a block: they and the keys must be the same tokens"

    spans = [span for span in SPANS if 2 * span <= length] if branches_are_cheap() else []
    triangle: Any = partial(_triangle, cap=cap, with_sums=with_sums)
    # The number of spans that are smaller than the window: it is the place of the first span in which the window fits.
    # The last way takes a window that fits in none.
    ways = [*(partial(_near, cap=cap, with_sums=with_sums, span=span) for span in spans), triangle]
    way = jnp.sum(jnp.asarray(seen.window) > jnp.asarray(spans, jnp.int32))
    out = jax.lax.switch(way, ways, q, k, v, seen) if spans else triangle(q, k, v, seen)
    return checkpoint_name(out, "attention")


def _triangle(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen, cap: float | None = None, with_sums: bool = False
) -> Any:
    """Let each block of queries attend to all keys up to its own end; see `plain`."""
    length, size = q.shape[1], choose_query_block(q.shape[1])

    @partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
    def one_block(start, q, k, v, seen):
        end = min(start + size, length)
        rule = seen.queries(start, end - start)
        rule = rule._replace(k_places=seen.k_places[:end], k_segments=seen.k_segments[:, :end])
        return _weigh_values(q[:, start:end], k[:, :end], v[:, :end], rule.mask(), cap, with_sums)

    blocks = [one_block(start, q, k, v, seen) for start in range(0, length, size)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *blocks)


def _near(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: Seen,
    cap: float | None = None,
    with_sums: bool = False,
    *,
    span: int,
) -> Any:
    """Attend where windows have at most `span` tokens: a block of queries takes the keys of a few blocks.

        keys      0     1     2     3     4          a span of two blocks
        block 0   #
              1   #     #
              2   #     #     #
              3         #     #     #
              4               #     #     #

    All blocks are one piece of the program, a scan. In the place of blocks before the first one stand zeros, whose
    places no query sees. Zeros also fill up the last block, if the length is not a multiple of a block.
    """
    length, num_earlier = q.shape[1], span // NEAR_BLOCK
    count = -(-length // NEAR_BLOCK)
    unseen = 2 * count * NEAR_BLOCK  # a place behind all queries, which none of them sees: attention is causal

    def split(x: jax.Array, dim: int, filler: int = 0) -> jax.Array:
        """[.., T, ..] -> [blocks, .., tokens of a block, ..]."""
        missing = [(0, count * NEAR_BLOCK - length if at == dim else 0) for at in range(x.ndim)]
        x = jnp.pad(x, missing, constant_values=filler)
        return jnp.moveaxis(x.reshape(*x.shape[:dim], count, NEAR_BLOCK, *x.shape[dim + 1 :]), dim, 0)

    def split_with_earlier(x: jax.Array, dim: int, filler: int = 0) -> jax.Array:
        """Like `split`, with the tokens of the blocks before each."""
        # Blocks that are moved down by n places stand beside the block that comes n later:
        #
        #     moved by 2    -  -  0  1  2
        #     moved by 1    -  0  1  2  3         a column has the keys of one block of queries; -: filler
        #     blocks        0  1  2  3  4
        blocks = split(x, dim, filler)
        rest = [(0, 0)] * (blocks.ndim - 1)
        earlier = [
            jnp.pad(blocks[: count - n], [(n, 0), *rest], constant_values=filler) for n in range(num_earlier, 0, -1)
        ]
        return jnp.concatenate([*earlier, blocks], dim + 1)

    @partial(jax.checkpoint, prevent_cse=False)
    def one_block(_, block):
        q, k, v, *rule = block
        return None, _weigh_values(q, k, v, Seen._make([*rule, seen.window]).mask(), cap, with_sums)

    rules = Seen(
        q_places=split(seen.q_places, 0),
        q_segments=split(seen.q_segments, 1),
        k_places=split_with_earlier(seen.k_places, 0, unseen),
        k_segments=split_with_earlier(seen.k_segments, 1),
        window=seen.window,
    )
    arrays = split(q, 1), split_with_earlier(k, 1), split_with_earlier(v, 1)
    _, blocks = jax.lax.scan(one_block, None, (*arrays, *rules[:-1]))

    def join(blocks: jax.Array) -> jax.Array:
        """[blocks, B, tokens of a block, ..] -> [B, T, ..]."""
        rows = jnp.moveaxis(blocks, 0, 1)
        return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :length]

    return jax.tree.map(join, blocks)


def _weigh_values(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, cap: float | None, with_sums: bool) -> Any:
    """Return the sum of values, weighed by the softmax of the scores, for a mask [B, 1, T, S]; see `plain`.

    Scores stand as the product of matrices gives them: for each key/value head, the queries of a token that share it
    beside one another, [B, K, T, G, S]. With one such head, as in Gemma 3 1B, no array is copied into another order.
    """
    batch, length, num_heads, dim = q.shape
    # JAX's own function has no cap and no sums, and wants values as wide as keys.
    if length < FEWEST_QUERIES and cap is None and not with_sums and dim == v.shape[3]:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=1.0)
    grouped = q.reshape(batch, length, k.shape[2], -1, dim)
    scores = jnp.einsum("btkgh,bskh->bktgs", grouped, k, preferred_element_type=jnp.float32)
    # The least finite number, not -inf: a token that fills a block up may see no key, and a softmax of nothing but -inf
    # is not a number.
    scores = jnp.where(mask[:, :, :, None], soft_cap(scores, cap), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bktgs,bskh->btkgh", weights, v).reshape(batch, length, num_heads, -1)
    if not with_sums:
        return out
    sums = jax.nn.logsumexp(scores, axis=-1)
    return out, jnp.moveaxis(sums, 1, 2).reshape(batch, length, num_heads)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen) -> jax.Array:
    """The fused attention of cuDNN, for GPUs. It takes the rule as a mask [B, 1, T, S], which takes memory and time."""
    out = jax.nn.dot_product_attention(q, k, v, mask=seen.mask(), scale=1.0, implementation="cudnn")
    return checkpoint_name(out, "attention")
