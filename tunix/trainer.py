"""The program: from a checked config to a trained model. Read `run` from top to bottom."""

import logging
import math
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tunix.base.buckets import join
from tunix.base.errors import Finished, Stopped
from tunix.cli import compose
from tunix.cli.intent import remark_on_tiny
from tunix.config import Config
from tunix.costs.devices import peak_tflops
from tunix.data.position import Position
from tunix.data.prompts import AnyCorpus
from tunix.inference.start import check_init_from, load_init_from
from tunix.plan.choice import resolve_auto
from tunix.processes import joining, peers, stopping
from tunix.processes.versions import versions
from tunix.processes.watchdog import Watchdog
from tunix.rl.feeds import FEEDS, Feed, Measure
from tunix.run import logs, run_folder
from tunix.run.checkpoint import Checkpoints
from tunix.run.compile_cache import keep_programs
from tunix.run.compiled_steps import CompiledSteps, memory_report
from tunix.run.endings import REASONS, REASONS_OF_EVALUATIONS, Moment, find_ending
from tunix.run.home import check_home, find_home, write_home
from tunix.run.improvement import Improvement
from tunix.run.lock import hold_lock
from tunix.run.metrics import Metrics, StepLog, peak_memory_gib
from tunix.run.start_clock import StartClock
from tunix.run.start_report import start_report
from tunix.run.stores import open_store
from tunix.run.trace import CommunicationTrace, check_window
from tunix.sinks import Start
from tunix.tokenizer.vocabulary import tokenizer_digest
from tunix.training.kernel_check import check_attention
from tunix.training.optim import check_phases
from tunix.training.overlap import check_compiler_options
from tunix.training.program import Program, assemble, assemble_stages, build_mesh
from tunix.training.sizes import Sizes, derive_sizes
from tunix.training.state import Architecture, State

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
    remarks = joining.start(job.config.distributed, versions() | compose.list_facts(job.config))
    keep_programs(job.config)
    waiting_log = logs.start_logging(remarks, job.config.logging)
    cfg, chosen = resolve_auto(job.config)
    # Code that the user brings is called once on made-up input, before anything is written.
    for section in (cfg.data, cfg.optimizer, cfg.scheduler):
        section.try_out()
    peers.on_main(cfg.logging.try_out, "trying the sinks")
    mesh, feed_kind = build_mesh(cfg), FEEDS[cfg.task.documents]

    with stopping.listening(), Watchdog(cfg.distributed) as watchdog, jax.set_mesh(mesh), ExitStack() as stack:
        # Find every mistake before anything is written. The order is important:
        # 1. the program, on shapes only: no array is made, so a dry run is quick;
        # 2. the data, which may take hours the first time: process 0 prepares them, the others read them;
        # 3. the report of every derived number, at which a dry run ends;
        # 4. checks that need the devices, the data or a download.
        program = assemble(cfg, mesh)
        arch = program.arch
        programs = assemble_stages(program, cfg.training.batch_schedule(mesh.shape), mesh)
        for each in programs.values():
            each.try_out_loss(mesh)
        check_before_reading(cfg, mesh, arch)
        clock.end("program")
        with watchdog.phase("preparing the data", math.inf):
            corpus = None if cfg.dry_run else peers.main_first(lambda: feed_kind.load(cfg), "preparing the data")
        clock.end("data")
        sizes = derive_sizes(cfg, mesh, arch, corpus.num_samples if corpus else None)
        report = start_report(cfg, program, mesh, sizes, corpus, chosen)
        log.info("%s", report)
        if remark := remark_on_tiny(job):
            log.warning("%s", remark)
        if corpus is None:
            return Result(None, {}, {})
        assert sizes.total_steps is not None
        feed = stack.enter_context(feed_kind.make(cfg, corpus, program, mesh, watchdog))
        held_out = feed.held_out
        if table := feed.samples.stages(sizes.total_steps):
            log.info("stages of the mixture\n%s", table)
        check_before_writing(cfg, arch, sizes.total_steps)
        check_home(job)
        if agreement := check_attention(cfg, program.layout, mesh):
            log.info("%s", agreement)
        clock.end("checks")

        # Take the folder, and the state to start from: the newest checkpoint of a resumed run that can be read, else
        # the weights of model.init_from, else new ones. Checkpoints are refused before the folder is written to.
        folder, shared = run_folder.open_folder(job)
        home = find_home(job, folder)
        store = open_store(join(home, "checkpoints"), cfg.checkpoint, shared)
        with hold_lock(folder), Checkpoints(store) as checkpoints:
            state, start, improvement, is_new = first_state(job, checkpoints, program, mesh, corpus, feed)
            clock.end("state")
            whole_run, sizes = sizes, derive_sizes(cfg, mesh, arch, corpus.num_samples, start)
            last = end_of_run(cfg, whole_run, sizes, start, improvement)
            spans = whole_run.schedule.spans(last)
            run_folder.write_record(job, folder, shared, waiting_log)
            run_folder.keep_files(cfg, corpus.vocabulary, folder)
            write_home(job, folder, home)
            log.info("writing to %s", folder)
            traced = programs[sizes.schedule.at(cfg.profile.after_step + 1).shape].cfg
            with (
                Metrics(cfg.logging.sinks, Start(folder, cfg.model_dump(mode="json"), start.step, last)) as metrics,
                CommunicationTrace(traced, mesh, folder / "profile", metrics) as trace,
                closing(feed.batches(start, last, metrics, folder)) as source,
            ):
                trace.starts_after(start.step)
                compiled = CompiledSteps(programs, sizes.schedule, mesh, spans, watchdog)
                train_step = compiled.at(min(start.step + 1, last), state)
                clock.end("step")
                log.info("%s", clock)
                metrics.text("config", compose.to_yaml(cfg), start.step)
                metrics.text("report", report, start.step)
                peak = peak_tflops(mesh.devices.flat[0].device_kind)
                steps = StepLog(metrics, sizes, peak, source.samples, cfg.logging.layer_norms_every, watchdog.pace)
                evaluation: dict[str, Any] = {}
                if is_new and cfg.checkpoint.save_first:
                    checkpoints.save(state, start, improvement, cfg, corpus.tokenizer, None)

                # The loop. Where the batch changes, its step is compiled first. While a step runs on the devices, the
                # next batch travels to them and the numbers of the step before are written. After a step: trace, read,
                # ask the reasons to end, evaluate, save. An evaluation comes before the save, because the best
                # checkpoint is chosen by its held-out loss.
                if start.step < last:
                    with watchdog.phase(source.phase):
                        batch, numbers = source.next(state)
                for step in range(start.step + 1, last + 1):
                    if step in compiled.changes:
                        steps.finish()
                        train_step = compiled.change_to(step, state)
                        steps.restart_clock()
                    watchdog.step(step)
                    with jax.profiler.StepTraceAnnotation("train", step_num=step):
                        state, scalars = train_step(state, batch)
                    steps.started(step, scalars, numbers)
                    if step in trace.edges:
                        steps.finish()
                        with watchdog.phase("profiling"):
                            trace.at(step, state, train_step)
                        steps.restart_clock()
                    if step < last:
                        if source.waits_for_state:
                            steps.finish()
                        # A source gives up when it is asked to stop: the run ends below, after this step.
                        with watchdog.phase(source.phase), suppress(Stopped):
                            batch, numbers = source.next(state)

                    save_now = due(cfg.checkpoint.save_every_steps, step, last) or step in cfg.checkpoint.save_at_steps
                    evaluate_now = due(cfg.evaluation.every_steps, step, last)
                    if save_now or evaluate_now:
                        steps.finish()
                    now = Moment(cfg, folder, step, steps.last, improvement, time.monotonic() - begun, source)
                    ending = find_ending(now, REASONS)
                    if ending and not ending.saves:
                        raise ending
                    if evaluate_now and not ending:
                        evaluate_sets(feed, state, step, metrics, watchdog)
                    if evaluate_now and held_out and not ending:
                        evaluation = evaluate(held_out, state, step, metrics, watchdog)
                        improvement = improvement.after(held_out.cost(evaluation), cfg.evaluation)
                        ending = find_ending(replace(now, improvement=improvement), REASONS_OF_EVALUATIONS)
                    if save_now or ending:
                        steps.finish()
                        cost = held_out.cost(evaluation) if held_out and evaluation.get("step") == step else None
                        with watchdog.phase("saving"):
                            checkpoints.save(state, source.after(step), improvement, cfg, corpus.tokenizer, cost)
                            if ending:
                                checkpoints.finish()
                    if isinstance(ending, Finished):
                        log.info("%s", ending)
                        last = step
                        break
                    if ending:
                        raise ending
                    if save_now or evaluate_now:
                        steps.restart_clock()

                # The end: make up for an evaluation that a stop prevented, wait for the last checkpoint, sum up.
                if held_out and evaluation.get("step") != last:
                    evaluate_sets(feed, state, last, metrics, watchdog)
                    evaluation = evaluate(held_out, state, last, metrics, watchdog)
                with watchdog.phase("closing"):
                    checkpoints.finish()
                    log.info("%s", memory_report(train_step, peak_memory_gib()))
                    if evaluation:
                        feed.sum_up(state, evaluation, metrics)
        log.info("done: %s", folder)
        return Result(folder, steps.last, evaluation)


