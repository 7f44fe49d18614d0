"""Tokenizers of the `tokenizers` library: read from files or from the hub, or trained on the corpus.

A `Vocab` is such a tokenizer (its `backend`) with the special tokens around a document and the chat template.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from tunix.base.buckets import is_address, mirror
from tunix.base.digests import hash_texts
from tunix.base.errors import UserError
from tunix.base.files import check_size, describe_missing, expand_home, names_file, read_json, write_tokenizer
from tunix.config import Tokenizer
from tunix.data.chat import CORPUS_DATE, PLAIN, ChatTemplate, RefusedConversation
from tunix.data.image_processors import ImageProcessor
from tunix.data.pieces import GROUP, PIECE, Cutter, drop_prefix, find_cutter, find_growth, find_prefix, split_text
from tunix.data.words import WordMemory, find_word_memory
from tunix.huggingface.hub import fetch

# Values in files of SentencePiece (Kudo and Richardson 2018, arXiv:1808.06226).
UNIGRAM, BPE = 1, 2  # values of TrainerSpec.model_type
CONTROL, USER_DEFINED = 3, 4  # values of SentencePiece.type
MAX_PIECE = 512  # characters of a token of BPE: to find its merges takes the square of them


def convert(path: Path) -> Backend:
    """Return a tokenizer that gives the same tokens for the same text as a SentencePiece model.

    It leaves out the tokens that SentencePiece can add before and after a text.

    Raises:
        UserError: the file is not a SentencePiece model, the model is neither unigram nor BPE, or the library is not
            installed.
    """
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise UserError(f"tokenizer.path={path} needs sentencepiece: pip install 'tunix-trainer[hf]'") from None
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(check_size(path).read_bytes())
    except Exception as error:  # protobuf's own error, whose module differs between versions
        raise UserError(f"tokenizer.path={path} cannot be read as a SentencePiece model: {error}") from None
    spec = proto.trainer_spec
    if spec.model_type not in (UNIGRAM, BPE):
        raise UserError(f"tokenizer.path={path} is a SentencePiece model of words or characters; unigram and BPE work")
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    model: models.Model
    if spec.model_type == UNIGRAM:
        model = models.Unigram(pieces, spec.unk_id, spec.byte_fallback)
    else:
        if (longest := max((len(piece) for piece, _ in pieces), default=0)) > MAX_PIECE:
            raise UserError(
                f"tokenizer.path={path} has a token of {longest:,} characters, and those of a SentencePiece model have "
                f"at most {MAX_PIECE}"
            )
        numbers = {piece: number for number, (piece, _) in enumerate(pieces)}
        model = models.BPE(
            numbers, _find_merges(proto), unk_token=spec.unk_piece, fuse_unk=True, byte_fallback=spec.byte_fallback
        )
    backend = Backend(model)
    steps: list[normalizers.Normalizer] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))  # NFKC and its like
    if proto.normalizer_spec.remove_extra_whitespaces:
        # One space before the text stays where Metaspace would put one.
        left = not proto.normalizer_spec.add_dummy_prefix
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Strip(left=left, right=True)]
    elif proto.normalizer_spec.add_dummy_prefix:
        steps.append(normalizers.Replace(Regex(r"\A "), "  "))  # Metaspace puts no space before one
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "first" if proto.normalizer_spec.add_dummy_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=spec.split_by_whitespace)
    spaces = decoders.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), spaces, decoders.Fuse()])
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        tokens = [AddedToken(p.piece, normalized=False, special=special) for p in proto.pieces if p.type == kind]
        (backend.add_special_tokens if special else backend.add_tokens)(tokens)
    return backend


def _find_merges(proto: Any) -> list[tuple[str, str]]:
    """Return the pairs of tokens that BPE merges, the first learnt first. A SentencePiece file has no list of merges. A
    token's score is minus the number of the merge that made it, so every split of a token into two other tokens is a
    merge, in the order of the scores."""
    numbers = {piece.piece: number for number, piece in enumerate(proto.pieces) if piece.type != CONTROL}
    merges = []
    for piece in proto.pieces:
        for bound in range(1, len(piece.piece)):
            left, right = piece.piece[:bound], piece.piece[bound:]
            if left in numbers and right in numbers:
                merges.append((-piece.score, numbers[left], numbers[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


# Characters or tokens that the steps of a tokenizer may make of one, by their product; those of XLM-R make 36.
MAX_GROWTH = 1000
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", SPECIAL_TOKENS, ADDED_TOKENS, "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # folder of further ones beside chat_template.jinja
TOOL_USE = "tool_use"  # name of the template for conversations with tools, where it is not the default one


def find_tokenizer_files(path: str) -> dict[str, Path]:
    """Return the tokenizer's files, keyed by their usual names.

    `path` is a file, to which other files in its folder belong; a folder, here or in a bucket; or a repository on the
    hub.
    """
    found = mirror(path, FILES, "tokenizer.path") if is_address(path) else expand_home(path)
    if found.is_file():
        usual = "tokenizer.model" if found.suffix == ".model" else "tokenizer.json"
        return {usual: found, **{name: found.with_name(name) for name in FILES[2:] if found.with_name(name).is_file()}}
    if found.is_dir():
        return {name: found / name for name in FILES if (found / name).is_file()}
    if names_file(path):
        raise UserError(f"tokenizer.path={describe_missing(path)}")
    fetched = fetch(path, FILES, "tokenizer.path", "file")
    return {name: fetched / name for name in FILES if (fetched / name).is_file()}


def read_backend_of(path: str, files: dict[str, Path]) -> Backend:
    """Read the tokenizer of these files; `path` is for messages."""
    if "tokenizer.json" in files:
        with explaining_library(f"tokenizer.path={path} cannot be read as a tokenizer.json"):
            backend = Backend.from_file(str(check_size(files["tokenizer.json"])))
        # These settings of whoever saved the file would cut and pad documents. The length here is training.seq_len.
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, models.BPE):
            backend.model.dropout = None  # by chance, other tokens of a text each time
    elif "tokenizer.model" in files:
        backend = convert(files["tokenizer.model"])
        _add_tokens(backend, files, path)
    else:
        raise UserError(f"tokenizer.path={path} has neither a tokenizer.json nor a tokenizer.model; name another")
    if (growth := find_growth(backend)) > MAX_GROWTH:
        raise UserError(
            f"tokenizer.path={path} may make {growth:,} characters or tokens of one, which takes the memory of the "
            f"machine; at most {MAX_GROWTH:,} are read"
        )
    return backend


def _add_tokens(backend: Backend, files: dict[str, Path], path: str) -> None:
    """Add the tokens that a folder has beside its SentencePiece model: those of added_tokens_decoder, or of a file of
    their own, whose special ones special_tokens_map.json names. Raises `UserError` where they are no tokens, or their
    ids are not the next ones."""
    decoder = _read_settings(files.get("tokenizer_config.json")).added_tokens_decoder
    older, named = (read_json(files[name]) if name in files else {} for name in (ADDED_TOKENS, SPECIAL_TOKENS))
    try:
        # Texts, or objects with their `content`; some stand in lists.
        words = [word for value in named.values() for word in (value if isinstance(value, list) else [value])]
        special = {str(word.get("content")) if isinstance(word, dict) else word for word in words}
        if decoder is None:
            tokens = {int(index): AddedToken(text, special=text in special) for text, index in older.items()}
        else:
            tokens = {int(index): AddedToken(**keys) for index, keys in decoder.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"tokenizer.path={path}: its added tokens are not understood: {error}") from None
    ordered = sorted(tokens.items(), key=itemgetter(0))
    backend.add_tokens([token for _, token in ordered if backend.token_to_id(token.content) is None])
    for index, token in ordered:
        if (found := backend.token_to_id(token.content)) != index:
            raise UserError(
                f"tokenizer.path={path}: the added token {token.content[:80]!r} has the id {index}, and gets {found} "
                "behind those of tokenizer.model; save its tokenizer.json with transformers"
            )


@contextmanager
def explaining_library(problem: str = "the tokenizer cannot read a text, by its tokenizer.json") -> Iterator[None]:
    """Raise `UserError` for an error of the library, which a tokenizer.json may cause with some texts alone."""
    try:
        yield
    except BaseException as error:
        # The library raises bare Exception. Where its Rust code panics, it raises a PanicException, which is no
        # Exception and cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{problem}: {error}") from None


def decode(backend: Backend, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Return the text of tokens; raises `UserError` where the library fails for them."""
    with explaining_library("the tokenizer cannot write the text of tokens, by its tokenizer.json"):
        return backend.decode(tokens, skip_special_tokens=skip_special_tokens)


