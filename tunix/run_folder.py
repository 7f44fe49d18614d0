"""A run's folder: claimed by one run, with its config, environment and log."""

import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from logging.handlers import MemoryHandler
from pathlib import Path

import jax
from omegaconf import OmegaConf
from rich.logging import RichHandler

from tunix import compose, distributed
from tunix.config import UserError

log = logging.getLogger(__name__)
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


def start_logging() -> MemoryHandler:
    """Log to the terminal at once; what is logged before the run has a folder waits in the handler returned.

    Warnings of other libraries go to the log file alone.
    """
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
    return waiting


def open_folder(job: compose.Job) -> Path:
    """The folder of this run, the same on every process; a resumed run's is there already.

    Raises:
        UserError: a folder given by hand that holds another run, or that cannot be written.
    """
    answer = ""
    if distributed.is_main():
        try:
            answer = str((job.run_dir if job.config.resume else claim(job)).absolute())
        except OSError as error:
            reason = error.strerror or str(error)
            answer = f"error: the run's folder {job.run_dir} cannot be written ({reason}); choose hydra.run.dir=DIR"
        except UserError as error:
            answer = f"error: {error}"
    answer = distributed.agree(answer)
    if answer.startswith("error: "):
        raise UserError(answer.removeprefix("error: "))
    _check_shared(Path(answer))
    return Path(answer)


def _check_shared(folder: Path) -> None:
    """Raise UserError if a process does not see the folder that process 0 has made."""
    for _ in range(20):  # a network file system may take its time
        if (folder / "config.yaml").exists():
            break
        time.sleep(0.5)
    seen = distributed.gather("" if (folder / "config.yaml").exists() else socket.gethostname())
    blind = sorted({host for host in seen if host})
    if blind:
        raise UserError(
            f"the run's folder {folder} is not seen by {', '.join(blind)}; "
            "choose one on a disk that all processes share: hydra.run.dir=DIR"
        )


def write_record(job: compose.Job, folder: Path, waiting: MemoryHandler) -> None:
    """The first files of the folder: config, environment, log, and the link to it."""
    if distributed.is_main():
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
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with (folder / "config.yaml").open("x") as file:
                file.write(_config_text(job))
            return folder
        except FileExistsError:
            if job.run_dir_is_explicit:
                raise UserError(f"hydra.run.dir={folder} holds another run; resume={folder} goes on with it") from None
    raise UserError(f"no free folder beside {job.run_dir}")


def _config_text(job: compose.Job) -> str:
    return compose.to_yaml(job.config.model_copy(update={"resume": None}))


def write_config(job: compose.Job, folder: Path) -> None:
    """The resolved config, and Hydra's record of how it was made."""
    text = _config_text(job)
    (folder / "config.yaml.new").write_text(text)
    os.replace(folder / "config.yaml.new", folder / "config.yaml")
    if job.hydra is not None:
        (folder / ".hydra").mkdir(exist_ok=True)
        OmegaConf.save(job.hydra, folder / ".hydra" / "hydra.yaml")
        (folder / ".hydra" / "config.yaml").write_text(text)
        OmegaConf.save(OmegaConf.create(job.overrides), folder / ".hydra" / "overrides.yaml")


def _write_environment(folder: Path) -> None:
    """What the run runs on; a resumed run adds to the list of its beginnings."""
    path = folder / "environment.json"
    if not path.exists():
        path.write_text(json.dumps(_environment(), indent=1))
        return
    record = json.loads(path.read_text())
    record.setdefault("resumed", []).append(_environment())
    path.write_text(json.dumps(record, indent=1))


def _link_latest(folder: Path, link: Path) -> None:
    temporary = link.with_name(f".latest-{os.getpid()}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary.symlink_to(os.path.relpath(folder, link.parent))
        os.replace(temporary, link)
    except OSError as error:
        log.warning("no link %s to this run: %s", link, error.strerror)


def _environment() -> dict:
    """What a run ran on."""

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def git(*words: str) -> str | None:
        result = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else None

    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": [sys.executable, *sys.argv],
        "folder": os.getcwd(),
        "host": platform.node(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES if version(package)},
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