def first_state(
    job: compose.Job, checkpoints: Checkpoints, program: Program, mesh: Mesh, corpus: AnyCorpus, feed: Feed
) -> tuple[State, Position, Improvement, bool]:
    """Return the state to start from: of a checkpoint if the run is resumed and has one, else new (True) at step 0.

    With it come its position in the data, and how its held-out loss went.
    """
    fresh = Position(0, 0, feed.samples.fingerprint(corpus.fingerprint), tokenizer_digest(corpus.tokenizer))
    if job.config.resume:
        restored = checkpoints.restore(job.resume_step, program.abstract, job.config, fresh)
        if restored:
            state, position, improvement = restored
            log.info("resumed at step %d, sample %d", position.step, position.next_sample)
            return program.complete(state), position, improvement, False
        log.warning("no checkpoint in %s yet: starting at step 0", checkpoints.store.folder)
    return program.new_state(job.config.seed, load_init_from(program, mesh)), fresh, Improvement(), True


def end_of_run(cfg: Config, whole_run: Sizes, sizes: Sizes, start: Position, improvement: Improvement) -> int:
    """Return the last step of a run that goes on from `start`, as `sizes` do.

    Where all steps before had the batches that the config says, that is the last step of `whole_run`.
    """
    if improvement.is_over(cfg.evaluation):
        log.warning(
            "nothing is left to train after step %d: evaluation.patience=%s ended the run; raise it to go on",
            start.step, cfg.evaluation.patience,
        )  # fmt: skip
        return start.step
    last = sizes.total_steps
    assert last is not None
    if start.num_samples != whole_run.course.taken(start.step):
        log.warning(
            "steps so far were not all of %d sequences: sample %d comes after step %d; the last step is %d, not %d",
            sizes.batch.num_sequences, start.next_sample, start.step, last, whole_run.total_steps,
        )  # fmt: skip
    if last == start.step:
        limits = {f"training.{key}": getattr(cfg.training, key) for key in ("max_steps", "max_tokens", "num_epochs")}
        reached = ", ".join(f"{key}={value}" for key, value in limits.items() if value is not None)
        log.warning("nothing is left to train after step %d: %s; raise it to go on", last, reached)
    if warning := check_phases(cfg.scheduler, whole_run.schedule.spans(last)):
        log.warning("%s", warning)
    return last


