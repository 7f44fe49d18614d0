"""One life of a checkpoint: it is written behind the training, made whole, checked, read, and kept or deleted.

    main thread        save: wait for the save before | copy own shards to the host | go on training
    a thread behind    write the copies, digests | process 0: wait for all, make it whole, delete what is not kept

A storage does the reading and writing (`STORAGE`):

    shared     a folder that all processes see               each process writes its own shards   folders.py
    one_host   a folder that only process 0 sees             process 0 writes the whole state     folders.py
    bucket     an address like s3://BUCKET/NAME              each process writes its own shards   bucket.py

A checkpoint is there completely or not at all: the last operation of a save (a folder is renamed, an object is written)
makes it whole. A process that dies before that leaves files that count as no checkpoint, and that the next start
deletes.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import jax
import numpy as np

from tunix.base.buckets import is_address
from tunix.base.digests import Damaged
from tunix.base.errors import UserError, first_line, name_first
from tunix.base.files import list_numbers, parse_json
from tunix.base.forms import reject_newer_form
from tunix.checkpoints.bucket import Bucket, name_array
from tunix.checkpoints.folders import Folder, OneHostFolder, read_together
from tunix.config import Checkpoint
from tunix.config.compose import format_resume
from tunix.processes import peers, watchdog
from tunix.training.state import State

log = logging.getLogger(__name__)
T = TypeVar("T")
WAITING = "waiting"  # a text of a checkpoint: answers that were drawn ahead after it had been written
POLL_S = 0.2  # seconds between two looks whether the other processes have written
# Gives each save of this process, in whatever store, the name under which the processes publish that it is done: the
# same on all of them, which save in the same order, and never that of a save before, whose answers are still there.
_saves = count()


class FailedElsewhere(Exception):
    """Another process could not write its part of a checkpoint; the message names it, and has its reason."""


class Record(NamedTuple):
    """What a checkpoint holds beside the arrays of the state, each an item of it: values for JSON."""

    info: dict[str, Any]  # position in the data, improvement of the held-out loss, config
    tokenizer: str  # JSON already
    metrics: dict[str, float] | None  # by which the best checkpoint is chosen; None where nothing was measured


class Storage(Protocol):
    """Where checkpoints are kept, each by its step. Process 0 alone calls the methods marked with 0."""

    is_seen_by_all: bool  # else process 0 alone reads it

    @property
    def folder(self) -> Path | str: ...  # of the checkpoints; an address, of a bucket

    def open(self) -> None: ...  # 0: make the folder, and delete what is not whole
    def list_steps(self) -> list[int]: ...  # 0: those of whole checkpoints, in order
    def copy(self, step: int, state: State, texts: dict[str, str]) -> Callable[[], dict[str, Any]]:
        """Copy what this process writes; return the function that writes it, which the thread behind calls.

        `texts` are files by name, {} but on process 0. The function returns what `commit` needs to know.
        """
        ...

    def commit(self, step: int, written: dict[str, Any], metrics: dict[str, float] | None) -> None: ...  # 0
    def explain(self, error: Exception) -> str | None: ...  # why a save failed; None for a bug
    def delete(self, step: int) -> None: ...  # 0
    def move(self, step: int, aside: str) -> None: ...  # 0: into the new folder `aside` beside that of the checkpoints
    def read(self, step: int, name: str) -> str: ...  # a text
    def add(self, step: int, name: str, text: str) -> None: ...  # 0: to a whole checkpoint, as a whole
    def read_metrics(self, step: int) -> dict[str, float] | None: ...  # 0; Damaged
    def add_metrics(self, step: int, metrics: dict[str, float]) -> None: ...  # 0: to a whole checkpoint without any
    def list_arrays(self, step: int) -> dict[str, tuple[int, ...]]: ...  # shapes by name: params/embed/table
    def read_arrays(self, step: int) -> dict[str, np.ndarray]: ...  # all of them, whole, in the shapes of `list_arrays`
    def restore(self, step: int, abstract: State) -> State: ...  # the arrays that `abstract` names, laid out as it says
    def check(self, step: int, share: int, num_shares: int) -> int | None: ...  # bytes read, None: no digests; Damaged
    def is_verified(self, step: int) -> bool: ...  # 0: whether `record_verified` was called, in this place
    def record_verified(self, step: int) -> None: ...  # 0


class StorageKind(NamedTuple):
    """A kind of storage, and which runs take it."""

    fits: Callable[[str, bool], bool]  # (a folder or an address, whether all processes see the same folder) -> bool
    make: Callable[[str, Checkpoint], Storage]


# A run takes the first one that fits.
STORAGE = {
    "bucket": StorageKind(
        lambda folder, is_shared: is_address(folder), lambda folder, cfg: Bucket(folder, cfg.timeout_s)
    ),
    "shared": StorageKind(lambda folder, is_shared: is_shared, lambda folder, cfg: Folder(Path(folder).absolute())),
    "one_host": StorageKind(lambda folder, is_shared: True, lambda folder, cfg: OneHostFolder(Path(folder).absolute())),
}


def open_store(folder: str, cfg: Checkpoint, is_shared: bool) -> "Store":
    """Open the store of a run's checkpoints in a folder or at an address; `is_shared` says if all processes see it."""
    return Store(make_storage(folder, cfg, is_shared), cfg)


