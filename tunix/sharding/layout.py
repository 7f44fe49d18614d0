"""Layouts: how weights, activations and gradients are split at rest and in use, and the ways between.

At the end: functions of the arrays of one device that are mapped over the stages of a pipeline (`stage_shard_map`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
from jax._src import api
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec, reshard

from tunix.sharding.table import (
    DIMS,
    EXPERTS,
    FIRST_WIDTH,
    LAYERS,
    STREAM_TOKENS,
    TOKENS,
    WIDTH,
    Equation,
    axis_names,
    stream_axes,
)

# A weight has two places. `in use` is where a product takes it: each dimension that the axes of table.py split, but for
# those that are gathered. `stored` adds the axes that keep weights, which split it further between two uses. A device
# then holds a smaller part, and gathers the rest when it needs it:
#
#     BTD,DNH->BTNH     w [D, N, H] at rest    P(fsdp, tp, -)     D is gathered
#                       w [D, N, H] in use     P(-, tp, -)        the same on all devices along fsdp
#
# Where a gradient lies before it is summed follows from the same letters: w lacks B and T, so each device that has rows
# or tokens of its own computes a part of the gradient (`gradient_axes`).


@dataclass(frozen=True)
class Strategy:
    """A ZeRO stage: what lies split between two uses, and how long gathered weights and own parts of gradients live."""

    splits: bool  # whether the axes that keep weights split weights, summed gradients and moments between uses
    gathered_for: str  # "block": gathered in each block's forward and again in its backward pass; "step": once
    summed_for: str  # over devices. "microbatch": gradients of each; "step": of all, where a config says auto


STRATEGIES = {
    "full_shard": Strategy(True, gathered_for="block", summed_for="microbatch"),  # ZeRO 3
    "shard_grad_op": Strategy(True, gathered_for="step", summed_for="microbatch"),  # ZeRO 2
    # ZeRO 1: a device has all weights in the dtype of products, and all gradients, while a step runs. Between two steps
    # it has its shards of the float32 weights, which the optimizer works on, and of the moments.
    "shard_optimizer": Strategy(True, gathered_for="step", summed_for="step"),
    "no_shard": Strategy(False, gathered_for="step", summed_for="step"),  # plain data parallelism
}


def activation_spec(dim_names: str) -> PartitionSpec:
    """Return where an array of these dimensions lives outside of the blocks, if axes divide all of them."""
    return _make_spec([DIMS[dim_name].activation_axes for dim_name in dim_names])


def gradient_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return where the gradient of an array lies: over axes where the array is `reduced`, it is a sum still open."""
    return PartitionSpec(*spec.partitions, unreduced=spec.reduced)


def drop_reduced(x: jax.Array) -> jax.Array:
    """Return an array whose type no longer says (by `reduced`) that its gradient is a sum over devices."""
    return reshard(x, PartitionSpec(*jax.typeof(x).sharding.spec.partitions))


# Ways of weights, gradients and activations between their places on the mesh, by methods of `Layout`.
#
# One weight `BTD,DNH->BTNH` on a mesh with dp, fsdp and tp. D rests on fsdp, an axis that keeps weights; N is split
# over tp at rest and in use; dp and fsdp split the batch, so that each data shard computes a gradient of its own:
#
#     at rest      P(fsdp, tp, -)                            one shard for each device, float32
#        | gather: cast to the compute dtype, then all-gather over fsdp
#     in use       P(-, tp, -)  reduced={dp, fsdp}           the same on all data shards, and of type "reduced"
#        | forward and backward pass of a microbatch
#     gradient     P(-, tp, -)  unreduced={dp, fsdp}         each data shard has its own part of the sum
#        | sum_gradient: reduce-scatter over fsdp, which splits the weight at rest, ...
#                  P(fsdp, tp, -)  unreduced={dp}
#        | ... then all-reduce over dp, where replicas exchange one shard each
#     summed       P(fsdp, tp, -)                            laid out as the weight at rest
#
# `reduced` and `unreduced` are types of JAX: a gradient cannot be used as if it were summed, and nothing is summed
# twice. The backward pass of `gather` is `sum_gradient`. So the place of `gather` decides when gradients are summed: in
# a block, once in each microbatch; before all microbatches, once in a step, which costs memory and saves traffic.
#
# Activations of a block go the same way with `splits_stream`, where tp splits the tokens t of the residual stream
# (sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198):
#
#     stream       [B, t, D]   P(data, tp, -)                norms, sums and dropout of own tokens
#        | gather_tokens: all-gather over tp                  backward: reduce-scatter
#     branch       [B, T, D]   P(data, -, -)  reduced={tp}   all tokens meet this device's part of the weights
#        | products
#     result       [B, T, D]   P(data, -, -)  unreduced={tp} each device has its own part of the sum
#        | scatter_tokens: reduce-scatter over tp              backward: all-gather
#     stream       [B, t, D]   P(data, tp, -)
#
# Without it both places are [B, T, D], whole along tp, and the sum of a result is an all-reduce.


