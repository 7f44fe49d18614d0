"""The folder of a run that will start elsewhere: it holds the resolved config, ready for `resume=RUN_DIR`."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tunix.base.errors import UserError, mask_values
from tunix.base.files import list_numbers
from tunix.base.text import flat
from tunix.config import Config, Local, compose
from tunix.config.launcher import Nodes
from tunix.processes import exits
from tunix.processes.identity import find_identity
from tunix.run.folder import claim_folder, write_config

# Exit codes after which a run starts again, the worst last: stopped before it began, stopped early, lost a process,
# aborted by JAX's runtime, killed. After every other code the next start would fail in the same way.
TO_RETRY = (143, 138, exits.STOPPED, exits.PEER, 134, 137)


@contextmanager
def prepare_folder(job: compose.Job) -> Iterator[Path]:
    """Make the run's folder with a config.yaml whose launcher is local. If the block fails, undo that.

    Raises:
        UserError: the folder holds another run or cannot be written, or several processes submit the run.
    """
    if identity := find_identity(job.config.distributed):
        raise UserError(
            f"launcher={job.config.launcher.name} submits a run once, but this is process {identity.process_id} of "
            f"{identity.num_processes} ({identity.source}); start it alone"
        )
    for key, value in flat(job.config.model_dump(mode="json", by_alias=True)).items():
        if mask_values(value) != value:
            raise UserError(
                f"{key} has a password or a signature, and a run that starts elsewhere reads its keys from a file, "
                "which keeps none; use credentials of the machine (docs/buckets.md)"
            )
    job = replace(job, config=job.config.model_copy(update={"launcher": Local(name="local")}))
    resumes = job.goes_on_in_folder
    written = [job.run_dir / "config.yaml", *(job.run_dir / ".hydra").glob("*")] if resumes else []
    try:
        restore = [keep(path) for path in written]
        folder = (job.run_dir if resumes else claim_folder(job)).absolute()
        others = {path for path in folder.iterdir() if path.name != "config.yaml"}  # that were in the folder before
        write_config(job, folder)
    except OSError as error:
        raise UserError(
            f"the run's folder {job.run_dir} cannot be written ({error.strerror}); choose hydra.run.dir=DIR"
        ) from None
    try:
        yield folder
    except BaseException:
        if resumes:
            for put_back in restore:
                put_back()
            raise
        for path in {*folder.iterdir()} - others:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for each in (folder, *folder.parents):  # with those above it that were made for it: what is empty then
            if each == Path.cwd() or any(each.iterdir()):
                break
            os.rmdir(each)
        raise


def find_newer(config: Config, folder: Path, step: int | None) -> tuple[Path, int] | None:
    """Return the newest checkpoint of a run that is to go on from an earlier `step`, and when it was changed (seconds).

    The start that goes on from that step puts it aside. As long as it is there as it was, no start has come so far, and
    the next one begins with that step, too. None where no checkpoint is newer, or where they are in a bucket.
    """
    checkpoints = Path(config.checkpoint.folder or folder) / "checkpoints"
    newest = max(list_numbers(checkpoints), default=0)
    if step is None or newest <= step:
        return None
    path = checkpoints / str(newest)
    return path, int(path.stat().st_mtime)


def describe(config: Config, nodes: Nodes) -> str:
    """Return the size of the run in words: `2 nodes, 8 GPUs each, 16 processes`."""

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}{'' if number == 1 else 's' if noun[-1] != 's' else 'es'}"

    devices = count(nodes.gpus_per_node, "GPU") if nodes.gpus_per_node else "CPUs only"
    resources = f"{count(nodes.nodes, 'node')}, {devices} each, {count(nodes.nodes * nodes.tasks, 'process')}"
    return f"{config.run_name}, {resources}" if config.run_name else resources


def print_numbers(config: Config, nodes: Nodes) -> None:
    """Print the derived numbers of the run on stderr: on stdout is what would be submitted, which may go to a file.

    What is chosen by the devices themselves is only known there.
    """
    if config.training.micro_batch_size == "auto" or config.plan.choose_mesh:
        print("the devices choose the batch or the mesh: python -m tunix.plan predicts them", file=sys.stderr)
        return
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing is computed, and a login node's GPU is others' too
    from tunix.run.start_report import make_report_of_launched

    platform = "gpu" if nodes.gpus_per_node else "cpu"
    print(make_report_of_launched(config, nodes.num_devices, platform), file=sys.stderr)


def keep(path: Path) -> Callable[[], object]:
    """Return a function that makes a file as it is now, or removes it if there is none now."""
    return partial(path.write_bytes, path.read_bytes()) if path.is_file() else partial(path.unlink, missing_ok=True)


def write_file(path: Path, text: str) -> Path:
    """Write a file, and the folders above it; raises `UserError` if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None
    return path
