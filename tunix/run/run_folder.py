"""A run's folder: claimed by one run, with its config, environment and log."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path

import jax

from tunix.base.buckets import is_address
from tunix.base.disk import create_file, write_whole
from tunix.base.errors import UserError
from tunix.base.yaml_text import format_yaml
from tunix.cli import compose
from tunix.cli.mirrored import find_mirrored
from tunix.cli.runs import OUTPUTS, find_run
from tunix.config import Config
from tunix.hf.hub import ABOUT, find
from tunix.hf.tensor_files import INDEX
from tunix.processes import peers
from tunix.processes.shared_disk import find_blind
from tunix.run.environment import describe_environment
from tunix.tokenizer.vocabulary import Vocabulary

# Folders in a run's folder: the files of model.init_from beside its weights; the tokenizer, with the tokens around a
# document and the chat template that it was trained with.
FILES, TOKENIZER = "pretrained", "tokenizer"

log = logging.getLogger(__name__)


def open_folder(job: compose.Job) -> tuple[Path, bool]:
    """Return the run's folder, the same on every process, and True if all processes see it.

    Process 0 makes the folder; a resumed run has it already. On hosts that do not see it, the first process makes one
    at the same path.

    Raises:
        UserError: a folder given by hand that holds another run, that cannot be written, or that only some hosts see.
    """

    def make(folder: Path, claim: Callable[[], Path]) -> Path:
        try:
            return folder if job.goes_on_in_folder else claim()
        except OSError as error:
            raise UserError(
                f"the run's folder {folder} cannot be written ({error.strerror or error}); choose hydra.run.dir=DIR"
            ) from None

    def make_on_main() -> Path:
        wanted = job.run_dir.absolute()
        return make(wanted, lambda: claim_folder(job)) if peers.is_main() else wanted

    def make_on_host() -> None:
        if peers.first_of_host() and not peers.is_main():
            make(folder, lambda: _claim(job, folder))

    made = peers.together(make_on_main, "the run's folder")
    folder = Path(peers.agree(str(made.absolute()), "the run's folder"))
    try:
        shared = _is_shared(folder, job.config.distributed.shared_filesystem)
        if not shared:
            peers.together(make_on_host, "every host's folder")
    except UserError:
        # The run does not begin: give back the folder that was claimed above.
        if peers.is_main() and not job.goes_on_in_folder:
            (folder / "config.yaml").unlink()
            with suppress(OSError):  # other files were there before
                folder.rmdir()
        raise
    return folder, shared


def _is_shared(folder: Path, asked: bool | str) -> bool:
    """Return True if all processes see the folder of process 0, in which it writes a file for them to find."""
    if jax.process_count() == 1:
        return True
    if asked is False:
        return False
    blind = {peers.hosts()[rank] for rank in find_blind(folder)}
    if not blind:
        return True
    # Where every other host lacks the folder, no disk is shared, and the run knows how to do without. Where only some
    # hosts lack it, a disk is meant to be shared, and is not mounted there.
    others = set(peers.hosts()) - {peers.hosts()[0]}
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


def keep_files(cfg: Config, vocabulary: Vocabulary, run_folder: Path) -> None:
    """Put into the run's folder what export needs: the tokenizer and what `model.init_from` says beside its weights."""
    if not peers.is_main():
        return
    if not (run_folder / TOKENIZER).is_dir():
        vocabulary.save(run_folder / TOKENIZER)
    if cfg.model.init_from is None or (run_folder / FILES).is_dir():
        return
    (run_folder / FILES).mkdir()
    if cfg.resume and is_address(cfg.resume):  # the bucket has them
        source = _existing(find_mirrored(cfg.resume, "resume")[0] / FILES)
    else:
        source = find_model_files(cfg.model.init_from)
    if source is None:
        return
    for path in (path for pattern in (*ABOUT, "*.txt") for path in source.glob(pattern)):
        if path.name != INDEX:
            shutil.copy(path, run_folder / FILES / path.name)


def write_record(job: compose.Job, folder: Path, shared: bool, waiting: MemoryHandler) -> None:
    """Write the first files of the folder: config, environment and log; and the link `latest` to the folder."""
    if peers.is_main() or (not shared and peers.first_of_host()):
        write_config(job, folder)
        _write_environment(folder)
        _link_latest(folder, OUTPUTS / job.config.project_name / "latest")
    name = "train.log" if peers.is_main() else f"train.{jax.process_index()}.log"
    file = logging.FileHandler(folder / name)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    # What was logged before there was a folder waits in memory until now.
    waiting.setTarget(file)
    waiting.flush()
    root = logging.getLogger()
    root.removeHandler(waiting)
    root.addHandler(file)


def find_model_files(init_from: str) -> Path | None:
    """Return the folder of Hugging Face's files of the model that `model.init_from` names.

    None for a run that began without such files.
    """
    if run := find_run(init_from, "model.init_from"):
        return _existing(run[0] / FILES)
    return find(init_from)


def _existing(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None


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
        raise UserError(f"hydra.run.dir={folder} holds another run; resume={folder} goes on with it") from None
    return folder


def _format_config(job: compose.Job) -> str:
    """Return the resolved config as YAML, without `resume`: the config of a run does not say that it goes on."""
    return compose.to_yaml(job.config.model_copy(update={"resume": None}))


def write_config(job: compose.Job, folder: Path) -> None:
    """Write the resolved config, and Hydra's record of how it was made."""
    text = _format_config(job)
    write_whole(folder / "config.yaml", text)
    if job.hydra is not None:
        (folder / ".hydra").mkdir(exist_ok=True)
        (folder / ".hydra" / "hydra.yaml").write_text(format_yaml(job.hydra), encoding="utf-8")
        (folder / ".hydra" / "config.yaml").write_text(text)
        (folder / ".hydra" / "overrides.yaml").write_text(format_yaml(job.overrides), encoding="utf-8")


def _write_environment(folder: Path) -> None:
    """Write environment.json; a resumed run adds its environment to the list `resumed`."""
    path = folder / "environment.json"
    record = describe_environment()
    if path.exists():
        try:
            first = json.loads(path.read_text())
            first.setdefault("resumed", []).append(record)
            record = first
        except (ValueError, AttributeError) as error:
            log.warning("%s is damaged (%s): it is written anew", path, error)
    write_whole(path, json.dumps(record, indent=1))


def _link_latest(folder: Path, link: Path) -> None:
    temporary = link.with_name(f".latest-{os.getpid()}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        # Made beside and renamed, because a link cannot be changed in place; relative, so that outputs/ can be moved.
        temporary.symlink_to(os.path.relpath(folder, link.parent))
        os.replace(temporary, link)
    except OSError as error:
        log.warning("no link %s to this run: %s", link, error.strerror)
