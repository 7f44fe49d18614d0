"""Numbers of a run: the line of each step, and the sinks that it goes to."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from tunix.base.errors import Ending, FolderFull, UserError
from tunix.base.files import find_way_out
from tunix.processes import exits, peers, watchdog
from tunix.processes.watchdog import Pace
from tunix.run.goodput import Goodput
from tunix.run.sinks import Background, give_table
from tunix.run.table import Sink, Start, open_sink
from tunix.training.optimizer import WATCHED
from tunix.training.step import NORMS
from tunix.training.train_spec import Sizes

log = logging.getLogger(__name__)

COUNTERS = ("skipped", "spikes", "spikes_total")  # whole numbers among the scalars of a step
ALWAYS = ("terminal",)  # sinks that every run has, named or not


class Metrics:
    """The sinks of a run on process 0; other processes have none.

    Where the run's folder cannot be written, all processes are asked to save and stop, and nothing more is written: the
    steps since the last checkpoint are worth more than their lines.
    """

    def __init__(self, names: Iterable[str], start: Start):
        chosen = dict.fromkeys((*names, *ALWAYS)) if peers.is_main() else ()
        self.sinks: list[Sink] = []
        self.close_timeout_s = start.config["logging"]["close_timeout_s"]
        self.failure: FolderFull | None = None
        try:
            for name in chosen:
                self.sinks.append(open_sink(name, start))
        except Exception as error:  # others may have told their servers that the run begins
            self.__exit__(type(error), error, None)
            raise

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with ExitStack() as closing:  # closes all, also when one fails
                for sink in self.sinks:
                    closing.callback(self.writing()(sink.close), error)  # what is still in a buffer is written
        finally:
            self._wait(self.close_timeout_s)
        if self.failure and error is None:  # no step came that could end the run
            raise self.failure

    def abandon(self, ending: Ending) -> None:
        """Let the sinks that work in the background say how the run ends, while the main thread hangs."""
        for sink in self.sinks:
            if isinstance(sink, Background):
                sink.close(ending)
        self._wait(self.close_timeout_s)

    def _wait(self, seconds: float) -> None:
        """Wait for the sinks that work in the background: they end side by side, and share the time."""
        deadline = time.monotonic() + seconds
        lost = [sink.wait(deadline) for sink in self.sinks if isinstance(sink, Background)]
        if any(lost) and exits.ends_with_leave.is_set():  # a sink's library may wait for its server as Python ends
            exits.still_works.set()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Note where the block, which writes into the run's folder, fails, and ask all processes to stop. Raises
        `UserError` where the folder is gone."""
        try:
            yield
        except FileNotFoundError as error:
            name = os.fsdecode(error.filename or "the run's folder")
            raise UserError(f"{name} was deleted or moved while the run wrote to it") from None
        except OSError as error:
            if self.failure is None:
                reason = f"the run's folder cannot be written: {error.strerror or error}"
                self.failure = FolderFull(f"{reason}; {find_way_out(error, 'free space')}")
                watchdog.request_stop(str(self.failure), fails=True)

    def write(self, record: dict[str, Any], group: str = "train") -> None:
        """Give a record of numbers, with its `step`, to every sink."""
        self._each(lambda sink: sink.write(record, group))

    def text(self, name: str, text: str, step: int) -> None:
        """Give a text of several lines to every sink."""
        self._each(lambda sink: sink.text(name, text, step))

    def table(self, name: str, rows: list[dict[str, Any]], text: str, step: int) -> None:
        """Give rows to every sink that has tables, and `text`, which shows them, to the others."""
        self._each(lambda sink: give_table(sink, name, rows, text, step))

    def image(self, name: str, png: bytes, step: int) -> None:
        """Give an image to every sink."""
        self._each(lambda sink: sink.image(name, png, step))

    def _each(self, give: Callable[[Sink], None]) -> None:
        """Give something to every sink; to none any more after one could not write."""
        with self.writing():
            for sink in self.sinks if self.failure is None else ():
                give(sink)


@dataclass(frozen=True)
class StartedStep:
    """A step that was given to the devices, whose numbers are not there yet."""

    step: int
    scalars: dict[str, Any]  # what the step returned: scalars, vectors, of which each number is written, and `NORMS`
    numbers: dict[str, float]  # what the source of its batch gave with it (`BatchSource.next`)


