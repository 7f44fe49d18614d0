"""Which prompts a rollout asks, where that depends on earlier answers: task.refill and task.curriculum.

Prompts are asked in the order of all samples, whose next number is the place in the data. A rollout may take more of
them than its steps learn from:

    sample       20  21  22  23  24  25  26  27
    curriculum        -               -               left out: its newest answers were all right
    asked        x       x   x   x       .   .
    signal       1       0   1   0       1   0        22 and 24 are replaced by 26 and 27: task.refill
                 next_sample 28, of which 4 do not count as samples of the steps (`Position.num_extra`)
"""

import base64
import hashlib
import json
import zlib
from dataclasses import replace

import numpy as np

from tunix.config.task import Grpo
from tunix.data.batches import Position, Samples
from tunix.data.prompts import Prompt

RIGHT = 1.0  # an answer is right where the first reward gives it at least this
MOST_LEFT_OUT = 100  # prompts that are left out for each one that is asked; then prompts are asked as they come


class PromptOrder:
    """Prompts in the order of all samples, without those that the curriculum leaves out. The same on every process."""

    def __init__(self, samples: Samples, task: Grpo, start: Position):
        self.samples, self.curriculum = samples, task.curriculum
        self.num_extra = 0  # samples after `start` beyond those that the steps count
        self.num_left_out = 0  # by the curriculum, in all
        # For each prompt that is left out, how often it will still be; by what it says, whatever its number is.
        self.turns_left: dict[str, int] = _unpack(start.curriculum)
        # Of the two newest rollouts, by their first steps: what was before each, and the range of samples that it took.
        self.before: dict[int, tuple[int, dict[str, int]]] = {}
        self.ranges: dict[int, range] = {}

    def begin(self, first_step: int) -> None:
        """Remember what a checkpoint before a rollout has to keep: the next one may be drawn before it is saved."""
        self.before = dict([*self.before.items()][-1:])
        self.before[first_step] = self.num_extra, dict(self.turns_left)

    def end(self, first_step: int, planned: range, number: int) -> None:
        """Note that a rollout took all samples up to `number`, in the place of those that its steps count."""
        self.ranges = dict([*self.ranges.items()][-1:])
        self.ranges[first_step] = range(planned.start + self.num_extra, number)
        self.num_extra = number - planned.stop

    def take(self, number: int, count: int) -> tuple[dict[int, Prompt], int]:
        """Return the next `count` prompts from a sample on, by their numbers, and the number behind them."""
        taken: dict[int, Prompt] = {}
        most = MOST_LEFT_OUT * count
        while len(taken) < count:
            prompt = self.samples[number]
            if self.turns_left and most and (turns := self.turns_left.pop(_digest(prompt), 0)):
                if turns > 1:
                    self.turns_left[_digest(prompt)] = turns - 1
                most -= 1
                self.num_left_out += 1
            else:
                taken[number] = prompt
            number += 1
        return taken, number

    def note(self, prompts: list[Prompt], first_scores: np.ndarray) -> None:
        """Leave prompts out from now on by the scores [P, G] that the first reward gives their answers."""
        easy, hard = self.curriculum.solved, self.curriculum.unsolved
        for prompt, share in zip(prompts, (first_scores >= RIGHT).mean(axis=1), strict=True):
            if (easy is not None and share >= easy) or (hard is not None and share <= hard):
                self.turns_left[_digest(prompt)] = self.curriculum.turns

    def complete(self, position: Position, first_step: int) -> Position:
        """Return a position before the rollout that begins with a step, with what this order adds to it."""
        num_extra, turns_left = self.before.get(first_step, (self.num_extra, self.turns_left))
        return replace(
            position,
            next_sample=position.next_sample + num_extra,
            num_extra=position.num_extra + num_extra,
            curriculum=_pack(turns_left),
        )


def _digest(prompt: Prompt) -> str:
    return hashlib.sha256(prompt.text.encode("utf-8", "replace")).hexdigest()[:16]


def _pack(turns_left: dict[str, int]) -> str:
    """Return the numbers of turns as a text, packed: there may be one for each prompt."""
    return base64.b64encode(zlib.compress(json.dumps(turns_left).encode())).decode() if turns_left else ""


def _unpack(text: str) -> dict[str, int]:
    return json.loads(zlib.decompress(base64.b64decode(text))) if text else {}
