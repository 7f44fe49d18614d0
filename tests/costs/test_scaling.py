"""Bytes that a device sends as one axis grows are those of theory: no other term grows with the number of devices."""

import pytest

from tools.scaling import CASES, measure


@pytest.mark.parametrize("name", CASES)
def test_what_grows_is_what_theory_says(name):
    """Norms and other vectors come on top."""
    for number in (2, 64):
        derived, theory = measure(CASES[name], number)
        assert derived == pytest.approx(theory, rel=1e-3), number
