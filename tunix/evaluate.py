"""Measure a trained model: `python -m tunix.evaluate checkpoint=RUN_DIR|HF_DIR [data=...] [key=value]`."""

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import grain
import jax
from jax.sharding import Mesh
from rich.table import Table

from tunix.base.errors import UserError
from tunix.base.tables import print_table
from tunix.cli import command, compose
from tunix.cli.runs import find_checkpoints, find_run
from tunix.config import Config, Evaluate
from tunix.config import Sampling as SamplingKeys
from tunix.config.data import Mixture
from tunix.config.rewards import RewardTerm
from tunix.config.task import Dpo, Grpo, Prompted
from tunix.data.corpus import Corpus, load_corpus
from tunix.data.prompts import Prompt, PromptCorpus, load_prompts
from tunix.hf.hub import find
from tunix.inference.drawing import choose_sampling
from tunix.inference.harness import ask_tasks
from tunix.inference.pretrained import load_params, load_pretrained
from tunix.inference.sampling import Answer
from tunix.inference.stops import chat_stop_ids
from tunix.processes import peers
from tunix.rewards import REWARDS
from tunix.rl.asking import score_together
from tunix.rl.pair_reference import add_reference
from tunix.rl.quality import Numbers, Row, summarise
from tunix.rl.scoring import Scorer
from tunix.run.run_folder import TOKENIZER
from tunix.sources import Rows
from tunix.tokenizer.vocabulary import Vocabulary
from tunix.training.held_out import HeldOut
from tunix.training.program import assemble, build_layout, build_mesh
from tunix.training.state import Architecture, describe

LONGEST_ANSWER = 128  # tokens, where neither the command nor the run says how many


def evaluate(cmd: Evaluate) -> None:
    """Print a table of what was measured, a line for each checkpoint, and write it to `cmd.output`.

    Several processes measure together, as they train together; process 0 writes.
    """
    output = peers.on_main(lambda: _writable("output", cmd.output), "checking output")
    steps = _list_steps(cmd)
    cfg = peers.main_first(lambda: _config(cmd), "reading the config")
    split = cfg if cmd.split == "held_out" else _without_split(cfg)
    measure = {"loss": measure_loss, "lm_eval": measure_tasks}.get(cmd.metric, measure_answers)
    measured = measure(cmd, split, list(steps.values()))
    if output is None:
        return
    about = {"checkpoint": cmd.checkpoint, "data": cfg.data.source, "split": cmd.split}
    rows = [({} if step is None else {"step": step}) | row for step, row in zip(steps, measured, strict=True)]
    content = about | rows[0] if not isinstance(cmd.step, tuple) and cmd.step != "all" else about | {"steps": rows}
    output.write_text(json.dumps(content, indent=2) + "\n")
    names = [name for name in rows[0] if name != "sets"]
    table = Table(*about, *names)
    for row in rows:
        step = {"step": row["step"]} if "step" in row else {}
        splits = {cmd.split: row} | {name: step | numbers for name, numbers in row.get("sets", {}).items()}
        for split, numbers in splits.items():
            table.add_row(*(about | {"split": split}).values(), *(_format(numbers.get(name)) for name in names))
    print_table(table)


def _format(value: float | int | None) -> str:
    return "" if value is None else f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"


def _writable(key: str, name: str) -> Path:
    """Return the path of a file to write; raises `UserError` where there can be none."""
    path = Path(name).expanduser()
    if not path.absolute().parent.is_dir():
        raise UserError(f"{key}={path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{key}={path} is a folder; name a file to write")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"{key}={path} is write-protected; name another file")
    return path


def _list_steps(cmd: Evaluate) -> dict[int | None, str]:
    """Return the checkpoints to measure, as the key `checkpoint` names them, by their steps.

    Raises:
        UserError: steps of what is no run, or of a run that has no such checkpoints.
    """
    if cmd.step is None:
        return {None: cmd.checkpoint}
    run = find_run(cmd.checkpoint)
    if run is None or run[1] is not None:
        what = "is no run of tunix" if run is None else "is one checkpoint"
        raise UserError(f"step={cmd.step}: checkpoint={cmd.checkpoint} {what}; give the folder of a run")
    choice = (cmd.step,) if isinstance(cmd.step, int) else cmd.step
    return dict(find_checkpoints(run[0], choice, f"step={cmd.step}"))


