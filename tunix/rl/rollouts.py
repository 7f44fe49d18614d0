"""Batches of answers that the model in training gives: what the training loop takes where the task is grpo.

A rollout asks P prompts for G answers each. Its answers make `steps_per_rollout` batches, which are used
`passes_per_rollout` times. These steps are a cycle; with 2 batches and 2 passes:

    step       1         2         3         4         5         6    ...
               rollout                                 rollout
    batch      0         1         0         1         0         1

What depends on what:

    prompts        next_sample ... next_sample + P - 1 in the order of all samples: one number is the place in the data
    noise          a function of the seed of the run and of that number: a resumed run draws the same answers
    groups         the answers to one prompt; where task.oversample draws more groups than the steps take, groups whose
                   rewards differ are taken first, because equal rewards teach nothing
    batch          [A, B, T]: an answer a row, with an advantage for each of its tokens
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from tunix.base.errors import Stopped
from tunix.base.files import open_lines
from tunix.config import Config
from tunix.config import Sampling as SamplingKeys
from tunix.config.batch import BatchShape
from tunix.config.task import Grpo
from tunix.costs.rollout import read_device_bytes, select_rows
from tunix.data.batches import Batch, Example, Numbers
from tunix.data.prompts import Prompt, PromptCorpus, gather_columns
from tunix.data.sample_order import DataSchedule, Position, Samples
from tunix.inference.engine import Answer
from tunix.inference.rollout import Request, Sampler
from tunix.inference.sampling import find_stop_ids, select_sampling
from tunix.processes import peers, watchdog
from tunix.processes.watchdog import Watchdog
from tunix.rl.ahead import Drawn, RolloutsAhead, pack, unpack
from tunix.rl.environment_pool import EnvironmentPool
from tunix.rl.episodes import Played, Player, credit_turns
from tunix.rl.scoring import Scorer, Scores
from tunix.run.folder import find_model_files
from tunix.run.metrics import Metrics
from tunix.sharding.arrays import local_rows, to_global
from tunix.training.choices import build_rollout_mesh
from tunix.training.program import Program

log = logging.getLogger(__name__)


# Advantages: each answer compared with the others of its group, which are the G answers to one prompt.
#
# rewards [1, 4]      1      0      0      1        mean 0.5, standard deviation 0.5
# centered          0.5   -0.5   -0.5    0.5
# group_std           1     -1     -1      1
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


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return rewards [P, G] less the mean of the others of their group. (RLOO, arXiv:2402.14740)"""
    # r - (sum - r) / (G - 1) = (G r - sum) / (G - 1) = (r - mean) G / (G - 1), where sum and mean are of all G answers.
    size = rewards.shape[1]
    return center(rewards) * size / (size - 1)


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "centered": center,
    "group_std": scale_by_deviation,
    "leave_one_out": leave_one_out,
}


def has_signal(rewards: np.ndarray) -> np.ndarray:
    """Return for each group of rewards [P, G] whether its answers are not all equally good, [P] bool."""
    return np.ptp(rewards, axis=1) > EQUAL


# Rows of a batch, each with one answer after its prompt.


