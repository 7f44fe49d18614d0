"""The trace of a few steps of a run, with its report: `training.profile_communication`."""

import logging
import re
import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from tunix.base.errors import UserError, first_line
from tunix.config import Config
from tunix.config.batch import stage_ends
from tunix.costs import trace_analysis
from tunix.costs.devices import find_kind
from tunix.costs.hlo import read_collectives, read_control_flow
from tunix.costs.step import derive_costs
from tunix.costs.trace_analysis import Timeline, compute_device_times, measure, plot_communication, predict, read_events
from tunix.processes import peers
from tunix.run.metrics import Metrics
from tunix.training.state import State
from tunix.training.train_spec import TrainSpec

log = logging.getLogger(__name__)


def check_window(cfg: Config, total_steps: int) -> None:
    """Raise `UserError` where the run is too short for the trace, or lacks a process that is to trace."""
    if not cfg.training.profile_communication:
        return
    last_step = cfg.profile.after_step + cfg.profile.steps
    if last_step > total_steps:
        raise UserError(
            f"profile.after_step={cfg.profile.after_step} and profile.steps={cfg.profile.steps} need {last_step} "
            f"steps, the run has {total_steps}; lower them or raise training.max_steps"
        )
    first, last = cfg.profile.after_step + 1, last_step
    if within := [end for end in stage_ends(cfg.training) if first <= end < last]:
        raise UserError(
            f"profile.after_step={cfg.profile.after_step} and profile.steps={cfg.profile.steps}: the batch changes "
            f"after step {within[0]} (training.batch_stages), among the steps that are traced; set "
            f"profile.after_step={within[-1]} or more"
        )
    absent = [rank for rank in cfg.profile.ranks or () if rank >= jax.process_count()]
    if absent or cfg.profile.ranks == ():
        raise UserError(
            f"profile.ranks={list(cfg.profile.ranks or ())}: the run has processes 0 to {jax.process_count() - 1}; "
            "null traces all"
        )


class CommunicationTrace:
    """Traces steps of a run. `edges` are the steps after which the trace begins and ends; call `at` after each of them.

    profile.after_step=5  profile.steps=3      step 5 | at(5): begin | step 6  step 7  step 8 | at(8): end, report
    """

    def __init__(self, train_spec: TrainSpec, mesh: jax.sharding.Mesh, folder: Path, metrics: Metrics):
        self.train_spec, self.mesh, self.folder, self.metrics = train_spec, mesh, folder, metrics
        self.cfg = cfg = train_spec.cfg
        first, ranks = cfg.profile.after_step, cfg.profile.ranks
        self.edges: tuple[int, ...] = (first, first + cfg.profile.steps) if cfg.training.profile_communication else ()
        self.traces = ranks is None or jax.process_index() in ranks  # this process
        self.is_active = False  # on any process: all of them take part in the report
        self.running = False  # on this process

    def __enter__(self) -> "CommunicationTrace":
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            log.warning("the run ended while steps were traced; there is no report of them")
            with suppress(OSError, jax.errors.JaxRuntimeError):  # of a full disk; it would hide how the run ends
                jax.profiler.stop_trace()
            shutil.rmtree(self._trace_folder, ignore_errors=True)

    def warn_if_past(self, step: int) -> None:
        """Warn that a resumed run is past the steps that were to be traced."""
        if self.edges and step >= self.edges[0] and not (self.folder / "communication.txt").exists():
            log.warning("no trace: resumed at step %d; profile.after_step must be at least %d", step, step + 1)

    def at(self, step: int, state: State, program: Any) -> None:
        """Begin or end the trace; `state` is the one after `step` and is waited for, `program` is the compiled step."""
        # Steps are given to the devices ahead of time. Without this, the trace would begin within an earlier step.
        jax.block_until_ready(state)
        if step == self.edges[0]:
            self.is_active = True
            if self.traces:
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # calls of Python functions would be most of the file
                jax.profiler.start_trace(self._trace_folder, profiler_options=options)
                self.running = True
        elif self.is_active:
            if self.running:
                self.running = False
                with self._going_on():
                    jax.profiler.stop_trace()
            self._report(step, program.as_text())

    @property
    def _trace_folder(self) -> Path:
        """The folder of this process: processes of one host would write files of the same name."""
        return self.folder / f"unfinished.{jax.process_index()}"

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Log why the trace or its report cannot be written, and go on: the run does not end for want of them."""
        try:
            yield
        except (OSError, jax.errors.JaxRuntimeError) as error:
            shutil.rmtree(self._trace_folder, ignore_errors=True)  # a part of it, which may fill the disk
            log.warning("the trace cannot be written to %s, and the run goes on: %s", self.folder, first_line(error))

    def _report(self, step: int, hlo: str) -> None:
        collectives = read_collectives(hlo)
        local_timelines: dict[str, Timeline] = {}
        if self.traces and self._trace_folder.is_dir():
            with self._going_on():
                # Where TensorBoard's profile plugin looks, named by process.
                session = self.folder / "plugins" / "profile" / f"after_step_{self.edges[0]}"
                session.mkdir(parents=True, exist_ok=True)
                kept = session / f"{socket.gethostname()}_{jax.process_index()}.xplane.pb"
                max(self._trace_folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime).replace(kept)
                shutil.rmtree(self._trace_folder)
                trace = ProfileData.from_file(str(kept))
                module = re.match(r"HloModule ([\w.\-]+)", hlo)
                assert module
                names = {each.name for each in collectives}
                local_timelines = compute_device_times(
                    read_events(trace, module[1], names), self.cfg.profile.steps, names, read_control_flow(hlo)
                )
        # A process has the timelines of its own devices alone; process 0 writes the report on all of them.
        timelines = {device: asdict(timeline) for device, timeline in local_timelines.items()}
        of_processes = peers.gather(timelines, "communication report")
        per_host = max(Counter(peers.hosts()).values()) * jax.local_device_count()
        if not peers.is_main():
            return
        of_all = {
            f"process {rank} device {device}": Timeline(**values)
            for rank, one in enumerate(of_processes)
            for device, values in one.items()
        }
        if not of_all:
            log.warning("the trace in %s shows no operation of the step: no communication report", self.folder)
            return
        sizes, kind = dict(self.mesh.shape), find_kind(self.mesh.devices.flat[0].device_kind)
        predicted = predict(derive_costs(self.train_spec).transfers, sizes, kind, per_host)
        communication = measure(self.edges[0] + 1, self.cfg.profile.steps, of_all, collectives, sizes, predicted)
        text, png = trace_analysis.format_text(communication), plot_communication(communication)
        with self._going_on():
            for name, content in (("txt", text), ("csv", trace_analysis.format_csv(communication))):
                (self.folder / f"communication.{name}").write_text(content)
            (self.folder / "communication.png").write_bytes(png)
        self.metrics.text("communication", text, step)
        self.metrics.image("communication_by_axis", png, step)
        log.info("communication of %s", text.partition("\n\nby collective")[0])
        log.info("trace and communication report: %s", self.folder)
