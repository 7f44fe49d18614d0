"""Arithmetic that a step needs, and what devices can do: the two halves of model FLOPs utilisation (MFU)."""

import numpy as np

from tunix.config import Model


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
    """Two for each multiplication of a weight, or of a score that the causal mask and the window let through."""
    attended = attended_tokens(cfg, seq_len)
    value_dim = cfg.head_dim if cfg.latent is None else cfg.latent.value_dim
    return 2.0 * _multiplied(cfg, num_active) + 2.0 * cfg.num_heads * (cfg.head_dim + value_dim) * attended


def attended_tokens(cfg: Model, seq_len: int) -> float:
    """Return the tokens that a token attends to, a mean over `seq_len` tokens and a sum over layers."""
    context = np.arange(1, seq_len + 1)
    of_local = {
        "window": lambda window: np.minimum(context, window),
        "chunk": lambda window: (context - 1) % window + 1,
    }[cfg.local_attention]
    return float(sum(of_local(window).mean() for window in cfg.windows(seq_len)))


def _multiplied(cfg: Model, num_active: int) -> int:
    looked_up = (0 if cfg.tied_head else cfg.vocab_size) + (cfg.context_length if cfg.positions == "learned" else 0)
    return num_active - looked_up * cfg.embed_dim
