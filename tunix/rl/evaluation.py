"""Evaluation of completions: of held-out prompts in a run, and metric=reward of `python -m tunix.evaluate`."""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tunix.base.errors import Stopped, UserError
from tunix.base.files import describing_refusal, find_writable
from tunix.base.progress import announcing
from tunix.config import Config, Evaluate, Sampling, compose
from tunix.config.rewards import EngineTerm, FunctionTerm, JudgeTerm, ModelTerm, RewardTerm
from tunix.config.task import Grpo, Prompted
from tunix.data.files import Rows
from tunix.data.prompts import RIGHT, Prompt, PromptCorpus, load_prompts, load_together
from tunix.data.thoughts import split_thought
from tunix.data.tokenizer import Vocab, decode, special_tokens
from tunix.inference.engine import Answer
from tunix.inference.pretrained import describe_files, load_language_model, load_params, reject_nan
from tunix.inference.rollout import RolloutRequest, derive_seed
from tunix.inference.sampling import find_stop_ids
from tunix.processes import peers, watchdog
from tunix.rl.engine_rewards import EngineRewards
from tunix.rl.episodes import Drawn, Played, Player, join_played, make_pool, try_user_code
from tunix.rl.rollouts import RolloutEngine, draw_answers, score_together
from tunix.rl.scoring import Scorer
from tunix.rl.table import REWARDS
from tunix.rl.tool_parsers import choose_tool_calls, find_reader

log = logging.getLogger(__name__)

# Quality of answers: how many are right, how good and how long they are.

Numbers = dict[str, float]
# An answer: prompt, answer, thought, reward, reward_LABEL for each reward, num_tokens, stopped; `failed` where one of
# these rewards did not score it.
Row = dict[str, Any]


def summarise(rows: Sequence[Row], labels: Sequence[str], num_samples: int) -> Numbers:
    """Return means over answers, and pass@k for k = 2, 4, 8, ... up to the answers to each prompt.

    `rows` are all answers to the first prompt, then those to the second, and so on. An answer is right if the first
    reward gives it 1 or more.
    """

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows], float).reshape(-1, num_samples)

    reward = column("reward")
    best = {f"best_of_{num_samples}": float(reward.max(1).mean())} if num_samples > 1 else {}
    return {
        "reward": float(reward.mean()),
        **{f"reward_{label}": float(column(f"reward_{label}").mean()) for label in labels},
        **best,
        **count_right(column(f"reward_{labels[0]}")),
        "answer_tokens": float(column("num_tokens").mean()),
        "truncated": float(1 - column("stopped").mean()),
        "prompts": len(reward),
    }


def count_right(first_scores: np.ndarray) -> Numbers:
    """Return accuracy, and pass@k for k = 2, 4, 8, ... up to G, of scores [P, G] by the first reward."""
    right, num_samples = first_scores >= RIGHT, first_scores.shape[1]
    powers_of_two = [1 << n for n in range(1, num_samples.bit_length())]
    chances = {f"pass@{k}": estimate_pass(k, right.sum(1), num_samples) for k in powers_of_two}
    return {"accuracy": float(right.mean())} | chances


def estimate_pass(k: int, num_right: np.ndarray, num_samples: int) -> float:
    """Return the chance that one of k answers is right (Chen et al. 2021, arXiv:2107.03374).

    `num_right` [P] says how many of the `num_samples` answers to each prompt are right.
    """
    # The chance that none of k answers is right, drawn from the n without putting any back: of the C(n, k) choices,
    # C(n - right, k) have no right answer. With n = 4, 1 right, k = 2 it is 3 / 6. `comb` is 0 where k > n - right.
    chances = [1 - math.comb(num_samples - right, k) / math.comb(num_samples, k) for right in num_right.tolist()]
    return float(np.mean(chances))


# Held-out prompts, answered by the model in training.


