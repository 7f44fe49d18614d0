"""Grouped-query attention: heads of queries that share heads of keys and values (arXiv:2305.13245).

    x [B, T, D] --+-- q --> norm, rotation --> queries [B, T, N, H] --+
                  +-- k --> norm, rotation --> keys    [B, T, K, H] --+-- softmax --> [B, T, N, H] -- o --> [B, t, D]
                  +-- v --> norm ------------> values  [B, T, K, H] --+

Global layers may have other heads than local ones (`model.global_heads`). The letters of their dimensions are k and h.
With `values_are_keys` they have no v: the product with k is both, before its norm and rotation. Layers that take keys
and values of earlier ones (`model.shared_kv`) have neither: their mix brings those of the other layer.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tunix.base.dotted_path import import_object
from tunix.config import Model
from tunix.models import cpu_library
from tunix.models.attention_mask import MaskRule
from tunix.models.kernels import branches_are_cheap
from tunix.models.layers import NORMS, Bias, Einsum, Initializer, divide_by_rms, identity, soft_cap
from tunix.models.rope import apply_rope, grow_queries
from tunix.models.table import CP_EXCHANGES, find_kernel
from tunix.sharding.layout import Layout, stage_shard_map

# Attention: which keys a query sees, and the kernels that compute it.
#
# `compute_attention` serves training and prefill, `attend_to_cache` tokens that look into a cache:
#
#              queries                    keys                                 which keys a query sees
#     train    T tokens of a row          the same tokens                      a `MaskRule`, by documents
#     prefill  T tokens of a prompt       the same tokens                      a `MaskRule`
#     extend   T tokens behind others     slots of a cache, the same tokens    a mask [B, T, S]: each row has a time
#     decode   the newest token           slots of a cache                     of its own

MIN_QUERIES, MAX_QUERIES = 128, 512  # of a block of the plain kernel, which has the scores of one block at a time
SPANS = (512, 1024)  # windows up to which the plain kernel skips the keys before them: those of Gemma 3
FEW_QUERIES = 16  # of a row, up to which keys and values are taken as a cache has them
CACHE_BLOCK = 256  # queries that look into a cache at one time; a power of two, which divides the longer ones
WINDOW_BLOCK = 256  # queries of a block there: a smaller block has fewer keys that none of its queries sees


class Method(NamedTuple):
    """How attention is computed, for all layers of a model."""

    kernel: str  # key of `KERNELS`, or a dotted path
    exchange: str  # key of `CP_EXCHANGES`, or "none"
    options: Mapping[str, Any]  # of the kernel (`Model.attention_options`)


AttentionFn = Callable[..., Any]  # (queries, keys, values, layout) -> results, as `compute_attention` gives them


class Heads(NamedTuple):
    """Ways from the entries that tokens have in a cache, a tuple of arrays [B, S, ...], to attention."""

    expand: Callable[..., tuple[jax.Array, jax.Array]]  # entries -> keys and values [B, S, K, H]
    # (one query for each row, entries with heads before slots, a function that attends) -> results of the queries
    look_back: Callable[[jax.Array, tuple[jax.Array, ...], AttentionFn], Any]
    kv_dim_name: str = "K"  # of the dimension of key/value heads (sharding/table.py)


def compute_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask_rule: MaskRule,
    layout: Layout,
    method: Method,
    kv_dim_name: str = "K",
) -> Any:
    """Return [B, T, N, H] of queries [B, T, N, H], which come scaled, and keys and values [B, S, K, H].

    Scores and softmax are float32. `kv_dim_name` names the dimension of key/value heads, which the layout splits.
    Positions and segments of `mask_rule` are those of whole sequences, on every device that has a part of them.
    """
    q_spec, kv_spec, segments = (layout.activation(dim_names) for dim_names in ("BTNH", f"BT{kv_dim_name}H", "BS"))
    ends = None if mask_rule.q_ends is None else segments
    mask_spec: Any = MaskRule._make([jax.P(), jax.P(), segments, segments, jax.P(), ends])

    if method.exchange == "none":
        attend = find_kernel(method.kernel)
    else:
        attend = partial(import_object(CP_EXCHANGES[method.exchange].function), method.kernel)

    def local_attention(q, k, v, mask_rule):
        k, v = (layout.local_kv_heads(x, q.shape[2], kv_dim_name) for x in (k, v))
        return attend(q, k, v, mask_rule, **method.options)

    in_specs = (q_spec, kv_spec, kv_spec, mask_spec)
    out_specs = (q_spec, layout.activation("BTN")) if "with_sums" in method.options else q_spec
    mapped = stage_shard_map(local_attention, in_specs, out_specs, layout.stages_around)
    return mapped(q, k, v, mask_rule._replace(window=jnp.asarray(mask_rule.window, jnp.int32)))


class Scaled(NamedTuple):
    """Keys or values of 8 bits: codes [B, S, K, H] int8, each vector of which has a scale, [B, S, K, 1] float32."""

    codes: jax.Array
    scales: jax.Array

    def read(self, dtype: Any) -> jax.Array:
        """Return the numbers that the codes stand for."""
        return (self.codes.astype(jnp.float32) * self.scales).astype(dtype)


def attend_to_cache(
    q: jax.Array,
    k: jax.Array | Scaled,
    v: jax.Array | Scaled,
    visible: jax.Array,
    layout: Layout,
    options: Mapping[str, Any],
    kv_dim_name: str,
) -> Any:
    """Do as `compute_attention` for queries [B, T, N, H] of which each sees keys of its own: `visible` [B, T, S] bool.

    Keys and values stand as a cache has them, [B, K, S, H]. `options` are those of the kernel.
    """
    q_spec, kv_spec = layout.activation("BTNH"), layout.activation(f"B{kv_dim_name}TH")

    def local_attention(q, k, v, visible):
        # Turned here, on one device, so that XLA drops the turn and the one of `_weigh_slots` at once. With a sharding
        # between them it would drop them later than it asks whether its library for CPUs takes the products.
        k, v = jax.tree.map(lambda x: layout.local_kv_heads(jnp.swapaxes(x, 1, 2), q.shape[2], kv_dim_name), (k, v))
        return _attend_in_blocks(q, k, v, visible, **options)

    out_specs = (q_spec, layout.activation("BTN")) if "with_sums" in options else q_spec
    kv_specs = jax.tree.map(lambda _: kv_spec, (k, v))
    in_specs = (q_spec, *kv_specs, jax.P(q_spec[0], None, None))
    return stage_shard_map(local_attention, in_specs, out_specs, layout.stages_around)(q, k, v, visible)


def _attend_in_blocks(
    q: jax.Array,
    k: jax.Array | Scaled,
    v: jax.Array | Scaled,
    visible: jax.Array,
    cap: float | None = None,
    with_sums: bool = False,
) -> Any:
    """Attend with the scores of `CACHE_BLOCK` queries at a time, which divides T; the results are [B, T, ...]."""
    length = q.shape[1]
    if length <= FEW_QUERIES:
        return _weigh_slots(q, k, v, visible, cap, with_sums)
    k, v = (x.read(q.dtype) if isinstance(x, Scaled) else x for x in (k, v))
    if length <= CACHE_BLOCK:
        return _weigh_values(q, k, v, visible[:, None], cap, with_sums)

    def split(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [blocks, B, queries of a block, ...]."""
        return jnp.moveaxis(x.reshape(x.shape[0], -1, CACHE_BLOCK, *x.shape[2:]), 1, 0)

    def one_block(block: tuple[jax.Array, jax.Array]) -> Any:
        return _weigh_values(block[0], k, v, block[1][:, None], cap, with_sums)

    blocks = jax.lax.map(one_block, (split(q), split(visible)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], length, *x.shape[3:]), blocks)


