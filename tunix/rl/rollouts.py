"""Rollouts: the model in training answers prompts, rewards score its answers, and these become batches.

A rollout asks P prompts for G answers each. Its answers make `steps_per_rollout` batches, which are used
`passes_per_rollout` times. These steps are a cycle; with 2 batches and 2 passes:

    step       1         2         3         4         5         6    ...
               rollout                                 rollout
    batch      0         1         0         1         0         1

What depends on what:

    prompts        next_sample ... next_sample + P - 1 in the order of all samples: one number is the place in the data;
                   further ones with task.refill, fewer with task.curriculum (data/prompts.py)
    noise          a function of the seed of the run and of that number: a resumed run draws the same answers
    groups         the answers to one prompt; where task.oversample draws more groups than the steps take, groups whose
                   rewards differ are taken first, because equal rewards teach nothing
    batch          [A, B, T]: answers in rows, with an advantage for each of their tokens
"""

import hashlib
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from tunix.base.errors import RolloutFailed, Stopped, UserError
from tunix.config import Config
from tunix.config.batch import BatchShape
from tunix.config.rewards import EngineTerm
from tunix.config.task import Grpo
from tunix.costs.rollout import select_pages, select_rollouts_at_once, select_rows
from tunix.data.batches import Batch, DataSchedule, Example, Numbers, Position, Samples
from tunix.data.image_slots import find_slots
from tunix.data.packing import pack_best_fit
from tunix.data.prompts import Prompt, PromptCorpus, PromptOrder, gather_columns
from tunix.data.thoughts import split_thought
from tunix.data.tokenizer import Vocab, decode
from tunix.inference.engine import Answer
from tunix.inference.rollout import Request, RolloutRequest, Sampler, derive_seed, gather_device_bytes
from tunix.inference.sampling import find_stop_ids, select_sampling
from tunix.processes import peers, watchdog
from tunix.processes.watchdog import Watchdog
from tunix.rl.ahead import RolloutGroup, RolloutsAhead, pack, unpack
from tunix.rl.engine_rewards import EngineRewards
from tunix.rl.environment_pool import EnvironmentPool
from tunix.rl.episodes import Drawn, Episode, Player, PrioritySlots, credit_turns, join_played
from tunix.rl.samples_file import SamplesFile
from tunix.rl.scoring import Scorer, Scores
from tunix.run.folder import find_model_files
from tunix.sharding.arrays import local_rows, to_global
from tunix.training.choices import build_rollout_mesh
from tunix.training.train_spec import TrainSpec

log = logging.getLogger(__name__)


# Questions to the model in training: it answers, and rewards score its answers.
#
# Several rollouts may be under way in threads (rl/ahead.py). How much of them runs side by side:
#
#     no environment   draw 7    | draw 8    |            one has the devices, until all of its answers are drawn
#                                 score 7 ... score 8     others are scored
#
#     with one         draw 7 ~~ draw 7 ~~ draw 7         while its environments work (~~), others have the devices: as
#                         draw 8 ~~ draw 8 ~~ draw 8      many as have caches in memory


def join_rollouts(parts: Sequence[RolloutGroup]) -> RolloutGroup:
    """Return rollouts that were drawn one after the other as one."""
    first, *others = parts
    if not others:
        return first
    scores = replace(_join([part.scores for part in parts]), seconds=sum(part.scores.seconds for part in parts))
    played = [part.played for part in parts if part.played is not None]
    return RolloutGroup(
        [prompt for part in parts for prompt in part.prompts],
        [answer for part in parts for answer in part.answers],
        [text for part in parts for text in part.texts],
        scores,
        sum(part.rollout_s for part in parts),
        join_played(played) if played else None,
    )


