"""What a run of two processes does when something happens to one of them: `make faults`.

For each event: seconds until no process is left, the exit codes, and whether the run, resumed by two processes, has the
losses of one that nothing happened to, in every digit. Exit code 1 where the run took longer than LIMIT_S, ended with
other codes, or lost something.

    python -m benchmarks.faults                          every event; writes the table of docs/reliability.md
    python -m benchmarks.faults evaluation exception     events at these places, of these kinds; writes nothing
"""

import itertools
import os
import platform
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conftest import write_corpus
from support.harness import PAIR, ROOT, metrics
from support.processes import Processes

PAGE, MARK = ROOT / "docs" / "reliability.md", "<!-- written by make faults -->\n"
HEARTBEAT_S, STEP_DEADLINE_S, PHASE_DEADLINE_S = 10, 10, 20
PLACES = {"start": 0, "step": 60, "save": 50, "evaluation": 50}  # and the step it is in
CODES = {  # of the process that it happens to, and of the other
    "SIGKILL": (137, 76), "SIGSTOP": (76, 76), "exception": (1, 76), "hang": (76, 76),
    "SIGTERM": (75, 75), "SIGUSR1": (75, 75),
}  # fmt: skip
LIMIT_S = {
    "SIGKILL": 15, "exception": 15, "SIGTERM": 10, "SIGUSR1": 10,
    "SIGSTOP": HEARTBEAT_S + 30, "hang": PHASE_DEADLINE_S + 30,
}  # fmt: skip
SMALL = [  # long enough that a request to stop, which JAX looks for every second, comes before the end
    *PAIR, "training.max_steps=400", "evaluation.every_steps=50", "checkpoint.save_every_steps=50",
    f"distributed.heartbeat_timeout_s={HEARTBEAT_S}",
]  # fmt: skip
DEADLINES = [f"distributed.step_deadline_s={STEP_DEADLINE_S}", f"distributed.phase_deadline_s={PHASE_DEADLINE_S}"]
DEFAULT = ["model=tiny", "training.max_steps=80", "hydra.run.dir=run"]


@dataclass(frozen=True)
class Event:
    what: str
    rank: int
    place: str

    def __str__(self) -> str:
        return f"{self.what} | {self.rank} | {self.place}"


def lines(run: Path) -> set[tuple[str | None, int, float]]:
    """Split, step and loss of every line of metrics, also of those that were written twice."""
    return {(split, line["step"], line["loss"]) for split in (None, "held_out") for line in metrics(run, split)}


def left(sessions: list[int]) -> list[int]:
    """Processes of these sessions that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in sessions and state != "Z":
                found.append(int(folder.name))
    return found


def hurt(event: Event, words: list[str], folder: Path) -> tuple[float, list[int | None]]:
    """Seconds from the event until no process is left, and the exit codes."""
    fault = f"{event.rank} {event.what} {event.place} {PLACES[event.place]}"
    more = DEADLINES if event.what == "hang" else []
    with Processes(
        *words, *more, folder=folder, count=2, script="tests/support/faulty.py", fork=False, FAULT=fault
    ) as run:
        sessions, started = [process.pid for process in run.started], time.time()
        while left(sessions) and time.time() < started + 180:
            time.sleep(0.02)
            for process in run.started:
                process.poll()
        ended = time.time()
        assert not left(sessions), f"{event}: processes are left behind"
        return ended - float((folder / "happened").read_text()), [process.poll() for process in run.started]


def resumed(words: list[str], folder: Path) -> set[tuple[str | None, int, float]]:
    """The run goes on to its end: all that it wrote before and after."""
    again = (
        ["resume=run", "distributed.step_deadline_s=60", "distributed.phase_deadline_s=600"]
        if (folder / "run" / "config.yaml").exists()
        else words
    )
    with Processes(*again, folder=folder, count=2, fork=False) as run:
        ends = run.ends()
    assert [end.code for end in ends] == [0, 0], ends
    return lines(folder / "run")


def measure(events: list[Event], words: list[str], home: Path) -> list[tuple[Event, float, list[int | None], str]]:
    """A row for each event; and a run that nothing happens to, to compare with."""

    def new(name: str) -> Path:
        shutil.rmtree(home / name, ignore_errors=True)
        (home / name).mkdir()
        return home / name

    expected = resumed(words, new("whole"))
    rows = []
    for event in events:
        folder = new("part")
        seconds, codes = hurt(event, words, folder)
        lost = "nothing" if resumed(words, folder) == expected else "LOSSES DIFFER"
        rows.append((event, seconds, codes, lost))
        print(f"| {event} | {seconds:.1f} | {codes[0]}, {codes[1]} | {lost} |", flush=True)
    return rows


def as_expected(event: Event, seconds: float, codes: list[int | None], lost: str) -> bool:
    hit, other = CODES[event.what]
    expected = [hit, other] if event.rank == 0 else [other, hit]
    return seconds < LIMIT_S[event.what] and codes == expected and lost == "nothing"


def main(chosen: list[str]) -> int:
    if unknown := set(chosen) - {*CODES, *PLACES}:
        sys.exit(f"no such event or place: {', '.join(sorted(unknown))}; there are {', '.join([*CODES, *PLACES])}")
    home = Path(tempfile.mkdtemp())
    os.environ.update(
        TUNIX_CACHE_DIR=str(home / "cache"), JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(home / "jax"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )  # fmt: skip
    corpus = write_corpus(home / "corpus")
    small = [*SMALL, "data=text", f"data.paths=['{corpus}']"]
    kinds, places = ([name for name in names if name in chosen] or list(names) for names in (CODES, PLACES))
    rows = measure([Event(*each) for each in itertools.product(kinds, (0, 1), places)], small, home)
    on_tiny = [] if chosen else measure([Event("SIGTERM", 1, "step")], DEFAULT, home)
    table = (
        "| event | process | in | seconds until all are gone | exit codes of 0, 1 | lost |\n|---|---|---|---|---|---|\n"
    )
    for event, seconds, codes, lost in rows + on_tiny:
        place = "step, default `tiny`" if (event, seconds, codes, lost) in on_tiny else event.place
        table += f"| {event.what} | {event.rank} | {place} | {seconds:.1f} | {codes[0]}, {codes[1]} | {lost} |\n"
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    if not chosen:
        PAGE.write_text(f"{PAGE.read_text().partition(MARK)[0]}{MARK}\nMachine: {machine}.\n\n{table}")
    shutil.rmtree(home)
    wrong = [str(row) for row in rows + on_tiny if not as_expected(*row)]
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
