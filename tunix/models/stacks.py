"""Stacks of equal blocks, and how rows of tokens go through them.

Equal blocks are a stack: their parameters are one tree, in which each array has a first dimension L. Stacks may take
turns. So 80 layers are as short a program as 8:

    one stack           blocks 0 1 2 3 ...                          a scan over layers
    stacks take turns   dense_blocks 0 2 4 ..., blocks 1 3 5 ...    a scan over pairs of layers
    one after another   dense_blocks 0 1, blocks 2 3 4 ...          two scans

There are three ways through them. Training scans over layers (`Stacks.run`). Where the layout splits the layers into
stages, each stage scans its own (`Stacks.run_on_stages`). In decoding each layer has a cache of its own size, so each
layer is a piece of program of its own (`Stacks.run_apart`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import reshard

from tunix.config import Model
from tunix.config.model import Run
from tunix.config.shared_layers import find_donors
from tunix.models.block import MIXERS, MLPS, Block, Mix, find_part
from tunix.models.block_sums import (
    NO_SUMS,
    BlockSums,
    Routing,
    join_layers,
    join_pattern,
    join_runs,
    join_stages,
)
from tunix.models.experts import penalty_names
from tunix.models.noise import Noise
from tunix.models.pipeline import run_stages, stage_seeds
from tunix.models.positions import Rope, layer_rope
from tunix.models.prefetch import as_variables, scan_ahead
from tunix.models.remat import Remat, checkpoint_block, join_blocks, scan_blocks
from tunix.models.shared_kv import leave_kv, take_kv
from tunix.sharding.layout import Layout


class Stack(NamedTuple):
    """Equal blocks."""

    name: str  # of the tree in the module
    layers: tuple[int, ...]  # numbers of its layers in the whole model
    mixer: str  # key of `MIXERS`
    mlp: str  # key of `MLPS`

    def make(self, cfg: Model, layout: Layout, rngs: nnx.Rngs) -> nnx.Module:
        """Return its blocks as one module, whose parameters have a first dimension L."""

        def make_one(key: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
            return nnx.split(Block(cfg, layout, self.mixer, self.mlp, nnx.Rngs(key)))

        graphdef, params = jax.vmap(make_one)(jax.random.split(rngs.params(), len(self.layers)))
        return nnx.merge(graphdef, params)


def list_stacks(cfg: Model) -> tuple[Stack, ...]:
    """Return the stacks of a model in the order of their first layers."""
    return tuple(
        Stack(name, layers, find_part(MIXERS, cfg, layers[0]), find_part(MLPS, cfg, layers[0]))
        for name, layers in cfg.stacks.items()
    )


class Layer(NamedTuple):
    """Values in which a layer differs from the others of its stack; with a first dimension L, those of all layers."""

    number: Any  # int32 scalar, in the whole model
    window: Any  # int32 scalar: a query sees its own token and the `window - 1` before it
    rope: Rope | None  # None with learned positions
    inputs: Any = None  # [B, t, p], of `model.layer_inputs`


class Rows(NamedTuple):
    """Arrays [B, ...] that a block takes of sequences. In a pipeline they travel from stage to stage together."""

    x: Any  # [B, t, D], the residual stream; a block changes it and nothing else
    positions: Any  # [B, T] int32
    beside: Any  # what the mix needs of the sequences: a tree of arrays, or None
    # On stages alone:
    penalties: Any = None  # {name: [B]}, those of the layers so far
    numbers: jax.Array | None = None  # [B] int32 in the microbatch: dropout draws by them
    # Keys and values that earlier layers have left for later ones, by the letters of their heads (`model.shared_kv`)
    shared: Any = None


class Forward(NamedTuple):
    """Values that all layers share in a forward pass."""

    # (a layer, `Rows.beside`) -> how tokens act on one another there, in the rows that have these arrays beside
    mix_of: Callable[[Layer, Any], Mix]
    length: int  # tokens of the sequences, or those for which a cache has room
    seed: Any = None  # int32 scalar for the dropout of training, or None
    reach: int | jax.Array | None = None  # tokens that the sequences end with, if they grow beyond `length`
    inputs: Any = None  # [l, B, t, p], of all layers, where the model has `layer_inputs`

    def rope(self, cfg: Model, layers: Any) -> Rope | None:
        """Return the angles of layers with heads of one width, arrays [L, ...]; None with learned positions."""
        reach = self.length if self.reach is None else self.reach
        return layer_rope(cfg, layers, reach) if cfg.positions == "rope" else None


class Stacks:
    """The blocks of a model, and how they are run. Iterates over the stacks.

    See `Transformer` for `remat`, `parts_per_stage` and `prefetch`.
    """

    def __init__(
        self,
        cfg: Model,
        layout: Layout,
        modules: dict[str, nnx.Module],
        remat: Remat,
        parts_per_stage: int | None,
        prefetch: bool,
    ):
        """`modules` are the blocks of each stack by its name, as `Stack.make` returns them."""
        self.cfg, self.layout, self.modules = cfg, layout, modules
        self.remat, self.parts_per_stage, self.prefetch = remat, parts_per_stage, prefetch
        self.stacks = {stack.name: stack for stack in list_stacks(cfg)}
        self.donors = find_donors(cfg)

    def __iter__(self) -> Iterator[Stack]:
        return iter(self.stacks.values())

    def run(self, rows: Rows, forward: Forward) -> tuple[Rows, BlockSums]:
        """Return the rows after all blocks, and the numbers of all blocks. Mixes keep nothing."""
        sums = NO_SUMS
        for run in self.cfg.runs:
            go = self._run_stages if self.layout.stage_axes else self._scan_run
            rows, sums_here = go(run, rows, forward)
            sums = join_runs(sums, sums_here)
        return rows, sums

    def run_apart(self, rows: Rows, forward: Forward, params: dict[str, list[Any]]) -> tuple[Rows, list]:
        """Return the rows after all blocks, and what the mix of each layer keeps, of any shapes.

        `params` has, by the name of a stack, the parameters of each of its layers as a tree of their own. A layer's
        number and window are Python's.
        """
        windows, all_kept = self.cfg.windows(forward.length), []
        ropes = {stack.name: forward.rope(self.cfg, stack.layers) for stack in self}
        for number in range(self.cfg.num_layers):
            name = self.cfg.stack_of(number)
            at = self.stacks[name].layers.index(number)
            rope = jax.tree.map(lambda of_all, at=at: of_all[at], ropes[name])
            inputs = None if forward.inputs is None else forward.inputs[number]
            layer, leaves = Layer(number, windows[number], rope, inputs), number in self.donors.values()
            rows, kept, _ = self._run_layer(name, rows, (params[name][at], layer), forward, leaves)
            if leaves:
                rows = rows._replace(shared=(rows.shared or {}) | {self.cfg.heads_of(number).letters: kept.kv})
            all_kept.append(kept.kept if leaves else kept)
        return rows, all_kept

    def layers_of(self, name: str, forward: Forward) -> tuple[Any, Layer]:
        """Return parameters and values of the layers of a stack, arrays [L, ...]."""
        layers, windows = self.stacks[name].layers, self.cfg.windows(forward.length)
        numbers, windows_here = jnp.asarray(layers), jnp.asarray([windows[layer] for layer in layers])
        inputs = None if forward.inputs is None else _take_layers(forward.inputs, list(layers))
        return nnx.state(self.modules[name]), Layer(numbers, windows_here, forward.rope(self.cfg, layers), inputs)

    def enter_stages(self, rows: Rows, seed: Any) -> Rows:
        """Return rows of a whole microbatch as stages take them."""
        spec = self.layout.activation("B")
        count = len(rows.positions)
        draws = seed is not None and self.cfg.lora.rank and self.cfg.lora.dropout
        numbers = reshard(jnp.arange(count), spec) if draws else None
        penalties = {name: reshard(jnp.zeros(count), spec) for name in penalty_names(self.cfg)}
        return rows._replace(penalties=penalties, numbers=numbers)

    def run_on_stages(self, layers: dict[str, Any], rows: Rows, forward: Forward) -> tuple[Rows, Routing | None]:
        """Run the layers of each stage on its rows, and return the rows and the routing of its experts.

        All arrays have a first dimension [S]: layers, the rows of `enter_stages`, and the seeds of `forward`. `layers`
        are parameters and values by the name of a stack: of whole turns, in which all stages have the same.
        """
        (turn,) = self.cfg.runs

        def run(layers, rows, seed):
            of_places = _take_turns(turn.pattern, layers, dim=1 if self.prefetch else 0)
            rows, sums, _ = self._scan(turn.pattern, of_places, rows, forward._replace(seed=seed))
            return rows, sums

        if self.prefetch:  # the scan has the stages inside of it
            rows, (penalties, routing) = run(layers, rows, forward.seed)
            routing = jax.tree.map(lambda x: x.swapaxes(0, 1), routing)
        else:
            rows, (penalties, routing) = jax.vmap(run)(layers, rows, forward.seed)
        return rows._replace(penalties=jax.tree.map(jnp.add, rows.penalties, penalties)), routing

    def _run_stages(self, run: Run, rows: Rows, forward: Forward) -> tuple[Rows, BlockSums]:
        on_each = forward._replace(seed=stage_seeds(self.layout, forward.seed))
        on_stages = partial(self.run_on_stages, forward=on_each)
        layers = {name: self.layers_of(name, forward) for name in dict.fromkeys(run.pattern)}
        rows = self.enter_stages(rows, forward.seed)
        rows, routing = run_stages(on_stages, layers, rows, self.layout, self.parts_per_stage)
        return rows, BlockSums(rows.penalties, join_stages(routing))

    def _scan_run(self, run: Run, rows: Rows, forward: Forward) -> tuple[Rows, BlockSums]:
        of_stacks = {name: self.layers_of(name, forward) for name in run.pattern}
        of_places = []
        for place, name in enumerate(run.pattern):
            numbers = run.layers[place :: len(run.pattern)]
            at = [self.stacks[name].layers.index(number) for number in numbers]
            of_places.append(_take_layers(of_stacks[name], at))
        leaving = {letters: run.layers.index(number) for letters, number in self.donors.items() if number in run.layers}
        rows, sums, left = self._scan(run.pattern, tuple(of_places), rows, forward, tuple(leaving.values()))
        if leaving:  # in a run of one turn
            shared = {letters: jax.tree.map(lambda x: x[0], left[place].kv) for letters, place in leaving.items()}
            rows = rows._replace(shared=shared)
        return rows, sums

    def _scan(
        self, pattern: tuple[str, ...], layers, rows: Rows, forward: Forward, leaving: tuple[int, ...] = ()
    ) -> tuple[Rows, BlockSums, list[Any]]:
        """Run layers of stacks that take turns on some rows, and return the rows, the sums of the layers, and what the
        layers at each place of the pattern keep, arrays [turns, ...]; those at the places `leaving` keep a `Left`.

        `layers` are parameters and values of the layers at each place of the pattern, arrays [turns, ...]. Layers that
        gather ahead on stages are [S, turns, ...], and so have all arrays this first dimension; routing is [turns, S].
        """

        def block_of(place, name):
            def block(x, params, layer, others):
                beside_x, seed = others
                # The seed comes with the arguments: a backward rule may not close over a value that is traced.
                this = forward._replace(seed=seed)
                after, kept, sums = self._run_layer(name, Rows(x, *beside_x), (params, layer), this, place in leaving)
                return after.x, (sums, kept)

            return block

        blocks = [block_of(place, name) for place, name in enumerate(pattern)]
        # What a block does not change stays outside: the scan would keep it for each layer.
        others = tuple(rows[1:]), forward.seed
        if self.prefetch:
            params, values = zip(*layers, strict=True)
            params = tuple(as_variables(self.modules[name], each) for name, each in zip(pattern, params, strict=True))
            again = checkpoint_block(join_blocks(blocks), self.remat)
            x, results = scan_ahead(again, params, rows.x, values, others, self.layout.inside_stage())
        else:
            x, results = scan_blocks(blocks, rows.x, layers, others, self.remat)
        sums = join_pattern([join_layers(sums_here) for sums_here, _ in results])
        return rows._replace(x=x), sums, [kept for _, kept in results]

    def _run_layer(self, name: str, rows: Rows, each, forward: Forward, leaves: bool) -> tuple[Rows, Any, BlockSums]:
        """Run a layer of a stack. One that `leaves` keys and values keeps a `Left`."""
        params, layer = each
        noise = None
        if forward.seed is not None:
            noise = Noise(jax.random.fold_in(jax.random.key(forward.seed), layer.number), rows.numbers)
        first = self.stacks[name].layers[0]
        if self.cfg.is_shared(first):
            letters = self.cfg.heads_of(first).letters
            of_donor = layer._replace(number=self.donors[letters])  # whose cache it looks into
            mix = take_kv(forward.mix_of(of_donor, rows.beside), rows.shared[letters])
        else:
            mix = forward.mix_of(layer, rows.beside)
            mix = leave_kv(mix) if leaves else mix
        block = nnx.merge(self._graphdef(name), params)
        x, kept, sums = block(rows.x, rows.positions, layer.rope, mix, noise, layer.inputs)
        return rows._replace(x=x), kept, sums

    def _graphdef(self, name: str) -> nnx.GraphDef:
        return nnx.graphdef(self.modules[name])


def _take_turns(pattern: tuple[str, ...], layers: dict[str, Any], dim: int) -> tuple[Any, ...]:
    """Return the layers at each place of a pattern, of those of each stack, in order; `dim` is that of the layers."""
    of_places = []
    for place, name in enumerate(pattern):
        first, step = pattern[:place].count(name), pattern.count(name)
        take = partial(jax.lax.slice_in_dim, start_index=first, limit_index=None, stride=step, axis=dim)
        of_places.append(layers[name] if step == 1 else jax.tree.map(take, layers[name]))
    return tuple(of_places)


def _take_layers(layers: Any, places: list[int]) -> Any:
    """Return the layers at these places, which have equal distances, of arrays [L, ...]."""
    step = places[1] - places[0] if len(places) > 1 else 1

    def take(x: jax.Array) -> jax.Array:
        return x if len(places) == len(x) else jax.lax.slice_in_dim(x, places[0], places[-1] + 1, step)

    return jax.tree.map(take, layers)
