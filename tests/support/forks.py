"""Start a Python program from a process that has imported JAX and tunix already: 0.1 s of CPU time in place of 3.5 s.

    tests ── ask ──> fork server ── fork ──> program ── fork ──> spare

The fork server (of Python's multiprocessing) has imported what a training imports. It has not started JAX's backend, has
no other Python thread and changes nothing, so a fork of it is like a process that has just done these imports. The fork
then becomes the program: it takes the words, the folder, the environment and the files of its output, runs the script as
`__main__`, and ends as Python ends.

Where the program will supervise a child, the fork makes a second fork of itself first, the spare, which waits. When the
supervisor starts its child, the spare wakes up and is that child: a process of its own below the supervisor, with the
words and the environment that the supervisor gives it.

What a fork cannot take is started by exec, as users start it (`can_fork`). Several tests of the command line, of launchers
and of Slurm do so always, and all tests do with TUNIX_TESTS_PLAIN=1.
"""

import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.as_main import run_to_the_end

ROOT = Path(__file__).parents[2]
# Read when Python starts or when jax is imported: a fork would keep those of the server.
READ_AT_IMPORT = ("JAX_", "PYTHON", "LD_", "TF_CPP_", "NPY_", "OMP_", "OPENBLAS_")
# A fork takes up the first two; the third is read when the plugin for GPUs is loaded.
EXCEPT = ("PYTHONPATH", "PYTHONUNBUFFERED", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")

# Neither forks nor what Hydra is remembered to have composed: each process starts, and reads conf/, as a user's does.
PLAIN = os.environ.get("TUNIX_TESTS_PLAIN") == "1"

_server_environment: dict[str, str] = {}


class Started:
    """A program in a fork, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, process: multiprocessing.process.BaseProcess, args: Sequence[str]):
        self.process, self.args = process, args
        assert process.pid is not None
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()


def can_fork(environment: Mapping[str, str]) -> bool:
    """Return whether a fork can take this environment: what is read at import is that of the server."""
    if PLAIN or sys.platform != "linux":  # elsewhere libraries of the system do not bear a fork
        return False
    names = {name for name in {*environment, *_server()} if name.startswith(READ_AT_IMPORT) and name not in EXCEPT}
    return all(environment.get(name) == _server().get(name) for name in names)


def start(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], out: Path, err: Path,
    *, fork: bool = True, supervises: bool = False,
) -> "Started | subprocess.Popen":  # fmt: skip
    """Start `python WORDS` in `folder`, in a session of its own, with its output in two files.

    `words` begins with the path of a script, or with `-m` and a module. `supervises` says that the program will start
    itself once more as its child (tunix/processes/supervisor.py). Without `fork`, and where a fork cannot take the
    environment, the program is started by exec.
    """
    with out.open("w") as stdout, err.open("w") as stderr:  # not in the fork: a test may read them before it runs
        if not fork or not can_fork(environment):
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env=environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
    given = {"words": list(words), "folder": str(folder), "environment": dict(environment), "supervises": supervises}
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_become, kwargs={**given, "out": str(out), "err": str(err)})
    process.start()
    return Started(process, words)


def _server() -> dict[str, str]:
    """Return the environment of the fork server, which is started the first time."""
    if not _server_environment:
        _server_environment.update(os.environ)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        multiprocessing.get_context("forkserver").set_forkserver_preload(["support.forks_imports"])
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before
    return _server_environment


def _become(words: list[str], folder: str, environment: dict[str, str], out: str, err: str, supervises: bool) -> None:
    """Be the program, in the fork; does not return."""
    os.setsid()
    os.chdir(folder)
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        stream.flush()
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, stream.fileno())
        os.close(file)
    if supervises:
        from tunix.processes import supervisor

        popen = partial(_Awake, _Spare())
        supervisor.subprocess = SimpleNamespace(Popen=popen, TimeoutExpired=subprocess.TimeoutExpired)
    _run(words, environment)


class _Spare:
    """A fork of this process that waits for words and an environment, and ends if this process ends before."""

    def __init__(self) -> None:
        from tunix.processes import exits

        read, self.write = os.pipe()
        end_with_parent = exits.end_with_parent()
        self.pid = os.fork()
        if self.pid:
            os.close(read)
            return
        os.close(self.write)
        end_with_parent()
        with os.fdopen(read, "rb") as pipe:
            message = pipe.read()
        if not message:
            os._exit(0)
        _run(*pickle.loads(message))

    def wake(self, words: list[str], environment: dict[str, str]) -> None:
        with os.fdopen(self.write, "wb") as pipe:
            pickle.dump((words, environment), pipe)


class _Awake(subprocess.Popen):
    """The spare as the child of its supervisor: the methods of `Popen` wait for it and send it signals."""

    def __init__(self, spare: _Spare, words: list[str], **more: Any):
        self.spare = spare
        super().__init__(words, **more)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        assert args[0] == sys.executable
        environment = more[3]  # after close_fds, pass_fds and cwd
        self.spare.wake(args[1:], environment)
        self.pid, self._child_created = self.spare.pid, True


def _run(words: list[str], environment: dict[str, str]) -> None:
    """Run a script or a module as `__main__`, and end as Python ends; does not return."""
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    more = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    site = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT / "tests") and Path(path) != ROOT]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:] = [os.getcwd(), *more, *site]
        program = partial(runpy.run_module, words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words[:]
        sys.path[:] = [str(Path(words[0]).parent), *more, *site]
        program = partial(runpy.run_path, words[0], run_name="__main__")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_to_the_end(program)
