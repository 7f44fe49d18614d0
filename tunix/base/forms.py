"""Forms of what tunix writes and reads again, each with a version of its own: versions of tunix share a machine.

In `loading.cache_dir` the version of the form is a part of each name (`locate_cached`), so none reads files of another
form. Everything else goes from hand to hand. It says of which form it is, and which tunix wrote it (`sign`):

    checkpoints/STEP/run/metadata               {..., "written_by": {"tunix": "0.1.0", "kind": "checkpoint", "form": 1}}
    digests.json of an export, an adapter,      the same
    a prepared corpus

A reader refuses a newer form, and names both versions of tunix. What has no `written_by` is older, and is read.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from tunix.base.config_types import read_version
from tunix.base.errors import UserError
from tunix.base.files import check_size, expand_home, parse_json

# Which files a folder of `loading.cache_dir` holds, and what they mean. Raise the number when you change a form;
# tests/data/test_cache_forms.py fails until then.
CACHE_FORMS = {
    "tokens": 3,  # tokenized corpora (data/shards.py)
    "tokenizers": 1,  # trained ones (data/dataset.py)
    "packing": 1,  # which pieces of documents a sequence has (data/packing.py)
    "reference": 2,  # log-probabilities of pairs under the model of step 0 (rl/reference.py)
    "teacher": 1,  # likeliest tokens of a teacher (data/teacher_logits.py)
    "programs": 1,  # compiled ones, in JAX's form, whose names hold JAX's own version (run/compiling.py)
    "buckets": 1,  # copies of objects (base/buckets.py), and stand-ins of checkpoints (config/saved_runs.py)
}
# Raise the number when code of before would misread what is written, or lack a part of it.
FORMS = {
    "checkpoint": 1,  # items, their keys and the names of arrays (checkpoints/)
    "export": 1,  # what is not in Hugging Face's own form (export.py)
    "adapter": 1,  # what is not in PEFT's own form (export.py)
    "corpus": CACHE_FORMS["tokens"],  # the folder that `prepare` leaves
    "teacher": CACHE_FORMS["teacher"],  # and that of a teacher's logits
}
KEY = "written_by"


def locate_cached(cache_dir: str | Path, kind: str, key: str) -> Path:
    """Return the path of something in `loading.cache_dir`: CACHE_DIR/KIND/vFORM-KEY.

    Raises:
        UserError: it is there, and this user may not read it.
    """
    folder = expand_home(cache_dir) / kind / f"v{CACHE_FORMS[kind]}-{key}"
    try:
        is_open = not folder.exists() or os.access(folder, os.R_OK | os.X_OK)
    except PermissionError:  # of a folder above it
        is_open = False
    if not is_open:
        raise UserError(
            f"loading.cache_dir={cache_dir}: another user has made {folder} for themselves alone; ask them for `chmod "
            f"-R go+rX {cache_dir}`, or set loading.cache_dir to a folder of your own"
        )
    return folder


def sign(kind: str) -> dict[str, Any]:
    """Return what something that is written says of itself, beside its other keys; `kind` is a key of `FORMS`."""
    return {KEY: {"tunix": read_version(), "kind": kind, "form": FORMS[kind]}}


def read_signature(folder: Path) -> dict[str, Any]:
    """Return what the digests.json of a folder says of who wrote it; {} where nothing does."""
    with suppress(OSError, ValueError, AttributeError):
        return dict(_find_signature(parse_json(check_size(folder / "digests.json").read_text())))
    return {}


def reject_newer_form(record: Any, source: str | Path) -> None:
    """Raise `UserError`, which names both versions of tunix, for a record with the signature of a newer form.

    `source` names what was read, for the message. A record without a signature passes.
    """
    writer = _find_signature(record)
    kind, form = str(writer.get("kind")), writer.get("form")
    if isinstance(form, int) and form > FORMS.get(kind, 0):
        raise UserError(
            f"{source} was written by tunix {writer.get('tunix')}, whose {kind} is of form {form}, and this is tunix "
            f"{read_version()}, which reads forms up to {FORMS.get(kind, 0)}; go on with a version that knows it"
        )


@contextmanager
def naming_writer(folder: Path) -> Iterator[None]:
    """Refuse a folder of a newer form; where its writer is newer, name both versions in an error of this block.

    A newer version may write a family of models that this one does not know, in the same form.
    """
    writer = read_signature(folder)
    reject_newer_form({KEY: writer}, folder)
    try:
        yield
    except UserError as error:
        if not _is_newer(writer.get("tunix")):
            raise
        raise UserError(
            f"{error}; {folder} was written by tunix {writer['tunix']}, and this is tunix {read_version()}"
        ) from None


def _find_signature(record: Any) -> Mapping[str, Any]:
    found = record.get(KEY) if isinstance(record, dict) else None
    return found if isinstance(found, dict) else {}


def _is_newer(version: Any) -> bool:
    try:
        return Version(str(version)) > Version(read_version())
    except InvalidVersion:  # "unknown"
        return False
