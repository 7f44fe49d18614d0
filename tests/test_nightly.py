"""A nightly case runs when it is asked for; a case that its mark names runs each time."""

from types import SimpleNamespace

import conftest
import pytest


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
