"""Sizes of the blocks of the flash kernels by kind of chip, apart from the kernels, which import Pallas."""

from typing import NamedTuple

import numpy as np


class Block(NamedTuple):
    """Sizes of the blocks that one program of a kernel works on, and what runs it."""

    queries: int
    keys: int
    warps: int  # groups of 32 threads
    stages: int  # blocks on their way from memory, the one at work included


class Blocks(NamedTuple):
    """Blocks of the three kernels."""

    forward: Block
    d_queries: Block
    d_keys: Block


_64 = Blocks(Block(128, 64, 4, 3), Block(128, 64, 8, 2), Block(64, 128, 8, 2))
_128 = Blocks(Block(128, 64, 8, 3), Block(128, 64, 8, 2), Block(64, 128, 8, 2))
_256 = Blocks(Block(128, 64, 8, 2), Block(64, 64, 8, 2), Block(32, 64, 8, 2))
# Blocks by the kind of chip (a part of its name) and by head dim. All are compiled for these chips, and ptxas says how
# many registers are spilled: on H100 only 84 bytes in the third kernel with head dim 256. None was timed on a device.
BLOCKS: dict[str, dict[int, Blocks]] = {
    "H100": {64: _64, 128: _128, 256: _256},
    "H200": {64: _64, 128: _128, 256: _256},
    "A100": {64: _64, 128: _128, 256: _256},
    # Its tensor memory holds 512 columns: (32, 64) needs 544.
    "B200": {64: _64, 128: _128, 256: _256._replace(d_keys=Block(64, 32, 8, 2))},
    # A block of threads has 99 KiB of shared memory, not 227.
    "L40S": {
        64: _64,
        128: _128,
        256: Blocks(Block(64, 32, 4, 2), Block(64, 32, 8, 1), Block(32, 32, 8, 1)),
    },
}


def padded_dim(blocks: dict[int, Blocks], dim: int) -> int:
    """Return the smallest head dim with blocks that has room for heads of `dim` numbers."""
    return min(size for size in blocks if size >= dim)


def blocks_for(blocks: dict[int, Blocks], dim: int) -> Blocks:
    """Return the blocks for heads of `dim` numbers, which are filled up to `padded_dim`."""
    return blocks[padded_dim(blocks, dim)]


def computed_pairs(length: int, windows: list[int], block: Block) -> float:
    """Return how many pairs of a query and a key the forward kernel computes in a row of one document.

    It is the mean over layers with these windows. A block at the end of a range counts in full, as the kernel computes
    it in full and masks what no query sees.
    """
    begins = np.arange(0, length, block.queries)
    stops = -(-np.minimum(begins + block.queries, length) // block.keys)

    def pairs(window: int) -> float:
        starts = np.maximum(begins - window + 1, 0) // block.keys
        return float(np.sum(stops - starts)) * block.queries * block.keys

    return sum(map(pairs, windows)) / len(windows)


def computed_pairs_in_ring(own_tokens: int, num_devices: int, window: int, block: Block) -> np.ndarray:
    """Return how many pairs the forward kernel computes in each step of a ring, [devices], on the device with the end.

    Sequences have one document. The device with the last tokens sees the keys of all others, and all wait for it.
    """
    begins = np.arange(0, own_tokens, block.queries)
    stop = -(-own_tokens // block.keys)
    pairs = [computed_pairs(own_tokens, [window], block)]
    for distance in range(own_tokens, num_devices * own_tokens, own_tokens):  # tokens from the block to the queries
        starts = np.clip(begins + distance - window + 1, 0, own_tokens) // block.keys
        pairs.append(float(np.sum(np.maximum(stop - starts, 0))) * block.queries * block.keys)
    return np.array(pairs)
