"""Rollouts, and those that are drawn ahead, beside learning, each by weights of a fixed age (task.staleness).

Rollout r is drawn by the weights after rollout r - 1 - k has been learnt, always. How long anything takes changes no
token. With k = 2 and one step a rollout:

    main thread   learn 5      | learn 6      | learn 7      | learn 8        waits for the answers that it needs next
    drawing         draw 7 (4)  draw 8 (5)  | draw 9 (6) |    draw 10 (7)     (by the weights after this step)

The first k rollouts are drawn by the weights that the run begins with. A checkpoint keeps the k rollouts that wait, so
a resumed run learns from the same answers.

Several processes have no drawing threads, which would run their programs in unequal orders. There the main thread
draws (`InTurn`), after it has given the devices a step to learn: with task.rollout_devices both work at one time.

    main thread   start step 5 | draw 7 (4)  | start step 6 | draw 8 (5)  | start step 7
    devices       learn 5 .......            | learn 6 .......            | learn 7 .......
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tunix.base import text
from tunix.config.task import Grpo
from tunix.data.prompts import Prompt
from tunix.inference.engine import Answer
from tunix.rl.episodes import Episode, Played
from tunix.rl.scoring import Scores
from tunix.sharding.arrays import copy_to

log = logging.getLogger(__name__)

CHECK_S = 0.5  # between two looks at whether the run is to stop, while a step waits for its answers


@dataclass(frozen=True)
class RolloutGroup:
    """P prompts and their P x G answers, grouped by prompt, with scores."""

    prompts: list[Prompt]
    answers: list[Answer]
    texts: list[str]  # of the answers, without their thoughts (data/thoughts.py) and the token that stopped them
    scores: Scores
    rollout_s: float
    played: Played | None = None  # where the answers are episodes
    weights_step: int = 0  # of a rollout that is drawn ahead: step after which the weights were that drew it
    request: str = ""  # and the digest of what was asked: another request has other answers

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

    @property
    def first_scores(self) -> np.ndarray:
        """[P, G]: the scores by the first reward, which says what is right."""
        return np.array(next(iter(self.scores.values.values()))).reshape(-1, self.group_size)

    def numbers(self) -> dict[str, float]:
        """Return what metrics.jsonl says about the answers and their scores."""
        lengths = [len(answer.tokens) for answer in self.answers]
        if self.played is not None:
            lengths = [sum(episode.learnt) for episode in self.played.episodes]
        guessed = [answer.num_guessed for answer in self.answers if answer.num_guessed is not None]
        rewards = {"reward": float(np.mean(self.scores.total))} if self.scores.values else {}
        return rewards | {
            **{f"reward_{label}": float(np.mean(values)) for label, values in self.scores.values.items()},
            "answer_tokens": float(np.mean(lengths)),
            "truncated": float(1 - self.stopped.mean()),
            **({"guessed": sum(guessed) / sum(lengths)} if guessed else {}),
            "reward_errors": sum(self.scores.errors.values()),
            **self.scores.numbers,
            **({} if self.played is None else self.played.numbers()),
        }


class InTurn(Executor):
    """Runs what it is given one after the other, in the thread that asks for a result."""

    class Waiting(Future):
        """The result of what has not begun."""

        def __init__(self, executor: "InTurn"):
            super().__init__()
            self.executor = executor

        def result(self, timeout: float | None = None) -> Any:
            self.executor.finish(self)
            return super().result(timeout)

    def __init__(self) -> None:
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future = self.Waiting(self)
        self.waiting.append((future, partial(function, *arguments, **named)))
        return future

    def finish(self, future: Future[Any]) -> None:
        """Run what was given up to this future."""
        while not future.done():
            first, run = self.waiting.popleft()
            try:
                first.set_result(run())
            except Exception as error:
                first.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.waiting.clear()


class RolloutsAhead:
    """Draws in threads, `staleness` rollouts ahead, each known by its first step.

    All that are begun are under way at one time: `RolloutEngine.ask` says what of them runs side by side.
    """

    def __init__(
        self,
        sample: Callable[[Any, int], RolloutGroup],
        mesh: Mesh,
        first_steps: range,
        staleness: int,
        waiting: dict[int, RolloutGroup],
    ):
        """`sample(parameters, first_step)` draws and scores a rollout; `first_steps` are those of all rollouts to come.

        `mesh` is that of drawing, `waiting` are rollouts of a checkpoint.
        """
        self.sample, self.mesh, self.first_steps, self.staleness = sample, mesh, first_steps, staleness
        # While a step waits for its rollout, the ones of the next `staleness` steps are begun too.
        self.threads = ThreadPoolExecutor(staleness + 1, "drawing") if jax.process_count() == 1 else InTurn()
        self.rollouts: dict[int, Future[RolloutGroup]] = {}
        for first_step, rollout in waiting.items():
            self.rollouts[first_step] = Future()
            self.rollouts[first_step].set_result(rollout)

    def take(self, params: Any, first_step: int, check: Callable[[], None]) -> RolloutGroup:
        """Return the rollout that begins with a step, drawn by weights of the past.

        Rollouts that are to be drawn by `params`, the parameters after the step before, begin now. While threads draw,
        `check` is called now and then, which may raise an error.
        """
        if isinstance(self.threads, InTurn):
            for future in self.rollouts.values():  # begun before the step that the devices now learn
                with suppress(Exception):  # it ends the run at the step that learns from it
                    future.result()
        index = self.first_steps.index(first_step)
        ahead = self.first_steps[index : index + self.staleness + 1]
        if missing := [each for each in ahead if each not in self.rollouts]:
            # The step that follows takes the memory of its parameters, so those that wait for a thread are copied.
            mesh = self.mesh  # that of the parameters, or of other devices
            copied = jax.tree.map(lambda leaf: copy_to(leaf, NamedSharding(mesh, leaf.sharding.spec)), params)
            for each in missing:
                self.rollouts[each] = self.threads.submit(self._sample, copied, each, first_step - 1)
        for past in [each for each in self.rollouts if each < first_step]:
            del self.rollouts[past]
        rollout = self.rollouts[first_step]
        while not isinstance(self.threads, InTurn) and not wait([rollout], CHECK_S).done:
            check()
        return rollout.result()

    def find_waiting(self, after: int, waits: bool = True) -> dict[int, RolloutGroup]:
        """Return the rollouts that a checkpoint after a step keeps; without `waits`, those that are drawn by now.

        One drawn by the weights after that step is left out: a resumed run draws it again, and also one that failed.
        """
        later = {first_step: future for first_step, future in self.rollouts.items() if first_step > after}
        kept = {}
        for first_step, future in sorted(later.items())[: self.staleness]:
            with suppress(Exception):
                if (waits or future.done()) and (rollout := future.result()).weights_step < after:
                    kept[first_step] = rollout
        return kept

    def close(self) -> None:
        """Give up what is not drawn yet; wait for the threads."""
        self.threads.shutdown(cancel_futures=True)

    def _sample(self, params: Any, first_step: int, weights_step: int) -> RolloutGroup:
        with jax.set_mesh(self.mesh):  # `jax.set_mesh` of the main thread does not reach this thread
            return replace(self.sample(params, first_step), weights_step=weights_step)


# Rollouts that wait, as a checkpoint keeps them: JSON, packed, because log-probabilities are many digits.


def pack(waiting: dict[int, RolloutGroup]) -> str:
    """Return rollouts by their first steps as a text."""
    plain = {
        str(first_step): {
            "weights_step": rollout.weights_step,
            "answers": [asdict(answer) for answer in rollout.answers],
            "texts": rollout.texts,
            "scores": asdict(rollout.scores),
            "rollout_s": rollout.rollout_s,
            "played": None if rollout.played is None else _to_plain(rollout.played),
            "request": rollout.request,
        }
        for first_step, rollout in waiting.items()
    }
    return text.pack(plain)


def _to_plain(played: Played) -> dict[str, Any]:
    """Return episodes as plain values, without their prompts, which the data have."""
    episodes = [
        {each.name: getattr(episode, each.name) for each in fields(episode) if each.name != "prompt"}
        for episode in played.episodes
    ]
    return {"episodes": episodes, "tool_s": played.tool_s, "num_lost": played.num_lost}


def _to_played(plain: dict[str, Any], task: Grpo, prompts: Sequence[Prompt]) -> Played:
    episodes = [
        Episode(prompt=prompts[row // task.group_size], **values | {"spans": [(a, b) for a, b in values["spans"]]})
        for row, values in enumerate(plain["episodes"])
    ]
    return Played(episodes, plain["tool_s"], plain["num_lost"], task)


def unpack(
    packed: str,
    first_steps: Sequence[int],
    task: Grpo,
    prompts_of: Callable[[int], Sequence[Prompt]],
    request_of: Callable[[Sequence[Prompt]], str],
) -> dict[int, RolloutGroup]:
    """Return the rollouts of a text that `pack` has made: the same digits. One of another request is left out.

    `first_steps` are those that the text should have; a warning names what it lacks. `prompts_of` gives the prompts of
    the rollout that begins with a step, and `request_of` the digest of a request.
    """
    rollouts, plain = {}, text.unpack(packed)
    if missing := [str(each) for each in first_steps if str(each) not in plain]:
        log.warning(
            "the checkpoint has no answers that wait for step %s: they are drawn by its weights, not by older ones",
            ", ".join(missing),
        )
    for first_step, rollout in plain.items():
        prompts = prompts_of(int(first_step))
        digest = request_of(prompts)
        if rollout.get("request", digest) != digest:  # versions before 2026-11-29 wrote none
            log.warning(
                "the answers that wait for step %s were drawn for other prompts, groups, rewards or environments: they "
                "are drawn anew",
                first_step,
            )
            continue
        rollouts[int(first_step)] = RolloutGroup(
            list(prompts),
            [Answer(**answer) for answer in rollout["answers"]],
            rollout["texts"],
            Scores(**rollout["scores"]),
            rollout["rollout_s"],
            None if rollout["played"] is None else _to_played(rollout["played"], task, prompts),
            rollout["weights_step"],
            digest,
        )
    return rollouts
