"""Stores: the places where checkpoints are kept, and how each is written.

Orbax writes them in the background. A checkpoint is there completely or not at all.

All processes call a store's methods in the same order: `steps`, `save`, `wait` (for this process's part), `finish` (for
all parts), `check`, `about`, `restore`, `put_aside`, `close`. A new store is a class here and its row in `STORES`.

A checkpoint is a folder STEP with the items `state` (arrays), `run` (position and config) and `tokenizer`.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from tunix.base.buckets import is_address
from tunix.base.digests import FILE, is_verified, note_verified
from tunix.base.errors import UserError
from tunix.config import Checkpoint
from tunix.processes import peers
from tunix.run.bucket_store import BucketStore
from tunix.run.objects import find_address, list_parts, read_arrays, read_item
from tunix.run.record import Record
from tunix.run.retention import held_out_loss, make_rules
from tunix.run.sealed import SealingManager, check_checkpoint, check_together
from tunix.sharding.arrays import from_main, to_main
from tunix.training.state import State

T = TypeVar("T")
log = logging.getLogger(__name__)
ALL_PROCESSES = ocp.options.MultiprocessingOptions()
ONLY_PROCESS_0 = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="process_0")


def read_state(checkpoint: Path, abstract: Any, processes: Any = ALL_PROCESSES) -> Any:
    """The arrays of a checkpoint that `abstract` names, with its dtypes and shardings; others are left out."""
    if address := find_address(checkpoint):
        return read_arrays(address, abstract)
    arguments = ocp.args.PyTreeRestore(
        abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=processes)
    with ocp.Checkpointer(handler, multiprocessing_options=processes) as reader:
        return reader.restore(checkpoint / "state", args=arguments)


def read_json(checkpoint: Path, item: str, processes: Any = ALL_PROCESSES) -> dict[str, Any]:
    """The item `run` or `tokenizer` of a checkpoint."""
    if address := find_address(checkpoint):
        return read_item(address, item)
    handler = ocp.JsonCheckpointHandler(multiprocessing_options=processes)
    with ocp.Checkpointer(handler, multiprocessing_options=processes) as reader:
        return reader.restore(checkpoint / item, args=ocp.args.JsonRestore())


def parts_in(checkpoint: Path) -> dict[str, Any]:
    """Parts of the state that not every checkpoint has.

    Returns:
        `copies`: names of the copies of the parameters (`training.copies`); `spike_window`: steps in the window of
        spikes (`training.spikes`), 0 without one.
    """
    if address := find_address(checkpoint):
        return list_parts(address)
    state = ocp.PyTreeCheckpointHandler().metadata(checkpoint / "state").tree
    window = state["spikes"]["loss"].shape[0] if "spikes" in state else 0
    return {"copies": sorted(state.get("copies", {})), "spike_window": window}


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


class SharedStore:
    """A folder that all processes see: each process writes its own shards."""

    def __init__(self, folder: Path, cfg: Checkpoint, processes: Any = ALL_PROCESSES, **options: Any):
        self.folder, self.processes, self.verify = folder.absolute(), processes, cfg.verify
        self.manager = SealingManager(
            self.folder,
            ocp.CheckpointManagerOptions(
                preservation_policy=make_rules(cfg),
                best_fn=held_out_loss,
                best_mode="min",
                enable_async_checkpointing=cfg.async_,
                cleanup_tmp_directories=True,
                multiprocessing_options=processes,
                **options,
            ),
        )

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, in order."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: State, record: Record) -> None:
        """Start saving; returns when the arrays are copied. A failure of the save before is raised here."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            run=ocp.args.JsonSave(record.about),
            tokenizer=ocp.args.JsonSave(record.tokenizer),
        )
        try:
            self.manager.save(step, args=items, metrics=record.metrics, force=True)
        except Exception as error:
            raise self._write_error(error) from error

    def wait(self) -> None:
        """Wait until what this process has begun to save is on disk."""
        try:
            self.manager.wait_until_finished()
            self.manager.check_for_errors()
        except Exception as error:
            raise self._write_error(error) from error

    def finish(self) -> None:
        """Wait until what all processes have begun to save is on disk."""
        self.wait()

    def check(self, step: int) -> None:
        """Compare a checkpoint with its digests, as `checkpoint.verify` says; each process reads a share of the files.

        Raises:
            Damaged: on every process, if a file is not what was written.
        """
        checkpoint = self.folder / str(step)
        mark = checkpoint / "state" / FILE
        if self.verify == "never" or (self.verify == "once" and is_verified(checkpoint, mark)):
            return
        alone = self.processes.active_processes is not None
        size = check_checkpoint(checkpoint) if alone else check_together(partial(check_checkpoint, checkpoint))
        if size is None:
            log.warning("the checkpoint of step %d has no digests (an older version wrote it): it is not checked", step)
        elif self.verify == "once" and peers.is_main():
            note_verified(checkpoint, mark)

    def about(self, step: int) -> dict[str, Any]:
        """The item `run`, and the `parts` of the state that not every checkpoint has."""
        checkpoint = self.folder / str(step)
        return read_json(checkpoint, "run", self.processes) | {"parts": parts_in(checkpoint)}

    def restore(self, step: int, abstract: State) -> State:
        """The arrays of the checkpoint that `abstract` names."""
        return read_state(self.folder / str(step), abstract, self.processes)

    def put_aside(self, steps: list[int], aside: str) -> None:
        """Move checkpoints into the new folder `aside` beside this one."""
        peers.barrier("before checkpoints are put aside")
        if peers.is_main():
            self.move(steps, self.folder.with_name(aside))
        peers.barrier("checkpoints are put aside")
        self.manager.reload()

    def move(self, steps: list[int], aside: Path) -> None:
        """Move checkpoints, on one process alone."""
        aside.mkdir()
        for step in steps:
            (self.folder / str(step)).rename(aside / str(step))

    def close(self) -> None:
        self.manager.close()

    def _write_error(self, error: Exception) -> Exception:
        """`UserError` for a disk that is full or cannot be written; any other error is a bug, and is returned."""
        text = str(error)
        words = ("No space left", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED")
        if not isinstance(error, OSError) and not any(word in text for word in words):
            return error
        whole = ", ".join(map(str, self.steps())) or "none"
        free = shutil.disk_usage(self.folder).free / 2**30
        return UserError(
            f"a checkpoint could not be written to {self.folder} ({free:.2f} GiB free): {text.splitlines()[0][:200]}; "
            f"whole checkpoints: {whole}. Make room and go on with resume={self.folder.parent}"
        )


class OneHostStore:
    """A folder that only process 0 sees: it gathers the whole state in its memory, and writes all of it."""

    def __init__(self, folder: Path, cfg: Checkpoint):
        self.folder = folder.absolute()
        self.disk: SharedStore | None = None
        if peers.is_main():
            folder.mkdir(exist_ok=True)
            self.disk = SharedStore(folder, cfg, ONLY_PROCESS_0, create=False)

    def steps(self) -> list[int]:
        return self._read(lambda disk: disk.steps())

    def save(self, step: int, state: State, record: Record) -> None:
        gathered = to_main(state)
        if self.disk and gathered is not None:
            self.disk.save(step, gathered, record)

    def wait(self) -> None:
        if self.disk:
            self.disk.wait()

    def finish(self) -> None:
        peers.together(self.wait, "process 0 keeps the checkpoint", peers.NO_LIMIT_S)

    def check(self, step: int) -> None:
        self._on_main(lambda disk: disk.check(step))

    def about(self, step: int) -> dict[str, Any]:
        return self._read(lambda disk: disk.about(step))

    def restore(self, step: int, abstract: State) -> State:
        on_host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), abstract)
        return from_main(self._on_main(lambda disk: disk.restore(step, on_host)), abstract)

    def put_aside(self, steps: list[int], aside: str) -> None:
        if self.disk:
            self.disk.move(steps, self.folder.with_name(aside))
            self.disk.manager.reload()

    def close(self) -> None:
        if self.disk:
            self.disk.close()

    def _on_main(self, work: Callable[[SharedStore], T]) -> T | None:
        """Result of `work(disk)` on process 0, None on the others; its failure is raised on all."""
        result, failure = None, ""
        try:
            result = work(self.disk) if self.disk else None
        except Exception as error:
            failure = str(error) or repr(error)
        if failure := peers.agree(failure, "process 0 reads the checkpoint", peers.NO_LIMIT_S):
            raise RuntimeError(failure)
        return result

    def _read(self, work: Callable[[SharedStore], Any]) -> Any:
        """Result of `work(disk)`, a value for JSON, on every process."""
        return json.loads(peers.agree(json.dumps(self._on_main(work)), "what process 0 has read"))