def check_before_reading(cfg: Config, mesh: Mesh, arch: Architecture) -> None:
    """Raise `UserError` for what the devices and the length of the run can tell without the data."""
    check_compiler_options(cfg.training.compiler_options)
    if (num_steps := derive_sizes(cfg, mesh, arch, None).total_steps) is not None:
        check_window(cfg, num_steps)


def check_before_writing(cfg: Config, arch: Architecture, total_steps: int) -> None:
    """Raise `UserError` for what only the length of the data or a download can tell."""
    check_window(cfg, total_steps)
    peers.main_first(lambda: check_init_from(cfg, arch), "looking at model.init_from")


def due(every: int | None, step: int, last: int) -> bool:
    """Return True after every so many steps (None: never), and after the last."""
    return step == last or (every is not None and step % every == 0)


def evaluate_sets(feed: Feed, state: State, step: int, metrics: Metrics, watchdog: Watchdog) -> None:
    """Write and log a line of metrics.jsonl for each of evaluation.sets."""
    for name, each in feed.sets.items():
        with watchdog.phase("evaluation"):
            record: dict[str, Any] = {"step": step, "split": name, **each.evaluate(state["params"])}
        metrics.write(record, f"sets/{name}")
        log.info("step %d  %s: %s", step, name, each.describe(record))


def evaluate(held_out: Measure, state: State, step: int, metrics: Metrics, watchdog: Watchdog) -> dict[str, Any]:
    """The held-out line of metrics.jsonl after `step`, written and logged."""
    with watchdog.phase("evaluation"):
        record: dict[str, Any] = {"step": step, "split": "held_out", **held_out.evaluate(state["params"])}
    metrics.write(record, "held_out")
    log.info("step %d  held out: %s", step, held_out.describe(record))
    return record