def arrange_answers(
    prompts: Sequence[list[int]],
    answers: Sequence[Answer],
    seq_len: int,
    masked: Sequence[bool],
    learnt: Sequence[list[bool]] | None = None,
) -> Example:
    """Return fields [rows, T] of answers after their prompts, then padding: those of `FIELDS`, and `log_probs`.

    `learnt` says of each token of an answer whether it was drawn: an environment has said the others.

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
        fields["loss_mask"][row, answered] = 0 if is_masked else (1 if learnt is None else learnt[row])
        fields["log_probs"][row, answered] = answer.sampled_log_probabilities
    return fields


# Rewards of the newest rollouts beside those of the first: a run whose answers become worse warns.

WINDOW = 50  # steps whose mean rewards are compared
ERRORS = 2.0  # standard errors by which the newest rewards must be below the first ones


class RewardTrend:
    """Mean rewards of the rollouts since the program began; a resumed run begins anew."""

    def __init__(self, steps_per_rollout: int):
        self.window = max(2, WINDOW // steps_per_rollout)
        self.first: list[float] = []
        self.newest: deque[float] = deque(maxlen=self.window)
        self.num_since_warning = 0  # rollouts

    def add(self, reward: float) -> str:
        """Take the mean reward of a rollout; return a warning if the newest are below the first, else nothing.

        Nothing is compared before both windows are full, and no rollout is in both. After a warning, the next one comes
        `window` rollouts later at the earliest.
        """
        if len(self.first) < self.window:
            self.first.append(reward)
            return ""
        self.newest.append(reward)
        self.num_since_warning += 1
        if len(self.newest) < self.window or self.num_since_warning < self.window:
            return ""
        before, now = float(np.mean(self.first)), float(np.mean(self.newest))
        # Standard error of the difference of two means, each of `window` rewards.
        error = math.sqrt((np.var(self.first, ddof=1) + np.var(self.newest, ddof=1)) / self.window)
        if now >= before - ERRORS * error:
            return ""
        self.num_since_warning = 0
        return (
            f"the reward falls: its mean over the last {self.window} rollouts is {now:.4g}, over the first "
            f"{self.window} it was {before:.4g}; try a lower optimizer.learning_rate, or task.kl_coefficient "
            '(docs/post_training.md, "What the numbers say")'
        )


# Questions to the model in training: it answers, and rewards score its answers.


@dataclass(frozen=True)
class RolloutGroup:
    """P prompts and their P x G answers, grouped by prompt, with scores."""

    prompts: list[Prompt]
    answers: list[Answer]
    texts: list[str]  # of the answers, without the token that stopped them
    scores: Scores
    rollout_s: float
    played: Played | None = None  # where the answers are episodes

    @property
    def group_size(self) -> int:
        return len(self.answers) // len(self.prompts)

    @property
    def stopped(self) -> np.ndarray:
        """[P, G] bool: the answer has an end, and was not cut at its longest length."""
        return np.array([answer.stopped for answer in self.answers]).reshape(-1, self.group_size)

    @property
    def totals(self) -> np.ndarray:
        """[P, G] float64: the weighted sum of the scores of each answer."""
        return np.array(self.scores.total).reshape(-1, self.group_size)

    def numbers(self) -> dict[str, float]:
        """Return what metrics.jsonl says about the answers and their scores."""
        lengths = [len(answer.tokens) for answer in self.answers]
        if self.played is not None:
            lengths = [sum(episode.learnt) for episode in self.played.episodes]
        rewards = {"reward": float(np.mean(self.scores.total))} if self.scores.values else {}
        return rewards | {
            **{f"reward_{label}": float(np.mean(values)) for label, values in self.scores.values.items()},
            "answer_tokens": float(np.mean(lengths)),
            "truncated": float(1 - self.stopped.mean()),
            "reward_errors": sum(self.scores.errors.values()),
            **({} if self.played is None else self.played.numbers()),
        }


class RolloutEngine:
    """Asks the model in training. Every process calls it with the same arguments and gets all answers and scores."""

    def __init__(
        self,
        cfg: Config,
        corpus: PromptCorpus,
        program: Program,
        mesh: Mesh,
        scorer: Scorer,
        watchdog: Watchdog,
        pool: EnvironmentPool | None = None,
    ):
        """Choose how many answers are drawn at one time: the device with the least memory decides for all processes.

        With a pool of environments each answer is an episode.

        Raises:
            UserError: the chat template does not show what an environment says.
        """
        assert isinstance(cfg.task, Grpo)
        self.mesh, self.vocab, self.scorer, self.watchdog = mesh, corpus.vocab, scorer, watchdog
        self.rollout_mesh = build_rollout_mesh(cfg, mesh)
        # Threads draw ahead, and held-out prompts are answered meanwhile: the devices with the environments, and the
        # processes of rewards, each serve one at a time.
        self.drawing, self.scoring = threading.Lock(), threading.Lock()
        # The number of rows is the shape of a program that all processes run together, so they must agree on it. If
        # one of them does not know its memory (None), as on CPUs, nothing limits the size but task.rollout_rows.
        known = [json.loads(text) for text in peers.gather(json.dumps(read_device_bytes()), "memory of a device")]
        self.rows_at_once = select_rows(program, None if None in known else min(known))
        self.sampler = Sampler(program.arch, cfg.model.context_length, self.rollout_mesh)
        folder = None if cfg.model.init_from is None else find_model_files(cfg.model.init_from)
        self.stop = find_stop_ids(corpus.vocab, cfg.sampling.stop, folder)
        self.player = (
            None
            if pool is None
            else Player(pool, cfg.task, corpus.vocab, self.stop, cfg.training.seq_len - cfg.sampling.max_new_tokens)
        )

    def ask(
        self,
        params: Any,
        prompts: list[Prompt],
        keys: SamplingKeys,
        group_size: int,
        seed: int,
        between_chunks: Callable[[], None] | None = None,
        beside: bool = False,
    ) -> RolloutGroup:
        """Draw `group_size` answers to each prompt with parameters at rest, and score them.

        `between_chunks` is called from time to time while answers are drawn (see `Sampler.rollout`), and once more
        before they are scored. `beside` says that another thread than the main one calls.
        """
        with self.drawing:
            start_time = time.perf_counter()
            answers, texts, played = self._draw(params, prompts, keys, group_size, seed, between_chunks)
            rollout_s = time.perf_counter() - start_time
        if between_chunks is not None:
            between_chunks()
        with self.scoring, nullcontext() if beside else self.watchdog.phase("scoring answers"):
            scores = score_together(self.scorer, prompts, texts, group_size, played)
        return RolloutGroup(prompts, answers, texts, scores, rollout_s, played)

    def _draw(
        self,
        params: Any,
        prompts: list[Prompt],
        keys: SamplingKeys,
        group_size: int,
        seed: int,
        between_chunks: Callable[[], None] | None,
    ) -> tuple[list[Answer], list[str], Played | None]:
        """Return answers and their texts, and episodes where there is an environment."""
        played = None
        if self.player is None:
            sampling = select_sampling(keys, self.stop)
            request = Request([prompt.tokens for prompt in prompts], group_size, seed)
            with jax.set_mesh(self.rollout_mesh):
                answers = self.sampler.rollout(params, request, sampling, self.rows_at_once, between_chunks)
            texts = self.vocab.backend.decode_batch([answer.text_tokens for answer in answers])
        else:
            seeds = [derive_seed(seed, "environment", index) for index in range(len(prompts))]
            rows = self.rows_at_once
            with jax.set_mesh(self.rollout_mesh):
                played = self.player.rollout(
                    self.sampler, params, prompts, keys, seed, seeds, group_size, rows, between_chunks
                )
            answers = [episode.to_answer() for episode in played.episodes]
            texts = [self.vocab.backend.decode(answer.tokens, skip_special_tokens=False) for answer in answers]
        return answers, texts, played


def score_together(
    scorer: Scorer, prompts: list[Prompt], texts: list[str], group_size: int, played: Played | None = None
) -> Scores:
    """Score answers: each process scores those of its share of the prompts and gets the scores of all.

    `texts` are all answers to the first prompt, then all to the second, ... An error of one process is raised on all.
    Of an episode the last turn is scored, and a reward may ask for all of them as `turns`.
    """
    share = peers.share(len(prompts))
    local = [prompt for prompt in prompts[share.start : share.stop] for _ in range(group_size)]
    part = slice(share.start * group_size, share.stop * group_size)
    local_texts, columns = texts[part], gather_columns(local)
    if played is not None:
        local_texts = [episode.last_turn for episode in played.episodes[part]]
        columns["turns"] = [episode.turns for episode in played.episodes[part]]

    def score() -> Scores:
        return scorer.score([prompt.text for prompt in local], local_texts, columns, group_size)

    local_scores = peers.together(score, "scoring answers")
    scores = _join([Scores(**json.loads(text)) for text in peers.gather(json.dumps(asdict(local_scores)), "scores")])
    return scores if played is None else played.add_rewards(scores)


def _join(parts: Sequence[Scores]) -> Scores:
    """Return the scores of consecutive parts of a batch as one."""
    labels = list(parts[0].values)
    return Scores(
        {label: [score for part in parts for score in part.values[label]] for label in labels},
        [total for part in parts for total in part.total],
        {label: sum(part.errors[label] for part in parts) for label in labels},
        max(part.seconds for part in parts),  # processes score at the same time: the slowest one counts
    )


def derive_seed(*parts: object) -> int:
    """Return a seed below 2^31 that depends on all parts.

    A hash, because a sum would give two rollouts the same noise: seed 1 at prompt 8, and seed 2 at prompt 7.
    """
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1  # 31 bits: a seed is an int32, which is not negative


# samples.jsonl: the answers that a run has learnt from, one JSON object a line, to be read by people.

SHOWN = 4  # answers of a step that other sinks get as text
WIDTH = 300  # characters of a prompt or an answer there


class SamplesFile:
    """The file samples.jsonl in the run's folder, which process 0 writes; a resumed run appends to it."""

    def __init__(self, folder: Path, every_steps: int, metrics: Metrics):
        self.every_steps, self.metrics = every_steps, metrics
        self.file = open_lines(folder / "samples.jsonl") if peers.is_main() else None

    def write(self, step: int, first_sample: int, rollouts: RolloutGroup, advantages: np.ndarray) -> None:
        """Write the answers that `step` begins to learn from.

        Args:
            first_sample: number of the first prompt in the order of all samples.
            advantages: [P, G]; not a number for an answer that is not trained on.
        """
        if self.file is None or (step - 1) % self.every_steps:
            return
        records = []
        for row, (answer, text) in enumerate(zip(rollouts.answers, rollouts.texts, strict=True)):
            group, member = divmod(row, rollouts.group_size)
            advantage = float(advantages[group, member])
            records.append(
                {
                    "step": step,
                    "sample": first_sample + group,
                    "prompt": rollouts.prompts[group].text,
                    "answer": text,
                    "reward": rollouts.scores.total[row],
                    **{f"reward_{label}": values[row] for label, values in rollouts.scores.values.items()},
                    "advantage": advantage if math.isfinite(advantage) else None,
                    "stopped": answer.stopped,
                    "tokens": answer.tokens,
                    "log_probabilities": answer.sampled_log_probabilities,
                    **({} if rollouts.played is None else rollouts.played.episodes[row].describe()),
                }
            )
        # One line an answer: a file that a kill cuts short loses its last line and no more.
        for record in records:
            self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.metrics.table("samples", records, "\n".join(map(_shorten, records[:SHOWN])), step)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _shorten(record: dict) -> str:
    prompt, answer = (str(record[key])[:WIDTH] for key in ("prompt", "answer"))
    return f"{prompt} >>> {answer}   reward {record['reward']:g}"


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
        judge: Callable[[Batch], jax.Array] | None = None,
        shared: Batch | None = None,
        last: int = 0,
    ):
        """`reference` is None where task.kl_coefficient is 0; `file` gets the answers, if there is one.

        `judge` gives log-probabilities [A, B, T] under a teacher that scores tokens; `shared` is what all microbatches
        share: a teacher in the loss. `last` is the last step, beyond which nothing is drawn ahead.
        """
        assert isinstance(cfg.task, Grpo)
        self.cfg, self.task, self.prompts, self.engine, self.mesh = cfg, cfg.task, samples, engine, engine.mesh
        self.reference, self.start, self.step, self.file = reference, start, start.step, file
        self.judge, self.shared = judge, shared or {}
        self.shape = shape
        self.cycle = cfg.task.cycle(shape.num_sequences)
        self.data_schedule = DataSchedule(start, self.cycle, cfg.training.skip_steps)
        self.rows = local_rows(self.mesh, self.shape.num_rows)  # of B, those of this process
        self.trend = RewardTrend(self.cycle.steps)
        self.batches: list[Batch] = []  # of the newest rollout, one for each step of a pass
        self.ahead: RolloutsAhead | None = None
        if self.task.staleness:
            first_steps = range(start.step + 1, last + 1, self.cycle.steps)
            waiting = unpack(start.waiting, self.task, self._prompts_of)
            waiting = {step: drawn for step, drawn in waiting.items() if self._fits(step, drawn)}
            info = self._draw_ahead, engine.rollout_mesh, first_steps, self.task.staleness, waiting
            self.ahead, self.waits_for_state = RolloutsAhead(*info), False
        self.is_closed = False

    def next(self, state: dict[str, Any]) -> tuple[Batch, Numbers]:
        """Return the batch of the next step; the first step of a rollout draws answers with the parameters of `state`.

        Raises:
            Stopped: the run is asked to stop, so the answers that were being drawn are of no use.
        """
        cycle_step = (self.step - self.start.step) % self.cycle.steps  # of the step in its cycle
        numbers: Numbers = {}
        if cycle_step == 0:
            self.batches, numbers = self._generate_and_score(state["params"])
        self.step += 1
        # Tokens of the steps before `start`, in proportion to their samples: another batch may have been used there.
        tokens = self.shape.num_tokens
        before = self.start.num_samples * tokens * self.cycle.steps // self.cycle.samples
        numbers = {"tokens": before + (self.step - self.start.step) * tokens, "data_wait_s": 0.0} | numbers
        return self.batches[cycle_step % self.task.steps_per_rollout], numbers

    def after(self, step: int) -> Position:
        """Return the position after `step`; within a rollout, the one after all of it."""
        position = self.prompts.position_after(step, self.start, self.data_schedule)
        return position if self.ahead is None else replace(position, waiting=pack(self.ahead.wait(step)))

    def samples(self, step: int) -> range:
        return self.data_schedule.samples(step)

    def can_stop(self, step: int) -> bool:
        """Return True at the end of a rollout: the answers of one that is under way are not saved."""
        return (step - self.start.step) % self.cycle.steps == 0

    def close(self) -> None:
        self.is_closed = True
        if self.ahead is not None:
            self.ahead.close()
        if self.file is not None:
            self.file.close()

    def _ask(self, params: Any, first_step: int) -> tuple[int, RolloutGroup, float, int]:
        """Return the first sample of the rollout that begins with a step, its answers, the seconds that the step waits
        for its data, and the step after which the weights were that drew it."""
        start_time = time.perf_counter()
        samples = self.data_schedule.samples(first_step)
        prompts = [self.prompts[number] for number in samples]
        if self.ahead is None:
            data_wait_s = time.perf_counter() - start_time
            seed = derive_seed(self.cfg.seed, "rollout", samples.start)
            size = self.task.group_size
            rollouts = self.engine.ask(params, prompts, self.cfg.sampling, size, seed, self._stop_if_requested)
            return samples.start, rollouts, data_wait_s, first_step - 1
        drawn = self.ahead.take(params, first_step)
        rollouts = RolloutGroup(prompts, drawn.answers, drawn.texts, drawn.scores, drawn.rollout_s, drawn.played)
        return samples.start, rollouts, time.perf_counter() - start_time, drawn.weights_step

    def _draw_ahead(self, params: Any, first_step: int) -> Drawn:
        """Draw and score the rollout that begins with a step, in another thread than the main one."""
        samples = self.data_schedule.samples(first_step)
        prompts, seed = (
            [self.prompts[number] for number in samples],
            derive_seed(self.cfg.seed, "rollout", samples.start),
        )
        sampling, size = self.cfg.sampling, self.task.group_size
        rollouts = self.engine.ask(params, prompts, sampling, size, seed, self._stop_if_closed, beside=True)
        return Drawn(0, rollouts.answers, rollouts.texts, rollouts.scores, rollouts.rollout_s, rollouts.played)

    def _prompts_of(self, first_step: int) -> list[Prompt]:
        return [self.prompts[number] for number in self.data_schedule.samples(first_step)]

    def _fits(self, first_step: int, drawn: Drawn) -> bool:
        """Return whether a rollout of a checkpoint has the answers and the rewards that this run asks for."""
        labels = {term.label for term in self.task.rewards}
        fits = len(drawn.answers) == self.cycle.samples * self.task.group_size and labels <= drawn.scores.values.keys()
        if not fits:
            log.warning(
                "the answers that wait for step %d were drawn for another batch: they are drawn anew", first_step
            )
        return fits

    def _stop_if_closed(self) -> None:
        if self.is_closed:
            raise Stopped("given up: the run has ended while answers were drawn ahead")

    def _generate_and_score(self, params: Any) -> tuple[list[Batch], Numbers]:
        """Draw and score answers; return a batch for each step of one pass, and numbers of all answers."""
        first, rollouts, data_wait_s, weights_step = self._ask(params, self.step + 1)
        rewards = rollouts.totals
        if self.task.truncated == "zero":
            rewards = np.where(rollouts.stopped, rewards, 0.0)
        signal = has_signal(rewards)  # [P]
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
            self.file.write(self.step + 1, first, rollouts, advantages)
        num_tokens = sum(len(answer.tokens) for answer in rollouts.answers)
        numbers = rollouts.numbers() | {
            **({"no_signal": float(1 - signal.mean())} if self.task.is_rewarded else {}),
            **({"teacher_kl": float(np.mean(gaps))} if self.judge else {}),
            **({"staleness": self.step - weights_step} if self.ahead else {}),
            "data_wait_s": data_wait_s,
            "rollout_s": rollouts.rollout_s,
            "rollout_tokens_per_s": num_tokens / rollouts.rollout_s,
            "reward_s": rollouts.scores.seconds,
        }
        if self.task.is_rewarded and (warning := self.trend.add(numbers["reward"])):
            log.warning("step %d: %s", self.step + 1, warning)
        return batches, numbers

    def _stop_if_requested(self) -> None:
        """Raise `Stopped` where the run is asked to stop: a rollout may take longer than a cluster waits."""
        if reason := watchdog.stop_requested():
            raise Stopped(f"{reason}: given up while answers for step {self.step + 1} were drawn; resume goes on")

    def _make_batch(
        self, params: Any, rollouts: RolloutGroup, rewards: np.ndarray, groups: np.ndarray
    ) -> tuple[Batch, np.ndarray, float]:
        """Return the batch of a step made of some groups with these rewards [P, G], their advantages, and how far a
        teacher is from their tokens: nats a token, an estimate of KL(model || teacher); 0 without one."""
        size, task = self.task.group_size, self.task
        rows = [group * size + n for group in groups.tolist() for n in range(size)]
        answers = [rollouts.answers[row] for row in rows]
        masked = [task.truncated == "mask" and not answer.stopped for answer in answers]
        prompts = [rollouts.prompts[row // size].tokens for row in rows]
        episodes = None if rollouts.played is None else [rollouts.played.episodes[row] for row in rows]
        if episodes is not None:
            prompts = [episode.begin for episode in episodes]
        learnt = None if episodes is None else [episode.learnt for episode in episodes]
        fields = arrange_answers(prompts, answers, self.shape.seq_len, masked, learnt)
        batch = self._to_devices(fields)
        if self.reference is None:
            batch |= self._to_devices({"reference_log_probs": np.zeros_like(fields["log_probs"])})
        else:
            batch["reference_log_probs"] = self.reference(params, batch)
            # The divergence as a part of the reward: the gap of log-probabilities, summed over the answer's tokens.
            if task.kl == "advantage":
                reference = np.asarray(multihost_utils.process_allgather(batch["reference_log_probs"], tiled=True))
                gap = (fields["log_probs"] - reference.reshape(fields["log_probs"].shape)) * fields["loss_mask"]
                rewards = rewards - task.kl_coefficient * gap.sum(axis=1).reshape(rewards.shape)
        advantages = ADVANTAGES[task.advantage](rewards)
        mask = fields["loss_mask"]
        of_tokens, gap = advantages.reshape(-1, 1) * mask, 0.0
        if episodes is not None and task.credit == "turns":
            zeroed = [task.truncated == "zero" and not episode.stopped for episode in episodes]
            of_tokens = mask * credit_turns(episodes, rewards, zeroed, ADVANTAGES[task.advantage], self.shape.seq_len)
            advantages = (of_tokens.sum(1) / np.maximum(1, mask.sum(1))).reshape(rewards.shape)
        if self.judge is not None:
            judged = np.asarray(multihost_utils.process_allgather(self.judge(batch), tiled=True)).reshape(mask.shape)
            gains = (judged - fields["log_probs"]) * mask  # whose mean is minus the divergence: its gradient is that
            of_tokens = of_tokens + task.teacher_weight * gains
            gap = -float(gains.sum() / max(mask.sum(), 1))
        return batch | self._to_devices({"advantages": of_tokens.astype(np.float32)}), advantages, gap

    def _to_devices(self, fields: Example) -> Batch:
        """Return fields [sequences, ...], which every process has, as global arrays [A, B, ...]."""
        shape = self.shape.num_microbatches, self.shape.num_rows
        # A x B sequences -> [A, B], of which this process puts its own rows of B on its devices.
        local = {name: leaf.reshape(*shape, *leaf.shape[1:])[:, self.rows] for name, leaf in fields.items()}
        return to_global(local, self.mesh)
