"""Arithmetic that a step needs, and what devices can do: the two halves of model FLOPs utilisation (MFU)."""

from functools import cache

import numpy as np
import yaml

from tunix.compose import CONF
from tunix.config import DeviceKind, Model


@cache
def device_kinds() -> dict[str, DeviceKind]:
    """The kinds of conf/command/device by file name."""
    files = sorted((CONF / "command" / "device").glob("*.yaml"))
    return {file.stem: DeviceKind.model_validate(yaml.safe_load(file.read_text())) for file in files}


def kind_named(device_kind: str) -> DeviceKind | None:
    """The kind that the driver's name for a device means; None where it is not known."""
    named = [kind for kind in device_kinds().values() if kind.name in device_kind]
    return max(named, key=lambda kind: len(kind.name)) if named else None


def peak_tflops(device_kind: str) -> float | None:
    """Dense bf16 peak of one device in TFLOP/s by the driver's name for it; None where it is not known."""
    kind = kind_named(device_kind)
    return kind.peak_tflops if kind else None


def flops_per_token(cfg: Model, num_parameters: int, num_trained: int, seq_len: int) -> float:
    """FLOPs of forward and backward pass per token: the forward pass three times, less the gradients of frozen weights.

    6 x parameters (4 x those that are frozen; none of tables that are only looked up: a tied embedding counts, for the
    logits) and 12 x heads x head dim x tokens attended to (PaLM, arXiv:2204.02311, appendix B, halved for causality).
    What rematerialization computes again does not count.
    """
    frozen = max(0, _multiplied(cfg, num_parameters) - num_trained)
    return 3 * forward_flops_per_token(cfg, num_parameters, seq_len) - 2.0 * frozen


def forward_flops_per_token(cfg: Model, num_parameters: int, seq_len: int) -> float:
    """Two for each multiplication of a weight, or of a score that the causal mask and the window let through."""
    context = np.arange(1, seq_len + 1)
    attended = sum(np.minimum(context, window).mean() for window in cfg.windows(seq_len))
    return 2.0 * _multiplied(cfg, num_parameters) + 4.0 * cfg.num_heads * cfg.head_dim * attended


def _multiplied(cfg: Model, num_parameters: int) -> int:
    looked_up = (0 if cfg.tied_head else cfg.vocab_size) + (cfg.context_length if cfg.positions == "learned" else 0)
    return num_parameters - looked_up * cfg.embed_dim
