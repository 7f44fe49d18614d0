"""A run that is hurt at random moments and goes on by itself: `make chaos ARGS="seconds=3600 seed=1"`.

    start or resume, on 1, 2 or 4 processes and a random mesh -> hurt it at a random moment -> wait until it is gone

This repeats until the run has reached its last step. Then every line of metrics.jsonl is accounted for: each step has
one or more lines, each loss is that of a run that nothing happened to (1e-5; where a step ran twice from one state on
one mesh, every digit), and each line counts the same tokens. Then a new run begins, until the time is over. The seed
decides what happens and after which step; how far each process is at that moment depends on the machine.

Exit code 1, with what was wrong, where a line is missing or other, where a process ends with a code that is not
documented, or where some process is not gone after LIMIT_S.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from conftest import write_corpus
from support.harness import PAIR
from support.processes import Processes

from benchmarks.faults import left

STEPS, EVERY, BATCH = 120, 10, 4
LIMIT_S = 120
CODES = {0, 1, 2, 75, 76, 137, -9}  # -9: a run of one process has no parent that says 137
MESHES = {1: ["[[1],[fsdp]]"], 2: ["[[2],[fsdp]]", "[[2],[dp]]"], 4: ["[[4],[fsdp]]", "[[2,2],[dp,fsdp]]"]}
WORDS = [
    *PAIR, f"training.max_steps={STEPS}", f"training.global_batch_size={BATCH}", "evaluation.every_steps=40",
    f"evaluation.num_sequences={BATCH}", f"checkpoint.save_every_steps={EVERY}", "checkpoint.max_to_keep=4",
    "optimizer.learning_rate=1e-3", "distributed.heartbeat_timeout_s=10", "distributed.step_deadline_s=30",
    "distributed.phase_deadline_s=120",
]  # fmt: skip


def send(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


def fill_disk(pid: int) -> None:
    """Let every write of the process fail from now on, as on a full disk."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))


SIGNALS = {  # to the process that trains, by its id
    "SIGKILL": send(signal.SIGKILL), "SIGSTOP": send(signal.SIGSTOP), "disk full": fill_disk,
    "SIGTERM": send(signal.SIGTERM), "SIGUSR1": send(signal.SIGUSR1),
}  # fmt: skip
DAMAGES = ("bit flip", "truncation", "lost file")  # of the newest checkpoint, while no process runs
KINDS = (*SIGNALS, "exception", *DAMAGES)


@dataclass
class Session:
    """One start of the run: on what, what happened, and which lines of metrics it wrote."""

    mesh: str
    what: str
    codes: list[int | None] = field(default_factory=list)
    gone_s: float = 0.0
    lines: list[dict] = field(default_factory=list)  # of training


