"""A run's folder: claimed by one run, with its config, environment and log."""

import errno
import fcntl
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import metadata
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import jax
from rich.logging import RichHandler

from tunix.base.buckets import is_address
from tunix.base.errors import MaskingFilter, UserError, mask_values, mask_variables
from tunix.base.files import create_file, find_way_out, parse_json, replacing, write_whole
from tunix.base.progress import is_watched
from tunix.base.text import format_yaml
from tunix.config import Config, Logging, compose
from tunix.config.saved_runs import OUTPUTS, find_mirrored, find_resume_point, find_run
from tunix.data.tokenizer import Vocab
from tunix.huggingface.hub import INFO_FILES, find, list_copied_files
from tunix.huggingface.weights import INDEX
from tunix.processes import peers
from tunix.processes.peers import is_seen_by_all
from tunix.processes.rollcall import list_versions

log = logging.getLogger(__name__)


# One run at a time writes into a folder. Its lock is one of the operating system (`flock`) on the file FOLDER/.running.
# The kernel gives it back when the process ends, also by kill -9, so no lock outlives its run; a file whose existence
# is the lock would have to be removed by hand. The file's text says who has the lock, for the message to the other.
LOCK = ".running"
# Seconds to wait for a run of this host that has the lock, and of another host. A run that was killed a moment ago may
# still be ending. A file server gives the lock of a host that died to others only when that host's lease has run out.
HOLDER_S, LEASE_S = 5.0, 300.0


@contextmanager
def hold_lock(folder: Path, home: str = "") -> Iterator[None]:
    """Hold the lock of a run's folder: process 0 locks a file in it until the block or the process ends.

    Also of `home`, the folder of its checkpoints, where that is another one: `resume=HOME` is a run that works there.
    A bucket has no locks.

    Raises:
        UserError: another run still holds the lock after a while, and is named; or a file of the folder cannot be
            written.
    """
    with ExitStack() as stack:

        def lock() -> None:
            _lock(folder / LOCK, stack)
            if not home or is_address(home):
                return
            with suppress(OSError):  # which the lock describes
                Path(home).mkdir(parents=True, exist_ok=True)
            if not (Path(home).exists() and folder.samefile(home)):
                _lock(Path(home) / LOCK, stack)

        try:
            peers.on_main(lock, "the run's lock")
            yield
        except OSError as error:
            path = Path(os.fsdecode(error.filename)) if error.filename else folder
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
            is_here = path.is_relative_to(folder) and error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EACCES)
            if not (is_full or is_here):
                raise
            raise UserError(
                f"{path} of the run's folder cannot be written ({error.strerror}); "
                f"{find_way_out(error, 'mend that')} and go on with {compose.format_resume(folder)}"
            ) from None


def _lock(path: Path, stack: ExitStack) -> None:
    """Lock the file until the stack closes. Where the file system has no locks, log a warning and go on."""
    try:
        # "a+" and not "w": as long as another run has the lock, the file has that run's text.
        file = stack.enter_context(path.open("a+"))
    except OSError as error:
        raise UserError(f"the run's folder {path.parent} cannot be written ({error.strerror})") from None
    hostname, start_time = socket.gethostname(), None
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = path.read_text().strip()
            patience = HOLDER_S if holder.endswith(f" on {hostname}") else LEASE_S
            if start_time is None:
                start_time = time.monotonic()
                log.warning("%s is being written by %s; waiting %.0f s for its end", path.parent, holder, patience)
            if time.monotonic() - start_time > patience:
                raise UserError(
                    f"{path.parent} is being written by {holder}; wait for its end, or start a run of its own"
                ) from None
            time.sleep(0.5)
        except OSError as error:
            log.warning("%s cannot be locked (%s): nothing keeps a second run out", path, error.strerror)
            return
    # Written past Python's buffer, so that a full disk is an error here, and not when the file is closed.
    os.truncate(file.fileno(), 0)
    os.write(file.fileno(), f"process {os.getpid()} on {hostname}".encode())


