"""The store of checkpoints in a folder that all processes see: each process writes its own shards.

Orbax does the work. It writes into STEP.orbax-checkpoint-tmp, and renames that folder to STEP when every process has
written its part. So a folder with the name of a step is a whole checkpoint, and the next start deletes all others.
"""

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from tunix.base.digests import FILE, is_verified, note_verified
from tunix.base.errors import UserError
from tunix.config import Checkpoint
from tunix.processes import peers
from tunix.run.items import ALL_PROCESSES, find_parts, read_json, read_state
from tunix.run.record import Record
from tunix.run.retention import held_out_loss, make_rules
from tunix.run.sealed import SealingManager, check_checkpoint, check_together
from tunix.training.state import State

log = logging.getLogger(__name__)
# Words of Orbax and tensorstore for a disk that takes no more, in errors that are no OSError.
DISK_REFUSES = ("No space left", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED")


class SharedStore:
    """A folder that all processes see."""

    def __init__(self, folder: Path, cfg: Checkpoint, processes: Any = ALL_PROCESSES, **options: Any):
        self.folder, self.processes, self.verify = folder.absolute(), processes, cfg.verify
        self.manager = SealingManager(
            self.folder,
            ocp.CheckpointManagerOptions(
                preservation_policy=make_rules(cfg),
                # Decides nothing beside a policy. But only with `best_fn` does Orbax write the item `metrics`.
                best_fn=held_out_loss,
                best_mode="min",
                enable_async_checkpointing=cfg.async_,
                cleanup_tmp_directories=True,
                multiprocessing_options=processes,
                **options,
            ),
        )

    def steps(self) -> list[int]:
        """Return the steps that have a whole checkpoint, in order."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: State, record: Record) -> None:
        """Start saving; returns when the arrays are copied. A failure of the save before is raised here."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            run=ocp.args.JsonSave(record.about),
            tokenizer=ocp.args.JsonSave(record.tokenizer),
        )
        try:
            # force: without it, Orbax would decide itself whether a checkpoint is due.
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
        alone = self.processes.active_processes is not None  # in a `OneHostStore`: the other processes do not come here
        size = check_checkpoint(checkpoint) if alone else check_together(partial(check_checkpoint, checkpoint))
        if size is None:
            log.warning("the checkpoint of step %d has no digests (an older version wrote it): it is not checked", step)
        elif self.verify == "once" and peers.is_main():
            note_verified(checkpoint, mark)

    def about(self, step: int) -> dict[str, Any]:
        """Read the item `run`; the key `parts` has what `find_parts` finds."""
        checkpoint = self.folder / str(step)
        return read_json(checkpoint, "run", self.processes) | {"parts": find_parts(checkpoint)}

    def restore(self, step: int, abstract: State) -> State:
        """Read the arrays of the checkpoint that `abstract` names."""
        return read_state(self.folder / str(step), abstract, self.processes)

    def put_aside(self, steps: list[int], aside: str) -> None:
        """Move checkpoints into the new folder `aside` beside this one."""
        peers.barrier("before checkpoints are put aside")  # until no process reads them any more
        if peers.is_main():
            self.move(steps, self.folder.with_name(aside))
        peers.barrier("checkpoints are put aside")
        self.manager.reload()  # Orbax lists the folder once, and would still count the checkpoints that are gone

    def move(self, steps: list[int], aside: Path) -> None:
        """Move checkpoints, on one process alone."""
        aside.mkdir()
        for step in steps:
            (self.folder / str(step)).rename(aside / str(step))

    def close(self) -> None:
        self.manager.close()

    def _write_error(self, error: Exception) -> Exception:
        """Return a `UserError` for a disk that is full or cannot be written, and any other error, a bug, as it is."""
        text = str(error)
        if not isinstance(error, OSError) and not any(words in text for words in DISK_REFUSES):
            return error
        whole = ", ".join(map(str, self.steps())) or "none"
        free = shutil.disk_usage(self.folder).free / 2**30
        return UserError(
            f"a checkpoint could not be written to {self.folder} ({free:.2f} GiB free): {text.splitlines()[0][:200]}; "
            f"whole checkpoints: {whole}. Make room and go on with resume={self.folder.parent}"
        )
