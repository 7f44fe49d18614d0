"""Kernels of attention and experts: the sizes of their blocks by kind of chip, what `auto` takes, what is refused.

The tables stand apart from the kernels, which import Pallas.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractDevice

from tunix.base.errors import UserError
from tunix.config import Model
from tunix.config.layers import ExpertsMlp
from tunix.models.table import FUSED, find_kernel

Row = TypeVar("Row")


def find_row_of_chip(table: Mapping[str, Row], device_kind: str) -> Row | None:
    """Return the row of a device by the name that its driver gives it, which contains the name of its chip.

    None if the table has no row of this chip.
    """
    return next((row for chip, row in table.items() if chip in device_kind), None)


def find_row_in_use(table: Mapping[str, Row]) -> Row:
    """Return the row of the devices of the mesh in use. A kernel is chosen only where its table has such a row.

    A plan that is only derived traces steps on a mesh without devices, for which nothing is compiled: any row will do.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    row = next(iter(table.values())) if device is None else find_row_of_chip(table, device.device_kind)
    assert row is not None
    return row


class FlashBlock(NamedTuple):
    """Sizes of the blocks that one program of a kernel works on, and what runs it."""

    queries: int
    keys: int
    warps: int  # groups of 32 threads
    stages: int  # blocks on their way from memory, the one at work included


class FlashBlocks(NamedTuple):
    """Blocks of the three kernels."""

    forward: FlashBlock
    d_queries: FlashBlock
    d_keys: FlashBlock


_64 = FlashBlocks(FlashBlock(128, 64, 4, 3), FlashBlock(128, 64, 8, 2), FlashBlock(64, 128, 8, 2))
_128 = FlashBlocks(FlashBlock(128, 64, 8, 3), FlashBlock(128, 64, 8, 2), FlashBlock(64, 128, 8, 2))
_256 = FlashBlocks(FlashBlock(128, 64, 8, 2), FlashBlock(64, 64, 8, 2), FlashBlock(32, 64, 8, 2))
# The fastest of those that `python -m benchmarks.gpu_blocks` tries on one H200, which has the processor of the H100.
_HOPPER = {
    64: FlashBlocks(FlashBlock(128, 128, 4, 2), FlashBlock(64, 64, 4, 2), FlashBlock(128, 64, 4, 2)),
    128: FlashBlocks(FlashBlock(128, 128, 8, 3), FlashBlock(64, 64, 4, 2), FlashBlock(64, 128, 8, 2)),
    256: FlashBlocks(FlashBlock(128, 64, 8, 2), FlashBlock(64, 64, 4, 2), FlashBlock(32, 64, 8, 2)),
}
# Blocks by the kind of chip (a part of its name) and by head dim. Those of other chips are compiled for them, and were
# not timed on a device.
FLASH_BLOCKS: dict[str, dict[int, FlashBlocks]] = {
    "H100": _HOPPER,
    "H200": _HOPPER,
    "A100": {64: _64, 128: _128, 256: _256},
    # Its tensor memory holds 512 columns: (32, 64) needs 544.
    "B200": {64: _64, 128: _128, 256: _256._replace(d_keys=FlashBlock(64, 32, 8, 2))},
    # A block of threads has 99 KiB of shared memory, not 227.
    "L40S": {
        64: _64,
        128: _128,
        256: FlashBlocks(FlashBlock(64, 32, 4, 2), FlashBlock(64, 32, 8, 1), FlashBlock(32, 32, 8, 1)),
    },
}


def padded_dim(blocks: dict[int, FlashBlocks], dim: int) -> int:
    """Return the smallest head dim with blocks that has room for heads of `dim` numbers."""
    return min(size for size in blocks if size >= dim)


def blocks_for(blocks: dict[int, FlashBlocks], dim: int) -> FlashBlocks:
    """Return the blocks for heads of `dim` numbers, which are filled up to `padded_dim`."""
    return blocks[padded_dim(blocks, dim)]


def computed_pairs(length: int, windows: list[int], block: FlashBlock) -> float:
    """Return how many pairs of a query and a key the forward kernel computes in a row of one document.

    It is the mean over layers with these windows. A block at the end of a range counts in full, as the kernel computes
    it in full and masks what no query sees.
    """
    return sum(float(computed_pairs_in_ring(length, 1, window, block)[0]) for window in windows) / len(windows)


