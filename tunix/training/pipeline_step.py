"""Gradients of a step by 1F1B: the backward pass of a part of the batch begins while other parts go in.

PipeDream's schedule with a flush at the end of the step (Narayanan et al. 2021, arXiv:2006.09503), in one program: all
stages do the same in a tick. In tick t stage s computes forward what stage 0 took in tick t - s, and goes backward
through part t - 2 (S - 1) + s. So the last stage goes backward through a part in the tick in which it finishes it:

    tick           0    1    2    3    4    5    6    7    8         S = 3 stages, M = 5 parts
    stage 0  F    p0   p1   p2   p3   p4
             B                        p0   p1   p2   p3   p4
    stage 1  F         p0   p1   p2   p3   p4
             B                   p0   p1   p2   p3   p4
    stage 2  F              p0   p1   p2   p3   p4
             B              p0   p1   p2   p3   p4
                   |-------| |--------------------| |------|
                    forward    forward, backward     backward        S - 1, M and S - 1 ticks

A stage keeps what it needs of a part until it goes backward through it: of at most 2 S - 1 parts, however many there
are. The parts of all microbatches of a step follow one another, so the stages fill and empty once a step.

With several chunks of layers on each stage (interleaved), a part goes through the stages once for each chunk, as
`Turns` says. Layers are dealt out to the stages before the first tick, and gradients are taken back after the last one.

The last stage has one part at a time. Its logits, its loss and the embedding of the part that comes in are the work of
all stages, which split its tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, reshard

from tunix.data.batches import Batch
from tunix.models.block import Forward, Rows
from tunix.models.layers import NO_SUMS, BlockSums, merge_runs, merge_stages
from tunix.models.pipeline import Chunks, Lanes
from tunix.models.transformer import RowMask, Transformer
from tunix.sharding.layout import Layout
from tunix.training.logprobs import HEAD_SCORES, ROUTING, LossFn, Max, Sums, add_sums
from tunix.training.pipeline_first_layers import FirstLayers
from tunix.training.pipeline_schedule import ScheduleSlot, Turns, assign_slots
from tunix.training.state import Architecture, Weight, add_gradients, keep_trained
from tunix.training.step import Gradients

# Model of a step whose blocks lie on stages, and the parts of the batch that go through it.
#
#    outside of the stages    [rows, t, ...]       one part; all stages split its tokens     embedding, final norm, loss
#    on the stages            [S, rows, T, ...]    each stage has rows of a part of its own  blocks
#
# `StagedModel.enter` and `StagedModel.leave` are the two ways between them.

# What a stage changes of its rows, and what has a gradient: the residual stream x [..., T, D], and the penalties of the
# routers by name, [...].
Stream = tuple[jax.Array, dict[str, jax.Array]]


def take_stream(rows: Rows) -> Stream:
    """Return what a stage changes of its rows: x [..., T, D], and the penalties by name, [...]."""
    return rows.x, rows.penalties


def replace_stream(rows: Rows, stream: Stream) -> Rows:
    """Return rows with x [..., T, D] and penalties [...], what `take_stream` returns, replaced."""
    x, penalties = stream
    return rows._replace(x=x, penalties=penalties)


class AfterBlocks:
    """A model whose blocks have run: a loss takes their result, [B, T, D], as if the model had computed it."""

    def __init__(self, model: Transformer, x: jax.Array, penalties: dict[str, jax.Array]):
        self.model, self.x, self.penalties = model, x, penalties

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def hidden(self, *_: Any) -> tuple[jax.Array, BlockSums]:
        """Return the result of the final norm, [B, T, D], and the penalties; ticks have the numbers of layers."""
        return self.model.finish(self.x), BlockSums(self.penalties, None)

    def __call__(self, *tokens: Any) -> jax.Array:
        """Return logits [B, T, V] float32."""
        vocab_weights = self.model.vocab_weights()
        return self.model.logits(vocab_weights, self.hidden()[0])


class Parts:
    """Parts of the batch of a step, of all its microbatches, in the order in which they go in: arrays [M, rows, ...].

    A number that is that of no part (a bubble) gives the first part or the last one: what comes of it is left out.
    """

    def __init__(self, model: Transformer, lanes: Lanes, batch: Batch, seeds: jax.Array, layout: Layout):
        """`seeds` [A] are those of the microbatches, `layout` is that of one part outside of the stages."""
        # Fields are laid out by parts once, before the first tick: the ticks then take one by its number.
        self.lanes, self.seeds = lanes, seeds

        def split(x: jax.Array) -> jax.Array:
            return lanes.list_parts(x, model.parts_per_stage, layout)

        self.model = model
        self.fields = {name: split(x) for name, x in batch.items()}
        self.entering = jax.tree.map(split, self.on_stages(batch))
        self.count = len(self.fields["tokens"])
        self.per_microbatch = self.count // len(seeds)

    def on_stages(self, batch: Batch) -> Rows:
        """Return what the rows of a batch [A, B, ...] have on stages beside x and the batch: arrays [A, B]."""

        def repeat(x: jax.Array) -> jax.Array:  # the same in all microbatches
            spec = PartitionSpec(None, *jax.typeof(x).sharding.spec)
            return jnp.broadcast_to(x, (len(self.seeds), *x.shape), out_sharding=spec)

        rows = self.model.stacks.enter_stages(Rows(None, batch["positions"][0], None), self.seeds[0])
        return jax.tree.map(repeat, rows._replace(positions=None))

    def batch(self, number: jax.Array | int) -> Batch:
        """Return the fields of a part, [rows, t]."""
        return self._take(self.fields, number)

    def mask_inputs(self, number: jax.Array | int) -> Rows:
        """Return what the rows of a part have on stages beside x and the batch, [rows]."""
        return self._take(self.entering, number)

    def seed(self, number: jax.Array | int) -> jax.Array:
        """Return the seed, a scalar, of the microbatch of a part."""
        return self.seeds[number // self.per_microbatch]

    def seeds_on_stages(self, numbers: jax.Array) -> jax.Array:
        """Return the seeds [S] of the parts [S] that the stages work on."""
        microbatches = jnp.clip(numbers, 0, self.count - 1) // self.per_microbatch
        return self.seeds.at[microbatches].get(out_sharding=PartitionSpec(self.lanes.stage_axes))

    def _take(self, arrays: Any, number: jax.Array | int) -> Any:
        index = jnp.clip(number, 0, self.count - 1)
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), arrays)


class StagedModel:
    """The model of a step in pieces: blocks whose layers the stages split, blocks before them, and everything else.

    A method takes the trained weights that it is differentiated by: `chunk`, those of one chunk of each stage, `outer`,
    or `first`. They have None in the place of frozen weights, which come from the step.
    """

    def __init__(
        self,
        arch: Architecture,
        loss_fn: LossFn,
        params: dict,
        weights: dict,
        parts: Parts,
        chunks: Chunks,
        reports_scores: bool,
    ):
        """`params` are at rest; `weights` are gathered, unless blocks gather them themselves."""
        self.model, self.arch, self.loss_fn = arch.module(params), arch, loss_fn
        self.model.reports_scores = reports_scores
        self.outer = arch.with_tokens_on_stages()
        self.parts, self.chunks = parts, chunks
        self.lanes = parts.lanes
        self.names, self.first_names = split_stacks(arch)
        self.forward = Forward(self.model.mix_of_row, parts.fields["tokens"].shape[-1])
        values = {name: self.model.stacks.layers_of(name, self.forward)[1] for name in self.names}
        self.values = jax.tree.map(chunks.split_values, values)  # of the layers: windows, angles
        self.stored_blocks = {name: params[name] for name in (*self.names, *self.first_names)}
        self.block_weights = jax.tree.map(chunks.split, {name: weights[name] for name in self.names})
        self.outer_weights = {key: tree for key, tree in weights.items() if key not in self.stored_blocks}
        self.first_weights = {name: weights[name] for name in self.first_names}

    def trained(self) -> tuple[Any, Any, Any]:
        """Return the trained weights of the blocks on stages, those outside of the blocks, and those before stages."""
        pieces = self.block_weights, self.outer_weights, self.first_weights
        blocks, outer, first = (keep_trained(each, {key: self.arch.is_trained[key] for key in each}) for each in pieces)
        return blocks, outer, first

    def embed(self, outer: Any, part: Batch) -> jax.Array:
        """Return the residual stream of a part before the first block, [rows, t, D]."""
        model = self._outer_model(outer)
        return model.embed(model.vocab_weights(), part["tokens"], part["positions"])

    def loss(self, outer: Any, stream: Stream, part: Batch, seed: jax.Array) -> tuple[jax.Array, tuple]:
        """Return the objective of a part whose blocks have run, and with it its weight and its sums, all scalars."""
        after = AfterBlocks(self._outer_model(outer), *stream)
        result = self.loss_fn(after, part, seed)  # type: ignore[arg-type]
        return result.objective, (result.weight, result.sums)

    def run_blocks(self, chunk: Any, stream: Stream, rows: Rows, slot: ScheduleSlot) -> tuple[Stream, Any]:
        """Run the chunk of layers of every stage that has its turn, on the rows of the part that has its turn there.

        Returns:
            The stream [S, rows, T, D], and the numbers of the layers, in which bubbles do not count.
        """
        layers = self._layers(chunk, slot)
        rows, of_layers = self.model.stacks.run_on_stages(layers, replace_stream(rows, stream), self._forward(slot))
        return take_stream(rows), self.lanes.leave_bubbles_out(of_layers, slot.part, self.parts.count)

    def keep_blocks(self, chunk: Any, rows: Rows, slot: ScheduleSlot) -> tuple[Stream, Any, Any]:
        """Return what `run_blocks` does, and what `go_back` takes of it."""
        layers, take = self._list_layers(chunk, slot)
        rows_after, of_layers, kept = self.model.stacks.keep_on_stages(layers, rows, self._forward(slot), take)
        of_layers = self.lanes.leave_bubbles_out(of_layers, slot.part, self.parts.count)
        return take_stream(rows_after), of_layers, (kept, rows._replace(x=None))

    def go_back(self, chunk: Any, kept: Any, slot: ScheduleSlot, d_stream: Stream, d_blocks: Any) -> tuple[Any, Stream]:
        """Return gradients of the blocks with those of a chunk, and the gradient of the stream before it.

        `kept` is what `keep_blocks` kept.
        """
        (kept, rows), (d_x, d_penalties), stacks = kept, d_stream, self.model.stacks
        is_trained = stacks.list_trained(self.arch.is_trained)
        # Layers that gather ahead sum over devices what is still open; it is added when the chunk is done.
        trees = {} if stacks.prefetch else d_blocks
        stacked = {name: jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None) for name, tree in trees.items()}
        layers, take = self._list_layers(chunk, slot)
        d_params, d_x, sums = stacks.go_back_on_stages(
            layers,
            rows._replace(x=d_x),
            self._forward(slot),
            kept,
            d_penalties,
            is_trained,
            {name: leaves for name, (leaves, _) in stacked.items()},
            partial(self.chunks.add_layer, slot.chunk),
            take,
        )
        if sums:
            sums = {name: jax.tree.unflatten(tree, sums[name]) for name, (_, tree) in stacked.items()}
            return sums, (d_x, d_penalties)

        def list_trained(chunk: Any) -> list[jax.Array]:
            pairs = zip(stacks.list_params(self._layers(chunk, slot)), is_trained, strict=True)
            return [param for param, trained in pairs if trained]

        (d_chunk,) = jax.vjp(list_trained, chunk)[1](d_params)
        return self.chunks.add(d_blocks, d_chunk, slot.chunk), (d_x, d_penalties)

    def _layers(self, chunk: Any, slot: ScheduleSlot) -> dict[str, Any]:
        # Trained weights come as an argument, because they are differentiated by; frozen ones are taken from the step.
        frozen, values = (self.chunks.take(tree, slot.chunk) for tree in (self.block_weights, self.values))
        weights = self.arch.merge(chunk, frozen)
        return {name: (weights[name], values[name]) for name in self.names}

    def _list_layers(self, chunk: Any, slot: ScheduleSlot) -> tuple[dict[str, Any], Callable[..., jax.Array] | None]:
        """Return the layers of a chunk, or those of all chunks with what takes one out of them (`Weights.take_one`)."""
        pattern, stacks = self.model.cfg.runs[-1].pattern, self.model.stacks
        if self.chunks.num_chunks == 1 or stacks.prefetch or len(pattern) > len(self.names):
            return self._layers(chunk, slot), None
        values = self.chunks.take(self.values, slot.chunk)
        layers = {name: (self.block_weights[name], values[name]) for name in self.names}
        return layers, partial(self.chunks.take_layer, slot.chunk)

    def _forward(self, slot: ScheduleSlot) -> Forward:
        return self.forward._replace(seed=self.parts.seeds_on_stages(slot.part))

    def around_stages(self, outer: Any, first: Any) -> Transformer:
        """Return the model outside of the stages as all sequences of a batch take it, with no part at work."""
        weights = self.arch.merge(outer, self.outer_weights) | self.arch.merge(first, self.first_weights)
        model = self.arch.module(self.stored_blocks | weights)
        model.reports_scores = self.model.reports_scores
        return model

    def enter(self, outer: Any, number: jax.Array | int, stream: Stream | None = None) -> Rows:
        """Return the rows of a part as the first block takes them, the same on every stage: [S, rows, T, ...].

        `stream` [rows, t, D] is that behind layers before the stages, where there are some.

        Only the first stage uses them. But they are made of tokens that all stages have split among them, so each
        stage gathers all tokens: a gather has the same shape on every device.
        """
        lanes, spec, part = self.lanes, self.model.block_layout.activation, self.parts.batch(number)
        inputs = self.parts.mask_inputs(number)
        x, penalties = (self.embed(outer, part), inputs.penalties) if stream is None else stream
        x, inputs = self._on_every_stage(x), inputs._replace(penalties=penalties)
        positions = lanes.on_every_stage(part["positions"], spec("BT"))
        segments = lanes.on_every_stage(part["segment_ids"], spec("BS"))
        inputs = jax.tree.map(lambda each: lanes.on_every_stage(each, spec("B")), inputs)
        return inputs._replace(x=x, positions=positions, mask_inputs=RowMask(segments, None))

    def leave(self, condition: jax.Array, stream: Stream) -> Stream:
        """Return the stream of the one stage where the condition [S] holds, [rows, t, D], split by all stages.

        The other stages add zeros, and the sum over stages is scattered over the tokens: one reduce-scatter.
        """
        (x, penalties), lanes, spec = stream, self.lanes, self.outer.layout.activation
        penalties = jax.tree.map(lambda each: lanes.from_stage(condition, each, spec("B")), penalties)
        return reshard(lanes.from_stage(condition, x, self._on_the_way), spec("BtD")), penalties

    def spread(self, stream: Stream) -> Stream:
        """Return a stream from outside of the stages on every stage: the opposite of `leave`."""
        (x, penalties), spec = stream, self.model.block_layout.activation
        penalties = jax.tree.map(lambda each: self.lanes.on_every_stage(each, spec("B")), penalties)
        return self._on_every_stage(x), penalties

    def _outer_model(self, outer: Any) -> Transformer:
        return self.outer.module(self.arch.merge(outer, self.outer_weights) | self.stored_blocks)

    def _on_every_stage(self, x: jax.Array) -> jax.Array:
        """Return [rows, t, D] from outside of the stages as [S, rows, t, D], the same on each stage."""
        return self.lanes.on_every_stage(reshard(x, self._on_the_way), self.model.block_layout.activation("BtD"))

    @property
    def _on_the_way(self) -> PartitionSpec:
        """Place of [rows, t, D] between the stages and what is outside: a stage's part of each device's own tokens.

        Outside, a stage has tokens in a row, which its devices split. So a part of the stream that devices split (tp)
        changes places, and is not gathered: with two stages of two devices and four tokens,

                      stage 0, device 0   stage 0, device 1   stage 1, device 0   stage 1, device 1
            stages    0 1                 2 3                 0 1                 2 3
            here      0                   2                   1                   3
            outside   0                   1                   2                   3
        """
        rows, tokens, width = self.model.block_layout.activation("BtD").partitions
        tokens = (tokens,) if isinstance(tokens, str) else tokens or ()
        return PartitionSpec(rows, (*tokens, *self.lanes.stage_axes), width)


# A tick has up to three parts. Which of them a tick has, all stages know before they begin (`Turns.loops`):
#
#     forward    each stage computes the rows that it has got, keeps what went in, and sends the result on
#     finish     the last stage's part leaves the stages: its loss, and the gradient of its stream
#     backward   each stage goes backward through rows of which it has kept values, and sends their gradients back


class Carry(NamedTuple):
    """State of the stages between two ticks."""

    saved: list[jax.Array]  # [slots, ...]: what each stage has kept of parts, for its backward pass
    forth: Rows  # [S, rows, ...]: rows that each stage has got from the stage before it, to go forward through
    back: Stream  # [S, rows, ...]: gradients that each stage has got from the stage behind it, to go backward through
    d_blocks: Any  # gradients so far, [S, v, L / (S v), ...] for v > 1 chunks, else [S, L / S, ...]
    d_outer: Any
    weight: jax.Array  # of the parts that the last stage has finished
    sums: Sums  # of the same parts
    of_layers: BlockSums  # numbers of the layers on each stage, without penalties
    # Of all parts, [M, rows, ...]: the stream behind layers before the stages, in whose place its gradient comes then.
    entries: Stream | None


class Iterations:
    """Ticks of the schedule: the work of all stages between two times that they send rows to one another.

    A stage puts what the backward pass of a part needs into a slot of `saved` (`assign_slots`): the values that
    `training.remat` keeps of each layer, or, with `recompute_runs`, only the rows that it has taken.
    """

    def __init__(self, model: StagedModel, schedule: Turns, recompute_runs: bool, first: FirstLayers | None):
        self.first, self.model, self.schedule = first, model, schedule
        self.parts, self.lanes, self.chunks = model.parts, model.lanes, model.chunks
        self.stages = reshard(jnp.arange(schedule.num_stages), PartitionSpec(self.lanes.stage_axes))
        self.is_first, self.is_last = self.stages == 0, self.stages == schedule.num_stages - 1
        self.blocks, self.outer, _ = model.trained()
        self.slots = assign_slots(schedule.num_stages, schedule.num_chunks, schedule.num_parts)
        self.recompute_runs = recompute_runs

    def start(self, d_blocks: Any, d_outer: Any, entries: Stream | None) -> Carry:
        """Return what the first tick takes: zeros, of the shapes that the ticks give.

        Shapes are traced, because they depend on the model and the loss. No stage has a turn before tick 0.
        """
        model, parts = self.model, self.parts
        forth = jax.tree.map(jnp.zeros_like, model.enter(self.outer, 0, self._take_entry(entries, jnp.asarray(0))))
        back = take_stream(forth)
        first, seed = parts.batch(0), parts.seed(0)
        shapes = jax.eval_shape(lambda: model.loss(self.outer, model.leave(self.is_first, back), first, seed)[1])
        weight, sums = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        slot = self.schedule.forward(jnp.asarray(-1), self.stages)
        chunk = self.chunks.take(self.blocks, slot.chunk)
        _, of_layers, kept = jax.eval_shape(lambda: self._run_blocks(chunk, forth, slot))
        saved = self.lanes.make_ring(jax.tree.leaves(kept), self.slots.num_slots)
        of_layers = jax.tree.map(self.chunks.zeros, of_layers)
        return Carry(saved, forth, back, d_blocks, d_outer, weight, sums, of_layers, entries)

    def tick(self, carry: Carry, now: jax.Array, *, forward: bool, backward: bool) -> tuple[Carry, None]:
        """Do the work of tick `now`, an int32 scalar, in the form that `jax.lax.scan` takes.

        While the stages fill, they go forward alone; while they empty, backward alone. In between the last stage
        finishes parts, and begins their backward pass.
        """
        # Without a finished part the last stage begins with zeros, which add nothing to any gradient.
        d_finished = jax.tree.map(jnp.zeros_like, carry.back)
        if forward:
            carry, stream = self._go_forward(carry, now)
            if backward:
                carry, d_finished = self._finish_part(carry, now, stream, d_finished)
        return self._go_backward(carry, now, d_finished) if backward else carry, None

    def _go_forward(self, carry: Carry, now: jax.Array) -> tuple[Carry, Stream]:
        """Let every stage compute its rows, keep them, and send the result on. Returns the result too."""
        model, lanes = self.model, self.lanes
        slot = self.schedule.forward(now, self.stages)
        is_due, number = self.schedule.entering(now)
        no_rows = jax.tree.map(jnp.zeros_like, carry.forth)
        enter = lambda _: (model.enter(self.outer, number, self._take_entry(carry.entries, number)),)  # noqa: E731
        (entering,) = self.schedule.if_due(is_due, enter, no_rows)
        # The first stage takes a part of the batch for its first chunk, and for the others what the last stage sends.
        rows = lanes.select(self.is_first & (slot.chunk == 0), entering, carry.forth)
        stream, more, kept = self._run_blocks(self.chunks.take(self.blocks, slot.chunk), rows, slot)
        leaves, self.kept_tree = jax.tree.flatten(kept)
        saved = lanes.put(carry.saved, leaves, self._find_slots(self.slots.put, now))
        so_far = carry.of_layers
        routing = self.chunks.add(so_far.routing, more.routing, slot.chunk)
        head_scores = self.chunks.add(so_far.head_scores, more.head_scores, slot.chunk, jnp.maximum)
        of_layers = BlockSums({}, routing, head_scores)
        return carry._replace(
            saved=saved, forth=lanes.send(replace_stream(rows, stream), 1), of_layers=of_layers
        ), stream

    def _run_blocks(self, chunk: Any, rows: Rows, slot: ScheduleSlot) -> tuple[Stream, Any, Any]:
        """Return the stream behind the blocks of each stage, their numbers, and what their backward pass needs."""
        if self.recompute_runs:
            return *self.model.run_blocks(chunk, take_stream(rows), rows, slot), rows
        return self.model.keep_blocks(chunk, rows, slot)

    def _take_entry(self, entries: Stream | None, number: jax.Array) -> Stream | None:
        return self.first.take(entries, number) if self.first is not None and entries is not None else None

    def _find_slots(self, table: np.ndarray, now: jax.Array) -> jax.Array:
        """Return the slots [S] of a tick."""
        return reshard(jnp.asarray(table)[now], PartitionSpec(self.lanes.stage_axes))

    def _finish_part(self, carry: Carry, now: jax.Array, stream: Stream, nothing: Stream) -> tuple[Carry, Stream]:
        """Compute the loss of the part that the last stage has finished, if it has. Returns the gradient of its stream.
        Without such a part the gradient is `nothing`. With one chunk on each stage the last stage finishes a part in
        each tick of this loop; with several it does so in some, and the others skip the loss."""
        model, (is_due, number) = self.model, self.schedule.finishing(now)

        def finish(d_outer, weight, sums, _):
            part, seed = self.parts.batch(number), self.parts.seed(number)
            finished = model.leave(self.is_last, stream)
            _, vjp, (more_weight, more) = jax.vjp(
                lambda outer, stream: model.loss(outer, stream, part, seed), self.outer, finished, has_aux=True
            )
            d_more, d_finished = vjp(jnp.ones((), jnp.float32))
            d_outer, sums = add_gradients(d_outer, d_more), add_sums(sums, more)
            return d_outer, weight + more_weight, sums, model.spread(d_finished)

        so_far = carry.d_outer, carry.weight, carry.sums
        d_outer, weight, sums, d_finished = self.schedule.if_due(is_due, finish, *so_far, nothing)
        return carry._replace(d_outer=d_outer, weight=weight, sums=sums), d_finished

    def _go_backward(self, carry: Carry, now: jax.Array, d_finished: Stream) -> Carry:
        """Let every stage go backward through rows that it kept, and send the gradient to the stage before it. With
        `recompute_runs` the stage computes its blocks once more, because it kept only what went into them. Behind the
        first chunk of the first stage comes the embedding."""
        model, lanes, slot = self.model, self.lanes, self.schedule.backward(now, self.stages)
        kept = jax.tree.unflatten(self.kept_tree, lanes.take(carry.saved, self._find_slots(self.slots.taken, now)))
        is_last = self.is_last & (slot.chunk == self.schedule.num_chunks - 1)
        # The gradient of a bubble is zero: `carry.back` begins as zeros, and a stage hands zeros on.
        chunk, d_stream = self.chunks.take(self.blocks, slot.chunk), lanes.select(is_last, d_finished, carry.back)
        sent = carry.forth, carry.of_layers, carry.d_outer, carry.weight, carry.sums
        if self.recompute_runs:
            kept = lanes.follow(kept, (sent, d_stream))
            run = partial(model.run_blocks, rows=kept, slot=slot)
            d_chunk, d_before = jax.vjp(run, chunk, take_stream(kept), has_aux=True)[1](d_stream)
            d_blocks = self.chunks.add(carry.d_blocks, d_chunk, slot.chunk)
        else:
            d_stream = lanes.follow(d_stream, sent)
            d_blocks, d_before = model.go_back(chunk, kept, slot, d_stream, carry.d_blocks)
        is_due, number = self.schedule.returning(now)

        def leave_stages(d_outer, entries):
            d_first = model.leave(self.is_first, d_before)
            if self.first is not None and entries is not None:
                return d_outer, self.first.put(entries, d_first, number)
            # The embedding is a lookup: it is computed once more for its gradient.
            part = self.parts.batch(number)
            (more,) = jax.vjp(lambda outer: model.embed(outer, part), self.outer)[1](d_first[0])
            return add_gradients(d_outer, more), entries

        d_outer, entries = self.schedule.if_due(is_due, leave_stages, carry.d_outer, carry.entries)
        return carry._replace(back=lanes.send(d_before, -1), d_blocks=d_blocks, d_outer=d_outer, entries=entries)


def split_stacks(arch: Architecture) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the stacks whose layers stages share, and of those before them."""
    first = [name for run in arch.model.first_runs for name in run.pattern]
    return tuple(name for name in arch.model.stacks if name not in first), tuple(first)


