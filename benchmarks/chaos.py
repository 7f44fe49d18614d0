"""A run that is hurt at random moments and goes on by itself: `make chaos ARGS="seconds=3600 seed=1"`.

`kinds=SIGKILL,bit_flip` draws from these events alone. A damaged checkpoint needs one that stops a run before its end.
It needs Linux, root, `ip` and `tc` (a network of its own, which is cut), `strace` (a disk that becomes slow), and
`mount` (a folder that becomes read-only).

    start or resume, on 1, 2 or 4 processes and a random mesh -> hurt it at a random moment -> wait until it is gone

This repeats until the run has reached its last step. Then every line of metrics.jsonl is accounted for: each step has
one or more lines, each loss is that of a run that nothing happened to (1e-5; where a step ran twice from one state on
one mesh, every digit), and each line counts the same tokens. Then a new run begins, until the time is over. The seed
decides what happens and after which step; how far each process is at that moment depends on the machine.

Exit code 1, with what was wrong, where a line is missing or other, where a process ends with a code that is not
documented, or where some process is not gone after LIMIT_S; the folders of the runs are kept then. At the end stands
a table of what happened, with the seconds lost: from the event until no process is left, and from the next start until
the first step that had not been taken before.
"""

import json
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from support.harness import PAIR
from support.processes import Processes

from benchmarks.arguments import check_names, read_values
from benchmarks.faults import left, make_root
from tunix.processes.supervisor import CHILD

STEPS, EVERY, BATCH = 120, 10, 4
LIMIT_S = 150  # more than the deadline of a phase
CODES = {0, 1, 2, 75, 76, 137, -9}  # -9: a run of one process has no parent that says 137
BEFORE_IT_BEGAN = {-10, -15, 138, 143}  # a stop signal while Python still imports: the default action
MESHES = {1: ["[[1],[fsdp]]"], 2: ["[[2],[fsdp]]", "[[2],[dp]]"], 4: ["[[4],[fsdp]]", "[[2,2],[dp,fsdp]]"]}
WORDS = [
    *PAIR, f"training.max_steps={STEPS}", f"training.global_batch_size={BATCH}", "evaluation.every_steps=40",
    f"evaluation.num_sequences={BATCH}", f"checkpoint.save_every_steps={EVERY}", "checkpoint.max_to_keep=4",
    "optimizer.learning_rate=1e-3", "distributed.heartbeat_timeout_s=10", "distributed.step_deadline_s=30",
    "distributed.phase_deadline_s=120", "distributed.init_timeout_s=60",
]  # fmt: skip


def send(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


def fill_disk(pid: int) -> None:
    """Let every write of the process fail from now on, as on a full disk."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))


def pause(pid: int) -> None:
    """Stop the process for less than its heartbeat, as a host does that is busy or is moved."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(pid, signal.SIGCONT)


def slow_disk(pid: int) -> None:
    """Let each call of the process that opens, makes, renames or closes a file take 0.1 s longer, for 20 s."""
    calls = "openat,mkdir,rename,renameat,renameat2,unlink,fsync,fdatasync"
    delay = ["-e", f"trace={calls}", "-e", f"inject={calls}:delay_enter=100000"]
    strace = ["strace", "-f", "-qq", "-p", str(pid), "-o", "/dev/null", *delay]
    subprocess.run(["timeout", "20", *strace], stderr=subprocess.DEVNULL, check=False)


def cut_network(seconds: float) -> Callable[[int], None]:
    """Return what lets nothing travel between the processes of the run for these seconds."""

    def cut(_: int) -> None:
        # Only the network of this program (see `main`): a queue that drops each packet. Without the queue, it is whole.
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "blackhole"], check=True)
        time.sleep(seconds)
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)

    return cut


def find_run(pid: int) -> Path:
    """Return the folder of the run that a process trains; `FileNotFoundError` where it is not made yet."""
    return (Path(f"/proc/{pid}/cwd") / "run").resolve(strict=True)


def move_folder(pid: int) -> None:
    """Let the run's folder vanish for a while, as a disk does that is mounted anew."""
    run = find_run(pid)
    away = run.rename(run.with_name("away"))
    time.sleep(4)
    away.rename(run)  # fails where it was made anew, and then its lines are missing


def write_protect(pid: int) -> None:
    """Let the run's folder be read-only for a while, as after an error of its disk; files that are open are written."""
    run = find_run(pid)
    side = run.with_name("side")  # a mount is made read-only where no file is open yet, and then put over the folder
    side.mkdir(exist_ok=True)
    binds = (["--bind", run, side], ["-o", "remount,ro,bind", side], ["--bind", side, run])
    for bind in binds:
        subprocess.run(["mount", *bind], check=True)
    subprocess.run(["umount", side], check=True)
    time.sleep(8)
    subprocess.run(["umount", "--lazy", str(run)], check=True)


