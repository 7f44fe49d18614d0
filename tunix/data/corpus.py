"""The corpus of a run: sequences packed from the tokens of each source, to train on and to evaluate on."""

import logging
from dataclasses import dataclass
from pathlib import Path

import grain
from tokenizers import Tokenizer as Backend

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.task import Dpo
from tunix.data.packing import Sequences
from tunix.data.stream import Prepared
from tunix.data.tokenize import find_units, prepare
from tunix.data.tokenized_sources import compute_fingerprint, prepare_corpus, take_all, warn_left_out
from tunix.sources import Source
from tunix.tokenizer.vocabulary import Vocabulary

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
        if len(sequences) >= 2**32:  # Grain's shuffle counts in 32 bits
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
    warn_left_out(f"evaluation.sets.{name}", prepared)
    cache_dir = Path(cfg.loading.cache_dir).expanduser()
    sequences = Sequences(prepared.stream("train"), cfg.training.seq_len, cfg.loading.packing, cache_dir)
    if not len(sequences):
        raise UserError(
            f"evaluation.sets.{name} has {sequences.stream.num_tokens:,} tokens, too few for one sequence of "
            f"training.seq_len={cfg.training.seq_len}; give more documents, or leave the set out"
        )
    return grain.MapDataset.source(sequences)


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
