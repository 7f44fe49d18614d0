"""A corpus as the model sees it: sources tokenized once, packed into sequences, each split by document."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import grain
from tokenizers import Tokenizer as Backend

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.data import Mixture
from tunix.data.packing import Sequences
from tunix.data.stream import Prepared, open_prepared
from tunix.data.tokenize import find_units, find_vocabulary, prepare
from tunix.sources import Source, Tokens
from tunix.sources.files import Unit
from tunix.tokenizer.vocabulary import Vocabulary, check_fits, read

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    prepared: dict[str, Prepared]  # by the name of the source
    train: dict[str, Sequences]  # by the name of the source
    held_out: grain.MapDataset  # sequences of all sources
    num_held_out: int  # documents
    vocabulary: Vocabulary
    fingerprint: str  # of what is trained on: documents, tokenizer, split, packing
    unigram_bits_per_byte: float  # of the training data, under a model that knows only how frequent each token is
    summary: str
    example: list[int]  # tokens of a held-out document; none if nothing is held out

    @property
    def tokenizer(self) -> Backend:
        return self.vocabulary.backend

    @property
    def num_sequences(self) -> int:
        """Sequences to train on."""
        return sum(map(len, self.train.values()))


def load_corpus(cfg: Config) -> Corpus:
    """Read, split, tokenize and pack the documents of `cfg.data`, or find that done."""
    prepared, vocabulary = prepare_corpus(cfg)
    cache_dir = Path(cfg.loading.cache_dir).expanduser()

    def packed(split: str) -> dict[str, Sequences]:
        return {
            name: Sequences(each.stream(split), cfg.training.seq_len, cfg.loading.packing, cache_dir)
            for name, each in prepared.items()
        }

    train, held_out = packed("train"), packed("held_out")
    for name, sequences in train.items():
        if not 0 < len(sequences) < 2**32:
            raise UserError(
                f"data: {name} has {sequences.stream.num_tokens:,} tokens, which make {len(sequences):,} sequences of "
                f"training.seq_len={cfg.training.seq_len}; 1 to 4,294,967,295 can be shuffled"
            )
    everything = [grain.MapDataset.source(each) for each in held_out.values()]
    size = sum(each.index["bytes"] for each in prepared.values())
    entropy = sum(each.index["unigram_bits_per_byte"] * each.index["bytes"] for each in prepared.values()) / size
    return Corpus(
        prepared,
        train,
        grain.MapDataset.concatenate(everything),
        sum(each.stream.num_documents for each in held_out.values()),
        vocabulary,
        _fingerprint(cfg, prepared),
        entropy,
        "\n".join(_summary(name, prepared[name], train[name], held_out[name], vocabulary) for name in prepared),
        _example(held_out),
    )


def prepare_corpus(cfg: Config) -> tuple[dict[str, Prepared], Vocabulary]:
    """The tokenized form of each source by its name, and the tokenizer they share."""
    sources: dict[str, Source] = cfg.data.parts if isinstance(cfg.data, Mixture) else {cfg.data.source: cfg.data}
    ready = {name: folder for name, source in sources.items() if (folder := _prepared_folder(source))}
    units = {name: find_units(source, cfg.loading) for name, source in sources.items() if name not in ready}
    cache_dir = Path(cfg.loading.cache_dir).expanduser()
    tokenizer = cfg.tokenizer
    if ready and tokenizer.path is None:
        tokenizer = tokenizer.model_copy(update={"path": str(next(iter(ready.values())) / "tokenizer"), "train": False})
    pairs: list[tuple[Source, list[Unit]]] = [(sources[name], found) for name, found in units.items()]
    vocabulary = find_vocabulary(tokenizer, cfg.task, pairs, cache_dir)
    check_fits(vocabulary, cfg.model.vocab_size)
    prepared = {}
    for name, source in sources.items():
        if name in ready:
            prepared[name] = _opened(ready[name], vocabulary, cfg)
        else:
            prepared[name] = prepare(source, units[name], cfg.task, vocabulary, cfg.loading)
        _tell_left_out(name, prepared[name])
    return prepared, vocabulary


def _prepared_folder(source: Source) -> Path | None:
    if isinstance(source, Tokens) and len(source.paths) == 1:
        folder = Path(source.paths[0]).expanduser()
        return folder if (folder / "index.json").is_file() else None
    return None


def _opened(folder: Path, vocabulary: Vocabulary, cfg: Config) -> Prepared:
    own = read(cfg.tokenizer.model_copy(update={"path": str(folder / "tokenizer")}))
    if own.backend.to_str() != vocabulary.backend.to_str():
        raise UserError(
            f"data.paths: {folder} was made with another tokenizer ({own.num_tokens} tokens) than tokenizer.path="
            f"{cfg.tokenizer.path} ({vocabulary.num_tokens} tokens); leave tokenizer.path=null to take its own"
        )
    prepared = open_prepared(folder)
    if prepared.index["answers"] != (cfg.task.documents == "conversation"):
        raise UserError(f"data.paths: {folder} was not made for task={cfg.task.name}; prepare it with that task")
    return prepared


def _fingerprint(cfg: Config, prepared: dict[str, Prepared]) -> str:
    mixing = ""
    if isinstance(cfg.data, Mixture):
        mixing = f"{cfg.data.source} {cfg.data.model_dump_json(exclude={'source', 'parts', 'max_epochs'})}"
    parts = [part for name, each in prepared.items() for part in (name, each.fingerprint)] if mixing else [
        each.fingerprint for each in prepared.values()
    ]  # fmt: skip
    return hashlib.sha256("\0".join([cfg.loading.packing, mixing, *parts]).encode()).hexdigest()[:20]


def _tell_left_out(name: str, prepared: Prepared) -> None:
    left_out = {reason: count for reason, count in prepared.index["left_out"].items() if count}
    if left_out:
        names = prepared.index["left_out_names"]
        more = ["..."] if sum(left_out.values()) - left_out.get("empty", 0) > len(names) else []
        counted = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
        log.warning("%s: left out: %s%s", name, counted, f" ({', '.join(names + more)})" if names else "")


def _summary(name: str, prepared: Prepared, train: Sequences, held_out: Sequences, vocabulary: Vocabulary) -> str:
    return (
        f"{name}: {train.stream.num_documents:,} documents, {train.stream.num_tokens:,} tokens to train on; "
        f"{held_out.stream.num_documents:,} documents, {held_out.stream.num_tokens:,} tokens held out; "
        f"{vocabulary.num_tokens:,} tokens, {prepared.index['bytes_per_token']:.2f} bytes per token; unigram entropy "
        f"{prepared.index['unigram_bits_per_byte']:.3f} bits per byte; {train.packing}: {len(train):,} sequences, "
        f"{train.utilisation:.1%} of their tokens are not padding"
    )


def _example(held_out: dict[str, Sequences]) -> list[int]:
    """The longest of the first held-out documents, up to a few thousand tokens."""
    found: list[int] = []
    for sequences in held_out.values():
        for number, (_, documents) in enumerate(sequences.stream.sizes):
            if documents:
                shard = sequences.stream.shard(number)
                ends = [*shard.starts[1:33].tolist(), len(shard.tokens)]
                for start, end in zip(shard.starts[:32].tolist(), ends, strict=False):
                    if end - start > len(found):
                        found = shard.tokens[start : min(end, start + 4096)].tolist()
                break
    return found
