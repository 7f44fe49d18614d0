"""Stores: the places where checkpoints are kept.

    shared     a folder that all processes see               each process writes its own shards   shared_store.py
    one_host   a folder that only process 0 sees             process 0 writes the whole state     one_host_store.py
    bucket     an address like s3://BUCKET/NAME              each process writes its own shards   bucket_store.py

Every store writes in the background while the run trains on. A checkpoint is there completely or not at all: the last
operation of a save (a folder is renamed, an object `digests.json` is written) makes it whole. A process that is killed
before that leaves files that count as no checkpoint, and that the next start deletes.

All processes call a store's methods in the same order: `steps`, `save`, `wait` (for this process's part), `finish` (for
all parts), `check`, `about`, `restore`, `put_aside`, `close`. A new store is a class and its row in `STORES`.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tunix.base.buckets import is_address
from tunix.config import Checkpoint
from tunix.run.bucket_store import BucketStore
from tunix.run.one_host_store import OneHostStore
from tunix.run.record import Record
from tunix.run.shared_store import SharedStore
from tunix.training.state import State

log = logging.getLogger(__name__)


class Store(Protocol):
    """Methods of every store; see the top of this file."""

    @property
    def folder(self) -> Path | str: ...  # an address, of a bucket

    def steps(self) -> list[int]: ...
    def save(self, step: int, state: State, record: Record) -> None: ...
    def wait(self) -> None: ...
    def finish(self) -> None: ...
    def check(self, step: int) -> None: ...
    def about(self, step: int) -> dict[str, Any]: ...
    def restore(self, step: int, abstract: State) -> State: ...
    def put_aside(self, steps: list[int], aside: str) -> None: ...
    def close(self) -> None: ...


class StoreKind(NamedTuple):
    """A kind of store."""

    fits: Callable[[str, bool], bool]  # (a folder or an address, whether all processes see the same folder) -> bool
    open: Callable[[str, Checkpoint], Store]


# A run takes the first one that fits.
STORES = {
    "bucket": StoreKind(lambda folder, is_shared: is_address(folder), BucketStore),
    "shared": StoreKind(lambda folder, is_shared: is_shared, lambda folder, cfg: SharedStore(Path(folder), cfg)),
    "one_host": StoreKind(lambda folder, is_shared: True, lambda folder, cfg: OneHostStore(Path(folder), cfg)),
}


def open_store(folder: str, cfg: Checkpoint, is_shared: bool) -> Store:
    """Open the store of a run's checkpoints in a folder or at an address; `is_shared` says if all processes see it."""
    kind = next(kind for kind in STORES.values() if kind.fits(folder, is_shared))
    return kind.open(folder, cfg)


def move_newer(store: Store, steps: list[int]) -> None:
    """Put checkpoints aside that are newer than the one a run goes on from, so that it can write its own."""
    if not steps:
        return
    aside = f"checkpoints_put_aside_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    log.warning("newer checkpoints (%s) are put aside in %s", ", ".join(map(str, sorted(steps))), aside)
    store.put_aside(steps, aside)
