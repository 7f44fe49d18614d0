"""Sinks on this machine: metrics.jsonl, TensorBoard, the console; and one that works in a thread of its own."""

import json
import logging
import math
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tunix.base.errors import name_error
from tunix.base.files import open_lines
from tunix.base.progress import is_watched

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """A run, as it begins or goes on."""

    folder: Path
    config: dict[str, Any]  # every key: {"model": {"num_layers": 3, ...}, ...}
    step: int  # steps that are done already
    last_step: int


class Sink(Protocol):
    """A class that is made with a `Start` when the run begins. What it does not take, it leaves out."""

    def __init__(self, start: "Start") -> None:
        """Begin with the run."""

    def write(self, record: dict[str, Any], group: str) -> None:
        """Take a record of numbers by name, with its `step`; `group` is `train`, or the split of an evaluation."""

    def text(self, name: str, text: str, step: int) -> None:
        """Take a text of several lines."""

    def image(self, name: str, png: bytes, step: int) -> None:
        """Take an image."""

    def close(self, error: BaseException | None) -> None:
        """End with the run: `error` is the one that ends it, None at its proper end."""


def give_table(sink: Sink, name: str, rows: list[dict[str, Any]], text: str, step: int) -> None:
    """Give rows to a sink that has a method `table`, and `text`, which shows them, to another."""
    if hasattr(sink, "table"):
        sink.table(name, rows, text, step)
    else:
        sink.text(name, text, step)


MAX_QUEUED = 100_000  # calls; what comes while so many wait is dropped and counted
DELAYS_S = (1, 2, 4, 8, 16, 32, 64)  # before a call is tried again; then, after 127 s in all, it is dropped and counted