def limit_memory(pid: int) -> None:
    """Leave the process 16 MiB of address space more than it has."""
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size + (16 << 20), resource.RLIM_INFINITY))


def come_as_stranger(_: int) -> None:
    """Send nonsense to every port of the run, and keep a connection to each of them for a while."""
    held = []
    for port in list_ports():
        for words in (b"", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b'{"process": 1}\n', os.urandom(2000)):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 2) as connection:
                connection.sendall(words)
        with suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", port), 2))
    time.sleep(3)
    for connection in held:
        connection.close()


def list_ports() -> list[int]:
    """Return the ports of this network on which somebody listens: those of the run."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"})


EVENTS = {  # what happens to the process that trains, by its id
    "SIGKILL": send(signal.SIGKILL), "SIGSTOP": send(signal.SIGSTOP), "disk full": fill_disk,
    "SIGTERM": send(signal.SIGTERM), "SIGUSR1": send(signal.SIGUSR1),
    "pause": pause, "slow disk": slow_disk,
    "cut of 5 s": cut_network(5), "cut of 20 s": cut_network(20),  # the heartbeat is 10 s
    "folder away": move_folder, "read-only": write_protect, "memory limit": limit_memory, "stranger": come_as_stranger,
    "slow start": pause,  # of a process that has just begun
}  # fmt: skip
TORN = "torn line"  # at the end of metrics.jsonl, while no process runs
DAMAGES = ("bit flip", "truncation", "lost file")  # of the newest checkpoint, while no process runs
FAULTS = {"exception": "exception", "clock jump": "clock"}  # by tests/support/faulty.py
# The run may go on.
HARMLESS = (
    "pause", "clock jump", "slow disk", "cut of 5 s", "folder away", "read-only", "stranger", "slow start",
    "memory limit", TORN,
)  # fmt: skip
# The others notice it, or there is nothing to notice.
OF_SEVERAL = ("SIGSTOP", "cut of 5 s", "cut of 20 s", "slow start", "stranger", *FAULTS)
OUT_OF_MEMORY = {134, 139, -6, -11}  # a library that gets no memory may abort
KINDS = (*EVENTS, *FAULTS, *DAMAGES, TORN)


@dataclass
class Session:
    """One start of the run: on what, what happened, and which lines of metrics it wrote."""

    mesh: str
    label: str
    codes: list[int | None] = field(default_factory=list)
    gone_s: float = 0.0  # from the event until no process was left
    new_s: float = 0.0  # from the start to the first step that had not been taken before, or to the end
    lines: list[dict] = field(default_factory=list)  # of training
    refused_damage: bool = False  # the run has named a damaged file, and has taken the checkpoint before


def read_lines(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest_step(run: Path) -> int:
    with suppress(ValueError):  # a line is being written
        return max((line["step"] for line in read_lines(run)), default=0)
    return 0


@contextmanager
def timing(session: Session, run: Path) -> Iterator[None]:
    """Measure `session.new_s` of the run that the block starts and waits for."""
    start_time, reached, ended = time.time(), newest_step(run), threading.Event()

    def watch() -> None:
        while newest_step(run) <= reached and not ended.wait(0.1):
            pass
        session.new_s = time.time() - start_time

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def list_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints, the newest last."""
    return sorted(int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit())


def damage(run: Path, label: str, rng: random.Random) -> None:
    """Damage a file of the newest checkpoint."""
    files = sorted(path for path in (run / "checkpoints" / str(list_steps(run)[-1])).rglob("*") if path.is_file())
    file = rng.choice([path for path in files if path.stat().st_size])
    content = bytearray(file.read_bytes())
    if label == "lost file":
        file.unlink()
    elif label == "truncation":
        file.write_bytes(content[: rng.randrange(len(content))])
    else:
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)


