"""The program: from a checked config to a trained model. Read `run` from top to bottom."""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tunix.base.buckets import join
from tunix.checkpoints.checkpoint import Checkpoints
from tunix.checkpoints.root import check_root, find_root, write_root
from tunix.checkpoints.store import open_store
from tunix.config import compose
from tunix.config.compose import remark_on_tiny
from tunix.plan.choice import plan_run
from tunix.processes import joining
from tunix.processes.rollcall import list_versions
from tunix.processes.watchdog import Watchdog, listening
from tunix.run.compiling import Compiler, StartClock, describe_memory, keep_programs
from tunix.run.folder import hold_lock, keep_files, open_folder, start_logging, write_record
from tunix.run.metrics import read_peak_memory_gib
from tunix.training.choices import build_mesh
from tunix.training_loop import check_before_writing, open_loop, restore_or_begin, set_up, try_out

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """The folder and the last numbers of a run."""

    folder: Path | None  # None after a dry run
    train: dict[str, Any]  # the last line of metrics.jsonl from training
    held_out: dict[str, Any]  # and from held-out evaluation


def run(job: compose.Job) -> Result:
    """Train as the config says.

    Raises:
        UserError: the run cannot be done, found before anything is written; or a checkpoint cannot be written.
        Ending: a reason of `run.early_stopping` holds.
    """
    start_time, clock = time.monotonic(), StartClock()
    # Join the other processes first: jax must know all devices before it is asked for one. The roll call compares
    # configs and versions, so a mistake in one of them ends every process here. `auto` becomes a value: only now are
    # the devices known.
    remarks = joining.start(job.config.distributed, list_versions() | compose.list_info(job.config))
    keep_programs(job.config)
    waiting_log = start_logging(remarks, job.config.logging)
    cfg = job.config
    planned, chosen = plan_run(cfg)
    try_out(cfg)
    if not cfg.dry_run:
        check_root(job)
    mesh = build_mesh(cfg, planned=planned)

    with listening(), Watchdog(cfg.distributed) as watchdog, jax.set_mesh(mesh), ExitStack() as stack:
        # Find every mistake before anything is written. A dry run ends with the report of all derived numbers. In a
        # new run the compiler begins as soon as it knows the program, and works while data and weights are read.
        compiler = stack.enter_context(Compiler(mesh, watchdog))
        setup = set_up(cfg, planned, mesh, chosen, watchdog, compiler, clock)
        log.info("%s", setup.report)
        if remark := remark_on_tiny(job):
            log.warning("%s", remark)
        if setup.corpus is None:
            return Result(None, {}, {})
        feed = stack.enter_context(setup.make_feed(watchdog))
        check_before_writing(setup, feed)
        if not cfg.resume:  # a checkpoint may be refused, and its program is mostly in the compile cache
            compiler.begin_run(setup.programs, setup.sizes.schedule, setup.sizes.total_steps)
        clock.end("checks")

        # Take the folder, and the state to start from: the newest checkpoint of a resumed run that can be read, else
        # the weights of model.init_from, else new ones. Checkpoints are refused before the folder is written to.
        folder, shared = open_folder(job)
        root = find_root(job, folder)
        kept_in = join(root, "checkpoints")
        with hold_lock(folder), Checkpoints(open_store(kept_in, cfg.checkpoint, shared)) as checkpoints:
            progress = restore_or_begin(job, checkpoints, setup, feed)
            clock.end("state")
            write_record(job, folder, shared, waiting_log)
            keep_files(cfg, setup.corpus.vocab, folder)
            write_root(job, folder, root)
            log.info("writing to %s", folder)

            # Wait for the first step and train; make up for an evaluation that a stop prevented, and wait for the last
            # checkpoint.
            with open_loop(setup, progress, feed, checkpoints, folder, watchdog, start_time) as loop:
                loop.compiled.at(min(progress.start.step + 1, progress.last))
                clock.end("step")
                log.info("%s", clock)
                if progress.is_new and cfg.checkpoint.save_first:
                    loop.save(progress.start, None)
                last = loop.run()
                loop.evaluations.make_up(last)
                with watchdog.phase("closing"):
                    loop.check_folder()  # what is saved into a folder that is gone fails with many words
                    checkpoints.finish()
                    loop.check_folder()
                    log.info("%s", describe_memory(loop.compiled.at(last), read_peak_memory_gib()))
                    if loop.evaluations.newest:
                        feed.sum_up(progress.state, loop.evaluations.newest, loop.metrics)
        log.info("done: %s", folder)
        return Result(folder, loop.step_log.last, loop.evaluations.newest)
