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

from tunix.data.batch import Batch
from tunix.models.block_sums import BlockSums, join_stages
from tunix.models.dealing import deal_out, take_back
from tunix.models.pipeline import Lanes
from tunix.models.transformer import Rows, Transformer
from tunix.sharding.layout import Layout
from tunix.training.scores import ROUTING, LossFn, add_sums
from tunix.training.state import Architecture, Weight
from tunix.training.step import Gradients
from tunix.training.turns import Turns


class AfterBlocks:
    """A model whose blocks have run: a loss takes their result, [B, T, D], as if the model had computed it."""

    def __init__(self, model: Transformer, x: jax.Array, penalties: dict[str, jax.Array]):
        self.model, self.x, self.penalties = model, x, penalties

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def hidden(self, *_: Any) -> tuple[jax.Array, BlockSums]:
        """Return the result of the final norm, and the penalties; the routing of experts is counted in the ticks."""
        with jax.named_scope("final_norm"):
            x = self.model.layout.join_stream(self.model.final_norm(self.x))
            return x, BlockSums(self.penalties, None)

    def __call__(self, *tokens: Any) -> jax.Array:
        """Return logits [B, T, V] float32."""
        tables = self.model.tables()
        return self.model.logits(tables, self.hidden()[0])


def make_pipelined_gradients(
    arch: Architecture, loss_fn: LossFn, layout: Layout, sync_every: int, num_chunks: int = 1
) -> Gradients:
    """Return what `make_gradients` returns: gradients of a step, its weight and its sums.

    Each stage has `num_chunks` chunks of layers.

    Weights outside of the blocks are gathered once, and each device adds up its own part of their gradients until the
    end of the step. Weights of the blocks are gathered in every tick, or once, as the strategy says.
    """
    in_blocks, outer = layout.gathers_in_blocks(sync_every), arch.with_tokens_on_stages()

    def gradients(params, batch, seeds):
        lanes = Lanes(layout)
        chunks = Chunks(lanes, num_chunks)
        (stack,) = arch.module(params).stacks
        params = params | {stack.name: jax.tree.map(chunks.deal_out, params[stack.name])}
        model = arch.module(params)
        places = Places(lanes, layout, stack.name, in_blocks)
        with jax.named_scope("gather"):
            weights = jax.tree.map_with_path(places.gather, params, arch.weights)
        _, values = model.layers_of(stack, batch["tokens"].shape[2])
        values = jax.tree.map(chunks.split_values, values)
        parts = {name: lanes.list_parts(x, model.parts_per_stage, outer.layout) for name, x in batch.items()}
        num_stages, num_parts = lanes.num_stages, len(parts["tokens"])
        turns = Turns(num_stages, num_chunks, num_parts)
        stages = reshard(jnp.arange(num_stages), PartitionSpec(lanes.stage_axes))
        parts_of_seed = num_parts // len(seeds)
        entering = list_entering(model, lanes, batch, seeds[0], outer.layout)

        def module(others):
            return outer.module(arch.merge(others, weights_outside) | {stack.name: params[stack.name]})

        def embed(others, part):
            whole = module(others)
            return whole.embed(whole.tables(), part["tokens"], part["positions"])

        def loss(others, stream, part, seed):
            result = loss_fn(AfterBlocks(module(others), *stream), part, seed)  # type: ignore[arg-type]
            return result.objective, (result.weight, result.sums)

        def run_stage(layers, rows, seed):
            rows, routing = model.run_on_stage(stack, layers, rows, model.mix_of_row, seed)
            return stream_of(rows), routing

        def run_stages(blocks, stream, rows, turn):
            """Run a chunk of layers on each stage; `blocks` are its trained weights."""
            layers = arch.merge(blocks, chunks.take(weights_of_blocks, turn.chunk)), chunks.take(values, turn.chunk)
            number = jnp.clip(turn.part, 0, num_parts - 1)
            seed = seeds.at[number // parts_of_seed].get(out_sharding=PartitionSpec(lanes.stage_axes))
            stream, routing = jax.vmap(run_stage)(layers, with_stream(rows, stream), seed)
            return stream, lanes.leave_bubbles_out(routing, turn.part, num_parts)

        def take(parts, number):
            number = jnp.clip(number, 0, num_parts - 1)
            return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), parts)

        def enter(others, number):
            spec, part = model.block_layout.activation, take(parts, number)
            x = stream_on_every_stage(embed(others, part))
            positions = lanes.on_every_stage(part["positions"], spec("BT"))
            segments = lanes.on_every_stage(part["segment_ids"], spec("BS"))
            entered = jax.tree.map(lambda each: lanes.on_every_stage(each, spec("B")), take(entering, number))
            return entered._replace(x=x, positions=positions, beside=segments)

        def leave(condition, stream):
            (x, penalties), spec = stream, outer.layout.activation
            penalties = jax.tree.map(lambda each: lanes.from_stage(condition, each, spec("B")), penalties)
            x = reshard(x, PartitionSpec(lanes.stage_axes, *model.block_layout.activation("BTD")))
            return outer.layout.split_stream(lanes.from_stage(condition, x, spec("BTD"))), penalties

        def spread(stream):
            (x, penalties), spec = stream, model.block_layout.activation
            penalties = jax.tree.map(lambda each: lanes.on_every_stage(each, spec("B")), penalties)
            return stream_on_every_stage(x), penalties

        def stream_on_every_stage(x):
            """[B, t, D] outside of the stages -> [S, B, t, D], the same on each stage, whose axes split no tokens."""
            spec = model.block_layout.activation
            x = lanes.on_every_stage(outer.layout.join_stream(x), spec("BTD"))
            return reshard(x, PartitionSpec(lanes.stage_axes, *spec("BtD")))

        def tick(carry, now, *, forward: bool, backward: bool):
            kept, forth, back, grads, (weight, sums), routing = carry
            d_blocks, d_others = grads
            d_last = jax.tree.map(jnp.zeros_like, back)
            if forward:
                turn = turns.forward(now, stages)
                is_due, number = turns.entering(now)
                (entered,) = turns.if_due(
                    is_due, lambda _: (enter(outside, number),), jax.tree.map(jnp.zeros_like, forth)
                )
                rows = lanes.choose((stages == 0) & (turn.chunk == 0), entered, forth)
                place = now % num_kept
                kept = jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, place, 1), kept, rows)
                y, more_routing = run_stages(chunks.take(blocks, turn.chunk), stream_of(rows), rows, turn)
                routing = chunks.add(routing, more_routing, turn.chunk)
                forth = lanes.send(with_stream(rows, y), 1)
            if forward and backward:  # the last stage may have finished a part
                is_due, number = turns.finishing(now)

                def finish(d_others, weight, sums, _):
                    part, seed = take(parts, number), seeds[number // parts_of_seed]
                    finished = leave(stages == num_stages - 1, y)
                    _, vjp, (more_weight, more) = jax.vjp(
                        lambda others, stream: loss(others, stream, part, seed), outside, finished, has_aux=True
                    )
                    d_outside, d_finished = vjp(jnp.ones((), jnp.float32))
                    return add(d_others, d_outside), weight + more_weight, add_sums(sums, more), spread(d_finished)

                d_others, weight, sums, d_last = turns.if_due(is_due, finish, d_others, weight, sums, d_last)
            if backward:
                turn = turns.backward(now, stages)
                place = turns.taken_at(now, stages) % num_kept
                rows = jax.tree.map(
                    lambda x: jax.vmap(partial(jax.lax.dynamic_index_in_dim, keepdims=False))(x, place), kept
                )
                is_last = (stages == num_stages - 1) & (turn.chunk == num_chunks - 1)
                d_y = lanes.choose(is_last, d_last, back)
                # The gradient of a part that is not there is zero: it came from zeros.
                _, vjp, _ = jax.vjp(
                    lambda blocks, stream: run_stages(blocks, stream, rows, turn),
                    chunks.take(blocks, turn.chunk),
                    stream_of(rows),
                    has_aux=True,
                )
                d_more, d_stream = vjp(d_y)
                d_blocks, back = chunks.add(d_blocks, d_more, turn.chunk), lanes.send(d_stream, -1)
                is_due, number = turns.returning(now)

                def enter_again(d_others):
                    d_first, _ = leave(stages == 0, d_stream)
                    first = take(parts, number)
                    return (add(d_others, jax.vjp(lambda others: embed(others, first), outside)[1](d_first)[0]),)

                (d_others,) = turns.if_due(is_due, enter_again, d_others)
            return (kept, forth, back, (d_blocks, d_others), (weight, sums), routing), None

        weights_of_blocks = jax.tree.map(chunks.split, weights[stack.name])
        weights_outside = {name: tree for name, tree in weights.items() if name != stack.name}
        is_trained = dict(arch.is_trained)
        blocks = keep(weights_of_blocks, is_trained.pop(stack.name))
        outside = keep(weights_outside, is_trained)
        nothing = jax.tree.map_with_path(places.zeros, arch.trained_weights)
        no_blocks = jax.tree.map(chunks.split_stage, nothing.pop(stack.name))

        num_kept = turns.num_kept
        forth = jax.tree.map(jnp.zeros_like, enter(outside, 0))
        back = stream_of(forth)
        kept = jax.tree.map(lambda x: lanes.several(x, num_kept), forth)
        first, seed = take(parts, 0), seeds[0]
        shapes = jax.eval_shape(lambda: loss(outside, leave(stages == 0, back), first, seed)[1])
        weight, sums = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        turn = turns.forward(jnp.asarray(-1), stages)
        routing = jax.eval_shape(lambda: run_stages(chunks.take(blocks, turn.chunk), back, forth, turn)[1])
        routing = jax.tree.map(chunks.zeros, routing)
        carry = kept, forth, back, (no_blocks, nothing), (weight, sums), routing
        for begin, end, does in turns.loops:
            carry, _ = jax.lax.scan(partial(tick, **does), carry, jnp.arange(begin, end))
        *_, (d_blocks, d_others), (weight, sums), routing = carry
        if routing is not None:
            sums = sums | {ROUTING: chunks.in_order(join_stages(jax.tree.map(chunks.join_stage, routing)))}
        with jax.named_scope("reduce"):
            d_blocks = jax.tree.map(chunks.join_stage, d_blocks)
            grads = jax.tree.map_with_path(
                places.sum_over_devices, d_others | {stack.name: d_blocks}, arch.trained_weights
            )
            grads = grads | {stack.name: jax.tree.map(chunks.take_back, grads[stack.name])}
        return grads, weight, sums

    return gradients


def list_entering(model: Transformer, lanes: Lanes, batch: Batch, seed: jax.Array, layout: Layout) -> Rows:
    """Return, for each part of the step, what its rows have on stages beside x and the batch: arrays [M, rows]."""
    count = len(batch["tokens"])
    rows = model.enter_stages(Rows(None, batch["positions"][0], None), seed)._replace(positions=None)

    def of_parts(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(None, *jax.typeof(x).sharding.spec)
        repeated = jnp.broadcast_to(x, (count, *x.shape), out_sharding=spec)
        return lanes.list_parts(repeated, model.parts_per_stage, layout)

    return jax.tree.map(of_parts, rows)


def stream_of(rows: Rows) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return what a stage changes of its rows, and what has a gradient: the residual stream, and penalties."""
    return rows.x, rows.penalties


def with_stream(rows: Rows, stream: tuple[jax.Array, dict[str, jax.Array]]) -> Rows:
    """Return rows with what `stream_of` returns replaced."""
    x, penalties = stream
    return rows._replace(x=x, penalties=penalties)


class Chunks:
    """Chunks of the layers of each stage, [S, v, L / (S v), ...]; one chunk is [S, L / S, ...]."""

    def __init__(self, lanes: Lanes, num_chunks: int):
        self.lanes, self.num_chunks = lanes, num_chunks
        self._of_stages = PartitionSpec(lanes.stage_axes)

    def deal_out(self, x: jax.Array) -> jax.Array:
        """[L, ...] at rest -> [L, ...] in the order of the stages' chunks."""
        return x if self.num_chunks == 1 else deal_out(x, self.lanes.stage_axes, self.lanes.num_stages, self.num_chunks)

    def take_back(self, x: jax.Array) -> jax.Array:
        """The inverse of `deal_out`."""
        return (
            x if self.num_chunks == 1 else take_back(x, self.lanes.stage_axes, self.lanes.num_stages, self.num_chunks)
        )

    def split(self, x: jax.Array) -> jax.Array:
        """[L, ...], dealt out -> chunks."""
        return self.split_stage(self.lanes.split_layers(x))

    def split_values(self, x: jax.Array) -> jax.Array:
        """[L, ...], which every device has, in the order of the layers -> chunks."""
        by_chunk = x.reshape(self.num_chunks, self.lanes.num_stages, -1, *x.shape[1:])
        return self.split(by_chunk.swapaxes(0, 1).reshape(x.shape))

    def in_order(self, tree: Any) -> Any:
        """Return arrays [L, ...], which every device has, in the order of the layers again."""

        def one(x: jax.Array) -> jax.Array:
            by_stage = x.reshape(self.lanes.num_stages, self.num_chunks, -1, *x.shape[1:])
            return by_stage.swapaxes(0, 1).reshape(x.shape)

        return jax.tree.map(one, tree)

    def split_stage(self, x: jax.Array) -> jax.Array:
        """[S, L / S, ...] -> chunks."""
        if self.num_chunks == 1:
            return x
        spec = jax.typeof(x).sharding.spec
        front, others = spec.partitions[0], spec.partitions[2:]
        spec = PartitionSpec(front, None, None, *others, reduced=spec.reduced, unreduced=spec.unreduced)
        return x.reshape(x.shape[0], self.num_chunks, -1, *x.shape[2:], out_sharding=spec)

    def join_stage(self, x: jax.Array) -> jax.Array:
        """Chunks -> [S, L / S, ...]."""
        if self.num_chunks == 1:
            return x
        return x.reshape(x.shape[0], -1, *x.shape[3:], out_sharding=_without_chunks(jax.typeof(x).sharding.spec))

    def take(self, tree: Any, chunk: jax.Array) -> Any:
        """Return the layers of one chunk of each stage, [S, L / (S v), ...]; `chunk` is [S]."""
        if self.num_chunks == 1:
            return tree

        def on_each_stage(x: jax.Array, chunk: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, chunk[0], axis=1, keepdims=False)

        def one(x: jax.Array) -> jax.Array:
            spec = jax.typeof(x).sharding.spec
            taken = jax.shard_map(on_each_stage, in_specs=(spec, self._of_stages), out_specs=_without_chunks(spec))
            return taken(x, chunk)

        return jax.tree.map(one, tree)

    def add(self, total: Any, more: Any, chunk: jax.Array) -> Any:
        """Return totals of all chunks with what is added to one chunk of each stage.

        jax 0.10.2 has no `dynamic_slice` of arrays that are still to be summed over devices, so the chunk comes out of
        a choice among all.
        """
        if self.num_chunks == 1:
            return add(total, more)

        def on_each_stage(total: jax.Array, more: jax.Array, chunk: jax.Array) -> jax.Array:
            own = total[:, 0]
            for number in range(1, self.num_chunks):
                own = jax.lax.select(chunk[0] == number, total[:, number], own)
            return jax.lax.dynamic_update_slice_in_dim(total, (own + more)[:, None], chunk[0], axis=1)

        def one(total: jax.Array, more: jax.Array) -> jax.Array:
            spec, more = jax.typeof(total).sharding.spec, more.astype(total.dtype)
            specs = spec, _without_chunks(spec), self._of_stages
            return jax.shard_map(on_each_stage, in_specs=specs, out_specs=spec)(total, more, chunk)

        return jax.tree.map(one, total, more)

    def zeros(self, of_chunk: jax.ShapeDtypeStruct) -> jax.Array:
        """Return zeros for all chunks of arrays of this shape, [S, L / (S v), ...]."""
        spec, shape = of_chunk.sharding.spec, of_chunk.shape
        if self.num_chunks == 1:
            return reshard(jnp.zeros(shape, of_chunk.dtype), spec)
        chunks = jnp.zeros((shape[0], self.num_chunks, *shape[1:]), of_chunk.dtype)
        return reshard(chunks, PartitionSpec(spec[0], None, *spec[1:]))


def _without_chunks(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec of [S, layers, ...] for that of [S, v, layers, ...]."""
    front, _, *others = spec.partitions
    return PartitionSpec(front, *others, reduced=spec.reduced, unreduced=spec.unreduced)


class Places:
    """Where parameters and gradients are while the ticks run: those of the blocks as [S, L / S, ...]."""

    def __init__(self, lanes: Lanes, layout: Layout, blocks: str, in_blocks: bool):
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
        return path[0].key == self.blocks

    def _rest(self, weight: Weight) -> PartitionSpec:
        return self.layout.at_rest(weight.equation, self.layout.strategy.gradients)


def keep(tree: Any, is_trained: Any) -> Any:
    """Return the tree with None in the place of what is frozen."""
    return jax.tree.map(lambda leaf, trained: leaf if trained else None, tree, is_trained)


def add(total: Any, more: Any) -> Any:
    """Return the sum of two trees of gradients in the dtype of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
