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
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.models.block_sums import join_stages
from tunix.models.pipeline import Lanes
from tunix.sharding.layout import Layout
from tunix.training.layer_chunks import Chunks
from tunix.training.scores import ROUTING, LossFn
from tunix.training.staged import Parts, StagedModel
from tunix.training.state import Architecture, Weight
from tunix.training.step import Gradients
from tunix.training.ticks import Ticks
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
        # A device has layers in a row at rest, and a stage's chunks are apart: layers are dealt out before the first
        # tick, and gradients are taken back after the last one.
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
        # Three loops in place of one with conditions: the ticks that only fill or empty the stages are shorter.
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


class Places:
    """Places of parameters and gradients while the ticks run: those of the blocks are arrays [S, L / S, ...].

                     blocks gather (in_blocks)        gathered once               outside of the blocks
    parameter        at rest                          in use                      in use
    gradient so far  summed and split, as at rest     own part, `unreduced`       own part, `unreduced`
    after the ticks  is there already                 summed, split               summed, split
    """

    def __init__(self, lanes: Lanes, layout: Layout, blocks: tuple[str, ...], in_blocks: bool):
        """`blocks` are the names of the stacks of blocks."""
        self.lanes, self.layout, self.blocks, self.in_blocks = lanes, layout, blocks, in_blocks

    def gather(self, path: Any, parameter: jax.Array, weight: Weight) -> jax.Array:
        """Return a parameter as the ticks take it: at rest where blocks gather it themselves, else gathered."""
        rests = self.in_blocks and self._is_in_blocks(path)
        return parameter if rests else self.layout.gather(parameter, weight.equation)

    def zeros(self, path: Any, weight: Weight) -> jax.Array:
        """Return zeros, float32, to add the gradients of the ticks to."""
        if not self._is_in_blocks(path):
            return reshard(jnp.zeros(weight.shape), self.layout.unreduced(weight.equation))
        spec = self._rest(weight) if self.in_blocks else self.layout.unreduced(weight.equation)
        shape = self.lanes.num_stages, weight.shape[0] // self.lanes.num_stages, *weight.shape[1:]
        return reshard(jnp.zeros(shape), self.lanes.spec_of_stages(spec))

    def sum_over_devices(self, path: Any, gradient: jax.Array, weight: Weight) -> jax.Array:
        """Return a gradient summed over devices, of the shape and layout that the step wants."""
        if not self._is_in_blocks(path):
            return self.layout.sum_gradient(gradient, self._rest(weight))
        if not self.in_blocks:
            gradient = self.layout.sum_gradient(gradient, self.lanes.spec_of_stages(self._rest(weight)))
        return gradient.reshape(weight.shape, out_sharding=self._rest(weight))

    def _is_in_blocks(self, path: Any) -> bool:
        return path[0].key in self.blocks

    def _rest(self, weight: Weight) -> PartitionSpec:
        return self.layout.at_rest(weight.equation, self.layout.strategy.gradients)