@dataclass
class StepLog:
    """Writes the line of each step while the next one runs: no step waits for its own numbers.

        the loop      start step 1 | start step 2, write line 1 | start step 3, write line 2
        devices       . step 1 ......... | step 2 ............. | step 3 .............

    The time of a step is that from one line to the next. So the lines have the pace of the devices, although the loop
    runs ahead of them.
    """

    metrics: Metrics
    sizes: Sizes
    peak_tflops: float | None
    samples: Callable[[int], range]  # of a step: those of a step that changed nothing are named in the log
    norms_every: int | None  # norms of layers are written after so many steps
    pace: Pace  # learns the time of each step
    goodput: Goodput  # counts the time of each step
    pending: StartedStep | None = None
    last: dict[str, Any] = field(default_factory=dict)  # the newest line
    clock: float = field(default_factory=time.perf_counter)

    def restart_clock(self) -> None:
        """Count the next step's time from now: something else has run since the last one."""
        self.clock = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Write the step that was started last, and leave the time of this block out of the times of steps."""
        self.finish()
        begin = time.perf_counter()
        yield
        self.leave_out(begin)

    def leave_out(self, begin: float) -> None:
        """Leave the time since `begin`, by time.perf_counter(), out of that of the next step. What came before counts:
        the answers of the next step may be drawn already."""
        self.clock += time.perf_counter() - begin

    def record_start(self, step: int, scalars: dict[str, Any], numbers: dict[str, float]) -> None:
        """Note that `step` runs on the devices; write the step before. The arguments are those of `StartedStep`."""
        # Asked for now, the copies to the host begin by themselves when the step has ended. `_write` finds them there.
        for value in jax.tree.leaves(scalars):
            value.copy_to_host_async()
        self._write(StartedStep(step, scalars, numbers))

    def finish(self) -> None:
        """Wait for the last step started and write it."""
        self._write(None)

    def _write(self, following: StartedStep | None) -> None:
        """Write the step that was started last; `following` is the one after it."""
        started, self.pending = self.pending, following
        if started is None:
            return
        scalars = dict(started.scalars)
        norms = scalars.pop(NORMS, {})
        if self.norms_every and started.step % self.norms_every == 0:
            scalars |= norms
        waits_since = time.perf_counter()
        values: dict[str, float] = {}
        for name, value in scalars.items():  # waits until the step has ended
            if value.ndim == 0:
                values[name] = float(value)
            else:  # number 3 of a vector `expert_load` is `expert_load/3`
                values |= {f"{name}/{index}": number for index, number in enumerate(value.tolist())}
        now = time.perf_counter()
        # From line to line, and not from the call of a step to its end: the call comes while the step before runs.
        step_time_s, self.clock = now - self.clock, now
        self.pace.note(step_time_s, now - waits_since, started.numbers["data_wait_s"])
        self.last = make_record(started, values, step_time_s, self.sizes, self.peak_tflops) | self.pace.slowest
        if remark := remark_on_skipped(self.last, self.samples(started.step)):
            log.warning("%s", remark)
        self.goodput.record_step(self.last)
        self.metrics.write(self.last)


def make_record(
    started: StartedStep, values: dict[str, float], step_time_s: float, sizes: Sizes, peak_tflops: float | None
) -> dict[str, Any]:
    """Return the line of metrics.jsonl for a step; a number that is not finite is None.

    Raises:
        UserError: a sum of the loss has the name of a number of the batch, like the reward of a rollout.
    """
    if taken := sorted(values.keys() & started.numbers.keys()):
        raise UserError(
            f"task.loss: its sums have {taken[0]}, which the line of step {started.step} has already; rename it"
        )
    batch = sizes.schedule.at(started.step).shape
    # Answers that share rows may take fewer rows than the batch has (rl/rollouts.py).
    speed = started.numbers.get("rows_used", batch.num_sequences) * batch.seq_len / step_time_s
    tflops = speed * sizes.flops_by_length[batch.seq_len] / sizes.num_devices / 1e12
    return {
        "step": started.step,
        **{name: value if math.isfinite(value) else None for name, value in values.items()},
        **{name: int(values[name]) for name in COUNTERS if name in values},
        **started.numbers,
        "tokens_per_s": speed,
        "tokens_per_s_per_device": speed / sizes.num_devices,
        "step_time_s": step_time_s,
        "tflops_per_device": tflops,
        "mfu": tflops / peak_tflops if peak_tflops else None,
        "peak_memory_gib": read_peak_memory_gib(),
    }


def remark_on_skipped(record: dict[str, Any], samples: range) -> str:
    """Return why the step of this line changed no weight, and its samples; empty where it did."""
    if record["skipped"]:
        reason = "loss or gradients are not finite"
    elif record["loss"] is None:  # 0 / 0; before spikes, whose number in a row stays in such a step
        reason = "its batch has no token that is learnt"
    elif record.get("spikes"):
        far = [f"{name} {record[name]:.4g} is {record[f'{name}_deviations']:.3g}" for name in WATCHED]
        reason = f"a spike: {', '.join(far)} standard deviations above the steps before"
    else:
        return ""
    return f"step {record['step']} changed no weight: {reason}; its samples are {samples.start} to {samples.stop - 1}"


def read_peak_memory_gib() -> float | None:
    """Return the most memory that one device of this process has used; None where the backend does not count (CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [peak for peak in peaks if peak is not None]
    return max(known) / 2**30 if known else None
