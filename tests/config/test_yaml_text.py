"""Texts of saved configs: OmegaConf reads back what was written."""

import hypothesis
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tunix.base.text import format_yaml

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TRICKY = st.sampled_from(
    [
        "1e5",
        "1_000",
        "0x1F",
        "12:30",
        "y",
        "no",
        "null",
        "~",
        "",
        " a ",
        "a: b",
        "- a",
        "#",
        "'",
        "é",
        "🙂",
        "nan",
        "\x85",
    ]
)
VALUES = st.recursive(
    PLAIN | TRICKY, lambda more: st.lists(more, max_size=3) | st.dictionaries(st.text(min_size=1), more, max_size=3)
)


@hypothesis.settings(deadline=None)
@hypothesis.given(VALUES)
def test_omegaconf_reads_what_is_written(value):
    hypothesis.assume("${" not in repr(value))  # an interpolation, which a composed config has no more
    text = format_yaml({"value": value})
    assert OmegaConf.to_container(OmegaConf.create(text)) == {"value": value}


def test_the_same_list_twice_has_no_alias():
    once = [1, 2]
    assert format_yaml({"a": once, "b": once}) == "a:\n- 1\n- 2\nb:\n- 1\n- 2\n"