class Token(BaseModel):
    """A token as a JSON object. Only its text is read; other fields say how it is cut out of a text."""

    content: str


class NamedTemplate(BaseModel):
    """One of several chat templates."""

    name: str
    template: str


class Settings(BaseModel):
    """Keys of tokenizer_config.json that are read, and of chat_template.json, where a processor has its template, and
    of special_tokens_map.json."""

    bos_token: str | Token | None = None
    eos_token: str | Token | None = None
    chat_template: str | list[NamedTemplate] | None = None
    added_tokens_decoder: Any = None  # of newer files
    add_bos_token: Any = None


def read_settings(files: dict[str, Path]) -> Settings:
    """Return the content of tokenizer_config.json, with the template of chat_template.json if it has none; without
    values if there are no such files.

    Versions of transformers that did not write added_tokens_decoder kept there what a tokenizer began with, and the
    tokens of today in special_tokens_map.json. As in transformers, these are taken. Raises `UserError` where a key has
    a value of another type.
    """
    of_config, of_tokens, of_processor = (
        _read_settings(files.get(name)) for name in ("tokenizer_config.json", SPECIAL_TOKENS, "chat_template.json")
    )
    found: dict[str, Any] = {"chat_template": of_config.chat_template or of_processor.chat_template}
    if of_config.added_tokens_decoder is None:
        found |= {key: getattr(of_tokens, key) for key in of_tokens.model_fields_set & {"bos_token", "eos_token"}}
    return of_config.model_copy(update=found)


