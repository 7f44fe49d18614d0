"""Batches: their fields, their order, which only the seed and the sample number decide, and who gives them to the loop.

A batch is a dict of arrays. On the host each process has its own rows of it; on the devices it is one global array a
field. Its dimensions are those of `BatchShape`: A microbatches, B sequences of one microbatch, T tokens.
"""

import copy
import dataclasses
import math
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich.table import Table

from tunix.base.digests import hash_texts
from tunix.base.errors import UserError
from tunix.base.text import as_text
from tunix.config import Config
from tunix.config.batch import BatchKeys, BatchPeriod, BatchSchedule, BatchShape
from tunix.config.data import Mixture
from tunix.config.task import Cycle
from tunix.config.training import read_steps
from tunix.data.image_processors import find_processor
from tunix.sharding.arrays import AnyMesh, local_rows, to_global
from tunix.sharding.layout import activation_spec

Numbers = dict[str, float]  # of one step, by their names in metrics.jsonl
Fields = Mapping[str, "Field"]
Batch = dict[str, Any]  # jax.Array [A, B, T] on the devices; [B, T] inside the loop over microbatches; and `TEACHER`
Example = dict[str, np.ndarray]  # [T], one sequence; or several of them stacked, [A, B, T]


class Field(NamedTuple):
    """Dimensions and dtype of one field."""

    dims: str  # letters of the dimensions: ABT, or AB for one number a sequence
    dtype: str
    # Computes the field from the other fields of a batch [A, B, T]; None if the source of the batches fills it.
    make: Callable[[Example], np.ndarray] | None = None
    sizes: tuple[tuple[str, int], ...] = ()  # of dimensions beside A, B and T, by their letters
    per_token: int = 1  # numbers of each token, side by side in the dimension T

    def shape(self, batch: BatchShape) -> tuple[int, ...]:
        """Return the shape of the field of a whole batch."""
        sizes = dict(zip("ABT", batch, strict=True)) | dict(self.sizes)
        sizes["T"] *= self.per_token
        return tuple(sizes[dim_name] for dim_name in self.dims)


# An item that is no field: the parameters of a teacher, which all microbatches share (training/teacher.py).
TEACHER = "teacher"


def split_shared(batch: Batch) -> tuple[Batch, Batch]:
    """Return the fields of a batch, which have a microbatch dimension, and what all of its microbatches share."""
    shared = {name: batch[name] for name in (TEACHER,) if name in batch}
    return {name: leaf for name, leaf in batch.items() if name not in shared}, shared


# A loss that needs more adds fields to these (`LossKind.fields`).
FIELDS = {
    "tokens": Field("ABT", "int32"),  # what the model reads
    "targets": Field("ABT", "int32"),  # what it should predict: the token after each
    "positions": Field("ABT", "int32"),  # place of each token in its document, from 0
    "segment_ids": Field("ABT", "int32"),  # document of each token, from 1 in every sequence; 0 is padding
    "loss_mask": Field("ABT", "float32"),  # weight of each target in the loss; 0 leaves it out
}


# Images of a batch, in a run of a model with a tower (`model.vision`) and training.images_per_row of at least 1.
#
#     images          [A, B, units, ...] uint8   units of the row's images in turn (data/image_processors.py),
#                                                then zeros: room for P = training.images_per_row images of the largest
#                                                size. gemma3: [A, B, P, H, W, 3]; qwen3_vl: patches [A, B, i, 3, a, b]
#     image_grids     [A, B, P, 2] int32         units of each image, down and across; 0 where there is no image
#     image_index     [A, B, T] int32            which of the row's soft tokens a token is, counted from its first; -1
#                                                of a token of text, and of padding
#
#     tokens        <begin> <image> <image> ... <image> <end> What is this ?      <image>: model.vision.image_token
#     image_index   -1      0       1       ... 255     -1    -1   -1 -1   -1
#
# Pixels are as they were decoded and resized. The model divides them by 255 and normalizes them (models/vision.py).
IMAGES, IMAGE_INDEX, IMAGE_GRIDS = IMAGE_FIELDS = "images", "image_index", "image_grids"  # in the order of `Images`