def make_storage(folder: str, cfg: Checkpoint, is_shared: bool) -> Storage:
    """Return the storage of a folder or an address; nothing is opened or written."""
    kind = next(kind for kind in STORAGE.values() if kind.fits(folder, is_shared))
    return kind.make(folder, cfg)


class Store:
    """Checkpoints of one run in a storage. All processes call the methods in the same order."""

    def __init__(self, storage: Storage, cfg: Checkpoint):
        self.storage, self.cfg = storage, cfg
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None
        self.losses: dict[int, float | None] = {}  # what `_read_losses` has read: in a bucket each one is a request
        peers.on_main(storage.open, "checkpoints that are not whole")

    @property
    def folder(self) -> Path | str:
        return self.storage.folder

    @property
    def home(self) -> str:
        """Folder or address of the run that `folder` belongs to."""
        return str(self.folder).rpartition("/")[0]

    def steps(self) -> list[int]:
        """Return the steps that have a whole checkpoint, in order."""
        return self._ask_main(self.storage.list_steps)

    def save(self, step: int, state: State, record: Record) -> None:
        """Start saving; returns when the arrays are copied. A failure of the save before is raised here."""
        self.wait()
        texts = {}
        if peers.is_main():
            texts = {"run/metadata": json.dumps(record.info), "tokenizer/metadata": record.tokenizer}
            if record.metrics is not None:
                texts["metrics/metrics"] = json.dumps(record.metrics)
        try:
            write = self.storage.copy(step, state, texts)  # now: the next step overwrites the memory of the state
        except Exception as error:
            raise self._explain(error) from error
        work = (step, write, record.metrics, f"saved/{next(_saves)}")
        self.thread = threading.Thread(target=self._complete, args=work, name=f"checkpoint {step}", daemon=True)
        self.thread.start()
        if not self.cfg.async_:
            self.finish()

    def add(self, step: int, name: str, text: str) -> None:
        """Add a text to a checkpoint that is whole; none of no characters."""

        def write() -> None:
            try:
                self.storage.add(step, name, text)
            except Exception as error:
                raise self._explain(error) from error

        if text:
            peers.on_main(write, "what is added to the checkpoint")

    def add_loss(self, step: int, loss: float | None) -> None:
        """Add the held-out loss to a checkpoint that was saved before its model was measured."""

        def write() -> None:
            try:
                if loss is not None and self._read_losses().get(step, loss) is None:
                    self.storage.add_metrics(step, {"held_out_loss": loss})
                    self.losses[step] = loss
            except Exception as error:
                reason = self.storage.explain(error) or repr(error)
                log.warning("the checkpoint of step %d does not get its held-out loss: %s", step, reason)

        peers.on_main(write, "the held-out loss of a checkpoint")

    def wait(self) -> None:
        """Wait until what this process has begun to save is written."""
        if self.thread:
            self.thread.join()
            self.thread = None
        failure, self.failure = self.failure, None
        if failure:
            raise self._explain(failure) from failure

    def finish(self) -> None:
        """Wait until what all processes have begun to save is written."""
        peers.together(self.wait, "all processes have written their part of the checkpoint")

    def describe_best(self) -> str:
        """Return which checkpoint has the lowest held-out loss, for the log; empty where it is the newest one."""

        def describe() -> str:
            try:
                losses = self._read_losses()
            except Exception as error:
                return f"the best checkpoint is not known: {self.storage.explain(error) or repr(error)}"
            best, newest = find_best(losses), max(losses, default=None)
            if best in (None, newest):
                return ""
            return (
                f"best held out: step {best}; commands take the newest checkpoint, step {newest}, unless they name "
                f"another one: checkpoint={self.folder}/{best}"
            )

        return self._ask_main(describe) if self.cfg.keep_best else ""

    def check(self, step: int) -> None:
        """Compare a checkpoint with its digests, as `checkpoint.verify` says; each process reads a share of the files.

        Raises:
            Damaged: on every process, if a file is not what was written.
            UserError: a newer version of tunix wrote it, in a form that is not read here.
        """
        self._ask_main(lambda: reject_newer_checkpoint(self.storage, step))
        if self.cfg.verify == "never":
            return
        if self.cfg.verify == "once" and self._ask_main(lambda: self.storage.is_verified(step)):
            return
        rank, num_shares = jax.process_index(), jax.process_count() if self.storage.is_seen_by_all else 1
        size = read_together(lambda: self.storage.check(step, rank, num_shares) if rank < num_shares else 0)
        if size is None:
            log.warning(
                "the checkpoint of step %d has no digests (an older version wrote it): it is not compared", step
            )
        elif self.cfg.verify == "once" and peers.is_main():
            self.storage.record_verified(step)

    def info(self, step: int) -> dict[str, Any]:
        """Read what a checkpoint says about itself, as `read_about` returns it."""
        return self._ask_main(lambda: read_about(self.storage, step))

    def check_state(self, step: int, abstract: State) -> None:
        """Check that the checkpoint has the arrays that `abstract` names, in their shapes.

        Raises:
            UserError: on every process, if it was saved with another optimizer or model.
        """

        def compare() -> None:
            arrays = self.storage.list_arrays(step)
            for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
                name, shape = name_array(path), tuple(leaf.shape)
                if (saved := arrays.pop(name, None)) == shape:
                    continue
                found = f"no array {name}" if saved is None else f"{name} in shape {saved}, not {shape}"
                raise UserError(
                    f"resume: the checkpoint of step {step} in {self.folder} has {found}: the optimizer or the model "
                    "of this config needs another state; leave their keys as they were, or start a new run from its "
                    f"weights: model.init_from={self.home}"
                )
            if arrays:
                names = name_first(list(arrays))
                log.warning("resume: this config has no use for %s of the checkpoint, and goes on without", names)

        self._ask_main(compare)

    def restore(self, step: int, abstract: State) -> State:
        """Read the arrays of the checkpoint that `abstract` names.

        Raises:
            Damaged: on every process, if one of them cannot read its part.
        """
        return read_together(lambda: self.storage.restore(step, abstract))

    def put_aside(self, steps: list[int]) -> None:
        """Move checkpoints that are newer than the one a run goes on from, so that the run can write its own."""
        if not steps:
            return
        aside = f"checkpoints_put_aside_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        log.warning("newer checkpoints (%s) are put aside in %s", ", ".join(map(str, sorted(steps))), aside)

        def move() -> None:
            for step in steps:
                self.storage.move(step, aside)

        peers.on_main(move, "checkpoints are put aside")

    def _complete(
        self, step: int, write: Callable[[], dict[str, Any]], metrics: dict[str, float] | None, answers: str
    ) -> None:
        """Write this process's part, and on process 0 what makes the checkpoint whole; runs in a thread of its own."""
        rank = jax.process_index()
        try:
            written = write()
            # Processes tell one another through the coordinator, and not by a collective: this thread runs beside the
            # training, whose collectives must come in the same order everywhere.
            peers.publish(f"{answers}/{rank}", json.dumps({"written": written}))
            if peers.is_main():
                # Last, and after all parts of all processes.
                self.storage.commit(step, written | _wait_for_others(answers), metrics)
                self.losses.pop(step, None)  # of one with this number that was put aside
                self._delete_old()
        except Exception as error:
            # Nobody sees an exception of this thread. So process 0 is told, which would wait for ever, and `wait`
            # raises it in the main thread: at the next save, for which the run is asked now. Later steps would be lost.
            reason = self._find_reason(error) or repr(error)
            peers.publish(f"{answers}/{rank}", json.dumps({"failure": reason}))
            self.failure = error
            watchdog.request_stop(f"the checkpoint of step {step} cannot be written: {reason}", fails=True)

    def _delete_old(self) -> None:
        """Delete the checkpoints that are not kept."""
        try:
            for step in list_dropped(self.cfg, self._read_losses()):
                self.storage.delete(step)
        except Exception as error:  # some buckets allow nobody to delete
            reason = self.storage.explain(error) or repr(error)
            log.warning("older checkpoints in %s could not be deleted: %s", self.folder, reason)

    def _read_losses(self) -> dict[int, float | None]:
        """Return the held-out loss of each checkpoint by its step, None where nothing was measured."""
        steps = self.storage.list_steps()
        self.losses = {step: loss for step, loss in self.losses.items() if step in steps}
        for step in [step for step in steps if step not in self.losses]:
            try:
                metrics = self.storage.read_metrics(step)
                self.losses[step] = None if metrics is None else float(metrics["held_out_loss"])
            except UserError:  # a bucket refuses or does not answer, for now: this may be the best one
                raise
            except (Damaged, OSError, ValueError, KeyError, TypeError) as error:
                self.losses[step] = None  # the other checkpoints stay usable
                log.error("step %d in %s: %r: this checkpoint does not count as the best", step, self.folder, error)
        return self.losses

    def _explain(self, error: Exception) -> Exception:
        """Return a `UserError` for a disk or a bucket that takes no more, and any other error, a bug, as it is."""
        if (reason := self._find_reason(error)) is None:
            return error
        whole = "those that were there"
        if not isinstance(error, TimeoutError):  # else it would let this question wait, too
            with suppress(OSError, UserError):
                whole = ", ".join(map(str, self.storage.list_steps())) or "none"
        return UserError(
            f"a checkpoint could not be written to {self.folder}: {reason}; whole checkpoints: {whole}. "
            f"When it can be written again, go on with {format_resume(self.home)}"
        )

    def _find_reason(self, error: Exception) -> str | None:
        """Return why a save failed, None for a bug; of another process it is what that one says of its own disk."""
        return str(error) if isinstance(error, FailedElsewhere) else self.storage.explain(error)

    def _ask_main(self, work: Callable[[], T]) -> T:
        """Return `work()` of process 0, a value for JSON, on every process."""
        value = read_together(lambda: work() if peers.is_main() else None)
        return cast(T, peers.agree(value, "what process 0 has read"))


