"""The folder of a run that starts elsewhere: its resolved config, ready for `resume=RUN_DIR`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tunix.base.errors import UserError
from tunix.cli import compose
from tunix.config import Local
from tunix.processes.identity import who_am_i
from tunix.run import run_folder


@contextmanager
def folder(job: compose.Job) -> Iterator[Path]:
    """The run's folder with a config.yaml whose launcher is local; restored if the block fails.

    Raises:
        UserError: the folder holds another run or cannot be written, or several processes came to submit it.
    """
    if one_of_many := who_am_i(job.config.distributed):
        raise UserError(
            f"launcher={job.config.launcher.name} submits a run once, but this is process {one_of_many.process_id} of "
            f"{one_of_many.num_processes} ({one_of_many.source}); start it alone"
        )
    job = replace(job, config=job.config.model_copy(update={"launcher": Local(name="local")}))
    resumes = job.config.resume is not None
    before = (job.run_dir / "config.yaml").read_text() if resumes else ""
    try:
        made = (job.run_dir if resumes else run_folder.claim_folder(job)).absolute()
        run_folder.write_config(job, made)
    except OSError as error:
        raise UserError(
            f"the run's folder {job.run_dir} cannot be written ({error.strerror}); choose hydra.run.dir=DIR"
        ) from None
    try:
        yield made
    except BaseException:
        if resumes:
            (made / "config.yaml").write_text(before)
        else:
            _remove(made)
        raise


def write(path: Path, text: str) -> Path:
    """Raises `UserError` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None
    return path


def _remove(made: Path) -> None:
    """The folder, and the folders around it that are empty then."""
    shutil.rmtree(made)
    for parent in made.parents:
        if parent == Path.cwd() or any(parent.iterdir()):
            return
        os.rmdir(parent)
