"""The corpus of a run: tokenize each source once, pack it into sequences, and hold out documents for evaluation."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grain
from tokenizers import Tokenizer as Backend

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.data import Mixture
from tunix.config.task import Dpo
from tunix.data.packing import Sequences
from tunix.data.stream import Prepared
from tunix.data.tokenize import find_units, find_vocabulary, open_whole, prepare
from tunix.sources import Source, Tokens
from tunix.sources.files import Unit
from tunix.tokenizer.vocabulary import Vocabulary, check_fits, read_vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """Sequences to train on and to evaluate on, and the tokenizer that made them."""

    prepared: dict[str, Prepared]  # keyed by the name of the source
    train: dict[str, Sequences]  # keyed by the name of the source
    held_out_parts: dict[str, Sequences]  # keyed by the name of the source
    held_out: grain.MapDataset  # sequences of all sources
    num_held_out: int  # documents
    vocabulary: Vocabulary
    fingerprint: str  # identifies the training data: documents, tokenizer, split, packing
    unigram_bits_per_byte: float  # loss on the training data of a model that knows only how frequent each token is
    summary: str  # a line for each source
    example: list[int]  # tokens of a held-out document; empty if nothing is held out
    sets: dict[str, grain.MapDataset]  # sequences of each of evaluation.sets

    @property
    def tokenizer(self) -> Backend:
        return self.vocabulary.backend

    @property
    def num_samples(self) -> int:
        """Sequences to train on."""
        return sum(map(len, self.train.values()))


def load_corpus(cfg: Config) -> Corpus:
    """Read, split, tokenize and pack the documents of `cfg.data`; work that is in the cache is not done again.

    Raises:
        UserError: the data cannot be read, or there are too few, or too many, sequences to shuffle.
    """
    prepared, vocabulary = prepare_corpus(cfg)
    cache_dir = Path(cfg.loading.cache_dir).expanduser()

    def pack(split: str) -> dict[str, Sequences]:
        return {
            name: Sequences(folder.stream(split), cfg.training.seq_len, cfg.loading.packing, cache_dir)
            for name, folder in prepared.items()
        }

    train, held_out = pack("train"), pack("held_out")
    if isinstance(cfg.task, Dpo):
        _report_long_pairs({**train, **{f"{name}, held out": part for name, part in held_out.items()}}, cfg, cfg.task)
    for name, sequences in train.items():
        if not len(sequences):
            raise UserError(
                f"data: {name} has {sequences.stream.num_tokens:,} tokens to train on, too few for one sequence of "
                f"training.seq_len={cfg.training.seq_len}; give more data, or lower training.seq_len"
            )
        if len(sequences) >= 2**32:
            raise UserError(
                f"data: {name} has {sequences.stream.num_tokens:,} tokens, which make {len(sequences):,} sequences of "
                f"training.seq_len={cfg.training.seq_len}; up to 4,294,967,295 can be shuffled"
            )
    indices = [folder.index for folder in prepared.values()]
    size = sum(index["bytes"] for index in indices)
    entropy = sum(index["unigram_bits_per_byte"] * index["bytes"] for index in indices) / size
    return Corpus(
        prepared=prepared,
        train=train,
        held_out_parts=held_out,
        held_out=grain.MapDataset.concatenate([grain.MapDataset.source(part) for part in held_out.values()]),
        num_held_out=sum(part.stream.num_documents for part in held_out.values()),
        vocabulary=vocabulary,
        fingerprint=compute_fingerprint(cfg.data, prepared, cfg.loading.packing),
        unigram_bits_per_byte=entropy,
        summary="\n".join(
            _summarise(name, prepared[name], train[name], held_out[name], vocabulary) for name in prepared
        ),
        example=_pick_example(held_out),
        sets={name: _load_set(name, source, vocabulary, cfg) for name, source in cfg.evaluation.sets.items()},
    )


def _load_set(name: str, source: Source, vocabulary: Vocabulary, cfg: Config) -> grain.MapDataset:
    """Tokenize all documents of one of evaluation.sets with the run's tokenizer, and pack them.

    Raises:
        UserError: the documents make no sequence.
    """
    everything = take_all(source)
    prepared = prepare(everything, find_units(everything, cfg.loading), cfg.task, vocabulary, cfg.loading)
    _warn_left_out(f"evaluation.sets.{name}", prepared)
    cache_dir = Path(cfg.loading.cache_dir).expanduser()
    sequences = Sequences(prepared.stream("train"), cfg.training.seq_len, cfg.loading.packing, cache_dir)
    if not len(sequences):
        raise UserError(
            f"evaluation.sets.{name} has {sequences.stream.num_tokens:,} tokens, too few for one sequence of "
            f"training.seq_len={cfg.training.seq_len}; give more documents, or leave the set out"
        )
    return grain.MapDataset.source(sequences)


def take_all(source: Source) -> Source:
    """Return a source of evaluation.sets with nothing held out: all of it is evaluated on."""
    return source.model_copy(update={"held_out_fraction": 0.0})


def _report_long_pairs(parts: dict[str, Sequences], cfg: Config, task: Dpo) -> None:
    """Log how many pairs are longer than a sequence and therefore left out, or refuse them.

    Raises:
        UserError: there are such pairs, and task.long_pairs=error.
    """
    refuse = task.long_pairs == "error"
    for name, part in parts.items():
        if part.num_left_out:
            problem = (
                f"{name}: {part.num_left_out:,} of {part.stream.num_documents:,} pairs are longer than "
                f"training.seq_len={cfg.training.seq_len} tokens, both answers with their prompts"
            )
            if refuse:
                raise UserError(f"data: {problem}; raise it, or set task.long_pairs=skip to leave them out")
            log.warning("%s: left out", problem)


class Parts(NamedTuple):
    """Sources of a corpus by name, and the tokenizer that they share."""

    copied: dict[str, Path]  # folders that `tunix.prepare` made, perhaps on another machine
    units: dict[str, list[Unit]]  # of the other sources
    vocabulary: Vocabulary


def list_sources(cfg: Config) -> dict[str, Source]:
    """Return the sources of the training data by name."""
    return cfg.data.parts if isinstance(cfg.data, Mixture) else {cfg.data.source: cfg.data}


def find_parts(cfg: Config) -> Parts:
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
    return Parts(copied, units, vocabulary)


def prepare_corpus(cfg: Config) -> tuple[dict[str, Prepared], Vocabulary]:
    """Tokenize each source; return the results keyed by the sources' names, and the tokenizer that they share."""
    copied, units, vocabulary = find_parts(cfg)
    prepared = {}
    for name, source in list_sources(cfg).items():
        if name in copied:
            prepared[name] = _open_copied(copied[name], vocabulary, cfg)
        else:
            prepared[name] = prepare(source, units[name], cfg.task, vocabulary, cfg.loading)
        _warn_left_out(name, prepared[name])
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
    prepared = open_whole(folder, cfg.loading)
    if prepared.documents != cfg.task.documents:
        raise UserError(f"data.paths: {folder} was not made for task={cfg.task.name}; prepare it with that task")
    return prepared


