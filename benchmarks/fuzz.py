"""Random commands that must not end badly: `make fuzz ARGS="seed=1 minutes=60"`.

A try is a command with random keys and values, random variables of launchers, a damaged file in the place of one that
is read, or a signal at a random moment. What `find_faults` asks of each end is the contract: an exit code of its table,
no traceback, one message that names the cause, nothing written outside of the folders that the words name, no process
left, memory and time bounded. Commands run as forks (tests/support/forks.py); a try that failed runs once more as users
start it, and is kept as a case of JSON in `keep=build/fuzz` when it fails again. `case=FILE` runs such a case.
"""

import base64
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from support import forks
from support.harness import ROOT, SMALL

from benchmarks.arguments import read_values
from benchmarks.faults import left
from benchmarks.fuzz_requests import make_requests
from tunix.config import Config, Section, commands
from tunix.config.foreign_names import read_rows
from tunix.config.mistakes import list_sections

LIMIT_S, MAX_MEMORY_GIB = 300.0, 5.0
CODES = {0, 2, 75, 76, 77}
MAX_MESSAGE = 3000  # characters of an error
TRAIN = [
    *SMALL, "model.num_layers=2", "model.global_every=2", "data=jsonl", "data.paths=[rows.jsonl]",
    "training.max_steps=2", "evaluation.every_steps=null", "evaluation.num_sequences=2", "evaluation.sample_tokens=0",
    "checkpoint.save_every_steps=1", "scheduler=constant", "distributed.init_timeout_s=2", "tokenizer=bytes",
    "data.held_out_fraction=0.2", "loading.prepare_processes=1",
]  # fmt: skip

# Values of no type in particular. None names a place that a mistake could harm.
NASTY = [
    "", "''", "null", "true", "false", "0", "-1", "1", "2", "3", "1.5", "-0.0", "1e-300", "1e400", ".inf", "-.inf",
    ".nan", "2147483648", "9223372036854775808", "1" * 40, "1e23", "[]", "[1]", "[[1],[fsdp]]", "[[0],[fsdp]]",
    "[[-1],[tp]]", "[[2],[nope]]", "[[1,1],[fsdp,fsdp]]", "{}", "{a: 1}", "{name: adamw}", "[null]", "[[[]]]",
    "'a b'", "'\\u00e9'", "²", "'\U0001f600'", "auto", "none", "nosuch", "../x", "/nosuch/x", "/dev/null",
    "/dev/full", "/proc/nosuch", "rows.jsonl", "run", "hf", "s3://", "gs:///x", "file:///x", "http://127.0.0.1:9/x",
    "s3:/x", "os:getcwd", "os.getcwd", "nosuch:f", "a:b:c", "'*'", "'['", "'(?P<'", "a=b", "'${seed}'", "'${nosuch}'",
    "'${oc.env:NOSUCH}'", "x" * 300, "'%s'", "'{'", "[a,b]", "1,2", "choice(1,2)", "range(1,3)", "?", "???",
    "'\\x00'", "'\\n'", "~", "-", "--", "0x10", "yes",
]  # fmt: skip
EDGES = ("0", "1", "-1", "2", "3", "7", "64", "0.5", "1.0", "-0.5", "1e-9", "2147483647", "4294967296", "1e30")
VARIABLES = [
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "NODE_RANK",
    "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_JOB_NODELIST", "SLURM_STEP_ID",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE",
    "CUDA_VISIBLE_DEVICES", "NO_COLOR", "COLUMNS", "TERM", "TUNIX_WEBHOOK_URL", "HF_HOME", "HF_TOKEN", "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME", "HOME", "TMPDIR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "LANG",
]  # fmt: skip
OF_VARIABLES = [
    "", "0", "1", "2", "-1", "²", "x", "1.5", "999999999999999999999", "127.0.0.1", "localhost", "a..b", "h" * 300,
    "::1", "4(x2),3", "n[1-2]", "n[1-", "2(xz)", "29500", "65535", "70000", "0,1", "/nosuch", "http://127.0.0.1:9/x",
    "1" * 5000,
]  # fmt: skip
SIGNALS = {signal.SIGTERM: {75, -15, 143}, signal.SIGUSR1: {75, -10, 138}, signal.SIGINT: {-2, 130}}


