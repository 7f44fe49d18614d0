"""Tokenizers of the `tokenizers` library: read from files or from the hub, or trained on the corpus.

A `Vocabulary` is such a tokenizer (its `backend`) with the special tokens around a document and the chat template.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tunix.base.errors import UserError
from tunix.config import Tokenizer
from tunix.tokenizer.chat import PLAIN, ChatTemplate
from tunix.tokenizer.tokenizer_files import (
    choose_template,
    find_tokenizer_files,
    read_backend_of,
    read_settings,
    token_text,
)

ROW_MULTIPLE = 128
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"  # special tokens of tokenizers that are trained here


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with the first and the last token of a document, and the chat template."""

    backend: Backend
    bos_token: str | None  # first token of a document; None: documents have none
    eos_token: str  # last token of a document
    chat_template: str | None  # Jinja

    @cached_property
    def bos(self) -> int | None:
        return None if self.bos_token is None else self.backend.token_to_id(self.bos_token)

    @cached_property
    def eos(self) -> int:
        index = self.backend.token_to_id(self.eos_token)
        assert index is not None
        return index

    @cached_property
    def num_tokens(self) -> int:
        """The largest token id plus one."""
        return max(self.backend.get_vocab().values()) + 1

    @cached_property
    def chat(self) -> ChatTemplate:
        if self.chat_template is None:
            raise UserError("the tokenizer has no chat template; set task.chat_template to a Jinja file")
        return ChatTemplate(self.chat_template, {"bos_token": self.bos_token or "", "eos_token": self.eos_token})

    @cached_property
    def digest(self) -> str:
        """Hash of everything that decides the tokens of a document."""
        parts = (tokenizer_digest(self.backend), str(self.bos_token), self.eos_token)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]

    def with_bos(self) -> Backend:
        """Return a tokenizer that adds the first token of a document to each text, as Hugging Face's tokenizers do."""
        backend = Backend.from_str(self.backend.to_str())
        if self.bos_token is not None and backend.post_processor is None:
            first = f"{self.bos_token} $A"
            backend.post_processor = processors.TemplateProcessing(
                single=first, pair=f"{first} $B", special_tokens=[(self.bos_token, self.bos)]
            )
        return backend

    def save(self, folder: Path) -> None:
        """Make `folder` with the files that `read_vocabulary` reads, under Hugging Face's names."""
        folder.mkdir()
        self.backend.save(str(folder / "tokenizer.json"))
        special = {"bos_token": self.bos_token, "eos_token": self.eos_token, "chat_template": self.chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=1))


def read_vocabulary(tokenizer: Tokenizer, chat_template: str | None = None) -> Vocabulary:
    """Read the tokenizer of `tokenizer.path`; see `load_vocabulary`."""
    assert tokenizer.path is not None
    return load_vocabulary(tokenizer.path, tokenizer.bos_token, tokenizer.eos_token, chat_template)


def load_vocabulary(
    path: str, bos: str | None = None, eos: str | None = None, chat_template: str | None = None
) -> Vocabulary:
    """Read the tokenizer of a file, of a folder, or of a repository on the hub.

    Args:
        bos: the first token of a document; None takes the one that the files name.
        eos: the last token of a document, likewise.
        chat_template: a Jinja file, or the name of one of the tokenizer's templates; None takes the tokenizer's own.

    Raises:
        UserError: there is no tokenizer, or it lacks the tokens that surround a document.
    """
    files = find_tokenizer_files(path)
    backend = read_backend_of(path, files)
    settings = read_settings(files)
    template = choose_template(files, settings, chat_template, "task.chat_template")
    bos = bos or token_text(settings.bos_token) or _find_token(backend, (BOS, "<s>"))
    eos = eos or token_text(settings.eos_token) or _find_token(backend, (EOS, "</s>", "<|endoftext|>"))
    if eos is None:
        raise UserError(f"tokenizer.path={path} does not say which token ends a document; set tokenizer.eos_token")
    for key, token in (("bos_token", bos), ("eos_token", eos)):
        if token is not None and backend.token_to_id(token) is None:
            raise UserError(f"tokenizer.{key}={token} is not a token of {path}")
    return Vocabulary(backend, bos, eos, template)


def read_backend(folder: Path) -> Backend | None:
    """Return the tokenizer of a model's folder; None if it has none."""
    files = find_tokenizer_files(str(folder))
    return read_backend_of(str(folder), files) if {"tokenizer.json", "tokenizer.model"} & files.keys() else None


def read_chat(folder: Path, chat_template: str | None) -> ChatTemplate:
    """Return the template that the key `chat_template` names; if it is None, the template of the folder's tokenizer."""
    files = find_tokenizer_files(str(folder))
    settings = read_settings(files)
    template = choose_template(files, settings, chat_template, "chat_template")
    if template is None:
        raise UserError("the tokenizer has no chat template; set chat_template to a Jinja file")
    tokens = {"bos_token": settings.bos_token, "eos_token": settings.eos_token}
    return ChatTemplate(template, {name: token_text(token) or "" for name, token in tokens.items()})


def train_vocabulary(tokenizer: Tokenizer, texts: Iterable[str]) -> Vocabulary:
    """Train a byte-level BPE. The same texts give the same tokenizer."""
    bos, eos = tokenizer.bos_token or BOS, tokenizer.eos_token or EOS
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokenizer.vocab_size,
        special_tokens=[PAD, bos, eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # All 256 bytes are tokens from the start (`initial_alphabet`), so every text can be encoded, in any language.
    backend.train_from_iterator(texts, trainer)
    return Vocabulary(backend, bos, eos, PLAIN)


def pad_rows(num_tokens: int) -> int:
    """Return the rows of an embedding table for `num_tokens` tokens: the next multiple of `ROW_MULTIPLE`.

    The sizes of mesh axes divide such a number, and matrix units need no padding for it.
    """
    return -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE


def check_fits(vocabulary: Vocabulary, model_vocab_size: int) -> None:
    """Raise `UserError` if the model's embedding has fewer rows than the tokenizer has tokens."""
    if vocabulary.num_tokens > model_vocab_size:
        raise UserError(
            f"the tokenizer has {vocabulary.num_tokens} tokens, more than model.vocab_size={model_vocab_size}; set "
            f"model.vocab_size={pad_rows(vocabulary.num_tokens)}, the next multiple of {ROW_MULTIPLE}, or auto, or "
            "choose another tokenizer"
        )


def tokenizer_digest(backend: Backend) -> str:
    return hashlib.sha256(backend.to_str().encode()).hexdigest()[:20]


def special_tokens(backend: Backend) -> set[int]:
    """Return the ids of the tokens that stand for no text."""
    return {index for index, token in backend.get_added_tokens_decoder().items() if token.special}


def bytes_by_token(backend: Backend) -> np.ndarray:
    """Return the UTF-8 bytes of text for which each token stands, [V] int64; special tokens stand for none."""
    special = special_tokens(backend)
    byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    def count_bytes(index: int) -> int:
        if index in special:
            return 0
        if byte_level:  # such a tokenizer writes each byte as one character
            return len(backend.id_to_token(index) or "")
        return len(backend.decode([index]).encode())

    return np.array([count_bytes(index) for index in range(backend.get_vocab_size())])


def _find_token(backend: Backend, names: tuple[str, ...]) -> str | None:
    """Return the first of the names that is a token."""
    return next((name for name in names if backend.token_to_id(name) is not None), None)
