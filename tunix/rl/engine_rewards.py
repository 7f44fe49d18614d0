"""Rewards that the run itself computes, and no process of rewards: of a model on the mesh, and of an answer's length.

{function: model, path: RUN}           the number that a model of task=reward gives the answer
{function: overlong, buffer: 256}      0 for an answer with room for 256 more tokens, -1 for one that is cut
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from tunix.base.errors import UserError
from tunix.config.task import RewardTerm
from tunix.data.prompts import Prompt
from tunix.inference.engine import Answer
from tunix.inference.reward_model import RewardModel
from tunix.processes import peers
from tunix.rl.scoring import Scores

log = logging.getLogger(__name__)


class Answered(NamedTuple):
    """Answers to score, one after the other: those to the first prompt, then those to the second, ..."""

    prompts: Sequence[Prompt]  # one for each answer
    texts: Sequence[str]
    num_tokens: Sequence[int]
    longest: int  # sampling.max_new_tokens


Score = Callable[[Answered], list[float | str]]


def score_length(buffer: int, answered: Answered) -> list[float | str]:
    """Return the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13) for each answer.

    tokens     0 ............ longest - buffer ............ longest
    score      0                     0           falls          -1
    """
    excess = (count - (answered.longest - buffer) for count in answered.num_tokens)
    return [-min(1.0, max(0, each) / buffer) for each in excess]


def score_by_model(model: RewardModel, answered: Answered) -> list[float | str]:
    """Return the reward that a model gives to each answer."""
    questions = [prompt.question for prompt in answered.prompts]
    if None in questions:
        raise UserError(
            "task.rewards: a model reads turns, and data=tokens keeps the tokens of prompts alone; give rows"
        )
    return model.score([(each.messages, each.options) for each in questions if each is not None], answered.texts)


class EngineRewards:
    """The terms of a reward that the run computes. Every process calls it with the same answers."""

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        longest: int,
        errors: Literal["zero", "stop"],
        dtype: str,
        mesh_shape: Any,
    ):
        """Load the models; `longest` is the largest number of tokens of an answer.

        Raises:
            UserError: a model gives no reward, or a buffer is longer than an answer.
        """
        self.longest, self.errors = longest, errors
        self.terms = [term for term in terms if term.is_of_engine]
        self.scores: list[Score] = []
        self.bytes_per_device = 0
        for term in self.terms:
            if term.path is not None:
                model = RewardModel(term.path, dtype, mesh_shape)
                self.bytes_per_device += model.bytes_per_device
                log.info("reward model: %s, %s parameters", term.path, f"{model.model.arch.num_parameters:,}")
                self.scores.append(partial(score_by_model, model))
                continue
            assert term.buffer is not None
            if term.buffer > longest:
                raise UserError(
                    f"task.rewards: buffer={term.buffer} of overlong is longer than an answer "
                    f"(sampling.max_new_tokens={longest}); give a smaller one"
                )
            self.scores.append(partial(score_length, term.buffer))

    def add(self, scores: Scores, prompts: Sequence[Prompt], texts: Sequence[str], answers: Sequence[Answer]) -> Scores:
        """Return the scores with those of these terms; each prompt has equally many answers.

        Raises:
            UserError: an answer has no score, and task.reward_errors=stop.
        """
        group_size = len(texts) // max(1, len(prompts))
        repeated = [prompt for prompt in prompts for _ in range(group_size)]
        answered = Answered(repeated, texts, [len(answer.tokens) for answer in answers], self.longest)
        values, total, errors = dict(scores.values), list(scores.total), dict(scores.errors)
        for term, score in zip(self.terms, self.scores, strict=True):
            # One answer for all processes: devices of several hosts may round otherwise.
            found = json.loads(peers.agree(json.dumps(score(answered)), f"scores of {term.label}"))
            failed = [each for each in found if isinstance(each, str)]
            if failed and self.errors == "stop":
                raise UserError(
                    f"rewards: {term.label} fails: {failed[0]}; reward_errors=zero scores such answers 0, counting them"
                )
            if failed:
                counts = term.label, len(failed), len(found), failed[0]
                log.warning("reward %s: %d of %d answers have no score and get 0: %s", *counts)
            values[term.label] = [0.0 if isinstance(each, str) else each for each in found]
            errors[term.label] = len(failed)
            total = [sum_ + term.weight * own for sum_, own in zip(total, values[term.label], strict=True)]
        return replace(scores, values=values, total=total, errors=errors)
