"""Saved checkpoints as commands read them, and the check that files are still what tunix has written.

A checkpoint is named by its folder, RUN/checkpoints/STEP. That of a run in a bucket is a stand-in that holds only the
address (`config/saved_runs.py`), and everything is read from there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunix.base.digests import FILE, Damaged, check_files, list_files
from tunix.base.errors import UserError
from tunix.base.files import is_whole_number, list_numbers
from tunix.checkpoints.bucket import Bucket
from tunix.checkpoints.folders import Folder
from tunix.checkpoints.store import Storage
from tunix.config.saved_runs import find_run

ADDRESS = "address"  # a file in a checkpoint's folder that is a stand-in for one in a bucket


def find_storage(checkpoint: Path) -> tuple[Storage, int]:
    """Return the place and the step of a checkpoint."""
    file = checkpoint / ADDRESS
    if not file.is_file():
        return Folder(checkpoint.parent), int(checkpoint.name)
    folder, _, step = file.read_text().strip().rpartition("/")
    return Bucket(folder), int(step)


def reject_damaged_checkpoint(checkpoint: Path, key: str = "checkpoint") -> None:
    """Raise `UserError` if the files of a run's checkpoint are not those of its digests; `key` is for the message."""
    try:
        storage, step = find_storage(checkpoint)
        storage.check(step, 0, 1)
    except Damaged as damage:
        others = [str(step) for step in list_numbers(checkpoint.parent) if str(step) != checkpoint.name]
        hint = f"; take another step: {checkpoint.parent}/STEP with STEP of {', '.join(others)}" if others else ""
        raise UserError(f"{key}: {damage}{hint}") from None


@contextmanager
def describe_unreadable(checkpoint: Path, key: str = "checkpoint") -> Iterator[None]:
    """Turn an error of reading a checkpoint in this block into a `UserError`: without digests, damage is found late."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Orbax has no kind of its own
        reason = (str(error).splitlines() or [repr(error)])[0][:400]
        raise UserError(f"{key}: {checkpoint} cannot be read: {reason}") from error


def check_everything(source: str) -> tuple[list[str], bool]:
    """Compare a run (or one of its checkpoints), an export or a prepared corpus with its digests.

    Returns:
        A line for each checkpoint or folder, and True if nothing is damaged.

    Raises:
        UserError: the folder is none of these, or it has no digests.
    """
    lines, is_intact = [], True
    for folder, is_checkpoint in _find_folders(source):
        name, files = str(folder), f", {len(list_files(folder))} files"
        try:
            if is_checkpoint:
                storage, step = find_storage(folder)
                name, files = f"{storage.folder}/{step}", "" if isinstance(storage, Bucket) else files
                size = storage.check(step, 0, 1)
            else:
                size = check_files([folder / FILE])
        except Damaged as damage:
            lines.append(f"DAMAGED {name}: {damage}")
            is_intact = False
            continue
        result = "no digests (an older version wrote it); it can be read"
        if size is not None:
            result = f"as written, {size / 2**30:.3f} GiB read"
        lines.append(f"{name}: {result}{files}")
    return lines, is_intact


def _find_folders(source: str) -> list[tuple[Path, bool]]:
    """Return the folders to check, each with True if it is a checkpoint."""
    if run := find_run(source):
        # Files and links to nothing with such a name are listed too: whoever wants to know is told that they are wrong.
        steps = sorted(int(path.name) for path in (run[0] / "checkpoints").glob("*") if is_whole_number(path.name))
        requested = steps if run[1] is None else [run[1]]
        if not steps or not set(requested) <= set(steps):
            entries = f"the run has {', '.join(map(str, steps))}" if steps else f"{run[0]} has none yet"
            raise UserError(f"checkpoint={source}: there is no such checkpoint; {entries}")
        return [(run[0] / "checkpoints" / str(step), True) for step in requested]
    folder = Path(source).expanduser()
    if not (folder / FILE).is_file():
        raise UserError(
            f"checkpoint={source}: there is no {FILE}; expected a run's folder, an export or a prepared corpus of tunix"
        )
    return [(folder, False)]
