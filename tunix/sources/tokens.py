"""Tokens that another program made."""

from typing import Literal

from tunix.base.buckets import is_address, mirror
from tunix.base.section import CountOrZero, Share
from tunix.sources.files import Unit, find_files
from tunix.sources.source import Paths, Source


class Tokens(Source):
    """Tokens that exist already: a folder of `python -m tunix.prepare`, or flat files of nanoGPT and OLMo."""

    held_out_fraction: Share
    """Share of the tokens of each flat file, at its end, kept for evaluation; the cut moves to where a document
    begins, and a file of one document is not cut."""

    source: Literal["tokens"]
    """Where documents come from."""
    paths: Paths
    """One prepared folder; or flat files (.bin, .npy with a head or without), folders or globs of them. A folder in a
    bucket (s3://, gs://) is copied to this machine."""
    dtype: Literal["uint16", "uint32"]
    """Type of the numbers in files without a head."""
    skip_bytes: CountOrZero
    """Bytes before the first token of files without a head (modded-nanogpt: 1024)."""
    document_end: CountOrZero | None
    """Token that ends each document; null takes each file for one document. Prepared folders know theirs."""

    # There is no text to read: `tunix/data/shards.py` copies the numbers of each unit.
    def units(self, unit_bytes: int) -> list[Unit]:
        return find_files(self.local_paths, (".bin", ".npy"))

    @property
    def local_paths(self) -> tuple[str, ...]:
        """The paths, with a copy on this machine for each folder in a bucket: tokens are mapped into memory."""
        return tuple(str(mirror(path, ("*",), "data.paths")) if is_address(path) else path for path in self.paths)
