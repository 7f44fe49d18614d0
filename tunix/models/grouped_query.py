"""Grouped-query attention: heads of queries that share heads of keys and values (arXiv:2305.13245).

    x [B, T, D] --+-- q --> norm, rotation --> queries [B, T, N, H] --+
                  +-- k --> norm, rotation --> keys    [B, T, K, H] --+-- softmax --> [B, T, N, H] -- o --> [B, t, D]
                  +-- v --> norm ------------> values  [B, T, K, H] --+

Global layers may have other heads than local ones (`model.global_heads`). The letters of their dimensions are k and h.
With `values_are_keys` they have no v: the product with k is both, before its norm and rotation. Layers that take keys
and values of earlier ones (`model.shared_kv`) have neither: their mix brings those of the other layer.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.config import Model
from tunix.models.draws import Draws
from tunix.models.latent import Attend, Heads
from tunix.models.layers import Bias, Einsum, unchanged
from tunix.models.norms import NORMS, divide_by_rms
from tunix.models.positions import apply_rope, grow_queries
from tunix.sharding.layout import Layout


class Attention(nnx.Module):
    """Attention [B, t, D] -> [B, t, D], and its cache.

    `letters` are those of key/value heads and of their width: "KH", or "kh" in global layers with heads of their own.
    With `model.attention_gate` each token says which numbers of its result count. Without `has_kv` there are queries
    alone.
    """

    def __init__(self, cfg: Model, layout: Layout, draws: Draws, letters: str = "KH", has_kv: bool = True):
        self.cfg, self.layout, self.scale = cfg, layout, cfg.query_scale**-0.5
        self.kv_letter, width = letters[0], letters[1]
        self.q = Einsum("attention.q", f"BTD,DN{width}->BTN{width}", cfg, layout, draws)
        self.k = Einsum("attention.k", f"BTD,D{letters}->BT{letters}", cfg, layout, draws) if has_kv else None
        has_values = letters == "KH" or cfg.global_heads is None or not cfg.global_heads.values_are_keys
        has_values = has_values and has_kv
        self.v = Einsum("attention.v", f"BTD,D{letters}->BT{letters}", cfg, layout, draws) if has_values else None
        self.o = Einsum("attention.o", f"BTN{width},N{width}D->BtD", cfg, layout, draws)
        self.q_norm = self._norm(f"BTN{width}", cfg, layout)
        self.k_norm = self._norm(f"BT{letters}", cfg, layout) if has_kv else unchanged
        self.sinks = Bias("BTN", cfg, layout) if cfg.attention_sinks else None
        gate_equation = f"BTD,DN{width}->BTN{width}"
        self.gate = Einsum("attention.gate", gate_equation, cfg, layout, draws) if cfg.attention_gate else None

    def _norm(self, letters: str, cfg: Model, layout: Layout) -> Any:
        """Return the norm of queries or keys, over each head or over all heads together."""
        if cfg.qk_norm in ("none", "after_rotation"):
            return unchanged
        dims = {"per_head": letters[-1], "all_heads": letters[-2:]}[cfg.qk_norm]
        return NORMS[cfg.norm](letters, cfg, layout, dims)

    def __call__(self, x, positions, rope, mix, noise):
        x = self.layout.enter_branch(x)
        kv: tuple[jax.Array, ...] = ()
        q = self.q(x, noise)
        if self.k is not None:
            k = self.k(x, noise)
            v = k if self.v is None else self.v(x, noise)  # before the norm and the rotation of k
            v = divide_by_rms(v, self.cfg.norm_eps) if self.cfg.value_norm else v
            q, k = self._place(self.q_norm(q), positions, rope), self._place(self.k_norm(k), positions, rope)
            kv = k, v
        else:
            q = self._place(self.q_norm(q), positions, rope)
        if self.cfg.query_growth is not None:
            q = grow_queries(q, positions, rope, self.cfg.query_growth)
        # The mix knows which keys there are: in training those of the row, in generation those of a cache.
        out, cache = mix.attend(q * self.scale, kv, Heads(_pass_on, self._look_back, self.kv_letter))
        out = out if self.sinks is None else self._add_sinks(*out)
        if self.gate is not None:
            out = out * jax.nn.sigmoid(self.gate(x, noise))
        return self.o(out, noise), cache

    def _place(self, x: jax.Array, positions: jax.Array, rope: Any) -> jax.Array:
        """Return queries or keys rotated by their positions, and with `qk_norm=after_rotation` divided by their RMS."""
        if self.cfg.positions == "rope":
            x = apply_rope(x, positions, rope, self.cfg.rotated_pairs)
        if self.cfg.qk_norm == "after_rotation":
            # Which layers rotate is data: layers with and without positions are one program.
            x = jnp.where(rope.rotates, divide_by_rms(x, self.cfg.norm_eps), x)
        return x

    def _look_back(self, q: jax.Array, entries: tuple[jax.Array, ...], attend: Attend) -> Any:
        return attend(q, *entries, self.layout)

    def _add_sinks(self, out: jax.Array, log_sums: jax.Array) -> jax.Array:
        """Return the results [B, T, N, H] as if each head's softmax had one more score, the sink, without a value.

        sum(exp(s) v) / (sum(exp(s)) + exp(sink)) = result * sigmoid(log(sum(exp(s))) - sink)

        So the kernels need not know of sinks: they return the log of their sum.
        """
        assert self.sinks is not None
        # `sinks` is a bias, which adds: log_sums - sinks = -(sinks - log_sums).
        share = jax.nn.sigmoid(-self.sinks(-log_sums))
        return out * share[..., None].astype(out.dtype)


def _pass_on(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return k, v
