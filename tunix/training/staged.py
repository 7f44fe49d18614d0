"""Model of a step whose blocks lie on stages, and the parts of the batch that go through it.

    outside of the stages    [rows, t, ...]       one part; all stages split its tokens     embedding, final norm, loss
    on the stages            [S, rows, T, ...]    each stage has rows of a part of its own  blocks

`StagedModel.enter` and `StagedModel.leave` are the two ways between them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.data.batch import Batch
from tunix.models.block_sums import BlockSums
from tunix.models.forward import Forward, Rows
from tunix.models.pipeline import Lanes
from tunix.models.transformer import Transformer
from tunix.sharding.layout import Layout
from tunix.training.layer_chunks import Chunks
from tunix.training.scores import LossFn, Sums
from tunix.training.state import Architecture, keep_trained
from tunix.training.turns import Turn

# What a stage changes of its rows, and what has a gradient: the residual stream x [..., T, D], and the penalties of the
# routers by name, [...].
Stream = tuple[jax.Array, dict[str, jax.Array]]


def take_stream(rows: Rows) -> Stream:
    """Return what a stage changes of its rows."""
    return rows.x, rows.penalties


def replace_stream(rows: Rows, stream: Stream) -> Rows:
    """Return rows with what `take_stream` returns replaced."""
    x, penalties = stream
    return rows._replace(x=x, penalties=penalties)


class AfterBlocks:
    """A model whose blocks have run: a loss takes their result, [B, T, D], as if the model had computed it."""

    def __init__(self, model: Transformer, x: jax.Array, penalties: dict[str, jax.Array]):
        self.model, self.x, self.penalties = model, x, penalties

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def hidden(self, *_: Any) -> tuple[jax.Array, BlockSums]:
        """Return the result of the final norm, and the penalties; the routing of experts is counted in the ticks."""
        return self.model.finish(self.x), BlockSums(self.penalties, None)

    def __call__(self, *tokens: Any) -> jax.Array:
        """Return logits [B, T, V] float32."""
        tables = self.model.tables()
        return self.model.logits(tables, self.hidden()[0])


class Parts:
    """Parts of the batch of a step, of all its microbatches, in the order in which they go in: arrays [M, rows, ...].

    A number that is that of no part (a bubble) gives the first part or the last one: what comes of it is left out.
    """

    def __init__(self, model: Transformer, lanes: Lanes, batch: Batch, seeds: jax.Array, layout: Layout):
        """`seeds` [A] are those of the microbatches, `layout` is that of one part outside of the stages."""
        # Fields are laid out by parts once, before the first tick: the ticks then take one by its number.
        self.lanes, self.seeds = lanes, seeds
        self.fields = {name: lanes.list_parts(x, model.parts_per_stage, layout) for name, x in batch.items()}
        self.entering = list_entering(model, lanes, batch, seeds[0], layout)
        self.count = len(self.fields["tokens"])
        self.per_microbatch = self.count // len(seeds)

    def batch(self, number: jax.Array | int) -> Batch:
        """Return the fields of a part, [rows, t]."""
        return self._take(self.fields, number)

    def beside(self, number: jax.Array | int) -> Rows:
        """Return what the rows of a part have on stages beside x and the batch, [rows]."""
        return self._take(self.entering, number)

    def seed(self, number: jax.Array | int) -> jax.Array:
        """Return the seed of the microbatch of a part."""
        return self.seeds[number // self.per_microbatch]

    def seeds_on_stages(self, numbers: jax.Array) -> jax.Array:
        """Return the seeds [S] of the parts [S] that the stages work on."""
        spec = PartitionSpec(self.lanes.stage_axes)
        return self.seeds.at[self._clip(numbers) // self.per_microbatch].get(out_sharding=spec)

    def _take(self, arrays: Any, number: jax.Array | int) -> Any:
        place = self._clip(number)
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), arrays)

    def _clip(self, number: jax.Array | int) -> jax.Array:
        return jnp.clip(number, 0, self.count - 1)


def list_entering(model: Transformer, lanes: Lanes, batch: Batch, seed: jax.Array, layout: Layout) -> Rows:
    """Return, for each part of the step, what its rows have on stages beside x and the batch: arrays [M, rows]."""
    count = len(batch["tokens"])
    rows = model.stacks.enter_stages(Rows(None, batch["positions"][0], None), seed)._replace(positions=None)

    def of_parts(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(None, *jax.typeof(x).sharding.spec)
        repeated = jnp.broadcast_to(x, (count, *x.shape), out_sharding=spec)
        return lanes.list_parts(repeated, model.parts_per_stage, layout)

    return jax.tree.map(of_parts, rows)


class StagedModel:
    """The model of a step in two pieces: its blocks, whose layers the stages split, and everything outside of them.

    A method takes the trained weights that it is differentiated by: `chunk`, those of one chunk of each stage, or
    `outside`. They have None in the place of frozen weights, which come from the step.
    """

    def __init__(
        self,
        arch: Architecture,
        loss_fn: LossFn,
        params: dict[str, Any],
        weights: dict[str, Any],
        parts: Parts,
        chunks: Chunks,
    ):
        """`params` are at rest; `weights` are gathered, unless blocks gather them themselves."""
        self.model, self.arch, self.loss_fn = arch.module(params), arch, loss_fn
        self.outer = arch.with_tokens_on_stages()
        self.parts, self.chunks = parts, chunks
        self.lanes = parts.lanes
        self.names = tuple(stack.name for stack in self.model.stacks)
        self.forward = Forward(self.model.mix_of_row, parts.fields["tokens"].shape[-1])
        values = {name: self.model.stacks.layers_of(name, self.forward)[1] for name in self.names}
        self.values = jax.tree.map(chunks.split_values, values)  # of the layers: windows, angles
        self.blocks_at_rest = {name: params[name] for name in self.names}
        self.block_weights = jax.tree.map(chunks.split, {name: weights[name] for name in self.names})
        self.outer_weights = {key: tree for key, tree in weights.items() if key not in self.names}

    def trained(self) -> tuple[Any, Any]:
        """Return the trained weights of the blocks, and those outside of them."""
        is_trained = dict(self.arch.is_trained)
        in_blocks = {name: is_trained.pop(name) for name in self.names}
        return keep_trained(self.block_weights, in_blocks), keep_trained(self.outer_weights, is_trained)

    def embed(self, outside: Any, part: Batch) -> jax.Array:
        """Return the residual stream of a part before the first block, [rows, t, D]."""
        model = self._outer_model(outside)
        return model.embed(model.tables(), part["tokens"], part["positions"])

    def loss(
        self, outside: Any, stream: Stream, part: Batch, seed: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Sums]]:
        """Return the objective of a part whose blocks have run, and beside it its weight and its sums."""
        after = AfterBlocks(self._outer_model(outside), *stream)
        result = self.loss_fn(after, part, seed)  # type: ignore[arg-type]
        return result.objective, (result.weight, result.sums)

    def run_blocks(self, chunk: Any, stream: Stream, rows: Rows, turn: Turn) -> tuple[Stream, Any]:
        """Run the chunk of layers of every stage that has its turn, on the rows of the part that has its turn there.

        Returns:
            The stream [S, rows, T, D], and the routing of the experts, in which bubbles do not count.
        """
        # Trained weights come as an argument, because they are differentiated by; frozen ones are taken from the step.
        frozen, values = (self.chunks.take(tree, turn.chunk) for tree in (self.block_weights, self.values))
        weights = self.arch.merge(chunk, frozen)
        layers = {name: (weights[name], values[name]) for name in self.names}
        forward = self.forward._replace(seed=self.parts.seeds_on_stages(turn.part))
        rows, routing = self.model.stacks.run_on_stages(layers, replace_stream(rows, stream), forward)
        return take_stream(rows), self.lanes.leave_bubbles_out(routing, turn.part, self.parts.count)

    def enter(self, outside: Any, number: jax.Array | int) -> Rows:
        """Return the rows of a part as the first block takes them, the same on every stage: [S, rows, T, ...].

        Only the first stage uses them. But they are made of tokens that all stages have split among them, so each
        stage gathers all tokens: a gather has the same shape on every device.
        """
        lanes, spec, part = self.lanes, self.model.block_layout.activation, self.parts.batch(number)
        x = self._on_every_stage(self.embed(outside, part))
        positions = lanes.on_every_stage(part["positions"], spec("BT"))
        segments = lanes.on_every_stage(part["segment_ids"], spec("BS"))
        beside = jax.tree.map(lambda each: lanes.on_every_stage(each, spec("B")), self.parts.beside(number))
        return beside._replace(x=x, positions=positions, beside=segments)

    def leave(self, condition: jax.Array, stream: Stream) -> Stream:
        """Return the stream of the one stage where the condition [S] holds, [rows, t, D], split by all stages.

        The other stages add zeros, and the sum over stages is scattered over the tokens: one reduce-scatter.
        """
        (x, penalties), lanes, layout = stream, self.lanes, self.outer.layout
        spec = layout.activation
        penalties = jax.tree.map(lambda each: lanes.from_stage(condition, each, spec("B")), penalties)
        x = reshard(x, PartitionSpec(lanes.stage_axes, *self.model.block_layout.activation("BTD")))
        return layout.split_stream(lanes.from_stage(condition, x, spec("BTD"))), penalties

    def spread(self, stream: Stream) -> Stream:
        """Return a stream from outside of the stages on every stage: the opposite of `leave`."""
        (x, penalties), spec = stream, self.model.block_layout.activation
        penalties = jax.tree.map(lambda each: self.lanes.on_every_stage(each, spec("B")), penalties)
        return self._on_every_stage(x), penalties

    def _outer_model(self, outside: Any) -> Transformer:
        return self.outer.module(self.arch.merge(outside, self.outer_weights) | self.blocks_at_rest)

    def _on_every_stage(self, x: jax.Array) -> jax.Array:
        """Return [rows, t, D] from outside of the stages as [S, rows, t, D], the same on each stage.

        The axes of the stages split no tokens there.
        """
        spec = self.model.block_layout.activation
        x = self.lanes.on_every_stage(self.outer.layout.join_stream(x), spec("BTD"))
        return reshard(x, PartitionSpec(self.lanes.stage_axes, *spec("BtD")))
