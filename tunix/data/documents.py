"""Where documents come from: each source reads files and gives (name, text) pairs in a fixed order."""

import glob
import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tunix.config import PythonStdlib, TextFiles, UserError


@dataclass(frozen=True)
class Document:
    name: str  # path below the source's root, the same on every machine
    text: str


@dataclass
class Documents:
    """What a source gave, and what it had to leave out."""

    train: list[Document] = field(default_factory=list)
    held_out: list[Document] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # not UTF-8
    empty: int = 0

    @property
    def digest(self) -> str:
        """Hash of every name and text and of the split."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            for document in part:
                digest.update(f"{document.name}\0{len(document.text)}\0".encode())
                digest.update(document.text.encode())
            digest.update(b"\0\0")
        return digest.hexdigest()


def read_documents(cfg: PythonStdlib | TextFiles) -> Documents:
    """All documents of the source, split by a hash of their names into training and held-out ones.

    Raises:
        UserError: no document, a file that cannot be read, or one that is not UTF-8 where that is refused.
    """
    documents = Documents()
    found = []
    for name, path in SOURCES[cfg.source](cfg):
        text = _read(path, cfg.decode_errors)
        if text is None:
            documents.skipped.append(name)
        elif not text:
            documents.empty += 1
        else:
            found.append(Document(name, text))
    if not found:
        raise UserError(
            f"data.source={cfg.source}: no document with text in it ({documents.empty} empty, {len(documents.skipped)} not UTF-8)"
        )
    found.sort(key=lambda document: _hash(document.name))  # names tell nothing of content: a fixed random order
    num_held_out = round(cfg.held_out_fraction * len(found))
    if cfg.held_out_fraction > 0:
        num_held_out = min(max(1, num_held_out), len(found))
    documents.held_out, documents.train = found[:num_held_out], found[num_held_out:]
    if not documents.train:
        raise UserError(
            f"all {len(found)} documents are held out; add documents, or lower data.held_out_fraction={cfg.held_out_fraction} "
            "(0 holds out none)"
        )
    return documents


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _read(path: Path, decode_errors: str) -> str | None:
    """Text of a file, or None where it is not UTF-8 and such files are skipped."""
    try:
        return path.read_bytes().decode(errors="replace" if decode_errors == "replace" else "strict")
    except OSError as error:
        raise UserError(f"data: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        if decode_errors == "error":
            raise UserError(
                f"data: {path} is not UTF-8 (byte {error.start}); data.decode_errors=skip leaves such files out, replace reads them"
            ) from None
        return None


def _python_stdlib(cfg: PythonStdlib) -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            yield path.relative_to(root).as_posix(), path


def _text(cfg: TextFiles) -> Iterator[tuple[str, Path]]:
    seen = set()
    for pattern in cfg.paths:
        matches = sorted(map(Path, glob.glob(str(Path(pattern).expanduser()), recursive=True)))
        if not matches:
            raise UserError(f"data.paths: {pattern} does not exist")
        for match in matches:
            files = (
                [match]
                if match.is_file()
                else sorted(p for p in match.rglob("*") if p.suffix in cfg.extensions and p.is_file())
            )
            for path in files:
                if path.resolve() not in seen:
                    seen.add(path.resolve())
                    yield (path.name if match.is_file() else path.relative_to(match).as_posix()), path
    if not seen:
        raise UserError(
            f"data.paths={list(cfg.paths)}: no file that ends in {', '.join(cfg.extensions)} (data.extensions)"
        )


SOURCES: dict[str, Callable[..., Iterator[tuple[str, Path]]]] = {"python_stdlib": _python_stdlib, "text": _text}