class HeldOutAnswers:
    """Held-out prompts, the same at every evaluation; `evaluate` has them answered, and the answers scored."""

    def __init__(self, cfg: Config, corpus: PromptCorpus, engine: RolloutEngine):
        """Raises `UserError` where the answers do not fit behind the prompts."""
        self.cfg, self.engine = cfg, engine
        self.prompts = corpus.spread("held_out", cfg.evaluation.num_prompts)
        max_new_tokens, context = cfg.evaluation.sampling.max_new_tokens, cfg.model.context_length
        # In front of an episode there is room for a prompt with what `reset` says, whatever it says.
        max_length = max(len(each.tokens) for each in self.prompts) if engine.player is None else cfg.max_prompt_length
        if max_length + max_new_tokens > context:
            raise UserError(
                f"evaluation.sampling.max_new_tokens={max_new_tokens} behind a held-out prompt of {max_length} tokens "
                f"is more than model.context_length={context}; lower it to {context - max_length}"
            )

    def evaluate(self, params: Any) -> dict[str, float]:
        """Return mean scores of the answers by their names in metrics.jsonl, and the share of right ones.

        With several answers to each prompt, pass@k is the chance that one of k answers is right. Raises `Stopped` where
        the run is asked to stop while the answers are drawn.
        """
        size = self.cfg.evaluation.num_samples
        # The same noise at every evaluation: two evaluations differ by their parameters alone.
        seed = derive_seed(self.cfg.seed, "held_out")
        keys = self.cfg.evaluation.sampling
        rollouts = self.engine.ask(params, RolloutRequest(self.prompts, keys, size, seed, _stop_if_requested))
        return {
            **rollouts.numbers(),
            **count_right(rollouts.first_scores),
            "prompts": len(self.prompts),
            "rollout_s": rollouts.rollout_s,
        }

    def cost(self, record: dict[str, float]) -> float:
        """Return the number that is lowest for the best model: the reward, with its sign turned.

        It is no number where as many scores are missing as there are answers, as where one of two rewards fails for
        all: 0 stands for each, which would be the best of rewards below 0.
        """
        has_scores = record["reward_errors"] < record["prompts"] * self.cfg.evaluation.num_samples
        return -record["reward"] if has_scores else math.nan

    def describe(self, record: dict[str, float]) -> str:
        """Return the evaluation in a few words for the log."""
        failed = f", {record['reward_errors']} scores are missing" if record["reward_errors"] else ""
        return f"accuracy {record['accuracy']:.4f}, reward {record['reward']:.4f}{failed}"


def _stop_if_requested() -> None:
    if reason := watchdog.stop_requested():
        raise Stopped(f"{reason}: given up while held-out prompts were answered; resume answers them")


# Quality of a model's answers to the prompts of a split: metric=reward of `python -m tunix.evaluate`.

MAX_ANSWER = 128  # tokens, where neither the command nor the run says how many

# Answers are written when so many times batch_size of them are drawn and scored, so that a kill loses no more.
# Fewer would leave rows idle more often, behind the longest answers of each part.
ROUNDS = 16