def tear_line(run: Path) -> None:
    """Leave half of a line at the end of metrics.jsonl, as a crash in a write does."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(read_lines(run)[-1])[:40])


def hurt(processes: Processes, label: str, run: Path, rng: random.Random) -> float:
    """Send a row of `EVENTS` to one process after a random step, or in its first seconds; return the Unix time."""
    if label == "slow start":
        happened = time.time()
        with suppress(OSError):
            EVENTS[label](rng.choice(processes.started).pid)
        return happened
    start_time = len(read_lines(run))
    steps, delay_s = rng.randrange(1, STEPS // 3), rng.uniform(0, 10 if rng.random() < 0.3 else 0.5)
    if delay_s < 0.5:
        with suppress(AssertionError):  # the run ended before
            processes.wait_until(lambda: len(read_lines(run)) >= start_time + steps, "a step")
    time.sleep(delay_s)
    rank = rng.randrange(len(processes.started))
    happened = time.time()
    with suppress(AssertionError, OSError):  # the run ended before
        pid = find_trainer(processes, rank)
        happened = time.time()
        EVENTS[label](pid)
    return happened


def find_trainer(processes: Processes, rank: int) -> int:
    """Return the id of the process that trains, once it has begun: with several, each is the child of another."""
    if len(processes.started) == 1:
        return processes.started[0].pid
    parent = processes.started[rank].pid
    children = Path(f"/proc/{parent}/task/{parent}/children")

    def has_begun() -> bool:
        # Before its exec, the child is a copy of its parent, which waits for it: a signal would hit both.
        names = [Path(f"/proc/{name}/environ").read_bytes() for name in children.read_text().split()]
        return any(CHILD.encode() in name for name in names)

    processes.wait_until(has_begun, "the process that trains")
    return processes.child(rank)


def start(folder: Path, data: list[str], rng: random.Random, kinds: Sequence[str] = KINDS) -> Session:
    """Start or resume the run, hurt it, and wait until it is gone."""
    run, count = folder / "run", rng.choice([1, 2, 2, 4])
    several, two = count > 1, len(list_steps(run)) > 1  # one checkpoint must be left
    possible = [
        kind
        for kind in kinds
        if (several or kind not in OF_SEVERAL) and (two or kind not in DAMAGES) and (read_lines(run) or kind != TORN)
    ]
    label = rng.choice(possible)
    session = Session(rng.choice(MESHES[count]), label)
    if label in DAMAGES:
        damage(run, label, rng)
    before = len(read_lines(run))
    if label == TORN:
        tear_line(run)
    has_begun = (run / "config.yaml").exists()
    words = ["resume=run"] if has_begun else [*WORDS, *data]
    fault = {"script": "run_training.py"}
    if label in FAULTS:
        step = newest_step(run) + rng.randrange(1, STEPS // 2)
        fault = {"script": "tests/support/faulty.py", "FAULT": f"{rng.randrange(count)} {FAULTS[label]} step {step}"}
    (folder / "happened").unlink(missing_ok=True)
    mesh = [f"model.mesh_shape={session.mesh}"]
    with (
        timing(session, run),
        Processes(*words, *mesh, folder=folder, count=count, devices=1, fork=False, **fault) as processes,
    ):
        happened = hurt(processes, label, run, rng) if label in EVENTS else None
        sessions = [process.pid for process in processes.started]
        ends_soon = happened and label not in HARMLESS
        while left(sessions) and (not ends_soon or time.time() < happened + LIMIT_S):
            time.sleep(0.05)
            for process in processes.started:
                process.poll()
        ended = time.time()
        assert not left(sessions), f"{session}: not gone after {LIMIT_S} s"
        session.codes = [process.wait() for process in processes.started]
    if label in FAULTS and (folder / "happened").exists():
        happened = float((folder / "happened").read_text())
    if any(session.codes):
        session.gone_s = ended - (happened or ended)
    elif label not in (*HARMLESS, *DAMAGES) or (label in FAULTS and happened is None):
        session.label = "nothing"  # the run ended before
    session.lines = [line for line in read_lines(run)[before:] if "split" not in line]
    outputs = "".join(path.read_text() for path in sorted(folder.glob("std*.[0-9]")))
    session.refused_damage = "IS DAMAGED, taking the one before" in outputs
    known = CODES if session.lines else CODES | BEFORE_IT_BEGAN
    known = known | OUT_OF_MEMORY if label == "memory limit" else known
    assert set(session.codes) <= known, f"{session}\n{outputs[-4000:]}"
    return session


def account(sessions: list[Session], expected: dict[int, dict]) -> list[str]:
    """Return what is wrong with the lines of a run that has reached its end."""
    wrong = []
    lines = [line for session in sessions for line in session.lines]
    if missing := sorted(expected.keys() - {line["step"] for line in lines}):
        wrong.append(f"steps without a line: {missing}")
    for line in lines:
        whole = expected[line["step"]]
        if abs(line["loss"] / whole["loss"] - 1) > 1e-5 or line["tokens"] != whole["tokens"]:
            wrong.append(f"step {line['step']}: loss {line['loss']!r}, undisturbed {whole['loss']!r}")
    for first, second in pairwise(sessions):
        # The second session starts from a state that the first one made: what ran twice has the same digits.
        steps = {line["step"]: line["loss"] for line in first.lines}
        if first.mesh != second.mesh or not second.lines or second.lines[0]["step"] - 1 not in steps:
            continue
        wrong += [
            f"step {line['step']}: {line['loss']!r} and {steps[line['step']]!r} on {first.mesh}"
            for line in second.lines
            if steps.get(line["step"], line["loss"]) != line["loss"]
        ]
    return wrong


def play(
    folder: Path, data: list[str], rng: random.Random, until: float, kinds: Sequence[str], sessions: list[Session]
) -> list[str]:
    """Run until the last step, hurt again and again until then or until the time is over; return what is wrong.

    `sessions` gets each start.
    """
    while not any(line["step"] == STEPS for session in sessions for line in session.lines):
        if time.time() > until:  # nothing happens from now on
            again = ["resume=run"] if (folder / "run" / "config.yaml").exists() else [*WORDS, *data]
            with Processes(*again, "model.mesh_shape=[[2],[fsdp]]", folder=folder, count=2, fork=False) as last:
                before = len(read_lines(folder / "run"))
                codes = [end.code for end in last.ends()]
            lines = [line for line in read_lines(folder / "run")[before:] if "split" not in line]
            sessions.append(Session("[[2],[fsdp]]", "nothing", codes, lines=lines))
            assert codes == [0, 0], f"{sessions[-1].mesh}, undisturbed: codes {codes}"
            continue
        sessions.append(start(folder, data, rng, kinds))
        each = sessions[-1]
        steps = f"{each.lines[0]['step']} to {each.lines[-1]['step']}" if each.lines else "no step"
        damage = ", damage named" if each.refused_damage else ""
        ends = f"codes {each.codes} gone after {each.gone_s:.1f} s{damage}"
        print(f"{each.mesh:20} {each.label:12} {steps:12} {ends}", flush=True)
    whole = [line for line in read_lines(folder / "whole") if "split" not in line]
    return account(sessions, {line["step"]: line for line in whole})


def table(rounds: list[list[Session]]) -> str:
    """Return a row for each kind of event: how often, and the seconds lost."""
    gone: dict[str, list[float]] = {}
    lost: dict[str, list[float]] = {}
    for sessions in rounds:
        for before, each in zip([None, *sessions], [*sessions, None], strict=True):
            # A session begins anew because of what ended the one before, or with a checkpoint that was damaged.
            again_s = each.new_s if each else 0.0
            is_damaged = each is not None and each.label in DAMAGES
            if before and any(before.codes):
                gone.setdefault(before.label, []).append(before.gone_s)
                lost.setdefault(before.label, []).append(before.gone_s + (0.0 if is_damaged else again_s))
            if each and is_damaged:
                lost.setdefault(each.label, []).append(again_s)
            if each and each.label in HARMLESS and not any(each.codes):
                lost.setdefault(each.label, []).append(0.0)
    lines = [
        "| event | times | seconds until all are gone: median, most | seconds lost: median, most |",
        "|---|---|---|---|",
    ]
    for label in KINDS:
        if label in lost:
            numbers = (describe(gone.get(label, [])), describe(lost[label]))
            lines.append(f"| {label} | {len(lost[label])} | {numbers[0]} | {numbers[1]} |")
    return "\n".join(lines)


def describe(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if any(seconds) else ""


def main(words: list[str]) -> int:
    given = read_values(words, seconds="300", seed="0", kinds=",".join(KINDS).replace(" ", "_"))
    kinds = given["kinds"].replace("_", " ").split(",")
    check_names(kinds, KINDS)
    if os.environ.setdefault("CHAOS_NETWORK", "machine") == "machine":  # take a network of our own, to cut it
        os.environ["CHAOS_NETWORK"] = "own"
        os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, "-m", "benchmarks.chaos", *words])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    seed, until = int(given["seed"]), time.time() + float(given["seconds"])
    root, data = make_root()
    with Processes(*WORDS, *data, "hydra.run.dir=whole", folder=root, count=2, fork=False) as run:
        assert [end.code for end in run.ends()] == [0, 0], run.ends()
    rng, wrong = random.Random(seed), []
    rounds_of_sessions: list[list[Session]] = []
    while not wrong and (not rounds_of_sessions or time.time() < until):
        rounds_of_sessions.append([])
        folder = root / f"round{len(rounds_of_sessions)}"
        folder.mkdir()
        shutil.copytree(root / "whole", folder / "whole")
        try:
            wrong = play(folder, data, rng, until, kinds, rounds_of_sessions[-1])
        except AssertionError as error:
            wrong = [str(error)]
    sessions = [each for of_round in rounds_of_sessions for each in of_round]
    print(table(rounds_of_sessions))
    num_lines = sum(len(each.lines) for each in sessions)
    print(f"seed {seed}: {len(rounds_of_sessions)} runs, {len(sessions)} starts, {num_lines} lines of steps")
    if wrong:
        print("\n".join(wrong), f"the folders of the runs: {root}", sep="\n", file=sys.stderr)
        return 1
    print("nothing is lost")
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
