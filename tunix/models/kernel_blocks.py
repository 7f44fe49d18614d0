"""Sizes of the blocks of our kernels by kind of chip, apart from the kernels, which import Pallas."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import jax
import numpy as np

# Rows of tables that are by the kind of chip. They stand apart from the kernels, which import Pallas.

Row = TypeVar("Row")


def find_row_of_chip(table: Mapping[str, Row], device_kind: str) -> Row | None:
    """Return the row of a device by the name that its driver gives it, which contains the name of its chip.

    None if the table has no row of this chip.
    """
    return next((row for chip, row in table.items() if chip in device_kind), None)


def find_row_in_use(table: Mapping[str, Row]) -> Row:
    """Return the row of the devices of the mesh in use. A kernel is chosen only where its table has such a row."""
    row = find_row_of_chip(table, jax.sharding.get_abstract_mesh().abstract_device.device_kind)
    assert row is not None
    return row


# Sizes of the blocks of the flash kernels by kind of chip, apart from the kernels, which import Pallas.


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
# Blocks by the kind of chip (a part of its name) and by head dim. All are compiled for these chips, and ptxas says how
# many registers are spilled: on H100 only 84 bytes in the third kernel with head dim 256. None was timed on a device.
FLASH_BLOCKS: dict[str, dict[int, FlashBlocks]] = {
    "H100": {64: _64, 128: _128, 256: _256},
    "H200": {64: _64, 128: _128, 256: _256},
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
    starts_at = np.arange(0, length, block.queries)
    stops = -(-np.minimum(starts_at + block.queries, length) // block.keys)

    def pairs(window: int) -> float:
        starts = np.maximum(starts_at - window + 1, 0) // block.keys
        return float(np.sum(stops - starts)) * block.queries * block.keys

    return sum(map(pairs, windows)) / len(windows)


def computed_pairs_in_ring(local_tokens: int, num_devices: int, window: int, block: FlashBlock) -> np.ndarray:
    """Return how many pairs the forward kernel computes in each step of a ring, [devices], on the device with the end.

    Sequences have one document. The device with the last tokens sees the keys of all others, and all wait for it.
    """
    starts_at = np.arange(0, local_tokens, block.queries)
    stop = -(-local_tokens // block.keys)
    pairs = [computed_pairs(local_tokens, [window], block)]
    for distance in range(
        local_tokens, num_devices * local_tokens, local_tokens
    ):  # tokens from the block to the queries
        starts = np.clip(starts_at + distance - window + 1, 0, local_tokens) // block.keys
        pairs.append(float(np.sum(np.maximum(stop - starts, 0))) * block.queries * block.keys)
    return np.array(pairs)


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


def empty_rows(blocks: GroupedBlocks) -> dict[str, float]:
    """Return by kernel how many rows a group's last block computes beside those that the group has, on average."""
    return {
        "grouped_forward": blocks.forward.rows / 2,
        "grouped_d_rows": blocks.d_rows.rows / 2,
        "grouped_d_weights": blocks.d_weights.depth / 2,
    }
