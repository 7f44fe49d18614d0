"""Digests of a checkpoint in a folder: Orbax's handlers of items, which also write and check `digests.json`.

    STEP/state/ocdbt.process_R/...   arrays, written by process R, with STEP/state/digests.R.json
    STEP/state/...                   what process 0 adds at the end, with STEP/state/digests.json
    STEP/run, STEP/tokenizer, STEP/metrics      one file each, with digests.json

    each process    write own arrays | read them again, write digests.R.json |
    process 0                                                                | merge | digests.json | rename to STEP

Each process reads its files again in the background, while they are in the page cache, before the checkpoint's folder
gets its name. So a checkpoint has all of its digests or none, and no step waits for them. A `digests.json` names the
step, so that an item of another step is found too.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import orbax.checkpoint as ocp

from tunix.base.digests import FILE, Damaged, check_files, list_files, read_digests, write_digests
from tunix.processes import peers
from tunix.run.objects import check_objects, find_address

T = TypeVar("T")
log = logging.getLogger(__name__)
ITEMS = ("state", "run", "tokenizer", "metrics")
UNSEALED = "commit_success.txt"  # Orbax writes it after the digests; nobody reads it


def check_together(check: Callable[[int, int], T]) -> T:
    """Return `check(process, number of processes)`, in which each process compares its share of the files.

    Raises:
        Damaged: on every process, if a file of one share is not what was written.
    """
    result, damage = None, ""
    # Damage is gathered first and raised then: a process that stopped here alone would leave the others waiting in the
    # restore.
    try:
        result = check(jax.process_index(), jax.process_count())
    except Damaged as error:
        damage = str(error)
    if damage := next(filter(None, peers.gather(damage, "checkpoints are compared with their digests")), ""):
        raise Damaged(damage)
    return cast(T, result)


class Afterwards:
    """A future for Orbax that is no future: it does its work when Orbax asks for its result.

    Orbax asks its futures one after the other, in its background thread. So the work comes after the futures that stand
    before this one, and no step waits for it.
    """

    def __init__(self, work: Callable[[], None]):
        self.work = work

    def result(self, timeout: float | None = None) -> None:
        self.work()


class SealedState(ocp.StandardCheckpointHandler):
    """The item `state`: each process digests its own arrays, process 0 the rest."""

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        futures = await super().async_save(directory, *args, **kwargs)
        # The last of the futures: the arrays are on the disk when its turn comes.
        return [*(futures or []), Afterwards(lambda: self._seal_own(_path(directory)))]

    def _seal_own(self, folder: Path) -> None:
        process = jax.process_index()
        # Orbax's names for the files that one process writes. `finalize`, on process 0, digests the files that are
        # left.
        names = {f"ocdbt.process_{process}", f"process_{process}"}
        own = [path for path in list_files(folder) if names & set(path.relative_to(folder).parts)]
        write_digests(folder, own, f"digests.{process}.json")

    def finalize(self, directory: Any) -> None:
        """Digest the rest on process 0, when all processes have written and before the folder gets its name."""
        super().finalize(directory)
        folder = Path(directory)
        parts = sorted(folder.glob("digests.*.json"))
        # The files that are in no part: Orbax's index of the arrays of all processes.
        sealed = {folder / name for part in parts for name in read_digests(part)["files"]}
        seal(folder, [path for path in list_files(folder) if path not in sealed])


class SealedJson(ocp.JsonCheckpointHandler):
    """An item of one JSON file."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        seal(Path(directory), list_files(Path(directory)))


class SealedMetrics(SealedJson):
    """The item `metrics`, from which Orbax knows the best checkpoint as soon as it opens the folder."""

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        file = Path(directory) / FILE
        try:
            if file.is_file():
                check_files([file])
            return super().restore(directory, *args, **kwargs)
        except (Damaged, ValueError) as error:
            # The manager reads the metrics of all checkpoints when it opens. An error would make all of them useless.
            log.error("%s: this checkpoint does not count as the best", error)
            return {"held_out_loss": math.inf}


class SealingManager(ocp.CheckpointManager):
    """Orbax's manager of the checkpoints in a folder, whose items have digests."""

    def __init__(self, folder: Path, options: ocp.CheckpointManagerOptions):
        super().__init__(folder, options=options, handler_registry=sealing_handlers(options.multiprocessing_options))

    @property
    def _metrics_handler(self) -> SealedMetrics:
        """Handler with which the manager reads the metrics of older checkpoints; Orbax has no public way to set it."""
        return SealedMetrics("metrics", multiprocessing_options=self._multiprocessing_options)


def sealing_handlers(processes: ocp.options.MultiprocessingOptions) -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Return the handlers that write the items of a run; the manager adds the one for `metrics`."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.StandardSave, SealedState(multiprocessing_options=processes))
    for item in ("run", "tokenizer"):
        registry.add(item, ocp.args.JsonSave, SealedJson(multiprocessing_options=processes))
    return registry


def seal(folder: Path, files: list[Path]) -> None:
    """Write the digests of an item's folder, STEP/ITEM while it is written."""
    step = int(folder.parent.name.split(".")[0])  # of STEP.orbax-checkpoint-tmp
    write_digests(folder, [path for path in files if path.name not in (FILE, UNSEALED)], step=step)


def check_checkpoint(checkpoint: Path, share: int = 0, num_shares: int = 1) -> int | None:
    """Compare a checkpoint with its digests; return the bytes that were read, None if it has no digests.

    Raises:
        Damaged: a file is not what was written, or belongs to another step.
    """
    if address := find_address(checkpoint):
        return check_objects(address, share, num_shares)
    items = [checkpoint / item for item in ITEMS if (checkpoint / item).is_dir()]
    if not any((item / FILE).is_file() for item in items):
        return None
    missing = [item for item in ITEMS[:3] if not (checkpoint / item).is_dir()]
    if missing:
        raise Damaged(f"{checkpoint / missing[0]} is missing")
    for item in items:
        step = read_digests(item / FILE).get("step")
        if str(step) != checkpoint.name:
            raise Damaged(f"{item} belongs to step {step}")
    return check_files([item / FILE for item in items], share, num_shares)


def _path(directory: Any) -> Path:
    """Return the path that Orbax gives a handler; it may be one that is still being made."""
    return Path(directory.path if hasattr(directory, "await_creation") else directory)
