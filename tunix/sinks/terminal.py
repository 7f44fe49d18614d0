"""The console: a progress bar on a terminal, and a line every so many steps, which train.log gets too."""

import logging
import sys
from datetime import timedelta
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tunix.sinks.sink import Start

log = logging.getLogger(__name__)


class Terminal:
    """Training numbers for people, also those of the log file. Every run has this sink."""

    def __init__(self, start: Start):
        self.every_steps, self.last_step = start.config["logging"]["every_steps"], start.last_step
        self.progress: Progress | None = None
        if sys.stdout.isatty():
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
        line = f"{name} {_decimals(record[name])}  {record['tokens_per_s']:,.0f} tokens/s"
        if record["mfu"] is not None:
            line += f"  MFU {record['mfu']:.1%}"
        if record.get("dropped_share"):
            line += f"  dropped {record['dropped_share']:.2%}"
        if self.progress:
            self.progress.update(self.task, completed=step, total=self.last_step, description=line)
        if step % self.every_steps == 0 or step == self.last_step:
            left = timedelta(seconds=round((self.last_step - step) * record["step_time_s"]))
            log.info(
                f"step {step}/{self.last_step}  {line}  grad norm {_decimals(record['grad_norm'])}  "
                f"lr {record['learning_rate']:.2e}  step {record['step_time_s']:.3f} s  {left} left"
            )

    def text(self, name: str, text: str, step: int) -> None:
        """Texts are logged by those that write them."""

    def image(self, name: str, png: bytes, step: int) -> None:
        """A terminal shows no pictures."""

    def close(self, error: BaseException | None) -> None:
        if self.progress:
            self.progress.stop()


def _decimals(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
