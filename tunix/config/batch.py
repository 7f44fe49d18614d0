"""The batch of an optimizer step: its shape, its way through a pipeline, and stages of a run with another batch.

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
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from tunix.base.config_types import Count, CountOrZero, Flag, Section
from tunix.base.errors import UserError, near_multiples
from tunix.sharding.mesh import data_shards, list_divisors, nearest, num_stages, stream_shards, token_shards

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


class PipelineShape(NamedTuple):
    """How a step goes through the stages of the layers (the mesh axis pp), and what follows from it.

    The sequences of a microbatch are cut into P parts, and S stages work on S parts at a time. In a tick each stage
    computes one part, so the last stage has the last part after P + S - 1 ticks. In S - 1 of them a stage has nothing
    to do: the bubble. training/pipeline_step.py draws it.

    The parts of all microbatches of a step follow one another (1f1b). interleaved cuts the layers of a stage into
    chunks: a tick is shorter, and the same number of idle ticks takes less time.
    """

    num_stages: int  # S
    num_parts: int  # P, of one microbatch; each has sequences of every data shard
    num_microbatches: int  # A
    num_chunks: int = 1  # v, of the layers of each stage: more than 1 with interleaved
    recompute_runs: bool = False  # the backward pass runs the forward pass of a stage again, and keeps only its rows

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
    def before_stages(self) -> "PipelineShape":
        """Passes through layers before the stages: each has a part of every stage, and runs forward once more later."""
        if self.num_stages == 1:
            return self
        return PipelineShape(1, 1, self.num_microbatches * self.num_parts // self.num_stages, recompute_runs=True)

    @property
    def bubble(self) -> float:
        """Share of the ticks in which a stage computes nothing that is used."""
        return 1 - 1 / self.iterations_per_microbatch


def count_parts(batch: "BatchKeys", mesh_sizes: Mapping[str, int]) -> int:
    """Return the number of parts of a microbatch that go through the stages one after the other. Raises `UserError`
    where the key does not fit the stages and the rows; it names the nearest numbers that do."""
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


class BatchKeys(Section):
    """Keys of `training` that say what the batch of a step is, and how it goes through the devices of a mesh."""

    seq_len: Count
    """Tokens per sequence (T)."""
    images_per_row: CountOrZero
    """Images that a sequence has room for (P), in a model with model.vision; 0 takes text alone."""
    micro_batch_size: Count | Literal["auto"]
    """Sequences per data shard per microbatch; auto is the largest that is predicted to fit (the keys of plan)."""
    micro_batch_tokens: Count | None
    """The same in tokens, in the place of micro_batch_size: a multiple of seq_len; null takes micro_batch_size."""
    gradient_accumulation_steps: Count | None
    """Microbatches per optimizer step (A); null derives it from a global batch, or is 1."""
    global_batch_size: Count | None
    """Sequences per optimizer step over the whole mesh; null derives it."""
    global_batch_tokens: Count | None
    """Tokens per optimizer step over the whole mesh; null derives it."""
    batch_stages: tuple[BatchStage, ...]
    """Stages with another batch before that of the run, in order:
    [{until_step:1000,global_batch_size:64,seq_len:512},{until_step:4000,global_batch_size:128}]. For a batch or
    sequences that grow: the batch of the run follows the last stage."""
    sync_gradients_every: Count | Literal["auto"]
    """Sum gradients over devices after every n microbatches. Larger n sends less and needs more memory; the loss does
    not change. n must divide the number of microbatches. auto: once a step where no axis splits the gradients (as on dp
    alone), which costs no memory there; else once a microbatch."""
    pipeline_microbatches: Count | Literal["auto"]
    """Parts in which the sequences of a microbatch stream through the stages of the pp axis: a multiple of the stages,
    which divides micro_batch_size x stages. More parts leave stages idle for less time; auto is one sequence of each
    shard at a time, the most there can be."""
    pipeline_schedule: Literal["auto", "1f1b", "interleaved"]
    """When stages of the pp axis go forward and backward: 1f1b, backward through a part while others go forward, so
    that memory does not grow with their number, and stages fill once a step; interleaved, 1f1b with several chunks of
    layers on each stage, which fill sooner. auto is 1f1b. pp times cp divides seq_len."""
    pipeline_chunks: Annotated[int, Field(ge=2)]
    """pipeline_schedule=interleaved: chunks of layers that each stage has, every S-th chunk of the model; S times this
    number divides the layers. The bubble is divided by it, and the rows that stages keep are multiplied."""
    pipeline_recompute: Flag
    """Stages of the pp axis keep of a part only the rows that they take, and run forward once more in the backward
    pass. false: they keep what training.remat says, of all parts that are under way."""
    sequence_parallel: Flag | Literal["auto"]
    """Devices that share products (tp) split the tokens of the residual stream: norms, sums and dropout of own tokens,
    a reduce-scatter and an all-gather in the place of each all-reduce. auto is true where tp (times cp and pp) divides
    seq_len."""

    @property
    def sequences_per_shard(self) -> int:
        """Sequences of a data shard in a microbatch: `micro_batch_size` as a number, or those of `micro_batch_tokens`.
        Raises `UserError` where it is `auto`, and nothing has chosen a number yet."""
        if self.micro_batch_size == "auto":
            raise UserError("training.micro_batch_size=auto is chosen by a run and by tunix.plan only; give a number")
        if self.micro_batch_tokens is not None:
            return self.micro_batch_tokens // self.seq_len
        return self.micro_batch_size

    def batch_shape(self, mesh_sizes: Mapping[str, int]) -> BatchShape:
        """Return the batch of a step on a mesh of these sizes, behind all of `batch_stages`.

            global_batch_size = num_microbatches x micro_batch_size x data shards

        One of `global_batch_size`, `global_batch_tokens` and `gradient_accumulation_steps` is given at most; the number
        of microbatches follows.

        Raises:
            UserError: the keys do not fit one another on this mesh, with the nearest values that do.
        """
        shards = data_shards(mesh_sizes)
        num_rows = self.sequences_per_shard * shards
        num_microbatches = self.gradient_accumulation_steps or 1
        factors = f"micro_batch_size={self.sequences_per_shard} x {shards} data shards"
        of_tokens = num_rows * self.seq_len, f"{factors} x seq_len={self.seq_len}"
        for name, (unit, unit_text) in {"size": (num_rows, factors), "tokens": of_tokens}.items():
            value = getattr(self, f"global_batch_{name}")
            if value is not None and value % unit:
                raise UserError(
                    f"training.global_batch_{name}={value} is not divisible by {unit} = {unit_text}; "
                    f"nearest: {near_multiples(value, unit)}"
                )
            num_microbatches = value // unit if value is not None else num_microbatches
        if self.sync_gradients_every != "auto" and num_microbatches % self.sync_gradients_every:
            raise UserError(
                f"training.sync_gradients_every={self.sync_gradients_every} does not divide the {num_microbatches} "
                f"microbatches of a step; it may be {', '.join(map(str, list_divisors(num_microbatches)))}"
            )
        # These raise errors for keys that do not fit; their results are not needed here.
        count_parts(self, mesh_sizes)
        check_tokens_on_stages(self, mesh_sizes)
        for number in range(len(self.batch_stages)):
            keys_in_stage(self, number, mesh_sizes)
        return BatchShape(num_microbatches, num_rows, self.seq_len)

    def batch_schedule(self, mesh_sizes: Mapping[str, int], step: int = 0, tokens: int = 0) -> "BatchSchedule":
        """Return the batches of the steps that a run still has to take, on a mesh of these sizes.

        `step` and `tokens` are those that the run has taken already, 0 for a new run. Raises `UserError` where the
        batch of a stage does not fit the mesh.
        """
        # A stage that ends after tokens ends at another step if the run was resumed with another batch. So the schedule
        # is made anew at each start, from the steps and tokens so far.
        periods = []
        for number, end in enumerate(stage_ends(self, step, tokens)):
            if end > step:
                keys = keys_in_stage(self, number, mesh_sizes)
                shape, num_cuts = keys.batch_shape(mesh_sizes), self.seq_len // keys.seq_len
                periods.append(BatchPeriod(step + 1, end, keys, shape, num_cuts))
                step = end
        periods.append(BatchPeriod(step + 1, None, self, self.batch_shape(mesh_sizes), 1))
        return BatchSchedule(tuple(periods))

    def pipeline(self, mesh_sizes: Mapping[str, int]) -> PipelineShape:
        """Return the pipeline on a mesh of these sizes; one stage has a microbatch as one part."""
        microbatches, stages = self.batch_shape(mesh_sizes).num_microbatches, num_stages(mesh_sizes)
        # Both keys are read also where they have no effect: a key that nothing reads fails a test.
        schedule, chunks, recompute = self.pipeline_schedule, self.pipeline_chunks, self.pipeline_recompute
        if stages == 1 or schedule != "interleaved":
            chunks = 1
        return PipelineShape(stages, count_parts(self, mesh_sizes), microbatches, chunks, stages > 1 and recompute)

    def parts_per_stage(self, mesh_sizes: Mapping[str, int]) -> int | None:
        """Return the parts of a microbatch that wait at each stage; None: as many as a device has sequences."""
        if self.pipeline_microbatches == "auto":
            return None
        return count_parts(self, mesh_sizes) // num_stages(mesh_sizes)

    def splits_stream(self, mesh_sizes: Mapping[str, int]) -> bool:
        """Return whether devices split the tokens of the residual stream on a mesh; see `sequence_parallel`. Raises
        `UserError` where it is true, and the devices do not divide the tokens."""
        if self.sequence_parallel is False or stream_shards(mesh_sizes) == 1:
            return False
        # Stages split the tokens of a part further, outside of the blocks.
        split = stream_shards(mesh_sizes) * token_shards(mesh_sizes) * num_stages(mesh_sizes)
        if self.sequence_parallel is True and self.seq_len % split:
            raise UserError(
                f"training.sequence_parallel=true splits training.seq_len={self.seq_len} over {split} devices; "
                f"nearest: {near_multiples(self.seq_len, split)}, or training.sequence_parallel=auto"
            )
        return self.seq_len % split == 0


class BatchPeriod(NamedTuple):
    """Steps of a run whose batches have one shape."""

    first_step: int
    last_step: int | None  # None: that of the run
    batch: BatchKeys  # of a run that has this batch from its first step to its last
    shape: BatchShape
    num_cuts: int  # rows of the batch that are cut from one sample

    @property
    def num_samples(self) -> int:
        """Samples of one step, each of training.seq_len tokens."""
        return self.shape.num_sequences // self.num_cuts

    @property
    def to_text(self) -> str:
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


def stage_ends(batch: BatchKeys, step: int = 0, tokens: int = 0) -> list[int]:
    """Return the last step of each stage, for a run that has taken `step` steps and `tokens` tokens.

    For a stage that has ended, this is `step`.
    """
    ends = []
    for stage in batch.batch_stages:
        tokens_per_step = _count_tokens(batch, stage)
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


def _count_tokens(batch: BatchKeys, stage: BatchStage) -> int:
    """Return the tokens of a step of the stage."""
    if stage.global_batch_size is not None:
        return stage.global_batch_size * (stage.seq_len or batch.seq_len)
    return batch.global_batch_tokens or (batch.global_batch_size or 0) * batch.seq_len


def check_batch_stages(batch: BatchKeys) -> None:
    """Raise ValueError where stages contradict one another or the batch of the run, whatever the mesh is."""
    if not batch.batch_stages:
        return
    if batch.global_batch_size is None and batch.global_batch_tokens is None:
        raise ValueError(
            f"{KEY} needs the batch that follows its stages, the same on every mesh: set training.global_batch_size"
        )
    length = batch.seq_len
    for number, stage in enumerate(batch.batch_stages):
        seq_len = stage.seq_len or length
        if length % seq_len:
            near = nearest(list_divisors(length), seq_len)
            raise ValueError(
                f"{KEY}.{number}.seq_len={seq_len} does not divide training.seq_len={length}, whose sequences are cut "
                f"into shorter ones; nearest: {' or '.join(map(str, near))}"
            )
        if stage.global_batch_size is not None and stage.global_batch_size * seq_len % length:
            unit = length // seq_len
            raise ValueError(
                f"{KEY}.{number}.global_batch_size={stage.global_batch_size} sequences of {seq_len} tokens are not cut "
                f"from whole ones of training.seq_len={length}; "
                f"nearest: {near_multiples(stage.global_batch_size, unit)}"
            )
    before = 0
    for number, end in enumerate(stage_ends(batch)):
        if end <= before:
            raise ValueError(
                f"{KEY}.{number} ends with step {end}, not after the stage before it, which ends with step {before}; "
                "put the stages in order"
            )
        before = end


def keys_in_stage(batch: BatchKeys, number: int, mesh_sizes: Mapping[str, int]) -> BatchKeys:
    """Return the keys with the batch of stage `number`, as if it were the batch of the whole run.

    A microbatch of the stage has at most as many tokens as one of the run, so that it fits into the same memory. It has
    fewer where the stage's batch is smaller than a microbatch of the run, or is not a multiple of it.

    Raises:
        UserError: the batch does not fit the mesh, with the nearest one that does.
    """
    stage, shards = batch.batch_stages[number], data_shards(mesh_sizes)
    length = stage.seq_len or batch.seq_len
    num_cuts = batch.seq_len // length
    num_sequences = _count_tokens(batch, stage) // length
    if num_sequences % (shards * num_cuts):
        unit = shards * num_cuts
        suffix = f" x {num_cuts} rows cut from each sequence" if num_cuts > 1 else ""
        raise UserError(
            f"{KEY}.{number}.global_batch_size={num_sequences} is not divisible by {unit} = {shards} data shards"
            f"{suffix}; nearest: {near_multiples(num_sequences, unit)}"
        )
    if length % token_shards(mesh_sizes):
        raise UserError(
            f"{KEY}.{number}.seq_len={length} is not divisible by the {token_shards(mesh_sizes)} devices that share a "
            f"sequence (model.mesh_shape); raise it, or leave it out"
        )
    stage_samples = num_sequences // num_cuts // shards
    # The largest number of samples that divides the batch of a shard and is no more than a microbatch of the run.
    rows = max(n for n in list_divisors(stage_samples) if n <= batch.sequences_per_shard)
    changed = {"micro_batch_size": rows * num_cuts, "global_batch_size": num_sequences, "batch_stages": ()}
    unset = dict.fromkeys(("micro_batch_tokens", "global_batch_tokens", "gradient_accumulation_steps"))
    keys = batch.model_copy(update={"seq_len": length, **changed, **unset})
    try:
        keys.batch_shape(mesh_sizes)
        keys.splits_stream(mesh_sizes)
    except UserError as error:
        raise UserError(f"{KEY}.{number}: {error}") from None
    return keys