def compute_fingerprint(data: Source | Mixture, prepared: dict[str, Prepared], packing: str) -> str:
    """Hash everything that decides which samples a run trains on; a checkpoint keeps it, and resuming compares it."""
    mixing, parts = "", []
    if isinstance(data, Mixture):
        mixing = f"{data.source} {data.model_dump_json(exclude={'source', 'parts', 'max_epochs'})}"
    for name, folder in prepared.items():
        parts += [name, folder.fingerprint] if mixing else [folder.fingerprint]
    return hashlib.sha256("\0".join([packing, mixing, *parts]).encode()).hexdigest()[:20]


def _warn_left_out(name: str, prepared: Prepared) -> None:
    """Log how many items gave no document, and the names of the first; empty documents have no name worth showing."""
    left_out = {reason: count for reason, count in prepared.index["left_out"].items() if count}
    if left_out:
        names = prepared.index["left_out_names"]
        more = ["..."] if sum(left_out.values()) - left_out.get("empty", 0) > len(names) else []
        counted = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
        log.warning("%s: left out: %s%s", name, counted, f" ({', '.join(names + more)})" if names else "")


def _summarise(name: str, prepared: Prepared, train: Sequences, held_out: Sequences, vocabulary: Vocabulary) -> str:
    return (
        f"{name}: {train.stream.num_documents:,} documents, {train.stream.num_tokens:,} tokens to train on; "
        f"{held_out.stream.num_documents:,} documents, {held_out.stream.num_tokens:,} tokens held out; "
        f"{vocabulary.num_tokens:,} tokens, {prepared.index['bytes_per_token']:.2f} bytes per token; unigram entropy "
        f"{prepared.index['unigram_bits_per_byte']:.3f} bits per byte; {train.packing}: {len(train):,} sequences, "
        f"{train.utilisation:.1%} of their tokens are not padding"
    )


def _pick_example(held_out: dict[str, Sequences]) -> list[int]:
    """Return up to 4096 tokens of the longest among the first 32 held-out documents of each source."""
    longest: list[int] = []
    for sequences in held_out.values():
        for number, (_, documents) in enumerate(sequences.stream.sizes):
            if documents:
                shard = sequences.stream.shard(number)
                ends = [*shard.starts[1:33].tolist(), len(shard.tokens)]
                for start, end in zip(shard.starts[:32].tolist(), ends, strict=False):
                    if end - start > len(longest):
                        longest = shard.tokens[start : min(end, start + 4096)].tolist()
                break  # the first shard with documents is enough
    return longest