def _read_settings(path: Path | None) -> Settings:
    try:
        return Settings.model_validate({} if path is None else read_json(path))
    except ValidationError as error:
        key = (*error.errors()[0]["loc"], "the file")[0]
        raise UserError(f"{path}: {key} is not understood: it has a value of the wrong type") from None


def token_text(token: str | Token | None) -> str | None:
    return token.content if isinstance(token, Token) else token


def find_templates(files: dict[str, Path], settings: Settings, key: str) -> dict[str, str | None]:
    """Return the tokenizer's templates by their names; `key` is for messages."""
    template = settings.chat_template
    templates: dict[str, str | None]
    templates = {each.name: each.template for each in template} if isinstance(template, list) else {"default": template}
    if "chat_template.jinja" in files:
        file = files["chat_template.jinja"]
        templates["default"] = _read_template(file, key)
        for other in sorted(file.parent.glob(f"{TEMPLATES}/*.jinja")):
            templates[other.stem] = _read_template(other, key)
    return templates


def select_template(templates: dict[str, str | None], name_or_file: str | None, key: str) -> str | None:
    """Return one of the tokenizer's templates by its name, a Jinja text, or that of a file; `key` is for the message.

    None gives the tokenizer's default template, or None if it has no template.
    """
    if name_or_file is None or templates.get(name_or_file):
        return templates.get(name_or_file or "default")
    if "{%" in name_or_file or "{{" in name_or_file:
        return name_or_file
    file = expand_home(name_or_file)
    try:
        if file.exists() and not file.is_file():  # a device or a pipe may never end
            raise UserError(f"{key}={name_or_file} is no regular file")
        return _read_template(file, key)
    except OSError as error:
        names = ", ".join(name for name, text in templates.items() if text) or "none"
        raise UserError(f"{key}={name_or_file} cannot be read: {error.strerror}; the tokenizer has {names}") from None


