"""Batches in an order that only the seed and the sample number decide."""

import hashlib
from collections.abc import Iterator

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.data import Mixture
from tunix.data.mixture import SampleOrder, stage_table, stages
from tunix.data.packing import Example, Sequences
from tunix.sharding.arrays import local_rows, to_global
from tunix.sharding.mesh_shape import data_shards


class TrainBatches:
    """The training data of a run: each step takes the next A x B samples of one endless shuffled sequence."""

    def __init__(self, parts: dict[str, Sequences], cfg: Config, mesh: Mesh, num_microbatches: int):
        self.parts, self.cfg, self.mesh, self.num_microbatches = parts, cfg, mesh, num_microbatches
        self.micro_batch = cfg.training.sequences_per_shard * data_shards(mesh.shape)  # B
        self.rows = local_rows(mesh, self.micro_batch)  # of B, those of this process
        num_sequences = sum(map(len, parts.values()))
        if num_sequences < self.batch_size:
            raise UserError(
                f"the training data make {num_sequences} sequences of training.seq_len={cfg.training.seq_len} tokens, "
                f"one step needs {self.batch_size}; add data or make the batch or seq_len smaller"
            )
        self.mixture = cfg.data if isinstance(cfg.data, Mixture) else None
        self.order = SampleOrder(stages(self.mixture, parts, self.batch_size, cfg.training.seq_len))
        shuffled = [grain.MapDataset.source(part).seed(cfg.seed).shuffle().repeat() for part in parts.values()]
        self.samples = grain.MapDataset.select_from_datasets(shuffled, self.order)

    @property
    def batch_size(self) -> int:
        """Sequences of one step."""
        return self.num_microbatches * self.micro_batch

    def fingerprint(self, corpus: str) -> str:
        """Of the order of the samples of `corpus`: its own, and where the stages of a mixture begin."""
        if self.mixture is None:
            return corpus
        return hashlib.sha256(f"{corpus} {self.order.stages}".encode()).hexdigest()[:20]

    def stages(self, num_steps: int) -> str:
        """What a run of `num_steps` takes of each source, as a table; empty where there is one source.

        Raises:
            UserError: more of a source than data.max_epochs allows.
        """
        if self.mixture is None:
            return ""
        num_samples = num_steps * self.batch_size
        return stage_table(
            self.order, self.mixture, self.parts, num_samples, self.batch_size, self.cfg.training.seq_len
        )

    def source_tokens(self, next_sample: int) -> dict[str, int]:
        """Tokens of each source of a mixture in the samples before `next_sample`, padding included; they add up to the
        run's."""
        if self.mixture is None:
            return {}
        counts = self.order.drawn(next_sample)
        return {name: count * self.cfg.training.seq_len for name, count in zip(self.parts, counts, strict=True)}

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
        options = grain.ReadOptions(self.cfg.loading.read_threads, self.cfg.loading.prefetch_batches)
        for batch in steps.to_iter_dataset(options):
            yield to_global(batch, self.mesh)


def held_out_batches(sequences: grain.MapDataset, num_sequences: int, batch_size: int, rows: list[int]) -> Example:
    """Sequences spread evenly over the held-out ones as [batches, rows, T]; masked rows fill up the last batch.

    Which sequences they are does not depend on the mesh.
    """
    count = min(num_sequences, len(sequences))
    if count == 0:
        raise UserError(
            "the held-out documents make no sequence of training.seq_len tokens; "
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
