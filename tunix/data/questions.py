"""Questions with their answers, out of prepared conversations."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tunix.data.stream import Arrays


class Question(NamedTuple):
    """A conversation as token ids, cut before its last answer."""

    prompt: list[int]
    answer: list[int]  # with the end of its turn


def cut_questions(shard: Arrays) -> Iterator[Question]:
    """Yield the conversations of a shard that have an answer, each cut before its last one."""
    assert shard.answers is not None
    for start, end in zip(shard.starts, [*shard.starts[1:], len(shard.tokens)], strict=True):
        tokens, learnt = shard.tokens[start:end], shard.answers[start:end].astype(int)
        if not learnt.any():  # empty answers, in a template without an end of the turn
            continue
        begin = int(np.flatnonzero(np.diff(learnt, prepend=0) == 1)[-1])
        length = int(learnt[begin:].sum())
        yield Question(tokens[:begin].tolist(), tokens[begin : begin + length].tolist())