@dataclass(frozen=True)
class Layout:
    """Places and dtypes of the arrays of a run, the ways between the places, and the kernels and exchanges.

    Places follow from equations and the tables of table.py. Weights rest in `param` dtype. A matrix product takes them
    in `compute` dtype. Gradients are summed over devices in `reduce` dtype.
    """

    strategy: Strategy
    unsplit: frozenset[str]  # letters of dimensions that every device keeps whole: their axis does not divide them
    param: str
    compute: str
    reduce: str
    # What the axes of the stages split here: `sequences` of a batch; `layers` inside of a stage, and nothing else; or
    # `tokens` of sequences, where one part of a batch is at work outside of the stages (1F1B).
    stages_split: str = "sequences"
    block_matmul: str = "plain"  # kind of the products of attention and MLP: a key of MATMUL (models/matmul.py)
    moments_on_host: bool = False  # the optimizer's state is in the host's memory between two updates
    # Keys of the tables of models/table.py, or dotted paths. Kernels of attention come with the letter of their
    # key/value heads.
    kernels: tuple[tuple[str, str], ...] = ()
    cp_exchange: str = "none"  # how queries meet keys on other devices
    expert_products: str = "xla"
    expert_exchange: str = "gather"  # how tokens reach their experts
    # Parts of a device's sequences that take turns in a layer (models/layer_stacks.py), where they divide them.
    batch_parts: int = 1
    splits_stream: bool = False  # devices with parts of the same products split the tokens of the residual stream
    in_first_layers: bool = False  # in layers before the stages, whose weights rest on the axes of the stages too

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

    def count_parts(self, local_rows: int) -> int:
        """Return into how many parts that take turns a device cuts its sequences: `batch_parts` where they divide."""
        return 1 if local_rows % self.batch_parts else self.batch_parts

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

    def before_stages(self) -> Self:
        """Return the layout inside of layers before the stages: axes of stages split the batch, and weights at rest."""
        return replace(self.with_all_layers(), in_first_layers=True)

    def for_generation(self) -> Self:
        """Return the layout of programs that draw answers one token after the other: no axis splits the stream.

        Products are plain: the scale of an 8-bit array would tie each answer to those that are drawn beside it. So
        would a bounded buffer of rows, and tokens of experts are gathered.
        """
        layout = replace(self.with_all_layers(), batch_parts=1)
        return replace(layout, splits_stream=False, block_matmul="plain", expert_exchange="gather", cp_exchange="none")

    def kernel_of(self, dim_name: str) -> str:
        """Return the kernel of attention whose key/value heads have this letter."""
        return dict(self.kernels)[dim_name]

    def stored(self, equation: Equation) -> PartitionSpec:
        """Return where a weight lives between uses, and so do the sum of its gradients and its moments."""
        return _make_spec(self._stored_axes(equation) if self.strategy.splits else self._axes_in_use(equation))

    def in_use(self, equation: Equation) -> PartitionSpec:
        """Return where a weight lives while a product uses it."""
        return _make_spec(self._axes_in_use(equation), reduced=set(self.gradient_axes(equation)))

    def unreduced(self, equation: Equation) -> PartitionSpec:
        """Return where the gradient of a gathered weight lives before it is summed over devices."""
        return _make_spec(self._axes_in_use(equation), unreduced=set(self.gradient_axes(equation)))

    def scattered(self, equation: Equation, stored: PartitionSpec | None = None) -> PartitionSpec:
        """Return where the gradient of a gathered weight lives when it is summed inside of a replica alone.

        `stored` is where the weight rests, of a layer whose equation does not say that it stands before stages.
        """
        stored = self.stored(equation) if stored is None else stored
        return PartitionSpec(*stored, unreduced=set(self.gradient_axes(equation)) - list_axes(stored))

    def has_replicas(self, sizes: Mapping[str, int]) -> bool:
        """Return whether gradients are sums over axes of this mesh that keep no weights."""
        keeping = {axis for dim in DIMS.values() if dim.is_gathered for axis in dim.weight_axes}
        return any(sizes[axis] > 1 for axis in set(self.batch_axes) - keeping)

    def activation(self, dim_names: str) -> PartitionSpec:
        """Return where an activation of these dimensions lives."""
        return _make_spec([self._activation_axes(dim_name) for dim_name in dim_names])

    def result(self, equation: Equation) -> PartitionSpec:
        """Return where the result of a product lives; one that leaves a branch is then given to `scatter_tokens`."""
        if not (equation.leaves_branch and self.stream_axes):
            return self.activation(equation.y)
        local_parts = set(self.product_axes(equation))
        return PartitionSpec(*self.activation(equation.y.replace(STREAM_TOKENS, TOKENS)), unreduced=local_parts)

    def use_dtype(self, equation: Equation) -> str:
        """Return the dtype of a weight in use: float32 for vectors (norm scales, biases), else the compute dtype."""
        return "float32" if equation.is_vector else self.compute

    def gathers_in_blocks(self, sync_every: int) -> bool:
        """Return whether each block gathers its weights; with gradients summed every `sync_every` microbatches.

        Gradients that are summed less often than once a microbatch need weights that are gathered for the whole step.
        """
        return self.strategy.gathered_for == "block" and sync_every == 1

    def num_local_kv_heads(self, num_heads: int, dim_name: str) -> int:
        """Return how many of the `num_heads` key/value heads on a device serve its queries; see `local_kv_heads`."""
        return 1 if dim_name in self.unsplit else num_heads

    def gather_axes(self, equation: Equation) -> tuple[str, ...]:
        """Return the mesh axes that a weight is gathered over, and its gradient scattered over."""
        in_use = {axis for axes in self._axes_in_use(equation) for axis in axes}
        return _sort_axes({axis for axes in self._stored_axes(equation) for axis in axes} - in_use)

    def gradient_axes(self, equation: Equation) -> tuple[str, ...]:
        """Return the mesh axes that a gradient is a sum over: those that split dimensions which the weight lacks."""
        if equation.is_quantized or equation.is_choice:
            return ()
        split = {axis for dim_name in equation.batch for axis in self._activation_axes(dim_name)}
        # An axis that splits the weight in use has other entries of the weight on each device: nothing to sum.
        return _sort_axes(split - {axis for axes in self._axes_in_use(equation) for axis in axes})

    def product_axes(self, equation: Equation) -> tuple[str, ...]:
        """Return the mesh axes that a product is a sum over: those that split, in use, the dimensions it sums over."""
        in_use = zip(equation.w, self._axes_in_use(equation), strict=True)
        return _sort_axes({axis for dim_name, axes in in_use if dim_name in equation.summed for axis in axes})

    def _activation_axes(self, dim_name: str) -> tuple[str, ...]:
        if dim_name in self.unsplit:
            return ()
        if dim_name == STREAM_TOKENS:  # innermost: a branch gathers neighbours
            return (*self._activation_axes(TOKENS), *self.stream_axes)
        axes = DIMS[dim_name].activation_axes
        if self.stages_split == "sequences":
            return axes
        inner = tuple(axis for axis in axes if axis not in self.stage_axes)
        # Stages split the share that a device has without them: the tokens of a part are put together over one axis.
        return (*inner, *self.stage_axes) if dim_name == TOKENS and self.stages_split == "tokens" else inner

    def _stored_axes(self, equation: Equation) -> list[tuple[str, ...]]:
        """Return the axes of each dimension of the weight between uses. Vectors are too small to be worth a gather.

        An axis splits one dimension: a dimension that is gathered rests on the axes that no other dimension takes.
        """
        in_use = self._axes_in_use(equation)
        if equation.is_vector:
            return in_use
        taken = {axis for axes in in_use for axis in axes}
        stored = []
        for dim_name, axes in zip(equation.w, in_use, strict=True):
            is_first = (equation.is_before_stages or self.in_first_layers) and FIRST_WIDTH not in self.unsplit
            keeping = self._weight_axes(FIRST_WIDTH if is_first and dim_name == WIDTH else dim_name)
            free = tuple(axis for axis in keeping if axis not in taken)
            stored.append(free if DIMS[dim_name].is_gathered else axes)
            taken |= set(stored[-1])
        return stored

    def _axes_in_use(self, equation: Equation) -> list[tuple[str, ...]]:
        """Return the axes of each dimension of the weight in a product, which takes the gathered dimensions whole."""
        return [() if DIMS[dim_name].is_gathered else self._weight_axes(dim_name) for dim_name in equation.w]

    def _weight_axes(self, dim_name: str) -> tuple[str, ...]:
        return () if dim_name in self.unsplit else DIMS[dim_name].weight_axes

    def gather(self, weight: jax.Array, equation: Equation, keep_dtype: bool = False) -> jax.Array:
        """Return the weight, in the shape of `equation.w`, as a matrix product takes it. One that is gathered is cast
        at most, and with `keep_dtype` passes as it is.

        The cast comes before the gather, so that half the bytes travel. The backward pass sums the gradient over
        devices and leaves each device its own shard.
        """
        remaining, dtype = jax.typeof(weight).sharding.spec, weight.dtype
        if remaining == self.in_use(equation):
            return weight if keep_dtype or equation.is_quantized else weight.astype(self.use_dtype(equation))

        # Autodiff would sum the gradient in the dtype of products, and over all axes at once. The backward pass of our
        # own casts it to `reduce` first, and scatters it before the other axes sum it.
        @jax.custom_vjp
        def gather(weight):
            used = weight if equation.is_quantized else weight.astype(self.use_dtype(equation))
            return reshard(used, self.in_use(equation))

        def backward(_, gradient):
            return (self.sum_gradient(gradient, remaining).astype(dtype),)

        gather.defvjp(lambda weight: (gather(weight), None), backward)
        return checkpoint_name(gather(weight), "gathered")

    def sum_gradient(self, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Return a gradient of any shape summed over devices in `reduce` dtype and laid out as `spec`.

        It is summed first over the axes that split `spec`, so that over the others only a shard of it travels.
        """
        return reshard(self.scatter_gradient(gradient, spec), spec)

    def scatter_gradient(self, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Return a gradient of any shape in `reduce` dtype, summed over the axes that split `spec`, and a part of a sum
        over others.

        Where these others are all axes that it is a sum over, it stays as it lies.
        """
        gradient = gradient.astype(self.reduce)
        local_parts = jax.typeof(gradient).sharding.spec.unreduced  # axes along which each device has a part of the sum
        replicas = local_parts - list_axes(spec)
        return gradient if replicas == local_parts else reshard(gradient, PartitionSpec(*spec, unreduced=replicas))

    def split_stream(self, x: jax.Array) -> jax.Array:
        """Return [B, T, ...] as the residual stream has it, [B, t, ...]: each device keeps its own tokens."""
        return reshard(x, self._with_tokens(x, STREAM_TOKENS)) if self.stream_axes else x

    def gather_stream(self, x: jax.Array) -> jax.Array:
        """Return [B, t, ...] as [B, T, ...], the same on all devices that split the stream; so is its gradient."""
        return reshard(x, self._with_tokens(x, TOKENS)) if self.stream_axes else x

    def gather_tokens(self, x: jax.Array) -> jax.Array:
        """Return [B, t, D] of the residual stream as [B, T, D], which products of a branch take.

        Each device adds its own part to the gradient. The backward pass sums these parts once, for all products.
        """
        if not self.stream_axes:
            return x
        # No remat policy keeps it: it is tp times as large as x, and a scan of jax 0.10.2 cannot keep `reduced` arrays.
        return reshard(x, PartitionSpec(*self._with_tokens(x, TOKENS), reduced=set(self.stream_axes)))

    def as_matmul_input(self, x: jax.Array, equation: Equation) -> jax.Array:
        """Return x of a branch, in the shape of `equation.x`, as this product takes it.

        Devices that have the whole weight all compute the same gradient of x, which is a part of no sum.
        """
        # `reduced` promises that the gradient arrives as parts to be summed (`unreduced`). A product whose weight is
        # whole on these devices gives them equal gradients, and their sum would count one gradient several times.
        spec = jax.typeof(x).sharding.spec
        parts = spec.reduced & set(self.product_axes(equation.transposed()))
        return x if parts == spec.reduced else reshard(x, PartitionSpec(*spec.partitions, reduced=parts))

    def scatter_tokens(self, y: jax.Array, equation: Equation) -> jax.Array:
        """Return the result of a product: one of [B, T, D] that leaves a branch as [B, t, D], summed over devices."""
        return reshard(y, self.activation(equation.y)) if equation.leaves_branch and self.stream_axes else y

    def _with_tokens(self, x: jax.Array, dim_name: str) -> PartitionSpec:
        """Return where an array [B, T, ...] or [B, t, ...] lives with its tokens split as those of this letter."""
        rows, _, *others = jax.typeof(x).sharding.spec.partitions
        return PartitionSpec(rows, *self.activation(dim_name), *others)

    def local_kv_heads(self, heads: jax.Array, num_local_queries: int, dim_name: str) -> jax.Array:
        """Return the heads [B, T, K, H] that serve this device's query heads, inside a `shard_map`.

        With more devices on the axis of query heads than K, each device has all key/value heads and needs one of them,
        because K divides the size of the axis. `dim_name` is that of their dimension.
        """
        if dim_name not in self.unsplit:
            return heads
        (axis,) = DIMS["N"].activation_axes
        queries_per_head = num_local_queries * jax.lax.axis_size(axis) // heads.shape[2]
        local = jax.lax.axis_index(axis) * num_local_queries // queries_per_head
        return jax.lax.dynamic_slice_in_dim(heads, local, 1, axis=2)

    def as_local_input(self, weight: jax.Array) -> jax.Array:
        """Return a gathered weight of any shape as a `shard_map` takes it, whose body works on one device's arrays.

        jax 0.10.2 cannot lower the gradient of a `reduced` argument where all these axes have size 1. Such a gradient
        is no sum over devices, so the type can go.
        """
        spec = jax.typeof(weight).sharding.spec
        sizes = jax.sharding.get_abstract_mesh().shape
        if spec.reduced and all(sizes[axis] == 1 for axis in spec.reduced):
            return reshard(weight, PartitionSpec(*spec.partitions))
        return weight


def _make_spec(axes: list[tuple[str, ...]], **types: set[str]) -> PartitionSpec:
    """Return the PartitionSpec of the axes of each dimension; `types` are `reduced` or `unreduced` axes."""
    return PartitionSpec(*(each if len(each) > 1 else each[0] if each else None for each in axes), **types)


def list_axes(spec: PartitionSpec) -> set[str]:
    """Return the axes that split an array."""
    return {axis for axes in spec.partitions for axis in ((axes,) if isinstance(axes, str) else axes or ())}


def _sort_axes(axes: set[str]) -> tuple[str, ...]:
    """Return mesh axes in the order of the table."""
    return tuple(axis for axis in axis_names() if axis in axes)


def stage_shard_map(
    function: Callable, in_specs: Any, out_specs: Any, axes: tuple[str, ...], stand_in: Callable | None = None
) -> Callable:
    """Return `jax.shard_map(function, ...)`, which may be vmapped over stages where `axes` split them.

    `jax.vmap` of a plain `shard_map` leaves the axes of the stages to the compiler, which cannot split a kernel. Here
    they are axes of the `shard_map` too, and the function gets the arrays of one stage. `vmap` must come before
    autodiff: differentiate the vmapped function, do not vmap a gradient.

    `vmap` traces the `shard_map` for the types of its results before it asks for the rule, with the axes of the stages
    outside. There jax 0.10.2 refuses `reduced` arguments, and operations that have no rule for shardings. `stand_in` is
    then traced in its place: a function of the same arguments whose results have the same types. It never runs.
    """
    plain = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)
    if not axes:
        return plain
    traced = stand_in or plain
    # In a lambda, because custom_vmap asks a function for the default values of its arguments, and passes them, too.
    mapped = custom_vmap(lambda *arguments: traced(*arguments))

    def split(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(axes, *spec.partitions, reduced=spec.reduced, unreduced=spec.unreduced)

    @mapped.def_vmap
    def over_stages(_, is_batched, *arguments):
        leaves, tree = jax.tree.flatten(arguments)
        flags = jax.tree.leaves(is_batched)
        plain_specs = jax.tree.leaves(jax.tree.broadcast(in_specs, arguments))
        specs = tuple(split(spec) if flag else spec for spec, flag in zip(plain_specs, flags, strict=True))

        def one_stage(*leaves):
            local = [leaf[0] if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
            return jax.tree.map(lambda x: x[None], function(*jax.tree.unflatten(tree, local)))

        results = jax.shard_map(one_stage, in_specs=specs, out_specs=jax.tree.map(split, out_specs))(*leaves)
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _find_mapped_axes(arguments: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """Return the mesh axes that split the mapped dimension, which must be the same in all arguments of `jax.vmap`."""
    entries = []
    for argument, dim in zip(arguments, dims, strict=True):
        sharding = getattr(jax.typeof(argument), "sharding", None)
        if dim is not None:
            entries.append(None if sharding is None else sharding.spec.partitions[dim])
    if len(set(entries)) > 1:
        raise ValueError(f"vmap: the mapped dimensions of the arguments are split in different ways: {entries}")
    axes = entries[0] if entries else None
    return (axes,) if isinstance(axes, str) else axes


# JAX 0.10.2, the version that is locked, asks the arguments of `vmap` for `spec[dim]`. Weights that are gathered for
# the whole step refuse that, because their spec has `reduced` axes; `spec.partitions[dim]` is the answer.
api._mapped_axis_spec = _find_mapped_axes
