"""Text files: one document each."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tunix.base.errors import UserError
from tunix.sources.files import Unit, find_files, make_file_unit, open_unpacked
from tunix.sources.source import Item, Paths, Source


def list_standard_library() -> list[Unit]:
    """List the files of the running interpreter's standard library, without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    own = [name for name in names if not {"site-packages", "dist-packages"} & set(name.parts)]
    return [make_file_unit(root / name, name.as_posix()) for name in own]


class PythonStdlib(Source):
    """The source of the running interpreter's standard library: real text on every machine."""

    source: Literal["python_stdlib"]
    """Where documents come from."""
    decode_errors: Literal["skip", "error", "replace"]
    """A file that is not UTF-8: left out and counted, refused, or read with U+FFFD."""

    def units(self, unit_bytes: int) -> list[Unit]:
        return list_standard_library()

    def read(self, unit: Unit) -> Iterator[Item]:
        with open_unpacked(unit.path) as file:
            data = file.read()
        try:
            text = data.decode("utf-8-sig", errors="replace" if self.decode_errors == "replace" else "strict")
        except UnicodeDecodeError as error:
            if self.decode_errors == "error":
                raise UserError(
                    f"data: {unit.path} is not UTF-8 (byte {error.start}); "
                    "data.decode_errors=skip leaves such files out, replace reads them"
                ) from None
            yield Item(unit.name, None, "not UTF-8")
        else:
            yield Item(unit.name, text)


class TextFiles(PythonStdlib):
    """Text files, one document each; those that end in .gz or .zst are unpacked."""

    source: Literal["text"]  # type: ignore[assignment]
    """Where documents come from."""
    paths: Paths
    """Files, folders, globs, or addresses of them: s3://, gs://, https://."""
    extensions: tuple[str, ...]
    """Endings of the files that are read below a folder, also with .gz or .zst behind them."""

    def units(self, unit_bytes: int) -> list[Unit]:
        return find_files(self.paths, self.extensions)
