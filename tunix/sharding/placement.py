"""Places of weights, activations and gradients on the mesh, which follow from equations and the tables of dims.py.

A weight has two places. `in use` is where a product takes it: each dimension that the axes of dims.py split, but for
those that are gathered. `at rest` adds the axes that keep weights, which split it further between two uses. A device
then holds a smaller part, and gathers the rest when it needs it:

    BTD,DNH->BTNH     w [D, N, H] at rest    P(fsdp, tp, -)     D is gathered
                      w [D, N, H] in use     P(-, tp, -)        the same on all devices along fsdp

Where a gradient lies before it is summed follows from the same letters: w lacks B and T, so each device that has rows
or tokens of its own computes a part of the gradient (`gradient_axes`).
"""

from dataclasses import dataclass, replace
from typing import Self

from jax.sharding import PartitionSpec

from tunix.sharding.dims import DIMS, EXPERTS, LAYERS, STREAM_TOKENS, TOKENS, axis_names, stream_axes
from tunix.sharding.equations import Equation


@dataclass(frozen=True)
class Strategy:
    """A ZeRO stage: what the axes that keep weights split between uses, and how long gathered weights live."""

    params: bool
    gradients: bool  # the accumulator of a step
    optimizer: bool
    gathered_for: str  # "block": gathered in each block's forward and again in its backward pass; "step": once


STRATEGIES = {
    #                           params  gradients optimizer
    "full_shard": Strategy(True, True, True, gathered_for="block"),  # ZeRO 3
    "shard_grad_op": Strategy(True, True, True, gathered_for="step"),  # ZeRO 2
    "shard_optimizer": Strategy(False, False, True, gathered_for="step"),  # ZeRO 1
    "no_shard": Strategy(False, False, False, gathered_for="step"),  # plain data parallelism
}


def activation_spec(letters: str) -> PartitionSpec:
    """Return where an array of these dimensions lives outside of the blocks, if axes divide all of them."""
    return _make_spec([DIMS[letter].activation_axes for letter in letters])