class Background:
    """The thread of one sink, and the calls that wait for it. A slow sink, or one that fails, delays and stops no step.

        the loop  ->  queue of calls  ->  thread: make the sink, then call by call; a call that fails is tried again

    The first failure is logged when it comes, and their number at the end.
    """

    def __init__(self, name: str, make: Callable[[Start], Sink], start: Start):
        self.name, self.make, self.start = name, make, start
        # A queue without a limit of its own: `put` never waits, so the loop never waits for a server.
        self.calls: queue.SimpleQueue[tuple[str, tuple]] = queue.SimpleQueue()
        self.failures = self.dropped = 0
        self.deadline: float | None = None  # by time.monotonic(), once the run ends
        self.ends = threading.Event()  # set when the run ends; wakes the thread from a delay
        self.thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self.thread.start()

    def _add(self, method: str, *arguments: Any) -> None:
        if self.calls.qsize() < MAX_QUEUED:
            self.calls.put((method, arguments))
        else:
            self.dropped += 1

    write = partialmethod(_add, "write")
    text = partialmethod(_add, "text")
    image = partialmethod(_add, "image")
    # Whether the sink has a method `table` is not known yet: the thread makes the sink. `_call` asks it.
    table = partialmethod(_add, "table")

    def close(self, error: BaseException | None) -> None:
        """Ask the sink to end; the caller then waits with `wait`."""
        self.calls.put(("close", (error,)))

    def wait(self, deadline: float) -> int:
        """Wait until the sink has ended, at most until `deadline` (by time.monotonic()); return how much is lost."""
        self.deadline = deadline
        self.ends.set()
        self.thread.join(max(0.0, deadline - time.monotonic()))
        # The call that is at work when the time is over counts as lost too: the thread ends with the process.
        lost = self.dropped + self.calls.qsize() + self.thread.is_alive()
        if self.failures or lost:
            log.warning("logging.sinks=%s: %d failures; %d calls are lost", self.name, self.failures, lost)
        return lost

    def _work(self) -> None:
        """Make the sink, and hand it the calls until `close` is done or the deadline has passed."""
        # Making the sink logs in at a server. Without it every call is lost, so this is tried until the run ends. The
        # calls wait in the queue meanwhile.
        sink = None
        while sink is None:
            sink = self._try(lambda: self.make(self.start))
            if sink is None and self._is_late():
                return
        while True:
            method, arguments = self.calls.get()
            if self._try(partial(_call, sink, method, arguments)) is None:
                self.dropped += 1
            if method == "close" or self._is_late():
                return

    def _try(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work()`, which may fail a few times; None where it fails every time."""
        for delay_s in (*DELAYS_S, None):
            try:
                return work()
            except Exception as error:
                self.failures += 1
                if self.failures == 1:
                    cause = name_error(error)[:300]
                    log.warning("logging.sinks=%s fails: %s; it is tried again, and the run goes on", self.name, cause)
            if delay_s is None or self._is_late():
                break
            # When the run ends, delays are at most a second: the process waits for this thread.
            if self.ends.wait(delay_s):
                time.sleep(min(delay_s, 1))
        return None

    def _is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline


def _call(sink: Sink, method: str, arguments: tuple) -> bool:
    """Call a method of the sink, and return True: `_try` returns None for a call that failed."""
    if method == "table":
        give_table(sink, *arguments)
    else:
        getattr(sink, method)(*arguments)
    return True


class Jsonl(Sink):
    """The file metrics.jsonl in the run's folder: a JSON object a line for each record; a resumed run appends to it."""

    def __init__(self, start: Start):
        # Line by line: a run that is killed has lost no line, and `tail -f` shows each step.
        self.file = open_lines(start.folder / "metrics.jsonl")

    def write(self, record: dict[str, Any], group: str) -> None:
        # JSON has no NaN.
        values = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in record.items()}
        self.file.write(json.dumps(values) + "\n")

    def close(self, error: BaseException | None) -> None:
        self.file.close()


class TensorBoard(Sink):
    """Events in the run's folder (`tensorboard --logdir outputs/`): scalars GROUP/NAME, texts as they are, images."""

    def __init__(self, start: Start):
        # Here, because TensorBoard takes a while to import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        # TensorBoard's own writer has a thread, whose traceback a full disk shows before our message.
        seconds, rest = divmod(time.time_ns(), 10**9)
        # Readers take files in the order of their names. The clock may be behind that of the host where the run began.
        found = (re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in start.folder.iterdir())
        seconds = max([seconds, *(int(each[1]) + 1 for each in found if each)])
        name = f"events.out.tfevents.{seconds:010}.{socket.gethostname()}.{os.getpid()}.{rest:09}"
        self.make_event, self.records = Event, RecordWriter((start.folder / name).open("xb"))
        self._write(file_version="brain.Event:2")
        # Readers leave out what an earlier file has from this step on: a resumed run trains it again.
        self._write(step=start.step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, record: dict[str, Any], group: str) -> None:
        numbers = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
        self._add(record["step"], *({"tag": f"{group}/{k}", "simple_value": v} for k, v in numbers.items()))

    def text(self, name: str, text: str, step: int) -> None:
        from tensorboard.plugins.text import metadata
        from tensorboard.util import tensor_util

        # TensorBoard reads texts as Markdown, in which four spaces before each line mean: show it as it is. A line ends
        # there at \r too, behind which an image of a model's text would be fetched from any address.
        tensor = tensor_util.make_tensor_proto("    " + re.sub("\r\n?|\n", "\n    ", text))
        self._add(step, {"tag": name, "metadata": metadata.create_summary_metadata(name, ""), "tensor": tensor})

    def image(self, name: str, png: bytes, step: int) -> None:
        # A PNG begins with 8 bytes of its own and 8 of the head of its first chunk, IHDR; then width and height.
        width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))
        self._add(step, {"tag": name, "image": {"width": width, "height": height, "encoded_image_string": png}})

    def close(self, error: BaseException | None) -> None:
        self.records.close()

    def _add(self, step: int, *values: dict[str, Any]) -> None:
        self._write(step=step, summary={"value": values})

    def _write(self, **event: Any) -> None:
        self.records.write(self.make_event(wall_time=time.time(), **event).SerializeToString())
        self.records.flush()


class Terminal(Sink):
    """A progress bar on a terminal, and a line every so many steps, which train.log gets too. Every run has it.

    The first step of a start has a line: ten slow steps take so long that a run seemed to hang.
    """

    def __init__(self, start: Start):
        self.every_steps = start.config["logging"]["every_steps"]
        self.first_step, self.last_step = start.step + 1, start.last_step
        self.progress: Progress | None = None
        if is_watched():
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self.progress = Progress(*columns, transient=True)
            self.task = self.progress.add_task("compiling", total=None)
            self.progress.start()

    def write(self, record: dict[str, Any], group: str) -> None:
        if group != "train":
            return
        step = record["step"]
        # In reinforcement learning the loss says little: it is near 0, or moves with the batch. The reward says how the
        # run goes.
        name = "reward" if "reward" in record else "loss"
        line = f"{name} {_decimals(record[name])}  "
        if "teacher_kl" in record:
            line += f"KL to the teacher {_decimals(record['teacher_kl'])}  "
        line += f"{record['tokens_per_s']:,.0f} tokens/s"
        if record["mfu"] is not None:
            line += f"  MFU {record['mfu']:.1%}"
        if record.get("dropped_share"):
            line += f"  dropped {record['dropped_share']:.2%}"
        if self.progress:
            self.progress.update(self.task, completed=step, total=self.last_step, description=line)
        if step % self.every_steps == 0 or step in (self.first_step, self.last_step):
            left = timedelta(seconds=round((self.last_step - step) * record["step_time_s"]))
            log.info(
                f"step {step}/{self.last_step}  {line}  grad norm {_decimals(record['grad_norm'])}  "
                f"lr {record['learning_rate']:.2e}  step {record['step_time_s']:.3f} s  {left} left"
            )

    def close(self, error: BaseException | None) -> None:
        if self.progress:
            self.progress.stop()


def _decimals(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
