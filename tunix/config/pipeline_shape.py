"""How a step goes through the stages of the layers (the mesh axis pp).

The sequences of a microbatch are cut into P parts, and S stages work on S parts at a time. In a tick each stage
computes one part, so the last stage has the last part after P + S - 1 ticks. In S - 1 of them a stage has nothing to
do: the bubble. models/pipeline.py (gpipe) and training/pipelined.py (1f1b, interleaved) have pictures.

gpipe fills the stages once for each microbatch, 1f1b and interleaved once a step. interleaved cuts the layers of a
stage into chunks, so that a tick is shorter and the same number of idle ticks takes less time.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tunix.base.errors import UserError
from tunix.sharding.mesh_shape import nearest, num_stages, token_shards

if TYPE_CHECKING:
    from tunix.config.training import Training


class PipelineShape(NamedTuple):
    """Sizes of a pipeline: stages, parts of a microbatch, microbatches and chunks, and what follows from them."""

    schedule: str  # key of `PIPELINE_SCHEDULES`
    num_stages: int  # S
    num_parts: int  # P, of one microbatch; each has sequences of every data shard
    num_microbatches: int  # A
    num_chunks: int = 1  # v, of the layers of each stage: more than 1 with interleaved

    @property
    def is_stream(self) -> bool:
        """True where the parts of all microbatches follow one another, and stages fill once a step."""
        return PIPELINE_SCHEDULES[self.schedule].is_stream

    @property
    def fill(self) -> int:
        """Ticks until the last stage has its first part."""
        return self.num_stages - 1

    @property
    def num_ticks(self) -> int:
        """Times that each stage computes a chunk forward, and as often backward, in a step."""
        return PIPELINE_SCHEDULES[self.schedule].count_ticks(self)

    @property
    def num_passes(self) -> float:
        """Times that each stage computes all of its layers forward in a step."""
        return self.num_ticks / self.num_chunks

    @property
    def ticks_per_part(self) -> float:
        """Passes of a stage for each part of the step: 1 without a bubble, (P + S - 1) / P with gpipe."""
        return self.num_passes / (self.num_microbatches * self.num_parts)

    @property
    def runs_again(self) -> bool:
        """True where the backward pass runs the forward pass of a stage again.

        Only the rows that enter a stage are kept. Activations of all parts that are under way would not fit.
        """
        return self.num_stages > 1

    @property
    def bubble(self) -> float:
        """Share of the ticks in which a stage computes nothing that is used."""
        return 1 - 1 / self.ticks_per_part


class PipelineSchedule(NamedTuple):
    """When stages go forward and backward."""

    gradients: str  # function that computes a step's gradients: `Program` (training/program.py) -> `Gradients`
    count_ticks: Callable[[PipelineShape], int]  # `PipelineShape.num_ticks`
    is_stream: bool  # `PipelineShape.is_stream`
    has_chunks: bool = False  # each stage has several chunks of layers, training.pipeline_chunks


def _count_ticks_of_microbatches(shape: PipelineShape) -> int:
    """Return the ticks of a step whose stages fill and empty once for each microbatch."""
    return shape.num_microbatches * (shape.num_parts + shape.fill)


def _count_ticks_of_stream(shape: PipelineShape) -> int:
    """Return the ticks of a step whose stages fill and empty once."""
    return shape.num_chunks * shape.num_microbatches * shape.num_parts + shape.fill


# The values of training.pipeline_schedule beside auto. Without stages it is gpipe.
PIPELINE_SCHEDULES = {
    "gpipe": PipelineSchedule("tunix.training.program:one_by_one", _count_ticks_of_microbatches, is_stream=False),
    "1f1b": PipelineSchedule("tunix.training.program:as_stream", _count_ticks_of_stream, is_stream=True),
    "interleaved": PipelineSchedule(
        "tunix.training.program:as_stream", _count_ticks_of_stream, is_stream=True, has_chunks=True
    ),
}


def count_parts(training: "Training", mesh_sizes: Mapping[str, int]) -> int:
    """Return the number of parts of a microbatch that go through the stages one after the other.

    Raises:
        UserError: the key does not fit the stages and the rows, with the nearest numbers that do.
    """
    stages, rows = num_stages(mesh_sizes), training.sequences_per_shard
    if stages == 1:
        return 1
    # `rows` are the sequences of one device. Outside of the blocks the stages split the batch too, so `stages` devices
    # have stages * rows sequences together. With `auto` each is a part of its own: most parts, the shortest bubble.
    parts = stages * rows if training.pipeline_microbatches == "auto" else training.pipeline_microbatches
    if parts % stages or rows % (parts // stages):
        legal = [stages * n for n in range(1, rows + 1) if rows % n == 0]
        raise UserError(
            f"training.pipeline_microbatches={parts} does not fit {stages} stages with "
            f"training.micro_batch_size={rows}: it must be a multiple of {stages} that divides {stages * rows}; "
            f"nearest: {' or '.join(map(str, nearest(legal, parts)))}, or auto"
        )
    return parts


def choose_schedule(training: "Training", mesh_sizes: Mapping[str, int]) -> str:
    """Return the schedule, a key of `PIPELINE_SCHEDULES`.

    Streams split the tokens of a part over the stages, and over devices that share sequences.

    Raises:
        UserError: the schedule that was asked for does not divide the tokens, with the nearest numbers that it does.
    """
    schedule, stages = training.pipeline_schedule, num_stages(mesh_sizes)
    if stages == 1:
        return "gpipe"
    split = stages * token_shards(mesh_sizes)
    if schedule == "auto":
        return "gpipe" if training.seq_len % split else "1f1b"
    if PIPELINE_SCHEDULES[schedule].is_stream and training.seq_len % split:
        low = max(1, training.seq_len // split) * split
        raise UserError(
            f"training.pipeline_schedule={schedule} splits training.seq_len={training.seq_len} over {split} devices; "
            f"nearest: {low} or {low + split}, or training.pipeline_schedule=gpipe"
        )
    return schedule