# A kernel is a function of one device's arrays: (q [B, T, N, H], k and v [B, S, K, H], mask_rule) -> [B, T, N, H].
#
# It may take options, which are given where the model needs them. With `cap` the softmax takes cap * tanh(score / cap).
# With `with_sums=True` the result is a pair, whose second array are the logs of the sums of exp(score), [B, T, N]
# float32 in nats. With `future_keys` a query may see so many keys behind its own, as the rule says (`MaskRule.q_ends`).
#
# It gives its result the name "attention", by which remat policies keep it. If it has a backward rule of its own
# (jax.custom_vjp), its forward rule gives this name to all that the backward rule needs beside q, k and v: a value
# without a name is computed again.


def select_query_block(length: int) -> int:
    """Return the number of queries in a block of the plain kernel: an eighth of the sequence, within bounds.

    A smaller block has fewer keys that none of its queries sees, and more blocks make a longer program.
    """
    eighth = -(-length // (8 * MIN_QUERIES)) * MIN_QUERIES
    return min(eighth, MAX_QUERIES)


def plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask_rule: MaskRule,
    cap: float | None = None,
    with_sums: bool = False,
    future_keys: int = 0,
) -> Any:
    """Attention in XLA's own operations, for a block of queries at a time (Rabe and Staats 2021, arXiv:2112.05682):
    q [B, T, N, H], scaled, k and v [B, S, K, H] -> [B, T, N, H], and with `with_sums` also [B, T, N] float32.

    The backward pass computes the scores of a block again. So memory grows with T, not with its square. A block attends
    to the keys up to its own end, which saves almost half of the scores, forward and backward:

        keys      0     1     2     3
        block 0   #
              1   #     #
              2   #     #     #
              3   #     #     #     #

    Each block is a piece of the program, as its number of keys is its own: at most eight of them for
    4,096 tokens and fewer.

    Where a branch is cheap, a layer whose window is small goes another way (`_sliding_window`), which skips the keys
    before the window too. The window is data, so that a scan over layers is one program: it has both ways once, at any
    depth.

    Where queries see keys behind their own, a block attends to `future_keys` more keys, and goes the first way.
    """
    length, weigh = q.shape[1], partial(_weigh_values, cap=cap, with_sums=with_sums)
    if length <= select_query_block(length):
        return checkpoint_name(weigh(q, k, v, mask_rule.mask()), "attention")
    assert k.shape[1] == length, "more queries than a block: they and the keys must be the same tokens"

    is_causal = mask_rule.q_ends is None
    spans = [span for span in SPANS if 2 * span <= length] if branches_are_cheap() and is_causal else []
    triangle = partial(_triangle, weigh=weigh, future_keys=0 if is_causal else future_keys)
    # The number of spans that are smaller than the window: it is the index of the first span in which the window fits.
    # The last way takes a window that fits in none.
    ways: list[Any] = [*(partial(_sliding_window, weigh=weigh, span=span) for span in spans), triangle]
    way = jnp.sum(jnp.asarray(mask_rule.window) > jnp.asarray(spans, jnp.int32))
    out = jax.lax.switch(way, ways, q, k, v, mask_rule) if spans else ways[0](q, k, v, mask_rule)
    return checkpoint_name(out, "attention")