class RolloutEngine:
    """Asks the model in training. Every process calls it with the same arguments and gets all answers and scores."""

    def __init__(
        self,
        cfg: Config,
        corpus: PromptCorpus,
        train_spec: TrainSpec,
        mesh: Mesh,
        scorer: Scorer,
        watchdog: Watchdog,
        pool: EnvironmentPool | None,
        engine_rewards: EngineRewards | None,
    ):
        """Choose how many answers are drawn at one time: the device with the least memory decides for all processes.

        With a pool of environments each answer is an episode. Raises `UserError` where the chat template does not show
        what an environment says.
        """
        assert isinstance(cfg.task, Grpo)
        self.mesh, self.vocab, self.scorer, self.watchdog = mesh, corpus.vocab, scorer, watchdog
        self.rollout_mesh = build_rollout_mesh(cfg, mesh)
        # The number of rows is the shape of a program that all processes run together, so they must agree on it. If
        # one of them does not know its memory (None), as on CPUs, nothing limits the size but task.rollout_rows.
        device_bytes, self.engine_rewards = gather_device_bytes(), engine_rewards
        if device_bytes is not None and engine_rewards is not None:
            device_bytes -= engine_rewards.bytes_per_device
        self.rows_at_once = select_rows(train_spec, device_bytes)
        # Threads draw ahead, and held-out prompts are answered meanwhile.
        self.caches = PrioritySlots(select_rollouts_at_once(train_spec, device_bytes))
        num_pages = select_pages(train_spec, self.rows_at_once, device_bytes)
        # Training turns by seq_len, whatever the lengths of a rollout: the model that answers is the one that learns.
        info = cfg.model.context_length, self.rollout_mesh, num_pages, cfg.training.seq_len
        self.sampler = Sampler(train_spec.arch, *info)
        folder = find_model_files(cfg)
        # What ends an answer, by the value of `sampling.stop`: held-out answers may have ends of their own.
        stop, held_out = cfg.sampling.stop, cfg.evaluation.sampling.stop
        find = partial(find_stop_ids, corpus.vocab, folder=folder, template_options=cfg.task.chat_template_kwargs)
        self.stops = {stop: find(stop_strings=stop)}
        if held_out not in self.stops:
            self.stops[held_out] = find(stop_strings=held_out, key="evaluation.sampling.stop")
        self.player = (
            None if pool is None else Player(pool, cfg.task, corpus.vocab, self.stops[stop], cfg.max_prompt_length)
        )
        self.devices = PrioritySlots(1) if self.player is None else self.player.devices

    def ask(self, params: Any, request: RolloutRequest, in_thread: bool = False) -> RolloutGroup:
        """Draw the answers of a request with parameters at rest, and score them.

        `between_chunks` of the request is called once more before they are scored. `in_thread` says that another thread
        than the main one calls. Raises `RolloutFailed` where a reward or an environment has failed, and its errors end
        the run.
        """
        try:
            return self._draw_and_score(params, request, in_thread)
        except UserError as error:
            raise RolloutFailed(str(error)) from error

    def _draw_and_score(self, params: Any, request: RolloutRequest, in_thread: bool) -> RolloutGroup:
        with self.caches.hold(request.rank), jax.set_mesh(self.rollout_mesh):
            start_time = time.perf_counter()
            stop = self.stops[request.sampling.stop]
            # A player holds the devices itself, and gives them back while environments work.
            with self.devices.hold(request.rank) if self.player is None else nullcontext():
                drawn = draw_answers(self.sampler, params, request, self.rows_at_once, stop, self.vocab, self.player)
            rollout_s = time.perf_counter() - start_time
        if request.between_chunks is not None:
            request.between_chunks()
        prompts = list(request.prompts)
        with nullcontext() if in_thread else self.watchdog.phase("scoring answers"):
            scores = score_together(self.scorer, prompts, drawn, request.group_size)
            if self.engine_rewards is not None:
                hold = partial(self.devices.hold, request.rank)
                scores = self.engine_rewards.add(scores, prompts, drawn, request.sampling.max_new_tokens, hold)
        return RolloutGroup(prompts, drawn.answers, drawn.texts, scores, rollout_s, drawn.played)


def draw_answers(
    sampler: Sampler,
    params: Any,
    request: RolloutRequest,
    rows_at_once: int | None,
    stop: tuple[int, ...],
    vocab: Vocab,
    player: Player | None,
) -> Drawn:
    """Draw the answers of a request with parameters at rest; `stop` ends an answer, or a turn of an episode."""
    if player is not None:
        played = player.rollout(sampler, params, request, rows_at_once, stop)
        answers = [episode.to_answer() for episode in played.episodes]
        return Drawn(answers, [decode(vocab.backend, answer.tokens, False) for answer in answers], played)
    tokens, images = [each.tokens for each in request.prompts], [each.images for each in request.prompts]
    has_images = any(each is not None for each in images)
    asked = [prompt for prompt in tokens for _ in range(request.group_size)]
    first_row = request.first_prompt * request.group_size
    drawing = Request(tokens, request.group_size, request.seed, first_row, images if has_images else None)
    sampling = select_sampling(request.sampling, stop)
    answers = sampler.rollout(params, drawing, sampling, rows_at_once, request.between_chunks)
    pairs = zip(answers, asked, strict=True)
    parts = [split_thought(vocab.backend, answer.text_tokens, prompt) for answer, prompt in pairs]
    thoughts, texts = ([decode(vocab.backend, part[kind]) for part in parts] for kind in (0, 1))
    return Drawn(answers, texts, thoughts=thoughts)


