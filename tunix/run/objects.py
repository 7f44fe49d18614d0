"""A checkpoint as objects in a bucket. tensorstore writes and reads them; every process writes its own shards.

    STEP/state/params/embed/table/.zarray    shape, dtype and size of a chunk, as the format zarr has them
    STEP/state/params/embed/table/0.3        one chunk: the bytes of a shard, or of a part of one
    STEP/state/arrays.json                   shape and dtype of each array, by name
    STEP/run/metadata, STEP/tokenizer/metadata, STEP/metrics/metrics     as in a folder
    STEP/digests.R.json                      digests of what process R has written
    STEP/digests.json                        written last: a checkpoint without it is not whole

A bucket cannot rename a folder, so the last object takes the part of Orbax's rename. Orbax 0.12 itself takes an
address of S3 for a path of this machine, and its index of all processes' arrays needs a file system.
"""

import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from tunix.base.buckets import explain, filesystem, join
from tunix.base.digests import FILE, Damaged, digest_bytes
from tunix.training.state import State

ADDRESS = "address"  # a file in a checkpoint's folder that is a stand-in for one in a bucket
ARRAYS = "state/arrays.json"
KEY = "checkpoint.folder"
CHUNK = 1 << 26  # bytes of a chunk at most: S3 takes 5 GB in one request
NUM_THREADS = 8
READ_TIMEOUT_S = 300.0  # for commands that read a checkpoint, which have no key for it


def find_address(checkpoint: Path) -> str | None:
    """Return the address that a checkpoint's folder stands for; None if the checkpoint is in the folder itself."""
    file = checkpoint / ADDRESS
    return file.read_text().strip() if file.is_file() else None