def read_lines(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def damage(run: Path, what: str, rng: random.Random) -> bool:
    """Damage a file of the newest checkpoint; return whether there are two, so that one is left."""
    steps = sorted((int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit()), reverse=True)
    if len(steps) < 2:
        return False
    files = sorted(path for path in (run / "checkpoints" / str(steps[0])).rglob("*") if path.is_file())
    file = rng.choice([path for path in files if path.stat().st_size])
    content = bytearray(file.read_bytes())
    if what == "lost file":
        file.unlink()
    elif what == "truncation":
        file.write_bytes(content[: rng.randrange(len(content))])
    else:
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
    return True


def hurt(processes: Processes, what: str, run: Path, rng: random.Random) -> float:
    """Send a row of `SIGNALS` to one process after a random step, or in its first seconds; return the Unix time."""
    begun = len(read_lines(run))
    steps, delay_s = rng.randrange(1, STEPS // 3), rng.uniform(0, 10 if rng.random() < 0.3 else 0.5)
    if delay_s < 0.5:
        with suppress(AssertionError):  # the run ended before
            processes.wait_until(lambda: len(read_lines(run)) >= begun + steps, "a step")
    time.sleep(delay_s)
    rank = rng.randrange(len(processes.started))
    with suppress(AssertionError, OSError):  # the run ended before
        SIGNALS[what](find_trainer(processes, rank))
    return time.time()


def find_trainer(processes: Processes, rank: int) -> int:
    """Return the id of the process that trains, once it has begun: with several, each is the child of another."""
    if len(processes.started) == 1:
        return processes.started[0].pid
    parent = processes.started[rank].pid
    children = Path(f"/proc/{parent}/task/{parent}/children")
    processes.wait_until(lambda: bool(children.read_text()), "the process that trains")
    return processes.child(rank)


def start(folder: Path, data: list[str], rng: random.Random) -> Session:
    """Start or resume the run, hurt it, and wait until it is gone."""
    run, count = folder / "run", rng.choice([1, 2, 2, 4])
    what = rng.choice([kind for kind in KINDS if count > 1 or kind not in ("SIGSTOP", "exception")])
    session = Session(rng.choice(MESHES[count]), what)
    if what in DAMAGES and not damage(run, what, rng):
        session.what = "nothing"
    before = len(read_lines(run))
    has_begun = (run / "config.yaml").exists()
    words = ["resume=run"] if has_begun else [*WORDS, *data]
    fault = {"script": "run_training.py"}
    if what == "exception":
        step = before + rng.randrange(1, STEPS // 2)
        fault = {"script": "tests/support/faulty.py", "FAULT": f"{rng.randrange(count)} exception step {step}"}
    mesh = [f"model.mesh_shape={session.mesh}"]
    with Processes(*words, *mesh, folder=folder, count=count, devices=1, fork=False, **fault) as processes:
        happened = hurt(processes, what, run, rng) if what in SIGNALS else time.time()
        sessions = [process.pid for process in processes.started]
        while left(sessions) and (what not in SIGNALS or time.time() < happened + LIMIT_S):
            time.sleep(0.05)
            for process in processes.started:
                process.poll()
        session.gone_s = time.time() - happened
        assert not left(sessions), f"{session}: not gone after {LIMIT_S} s"
        session.codes = [process.wait() for process in processes.started]
    session.lines = [line for line in read_lines(run)[before:] if "split" not in line]
    outputs = "".join(path.read_text() for path in sorted(folder.glob("std*.[0-9]")))
    assert set(session.codes) <= CODES, f"{session}\n{outputs[-4000:]}"
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


def play(folder: Path, data: list[str], rng: random.Random, until: float) -> tuple[list[Session], list[str]]:
    """Run until the last step, hurt again and again until then or until the time is over; return what is wrong too."""
    sessions: list[Session] = []
    while not any(line["step"] == STEPS for session in sessions for line in session.lines):
        if time.time() > until:  # nothing happens from now on
            with Processes("resume=run", "model.mesh_shape=[[2],[fsdp]]", folder=folder, count=2, fork=False) as last:
                before = len(read_lines(folder / "run"))
                codes = [end.code for end in last.ends()]
            lines = [line for line in read_lines(folder / "run")[before:] if "split" not in line]
            sessions.append(Session("[[2],[fsdp]]", "nothing", codes, 0.0, lines))
            continue
        sessions.append(start(folder, data, rng))
        each = sessions[-1]
        steps = f"{each.lines[0]['step']} to {each.lines[-1]['step']}" if each.lines else "no step"
        print(f"{each.mesh:20} {each.what:12} {steps:12} codes {each.codes} gone after {each.gone_s:.1f} s", flush=True)
    whole = [line for line in read_lines(folder / "whole") if "split" not in line]
    return sessions, account(sessions, {line["step"]: line for line in whole})


def main(words: list[str]) -> int:
    given = dict(word.split("=") for word in words)
    seed, until = int(given.get("seed", 0)), time.time() + float(given.get("seconds", 300))
    home = Path(tempfile.mkdtemp())
    os.environ.update(
        TUNIX_CACHE_DIR=str(home / "cache"), JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(home / "jax"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )  # fmt: skip
    data = ["data=text", f"data.paths=['{write_corpus(home / 'corpus')}']"]
    with Processes(*WORDS, *data, "hydra.run.dir=whole", folder=home, count=2, fork=False) as run:
        assert [end.code for end in run.ends()] == [0, 0], run.ends()
    rng, rounds, wrong, sessions = random.Random(seed), 0, [], []
    while not wrong and (not rounds or time.time() < until):
        rounds += 1
        folder = home / f"round{rounds}"
        folder.mkdir()
        shutil.copytree(home / "whole", folder / "whole")
        more, wrong = play(folder, data, rng, until)
        sessions += more
    for what in sorted({each.what for each in sessions}):
        of_kind = [each for each in sessions if each.what == what]
        longest = max(each.gone_s for each in of_kind)
        print(f"{what}: {len(of_kind)} times, {longest:.1f} s at most until the run was gone")
    num_lines = sum(len(each.lines) for each in sessions)
    print(f"seed {seed}: {rounds} runs, {len(sessions)} starts, {num_lines} lines of steps")
    print("\n".join(wrong) or "nothing is lost", file=sys.stderr if wrong else sys.stdout)
    shutil.rmtree(home)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
