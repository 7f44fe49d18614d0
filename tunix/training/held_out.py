"""Held-out loss on a fixed set of sequences: the same number on every mesh."""

import jax
from jax.sharding import Mesh

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.data.batches import add_fields, read_held_out
from tunix.data.dataset import Corpus
from tunix.data.tokenizer import bytes_by_token
from tunix.sharding.arrays import local_rows, to_global
from tunix.training.logprobs import add_up
from tunix.training.loss import find_loss_kind
from tunix.training.state import Architecture


class HeldOut:
    """A held-out set on the devices, and the loss over it: of the corpus, or one of its `sets` by name."""

    def __init__(
        self, cfg: Config, corpus: Corpus, arch: Architecture, mesh: Mesh, num_rows: int, name: str | None = None
    ):
        """`num_rows` are the sequences of a microbatch; `name` is that of a set of evaluation.sets."""
        sequences = corpus.held_out if name is None else corpus.sets[name]
        arguments = sequences, cfg.evaluation.num_sequences, num_rows
        # Each process reads the whole set once, so that all of them know the same number of bytes.
        everything = read_held_out(*arguments, list(range(num_rows)))
        # Bits per byte count the bytes of the predicted text alone, as the loss does: masked targets have none.
        num_bytes = bytes_by_token(corpus.tokenizer)[everything["targets"]]
        self.num_bytes = int((num_bytes * everything["loss_mask"]).sum())
        if self.num_bytes == 0:
            which = "the held-out sequences" if name is None else f"the sequences of evaluation.sets.{name}"
            raise UserError(
                f"{which} have no "
                "text to be predicted: their answers are empty, or none begins within "
                f"training.seq_len={cfg.training.seq_len} tokens; raise it, hold out more, or set "
                "data.held_out_fraction=0"
            )
        self.kind = find_loss_kind(cfg)
        # The whole set rests on the devices: an evaluation is one program, which waits for no data.
        local = read_held_out(*arguments, local_rows(mesh, num_rows))
        self.batches = to_global(add_fields(local, self.kind.fields), mesh)
        loss_fn = self.kind.make(cfg)

        @jax.jit
        def totals(params, batches):
            def report(_, batch):
                loss = loss_fn(arch.module(params), batch, None)
                return None, (loss.sums, loss.weight)

            # Sums over all batches, divided once at the end: a mean of means is wrong where masks differ.
            return add_up(jax.lax.scan(report, None, batches)[1])

        self.totals = totals

    def evaluate(self, params: dict) -> dict[str, float]:
        """Return the numbers of the held-out set by their names in metrics.jsonl, `loss` among them."""
        sums, weight = self.totals(params, self.batches)
        return self.kind.evaluate(sums, weight, self.num_bytes)

    def cost(self, record: dict[str, float]) -> float:
        """Return the number that is lowest for the best model."""
        return record["loss"]

    def describe(self, record: dict[str, float]) -> str:
        """Return an evaluation in a few words for the log."""
        bits = f", {record['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in record else ""
        return f"loss {record['loss']:.4f}{bits}"
