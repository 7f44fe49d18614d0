"""Documents that a user's own function yields (docs/extending.md)."""

import hashlib
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tunix.base.dotted import DottedPath, blame_user, import_object
from tunix.sources.files import Unit
from tunix.sources.rows import Rows
from tunix.sources.source import Item


class Custom(Rows):
    """Documents that your own Python function yields: texts, or rows as {column: value}."""

    source: Literal["custom"]
    """Where documents come from."""
    function: DottedPath
    """`package.module:name` of a generator; it must yield the same documents in the same order each time."""
    arguments: dict[str, Any] | None
    """Keyword arguments of the function, {name: value}; null gives none."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """Return one unit: the number of documents is not known before the function runs."""
        # A change of the function's file makes a new corpus. A change of a module that it imports, or of a file that it
        # reads, is not noticed.
        file = inspect.getsourcefile(import_object(self.function))
        version = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
        return [Unit(self.function, "", 0, 1, unit_bytes, version)]

    def read(self, unit: Unit) -> Iterator[Item]:
        documents = self._documents()
        for number, content in enumerate(documents):
            problem = "" if isinstance(content, str | dict) else f"is {type(content).__name__}, not a text or a row"
            where = partial("{}, document {},".format, self.function, number)
            yield Item(f"{self.function}@{number}", None if problem else content, problem, where)

    def try_out(self) -> None:
        """Raise `UserError` where the function does not yield a document."""
        first = next(self._documents(), None)
        if not isinstance(first, str | dict):
            with blame_user("data.function", self.function):
                raise TypeError(f"the first document is {first!r:.80}, not a text (str) or a row (dict)")

    def _documents(self) -> Iterator[Any]:
        # `with` is inside of the generator, because most of the function's code runs while its documents are read.
        with blame_user("data.function", self.function):
            yield from import_object(self.function)(**(self.arguments or {}))
