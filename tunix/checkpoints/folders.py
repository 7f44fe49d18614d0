"""Folders of checkpoints. Orbax writes the arrays; tensorstore reads them.

    STEP.orbax-checkpoint-tmp/                 while it is written; it is renamed to STEP when every process has written
    STEP/state/ocdbt.process_R/...             arrays, written by process R, with STEP/state/digests.R.json
    STEP/state/...                             Orbax's index of all arrays, with STEP/state/digests.json
    STEP/run, STEP/tokenizer, STEP/metrics     one JSON file each, with digests.json

    each process    write own arrays | read them again, write digests.R.json |
    process 0                                                                | index | digests.json | rename to STEP

Each process reads its files again in the background, while they are in the page cache, before the checkpoint's folder
gets its name. So a checkpoint has all of its digests or none, and no step waits for them. A `digests.json` names the
step, so that an item of another step is found too.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath  # Orbax's kind of path

from tunix.base import digests
from tunix.base.digests import FILE, Damaged, check_files, list_files, read_digests, write_digests
from tunix.base.errors import UserError, first_line
from tunix.base.files import check_size, describe_refusal, is_whole_number, list_numbers, parse_json, write_whole
from tunix.checkpoints.bucket import name_array, restore_arrays
from tunix.processes import peers
from tunix.sharding.arrays import from_main, to_main
from tunix.training.state import State

UNFINISHED = ".orbax-checkpoint-tmp"  # end of the name of a folder that is written or deleted
ITEMS = ("state", "run", "tokenizer", "metrics")
# Files that every checkpoint has.
NEEDED = ("state/_METADATA", "state/manifest.ocdbt", "run/metadata", "tokenizer/metadata")
# Words of Orbax and tensorstore for a disk that takes no more, in errors that are no OSError.
LIMITS = {
    "File too large": "a limit of files' sizes: ulimit -f, a quota",
    "Too many open files": "a limit of open files: ulimit -n",
}
DISK_REFUSES = (
    "No space left", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "Input/output error", "Stale file handle", *LIMITS
)  # fmt: skip
T = TypeVar("T")


class Folder:
    """Checkpoints in a folder that all processes see; the methods are those of a `store.Storage`."""

    is_seen_by_all = True

    def __init__(self, folder: Path):
        self.folder = folder

    def open(self) -> None:
        if "\\" in str(self.folder):
            raise UserError(f"checkpoints cannot be written to {self.folder}: tensorstore takes a \\ for a /")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"checkpoints cannot be written to {self.folder}: {describe_refusal(error)}") from None
        for path in self.folder.glob(f"*{UNFINISHED}"):
            if is_whole_number(path.name.removesuffix(UNFINISHED)):
                shutil.rmtree(path)

    def list_steps(self) -> list[int]:
        return list_numbers(self.folder)

    def copy(self, step: int, state: State, texts: dict[str, str]) -> Callable[[], dict[str, Any]]:
        unfinished = self._unfinished(step)
        # Without parents: where a user has moved or deleted the run's folder, it is not made anew. (The libraries that
        # write arrays make what is missing: see `commit`.)
        for folder in (unfinished, unfinished / "state", *{(unfinished / name).parent for name in texts}):
            folder.mkdir(exist_ok=True)
        # Not compressed: zstd takes 8 % off float32 weights, for four fifths of a save's time outside the kernel.
        saving = ocp.PyTreeCheckpointHandler(use_compression=False).async_save(
            epath.Path(unfinished / "state"), args=ocp.args.PyTreeSave(state)
        )
        # A thread of its own has an event loop of its own: in a notebook, this one has a loop that runs. The thread
        # ends before its loop is closed, also after Ctrl-C.
        with closing(asyncio.new_event_loop()) as loop, ThreadPoolExecutor(1) as pool:
            futures = pool.submit(loop.run_until_complete, saving).result()

        def write() -> dict[str, Any]:
            for future in futures or []:
                future.result()
            rank, state_folder = jax.process_index(), unfinished / "state"
            # What Orbax writes for one process, and no look at what the others do here: they rename and delete folders.
            # `commit` digests the files that are left.
            arrays = list_files(state_folder / f"ocdbt.process_{rank}")
            shapes = state_folder.glob(f"array_metadatas/process_{rank}")
            write_digests(state_folder, [*arrays, *shapes], f"digests.{rank}.json")
            for name, text in texts.items():
                file = unfinished / name
                file.write_text(text)
                write_digests(file.parent, [file], step=step)
            return {}

        return write

    def commit(self, step: int, written: dict[str, Any], metrics: dict[str, float] | None) -> None:
        unfinished = self._unfinished(step)
        state = unfinished / "state"
        # No epath.Path: it takes a [ or * in the names of folders for a pattern, finds no arrays, and merges nothing.
        ocp.PyTreeCheckpointHandler().finalize(state)  # type: ignore[arg-type]
        parts = sorted(state.glob("digests.*.json"))
        # The files that are in no part: Orbax's index of the arrays of all processes.
        sealed = {state / name for part in parts for name in read_digests(part)["files"]}
        write_digests(state, [path for path in list_files(state) if path not in sealed], step=step)
        for name in NEEDED:
            (unfinished / name).stat()  # missing where the folder was deleted, and `finalize` has made it again
        unfinished.rename(self.folder / str(step))

    def explain(self, error: Exception) -> str | None:
        text = str(error) or repr(error)
        if not isinstance(error, OSError) and not any(words in text for words in DISK_REFUSES):
            return None
        if isinstance(error, FileNotFoundError) or not self.folder.exists():
            return f"{self.folder} was deleted or moved while the run wrote to it"
        free = f"{shutil.disk_usage(self.folder).free / 2**30:.2f} GiB free"
        limit = next((f"; {hint}" for words, hint in LIMITS.items() if words in text), "")
        said = first_line(error)
        if len(said) > 250:  # the reason stands at the end, behind paths
            said = f"{said[:100]} ... {said[-140:]}"
        return f"{said} ({free}{limit})"

    def delete(self, step: int) -> None:
        # Renamed first: whoever is killed in between leaves no half of a checkpoint under its name.
        shutil.rmtree((self.folder / str(step)).rename(self._unfinished(step)))

    def move(self, step: int, aside: str) -> None:
        folder = self.folder.with_name(aside)
        folder.mkdir(exist_ok=True)
        (self.folder / str(step)).rename(folder / str(step))

    def add(self, step: int, name: str, text: str) -> None:
        write_whole(self.folder / str(step) / name, text)

    def read(self, step: int, name: str) -> str:
        path = self.folder / str(step) / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, or a pipe or a device")
        return path.read_text()

    def read_metrics(self, step: int) -> dict[str, float] | None:
        item = self.folder / str(step) / "metrics"
        if not item.is_dir():
            return None
        if (item / FILE).is_file():
            check_files([item / FILE])
        return parse_json(check_size(item / "metrics").read_text())

    def add_metrics(self, step: int, metrics: dict[str, float]) -> None:
        unfinished = self.folder / str(step) / f"metrics{UNFINISHED}"
        unfinished.mkdir(exist_ok=True)
        file = unfinished / "metrics"
        file.write_text(json.dumps(metrics))
        write_digests(unfinished, [file], step=step)
        unfinished.rename(unfinished.with_name("metrics"))

    def list_arrays(self, step: int) -> dict[str, tuple[int, ...]]:
        tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(self.folder / str(step) / "state")).tree
        return {name_array(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    def read_arrays(self, step: int) -> dict[str, np.ndarray]:
        """Return all arrays of a checkpoint by their names, whole, in the shapes that `list_arrays` gives."""
        state = _open_state(self.folder / str(step) / "state")
        return {name: _read_array(state, name) for name in self.list_arrays(step)}

    def restore(self, step: int, abstract: Any) -> Any:
        return restore_arrays(partial(_open_array, _open_state(self.folder / str(step) / "state")), abstract)

    def check(self, step: int, share: int = 0, num_shares: int = 1) -> int | None:
        """Compare a checkpoint with its digests; return the bytes that were read, None if it has no digests.

        The arrays of a checkpoint without digests are read.

        Raises:
            Damaged: a file is missing, is not what was written, or belongs to another step.
            UserError: the checkpoint is one of a bucket.
        """
        checkpoint = self.folder / str(step)
        if not checkpoint.is_dir():
            raise Damaged(f"{checkpoint} is no folder{', but a link to nothing' if checkpoint.is_symlink() else ''}")
        if (checkpoint / FILE).is_file():
            raise UserError(
                f"{checkpoint} was copied from a bucket, and has another form on a disk; give the run's address in the "
                "bucket, s3://BUCKET/RUN"
            )
        if missing := [name for name in NEEDED if not (checkpoint / name).is_file()]:
            raise Damaged(f"{checkpoint} lacks {', '.join(missing)}")
        # Whoever opens a pipe waits for ever, and a device may have no end.
        if odd := [path for path in checkpoint.rglob("*") if path.exists() and not path.is_file() | path.is_dir()]:
            raise Damaged(f"{odd[0]} is a pipe or a device, and no file")
        if not any(checkpoint.glob("*/digests*.json")):
            _read_arrays(checkpoint / "state", share, num_shares)
            return None
        items = [checkpoint / item for item in ITEMS if (checkpoint / item).is_dir()]
        for item in items:
            found = read_digests(item / FILE).get("step")
            if found != step:
                raise Damaged(f"{item} belongs to step {found}")
        return check_files([item / FILE for item in items], share, num_shares)

    def is_verified(self, step: int) -> bool:
        return digests.is_verified(self.folder / str(step), self.folder / str(step) / "state" / FILE)

    def record_verified(self, step: int) -> None:
        digests.record_verified(self.folder / str(step), self.folder / str(step) / "state" / FILE)

    def _unfinished(self, step: int) -> Path:
        return self.folder / f"{step}{UNFINISHED}"


def read_together(work: Callable[[], T]) -> T:
    """Return `work()`, which reads a checkpoint; an error on one process is raised on all: a process that stopped alone
    would leave the others waiting.

    Raises:
        Damaged: what is no `UserError`.
    """

    def attempt() -> tuple[T | None, Exception | None]:
        try:
            return work(), None
        except UserError:
            raise
        except Exception as error:  # Orbax and tensorstore have no kinds of their own
            return None, error

    result, error = peers.together(attempt, "a checkpoint is read")
    damage = first_line(error) if error else ""
    if damage := next(filter(None, peers.gather(damage, "a checkpoint is read")), ""):
        raise Damaged(damage) from error
    return cast(T, result)


class OneHostFolder(Folder):
    """Checkpoints in a folder that only process 0 sees: the hosts have no disk in common.

        save       every process sends its shards to process 0, which writes the whole state
        restore    process 0 reads the whole state, and sends every process its shards

    So process 0 needs memory for the whole state. A bucket (`checkpoint.folder`) needs no such memory.
    """

    is_seen_by_all = False

    def copy(self, step: int, state: State, texts: dict[str, str]) -> Callable[[], dict[str, Any]]:
        gathered = to_main(state)
        return dict if gathered is None else super().copy(step, gathered, texts)

    def restore(self, step: int, abstract: Any) -> Any:
        on_host = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), abstract)
        read = super().restore
        # If process 0 alone raised an error, the others would wait for its shards for ever.
        return from_main(read_together(lambda: read(step, on_host) if peers.is_main() else None), abstract)


def _read_arrays(folder: Path, share: int, num_shares: int) -> None:
    """Read the arrays of an item `state` without digests; raises `Damaged` where a file is missing or cut off."""
    try:
        state = _open_state(folder)
        names = [name.decode() for name in state.list().result()]
        arrays = sorted(name.removesuffix("/.zarray") for name in names if name.endswith("/.zarray"))
        for name in arrays[share::num_shares]:
            _read_array(state, name)
    except ValueError as error:
        raise Damaged(f"{folder} cannot be read: {first_line(error)[:300]}") from None


def _open_state(folder: Path) -> ts.KvStore:
    """Open Orbax's store of arrays. Its files are mapped: read into buffers, twice as many pages would be made."""
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "cache_pool": "cache_pool#index"}
    context = ts.Context({"file_io_mode": {"mode": "memmap"}, "cache_pool#index": {"total_bytes_limit": 10**8}})
    return ts.KvStore.open(spec, context=context).result()


def _open_array(state: ts.KvStore, name: str) -> ts.TensorStore:
    """Open an array: params/embed/table, which Orbax calls params.embed.table. Missing data are an error, not zeros."""
    spec = {"driver": "zarr", "fill_missing_data_reads": False}
    array = ts.open(spec, kvstore=state / f"{name.replace('/', '.')}/", open=True, read=True).result()
    chunk = tuple(array.spec().to_json()["metadata"]["chunks"])
    if any(size > max(1, whole) for size, whole in zip(chunk, array.shape, strict=True)):
        raise ValueError(f"{name} of shape {array.shape} is in chunks of {chunk}")  # memory for a chunk is made first
    return array


def _read_array(state: ts.KvStore, name: str) -> np.ndarray:
    """Return a whole array; raises `ValueError` for more than there is memory: tensorstore would abort the process."""
    array = _open_array(state, name)
    if (size := array.size * array.dtype.numpy_dtype.itemsize) > os.sysconf("SC_PHYS_PAGES") * PAGESIZE:
        raise ValueError(f"{name} has {size:,} bytes, more than the memory of this machine")
    return np.asarray(array.read().result())