def list_dropped(cfg: Checkpoint, losses: dict[int, float | None]) -> list[int]:
    """Return the steps of the checkpoints that are not kept; `losses` has the held-out loss of each, or None."""
    steps = sorted(losses)
    kept: set[int | None] = {*steps[-cfg.max_to_keep :], *cfg.save_at_steps, *([0] if cfg.save_first else [])}
    if cfg.keep_every_steps:
        kept |= {step for step in steps if step % cfg.keep_every_steps == 0}
    if cfg.keep_best:
        kept.add(find_best(losses))
    return [step for step in steps if step not in kept]


def find_best(losses: dict[int, float | None]) -> int | None:
    """Return the newest of the steps with the lowest held-out loss; None where nothing was measured."""
    measured = [(loss, -step) for step, loss in losses.items() if loss is not None and not math.isnan(loss)]
    return -min(measured)[1] if measured else None


def _wait_for_others(answers: str) -> dict[str, Any]:
    """Return what the processes have published that their parts are written, when all have."""
    written: dict[str, Any] = {}
    # Without a time limit: where a process dies, the watchdog ends this one too (`processes/watchdog.py`).
    while len(texts := peers.published(answers)) < jax.process_count() > 1:
        time.sleep(POLL_S)
    for rank, text in texts.items():
        answer = json.loads(text)
        if "failure" in answer:
            raise FailedElsewhere(f"process {rank}: {answer['failure']}")
        written |= answer["written"]
    return written


