"""The store of checkpoints in a folder that only process 0 sees: the hosts have no disk in common.

    save       every process sends its shards to process 0, which writes the whole state
    restore    process 0 reads the whole state, and sends every process its shards

So process 0 needs memory for the whole state. A bucket (`checkpoint.folder`) needs no such memory.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from tunix.config import Checkpoint
from tunix.processes import peers
from tunix.run.items import ONLY_PROCESS_0
from tunix.run.record import Record
from tunix.run.shared_store import SharedStore
from tunix.sharding.arrays import from_main, to_main
from tunix.training.state import State

T = TypeVar("T")


class OneHostStore:
    """A folder of process 0. The methods are those of a `SharedStore` there; the other processes have none."""

    def __init__(self, folder: Path, cfg: Checkpoint):
        self.folder = folder.absolute()
        self.disk: SharedStore | None = None
        if peers.is_main():
            folder.mkdir(exist_ok=True)
            # Orbax makes the folder (create=True) only where all processes take part.
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
        """Return `work(disk)` on process 0 and None on the others; an error of process 0 is raised on all of them."""
        result, failure = None, ""
        # If process 0 alone raised an error, the others would wait for its shards for ever.
        try:
            result = work(self.disk) if self.disk else None
        except Exception as error:
            failure = str(error) or repr(error)
        if failure := peers.agree(failure, "process 0 reads the checkpoint", peers.NO_LIMIT_S):
            raise RuntimeError(failure)
        return result

    def _read(self, work: Callable[[SharedStore], Any]) -> Any:
        """Return `work(disk)`, a value for JSON, on every process."""
        return json.loads(peers.agree(json.dumps(self._on_main(work)), "what process 0 has read"))
