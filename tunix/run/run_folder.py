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
from omegaconf import OmegaConf

from tunix.base.disk import write_whole
from tunix.base.errors import UserError
from tunix.cli import compose
from tunix.config import Config
from tunix.hf.hub import ABOUT, find
from tunix.hf.weights import INDEX
from tunix.processes import peers
from tunix.processes.shared_disk import blind_to
from tunix.run.environment import _environment
from tunix.tokenizer.vocabulary import Vocabulary

# In a run's folder: what model.init_from says beside its weights; the tokenizer, with the tokens that surround a
# document and the chat template of its training.
FILES, TOKENIZER = "pretrained", "tokenizer"


def keep_files(cfg: Config, vocabulary: Vocabulary, run_folder: Path) -> None:
    """Put into the run's folder what export needs: the tokenizer and what `model.init_from` says beside its weights."""
    if not peers.is_main():
        return
    if not (run_folder / TOKENIZER).is_dir():
        vocabulary.save(run_folder / TOKENIZER)
    if cfg.model.init_from is None or (run_folder / FILES).is_dir():
        return
    (run_folder / FILES).mkdir()
    source = find(cfg.model.init_from)
    for path in (path for pattern in (*ABOUT, "*.txt") for path in source.glob(pattern)):
        if path.name != INDEX:
            shutil.copy(path, run_folder / FILES / path.name)


log = logging.getLogger(__name__)


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
    named = peers.together(lambda: made(asked, lambda _: claim(job)) if peers.is_main() else asked, "the run's folder")
    folder = Path(peers.agree(str(named.absolute()), "the run's folder"))
    try:
        shared = _is_shared(folder, job.config.distributed.shared_filesystem)
        if not shared:
            mine = peers.first_of_host() and not peers.is_main()
            peers.together(
                lambda: made(folder, lambda folder: _claim_this(job, folder)) if mine else folder, "every host's folder"
            )
    except UserError:
        if peers.is_main() and not job.config.resume:
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
    blind = {peers.hosts()[rank] for rank in blind_to(folder)}
    if not blind:
        return True
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


def write_record(job: compose.Job, folder: Path, shared: bool, waiting: MemoryHandler) -> None:
    """The first files of the folder: config, environment, log, and the link to it."""
    if peers.is_main() or (not shared and peers.first_of_host()):
        write_config(job, folder)
        _write_environment(folder)
        _link_latest(folder, compose.OUTPUTS / job.config.project_name / "latest")
    name = "train.log" if peers.is_main() else f"train.{jax.process_index()}.log"
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
    write_whole(folder / "config.yaml", text)
    if job.hydra is not None:
        (folder / ".hydra").mkdir(exist_ok=True)
        OmegaConf.save(job.hydra, folder / ".hydra" / "hydra.yaml")
        (folder / ".hydra" / "config.yaml").write_text(text)
        OmegaConf.save(OmegaConf.create(job.overrides), folder / ".hydra" / "overrides.yaml")


def _write_environment(folder: Path) -> None:
    """What the run runs on; a resumed run adds to the list of its beginnings."""
    path = folder / "environment.json"
    if not path.exists():
        write_whole(path, json.dumps(_environment(), indent=1))
        return
    record = json.loads(path.read_text())
    record.setdefault("resumed", []).append(_environment())
    write_whole(path, json.dumps(record, indent=1))


def _link_latest(folder: Path, link: Path) -> None:
    temporary = link.with_name(f".latest-{os.getpid()}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary.symlink_to(os.path.relpath(folder, link.parent))
        os.replace(temporary, link)
    except OSError as error:
        log.warning("no link %s to this run: %s", link, error.strerror)
