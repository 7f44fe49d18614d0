"""The device mesh, where weights and activations live on it, and host data as global arrays."""

from dataclasses import dataclass

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from tunix.sharding.dims import AXES, DATA_AXES, LETTERS, Equation


@dataclass(frozen=True)
class Strategy:
    """A ZeRO stage: what is split over the fsdp axis between uses, and how long gathered weights live."""

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


@dataclass(frozen=True)
class Layout:
    """How a run keeps its weights: where (the table of layout.py) and in which dtypes.

    Weights rest in `param` dtype. A matrix product takes them from `gather`: in `compute` dtype, whole on the data
    axes. JAX types such an array `reduced` over the axes that split the batch, so that its cotangent is `unreduced`:
    each device's own part of the gradient, not summed yet.
    """

    strategy: Strategy
    whole: frozenset[str]  # letters of dimensions that every device keeps whole: their axis does not divide them
    param: str
    compute: str
    reduce: str

    def rest(self, equation: Equation, sharded: bool | None = None) -> PartitionSpec:
        """Where a weight lives between uses; with `sharded` given, its gradient or moments, split over fsdp or not."""
        sharded = self.strategy.params if sharded is None else sharded
        return PartitionSpec(*(axis if axis != "fsdp" or sharded else None for axis in self._weight_axes(equation)))

    def activation(self, letters: str) -> PartitionSpec:
        """Where an activation of these dimensions lives."""
        return PartitionSpec(*(self._axis(letter, 1) for letter in letters))

    def gathered(self, equation: Equation) -> PartitionSpec:
        """Where a weight lives while it is used."""
        return PartitionSpec(*self._gathered_axes(equation), reduced=self._gradient_axes(equation))

    def own_part(self, equation: Equation) -> PartitionSpec:
        """Where the gradient of a gathered weight lives before it is summed over devices."""
        return PartitionSpec(*self._gathered_axes(equation), unreduced=self._gradient_axes(equation))

    def gather(self, weight: jax.Array, equation: Equation) -> jax.Array:
        """The weight as a matrix product takes it; a weight that is gathered already passes as it is.

        The cast comes before the gather, so that half the bytes travel; backward, the sum over devices is taken in
        `reduce` dtype and leaves each device its own shard.
        """
        rest, dtype = jax.typeof(weight).sharding.spec, weight.dtype
        if rest == self.gathered(equation):
            return weight

        @jax.custom_vjp
        def gather(weight):
            used = weight if equation.is_quantized else weight.astype(self.use_dtype(equation))
            return reshard(used, self.gathered(equation))

        def backward(_, gradient):
            return (self.summed(gradient, rest).astype(dtype),)

        gather.defvjp(lambda weight: (gather(weight), None), backward)
        return checkpoint_name(gather(weight), "gathered")

    def summed(self, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A gradient summed over devices and laid out as `spec`: first inside a replica, then over replicas."""
        gradient = gradient.astype(self.reduce)
        if "fsdp" in spec:
            gradient = reshard(gradient, PartitionSpec(*spec, unreduced={"dp"}))
        return reshard(gradient, spec)

    def own_kv_head(self, heads: jax.Array, num_local_queries: int) -> jax.Array:
        """Of replicated heads [B, T, K, H], the one [B, T, 1, H] that serves this device's query heads.

        Inside a `shard_map`. There is one, because K divides tp.
        """
        queries_per_head = num_local_queries * jax.lax.axis_size("tp") // heads.shape[2]
        mine = jax.lax.axis_index("tp") * num_local_queries // queries_per_head
        return jax.lax.dynamic_slice_in_dim(heads, mine, 1, axis=2)

    def use_dtype(self, equation: Equation) -> str:
        """Vectors (norm scales, biases) are used in float32, matrices in the compute dtype."""
        return "float32" if equation.is_vector else self.compute

    def _weight_axes(self, equation: Equation) -> list:
        """Vectors are whole on the data axes: too small to be worth a gather."""
        axes = [self._axis(letter, 0) for letter in equation.w]
        return [None if equation.is_vector and axis in DATA_AXES else axis for axis in axes]

    def _gathered_axes(self, equation: Equation) -> list:
        return [None if axis == "fsdp" else axis for axis in self._weight_axes(equation)]

    def _gradient_axes(self, equation: Equation) -> set[str]:
        """Mesh axes over which a gradient is a sum: those that split the dimensions the weight lacks."""
        axes: set[str] = set()
        for letter in "" if equation.is_quantized else equation.batch:
            axis = self._axis(letter, 1)
            axes |= set(axis) if isinstance(axis, tuple) else {axis} if axis else set()
        return axes

    def _axis(self, letter: str, column: int) -> str | tuple[str, ...] | None:
        return None if letter in self.whole else AXES[LETTERS[letter]][column]
