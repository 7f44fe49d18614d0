"""What a run of two processes does when one of them is hurt: `make faults` prints the table of docs/reliability.md.

For each event: seconds until no process is left, the exit codes, and whether the run, resumed by two processes, has the
losses of one that nothing happened to, in every digit.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from conftest import write_corpus
from harness import RUN, metrics
from processes import Processes

STEPS = 400
EVENTS = {  # what happens, to which process, and what it is in
    "SIGKILL, worker, in a step": ("kill", 1, []),
    "SIGKILL, coordinator, in a step": ("kill", 0, []),
    "SIGKILL, worker, in a save": ("kill", 1, ["checkpoint.save_every_steps=1"]),
    "SIGKILL, worker, in an evaluation": ("kill", 1, ["evaluation.every_steps=1"]),
    "SIGKILL, worker, at start": ("kill at start", 1, []),
    "exception, worker": ("raise", 1, []),
    "exception, coordinator": ("raise", 0, []),
    "SIGSTOP, worker": ("stop", 1, []),
    "hang while reading, worker": ("hang", 1, ["distributed.step_deadline_s=10"]),
    "SIGTERM, worker": ("term", 1, []),
    "SIGTERM, coordinator": ("term", 0, []),
    "SIGUSR1, worker": ("usr1", 1, []),
}
SIGNALS = {
    "kill": signal.SIGKILL, "kill at start": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
}  # fmt: skip


def words(corpus: Path) -> list[str]:
    return [
        *RUN, "data=text", f"data.paths=['{corpus}']", "model.mesh_shape=[[2],[fsdp]]", "hydra.run.dir=run",
        f"training.max_steps={STEPS}", "training.global_batch_size=8", "evaluation.every_steps=null",
        "checkpoint.save_every_steps=10",
    ]  # fmt: skip


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run)} if (run / "metrics.jsonl").exists() else {}


def hurt(folder: Path, corpus: Path, kind: str, rank: int, more: list[str]) -> tuple[float, list[int | None]]:
    """Seconds from the event until no process is left, and the exit codes."""
    fault = {"FAULT": f"{rank} {kind} 320"} if kind in ("raise", "hang") else {}
    script = "tests/faulty.py" if fault else "run_training.py"
    with Processes(*words(corpus), *more, folder=folder, count=2, script=script, **fault) as run:
        if kind == "kill at start":
            time.sleep(6)
        else:
            run.wait_for_step(folder / "run", 40 if fault else 25)
        if kind in SIGNALS:
            target = run.child(rank) if kind == "stop" else run.started[rank].pid
            os.kill(target, SIGNALS[kind])
        begun = time.monotonic()
        while any(process.poll() is None for process in run.started) and time.monotonic() - begun < 120:
            if kind == "stop" and run.started[1 - rank].poll() is not None:
                break  # a stopped process ends when its launcher kills it
            time.sleep(0.05)
        waited = time.monotonic() - begun
        if kind == "stop":
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.started[rank].pid, signal.SIGKILL)
        codes = [process.poll() for process in run.started]
    return waited, codes


def resumed(folder: Path, corpus: Path, expected: dict[int, float]) -> bool:
    """Whether the run goes on to the end, and all its losses are those of the whole one."""
    again = ["resume=run"] if (folder / "run" / "config.yaml").exists() else words(corpus)
    with Processes(*again, folder=folder, count=2) as run:
        assert [end.code for end in run.ends()] == [0, 0]
    return losses(folder / "run") == expected


def main() -> None:
    home = Path(tempfile.mkdtemp())
    os.environ.update(TUNIX_CACHE_DIR=str(home / "cache"), JAX_PLATFORMS="cpu")
    corpus = write_corpus(home / "corpus")
    (home / "whole").mkdir()
    with Processes(*words(corpus), folder=home / "whole", count=2) as run:
        assert [end.code for end in run.ends()] == [0, 0]
    expected = losses(home / "whole" / "run")
    print("| event | seconds until all are gone | exit codes (coordinator, worker) | lost |\n|---|---|---|---|")
    for name, (kind, rank, more) in EVENTS.items():
        folder = home / "part"
        folder.mkdir()
        seconds, codes = hurt(folder, corpus, kind, rank, more)
        lost = "nothing" if resumed(folder, corpus, expected) else "LOSSES DIFFER"
        print(f"| {name} | {seconds:.1f} | {codes[0]}, {codes[1]} | {lost} |", flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
