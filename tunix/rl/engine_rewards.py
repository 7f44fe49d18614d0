"""Rewards that the run itself computes, and no process of rewards: of a model on the mesh, of a judge on a server, and
of an answer's length.

{function: model, path: RUN}           the number that a model of task=reward gives the answer
{function: judge, url: URL, model: M}  the rating of a language model behind an address (judge.py)
{function: overlong, buffer: 256}      0 for an answer with room for 256 more tokens, -1 for one that is cut
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tunix.base.errors import UserError
from tunix.base.files import expand_home
from tunix.config import Config
from tunix.config.pretrained_config import check_gives_reward
from tunix.config.rewards import EngineTerm, JudgeTerm, ModelTerm, OverlongTerm, RewardTerm
from tunix.data.chat import Message, Options
from tunix.data.documents import Conversation, Document, Question, encode_whole
from tunix.data.prompts import Prompt
from tunix.data.tokenizer import load_vocab
from tunix.inference.pretrained import load_pretrained
from tunix.processes import peers
from tunix.rl.episodes import Drawn
from tunix.rl.judge import Judge
from tunix.rl.scoring import OnError, Scores, count_failed, mark_failed, read_score
from tunix.sharding.arrays import bytes_per_device

log = logging.getLogger(__name__)

TOKENS = 16_384  # of the answers that a model scores at one time, on all devices
SLACK_S = 600.0  # beside the time of a judge, that processes wait for one another


class AnswersToScore(NamedTuple):
    """Answers to score, one after the other: those to the first prompt, then those to the second, ..."""

    prompts: Sequence[Prompt]  # one for each answer
    texts: Sequence[str]
    num_tokens: Sequence[int]
    max_new_tokens: int  # that an answer can have


class Found(NamedTuple):
    """The score of each answer, or why it has none; and numbers for metrics.jsonl."""

    scores: list[float | str]
    numbers: dict[str, float] = {}  # noqa: RUF012


def score_length(buffer: int, answers: AnswersToScore) -> Found:
    """Return the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13) for each answer.

    tokens     0 .......... max_new_tokens - buffer .......... max_new_tokens
    score      0                      0              falls          -1
    """
    excess = (count - (answers.max_new_tokens - buffer) for count in answers.num_tokens)
    return Found([-min(1.0, max(0, each) / buffer) for each in excess])


class RewardModel:
    """A model with one number, split over the mesh, and its tokenizer. Every process calls it with the same answers.

    It reads an answer as it was trained to: by its own chat template and tokenizer, which may be others than those of
    the model that answers.
    """

    def __init__(self, path: str | Path, dtype: str, mesh_shape: Any):
        """Load it; weights and products are of `dtype`. Raises `UserError` where it is no model with one number, or has
        no tokenizer."""
        self.model = load_pretrained(path, dtype, mesh_shape, strategy="full_shard")
        check_gives_reward(self.model.cfg)  # also where a command names it
        self.vocab = self.model.vocab or load_vocab(str(self.model.tokenizer_files))

    @property
    def bytes_per_device(self) -> int:
        """Bytes of its weights on a device."""
        return bytes_per_device(self.model.params)

    def score(self, prompts: Sequence[tuple[Sequence[Message], Options]], answers: Sequence[str]) -> list[float | str]:
        """Return for each answer its reward, or the text that says why it has none.

        A prompt is the turns before the answer, and what the chat template got.
        """
        rows, max_length = self.encode(prompts, answers), self.model.cfg.context_length
        too_long = "it has {:,} tokens with its prompt, more than model.context_length={} of the reward model"
        scores: list[float | str] = [x if isinstance(x, str) else too_long.format(len(x), max_length) for x in rows]
        fitting = {n: row for n, row in enumerate(rows) if not isinstance(row, str) and len(row) <= max_length}
        if fitting:
            num_at_once = max(1, TOKENS // max(map(len, fitting.values())))
            numbers = self.model.score([*fitting.values()], num_at_once)[:, 0]
            for number, score in zip(fitting, numbers.tolist(), strict=True):
                scores[number] = score
        return scores

    def encode(
        self, prompts: Sequence[tuple[Sequence[Message], Options]], answers: Sequence[str]
    ) -> list[list[int] | str]:
        """Return the tokens of each answer with its prompt, or why the template of the reward model refuses them: that
        of Qwen 3 without thoughts does so where an answer has </think>, as any model may write it."""
        turns = [
            Document("", Conversation([*messages, {"role": "assistant", "content": answer}], options))
            for (messages, options), answer in zip(prompts, answers, strict=True)
        ]
        try:
            return [np.concatenate(each.tokens).tolist() for each in encode_whole(self.vocab, turns)]
        except UserError as error:
            if len(turns) == 1:
                return [str(error)]
        return [self.encode([prompt], [answer])[0] for prompt, answer in zip(prompts, answers, strict=True)]


def score_by_model(model: RewardModel, answers: AnswersToScore) -> Found:
    """Return the reward that a model gives to each answer."""
    questions = list(map(find_read, answers.prompts))
    return Found(model.score([(each.messages, each.options) for each in questions], answers.texts))


def find_read(prompt: Prompt) -> Question:
    """Return what a reward model reads of a prompt. Raises `UserError` where there are no turns."""
    if prompt.question is None:
        raise UserError(
            "task.rewards: a model reads turns, and data=tokens keeps the tokens of prompts alone; give rows"
        )
    return prompt.question


def score_by_judge(judge: Judge | None, answers: AnswersToScore) -> Found:
    """Return what a judge gives to each answer. Process 0 alone has one, and `EngineRewards` tells the others."""
    return Found([]) if judge is None else Found(*judge.score(answers.prompts, answers.texts))


class EngineRewards:
    """The terms of a reward that the run computes. Every process calls it with the same answers."""

    def __init__(
        self,
        terms: Sequence[RewardTerm],
        max_lengths: Mapping[str, int],
        errors: OnError,
        timeout_s: float,
        cfg: Config,
    ):
        """Load the models. `terms` are all of a reward, `timeout_s` is the time of a judge for the answers of a batch.

        `max_lengths` has the most tokens of an answer by each key that sets them. Raises `UserError` where a model
        gives no reward, a judge lacks its key, or a buffer is longer than an answer.
        """
        self.labels, self.errors, self.timeout_s = [term.label for term in terms], errors, timeout_s
        self.terms = [term for term in terms if isinstance(term, EngineTerm)]
        self.scores: list[Callable[[AnswersToScore], Found]] = []
        self.judges: list[Judge | None] = []
        self.models: list[tuple[str | Path, RewardModel]] = []
        self.bytes_per_device = 0
        for term in self.terms:
            match term:
                case ModelTerm():
                    try:
                        model = RewardModel(term.path, cfg.training.dtypes["compute"], cfg.model.mesh_shape)
                    except UserError as error:  # the mesh may fit the model that answers alone
                        raise UserError(f"task.rewards: path={term.path}: {error}") from None
                    self.models.append((term.path, model))
                    self.bytes_per_device += model.bytes_per_device
                    log.info("reward model: %s, %s parameters", term.path, f"{model.model.arch.num_parameters:,}")
                    self.scores.append(partial(score_by_model, model))
                case JudgeTerm():
                    judge = Judge(term, timeout_s, expand_home(cfg.loading.cache_dir)) if peers.is_main() else None
                    self.judges.append(judge)
                    self.scores.append(partial(score_by_judge, judge))
                case OverlongTerm():
                    for key, count in max_lengths.items():
                        if term.buffer > count:
                            raise UserError(
                                f"task.rewards: buffer={term.buffer} of overlong is longer than an answer "
                                f"({key}={count}); give a smaller one"
                            )
                    self.scores.append(partial(score_length, term.buffer))

    def try_out(self, prompt: Prompt, has_images: bool) -> None:
        """Ask each judge once; `has_images` says whether any of the prompts has an image.

        Raises:
            UserError: a judge gives no rating, or a model could not read the prompt, or an image of another one.
        """
        if self.models and has_images:
            raise UserError(
                "task.rewards: a model reads texts alone, and prompts have images; leave the term out, or set "
                "data.columns.images=null"
            )
        for path, model in self.models:
            question = find_read(prompt)
            (row,) = model.encode([(question.messages, question.options)], ["42"])
            if isinstance(row, str):
                raise UserError(f"task.rewards: the model of path={path} cannot read the first prompt: {row}")

        def ask() -> None:
            for judge in filter(None, self.judges):
                judge.try_out(prompt)

        if self.judges:
            peers.together(ask, "trying the judge")

    def close(self) -> None:
        for judge in filter(None, self.judges):
            judge.close()

    def add(
        self,
        scores: Scores,
        prompts: Sequence[Prompt],
        drawn: Drawn,
        max_new_tokens: int,
        hold: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Scores:
        """Return the scores with those of these terms, in the order of all terms; each prompt has equally many answers.

        `max_new_tokens` bounds an answer, and `hold` gives the block in which a model may take the devices.

        Raises:
            UserError: an answer has no score, and task.reward_errors=stop.
        """
        start_time = time.perf_counter()
        group_size = len(drawn.texts) // max(1, len(prompts))
        repeated = [prompt for prompt in prompts for _ in range(group_size)]
        num_tokens = [len(answer.tokens) for answer in drawn.answers]
        answers = AnswersToScore(repeated, drawn.texts, num_tokens, max_new_tokens)
        values, total, errors = dict(scores.values), list(scores.total), dict(scores.errors)
        numbers, failed = dict(scores.numbers), scores.failed
        for term, score in zip(self.terms, self.scores, strict=True):
            with hold() if isinstance(term, ModelTerm) else nullcontext():
                # One answer for all processes: devices of several hosts may round otherwise, and process 0 alone asks
                # a judge.
                found = Found(*peers.agree(score(answers), f"scores of {term.label}", SLACK_S + self.timeout_s))
            # A model whose numbers overflow gives nan, which would reach each advantage of the group.
            given = [each if isinstance(each, str) else read_score(each) for each in found.scores]
            values[term.label], errors[term.label] = count_failed(term.label, term.label, given, self.errors)
            failed = mark_failed(failed, given)
            numbers |= {f"{term.label}_{name}": number for name, number in found.numbers.items()}
            total = [sum_ + term.weight * own for sum_, own in zip(total, values[term.label], strict=True)]
        if drawn.played is not None:
            total = drawn.played.drop_failed(total)
        # The first reward says which answers are right.
        values = {label: values[label] for label in self.labels if label in values} | values
        seconds = scores.seconds + time.perf_counter() - start_time
        return replace(
            scores, values=values, total=total, errors=errors, seconds=seconds, numbers=numbers, failed=failed
        )
