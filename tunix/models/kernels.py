"""Choice of the kernels of attention and experts: what `auto` takes, and where a kernel is refused."""

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractDevice

from tunix.base.dotted_path import import_object
from tunix.base.errors import UserError
from tunix.config import Model
from tunix.models import kernel_blocks
from tunix.models.kernel_blocks import FLASH_BLOCKS, find_row_of_chip
from tunix.models.table import KERNELS

# Dtypes that flash and cuDNN multiply. The tensor cores of a GPU round float32 to fewer bits: such a kernel would be
# fast and not exact, so float32 takes XLA's operations.
DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
# Which key of the model needs each kernel option (for error messages).
NEEDED_FOR = {"cap": "cap of scores (model.attention_cap)", "with_sums": "sums for model.attention_sinks"}


class Choice(NamedTuple):
    """A key of a table of kernels, of products or of exchanges, or a dotted path, and why it was chosen."""

    name: str
    reason: str


def mesh_device() -> AbstractDevice | None:
    """Return platform and kind of the devices of the mesh in use; None if the mesh has no devices.

    The backend of this process is not asked: a plan compiles for GPUs in a process that has CPUs.
    """
    return jax.sharding.get_abstract_mesh().abstract_device


def find_kernel(name: str) -> Any:
    """Return the kernel of attention with this key of `KERNELS` or dotted path."""
    return import_object(KERNELS.get(name, name))


def choose_kernels(model: Model, dtype: str, device: AbstractDevice | None) -> dict[str, Choice]:
    """Return the kernel of attention by the letter of its key/value heads; see `select_kernel`."""
    return {
        heads.dim_names[0]: select_kernel(model.attention, heads.dim, dtype, device, model.attention_options)
        for heads in model.head_kinds
    }


def select_kernel(
    name: str, head_dim: int, dtype: str, device: AbstractDevice | None, options: Iterable[str] = ()
) -> Choice:
    """Return the kernel of `model.attention=name` for products in `dtype` on this device; None is not known.

    `options` are the names of those that the model needs (`Model.attention_options`).

    Raises:
        UserError: the kernel does not run or is not exact there.
    """
    if name == "auto":
        problem = _check_flash(device, head_dim, dtype)
        # cuDNN is not among the choices: it takes the rule as a mask [T, S], and skips nothing.
        return Choice("xla", problem) if problem else Choice("flash", "exact here, and skips keys that no query sees")
    if device is not None and name in CHECKS and (problem := CHECKS[name](device, head_dim, dtype)):
        raise UserError(
            f"model.attention={name}: {problem}; model.attention=auto takes the fastest kernel that is exact"
        )
    # A kernel says by its parameters which options it has: so one of a user's own needs no table.
    parameters = inspect.signature(find_kernel(name)).parameters
    if missing := [NEEDED_FOR[option] for option in options if option not in parameters]:
        raise UserError(f"model.attention={name} has no {missing[0]}, which the model needs; set model.attention=auto")
    return Choice(name, f"model.attention={name}")


def _check_flash(device: AbstractDevice | None, head_dim: int, dtype: str) -> str | None:
    """Return why flash does not run or is not exact here; None if it is."""
    if device is None or find_row_of_chip(FLASH_BLOCKS, device.device_kind) is None:
        kind = device.device_kind if device else "no device"
        return f"flash has block sizes for {', '.join(FLASH_BLOCKS)}, not for {kind}"
    return _check_heads("flash", head_dim, dtype)


def _check_cudnn(device: AbstractDevice, head_dim: int, dtype: str) -> str | None:
    """Return why cuDNN's kernel does not run or is not exact here; None if it is."""
    if device.platform == "cpu":
        return f"cuDNN needs an NVIDIA GPU, not {device.device_kind}"
    if head_dim % 8:
        return f"cuDNN takes heads of a multiple of 8 numbers, not of {head_dim}"
    return _check_heads("cuDNN", head_dim, dtype)


def _check_heads(kernel: str, head_dim: int, dtype: str) -> str | None:
    """Return why a kernel does not take heads of this size and dtype; None if it does."""
    if dtype not in DTYPES:
        return f"{kernel} multiplies 16-bit numbers, and products are {dtype}"
    if head_dim > MAX_HEAD_DIM:
        return f"{kernel} takes heads of at most {MAX_HEAD_DIM} numbers, not of {head_dim}"
    return None


CHECKS = {"flash": _check_flash, "cudnn": _check_cudnn}


def select_expert_matmul(name: str, dtype: str, device: AbstractDevice | None) -> Choice:
    """Return the grouped product of `model.expert_products=name` for products in `dtype` on this device.

    Raises:
        UserError: the kernel does not run or is not exact there.
    """
    if name == "auto":
        problem = _check_grouped(device, dtype)
        return Choice("xla", problem) if problem else Choice("grouped", "exact here, and a row meets one expert")
    if name == "grouped" and device is not None and (problem := _check_grouped(device, dtype)):
        raise UserError(f"model.expert_products=grouped: {problem}; set model.expert_products=auto")
    return Choice(name, f"model.expert_products={name}")


def _check_grouped(device: AbstractDevice | None, dtype: str) -> str | None:
    """Return why the grouped kernel does not run or is not exact here; None if it is."""
    if device is None or find_row_of_chip(kernel_blocks.GROUPED_BLOCKS, device.device_kind) is None:
        chips, this = ", ".join(kernel_blocks.GROUPED_BLOCKS), device.device_kind if device else "no device"
        return f"the grouped kernel has block sizes for {chips}, not for {this}"
    if dtype not in DTYPES:
        return f"the grouped kernel multiplies 16-bit numbers, and products are {dtype}"
    return None


def branches_are_cheap() -> bool:
    """Return whether a program on the mesh in use may branch in each layer: on a GPU, a branch waits for the host."""
    device = mesh_device()
    return device is not None and device.platform == "cpu"
