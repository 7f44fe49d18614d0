"""The licences of all packages that tunix needs are known and allowed."""

import pytest

from tools import licences


def test_the_page_is_renewed_and_every_licence_is_allowed(monkeypatch, tmp_path):
    before = licences.PAGE.read_text()
    monkeypatch.setattr(licences, "PAGE", tmp_path / "licences.md")
    assert licences.main() == 0
    names = {line.split("`")[1] for line in licences.PAGE.read_text().splitlines() if line.startswith("| `")}
    assert {"jax", "flax", "tokenizers", "rich", "numpy"} <= names
    assert "unknown" not in licences.PAGE.read_text()
    assert before.splitlines()[:9] == licences.PAGE.read_text().splitlines()[:9]
    assert names - {line.split("`")[1] for line in before.splitlines() if line.startswith("| `")} <= {"uvloop"}


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("MPL-2.0 AND MIT", True),
        ("MIT OR GPL-3.0-only", True),  # one may choose
        ("GPL-3.0-only", False),
        ("MIT AND AGPL-3.0-only", False),
        ("unknown", False),
    ],
)
def test_what_is_allowed(expression, allowed):
    assert licences.is_allowed(expression) == allowed