def computed_pairs_in_ring(local_tokens: int, num_devices: int, window: int, block: FlashBlock) -> np.ndarray:
    """Return how many pairs the forward kernel computes in each step of a ring, [devices], on the device with the end.

    Sequences have one document. The device with the last tokens sees the keys of all others, and all wait for it.
    """
    queries = np.arange(0, local_tokens, block.queries)
    pairs = []
    for distance in range(0, num_devices * local_tokens, local_tokens):  # tokens from the block to the queries
        ends = local_tokens if distance else np.minimum(queries + block.queries, local_tokens)
        starts = np.clip(queries + distance - window + 1, 0, local_tokens) // block.keys
        pairs.append(np.sum(np.maximum(-(-ends // block.keys) - starts, 0)) * block.queries * block.keys)
    return np.array(pairs, float)


class GroupedBlock(NamedTuple):
    """Sizes of the block of the result that one program of a kernel computes, and what runs it."""

    rows: int
    columns: int
    depth: int  # summed at a time
    warps: int  # groups of 32 threads
    stages: int  # blocks on their way from memory, the one at work included


class GroupedBlocks(NamedTuple):
    """Blocks of the three kernels. The result of the last one is the gradient of one group's weights."""

    forward: GroupedBlock
    d_rows: GroupedBlock
    d_weights: GroupedBlock


_LARGE, _SMALL = GroupedBlock(128, 256, 64, 8, 3), GroupedBlock(128, 128, 32, 4, 3)
# Blocks by the kind of chip (a part of its name). All are compiled for these chips, with arrays of more and of less
# than 4 GiB, and ptxas says that no register is spilled (154 to 186 registers of large blocks, 201 to 240 of small
# ones). None was timed on a device. A small block takes 48 KiB of shared memory. A large one takes 144 KiB, which the
# L40S does not have.
GROUPED_BLOCKS: dict[str, GroupedBlocks] = {
    "H100": GroupedBlocks(_LARGE, _LARGE, _LARGE),
    "H200": GroupedBlocks(_LARGE, _LARGE, _LARGE),
    "A100": GroupedBlocks(_SMALL, _SMALL, _SMALL),
    "B200": GroupedBlocks(_LARGE, _LARGE, _LARGE),
    "L40S": GroupedBlocks(_SMALL, _SMALL, _SMALL),
}


class ExpertBlocks(NamedTuple):
    """Blocks of the kernels of models/fused_experts.py."""

    up: GroupedBlock  # two sums of this size at a time
    down: GroupedBlock
    combine: GroupedBlock  # without a depth: a sum over the choices of each token
    d_hidden: GroupedBlock  # when it stores, it has the gradients of the gate in registers, too
    d_hidden_long: GroupedBlock  # the same for `LONG_GATES`
    d_down: GroupedBlock
    d_inputs: GroupedBlock  # two sums
    d_rows: GroupedBlock


LONG_GATES = ("gelu", "clamped_silu")  # values of model.mlp.activation whose gradients have many numbers
# Rows for which fused kernels have room at a time, as a multiple of those of equal loads. What a router with a balance
# loss sends to one device exceeds this seldom, and further rounds compute what does.
CAPACITY_FACTOR = 1.25
_TWO_LARGE, _TWO_SMALL = GroupedBlock(128, 128, 64, 8, 3), GroupedBlock(128, 64, 32, 8, 3)
_COMBINE = GroupedBlock(16, 256, 0, 4, 2)
_FUSED_LARGE = ExpertBlocks(
    _TWO_LARGE, _LARGE, _COMBINE, GroupedBlock(128, 64, 64, 8, 3), GroupedBlock(64, 64, 64, 8, 3), _LARGE, _TWO_LARGE,
    _LARGE,
)  # fmt: skip
# The fastest on one H200, as above. `d_hidden` spills registers, and takes 0.99 ms where the block of `_FUSED_LARGE`,
# which spills none, takes 1.68; `d_hidden_long` was not timed.
_FUSED_HOPPER = ExpertBlocks(
    GroupedBlock(128, 128, 64, 8, 4), _LARGE, GroupedBlock(8, 256, 0, 4, 2), GroupedBlock(64, 256, 64, 8, 4),
    GroupedBlock(64, 64, 64, 8, 3), GroupedBlock(128, 128, 64, 4, 4), GroupedBlock(128, 64, 64, 4, 3), _LARGE,
)  # fmt: skip
_FUSED_SMALL = ExpertBlocks(
    _TWO_SMALL, _SMALL, _COMBINE, GroupedBlock(128, 64, 32, 8, 3), GroupedBlock(64, 64, 32, 8, 3), _SMALL, _TWO_SMALL,
    _SMALL,
)  # fmt: skip
# Blocks by the kind of chip, as above: compiled for these chips with the experts of Qwen 3 30B-A3B, GPT-OSS 20B,
# Llama 4 and Gemma 4 26B-A4B, and ptxas says that no register is spilled, but for `d_hidden` on Hopper.
EXPERT_BLOCKS: dict[str, ExpertBlocks] = {
    "H100": _FUSED_HOPPER,
    "H200": _FUSED_HOPPER,
    "A100": _FUSED_SMALL,
    "B200": _FUSED_LARGE._replace(up=_TWO_LARGE._replace(stages=2)),
    "L40S": _FUSED_SMALL,
}


def empty_rows(blocks: GroupedBlocks) -> dict[str, float]:
    """Return by kernel how many rows a group's last block computes beside those that the group has, on average."""
    return {
        "grouped_forward": blocks.forward.rows / 2,
        "grouped_d_rows": blocks.d_rows.rows / 2,
        "grouped_d_weights": blocks.d_weights.depth / 2,
    }


def fused_empty_rows(blocks: ExpertBlocks) -> dict[str, float]:
    """Return what `empty_rows` does for fused kernels."""
    by_rows = {name: getattr(blocks, name).rows for name in ("up", "down", "d_hidden", "d_rows")}
    by_depth = {name: getattr(blocks, name).depth for name in ("d_down", "d_inputs")}
    return {f"experts_{name}": size / 2 for name, size in (by_rows | by_depth).items()}


# Dtypes that flash and cuDNN multiply. The tensor cores of a GPU round float32 to fewer bits: such a kernel would be
# fast and not exact, so float32 takes XLA's operations.
DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
# Which key of the model needs each kernel option (for error messages).
NEEDED_FOR = {
    "cap": "cap of scores (model.attention_cap)",
    "with_sums": "sums for model.attention_sinks or optimizer.qk_clip",
    "future_keys": "way for tokens of an image to see later ones (model.vision)",
}


class Choice(NamedTuple):
    """A key of a table of kernels, of products or of exchanges, or a dotted path, and why it was chosen."""

    name: str
    reason: str


def mesh_device() -> AbstractDevice | None:
    """Return platform and kind of the devices of the mesh in use; None if the mesh has no devices.

    The backend of this process is not asked: a plan compiles for GPUs in a process that has CPUs.
    """
    return jax.sharding.get_abstract_mesh().abstract_device


def mesh_platform() -> str | None:
    """Return the platform of the devices of the mesh in use, cpu or gpu; None if the mesh has no devices."""
    device = mesh_device()
    return None if device is None else device.platform


def choose_kernels(
    model: Model, dtype: str, device: AbstractDevice | None, reports_scores: bool = False
) -> dict[str, Choice]:
    """Return the kernel of attention by the letter of its key/value heads; see `select_kernel`.

    `reports_scores` says whether the step asks for `BlockSums.head_scores`.
    """
    options = {**model.kernel_options, "with_sums": True} if reports_scores else model.kernel_options
    return {
        heads.dim_names[0]: select_kernel(model.attention, heads.dim, dtype, device, options)
        for heads in model.head_kinds
    }


def select_kernel(
    name: str, head_dim: int, dtype: str, device: AbstractDevice | None, options: Iterable[str] = ()
) -> Choice:
    """Return the kernel of `model.attention=name` for products in `dtype` on this device; None is not known.

    `options` are the names of those that the model needs (`Model.kernel_options`).

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


def _check_kernel(
    kernel: str, table: Mapping[str, Any] | None, device: AbstractDevice | None, dtype: str, head_dim: int = 0
) -> str | None:
    """Return why a kernel with this table of blocks does not run or is not exact here; None if it is."""
    if table is not None and (device is None or find_row_of_chip(table, device.device_kind) is None):
        kind = device.device_kind if device else "no device"
        return f"{kernel} has block sizes for {', '.join(table)}, not for {kind}"
    if dtype not in DTYPES:
        return f"{kernel} multiplies 16-bit numbers, and products are {dtype}"
    if head_dim > MAX_HEAD_DIM:
        return f"{kernel} takes heads of at most {MAX_HEAD_DIM} numbers, not of {head_dim}"
    return None


def _check_flash(device: AbstractDevice | None, head_dim: int, dtype: str) -> str | None:
    return _check_kernel("flash", FLASH_BLOCKS, device, dtype, head_dim)


def _check_cudnn(device: AbstractDevice, head_dim: int, dtype: str) -> str | None:
    if device.platform == "cpu":
        return f"cuDNN needs an NVIDIA GPU, not {device.device_kind}"
    if head_dim % 8:
        return f"cuDNN takes heads of a multiple of 8 numbers, not of {head_dim}"
    return _check_kernel("cuDNN", None, device, dtype, head_dim)


# Each returns why the kernel does not run or is not exact on a device; None if it is.
CHECKS = {"flash": _check_flash, "cudnn": _check_cudnn}


def select_expert_matmul(
    name: str, dtype: str, device: AbstractDevice | None, model: Model | None = None, platform: str | None = None
) -> Choice:
    """Return what computes the experts of a model, with `model.expert_products=name` and products in `dtype`.

    Without a device, it is one of this platform; a GPU has the kernels then.

    Raises:
        UserError: it does not run or is not exact there.
    """
    device = _any_device(platform, EXPERT_BLOCKS) if device is None else device
    problems = {
        FUSED: _check_fused(model) or _check_kernel("the fused kernels", EXPERT_BLOCKS, device, dtype),
        "grouped": _check_kernel("the grouped kernel", GROUPED_BLOCKS, device, dtype),
    }
    if name == "auto":
        if problem := problems["grouped"]:
            return Choice("xla", problem)
        not_fused = problems[FUSED]
        return Choice("grouped", not_fused) if not_fused else Choice(FUSED, "exact here, and copies no row")
    problem = problems.get(name)
    if name == FUSED and device is not None and device.platform == "cpu":  # there JAX's own operations stand for them
        problem = _check_fused(model)
    if device is not None and problem:
        raise UserError(f"model.expert_products={name}: {problem}; set model.expert_products=auto")
    return Choice(name, f"model.expert_products={name}")


def _any_device(platform: str | None, blocks: Mapping[str, Any]) -> AbstractDevice | None:
    """Return the first GPU in a table of blocks, where nothing but the platform is known; None where it has no GPUs."""
    return AbstractDevice(next(iter(blocks)), None, platform) if platform == "gpu" else None


def _check_fused(model: Model | None) -> str | None:
    """Return what of a model's experts the fused kernels do not compute; None if they compute all."""
    if model is None or not isinstance(model.mlp, ExpertsMlp):
        return None
    if model.mlp.biases and model.mlp.weighted == "inputs":
        return "the fused kernels add no biases (model.mlp.biases) to weighted inputs (model.mlp.weighted=inputs)"
    if model.lora.rank and any(re.search(model.lora.targets, f"mlp.{name}") for name in EXPERT_MATRICES):
        return "the fused kernels add no low-rank updates to experts (model.lora.targets)"
    return None


EXPERT_MATRICES = ("expert_gate", "expert_up", "expert_down")


def select_cache(
    name: str,
    model: Model,
    dtype: str,
    device: AbstractDevice | None,
    platform: str | None = None,
    key: str = "sampling.cache",
) -> str:
    """Return where a rollout on a device has keys and values for sampling.cache=`name`: pages or slots.

    Without a device, it is one of this platform; a GPU has the kernel then.

    Raises:
        UserError: pages for a model that cannot have them there.
    """
    device = _any_device(platform, FLASH_BLOCKS) if device is None else device
    on_cpu = device is None or device.platform == "cpu"
    problem = model.find_page_problem() or (None if on_cpu else _check_page_kernel(model, dtype, device))
    if name == "pages" and problem:
        raise UserError(f"{key}=pages: {problem}; set {key}=auto, which takes slots here")
    return name if name != "auto" else "slots" if problem or on_cpu else "pages"


def _check_page_kernel(model: Model, dtype: str, device: AbstractDevice | None) -> str | None:
    """Return why attention to pages on a GPU (models/paged_attention.py) does not compute a model; None if it does."""
    if model.attention_sinks:
        return "the kernel of pages gives no sums of scores, which model.attention_sinks needs"
    dims = {heads.dim for heads in model.head_kinds}
    if odd := [dim for dim in dims if dim & (dim - 1) or dim < 16]:
        return f"the kernel of pages takes heads of 16, 32, 64, 128 or 256 numbers, not of {odd[0]}"
    return _check_kernel("the kernel of pages", FLASH_BLOCKS, device, dtype, max(dims))


def branches_are_cheap() -> bool:
    """Return whether a program on the mesh in use may branch in each layer: on a GPU, a branch waits for the host."""
    return mesh_platform() == "cpu"


def products_add_to_sums() -> bool:
    """Return whether XLA adds the float32 result of a product of 16-bit factors to a sum inside of the product, on the
    mesh in use: on GPUs."""
    return mesh_platform() == "gpu"


def has_product_library(*dtypes: Any) -> bool:
    """Return whether XLA's library on the mesh in use multiplies factors of these dtypes (models/cpu_library.py)."""
    has_routine = all(dtype in ("bfloat16", "float32") for dtype in dtypes) and len(set(dtypes)) == 1
    return has_routine and mesh_platform() == "cpu"
