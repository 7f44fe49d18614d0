"""Questions to the model in training: it answers, and rewards score its answers."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tunix.config import Config
from tunix.config import Sampling as SamplingKeys
from tunix.config.task import Grpo
from tunix.costs.rollout_memory import choose_rows, read_device_bytes
from tunix.costs.rollout_sizes import count_prompts_at_once
from tunix.data.prompts import Prompt, PromptCorpus, gather_columns
from tunix.inference.answers import Answer
from tunix.inference.drawing import choose_sampling
from tunix.inference.requests import Request
from tunix.inference.sampling import Sampler
from tunix.inference.stops import find_stop_ids
from tunix.processes import peers
from tunix.processes.watchdog import Watchdog
from tunix.rl.scoring import Scorer, Scores
from tunix.run.run_folder import find_model_files
from tunix.training.program import Program


@dataclass(frozen=True)
class Asked:
    """Prompts [P] with their answers [P x G]; the answers to a prompt stand one after the other."""

    prompts: list[Prompt]
    answers: list[Answer]
    texts: list[str]  # of the answers, without the token that stopped them
    scores: Scores
    rollout_s: float

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
        return {
            "reward": float(np.mean(self.scores.total)),
            **{f"reward_{label}": float(np.mean(values)) for label, values in self.scores.values.items()},
            "answer_tokens": float(np.mean(lengths)),
            "truncated": float(1 - self.stopped.mean()),
            "reward_errors": sum(self.scores.errors.values()),
        }


class Asker:
    """Asks the model in training. Every process calls it with the same arguments and gets all answers and scores."""

    def __init__(
        self, cfg: Config, corpus: PromptCorpus, program: Program, mesh: Mesh, scorer: Scorer, watchdog: Watchdog
    ):
        """Choose how many answers are drawn at one time: the device with the least memory decides for all processes."""
        assert isinstance(cfg.task, Grpo)
        self.mesh, self.vocabulary, self.scorer, self.watchdog = mesh, corpus.vocabulary, scorer, watchdog
        # The size of a wave is the shape of a program that all processes run together, so they must agree on it. If
        # one of them does not know its memory (None), as on CPUs, nothing limits the size but task.rollout_rows.
        known = [json.loads(text) for text in peers.gather(json.dumps(read_device_bytes()), "memory of a device")]
        self.rows_at_once = choose_rows(program, None if None in known else min(known))
        self.sampler = Sampler(program.arch, cfg.model.context_length, mesh)
        folder = None if cfg.model.init_from is None else find_model_files(cfg.model.init_from)
        self.stop = find_stop_ids(corpus.vocabulary, cfg.sampling.stop, folder)

    def ask(
        self,
        params: Any,
        prompts: list[Prompt],
        keys: SamplingKeys,
        group_size: int,
        seed: int,
        between_stretches: Callable[[], None] | None = None,
    ) -> Asked:
        """Draw `group_size` answers to each prompt with parameters at rest, and score them.

        `between_stretches` is called from time to time while answers are drawn (see `Sampler.rollout`), and once more
        before they are scored.
        """
        begun = time.perf_counter()
        request = Request([prompt.tokens for prompt in prompts], group_size, seed)
        how, at_once = choose_sampling(keys, self.stop), count_prompts_at_once(self.rows_at_once, group_size)
        answers = self.sampler.rollout(params, request, how, at_once, between_stretches)
        if between_stretches is not None:
            between_stretches()
        rollout_s = time.perf_counter() - begun
        texts = self.vocabulary.backend.decode_batch([answer.text_tokens for answer in answers])
        with self.watchdog.phase("scoring answers"):
            scores = score_together(self.scorer, prompts, texts, group_size)
        return Asked(prompts, answers, texts, scores, rollout_s)


def score_together(scorer: Scorer, prompts: list[Prompt], texts: list[str], group_size: int) -> Scores:
    """Score answers: each process scores those of its share of the prompts and gets the scores of all.

    `texts` are all answers to the first prompt, then all to the second, ... An error of one process is raised on all.
    """
    share = peers.share(len(prompts))
    own = [prompt for prompt in prompts[share.start : share.stop] for _ in range(group_size)]
    own_texts = texts[share.start * group_size : share.stop * group_size]

    def score() -> Scores:
        return scorer.score([prompt.text for prompt in own], own_texts, gather_columns(own), group_size)

    own_scores = peers.together(score, "scoring answers")
    return _join([Scores(**json.loads(text)) for text in peers.gather(json.dumps(asdict(own_scores)), "scores")])


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
