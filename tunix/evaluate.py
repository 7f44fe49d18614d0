"""Measure a trained model: `python -m tunix.evaluate checkpoint=RUN_DIR|HF_DIR [data=...] [key=value]`."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import grain
import jax
from jax.sharding import Mesh
from rich.table import Table

from tunix.base.errors import UserError
from tunix.base.files import describing_refusal, find_writable
from tunix.base.progress import announcing
from tunix.base.text import print_table
from tunix.config import Config, Evaluate, command_line, compose
from tunix.config.data import Mixture
from tunix.config.saved_runs import find_checkpoints, find_run, read_saved
from tunix.config.task import Compared
from tunix.data.dataset import Corpus, load_corpus
from tunix.data.prompts import load_together
from tunix.huggingface.hub import find
from tunix.inference.lm_eval import list_tasks
from tunix.inference.pretrained import describe_files, load_language_model, load_params
from tunix.processes import peers
from tunix.rl.evaluation import Numbers, evaluate_answers, is_sampling
from tunix.rl.reference import add_reference
from tunix.run.folder import TOKENIZER
from tunix.training.choices import build_layout, build_mesh
from tunix.training.loss import HeldOut, make_totals
from tunix.training.multiple_choice import MultipleChoice, make_choices
from tunix.training.state import Architecture, describe
from tunix.training.train_spec import assemble

Sets = dict[str, HeldOut | MultipleChoice]

# Keys of the evaluation in a run for which this command has keys of its own, where the model draws answers.
KEYS_OF_RUNS = {
    "evaluation.num_sequences": "num_prompts",
    "evaluation.num_prompts": "num_prompts",
    "evaluation.num_samples": "num_samples",
}


def evaluate(cmd: Evaluate) -> None:
    """Print a table of what was measured, a line for each checkpoint, and write it to `cmd.output`.

    Several processes measure together, as they train together; process 0 writes.
    """
    output = peers.on_main(lambda: find_writable("output", cmd.output), "checking output")
    steps = _list_steps(cmd)
    cfg = peers.main_first(lambda: make_config(cmd), "reading the config")
    cfg_of_split = _hold_out_nothing(cfg) if cmd.split == "all" else cfg
    evaluate_fn = {"loss": evaluate_loss, "lm_eval": evaluate_tasks}.get(cmd.metric, evaluate_answers)
    measured = []
    for number, numbers in zip(steps, evaluate_fn(cmd, cfg_of_split, list(steps.values())), strict=True):
        measured.append(numbers)
        if len(steps) > 1:  # the table comes at the end, perhaps in hours
            found = (f"{name} {_format(value)}" for name, value in numbers.items() if name != "sets")
            peers.print_progress(f"step {number}: {', '.join(found)}")
    if output is None:
        return
    info = {"checkpoint": cmd.checkpoint}
    if cmd.metric != "lm_eval":  # whose tasks have data of their own
        info |= {"data": cfg.data.source, "split": cmd.split}
    rows = [({} if step is None else {"step": step}) | row for step, row in zip(steps, measured, strict=True)]
    is_list = isinstance(cmd.step, tuple) or cmd.step == "all"  # of steps, even if there is only one
    content = info | ({"steps": rows} if is_list else rows[0])
    measured_sets = [rows[0], *rows[0].get("sets", {}).values()]
    names = [name for name in dict.fromkeys(chain(*measured_sets)) if name != "sets"]
    table = Table(*info, *names)
    for row in rows:
        step = {"step": row["step"]} if "step" in row else {}
        splits = {cmd.split: row} | {name: step | numbers for name, numbers in row.get("sets", {}).items()}
        for split, numbers in splits.items():
            described = info | {"split": split}
            table.add_row(*(described[name] for name in info), *(_format(numbers.get(name)) for name in names))
    print_table(table)  # first: a disk may refuse what has taken hours
    content = json.loads(json.dumps(content), parse_constant=lambda name: None)  # JSON has no NaN and no Infinity
    with describing_refusal(f"output={output}"):
        output.write_text(json.dumps(content, indent=2) + "\n")


def _format(value: float | int | None) -> str:
    return "" if value is None else f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"


def _list_steps(cmd: Evaluate) -> dict[int | None, str]:
    """Return the checkpoints to measure, as the key `checkpoint` names them, by their steps.

    Raises:
        UserError: steps of what is no run, or of a run that has no such checkpoints.
    """
    if cmd.step is None:
        return {None: cmd.checkpoint}
    choice = (cmd.step,) if isinstance(cmd.step, int) else cmd.step

    def find(steps: Any) -> dict[int | None, str]:
        return dict(find_checkpoints(cmd.checkpoint, steps, f"step={cmd.step}"))

    # Where the run still trains, a process that looks later finds more of them.
    steps = peers.decide(lambda: list(find(choice)), "the checkpoints")
    return peers.together(lambda: find(steps), "looking for the checkpoints")


def make_config(cmd: Evaluate) -> Config:
    """Return the config of the run or the model, with the overrides and the tokenizer that it was trained with."""
    run = find_run(cmd.checkpoint, copied=(TOKENIZER,))
    if override := next((word for word in cmd.overrides if run and word.lstrip("+").startswith("tokenizer")), None):
        raise UserError(f"{override}: a run is measured with the tokenizer that it was trained with; leave it out")
    origin = f"resume={cmd.checkpoint}" if run else f"model.init_from={find(cmd.checkpoint, key='checkpoint')}"
    # One length in two places would leave open which one counts.
    if override := next((word for word in cmd.overrides if word.startswith("sampling.max_new_tokens=")), None):
        raise UserError(f"{override}: this command has the key max_new_tokens for it")
    for word in cmd.overrides if cmd.metric not in ("loss", "lm_eval") else ():
        key, _, value = word.partition("=")
        if own := KEYS_OF_RUNS.get(key):
            raise UserError(f"{word}: metric={cmd.metric} does not read it; write {own}={value}")
    words = [word for word in cmd.overrides if not is_sampling(word)]
    if cmd.max_new_tokens is not None and "task=grpo" in words:  # whose default length may leave no room for a prompt
        words.append(f"sampling.max_new_tokens={cmd.max_new_tokens}")
    # An evaluation takes microbatches, each alone: the batch of the run and its stages may not fit these devices.
    if run and read_saved(run[0])["task"]["name"] != "grpo":  # whose groups of answers are parts of a batch
        batch = ("global_batch_size=null", "global_batch_tokens=null", "batch_stages=[]", "sync_gradients_every=auto")
        words = [*(f"training.{word}" for word in batch), *words]  # of two words for a key the last one counts
    cfg = compose.compose([origin, *words]).config
    if not run and cfg.model.lora.rank and cfg.model.init_adapter is None:
        raise UserError(
            f"model.lora.rank={cfg.model.lora.rank}: checkpoint={cmd.checkpoint} has no low-rank updates; leave it "
            "out, or give model.init_adapter=ADAPTER"
        )
    if cfg.training.micro_batch_size == "auto":  # a run's own choice is for the devices that it ran on
        cfg = cfg.with_training(micro_batch_size=1, pipeline_microbatches="auto")
    of_run = {"global_batch_size": None, "global_batch_tokens": None, "batch_stages": ()}
    cfg = cfg.with_training(gradient_accumulation_steps=1, sync_gradients_every="auto", **of_run)
    if cfg.training.remat == "budget":  # a budget is for what the backward pass needs, and there is none here
        cfg = cfg.with_training(remat="full")
    tokenizer = {"path": str(run[0] / TOKENIZER), "train": False} if run else {"train": False}
    return cfg.model_copy(update={"tokenizer": cfg.tokenizer.model_copy(update=tokenizer)})


def evaluate_loss(cmd: Evaluate, cfg: Config, checkpoints: list[str]) -> Iterator[dict[str, Any]]:
    """Measure the held-out loss as a run with this config does, on the same sequences, mesh and dtypes; yield the
    numbers of each checkpoint.

    The numbers of evaluation.sets and of evaluation.choices stand under `sets`, by name.
    """
    if cfg.task.documents == "prompt":
        raise UserError(f"metric=loss: task={cfg.task.name} has no loss on held-out answers; set metric=reward")
    if texts := [word for word in cmd.overrides if is_sampling(word)]:
        raise UserError(f"{texts[0]}: metric=loss draws no answers; set metric=reward")
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        layout = build_layout(cfg, mesh)
        arch = describe(cfg.model, layout)
        held_out: HeldOut | None = None
        sets: Sets = {}
        for checkpoint in checkpoints:
            params, _ = load_params(checkpoint, cfg.model, arch, layout, mesh, cmd.weights)
            # After the first weights: reading the data may take long, and missing weights are noticed in a second.
            if held_out is None:
                held_out, sets = _load_held_out(cmd, cfg, arch, mesh)
            with announcing(f"measuring {checkpoint}", peers.print_progress):
                numbers = held_out.evaluate(params)
            labelled = {name: each.evaluate(params) for name, each in sets.items()}
            yield numbers | ({"sets": labelled} if labelled else {})


def _load_held_out(cmd: Evaluate, cfg: Config, arch: Architecture, mesh: Mesh) -> tuple[HeldOut, Sets]:
    """Return the documents of the split on the devices, and evaluation.sets and evaluation.choices by name.

    Pairs of answers come with their scores by the model of step 0.
    """
    with announcing("preparing the data", peers.print_progress):
        corpus = load_together(lambda: _load_documents(cmd, cfg))
    if isinstance(cfg.task, Compared):
        add_reference(cfg, corpus, assemble(cfg, mesh), mesh)
    num_rows = cfg.training.batch_shape(mesh.shape).num_rows
    info = cfg, corpus, make_totals(cfg, arch), mesh, num_rows
    sets: Sets = {name: HeldOut(*info, name) for name in corpus.sets}
    return HeldOut(*info), sets | make_choices(cfg, corpus.vocab, arch, mesh, num_rows)


def _load_documents(cmd: Evaluate, cfg: Config) -> Corpus:
    """Return the corpus; its `held_out` has the documents of the split."""
    corpus = load_corpus(cfg)
    if cmd.split != "held_out":
        everything = [grain.MapDataset.source(each) for each in corpus.train.values()]
        return replace(corpus, held_out=grain.MapDataset.concatenate(everything))
    if corpus.num_held_out == 0:
        raise UserError("data.held_out_fraction=0 holds out nothing; split=all measures all documents")
    return corpus


def evaluate_tasks(cmd: Evaluate, cfg: Config, checkpoints: list[str]) -> Iterator[Numbers]:
    """Ask the tasks of EleutherAI's harness; yield their numbers as TASK/METRIC for each checkpoint."""
    if words := [word for word in cmd.overrides if is_sampling(word)]:
        raise UserError(f"{words[0]}: a task of metric=lm_eval says itself how answers are drawn; leave it out")
    for checkpoint in checkpoints:
        dtype, info = cfg.training.dtypes["compute"], describe_files(checkpoint, cfg.model)
        model = load_language_model(checkpoint, dtype, cfg.model.mesh_shape, cmd.weights, **info)
        yield list_tasks(model, cmd)


def _hold_out_nothing(cfg: Config) -> Config:
    """Return the config with no document held out, so that the training documents are all documents."""
    nothing = {"held_out_fraction": 0.0}
    if isinstance(cfg.data, Mixture):
        parts = {name: part.model_copy(update=nothing) for name, part in cfg.data.parts.items()}
        return cfg.model_copy(update={"data": cfg.data.model_copy(update={"parts": parts})})
    return cfg.model_copy(update={"data": cfg.data.model_copy(update=nothing)})


if __name__ == "__main__":
    sys.exit(command_line.run_command(Evaluate, evaluate))