@dataclass(frozen=True)
class Placement:
    """Places and dtypes of the arrays of a run.

    Weights rest in `param` dtype. A matrix product takes them in `compute` dtype. Gradients are summed over devices in
    `reduce` dtype.
    """

    strategy: Strategy
    unsplit: frozenset[str]  # letters of dimensions that every device keeps whole: their axis does not divide them
    param: str
    compute: str
    reduce: str
    # What the axes of the stages split here: `sequences` of a batch; `layers` inside of a stage, and nothing else; or
    # `tokens` of sequences, where one part of a batch is at work outside of the stages (1F1B).
    stages_split: str = "sequences"
    block_products: str = "plain"  # kind of the products of attention and MLP: a key of PRODUCTS (models/products.py)
    moments_on_host: bool = False  # the optimizer's state is in the host's memory between two updates
    expert_exchange: str = "gather"  # how tokens reach their experts: a key of EXPERT_EXCHANGES (config)
    splits_stream: bool = False  # devices with parts of the same products split the tokens of the residual stream

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the layers into stages; none where every device keeps all layers."""
        return () if LAYERS in self.unsplit else DIMS[LAYERS].weight_axes

    @property
    def stages_around(self) -> tuple[str, ...]:
        """Mesh axes of the stages, inside of one; none elsewhere."""
        return self.stage_axes if self.stages_split == "layers" else ()

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the sequences here, outermost first."""
        return self._activation_axes("B")

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the experts: devices along them have different experts, and different sequences."""
        return self._weight_axes(EXPERTS)

    @property
    def stream_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the tokens of the residual stream, but not in a branch; none without `splits_stream`."""
        return stream_axes() if self.splits_stream else ()

    def inside_stage(self) -> Self:
        """Return the layout inside of the blocks: the same one where the layers are not split into stages."""
        return replace(self, stages_split="layers")

    def with_tokens_on_stages(self) -> Self:
        """Return the layout outside of the blocks for one part of a batch, whose tokens are split over the stages."""
        return replace(self, stages_split="tokens")

    def with_all_layers(self) -> Self:
        """Return the layout in which every device keeps all layers: then axes of stages split the batch alone."""
        return replace(self, unsplit=self.unsplit | {LAYERS})

    def for_generation(self) -> Self:
        """Return the layout of programs that draw answers one token after the other: no axis splits the stream.

        Products are plain: the scale of an 8-bit array would tie each answer to those that are drawn beside it. So
        would a bounded buffer of rows, and tokens of experts are gathered.
        """
        layout = self.with_all_layers()
        return replace(layout, splits_stream=False, block_products="plain", expert_exchange="gather")

    def at_rest(self, equation: Equation, sharded: bool | None = None) -> PartitionSpec:
        """Return where a weight lives between uses.

        With `sharded` given, where its gradient or its moments live: split over the axes that keep weights, or not.
        """
        sharded = self.strategy.params if sharded is None else sharded
        return _make_spec(self._axes_at_rest(equation)) if sharded else _make_spec(self._axes_in_use(equation))

    def in_use(self, equation: Equation) -> PartitionSpec:
        """Return where a weight lives while a product uses it."""
        return _make_spec(self._axes_in_use(equation), reduced=set(self.gradient_axes(equation)))

    def unreduced(self, equation: Equation) -> PartitionSpec:
        """Return where the gradient of a gathered weight lives before it is summed over devices."""
        return _make_spec(self._axes_in_use(equation), unreduced=set(self.gradient_axes(equation)))

    def activation(self, letters: str) -> PartitionSpec:
        """Return where an activation of these dimensions lives."""
        return _make_spec([self._activation_axes(letter) for letter in letters])

    def result(self, equation: Equation) -> PartitionSpec:
        """Return where the result of a product lives; one that leaves a branch is then given to `leave_branch`."""
        if not (equation.leaves_branch and self.stream_axes):
            return self.activation(equation.y)
        own_parts = set(self.product_axes(equation))
        return PartitionSpec(*self.activation(equation.y.replace(STREAM_TOKENS, TOKENS)), unreduced=own_parts)

    def use_dtype(self, equation: Equation) -> str:
        """Return the dtype of a weight in use: float32 for vectors (norm scales, biases), else the compute dtype."""
        return "float32" if equation.is_vector else self.compute

    def gathers_in_blocks(self, sync_every: int) -> bool:
        """Return whether each block gathers its weights; with gradients summed every `sync_every` microbatches.

        Gradients that are summed less often than once a microbatch need weights that are gathered for the whole step.
        """
        return self.strategy.gathered_for == "block" and sync_every == 1

    def num_own_kv_heads(self, num_heads: int, letter: str = "K") -> int:
        """Return how many of the `num_heads` key/value heads on a device serve its query heads; see `own_kv_heads`."""
        return 1 if letter in self.unsplit else num_heads

    def gather_axes(self, equation: Equation) -> tuple[str, ...]:
        """Return the mesh axes that a weight is gathered over, and its gradient scattered over."""
        in_use = {axis for axes in self._axes_in_use(equation) for axis in axes}
        return _sort_axes({axis for axes in self._axes_at_rest(equation) for axis in axes} - in_use)

    def gradient_axes(self, equation: Equation) -> tuple[str, ...]:
        """Return the mesh axes that a gradient is a sum over: those that split dimensions which the weight lacks."""
        if equation.is_quantized or equation.is_choice:
            return ()
        split = {axis for letter in equation.batch for axis in self._activation_axes(letter)}
        # An axis that splits the weight in use has other entries of the weight on each device: nothing to sum.
        return _sort_axes(split - {axis for axes in self._axes_in_use(equation) for axis in axes})

    def product_axes(self, equation: Equation) -> tuple[str, ...]:
        """Return the mesh axes that a product is a sum over: those that split, in use, the dimensions it sums over."""
        in_use = zip(equation.w, self._axes_in_use(equation), strict=True)
        return _sort_axes({axis for letter, axes in in_use if letter in equation.summed for axis in axes})

    def _activation_axes(self, letter: str) -> tuple[str, ...]:
        if letter in self.unsplit:
            return ()
        if letter == STREAM_TOKENS:  # innermost: a branch gathers neighbours
            return (*self._activation_axes(TOKENS), *self.stream_axes)
        axes = DIMS[letter].activation_axes
        if self.stages_split == "sequences":
            return axes
        others = tuple(axis for axis in axes if axis not in self.stage_axes)
        # Stages split the share that a device has without them: the tokens of a part are put together over one axis.
        return (*others, *self.stage_axes) if letter == TOKENS and self.stages_split == "tokens" else others

    def _axes_at_rest(self, equation: Equation) -> list[tuple[str, ...]]:
        """Return the axes of each dimension of the weight between uses. Vectors are too small to be worth a gather.

        An axis splits one dimension: a dimension that is gathered rests on the axes that no other dimension takes.
        """
        in_use = self._axes_in_use(equation)
        if equation.is_vector:
            return in_use
        taken = {axis for axes in in_use for axis in axes}
        at_rest = []
        for letter, axes in zip(equation.w, in_use, strict=True):
            free = tuple(axis for axis in self._weight_axes(letter) if axis not in taken)
            at_rest.append(free if DIMS[letter].is_gathered else axes)
            taken |= set(at_rest[-1])
        return at_rest

    def _axes_in_use(self, equation: Equation) -> list[tuple[str, ...]]:
        """Return the axes of each dimension of the weight in a product, which takes the gathered dimensions whole."""
        return [() if DIMS[letter].is_gathered else self._weight_axes(letter) for letter in equation.w]

    def _weight_axes(self, letter: str) -> tuple[str, ...]:
        return () if letter in self.unsplit else DIMS[letter].weight_axes


def _make_spec(axes: list[tuple[str, ...]], **types: set[str]) -> PartitionSpec:
    """Return the PartitionSpec of the axes of each dimension; `types` are `reduced` or `unreduced` axes."""
    return PartitionSpec(*(each if len(each) > 1 else each[0] if each else None for each in axes), **types)


def _sort_axes(axes: set[str]) -> tuple[str, ...]:
    """Return mesh axes in the order of the table."""
    return tuple(axis for axis in axis_names() if axis in axes)