def score_together(scorer: Scorer, prompts: list[Prompt], drawn: Drawn, group_size: int) -> Scores:
    """Score answers: each process scores those of its share of the prompts and gets the scores of all.

    An error of one process is raised on all. Of an episode the last turn is scored, and a reward may ask for all of
    them as `turns`.
    """
    share = peers.share(len(prompts))
    part = slice(share.start * group_size, share.stop * group_size)
    repeated = [prompt for prompt in prompts for _ in range(group_size)]
    # Those that any prompt has: a reward may need a column that the rows of this share lack.
    columns = {name: values[part] for name, values in gather_columns(repeated).items()}
    local, own = repeated[part], drawn.part(part)
    texts = own.texts
    if own.played is not None:
        texts = [episode.last_turn for episode in own.played.episodes]
        columns["turns"] = [episode.turns for episode in own.played.episodes]

    def score() -> Scores:
        return scorer.score([prompt.text for prompt in local], texts, columns, group_size)

    local_scores = peers.together(score, "scoring answers")
    scores = _join([Scores(**each) for each in peers.gather(asdict(local_scores), "scores")])
    return scores if drawn.played is None else drawn.played.add_rewards(scores)


def _join(parts: Sequence[Scores]) -> Scores:
    """Return the scores of consecutive parts of a batch as one."""
    labels = list(parts[0].values)
    return Scores(
        {label: [score for part in parts for score in part.values[label]] for label in labels},
        [total for part in parts for total in part.total],
        {label: sum(part.errors[label] for part in parts) for label in labels},
        max(part.seconds for part in parts),  # processes score at the same time: the slowest one counts
        {name: sum(part.numbers[name] for part in parts) for name in parts[0].numbers},
        [failed for part in parts for failed in part.failed],
    )


# Advantages: each answer compared with the others of its group, which are the G answers to one prompt.
#
# rewards [1, 4]      1      0      0      1        mean 0.5, standard deviation 0.5
# centered          0.5   -0.5   -0.5    0.5
# group_std           1     -1     -1      1        batch_std: divided by the deviation of all groups
# leave_one_out     2/3   -2/3   -2/3    2/3        the first: 1 - (0 + 0 + 1) / 3

# Rewards of a group that differ by less than this count as equal: the difference is a rounding error, not a signal.
EQUAL = 1e-6


def center(rewards: np.ndarray) -> np.ndarray:
    """Return rewards [P, G] less the mean of their group. (Dr. GRPO, arXiv:2503.20783)"""
    return rewards - rewards.mean(axis=1, keepdims=True)


def scale_by_deviation(rewards: np.ndarray) -> np.ndarray:
    """Return centred rewards [P, G] divided by the standard deviation of their group. (GRPO, arXiv:2402.03300)"""
    deviation = rewards.std(axis=1, keepdims=True)
    return np.where(deviation > EQUAL, center(rewards) / np.maximum(deviation, EQUAL), 0.0)


