"""Quality of a model's answers to the prompts of a split: metric=reward of `python -m tunix.evaluate`."""

import json
from contextlib import ExitStack
from typing import Any, TextIO

import jax

from tunix.base.disk import find_writable
from tunix.base.errors import UserError
from tunix.cli import compose
from tunix.config import Config, Evaluate, Sampling
from tunix.config.data import Mixture
from tunix.config.rewards import RewardTerm
from tunix.config.task import Grpo, Prompted
from tunix.data.prompts import Prompt, PromptCorpus, load_prompts
from tunix.inference.answers import Answer
from tunix.inference.drawing import choose_sampling
from tunix.inference.pretrained import describe_files, load_params, load_pretrained
from tunix.inference.requests import Request
from tunix.inference.stops import find_stop_ids
from tunix.processes import peers
from tunix.rewards import REWARDS
from tunix.rl.asking import score_together
from tunix.rl.quality import Numbers, Row, summarise
from tunix.rl.scoring import Scorer
from tunix.sources import Rows
from tunix.tokenizer.vocabulary import Vocabulary

LONGEST_ANSWER = 128  # tokens, where neither the command nor the run says how many


def measure_answers(cmd: Evaluate, cfg: Config, checkpoints: list[str]) -> list[Numbers]:
    """Draw answers to the prompts of the split, score them, and return their quality for each checkpoint."""
    terms = _find_rewards(cmd, cfg)
    how = _find_sampling(cmd, cfg)
    dtype, decoder = cfg.training.dtypes["compute"], cfg.model
    about = describe_files(checkpoints[0], decoder)
    model = load_pretrained(checkpoints[0], dtype, decoder.mesh_shape, cmd.weights, **about)
    longest = model.cfg.context_length - how.max_new_tokens
    corpus = peers.main_first(lambda: _load_prompts(cmd, cfg, longest), "preparing the data")
    prompts = corpus.spread("held_out" if cmd.split == "held_out" else "train", cmd.num_prompts)
    if not prompts:
        raise UserError("no prompt is held out; split=all takes all of them")
    stop = find_stop_ids(corpus.vocabulary, how.stop, model.files)
    sampling = choose_sampling(how, stop)
    measured: list[Numbers] = []
    with (
        Scorer(terms, cmd.reward_processes, cmd.reward_timeout_s, cmd.reward_errors) as scorer,
        jax.set_mesh(model.mesh),
        ExitStack() as files,
    ):
        # Rewards and the file of samples are tried before answers are drawn, which may take hours.
        scorer.try_out(prompts[0].text, prompts[0].columns)
        samples = peers.on_main(lambda: _open_samples(cmd, files), "opening the file of samples")
        for checkpoint in checkpoints:
            # The model of the first checkpoint is loaded with its tokenizer; of the others only parameters are read.
            params = model.params
            if checkpoint != checkpoints[0]:
                params, _ = load_params(checkpoint, model.cfg, model.arch, model.layout, model.mesh, cmd.weights)
            request = Request([prompt.tokens for prompt in prompts], cmd.num_samples, cfg.seed)
            answers = model.sampler.rollout(params, request, sampling, max(1, cmd.batch_size // cmd.num_samples))
            rows, num_errors = _make_rows(cmd, prompts, answers, corpus.vocabulary, scorer)
            if samples is not None:
                lines = (json.dumps({"checkpoint": checkpoint, **row}, ensure_ascii=False) for row in rows)
                samples.writelines(f"{line}\n" for line in lines)
            numbers = summarise(rows, [term.label for term in terms], cmd.num_samples)
            # metric=gsm8k is also reported under its own name, beside `reward`.
            alone = {cmd.metric: numbers["reward"]} if cmd.metric in REWARDS else {}
            measured.append(alone | numbers | {"reward_errors": num_errors})
    return measured


def _make_rows(
    cmd: Evaluate, prompts: list[Prompt], answers: list[Answer], vocabulary: Vocabulary, scorer: Scorer
) -> tuple[list[Row], int]:
    """Score the answers; return a row for each, those to the first prompt first, and the number of missing scores."""
    rows: list[Row] = []
    num_errors = 0
    texts = [vocabulary.backend.decode(answer.text_tokens) for answer in answers]
    count = cmd.num_samples
    # In batches, because reward_timeout_s is the time that a reward has for one batch.
    size = max(1, cmd.batch_size // count)
    for start in range(0, len(prompts), size):
        asked, part = prompts[start : start + size], slice(start * count, (start + size) * count)
        scores = score_together(scorer, asked, texts[part], count)
        num_errors += sum(scores.errors.values())
        for number, (text, answer) in enumerate(zip(texts[part], answers[part], strict=True)):
            rows.append(
                {
                    "prompt": asked[number // count].text,
                    "answer": text,
                    "reward": scores.total[number],
                    **{f"reward_{label}": values[number] for label, values in scores.values.items()},
                    "num_tokens": len(answer.tokens),
                    "stopped": answer.stopped,
                }
            )
    return rows, num_errors


def _open_samples(cmd: Evaluate, files: ExitStack) -> TextIO | None:
    return files.enter_context(find_writable("samples", cmd.samples).open("w")) if cmd.samples else None


def _find_rewards(cmd: Evaluate, cfg: Config) -> tuple[RewardTerm, ...]:
    """Return the rewards that the command names, or those of the run."""
    if cmd.metric != "reward":
        return (RewardTerm(function=cmd.metric, weight=1.0),)
    if cmd.rewards is not None:
        return cmd.rewards
    if not isinstance(cfg.task, Grpo):
        raise UserError(f"metric=reward: task={cfg.task.name} has no rewards; name them: rewards=[gsm8k,format]")
    return cfg.task.rewards


def _load_prompts(cmd: Evaluate, cfg: Config, longest: int) -> PromptCorpus:
    """Read the questions of conversations, whatever the task of the run is."""
    sources = cfg.data.parts.values() if isinstance(cfg.data, Mixture) else [cfg.data]
    if not all(isinstance(source, Rows) for source in sources):
        raise UserError(
            f"metric={cmd.metric} asks the questions of conversations, and data={cfg.data.source} has none; give rows, "
            "like data=jsonl, csv, parquet or hf, and data.columns"
        )
    system = cmd.system or (cfg.task.system if isinstance(cfg.task, Prompted) else None)
    # The run may be one of pretraining: its data are then read as a task with prompts reads them.
    task = Prompted(name=cfg.task.name, chat_template=cfg.task.chat_template, loss=None, system=system)
    return load_prompts(cfg.model_copy(update={"task": task}), longest)


def is_sampling(word: str) -> bool:
    """Return whether a word of the command line sets a key of `sampling`.

    In this command these keys say how the answers of the evaluation are drawn, not those of a rollout.
    """
    return word.split("=")[0].partition(".")[0] == "sampling"


def _find_sampling(cmd: Evaluate, cfg: Config) -> Sampling:
    """Return how answers are drawn: as the command says, else as the run's evaluation does."""
    words = [word for word in cmd.overrides if is_sampling(word)]
    # One length in two places would leave open which one counts.
    if given := next((word for word in words if word.startswith("sampling.max_new_tokens=")), None):
        raise UserError(f"{given}: this command has the key max_new_tokens for it")
    how = cfg.evaluation.sampling
    if words:
        preset = [] if any(word.startswith("sampling=") for word in words) else ["sampling=greedy"]
        how = compose.compose([*preset, *words]).config.sampling
    longest = cfg.evaluation.sampling.max_new_tokens if isinstance(cfg.task, Grpo) else LONGEST_ANSWER
    changed: dict[str, Any] = {"max_new_tokens": cmd.max_new_tokens or longest}
    if cmd.temperature is not None:
        changed["temperature"] = cmd.temperature
    how = how.model_copy(update=changed)
    if cmd.num_samples > 1 and how.temperature == 0:
        raise UserError(
            f"num_samples={cmd.num_samples} answers are all the same at temperature=0; raise it, or set "
            "sampling=standard"
        )
    return how
