"""Home of a run's checkpoints: the run's folder, or the folder or address that `checkpoint.folder` names.

    HOME/config.yaml, HOME/tokenizer/, HOME/pretrained/     what a run needs to go on from there
    HOME/checkpoints/STEP

So `resume=HOME` goes on on a machine that has never seen the run's folder.
"""

import shutil
from pathlib import Path

import jax

from tunix.base.buckets import explaining, filesystem, is_address, join, read_text, upload
from tunix.base.disk import create_file, write_whole
from tunix.base.errors import UserError
from tunix.cli.compose import Job
from tunix.cli.mirrored import COPIED, split_step
from tunix.processes import peers
from tunix.run.objects import KEY, Objects

CONFIG = "config.yaml"


def find_home(job: Job, folder: Path) -> str:
    """Return the home of the checkpoints of the run that works in `folder`."""
    return job.config.checkpoint.folder or str(folder)


def check_home(job: Job) -> None:
    """Write, read and delete a small object on every process, where the checkpoints are in a bucket.

    Raises:
        UserError: the home holds another run, or the bucket cannot be written; before anything else is written.
    """
    home = job.config.checkpoint.folder
    if home is None:
        return
    peers.on_main(lambda: _refuse_other_run(job, home), "the home of the checkpoints")
    if is_address(home):
        peers.together(lambda: _try_out(home, job.config.checkpoint.timeout_s), "writing to the bucket")


def _refuse_other_run(job: Job, home: str) -> None:
    """Raise `UserError` for a new run at the home of another one, and for a run that would leave its checkpoints."""
    if job.config.resume:
        came_from = job.came_from or split_step(job.config.resume)[0]
        if came_from != home:
            raise UserError(
                f"{KEY}={home}: the checkpoints of this run are in {came_from}; model.init_from={came_from} starts "
                "a new run from its weights"
            )
        return
    holds_run = read_text(join(home, CONFIG), KEY) is not None if is_address(home) else (Path(home) / CONFIG).is_file()
    if holds_run:
        raise _make_taken_error(home)


def _make_taken_error(home: str) -> UserError:
    return UserError(f"{KEY}={home} holds another run; resume={home} goes on with it")


def _try_out(home: str, timeout_s: float) -> None:
    name, text = f".probe-{jax.process_index()}", b"tunix"
    with explaining(home, KEY):
        # At most 10 s: the user waits for the start. A longer limit is for a server that is away while the run trains.
        objects = Objects(home, min(timeout_s, 10.0))
        objects.write(name, text)
        if objects.read(name) != text:
            raise UserError(f"{KEY}={home}: the bucket does not give back what was written")
        objects.delete(name)


def write_home(job: Job, folder: Path, home: str) -> None:
    """Write what a run needs to go on into the home of its checkpoints, on process 0. A new run takes the home."""
    if job.config.checkpoint.folder is None:
        return
    peers.on_main(lambda: _write(job, folder, home), "the home of the checkpoints")


def _write(job: Job, folder: Path, home: str) -> None:
    text = (folder / CONFIG).read_text()
    if is_address(home):
        files, place = filesystem(home, KEY), join(home, CONFIG)
        with explaining(place, KEY):
            try:
                # "create" fails where the file exists, as one operation of the server: of two runs that start at the
                # same time with the same address, only one gets it.
                files.pipe_file(place, text.encode(), mode="overwrite" if job.config.resume else "create")
            except FileExistsError:
                raise _make_taken_error(home) from None
        for name in COPIED:
            if (folder / name).is_dir():
                upload(folder / name, join(home, name), KEY)
        return
    try:
        Path(home).mkdir(parents=True, exist_ok=True)
        is_own = folder.samefile(home)  # its config.yaml is that of this run
        (write_whole if job.config.resume or is_own else create_file)(Path(home) / CONFIG, text)
        for name in COPIED:
            if (folder / name).is_dir() and not is_own:
                shutil.copytree(folder / name, Path(home) / name, dirs_exist_ok=True)
    except FileExistsError:
        raise _make_taken_error(home) from None
    except OSError as error:
        raise UserError(f"{KEY}={home} cannot be written: {error.strerror}") from None
