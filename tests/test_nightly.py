"""Forty commits run every nightly case; a case that its mark names runs each time."""

import subprocess
from types import SimpleNamespace

import conftest
import pytest


def test_forty_commits_run_all(monkeypatch):
    cases, seen = list(range(300)), []
    for count in range(990, 990 + conftest.PARTS):
        monkeypatch.setattr(subprocess, "run", lambda *_, count=count, **__: SimpleNamespace(stdout=f"{count}\n"))
        seen += conftest.todays_part(cases)
    assert sorted(seen) == cases


def case(name: str, mark: pytest.MarkDecorator | None) -> SimpleNamespace:
    found = mark.mark if mark else None
    return SimpleNamespace(
        originalname="test", callspec=SimpleNamespace(id=name), get_closest_marker=lambda _, found=found: found
    )


def test_a_mark_may_name_cases_that_always_run():
    mark = pytest.mark.nightly(but=["tp"])
    assert [conftest.is_nightly(case(*words)) for words in (("fsdp", mark), ("tp", mark), ("cp", None))] == [
        True,
        False,
        False,
    ]
    conftest.check_exceptions([case("tp", mark)])
    with pytest.raises(pytest.UsageError, match=r"not there: \[\('test', 'tp'\)\]"):
        conftest.check_exceptions([case("fsdp", mark)])
