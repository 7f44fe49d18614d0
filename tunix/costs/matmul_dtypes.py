"""Products of the numbers of `training.matmul_dtype`: devices that have them, and their share of the arithmetic."""

import jax

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.kernel_tables import MATMUL_DTYPES
from tunix.costs.devices import compute_peak_tflops, find_kind, find_matmul_tflops, read_device_kinds
from tunix.models.flops import flops_per_token
from tunix.models.paths import parameter_name
from tunix.sharding.equations import Equation
from tunix.training.state import Architecture

# Letters of experts, of a router's scores, and of inputs of layers: their products keep the compute dtype.
OTHERS = "XYp"


def check_matmul_dtype(cfg: Config, platform: str, device_kind: str) -> None:
    """Raise `UserError` where `training.matmul_dtype` is asked of devices that do not multiply its numbers.

    CPUs are no mistake: they emulate it, for tests and for a look at the loss. `device_kind` is the driver's name.
    """
    dtype, kind = cfg.training.matmul_dtype, find_kind(device_kind)
    if dtype is None or platform == "cpu" or (kind is not None and find_matmul_tflops(kind, dtype) is not None):
        return
    chips = ", ".join(each.name for each in read_device_kinds().values() if find_matmul_tflops(each, dtype) is not None)
    raise UserError(
        f"training.matmul_dtype={dtype}: {device_kind} has no products of {MATMUL_DTYPES[dtype].numbers} that are "
        f"known here; {chips} have them, and CPUs emulate them. Leave training.matmul_dtype=null"
    )


def compute_matmul_share(cfg: Config, arch: Architecture, seq_len: int) -> float:
    """Return the share of a step's model FLOPs that products of `training.matmul_dtype` have; 0 without it."""
    if cfg.training.matmul_dtype is None:
        return 0.0
    flops = 0.0
    trained = jax.tree.leaves(arch.is_trained)
    for (path, weight), is_trained in zip(jax.tree.leaves_with_path(arch.weights), trained, strict=True):
        if _is_narrow(parameter_name(path), weight.equation):
            flops += (6 if is_trained else 4) * weight.size
    return flops / flops_per_token(cfg.model, arch.num_active, arch.num_active_trained, seq_len)


def find_run_peak_tflops(cfg: Config, arch: Architecture, seq_len: int, device_kind: str) -> float | None:
    """Return the peak of one device for a run's products, by the driver's name; None if the name is not known."""
    kind = find_kind(device_kind)
    return (
        compute_peak_tflops(kind, cfg.training.matmul_dtype, compute_matmul_share(cfg, arch, seq_len)) if kind else None
    )


def _is_narrow(name: str, equation: Equation) -> bool:
    """Return whether a parameter's products are of `training.matmul_dtype`: those of an `Einsum` (models/layers.py)."""
    return equation.is_stacked and name.endswith(".w") and not set(OTHERS) & set(equation.w)
