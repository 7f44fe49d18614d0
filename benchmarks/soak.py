"""Many starts and ends of everything that starts and ends: `make soak ARGS="count=300 seed=1"`.

Trainings, dry runs, comparisons of meshes, checks of files, evaluations and refused starts, by one process and by two,
in a random order. A process that ends while a thread is still inside a library aborts, but rarely: once in fifty ends,
and more often on a busy machine. So this takes hundreds of starts. Exit code 1, with the output of the process, where
a code is not the right one, a process prints one of LAST_WORDS, or some process is not gone after LIMIT_S.
"""

import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.devices import xla_flags
from support.harness import PAIR, ROOT
from support.processes import Processes

from benchmarks.arguments import read_values
from benchmarks.faults import make_root

LIMIT_S = 900  # with a load average of 25, a start that takes 7 s has taken 290
LAST_WORDS = ("terminate called", "FATAL", "Fatal Python error", "Traceback")  # of a process that does not end well


@dataclass(frozen=True)
class Kind:
    """A command that is started again and again."""

    count: int  # processes
    words: list[str]  # after `python`; RUN is a run that is there, NEW the folder of a new one
    code: int = 0


@dataclass
class Ends:
    """How the starts of a kind have ended."""

    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


TRAIN = [*PAIR, "training.max_steps=2", "evaluation.every_steps=2", "checkpoint.save_every_steps=2"]
MESHES = '--meshes=[[[1],["fsdp"]],[[2],["dp"]]]'
VERIFY = ["-m", "tunix.verify", *TRAIN, "--steps=1", MESHES]
EVALUATE = ["-m", "tunix.evaluate", "checkpoint=RUN", "output=NEW.json"]
KINDS = {
    "train, 1 process": Kind(1, ["run_training.py", *TRAIN, "hydra.run.dir=NEW"]),
    "train, 2 processes": Kind(2, ["run_training.py", *TRAIN, "hydra.run.dir=NEW"]),
    "dry run, 1 process": Kind(1, ["run_training.py", *TRAIN, "dry_run=true"]),
    "dry run, 2 processes": Kind(2, ["run_training.py", *TRAIN, "dry_run=true"]),
    "verify, 1 process": Kind(1, VERIFY),
    "verify, 2 processes": Kind(2, VERIFY),
    "verify checkpoint=RUN": Kind(1, ["-m", "tunix.verify", "checkpoint=RUN"]),
    "evaluate, 1 process": Kind(1, EVALUATE),
    "evaluate, 2 processes": Kind(2, EVALUATE),
    "a key that is unknown": Kind(1, ["run_training.py", "training.seq_length=4"], 2),
    "a mesh that does not fit, 2 processes": Kind(2, ["run_training.py", *TRAIN, "model.mesh_shape=[[3],[fsdp]]"], 2),
}


def start(kind: Kind, folder: Path, data: list[str]) -> tuple[float, list[int], str]:
    """Start a command; return the seconds until its end, the exit code of each process, and what all have printed."""
    words = [word.replace("RUN", "whole").replace("NEW", f"new{time.time_ns()}") for word in kind.words]
    if "hydra.run.dir" in " ".join(words) or "--steps=1" in words or "dry_run=true" in words:
        words += data
    start_time = time.time()
    if kind.count == 1:
        module = words[0] == "-m"
        command = [sys.executable, *words] if module else [sys.executable, str(ROOT / words[0]), *words[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(2)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        return time.time() - start_time, [done.returncode], done.stdout + done.stderr
    program = {"module": words[1]} if words[0] == "-m" else {"script": words[0]}
    words = words[2:] if words[0] == "-m" else words[1:]
    with Processes(*words, folder=folder, count=kind.count, fork=False, **program) as processes:
        ends = processes.ends(LIMIT_S)
    return time.time() - start_time, [end.code for end in ends], "".join(end.stdout + end.stderr for end in ends)


def main(words: list[str]) -> int:
    given = read_values(words, count="300", seed="0")
    (root, data), rng = make_root(), random.Random(int(given["seed"]))
    _, codes, text = start(Kind(1, ["run_training.py", *TRAIN, "hydra.run.dir=RUN"]), root, data)
    assert codes == [0], text
    results = {name: Ends() for name in KINDS}
    for number in range(int(given["count"])):
        name = rng.choice([*KINDS])
        kind, ends = KINDS[name], results[name]
        try:
            seconds, codes, text = start(kind, root, data)
        except subprocess.TimeoutExpired:
            seconds, codes, text = LIMIT_S, [], f"not gone after {LIMIT_S} s"
        ends.seconds.append(seconds)
        if codes != [kind.code] * kind.count or any(words in text for words in LAST_WORDS):
            ends.wrong.append(text)
            print(f"{name}: codes {codes}\n{text[-4000:]}", file=sys.stderr)
        print(f"{number + 1}: {name}, codes {codes}, {seconds:.1f} s", flush=True)
        for path in root.glob("new*"):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
    print("| start | times | median s | ended otherwise |\n|---|---|---|---|")
    for name, ends in results.items():
        if ends.seconds:
            print(f"| {name} | {len(ends.seconds)} | {statistics.median(ends.seconds):.1f} | {len(ends.wrong)} |")
    shutil.rmtree(root)
    return int(any(ends.wrong for ends in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