def scale_by_batch(rewards: np.ndarray) -> np.ndarray:
    """Return centred rewards [P, G] divided by the standard deviation of all rewards. (arXiv:2508.08221)"""
    return center(rewards) / max(rewards.std(), EQUAL)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return rewards [P, G] less the mean of the others of their group. (RLOO, arXiv:2402.14740)"""
    # r - (sum - r) / (G - 1) = (G r - sum) / (G - 1) = (r - mean) G / (G - 1), where sum and mean are of all G answers.
    size = rewards.shape[1]
    return center(rewards) * size / (size - 1)


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "centered": center,
    "group_std": scale_by_deviation,
    "batch_std": scale_by_batch,
    "leave_one_out": leave_one_out,
}


def has_signal(advantages: np.ndarray) -> np.ndarray:
    """Return for each group of advantages [P, G], of centred rewards, whether it teaches something, [P] bool."""
    return np.abs(advantages).max(axis=1) > EQUAL


# Rows of a batch made of answers: each answer after its prompt, alone in a row or with others behind one another.
#
# With task.answers_per_row=2 and T = 10, three answers (a, b, c) take two rows:
#
#     tokens         p p p a a p p b b .    p p p p p c . . . .
#     segment_ids    1 1 1 1 1 2 2 2 2 0    1 1 1 1 1 1 0 0 0 0


def arrange_answers(
    prompts: Sequence[list[int]], answers: Sequence[Answer], seq_len: int, learnt: Sequence[list[bool]] | None
) -> Example:
    """Return fields [rows, T] of answers after their prompts, then padding: those of `FIELDS`, and `log_probs`.

    `learnt` says of each token of an answer whether it was drawn: an environment has said the others.

        tokens      p p p a b      .  .        prompt p p p, answer a b c, T = 7
        targets     p p a b c      .  .        c is the token that stops the answer: it is learnt too
        loss_mask   0 0 1 1 1      0  0
        log_probs   0 0 x y z      0  0        of a, b, c under the model that drew them, at its temperature
        segment_ids 1 1 1 1 1      0  0

    A prompt with its answer has at most T tokens.
    """
    shape = len(prompts), seq_len
    fields = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segment_ids")}
    fields |= {name: np.zeros(shape, np.float32) for name in ("loss_mask", "log_probs")}
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = [*prompt, *answer.tokens]
        # The target at a place is the token behind it, so the last token of the prompt predicts the answer's first one.
        end, answered = len(text) - 1, slice(len(prompt) - 1, len(text) - 1)
        fields["tokens"][row, :end], fields["targets"][row, :end] = text[:-1], text[1:]
        fields["positions"][row, :end] = np.arange(end)
        fields["segment_ids"][row, :end] = 1
        fields["loss_mask"][row, answered] = 1 if learnt is None else learnt[row]
        fields["log_probs"][row, answered] = answer.sampled_log_probabilities
    return fields


class RowPlan(NamedTuple):
    """Where each answer of a step lies: its row, its first token there, its tokens, and its number in the row from 1.

    The answers of a row follow one another, and the rest of the row is padding.
    """

    rows: np.ndarray  # [answers]
    starts: np.ndarray  # [answers]
    lengths: np.ndarray  # [answers]
    numbers: np.ndarray  # [answers]

    @property
    def num_rows(self) -> int:
        return int(self.rows.max()) + 1

    def pack(self, fields: Example, num_rows: int) -> Example:
        """Return fields [answers, T] as rows [num_rows, T]; rows without an answer are padding."""
        packed = {name: np.zeros((num_rows, leaf.shape[1]), leaf.dtype) for name, leaf in fields.items()}
        for index, (row, start, length, number) in enumerate(zip(*self, strict=True)):
            for name, leaf in fields.items():
                packed[name][row, start : start + length] = leaf[index, :length]
            packed["segment_ids"][row, start : start + length] = number
        return packed

    def unpack(self, rows: np.ndarray) -> np.ndarray:
        """Return numbers of tokens [rows, T] as [answers, T]; 0 behind an answer."""
        answers = np.zeros((len(self.rows), rows.shape[1]), rows.dtype)
        for index, (row, start, length, _) in enumerate(zip(*self, strict=True)):
            answers[index, :length] = rows[row, start : start + length]
        return answers


def plan_rows(lengths: np.ndarray, seq_len: int, answers_per_row: int) -> RowPlan:
    """Return a plan for answers with `lengths` [answers], prompts included: best-fit decreasing, so many in a row at
    most.

    Rows are in the order of their first answers, and so are the answers of a row. With one answer in a row, row n has
    answer n.
    """
    rows, starts, numbers = np.zeros((3, len(lengths)), np.int64)
    for row, members in enumerate(sorted(map(sorted, pack_best_fit(lengths, seq_len, answers_per_row)))):
        rows[members], numbers[members] = row, np.arange(1, len(members) + 1)
        starts[members] = np.cumsum(lengths[members]) - lengths[members]
    return RowPlan(rows, starts, lengths, numbers)


def count_microbatches(num_rows: int, rows_per_microbatch: int, max_microbatches: int, unit: int) -> int:
    """Return the microbatches of a step with so many rows: as few as have room.

    They are one of at most eight numbers up to `max_microbatches`, because each is a program, which has to be compiled.
    All are multiples of `unit`, which divides `max_microbatches`.
    """
    needed = -(-num_rows // rows_per_microbatch)
    unit *= -(-max_microbatches // (8 * unit))
    return min(max_microbatches, -(-needed // unit) * unit)


# Rewards of the newest rollouts beside those of the first: a run whose answers become worse warns.

WINDOW = 50  # steps whose mean rewards are compared
ERRORS = 2.0  # standard errors by which the newest rewards must be below the first ones


class RewardTrend:
    """Mean rewards of the rollouts since the program began; a resumed run begins anew."""

    def __init__(self, steps_per_rollout: int):
        self.window = max(2, WINDOW // steps_per_rollout)
        self.first: list[float] = []
        self.latest: deque[float] = deque(maxlen=self.window)
        self.num_since_warning = 0  # rollouts

    def add(self, reward: float) -> str:
        """Take the mean reward of a rollout; return a warning if the newest are below the first, else nothing.

        Nothing is compared before both windows are full, and no rollout is in both. After a warning, the next one comes
        `window` rollouts later at the earliest.
        """
        if len(self.first) < self.window:
            self.first.append(reward)
            return ""
        self.latest.append(reward)
        self.num_since_warning += 1
        if len(self.latest) < self.window or self.num_since_warning < self.window:
            return ""
        before, now = float(np.mean(self.first)), float(np.mean(self.latest))
        # Standard error of the difference of two means, each of `window` rewards.
        error = math.sqrt((np.var(self.first, ddof=1) + np.var(self.latest, ddof=1)) / self.window)
        if now >= before - ERRORS * error:
            return ""
        self.num_since_warning = 0
        return (
            f"the reward falls: its mean over the last {self.window} rollouts is {now:.4g}, over the first "
            f"{self.window} it was {before:.4g}; try a lower optimizer.learning_rate, or task.kl_coefficient "
            '(docs/post_training.md, "What the numbers say")'
        )


# Rollouts in a row that teach nothing: a run says so once, and goes on.

NUM_USELESS = 5  # rollouts in a row
USELESS = {
    "truncated": "all answers of the last {count} rollouts were cut at their longest length; raise "
    "sampling.max_new_tokens{turns}, or see in samples.jsonl whether the model ends an answer (sampling.stop)",
    "no_signal": "the rewards of the last {count} rollouts taught nothing: those of the answers to each prompt were "
    "equal; problems may be too hard or too easy, or a reward may not read answers as you expect",
}


class UselessRollouts:
    """Counts rollouts of which all answers were cut, or no group teaches anything; a resumed run begins anew."""

    def __init__(self, max_turns: int | None):
        """`max_turns` ends episodes, where the answers are such."""
        self.counts = dict.fromkeys(USELESS, 0)  # of rollouts in a row, by their number that is 1
        self.turns = "" if max_turns is None else f" or task.max_turns={max_turns}"

    def add(self, numbers: Numbers) -> list[str]:
        """Take the numbers of a rollout; return a warning for each kind that has come to `NUM_USELESS`, once a run."""
        warnings = []
        for name, count in list(self.counts.items()):
            self.counts[name] = count + 1 if numbers.get(name) == 1 else 0
            if self.counts[name] == NUM_USELESS:
                warnings.append(USELESS[name].format(count=NUM_USELESS, turns=self.turns))
                del self.counts[name]
        return [f'{warning} (docs/post_training.md, "What the numbers say")' for warning in warnings]


# (parameters of the policy, batch) -> log-probabilities [A, B, T] under the reference
Reference = Callable[[Any, Batch], jax.Array]


class Rollouts:
    """Answers of the model in training, as batches: a `BatchSource`."""

    phase = "drawing and scoring answers"
    waits_for_state = True

    def __init__(
        self,
        cfg: Config,
        shape: BatchShape,
        samples: Samples,
        engine: RolloutEngine,
        reference: Reference | None,
        start: Position,
        file: SamplesFile | None,
        score_by_teacher: Callable[[Batch], jax.Array] | None = None,
        shared: Batch | None = None,
        last: int = 0,
    ):
        """`reference` is None where task.kl_coefficient is 0; `file` gets the answers, if there is one.

        `score_by_teacher` gives log-probabilities [A, B, T] under a teacher that scores tokens; `shared` is what all
        microbatches share: a teacher in the loss. `last` is the last step, beyond which nothing is drawn ahead.
        """
        assert isinstance(cfg.task, Grpo)
        self.cfg, self.task, self.prompts, self.engine, self.mesh = cfg, cfg.task, samples, engine, engine.mesh
        self.reference, self.start, self.step, self.file = reference, start, start.step, file
        self.score_by_teacher, self.shared = score_by_teacher, shared or {}
        self.shape, self.slots = shape, find_slots(cfg)
        self.cycle = cfg.task.cycle(shape.num_sequences)
        self.data_schedule = DataSchedule(start, self.cycle, cfg.training.skip_steps)
        self.rows = local_rows(self.mesh, self.shape.num_rows)  # of B, those of this process
        self.trend = RewardTrend(self.cycle.steps)
        self.useless = UselessRollouts(self.task.max_turns if self.task.has_environment else None)
        self.order = PromptOrder(samples, cfg.task, start)
        self.batches: list[Batch] = []  # of the newest rollout, one for each step of a pass
        self.ahead: RolloutsAhead | None = None
        if self.task.staleness:
            first_steps = range(start.step + 1, last + 1, self.cycle.steps)
            expected = first_steps[: self.task.staleness] if start.step else ()
            waiting = unpack(start.waiting, expected, self.task, self._prompts_of, self._digest_request)
            info = self._sample_ahead, engine.rollout_mesh, first_steps, self.task.staleness, waiting
            self.ahead, self.waits_for_state = RolloutsAhead(*info), False
        self.is_closed = False

    def next(self, state: dict[str, Any]) -> tuple[Batch, Numbers]:
        """Return the batch of the next step; the first step of a rollout draws answers with the parameters of `state`.
        Raises `Stopped` where the run is asked to stop, so the answers that were being drawn are of no use."""
        cycle_step = (self.step - self.start.step) % self.cycle.steps  # of the step in its cycle
        numbers: Numbers = {}
        if cycle_step == 0:
            self.batches, numbers = self._generate_and_score(state["params"])
        self.step += 1
        # Tokens of the steps before `start`, in proportion to their samples: another batch may have been used there.
        tokens = self.shape.num_tokens
        before = self.start.num_samples * tokens * self.cycle.steps // self.cycle.samples
        numbers = {"tokens": before + (self.step - self.start.step) * tokens, "data_wait_s": 0.0} | numbers
        batch = self.batches[cycle_step % self.task.steps_per_rollout]
        if self.task.answers_per_row > 1:
            numbers["rows_used"] = batch["tokens"].shape[0] * batch["tokens"].shape[1]
        return batch, numbers

    def after(self, step: int, waits: bool = True) -> Position:
        """Return the position after `step`; within a rollout, the one after all of it."""
        position = self.prompts.position_after(step, self.start, self.data_schedule)
        if self.ahead is not None:
            return replace(position, waiting=pack(self.ahead.find_waiting(step, waits)))
        return self.order.complete(position, self._first_step(step) + self.cycle.steps)

    def samples(self, step: int) -> range:
        return self.order.ranges.get(self._first_step(step)) or self.data_schedule.samples(step)

    def _first_step(self, step: int) -> int:
        """Return the first step of the rollout that serves `step`."""
        return step - (step - self.start.step - 1) % self.cycle.steps

    def can_stop(self, step: int) -> bool:
        """Return True at the end of a rollout: the answers of one that is under way are not saved."""
        return (step - self.start.step) % self.cycle.steps == 0

    def close(self) -> None:
        self.is_closed = True
        if self.ahead is not None:
            self.ahead.close()
        if self.file is not None:
            self.file.close()

    def _ask(self, params: Any, first_step: int) -> tuple[list[int], RolloutGroup, Numbers]:
        """Return the samples of the rollout that begins with a step, its answers, and numbers of how it was drawn."""
        start_time = time.perf_counter()
        samples = self.data_schedule.samples(first_step)
        if self.ahead is None:
            return self._ask_now(params, first_step, samples)
        rollouts = self.ahead.take(params, first_step, self._stop_if_requested)
        waited = {"data_wait_s": time.perf_counter() - start_time, "staleness": self.step - rollouts.weights_step}
        return list(samples), rollouts, waited

    def _ask_now(self, params: Any, first_step: int, samples: range) -> tuple[list[int], RolloutGroup, Numbers]:
        """Draw a rollout with these parameters; ask further prompts where task.refill says so. `samples` are those of
        the step where no earlier one took more."""
        order, task = self.order, self.task
        order.begin(first_step)
        left_out, number = order.num_left_out, samples.start + order.num_extra
        wanted, missing, data_wait_s = len(samples), len(samples), 0.0
        needed = task.num_prompts(self.shape.num_sequences) * task.steps_per_rollout
        numbers: list[int] = []
        parts: list[RolloutGroup] = []
        while not parts or (missing > 0 and len(parts) <= task.refill):
            start_time = time.perf_counter()
            prompts, number = order.take(number, missing)
            data_wait_s += time.perf_counter() - start_time
            numbers += prompts
            parts.append(self.engine.ask(params, self._make_request(first_step, prompts)))
            if task.curriculum.is_used:
                order.note(parts[-1].prompts, parts[-1].first_scores)
            missing = needed - sum(int(self._find_signal(part).sum()) for part in parts)
        order.end(first_step, samples, number)
        found: Numbers = {"data_wait_s": data_wait_s}
        if task.refill:
            found["refilled"] = len(numbers) - wanted
        if task.curriculum.is_used:
            found["left_out"] = order.num_left_out - left_out
        return numbers, join_rollouts(parts), found

    def _read_rewards(self, rollouts: RolloutGroup) -> np.ndarray:
        """Return the rewards [P, G] that are learnt."""
        return np.where(rollouts.stopped, rollouts.totals, 0.0) if self.task.truncated == "zero" else rollouts.totals

    def _find_signal(self, rollouts: RolloutGroup) -> np.ndarray:
        """Return for each group whether its rewards teach something, [P] bool; answers that are masked do not."""
        rewards = self._read_rewards(rollouts)
        gains = center(rewards)
        if rollouts.played is not None and self.task.credit == "turns":
            of_tokens = self._credit_turns(rollouts.played.episodes, rewards, center)
            gains = np.abs(of_tokens).max(axis=1).reshape(rewards.shape)
        return has_signal(np.where(rollouts.stopped, gains, 0.0) if self.task.truncated == "mask" else gains)

    def _credit_turns(
        self, episodes: Sequence[Episode], rewards: np.ndarray, advantage: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return advantages of tokens [P x G, T] turn by turn, of episodes with rewards [P, G]."""
        zeroed = [self.task.truncated == "zero" and not episode.stopped for episode in episodes]
        return credit_turns(episodes, rewards, zeroed, advantage, self.shape.seq_len)

    def _sample_ahead(self, params: Any, first_step: int) -> RolloutGroup:
        """Draw and score the rollout that begins with a step, mostly in another thread than the main one."""
        samples = self.data_schedule.samples(first_step)
        request = self._make_request(first_step, {number: self.prompts[number] for number in samples})
        in_thread = threading.current_thread() is not threading.main_thread()
        drawn = self.engine.ask(params, request, in_thread)
        return replace(drawn, request=self._digest_request(drawn.prompts))

    def _make_request(self, first_step: int, prompts: dict[int, Prompt]) -> RolloutRequest:
        """Return what the rollout that begins with a step asks the model: prompts by their numbers, which are noise."""
        seed = derive_seed(self.cfg.seed, "rollout", next(iter(prompts)))
        stop = self._stop_if_requested if self.ahead is None else self._stop_if_closed
        return RolloutRequest(list(prompts.values()), self.cfg.sampling, self.task.group_size, seed, stop, first_step)

    def _prompts_of(self, first_step: int) -> list[Prompt]:
        return [self.prompts[number] for number in self.data_schedule.samples(first_step)]

    def _digest_request(self, prompts: Sequence[Prompt]) -> str:
        """Return a digest of what a rollout of these prompts is asked for: what it has in the order of its answers."""
        task, most = self.task, self.cfg.sampling.max_new_tokens
        rewards = [(term.label, term.function, term.weight) for term in task.rewards]
        # Terms that the run computes have keys of their own, like the path of a model.
        keys = {term.label: term.model_dump(mode="json") for term in task.rewards if isinstance(term, EngineTerm)}
        environment = task.environment, task.environment_options, task.max_turns
        tokens = [prompt.tokens for prompt in prompts]
        request = tokens, task.group_size, rewards, environment, most, *([keys] if keys else [])
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]

    def _stop_if_closed(self) -> None:
        if self.is_closed:
            raise Stopped("given up: the run has ended while answers were drawn ahead")

    def _generate_and_score(self, params: Any) -> tuple[list[Batch], Numbers]:
        """Draw and score answers; return a batch for each step of one pass, and numbers of all answers."""
        samples, rollouts, found = self._ask(params, self.step + 1)
        rewards = self._read_rewards(rollouts)
        signal = self._find_signal(rollouts)  # [P]
        num_groups = self.task.num_prompts(self.shape.num_sequences)  # of a step
        # False sorts before True, so groups with a signal come first. A stable sort keeps the order of the prompts in
        # both kinds: the choice is the same on every process. The second sort brings the chosen ones back into order.
        chosen = np.sort(np.argsort(~signal, kind="stable")[: num_groups * self.task.steps_per_rollout])
        advantages = np.full(rewards.shape, np.nan)  # stays so where an answer is not trained on
        batches, gaps = [], []
        for groups in chosen.reshape(-1, num_groups):
            batch, advantages[groups], gap = self._make_batch(params, rollouts, rewards[groups], groups)
            batches.append(batch | self.shared)
            gaps.append(gap)
        if self.file is not None:
            self.file.write(self.step + 1, samples, rollouts, advantages)
        num_tokens = sum(len(answer.tokens) for answer in rollouts.answers)
        numbers = rollouts.numbers() | {
            **({"no_signal": float(1 - signal.mean())} if self.task.is_rewarded else {}),
            **({"teacher_kl": float(np.divide(*np.sum(gaps, axis=0)))} if self.score_by_teacher else {}),
            **found,
            "rollout_s": rollouts.rollout_s,
            "rollout_tokens_per_s": num_tokens / rollouts.rollout_s,
            "reward_s": rollouts.scores.seconds,
        }
        warnings = self.useless.add(numbers)
        if self.task.is_rewarded and (warning := self.trend.add(numbers["reward"])):
            warnings.append(warning)
        for warning in warnings:
            log.warning("step %d: %s", self.step + 1, warning)
        return batches, numbers

    def _stop_if_requested(self) -> None:
        """Raise `Stopped` where the run is asked to stop: a rollout may take longer than a cluster waits."""
        if reason := watchdog.stop_requested():
            raise Stopped(f"{reason}: given up while answers for step {self.step + 1} were drawn; resume goes on")

    def _make_batch(
        self, params: Any, rollouts: RolloutGroup, rewards: np.ndarray, groups: np.ndarray
    ) -> tuple[Batch, np.ndarray, tuple[float, float]]:
        """Return the batch of a step made of some groups with these rewards [P, G], their advantages, and how far a
        teacher is from their tokens: nats, whose mean is an estimate of KL(model || teacher), and the tokens."""
        size, task = self.task.group_size, self.task
        rows = [group * size + n for group in groups.tolist() for n in range(size)]
        answers = [rollouts.answers[row] for row in rows]
        is_learnt = [task.truncated != "mask" or answer.stopped for answer in answers]
        prompts = [rollouts.prompts[row // size].tokens for row in rows]
        episodes = None if rollouts.played is None else [rollouts.played.episodes[row] for row in rows]
        if episodes is not None:
            prompts = [episode.begin for episode in episodes]
        learnt = None if episodes is None else [episode.learnt for episode in episodes]
        fields = arrange_answers(prompts, answers, self.shape.seq_len, learnt)
        drawn = fields["loss_mask"]  # also of answers that are masked
        fields["loss_mask"] = drawn * np.array(is_learnt, np.float32)[:, None]
        plan = plan_rows((fields["segment_ids"] > 0).sum(1), self.shape.seq_len, task.answers_per_row)
        num_microbatches = self._count_microbatches(plan.num_rows)

        def arrange(fields: Example) -> Example:
            return plan.pack(fields, num_microbatches * self.shape.num_rows)

        def scored(log_probs: jax.Array) -> np.ndarray:
            """Return numbers of tokens [A, B, T] on the devices as [answers, T]."""
            whole = np.asarray(multihost_utils.process_allgather(log_probs, tiled=True))
            return plan.unpack(whole.reshape(-1, self.shape.seq_len))

        on_rows = arrange(fields)
        if self.slots is not None:
            on_rows |= self.slots.stack([rollouts.prompts[row // size].images for row in rows], self.shape.seq_len)
        batch = self._to_devices(on_rows)
        if self.reference is None:
            batch |= self._to_devices({"reference_log_probs": np.zeros_like(on_rows["log_probs"])})
        else:
            batch["reference_log_probs"] = self.reference(params, batch)
            # The divergence as a part of the reward: the gap of log-probabilities, summed over the answer's tokens.
            if task.kl == "advantage":
                gap = (fields["log_probs"] - scored(batch["reference_log_probs"])) * drawn
                rewards = rewards - task.kl_coefficient * gap.sum(axis=1).reshape(rewards.shape)
        advantages = ADVANTAGES[task.advantage](rewards)
        mask = fields["loss_mask"]
        of_tokens, gap = advantages.reshape(-1, 1) * mask, (0.0, 1.0)
        if episodes is not None and task.credit == "turns":
            of_tokens = mask * self._credit_turns(episodes, rewards, ADVANTAGES[task.advantage])
            advantages = (of_tokens.sum(1) / np.maximum(1, mask.sum(1))).reshape(rewards.shape)
        if self.score_by_teacher is not None:
            # Their mean is minus the divergence, and so is its gradient.
            gains = (scored(self.score_by_teacher(batch)) - fields["log_probs"]) * mask
            of_tokens = of_tokens + task.teacher_weight * gains
            gap = -float(gains.sum()), max(1.0, float(mask.sum()))
        advantages = np.where(np.reshape(is_learnt, rewards.shape), advantages, np.nan)  # of answers that are learnt
        on_rows = arrange(fields | {"advantages": of_tokens.astype(np.float32)})
        return batch | self._to_devices({"advantages": on_rows["advantages"]}), advantages, gap

    def _count_microbatches(self, num_rows: int) -> int:
        """Return the microbatches of a step whose answers take so many rows."""
        if self.task.answers_per_row == 1:
            return self.shape.num_microbatches
        every = self.cfg.training.sync_gradients_every
        return count_microbatches(num_rows, *self.shape[1::-1], 1 if every == "auto" else every)

    def _to_devices(self, fields: Example) -> Batch:
        """Return fields [rows, ...], which every process has, as global arrays [A, B, ...]."""
        # Rows -> [A, B], of which this process puts its own rows of B on its devices.
        local = {name: x.reshape(-1, self.shape.num_rows, *x.shape[1:])[:, self.rows] for name, x in fields.items()}
        return to_global(local, self.mesh)