def _config(cmd: Evaluate) -> Config:
    """The run's or the model's config, on the tokenizer that it was trained with."""
    run = find_run(cmd.checkpoint)
    if given := next((word for word in cmd.overrides if run and word.lstrip("+").startswith("tokenizer")), None):
        raise UserError(f"{given}: a run is measured with the tokenizer that it was trained with; leave it out")
    origin = f"resume={cmd.checkpoint}" if run else f"model.init_from={find(cmd.checkpoint, key='checkpoint')}"
    cfg = compose.compose([origin, *(word for word in cmd.overrides if not _is_sampling(word))]).config
    if cfg.training.micro_batch_size == "auto":  # what a run has chosen fits where it ran
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"micro_batch_size": 1})})
    # An evaluation has no stages of the batch, which perhaps do not fit its devices.
    cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"batch_stages": ()})})
    if cfg.training.remat == "budget":  # nothing goes backward here
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"remat": "full"})})
    own = {"path": str(run[0] / TOKENIZER), "train": False} if run else {"train": False}
    return cfg.model_copy(update={"tokenizer": cfg.tokenizer.model_copy(update=own)})


def _is_sampling(word: str) -> bool:
    """Return whether a word says how answers are drawn: here it is about evaluation, and not about a rollout."""
    return word.split("=")[0].partition(".")[0] == "sampling"


def _find_sampling(cmd: Evaluate, cfg: Config) -> SamplingKeys:
    """Return how answers are drawn: as the command says, else as the run's evaluation does."""
    words = [word for word in cmd.overrides if _is_sampling(word)]
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


def measure_loss(cmd: Evaluate, cfg: Config, checkpoints: list[str]) -> list[dict[str, Any]]:
    """Measure the held-out loss as a run with this config does: on the same sequences, mesh and dtypes.

    The numbers of evaluation.sets stand under `sets`, by name.
    """
    if cfg.task.documents == "prompt":
        raise UserError(f"metric=loss: task={cfg.task.name} has no loss on held-out answers; set metric=reward")
    if words := [word for word in cmd.overrides if _is_sampling(word)]:
        raise UserError(f"{words[0]}: metric=loss draws no answers; set metric=reward")
    mesh = build_mesh(cfg)
    measured: list[dict[str, Any]]
    with jax.set_mesh(mesh):
        layout = build_layout(cfg, mesh)
        arch = describe(cfg.model, layout)
        held_out: HeldOut | None = None
        sets: dict[str, HeldOut] = {}
        measured = []
        for checkpoint in checkpoints:
            params, _ = load_params(checkpoint, cfg.model, arch, layout, mesh, cmd.weights)
            # After the first weights: the data may take long, and weights that are not there are found in a second.
            if held_out is None:
                held_out, sets = _load_held_out(cmd, cfg, arch, mesh)
            numbers = held_out.evaluate(params)
            labelled = {name: each.evaluate(params) for name, each in sets.items()}
            measured.append(numbers | ({"sets": labelled} if labelled else {}))
    return measured


def _load_held_out(cmd: Evaluate, cfg: Config, arch: Architecture, mesh: Mesh) -> tuple[HeldOut, dict[str, HeldOut]]:
    """The documents of the split on the devices, and evaluation.sets by name.

    Pairs of answers come with their scores by the model of step 0.
    """
    corpus = peers.main_first(lambda: _load_documents(cmd, cfg), "preparing the data")
    if isinstance(cfg.task, Dpo):
        add_reference(cfg, corpus, assemble(cfg, mesh), mesh)
    return HeldOut(cfg, corpus, arch, mesh), {name: HeldOut(cfg, corpus, arch, mesh, name) for name in corpus.sets}


def _load_documents(cmd: Evaluate, cfg: Config) -> Corpus:
    """The corpus with the documents of the split as those that are held out."""
    corpus = load_corpus(cfg)
    if cmd.split == "all":
        everything = [grain.MapDataset.source(each) for each in corpus.train.values()]
        return replace(corpus, held_out=grain.MapDataset.concatenate(everything))
    if corpus.num_held_out == 0:
        raise UserError("data.held_out_fraction=0 holds out nothing; split=all measures all documents")
    return corpus


