"""Loop over the steps of a run, with what happens between two steps: evaluations, checkpoints, reasons to end."""

import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from tunix.base.errors import Finished, Stopped
from tunix.cli.compose import to_yaml
from tunix.costs.matmul_dtypes import find_run_peak_tflops
from tunix.data.batch import Batch
from tunix.data.batches import BatchSource, Numbers
from tunix.data.position import Position
from tunix.loop.evaluations import Evaluations
from tunix.loop.progress import Progress
from tunix.loop.setup import Setup
from tunix.processes.watchdog import Watchdog
from tunix.rl.feeds import Feed
from tunix.run.checkpoint import Checkpoints
from tunix.run.compiled_steps import CompiledSteps
from tunix.run.endings import REASONS, REASONS_OF_EVALUATIONS, Moment, find_ending
from tunix.run.metrics import Metrics, StepLog
from tunix.run.trace import CommunicationTrace
from tunix.sinks import Start

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loop:
    """The parts that work together in each step of a run."""

    setup: Setup
    folder: Path  # of the run
    begun: float  # when the program began, by time.monotonic()
    progress: Progress
    source: BatchSource
    compiled: CompiledSteps
    metrics: Metrics
    step_log: StepLog
    trace: CommunicationTrace
    evaluations: Evaluations
    checkpoints: Checkpoints
    watchdog: Watchdog

    def run(self) -> int:
        """Train to the last step. Return the step after which the run has ended: a reason may end it before.

        While a step runs on the devices, the numbers of the step before are written and the next batch travels there:

            this loop    start step 2 | write line 1 | batch 3 | start step 3 | write line 2 | batch 4
            devices      | step 2 ........................... | step 3 ............................

        Raises:
            Ending: a reason of `run.endings` to end the run, other than that it is finished.
        """
        progress, first, last = self.progress, self.progress.start.step + 1, self.progress.last
        if first > last:
            return last
        train_step = self.compiled.at(first)
        batch, numbers = self._next_batch()
        for step in range(first, last + 1):
            if step in self.compiled.changes:  # the batch has another shape from now on
                self.step_log.finish()
                train_step = self.compiled.change_to(step)
                self.step_log.restart_clock()
            self.watchdog.step(step)
            # The call returns as soon as the devices have the step in their queue. The old state is donated: its memory
            # becomes that of the new one, so nothing may keep a reference to it.
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                progress.state, scalars = train_step(progress.state, batch)
            self.step_log.note_start(step, scalars, numbers)
            self._trace(step, train_step)
            if step < last:
                # A source gives up when it is asked to stop: the run ends below, after this step.
                with suppress(Stopped):
                    batch, numbers = self._next_batch()
            if self._is_over(step):
                return step
        return last

    def save(self, position: Position, cost: float | None) -> None:
        """Start a checkpoint; `cost` is the held-out number of the model, by which the best checkpoint is chosen."""
        corpus, progress = self.setup.corpus, self.progress
        assert corpus is not None
        self.checkpoints.save(progress.state, position, progress.improvement, self.setup.cfg, corpus.tokenizer, cost)

    def _next_batch(self) -> tuple[Batch, Numbers]:
        # A source that draws answers with the new weights has to wait for the step that makes them. The line of that
        # step is written first, so the time of drawing counts for the step that uses the answers.
        if self.source.waits_for_state:
            self.step_log.finish()
        with self.watchdog.phase(self.source.phase):
            return self.source.next(self.progress.state)

    def _trace(self, step: int, train_step: Any) -> None:
        """Begin or end the trace of the profiler, if that is due after `step`."""
        if step in self.trace.edges:
            self.step_log.finish()
            with self.watchdog.phase("profiling"):
                self.trace.at(step, self.progress.state, train_step)
            self.step_log.restart_clock()

    def _is_over(self, step: int) -> bool:
        """Ask the reasons to end, evaluate and save, as far as each is due after `step`; True if the run is finished.

        An evaluation comes before the save, because the best checkpoint is chosen by its held-out loss.
        """
        cfg, progress = self.setup.cfg, self.progress
        save_now = is_due(cfg.checkpoint.save_every_steps, step, progress.last) or step in cfg.checkpoint.save_at_steps
        evaluate_now = is_due(cfg.evaluation.every_steps, step, progress.last)
        if save_now or evaluate_now:
            self.step_log.finish()  # their time is not that of a step
        elapsed_s = time.monotonic() - self.begun
        now = Moment(cfg, self.folder, step, self.step_log.last, progress.improvement, elapsed_s, self.source)
        ending = find_ending(now, REASONS)
        if ending and not ending.saves:  # the state is not worth a checkpoint: its loss is not finite, for example
            raise ending
        if evaluate_now and not ending:
            self.evaluations.run(step)
            ending = find_ending(replace(now, improvement=progress.improvement), REASONS_OF_EVALUATIONS)
        if save_now or ending:
            self.step_log.finish()
            with self.watchdog.phase("saving"):
                self.save(self.source.after(step), self.evaluations.cost(step))
                if ending:  # the message of the ending says that everything is saved, so wait until that is true
                    self.checkpoints.finish()
        if isinstance(ending, Finished):
            log.info("%s", ending)
            return True
        if ending:
            raise ending
        if save_now or evaluate_now:
            self.step_log.restart_clock()
        return False


@contextmanager
def open_loop(
    setup: Setup,
    progress: Progress,
    feed: Feed,
    checkpoints: Checkpoints,
    folder: Path,
    watchdog: Watchdog,
    begun: float,
) -> Iterator[Loop]:
    """Open the sinks, the trace and the source of batches of a run, and give the loop over its steps.

    Nothing is compiled yet. `begun` is when the program began, by time.monotonic().
    """
    cfg, mesh, start, last, schedule = setup.cfg, setup.mesh, progress.start, progress.last, progress.sizes.schedule
    traced = setup.programs[schedule.at(cfg.profile.after_step + 1).shape].cfg
    with (
        Metrics(cfg.logging.sinks, Start(folder, cfg.model_dump(mode="json"), start.step, last)) as metrics,
        CommunicationTrace(traced, mesh, folder / "profile", metrics) as trace,
        closing(feed.batches(start, last, metrics, folder)) as source,
    ):
        trace.warn_if_past(start.step)
        metrics.text("config", to_yaml(cfg), start.step)
        metrics.text("report", setup.report, start.step)
        seq_len, device_kind = progress.sizes.batch.seq_len, mesh.devices.flat[0].device_kind
        peak = find_run_peak_tflops(cfg, setup.program.arch, seq_len, device_kind)
        every = cfg.logging.layer_norms_every
        yield Loop(
            setup,
            folder,
            begun,
            progress,
            source,
            CompiledSteps(setup.programs, schedule, setup.sizes.schedule.spans(last), setup.compiler),
            metrics,
            StepLog(metrics, progress.sizes, peak, source.samples, every, watchdog.pace),
            trace,
            Evaluations(feed, progress, cfg.evaluation, metrics, watchdog),
            checkpoints,
            watchdog,
        )


def is_due(every: int | None, step: int, last: int) -> bool:
    """Return True after every so many steps (None: never), and after the last."""
    return step == last or (every is not None and step % every == 0)
