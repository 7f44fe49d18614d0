"""Every key of the right columns of docs/coming_from.md composes."""

import re

import pytest
from cli.test_foreign import GRPO, OWN_NAMES
from cli.test_foreign import WORDS as TESTED
from support.harness import ROOT

from tunix.cli.compose import compose
from tunix.cli.keys import list_keys
from tunix.config import Config

PAGE = (ROOT / "docs/coming_from.md").read_text()
ROWS = re.findall(r"^\| .+? \| (.+) \|$", PAGE, flags=re.M)
CODE = {words for row in ROWS for words in re.findall(r"`([^`]+)`", row)}
WORDS = sorted(words for words in CODE - {*TESTED} if re.match(r"[a-z_.]+=", words))
KEYS = {*(name for name, _ in list_keys()), *Config.model_fields, "mesh_shape", "hydra.run.dir"}


@pytest.mark.parametrize("words", WORDS)
def test_our_words_compose(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert {*re.findall(r"(?:^| )([a-z0-9_.]+)=", words)} <= KEYS
    if not any(
        name in words for name in (*OWN_NAMES, "MODULE", "my_", "latest")
    ):  # they name something of the reader's own
        grpo = ["task=grpo", *GRPO] if re.search("^(task|sampling)", words) else []
        compose([*grpo, *words.split()])
