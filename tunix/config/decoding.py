"""How answers are drawn from a model."""

from typing import Annotated

from pydantic import Field

from tunix.base.section import Count, Section, Share, Temperature


class Sampling(Section):
    """Choice of each token of an answer, and where an answer ends. The filters apply in the order of their keys."""

    max_new_tokens: Count
    """Longest answer, in tokens."""
    temperature: Temperature
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: Count | None
    """Draw from the k likeliest tokens only."""
    top_p: Annotated[Share, Field(gt=0)] | None
    """Draw from the likeliest tokens that together have this probability (Holtzman et al. 2020)."""
    min_p: Share | None
    """Draw from tokens with at least this share of the likeliest one's probability (arXiv:2407.01082)."""
    stop: tuple[str, ...]
    """Tokens that end an answer, beside those that the model and its chat template name."""
