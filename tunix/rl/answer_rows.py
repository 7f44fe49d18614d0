"""Rows of a batch, each with one answer after its prompt."""

from collections.abc import Sequence

import numpy as np

from tunix.data.batch import Example
from tunix.inference.answers import Answer


def place_answers(
    prompts: Sequence[list[int]], answers: Sequence[Answer], seq_len: int, masked: Sequence[bool]
) -> Example:
    """Return fields [rows, T] of answers after their prompts, then padding: those of `FIELDS`, and `log_probs`.

        tokens      p p p a b      .  .        prompt p p p, answer a b c, T = 7
        targets     p p a b c      .  .        c is the token that stops the answer: it is learnt too
        loss_mask   0 0 1 1 1      0  0        all 0 where `masked` says so
        log_probs   0 0 x y z      0  0        of a, b, c in the distribution that they were drawn from
        segment_ids 1 1 1 1 1      0  0

    A prompt with its answer has at most T tokens.
    """
    shape = len(prompts), seq_len
    fields = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    fields |= {name: np.zeros(shape, np.float32) for name in ("loss_mask", "log_probs")}
    for row, (prompt, answer, is_masked) in enumerate(zip(prompts, answers, masked, strict=True)):
        text = [*prompt, *answer.tokens]
        # The target at a place is the token behind it, so the last token of the prompt predicts the answer's first one.
        end, answered = len(text) - 1, slice(len(prompt) - 1, len(text) - 1)
        fields["tokens"][row, :end], fields["targets"][row, :end] = text[:-1], text[1:]
        fields["positions"][row, :end] = np.arange(end)
        fields["segment_ids"][row, :end] = 1
        fields["loss_mask"][row, answered] = not is_masked
        fields["log_probs"][row, answered] = answer.drawn_log_probabilities
    return fields
