"""Ticks of a pipeline: the work of all stages between two times that they send rows to one another.

A tick has up to three parts. Which of them a tick has, all stages know before they begin (`Turns.loops`):

    forward    each stage computes the rows that it has got, keeps what went in, and sends the result on
    finish     the last stage's part leaves the stages: its loss, and the gradient of its stream
    backward   each stage computes rows that it kept once more, this time with gradients, and sends these back
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.models.stacks import Rows
from tunix.training.scores import Sums, add_sums
from tunix.training.staged import StagedModel, Stream, replace_stream, take_stream
from tunix.training.state import add_gradients
from tunix.training.turns import Turns


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
        self.model, self.turns = model, turns
        self.parts, self.lanes, self.chunks = model.parts, model.lanes, model.chunks
        self.stages = reshard(jnp.arange(turns.num_stages), PartitionSpec(self.lanes.stage_axes))
        self.is_first, self.is_last = self.stages == 0, self.stages == turns.num_stages - 1
        self.blocks, self.outside = model.trained()

    def start(self, d_blocks: Any, d_outside: Any) -> Carry:
        """Return what the first tick takes: zeros, of the shapes that the ticks give.

        Shapes are traced, because they depend on the model and the loss. No stage has a turn before tick 0.
        """
        model, parts = self.model, self.parts
        forth = jax.tree.map(jnp.zeros_like, model.enter(self.outside, 0))
        back = take_stream(forth)
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
        turn, place = self.turns.forward(now, self.stages), now % self.turns.num_kept
        is_due, number = self.turns.entering(now)
        no_rows = jax.tree.map(jnp.zeros_like, carry.forth)
        (entering,) = self.turns.if_due(is_due, lambda _: (model.enter(self.outside, number),), no_rows)
        # The first stage takes a part of the batch for its first chunk, and for the others what the last stage sends.
        rows = lanes.choose(self.is_first & (turn.chunk == 0), entering, carry.forth)
        kept = jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, place, 1), carry.kept, rows)
        stream, more = model.run_blocks(self.chunks.take(self.blocks, turn.chunk), take_stream(rows), rows, turn)
        routing = self.chunks.add(carry.routing, more, turn.chunk)
        return carry._replace(kept=kept, forth=lanes.send(replace_stream(rows, stream), 1), routing=routing), stream

    def _finish_part(self, carry: Carry, now: jax.Array, stream: Stream, nothing: Stream) -> tuple[Carry, Stream]:
        """Compute the loss of the part that the last stage has finished, if it has. Returns the gradient of its stream.

        Without such a part the gradient is `nothing`. With one chunk on each stage the last stage finishes a part in
        each tick of this loop; with several it does so in some, and the others skip the loss.
        """
        model, (is_due, number) = self.model, self.turns.finishing(now)

        def finish(d_outside, weight, sums, _):
            part, seed = self.parts.batch(number), self.parts.seed(number)
            finished = model.leave(self.is_last, stream)
            _, vjp, (more_weight, more) = jax.vjp(
                lambda outside, stream: model.loss(outside, stream, part, seed), self.outside, finished, has_aux=True
            )
            d_more, d_finished = vjp(jnp.ones((), jnp.float32))
            return (
                add_gradients(d_outside, d_more),
                weight + more_weight,
                add_sums(sums, more),
                model.spread(d_finished),
            )

        so_far = carry.d_outside, carry.weight, carry.sums
        d_outside, weight, sums, d_finished = self.turns.if_due(is_due, finish, *so_far, nothing)
        return carry._replace(d_outside=d_outside, weight=weight, sums=sums), d_finished

    def _go_backward(self, carry: Carry, now: jax.Array, d_finished: Stream) -> Carry:
        """Let every stage go backward through rows that it kept, and send the gradient to the stage before it.

        The stage computes its blocks once more, because it kept only what went into them. Behind the first chunk of the
        first stage comes the embedding.
        """
        model, lanes, turn = self.model, self.lanes, self.turns.backward(now, self.stages)
        place = self.turns.taken_at(now, self.stages) % self.turns.num_kept  # [S]
        # Each stage reads another place of its ring: it took these rows 2 (S - 1 - s) ticks ago with one chunk.
        rows = jax.tree.map(
            lambda x: jax.vmap(partial(jax.lax.dynamic_index_in_dim, keepdims=False))(x, place), carry.kept
        )
        is_last = self.is_last & (turn.chunk == self.turns.num_chunks - 1)
        # The gradient of a bubble is zero: `carry.back` begins as zeros, and a stage hands zeros on.
        _, vjp, _ = jax.vjp(
            lambda chunk, stream: model.run_blocks(chunk, stream, rows, turn),
            self.chunks.take(self.blocks, turn.chunk),
            take_stream(rows),
            has_aux=True,
        )
        d_chunk, d_before = vjp(lanes.choose(is_last, d_finished, carry.back))
        is_due, number = self.turns.returning(now)

        def enter_again(d_outside):
            # The embedding is a lookup: it is computed once more for its gradient.
            d_first, _ = model.leave(self.is_first, d_before)
            part = self.parts.batch(number)
            (more,) = jax.vjp(lambda outside: model.embed(outside, part), self.outside)[1](d_first)
            return (add_gradients(d_outside, more),)

        (d_outside,) = self.turns.if_due(is_due, enter_again, carry.d_outside)
        return carry._replace(
            back=lanes.send(d_before, -1),
            d_blocks=self.chunks.add(carry.d_blocks, d_chunk, turn.chunk),
            d_outside=d_outside,
        )
