"""Text to tokens with the `tokenizers` library: from files, from the hub, or a byte-level BPE trained on the corpus."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tunix.base.disk import read_json
from tunix.base.errors import UserError
from tunix.config import Tokenizer
from tunix.hf.hub import why
from tunix.tokenizer import sentencepiece
from tunix.tokenizer.chat import PLAIN, ChatTemplate

ROW_MULTIPLE = 128
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"  # of tokenizers trained here
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with what surrounds a document: its first and last token, and its chat template."""

    backend: Backend
    bos_token: str | None
    eos_token: str
    chat_template: str | None

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
        """One more than the largest token id."""
        return max(self.backend.get_vocab().values()) + 1

    @cached_property
    def chat(self) -> ChatTemplate:
        if self.chat_template is None:
            raise UserError("the tokenizer has no chat template; set task.chat_template to a Jinja file")
        return ChatTemplate(self.chat_template, {"bos_token": self.bos_token or "", "eos_token": self.eos_token})

    @cached_property
    def digest(self) -> str:
        """Of what becomes of a text."""
        parts = (tokenizer_digest(self.backend), str(self.bos_token), self.eos_token)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]

    def beginning(self) -> Backend:
        """The tokenizer such that it puts the first token before a text by itself, as Hugging Face's do."""
        backend = Backend.from_str(self.backend.to_str())
        if self.bos_token is not None and backend.post_processor is None:
            first = f"{self.bos_token} $A"
            backend.post_processor = processors.TemplateProcessing(
                single=first, pair=f"{first} $B", special_tokens=[(self.bos_token, self.bos)]
            )
        return backend

    def save(self, folder: Path) -> None:
        """Make a folder of the files that `read` takes, as Hugging Face names them."""
        folder.mkdir()
        self.backend.save(str(folder / "tokenizer.json"))
        special = {"bos_token": self.bos_token, "eos_token": self.eos_token, "chat_template": self.chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=1))


def read(cfg: Tokenizer, chat_template: str | None = None) -> Vocabulary:
    """The tokenizer of `tokenizer.path`; `chat_template` is a Jinja file that goes before its own.

    Raises:
        UserError: no tokenizer there, or none of the tokens that surround a document.
    """
    assert cfg.path is not None
    return load(cfg.path, cfg.bos_token, cfg.eos_token, chat_template)


def load(path: str, bos: str | None = None, eos: str | None = None, chat_template: str | None = None) -> Vocabulary:
    """The same of a path alone; what is given goes before what the files say."""
    files = _files(path)
    backend = _backend(path, files)
    about: dict[str, Any] = read_json(files["tokenizer_config.json"]) if _has(files) else {}
    template = _template(files, about, chat_template, "task.chat_template")
    bos = bos or _token(about.get("bos_token")) or _first(backend, (BOS, "<s>"))
    eos = eos or _token(about.get("eos_token")) or _first(backend, (EOS, "</s>", "<|endoftext|>"))
    if eos is None:
        raise UserError(f"tokenizer.path={path} does not say which token ends a document; set tokenizer.eos_token")
    for key, token in (("bos_token", bos), ("eos_token", eos)):
        if token is not None and backend.token_to_id(token) is None:
            raise UserError(f"tokenizer.{key}={token} is not a token of {path}")
    return Vocabulary(backend, bos, eos, template)


def read_backend(folder: Path) -> Backend | None:
    """The tokenizer of a model's folder, if it has one."""
    files = _files(str(folder))
    return _backend(str(folder), files) if {"tokenizer.json", "tokenizer.model"} & files.keys() else None


def read_chat(folder: Path, asked: str | None) -> ChatTemplate:
    """The template for answers: `chat_template=asked`, or that of a folder with a tokenizer."""
    files = _files(str(folder))
    about: dict[str, Any] = read_json(files["tokenizer_config.json"]) if _has(files) else {}
    template = _template(files, about, asked, "chat_template")
    if template is None:
        raise UserError("the tokenizer has no chat template; set chat_template to a Jinja file")
    return ChatTemplate(template, {key: _token(about.get(key)) or "" for key in ("bos_token", "eos_token")})


