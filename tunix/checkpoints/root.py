"""Home of a run's checkpoints: the run's folder, or the folder or address that `checkpoint.folder` names.

    HOME/config.yaml, HOME/tokenizer/, HOME/pretrained/     what a run needs to go on from there
    HOME/checkpoints/STEP

So `resume=HOME` goes on on a machine that has never seen the run's folder.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import jax

from tunix.base.buckets import explaining, filesystem, is_address, join, read_text, upload
from tunix.base.errors import UserError
from tunix.base.files import create_file, write_whole
from tunix.checkpoints.bucket import KEY, Objects
from tunix.checkpoints.store import make_storage, reject_newer_checkpoint
from tunix.config.compose import Job, format_resume
from tunix.config.saved_runs import COPIED, split_step
from tunix.processes import peers
from tunix.processes.peers import is_seen_by_all

log = logging.getLogger(__name__)
CONFIG = "config.yaml"


def _describe_taken(root: str) -> str:
    return f"{KEY}={root} holds another run; {format_resume(root)} goes on with it"


def find_root(job: Job, folder: Path) -> str:
    """Return the home of the checkpoints of the run that works in `folder`."""
    return job.config.checkpoint.folder or str(folder)


def check_root(job: Job) -> bool | None:
    """Write and delete a small file in the home, on process 0; in a bucket a small object on every process.

    Return whether all processes see the home; None where it is the run's folder, or in a bucket.

    Raises:
        UserError: the home holds another run, or cannot be written; or the checkpoint to go on from has a newer form.
            Nothing else has been read or written before.
    """
    if job.config.resume:
        peers.on_main(lambda: _reject_newer_checkpoint(job), "looking at the checkpoint")
    root = job.config.checkpoint.folder
    if root is None:
        return None
    peers.on_main(lambda: _reject_other_run(job, root), "the home of the checkpoints")
    if is_address(root):
        peers.together(lambda: _try_out_bucket(root, job.config.checkpoint.timeout_s), "writing to the bucket")
        return None
    requested = job.config.distributed.shared_filesystem
    with ExitStack() as stack:
        there = _trying_out(Path(root))
        peers.on_main(lambda: stack.enter_context(there), "writing to the home of the checkpoints")
        is_shared = is_seen_by_all(Path(root), requested, "the home of the checkpoints", KEY)
    if not is_shared and requested == "auto":
        log.warning("%s is on no shared disk: process 0 keeps the checkpoints (distributed.shared_filesystem)", root)
    return is_shared


def _reject_newer_checkpoint(job: Job) -> None:
    folder = join(find_root(job, job.run_dir), "checkpoints")
    storage = make_storage(folder, job.config.checkpoint, is_shared=True)
    steps = storage.list_steps()
    for step in steps[-1:] if job.resume_step is None else [job.resume_step]:
        reject_newer_checkpoint(storage, step)


def _reject_other_run(job: Job, root: str) -> None:
    """Raise `UserError` for a new run at the home of another one, and for a run that would leave its checkpoints."""
    if job.config.resume:
        came_from = job.came_from or split_step(job.config.resume)[0]
        if came_from != root:
            raise UserError(
                f"{KEY}={root}: the checkpoints of this run are in {came_from}; model.init_from={came_from} starts "
                "a new run from its weights"
            )
        # A run takes its home before its first step (`write_root`).
        has_trained = (job.run_dir / "metrics.jsonl").is_file()
        if has_trained and not is_address(root) and not (Path(root) / CONFIG).is_file():
            raise UserError(
                f"{KEY}={root} is not there, and this run's checkpoints were; put it back, or write its new place into "
                f"{job.run_dir / CONFIG}"
            )
        return
    if read_text(join(root, CONFIG), KEY) is not None if is_address(root) else (Path(root) / CONFIG).is_file():
        raise UserError(_describe_taken(root))


@contextmanager
def _trying_out(root: Path) -> Iterator[None]:
    """Make the folder for a block, and a file in it; remove both: another mistake may be found before a run begins."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(b"tunix")
            file.flush()
        yield
    except OSError as error:
        raise UserError(f"{KEY}={root} cannot be written: {error.strerror}; name another folder") from None
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _try_out_bucket(root: str, timeout_s: float) -> None:
    name, text = f".probe-{jax.process_index()}", b"tunix"
    with explaining(root, KEY):
        # At most 10 s: the user waits for the start. A longer limit is for a server that is away while the run trains.
        objects = Objects(root, min(timeout_s, 10.0))
        objects.write(name, text)
        if objects.read(name) != text:
            raise UserError(f"{KEY}={root}: the bucket does not give back what was written")
        objects.delete(name)


def write_root(job: Job, folder: Path, root: str) -> None:
    """Write what a run needs to go on into the home of its checkpoints, on process 0. A new run takes the home."""
    if job.config.checkpoint.folder is None:
        return
    peers.on_main(lambda: _write(job, folder, root), "the home of the checkpoints")


def _write(job: Job, folder: Path, root: str) -> None:
    text = (folder / CONFIG).read_text()
    if is_address(root):
        files, address = filesystem(root, KEY), join(root, CONFIG)
        with explaining(address, KEY):
            try:
                # "create" fails where the file exists, as one operation of the server: of two runs that start at the
                # same time with the same address, only one gets it.
                files.pipe_file(address, text.encode(), mode="overwrite" if job.config.resume else "create")
            except FileExistsError:
                raise UserError(_describe_taken(root)) from None
        for name in COPIED:
            if (folder / name).is_dir():
                upload(folder / name, join(root, name), KEY)
        return
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        is_local = folder.samefile(root)  # its config.yaml is that of this run
        (write_whole if job.config.resume or is_local else create_file)(Path(root) / CONFIG, text)
        for name in COPIED:
            if (folder / name).is_dir() and not is_local:
                shutil.copytree(folder / name, Path(root) / name, dirs_exist_ok=True)
    except FileExistsError:
        raise UserError(_describe_taken(root)) from None
    except OSError as error:
        raise UserError(f"{KEY}={root} cannot be written: {error.strerror}") from None
