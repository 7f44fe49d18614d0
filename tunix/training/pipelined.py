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

A stage keeps the rows that it took until it goes backward through them: of at most 2 S - 1 parts, however many there
are. GPipe (models/pipeline.py) keeps those of all parts of a microbatch. And the parts of all microbatches of a step
follow one another here, so the stages fill and empty once a step.

With several chunks of layers on each stage (interleaved), a part goes through the stages once for each chunk, as
`Turns` says. Layers are dealt out to the stages before the first tick, and gradients are taken back after the last one.

The last stage has one part at a time. Its logits, its loss and the embedding of the part that comes in are the work of
all stages, which split its tokens.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.models.block_sums import join_stages
from tunix.models.pipeline import Lanes
from tunix.models.stacks import Rows
from tunix.sharding.layout import Layout
from tunix.training.layer_chunks import Chunks, add
from tunix.training.scores import ROUTING, LossFn, Sums, add_sums
from tunix.training.staged import Parts, StagedModel, Stream, stream_of, with_stream
from tunix.training.state import Architecture, Weight
from tunix.training.step import Gradients
from tunix.training.turns import Turns


def make_pipelined_gradients(arch: Architecture, loss_fn: LossFn, sync_every: int, num_chunks: int = 1) -> Gradients:
    """Return what `make_gradients` returns: gradients of a step, its weight and its sums.

    Each stage has `num_chunks` chunks of layers.

    Weights outside of the blocks are gathered once, and each device adds up its own part of their gradients until the
    end of the step. Weights of the blocks are gathered in every tick, or once, as the strategy says.
    """
    layout = arch.layout
    in_blocks = layout.gathers_in_blocks(sync_every)

    def gradients(params, batch, seeds):
        lanes = Lanes(layout)
        chunks = Chunks(lanes, num_chunks)
        names = tuple(stack.name for stack in arch.module(params).stacks)
        params = params | {name: jax.tree.map(chunks.deal_out, params[name]) for name in names}
        model, places = arch.module(params), Places(lanes, layout, names, in_blocks)
        with jax.named_scope("gather"):
            weights = jax.tree.map_with_path(places.gather, params, arch.weights)
        parts = Parts(model, lanes, batch, seeds, layout.with_tokens_on_stages())
        turns = Turns(lanes.num_stages, num_chunks, parts.count)
        ticks = Ticks(StagedModel(arch, loss_fn, params, weights, parts, chunks), turns)

        d_outside = jax.tree.map_with_path(places.zeros, arch.trained_weights)
        d_blocks = jax.tree.map(chunks.split_stage, {name: d_outside.pop(name) for name in names})
        carry = ticks.start(d_blocks, d_outside)
        for begin, end, does in turns.loops:
            tick = partial(ticks.tick, forward=does["forward"], backward=does["backward"])
            carry, _ = jax.lax.scan(tick, carry, jnp.arange(begin, end))

        sums, d_outside = carry.sums, carry.d_outside
        if carry.routing is not None:
            sums = sums | {ROUTING: chunks.in_order(join_stages(jax.tree.map(chunks.join_stage, carry.routing)))}
        with jax.named_scope("reduce"):
            d_blocks = jax.tree.map(chunks.join_stage, carry.d_blocks)
            grads = jax.tree.map_with_path(places.sum_over_devices, d_outside | d_blocks, arch.trained_weights)
            grads = grads | {name: jax.tree.map(chunks.take_back, grads[name]) for name in names}
        return grads, carry.weight, sums

    return gradients


class Carry(NamedTuple):
    """State of the stages between two ticks."""

    kept: Rows  # [S, places, rows, ...]: the rows that each stage took in the last ticks
    forth: Rows  # [S, rows, ...]: rows that each stage has got from the stage before it, to go forward through
    back: Stream  # [S, rows, ...]: gradients that each stage has got from the stage behind it, to go backward through
    d_blocks: Any  # gradients so far, [S, v, L / (S v), ...] for v > 1 chunks, else [S, L / S, ...]
    d_outside: Any
    weight: jax.Array  # of the parts that the last stage has finished
    sums: Sums  # of the same parts
    routing: Any  # of the experts on each stage; None where there are none


