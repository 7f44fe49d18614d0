"""The program: from a checked config to a trained model. Read `run` from top to bottom."""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tunix.base.buckets import join
from tunix.cli import compose
from tunix.cli.intent import remark_on_tiny
from tunix.loop.progress import restore_or_begin
from tunix.loop.setup import check_before_writing, set_up, try_out
from tunix.loop.steps import open_loop
from tunix.plan.choice import resolve_auto
from tunix.processes import joining, stopping
from tunix.processes.versions import list_versions
from tunix.processes.watchdog import Watchdog
from tunix.run import logs, run_folder
from tunix.run.checkpoint import Checkpoints
from tunix.run.compile_cache import keep_programs
from tunix.run.compile_step import describe_memory
from tunix.run.compiler import Compiler
from tunix.run.home import check_home, find_home, write_home
from tunix.run.lock import hold_lock
from tunix.run.metrics import read_peak_memory_gib
from tunix.run.start_clock import StartClock
from tunix.run.stores import open_store
from tunix.training.mesh_choices import build_mesh

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
        Ending: a reason of `run.endings` holds.
    """
    begun, clock = time.monotonic(), StartClock()
    # Join the other processes first: jax must know all devices before it is asked for one. The roll call compares
    # configs and versions, so a mistake in one of them ends every process here. `auto` becomes a value: only now are
    # the devices known.
    remarks = joining.start(job.config.distributed, list_versions() | compose.list_facts(job.config))
    keep_programs(job.config)
    waiting_log = logs.start_logging(remarks, job.config.logging)
    cfg, chosen = resolve_auto(job.config)
    try_out(cfg)
    mesh = build_mesh(cfg)

    with stopping.listening(), Watchdog(cfg.distributed) as watchdog, jax.set_mesh(mesh), ExitStack() as stack:
        # Find every mistake before anything is written. A dry run ends with the report of all derived numbers. In a
        # new run the compiler begins as soon as it knows the program, and works while data and weights are read.
        compiler = stack.enter_context(Compiler(mesh, watchdog))
        setup = set_up(cfg, mesh, chosen, watchdog, compiler, clock)
        log.info("%s", setup.report)
        if remark := remark_on_tiny(job):
            log.warning("%s", remark)
        if setup.corpus is None:
            return Result(None, {}, {})
        feed = stack.enter_context(setup.make_feed(watchdog))
        check_before_writing(setup, feed)
        check_home(job)
        if not cfg.resume:  # a checkpoint may be refused, and its program is mostly in the compile cache
            compiler.begin_run(setup.programs, setup.sizes.schedule, setup.sizes.total_steps)
        clock.end("checks")

        # Take the folder, and the state to start from: the newest checkpoint of a resumed run that can be read, else
        # the weights of model.init_from, else new ones. Checkpoints are refused before the folder is written to.
        folder, shared = run_folder.open_folder(job)
        home = find_home(job, folder)
        store = open_store(join(home, "checkpoints"), cfg.checkpoint, shared)
        with hold_lock(folder), Checkpoints(store) as checkpoints:
            progress = restore_or_begin(job, checkpoints, setup, feed)
            clock.end("state")
            run_folder.write_record(job, folder, shared, waiting_log)
            run_folder.keep_files(cfg, setup.corpus.vocabulary, folder)
            write_home(job, folder, home)
            log.info("writing to %s", folder)

            # Wait for the first step and train; make up for an evaluation that a stop prevented, and wait for the last
            # checkpoint.
            with open_loop(setup, progress, feed, checkpoints, folder, watchdog, begun) as loop:
                loop.compiled.at(min(progress.start.step + 1, progress.last))
                clock.end("step")
                log.info("%s", clock)
                if progress.is_new and cfg.checkpoint.save_first:
                    loop.save(progress.start, None)
                last = loop.run()
                loop.evaluations.make_up(last)
                with watchdog.phase("closing"):
                    checkpoints.finish()
                    log.info("%s", describe_memory(loop.compiled.at(last), read_peak_memory_gib()))
                    if loop.evaluations.newest:
                        feed.sum_up(progress.state, loop.evaluations.newest, loop.metrics)
        log.info("done: %s", folder)
        return Result(folder, loop.step_log.last, loop.evaluations.newest)
