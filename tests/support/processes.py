"""Several real processes of one run on this machine."""

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.devices import xla_flags
from support.forks import start
from support.harness import ROOT, metrics


@dataclass
class End:
    code: int
    stdout: str
    stderr: str


def wait_until(
    happened: Callable[[], bool], event: str, timeout: float = 120,
    still_possible: Callable[[], bool] = lambda: True, said: Callable[[], str] = lambda: "",
) -> None:  # fmt: skip
    """Return when `happened()`; fail with what was `said` at the timeout, or when it is no more `still_possible`."""
    deadline = time.monotonic() + timeout
    while not happened():
        waits = time.monotonic() < deadline and still_possible()
        if not waits and not happened():
            raise AssertionError(f"{event} never came: {said()}")
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class Processes:
    """`count` processes with `devices` fake devices each; their output goes to files in `folder`."""

    def __init__(
        self, *words: str, folder: Path, count: int, devices: int = 1, script: str = "run_training.py",
        own: list[str] | None = None, roots: list[Path] | None = None, module: str | None = None, fork: bool = True,
        **env: str,
    ):  # fmt: skip
        """`own` has one word more for each process, `roots` the code of each; `module` runs in place of the script.

        Without `fork` each process is started by exec, as users start it (see support/forks.py).
        """
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        self.started = []
        for rank in range(count):
            identity = {"coordinator_address": f"localhost:{port}", "num_processes": count, "process_id": rank}
            who = [f"distributed.{key}={value}" for key, value in identity.items()]
            mine = [own[rank]] if own and own[rank] else []
            root = roots[rank] if roots else ROOT
            program = ["-m", module] if module else [str(root / script)]
            command, environment = [*program, *words, *who, *mine], {**os.environ, "XLA_FLAGS": xla_flags(devices)}
            self.started.append(
                start(
                    command, folder, {**environment, "PYTHONPATH": str(root), **env}, folder / f"stdout.{rank}",
                    folder / f"stderr.{rank}", fork=fork and root == ROOT, supervises=True,
                )
            )  # fmt: skip

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has ended, or it is a fork that has no group of its own yet
                process.kill()
            process.wait()

    def ends(self, timeout: float = 300) -> list[End]:
        """Wait for all to end."""
        deadline = time.monotonic() + timeout
        for process in self.started:
            process.wait(max(0.1, deadline - time.monotonic()))
        return [
            End(
                process.returncode,
                (self.folder / f"stdout.{rank}").read_text(),
                (self.folder / f"stderr.{rank}").read_text(),
            )
            for rank, process in enumerate(self.started)
        ]

    def child(self, rank: int) -> int:
        """The process that trains; its parent watches over it."""
        return int(
            Path(f"/proc/{self.started[rank].pid}/task/{self.started[rank].pid}/children").read_text().split()[0]
        )

    def wait_until(self, happened: Callable[[], bool], event: str, timeout: float = 120) -> None:
        """Return when `happened()`; fail with what process 0 said when all processes have ended, or at the timeout."""
        wait_until(
            happened, event, timeout,
            still_possible=lambda: None in [process.poll() for process in self.started],
            said=lambda: (self.folder / "stderr.0").read_text(),
        )  # fmt: skip

    def wait_for_text(self, text: str) -> None:
        """Until process 0 has printed it."""
        self.wait_until(lambda: text in (self.folder / "stdout.0").read_text(), text)

    def wait_for_file(self, path: Path) -> None:
        self.wait_until(path.exists, str(path))

    def wait_for_step(self, run: Path, step: int) -> None:
        """Until the line of this step is in metrics.jsonl."""

        def written() -> bool:
            try:
                return any(line["step"] >= step for line in metrics(run))
            except (OSError, ValueError):  # no file yet, or a line being written
                return False

        self.wait_until(written, f"step {step}")
