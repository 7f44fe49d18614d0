"""Products of 8-bit floats (`training.matmul_dtype=fp8`): devices that have them, and their share of the arithmetic."""

import jax

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.costs.devices import device_kinds, find_kind, peak_tflops
from tunix.models.flops import flops_per_token
from tunix.models.paths import parameter_name
from tunix.sharding.dims import Equation
from tunix.training.state import Architecture

# Letters of experts, of a router's scores, and of inputs of layers: their products keep the compute dtype.
OTHERS = "XYp"


def check_matmul_dtype(cfg: Config, platform: str, device_kind: str) -> None:
    """Raise `UserError` where `training.matmul_dtype=fp8` is asked of devices that do not multiply 8-bit floats.

    CPUs are no mistake: they emulate it, for tests and for a look at the loss. `device_kind` is the driver's name.
    """
    kind = find_kind(device_kind)
    if cfg.training.matmul_dtype is None or platform == "cpu" or (kind is not None and kind.fp8_tflops is not None):
        return
    chips = ", ".join(each.name for each in device_kinds().values() if each.fp8_tflops is not None)
    raise UserError(
        f"training.matmul_dtype=fp8: {device_kind} has no products of 8-bit floats that are known here; {chips} have "
        "them, and CPUs emulate them. Leave training.matmul_dtype=null"
    )


def fp8_share(cfg: Config, arch: Architecture, seq_len: int) -> float:
    """Return the share of a step's model FLOPs that products of 8-bit floats have; 0 without them."""
    if cfg.training.matmul_dtype is None:
        return 0.0
    flops = 0.0
    trained = jax.tree.leaves(arch.is_trained)
    for (path, weight), is_trained in zip(jax.tree.leaves_with_path(arch.weights), trained, strict=True):
        if _is_in_8_bits(parameter_name(path), weight.equation):
            flops += (6 if is_trained else 4) * weight.size
    return flops / flops_per_token(cfg.model, arch.num_active, arch.num_active_trained, seq_len)


def run_peak_tflops(cfg: Config, arch: Architecture, seq_len: int, device_kind: str) -> float | None:
    """Return the peak of one device for a run's products, by the driver's name; None if the name is not known."""
    kind = find_kind(device_kind)
    return peak_tflops(kind, fp8_share(cfg, arch, seq_len)) if kind else None


def _is_in_8_bits(name: str, equation: Equation) -> bool:
    """Return whether the products of a parameter are of 8-bit floats: those of an `Einsum` of models/layers.py."""
    return equation.is_stacked and name.endswith(".w") and not set(OTHERS) & set(equation.w)
