"""A run's folder: claimed by one run, with its config, environment and log."""

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from logging.handlers import MemoryHandler
from pathlib import Path

import jax
from omegaconf import OmegaConf
from rich.logging import RichHandler

from tunix import compose, distributed
from tunix.config import UserError

log = logging.getLogger(__name__)
PROBE_S = 5.0
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tokenizers",
    "numpy",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)


def start_logging(remarks: list[str]) -> MemoryHandler:
    """Log to the terminal at once, `remarks` first; what is logged before the run has a folder waits in the handler
    returned.

    Warnings of other libraries go to the log file alone.
    """
    logging.raiseExceptions = False  # a full disk is told of once, by what needs it
    waiting = MemoryHandler(10**6, flushLevel=logging.CRITICAL + 1)
    logging.basicConfig(handlers=[waiting], level=logging.WARNING, force=True)
    logging.getLogger("absl").setLevel(logging.ERROR)
    sys.unraisablehook = lambda ignored: logging.getLogger("python").warning(  # tensorstore, after a failed save
        "ignored in %r", ignored.object, exc_info=ignored.exc_value
    )
    ours = logging.getLogger("tunix")
    ours.setLevel(logging.INFO)
    ours.handlers.clear()
    if distributed.is_main():
        on_terminal = RichHandler(show_path=False, show_level=False, log_time_format="%X")
        ours.addHandler(on_terminal if sys.stdout.isatty() else logging.StreamHandler(sys.stdout))
    for remark in remarks:
        log.warning("%s", remark)
    return waiting


def open_folder(job: compose.Job) -> tuple[Path, bool]:
    """The folder of this run, the same on every process (a resumed run's is there already), and whether all see one.

    Where they do not, the first process of every host has made its own.

    Raises:
        UserError: a folder given by hand that holds another run, that cannot be written, or that only some see.
    """

    def made(folder: Path, claimed: Callable[[Path], Path]) -> Path:
        try:
            return folder if job.config.resume else claimed(folder)
        except OSError as error:
            raise UserError(
                f"the run's folder {folder} cannot be written ({error.strerror or error}); choose hydra.run.dir=DIR"
            ) from None

    asked = job.run_dir.absolute()
    named = distributed.together(
        lambda: made(asked, lambda _: claim(job)) if distributed.is_main() else asked, "the run's folder"
    )
    folder = Path(distributed.agree(str(named.absolute()), "the run's folder"))
    try:
        shared = _is_shared(folder, job.config.distributed.shared_filesystem)
        if not shared:
            mine = distributed.first_of_host() and not distributed.is_main()
            distributed.together(
                lambda: made(folder, lambda folder: _claim_this(job, folder)) if mine else folder, "every host's folder"
            )
    except UserError:
        if distributed.is_main() and not job.config.resume:
            (folder / "config.yaml").unlink()
            with suppress(OSError):  # other files were there before
                folder.rmdir()
        raise
    return folder, shared


def _is_shared(folder: Path, asked: bool | str) -> bool:
    """Whether all processes see the folder of process 0, where it puts a file for them to find."""
    if jax.process_count() == 1:
        return True
    if asked is False:
        return False
    blind = {distributed.hosts()[rank] for rank in blind_to(folder)}
    if not blind:
        return True
    others = set(distributed.hosts()) - {distributed.hosts()[0]}
    if asked is True or blind != others:
        raise UserError(
            f"the run's folder {folder} is not seen by {', '.join(sorted(blind))}; "
            "choose one on a disk that all processes share: hydra.run.dir=DIR"
        )
    log.warning(
        "%s is on no shared disk: every host keeps its own, process 0 the checkpoints (distributed.shared_filesystem)",
        folder,
    )
    return False


def blind_to(folder: Path) -> list[int]:
    """Processes that do not see a file which process 0 makes in the folder; called by all.

    Raises:
        UserError: process 0 cannot write there.
    """
    probe = folder / distributed.agree(f".probe-{time.time_ns()}", "name of the probe file")

    def put() -> None:
        try:
            if distributed.is_main():
                probe.touch()
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from None

    distributed.together(put, "the probe file is there")
    seen = distributed.gather("seen" if _comes(probe, PROBE_S) else "", "the probe file")
    if distributed.is_main():
        probe.unlink()
    return [rank for rank, said in enumerate(seen) if not said]


