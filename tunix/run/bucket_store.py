"""The store of checkpoints in a bucket: every process writes its own shards, so the hosts need no shared disk.

    main thread        save: wait for the save before | copy own shards to the host | go on training
    a thread behind    write the copies | process 0: wait for all, write digests.json, delete what is not kept

A process that dies in between leaves a checkpoint without digests.json. It counts as no checkpoint, and the next start
of the run deletes it.
"""

import json
import logging
import threading
import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax

from tunix.base.buckets import explain, filesystem, join, list_names
from tunix.base.digests import FILE, digest_bytes
from tunix.base.errors import UserError
from tunix.cli.mirrored import list_steps
from tunix.config import Checkpoint
from tunix.processes import peers
from tunix.run.object_arrays import Part, copy_part, list_parts, read_arrays
from tunix.run.objects import KEY, Objects, check_objects, fingerprint
from tunix.run.record import Record
from tunix.run.retention import Saved, list_dropped, make_rules
from tunix.run.sealed import check_together
from tunix.training.state import State

log = logging.getLogger(__name__)
VERIFIED = "verified"  # an object with the fingerprint of the digests that were compared last
POLL_S = 0.2  # seconds between two looks whether the other processes have written


class BucketStore:
    """Checkpoints below an address, HOME/checkpoints."""

    def __init__(self, address: str, cfg: Checkpoint):
        self.folder, self.cfg = address, cfg
        self.objects = Objects(address, cfg.timeout_s)
        self.rules = make_rules(cfg)
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None
        self.num_saves = 0  # the same on every process: the name under which they publish that a save is done
        peers.on_main(self._delete_unfinished, "checkpoints that are not whole")

    def steps(self) -> list[int]:
        """Return the steps that have a whole checkpoint, in order."""
        listed = list_steps(self.home, KEY) if peers.is_main() else []
        return json.loads(peers.agree(json.dumps(listed), "checkpoints in the bucket"))

    @property
    def home(self) -> str:
        return self.folder.rpartition("/")[0]

    def save(self, step: int, state: State, record: Record) -> None:
        """Start saving; returns when the arrays are copied. A failure of the save before is raised here."""
        self.wait()
        part = copy_part(state)  # now, because the next step overwrites the memory of the state
        if peers.is_main():
            part.texts |= {"run/metadata": json.dumps(record.about)}
            part.texts["tokenizer/metadata"] = json.dumps(record.tokenizer)
            if record.metrics is not None:
                part.texts["metrics/metrics"] = json.dumps(record.metrics)
        self.num_saves += 1
        self.thread = threading.Thread(
            target=self._write, args=(step, part, record.metrics, self.num_saves), daemon=True
        )
        self.thread.start()
        if not self.cfg.async_:
            self.finish()

    def wait(self) -> None:
        """Wait until what this process has begun to save is in the bucket."""
        if self.thread:
            self.thread.join()
            self.thread = None
        failure, self.failure = self.failure, None
        if failure:
            raise UserError(
                f"a checkpoint could not be written to {self.folder}: {explain(failure)}; whole checkpoints stay as "
                f"they are. When the bucket can be written again, go on with resume={self.home}"
            ) from failure

    def finish(self) -> None:
        """Wait until what all processes have begun to save is in the bucket."""
        peers.together(self.wait, "all processes have written their part of the checkpoint", peers.NO_LIMIT_S)

    def check(self, step: int) -> None:
        """Compare a checkpoint with its digests, as `checkpoint.verify` says; each process reads a share.

        Raises:
            Damaged: on every process, if an object is not what was written.
        """
        address = self._place(step)
        if self.cfg.verify == "never" or (self.cfg.verify == "once" and self._is_verified(address)):
            return
        check_together(partial(check_objects, address))
        if self.cfg.verify == "once" and peers.is_main():
            self.objects.write(f"{step}/{VERIFIED}", fingerprint(address).encode())

    def about(self, step: int) -> dict[str, Any]:
        """Read the item `run`; the key `parts` has what `list_parts` finds."""
        return self.objects.read_json(f"{step}/run/metadata") | {"parts": list_parts(self._place(step))}

    def restore(self, step: int, abstract: State) -> State:
        """Read the arrays of the checkpoint that `abstract` names."""
        return read_arrays(self._place(step), abstract, self.cfg.timeout_s)

    def put_aside(self, steps: list[int], aside: str) -> None:
        """Move checkpoints into the new folder `aside` beside this one. The server copies them."""

        def move() -> None:
            files = filesystem(self.folder, KEY)
            for step in steps:
                files.copy(self._place(step), join(self.home, aside, str(step)), recursive=True)
                self.objects.delete_folder(str(step))

        peers.on_main(move, "checkpoints are put aside")

    def close(self) -> None:
        """Nothing is open between two saves."""

    def _write(self, step: int, part: Part, metrics: dict[str, float] | None, number: int) -> None:
        """Write this process's part, and on process 0 what makes the checkpoint whole; runs in a thread of its own."""
        rank, answers = jax.process_index(), f"saved/{number}"
        try:
            objects = Objects(self._place(step), self.cfg.timeout_s)
            text = json.dumps({"files": part.write(objects)})
            objects.write(f"digests.{rank}.json", text.encode())
            own = {f"digests.{rank}.json": digest_bytes(text.encode())}
            # Processes tell one another through the coordinator, and not by a collective: this thread runs beside the
            # training, whose collectives must come in the same order everywhere.
            peers.publish(f"{answers}/{rank}", json.dumps({"digests": own}))
            if peers.is_main():
                digests = own | self._wait_for_others(answers)
                # Last, and after all parts of all processes: this object makes the checkpoint whole. A kill before this
                # line leaves objects that `_delete_unfinished` removes at the next start.
                record = {"step": step, "time": datetime.now(UTC).isoformat(), "metrics": metrics, "files": digests}
                objects.write(FILE, json.dumps(record).encode())
                self._delete_old()
        except Exception as error:
            # Nobody sees an exception of this thread. So process 0 is told, which would wait for ever, and `wait`
            # raises it in the main thread.
            peers.publish(f"{answers}/{rank}", json.dumps({"failure": explain(error)}))
            self.failure = error

    def _wait_for_others(self, answers: str) -> dict[str, Any]:
        """Return the digests of what the other processes have written, when all have."""
        digests: dict[str, Any] = {}
        # Without a time limit: where a process dies, the watchdog ends this one too (`processes/watchdog.py`).
        while len(texts := peers.published(answers)) < jax.process_count() > 1:
            time.sleep(POLL_S)
        for rank, text in texts.items():
            answer = json.loads(text)
            if "failure" in answer:
                raise OSError(f"process {rank}: {answer['failure']}")
            digests |= answer["digests"]
        return digests

    def _delete_old(self) -> None:
        """Delete the checkpoints that are not kept."""
        records = [self.objects.read_json(f"{step}/{FILE}") for step in list_steps(self.home, KEY)]
        saved = [Saved(each["step"], each["metrics"], datetime.fromisoformat(each["time"])) for each in records]
        try:
            for step in list_dropped(self.rules, saved):
                self.objects.delete_folder(str(step))
        except Exception as error:  # some buckets allow nobody to delete
            log.warning("older checkpoints in %s could not be deleted: %s", self.folder, explain(error))

    def _delete_unfinished(self) -> None:
        """Delete what a process that died has left of a checkpoint."""
        finished = set(map(str, list_steps(self.home, KEY)))
        for name in list_names(self.folder, KEY):
            if name.isdigit() and name not in finished:
                log.warning("the checkpoint of step %s in %s is not whole: it is deleted", name, self.folder)
                self.objects.delete_folder(name)

    def _place(self, step: int) -> str:
        return join(self.folder, str(step))

    def _is_verified(self, address: str) -> bool:
        try:
            return Objects(address).read(VERIFIED).decode() == fingerprint(address)
        except FileNotFoundError:
            return False