def make_pipelined_gradients(
    arch: Architecture, loss_fn: LossFn, sync_every: int, num_chunks: int, recompute_runs: bool, reports_scores: bool
) -> Gradients:
    """Return what `make_gradients` returns: gradients of a step, its weight and its sums.

    Each stage has `num_chunks` chunks of layers. `reports_scores` asks for `BlockSums.head_scores`.

    Weights outside of the blocks are gathered once, and each device adds up its own part of their gradients until the
    end of the step. Weights of the blocks are gathered in every tick, or once, as the strategy says.
    """
    layout = arch.layout
    in_blocks = layout.gathers_in_blocks(sync_every)

    def gradients(params, batch, seeds):
        lanes = Lanes(layout)
        chunks = Chunks(lanes, num_chunks)
        names, first_names = split_stacks(arch)
        # A device has layers in a row at rest, and a stage's chunks are apart: layers are dealt out before the first
        # tick, and gradients are taken back after the last one.
        params = params | {name: jax.tree.map(chunks.deal_out, params[name]) for name in names}
        model, zeros_like = arch.module(params), Zeros(lanes, layout, names, in_blocks)
        with jax.named_scope("gather"):
            weights = jax.tree.map_with_path(zeros_like.gather, params, arch.weights)
        parts = Parts(model, lanes, batch, seeds, layout.with_tokens_on_stages())
        schedule = Turns(lanes.num_stages, num_chunks, parts.count)
        staged = StagedModel(arch, loss_fn, params, weights, parts, chunks, reports_scores)
        first = FirstLayers(staged, batch, seeds) if first_names else None
        iterations = Iterations(staged, schedule, recompute_runs, first)

        d_outer = jax.tree.map_with_path(zeros_like.zeros, arch.trained_weights)
        d_blocks = jax.tree.map(chunks.split_stage, {name: d_outer.pop(name) for name in names})
        d_first = {name: d_outer.pop(name) for name in first_names}
        _, outer, before = staged.trained()
        entries, of_first = (None, NO_SUMS) if first is None else first.forward(outer, before)
        carry = iterations.start(d_blocks, d_outer, entries)
        # Three loops in place of one with conditions: the ticks that only fill or empty the stages are shorter.
        for begin, end, does in schedule.loops:
            tick = partial(iterations.tick, forward=does["forward"], backward=does["backward"])
            ticks = lanes.follow(jnp.arange(begin, end), (carry.forth, carry.back, carry.entries))
            carry, _ = jax.lax.scan(tick, carry, ticks)

        sums, d_outer, d_blocks = carry.sums, carry.d_outer, carry.d_blocks
        if first is not None and carry.entries is not None:
            d_outer, d_first = first.backward(outer, before, carry.entries, d_outer, d_first)
            d_blocks = lanes.follow(d_blocks, (d_outer, d_first))
        of_stages = chunks.in_order(merge_stages(jax.tree.map(chunks.merge_stage, carry.of_layers)))
        # Heads of the layers before the stages are still split over tp.
        of_first = jax.tree.map(lambda x: reshard(x, PartitionSpec()), of_first)
        of_layers = merge_runs(of_first, of_stages)
        if of_layers.routing is not None:
            sums = sums | {ROUTING: of_layers.routing}
        if of_layers.head_scores is not None:
            sums = sums | {HEAD_SCORES: Max(of_layers.head_scores)}
        with jax.named_scope("reduce"):
            d_blocks = jax.tree.map(chunks.merge_stage, d_blocks)
            summed = d_outer | d_first | d_blocks
            grads = jax.tree.map_with_path(zeros_like.sum_over_devices, summed, arch.trained_weights)
            grads = grads | {name: jax.tree.map(chunks.take_back, grads[name]) for name in names}
        return grads, carry.weight, sums

    return gradients


