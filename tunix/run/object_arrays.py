"""Arrays of a checkpoint in a bucket: cut into chunks, each an object, in the format of zarr's version 2.

    an array of 6 x 8 numbers in shards of 3 x 4, each cut into chunks of 3 x 2; the names of the objects:

        0.0  0.1  |  0.2  0.3        0.1: rows 0 to 2, columns 2 and 3
        1.0  1.1  |  1.2  1.3        1.0: rows 3 to 5, columns 0 and 1

A chunk never crosses the border of two shards, so no two processes write the same object, and none waits for another.
A reader on another mesh takes slices that lie across chunks; tensorstore finds the objects of a slice.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tunix.base.digests import digest_bytes
from tunix.run.objects import NUM_THREADS, READ_TIMEOUT_S, Objects
from tunix.training.state import State

ARRAYS = "state/arrays.json"
# Bytes of a chunk at most. S3 takes 5 GB in one request; smaller chunks travel side by side, and a reader of a slice
# fetches whole chunks.
CHUNK = 1 << 26


@dataclass
class Part:
    """Share of a checkpoint that one process writes: copies of shards in the memory of the host, and texts."""

    chunks: list[tuple[str, np.ndarray]] = field(default_factory=list)  # name of the object, its numbers
    texts: dict[str, str] = field(default_factory=dict)

    def write(self, objects: Objects) -> dict[str, Any]:
        """Write everything; return the digests by name."""

        def write(name: str, make: Callable[[], bytes]) -> tuple[str, dict[str, Any]]:
            data = make()
            objects.write(name, data)
            return name, digest_bytes(data)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            tasks = [pool.submit(write, name, chunk.tobytes) for name, chunk in self.chunks]
            tasks += [pool.submit(write, name, text.encode) for name, text in self.texts.items()]
            return dict(task.result() for task in tasks)


def name_array(path: Any) -> str:
    """Return the name of an array in the state: params/embed/table."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def copy_part(state: State) -> Part:
    """Copy what this process writes of the state: of each shard, the first replica. Process 0 adds what all share."""
    part, leaves = Part(), jax.tree_util.tree_leaves_with_path(state)
    for _, leaf in leaves:
        leaf.copy_to_host_async()  # all copies are under way before the first is waited for
    for path, leaf in leaves:
        shape, name = leaf.sharding.shard_shape(leaf.shape), f"state/{name_array(path)}"
        chunk = split_shape(shape, leaf.dtype.itemsize)
        for shard in leaf.addressable_shards:
            # Devices may have copies of the same shard. JAX numbers them over all processes: one process has number 0.
            if shard.replica_id == 0:
                # A copy, because the next step takes the memory of the state.
                part.chunks += cut(name, shard.index, np.array(shard.data), chunk)
        if jax.process_index() == 0:
            part.texts[f"{name}/.zarray"] = json.dumps(_describe(leaf, chunk))
    if jax.process_index() == 0:
        arrays = {name_array(path): {"shape": leaf.shape, "dtype": leaf.dtype.name} for path, leaf in leaves}
        part.texts[ARRAYS] = json.dumps(arrays)
    return part


def split_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of a chunk: it divides the shard, and has at most `CHUNK` bytes where that is possible."""
    chunk = list(shape)
    # Dimension by dimension from the first, into as few equal parts as bring the chunk below the limit. A float32 shard
    # of 262,144 x 1,152 has 1,152 MiB: its first dimension is cut into 32 parts, the first divisor of 262,144 from 18
    # on.
    for dim, size in enumerate(shape):
        others = math.prod(chunk) // max(size, 1) * itemsize
        parts = next((n for n in range(1, size + 1) if size % n == 0 and others * (size // n) <= CHUNK), max(size, 1))
        chunk[dim] = size // parts
    return tuple(chunk)


def cut(name: str, index: Any, shard: np.ndarray, chunk: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the chunks of a shard, which begins at `index` of the whole array, with the names of their objects."""
    firsts = [(place.start or 0) // size for place, size in zip(index, chunk, strict=True)]
    counts = [size // each for size, each in zip(shard.shape, chunk, strict=True)]
    for place in itertools.product(*map(range, counts)):
        here = tuple(slice(n * size, (n + 1) * size) for n, size in zip(place, chunk, strict=True))
        numbers = [str(first + n) for first, n in zip(firsts, place, strict=True)]
        yield f"{name}/{'.'.join(numbers) or '0'}", shard[here]  # zarr calls the chunk of a single number "0"


def _describe(leaf: jax.Array, chunk: tuple[int, ...]) -> dict[str, Any]:
    """Return the content of the object `.zarray`, which says how the chunks of an array are read."""
    dtype = np.dtype(leaf.dtype)
    return {
        "zarr_format": 2,
        "shape": leaf.shape,
        "chunks": chunk,
        # "<f4" for float32, as zarr says it. For kinds that numpy lacks, tensorstore takes the name: "bfloat16".
        "dtype": dtype.name if dtype.kind == "V" else dtype.str,
        "order": "C",
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "dimension_separator": ".",
    }


def read_arrays(checkpoint: str, abstract: Any, timeout_s: float = READ_TIMEOUT_S) -> Any:
    """Read the arrays that `abstract` names, with its dtypes and shardings; each process reads its own slices."""
    objects = Objects(checkpoint, timeout_s)

    def read(path: Any, leaf: Any) -> jax.Array:
        name = name_array(path)
        array, slices = objects.array(f"state/{name}"), {}
        if tuple(array.shape) != tuple(leaf.shape):
            raise ValueError(f"{name} has shape {tuple(array.shape)}, not {tuple(leaf.shape)}")

        def slice_of(index: Any) -> np.ndarray:
            key = str(index)
            if key not in slices:  # devices with the same slice share it
                slices[key] = np.asarray(array[index].read().result(2 * timeout_s)).astype(leaf.dtype)
            return slices[key]

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, slice_of)

    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return jax.tree.unflatten(treedef, list(pool.map(lambda item: read(*item), leaves)))


def list_parts(checkpoint: str) -> dict[str, Any]:
    """Find the parts of the state that not every checkpoint has, as `items.find_parts` returns them."""
    arrays = Objects(checkpoint).read_json(ARRAYS)
    copies = {name.split("/")[1] for name in arrays if name.startswith("copies/")}
    window = arrays["spikes/loss"]["shape"][0] if "spikes/loss" in arrays else 0
    return {"copies": sorted(copies), "spike_window": window}
