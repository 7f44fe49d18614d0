"""Collectives of a compiled step as an axis grows from 4 to 8 devices: no other term grows than those of theory."""

import pytest

from tools.compiled_scaling import AXES, measure


@pytest.mark.nightly
@pytest.mark.parametrize("axis", AXES)
def test_counts_do_not_grow_with_devices(axis):
    """Derived bytes are the compiled ones. The collectives of a step are as many, but for those of the ticks of pp."""
    four, eight = (measure(axis, number, largest=8) for number in (4, 8))
    for moved in (four, eight):
        for name, (derived, compiled) in moved.num_bytes.items():
            assert derived == pytest.approx(compiled, rel=5e-3), name
    more_ticks = eight.iterations - four.iterations
    assert more_ticks == (4 if axis == "pp" else 0)
    assert four.counts.keys() == eight.counts.keys() != set()
    for kind, count in four.counts.items():
        more = eight.counts[kind] - count
        in_a_tick, remaining = divmod(more, more_ticks) if more_ticks else (0, more)
        assert remaining == 0, (kind, four.counts, eight.counts)
        assert 0 <= in_a_tick < 12, (kind, four.counts, eight.counts)