def watch_folder(folder: Path) -> Callable[[], None]:
    """Return a check, which all processes call together, that the run's folder is still the one that it is now.

    It raises `UserError` on all of them if somebody has deleted or moved the folder: Orbax would make it again without
    its config, and nothing could go on from there.
    """
    start_time = folder.stat()

    def check() -> None:
        try:
            is_there = folder.stat().st_ino == start_time.st_ino and (folder / "config.yaml").exists()
        except OSError:
            is_there = False
        if not is_there:
            raise UserError(
                f"the run's folder {folder} was deleted or moved while the run wrote to it; it is not made again"
            )

    return lambda: peers.on_main(check, "the run's folder")


MAX_DIFF = 1 << 20  # characters of the difference to the commit that are kept
VARIABLES = ("XLA_", "JAX_", "NCCL_", "TUNIX_", "CUDA_", "SLURM_")  # beginnings of the names that are kept


@cache
def list_packages() -> dict[str, str]:
    """Return the version of every installed package by its name."""
    # Read once: each use of `metadata` and of `version` parses the package's file again.
    all_fields = [each.metadata for each in metadata.distributions()]
    return {fields["Name"]: fields["Version"] for fields in all_fields if fields and fields["Name"]}


def describe_environment() -> dict[str, Any]:
    """The environment of this process, as environment.json keeps it: versions, devices, git commit, command.

    The commit is that of the repository that has tunix's files, not of one in whose folder tunix is installed.
    """

    def ask_git(*args: str) -> str | None:
        root = Path(__file__).parents[1]
        with suppress(OSError):  # a machine without git
            result = subprocess.run(["git", *args], cwd=root, capture_output=True, errors="replace", check=False)
            return result.stdout.strip() if result.returncode == 0 else None
        return None

    is_tracked = ask_git("ls-files", "--error-unmatch", "__init__.py") is not None
    git = ask_git if is_tracked else lambda *_: None
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": mask_values([sys.executable, *sys.argv]),
        "folder": os.getcwd(),
        "host": platform.node(),
        "versions": list_versions(),
        "git_commit": git("rev-parse", "HEAD"),
        "git_changes": (git("status", "--porcelain") or "").splitlines(),
        "git_diff": (git("diff", "HEAD") or "")[:MAX_DIFF],
        "packages": list_packages(),
        "devices": [f"{device.id}: {device.device_kind} (process {device.process_index})" for device in jax.devices()],
        "processes": jax.process_count(),
        "variables": mask_variables({key: os.environ[key] for key in sorted(os.environ) if key.startswith(VARIABLES)}),
    }


# Folders in a run's folder: the files of model.init_from beside its weights; the tokenizer, with the tokens around a
# document and the chat template that it was trained with.
FILES, TOKENIZER = "pretrained", "tokenizer"


def open_folder(job: compose.Job) -> tuple[Path, bool]:
    """Return the run's folder, the same on every process, and True if all processes see it.

    Process 0 makes the folder; a resumed run has it already. On hosts that do not see it, the first process makes one
    at the same path.

    Raises:
        UserError: a folder given by hand that holds another run, that cannot be written, or that only some hosts see.
    """

    def make(folder: Path, claim: Callable[[], Path], is_here: bool) -> Path:
        try:
            return claim() if is_here and not job.goes_on_in_folder else folder
        except OSError as error:
            raise UserError(
                f"the run's folder {folder} cannot be written ({error.strerror or error}); choose hydra.run.dir=DIR"
            ) from None

    requested, is_main = job.run_dir.absolute(), peers.is_main()
    made = peers.together(lambda: make(requested, lambda: claim_folder(job), is_main), "the run's folder")
    folder = Path(peers.agree(str(made.absolute()), "the run's folder"))
    try:
        requested_sharing = job.config.distributed.shared_filesystem
        shared = is_seen_by_all(folder, requested_sharing, "the run's folder", "hydra.run.dir")
        if not shared and requested_sharing == "auto":
            log.warning(
                "%s is on no shared disk: every host keeps its own, process 0 the checkpoints "
                "(distributed.shared_filesystem)",
                folder,
            )
        if not shared:
            is_first = peers.first_of_host() and not is_main
            peers.together(lambda: make(folder, lambda: _claim(job, folder), is_first), "every host's folder")
    except UserError:
        # The run does not begin: give back the folder that was claimed above.
        if peers.is_main() and not job.goes_on_in_folder:
            (folder / "config.yaml").unlink()
            with suppress(OSError):  # other files were there before
                folder.rmdir()
        raise
    return folder, shared


