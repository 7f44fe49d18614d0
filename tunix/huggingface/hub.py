"""Find a model's files: in a folder here, or on the Hugging Face hub, from where they are downloaded once.

Imports no jax.
"""

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunix.base.buckets import is_address, mirror
from tunix.base.errors import UserError, first_line
from tunix.base.files import expand_home

log = logging.getLogger(__name__)

INFO_FILES = ("*.json", "*.jinja", "tokenizer.model")  # config, tokenizer, chat template
CONFIG = ("config.json",)  # all that a dry run reads of a model
WEIGHTS = ("*.safetensors",)

# Reasons for an error of huggingface_hub, by the name of its class; a subclass stands before its base.
REASONS = {
    "GatedRepoError": "access to it has to be granted on its page, and HF_TOKEN set",
    "RepositoryNotFoundError": "it has no model of this name; a private one needs HF_TOKEN",
    "LocalEntryNotFoundError": "it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE is set",
    "ConnectError": "it is not in the cache, and the hub is out of reach",
}
OUT_OF_REACH = (REASONS["LocalEntryNotFoundError"], REASONS["ConnectError"])


def find(source: str, patterns: tuple[str, ...] = INFO_FILES, key: str = "model.init_from") -> Path:
    """Return the folder with the files of `source`, a path, an address or an ID like `google/gemma-3-270m`.

    Only JSON, templates, tokenizers and safetensors are ever downloaded, into the cache of `huggingface_hub`. `key` is
    for messages.

    Raises:
        UserError: `source` is neither a folder nor a model that can be downloaded.
    """
    if is_address(source):
        return mirror(source, patterns, key)
    folder = expand_home(source)
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise UserError(f"{key}={source} is neither a folder nor the ID of a model like google/gemma-3-270m")
    return fetch(source, patterns, key, "folder")


def fetch(source: str, patterns: tuple[str, ...], key: str, kind: str) -> Path:
    """Return the folder of a model's files on the hub, in the cache of `huggingface_hub`; see `find`.

    `kind` is what `source` is not: a folder, or a file, of this machine.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(patterns)))
    except Exception as error:  # many kinds: no network, no permission, no such name
        kinds = {each.__name__ for each in type(error).__mro__}
        reason = next((text for name, text in REASONS.items() if name in kinds), first_line(error))
        if reason in OUT_OF_REACH:  # by a certificate, a proxy, a name that is not known
            reason += f" ({first_line(error.__cause__ or error)})"
        raise UserError(
            f"{key}={source} is not a {kind} here and could not be fetched from the Hugging Face hub: {reason}"
        ) from None


def create(name: str, private: bool) -> None:
    """Make a model of this name on the hub, unless it is there.

    Raises:
        UserError: the hub refuses, or is out of reach.
    """
    from huggingface_hub import HfApi

    with _explain_push(name):
        HfApi().create_repo(name, private=private, exist_ok=True)


def upload(folder: Path, name: str) -> str:
    """Send the files of a folder to a model on the hub, which is there, and return its address."""
    from huggingface_hub import HfApi

    with _explain_push(name):
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Export of tunix")
    return f"{HfApi().endpoint}/{name}"


@contextmanager
def _explain_push(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # many kinds, as above
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = "HF_TOKEN is missing, or may not write there" if status in (401, 403) else first_line(error)
        raise UserError(f"push={name} could not be sent to the hub: {reason}") from None


def list_copied_files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of a model's folder that may be copied into a run's folder or an export.

    A folder may come from anybody. So a link is followed only to a file of the same name, in folders of the same names
    as those between, or to one of the hub's own cache (MODEL/snapshots/VERSION/NAME -> MODEL/blobs/HASH). Other links
    are left out, with a warning: a link called vocab.txt may lead to a private file, and exports are published.
    """
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        target, names = path.resolve(), path.relative_to(folder).parts
        blobs = folder.resolve().parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
        is_same = target.parts[-len(names) :] == names
        if not is_same and not any(target.is_relative_to(own) for own in (folder.resolve(), blobs)):
            log.warning("%s is a link to %s: it is not copied", path, target)
        elif path.is_file():
            yield path


def copy_files(source: Path, patterns: tuple[str, ...], folder: Path) -> bool:
    """Copy those files of a model that are there (`list_copied_files`); return whether there was one."""
    found = list(list_copied_files(source, patterns))
    for path in found:
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    return bool(found)