def _triangle(
    q: jax.Array, k: jax.Array, v: jax.Array, mask_rule: MaskRule, *, weigh: Callable, future_keys: int = 0
) -> Any:
    """Let each block of queries attend to all keys up to `future_keys` behind its own end; see `plain`.

    `weigh` is `_weigh_values`.
    """
    length, size = q.shape[1], select_query_block(q.shape[1])

    @partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
    def one_block(start, q, k, v, mask_rule):
        end = min(start + size, length)
        rule, num_keys = mask_rule.queries(start, end - start), min(end + future_keys, length)
        rule = rule._replace(
            k_positions=mask_rule.k_positions[:num_keys], k_segments=mask_rule.k_segments[:, :num_keys]
        )
        return weigh(q[:, start:end], k[:, :num_keys], v[:, :num_keys], rule.mask())

    blocks = [one_block(start, q, k, v, mask_rule) for start in range(0, length, size)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *blocks)


def _sliding_window(
    q: jax.Array, k: jax.Array, v: jax.Array, mask_rule: MaskRule, *, weigh: Callable, span: int
) -> Any:
    """Attend where windows have at most `span` tokens: a block of queries takes the keys of a few blocks.

        keys      0     1     2     3     4          a span of two blocks
        block 0   #
              1   #     #
              2   #     #     #
              3         #     #     #
              4               #     #     #

    All blocks are one piece of the program, a scan. In the place of blocks before the first one stand zeros, whose
    positions no query sees. Zeros also fill up the last block, if the length is not a multiple of a block.
    """
    length, num_earlier = q.shape[1], span // WINDOW_BLOCK
    count = -(-length // WINDOW_BLOCK)
    unseen = 2 * count * WINDOW_BLOCK  # a position behind all queries, which none of them sees: attention is causal

    def split(x: jax.Array, dim: int, filler: int = 0) -> jax.Array:
        """[.., T, ..] -> [blocks, .., tokens of a block, ..]."""
        missing = [(0, count * WINDOW_BLOCK - length if at == dim else 0) for at in range(x.ndim)]
        x = jnp.pad(x, missing, constant_values=filler)
        return jnp.moveaxis(x.reshape(*x.shape[:dim], count, WINDOW_BLOCK, *x.shape[dim + 1 :]), dim, 0)

    def split_with_earlier(x: jax.Array, dim: int, filler: int = 0) -> jax.Array:
        """Like `split`, with the tokens of the blocks before each."""
        # Blocks that are moved down by n positions stand beside the block that comes n later:
        #
        #     moved by 2    -  -  0  1  2
        #     moved by 1    -  0  1  2  3         a column has the keys of one block of queries; -: filler
        #     blocks        0  1  2  3  4
        blocks = split(x, dim, filler)
        remaining = [(0, 0)] * (blocks.ndim - 1)
        moved = [
            jnp.pad(blocks[: count - n], [(n, 0), *remaining], constant_values=filler)
            for n in range(num_earlier, -1, -1)
        ]
        return jnp.concatenate(moved, dim + 1)

    @partial(jax.checkpoint, prevent_cse=False)
    def one_block(_, block):
        q, k, v, *rule = block
        return None, weigh(q, k, v, MaskRule._make([*rule, mask_rule.window, None]).mask())

    rules = MaskRule(
        q_positions=split(mask_rule.q_positions, 0),
        q_segments=split(mask_rule.q_segments, 1),
        k_positions=split_with_earlier(mask_rule.k_positions, 0, unseen),
        k_segments=split_with_earlier(mask_rule.k_segments, 1),
        window=mask_rule.window,
    )
    arrays = split(q, 1), split_with_earlier(k, 1), split_with_earlier(v, 1)
    _, blocks = jax.lax.scan(one_block, None, (*arrays, *rules[:4]))

    def join(blocks: jax.Array) -> jax.Array:
        """[blocks, B, tokens of a block, ..] -> [B, T, ..]."""
        rows = jnp.moveaxis(blocks, 0, 1)
        return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :length]

    return jax.tree.map(join, blocks)


