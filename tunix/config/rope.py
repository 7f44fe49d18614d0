"""Rotary positions (RoPE): the ways to stretch them over a longer context."""

from typing import Annotated, Literal

from pydantic import Field

from tunix.base.section import Count, Flag, Positive, Section


class RopeUnscaled(Section):
    """Positions as they are."""

    name: Literal["none"]
    """How the rotations are slowed down for a longer context, in layers that attend to everything."""


class RopeLinear(Section):
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    name: Literal["linear"]
    """How the rotations are slowed down for a longer context, in layers that attend to everything."""
    factor: Positive
    """Ratio of the longer context to the original one."""


class RopeLlama3(RopeLinear):
    """Slow rotations divided by a factor, fast ones left, those between mixed (Llama 3.1's model card)."""

    name: Literal["llama3"]  # type: ignore[assignment]
    """How the rotations are slowed down for a longer context, in layers that attend to everything."""
    original_context: Count
    """Tokens of the context before it was made longer."""
    low_freq_factor: Positive
    """Rotations with fewer turns than this in the original context are divided by the factor."""
    high_freq_factor: Positive
    """Rotations with more turns than this in the original context are left."""


class RopeYarn(RopeLinear):
    """YaRN (Peng et al. 2023, arXiv:2309.00071)."""

    name: Literal["yarn"]  # type: ignore[assignment]
    """How the rotations are slowed down for a longer context, in layers that attend to everything."""
    original_context: Count
    """Tokens of the context before it was made longer."""
    beta_fast: Positive
    """Rotations with more turns than this in the original context are left."""
    beta_slow: Positive
    """Rotations with fewer turns than this in the original context are divided by the factor."""
    attention_factor: Positive | None
    """Queries and keys are multiplied by this; null is 0.1 * log(factor) + 1."""
    truncate: Flag
    """Round the borders between fast, mixed and slow rotations to whole pairs of dimensions."""


class RopeLong(Section):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): a divisor for each rotation, found by a search."""

    name: Literal["longrope"]
    """How the rotations are slowed down for a longer context, in layers that attend to everything."""
    original_context: Count
    """Tokens of the context before it was made longer."""
    short_factors: list[Positive]
    """Divisors of the rotations, for sequences of at most the original context."""
    long_factors: list[Positive]
    """Divisors of the rotations, for longer sequences."""
    attention_factor: Positive | None
    """Queries and keys are multiplied by this; null is sqrt(1 + log(context_length / original) / log(original))."""


class RopeProportional(Section):
    """Rotations of a share of the pairs, as fast as if all pairs were rotated; the others are left as they are."""

    name: Literal["proportional"]
    """How the rotations are slowed down for a longer context, in layers that attend to everything."""
    share: Annotated[float, Field(gt=0, le=1)]
    """Share of the pairs of a head that are rotated, the fastest ones."""


RopeScaling = Annotated[
    RopeUnscaled | RopeLinear | RopeLlama3 | RopeYarn | RopeLong | RopeProportional, Field(discriminator="name")
]
