"""Buckets of checkpoints. Arrays are cut into chunks, each an object, in the format of zarr's version 2.

    an array of 6 x 8 numbers in shards of 3 x 4, each cut into chunks of 3 x 2; the names of the objects:

        0.0  0.1  |  0.2  0.3        0.1: rows 0 to 2, columns 2 and 3
        1.0  1.1  |  1.2  1.3        1.0: rows 3 to 5, columns 0 and 1

A chunk never crosses the border of two shards, so no two processes write the same object, and none waits for another.
A reader on another mesh takes slices that lie across chunks; tensorstore finds the objects of a slice.

    STEP/state/params/embed/table/.zarray    shape, dtype and size of a chunk, as the format zarr has them
    STEP/state/params/embed/table/0.3        one chunk: the bytes of a shard, or of a part of one
    STEP/state/arrays.json                   shape and dtype of each array, by name
    STEP/run/metadata, STEP/tokenizer/metadata, STEP/metrics/metrics     as in a folder
    STEP/digests.R.json                      digests of what process R has written
    STEP/digests.json                        written last: a checkpoint without it is not whole

A checkpoint in a folder is whole when the folder gets its name. A bucket cannot rename a folder, so there the last
object makes it whole: whoever finds digests.json knows that everything it names was written before. Orbax 0.12 itself
takes an address of S3 for a path of this machine, and its index of all processes' arrays needs a file system.
"""

import itertools
import json
import logging
import math
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from tunix.base.buckets import explain, explaining, filesystem, join, list_names
from tunix.base.digests import FILE, Damaged, digest_bytes
from tunix.base.errors import UserError
from tunix.base.files import is_whole_number
from tunix.config.saved_runs import list_steps
from tunix.training.state import State

log = logging.getLogger(__name__)

KEY = "checkpoint.folder"
ARRAYS = "state/arrays.json"
VERIFIED = "verified"  # an object with the fingerprint of the digests that were compared last
NUM_THREADS = 8
READ_TIMEOUT_S = 300.0  # for commands that read a checkpoint, which have no key for it
# Bytes of a chunk at most. S3 takes 5 GB in one request; smaller chunks travel side by side, and a reader of a slice
# fetches whole chunks.
CHUNK = 1 << 26


