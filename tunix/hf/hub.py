"""Where a model's files are: a folder here, or one of the Hugging Face hub's, downloaded once. Knows no jax."""

import re
from pathlib import Path

from tunix.base.errors import UserError

ABOUT = ("*.json", "*.jinja", "tokenizer.model")  # config, tokenizer, chat template
WEIGHTS = ("*.safetensors",)

REASONS = {  # by the name of huggingface_hub's error, the narrower first
    "GatedRepoError": "access to it has to be granted on its page, and HF_TOKEN set",
    "RepositoryNotFoundError": "it has no model of this name; a private one needs HF_TOKEN",
    "LocalEntryNotFoundError": "it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE is set",
    "ConnectError": "it is not in the cache, and the hub is out of reach",
}


def find(source: str, patterns: tuple[str, ...] = ABOUT, key: str = "model.init_from") -> Path:
    """The folder that holds the files of `source`, a path or an ID like `google/gemma-3-270m`.

    Only JSON, templates, tokenizers and safetensors are ever fetched, into the cache of `huggingface_hub`.

    Raises:
        UserError: neither a folder nor a model that can be fetched.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise UserError(f"{key}={source} is neither a folder nor the ID of a model like google/gemma-3-270m")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(patterns)))
    except Exception as error:  # of many kinds: network, rights, names
        raise UserError(
            f"{key}={source} is not a folder here and could not be fetched from the Hugging Face hub: {why(error)}"
        ) from None


def why(error: Exception) -> str:
    """What an error of huggingface_hub means, in a line."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return next((text for kind, text in REASONS.items() if kind in kinds), str(error).strip().splitlines()[0])
