"""What a run of two processes does when something happens to one of them: `make faults`.

For each event: seconds until no process is left, the exit codes, and whether the run, resumed by two processes, has the
losses of one that nothing happened to, in every digit. Exit code 1 where the run ended with other codes, lost
something, or took longer than LIMIT_S and the time of an undisturbed run: on a busy machine everything takes longer.
Deadlines for a process that hangs follow from that time, too.

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

from benchmarks.arguments import check_names

PAGE, MARK = ROOT / "docs" / "reliability.md", "<!-- written by make faults -->\n"
HEARTBEAT_S, STEP_DEADLINE_S, PHASE_DEADLINE_S = 10, 10, 20  # of a quiet machine
PLACES = {"start": 0, "compile": 0, "step": 60, "save": 50, "evaluation": 50}  # and the step it is in
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
DEFAULT = ["model=tiny", "training.max_steps=80", "hydra.run.dir=run"]


@dataclass(frozen=True)
class Event:
    label: str
    rank: int
    place: str
    model: str = ""  # behind the place in the table

    def __str__(self) -> str:
        return f"{self.label} | {self.rank} | {self.place}{self.model}"


@dataclass(frozen=True)
class Row:
    """What an event has led to."""

    event: Event
    seconds: float  # until no process was left
    codes: list[int | None]  # of process 0 and 1
    lost: str
    undisturbed_s: float  # of the run that nothing happens to

    def __str__(self) -> str:
        return f"| {self.event} | {self.seconds:.1f} | {self.codes[0]}, {self.codes[1]} | {self.lost} |"

    @property
    def is_as_expected(self) -> bool:
        hit, other = CODES[self.event.label]
        expected = [hit, other] if self.event.rank == 0 else [other, hit]
        in_time = self.seconds < LIMIT_S[self.event.label] + self.undisturbed_s
        return in_time and self.codes == expected and self.lost == "nothing"


def make_root() -> tuple[Path, list[str]]:
    """Make a folder with a corpus, in which this program and those that it starts keep what they keep between runs.

    Returns:
        The folder, and the words of the command line that name the corpus.
    """
    root = Path(tempfile.mkdtemp())
    os.environ.update(
        TUNIX_CACHE_DIR=str(root / "cache"), JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(root / "jax"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )  # fmt: skip
    return root, ["data=text", f"data.paths=['{write_corpus(root / 'corpus')}']"]


def lines(run: Path) -> set[tuple[str | None, int, float]]:
    """Split, step and loss of every line of metrics, also of those that were written twice."""
    return {(split, line["step"], line["loss"]) for split in (None, "held_out") for line in metrics(run, split)}


def left(sessions: list[int]) -> list[int]:
    """Processes of these sessions that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # it has ended meanwhile
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in sessions and state != "Z":
                found.append(int(folder.name))
    return found


def list_events(kinds: list[str], places: list[str]) -> list[Event]:
    """Return all events of these kinds at these places.

    A process may prepare its data for hours, so a hang has no deadline there: it happens while the step is compiled.
    """
    other = {"hang": "start"}  # the place where a kind does not happen; the others do not happen in `compile`
    events = itertools.product(kinds, (0, 1), places)
    return [Event(*each) for each in events if each[2] != other.get(each[0], "compile")]


def hurt(event: Event, words: list[str], folder: Path, undisturbed_s: float) -> tuple[float, list[int | None]]:
    """Seconds from the event until no process is left, and the exit codes."""
    fault = f"{event.rank} {event.label} {event.place} {PLACES[event.place]}"
    more = []
    if event.label == "hang":  # no step and no phase takes as long as a whole run
        step_s, phase_s = max(STEP_DEADLINE_S, undisturbed_s / 4), max(PHASE_DEADLINE_S, undisturbed_s)
        more = [f"distributed.step_deadline_s={step_s:.0f}", f"distributed.phase_deadline_s={phase_s:.0f}"]
    with Processes(
        *words, *more, folder=folder, count=2, script="tests/support/faulty.py", fork=False, FAULT=fault
    ) as run:
        sessions, started = [process.pid for process in run.started], time.time()
        while left(sessions) and time.time() < started + 180 + 3 * undisturbed_s:
            time.sleep(0.02)
            for process in run.started:
                process.poll()
        ended = time.time()
        assert not left(sessions), "processes are left behind"
        assert (folder / "happened").exists(), "the run ended before the event"
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


def measure(events: list[Event], words: list[str], root: Path) -> list[Row]:
    """Return a row for each event; a run that nothing happens to comes first, to compare with."""

    def new(name: str) -> Path:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir()
        return root / name

    start_time = time.time()
    expected = resumed(words, new("whole"))
    undisturbed_s = time.time() - start_time
    rows = []
    for event in events:
        folder = new("part")
        try:
            seconds, codes = hurt(event, words, folder, undisturbed_s)
            lost = "nothing" if resumed(words, folder) == expected else "LOSSES DIFFER"
        except (AssertionError, OSError) as error:  # the other events are still worth to be measured
            seconds, codes, lost = 0.0, [None, None], str(error)
        rows.append(Row(event, seconds, codes, lost, undisturbed_s))
        print(rows[-1], flush=True)
    return rows


def main(chosen: list[str]) -> int:
    check_names(chosen, [*CODES, *PLACES])
    root, data = make_root()
    small = [*SMALL, *data]
    kinds, places = ([name for name in names if name in chosen] or list(names) for names in (CODES, PLACES))
    rows = measure(list_events(kinds, places), small, root)
    if not chosen:
        rows += measure([Event("SIGTERM", 1, "step", " of the default `tiny`")], DEFAULT, root)
    table = (
        "| event | process | in | seconds until all are gone | exit codes of 0, 1 | lost |\n|---|---|---|---|---|---|\n"
    )
    table += "".join(f"{row}\n" for row in rows)
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    if not chosen:
        took = f"an undisturbed run takes {rows[0].undisturbed_s:.0f} s"
        PAGE.write_text(f"{PAGE.read_text().partition(MARK)[0]}{MARK}\nMachine: {machine}; {took}.\n\n{table}")
    shutil.rmtree(root)
    wrong = [str(row) for row in rows if not row.is_as_expected]
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
