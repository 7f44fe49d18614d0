"""Cost of a checkpoint's digests, beside that of writing and reading it: `python -m benchmarks.digests [GIB]`.

One process with one device writes a state of random float32 numbers to a folder, compares it with its digests, and
reads it again. Seconds are the processor's, of all threads, user and system. Files come from the page cache. The best
of three counts, and the only save.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from tunix.base.digests import list_files, write_digests
from tunix.checkpoints.folders import Folder
from tunix.checkpoints.store import Record, Store
from tunix.config.compose import compose

MIB = 1 << 18  # float32 numbers


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """Least CPU time of a call."""
    taken = []
    for _ in range(times):
        start_time = time.process_time()
        work()
        taken.append(time.process_time() - start_time)
    return min(taken)


def main(gib: float) -> None:
    rng = np.random.default_rng(0)
    count = max(1, round(16 * gib))
    state = {f"w{number}": jax.numpy.asarray(rng.standard_normal(64 * MIB, np.float32)) for number in range(count)}
    nbytes = sum(leaf.nbytes for leaf in state.values())
    with tempfile.TemporaryDirectory(dir=".") as folder:
        store = Store(Folder(Path(folder).absolute()), compose([]).config.checkpoint)

        def save() -> None:
            store.save(1, state, Record({}, {}, None))
            store.wait()

        saving = seconds(save, 1)
        checkpoint = Path(folder) / "1"
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in state.items()
        }
        restoring = seconds(lambda: jax.block_until_ready(store.restore(1, abstract)))
        checking = seconds(lambda: store.storage.check(1))
        writing = seconds(lambda: write_digests(checkpoint / "state", list_files(checkpoint / "state"), "trial"))
    print(f"{nbytes / 2**30:.2f} GiB of state")
    for name, taken in [
        ("save, with digests", saving),
        ("restore", restoring),
        ("check", checking),
        ("digests", writing),
    ]:
        print(f"{name:20} {taken:6.2f} s  {nbytes / 2**30 / taken:6.2f} GiB/s")
    print(f"check / restore {checking / restoring:.2f}; digests / save {writing / saving:.2f}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
