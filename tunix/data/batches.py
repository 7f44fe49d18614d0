"""Batches: their fields, how they are read in the order of sample_order.py, and who gives them to the loop.

A batch is a dict of arrays. On the host each process has its own rows of it; on the devices it is one global array a
field. Its dimensions are those of `BatchShape`: A microbatches, B sequences of one microbatch, T tokens.
"""

import copy
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import grain
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.batch import BatchKeys, BatchPeriod, BatchShape
from tunix.data.image_processors import find_processor
from tunix.data.sample_order import (
    BEGINNING,
    DataSchedule,
    Parts,
    Position,
    Samples,
    make_data_schedule,
    schedule_after,
)
from tunix.sharding.arrays import local_rows, to_global
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
    padding: int = 0  # of a sequence of nothing but padding
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
        IMAGE_INDEX: Field("ABT", "int32", fill_index, padding=-1),
        IMAGE_GRIDS: Field("ABjo", "int32", fill(IMAGE_GRIDS, per_row, 2), sizes=(("j", per_row), ("o", 2))),
    }


def abstract_arrays(fields: Fields, shape: BatchShape, mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes, dtypes and shardings of the fields of a global batch. No array is made."""
    arrays = {}
    for name, field in fields.items():
        sharding = NamedSharding(mesh, activation_spec(field.dims))
        arrays[name] = jax.ShapeDtypeStruct(field.shape(shape), field.dtype, sharding=sharding)
    return arrays


def add_fields(batch: Example, fields: Fields) -> Example:
    """Return a batch with the fields that are computed from its other fields."""
    return batch | {name: field.make(batch).astype(field.dtype) for name, field in fields.items() if field.make}


def empty_example(seq_len: int, fields: Fields = FIELDS) -> Example:
    """Return one sequence of padding, [T] or a scalar in each field: zeros, or the number that the field pads with."""
    shape = BatchShape(1, 1, seq_len)
    return {name: np.full(field.shape(shape)[2:], field.padding, field.dtype) for name, field in fields.items()}


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
    rows = {
        name: leaf.reshape(shape) if leaf.ndim == 3 else np.repeat(leaf, num_cuts, 1) for name, leaf in batch.items()
    }
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
    """The first sample of each of some steps of a course: computed when asked for, as a run may have millions."""

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

    def after(self, step: int) -> Position:
        """Return the position in the data after `step`, which a checkpoint of that step keeps."""

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

    def after(self, step: int) -> Position:
        return self.data.position_after(step, self.start, self.data_schedule)

    def samples(self, step: int) -> range:
        return self.data_schedule.samples(step)

    def can_stop(self, step: int) -> bool:
        return True

    def close(self) -> None:
        self.batches.close()


def choose_held_out(num_held_out: int, num_sequences: int) -> list[int]:
    """Return the numbers of at most `num_sequences` sequences, spread evenly over the held-out ones."""
    count = min(num_sequences, num_held_out)
    return [index * num_held_out // count for index in range(count)]


def read_held_out(sequences: Sequence[Example], num_sequences: int, num_rows: int, rows: list[int]) -> Example:
    """Return sequences spread evenly over the held-out ones as [batches, rows, T]; padding fills up the last batch.

    A batch has `num_rows` rows over the whole mesh, of which this process reads `rows`. Which sequences are read does
    not depend on the mesh.
    """
    chosen = choose_held_out(len(sequences), num_sequences)
    count = len(chosen)
    if count == 0:
        raise UserError(
            "the held-out documents make no sequence of training.seq_len tokens; "
            "add data, raise data.held_out_fraction, or set it to 0 to hold out none"
        )
    # A token of padding is no token of an image.
    padding = {name: np.full_like(field, -(name == IMAGE_INDEX)) for name, field in sequences[0].items()}

    def row(index: int) -> Example:
        return sequences[chosen[index]] if index < count else padding

    return stack_examples([[row(start + n) for n in rows] for start in range(0, count, num_rows)])
