"""Ways of weights, gradients and activations between their places on the mesh (placement.py).

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

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from tunix.sharding.dims import DIMS, STREAM_TOKENS, TOKENS
from tunix.sharding.equations import Equation
from tunix.sharding.placement import Placement


class Layout(Placement):
    """A placement with the operations that bring arrays from one place to another."""

    def gather(self, weight: jax.Array, equation: Equation) -> jax.Array:
        """Return the weight as a matrix product takes it; a weight that is gathered already passes as it is.

        The cast comes before the gather, so that half the bytes travel. The backward pass sums the gradient over
        devices and leaves each device its own shard.
        """
        rest, dtype = jax.typeof(weight).sharding.spec, weight.dtype
        if rest == self.in_use(equation):
            return weight

        # Autodiff would sum the gradient in the dtype of products, and over all axes at once. The backward pass of our
        # own casts it to `reduce` first, and scatters it before the other axes sum it.
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
        own_parts = jax.typeof(gradient).sharding.spec.unreduced  # axes along which each device has a part of the sum
        others = own_parts - _list_axes(spec)
        if others and others != own_parts:
            gradient = reshard(gradient, PartitionSpec(*spec, unreduced=others))
        return reshard(gradient, spec)

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
        # `reduced` promises that the gradient arrives as parts to be summed (`unreduced`). A product whose weight is
        # whole on these devices gives them equal gradients, and their sum would count one gradient several times.
        spec = jax.typeof(x).sharding.spec
        parts = spec.reduced & set(self.product_axes(equation.transposed()))
        return x if parts == spec.reduced else reshard(x, PartitionSpec(*spec.partitions, reduced=parts))

    def leave_branch(self, y: jax.Array, equation: Equation) -> jax.Array:
        """Return the result of a product: one of [B, T, D] that leaves a branch as [B, t, D], summed over devices."""
        return reshard(y, self.activation(equation.y)) if equation.leaves_branch and self.stream_axes else y

    def _with_tokens(self, x: jax.Array, letter: str) -> PartitionSpec:
        """Return where an array [B, T, ...] or [B, t, ...] lives with its tokens split as those of this letter."""
        rows, _, *others = jax.typeof(x).sharding.spec.partitions
        return PartitionSpec(rows, *self.activation(letter), *others)

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


def _list_axes(spec: PartitionSpec) -> set[str]:
    """Return the mesh axes that split an array."""
    return {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
