"""Objects of a checkpoint in a bucket, which tensorstore writes and reads; `object_arrays.py` has those of arrays.

    STEP/state/params/embed/table/.zarray    shape, dtype and size of a chunk, as the format zarr has them
    STEP/state/params/embed/table/0.3        one chunk: the bytes of a shard, or of a part of one
    STEP/state/arrays.json                   shape and dtype of each array, by name
    STEP/run/metadata, STEP/tokenizer/metadata, STEP/metrics/metrics     as in a folder
    STEP/digests.R.json                      digests of what process R has written
    STEP/digests.json                        written last: a checkpoint without it is not whole

A checkpoint in a folder is whole when Orbax renames that folder. A bucket cannot rename a folder; there the last object
has that part: whoever finds digests.json knows that everything it names was written before. Orbax 0.12 itself takes an
address of S3 for a path of this machine, and its index of all processes' arrays needs a file system.
"""

import itertools
import json
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tensorstore as ts

from tunix.base.buckets import explain, filesystem, join
from tunix.base.digests import FILE, Damaged, digest_bytes

ADDRESS = "address"  # a file in a checkpoint's folder that is a stand-in for one in a bucket
KEY = "checkpoint.folder"
NUM_THREADS = 8
READ_TIMEOUT_S = 300.0  # for commands that read a checkpoint, which have no key for it


def find_address(checkpoint: Path) -> str | None:
    """Return the address that a checkpoint's folder stands for; None if the checkpoint is in the folder itself."""
    file = checkpoint / ADDRESS
    return file.read_text().strip() if file.is_file() else None


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

    def __init__(self, address: str, timeout_s: float = READ_TIMEOUT_S):
        self.address, self.timeout_s = address.rstrip("/"), timeout_s
        scheme, _, place = self.address.partition("://")
        bucket, _, path = place.partition("/")
        # tensorstore has no time limit, but a number of tries. It waits 1, 2, 4, ... 32, 32 seconds between them.
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
        # The range up to the next possible name, so it has this one alone.
        self.store.delete_range(ts.KvStore.KeyRange(name, name + "\0")).result(2 * self.timeout_s)

    def delete_folder(self, name: str) -> None:
        """Delete every object below a folder. The one that makes a checkpoint whole comes first, so that no reader
        takes the rest for a checkpoint."""
        self.delete(f"{name}/{FILE}")
        everything = ts.KvStore.KeyRange(f"{name}/", f"{name}0")  # "0" is the character after "/"
        self.store.delete_range(everything).result(2 * self.timeout_s)

    def array(self, name: str) -> Any:
        """Return a `tensorstore.TensorStore` of an array, of which slices can be read."""
        place = self.spec | {"path": f"{self.spec['path']}{name}/"}
        return ts.open({"driver": "zarr", "kvstore": place}, open=True, read=True).result(2 * self.timeout_s)


def read_item(checkpoint: str, item: str) -> dict[str, Any]:
    """Read the item `run` or `tokenizer` of a checkpoint."""
    return Objects(checkpoint).read_json(f"{item}/metadata")


def check_objects(checkpoint: str, share: int = 0, num_shares: int = 1) -> int:
    """Compare a checkpoint with its digests; return the bytes that were read. Of `num_shares`, each reads a share.

    Raises:
        Damaged: an object is missing, or has other bytes than were written.
    """
    objects = Objects(checkpoint)
    # digests.json names the digests of each process, and those name the other objects.
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