def _shared(folder: str, cfg: Checkpoint) -> Store:
    return SharedStore(Path(folder), cfg)


def _one_host(folder: str, cfg: Checkpoint) -> Store:
    return OneHostStore(Path(folder), cfg)


def _bucket(folder: str, cfg: Checkpoint) -> Store:
    return BucketStore(folder, cfg)


class StoreKind(NamedTuple):
    """A kind of store."""

    fits: Callable[[str, bool], bool]  # (a folder or an address, whether all processes see the same folder) -> bool
    open: Callable[[str, Checkpoint], Store]


# A run takes the first one that fits.
STORES = {
    "bucket": StoreKind(lambda folder, is_shared: is_address(folder), _bucket),
    "shared": StoreKind(lambda folder, is_shared: is_shared, _shared),
    "one_host": StoreKind(lambda folder, is_shared: True, _one_host),
}


def open_store(folder: str, cfg: Checkpoint, is_shared: bool) -> Store:
    """The store for a run's checkpoints, in a folder or at an address; `is_shared` tells if all processes see it."""
    kind = next(kind for kind in STORES.values() if kind.fits(folder, is_shared))
    return kind.open(folder, cfg)


def move_newer(store: Store, steps: list[int]) -> None:
    """Put checkpoints aside that are newer than the one a run goes on from, so that it can write its own."""
    if not steps:
        return
    aside = f"checkpoints_put_aside_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    log.warning("newer checkpoints (%s) are put aside in %s", ", ".join(map(str, sorted(steps))), aside)
    store.put_aside(steps, aside)