def _writes_folder(shared: bool) -> bool:
    """Return True on the process that writes a run's folder: of all that see one folder (`shared`), or of its host."""
    return peers.is_main() or (not shared and peers.first_of_host())


def keep_files(cfg: Config, vocab: Vocab, run_folder: Path, shared: bool) -> None:
    """Put into the run's folder what export and a resume need: the tokenizer, and what `model.init_from` says beside
    its weights."""
    if not _writes_folder(shared):
        return
    # Each folder gets its name when it is whole: a resumed run takes one that is there for complete.
    if not (run_folder / TOKENIZER).is_dir():
        with replacing(run_folder / TOKENIZER) as new:
            vocab.save(new)
    if cfg.model.init_from is None or (run_folder / FILES).is_dir():
        return
    if cfg.resume and is_address(cfg.resume):  # the bucket has them
        source: Path | None = find_mirrored(cfg.resume, "resume", (FILES,))[0] / FILES
    else:
        source = find_model_files(cfg)
    with replacing(run_folder / FILES) as new:
        new.mkdir()
        for path in list_copied_files(source, (*INFO_FILES, "*.txt")) if source else ():
            if path.name != INDEX:
                shutil.copy(path, new / path.name)


def write_record(job: compose.Job, folder: Path, shared: bool, waiting: MemoryHandler) -> None:
    """Write the first files of the folder: config, environment and log; and the link `latest` to the folder."""
    if _writes_folder(shared):
        write_config(job, folder)
        _write_environment(folder)
        link = OUTPUTS / job.config.project_name / "latest"
        temporary = link.with_name(f".latest-{os.getpid()}")
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            # Made beside and renamed, since a link cannot be changed in place; relative, so that outputs/ can be moved.
            temporary.unlink(missing_ok=True)  # of a process that was killed: in a container all have the same number
            temporary.symlink_to(os.path.relpath(folder.resolve(), link.parent.resolve()))
            os.replace(temporary, link)
        except OSError as error:
            log.warning("no link %s to this run: %s", link, error.strerror)
    name = "train.log" if peers.is_main() else f"train.{jax.process_index()}.log"
    file = logging.FileHandler(folder / name)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    file.addFilter(MaskingFilter())
    # What was logged before there was a folder waits in memory until now.
    waiting.setTarget(file)
    waiting.flush()
    root = logging.getLogger()
    root.removeHandler(waiting)
    root.addHandler(file)


def find_model_files(cfg: Config) -> Path | None:
    """Return the folder of Hugging Face's files of the model that `model.init_from` names.

    A resumed run takes its own copies of them where that model is gone, or was left on another machine. None for a run
    that began without such files.
    """
    source = cfg.model.init_from
    if source is None:
        return None
    try:
        if run := find_run(source, "model.init_from", (FILES,)):
            return run[0] / FILES if (run[0] / FILES).is_dir() else None
        return find(source)
    except UserError:
        if cfg.resume is None or is_address(cfg.resume):
            raise
        copied = find_resume_point(cfg.resume, cfg.project_name)[0] / FILES
        if not copied.is_dir():
            raise
        return copied


