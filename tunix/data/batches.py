"""Batches in an order that only the seed and the sample number decide, and the sources that give them to the loop."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import grain
from jax.sharding import Mesh

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.data import Mixture
from tunix.data.batch import Batch, Example, empty_example, stack_examples
from tunix.data.mixture import SampleOrder, read_stages, stage_table
from tunix.data.packing import Sequences
from tunix.data.position import Position
from tunix.sharding.arrays import local_rows, to_global

Numbers = dict[str, float]  # of one step, by their names in metrics.jsonl


class TrainBatches:
    """The training data of a run: each step takes the next A x B samples of one endless shuffled sequence."""

    def __init__(self, parts: dict[str, Sequences], cfg: Config, mesh: Mesh):
        self.parts, self.cfg, self.mesh = parts, cfg, mesh
        self.shape = cfg.training.batch_shape(mesh.shape)
        self.rows = local_rows(mesh, self.shape.num_rows)  # of B, those of this process
        num_sequences = sum(map(len, parts.values()))
        if num_sequences < self.batch_size:
            raise UserError(
                f"the training data make {num_sequences} sequences of training.seq_len={cfg.training.seq_len} tokens, "
                f"one step needs {self.batch_size}; add data or make the batch or seq_len smaller"
            )
        self.mixture = cfg.data if isinstance(cfg.data, Mixture) else None
        self.order = SampleOrder(read_stages(self.mixture, parts, self.batch_size, cfg.training.seq_len))
        shuffled = [grain.MapDataset.source(part).seed(cfg.seed).shuffle().repeat() for part in parts.values()]
        self.samples = grain.MapDataset.select_from_datasets(shuffled, self.order)

    @property
    def batch_size(self) -> int:
        """Sequences of one step."""
        return self.shape.num_sequences

    def fingerprint(self, corpus: str) -> str:
        """Fingerprint of the samples and their order: the corpus's own, and where the stages of a mixture begin."""
        if self.mixture is None:
            return corpus
        return hashlib.sha256(f"{corpus} {self.order.stages}".encode()).hexdigest()[:20]

    def stages(self, num_steps: int) -> str:
        """Return a table of the sequences that `num_steps` steps take of each source; empty for a single source.

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
        counts = self.order.count_by_part(next_sample)
        return {name: count * self.cfg.training.seq_len for name, count in zip(self.parts, counts, strict=True)}

    def read(self, first_sample: int) -> Example:
        """This process's rows [A, B_local, T] of the batch that starts at `first_sample`."""
        microbatches = range(first_sample, first_sample + self.batch_size, self.shape.num_rows)
        return stack_examples([[self.samples[start + row] for row in self.rows] for start in microbatches])

    def iterate(self, first_sample: int, num_steps: int) -> Iterator[Batch]:
        """Global batches of `num_steps` steps from `first_sample` on, read ahead; any start costs the same."""
        if num_steps == 0:
            return
        last = first_sample + num_steps * self.batch_size
        steps = grain.MapDataset.range(first_sample, last, self.batch_size).map(self.read)
        options = grain.ReadOptions(self.cfg.loading.read_threads, self.cfg.loading.prefetch_batches)
        for batch in steps.to_iter_dataset(options):
            yield to_global(batch, self.mesh)


class BatchSource(Protocol):
    """Source that the training loop asks for its batches.

    The loop hands over the state after the step before. A source that reads a corpus ignores it and reads ahead; a
    source that samples from the model (a rollout) needs its weights.
    """

    def next(self, state: dict[str, Any]) -> tuple[Batch, Numbers]:
        """The batch of the next step on the devices, and numbers for the line of that step in metrics.jsonl.

        `tokens`, the tokens of the run after that step, and `data_wait_s` are among the numbers.
        """

    def after(self, step: int) -> Position:
        """Return the position in the data after `step`, which a checkpoint of that step keeps."""


class ReadAhead:
    """The batches of a corpus from `start` to the step `last`, read ahead by threads: a `BatchSource`."""

    def __init__(self, data: TrainBatches, start: Position, last: int):
        self.data, self.start, self.step = data, start, start.step
        self.batches = data.iterate(start.next_sample, last - start.step)

    def next(self, state: dict[str, Any]) -> tuple[Batch, Numbers]:
        begun = time.perf_counter()
        batch = next(self.batches)
        wait_s = time.perf_counter() - begun
        self.step += 1
        position = self.after(self.step)
        by_source = {f"tokens_{name}": count for name, count in position.source_tokens.items()}
        tokens = position.next_sample * self.data.shape.seq_len
        return batch, {"tokens": tokens, **by_source, "data_wait_s": wait_s}

    def after(self, step: int) -> Position:
        next_sample = self.start.next_sample + (step - self.start.step) * self.data.batch_size
        source_tokens = self.data.source_tokens(next_sample)
        return replace(self.start, step=step, next_sample=next_sample, source_tokens=source_tokens)


def read_held_out(sequences: grain.MapDataset, num_sequences: int, num_rows: int, rows: list[int]) -> Example:
    """Sequences spread evenly over the held-out ones as [batches, rows, T]; padding fills up the last batch.

    A batch has `num_rows` rows over the whole mesh, of which this process reads `rows`. Which sequences are read does
    not depend on the mesh.
    """
    count = min(num_sequences, len(sequences))
    if count == 0:
        raise UserError(
            "the held-out documents make no sequence of training.seq_len tokens; "
            "add data, raise data.held_out_fraction, or set it to 0 to hold out none"
        )
    padding = empty_example(len(sequences[0]["tokens"]))

    def row(index: int) -> Example:
        return sequences[index * len(sequences) // count] if index < count else padding

    return stack_examples([[row(start + n) for n in rows] for start in range(0, count, num_rows)])