def image_fields(cfg: Config) -> Fields:
    """Return the fields of images of a run; none where the model has no tower, or its rows no slots."""
    if cfg.model.vision is None or not cfg.training.images_per_row:
        return {}
    processor, per_row = find_processor(cfg.model.vision), cfg.training.images_per_row
    shape = per_row * processor.max_units, *processor.unit_shape

    # Rows without images, of a source that knows of none, have empty slots.
    def fill(name: str, *sizes: int) -> Callable[[Example], np.ndarray]:
        return lambda batch: batch[name] if name in batch else np.zeros((*batch["tokens"].shape[:2], *sizes), np.uint8)

    def fill_index(batch: Example) -> np.ndarray:
        return batch[IMAGE_INDEX] if IMAGE_INDEX in batch else np.full(batch["tokens"].shape, -1, np.int32)

    sizes = tuple(zip(processor.dim_names, shape, strict=True))
    return {
        IMAGES: Field(f"AB{processor.dim_names}", "uint8", fill(IMAGES, *shape), sizes=sizes),
        IMAGE_INDEX: Field("ABT", "int32", fill_index),
        IMAGE_GRIDS: Field("ABjo", "int32", fill(IMAGE_GRIDS, per_row, 2), sizes=(("j", per_row), ("o", 2))),
    }


