"""Tokens of all sources of a config: the files to tokenize, the tokenizer that all sources share, a folder for each.

A source is tokenized here (`tokenize.prepare`), or it is a folder that `tunix.prepare` made, maybe on another machine.
"""

import hashlib
import logging
from pathlib import Path
from typing import NamedTuple

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.data import Mixture
from tunix.data.stream import Prepared
from tunix.data.tokenize import find_units, find_vocabulary, open_verified, prepare
from tunix.sources import Source, Tokens
from tunix.sources.files import Unit
from tunix.tokenizer.vocabulary import Vocabulary, check_fits, read_vocabulary

log = logging.getLogger(__name__)


class Inputs(NamedTuple):
    """Sources of a corpus by name, and the tokenizer that they share."""

    copied: dict[str, Path]  # folders that `tunix.prepare` made, perhaps on another machine
    units: dict[str, list[Unit]]  # of the other sources
    vocabulary: Vocabulary


def list_sources(cfg: Config) -> dict[str, Source]:
    """Return the sources of the training data by name."""
    return cfg.data.parts if isinstance(cfg.data, Mixture) else {cfg.data.source: cfg.data}


def take_all(source: Source) -> Source:
    """Return a source of evaluation.sets with nothing held out: all of its documents are for evaluation."""
    return source.model_copy(update={"held_out_fraction": 0.0})


def find_inputs(cfg: Config) -> Inputs:
    """List what there is to tokenize; read the tokenizer, or train it.

    A copied folder has a tokenizer of its own, which is then the tokenizer of all sources.
    """
    sources = list_sources(cfg)
    copied = {name: folder for name, source in sources.items() if (folder := _find_copied(source))}
    units = {name: find_units(source, cfg.loading) for name, source in sources.items() if name not in copied}
    cache_dir = Path(cfg.loading.cache_dir).expanduser()
    tokenizer = cfg.tokenizer
    if copied and tokenizer.path is None:
        first = next(iter(copied.values()))
        tokenizer = tokenizer.model_copy(update={"path": str(first / "tokenizer"), "train": False})
    pairs: list[tuple[Source, list[Unit]]] = [(sources[name], units[name]) for name in units]
    vocabulary = find_vocabulary(tokenizer, cfg.task, pairs, cache_dir)
    check_fits(vocabulary, cfg.model.vocab_size)
    return Inputs(copied, units, vocabulary)


def prepare_corpus(cfg: Config) -> tuple[dict[str, Prepared], Vocabulary]:
    """Tokenize each source; return the results keyed by the sources' names, and the tokenizer that they share."""
    copied, units, vocabulary = find_inputs(cfg)
    prepared = {}
    for name, source in list_sources(cfg).items():
        if name in copied:
            prepared[name] = _open_copied(copied[name], vocabulary, cfg)
        else:
            prepared[name] = prepare(source, units[name], cfg.task, vocabulary, cfg.loading)
        warn_left_out(name, prepared[name])
    return prepared, vocabulary


def _find_copied(source: Source) -> Path | None:
    """Return the folder of a source that `tunix.prepare` has tokenized already; None for any other source."""
    if isinstance(source, Tokens) and len(source.paths) == 1:
        folder = Path(source.local_paths[0]).expanduser()
        return folder if (folder / "index.json").is_file() else None
    return None


def _open_copied(folder: Path, vocabulary: Vocabulary, cfg: Config) -> Prepared:
    """Open a folder that `tunix.prepare` made.

    Raises:
        UserError: its tokenizer or its task is not that of the run.
    """
    own = read_vocabulary(cfg.tokenizer.model_copy(update={"path": str(folder / "tokenizer")}))
    if own.backend.to_str() != vocabulary.backend.to_str():
        raise UserError(
            f"data.paths: {folder} was made with another tokenizer ({own.num_tokens} tokens) than tokenizer.path="
            f"{cfg.tokenizer.path} ({vocabulary.num_tokens} tokens); leave tokenizer.path=null to take its own"
        )
    prepared = open_verified(folder, cfg.loading)
    if prepared.documents != cfg.task.documents:
        raise UserError(f"data.paths: {folder} was not made for task={cfg.task.name}; prepare it with that task")
    return prepared


def compute_fingerprint(data: Source | Mixture, prepared: dict[str, Prepared], packing: str) -> str:
    """Hash everything that decides which samples a run trains on; a checkpoint keeps it, and resuming compares it."""
    # A run of one source does not hash its name, which has no effect on the samples. `max_epochs` only refuses runs.
    mixing, parts = "", []
    if isinstance(data, Mixture):
        mixing = f"{data.source} {data.model_dump_json(exclude={'source', 'parts', 'max_epochs'})}"
    for name, folder in prepared.items():
        parts += [name, folder.fingerprint] if mixing else [folder.fingerprint]
    return hashlib.sha256("\0".join([packing, mixing, *parts]).encode()).hexdigest()[:20]


def warn_left_out(name: str, prepared: Prepared) -> None:
    """Log how many items gave no document, with the names of the first ones. Empty documents are not named."""
    left_out = {reason: count for reason, count in prepared.index["left_out"].items() if count}
    if left_out:
        names = prepared.index["left_out_names"]
        more = ["..."] if sum(left_out.values()) - left_out.get("empty", 0) > len(names) else []
        counted = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
        log.warning("%s: left out: %s%s", name, counted, f" ({', '.join(names + more)})" if names else "")
