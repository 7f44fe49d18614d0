"""Sequences packed from a stream, in an order that only the seed and the sample number decide."""

from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from tunix.config import Config, UserError
from tunix.data.corpus import Stream
from tunix.mesh import data_shards, local_rows, to_global

Example = dict[str, np.ndarray]  # tokens targets positions segment_ids: [T] int32; loss_mask: [T] float32


class Packed(grain.sources.RandomAccessDataSource):
    """Sequence i is tokens i*T to (i+1)*T of the stream; documents meet in it, but never see one another.

    `segment_ids` tell a sequence's documents apart, `positions` restart with each. The target of a document's last
    token would be the next document's first: it is masked.
    """

    def __init__(self, stream: Stream, seq_len: int):
        self.stream, self.seq_len = stream, seq_len

    def __len__(self) -> int:
        return max(0, (len(self.stream.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: Any) -> Example:
        first = int(index) * self.seq_len
        tokens = self.stream.tokens[first : first + self.seq_len + 1].astype(np.int32)
        where = np.arange(first, first + self.seq_len + 1)
        document = np.searchsorted(self.stream.starts, where, side="right") - 1
        begins = np.maximum(self.stream.starts[document], first)
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "positions": (where - begins)[:-1].astype(np.int32),
            "segment_ids": (document - document[0] + 1)[:-1].astype(np.int32),
            "loss_mask": (document[1:] == document[:-1]).astype(np.float32),
        }


class TrainBatches:
    """The training data of a run: each step takes the next A x B samples of one endless shuffled sequence."""

    def __init__(self, stream: Stream, cfg: Config, mesh: Mesh, num_microbatches: int):
        self.cfg, self.mesh, self.num_microbatches = cfg, mesh, num_microbatches
        self.micro_batch = cfg.training.micro_batch_size * data_shards(mesh)  # B
        self.rows = local_rows(mesh, self.micro_batch)  # of B, those of this process
        sequences = Packed(stream, cfg.training.seq_len)
        if len(sequences) < self.batch_size:
            raise UserError(
                f"the training data make {len(sequences)} sequences of training.seq_len={cfg.training.seq_len} tokens, "
                f"one step needs {self.batch_size}; add data or make the batch or seq_len smaller"
            )
        self.samples = grain.MapDataset.source(sequences).seed(cfg.seed).shuffle().repeat()

    @property
    def batch_size(self) -> int:
        """Sequences of one step."""
        return self.num_microbatches * self.micro_batch

    def sample_ids(self, first_sample: int) -> range:
        """Places in the shuffled sequence that the step starting at `first_sample` takes."""
        return range(first_sample, first_sample + self.batch_size)

    def read(self, first_sample: int) -> Example:
        """This process's rows [A, B_local, T] of the batch that starts at `first_sample`."""
        microbatches = self.sample_ids(first_sample)[:: self.micro_batch]
        return _stack([[self.samples[start + row] for row in self.rows] for start in microbatches])

    def read_global(self, first_sample: int) -> dict[str, jax.Array]:
        """That batch [A, B, T] on the devices."""
        return to_global(self.read(first_sample), self.mesh)

    def iterate(self, first_sample: int, num_steps: int) -> Iterator[dict[str, jax.Array]]:
        """`num_steps` batches from `first_sample` on, read ahead by threads; starting late costs nothing."""
        if num_steps == 0:
            return
        last = first_sample + num_steps * self.batch_size
        steps = grain.MapDataset.range(first_sample, last, self.batch_size).map(self.read)
        options = grain.ReadOptions(self.cfg.data.read_threads, self.cfg.data.prefetch_batches)
        for batch in steps.to_iter_dataset(options):
            yield to_global(batch, self.mesh)


def held_out_batches(stream: Stream, seq_len: int, num_sequences: int, batch_size: int, rows: list[int]) -> Example:
    """Sequences spread evenly over the held-out stream as [batches, rows, T]; masked rows fill up the last batch.

    Which sequences they are does not depend on the mesh.
    """
    sequences = Packed(stream, seq_len)
    count = min(num_sequences, len(sequences))
    if count == 0:
        raise UserError(
            f"the held-out documents make no sequence of training.seq_len={seq_len} tokens ({len(stream.tokens)} tokens); "
            "add data, raise data.held_out_fraction, or set it to 0 to hold out none"
        )
    filler = {name: np.zeros_like(value) for name, value in sequences[0].items()}

    def row(index: int) -> Example:
        return sequences[index * len(sequences) // count] if index < count else filler

    return _stack([[row(start + n) for n in rows] for start in range(0, count, batch_size)])


def _stack(microbatches: list[list[Example]]) -> Example:
    """[A][B] examples of [T] to one of [A, B, T]."""
    names = microbatches[0][0]
    return {name: np.stack([np.stack([example[name] for example in rows]) for rows in microbatches]) for name in names}
