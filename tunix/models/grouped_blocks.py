"""Sizes of the blocks of the grouped products by kind of chip, apart from the kernels, which import Pallas."""

from typing import NamedTuple


class Block(NamedTuple):
    """Sizes of the block of the result that one program of a kernel computes, and what runs it."""

    rows: int
    columns: int
    depth: int  # summed at a time
    warps: int  # groups of 32 threads
    stages: int  # blocks on their way from memory, the one at work included


class Blocks(NamedTuple):
    """Blocks of the three kernels. The result of the last one is the gradient of one group's weights."""

    forward: Block
    d_rows: Block
    d_weights: Block


_LARGE, _SMALL = Block(128, 256, 64, 8, 3), Block(128, 128, 32, 4, 3)
# Blocks by the kind of chip (a part of its name). All are compiled for these chips, with arrays of more and of less
# than 4 GiB, and ptxas says that no register is spilled (154 to 186 registers of large blocks, 201 to 240 of small
# ones). None was timed on a device. A small block takes 48 KiB of shared memory. A large one takes 144 KiB, which the
# L40S does not have.
BLOCKS: dict[str, Blocks] = {
    "H100": Blocks(_LARGE, _LARGE, _LARGE),
    "H200": Blocks(_LARGE, _LARGE, _LARGE),
    "A100": Blocks(_SMALL, _SMALL, _SMALL),
    "B200": Blocks(_LARGE, _LARGE, _LARGE),
    "L40S": Blocks(_SMALL, _SMALL, _SMALL),
}


def empty_rows(blocks: Blocks) -> dict[str, float]:
    """Return by kernel how many rows a group's last block computes beside those that the group has, on average."""
    return {
        "grouped_forward": blocks.forward.rows / 2,
        "grouped_d_rows": blocks.d_rows.rows / 2,
        "grouped_d_weights": blocks.d_weights.depth / 2,
    }
