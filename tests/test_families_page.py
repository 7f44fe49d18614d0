"""docs/families.md is made of the configs as they are, and leaves no part of the architecture out."""

import sys

import pytest
from support.harness import ROOT

from tunix.config import Model
from tunix.config.model import list_keys_outside

sys.path.insert(0, str(ROOT))


class Reader:
    """A model that remembers which of its keys were read."""

    def __init__(self, model: Model):
        self.model, self.read = model, set()

    def __getattr__(self, name: str):
        self.read.add(name)
        return getattr(self.model, name)


@pytest.mark.nightly
def test_the_page_of_families_is_current():
    from tools.family_blocks import page

    assert (ROOT / "docs" / "families.md").read_text() == page(), "run `make docs`"


def test_the_page_of_families_reads_every_key_of_the_architecture():
    from tools.family_blocks import NUMBERS, describe_family, load_model

    models = {
        size: Reader(load_model(size)) for size in ("gemma4_e2b", "deepseek_v3", "llama4_scout", "qwen3_next_80b_a3b")
    }
    describe_family(models)
    read = set().union(*(model.read for model in models.values()))
    assert set(NUMBERS.values()) <= read
    # A head of labels comes with a task, whatever the family.
    assert set(Model.model_fields) - list_keys_outside() - read == {"family", "labels"}