class Ticks:
    """Ticks of the schedule: the work of all stages between two times that they send rows to one another.

    `kept` is a ring: what a stage takes in tick t it puts at place t % (2 S v - 1). With one chunk (v = 1), stage s
    goes backward through it 2 (S - 1 - s) ticks later: the last stage at once, the first just before the place is
    needed again.

        place         0    1    2    3    4             S = 3, stage 0
        tick 4       p0   p1   p2   p3   p4             takes p4, then goes backward through p0
        tick 5       p5   p1   p2   p3   p4             takes p5 in its place, then goes backward through p1
    """

    def __init__(self, model: StagedModel, turns: Turns):
        self.model, self.turns, self.parts, self.lanes, self.chunks = (
            model,
            turns,
            model.parts,
            model.lanes,
            model.chunks,
        )
        self.stages = reshard(jnp.arange(turns.num_stages), PartitionSpec(self.lanes.stage_axes))
        self.is_first, self.is_last = self.stages == 0, self.stages == turns.num_stages - 1
        self.blocks, self.outside = model.trained()

    def start(self, d_blocks: Any, d_outside: Any) -> Carry:
        """Return what the first tick takes: zeros, of the shapes that the ticks give."""
        model, parts = self.model, self.parts
        forth = jax.tree.map(jnp.zeros_like, model.enter(self.outside, 0))
        back = stream_of(forth)
        kept = jax.tree.map(lambda x: self.lanes.several(x, self.turns.num_kept), forth)
        first, seed = parts.batch(0), parts.seed(0)
        shapes = jax.eval_shape(lambda: model.loss(self.outside, model.leave(self.is_first, back), first, seed)[1])
        weight, sums = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        turn = self.turns.forward(jnp.asarray(-1), self.stages)
        chunk = self.chunks.take(self.blocks, turn.chunk)
        routing = jax.eval_shape(lambda: model.run_blocks(chunk, back, forth, turn)[1])
        return Carry(kept, forth, back, d_blocks, d_outside, weight, sums, jax.tree.map(self.chunks.zeros, routing))

    def tick(self, carry: Carry, now: jax.Array, *, forward: bool, backward: bool) -> tuple[Carry, None]:
        """Do the work of tick `now`, in the form that `jax.lax.scan` takes.

        While the stages fill, they go forward alone; while they empty, backward alone. In between the last stage
        finishes parts, and begins their backward pass.
        """
        d_finished = jax.tree.map(jnp.zeros_like, carry.back)
        if forward:
            carry, stream = self._go_forward(carry, now)
            if backward:
                carry, d_finished = self._finish_part(carry, now, stream, d_finished)
        return self._go_backward(carry, now, d_finished) if backward else carry, None

    def _go_forward(self, carry: Carry, now: jax.Array) -> tuple[Carry, Stream]:
        """Let every stage compute its rows, keep them, and send the result on. Returns the result too."""
        model, lanes, turn, place = (
            self.model,
            self.lanes,
            self.turns.forward(now, self.stages),
            now % self.turns.num_kept,
        )
        is_due, number = self.turns.entering(now)
        nobody = jax.tree.map(jnp.zeros_like, carry.forth)
        (entering,) = self.turns.if_due(is_due, lambda _: (model.enter(self.outside, number),), nobody)
        rows = lanes.choose(self.is_first & (turn.chunk == 0), entering, carry.forth)
        kept = jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, place, 1), carry.kept, rows)
        stream, more = model.run_blocks(self.chunks.take(self.blocks, turn.chunk), stream_of(rows), rows, turn)
        routing = self.chunks.add(carry.routing, more, turn.chunk)
        return carry._replace(kept=kept, forth=lanes.send(with_stream(rows, stream), 1), routing=routing), stream

    def _finish_part(self, carry: Carry, now: jax.Array, stream: Stream, nothing: Stream) -> tuple[Carry, Stream]:
        """Compute the loss of the part that the last stage has finished, if it has. Returns the gradient of its stream.

        Without such a part the gradient is `nothing`.
        """
        model, (is_due, number) = self.model, self.turns.finishing(now)

        def finish(d_outside, weight, sums, _):
            part, seed = self.parts.batch(number), self.parts.seed(number)
            finished = model.leave(self.is_last, stream)
            _, vjp, (more_weight, more) = jax.vjp(
                lambda outside, stream: model.loss(outside, stream, part, seed), self.outside, finished, has_aux=True
            )
            d_more, d_finished = vjp(jnp.ones((), jnp.float32))
            return add(d_outside, d_more), weight + more_weight, add_sums(sums, more), model.spread(d_finished)

        so_far = carry.d_outside, carry.weight, carry.sums
        d_outside, weight, sums, d_finished = self.turns.if_due(is_due, finish, *so_far, nothing)
        return carry._replace(d_outside=d_outside, weight=weight, sums=sums), d_finished

    def _go_backward(self, carry: Carry, now: jax.Array, d_finished: Stream) -> Carry:
        """Let every stage go backward through rows that it kept, and send the gradient to the stage before it.

        The stage computes its blocks once more, because it kept only what went into them. Behind the first chunk of the
        first stage comes the embedding.
        """
        model, lanes, turn = self.model, self.lanes, self.turns.backward(now, self.stages)
        place = self.turns.taken_at(now, self.stages) % self.turns.num_kept
        rows = jax.tree.map(
            lambda x: jax.vmap(partial(jax.lax.dynamic_index_in_dim, keepdims=False))(x, place), carry.kept
        )
        is_last = self.is_last & (turn.chunk == self.turns.num_chunks - 1)
        # The gradient of a part that is not there is zero: it came from zeros.
        _, vjp, _ = jax.vjp(
            lambda chunk, stream: model.run_blocks(chunk, stream, rows, turn),
            self.chunks.take(self.blocks, turn.chunk),
            stream_of(rows),
            has_aux=True,
        )
        d_chunk, d_before = vjp(lanes.choose(is_last, d_finished, carry.back))
        is_due, number = self.turns.returning(now)

        def enter_again(d_outside):
            d_first, _ = model.leave(self.is_first, d_before)
            part = self.parts.batch(number)
            (more,) = jax.vjp(lambda outside: model.embed(outside, part), self.outside)[1](d_first)
            return (add(d_outside, more),)

        (d_outside,) = self.turns.if_due(is_due, enter_again, carry.d_outside)
        return carry._replace(
            back=lanes.send(d_before, -1),
            d_blocks=self.chunks.add(carry.d_blocks, d_chunk, turn.chunk),
            d_outside=d_outside,
        )


