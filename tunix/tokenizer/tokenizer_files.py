"""Find the files of a tokenizer, in a folder, in a bucket or on the hub, and read them."""

from pathlib import Path

from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer as Backend

from tunix.base.buckets import is_address, mirror
from tunix.base.disk import read_json
from tunix.base.errors import UserError
from tunix.hf.hub import explain
from tunix.tokenizer import sentencepiece

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


def find_tokenizer_files(path: str) -> dict[str, Path]:
    """Return the tokenizer's files, keyed by their usual names.

    `path` is a file, to which other files in its folder belong; a folder, here or in a bucket; or a repository on the
    hub.
    """
    place = mirror(path, FILES, "tokenizer.path") if is_address(path) else Path(path).expanduser()
    if place.is_file():
        usual = "tokenizer.model" if place.suffix == ".model" else "tokenizer.json"
        beside = {name: place.parent / name for name in FILES[2:]}
        return {usual: place, **{name: file for name, file in beside.items() if file.is_file()}}
    if place.is_dir():
        return {name: place / name for name in FILES if (place / name).is_file()}
    # What does not look like OWNER/NAME is not looked for on the hub.
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
            except LocalEntryNotFoundError as error:
                # The hub does not answer and the cache lacks the file, which may or may not exist. The files after it
                # are looked for in the cache only.
                unknown = error
            except EntryNotFoundError:
                continue
        if unknown and not files:
            raise unknown
    except Exception as error:  # no network, no such name, no permission to read it
        raise UserError(
            f"tokenizer.path={path} is not a file here and could not be fetched from the Hugging Face hub: "
            f"{explain(error)}"
        ) from None
    return files


def read_backend_of(path: str, files: dict[str, Path]) -> Backend:
    """Read the tokenizer of these files; `path` is for messages."""
    if "tokenizer.json" in files:
        try:
            return Backend.from_file(str(files["tokenizer.json"]))
        except BaseException as error:
            # The library raises bare Exception. Where its Rust code panics, it raises a PanicException, which is no
            # Exception and cannot be imported.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"tokenizer.path={path} cannot be read as a tokenizer.json: {error}") from None
    if "tokenizer.model" in files:
        return sentencepiece.convert(files["tokenizer.model"])
    raise UserError(f"tokenizer.path={path} has neither a tokenizer.json nor a tokenizer.model; name another")


class Token(BaseModel):
    """A token as a JSON object. Only its text is read; other fields say how it is cut out of a text."""

    content: str


class NamedTemplate(BaseModel):
    """One of several chat templates."""

    name: str
    template: str


class Settings(BaseModel):
    """Keys of tokenizer_config.json that are read."""

    bos_token: str | Token | None = None
    eos_token: str | Token | None = None
    chat_template: str | list[NamedTemplate] | None = None


def read_settings(files: dict[str, Path]) -> Settings:
    """Return the content of tokenizer_config.json; without values if there is no such file.

    Raises:
        UserError: a key has a value of another type.
    """
    if "tokenizer_config.json" not in files:
        return Settings()
    path = files["tokenizer_config.json"]
    try:
        return Settings.model_validate(read_json(path))
    except ValidationError as error:
        key = error.errors()[0]["loc"][0]
        raise UserError(f"{path}: {key} is not understood: it has a value of the wrong type") from None


def token_text(token: str | Token | None) -> str | None:
    return token.content if isinstance(token, Token) else token


def choose_template(files: dict[str, Path], settings: Settings, name_or_file: str | None, key: str) -> str | None:
    """Return one of the tokenizer's templates by its name, a Jinja text, or that of a file; `key` is for the message.

    None gives the tokenizer's default template, or None if it has no template.
    """
    own = settings.chat_template
    templates = {each.name: each.template for each in own} if isinstance(own, list) else {"default": own}
    if "chat_template.jinja" in files:
        templates["default"] = files["chat_template.jinja"].read_text()
    if name_or_file is None or templates.get(name_or_file):
        return templates.get(name_or_file or "default")
    if "{%" in name_or_file or "{{" in name_or_file:
        return name_or_file
    try:
        return Path(name_or_file).expanduser().read_text()
    except OSError as error:
        known = ", ".join(name for name, text in templates.items() if text) or "none"
        raise UserError(f"{key}={name_or_file} cannot be read: {error.strerror}; the tokenizer has {known}") from None