@dataclass
class Case:
    """A command and its surroundings. The folder of a try has copies of a run, a model and rows beside it."""

    kind: str
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # path in the folder -> content in base64; "-" deletes
    signal: tuple[int, float] | None = None  # number, seconds after the start


@dataclass
class End:
    """How a command has ended."""

    code: int | None  # None: it had to be killed
    stdout: str
    stderr: str
    memory_gib: float
    left: list[int]  # processes of its session that are still there
    written: list[str]  # new or changed paths of the folder


# What a try may be.


def list_leaves(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key as users type it, with the annotation of its value; keys of unions come once for each member."""
    for name, entry in section.model_fields.items():
        key, kinds = prefix + (entry.alias or name), list_sections(entry.annotation)
        for kind in kinds:
            yield from list_leaves(kind, f"{key}.")
        yield key, (entry.annotation, entry.metadata)


LEAVES = list(list_leaves(Config))
GROUPS = {
    path.name: sorted(each.stem for each in path.glob("*.yaml")) for path in (ROOT / "conf").iterdir() if path.is_dir()
}


def list_legal(annotation: Any) -> list[str]:
    """Return values that a type names: words of literals, edges of numbers, true and false."""
    if typing.get_origin(annotation) is typing.Literal:
        return [str(each) for each in typing.get_args(annotation)]
    if annotation in (int, float):
        return list(EDGES)
    if annotation is bool:
        return ["true", "false"]
    return [each for part in typing.get_args(annotation) for each in list_legal(part)]


def pick_value(rng: random.Random, key: str) -> str:
    annotations = [annotation for name, (annotation, _) in LEAVES if name == key]
    legal = [value for annotation in annotations for value in list_legal(annotation)]
    return rng.choice(legal) if legal and rng.random() < 0.6 else rng.choice(NASTY)


def pick_words(rng: random.Random) -> list[str]:
    """Return random keys with random values, choices of groups, and names of other programs."""
    words = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.random()
        key = rng.choice(LEAVES)[0]
        if kind < 0.75:
            words.append(rng.choice(("", "", "", "", "+", "++")) + f"{key}={pick_value(rng, key)}")
        elif kind < 0.85:
            group = rng.choice([*GROUPS])
            choice = rng.choice([*GROUPS[group], "nosuch", "", "null"])
            words.append(("+" if group == "experiment" else "") + f"{group}={choice}")
        elif kind < 0.92:
            words.append(rng.choice(("", "--")) + f"{rng.choice(FOREIGN)}={rng.choice(NASTY)}")
        elif kind < 0.96:
            words.append(f"~{key}")
        else:
            words.append(rng.choice(NASTY))
    return words


FOREIGN = sorted({name for row in read_rows() for name in row.there})


def dry_run(rng: random.Random) -> Case:
    return Case("dry run", ["run_training.py", *TRAIN, *pick_words(rng), "dry_run=true"])


def other_size(rng: random.Random) -> Case:
    """A published size or another task, of which a dry run computes every number."""
    words = [f"model={rng.choice(GROUPS['model'])}", "model.vocab_size=auto", f"task={rng.choice(GROUPS['task'])}"]
    return Case("other size", ["run_training.py", *words, *pick_words(rng), "dry_run=true"])


# Sizes above those of a small run would only fill the machine.
LARGE = {"model", "sampling", "plan", "launcher", "profile", "distributed"}
SMALL_EDGES = {"0", "1", "2", "3", "0.5", "null", "true", "false", "auto"}


def train(rng: random.Random) -> Case:
    words = []
    for key in rng.sample([key for key, _ in LEAVES if key.partition(".")[0] not in LARGE], 2):
        value = pick_value(rng, key)
        if value.lstrip("-").isdecimal() and value not in SMALL_EDGES:
            value = rng.choice([*SMALL_EDGES])
        words.append(f"{key}={value}")
    return Case("train", ["run_training.py", *TRAIN, *words, "hydra.run.dir=new"])


def resume(rng: random.Random) -> Case:
    return Case("resume", ["run_training.py", "resume=run", "training.max_steps=3", *damage_words(rng)])


def damage_words(rng: random.Random) -> list[str]:
    return pick_words(rng)[:1] if rng.random() < 0.3 else []


COMMANDS: dict[str, tuple[list[str], type[Section] | None]] = {
    "generate": (["checkpoint=run", "prompt=ab", "max_new_tokens=2"], commands.Generate),
    "evaluate": (["checkpoint=run", "output=new.json"], commands.Evaluate),
    "export": (["checkpoint=run", "output=new"], commands.Export),
    "average": (["checkpoint=run", "steps=[1,2]", "output=new"], commands.Average),
    "compare": (["run", "other"], None),
    "verify": (["checkpoint=run"], None),
    "prepare": ([*TRAIN], None),
    "plan": ([*TRAIN, "plan.num_compiled=0"], None),
    "doctor": ([], None),
    "launch": (["--nprocs=1", str(ROOT / "run_training.py"), *TRAIN, "dry_run=true"], None),
}
FLAGS = [
    "--nprocs=", "--nnodes=", "--node_rank=", "--master_addr=", "--master_port=", "--rdzv_endpoint=", "--json",
    "--steps=", "--meshes=", "--html=", "--accelerate_config=", "--help", "--nosuch=", "--multirun",
]  # fmt: skip


def command(rng: random.Random) -> Case:
    name = rng.choice([*COMMANDS])
    words, section = COMMANDS[name]
    more = []
    for _ in range(rng.choice((1, 1, 2))):
        if section and rng.random() < 0.8:
            more.append(f"{rng.choice([*section.model_fields])}={rng.choice(NASTY)}")
        elif rng.random() < 0.5:
            flag = rng.choice(FLAGS)
            more.append(flag + rng.choice(NASTY) if flag.endswith("=") else flag)
        else:
            more += pick_words(rng)[:1]
    if name == "launch":  # its own flags come before the script
        return Case("launch", ["-m", "tunix.launch", *(each for each in more if each.startswith("-")), *words])
    return Case(name, ["-m", f"tunix.{name}", *words, *more])


def launcher(rng: random.Random) -> Case:
    name = rng.choice(("slurm", "kubernetes", "ray"))
    keys = [key for key, _ in LEAVES if key.startswith("launcher.")]
    words = [f"{key}={pick_value(rng, key)}" for key in rng.sample(keys, 2)]
    needed = ["launcher.image=x", "launcher.volume_claim=y"] if name == "kubernetes" else []
    return Case(f"launcher {name}", ["run_training.py", *TRAIN, f"launcher={name}", *needed, *words, "dry_run=true"])


def surroundings(rng: random.Random) -> Case:
    names = rng.sample(VARIABLES, rng.choice((1, 2, 3, 4)))
    environment = {name: rng.choice(OF_VARIABLES) for name in names}
    words = ["run_training.py", *TRAIN, "distributed.init_timeout_s=1", "dry_run=true"]
    if rng.random() < 0.25:
        words = ["-m", "tunix.launch", str(ROOT / words[0]), *words[1:]]
    return Case("surroundings", words, environment)


GENERATE, EXPORT = "-m tunix.generate prompt=ab max_new_tokens=2 checkpoint=", "-m tunix.export output=new checkpoint="
RESUME, PREPARE = "run_training.py resume=run training.max_steps=3", "-m tunix.prepare TRAIN"
OF_FILES = "tokenizer=bpe tokenizer.path=hf"
READERS = {  # commands that read each file or folder; TRAIN stands for the words above
    "run": (f"{GENERATE}run", "-m tunix.verify checkpoint=run", "-m tunix.compare run other", RESUME, f"{EXPORT}run"),
    "hf": (f"{GENERATE}hf", f"run_training.py TRAIN {OF_FILES} model.init_from=hf dry_run=true",
           f"{PREPARE} {OF_FILES}", f"{EXPORT}hf"),
    "adapter": (f"{GENERATE}hf adapter=adapter", f"{EXPORT}hf adapter=adapter merge_lora=true"),
    "rows.jsonl": (
        PREPARE, "-m tunix.generate checkpoint=run input=rows.jsonl column=text output=new.jsonl max_new_tokens=2"),
    "rows.csv": (f"{PREPARE} data=csv data.paths=[rows.csv]",),
    "rows.parquet": (f"{PREPARE} data=parquet data.paths=[rows.parquet]",),
    "words.yaml": (f"-m tunix.launch --accelerate_config=words.yaml {ROOT}/run_training.py TRAIN dry_run=true",
                   "-m tunix.plan TRAIN plan.num_compiled=0 plan.topology=words.yaml"),
}  # fmt: skip


def split_words(text: str) -> list[str]:
    """Return the words of a command."""
    return [each for word in text.split() for each in (TRAIN if word == "TRAIN" else [word])]


CONTENTS = [
    b"", b"\0", b"{", b"[]", b"{}", b"null", b"3", b'"x"', b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe", b"a: [", b"a\n",
    b"x" * 100_000,
]  # fmt: skip


def damaged_file(rng: random.Random, root: Path) -> Case:
    """A file that a command reads has other bytes, or is gone."""
    top = rng.choice([*READERS])
    path = root / top
    files = [path] if path.is_file() else [each for each in sorted(path.rglob("*")) if each.is_file()]
    files = [each for each in files if rng.random() < 0.3 or "checkpoints" not in each.parts] or files
    chosen = rng.choice(files)
    whole = chosen.read_bytes()
    data: bytes | None = rng.choice(CONTENTS)
    kind = rng.random()
    if kind < 0.1:
        data = None
    elif kind < 0.7:
        data = damage(rng, whole)
    words = split_words(rng.choice(READERS[top]))
    content = "-" if data is None else base64.b64encode(data).decode()
    return Case(f"damaged {top}", words, files={str(chosen.relative_to(root)): content})


def damage(rng: random.Random, whole: bytes) -> bytes:
    """Return bytes with some changed, cut, swapped for a number or a word, or put in."""
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.choice((1, 10, 1000, len(data)))]
        elif kind == 2:
            data[at:at] = rng.choice(CONTENTS)[:200]
        else:  # the value behind a colon
            colon = data.find(b":", at)
            if colon >= 0:
                end = min(
                    [each for each in (data.find(b",", colon), data.find(b"\n", colon)) if each >= 0] or [len(data)]
                )
                data[colon + 1 : end] = b" " + rng.choice(NASTY).encode()
    return bytes(data)


def interrupted(rng: random.Random) -> Case:
    long = "run_training.py TRAIN training.max_steps=200 hydra.run.dir=new"
    words = split_words(rng.choice((long, *READERS["run"], f"{PREPARE} {OF_FILES}")))
    return Case("signal", words, signal=(int(rng.choice([*SIGNALS])), round(rng.uniform(0, 8), 2)))


def requests(rng: random.Random) -> Case:
    """A server that gets nonsense."""
    words = "-m benchmarks.fuzz_requests checkpoint=run chat_template=chat.jinja requests=requests.json"
    sent = json.dumps(make_requests(rng, NUM_REQUESTS, damage)).encode()
    return Case("requests", words.split(), files={"requests.json": base64.b64encode(sent).decode()})


NUM_REQUESTS = 60  # to one server
KINDS: dict[Callable[..., Case], int] = {
    dry_run: 30,
    other_size: 8,
    train: 7,
    resume: 3,
    command: 14,
    launcher: 4,
    surroundings: 8,
    interrupted: 5,
    requests: 2,
}
DAMAGED = 21  # of a hundred tries


def pick_case(rng: random.Random, root: Path) -> Case:
    if rng.random() < DAMAGED / 100:
        return damaged_file(rng, root)
    (kind,) = rng.choices([*KINDS], [*KINDS.values()])
    return kind(rng)


# Run a case, and look at its end.


def run_case(case: Case, root: Path, *, fork: bool) -> End:
    """Run a case in a new folder, with copies of what is in `root`."""
    with tempfile.TemporaryDirectory(dir=root.parent) as name:
        folder = Path(name) / "work"
        shutil.copytree(root, folder, symlinks=True)
        for path, content in case.files.items():
            (folder / path).unlink(missing_ok=True)
            if content != "-":
                (folder / path).write_bytes(base64.b64decode(content))
        before = list_files(Path(name))
        out, err = Path(name) / "out", Path(name) / "err"
        words = [str(ROOT / word) if word == "run_training.py" else word for word in case.words]
        given = {key: value for key, value in case.environment.items() if "\0" not in value}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **given}
        started = forks.start(words, folder, environment, out, err, fork=fork)
        session = Session(started.pid)
        session.wait(started, case.signal)
        still_there = session.kill()
        written = [path for path, version in list_files(Path(name)).items() if before.get(path) != version]
        stdout, stderr = (each.read_text(errors="replace") for each in (out, err))
        code = None if session.is_late else started.wait(60)
        return End(code, stdout, stderr, session.memory_gib, still_there, sorted({*written} - {"out", "err"}))


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in folder.rglob("*"):
        with suppress(OSError):
            if not path.is_dir():
                stat = path.lstat()
                found[str(path.relative_to(folder))] = (stat.st_size, stat.st_mtime_ns)
    return found


class Session:
    """The processes of a command: it begins a session (`setsid`), so its children are known."""

    def __init__(self, pid: int):
        self.pid, self.memory_gib, self.is_late = pid, 0.0, False

    def wait(self, started: Any, sent: tuple[int, float] | None) -> None:
        """Wait for the end; sends the signal of a case at its moment."""
        start_time = time.monotonic()
        while started.poll() is None:
            now = time.monotonic() - start_time
            if sent and now > sent[1]:
                with suppress(OSError):
                    os.kill(self.pid, sent[0])
                sent = None
            self.memory_gib = max(self.memory_gib, sum(map(read_memory_gib, left([self.pid]))))
            if now > LIMIT_S or self.memory_gib > MAX_MEMORY_GIB:
                self.is_late = True
                self.kill(grace_s=0)
            time.sleep(0.05)

    def kill(self, grace_s: float = 3) -> list[int]:
        """Kill what is left of the session after a while; returns it."""
        deadline = time.monotonic() + grace_s
        while (pids := left([self.pid])) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return pids


def read_memory_gib(pid: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 2**20
    return 0.0


def find_faults(case: Case, end: End) -> list[str]:
    """Return what is wrong with an end; nothing where it keeps the contract."""
    faults, errors = [], [line for line in end.stderr.splitlines() if line.startswith("error: ")]
    codes = CODES | (SIGNALS[signal.Signals(case.signal[0])] if case.signal else set())
    if "tunix.verify" in case.words or "tunix.doctor" in case.words:
        codes = codes | {1}
    if end.code is None:
        faults.append(f"not gone after {LIMIT_S:g} s, or more than {MAX_MEMORY_GIB:g} GiB ({end.memory_gib:.1f})")
    elif end.code not in codes:
        faults.append(f"exit code {end.code}")
    if "Traceback (most recent call last)" in end.stdout + end.stderr or "Exception in ASGI" in end.stderr:
        faults.append("a traceback")
    if end.code == 2:
        if "launch" not in case.kind and len(errors) != 1 and "usage: " not in end.stderr:
            faults.append(f"{len(errors)} errors in place of one")
        if not end.stderr.strip():
            faults.append("no message")
        if len(end.stderr) > MAX_MESSAGE and "tunix.launch" not in case.words:
            faults.append(f"an error of {len(end.stderr)} characters")
    if end.left:
        faults.append(f"{len(end.left)} processes left")
    named = [word.partition("=")[2].strip("'") for word in case.words] + [*case.environment.values()]
    for name in [*named]:
        with suppress(ValueError):  # Hydra reads a number, whose text is the folder: 1e400 is inf
            named.append(str(float(name)))
    outside = [
        path for path in end.written
        if not path.startswith(("work/new", "work/outputs", "work/multirun", "work/run/"))
        and not any(name and Path(path).is_relative_to(os.path.normpath(f"work/{name}")) for name in named)
    ]  # fmt: skip
    if outside:
        faults.append(f"written: {', '.join(outside[:3])}")
    if "dry_run=true" in case.words and not faults and [path for path in end.written if path.startswith("work/")]:
        faults.append(f"a dry run wrote {end.written[0]}")
    return faults


# The folder that tries begin with, and the loop.


def make_root(root: Path) -> None:
    """Make a run, another one, a model with its adapter, and rows."""
    root.mkdir()
    rows = [
        {"text": f"{number} and {number + 1} make {2 * number + 1}", "prompt": "a", "completion": "b"}
        for number in range(40)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rows.csv").write_text("text,answer\n" + "".join(f'"{row["text"]}",b\n' for row in rows))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [row["text"] for row in rows]}), root / "rows.parquet", row_group_size=20
    )
    (root / "chat.jinja").write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    (root / "words.yaml").write_text("num_processes: 1\nnum_machines: 1\nmixed_precision: 'no'\nuse_cpu: true\n")
    train_words = [str(ROOT / "run_training.py"), *TRAIN]
    lora = ["model.init_from=hf", "model.lora.rank=2", "checkpoint.keep_every_steps=1"]
    for words in (
        [*train_words, "hydra.run.dir=run", "checkpoint.keep_every_steps=1"],
        [*train_words, "hydra.run.dir=other"],
        ["-m", "tunix.export", "checkpoint=run", "output=hf"],
        [*train_words, *lora, "hydra.run.dir=lora"],
        ["-m", "tunix.export", "checkpoint=lora", "output=adapter"],
    ):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    shutil.rmtree(root / "lora")
    # A command that is always refused would be taken for one that refuses what is damaged.
    for text in dict.fromkeys(text for texts in READERS.values() for text in texts if "words.yaml" not in text):
        end = run_case(Case("control", split_words(text)), root, fork=True)
        if end.code:
            print(f"control: exit code {end.code}: {text}\n{end.stderr[-2000:]}", flush=True)


def try_case(case: Case, root: Path) -> tuple[End, list[str]]:
    """Run a case by a fork, and once more as users start it where something is wrong with its end."""
    end = run_case(case, root, fork=True)
    if faults := find_faults(case, end):
        again = run_case(case, root, fork=False)
        if in_both := find_faults(case, again):
            return again, in_both
        faults = [f"{fault} (in one of two tries)" for fault in faults] if case.signal else []
    return end, faults


def main(words: list[str]) -> int:
    given = read_values(words, seed="0", minutes="60", keep="build/fuzz", workers="2", case="")
    keep = Path(given["keep"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # commands would ignore it where a shell began this behind
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        os.environ.update(
            JAX_PLATFORMS="cpu", TUNIX_CACHE_DIR=str(home / "cache"), HOME=str(home / "home"), HF_HUB_OFFLINE="1",
            JAX_COMPILATION_CACHE_DIR=str(home / "jax"), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )  # fmt: skip
        (home / "home").mkdir()
        root = home / "root"
        make_root(root)
        if given["case"]:
            case = Case(**json.loads(Path(given["case"]).read_text())["case"])
            end, faults = try_case(case, root)
            print(end.stdout, end.stderr, faults or "as it should be", sep="\n")
            return int(bool(faults))
        return loop(random.Random(int(given["seed"])), float(given["minutes"]) * 60, int(given["workers"]), keep, root)


def loop(rng: random.Random, seconds: float, workers: int, keep: Path, root: Path) -> int:
    """Try cases until the time is over; returns 1 where one has failed. Findings of one form are kept once."""
    deadline, lock = time.monotonic() + seconds, threading.Lock()
    counts: dict[str, int] = {}
    findings: dict[tuple[str, str], int] = {}

    def work() -> None:
        while time.monotonic() < deadline:
            with lock:
                case = pick_case(rng, root)
            end, faults = try_case(case, root)
            with lock:
                counts[case.kind] = counts.get(case.kind, 0) + 1
                if not faults:
                    continue
                form = case.kind, "; ".join(faults) + " " + " ".join(end.stderr.strip().splitlines()[-1:])[:120]
                findings[form] = findings.get(form, 0) + 1
                if findings[form] == 1:
                    keep.mkdir(parents=True, exist_ok=True)
                    shown = {"faults": faults, "case": asdict(case)}
                    shown |= {"stdout": end.stdout[-2000:], "stderr": end.stderr[-6000:]}
                    file = keep / f"{case.kind.replace(' ', '_')}-{len(findings)}.json"
                    file.write_text(json.dumps(shown, indent=1))
                    words, error = " ".join(case.words)[-400:], end.stderr.strip()[-300:]
                    line = f"{case.kind}: {'; '.join(faults)}: {words} {case.environment} {[*case.files]}"
                    print(f"{line}\n  {error}", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(work) for _ in range(workers)]:
            future.result()
    print("| kind | tries |\n|---|---|")
    for kind, count in sorted(counts.items()):
        print(f"| {kind} | {count} |")
    print(f"{sum(counts.values())} tries, {sum(findings.values())} failed, in {len(findings)} forms; cases in {keep}")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
