"""Rewards of a run: which functions score answers, and with what weights."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from tunix.base.dotted import entry_of
from tunix.base.section import Section
from tunix.rewards import REWARDS


class RewardTerm(Section):
    """One term of the reward of an answer, which is the sum of all terms."""

    function: entry_of(REWARDS)  # type: ignore[valid-type]
    """A reward by name, or `package.module:name` of your own (docs/post_training.md)."""
    weight: Annotated[float, Field(allow_inf_nan=False)]
    """Its score is multiplied by this."""

    @property
    def label(self) -> str:
        """Name of the term in metrics.jsonl, samples.jsonl and results.json."""
        return self.function.rpartition(":")[2]


def _read_term(value: Any) -> Any:
    return {"function": value, "weight": 1.0} if isinstance(value, str) else value


def _check_some(terms: tuple[RewardTerm, ...]) -> tuple[RewardTerm, ...]:
    if not terms:
        raise ValueError("give at least one")
    return terms


# The type of a key that lists rewards. A name alone has the weight 1: [gsm8k, {function: format, weight: 0.2}].
RewardTerms = Annotated[tuple[Annotated[RewardTerm, BeforeValidator(_read_term)], ...], AfterValidator(_check_some)]
