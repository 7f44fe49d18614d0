"""Places of weights, activations and gradients on the mesh, which follow from equations and the tables of dims.py.

One weight `BTD,DNH->BTNH` on a mesh with dp, fsdp and tp. D rests on fsdp, an axis that keeps weights; N is split over
tp at rest and in use; dp and fsdp split the batch, so that each data shard computes a gradient of its own:

    at rest      P(fsdp, tp, -)                            one shard for each device, float32
       | gather: cast to the compute dtype, then all-gather over fsdp
    in use       P(-, tp, -)  reduced={dp, fsdp}           the same on all data shards, and of type "reduced"
       | forward and backward pass of a microbatch
    gradient     P(-, tp, -)  unreduced={dp, fsdp}         each data shard has its own part of the sum
       | sum_gradient: reduce-scatter over fsdp, which splits the weight at rest, ...
                 P(fsdp, tp, -)  unreduced={dp}
       | ... then all-reduce over dp, where replicas exchange one shard each
    summed       P(fsdp, tp, -)                            laid out as the weight at rest

`reduced` and `unreduced` are types of JAX: a gradient cannot be used as if it were summed, and nothing is summed twice.
The backward pass of `gather` is `sum_gradient`. So the place of `gather` decides when gradients are summed: in a block,
once in each microbatch; before all microbatches, once in a step, which costs memory and saves traffic.

Activations of a block go the same way with `splits_stream`, where tp splits the tokens t of the residual stream
(sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198):

    stream       [B, t, D]   P(data, tp, -)                norms, sums and dropout of own tokens
       | enter_branch: all-gather over tp                  backward: reduce-scatter
    branch       [B, T, D]   P(data, -, -)  reduced={tp}   all tokens meet this device's part of the weights
       | products
    result       [B, T, D]   P(data, -, -)  unreduced={tp} each device has its own part of the sum
       | leave_branch: reduce-scatter over tp              backward: all-gather
    stream       [B, t, D]   P(data, tp, -)

Without it both places are [B, T, D], whole along tp, and the sum of a result is an all-reduce.
"""

from dataclasses import dataclass, replace

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from tunix.sharding.dims import DIMS, EXPERTS, LAYERS, STREAM_TOKENS, TOKENS, Equation, axis_names, stream_axes


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
    return _spec([DIMS[letter].activation_axes for letter in letters])


