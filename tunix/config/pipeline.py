"""How a step goes through the stages of the layers (the mesh axis pp).

The sequences of a microbatch are cut into P parts, and S stages work on S parts at a time. In a tick each stage
computes one part, so the last stage has the last part after P + S - 1 ticks. In S - 1 of them a stage has nothing to
do: the bubble. training/pipeline_step.py has a picture.

The parts of all microbatches of a step follow one another (1f1b). interleaved cuts the layers of a stage into chunks:
a tick is shorter, and the same number of idle ticks takes less time.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from tunix.base.errors import UserError, near_multiples
from tunix.sharding.mesh_shape import list_divisors, nearest, num_stages, token_shards

if TYPE_CHECKING:
    from tunix.config.batch import BatchKeys


class PipelineShape(NamedTuple):
    """Sizes of a pipeline: stages, parts of a microbatch, microbatches and chunks, and what follows from them."""

    num_stages: int  # S
    num_parts: int  # P, of one microbatch; each has sequences of every data shard
    num_microbatches: int  # A
    num_chunks: int = 1  # v, of the layers of each stage: more than 1 with interleaved

    @property
    def num_iterations(self) -> int:
        """Forward ticks of a step; each tick runs one chunk on every stage. The backward pass has as many."""
        return self.num_chunks * self.num_microbatches * self.num_parts + self.num_stages - 1

    @property
    def num_passes(self) -> float:
        """Forward passes of a step through all layers of a stage, the idle ones of the bubble included."""
        return self.num_iterations / self.num_chunks

    @property
    def iterations_per_microbatch(self) -> float:
        """Passes of a stage for each part of the step: 1 without a bubble, (P + S - 1) / P with one microbatch."""
        return self.num_passes / (self.num_microbatches * self.num_parts)

    @property
    def recompute_runs(self) -> bool:
        """True where the backward pass runs the forward pass of a stage again.

        Only the rows that enter a stage are kept. Activations of all parts that are under way would not fit.
        """
        return self.num_stages > 1

    @property
    def bubble(self) -> float:
        """Share of the ticks in which a stage computes nothing that is used."""
        return 1 - 1 / self.iterations_per_microbatch


def count_parts(batch: "BatchKeys", mesh_sizes: Mapping[str, int]) -> int:
    """Return the number of parts of a microbatch that go through the stages one after the other.

    Raises:
        UserError: the key does not fit the stages and the rows, with the nearest numbers that do.
    """
    stages, rows = num_stages(mesh_sizes), batch.sequences_per_shard
    if stages == 1:
        return 1
    # `rows` are the sequences of one device. Outside of the blocks the stages split the batch too, so `stages` devices
    # have stages * rows sequences together. With `auto` each is a part of its own: most parts, the shortest bubble.
    parts = stages * rows if batch.pipeline_microbatches == "auto" else batch.pipeline_microbatches
    if parts % stages or rows % (parts // stages):
        valid = [stages * n for n in list_divisors(rows)]
        raise UserError(
            f"training.pipeline_microbatches={parts} does not fit {stages} stages with "
            f"training.micro_batch_size={rows}: it must be a multiple of {stages} that divides {stages * rows}; "
            f"nearest: {' or '.join(map(str, nearest(valid, parts)))}, or auto"
        )
    return parts


def check_tokens_on_stages(batch: "BatchKeys", mesh_sizes: Mapping[str, int]) -> None:
    """Raise `UserError` where the stages do not divide the tokens of a part, with the nearest numbers that they do.

    Outside of the blocks all stages, and devices that share sequences, split the tokens of one part.
    """
    split = num_stages(mesh_sizes) * token_shards(mesh_sizes)
    if num_stages(mesh_sizes) == 1 or batch.seq_len % split == 0:
        return
    raise UserError(
        f"training.seq_len={batch.seq_len} is split over {split} devices of the mesh axes pp x cp; "
        f"nearest: {near_multiples(batch.seq_len, split)}, or leave pp out of model.mesh_shape"
    )