def _open_s3(address: str, retries: dict[str, Any]) -> dict[str, Any]:
    """Return tensorstore's driver for S3, with the endpoint and the region that fsspec has found."""
    files = filesystem(address, KEY)
    files.connect()
    meta, spec = files.s3.meta, {"driver": "s3", "s3_request_retries": retries}
    if "amazonaws.com" not in meta.endpoint_url:  # another server; tensorstore finds Amazon's endpoints itself
        spec |= {"endpoint": meta.endpoint_url, "aws_region": meta.region_name or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def _open_gs(address: str, retries: dict[str, Any]) -> dict[str, Any]:
    """Return tensorstore's driver for Google's buckets, on the server that fsspec talks to."""
    if server := os.environ.get("STORAGE_EMULATOR_HOST"):
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = server if "://" in server else f"http://{server}"
    return {"driver": "gcs", "gcs_request_retries": retries}


DRIVERS: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {"s3": _open_s3, "gs": _open_gs}


class Objects:
    """Objects below an address. A request that fails is tried again for about `timeout_s` seconds.

    Every wait for a result has twice that limit, for a server that takes a request and never answers.
    """

    def __init__(self, address: str, timeout_s: float):
        self.address, self.timeout_s = address.rstrip("/"), timeout_s
        scheme, _, place = self.address.partition("://")
        bucket, _, path = place.partition("/")
        # tensorstore has no time limit, but a number of tries. It waits 1, 2, 4, ... 32, 32 seconds between them.
        delays = itertools.accumulate(min(2.0**number, 32.0) for number in itertools.count())
        tries = next(number for number, waited in enumerate(delays, 1) if waited >= timeout_s)
        driver = DRIVERS[scheme](self.address, {"max_retries": tries, "initial_delay": "1s", "max_delay": "32s"})
        self.spec = driver | {"bucket": bucket, "path": f"{path}/" if path else ""}
        self.store = ts.KvStore.open(self.spec).result()

    def write(self, name: str, data: bytes) -> None:
        self.store.write(name, data).result(2 * self.timeout_s)

    def read(self, name: str) -> bytes:
        """Return an object's bytes.

        Raises:
            FileNotFoundError: there is none.
            UserError: the server refuses or does not answer, which says nothing about the object.
        """
        with explaining(join(self.address, name), KEY):
            answer = self.store.read(name).result(2 * self.timeout_s)
        if answer.state != "value":
            raise FileNotFoundError(f"{self.address}/{name} is missing")
        return answer.value

    def delete(self, name: str) -> None:
        # The range up to the next possible name, so it has this one alone.
        self.store.delete_range(ts.KvStore.KeyRange(name, name + "\0")).result(2 * self.timeout_s)

    def delete_folder(self, name: str) -> None:
        """Delete every object below a folder. The one that makes a checkpoint whole comes first, so that no reader
        takes the rest for a checkpoint."""
        self.delete(f"{name}/{FILE}")
        everything = ts.KvStore.KeyRange(f"{name}/", f"{name}0")  # "0" is the character after "/"
        self.store.delete_range(everything).result(2 * self.timeout_s)


class Bucket:
    """Checkpoints below an address, HOME/checkpoints; the methods are those of a `store.Storage`."""

    is_seen_by_all = True

    def __init__(self, folder: str, timeout_s: float = READ_TIMEOUT_S):
        self.folder, self.root = folder, folder.rpartition("/")[0]
        self.objects = Objects(folder, timeout_s)

    def open(self) -> None:
        finished = set(map(str, self.list_steps()))
        for name in list_names(self.folder, KEY):
            if is_whole_number(name) and name not in finished:
                log.warning("the checkpoint of step %s in %s is not whole: it is deleted", name, self.folder)
                self.objects.delete_folder(name)

    def list_steps(self) -> list[int]:
        return list_steps(self.root, KEY)

    def copy(self, step: int, state: State, texts: dict[str, str]) -> Callable[[], dict[str, Any]]:
        objects = copy_chunks(state)
        if texts:  # on process 0
            arrays = {
                name_array(path): {"shape": leaf.shape, "dtype": leaf.dtype.name}
                for path, leaf in jax.tree_util.tree_leaves_with_path(state)
            }
            for name, text in (texts | {ARRAYS: json.dumps(arrays)}).items():
                objects.write(name, text.encode()).result()
        names = [key.decode() for key in objects.list().result()]

        def send(name: str) -> tuple[str, dict[str, Any]]:
            data = objects.read(name).result().value
            self.objects.write(f"{step}/{name}", data)
            return name, digest_bytes(data)

        def write() -> dict[str, Any]:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                digests = dict(pool.map(send, [name for name in names if texts or not name.endswith(".zarray")]))
            name = f"digests.{jax.process_index()}.json"
            objects.write(name, json.dumps({"files": digests}).encode()).result()
            return dict([send(name)])

        return write

    def commit(self, step: int, written: dict[str, Any], metrics: dict[str, float] | None) -> None:
        record = {"step": step, "time": datetime.now(UTC).isoformat(), "metrics": metrics, "files": written}
        self.objects.write(f"{step}/{FILE}", json.dumps(record).encode())

    def explain(self, error: Exception) -> str | None:
        return explain(error)

    def delete(self, step: int) -> None:
        self.objects.delete_folder(str(step))

    def move(self, step: int, aside: str) -> None:
        """The server copies the objects."""
        source, target = join(self.folder, str(step)), join(self.root, aside, str(step))
        filesystem(self.folder, KEY).copy(source, target, recursive=True)
        self.delete(step)

    def add(self, step: int, name: str, text: str) -> None:
        self.objects.write(f"{step}/{name}", text.encode())

    def read(self, step: int, name: str) -> str:
        return self.objects.read(f"{step}/{name}").decode()

    def read_metrics(self, step: int) -> dict[str, float] | None:
        return json.loads(self.read(step, FILE))["metrics"]

    def add_metrics(self, step: int, metrics: dict[str, float]) -> None:
        record = json.loads(self.read(step, FILE)) | {"metrics": metrics}
        self.objects.write(f"{step}/{FILE}", json.dumps(record).encode())

    def list_arrays(self, step: int) -> dict[str, tuple[int, ...]]:
        arrays = json.loads(self.read(step, ARRAYS))
        return {name: tuple(array["shape"]) for name, array in arrays.items()}

    def read_arrays(self, step: int) -> dict[str, np.ndarray]:
        """Return all arrays of a checkpoint by their names, whole, in the shapes that `list_arrays` gives."""

        def read(item: tuple[str, dict[str, Any]]) -> np.ndarray:
            numbers = self._open_array(step, item[0]).read().result(2 * self.objects.timeout_s)
            return np.asarray(numbers).astype(jnp.dtype(item[1]["dtype"]))

        arrays = json.loads(self.read(step, ARRAYS))
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return dict(zip(arrays, pool.map(read, arrays.items()), strict=True))

    def _open_array(self, step: int, name: str) -> ts.TensorStore:
        chunks = self.objects.store / f"{step}/state/{name}/"
        spec = {"driver": "zarr", "fill_missing_data_reads": False}  # a missing object is an error, not zeros
        return ts.open(spec, kvstore=chunks, open=True, read=True).result(2 * self.objects.timeout_s)

    def restore(self, step: int, abstract: Any) -> Any:
        return restore_arrays(partial(self._open_array, step), abstract, 2 * self.objects.timeout_s)

    def check(self, step: int, share: int = 0, num_shares: int = 1) -> int:
        """Compare a checkpoint with its digests; return the bytes that were read. Of `num_shares`, each reads a share.

        Raises:
            Damaged: an object is missing, or has other bytes than were written.
        """
        # digests.json names the digests of each process, and those name the other objects.
        files = self._read_digests(step, FILE)
        for name in [name for name in files if name.startswith("digests.")]:
            files |= self._read_digests(step, name)

        def check(name: str) -> int:
            address = join(self.folder, str(step), name)
            try:
                data = self.objects.read(f"{step}/{name}")
            except FileNotFoundError as error:
                raise Damaged(f"{address} cannot be read: {explain(error)}") from None
            if digest_bytes(data) != files[name]:
                size = files[name]["size"]
                raise Damaged(f"{address} has other bytes than were written ({len(data):,}, then {size:,})")
            return len(data)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return sum(pool.map(check, sorted(files)[share::num_shares]))

    def is_verified(self, step: int) -> bool:
        try:
            return self.read(step, VERIFIED) == self._fingerprint(step)
        except FileNotFoundError:
            return False

    def record_verified(self, step: int) -> None:
        self.objects.write(f"{step}/{VERIFIED}", self._fingerprint(step).encode())

    def _fingerprint(self, step: int) -> str:
        """Return a short text that changes with the digests."""
        return f"{zlib.crc32(self.read(step, FILE).encode()):08x}"

    def _read_digests(self, step: int, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads(self.read(step, name))["files"])
        except UserError:  # of the server
            raise
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{join(self.folder, str(step), name)} cannot be read: {explain(error)}") from None


def name_array(path: Any) -> str:
    """Return the name of an array in the state: params/embed/table."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def restore_arrays(open_array: Callable[[str], ts.TensorStore], abstract: Any, timeout_s: float | None = None) -> Any:
    """Read the arrays that `abstract` names: each device gets its slice, a leaf without a sharding is a numpy array.

    Args:
        open_array: opens an array by its name.
        timeout_s: for each read.
    """

    def read(path: Any, leaf: Any) -> Any:
        name, slices = name_array(path), {}
        array = open_array(name)
        if tuple(array.shape) != tuple(leaf.shape):
            raise ValueError(f"{name} has shape {tuple(array.shape)}, not {tuple(leaf.shape)}")

        def slice_of(index: Any) -> np.ndarray:
            key = str(index)
            if key not in slices:  # devices with the same slice share it
                slices[key] = np.asarray(array[index].read().result(timeout_s)).astype(leaf.dtype, copy=False)
            return slices[key]

        if getattr(leaf, "sharding", None) is None:
            return slice_of(())
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, slice_of)

    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return jax.tree.unflatten(treedef, list(pool.map(lambda item: read(*item), leaves)))


def copy_chunks(state: State) -> ts.KvStore:
    """Copy what this process writes of the state, the first replica of each shard, as objects in memory.

    Their keys and bytes are those of zarr: state/NAME/.zarray, state/NAME/0.3.
    """
    memory = ts.KvStore.open("memory://", context=ts.Context()).result()
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for _, leaf in leaves:
        leaf.copy_to_host_async()  # all copies are under way before the first is waited for
    for path, leaf in leaves:
        described = {"shape": leaf.shape, "chunks": split_shard(leaf), "compressor": None}
        array = ts.open(
            {"driver": "zarr", "metadata": described, "store_data_equal_to_fill_value": True},
            kvstore=memory / f"state/{name_array(path)}/",
            dtype=leaf.dtype,
            create=True,
        ).result()
        for shard in leaf.addressable_shards:
            # Devices may have copies of the same shard. JAX numbers them over all processes: one process has number 0.
            if shard.replica_id == 0:
                # A copy, because the next step takes the memory of the state.
                array[shard.index].write(np.asarray(shard.data)).result()
    return memory


def split_shard(leaf: jax.Array) -> tuple[int, ...]:
    """Return the shape of a chunk of an array of any shape [...]: it has as many dimensions, divides the shard of each
    device, and has at most `CHUNK` bytes where that is possible."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    chunk = list(shape)
    # Dimension by dimension from the first, into as few equal parts as bring the chunk below the limit. A float32 shard
    # of 262,144 x 1,152 has 1,152 MiB: its first dimension is cut into 32 parts, its first divisor from 18 on.
    for dim, size in enumerate(shape):
        others = math.prod(chunk) // max(size, 1) * leaf.dtype.itemsize
        parts = next((n for n in range(1, size + 1) if size % n == 0 and others * (size // n) <= CHUNK), max(size, 1))
        chunk[dim] = size // parts
    return tuple(chunk)