def abstract_arrays(fields: Fields, shape: BatchShape, mesh: AnyMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes, dtypes and shardings of the fields of a global batch. No array is made."""
    arrays = {}
    for name, field in fields.items():
        sharding = NamedSharding(mesh, activation_spec(field.dims))
        arrays[name] = jax.ShapeDtypeStruct(field.shape(shape), field.dtype, sharding=sharding)
    return arrays


def add_fields(batch: Example, fields: Fields) -> Example:
    """Return a batch with the fields that are computed from its other fields."""
    return batch | {name: field.make(batch).astype(field.dtype) for name, field in fields.items() if field.make}


def empty_example(seq_len: int) -> Example:
    """Return one sequence of padding: zeros [T] in each of `FIELDS`."""
    return {name: np.zeros(seq_len, field.dtype) for name, field in FIELDS.items()}


def split_rows(batch: Example, num_cuts: int) -> Example:
    """Cut each sequence of a batch `[A, B, T]` into rows: `[A, B * num_cuts, T / num_cuts]`.

    A row is what packing would have made of its tokens alone: documents that began before the row begin with it.

        segment_ids   1 1 1 2 2 2 2 0     two rows   1 1 1 2 | 1 1 1 0
        positions     0 1 2 0 1 2 3 0                0 1 2 0 | 0 1 2 0
    """
    if num_cuts == 1:
        return batch
    sizes, num_rows, length = batch["tokens"].shape
    shape = sizes, num_rows * num_cuts, length // num_cuts
    # What is not one number a token, like images, belongs to each row of a sequence.
    rows = {name: x.reshape(shape) if x.ndim == 3 else np.repeat(x, num_cuts, 1) for name, x in batch.items()}
    # In each row, documents are numbered from 1 again, and one that began before the row begins with it. A row that
    # begins with padding has nothing else.
    segments = rows["segment_ids"]
    renumbered = np.where(segments > 0, segments - segments[..., :1] + 1, 0).astype(segments.dtype)
    positions = np.minimum(rows["positions"], np.arange(shape[2], dtype=np.int32))
    return rows | {"segment_ids": renumbered, "positions": positions}


def stack_examples(microbatches: Sequence[Sequence[Example]]) -> Example:
    """Join A lists of B examples, each of `[T]`, to arrays of `[A, B, T]`."""
    names = microbatches[0][0]
    return {name: np.stack([np.stack([example[name] for example in rows]) for rows in microbatches]) for name in names}


def put_rows(sequences: Any, rows: Sequence[int], mesh: Mesh) -> dict[str, jax.Array]:
    """Return some of the `sequences`, by their numbers, on the mesh [B, T]: a process reads those of its devices."""
    local = stack_examples([[sequences[rows[row]] for row in local_rows(mesh, len(rows))]])
    return {name: leaf[0] for name, leaf in to_global(local, mesh).items()}


# Order of samples: which sample of which source comes next, computed from its number alone.


@dataclass(frozen=True)
class Position:
    """Position of a run in its steps and its data. Random numbers follow from the seed and the step.

    The data of a run are one endless sequence of samples, whose order follows from the seed. The position is the number
    of the next sample. It does not name a file, a process or a mesh. So a run also goes on with the next sample on
    another number of devices, and none is lost or repeated.
    """

    step: int
    next_sample: int  # place in the shuffled sequence of training data
    data: str  # fingerprint of that data
    tokenizer: str  # digest
    # Of a mixture: the tokens of each source so far.
    source_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    left_out: list[list[int]] = dataclasses.field(default_factory=list)  # samples [first, end) that no step took
    waiting: str = ""  # answers that were drawn ahead (rl/ahead.py)
    num_extra: int = 0  # samples that no step counts: asked in the place of others, or left out (data/prompts.py)
    curriculum: str = ""  # prompts that are left out for a time (data/prompts.py)
    # Fingerprints of the held-out documents, by source, and of evaluation.sets.NAME.
    held_out: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Samples that the steps so far took."""
        return self.next_sample - self.num_extra - sum(end - first for first, end in self.left_out)


BEGINNING = Position(0, 0, "", "")


class DataSchedule:
    """Samples that each step after a position takes, and those that are left out.

        training.skip_steps=[4:5], 10 samples a step

        step         1       2       3       4       5
        samples    0-9   10-19   20-29   50-59   60-69        30-49, which steps 4 and 5 would have taken, are left out

    Samples are read in cycles: one reading may serve several steps. In pretraining each step has a reading of its own.
    A rollout of GRPO that is learnt from in two steps, with 8 prompts:

        step         1       2       3       4
        samples    0-7     0-7    8-15    8-15        Cycle(samples=8, steps=2)
    """

    def __init__(
        self, start: Position, cycle: Cycle, skip_steps: Sequence[str], stages: Sequence[tuple[int, Cycle]] = ()
    ):
        """`stages` are those that end after `start`, each with its last step and its cycle; `cycle` follows them."""
        self.start, self.cycle = start, cycle
        # Each stage: the last step before it, its last step, its cycle. Every stage has an end, so that the loops below
        # need no case for the last one.
        ends: list[float] = [start.step, *(end for end, _ in stages), math.inf]
        self.stages = list(zip(map(int, ends[:-1]), ends[1:], [*(each for _, each in stages), cycle], strict=True))
        # The steps to leave out. What was left out before `start` is in its position already.
        self.gaps = [steps for steps in map(read_steps, skip_steps) if steps[0] > start.step]

    def taken(self, step: int) -> int:
        """Return the number of samples read by steps start+1 ... step. A rollout that has begun counts whole."""
        return self._count(range(self.start.step + 1, step + 1))

    def next_sample(self, step: int) -> int:
        """Return the first sample behind those of the reading that serves `step`."""
        first_step = self._first_step(step)
        skipped = sum(self._count(steps) for steps in self.gaps if steps[0] <= first_step)
        return self.start.next_sample + self.taken(step) + skipped

    def samples(self, step: int) -> range:
        """Return the samples of the reading that serves `step`."""
        end = self.next_sample(step)
        return range(end - self._stage(step)[1].samples, end)

    def left_out(self, step: int) -> list[list[int]]:
        """Return the samples [first, end) that the run has left out, from its beginning to `step`."""
        ranges = list(self.start.left_out)
        for steps in self.gaps:
            if steps[0] <= self._first_step(step):
                # The samples of a gap lie just before those that its first step takes in their place.
                end = self.samples(steps[0]).start
                ranges.append([end - self._count(steps), end])
        return ranges

    def last_step_within(self, num_samples: int) -> int:
        """Return the last step until which at most so many samples are read after `start`; it ends a reading."""
        step, remaining, cycle = self._locate(num_samples)
        return step + remaining // cycle.samples * cycle.steps

    def steps_of(self, num_samples: int) -> float:
        """Return the steps, with a fraction, that read so many samples after `start`."""
        step, remaining, cycle = self._locate(num_samples)
        return step - self.start.step + remaining / cycle.samples * cycle.steps

    def _locate(self, num_samples: int) -> tuple[int, int, Cycle]:
        """Return the last step before the stage in which so many samples end, the samples in that stage, its cycle."""
        *with_end, (last, _, last_cycle) = self.stages
        for before, end, cycle in with_end:
            of_stage = self._count(range(before + 1, int(end) + 1))
            if num_samples < of_stage:
                return before, num_samples, cycle
            num_samples -= of_stage
        return last, num_samples, last_cycle

    def _count(self, steps: range) -> int:
        """Return how many samples the readings of these steps have; a reading begins with the first of the steps."""
        count = 0
        for before, end, cycle in self.stages:
            num_steps = min(steps.stop - 1, end) - max(steps.start - 1, before)
            count += max(0, math.ceil(num_steps / cycle.steps)) * cycle.samples
        return count

    def _first_step(self, step: int) -> int:
        """Return the first step of the reading that serves `step`."""
        before, cycle = self._stage(step)
        return before + (step - before - 1) // cycle.steps * cycle.steps + 1

    def _stage(self, step: int) -> tuple[int, Cycle]:
        """Return the last step before the stage of `step`, and its cycle."""
        return next((before, cycle) for before, end, cycle in self.stages if step <= end)


def make_data_schedule(cfg: Config, schedule: BatchSchedule, start: Position) -> DataSchedule:
    """Return the samples of the steps of a run that goes on from `start`, with the batches of `schedule_after` it."""
    cycles = [cfg.task.cycle(each.num_samples, each.shape.num_rows // each.num_cuts) for each in schedule.periods]
    ends = [period.last_step or 0 for period in schedule.periods[:-1]]  # all have a last step
    return DataSchedule(start, cycles[-1], cfg.training.skip_steps, list(zip(ends, cycles[:-1], strict=True)))


def schedule_after(start: Position, batch: BatchKeys, mesh_sizes: Mapping[str, int]) -> BatchSchedule:
    """Return the batch of each step of a run that goes on from `start`."""
    return batch.batch_schedule(mesh_sizes, start.step, start.num_samples * batch.seq_len)


# A mixture trains on several sources (parts) with given weights, in stages. Nothing is drawn at random: the samples of
# a stage are dealt out so that after any number of them each part has its share, up to one sample. So a resumed run,
# and any number of processes, see the same order.

PRECISION = 10**6  # shares are whole millionths


class SamplePart(Protocol):
    """Samples of one source, packed sequences or prompts: any of them at the same cost."""

    def __len__(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Tokens in all samples, without padding."""

    @property
    def documents_per_sequence(self) -> float:
        """Documents in one sample, on average."""


Parts = Mapping[str, SamplePart]  # keyed by the name of the source


@dataclass(frozen=True)
class Stage:
    """A period of the run with constant shares. (The run's fingerprint holds this class as text: rename nothing.)"""

    name: str
    first_sample: int
    ratios: tuple[int, ...]  # of samples, one for each part, in millionths


def split_samples(count: int, ratios: tuple[int, ...]) -> list[int]:
    """Return how many of the first `count` samples of a stage are of each part: `count * share / sum(ratios)`, rounded.

    Parts are split off one after the other, as Grain's own `mix` does, so no table of samples is needed. From one
    count to the next exactly one part grows, by one sample.

        shares 1 : 1 : 2     samples    1    2    3    4    5    6    7    8
                             counts    100  110  111  112  212  222  223  224
    """
    left, total, counts = count, sum(ratios), []
    for share in ratios:
        # Whole numbers are exact after any number of samples. With rounded ones a resumed run might count differently.
        remaining = left * (total - share) // total if total else left
        counts.append(left - remaining)
        left, total = remaining, total - share
    return counts


class SampleOrder(grain.transforms.DatasetSelectionMap):
    """Map from a sample's number to its part and its number within the part, over all stages of a run."""

    def __init__(self, stages: list[Stage]):
        self.stages = stages
        self.firsts = [stage.first_sample for stage in stages]
        self.before = [[0] * len(stages[0].ratios)]  # samples of each part before each stage
        for stage, after in pairwise(stages):
            counts = split_samples(after.first_sample - stage.first_sample, stage.ratios)
            self.before.append([a + b for a, b in zip(self.before[-1], counts, strict=True)])

    def __len__(self) -> int:
        return sys.maxsize  # Grain asks for a length; the run ends by its steps

    def count_by_part(self, count: int) -> list[int]:
        """Return how many of the first `count` samples of the run are of each part."""
        number = bisect_right(self.firsts, count) - 1  # the last stage that begins within them, or behind them
        stage = self.stages[number]
        counts = split_samples(count - stage.first_sample, stage.ratios)
        return [a + b for a, b in zip(self.before[number], counts, strict=True)]

    def __getitem__(self, sample: int) -> tuple[int, int]:
        # The sample belongs to the part whose count grows by it.
        before, after = self.count_by_part(sample), self.count_by_part(sample + 1)
        part = next(part for part, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        return part, before[part]


def read_stages(mixture: Mixture | None, parts: Parts, data_schedule: DataSchedule, seq_len: int) -> list[Stage]:
    """Return the stages of a run, in samples; None, a single source, is a mixture of one part with one stage.

    Raises:
        UserError: the stages are out of order, or a weight is too small.
    """
    if mixture is None:
        return [Stage("all", 0, (PRECISION,))]
    stages = [Stage("start", 0, _compute_ratios(mixture, mixture.weights, parts, "data.weights"))]
    for stage in mixture.stages:
        if stage.from_tokens is not None:
            first = -(-stage.from_tokens // seq_len)
        else:
            first = data_schedule.taken(stage.from_step or 0)
        if first <= stages[-1].first_sample:
            raise UserError(
                f"data.stages: stage {stage.name} begins at sample {first}, not after stage {stages[-1].name} "
                f"(sample {stages[-1].first_sample}); put the stages in order"
            )
        ratios = _compute_ratios(mixture, stage.weights, parts, f"data.stages: stage {stage.name}: weights")
        stages.append(Stage(stage.name, first, ratios))
    return stages


def _compute_ratios(mixture: Mixture, weights: dict[str, float], parts: Parts, key: str) -> tuple[int, ...]:
    """Convert the weights of a `key`, which are of samples, tokens or documents, to shares of samples in millionths.
    Raises `UserError` where a weight is not 0, and its share is."""
    per_sample = {
        "sample": lambda part: 1.0,
        "token": lambda part: part.num_tokens / len(part),
        "document": lambda part: part.documents_per_sequence,
    }[mixture.weight_unit]
    # A part whose samples have twice the tokens needs half as many samples for the same weight in tokens.
    samples = [weights[name] / per_sample(part) for name, part in parts.items()]
    ratios = tuple(round(PRECISION * number / sum(samples)) for number in samples)
    if lost := next((name for name, ratio in zip(parts, ratios, strict=True) if weights[name] and not ratio), None):
        raise UserError(
            f"{key}: {lost}={weights[lost]:g} is less than half a millionth of the samples, and no sample would be of "
            f"{lost}; raise it, or set it to 0"
        )
    return ratios


def count_read(order: SampleOrder, first: int, end: int, left_out: Sequence[Sequence[int]]) -> list[int]:
    """Return how many of the samples [first, end) are of each part, without those that were left out.

    `left_out` has ranges of samples [first, end) that do not overlap.
    """

    def count(first: int, end: int) -> np.ndarray:
        return np.subtract(order.count_by_part(end), order.count_by_part(first))

    counts = count(first, end)
    for gap_first, gap_end in left_out:
        begin, stop = max(first, gap_first), min(end, gap_end)
        if begin < stop:
            counts = counts - count(begin, stop)
    return counts.tolist()


class Samples:
    """The samples of a run, packed sequences or prompts, an endless shuffled sequence: sample n follows from the seed
    and its number alone, and is the same on every mesh and number of processes.

    Each part (source) is shuffled anew in each epoch. In a mixture, `SampleOrder` says which part gives sample n.
    """

    def __init__(self, parts: Parts, cfg: Config, data_schedule: DataSchedule, tokens_per_sample: int):
        """`data_schedule` begins at step 0; it says at which sample a stage with `from_step` begins. A sample counts as
        `tokens_per_sample` tokens."""
        self.parts, self.data_schedule, self.tokens_per_sample = parts, data_schedule, tokens_per_sample
        self.mixture = cfg.data if isinstance(cfg.data, Mixture) else None
        self.order = SampleOrder(read_stages(self.mixture, parts, data_schedule, tokens_per_sample))
        shuffled = [grain.MapDataset.source(part).seed(cfg.seed).shuffle().repeat() for part in parts.values()]
        self.samples = grain.MapDataset.select_from_datasets(shuffled, self.order)

    def __getitem__(self, number: int) -> Any:
        return self.samples[number]

    def fingerprint(self, corpus: str) -> str:
        """Return the fingerprint of the samples and their order: that of the corpus, with the stages of a mixture."""
        if self.mixture is None:
            return corpus
        return hash_texts(f"{corpus} {self.order.stages}")

    def stages(self, last_step: int, data_schedule: DataSchedule) -> str:
        """Format the stages of a mixture up to a step: where each begins, the samples and epochs of each part.

        `data_schedule` may go on from a later position than step 0: a run that changed its batch on the way has taken
        other samples than the config says. Samples that training.skip_steps leaves out do not count. Empty for a
        single source.

        Raises:
            UserError: a part would be repeated more often than data.max_epochs allows.
        """
        if self.mixture is None:
            return ""
        order, parts, start = self.order, self.parts, data_schedule.start
        num_samples, left_out = data_schedule.next_sample(last_step), data_schedule.left_out(last_step)
        total = dict(zip(parts, count_read(order, 0, num_samples, left_out), strict=True))
        for name, max_epochs in (self.mixture.max_epochs or {}).items():
            epochs = total[name] / len(parts[name])
            if epochs > max_epochs:
                raise UserError(
                    f"data.max_epochs: the run would read {name} {epochs:.2f} times, more than {max_epochs:g}; "
                    f"lower its weight, shorten the run, give it more data (it has {len(parts[name]):,} sequences, "
                    f"{total[name]:,} are asked for), or raise the cap"
                )
        # A stage that begins behind the end of the run is in the table with no samples. Each part has a line: a mixture
        # may have hundreds.
        table = Table(box=None)
        for column in ("stage", "from step", "from token", "part", "samples", "epochs"):
            table.add_column(column, justify="left" if column in ("stage", "part") else "right")
        for stage, end in zip(order.stages, [*order.firsts[1:], num_samples], strict=True):
            first = stage.first_sample
            counts = count_read(order, min(first, num_samples), min(end, num_samples), left_out)
            skipped = sum(max(0, min(stop, first) - begin) for begin, stop in left_out if begin >= start.next_sample)
            step = start.step + round(data_schedule.steps_of(first - start.next_sample - skipped), 2)
            begin = "begun" if first < start.next_sample else f"{step:,.12g}"
            cells = [stage.name, begin, f"{first * self.tokens_per_sample:,}"]
            for count, (name, part) in zip(counts, parts.items(), strict=True):
                table.add_row(*cells, name, f"{count:,}", f"{count / len(part):.2f}")
                cells = ["", "", ""]
        return as_text(table)

    def position_after(self, step: int, start: Position, data_schedule: DataSchedule) -> Position:
        """Return the position after `step` of a run that goes on from `start`."""
        next_sample, left_out = data_schedule.next_sample(step), data_schedule.left_out(step)
        source_tokens = self.source_tokens(next_sample, left_out)
        return replace(start, step=step, next_sample=next_sample, source_tokens=source_tokens, left_out=left_out)

    def source_tokens(self, next_sample: int, left_out: Sequence[Sequence[int]] = ()) -> dict[str, int]:
        """Return the tokens of each source of a mixture in the samples before `next_sample`, padding included.

        The samples [first, end) that were left out do not count; the numbers add up to the tokens of the run.
        """
        if self.mixture is None:
            return {}
        counts = count_read(self.order, 0, next_sample, left_out)
        return {name: count * self.tokens_per_sample for name, count in zip(self.parts, counts, strict=True)}


# Batches of a corpus, and who gives batches to the training loop.


class TrainBatches(Samples):
    """The training data of a run: each step takes the next samples of one endless shuffled sequence.

    These are A x B samples. In a stage of `training.batch_stages` with shorter sequences a sample becomes several rows.
    """

    def __init__(self, parts: Parts, cfg: Config, batch: BatchKeys, mesh: Mesh, fields: Fields = FIELDS):
        """`fields` are those of the loss."""
        self.cfg, self.batch, self.mesh, self.fields = cfg, batch, mesh, fields
        schedule = schedule_after(BEGINNING, batch, mesh.shape)
        self.set_period(schedule.periods[-1])
        num_sequences, needed = sum(map(len, parts.values())), max(period.num_samples for period in schedule.periods)
        if num_sequences < needed:
            raise UserError(
                f"the training data make {num_sequences} sequences of training.seq_len={cfg.training.seq_len} tokens, "
                f"one step needs {needed}; add data or make the batch or seq_len smaller"
            )
        super().__init__(parts, cfg, make_data_schedule(cfg, schedule, BEGINNING), cfg.training.seq_len)

    def set_period(self, period: BatchPeriod) -> None:
        """Read batches of the shape that a period of the run has."""
        self.batch_size, self.num_cuts = period.num_samples, period.num_cuts
        self.num_rows = period.shape.num_rows // period.num_cuts  # samples of a microbatch, on all processes
        self.rows = local_rows(self.mesh, self.num_rows)  # numbers of the samples of this process among them

    def read(self, first_sample: int) -> Example:
        """Return this process's rows [A, B_local, T] of the batch that starts at `first_sample`.

        A = 2 microbatches of 4 rows, 2 processes; the samples from 0 on

        microbatch 0    0 1 | 2 3        process 0 reads 0 1 4 5
        microbatch 1    4 5 | 6 7        process 1 reads 2 3 6 7
        """
        microbatches = range(first_sample, first_sample + self.batch_size, self.num_rows)
        examples = stack_examples([[self[start + row] for row in self.rows] for start in microbatches])
        return add_fields(split_rows(examples, self.num_cuts), self.fields)

    def iterate(self, first_samples: Sequence[int]) -> Generator[Batch]:
        """Yield the global batches that start at these samples. They are read ahead; any start costs the same."""
        if not first_samples:
            return
        # Threads read ahead, because a page of a mapped file may have to come from a disk, or over the network.
        steps = grain.MapDataset.range(len(first_samples)).map(lambda number: self.read(first_samples[number]))
        options = grain.ReadOptions(self.cfg.loading.read_threads, self.cfg.loading.prefetch_batches)
        for batch in steps.to_iter_dataset(options):
            yield to_global(batch, self.mesh)


class FirstSamples(Sequence[int]):
    """The first sample of each of some steps of a run: computed when asked for, as a run may have millions."""

    def __init__(self, data_schedule: DataSchedule, steps: range):
        self.data_schedule, self.steps = data_schedule, steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, number: Any) -> Any:
        return self.data_schedule.samples(self.steps[number]).start


class BatchSource(Protocol):
    """Source that the training loop asks for its batches.

    The loop hands over the state after the step before. A source that reads a corpus ignores it and reads ahead; a
    source that samples from the model (a rollout) needs its weights.
    """

    phase: str  # what `next` does, for the watchdog
    waits_for_state: bool  # False: `next` may run while the step before does

    def next(self, state: dict[str, Any]) -> tuple[Batch, Numbers]:
        """Return the batch of the next step on the devices, and numbers for the line of that step in metrics.jsonl.

        `tokens`, the tokens of the run after that step, and `data_wait_s` are among the numbers.
        """

    def after(self, step: int, waits: bool = True) -> Position:
        """Return the position in the data after `step`, which a checkpoint of that step keeps.

        Without `waits` it lacks what is still being drawn for later steps.
        """

    def samples(self, step: int) -> range:
        """Return the samples that `step` learns from; of a rollout, all of its prompts."""

    def can_stop(self, step: int) -> bool:
        """Return whether a run that is saved after `step` goes on with the same batches."""

    def close(self) -> None:
        """End reading."""


class PrefetchReader:
    """The batches of a corpus from `start` to the step `last`, read ahead by threads: a `BatchSource`."""

    phase = "reading a batch"
    waits_for_state = False

    def __init__(
        self,
        data: TrainBatches,
        start: Position,
        last: int,
        shared: Batch | None = None,
        complete: Callable[[Any, Batch], Batch] | None = None,
    ):
        """`shared` is what all microbatches of each batch share: `TEACHER`; `complete` fills fields that depend on the
        parameters of the step."""
        self.data, self.start, self.step, self.shared = data, start, start.step, shared or {}
        self.complete = complete
        self.schedule = schedule_after(start, data.batch, data.mesh.shape)
        self.data_schedule = make_data_schedule(data.cfg, self.schedule, start)
        self.batches = self._iterate(last)

    def _iterate(self, last: int) -> Generator[Batch]:
        for period in self.schedule.periods:
            steps = period.steps(self.start.step + 1, last)
            data = copy.copy(self.data)  # the same data in batches of another shape
            data.set_period(period)
            yield from data.iterate(FirstSamples(self.data_schedule, steps))

    def next(self, state: dict[str, Any]) -> tuple[Batch, Numbers]:
        start_time = time.perf_counter()
        batch = next(self.batches)
        wait_s = time.perf_counter() - start_time
        # The devices do this behind the step before: nothing waits for its result here.
        batch = (batch if self.complete is None else self.complete(state["params"], batch)) | self.shared
        self.step += 1
        position = self.after(self.step)
        by_source = {f"tokens_{name}": count for name, count in position.source_tokens.items()}
        tokens = position.num_samples * self.data.tokens_per_sample
        return batch, {"tokens": tokens, **by_source, "data_wait_s": wait_s}

    def after(self, step: int, waits: bool = True) -> Position:
        return self.data.position_after(step, self.start, self.data_schedule)

    def samples(self, step: int) -> range:
        return self.data_schedule.samples(step)

    def can_stop(self, step: int) -> bool:
        return True

    def close(self) -> None:
        self.batches.close()


def choose_evenly(num_samples: int, limit: int) -> list[int]:
    """Return the numbers of at most `limit` samples, spread evenly over all of them."""
    count = min(limit, num_samples)
    return [index * num_samples // count for index in range(count)]


def check_held_out(sequences: Sequence[Example]) -> None:
    """Raise `UserError` where held-out documents make no sequence."""
    if not len(sequences):
        raise UserError(
            "the held-out documents make no sequence of training.seq_len tokens; "
            "add data, raise data.held_out_fraction, or set it to 0 to hold out none"
        )


def read_held_out(sequences: Sequence[Example], num_sequences: int, num_rows: int, rows: list[int]) -> Example:
    """Return sequences spread evenly over the held-out ones as [batches, rows, T]; padding fills up the last batch.

    A batch has `num_rows` rows over the whole mesh, of which this process reads `rows`. Which sequences are read does
    not depend on the mesh.
    """
    check_held_out(sequences)
    chosen = choose_evenly(len(sequences), num_sequences)
    count = len(chosen)
    # A token of padding is no token of an image.
    padding = {name: np.full_like(field, -(name == IMAGE_INDEX)) for name, field in sequences[0].items()}

    def row(index: int) -> Example:
        return sequences[chosen[index]] if index < count else padding

    return stack_examples([[row(start + n) for n in rows] for start in range(0, count, num_rows)])
