"""Environments that users bring by dotted path, for tests."""

import hashlib
import os
import random
import signal
import time
from pathlib import Path

from tunix.rl.tool_parsers import Call


class Chatty:
    """Answers every turn with two digits, and rewards it; both follow from the seed and from what was said."""

    def __init__(self, wild: bool = False):
        """A wild one sleeps, ends its process once for a seed, and kills the run once, after step 2."""
        self.wild = wild

    def reset(self, seed: int, question: str, **columns) -> None:
        self.seed, self.said = seed, question

    def step(self, text: str):
        if self.wild:
            self._act_wildly()
        self.said += f" {text}"
        digest = hashlib.sha256(f"{self.seed} {self.said}".encode()).digest()
        return f"={digest[0] % 100:02}", digest[1] % 5 / 4, digest[2] % 4 == 0

    def _act_wildly(self) -> None:
        time.sleep(random.SystemRandom().random() * 0.02)
        answers = Path("run") / "samples.jsonl"
        if answers.exists() and len(answers.read_text().splitlines()) >= 32 and self._is_first("struck"):
            os.kill(os.getppid(), signal.SIGKILL)
        if self.seed % 2 and self._is_first(f"died {self.seed}"):
            os._exit(3)

    def _is_first(self, name: str) -> bool:
        try:
            Path(name).mkdir()
        except FileExistsError:
            return False
        return True


class Failing(Chatty):
    def step(self, text: str):
        raise RuntimeError("out of order")


class FailingLater(Chatty):
    """Fails once the run has learnt from some answers."""

    def __init__(self, after: int):
        super().__init__()
        self.after = after

    def reset(self, seed: int, question: str, **columns) -> None:
        answers = Path("run") / "samples.jsonl"
        if answers.exists() and len(answers.read_text().splitlines()) >= self.after:
            raise RuntimeError("out of order")
        super().reset(seed, question)


class Forgetful:
    """Has nothing to say, and no reset."""

    def step(self, text: str):
        return None, 0.0, True


class Silent:
    """Has a tool, and no reward."""

    def reset(self):
        pass

    def look(self, place: str) -> str:
        """Look at a place."""
        return place


class RewardsAtTheEnd(Silent):
    def get_reward(self) -> float:
        return 0.75


def read_numbers(text: str) -> list:
    """A format of calls that fails for a text that is no number, and makes no call of one, or one with a number as id."""
    number = int(text)
    return [number] if number > 0 else [Call("add", {}, id=number)]
