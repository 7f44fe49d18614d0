"""Stacks of equal blocks, and how rows of tokens go through them.

Equal blocks are a stack: their parameters are one tree, in which each array has a first dimension L. Stacks may take
turns. So 80 layers are as short a program as 8:

    one stack           blocks 0 1 2 3 ...                          a scan over layers
    stacks take turns   dense_blocks 0 2 4 ..., blocks 1 3 5 ...    a scan over pairs of layers
    one after another   dense_blocks 0 1, blocks 2 3 4 ...          two scans

Each scan is a `Run` of the config: its pattern names the stacks of one turn, here ("dense_blocks", "blocks").

There are three ways through them. Training scans over layers (`Stacks.run`). Where the layout splits the layers into
stages, each stage scans its own (`Stacks.run_on_stages`). In decoding each layer has a cache of its own size, so each
layer is a piece of program of its own (`Stacks.run_apart`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import reshard

from tunix.config import Model
from tunix.config.layers import ExpertsMlp, find_donors
from tunix.config.model import Run
from tunix.models.block import (
    MIXERS,
    MLPS,
    Block,
    Forward,
    Layer,
    OtherPart,
    Rows,
    Steps,
    donate_kv,
    find_part,
    finish,
    finish_parts,
    take_kv,
)
from tunix.models.experts import penalty_names
from tunix.models.kernels import branches_are_cheap
from tunix.models.layer_scan import LayerSlice, Passes, as_variables, gives_wide_gradients, is_narrow
from tunix.models.layers import NO_SUMS, BlockSums, DropoutKey, Initializer, merge_layers, merge_runs
from tunix.models.pipeline import run_stages
from tunix.models.prefetch import PrefetchPasses
from tunix.models.remat import checkpoint_block, merge_blocks, scan_blocks
from tunix.sharding.layout import Layout


class Stack(NamedTuple):
    """Equal blocks, of which one program computes all."""

    name: str  # of their parameters in the tree of the model
    layers: tuple[int, ...]  # numbers of its layers in the whole model
    mixer: str  # key of `MIXERS`
    mlp: str  # key of `MLPS`

    def make(self, cfg: Model, layout: Layout, initializer: Initializer) -> nnx.Module:
        """Return its blocks as one module, whose parameters have a first dimension L."""
        return initializer.make_stack(len(self.layers), lambda own: Block(cfg, layout, self.mixer, self.mlp, own))


def list_stacks(cfg: Model) -> tuple[Stack, ...]:
    """Return the stacks of a model in the order of their first layers."""
    return tuple(
        Stack(name, layers, find_part(MIXERS, cfg, layers[0]), find_part(MLPS, cfg, layers[0]))
        for name, layers in cfg.stacks.items()
    )


class Stacks:
    """The blocks of a model, and how they are run. Iterates over the stacks."""

    def __init__(self, model: Any):
        """`model` is a `Transformer`; an attribute with the name of a stack is what `Stack.make` returned."""
        self.cfg, self.layout, self.remat = model.cfg, model.layout, model.remat
        self.parts_per_stage, self.prefetch = model.parts_per_stage, model.prefetch
        self.gradient_sums = model.gradient_sums
        self.stacks = {stack.name: stack for stack in list_stacks(model.cfg)}
        self.modules = {name: getattr(model, name) for name in self.stacks}
        self.donors = find_donors(model.cfg)

    def __iter__(self) -> Iterator[Stack]:
        return iter(self.stacks.values())

    def run(self, rows: Rows, forward: Forward) -> tuple[Rows, BlockSums]:
        """Run all blocks by scans: rows with x [B, t, D] -> the same after the last block, and sums of all blocks.

        Stages run theirs here for evaluations alone: without dropout, without the routing of experts among the sums.
        """
        if self.layout.stage_axes:
            return self._run_stages(self.cfg.runs[-1], rows, forward)
        return self.scan_runs(self.cfg.runs, rows, forward)

    def scan_runs(self, runs: Sequence[Run], rows: Rows, forward: Forward) -> tuple[Rows, BlockSums]:
        """Run the blocks of these runs, one after the other, by scans; see `run`."""
        sums = NO_SUMS
        for number, run in enumerate(runs):
            rows, local_sums = self._scan_run(run, rows, forward)
            sums = merge_runs(sums, local_sums)
            if number < len(forward.features):  # each of the first layers is a run
                rows = rows._replace(x=rows.x + forward.features[number])
        return rows, sums

    def run_apart(self, rows: Rows, forward: Forward, params: dict[str, list[Any]]) -> tuple[Rows, list]:
        """Run the layers one by one (decoding). Returns hidden states and one cache per layer, whose shapes may differ.

        `params` has, by the name of a stack, the parameters of each of its layers as a tree of their own. A layer's
        number and window are Python's.
        """
        # No scan: its carry has one shape for all layers, and caches of local and of global layers have two.
        windows, caches = self.cfg.list_windows(forward.length), []
        ropes = {stack.name: forward.rope(self.cfg, stack.layers) for stack in self}
        for number in range(self.cfg.num_layers):
            name = self.cfg.stack_of(number)
            index = self.stacks[name].layers.index(number)
            rope = jax.tree.map(lambda x, index=index: x[index], ropes[name])
            inputs = None if forward.inputs is None else forward.inputs[number]
            layer, is_donor = Layer(number, windows[number], rope, inputs), number in self.donors.values()
            x, cache, _ = finish(self._start_layer(name, rows, (params[name][index], layer), forward, is_donor))
            rows = rows._replace(x=x)
            if is_donor:
                rows = rows._replace(shared=(rows.shared or {}) | {self.cfg.heads_of(number).dim_names: cache.kv})
            caches.append(cache.cache if is_donor else cache)
            if number < len(forward.features):
                rows = rows._replace(x=rows.x + forward.features[number])
        return rows, caches

    def layers_of(self, name: str, forward: Forward) -> tuple[Any, Layer]:
        """Return parameters and values of the layers of a stack, arrays [L, ...]."""
        layers, windows = self.stacks[name].layers, self.cfg.list_windows(forward.length)
        numbers, local_windows = jnp.asarray(layers), jnp.asarray([windows[layer] for layer in layers])
        inputs = None if forward.inputs is None else _take_layers(forward.inputs, list(layers))
        return nnx.state(self.modules[name]), Layer(numbers, local_windows, forward.rope(self.cfg, layers), inputs)

    def enter_stages(self, rows: Rows, seed: Any) -> Rows:
        """Return rows of a microbatch, [B, ...], as stages take them: with penalties and, for dropout, numbers [B].

        A part of the batch takes its penalties along from stage to stage. For the dropout of its rows it takes their
        numbers along, so that they draw what they would draw without stages.
        """
        spec = self.layout.activation("B")
        count = len(rows.positions)
        has_dropout = seed is not None and self.cfg.lora.rank and self.cfg.lora.dropout
        numbers = reshard(jnp.arange(count), spec) if has_dropout else None
        penalties = {name: reshard(jnp.zeros(count), spec) for name in penalty_names(self.cfg)}
        return rows._replace(penalties=penalties, numbers=numbers)

    def run_on_stages(self, layers: dict[str, Any], rows: Rows, forward: Forward) -> tuple[Rows, BlockSums]:
        """Run the layers of each stage on its rows, and return the rows, and the numbers of each layer.

        All arrays have a first dimension [S]: layers, the rows of `enter_stages`, and the seeds of `forward`. `layers`
        are parameters and values by the name of a stack. Each stage has some turns of the pattern, each complete, and
        all stages have equally many: so one `vmap` is the program of all stages.
        """
        pattern = self.cfg.runs[-1].pattern

        def run_stage(layers, rows, seed):
            layers = _split_turns(pattern, layers, dim=1 if self.prefetch else 0)
            rows, sums, _ = self._scan(pattern, layers, rows, forward._replace(seed=seed))
            return rows, sums

        if self.prefetch:  # the scan has the stages inside of it (prefetch.py)
            rows, (penalties, *of_layers) = run_stage(layers, rows, forward.seed)
            of_layers = jax.tree.map(lambda x: x.swapaxes(0, 1), of_layers)
        else:
            rows, (penalties, *of_layers) = jax.vmap(run_stage)(layers, rows, forward.seed)
        rows = rows._replace(penalties=jax.tree.map(jnp.add, rows.penalties, penalties))
        return rows, BlockSums({}, *of_layers)

    def keep_on_stages(
        self, layers: dict[str, Any], rows: Rows, forward: Forward, take: Callable[..., jax.Array] | None
    ) -> tuple[Rows, BlockSums, Any]:
        """Return what `run_on_stages` does, and what `go_back_on_stages` needs: kept values, [L / S, S, ...].

        With `take`, parameters are those of all chunks of a stage (`Weights.take_one`).
        """
        passes, values, shared = self._make_stage_passes(layers, rows, forward, take)
        x, results, vjps, _ = passes.keep(passes.weights.values, rows.x, values, shared)
        penalties, *of_layers = _merge_results(results)
        rows = rows._replace(x=x, penalties=jax.tree.map(jnp.add, rows.penalties, penalties))
        return rows, BlockSums({}, *jax.tree.map(lambda x: x.swapaxes(0, 1), of_layers)), (vjps, results)

    def go_back_on_stages(
        self,
        layers: dict[str, Any],
        rows: Rows,
        forward: Forward,
        kept: Any,
        d_penalties: dict[str, jax.Array],
        is_trained: Sequence[bool],
        sums: dict[str, list[jax.Array | None]],
        add: Callable[..., jax.Array],
        take: Callable[..., jax.Array] | None,
    ) -> tuple[list[jax.Array], jax.Array, dict[str, list[jax.Array | None]]]:
        """Return the gradients of the trained `list_params` [S, turns, ...], that of x [S, B, t, D], and the sums;
        `rows` have the gradient behind as x.

        With `sums`, by the name of a stack, layers add their gradients to them by `add`, in the place of the first.
        """
        passes, values, shared = self._make_stage_passes(layers, rows, forward, take)
        passes.slices.add_one = add
        vjps, results = kept
        (d_results,) = jax.vjp(lambda results: _merge_results(results).penalties, results)[1](d_penalties)
        gradients, d_x, sums = passes.go_back(values, shared, vjps, rows.x, d_results, is_trained, sums)
        return [gradient for gradient in gradients if gradient is not None], d_x, sums

    def list_params(self, layers: dict[str, Any]) -> list[jax.Array]:
        """Return the parameters of the layers of each stage, [S, turns, ...], place after place of the pattern."""
        return jax.tree.leaves([params for params, _ in _split_turns(self.cfg.runs[-1].pattern, layers, dim=1)])

    def list_trained(self, is_trained: dict[str, Any]) -> list[bool]:
        """Return whether each of `list_params` is trained, given a tree of all parameters of the model."""
        return jax.tree.leaves([is_trained[name] for name in self.cfg.runs[-1].pattern])

    def _make_stage_passes(
        self, layers: dict[str, Any], rows: Rows, forward: Forward, take: Callable[..., jax.Array] | None
    ) -> tuple[Passes, Any, Any]:
        """Return passes over the layers of each stage, values of the layers, and what all layers share."""
        pattern = self.cfg.runs[-1].pattern
        blocks, _, shared, _ = self._prepare(pattern, rows, forward, ())
        slices = [LayerSlice(name, pattern[:n].count(name), pattern.count(name)) for n, name in enumerate(pattern)]
        passes, values = self._make_passes(pattern, blocks, _split_turns(pattern, layers, dim=1), None, slices)
        passes.weights.take_one = take
        return passes, passes.weights.by_layer(values), shared

    def _run_stages(self, run: Run, rows: Rows, forward: Forward) -> tuple[Rows, BlockSums]:
        """Run the layers of a run on stages: parts of the batch go from stage to stage (pipeline.py)."""
        forward = forward._replace(seed=None)
        layers = {name: self.layers_of(name, forward) for name in dict.fromkeys(run.pattern)}

        def run_layers(layers, rows):
            return self.run_on_stages(layers, rows, forward)[0]

        rows = run_stages(run_layers, layers, self.enter_stages(rows, None), self.layout, self.parts_per_stage)
        return rows, BlockSums(rows.penalties, None)

    def _scan_run(self, run: Run, rows: Rows, forward: Forward) -> tuple[Rows, BlockSums]:
        """Run the layers of a run; its donors leave their keys and values in `Rows.shared`."""
        stacks = {name: self.layers_of(name, forward) for name in run.pattern}
        layers, slices = [], []  # at each place of the pattern
        for index, name in enumerate(run.pattern):
            numbers = run.layers[index :: len(run.pattern)]
            indices = [self.stacks[name].layers.index(number) for number in numbers]
            layers.append(_take_layers(stacks[name], indices))
            slices.append(LayerSlice(name, indices[0], _step_of(indices)))
        donors = {names: run.layers.index(number) for names, number in self.donors.items() if number in run.layers}
        rows, sums, caches = self._scan(run.pattern, tuple(layers), rows, forward, tuple(donors.values()), slices)
        if donors:  # in a run of one turn
            shared = {dim_names: jax.tree.map(lambda x: x[0], caches[index].kv) for dim_names, index in donors.items()}
            rows = rows._replace(shared=shared)
        return rows, sums

    def _scan(
        self,
        pattern: tuple[str, ...],
        layers,
        rows: Rows,
        forward: Forward,
        donors: tuple[int, ...] = (),
        slices: Sequence[LayerSlice] = (),
    ) -> tuple[Rows, BlockSums, list[Any]]:
        """Scan over the turns of a pattern, and return the rows, the sums of the layers, and their caches.

        Gradients of the layers go into `gradient_sums`, where the model has them; `slices` say where to.

        `layers` are parameters and values of the layers at each place of the pattern, arrays [turns, ...], and so are
        the caches. Those at the places `donors` are a `Donation`. Layers that gather ahead on stages are
        [S, turns, ...], and so have all arrays this first dimension; routing is [turns, S].
        """
        blocks, x, shared, num_parts = self._prepare(pattern, rows, forward, donors)
        sums = self.gradient_sums
        if sums is not None and not (sums.slots and sums.can_take(self.layout, self.remat)):
            sums = None
        if self.prefetch or sums is not None:
            passes, values = self._make_passes(pattern, blocks, layers, sums, slices)
            x, results = passes.scan(x, values, shared)
        else:
            x, results = scan_blocks(blocks, x, layers, shared, self.remat)
        x = x if num_parts == 1 else concat_rows(list(x))
        return rows._replace(x=x), _merge_results(results), [cache for _, cache in results]

    def _make_passes(
        self, pattern: tuple[str, ...], blocks: list[Any], layers: Any, sums: Any, slices: Sequence[LayerSlice]
    ) -> tuple[Passes, Any]:
        """Return passes over the layers at each place of a pattern, and the values of these layers."""
        params, values = zip(*layers, strict=True)
        params = tuple(as_variables(self.modules[name], each) for name, each in zip(pattern, params, strict=True))
        # Behind a barrier XLA would write a weight in float32, in place of a cast there and back that it leaves out.
        wide = gives_wide_gradients(params, sums)
        barriers = jax.tree.map(lambda w: not is_narrow(w), params) if wide else True
        block, layout = checkpoint_block(merge_blocks(blocks), self.remat, barriers), self.layout.inside_stage()
        passes = PrefetchPasses if self.prefetch else Passes
        return passes(block, params, layout, sums, slices, self.remat.unrolled), values

    def _prepare(
        self, pattern: tuple[str, ...], rows: Rows, forward: Forward, donors: tuple[int, ...]
    ) -> tuple[list[Any], Any, Any, int]:
        """Return the blocks of a pattern, x as they take it, what they share, and the parts of the batch in x."""

        def block_of(index, name):
            def start(x, params, layer, shared, other=None):
                other_rows, seed, tables = shared
                # The seed comes with the arguments: a backward rule may not close over a value that is traced.
                seeded = forward._replace(seed=seed)
                if (table := tables.get(name)) is not None:
                    turns = tuple(each[layer.rope.kind] for each in table)
                    layer = layer._replace(rope=layer.rope._replace(turns=turns))
                rows = Rows(x, *other_rows)
                return self._start_layer(name, rows, (params, layer), seeded, is_donor=index in donors, other=other)

            def run_block(*arguments):
                x, cache, sums = finish(start(*arguments))
                return x, (sums, cache)

            def run_parts(xs, params, layer, shared):
                parts_of_rows, seed, _ = shared
                other = None if isinstance(self.cfg.mlp, ExpertsMlp) else OtherPart()
                pairs = zip(xs, parts_of_rows, strict=True)
                first, second = (start(x, params, layer, (rows, seed, {}), other) for x, rows in pairs)
                xs, caches, sums = zip(*finish_parts(first, second, other), strict=True)
                assert all(cache is None for cache in caches), "only training splits a batch into parts"
                return xs, (merge_sums(list(sums)), None)

            return run_block if num_parts == 1 else run_parts

        num_parts = 1 if donors or forward.inputs is not None else count_parts(self.layout, rows.x)
        blocks = [block_of(index, name) for index, name in enumerate(pattern)]
        # What a block does not change stays outside: the scan would keep it for each layer. So do sine and cosine,
        # where XLA would compute them in each layer.
        has_tables = branches_are_cheap() and not self.layout.stage_axes and num_parts == 1
        tables = {
            name: forward.rope_tables(self.cfg, self.stacks[name].layers, rows.positions)
            for name in dict.fromkeys(pattern if has_tables else ())
        }
        x, others = rows.x, tuple(rows[1:])
        if num_parts > 1:
            x, others = zip(*((part[0], part[1:]) for part in split_rows(tuple(rows), num_parts)), strict=True)
        return blocks, x, (others, forward.seed, tables), num_parts

    def _start_layer(
        self,
        name: str,
        rows: Rows,
        params_and_layer: tuple[Any, Layer],
        forward: Forward,
        is_donor: bool,
        other: OtherPart | None = None,
    ) -> Steps:
        """Return the steps of a layer of a stack: their result is x, its cache (of a donor a `Donation`), its sums."""
        params, layer = params_and_layer
        dropout_key = None
        if forward.seed is not None:
            # Seed and number of the layer name its random choices: the same on every mesh, and in the second forward
            # pass of a block that is computed again.
            dropout_key = DropoutKey(jax.random.fold_in(jax.random.key(forward.seed), layer.number), rows.numbers)
        # Layers of a stack are alike in this, so any of them tells: `layer.number` may be traced.
        first = self.stacks[name].layers[0]
        if self.cfg.is_shared(first):
            dim_names = self.cfg.heads_of(first).dim_names
            donor = layer._replace(number=self.donors[dim_names])  # the mix looks into the cache of this layer
            mix = take_kv(forward.mix_of(donor, rows.mask_inputs), rows.shared[dim_names])
        else:
            mix = forward.mix_of(layer, rows.mask_inputs)
            mix = donate_kv(mix) if is_donor else mix
        block = nnx.merge(nnx.graphdef(self.modules[name]), params)
        return block.steps(rows.x, rows.positions, layer.rope, mix, dropout_key, layer.inputs, other)


def _merge_results(results: Sequence[tuple[BlockSums, Any]]) -> BlockSums:
    """Return the sums of all layers, given the results of each place of a pattern."""
    return merge_layers([local_sums for local_sums, _ in results])


def _split_turns(pattern: tuple[str, ...], layers: dict[str, Any], dim: int) -> tuple[Any, ...]:
    """Return the layers at each place of a pattern, out of those of each stack; `dim` is that of the layers.

    A stack with two of the three places of a pattern gives its layers to both in turn:

        pattern            blocks    blocks    dense_blocks
        place 0            0 2 4 ...                             every second layer of `blocks`, from the first on
              1                      1 3 5 ...                   from the second on
              2                                0 1 2 ...         all layers of `dense_blocks`
    """
    at_indices = []
    for index, name in enumerate(pattern):
        first, step = pattern[:index].count(name), pattern.count(name)
        take = partial(jax.lax.slice_in_dim, start_index=first, limit_index=None, stride=step, axis=dim)
        at_indices.append(layers[name] if step == 1 else jax.tree.map(take, layers[name]))
    return tuple(at_indices)


def _take_layers(layers: Any, indices: list[int]) -> Any:
    """Return the layers at these places, which have equal distances, of arrays [L, ...]."""
    step = _step_of(indices)

    def take(x: jax.Array) -> jax.Array:
        return x if len(indices) == len(x) else jax.lax.slice_in_dim(x, indices[0], indices[-1] + 1, step)

    return jax.tree.map(take, layers)


def _step_of(indices: list[int]) -> int:
    return indices[1] - indices[0] if len(indices) > 1 else 1


# Parts of a microbatch that take turns within a layer, so that one part computes while rows of the other travel.
#
# Tokens go to experts of other devices and come back, in each layer. With one part nothing can be computed meanwhile;
# two parts do not wait for each other:
#
#     arithmetic    attention 0 | attention 1 | experts 0 | attention 0 of the next layer ...
#     transfers                 | tokens 0    | tokens 1  | sums 0 ...
#
# Devices that split the tokens of the stream exchange them around each branch of a dense layer: `OtherPart` (block.py).
#
# A device splits its own sequences, so a part lies on the devices as the whole does, and no number changes its place.


def count_parts(layout: Layout, x: jax.Array) -> int:
    """Return the parts of rows x [B, t, D]: those of the layout where they divide the sequences of a device, else 1."""
    sizes = jax.sharding.get_abstract_mesh().shape
    local_rows = len(x)
    for axis in layout.batch_axes:
        local_rows //= sizes[axis]
    return 1 if layout.stage_axes else layout.count_parts(local_rows)


def split_rows(rows: Any, num_parts: int) -> list[Any]:
    """Return the parts of a tree of arrays [B, ...]: each device splits its own rows."""

    def split(array: jax.Array) -> tuple[jax.Array, ...]:
        spec = jax.typeof(array).sharding.spec
        return jax.shard_map(
            lambda own: tuple(jnp.split(own, num_parts)), in_specs=spec, out_specs=(spec,) * num_parts
        )(array)

    leaves, tree = jax.tree.flatten(rows)
    return [jax.tree.unflatten(tree, part) for part in zip(*map(split, leaves), strict=True)]


def concat_rows(parts: list[Any]) -> Any:
    """Return the tree of arrays [B, ...] that `split_rows` has split."""

    def join(*arrays: jax.Array) -> jax.Array:
        spec = jax.typeof(arrays[0]).sharding.spec
        return jax.shard_map(lambda *own: jnp.concatenate(own), in_specs=(spec,) * len(arrays), out_specs=spec)(*arrays)

    return jax.tree.map(join, *parts)


def merge_sums(sums: list[BlockSums]) -> BlockSums:
    """Return the sums of a block over all its parts."""
    penalties = concat_rows([each.penalties for each in sums])
    routing = jax.tree.map(lambda *each: sum(each[1:], each[0]), *[each.routing for each in sums])
    head_scores = jax.tree.map(lambda *each: reduce(jnp.maximum, each), *[each.head_scores for each in sums])
    return BlockSums(penalties, routing, head_scores)
