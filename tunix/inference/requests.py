"""Requests for answers, and the waves in which they are given.

Memory bounds the prompts that are answered at one time. Prompts of a wave are padded to the longest of them, so waves
are made of prompts that are about as long as each other:

    prompts      aaaa   bb   cccccc   d   eee        5 prompts, 2 answers to each, 2 prompts at a time
    by length    d   bb        eee   aaaa        cccccc
    waves        `--0--'       `---1----'        `-2--'

Which wave an answer is in changes none of its tokens: its noise depends on its place in the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tunix.costs.rollout_sizes import pad_prompt


@dataclass(frozen=True)
class Request:
    """Prompts, how many answers to each are wanted, and the noise that these draw by."""

    prompts: Sequence[list[int]]  # token ids
    answers_per_prompt: int = 1
    seed: int = 0
    first_row: int = 0  # answer n of the request draws by the number `first_row` + n, and by the seed

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.prompts))

    def split(self, prompts_at_once: int | None) -> list["Wave"]:
        """Return the waves in which the prompts are answered, those with the shortest prompts first; None for one."""
        order = sorted(range(len(self.prompts)), key=lambda index: len(self.prompts[index]))
        size, count = prompts_at_once or len(order), self.answers_per_prompt
        waves = []
        for start in range(0, len(order), size):
            indices = sorted(order[start : start + size])  # within a wave prompts are in the order of the request
            # Prompt 2 with 3 answers to each prompt: places 6, 7 and 8.
            places = [index * count + n for index in indices for n in range(count)]
            waves.append(Wave([self.prompts[index] for index in indices], places, self.first_row))
        return waves


@dataclass(frozen=True)
class Wave:
    """Prompts that are answered at one time."""

    prompts: list[list[int]]
    places: list[int]  # of their answers in the request; as many to each prompt, one after the other
    first_row: int  # of the request

    @property
    def length(self) -> int:
        """Tokens that the prompts are padded to."""
        return pad_prompt(max(map(len, self.prompts)))