def evaluate_answers(cmd: Evaluate, cfg: Config, checkpoints: list[str]) -> Iterator[Numbers]:
    """Draw answers to the prompts of the split, score them, and yield their quality for each checkpoint."""
    terms = _find_rewards(cmd, cfg)
    settings = _find_sampling(cmd, cfg)
    dtype, decoder = cfg.training.dtypes["compute"], cfg.model
    info = describe_files(checkpoints[0], decoder)
    model = load_language_model(checkpoints[0], dtype, decoder.mesh_shape, cmd.weights, **info, mtp=settings.by_mtp)
    max_length = model.cfg.context_length - settings.max_new_tokens
    corpus = load_together(lambda: _load_prompts(cmd, cfg, max_length))
    prompts = corpus.spread("held_out" if cmd.split == "held_out" else "train", cmd.num_prompts)
    if not prompts:
        raise UserError("no prompt is held out; split=all takes all of them")
    options = cfg.task.chat_template_kwargs
    stop = find_stop_ids(corpus.vocab, settings.stop, model.files, template_options=options)
    # Episodes are played where the run has an environment, or the command line names one.
    task = cfg.task if isinstance(cfg.task, Grpo) else None
    pool = None if task is None else make_pool(task, corpus.vocab, corpus.column_names)
    player = Player(pool, task, corpus.vocab, stop, max_length) if pool is not None and task is not None else None
    max_lengths = {"max_new_tokens": settings.max_new_tokens}
    engine_rewards = EngineRewards(terms, max_lengths, cmd.reward_errors, cmd.reward_timeout_s, cfg)
    in_processes = [term for term in terms if not isinstance(term, EngineTerm)]
    num_at_once = max(1, ROUNDS * cmd.batch_size // cmd.num_samples)
    keys = cmd.reward_processes, cmd.reward_timeout_s, cmd.reward_errors
    with (
        Scorer(in_processes, *keys, column_names=corpus.column_names) as scorer,
        jax.set_mesh(model.mesh),
        ExitStack() as files,
    ):
        # Rewards and the file of samples are tried before answers are drawn, which may take hours.
        if pool is not None:
            files.enter_context(pool)
        try_user_code(prompts[0], scorer, pool)
        files.callback(engine_rewards.close)
        engine_rewards.try_out(prompts[0], any(prompt.images is not None for prompt in prompts))
        if cmd.best is not None:
            _check_best(cmd, prompts, len(checkpoints), has_environment=pool is not None)
        paths = peers.on_main(lambda: _make_files(cmd), "making the files to write") or {}
        for checkpoint in checkpoints:
            # The model of the first checkpoint is loaded with its tokenizer; of the others only parameters are read.
            params = model.params
            if checkpoint != checkpoints[0]:
                params, _ = load_params(checkpoint, model.cfg, model.arch, model.layout, model.mesh, cmd.weights)
            rows: list[Row] = []
            counts: Numbers = {} if cmd.best is None else {"best_rows": 0}
            played: list[Played] = []
            for start in range(0, len(prompts), num_at_once):
                asked = prompts[start : start + num_at_once]
                request = RolloutRequest(asked, settings, cmd.num_samples, cfg.seed, first_prompt=start)
                work = f"answering prompts {start + 1:,} to {start + len(asked):,} of {len(prompts):,}"
                with announcing(work, peers.print_progress):
                    drawn = draw_answers(model.sampler, params, request, cmd.batch_size, stop, corpus.vocab, player)
                log_probs = (answer.log_probabilities for answer in drawn.answers)
                reject_nan(log_probs, checkpoint, "training.mixed_precision=fp32")
                new_rows, new_counts = _make_rows(cmd, asked, drawn, scorer, engine_rewards, settings.max_new_tokens)
                rows += new_rows
                counts |= {name: counts.get(name, 0) + number for name, number in new_counts.items()}
                if drawn.played is not None:
                    played.append(drawn.played)
                if "samples" in paths:
                    _add_lines("samples", paths["samples"], ({"checkpoint": checkpoint, **row} for row in new_rows))
                if cmd.best is not None:
                    plain = _find_plain(corpus.vocab, drawn.answers)
                    chosen = select_best(asked, new_rows, cmd.num_samples, cmd.best_from, plain)
                    counts["best_rows"] += len(chosen)
                    if "best" in paths:
                        _add_lines("best", paths["best"], chosen)
            if played:
                counts |= join_played(played).numbers()
            labels = [name.removeprefix("reward_") for name in rows[0] if name.startswith("reward_")]
            numbers = summarise(rows, labels, cmd.num_samples)
            # metric=gsm8k is also reported under its own name, beside `reward`.
            alone = {cmd.metric: numbers[f"reward_{cmd.metric}"]} if cmd.metric in REWARDS else {}
            yield alone | numbers | counts


def _make_rows(
    cmd: Evaluate, prompts: list[Prompt], drawn: Drawn, scorer: Scorer, engine_rewards: EngineRewards, max_length: int
) -> tuple[list[Row], Numbers]:
    """Score the answers; return a row for each, those to the first prompt first, and counts: of missing scores, and
    what a judge has cost."""
    rows: list[Row] = []
    count = cmd.num_samples
    counts: Numbers = {}
    # In batches, because reward_timeout_s is the time that a reward has for one batch.
    size = max(1, cmd.batch_size // count)
    for start in range(0, len(prompts), size):
        batch, part = prompts[start : start + size], slice(start * count, (start + size) * count)
        answered = drawn.part(part)
        episodes = None if answered.played is None else answered.played.episodes
        scores = engine_rewards.add(score_together(scorer, batch, answered, count), batch, answered, max_length)
        for name, number in {"reward_errors": sum(scores.errors.values()), **scores.numbers}.items():
            counts[name] = counts.get(name, 0) + number
        for number, (text, answer) in enumerate(zip(answered.texts, answered.answers, strict=True)):
            rows.append(
                {
                    "prompt": batch[number // count].text,
                    "answer": text,
                    **({"thought": answered.thoughts[number]} if any(answered.thoughts[number : number + 1]) else {}),
                    "reward": scores.total[number],
                    **{f"reward_{label}": values[number] for label, values in scores.values.items()},
                    # What an environment says is no part of the answer.
                    "num_tokens": len(answer.tokens) if episodes is None else sum(episodes[number].learnt),
                    "stopped": answer.stopped,
                    **({"failed": True} if scores.failed[number] else {}),
                    **({} if episodes is None else {"turns": episodes[number].transcript}),
                }
            )
    return rows, counts


def _find_plain(vocab: Vocab, answers: Sequence[Answer]) -> list[bool]:
    """Return for each answer whether its text, and that of its thought, is all of it: text drops special tokens, and
    with them what marks a call."""
    special, read = special_tokens(vocab.backend), find_reader(choose_tool_calls(vocab.chat_template or ""))
    plain = []
    for answer in answers:
        parts = [token for part in split_thought(vocab.backend, answer.text_tokens) for token in part]
        has_marks = len(parts) < len(answer.text_tokens)
        calls = has_marks and read(decode(vocab.backend, answer.text_tokens, skip_special_tokens=False))
        plain.append(special.isdisjoint(parts) and not calls)
    if num_marked := plain.count(False):
        log.warning("best: %d answers are left out, whose special tokens a row of task=sft would not have", num_marked)
    return plain


def select_best(
    prompts: Sequence[Prompt], rows: Sequence[Row], num_samples: int, least: float | None, plain: Sequence[bool]
) -> list[Row]:
    """Return for each prompt the conversation with its best answer, as task=sft reads it; the first of equal ones.

    Answers that were cut, that a reward did not score, that have a lower reward than `least`, or that are not `plain`
    text are left out. `rows` are in the order of the prompts.
    """
    chosen = []
    for number, prompt in enumerate(prompts):
        row_numbers = range(number * num_samples, (number + 1) * num_samples)
        whole = [rows[n] for n in row_numbers if rows[n]["stopped"] and plain[n] and "failed" not in rows[n]]
        whole = [row for row in whole if least is None or row["reward"] >= least]
        if not whole or prompt.question is None:
            continue
        row = max(whole, key=lambda row: row["reward"])
        thought = {"reasoning_content": row["thought"]} if "thought" in row else {}
        messages = [*prompt.question.messages, {"role": "assistant", "content": row["answer"], **thought}]
        tools = {key: value for key, value in prompt.question.options.items() if key == "tools"}
        chosen.append({"messages": messages, **tools, "reward": row["reward"]})
    return chosen


def _check_best(cmd: Evaluate, prompts: Sequence[Prompt], num_checkpoints: int, has_environment: bool) -> None:
    """Raise `UserError` where the best answers are no rows of task=sft."""
    reason = ""
    if num_checkpoints > 1:
        reason = f"one checkpoint answers, and step names {num_checkpoints}; name one step"
    elif has_environment:
        reason = "an answer is one turn, and task.environment makes episodes; set task.environment=null"
    elif any(prompt.images is not None for prompt in prompts):
        reason = "rows have texts alone, and these prompts have images; set data.columns.images=null"
    if reason:
        raise UserError(f"best={cmd.best}: {reason}")


def _make_files(cmd: Evaluate) -> dict[str, Path]:
    """Make the files of samples and of best answers empty, as far as the command names them; return them by key."""
    names = {key: value for key in ("samples", "best") if (value := getattr(cmd, key)) is not None}
    paths = {key: find_writable(key, name) for key, name in names.items()}
    for path in paths.values():
        path.open("w").close()
    return paths


def _add_lines(key: str, path: Path, rows: Iterable[Row]) -> None:
    with describing_refusal(f"{key}={path}"), path.open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def _find_rewards(cmd: Evaluate, cfg: Config) -> tuple[RewardTerm, ...]:
    """Return the rewards that the command names, or those of the run."""
    if cmd.metric != "reward":
        return (FunctionTerm(function=cmd.metric, weight=1.0, name=None),)
    if cmd.rewards is not None:
        has_environment = isinstance(cfg.task, Prompted) and cfg.task.has_environment
        if has_environment and any(isinstance(term, ModelTerm | JudgeTerm) for term in cmd.rewards):
            raise UserError(
                "rewards: a model or a judge scores one answer, and task.environment makes episodes; leave it out, or "
                "set task.environment=null"
            )
        return cmd.rewards
    if not isinstance(cfg.task, Grpo):
        raise UserError(f"metric=reward: task={cfg.task.name} has no rewards; name them: rewards=[gsm8k,format]")
    if not cfg.task.is_rewarded:  # it learns from a teacher alone
        raise UserError(
            "metric=reward: nothing scores answers (task.rewards=[]); name some: task.rewards=[gsm8k,format]"
        )
    return cfg.task.rewards


def _load_prompts(cmd: Evaluate, cfg: Config, max_length: int) -> PromptCorpus:
    """Read the questions of conversations, whatever the task of the run is."""
    if not all(isinstance(source, Rows) for source in cfg.sources.values()):
        raise UserError(
            f"metric={cmd.metric} asks the questions of conversations, and data={cfg.data.source} has none; give rows, "
            "like data=jsonl, csv, parquet or hf, and data.columns"
        )
    system = cmd.system or (cfg.task.system if isinstance(cfg.task, Prompted) else None)
    # The run may be one of pretraining: its data are then read as a task with prompts reads them.
    task: Prompted
    if isinstance(cfg.task, Prompted):
        task = cfg.task.model_copy(update={"system": system})
    else:
        names = "name", "chat_template", "chat_template_kwargs"
        task = Prompted(**{name: getattr(cfg.task, name) for name in names}, loss=None, system=system)
    return load_prompts(cfg.model_copy(update={"task": task}), max_length)


def is_sampling(word: str) -> bool:
    """Return whether a word of the command line sets a key of `sampling`.

    In this command these keys say how the answers of the evaluation are drawn, not those of a rollout.
    """
    return word.split("=")[0].partition(".")[0] == "sampling"


def _find_sampling(cmd: Evaluate, cfg: Config) -> Sampling:
    """Return how answers are drawn: as the command says, else as the run's evaluation does."""
    overrides = [word for word in cmd.overrides if is_sampling(word)]
    settings = cfg.evaluation.sampling
    if overrides:
        preset = [] if any(word.startswith("sampling=") for word in overrides) else ["sampling=greedy"]
        chosen = compose.compose([*preset, *overrides]).config.sampling
        # Where a turn and an answer end is a choice of its own, which the presets leave out.
        named = {word.split("=")[0] for word in overrides}
        kept = {key: getattr(settings, key) for key in ("stop", "max_turn_tokens") if f"sampling.{key}" not in named}
        settings = chosen.model_copy(update=kept)
    max_length = cfg.evaluation.sampling.max_new_tokens if isinstance(cfg.task, Grpo) else MAX_ANSWER
    changed: dict[str, Any] = {"max_new_tokens": cmd.max_new_tokens or max_length}
    if cmd.temperature is not None:
        changed["temperature"] = cmd.temperature
    settings = settings.model_copy(update=changed)
    if cmd.num_samples > 1 and settings.temperature == 0:
        raise UserError(
            f"num_samples={cmd.num_samples} answers are all the same at temperature=0; raise it, or set "
            "sampling=standard"
        )
    return settings