def train(cfg: Tokenizer, texts: Iterable[str]) -> Vocabulary:
    """A byte-level BPE, the same for the same texts."""
    bos, eos = cfg.bos_token or BOS, cfg.eos_token or EOS
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab_size,
        special_tokens=[PAD, bos, eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Vocabulary(backend, bos, eos, PLAIN)


def padded(num_tokens: int) -> int:
    """Rows of an embedding table for so many tokens: a multiple that meshes divide and matrix units like."""
    return -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE


def check_fits(vocabulary: Vocabulary, model_vocab_size: int) -> None:
    """Raise `UserError` where the model has fewer rows than the tokenizer has tokens."""
    if vocabulary.num_tokens > model_vocab_size:
        raise UserError(
            f"the tokenizer has {vocabulary.num_tokens} tokens, more than model.vocab_size={model_vocab_size}; set "
            f"model.vocab_size={padded(vocabulary.num_tokens)}, the next multiple of {ROW_MULTIPLE}, or auto, or "
            "choose another tokenizer"
        )


def tokenizer_digest(backend: Backend) -> str:
    return hashlib.sha256(backend.to_str().encode()).hexdigest()[:20]


def special_tokens(backend: Backend) -> set[int]:
    """Ids of tokens that stand for no text."""
    return {index for index, token in backend.get_added_tokens_decoder().items() if token.special}


def bytes_by_token(backend: Backend) -> np.ndarray:
    """UTF-8 bytes that each word stands for, [V] int64; special tokens stand for none."""
    special = special_tokens(backend)
    byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    def length(index: int) -> int:
        if index in special:
            return 0
        if byte_level:  # one character of the word for one byte
            return len(backend.id_to_token(index) or "")
        return len(backend.decode([index]).encode())

    return np.array([length(index) for index in range(backend.get_vocab_size())])


def _files(path: str) -> dict[str, Path]:
    """The tokenizer's files by their usual names: a file and its neighbours, a folder's, or those on the hub."""
    place = Path(path).expanduser()
    if place.is_file():
        usual = "tokenizer.model" if place.suffix == ".model" else "tokenizer.json"
        beside = {name: place.parent / name for name in FILES[2:]}
        return {usual: place, **{name: file for name, file in beside.items() if file.is_file()}}
    if place.is_dir():
        return {name: place / name for name in FILES if (place / name).is_file()}
    if place.suffix in (".json", ".model") or path.count("/") > 1 or path.startswith((".", "~")):
        raise UserError(f"tokenizer.path={path} does not exist")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    files: dict[str, Path] = {}
    unknown: Exception | None = None
    try:
        for name in FILES:
            try:
                files[name] = Path(hf_hub_download(path, name, local_files_only=unknown is not None))
            except LocalEntryNotFoundError as error:  # not in the cache, and nobody can say whether the hub has it
                unknown = error
            except EntryNotFoundError:
                continue
        if unknown and not files:
            raise unknown
    except Exception as error:  # the network, the name, the right to read it
        raise UserError(
            f"tokenizer.path={path} is not a file here and could not be fetched from the Hugging Face hub: {why(error)}"
        ) from None
    return files


def _backend(path: str, files: dict[str, Path]) -> Backend:
    if "tokenizer.json" in files:
        try:
            return Backend.from_file(str(files["tokenizer.json"]))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"tokenizer.path={path} cannot be read as a tokenizer.json: {error}") from None
    if "tokenizer.model" in files:
        return sentencepiece.convert(files["tokenizer.model"])
    raise UserError(f"tokenizer.path={path} has neither a tokenizer.json nor a tokenizer.model; name another")


def _has(files: dict[str, Path]) -> bool:
    return "tokenizer_config.json" in files


def _token(value: Any) -> str | None:
    return value["content"] if isinstance(value, dict) else value


def _template(files: dict[str, Path], about: dict[str, Any], asked: str | None, key: str) -> str | None:
    """The template that `key` asks for, a name or a Jinja file; else the tokenizer's own, if it has one."""
    own = about.get("chat_template")
    named = {each["name"]: each["template"] for each in own} if isinstance(own, list) else {"default": own}
    if "chat_template.jinja" in files:
        named["default"] = files["chat_template.jinja"].read_text()
    if asked is None or named.get(asked):
        return named.get(asked or "default")
    try:
        return Path(asked).expanduser().read_text()
    except OSError as error:
        known = ", ".join(name for name, text in named.items() if text) or "none"
        raise UserError(f"{key}={asked} cannot be read: {error.strerror}; the tokenizer has {known}") from None


def _first(backend: Backend, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if backend.token_to_id(name) is not None), None)