def reject_newer_checkpoint(storage: Storage, step: int) -> None:
    """Raise `UserError` for a checkpoint whose form is newer than what is read here."""
    record = None
    with suppress(OSError, ValueError):  # damage, which whoever reads more of the checkpoint describes
        record = parse_json(storage.read(step, "run/metadata"))
    reject_newer_form(record, f"{storage.folder}/{step}")


def read_about(storage: Storage, step: int) -> dict[str, Any]:
    """Read the item `run`: position in the data, config, ...; the key `parts` has what `find_parts` finds."""
    about = parse_json(storage.read(step, "run/metadata"))
    with suppress(FileNotFoundError):
        about["position"]["waiting"] = storage.read(step, WAITING)
    return {**about, "parts": find_parts(storage, step)}


def find_parts(storage: Storage, step: int) -> dict[str, Any]:
    """Find the parts of the state that not every checkpoint has. No array is read.

    Returns:
        `copies`: names of the copies of the parameters (training/ema.py); `spike_window`: steps in the window of spikes
        (training/optimizer.py), 0 without one.
    """
    arrays = storage.list_arrays(step)
    copies = {name.split("/")[1] for name in arrays if name.startswith("copies/")}
    return {"copies": sorted(copies), "spike_window": arrays.get("spikes/loss", (0,))[0]}