def _read_template(file: Path, key: str) -> str:
    try:
        return check_size(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{key}: {file} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except ValueError as error:
        raise UserError(f"{key}: {file} is no template: {error}") from None


ROW_MULTIPLE = 128
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"  # special tokens of tokenizers that are trained here


@dataclass(frozen=True)
class Vocab:
    """A tokenizer with the first and the last token of a document, and the chat template."""

    backend: Backend
    bos_token: str | None  # first token of a document; None: documents have none
    eos_token: str  # last token of a document
    chat_template: str | None  # Jinja
    images: ImageProcessor | None = None  # of a model that sees

    @cached_property
    def bos(self) -> int | None:
        return None if self.bos_token is None else self.backend.token_to_id(self.bos_token)

    @cached_property
    def eos(self) -> int:
        index = self.backend.token_to_id(self.eos_token)
        assert index is not None
        return index

    @cached_property
    def as_json(self) -> str:
        """The tokenizer as JSON of ASCII alone, which each checkpoint holds; 262,144 tokens take seconds to write."""
        return json.dumps(json.loads(self.backend.to_str()))

    @cached_property
    def num_tokens(self) -> int:
        """The largest token id plus one."""
        return count_ids(self.backend)

    @cached_property
    def dtype(self) -> np.dtype:
        """Type of tokens on disk."""
        return np.dtype(np.uint16 if self.num_tokens <= 2**16 else np.uint32)

    @cached_property
    def cutter(self) -> Cutter | None:
        return find_cutter(self.backend)

    @cached_property
    def words(self) -> WordMemory | None:
        return find_word_memory(self.backend, self.dtype)

    @cached_property
    def prefix(self) -> str | None:
        """Where `backend` puts a space before a text (`find_prefix`)."""
        return find_prefix(self.backend)

    @cached_property
    def continued(self) -> "Vocab":
        """The tokenizer of texts that go on behind another: it puts no space before them."""
        return self if self.prefix is None else replace(self, backend=drop_prefix(self.backend))

    @cached_property
    def added(self) -> dict[int, str]:
        """The tokens that are cut out of a text before the others, by their ids."""
        return {index: token.content for index, token in self.backend.get_added_tokens_decoder().items()}

    def encode_sequences(self, sequences: Sequence[Sequence[str]]) -> Iterator[list[np.ndarray]]:
        """Yield the tokens [T] of the texts of each sequence, which stand one behind the other in it.

        Tokenizers like SentencePiece put a space before a text. As in the whole sequence, a text that goes on behind
        another gets none, but for some tokenizers behind a special token.
        """
        if self.prefix is None:
            encoded = self.encode([text for texts in sequences for text in texts])
            for texts in sequences:
                yield [next(encoded) for _ in texts]
            return
        is_repeated = self.prefix == "each" and bool(self.added)
        special = re.compile("|".join(map(re.escape, self.added.values())))
        heads, rests = [], []  # of each text, up to its first special token and from there on: a space follows it again
        for text in (text for texts in sequences for text in texts):
            match = special.search(text) if is_repeated else None
            heads.append(text[: match.start()] if match else text)
            rests.append(text[match.start() :] if match else "")
        encodings = self.encode(heads), self.continued.encode(heads), self.encode(rests)
        for texts in sequences:
            tokens: list[np.ndarray] = []
            last = None  # token of the texts before
            for first, behind, rest in zip(*(islice(each, len(texts)) for each in encodings), strict=True):
                has_space = last is None or (is_repeated and last in self.added)
                tokens.append(np.concatenate([first if has_space else behind, rest]))
                last = tokens[-1][-1] if len(tokens[-1]) else last
            yield tokens

    def encode(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield the tokens [T] of each text, without those around a document.

        Long texts are tokenized in pieces, so that this takes about 4 times their size in memory.
        """
        if all(len(text) <= PIECE for text in texts):
            yield from self._encode_pieces(texts)
            return
        for text in texts:
            tokens = bytearray()
            pieces = split_text(text, self.cutter)
            while group := list(islice(pieces, GROUP)):
                for piece in self._encode_pieces(group):
                    tokens += piece.data
            yield np.frombuffer(tokens, self.dtype)

    def _encode_pieces(self, pieces: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield the tokens [T] of each piece of a text."""
        if self.words is not None:
            yield from map(self.words.encode, pieces)
            return
        with explaining_library():
            encodings = self.backend.encode_batch_fast(list(pieces), add_special_tokens=False)
        for encoding in encodings:
            yield np.array(encoding.ids, self.dtype)

    def expand_images(self, texts: Sequence[str], images: Sequence[bytes]) -> Sequence[str]:
        """Return the texts of a document with all tokens of each of its images. Raises `RefusedConversation` where the
        chat template has written more images, or fewer: a thought or a call may have one."""
        if self.images is None:
            return texts
        try:
            return self.images.expand(texts, images)
        except ValueError as error:
            raise RefusedConversation(f"task.chat_template: it writes {error}") from None

    def find_images(self, tokens: Sequence[np.ndarray], images: Sequence[bytes]) -> np.ndarray:
        """Return the spans [images, 2] of images in a document's parts (`ImageProcessor.find`). Raises
        `RefusedConversation` where the chat template has written other soft tokens than those of the images."""
        if self.images is None:
            return np.zeros((0, 2), np.int64)
        try:
            return self.images.find(np.concatenate(tokens), self.soft_id, images)
        except ValueError as error:  # a template, or its options, may write soft tokens of its own
            raise RefusedConversation(f"task.chat_template: it writes {error}") from None

    def is_of_image(self, tokens: np.ndarray) -> np.ndarray:
        """Return which tokens [T] stand for images, which no model learns to write."""
        assert self.images is not None
        ids = map(self.backend.token_to_id, self.images.tokens)
        return np.isin(tokens, [index for index in ids if index is not None])

    @cached_property
    def soft_id(self) -> int:
        assert self.images is not None
        index = self.backend.token_to_id(self.images.soft)
        assert index is not None  # `add_images`
        return index

    @cached_property
    def chat(self) -> ChatTemplate:
        if self.chat_template is None:
            raise UserError("the tokenizer has no chat template; set task.chat_template to a Jinja file")
        special = {"bos_token": self.bos_token or "", "eos_token": self.eos_token}
        mark = None if self.images is None else self.images.mark
        return ChatTemplate(self.chat_template, special, mark, CORPUS_DATE)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that decides the tokens of a document."""
        images = () if self.images is None else (str(self.images.describe()),)
        return hash_texts(tokenizer_digest(self.backend), str(self.bos_token), self.eos_token, *images)

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
        """Make `folder` with the files that `read_vocab` reads, under Hugging Face's names."""
        folder.mkdir()
        write_tokenizer(folder, self.backend)
        special = {"bos_token": self.bos_token, "eos_token": self.eos_token, "chat_template": self.chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=1))


def read_vocab(tokenizer: Tokenizer, chat_template: str | None = None) -> Vocab:
    """Read the tokenizer of `tokenizer.path`; see `load_vocab`."""
    assert tokenizer.path is not None
    return load_vocab(tokenizer.path, tokenizer.bos_token, tokenizer.eos_token, chat_template)


def load_vocab(path: str, bos: str | None = None, eos: str | None = None, chat_template: str | None = None) -> Vocab:
    """Read the tokenizer of a file, of a folder, or of a repository on the hub.

    Args:
        bos: the first token of a document; None takes the one that the files name, which may be none. Where they do not
            say it, a special token <bos> or <s> is taken.
        eos: the last token of a document, likewise.
        chat_template: a Jinja file, or the name of one of the tokenizer's templates; None takes the tokenizer's own.

    Raises:
        UserError: there is no tokenizer, or it lacks the tokens that surround a document.
    """
    files = find_tokenizer_files(path)
    backend = read_backend_of(path, files)
    settings = read_settings(files)
    templates = find_templates(files, settings, "task.chat_template")
    template = select_template(templates, chat_template, "task.chat_template")
    bos = bos or token_text(settings.bos_token)
    if bos is None and "bos_token" not in settings.model_fields_set:  # null says that documents have none
        bos = _find_token(backend, (BOS, "<s>"), special_tokens(backend))
    eos = eos or token_text(settings.eos_token) or _find_token(backend, (EOS, "</s>", "<|endoftext|>"))
    if eos is None:
        raise UserError(f"tokenizer.path={path} does not say which token ends a document; set tokenizer.eos_token")
    for key, token in (("bos_token", bos), ("eos_token", eos)):
        if token is not None and backend.token_to_id(token) is None:
            raise UserError(f"tokenizer.{key}={token} is not a token of {path}")
    return Vocab(backend, bos, eos, template)


def read_backend(folder: Path) -> Backend | None:
    """Return the tokenizer of a model's folder; None if it has none."""
    files = find_tokenizer_files(str(folder))
    return read_backend_of(str(folder), files) if {"tokenizer.json", "tokenizer.model"} & files.keys() else None


def lacks_first_token(folder: Path) -> bool:
    """Return whether transformers begins a text with `bos_token` where the folder's tokenizer does not: a file of
    SentencePiece does not say it, tokenizer_config.json does."""
    files = find_tokenizer_files(str(folder))
    return "tokenizer.json" not in files and bool(_read_settings(files.get("tokenizer_config.json")).add_bos_token)


def read_chat(
    folder: Path, chat_template: str | None, images: ImageProcessor | None = None, with_tools: bool = False
) -> ChatTemplate:
    """Return the template that the key `chat_template` names; if it is None, the template of the folder's tokenizer.
    `images` is the processor of images of a model that sees. With `with_tools` a template named `tool_use` comes first,
    as in transformers."""
    files = find_tokenizer_files(str(folder))
    settings = read_settings(files)
    templates = find_templates(files, settings, "chat_template")
    name = TOOL_USE if with_tools and TOOL_USE in templates else None
    template = select_template(templates, chat_template or name, "chat_template")
    if template is None:
        raise UserError("the tokenizer has no chat template; set chat_template to a Jinja file")
    tokens = {"bos_token": settings.bos_token, "eos_token": settings.eos_token}
    special = {name: token_text(token) or "" for name, token in tokens.items()}
    return ChatTemplate(template, special, None if images is None else images.mark)


MAX_TOKEN_BYTES = 4096  # of a tokenizer that is trained here


def train_vocab(tokenizer: Tokenizer, texts: Iterable[str], more: Sequence[str] = ()) -> Vocab:
    """Train a byte-level BPE. The same texts give the same tokenizer. `more` special tokens follow the first three.

    No token is longer than `MAX_TOKEN_BYTES`.
    """
    bos, eos = tokenizer.bos_token or BOS, tokenizer.eos_token or EOS
    backend = Backend(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # It learns from the parts of a longer word (a genome, a line of blanks): its time is the square of a word's length.
    parts = pre_tokenizers.Split(Regex(f".{{{MAX_TOKEN_BYTES}}}"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, parts])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokenizer.vocab_size + len(more),
        special_tokens=[PAD, bos, eos, *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # All 256 bytes are tokens from the start (`initial_alphabet`), so every text can be encoded, in any language.
    backend.train_from_iterator(texts, trainer)
    backend.pre_tokenizer = words
    return Vocab(backend, bos, eos, PLAIN)


def pad_rows(num_tokens: int) -> int:
    """Return the rows of an embedding table for `num_tokens` tokens: the next multiple of `ROW_MULTIPLE`.

    The sizes of mesh axes divide such a number, and matrix units need no padding for it.
    """
    return -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE


def add_images(vocab: Vocab, processor: ImageProcessor | None) -> Vocab:
    """Return a tokenizer for a model that sees images, with its processor; the same one where it sees none. Raises
    `UserError` where the tokenizer lacks the tokens that stand for an image."""
    if processor is None:
        return vocab
    if missing := [token for token in processor.tokens if vocab.backend.token_to_id(token) is None]:
        raise UserError(
            f"the tokenizer has no token {missing[0]}, and model.vision needs {', '.join(processor.tokens)} for an "
            "image; take the tokenizer of a model that sees, or tokenizer.path=null trains one"
        )
    return replace(vocab, images=processor)


def check_fits(vocab: Vocab, model_vocab_size: int) -> None:
    """Raise `UserError` if the model's embedding has fewer rows than the tokenizer has tokens."""
    if vocab.num_tokens > model_vocab_size:
        raise UserError(
            f"the tokenizer has {vocab.num_tokens} tokens, more than model.vocab_size={model_vocab_size}; set "
            f"model.vocab_size={pad_rows(vocab.num_tokens)}, the next multiple of {ROW_MULTIPLE}, or auto, or "
            "choose another tokenizer"
        )


MAX_IDS = 1 << 24  # of a tokenizer: tables have a row for each, and published ones have 300,000


def count_ids(backend: Backend) -> int:
    """Return the largest token id plus one; raises `UserError` for one that no table has a row for."""
    token, index = max(backend.get_vocab().items(), key=itemgetter(1))
    if index >= MAX_IDS:
        raise UserError(f"the tokenizer gives the token {token[:80]!r} the id {index}; ids are below {MAX_IDS:,}")
    return index + 1


def find_unknown(backend: Backend) -> str | None:
    """Return the token that stands for what the tokenizer does not know; None where it has none."""
    model = json.loads(backend.to_str())["model"]
    token = backend.id_to_token(model["unk_id"]) if model.get("unk_id") is not None else model.get("unk_token")
    return None if token is None or backend.token_to_id(token) is None else token


def tokenizer_digest(backend: Backend) -> str:
    return hash_texts(backend.to_str())


def special_tokens(backend: Backend) -> set[int]:
    """Return the ids of the tokens that stand for no text."""
    return {index for index, token in backend.get_added_tokens_decoder().items() if token.special}


MAX_DEPTH = 50  # of a regular expression for special tokens


def compile_special_texts(backend: Backend) -> re.Pattern[str]:
    """Return a pattern of the first character of each special token that is written out in a text."""
    added = backend.get_added_tokens_decoder().values()
    words = {token.content for token in added if token.special and token.content}
    return re.compile(rf"(?={_match_any(words)}).", re.DOTALL)


def _match_any(words: set[str], depth: int = 0) -> str:
    """Return a regular expression of any of some words, which are looked for together: Llama 3 has 256, and a text with
    the first characters of each would be read 256 times."""
    if not words:
        return "(?!)"
    if depth == MAX_DEPTH:
        return f"(?:{'|'.join(map(re.escape, sorted(words)))})"
    if "" in words:
        return ""
    rest: dict[str, set[str]] = {}
    for word in words:
        rest.setdefault(word[0], set()).add(word[1:])
    return f"(?:{'|'.join(re.escape(first) + _match_any(rest[first], depth + 1) for first in sorted(rest))})"


def break_special_texts(text: str, special: re.Pattern[str]) -> str:
    """Return a text in which no special token is written out, with `special` of `compile_special_texts`: a tool that
    says <|im_end|> ends no turn."""
    return special.sub(r"\g<0> ", text)


BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of SentencePiece for a byte

# The character that stands for each byte in a byte-level token: the byte's own where it is printable, as GPT-2 has it.
_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_OTHERS = count(256)
BYTE_LEVEL = codecs.charmap_build("".join(chr(b if b in _PRINTABLE else next(_OTHERS)) for b in range(256)))


class TokenBytes:
    """The UTF-8 bytes of text for which a token stands behind another one; a special token gives its name."""

    def __init__(self, backend: Backend):
        self.backend, self.added = backend, backend.get_added_tokens_decoder()
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    def __call__(self, index: int) -> bytes:
        if index in self.added:
            return self.added[index].content.encode()
        token = self.backend.id_to_token(index) or ""
        if self.is_byte_level:
            try:
                return codecs.charmap_encode(token, "strict", BYTE_LEVEL)[0]
            except UnicodeEncodeError:
                return token.encode()
        if byte := BYTE.fullmatch(token):
            return bytes.fromhex(byte[1])
        # Decoders drop the space before the first word of a text, so a token by itself is shorter than behind another.
        once, twice = (decode(self.backend, [index] * count).encode() for count in (1, 2))
        return twice[len(once) :]


def bytes_by_token(backend: Backend) -> np.ndarray:
    """Return how many UTF-8 bytes of text each token stands for, [V] int64, V the largest id plus one.

    Special tokens stand for none, and so do ids without a token.
    """
    read, special = TokenBytes(backend), special_tokens(backend)
    return np.array([0 if index in special else len(read(index)) for index in range(count_ids(backend))])


def decode_behind(backend: Backend, last: int, tokens: Sequence[int]) -> str:
    """Return the text of tokens that follow the token `last` of another text.

    The space before their first word stays, which some decoders drop at the beginning of a text.
    """
    before = decode(backend, [last])
    if before.endswith("\ufffd"):  # a part of a character, which the first of the tokens may complete
        return decode(backend, tokens)
    return decode(backend, [last, *tokens])[len(before) :]


def _find_token(backend: Backend, names: tuple[str, ...], among: set[int] | None = None) -> str | None:
    """Return the first of the names that is a token; with `among`, one of these ids."""
    ids = ((name, backend.token_to_id(name)) for name in names)
    return next((name for name, index in ids if index is not None and (among is None or index in among)), None)