@dataclass(frozen=True)
class Layout:
    """Places and dtypes of the weights of a run.

    Weights rest in `param` dtype. A matrix product takes them in `compute` dtype from `gather`. Gradients are summed
    over devices in `reduce` dtype.
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

    def inside_stage(self) -> "Layout":
        """Return the layout inside of the blocks: the same one where the layers are not split into stages."""
        return replace(self, stages_split="layers")

    def with_tokens_on_stages(self) -> "Layout":
        """Return the layout outside of the blocks for one part of a batch, whose tokens are split over the stages."""
        return replace(self, stages_split="tokens")

    def with_all_layers(self) -> "Layout":
        """Return the layout in which every device keeps all layers: then axes of stages split the batch alone."""
        return replace(self, unsplit=self.unsplit | {LAYERS})

    def for_generation(self) -> "Layout":
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
        return _spec(self._axes_at_rest(equation)) if sharded else _spec(self._axes_in_use(equation))

    def in_use(self, equation: Equation) -> PartitionSpec:
        """Return where a weight lives while a product uses it."""
        return _spec(self._axes_in_use(equation), reduced=set(self.gradient_axes(equation)))

    def unreduced(self, equation: Equation) -> PartitionSpec:
        """Return where the gradient of a gathered weight lives before it is summed over devices."""
        return _spec(self._axes_in_use(equation), unreduced=set(self.gradient_axes(equation)))

    def activation(self, letters: str) -> PartitionSpec:
        """Return where an activation of these dimensions lives."""
        return _spec([self._activation_axes(letter) for letter in letters])

    def split_stream(self, x: jax.Array) -> jax.Array:
        """Return [B, T, ...] as the residual stream has it, [B, t, ...]: each device keeps its own tokens."""
        return reshard(x, self._with_tokens(x, STREAM_TOKENS)) if self.stream_axes else x

    def join_stream(self, x: jax.Array) -> jax.Array:
        """Return [B, t, ...] as [B, T, ...], the same on all devices that split the stream; so is its gradient."""
        return reshard(x, self._with_tokens(x, TOKENS)) if self.stream_axes else x

    def enter_branch(self, x: jax.Array) -> jax.Array:
        """Return [B, t, D] of the residual stream as [B, T, D], which products of a branch take.

        Each device adds its own part to the gradient. The backward pass sums these parts once, for all products.
        """
        if not self.stream_axes:
            return x
        # No remat policy keeps it: it is tp times as large as x, and a scan of jax 0.10.2 cannot keep `reduced` arrays.
        return reshard(x, PartitionSpec(*self._with_tokens(x, TOKENS), reduced=set(self.stream_axes)))

    def meet(self, x: jax.Array, equation: Equation) -> jax.Array:
        """Return x of a branch as this product takes it.

        Devices that have the whole weight all compute the same gradient of x, which is a part of no sum.
        """
        spec = jax.typeof(x).sharding.spec
        parts = spec.reduced & set(self.product_axes(equation.transposed()))
        return x if parts == spec.reduced else reshard(x, PartitionSpec(*spec.partitions, reduced=parts))

    def result(self, equation: Equation) -> PartitionSpec:
        """Return where the result of a product lives; one that leaves a branch is then given to `leave_branch`."""
        if not (equation.leaves_branch and self.stream_axes):
            return self.activation(equation.y)
        own_parts = set(self.product_axes(equation))
        return PartitionSpec(*self.activation(equation.y.replace(STREAM_TOKENS, TOKENS)), unreduced=own_parts)

    def leave_branch(self, y: jax.Array, equation: Equation) -> jax.Array:
        """Return the result of a product: one of [B, T, D] that leaves a branch as [B, t, D], summed over devices."""
        return reshard(y, self.activation(equation.y)) if equation.leaves_branch and self.stream_axes else y

    @property
    def stream_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the tokens of the residual stream, but not in a branch; none without `splits_stream`."""
        return stream_axes() if self.splits_stream else ()

    def _with_tokens(self, x: jax.Array, letter: str) -> PartitionSpec:
        """Return where an array [B, T, ...] or [B, t, ...] lives with its tokens split as those of this letter."""
        rows, _, *others = jax.typeof(x).sharding.spec.partitions
        return PartitionSpec(rows, *self.activation(letter), *others)

    def gather(self, weight: jax.Array, equation: Equation) -> jax.Array:
        """Return the weight as a matrix product takes it; a weight that is gathered already passes as it is.

        The cast comes before the gather, so that half the bytes travel. The backward pass sums the gradient over
        devices and leaves each device its own shard.
        """
        rest, dtype = jax.typeof(weight).sharding.spec, weight.dtype
        if rest == self.in_use(equation):
            return weight

        @jax.custom_vjp
        def gather(weight):
            used = weight if equation.is_quantized else weight.astype(self.use_dtype(equation))
            return reshard(used, self.in_use(equation))

        def backward(_, gradient):
            return (self.sum_gradient(gradient, rest).astype(dtype),)

        gather.defvjp(lambda weight: (gather(weight), None), backward)
        return checkpoint_name(gather(weight), "gathered")

    def sum_gradient(self, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Return a gradient summed over devices in `reduce` dtype and laid out as `spec`.

        It is summed first over the axes that split `spec`, so that over the others only a shard of it travels.
        """
        gradient = gradient.astype(self.reduce)
        own_parts = jax.typeof(gradient).sharding.spec.unreduced
        others = own_parts - _names(spec)
        if others and others != own_parts:
            gradient = reshard(gradient, PartitionSpec(*spec, unreduced=others))
        return reshard(gradient, spec)

    def own_kv_heads(self, heads: jax.Array, num_local_queries: int, letter: str = "K") -> jax.Array:
        """Return the heads [B, T, K, H] that serve this device's query heads, inside a `shard_map`.

        With more devices on the axis of query heads than K, each device has all key/value heads and needs one of them,
        because K divides the size of the axis. `letter` is that of their dimension.
        """
        if letter not in self.unsplit:
            return heads
        (axis,) = DIMS["N"].activation_axes
        queries_per_head = num_local_queries * jax.lax.axis_size(axis) // heads.shape[2]
        own = jax.lax.axis_index(axis) * num_local_queries // queries_per_head
        return jax.lax.dynamic_slice_in_dim(heads, own, 1, axis=2)

    def num_own_kv_heads(self, num_heads: int, letter: str = "K") -> int:
        """Return how many of the `num_heads` key/value heads on a device serve its query heads; see `own_kv_heads`."""
        return 1 if letter in self.unsplit else num_heads

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the experts: devices along them have different experts, and different sequences."""
        return self._weight_axes(EXPERTS)

    def enter_devices(self, weight: jax.Array) -> jax.Array:
        """Return a gathered weight as a `shard_map` takes it, whose body works on one device's arrays.

        jax 0.10.2 cannot lower the gradient of a `reduced` argument where all these axes have size 1. Such a gradient
        is no sum over devices, so the type can go.
        """
        spec = jax.typeof(weight).sharding.spec
        sizes = jax.sharding.get_abstract_mesh().shape
        if spec.reduced and all(sizes[axis] == 1 for axis in spec.reduced):
            return reshard(weight, PartitionSpec(*spec.partitions))
        return weight

    def use_dtype(self, equation: Equation) -> str:
        """Return the dtype of a weight in use: float32 for vectors (norm scales, biases), else the compute dtype."""
        return "float32" if equation.is_vector else self.compute

    def gathers_in_blocks(self, sync_every: int) -> bool:
        """True where each block gathers its weights; with gradients summed every `sync_every` microbatches.

        Gradients that are summed less often than once a microbatch need weights that are gathered for the whole step.
        """
        return self.strategy.gathered_for == "block" and sync_every == 1

    def gather_axes(self, equation: Equation) -> tuple[str, ...]:
        """Return the mesh axes that a weight is gathered over, and its gradient scattered over."""
        in_use = {axis for axes in self._axes_in_use(equation) for axis in axes}
        return _ordered({axis for axes in self._axes_at_rest(equation) for axis in axes} - in_use)

    def gradient_axes(self, equation: Equation) -> tuple[str, ...]:
        """Return the mesh axes that a gradient is a sum over: those that split dimensions which the weight lacks."""
        if equation.is_quantized or equation.is_choice:
            return ()
        split = {axis for letter in equation.batch for axis in self._activation_axes(letter)}
        # An axis that splits the weight in use has other entries of the weight on each device: nothing to sum.
        return _ordered(split - {axis for axes in self._axes_in_use(equation) for axis in axes})

    def product_axes(self, equation: Equation) -> tuple[str, ...]:
        """Return the mesh axes that a product is a sum over: those that split, in use, the dimensions it sums over."""
        in_use = zip(equation.w, self._axes_in_use(equation), strict=True)
        return _ordered({axis for letter, axes in in_use if letter in equation.summed for axis in axes})

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
        """Axes of each dimension of the weight between uses. Vectors are too small to be worth a gather.

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
        """Axes of each dimension of the weight in a product, which takes the gathered dimensions whole."""
        return [() if DIMS[letter].is_gathered else self._weight_axes(letter) for letter in equation.w]

    def _weight_axes(self, letter: str) -> tuple[str, ...]:
        return () if letter in self.unsplit else DIMS[letter].weight_axes


def _spec(axes: list[tuple[str, ...]], **types: set[str]) -> PartitionSpec:
    """PartitionSpec of the axes of each dimension; `types` are `reduced` or `unreduced` axes."""
    return PartitionSpec(*(each if len(each) > 1 else each[0] if each else None for each in axes), **types)


def _names(spec: PartitionSpec) -> set[str]:
    """Mesh axes that split an array."""
    return {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}


def _ordered(axes: set[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axis_names() if axis in axes)