# Saved checkpoints as commands read them. A checkpoint is named by its folder, RUN/checkpoints/STEP. That of a run in a
# bucket is a stand-in that holds only the address (`config/saved_runs.py`), and everything is read from there.

ADDRESS = "address"  # a file in a checkpoint's folder that is a stand-in for one in a bucket


def find_storage(checkpoint: Path) -> tuple[Storage, int]:
    """Return the storage and the step of a checkpoint; raises `UserError` for one of a newer form."""
    file = checkpoint / ADDRESS
    storage: Storage = Folder(checkpoint.parent)
    step = checkpoint.name
    if file.is_file():
        folder, _, step = file.read_text().strip().rpartition("/")
        storage = Bucket(folder)
    reject_newer_checkpoint(storage, int(step))
    return storage, int(step)


def reject_damaged_checkpoint(checkpoint: Path, key: str = "checkpoint") -> None:
    """Raise `UserError` if the files of a run's checkpoint are not those of its digests; `key` is for the message."""
    try:
        storage, step = find_storage(checkpoint)
        storage.check(step, 0, 1)
    except Damaged as damage:
        others = [str(step) for step in list_numbers(checkpoint.parent) if str(step) != checkpoint.name]
        hint = f"; take another step: {checkpoint.parent}/STEP with STEP of {', '.join(others)}" if others else ""
        raise UserError(f"{key}: {damage}{hint}") from None


@contextmanager
def describe_unreadable(checkpoint: Path, key: str = "checkpoint") -> Iterator[None]:
    """Turn an error of reading a checkpoint in this block into a `UserError`: without digests, damage is found late."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Orbax has no kind of its own
        reason = first_line(error)[:400]
        raise UserError(f"{key}: {checkpoint} cannot be read: {reason}") from error
