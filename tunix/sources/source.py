"""Source of documents: its keys, what there is to read, and how one unit of that is read."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from tunix.base.section import Section, Share
from tunix.sources.files import Unit

Paths = Annotated[tuple[str, ...], Field(min_length=1)]


class Item(NamedTuple):
    """One thing that a source read: a text, a row with named columns, or the problem that it met."""

    name: str  # does not depend on where a unit begins: its hash decides whether the document is held out
    content: str | dict[str, Any] | None
    problem: str = ""  # why there is no content
    where: Callable[[], str] = str  # file and line for a message; a function, since counting lines takes time


class Source(Section):
    """Origin of documents. A subclass adds its name, its keys, and the methods `units` and `read`.

    Both methods must give the same on every machine and in every run, in the same order: the position of a run in its
    data is one number (data/position.py), which means the same documents only then.
    """

    if TYPE_CHECKING:  # each subclass declares the one value that it takes
        source: str

    held_out_fraction: Share
    """Share of documents kept for evaluation, chosen by a hash of file name and place; at least one if not 0."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """List what there is to read, cut into units of about `unit_bytes` where a file can be cut."""
        raise NotImplementedError

    def read(self, unit: Unit) -> Iterator[Item]:
        """Yield the documents of one unit in order."""
        raise NotImplementedError

    def try_out(self) -> None:
        """Run the user's own code once, if the source has any; raise `UserError` if it does not work."""
