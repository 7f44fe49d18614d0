"""Every row of conf/foreign_names.yaml: its names are answered with words that compose, and the pages have them."""

import re
import sys

import pytest
from config.test_foreign import check_words
from support.harness import ROOT

from tunix.base.errors import UserError
from tunix.config.compose import compose
from tunix.config.foreign_names import read_rows, read_values
from tunix.config.mistakes import reject_flags

PAGE = (ROOT / "docs/coming_from.md").read_text()
# (name, value, right cell) of each left cell.
CELLS = [(name, row.value or "1", row) for row in read_rows() for name in row.there]
OURS = {"tokenizer"}  # a key of ours with other values: a flag of theirs alone
ENTRIES = sorted(
    {
        *(row.translate(value) or row.here for row in read_rows() for value in (row.values or {row.value or "1": ""})),
        *(words for table in read_values().values() for words in table.values()),
        *re.findall(r"`([a-z_.]+=[^`]*)`", " ".join(re.findall(r"^\| .+? \| (.+) \|$", PAGE, flags=re.M))),
    }
    - {""}
)


@pytest.mark.parametrize("words", ENTRIES)
def test_our_words_compose(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if not words.startswith("--"):
        check_words(words)


@pytest.mark.parametrize(("name", "value", "row"), CELLS, ids=[name for name, *_ in CELLS])
def test_each_name_is_answered(name, value, row):
    """As KEY=VALUE and as --flag VALUE; the value of the user is in the answer where the unit is the same."""
    expected = row.answer(value)
    if "VALUE" in row.here and not row.values and not row.unit and "VALUE." not in row.here:
        assert value in expected
    quoted = value if re.fullmatch(r"[\w./-]+|\[.*\]", value) else f"'{value}'"
    if name not in OURS:
        with pytest.raises(UserError) as error:
            compose([f"{name}={quoted}"])
        assert str(error.value) == f"unknown key {name}; {row.answer(quoted)}"
    for flag in (name, name.replace("_", "-")):
        with pytest.raises(UserError) as error:
            reject_flags([f"--{flag}", value], ["--help"])
        assert str(error.value) == f"--{flag}: there is no such flag; {expected}"


def test_values_that_other_programs_do_not_have_are_not_carried_over():
    """An example never takes the place of the user's value."""
    for row in read_rows():
        answer = row.answer("12345")
        if row.here and (row.unit or row.values):
            assert re.search(r"(?<!task)=\S", answer.split(":")[0]) is None, (row.there, answer)


def test_the_pages_are_those_of_the_file():
    sys.path.insert(0, str(ROOT))
    from tools.foreign_names import coming_from, parallelism

    assert coming_from(PAGE) == PAGE, "run make docs"
    page = (ROOT / "docs/parallelism.md").read_text()
    assert parallelism(page) == page, "run make docs"
