"""Data sets of Hugging Face's library `datasets`."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from tunix.base.errors import UserError
from tunix.base.section import Flag
from tunix.sources.files import Unit
from tunix.sources.rows import Rows
from tunix.sources.source import Item


class HuggingFace(Rows):
    """A data set of the `datasets` library (the extra `hf`), from the hub or from files that it can read."""

    source: Literal["hf"]
    """Where documents come from."""
    path: str
    """Name on the hub, a folder, or a format (json, csv, parquet, text) with data_files."""
    name: str | None
    """Configuration of the data set; null for its default."""
    split: str
    """Split, also part of one: train[:10%]."""
    revision: str | None
    """Commit, tag or branch on the hub; null for the newest."""
    data_files: tuple[str, ...] | None
    """Files of the data set; null for all."""
    streaming: Flag
    """Read while it is tokenized, without a copy on disk."""

    def units(self, unit_bytes: int) -> list[Unit]:
        """List ranges of rows, or the shards of a data set that is streamed."""
        data = self._load()
        # The library's hash of the files and of what was done to them; it is private, and streamed data have none.
        version = f"{getattr(data, '_fingerprint', '')} {self.revision} {data.info.version}"
        if self.streaming:  # the size of a shard is not known: each counts as one unit
            return [Unit(self.path, self.path, part, part + 1, unit_bytes, version) for part in range(data.num_shards)]
        size = data.data.nbytes
        count = max(1, min(len(data), -(-size // unit_bytes)))
        cuts = [part * len(data) // count for part in range(count + 1)]
        return [Unit(self.path, self.path, start, stop, size // count, version) for start, stop in pairwise(cuts)]

    def read(self, unit: Unit) -> Iterator[Item]:
        data = self._load()
        if self.streaming:  # a unit is a shard of the data set, whose rows are counted from 0
            rows, first, prefix = data.shard(data.num_shards, unit.start), 0, f"{self.path}@{unit.start}."
        else:
            rows, first, prefix = data.select(range(unit.start, unit.stop)), unit.start, f"{self.path}@"
        try:
            for number, row in enumerate(rows, first):
                yield Item(f"{prefix}{number}", row, "", partial("data set {}, row {},".format, self.path, number))
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"data.path={self.path} ends early: {str(error).splitlines()[0]}") from None

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise UserError("data.source=hf needs the datasets library: pip install 'tunix-trainer[hf]'") from None
        datasets.disable_progress_bars()
        files = list(self.data_files) if self.data_files else None
        try:
            return datasets.load_dataset(
                self.path,
                self.name,
                split=self.split,
                revision=self.revision,
                data_files=files,
                streaming=self.streaming,
            )
        except Exception as error:  # the library passes on any error of the libraries below it
            raise UserError(f"data.path={self.path}: {(str(error) or repr(error)).splitlines()[0]}") from None
