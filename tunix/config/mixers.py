"""Parts that the attention of some families has: latent vectors, layers with a memory, queries that grow,
global layers with heads of their own."""

from typing import Literal, NamedTuple

from tunix.base.section import Count, CountOrZero, Flag, Positive, Section


class Latent(Section):
    """Queries, keys and values out of narrow vectors of each token (DeepSeek-V2, arXiv:2405.04434)."""

    query_dim: Count | None
    """Width of the vector that a token's queries are made of (Q); null for queries out of the token's whole vector."""
    dim: Count
    """Width of the vector that a token's keys and values are made of (C): a cache keeps it in their place."""
    value_dim: Count
    """Width of the values of one head (W), at most head_dim."""


class LinearAttention(Section):
    """Layers with a memory of fixed size in the place of keys and values (gated delta rule, arXiv:2412.06464)."""

    num_key_heads: Count
    """Heads of queries and of keys (I); each serves num_value_heads / num_key_heads value heads."""
    num_value_heads: Count
    """Heads of values and of results (J)."""
    key_dim: Count
    """Width of a key and of a query of one head (E)."""
    value_dim: Count
    """Width of a value of one head (M)."""
    filter_size: Count
    """Tokens that the filters of queries, keys and values take, the newest included (Z)."""

    @property
    def state_size(self) -> int:
        """Numbers of the memory of one layer, for one sequence."""
        return self.num_value_heads * self.key_dim * self.value_dim


class QueryGrowth(Section):
    """Queries that grow with their position p: they are multiplied by 1 + rate * log(1 + floor((p + offset) / every))
    (arXiv:2501.19399)."""

    rate: Positive
    """Growth at the first step."""
    every: Count
    """Tokens of a step."""
    offset: CountOrZero
    """Added to the position."""
    layers: Literal["all", "unrotated"]
    """Layers whose queries grow: all, or those without positions (model.unrotated_every)."""


class GlobalHeads(Section):
    """Heads of global layers, where they are not those of local layers."""

    head_dim: Count
    """Width of one head in global layers (h), even with RoPE."""
    num_kv_heads: Count
    """Key/value heads of global layers (k); each serves num_heads / num_kv_heads query heads."""
    values_are_keys: Flag
    """Values of global layers are their keys before norm and rotation; these layers have no projection of values."""


class HeadSizes(NamedTuple):
    """Sizes of the heads of one layer with attention."""

    num_kv_heads: int
    dim: int  # width of queries and of keys
    value_dim: int
    # The letters of both dimensions (sharding/dims.py): KH, or kh in layers with `GlobalHeads`. One model may have both
    # kinds, and an equation must tell their sizes apart.
    letters: str
