"""Fields of a batch: names, dimensions and dtypes in one table, and what follows from it.

A batch is a dict of arrays. On the host each process has its own rows of it; on the devices it is one global array a
field. Its dimensions are those of `BatchShape`: A microbatches, B sequences of one microbatch, T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from tunix.config.batch import BatchShape
from tunix.sharding.layout import activation_spec

Batch = dict[str, jax.Array]  # [A, B, T] on the devices; [B, T] inside the loop over microbatches
Example = dict[str, np.ndarray]  # [T], one sequence; or several of them stacked, [A, B, T]


class Field(NamedTuple):
    """Dimensions and dtype of one field."""

    dims: str  # letters of the dimensions: ABT, or AB for one number a sequence
    dtype: str
    # Computes the field from the other fields of a batch [A, B, T]; None if the source of the batches fills it.
    make: "Callable[[Example], np.ndarray] | None" = None


# A loss that needs more adds fields to these (`LossKind.fields`).
FIELDS = {
    "tokens": Field("ABT", "int32"),  # what the model reads
    "targets": Field("ABT", "int32"),  # what it should predict: the token after each
    "positions": Field("ABT", "int32"),  # place of each token in its document, from 0
    "segment_ids": Field("ABT", "int32"),  # document of each token, from 1 in every sequence; 0 is padding
    "loss_mask": Field("ABT", "float32"),  # weight of each target in the loss; 0 leaves it out
}


def abstract_arrays(
    fields: Mapping[str, Field], shape: BatchShape, mesh: Mesh | AbstractMesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes, dtypes and shardings of the fields of a global batch. No array is made."""
    arrays = {}
    for name, field in fields.items():
        sharding = NamedSharding(mesh, activation_spec(field.dims))
        arrays[name] = jax.ShapeDtypeStruct(shape.of(field.dims), field.dtype, sharding=sharding)
    return arrays


def add_fields(batch: Example, fields: Mapping[str, Field]) -> Example:
    """Return a batch with the fields that are computed from its other fields."""
    made = {name: field.make(batch).astype(field.dtype) for name, field in fields.items() if field.make is not None}
    return batch | made


def empty_example(seq_len: int, fields: Mapping[str, Field] = FIELDS) -> Example:
    """Return one sequence of padding: zeros in every field, [T] or a scalar."""
    shape = BatchShape(1, 1, seq_len)
    return {name: np.zeros(shape.of(field.dims[2:]), field.dtype) for name, field in fields.items()}


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
    rows = {name: leaf.reshape(shape) for name, leaf in batch.items()}
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
