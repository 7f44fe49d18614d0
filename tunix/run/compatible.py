"""Checks that a run may go on from a checkpoint: of the same model, tokenizer and data."""

import copy
import logging
from typing import Any

from tunix.base.errors import UserError
from tunix.base.nested import flat
from tunix.cli.saved import upgrade
from tunix.config import Config
from tunix.config.mlp import TRAINING_KEYS
from tunix.config.step_ranges import read_steps
from tunix.data.position import Position

log = logging.getLogger(__name__)

# Keys, or sections, that must have the same value in a run and in the checkpoint that it goes on from: they decide the
# shapes of the state, or which samples come next. The mesh, the number of processes, the strategy, the batch and the
# schedule may change. `MAY_DIFFER` are keys of these sections that change no shape: how a result is computed.
SAME = ("model", "optimizer.name", "optimizer.moments", "training.seq_len", "training.param_dtype", "seed")
MAY_DIFFER = (
    "model.mesh_shape",
    "model.attention",
    "model.expert_products",
    "model.cp_exchange",
    "model.expert_exchange",
    "model.expert_buffer_factor",
    *(f"model.mlp.{key}" for key in TRAINING_KEYS),
)


def check_same(config: Config, saved: dict[str, Any], position: Position, now: Position) -> None:
    """Check that a run may go on from a checkpoint.

    Args:
        config: of the run.
        saved: the config in the checkpoint, perhaps in the form of older code.
        position: in the checkpoint.
        now: names the tokenizer and the data that the run has loaded.

    Raises:
        UserError: the checkpoint belongs to another model, tokenizer or corpus.
    """
    old = upgrade(copy.deepcopy(saved))
    _check_config(flat(old), flat(config.model_dump(mode="json", by_alias=True)))
    _check_left_out(config, old["training"]["skip_steps"], position)
    _check_data(config, position, now)


def _check_config(old: dict[str, Any], new: dict[str, Any]) -> None:
    dtype = "training.param_dtype"  # null means float32
    old, new = old | {dtype: old[dtype] or "float32"}, new | {dtype: new[dtype] or "float32"}
    # The kind of a part comes first: its other keys differ for that reason.
    for key in sorted(old.keys() | new.keys(), key=lambda key: (not key.endswith(".kind"), key)):
        must_agree = any(key == name or key.startswith(f"{name}.") for name in SAME) and key not in MAY_DIFFER
        if must_agree and old.get(key) != new.get(key):
            raise UserError(
                f"resume: {key}={new.get(key)}, but the checkpoint was made with {old.get(key)}; "
                "leave it as it was or start a new run"
            )


def _check_left_out(config: Config, before: list[str], position: Position) -> None:
    """Raise `UserError` for steps to leave out from whose data the checkpoint has learnt already."""
    for text in config.training.skip_steps:
        steps = read_steps(text)
        if steps[0] <= position.step and text not in before:
            rest = f", or training.skip_steps=[{position.step + 1}:{steps[-1]}]" if steps[-1] > position.step else ""
            raise UserError(
                f"resume: training.skip_steps={text} begins before step {position.step + 1}, with which the run goes "
                f"on: the checkpoint has learnt from these data; take one from before step {steps[0]} "
                f"(resume=RUN_DIR/checkpoints/STEP){rest}"
            )


def _check_data(config: Config, position: Position, now: Position) -> None:
    if now.tokenizer != position.tokenizer:
        way_out = "its tokens mean another text; set tokenizer.path to the old one"
        if config.tokenizer.path is None:
            way_out = (
                "the corpus it is trained on has changed; loading.allow_changed_data=true goes on with the old one"
            )
        raise UserError(
            f"resume: the tokenizer ({now.tokenizer}) is not the checkpoint's ({position.tokenizer}); {way_out}"
        )
    if now.data != position.data:
        change = f"resume: the training data ({now.data}) are not the checkpoint's ({position.data}); "
        if not config.loading.allow_changed_data:
            raise UserError(
                f"{change}sample {position.next_sample} of one is not sample {position.next_sample} of the other. "
                "loading.allow_changed_data=true goes on with it all the same"
            )
        log.warning("%sgoing on at sample %d of the new ones", change, position.next_sample)
