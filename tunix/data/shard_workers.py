"""Workers that make the shards of a corpus, on all cores of this host."""

import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tunix.base.disk import make_once
from tunix.base.errors import UserError
from tunix.config import Loading
from tunix.data.shards import ShardPlan, make_shard

log = logging.getLogger(__name__)


def make_shards(plans: list[ShardPlan], folder: Path, loading: Loading) -> list[dict]:
    """Make the shards that are missing, on all cores; return the facts of all."""
    missing = [plan for plan in plans if not (folder / plan.name).exists()]
    if 0 < len(missing) < len(plans):
        log.info("%d of %d shards are there already", len(plans) - len(missing), len(plans))
    num_workers = min(len(missing), loading.prepare_processes or os.cpu_count() or 1)
    sizes = {plan.name: sum(unit.size for unit in plan.units) for plan in missing}
    columns = TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("", total=sum(sizes.values()))
        for name in _make_missing(missing, folder, num_workers):
            progress.advance(bar, sizes[name])
    return [json.loads((folder / plan.name / "facts.json").read_text()) for plan in plans]


def _make_missing(plans: list[ShardPlan], folder: Path, num_workers: int) -> Iterator[str]:
    """Make shards in worker processes and yield the name of each when it is done.

    With one worker, this process makes them all, and the tokenizer uses a thread for each core.
    """
    if num_workers <= 1:
        for plan in plans:
            yield _make_one(plan, folder)
        return
    # "spawn" starts a new interpreter. "fork" would copy this process, whose other threads (JAX, a tokenizer) may hold
    # locks; the copy has no such thread, so its locks would never open.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (os.getpid(),)) as pool:
        futures = [pool.submit(_make_one, plan, folder) for plan in plans]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise UserError(
                "a process that tokenizes was killed, perhaps because memory ran out; run fewer at a time: "
                f"loading.prepare_processes={max(1, num_workers // 2)}. Finished shards are kept"
            ) from None
        except BaseException:
            # Without this, leaving the block waits for every shard that has not begun yet.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make_one(plan: ShardPlan, folder: Path) -> str:
    make_once(folder / plan.name, lambda path: make_shard(plan, path))
    return plan.name


def _start_worker(parent: int) -> None:
    """Prepare a worker process: it uses one core, and it ends when its parent has ended."""
    # The tokenizer's threads (Rayon) are one for each core; so many in each worker would only wait for one another.
    os.environ["RAYON_NUM_THREADS"] = "1"

    # A parent that is killed cannot end its workers. A process whose parent has ended gets another parent.
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
