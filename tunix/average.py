"""Average the weights of several checkpoints: `python -m tunix.average checkpoint=RUN steps=[...] output=DIR`.

The checkpoints are of one run, or of several runs and Hugging Face directories of one architecture. The result is a
Hugging Face directory, which every command and `model.init_from` take.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from tunix.base.errors import UserError
from tunix.config import Average, Model
from tunix.config.command_line import run_command
from tunix.config.saved_runs import find_checkpoints, find_run
from tunix.export import Exporter, add_vector_files
from tunix.inference.pretrained import Pretrained, find_checkpoint, load_pretrained


def average(command: Average) -> str:
    """Write the averaged weights; return a line about them.

    Raises:
        UserError: the keys name fewer than two checkpoints, or checkpoints of different architectures.
    """
    sources = list_sources(command)
    shares = command.shares or (1.0,) * len(sources)
    if len(shares) != len(sources):
        raise UserError(
            f"shares={list(shares)} has {len(shares)} numbers for {len(sources)} checkpoints; give one for each"
        )

    # A function loads the weights, since the writer first looks whether it may write to `output`.
    def load(strategy: str) -> Pretrained:
        return average_weights(sources, shares, command, strategy)

    add_files = partial(add_vector_files, sources[0])
    line = Exporter(load, command.dtype, command.shard_gb, True, add_files=add_files).write(command.output)
    return f"{line}; the average of {len(sources)} checkpoints"


def list_sources(command: Average) -> list[str]:
    """Return the checkpoints to average, each as `load_pretrained` takes it.

    Raises:
        UserError: fewer than two, or a step that is not there.
    """
    if isinstance(command.checkpoint, tuple):
        if command.steps is not None:
            raise UserError(
                "steps chooses checkpoints of one run, but checkpoint=[...] names several folders; leave steps out, "
                "and write checkpoint=[RUN/checkpoints/STEP,...]"
            )
        sources = list(command.checkpoint)
    else:
        hint = " and steps=[300,400] or steps=all, or several checkpoints: checkpoint=[DIR,DIR]"
        if command.steps is None:
            raise UserError(f"checkpoint={command.checkpoint} needs steps; give the folder of a run{hint}")
        sources = [folder for _, folder in find_checkpoints(command.checkpoint, command.steps, "steps", hint)]
    folders = [_find_folder(source) for source in sources]
    if twice := next((each for each in folders if folders.count(each) > 1), None):
        raise UserError(f"{twice} is named twice; name each checkpoint once, and give it more weight by shares=[...]")
    if len(sources) < 2:
        raise UserError(f"an average needs two checkpoints or more, {len(sources)} given: {', '.join(sources)}")
    return sources


def _find_folder(source: str) -> str:
    """Return the folder of a checkpoint: of a run, that of its newest one; an ID of Hugging Face's stays as it is."""
    if run := find_run(source):
        return str(find_checkpoint(run[0] / "checkpoints", run[1]).resolve())
    return str(Path(source).resolve()) if Path(source).exists() else source


def average_weights(sources: list[str], shares: tuple[float, ...], command: Average, strategy: str) -> Pretrained:
    """Return the first model with the average of all weights, added up in float32, one checkpoint after the other.

    Raises:
        UserError: two checkpoints are of different architectures, or their tokenizers have different tokens.
    """

    # Low-rank updates are added to their matrices first: the average of two products is not the product of averages.
    def load(source: str) -> Pretrained:
        model = load_pretrained(source, "float32", weights=command.weights, strategy=strategy, family=command.family)
        return model.merged()

    # Two models are in memory at a time, however many sources there are.
    mean = load(sources[0])
    mean = replace(mean, params=_scale(mean.params, shares[0] / sum(shares)))
    for source, share in zip(sources[1:], shares[1:], strict=True):
        model = load(source)
        other = _list_keys(model.cfg)
        for key, value in _list_keys(mean.cfg).items():
            if other[key] != value:
                way_out = "; average their exports" if key == STACKS else ""
                raise UserError(
                    f"checkpoint: model.{key} is {value} in {sources[0]}, but {other[key]} in {source}; their weights "
                    f"have no average{way_out}"
                )
        if difference := _find_other_token(mean, model):
            raise UserError(
                f"checkpoint: token {difference[0]} is {difference[1]!r} in {sources[0]}, but {difference[2]!r} in "
                f"{source}; weights for different tokens have no average: name models with one tokenizer"
            )
        mean = replace(mean, params=_add(mean.params, model.params, share / sum(shares)))
        del model  # before the next one is read
    return mean


STACKS = "layers_before_stages"  # says which layers have their weights in one array, and an export has none of these


def _list_keys(cfg: Model) -> dict[str, Any]:
    """Return the keys of a model that decide its arrays and what they mean."""
    return cfg.architecture | {STACKS: cfg.layers_before_stages, "mtp": cfg.mtp is not None}


def _find_other_token(first: Pretrained, model: Pretrained) -> tuple[int, str, str] | None:
    """Return the first id that two models have for different tokens, with both tokens; None if there is none."""
    if first.tokenizer is None or model.tokenizer is None:
        return None
    own, other = ({n: token for token, n in each.get_vocab().items()} for each in (first.tokenizer, model.tokenizer))
    number = min((number for number in own.keys() & other.keys() if own[number] != other[number]), default=None)
    return None if number is None else (number, own[number], other[number])


@partial(jax.jit, donate_argnums=0)
def _scale(params: Any, share: float) -> Any:
    return jax.tree.map(lambda p: share * p, params)


@partial(jax.jit, donate_argnums=0)
def _add(total: Any, params: Any, share: float) -> Any:
    return jax.tree.map(lambda t, p: t + share * p, total, params)


if __name__ == "__main__":
    sys.exit(run_command(Average, average))
