"""Numbers of a run: metrics.jsonl, TensorBoard, and a line on the terminal. Written by process 0."""

import json
import logging
import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from tunix.config import Logging
from tunix.processes import peers
from tunix.training.sizes import Sizes

log = logging.getLogger(__name__)


class Metrics:
    """The files that numbers go to; on other processes than 0, nowhere."""

    def __init__(self, folder: Path, cfg: Logging):
        self.every_steps = cfg.every_steps
        self.file = self.events = self.progress = None
        if not peers.is_main():
            return
        self.file = (folder / "metrics.jsonl").open("a", buffering=1)
        if cfg.tensorboard:
            self.events = EventFileWriter(str(folder))
        if sys.stdout.isatty():
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self.progress = Progress(*columns, transient=True)
            self.task = self.progress.add_task("compiling", total=None)
            self.progress.start()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        for out in (self.events, self.file):
            if out:
                out.close()
        if self.progress:
            self.progress.stop()

    def write(self, record: dict[str, Any], group: str = "train") -> None:
        """One object into metrics.jsonl, its numbers into TensorBoard as `group/name`."""
        if self.file is None:
            return
        self.file.write(json.dumps(record) + "\n")
        if self.events:
            scalars = [(k, v) for k, v in record.items() if k != "step" and isinstance(v, int | float)]
            values = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in scalars]
            self.events.add_event(Event(step=record["step"], wall_time=time.time(), summary=Summary(value=values)))

    def text(self, name: str, text: str, step: int) -> None:
        """A text for TensorBoard, shown as it is."""
        if self.events:
            meta = text_plugin.create_summary_metadata(name, "")
            tensor = tensor_util.make_tensor_proto("    " + text.replace("\n", "\n    "))
            value = Summary.Value(tag=name, metadata=meta, tensor=tensor)
            self.events.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))

    def image(self, name: str, png: bytes, step: int) -> None:
        """A picture for TensorBoard."""
        if self.events:
            width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))  # its first chunk
            image = Summary.Image(width=width, height=height, encoded_image_string=png)
            value = Summary.Value(tag=name, image=image)
            self.events.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))

    def show(self, record: dict[str, Any], last_step: int) -> None:
        """The progress bar on a terminal; a line every so many steps in the log."""
        step, speed = record["step"], record["tokens_per_s"]
        line = f"loss {_shown(record['loss'])}  {speed:,.0f} tokens/s"
        if record["mfu"] is not None:
            line += f"  MFU {record['mfu']:.1%}"
        if self.progress:
            self.progress.update(self.task, completed=step, total=last_step, description=line)
        if step % self.every_steps == 0 or step == last_step:
            left = timedelta(seconds=round((last_step - step) * record["step_time_s"]))
            log.info(
                f"step {step}/{last_step}  {line}  grad norm {_shown(record['grad_norm'])}  "
                f"lr {record['learning_rate']:.2e}  step {record['step_time_s']:.3f} s  {left} left"
            )


class StepLog:
    """Turns each step's device scalars into a line of metrics, one step late: no step waits for its own numbers."""

    def __init__(self, metrics: Metrics, sizes: Sizes, last_step: int, peak_tflops: float | None):
        self.metrics, self.sizes, self.last_step, self.peak_tflops = metrics, sizes, last_step, peak_tflops
        self.pending: tuple[int, int, dict[str, jax.Array], float, dict[str, int]] | None = None
        self.last: dict[str, Any] = {}
        self.clock = time.perf_counter()

    def restart_clock(self) -> None:
        """Count the next step's time from now: something else has run since the last one."""
        self.clock = time.perf_counter()

    def started(
        self,
        step: int,
        tokens: int,
        scalars: dict[str, jax.Array],
        data_wait_s: float,
        source_tokens: dict[str, int],
    ) -> None:
        """`step` has been given to the devices, which brings the run to `tokens`; write the step before.

        `source_tokens` are the parts of them that each source of a mixture gave.
        """
        for value in scalars.values():
            value.copy_to_host_async()
        before, self.pending = self.pending, (step, tokens, scalars, data_wait_s, source_tokens)
        self._write(before)

    def finish(self) -> None:
        """Wait for the last step started and write it."""
        before, self.pending = self.pending, None
        self._write(before)

    def _write(self, pending: tuple[int, int, dict[str, jax.Array], float, dict[str, int]] | None) -> None:
        if pending is None:
            return
        step, tokens, scalars, data_wait_s, source_tokens = pending
        values = {name: float(value) for name, value in scalars.items()}  # waits for the step
        now = time.perf_counter()
        step_time_s, self.clock = now - self.clock, now
        speed = self.sizes.tokens_per_step / step_time_s
        tflops = speed * self.sizes.flops_per_token / self.sizes.num_devices / 1e12
        self.last = {
            "step": step,
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
            "skipped": int(values["skipped"]),
            "tokens": tokens,
            **{f"tokens_{name}": count for name, count in source_tokens.items()},
            "tokens_per_s": speed,
            "tokens_per_s_per_device": speed / self.sizes.num_devices,
            "step_time_s": step_time_s,
            "data_wait_s": data_wait_s,
            "tflops_per_device": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "peak_memory_gib": peak_memory_gib(),
        }
        self.metrics.write(self.last)
        self.metrics.show(self.last, self.last_step)


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def peak_memory_gib() -> float | None:
    """Most memory that one of this process's devices has held; None where the backend does not count (CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [peak for peak in peaks if peak is not None]
    return max(known) / 2**30 if known else None