def _open_s3(address: str, retries: dict[str, Any]) -> dict[str, Any]:
    """tensorstore's driver for S3, with the endpoint and the region that fsspec has found."""
    files = filesystem(address, KEY)
    files.connect()
    meta, spec = files.s3.meta, {"driver": "s3", "s3_request_retries": retries}
    if "amazonaws.com" not in meta.endpoint_url:
        spec |= {"endpoint": meta.endpoint_url, "aws_region": meta.region_name or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def _open_gs(address: str, retries: dict[str, Any]) -> dict[str, Any]:
    """tensorstore's driver for Google's buckets, on the server that fsspec talks to."""
    if server := os.environ.get("STORAGE_EMULATOR_HOST"):
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = server if "://" in server else f"http://{server}"
    return {"driver": "gcs", "gcs_request_retries": retries}


DRIVERS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {"s3": _open_s3, "gs": _open_gs}


class Objects:
    """Objects below an address. A request that fails is tried again for about `timeout_s` seconds."""

    def __init__(self, address: str, timeout_s: float = READ_TIMEOUT_S):
        self.address, self.timeout_s = address.rstrip("/"), timeout_s
        scheme, _, place = self.address.partition("://")
        bucket, _, path = place.partition("/")
        delays = itertools.accumulate(min(2.0**number, 32.0) for number in itertools.count())
        tries = next(number for number, waited in enumerate(delays, 1) if waited >= timeout_s)
        retries = {"max_retries": tries, "initial_delay": "1s", "max_delay": "32s"}
        driver = DRIVERS[scheme](self.address, retries)
        self.spec = driver | {"bucket": bucket, "path": f"{path}/" if path else ""}
        self.store = ts.KvStore.open(self.spec).result()

    def write(self, name: str, data: bytes) -> None:
        self.store.write(name, data).result(2 * self.timeout_s)

    def read(self, name: str) -> bytes:
        """Return an object's bytes; raises `FileNotFoundError` where there is none."""
        answer = self.store.read(name).result(2 * self.timeout_s)
        if answer.state != "value":
            raise FileNotFoundError(f"{self.address}/{name} is missing")
        return answer.value

    def read_json(self, name: str) -> Any:
        return json.loads(self.read(name))

    def delete(self, name: str) -> None:
        self.store.delete_range(ts.KvStore.KeyRange(name, name + "\0")).result(2 * self.timeout_s)

    def delete_folder(self, name: str) -> None:
        """Delete every object below a folder; the one that makes a checkpoint whole comes first."""
        self.delete(f"{name}/{FILE}")
        everything = ts.KvStore.KeyRange(f"{name}/", f"{name}0")  # "0" is the character after "/"
        self.store.delete_range(everything).result(2 * self.timeout_s)

    def array(self, name: str) -> Any:
        """Return a `tensorstore.TensorStore` of an array, of which slices can be read."""
        place = self.spec | {"path": f"{self.spec['path']}{name}/"}
        return ts.open({"driver": "zarr", "kvstore": place}, open=True, read=True).result(2 * self.timeout_s)


@dataclass
class Part:
    """Part of a checkpoint that one process writes: copies in the memory of the host, and texts."""

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


def array_name(path: Any) -> str:
    """Return the name of an array in the state: params/embed/table."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def copy_part(state: State) -> Part:
    """Copy what this process writes of the state: of each shard, the first replica. Process 0 adds what all share."""
    part, leaves = Part(), jax.tree_util.tree_leaves_with_path(state)
    for _, leaf in leaves:
        leaf.copy_to_host_async()
    for path, leaf in leaves:
        shape, name = leaf.sharding.shard_shape(leaf.shape), f"state/{array_name(path)}"
        chunk = split_shape(shape, leaf.dtype.itemsize)
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                # A copy, because the next step takes the memory of the state.
                part.chunks += cut(name, shard.index, np.array(shard.data), chunk)
        if jax.process_index() == 0:
            part.texts[f"{name}/.zarray"] = json.dumps(_describe(leaf, chunk))
    if jax.process_index() == 0:
        arrays = {array_name(path): {"shape": leaf.shape, "dtype": leaf.dtype.name} for path, leaf in leaves}
        part.texts[ARRAYS] = json.dumps(arrays)
    return part


def split_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of a chunk: it divides the shard, and has at most `CHUNK` bytes where that is possible."""
    chunk = list(shape)
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
        yield f"{name}/{'.'.join(numbers) or '0'}", shard[here]


def _describe(leaf: jax.Array, chunk: tuple[int, ...]) -> dict[str, Any]:
    """The object `.zarray` of zarr's version 2."""
    dtype = np.dtype(leaf.dtype)
    return {
        "zarr_format": 2,
        "shape": leaf.shape,
        "chunks": chunk,
        "dtype": dtype.name if dtype.kind == "V" else dtype.str,  # kinds that numpy lacks, like bfloat16
        "order": "C",
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "dimension_separator": ".",
    }


def read_arrays(checkpoint: str, abstract: Any, timeout_s: float = READ_TIMEOUT_S) -> Any:
    """The arrays that `abstract` names, with its dtypes and shardings; each process reads its own slices."""
    objects = Objects(checkpoint, timeout_s)

    def read(path: Any, leaf: Any) -> jax.Array:
        name = array_name(path)
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


def read_item(checkpoint: str, item: str) -> dict[str, Any]:
    """The item `run` or `tokenizer` of a checkpoint."""
    return Objects(checkpoint).read_json(f"{item}/metadata")


def list_parts(checkpoint: str) -> dict[str, Any]:
    """Parts of the state that not every checkpoint has, as `stores.parts_in` returns them."""
    arrays = Objects(checkpoint).read_json(ARRAYS)
    copies = {name.split("/")[1] for name in arrays if name.startswith("copies/")}
    window = arrays["spikes/loss"]["shape"][0] if "spikes/loss" in arrays else 0
    return {"copies": sorted(copies), "spike_window": window}


def check_objects(checkpoint: str, share: int = 0, num_shares: int = 1) -> int:
    """Compare a checkpoint with its digests; return the bytes that were read. Of `num_shares`, each reads a share.

    Raises:
        Damaged: an object is missing, or has other bytes than were written.
    """
    objects = Objects(checkpoint)
    files = dict(_read_digests(objects, FILE)["files"])
    for name in [name for name in files if name.startswith("digests.")]:
        files |= _read_digests(objects, name)["files"]

    def check(name: str) -> int:
        try:
            data = objects.read(name)
        except (FileNotFoundError, ValueError) as error:
            raise Damaged(f"{join(checkpoint, name)} cannot be read: {explain(error)}") from None
        if digest_bytes(data) != files[name]:
            size = files[name]["size"]
            raise Damaged(f"{join(checkpoint, name)} has other bytes than were written ({len(data):,}, then {size:,})")
        return len(data)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return sum(pool.map(check, sorted(files)[share::num_shares]))


def _read_digests(objects: Objects, name: str) -> dict[str, Any]:
    try:
        record = objects.read_json(name)
        return {**record, "files": dict(record["files"])}
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{join(objects.address, name)} cannot be read: {explain(error)}") from None


def fingerprint(checkpoint: str) -> str:
    """Return a short text that changes with the digests."""
    return f"{zlib.crc32(Objects(checkpoint).read(FILE)):08x}"
