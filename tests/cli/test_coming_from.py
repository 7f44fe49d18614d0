"""Every key of the right columns of docs/coming_from.md composes."""

import re

import pytest
from cli.test_foreign import WORDS as TESTED
from cli.test_foreign import check_words
from support.harness import ROOT

PAGE = (ROOT / "docs/coming_from.md").read_text()
ROWS = re.findall(r"^\| .+? \| (.+) \|$", PAGE, flags=re.M)
CODE = {words for row in ROWS for words in re.findall(r"`([^`]+)`", row)}
WORDS = sorted(words for words in CODE - {*TESTED} if re.match(r"[a-z_.]+=", words))


@pytest.mark.parametrize("words", WORDS)
def test_our_words_compose(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    check_words(words)
