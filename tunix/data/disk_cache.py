"""Results that are kept on disk under the hash of what they were made from."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tunix.base.errors import UserError


def stored(folder: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Path of `folder/name`, made by `make(path)` if it is not there yet.

    What is made appears whole or not at all; of two processes that make the same, one's result is kept.
    """
    target = folder / name
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as temporary:
            made = Path(temporary) / name
            make(made)
            try:
                os.replace(made, target)
            except OSError:
                if not target.exists():
                    raise
        return target
    except OSError as error:
        raise UserError(
            f"loading.cache_dir: cannot write {target}: {error.strerror}; set loading.cache_dir to a writable folder"
        ) from None
