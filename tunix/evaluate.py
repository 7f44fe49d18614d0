"""Measure a trained model: `python -m tunix.evaluate checkpoint=RUN_DIR|HF_DIR [data=...] [key=value]`."""

import json
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path

import grain
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from tunix.base.errors import UserError
from tunix.cli import command, compose
from tunix.config import Config, Evaluate
from tunix.config.data import Mixture
from tunix.data.corpus import load_corpus, prepare_corpus
from tunix.data.questions import Question, cut_questions
from tunix.generate import find_stop_ids
from tunix.hf.hub import find
from tunix.inference.pretrained import load_params, load_pretrained
from tunix.inference.sampling import Sampling
from tunix.rewards import REWARDS, find_reward
from tunix.run.run_folder import TOKENIZER
from tunix.tokenizer.vocabulary import Vocabulary, special_tokens
from tunix.training.held_out import HeldOut
from tunix.training.program import build_layout, build_mesh
from tunix.training.state import describe

log = logging.getLogger(__name__)
Numbers = dict[str, float]


def evaluate(cmd: Evaluate) -> None:
    """Print a table of what was measured, and write it to `cmd.output`."""
    output = Path(cmd.output).expanduser()
    if not output.absolute().parent.is_dir():
        raise UserError(f"output={output}: there is no folder {output.parent}")
    if output.is_dir():
        raise UserError(f"output={output} is a folder; name a file to write")
    cfg = _config(cmd)
    measure = METRICS.get(cmd.metric, measure_answers)  # a dotted path is a reward
    numbers = measure(cmd, cfg if cmd.split == "held_out" else _without_split(cfg))
    about = {"checkpoint": cmd.checkpoint, "data": cfg.data.source, "split": cmd.split}
    output.write_text(json.dumps(about | numbers, indent=2) + "\n")
    table = Table(*about, *numbers)
    cells = (f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" for value in numbers.values())
    table.add_row(*about.values(), *cells)
    Console().print(table)


def _config(cmd: Evaluate) -> Config:
    """The run's or the model's config, on the tokenizer that it was trained with."""
    run = compose.find_run(cmd.checkpoint)
    if given := next((word for word in cmd.overrides if run and word.lstrip("+").startswith("tokenizer")), None):
        raise UserError(f"{given}: a run is measured with the tokenizer that it was trained with; leave it out")
    origin = f"resume={cmd.checkpoint}" if run else f"model.init_from={find(cmd.checkpoint, key='checkpoint')}"
    cfg = compose.compose([origin, *cmd.overrides]).config
    if cfg.training.micro_batch_size == "auto":  # what a run has chosen fits where it ran
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"micro_batch_size": 1})})
    own = {"path": str(run[0] / TOKENIZER), "train": False} if run else {"train": False}
    return cfg.model_copy(update={"tokenizer": cfg.tokenizer.model_copy(update=own)})


def measure_loss(cmd: Evaluate, cfg: Config) -> Numbers:
    """Measure the held-out loss as a run with this config does: on the same sequences, mesh and dtypes."""
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        layout = build_layout(cfg, mesh)
        arch = describe(cfg.model, layout, cfg.training.remat)
        params, _ = load_params(cmd.checkpoint, cfg.model, arch, layout, mesh, cmd.weights)
        corpus = load_corpus(cfg)
        if cmd.split == "all":
            everything = [grain.MapDataset.source(each) for each in corpus.train.values()]
            corpus = replace(corpus, held_out=grain.MapDataset.concatenate(everything))
        elif corpus.num_held_out == 0:
            raise UserError("data.held_out_fraction=0 holds out nothing; split=all measures all documents")
        return HeldOut(cfg, corpus, arch, mesh).evaluate(params)


def measure_answers(cmd: Evaluate, cfg: Config) -> Numbers:
    """Return the mean reward of drawn answers to the last questions of conversations; for exact_match also pass@k."""
    if cfg.task.documents != "conversation":
        raise UserError(f"metric={cmd.metric} asks the questions of conversations; set task=sft and the data's columns")
    reward = find_reward(cmd.metric)
    model = load_pretrained(cmd.checkpoint, cfg.training.dtypes["compute"], cfg.model.mesh_shape, cmd.weights)
    questions, vocabulary = _questions(cmd, cfg)
    special = special_tokens(vocabulary.backend)
    ends = {vocabulary.eos, *find_stop_ids(model)} | {
        word for each in questions for word in each.answer if word in special
    }
    how = Sampling(cmd.max_new_tokens, cmd.temperature, stop=tuple(sorted(ends)))

    def text(tokens: list[int]) -> str:
        return vocabulary.backend.decode(tokens).strip()

    rewards = np.zeros((len(questions), cmd.num_samples))
    at_once = max(1, cmd.batch_size // cmd.num_samples)
    prompts = [each.prompt for each in questions]
    answers = model.sample(prompts, how, cfg.seed, answers_per_prompt=cmd.num_samples, prompts_at_once=at_once)
    for n, given in enumerate(answers):
        row, sample = divmod(n, cmd.num_samples)
        rewards[row, sample] = reward(text(given.tokens), text(questions[row].answer))
    if cmd.metric != "exact_match":
        best = {f"best_of_{cmd.num_samples}": float(rewards.max(1).mean())} if cmd.num_samples > 1 else {}
        return {"reward": float(rewards.mean()), **best, "prompts": len(questions)}
    correct = rewards.sum(1).astype(int)
    chances = {f"pass@{k}": _pass_at(k, correct, cmd.num_samples) for k in _powers(cmd.num_samples)}
    return {"exact_match": chances.pop("pass@1"), **chances, "prompts": len(questions)}


def _pass_at(k: int, correct: np.ndarray, num_samples: int) -> float:
    """Chance that one of k answers is right, from `num_samples` of each (Chen et al. 2021, arXiv:2107.03374)."""
    return float(np.mean([1 - math.comb(num_samples - c, k) / math.comb(num_samples, k) for c in correct.tolist()]))


def _powers(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length())]


def _questions(cmd: Evaluate, cfg: Config) -> tuple[list[Question], Vocabulary]:
    """At most `cmd.num_prompts` conversations, spread evenly over those of the split."""
    prepared, vocabulary = prepare_corpus(cfg)
    streams = [each.stream("held_out" if cmd.split == "held_out" else "train") for each in prepared.values()]
    found = [
        question
        for stream in streams
        for number in range(len(stream.sizes))
        for question in cut_questions(stream.shard(number))
    ]
    if without := sum(stream.num_documents for stream in streams) - len(found):
        log.warning("left out: %d conversations with no token of an answer", without)
    if not found:
        raise UserError("no conversation with an answer is held out; split=all asks all of them")
    count = min(cmd.num_prompts, len(found))
    return [found[index * len(found) // count] for index in range(count)], vocabulary


def _without_split(cfg: Config) -> Config:
    """The config with no document held out, so that the other split has them all."""
    nothing = {"held_out_fraction": 0.0}
    if isinstance(cfg.data, Mixture):
        parts = {name: part.model_copy(update=nothing) for name, part in cfg.data.parts.items()}
        return cfg.model_copy(update={"data": cfg.data.model_copy(update={"parts": parts})})
    return cfg.model_copy(update={"data": cfg.data.model_copy(update=nothing)})


METRICS = {"loss": measure_loss, **dict.fromkeys(REWARDS, measure_answers)}

if __name__ == "__main__":
    sys.exit(command.run_command(Evaluate, evaluate))
