"""Text to tokens with the `tokenizers` library: a tokenizer.json, or a byte-level BPE trained on the corpus."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tunix.config import Tokenizer, UserError
from tunix.data.cache import stored
from tunix.data.documents import Document

PAD = "<pad>"


def load_tokenizer(cfg: Tokenizer, documents: list[Document], model_vocab_size: int, cache_dir: Path) -> Backend:
    """The tokenizer of a run; one trained here is cached by the hash of what it was trained on.

    Raises:
        UserError: a file that is no tokenizer, lacks the special tokens, or has more words than the model has rows.
    """
    if cfg.path is None:
        sample = list(_first_bytes(documents, cfg.train_bytes))
        digest = hashlib.sha256(repr((cfg.vocab_size, cfg.bos_token, cfg.eos_token)).encode())
        for text in sample:
            digest.update(text.encode() + b"\0")
        path = stored(
            cache_dir / "tokenizers",
            f"{digest.hexdigest()[:20]}.json",
            lambda path: _train(cfg, sample).save(str(path)),
        )
    else:
        path = Path(cfg.path).expanduser()
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"tokenizer.path={path} cannot be read as a tokenizer.json: {error}") from None
    for key in ("bos_token", "eos_token"):
        if backend.token_to_id(getattr(cfg, key)) is None:
            raise UserError(f"tokenizer.{key}={getattr(cfg, key)} is not a token of {path}")
    if backend.get_vocab_size() > model_vocab_size:
        raise UserError(
            f"the tokenizer has {backend.get_vocab_size()} words, more than model.vocab_size={model_vocab_size}"
        )
    return backend


def tokenizer_digest(backend: Backend) -> str:
    return hashlib.sha256(backend.to_str().encode()).hexdigest()[:20]


def _train(cfg: Tokenizer, texts: list[str]) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab_size,
        special_tokens=[PAD, cfg.bos_token, cfg.eos_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _first_bytes(documents: list[Document], limit: int) -> Iterator[str]:
    for document in documents:
        yield document.text
        limit -= len(document.text.encode())
        if limit <= 0:
            return


def bytes_per_word(backend: Backend) -> np.ndarray:
    """UTF-8 bytes that each word stands for, [V] int64; special tokens stand for none."""
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    def length(index: int) -> int:
        if index in special:
            return 0
        if byte_level:  # one character of the word for one byte
            return len(backend.id_to_token(index) or "")
        return len(backend.decode([index]).encode())

    return np.array([length(index) for index in range(backend.get_vocab_size())])