def claim_folder(job: compose.Job) -> Path:
    """Create a folder of the run's name; a number is added to a name that is taken."""
    for number in range(1000):
        folder = job.run_dir if number == 0 else job.run_dir.with_name(f"{job.run_dir.name}_{number}")
        try:
            return _claim(job, folder)
        except UserError:
            if job.run_dir_is_explicit:
                raise
    raise UserError(f"no free folder beside {job.run_dir}")


def _claim(job: compose.Job, folder: Path) -> Path:
    """Create a folder. The run that creates config.yaml in it owns it; two runs never share one."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        create_file(folder / "config.yaml", _format_config(job))
    except FileExistsError:
        raise UserError(
            f"hydra.run.dir={folder} holds another run; {compose.format_resume(folder)} goes on with it"
        ) from None
    return folder


def _format_config(job: compose.Job) -> str:
    """Return the resolved config as YAML, without `resume`: the config of a run does not say that it goes on."""
    return compose.to_yaml(job.config.model_copy(update={"resume": None}))


def write_config(job: compose.Job, folder: Path) -> None:
    """Write the resolved config, and Hydra's record of how it was made; secrets in addresses are masked."""
    text = _format_config(job)
    write_whole(folder / "config.yaml", text)
    if job.hydra is not None:
        (folder / ".hydra").mkdir(exist_ok=True)
        (folder / ".hydra" / "hydra.yaml").write_text(format_yaml(mask_values(job.hydra)), encoding="utf-8")
        (folder / ".hydra" / "config.yaml").write_text(text)
        (folder / ".hydra" / "overrides.yaml").write_text(format_yaml(mask_values(job.overrides)), encoding="utf-8")


def _write_environment(folder: Path) -> None:
    """Write environment.json; a resumed run adds its environment to the list `resumed`. Its `git_diff`, which may have
    a megabyte, is null where it is that of the start before."""
    path = folder / "environment.json"
    record = describe_environment()
    if path.exists():
        try:
            first = parse_json(path.read_text())
            starts = [first, *first.setdefault("resumed", [])]
            before = next((start["git_diff"] for start in reversed(starts) if start.get("git_diff") is not None), None)
            if record["git_diff"] == before:
                record["git_diff"] = None
            first["resumed"].append(record)
            record = first
        except (ValueError, AttributeError, TypeError) as error:
            log.warning("%s is damaged (%s): it is written anew", path, error)
    write_whole(path, json.dumps(record, indent=1))


def start_logging(remarks: list[str], cfg: Logging) -> MemoryHandler:
    """Begin to log to the terminal, with `remarks` first.

    Returns a handler that keeps every message until the run has a folder, and with it a log file. Warnings of other
    libraries go to the log file alone.
    """
    logging.raiseExceptions = False  # a full disk is reported once, by the part of the run that needs it
    waiting = MemoryHandler(10**6, flushLevel=logging.CRITICAL + 1)  # a level that no message has: nothing flushes it
    logging.basicConfig(handlers=[waiting], level=logging.WARNING, force=True)
    logging.getLogger("absl").setLevel(logging.ERROR)
    # Errors of destructors, which Python prints on the terminal: tensorstore has some after a save that failed.
    sys.unraisablehook = lambda ignored: logging.getLogger("python").warning(
        "ignored in %r", ignored.object, exc_info=ignored.exc_value
    )
    ours = logging.getLogger("tunix")
    ours.setLevel(cfg.level.upper())
    ours.handlers.clear()
    if cfg.ranks is None or jax.process_index() in cfg.ranks:
        on_terminal = RichHandler(show_path=False, show_level=False, log_time_format="%X")
        handler = on_terminal if is_watched() else logging.StreamHandler(sys.stdout)
        handler.addFilter(MaskingFilter())
        ours.addHandler(handler)
    for remark in remarks:
        log.warning("%s", remark)
    return waiting
