"""The batch of an optimizer step: its shape, and the stages of a run that have another batch.

    training.global_batch_size=8 training.seq_len=2048
    training.batch_stages=[{until_step: 1000, global_batch_size: 8, seq_len: 512},
                           {until_step: 3000, global_batch_size: 4}]

    steps         samples a step     rows of the batch
    1 to 1000     2                  8 of 512 tokens     each sample is cut into 4 rows
    1001 to 3000  4                  4 of 2048 tokens
    3001 to ...   8                  8 of 2048 tokens    the batch of the section `training` itself

A sample of the data always has training.seq_len tokens. So the order of the data, and the meaning of a position in it,
are those of a run without stages.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field, model_validator

from tunix.base.errors import UserError
from tunix.base.section import Count, Section
from tunix.sharding.mesh_shape import data_shards, nearest, token_shards

if TYPE_CHECKING:
    from tunix.config.training import Training

KEY = "training.batch_stages"
Spans = Sequence[tuple[int, int]]  # the steps of a run in order: (number of steps, tokens of each of them)


class BatchShape(NamedTuple):
    """Shape [A, B, T] of the batch that one optimizer step takes, over the whole mesh."""

    num_microbatches: int  # A
    num_rows: int  # B: sequences of one microbatch, over all data shards
    seq_len: int  # T

    @property
    def num_sequences(self) -> int:
        """Sequences of one step."""
        return self.num_microbatches * self.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens of one step, padding included."""
        return self.num_sequences * self.seq_len

    def of(self, dims: str) -> tuple[int, ...]:
        """Sizes of some of the dimensions A, B and T, given by their letters."""
        sizes = dict(zip("ABT", self, strict=True))
        return tuple(sizes[letter] for letter in dims)


class BatchStage(Section):
    """Steps of the run with another batch. A stage begins where the stage before it ends. Give until_step or
    until_tokens, and global_batch_size or seq_len or both."""

    until_step: Count | None = Field(default=None)
    """Last optimizer step of the stage."""
    until_tokens: Count | None = Field(default=None)
    """Tokens of the run after which the stage ends, at the next step."""
    global_batch_size: Count | None = Field(default=None)
    """Sequences per optimizer step over the whole mesh, of this stage's seq_len; null takes as many tokens as without
    the stage."""
    seq_len: Count | None = Field(default=None)
    """Tokens per sequence; divides training.seq_len. null is training.seq_len."""

    @model_validator(mode="after")
    def _check(self) -> "BatchStage":
        if (self.until_step is None) == (self.until_tokens is None):
            raise ValueError(f"{KEY}: a stage needs one of until_step and until_tokens")
        if self.global_batch_size is None and self.seq_len is None:
            raise ValueError(
                f"{KEY}: a stage needs global_batch_size or seq_len; without them its batch is that of the run"
            )
        return self


class BatchPeriod(NamedTuple):
    """Steps of a run whose batches have one shape."""

    first_step: int
    last_step: int | None  # None: that of the run
    training: "Training"  # the section of a run that has this batch from its first step to its last
    shape: BatchShape
    num_cuts: int  # rows of the batch that are cut from one sample

    @property
    def num_samples(self) -> int:
        """Samples of one step, each of training.seq_len tokens."""
        return self.shape.num_sequences // self.num_cuts

    @property
    def in_words(self) -> str:
        """The steps of the period as text."""
        return f"{self.first_step:,} to {'the end' if self.last_step is None else f'{self.last_step:,}'}"

    def steps(self, first: int, last: int) -> range:
        """Return the steps of the period among those from `first` to `last`."""
        end = last if self.last_step is None else min(last, self.last_step)
        return range(max(first, self.first_step), end + 1)


@dataclass(frozen=True)
class BatchSchedule:
    """The batch of each step of a run: periods in the order of their steps, the last without an end."""

    periods: tuple[BatchPeriod, ...]

    def at(self, step: int) -> BatchPeriod:
        """Return the period of a step; of a step before the first period, that period."""
        number = bisect_right(self.periods, step, key=lambda period: period.first_step)
        return self.periods[max(0, number - 1)]

    def spans(self, num_steps: int) -> Spans:
        """Return the steps of a run of `num_steps` in order, and the tokens of each."""
        steps = [(len(period.steps(1, num_steps)), period.shape.num_tokens) for period in self.periods]
        return [(count, tokens) for count, tokens in steps if count]


def schedule_batches(training: "Training", mesh_sizes: Mapping[str, int], step: int, tokens: int) -> BatchSchedule:
    """Return the batches of the steps that a run still has to take, on a mesh of these sizes.

    `step` and `tokens` are those that the run has taken already, 0 for a new run.

    Raises:
        UserError: the batch of a stage does not fit the mesh.
    """
    # A stage that ends after tokens ends at another step if the run was resumed with another batch. So the schedule is
    # made anew at each start, from the steps and tokens so far.
    periods = []
    for number, end in enumerate(stage_ends(training, step, tokens)):
        if end > step:
            own = training_in_stage(training, number, mesh_sizes)
            shape, num_cuts = own.batch_shape(mesh_sizes), training.seq_len // own.seq_len
            periods.append(BatchPeriod(step + 1, end, own, shape, num_cuts))
            step = end
    periods.append(BatchPeriod(step + 1, None, training, training.batch_shape(mesh_sizes), 1))
    return BatchSchedule(tuple(periods))


