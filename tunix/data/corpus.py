"""A corpus as the model sees it: documents tokenized once into two streams, kept on disk by content hash."""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend

from tunix.config import Config
from tunix.data.cache import stored
from tunix.data.documents import Document, read_documents
from tunix.data.tokenizer import load_tokenizer, tokenizer_digest

log = logging.getLogger(__name__)
FORMAT = "1"  # of the files below; part of their hash


@dataclass(frozen=True)
class Stream:
    """Documents one after the other, each from its bos to its eos token."""

    tokens: np.ndarray  # [N] uint16 or uint32
    starts: np.ndarray  # [documents] int64: where each begins


@dataclass(frozen=True)
class Corpus:
    train: Stream
    held_out: Stream
    tokenizer: Backend
    bos: int
    fingerprint: str  # of the training stream: documents, tokenizer, split
    unigram_bits_per_byte: float  # entropy of the training stream's words, a model that knows only how frequent each is
    bytes_per_token: float
    summary: str
    example: str  # a held-out document; empty if none is held out


def load_corpus(cfg: Config) -> Corpus:
    """Read, split and tokenize the documents of `cfg.data`, or find that done."""
    cache_dir = Path(cfg.data.cache_dir).expanduser()
    documents = read_documents(cfg.data)
    if documents.skipped:
        log.warning(
            "%d files are not UTF-8 and are left out: %s",
            len(documents.skipped),
            ", ".join(documents.skipped[:5]) + (", ..." if len(documents.skipped) > 5 else ""),
        )
    backend = load_tokenizer(cfg.tokenizer, documents.train, cfg.model.vocab_size, cache_dir)
    bos, eos = (backend.token_to_id(token) for token in (cfg.tokenizer.bos_token, cfg.tokenizer.eos_token))
    fingerprint = hashlib.sha256(
        "\0".join([FORMAT, documents.digest, tokenizer_digest(backend), str(bos), str(eos)]).encode()
    ).hexdigest()[:20]

    def tokenize(folder: Path) -> None:
        log.info("tokenizing %d documents", len(documents.train) + len(documents.held_out))
        folder.mkdir()
        for name, part in (("train", documents.train), ("held_out", documents.held_out)):
            stream = _tokenize(backend, part, bos, eos)
            np.save(folder / f"{name}.tokens.npy", stream.tokens)
            np.save(folder / f"{name}.starts.npy", stream.starts)
        counts = np.bincount(np.load(folder / "train.tokens.npy"))
        size = sum(len(document.text.encode()) for document in documents.train)
        facts = {
            "unigram_bits_per_byte": _entropy_bits(counts) * counts.sum() / size,
            "bytes_per_token": size / counts.sum(),
        }
        (folder / "facts.json").write_text(json.dumps(facts))

    folder = stored(cache_dir / "tokens", fingerprint, tokenize)
    train, held_out = (
        Stream(*(np.load(folder / f"{name}.{part}.npy", mmap_mode="r") for part in ("tokens", "starts")))
        for name in ("train", "held_out")
    )
    facts = json.loads((folder / "facts.json").read_text())
    summary = (
        f"{cfg.data.source}: {len(documents.train):,} documents, {len(train.tokens):,} tokens to train on; "
        f"{len(documents.held_out):,} documents, {len(held_out.tokens):,} tokens held out; "
        f"{backend.get_vocab_size():,} words, {facts['bytes_per_token']:.2f} bytes per token; "
        f"unigram entropy {facts['unigram_bits_per_byte']:.3f} bits per byte"
    )
    example = max((document.text for document in documents.held_out[:32]), key=len, default="")
    return Corpus(
        train,
        held_out,
        backend,
        bos,
        fingerprint,
        facts["unigram_bits_per_byte"],
        facts["bytes_per_token"],
        summary,
        example,
    )


def _tokenize(backend: Backend, documents: list[Document], bos: int, eos: int) -> Stream:
    dtype = np.uint16 if backend.get_vocab_size() <= 2**16 else np.uint32
    encoded = backend.encode_batch_fast([document.text for document in documents], add_special_tokens=False)
    lengths = np.array([len(encoding.ids) + 2 for encoding in encoded], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if encoded else np.zeros(0, np.int64)
    tokens = np.empty(lengths.sum(), dtype)
    for start, length, encoding in zip(starts, lengths, encoded, strict=True):
        tokens[start] = bos
        tokens[start + 1 : start + length - 1] = encoding.ids
        tokens[start + length - 1] = eos
    return Stream(tokens, starts)


def _entropy_bits(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())