def measure_tasks(cmd: Evaluate, cfg: Config, checkpoints: list[str]) -> list[Numbers]:
    """Ask the tasks of EleutherAI's harness; return their numbers as TASK/METRIC for each checkpoint."""
    measured = []
    for checkpoint in checkpoints:
        model = load_pretrained(checkpoint, cfg.training.dtypes["compute"], cfg.model.mesh_shape, cmd.weights)
        measured.append(ask_tasks(model, cmd))
    return measured


def measure_answers(cmd: Evaluate, cfg: Config, checkpoints: list[str]) -> list[Numbers]:
    """Draw answers to the prompts of the split, score them, and return their quality for each checkpoint."""
    terms = _find_rewards(cmd, cfg)
    how = _find_sampling(cmd, cfg)
    model = load_pretrained(checkpoints[0], cfg.training.dtypes["compute"], cfg.model.mesh_shape, cmd.weights)
    longest = model.cfg.context_length - how.max_new_tokens
    corpus = peers.main_first(lambda: _load_prompts(cmd, cfg, longest), "preparing the data")
    prompts = corpus.spread("held_out" if cmd.split == "held_out" else "train", cmd.num_prompts)
    if not prompts:
        raise UserError("no prompt is held out; split=all takes all of them")
    stop = chat_stop_ids(corpus.vocabulary, how.stop, model.files)
    sampling = choose_sampling(how, stop)
    measured: list[Numbers] = []
    with (
        Scorer(terms, cmd.reward_processes, cmd.reward_timeout_s, cmd.reward_errors) as scorer,
        jax.set_mesh(model.mesh),
        ExitStack() as files,
    ):
        scorer.try_out(prompts[0].text, prompts[0].columns)
        samples = peers.on_main(lambda: _open_samples(cmd, files), "opening the file of samples")
        for checkpoint in checkpoints:
            params = model.params
            if checkpoint != checkpoints[0]:
                params, _ = load_params(checkpoint, model.cfg, model.arch, model.layout, model.mesh, cmd.weights)
            answers = model.sampler.rollout(
                params,
                [prompt.tokens for prompt in prompts],
                sampling,
                cfg.seed,
                answers_per_prompt=cmd.num_samples,
                prompts_at_once=max(1, cmd.batch_size // cmd.num_samples),
            )
            rows, num_errors = _score(cmd, prompts, answers, corpus.vocabulary, scorer)
            if samples is not None:
                lines = (json.dumps({"checkpoint": checkpoint, **row}, ensure_ascii=False) for row in rows)
                samples.writelines(f"{line}\n" for line in lines)
            numbers = summarise(rows, [term.label for term in terms], cmd.num_samples)
            alone = {cmd.metric: numbers["reward"]} if cmd.metric in REWARDS else {}
            measured.append(alone | numbers | {"reward_errors": num_errors})
    return measured


def _score(
    cmd: Evaluate, prompts: list[Prompt], answers: list[Answer], vocabulary: Vocabulary, scorer: Scorer
) -> tuple[list[Row], int]:
    """Return a row for each answer, all answers to the first prompt first, and how many scores are missing."""
    rows: list[Row] = []
    num_errors = 0
    texts = [vocabulary.backend.decode(answer.text_tokens) for answer in answers]
    count = cmd.num_samples
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
    return files.enter_context(_writable("samples", cmd.samples).open("w")) if cmd.samples else None


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
    task = Prompted(name=cfg.task.name, chat_template=cfg.task.chat_template, loss=None, system=system)
    return load_prompts(cfg.model_copy(update={"task": task}), longest)


def _without_split(cfg: Config) -> Config:
    """The config with no document held out, so that the other split has them all."""
    nothing = {"held_out_fraction": 0.0}
    if isinstance(cfg.data, Mixture):
        parts = {name: part.model_copy(update=nothing) for name, part in cfg.data.parts.items()}
        return cfg.model_copy(update={"data": cfg.data.model_copy(update={"parts": parts})})
    return cfg.model_copy(update={"data": cfg.data.model_copy(update=nothing)})


if __name__ == "__main__":
    sys.exit(command.run_command(Evaluate, evaluate))