def stage_ends(training: "Training", step: int = 0, tokens: int = 0) -> list[int]:
    """Return the last step of each stage, for a run that has taken `step` steps and `tokens` tokens.

    For a stage that has ended, this is `step`.
    """
    ends = []
    for stage in training.batch_stages:
        tokens_per_step = _count_tokens(training, stage)
        if stage.until_step is not None:
            end = max(step, stage.until_step)
        else:
            assert stage.until_tokens is not None
            # Rounded up: the stage ends with the first step that reaches its tokens.
            end = step + max(0, -(-(stage.until_tokens - tokens) // tokens_per_step))
        tokens += (end - step) * tokens_per_step
        step = end
        ends.append(end)
    return ends


def _count_tokens(training: "Training", stage: BatchStage) -> int:
    """Return the tokens of a step of the stage."""
    if stage.global_batch_size is not None:
        return stage.global_batch_size * (stage.seq_len or training.seq_len)
    return training.global_batch_tokens or (training.global_batch_size or 0) * training.seq_len


def check_batch_stages(training: "Training") -> None:
    """Raise ValueError where stages contradict one another or the batch of the run, whatever the mesh is."""
    if not training.batch_stages:
        return
    if training.global_batch_size is None and training.global_batch_tokens is None:
        raise ValueError(
            f"{KEY} needs the batch that follows its stages, the same on every mesh: set training.global_batch_size"
        )
    length = training.seq_len
    for number, stage in enumerate(training.batch_stages):
        own = stage.seq_len or length
        if length % own:
            near = nearest([n for n in range(1, length + 1) if length % n == 0], own)
            raise ValueError(
                f"{KEY}.{number}.seq_len={own} does not divide training.seq_len={length}, whose sequences are cut into "
                f"shorter ones; nearest: {' or '.join(map(str, near))}"
            )
        if stage.global_batch_size is not None and stage.global_batch_size * own % length:
            unit = length // own
            low = max(1, stage.global_batch_size // unit) * unit
            raise ValueError(
                f"{KEY}.{number}.global_batch_size={stage.global_batch_size} sequences of {own} tokens are not cut "
                f"from whole ones of training.seq_len={length}; nearest: {low} or {low + unit}"
            )
    before = 0
    for number, end in enumerate(stage_ends(training)):
        if end <= before:
            raise ValueError(
                f"{KEY}.{number} ends with step {end}, not after the stage before it, which ends with step {before}; "
                "put the stages in order"
            )
        before = end


def training_in_stage(training: "Training", number: int, mesh_sizes: Mapping[str, int]) -> "Training":
    """Return the section `training` with the batch of stage `number`, as if it were the batch of the whole run.

    A microbatch of the stage has at most as many tokens as one of the run, so that it fits into the same memory. It has
    fewer where the stage's batch is smaller than a microbatch of the run, or is not a multiple of it.

    Raises:
        UserError: the batch does not fit the mesh, with the nearest one that does.
    """
    stage, shards = training.batch_stages[number], data_shards(mesh_sizes)
    length = stage.seq_len or training.seq_len
    num_cuts = training.seq_len // length
    num_sequences = _count_tokens(training, stage) // length
    if num_sequences % (shards * num_cuts):
        unit = shards * num_cuts
        low = max(1, num_sequences // unit) * unit
        cut = f" x {num_cuts} rows cut from each sequence" if num_cuts > 1 else ""
        raise UserError(
            f"{KEY}.{number}.global_batch_size={num_sequences} is not divisible by {unit} = {shards} data shards{cut}; "
            f"nearest: {low} or {low + unit}"
        )
    if length % token_shards(mesh_sizes):
        raise UserError(
            f"{KEY}.{number}.seq_len={length} is not divisible by the {token_shards(mesh_sizes)} devices that share a "
            f"sequence (model.mesh_shape); raise it, or leave it out"
        )
    own_samples = num_sequences // num_cuts // shards
    # The largest number of samples that divides the batch of a shard and is no more than a microbatch of the run.
    rows = max(n for n in range(1, min(training.sequences_per_shard, own_samples) + 1) if own_samples % n == 0)
    changed = {
        "seq_len": length,
        "micro_batch_size": rows * num_cuts,
        "global_batch_size": num_sequences,
        "global_batch_tokens": None,
        "gradient_accumulation_steps": None,
        "batch_stages": (),
    }
    own = training.model_copy(update=changed)
    try:
        own.batch_shape(mesh_sizes)
        own.splits_stream(mesh_sizes)
    except UserError as error:
        raise UserError(f"{KEY}.{number}: {error}") from None
    return own
