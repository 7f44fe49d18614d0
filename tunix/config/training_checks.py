"""Keys of the section `training` that must fit one another, and those that must fit a mesh."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from tunix.base.errors import UserError
from tunix.config.batch_stages import BatchShape, check_batch_stages, training_in_stage
from tunix.config.pipeline_shape import choose_schedule, count_parts
from tunix.config.step_ranges import read_steps
from tunix.sharding.mesh_shape import data_shards

if TYPE_CHECKING:
    from tunix.config.training import Training


def check_training(training: "Training") -> None:
    """Raise ValueError where keys contradict one another, whatever the mesh is."""
    batch_keys = ("gradient_accumulation_steps", "global_batch_size", "global_batch_tokens")
    given = [f"training.{key}={getattr(training, key)}" for key in batch_keys if getattr(training, key) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both set; keep one and leave the others null")
    if training.max_steps is None and training.max_tokens is None and training.num_epochs is None:
        raise ValueError("the run has no end; set one of training.max_steps, training.max_tokens, training.num_epochs")
    if training.remat == "budget" and training.micro_batch_size == "auto":
        raise ValueError(
            "training.remat=budget and training.micro_batch_size=auto both take what memory is left; give a number "
            "of sequences, or one policy"
        )
    if training.remat_memory_gib is not None and training.remat != "budget":
        raise ValueError(
            f"training.remat_memory_gib={training.remat_memory_gib:g} says how much training.remat=budget may take; "
            f"training.remat={training.remat} takes what it needs: leave it out, or set training.remat=budget"
        )
    check_batch_stages(training)
    ranges = [read_steps(text) for text in training.skip_steps]
    for before, after in pairwise(ranges):
        if after[0] <= before[-1]:
            raise ValueError(
                f"training.skip_steps={','.join(training.skip_steps)}: the range from {after[0]} begins before the one "
                f"to {before[-1]} ends; write them in order"
            )


def find_batch_shape(training: "Training", mesh_sizes: Mapping[str, int]) -> BatchShape:
    """Return the batch of a step on a mesh of these sizes, behind all of `batch_stages`.

        global_batch_size = num_microbatches x micro_batch_size x data shards

    One of `global_batch_size`, `global_batch_tokens` and `gradient_accumulation_steps` is given at most; the number of
    microbatches follows.

    Raises:
        UserError: the keys do not fit one another on this mesh, with the nearest values that do.
    """
    shards = data_shards(mesh_sizes)
    num_rows = training.sequences_per_shard * shards
    num_microbatches = training.gradient_accumulation_steps or 1
    factors = f"micro_batch_size={training.micro_batch_size} x {shards} data shards"
    for key, asked, unit, unit_in_words in (
        ("global_batch_size", training.global_batch_size, num_rows, factors),
        (
            "global_batch_tokens",
            training.global_batch_tokens,
            num_rows * training.seq_len,
            f"{factors} x seq_len={training.seq_len}",
        ),
    ):
        if asked is None:
            continue
        if asked % unit:
            low = max(1, asked // unit) * unit
            raise UserError(
                f"training.{key}={asked} is not divisible by {unit} = {unit_in_words}; nearest: {low} or {low + unit}"
            )
        num_microbatches = asked // unit
    if training.sync_gradients_every != "auto" and num_microbatches % training.sync_gradients_every:
        legal = [n for n in range(1, num_microbatches + 1) if num_microbatches % n == 0]
        raise UserError(
            f"training.sync_gradients_every={training.sync_gradients_every} does not divide the {num_microbatches} "
            f"microbatches of a step; it may be {', '.join(map(str, legal))}"
        )
    # These raise errors for keys that do not fit; their results are not needed here.
    count_parts(training, mesh_sizes)
    choose_schedule(training, mesh_sizes)
    for number in range(len(training.batch_stages)):
        training_in_stage(training, number, mesh_sizes)
    return BatchShape(num_microbatches, num_rows, training.seq_len)
