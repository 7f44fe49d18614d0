"""Answers, and the drafts that they are while they grow."""

from dataclasses import dataclass, field

import numpy as np

from tunix.inference.drawing import Drawn


@dataclass(frozen=True)
class Answer:
    """Tokens that followed one prompt."""

    tokens: list[int]  # with the stop id, if there is one
    log_probabilities: list[float]  # of each token under the model, before temperature and filters
    drawn_log_probabilities: list[float]  # of each token under the distribution that it was drawn from
    stopped: bool  # by a stop id, not by the length

    @property
    def text_tokens(self) -> list[int]:
        """The tokens without the one that stopped the answer, which is no part of its text."""
        return self.tokens[:-1] if self.stopped else self.tokens


@dataclass
class Draft:
    """An answer that grows until a stop id comes."""

    stop: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    model_log_probs: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stopped: bool = False

    def extend(self, tokens: np.ndarray, model_log_probs: np.ndarray, log_probs: np.ndarray) -> None:
        """Take the next tokens [M], up to the first stop id; what was drawn after it does not count."""
        ends = np.flatnonzero(np.isin(tokens, self.stop))
        count = int(ends[0]) + 1 if len(ends) else len(tokens)
        self.tokens += tokens[:count].tolist()
        self.model_log_probs += model_log_probs[:count].tolist()
        self.log_probs += log_probs[:count].tolist()
        self.stopped = bool(len(ends))

    def answer(self) -> Answer:
        """Return the answer as it is now."""
        return Answer(self.tokens, self.model_log_probs, self.log_probs, self.stopped)


def extend_drafts(drafts: list[Draft], drawn: Drawn, count: int, places: np.ndarray) -> None:
    """Give each draft that goes on its `count` new tokens.

    Row n of `drawn` belongs to the draft `places[n]`, or to none where that is -1: such a row fills up a shard.
    """
    # Copied to the host once for all rows: a copy of each row would wait for the device each time.
    on_host = [np.asarray(each)[:, :count] for each in drawn]
    for row, place in enumerate(places):
        if place >= 0 and not drafts[place].stopped:
            drafts[place].extend(*(each[row] for each in on_host))
