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
    batch          [A, B, T]: an answer a row, with its advantage
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tunix.base.errors import Stopped
from tunix.config import Config
from tunix.config.task import Grpo
from tunix.data.batch import Batch, Example
from tunix.data.batches import Numbers
from tunix.data.course import Course
from tunix.data.position import Position
from tunix.data.samples import Samples
from tunix.processes import stopping
from tunix.rl.advantages import ADVANTAGES, has_signal
from tunix.rl.answer_rows import place_answers
from tunix.rl.asking import Asked, Asker, derive_seed
from tunix.rl.reward_trend import RewardTrend
from tunix.rl.samples_file import SamplesFile
from tunix.sharding.arrays import local_rows, to_global

log = logging.getLogger(__name__)

# (parameters of the policy, batch) -> log-probabilities [A, B, T] under the reference
Reference = Callable[[Any, Batch], jax.Array]


class Rollouts:
    """Answers of the model in training, as batches: a `BatchSource`."""

    phase = "drawing and scoring answers"
    waits_for_state = True

    def __init__(
        self,
        cfg: Config,
        samples: Samples,
        asker: Asker,
        reference: Reference | None,
        start: Position,
        file: SamplesFile | None,
    ):
        """`reference` is None where task.kl_coefficient is 0; `file` gets the answers, if there is one."""
        assert isinstance(cfg.task, Grpo)
        self.cfg, self.task, self.prompts, self.asker, self.mesh = cfg, cfg.task, samples, asker, asker.mesh
        self.reference, self.start, self.step, self.file = reference, start, start.step, file
        self.shape = cfg.training.batch_shape(self.mesh.shape)
        self.cycle = cfg.task.cycle(self.shape.num_sequences)
        self.course = Course(start, self.cycle, cfg.training.skip_steps)
        self.rows = local_rows(self.mesh, self.shape.num_rows)  # of B, those of this process
        self.trend = RewardTrend(self.cycle.steps)
        self.batches: list[Batch] = []  # of the newest rollout, one for each step of a pass

    def next(self, state: dict[str, Any]) -> tuple[Batch, Numbers]:
        """Return the batch of the next step; the first step of a rollout draws answers with the parameters of `state`.

        Raises:
            Stopped: the run is asked to stop, so the answers that were being drawn are of no use.
        """
        place = (self.step - self.start.step) % self.cycle.steps  # of the step in its cycle
        numbers: Numbers = {}
        if place == 0:
            self.batches, numbers = self._draw_and_score(state["params"])
        self.step += 1
        # Tokens of the steps before `start`, in proportion to their samples: another batch may have been used there.
        tokens = self.shape.num_tokens
        before = self.start.num_samples * tokens * self.cycle.steps // self.cycle.samples
        numbers = {"tokens": before + (self.step - self.start.step) * tokens, "data_wait_s": 0.0} | numbers
        return self.batches[place % self.task.steps_per_rollout], numbers

    def after(self, step: int) -> Position:
        """Return the position after `step`; within a rollout, the one after all of it."""
        return self.prompts.position_after(step, self.start, self.course)

    def samples(self, step: int) -> range:
        return self.course.samples(step)

    def can_stop(self, step: int) -> bool:
        """Return True at the end of a rollout: the answers of one that is under way are not saved."""
        return (step - self.start.step) % self.cycle.steps == 0

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def _draw_and_score(self, params: Any) -> tuple[list[Batch], Numbers]:
        """Draw and score answers; return a batch for each step of one pass, and numbers of all answers."""
        begun = time.perf_counter()
        samples = self.course.samples(self.step + 1)
        first, prompts = samples.start, [self.prompts[number] for number in samples]
        data_wait_s = time.perf_counter() - begun
        seed = derive_seed(self.cfg.seed, "rollout", first)
        asked = self.asker.ask(params, prompts, self.cfg.sampling, self.task.group_size, seed, self._stop_if_asked)
        rewards = asked.totals
        if self.task.truncated == "zero":
            rewards = np.where(asked.stopped, rewards, 0.0)
        signal = has_signal(rewards)  # [P]
        num_groups = self.task.num_prompts(self.shape.num_sequences)  # of a step
        # False sorts before True, so groups with a signal come first. A stable sort keeps the order of the prompts in
        # both kinds: the choice is the same on every process. The second sort brings the chosen ones back into order.
        chosen = np.sort(np.argsort(~signal, kind="stable")[: num_groups * self.task.steps_per_rollout])
        advantages = np.full(rewards.shape, np.nan)  # stays so where an answer is not trained on
        batches = []
        for groups in chosen.reshape(-1, num_groups):
            batch, advantages[groups] = self._make_batch(params, asked, rewards[groups], groups)
            batches.append(batch)
        if self.file is not None:
            self.file.write(self.step + 1, first, asked, advantages)
        num_tokens = sum(len(answer.tokens) for answer in asked.answers)
        numbers = asked.numbers() | {
            "no_signal": float(1 - signal.mean()),
            "data_wait_s": data_wait_s,
            "rollout_s": asked.rollout_s,
            "rollout_tokens_per_s": num_tokens / asked.rollout_s,
            "reward_s": asked.scores.seconds,
        }
        if warning := self.trend.add(numbers["reward"]):
            log.warning("step %d: %s", self.step + 1, warning)
        return batches, numbers

    def _stop_if_asked(self) -> None:
        """Raise `Stopped` where the run is asked to stop: a rollout may take longer than a cluster waits."""
        if why := stopping.stop_requested():
            raise Stopped(f"{why}: given up while answers for step {self.step + 1} were drawn; resume goes on")

    def _make_batch(self, params: Any, asked: Asked, rewards: np.ndarray, groups: np.ndarray) -> tuple[Batch, Any]:
        """Return the batch of a step made of some groups with these rewards [P, G], and their advantages."""
        size, task = self.task.group_size, self.task
        rows = [group * size + n for group in groups.tolist() for n in range(size)]
        answers = [asked.answers[row] for row in rows]
        masked = [task.truncated == "mask" and not answer.stopped for answer in answers]
        prompts = [asked.prompts[row // size].tokens for row in rows]
        fields = place_answers(prompts, answers, self.shape.seq_len, masked)
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
        return batch | self._to_devices({"advantages": advantages.reshape(-1).astype(np.float32)}), advantages

    def _to_devices(self, fields: Example) -> Batch:
        """Return fields [sequences, ...], which every process has, as global arrays [A, B, ...]."""
        shape = self.shape.num_microbatches, self.shape.num_rows
        # A x B sequences -> [A, B], of which this process puts its own rows of B on its devices.
        own = {name: leaf.reshape(*shape, *leaf.shape[1:])[:, self.rows] for name, leaf in fields.items()}
        return to_global(own, self.mesh)