class Zeros:
    """Places of parameters and gradients while the ticks run: those of the blocks are arrays [S, L / S, ...].

                     blocks gather (in_blocks)        gathered once               outside of the blocks
    parameter        at rest                          in use                      in use
    gradient so far  summed and split, as at rest     own part, `unreduced`       own part, `unreduced`
    after the ticks  is there already                 summed, split               summed, split

    Blocks before the stages have the places of other blocks, and no first dimension S.
    """

    def __init__(self, lanes: Lanes, layout: Layout, blocks: tuple[str, ...], in_blocks: bool):
        """`blocks` are the names of the stacks of blocks."""
        self.lanes, self.layout, self.blocks, self.in_blocks = lanes, layout, blocks, in_blocks

    def gather(self, _: Any, parameter: jax.Array, weight: Weight) -> jax.Array:
        """Return a parameter [L, ...] as the ticks take it: at rest where blocks gather it, else gathered."""
        return parameter if self._rests(weight) else self.layout.gather(parameter, weight.equation)

    def zeros(self, path: Any, weight: Weight) -> jax.Array:
        """Return float32 zeros to add gradients of ticks to: [S, L / S, ...] of blocks, else the weight's shape."""
        spec = self._remaining(weight) if self._rests(weight) else self.layout.unreduced(weight.equation)
        if not self._is_in_blocks(path):
            return reshard(jnp.zeros(weight.shape), spec)
        shape = self.lanes.num_stages, weight.shape[0] // self.lanes.num_stages, *weight.shape[1:]
        return reshard(jnp.zeros(shape), self.lanes.spec_of_stages(spec))

    def sum_over_devices(self, path: Any, gradient: jax.Array, weight: Weight) -> jax.Array:
        """Return a gradient summed over devices, of the shape and layout that the step wants."""
        if not self._is_in_blocks(path):
            return gradient if self._rests(weight) else self.layout.sum_gradient(gradient, self._remaining(weight))
        if not self.in_blocks:
            gradient = self.layout.sum_gradient(gradient, self.lanes.spec_of_stages(self._remaining(weight)))
        return gradient.reshape(weight.shape, out_sharding=self._remaining(weight))

    def _rests(self, weight: Weight) -> bool:
        return self.in_blocks and weight.equation.is_stacked

    def _is_in_blocks(self, path: Any) -> bool:
        return path[0].key in self.blocks

    def _remaining(self, weight: Weight) -> PartitionSpec:
        return self.layout.stored(weight.equation)
