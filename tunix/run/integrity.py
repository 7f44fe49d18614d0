"""Integrity of files: those of a checkpoint, an export or a prepared corpus must be what tunix has written."""

from pathlib import Path

from tunix.base.digests import FILE, Damaged, check_files, list_files
from tunix.base.disk import list_numbers
from tunix.base.errors import UserError
from tunix.cli.runs import find_run
from tunix.run.objects import find_address
from tunix.run.sealed import check_checkpoint


def refuse_damaged_checkpoint(checkpoint: Path) -> None:
    """Raise `UserError` if the files of a checkpoint of a run are not those of its digests."""
    try:
        check_checkpoint(checkpoint)
    except Damaged as damage:
        others = sorted(path.name for path in checkpoint.parent.glob("*") if path.name.isdigit() and path != checkpoint)
        way_out = f"; take another step: {checkpoint.parent}/STEP with STEP of {', '.join(others)}" if others else ""
        raise UserError(f"checkpoint: {damage}{way_out}") from None


def check_everything(source: str) -> tuple[list[str], bool]:
    """Compare a run (or one of its checkpoints), an export or a prepared corpus with its digests.

    Returns:
        A line for each checkpoint or folder, and True if nothing is damaged.

    Raises:
        UserError: the folder is none of these, or it has no digests.
    """
    folders = _find_folders(source)
    lines, is_intact = [], True
    for folder, is_checkpoint in folders:
        address = find_address(folder)
        name, files = (address, "") if address else (str(folder), f", {len(list_files(folder))} files")
        try:
            size = check_checkpoint(folder) if is_checkpoint else check_files([folder / FILE])
        except Damaged as damage:
            lines.append(f"DAMAGED {name}: {damage}")
            is_intact = False
            continue
        result = "no digests (an older version wrote it)"
        if size is not None:
            result = f"as written, {size / 2**30:.3f} GiB read"
        lines.append(f"{name}: {result}{files}")
    return lines, is_intact


def _find_folders(source: str) -> list[tuple[Path, bool]]:
    """Return the folders to check, each with True if it is a checkpoint."""
    if run := find_run(source):
        steps = list_numbers(run[0] / "checkpoints")
        wanted = steps if run[1] is None else [run[1]]
        if not steps or not set(wanted) <= set(steps):
            listed = f"the run has {', '.join(map(str, steps))}" if steps else f"{run[0]} has none yet"
            raise UserError(f"checkpoint={source}: there is no such checkpoint; {listed}")
        return [(run[0] / "checkpoints" / str(step), True) for step in wanted]
    folder = Path(source).expanduser()
    if not (folder / FILE).is_file():
        raise UserError(
            f"checkpoint={source}: there is no {FILE}; expected a run's folder, an export or a prepared corpus of tunix"
        )
    return [(folder, False)]
