"""The projections of a block by name, and low-rank updates of them."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from tunix.base.section import CountOrZero, Positive, Regex, Section

PROJECTIONS = (
    "attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down",
    "attention.q_down", "attention.kv_down", "attention.kv_up", "attention.q_whole",
    "attention.gate", "attention.beta", "attention.decay",
)  # fmt: skip


def match_projections(pattern: str | None) -> str | None:
    """Return the regular expression unchanged.

    Raises:
        ValueError: it matches no projection. A typo would otherwise train nothing, in silence.
    """
    if pattern is not None and not any(re.search(pattern, name) for name in PROJECTIONS):
        raise ValueError(f"matches none of {', '.join(PROJECTIONS)}")
    return pattern


class Lora(Section):
    """Low-rank updates of frozen matrices (Hu et al. 2021, arXiv:2106.09685)."""

    rank: CountOrZero
    """Rank of the updates (r); 0 trains all weights, without them."""
    alpha: Positive
    """Updates are multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)]
    """Share of an update's inputs that a training step leaves out."""
    targets: Regex
    """Regular expression of the projections that are updated: of attention.q, attention.k, attention.v, attention.o,
    mlp.gate, mlp.up and mlp.down; with model.latent also attention.q_down (or
    attention.q_whole in its and attention.q's place), attention.kv_down and attention.kv_up; with gates also
    attention.gate; with model.linear_attention also attention.beta and attention.decay."""
    train_also: Regex | None
    """Regular expression of parameters that are trained fully beside the updates, like embedding|head; null for
    none."""
    quantize_base: Literal["int8", "nf4"] | None
    """Keep the frozen matrices of attention and MLP in 8 or 4 bits, with a scale for each 32 weights; null keeps them
    in training.param_dtype. Needs qwix."""

    _matches = field_validator("targets")(match_projections)