def _weigh_values(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, cap: float | None = None, with_sums: bool = False
) -> Any:
    """Return the sum of values, weighed by the softmax of the scores, for a mask [B, 1, T, S]; see `plain`.

    Scores stand as the product of matrices gives them: for each key/value head, the queries of a token that share it
    beside one another, [B, K, T, G, S]. With one such head, as in Gemma 3 1B, no array is copied into another order.
    """
    batch, length, num_heads, dim = q.shape
    # JAX's own function has no cap and no sums, and wants values as wide as keys.
    if length < MIN_QUERIES and cap is None and not with_sums and dim == v.shape[3]:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=1.0)
    if length >= MIN_QUERIES and cpu_library.supports_attention(q, k, v):
        return cpu_library.weigh_values(q, k, v, mask, cap, with_sums)
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


def _weigh_slots(
    q: jax.Array, k: jax.Array | Scaled, v: jax.Array | Scaled, visible: jax.Array, cap: float | None, with_sums: bool
) -> Any:
    """Do as `_weigh_values` for few queries of each row, [B, T, N, H], which look into a cache; visible [B, T, S] bool.

    The products take keys and values as the cache has them, [B, K, S, H]: XLA's loop over tokens then needs no copy of
    the cache in another order. Scales of 8 bits multiply scores and weights, which are few: so codes are widened inside
    of the products, and no array of all keys in the dtype of products is written.
    """
    batch, length, num_heads, _ = q.shape
    (k, k_scales), (v, v_scales) = (_split_scales(x, q.dtype) for x in (k, v))
    num_shared = num_heads // k.shape[1]

    def group(x: jax.Array) -> jax.Array:
        """[B, T, N, ..] -> [B, K, queries, ..], the queries of all tokens that share a head of keys."""
        grouped = jnp.swapaxes(x.reshape(batch, length, -1, num_shared, *x.shape[3:]), 1, 2)
        return grouped.reshape(batch, -1, length * num_shared, *x.shape[3:])

    def ungroup(x: jax.Array) -> jax.Array:
        """The other way round."""
        tokens = jnp.swapaxes(x.reshape(batch, -1, length, num_shared, *x.shape[3:]), 1, 2)
        return tokens.reshape(batch, length, num_heads, *x.shape[3:])

    queries = group(q)
    if queries.shape[2] == 1 and cpu_library.supports_few_rows(q, k):
        queries = jnp.concatenate([queries, queries], axis=2)
    scores = jnp.einsum("bkgh,bksh->bkgs", queries, k, preferred_element_type=jnp.float32)
    scores = scores if k_scales is None else scores * k_scales
    mask = jnp.repeat(visible, num_shared, axis=1)[:, None] if length > 1 else visible[:, None]
    scores = jnp.where(mask, soft_cap(scores, cap), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    weights = (weights if v_scales is None else weights * v_scales).astype(v.dtype)
    out = jnp.einsum("bkgs,bksh->bkgh", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)
    out, scores = (x[:, :, : length * num_shared] for x in (out, scores))
    out = ungroup(out)
    return (out, ungroup(jax.nn.logsumexp(scores, axis=-1))) if with_sums else out


def _split_scales(x: jax.Array | Scaled, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return keys or values [B, K, S, H] in a dtype, and the scales [B, K, 1, S] of their products, if any."""
    if not isinstance(x, Scaled):
        return jnp.swapaxes(x, 1, 2), None
    return jnp.swapaxes(x.codes, 1, 2).astype(dtype), jnp.transpose(x.scales, (0, 2, 3, 1))


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, mask_rule: MaskRule, future_keys: int = 0) -> jax.Array:
    """The fused attention of cuDNN, for GPUs. It takes the rule as a mask [B, 1, T, S], which takes memory and time.

    `future_keys` is not read: a mask of all keys has those behind a query too.
    """
    out = jax.nn.dot_product_attention(q, k, v, mask=mask_rule.mask(), scale=1.0, implementation="cudnn")
    return checkpoint_name(out, "attention")


class Attention(nnx.Module):
    """Attention [B, t, D] -> [B, t, D], and its cache.

    `dim_names` are those of key/value heads and of their width: "KH", or "kh" in global layers with heads of their own.
    With `model.attention_gate` each token says which numbers of its result count. Without `has_kv` there are queries
    alone.
    """

    def __init__(
        self, cfg: Model, layout: Layout, initializer: Initializer, dim_names: str = "KH", has_kv: bool = True
    ):
        self.cfg, self.layout, self.scale = cfg, layout, cfg.query_scale**-0.5
        self.kv_dim_name, width = dim_names[0], dim_names[1]
        self.q = Einsum("attention.q", f"BTD,DN{width}->BTN{width}", cfg, layout, initializer)
        self.k = Einsum("attention.k", f"BTD,D{dim_names}->BT{dim_names}", cfg, layout, initializer) if has_kv else None
        values_are_keys = dim_names != "KH" and cfg.global_heads is not None and cfg.global_heads.values_are_keys
        has_v = has_kv and not values_are_keys
        self.v = Einsum("attention.v", f"BTD,D{dim_names}->BT{dim_names}", cfg, layout, initializer) if has_v else None
        self.o = Einsum("attention.o", f"BTN{width},N{width}D->BtD", cfg, layout, initializer)
        self.q_norm = self._norm(f"BTN{width}", cfg, layout)
        self.k_norm = self._norm(f"BT{dim_names}", cfg, layout) if has_kv else identity
        self.sinks = Bias("BTN", cfg, layout) if cfg.attention_sinks else None
        gate_equation = f"BTD,DN{width}->BTN{width}"
        self.gate = Einsum("attention.gate", gate_equation, cfg, layout, initializer) if cfg.attention_gate else None

    def _norm(self, dim_names: str, cfg: Model, layout: Layout) -> Any:
        """Return the norm of queries or keys, over each head or over all heads together."""
        if cfg.qk_norm in ("none", "after_rotation"):
            return identity
        dims = {"per_head": dim_names[-1], "all_heads": dim_names[-2:]}[cfg.qk_norm]
        return NORMS[cfg.norm](dim_names, cfg, layout, dims)

    def __call__(self, x, positions, rope, mix, dropout_key):
        """[B, t, D] -> ([B, t, D], the cache of the layer); `positions` are [B, T] int32.

        `rope` are the rotations of the layer, `mix` says which keys there are, `dropout_key` draws what dropout leaves
        out.
        """
        x = self.layout.gather_tokens(x)
        kv: tuple[jax.Array, ...] = ()
        q = self._apply_rope(self.q_norm(self.q(x, dropout_key)), positions, rope)
        if self.k is not None:
            k = self.k(x, dropout_key)
            v = k if self.v is None else self.v(x, dropout_key)  # before the norm and the rotation of k
            v = divide_by_rms(v, self.cfg.norm_eps) if self.cfg.value_norm else v
            kv = self._apply_rope(self.k_norm(k), positions, rope), v
        if self.cfg.query_growth is not None:
            q = grow_queries(q, positions, rope, self.cfg.query_growth)
        # The mix knows which keys there are: in training those of the row, in generation those of a cache.
        heads = Heads(lambda k, v: (k, v), lambda q, kv, attend: attend(q, *kv, self.layout), self.kv_dim_name)
        out, cache = mix.compute_attention(q * self.scale, kv, heads)
        out = out if self.sinks is None else self._add_sinks(*out)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(self.gate(x, dropout_key))
        return self.o(out, dropout_key), cache

    def _apply_rope(self, x: jax.Array, positions: jax.Array, rope: Any) -> jax.Array:
        """Return queries or keys rotated by their positions, and with `qk_norm=after_rotation` divided by their RMS."""
        if self.cfg.positions == "rope":
            x = apply_rope(x, positions, rope, self.cfg.rotated_pairs)
        if self.cfg.qk_norm == "after_rotation":
            # Which layers rotate is data: layers with and without positions are one program.
            x = jnp.where(rope.rotates, divide_by_rms(x, self.cfg.norm_eps), x)
        return x

    def _add_sinks(self, out: jax.Array, log_sums: jax.Array) -> jax.Array:
        """Return the results [B, T, N, H] as if each head's softmax had one more score, the sink, without a value.

        sum(exp(s) v) / (sum(exp(s)) + exp(sink)) = result * sigmoid(log(sum(exp(s))) - sink)

        So the kernels need not know of sinks: they return the log of their sum.
        """
        assert self.sinks is not None
        # `sinks` is a bias, which adds: log_sums - sinks = -(sinks - log_sums).
        share = jax.nn.sigmoid(-self.sinks(-log_sums))
        return (out * share[..., None]).astype(out.dtype)  # in float32, as the sum of its gradient
