"""Arithmetic that a step needs, and what devices can do: the two halves of model FLOPs utilisation (MFU)."""

from collections.abc import Sequence

import numpy as np

from tunix.config import Model
from tunix.models.delta_rule import CHUNK


def flops_per_token(cfg: Model, num_active: int, num_trained: int, seq_len: int) -> float:
    """FLOPs of forward and backward pass per token: the forward pass three times, less the gradients of frozen weights.

    6 x parameters (4 x those that are frozen; none of tables that are only looked up: a tied embedding counts, for the
    logits) and 12 x heads x head dim x tokens attended to (PaLM, arXiv:2204.02311, appendix B, halved for causality).
    What rematerialization computes again does not count. `num_active` and `num_trained` are parameters that compute a
    token: of experts, those of as many as a token is sent to.
    """
    frozen = max(0, _multiplied(cfg, num_active) - num_trained)
    return 3 * forward_flops_per_token(cfg, num_active, seq_len) - 2.0 * frozen


def forward_flops_per_token(cfg: Model, num_active: int, seq_len: int) -> float:
    """Two for each multiplication of a weight, or of a score that the causal mask and the window let through.

    Linear attention reads the memory of each head, corrects it, and asks it: three products with E x M numbers.
    """
    scores = 0.0
    for heads, layers in cfg.kinds_of_heads.items():
        scores += 2.0 * cfg.num_heads * (heads.dim + heads.value_dim) * attended_tokens(cfg, seq_len, layers)
    return 2.0 * _multiplied(cfg, num_active) + scores + _memory_flops_per_token(cfg)


def chunk_flops_per_token(cfg: Model, seq_len: int) -> float:
    """FLOPs of a forward pass that linear attention by chunks has more than token by token; MFU does not count them.

    Within a chunk, keys meet keys and queries, and a triangular system is solved (`models/delta_rule.py`).
    """
    linear = cfg.linear_attention
    if linear is None:
        return 0.0
    size, both = min(CHUNK, seq_len), linear.key_dim + linear.value_dim
    of_values = linear.num_value_heads * (both + 2 * linear.value_dim)
    return float(_num_linear(cfg) * size * (4 * linear.num_key_heads * linear.key_dim + of_values))


def _memory_flops_per_token(cfg: Model) -> float:
    linear = cfg.linear_attention
    return 0.0 if linear is None else 6.0 * _num_linear(cfg) * linear.state_size


def _num_linear(cfg: Model) -> int:
    return sum(cfg.is_linear(layer) for layer in range(cfg.num_layers))


def attended_tokens(cfg: Model, seq_len: int, layers: Sequence[int]) -> float:
    """Return the tokens that a token attends to, a mean over `seq_len` tokens and a sum over these layers."""
    context = np.arange(1, seq_len + 1)
    of_local = {
        "window": lambda window: np.minimum(context, window),
        "chunk": lambda window: (context - 1) % window + 1,
    }[cfg.local_attention]
    windows = cfg.windows(seq_len)
    return float(sum(of_local(windows[layer]).mean() for layer in layers))


def _multiplied(cfg: Model, num_active: int) -> int:
    looked_up = (0 if cfg.tied_head else cfg.vocab_size) + (cfg.context_length if cfg.positions == "learned" else 0)
    rows = 0 if cfg.layer_inputs is None else cfg.vocab_size * cfg.num_layers * cfg.layer_inputs.dim
    return num_active - looked_up * cfg.embed_dim - rows