def _comes(path: Path, patience_s: float) -> bool:
    """Whether the file is seen soon; a network file system may take its time."""
    deadline = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def write_record(job: compose.Job, folder: Path, shared: bool, waiting: MemoryHandler) -> None:
    """The first files of the folder: config, environment, log, and the link to it."""
    if distributed.is_main() or (not shared and distributed.first_of_host()):
        write_config(job, folder)
        _write_environment(folder)
        _link_latest(folder, compose.OUTPUTS / job.config.project_name / "latest")
    name = "train.log" if distributed.is_main() else f"train.{jax.process_index()}.log"
    file = logging.FileHandler(folder / name)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    waiting.setTarget(file)
    waiting.flush()
    root = logging.getLogger()
    root.removeHandler(waiting)
    root.addHandler(file)


def claim(job: compose.Job) -> Path:
    """Create the folder; whoever creates config.yaml in it owns it. A taken name gets a number behind it."""
    for number in range(1000):
        folder = job.run_dir if number == 0 else job.run_dir.with_name(f"{job.run_dir.name}_{number}")
        try:
            return _claim_this(job, folder)
        except UserError:
            if job.run_dir_is_explicit:
                raise
    raise UserError(f"no free folder beside {job.run_dir}")


def _claim_this(job: compose.Job, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / "config.yaml").open("x") as file:
            file.write(_config_text(job))
    except FileExistsError:
        raise UserError(f"hydra.run.dir={folder} holds another run; resume={folder} goes on with it") from None
    except OSError:
        with suppress(OSError):
            (folder / "config.yaml").unlink()  # half of one would hold the folder
        raise
    return folder


def _config_text(job: compose.Job) -> str:
    return compose.to_yaml(job.config.model_copy(update={"resume": None}))


def write_config(job: compose.Job, folder: Path) -> None:
    """The resolved config, and Hydra's record of how it was made."""
    text = _config_text(job)
    _replace(folder / "config.yaml", text)
    if job.hydra is not None:
        (folder / ".hydra").mkdir(exist_ok=True)
        OmegaConf.save(job.hydra, folder / ".hydra" / "hydra.yaml")
        (folder / ".hydra" / "config.yaml").write_text(text)
        OmegaConf.save(OmegaConf.create(job.overrides), folder / ".hydra" / "overrides.yaml")


def _write_environment(folder: Path) -> None:
    """What the run runs on; a resumed run adds to the list of its beginnings."""
    path = folder / "environment.json"
    if not path.exists():
        _replace(path, json.dumps(_environment(), indent=1))
        return
    record = json.loads(path.read_text())
    record.setdefault("resumed", []).append(_environment())
    _replace(path, json.dumps(record, indent=1))


def _replace(path: Path, text: str) -> None:
    """Write the file whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


def _link_latest(folder: Path, link: Path) -> None:
    temporary = link.with_name(f".latest-{os.getpid()}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary.symlink_to(os.path.relpath(folder, link.parent))
        os.replace(temporary, link)
    except OSError as error:
        log.warning("no link %s to this run: %s", link, error.strerror)


def versions() -> dict[str, str]:
    """Of Python, of the packages that a run's numbers depend on, and of the code of tunix (a hash)."""
    found = {"python": platform.python_version(), "code of tunix": _code_hash()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _code_hash() -> str:
    root = Path(__file__).parent
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _environment() -> dict:
    """What a run ran on."""

    def git(*words: str) -> str | None:
        result = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else None

    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": [sys.executable, *sys.argv],
        "folder": os.getcwd(),
        "host": platform.node(),
        "versions": versions(),
        "git_commit": git("rev-parse", "HEAD"),
        "git_changes": (git("status", "--porcelain") or "").splitlines(),
        "devices": [f"{device.id}: {device.device_kind} (process {device.process_index})" for device in jax.devices()],
        "processes": jax.process_count(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("XLA_", "JAX_", "NCCL_", "TUNIX_", "CUDA_", "SLURM_"))
        },
    }
