"""Questions to the model in training: it answers, and rewards score its answers.

Several rollouts may be under way in threads (rl/ahead.py). How much of them runs side by side:

    without an environment   draw 7    | draw 8    |            one has the devices, until all of its answers are drawn
                                        score 7 ... score 8     others are scored

    with one                 draw 7 ~~ draw 7 ~~ draw 7         while its environments work (~~), others have the
                                draw 8 ~~ draw 8 ~~ draw 8      devices: as many as have caches in memory
"""

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tunix.base.priority_slots import PrioritySlots
from tunix.config import Config
from tunix.config.task import Grpo
from tunix.costs.rollout import select_pages, select_rollouts_at_once, select_rows
from tunix.data.prompts import Prompt, PromptCorpus, gather_columns
from tunix.inference.engine import Answer
from tunix.inference.rollout import Request, Sampler, gather_device_bytes
from tunix.inference.sampling import find_stop_ids, select_sampling
from tunix.processes import peers
from tunix.processes.watchdog import Watchdog
from tunix.rl.engine_rewards import EngineRewards
from tunix.rl.environment_pool import EnvironmentPool
from tunix.rl.episodes import Played, Player, RolloutRequest
from tunix.rl.scoring import Scorer, Scores
from tunix.run.folder import find_model_files
from tunix.training.choices import build_rollout_mesh
from tunix.training.train_spec import TrainSpec


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


def join_rollouts(parts: Sequence[RolloutGroup]) -> RolloutGroup:
    """Return rollouts that were drawn one after the other as one."""
    first, *others = parts
    if not others:
        return first
    scores = replace(_join([part.scores for part in parts]), seconds=sum(part.scores.seconds for part in parts))
    games = [part.played for part in parts if part.played is not None]
    return RolloutGroup(
        [prompt for part in parts for prompt in part.prompts],
        [answer for part in parts for answer in part.answers],
        [text for part in parts for text in part.texts],
        scores,
        sum(part.rollout_s for part in parts),
        replace(
            games[0],
            episodes=[episode for game in games for episode in game.episodes],
            tool_s=sum(game.tool_s for game in games),
            num_lost=sum(game.num_lost for game in games),
        )
        if games
        else None,
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
        pool: EnvironmentPool | None = None,
        engine_rewards: EngineRewards | None = None,
    ):
        """Choose how many answers are drawn at one time: the device with the least memory decides for all processes.

        With a pool of environments each answer is an episode.

        Raises:
            UserError: the chat template does not show what an environment says.
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
        self.sampler = Sampler(train_spec.arch, cfg.model.context_length, self.rollout_mesh, num_pages)
        folder = None if cfg.model.init_from is None else find_model_files(cfg.model.init_from)
        self.stop = find_stop_ids(corpus.vocab, cfg.sampling.stop, folder)
        self.player = (
            None
            if pool is None
            else Player(pool, cfg.task, corpus.vocab, self.stop, cfg.training.seq_len - cfg.sampling.max_new_tokens)
        )
        self.devices = PrioritySlots(1) if self.player is None else self.player.devices

    def ask(self, params: Any, request: RolloutRequest, beside: bool = False) -> RolloutGroup:
        """Draw the answers of a request with parameters at rest, and score them.

        `between_chunks` of the request is called once more before they are scored. `beside` says that another thread
        than the main one calls.
        """
        with self.caches.hold(request.rank), jax.set_mesh(self.rollout_mesh):
            start_time = time.perf_counter()
            answers, texts, played = self._sample(params, request)
            rollout_s = time.perf_counter() - start_time
        if request.between_chunks is not None:
            request.between_chunks()
        prompts = list(request.prompts)
        with nullcontext() if beside else self.watchdog.phase("scoring answers"):
            scores = score_together(self.scorer, prompts, texts, request.group_size, played)
            if self.engine_rewards is not None:
                hold = partial(self.devices.hold, request.rank)
                scores = self.engine_rewards.add(scores, prompts, texts, answers, hold)
        return RolloutGroup(prompts, answers, texts, scores, rollout_s, played)

    def _sample(self, params: Any, request: RolloutRequest) -> tuple[list[Answer], list[str], Played | None]:
        """Return answers and their texts, and episodes where there is an environment."""
        decode = self.vocab.backend.decode
        if self.player is not None:
            played = self.player.rollout(self.sampler, params, request, self.rows_at_once)
            answers = [episode.to_answer() for episode in played.episodes]
            return answers, [decode(answer.tokens, skip_special_tokens=False) for answer in answers], played
        sampling = select_sampling(request.sampling, self.stop)
        drawing = make_request(request.prompts, request.group_size, request.seed)
        with self.devices.hold(request.rank):
            answers = self.sampler.rollout(params, drawing, sampling, self.rows_at_once, request.between_chunks)
        return answers, [decode(answer.text_tokens) for answer in answers], None


def make_request(prompts: Sequence[Prompt], answers_per_prompt: int, seed: int) -> Request:
    """Return what a sampler is asked for, with the images of the prompts."""
    images = [prompt.images for prompt in prompts]
    has_images = any(each is not None for each in images)
    tokens = [prompt.tokens for prompt in prompts]
    return Request(tokens, answers_per_prompt, seed, images=images if has_images else None)


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
        {name: sum(part.numbers[name] for part in parts) for name in parts[0].numbers},
    )
