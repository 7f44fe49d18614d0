"""Arithmetic that a step needs, and what devices can do: the two halves of model FLOPs utilisation (MFU)."""

import numpy as np

from tunix.config import Model

# Dense bf16 peak of one device in TFLOP/s, by a part of its name; NVIDIA data sheets, without sparsity.
PEAK_TFLOPS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0}


def peak_tflops(device_kind: str) -> float | None:
    """Dense bf16 peak of one device; None where it is not known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_kind), None)


def flops_per_token(cfg: Model, num_parameters: int, seq_len: int) -> float:
    """FLOPs of forward and backward pass per token: two for each multiplication of a weight or a score, times three.

    6 x parameters (the tied embedding counts once, for the logits) and 12 x heads x head dim x tokens attended to,
    counting only pairs that the causal mask and the window let through (PaLM, arXiv:2204.02311, appendix B, halved
    for causality). What rematerialization computes again does not count.
    """
    context = np.arange(1, seq_len + 1)
    everywhere, nearby = context.mean(), np.minimum(context, cfg.sliding_window).mean()
    num_global = cfg.num_layers // cfg.global_every
    attended = num_global * everywhere + (cfg.num_layers - num_global) * nearby
    return 6.0 * num_parameters + 12.0 * cfg.num_heads * cfg.head_dim * attended