class Places:
    """Where parameters and gradients are while the ticks run: those of the blocks as [S, L / S, ...]."""

    def __init__(self, lanes: Lanes, layout: Layout, blocks: tuple[str, ...], in_blocks: bool):
        """`blocks` are the names of the stacks of blocks."""
        self.lanes, self.layout, self.blocks, self.in_blocks = lanes, layout, blocks, in_blocks

    def gather(self, path: Any, parameter: jax.Array, weight: Weight) -> jax.Array:
        """Return a parameter as the ticks take it: at rest where blocks gather it themselves, else gathered."""
        rests = self.in_blocks and self._is_of_blocks(path)
        return parameter if rests else self.layout.gather(parameter, weight.equation)

    def zeros(self, path: Any, weight: Weight) -> jax.Array:
        """Return zeros, float32, to add the gradients of the ticks to."""
        if not self._is_of_blocks(path):
            return reshard(jnp.zeros(weight.shape), self.layout.unreduced(weight.equation))
        spec = self._rest(weight) if self.in_blocks else self.layout.unreduced(weight.equation)
        shape = self.lanes.num_stages, weight.shape[0] // self.lanes.num_stages, *weight.shape[1:]
        return reshard(jnp.zeros(shape), self.lanes.spec_of_stages(spec))

    def sum_over_devices(self, path: Any, gradient: jax.Array, weight: Weight) -> jax.Array:
        """Return a gradient summed over devices, of the shape and layout that the step wants."""
        if not self._is_of_blocks(path):
            return self.layout.sum_gradient(gradient, self._rest(weight))
        if not self.in_blocks:
            gradient = self.layout.sum_gradient(gradient, self.lanes.spec_of_stages(self._rest(weight)))
        return gradient.reshape(weight.shape, out_sharding=self._rest(weight))

    def _is_of_blocks(self, path: Any) -> bool:
        return path[0].key in self.blocks

    def _rest(self, weight: Weight) -> PartitionSpec:
        return self.layout.at_rest(weight.equation, self.layout.strategy.gradients)
