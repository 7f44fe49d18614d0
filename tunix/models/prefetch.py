"""A scan over layers that gathers the weights of the next layer, and sums the gradients of the last one, meanwhile.

A plain scan gathers the weights of a layer when this layer begins, and sums its gradients over devices before the
iteration ends, so its result must wait. Here weights and gradients in flight travel from iteration to iteration:

    forward     compute     layer 0    layer 1    layer 2               a column is an iteration: what stands in it
                gather      1          2          (2 once more)         depends on nothing else there, so XLA can run
                                                                        all of it at the same time
    backward    compute     layer 2    layer 1    layer 0
                gather      1          0          (0 once more)
                sum         (zeros)    2          1               then 0

The last gather forward brings the weights with which the backward pass begins. Beside the layer at work, a device has
the gathered weights of one more layer, and its own part of the gradients of one.

On stages (models/pipeline.py) each stage has such a scan over its own layers. All arrays have a first dimension [S]:
layers are [S, L / S, ...], the scan goes along their second dimension, and its body is vmapped over the stages. The
`vmap` stands inside of the backward rule, because a kernel on stages must be vmapped before its gradient is taken.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, get_abstract_mesh, reshard

from tunix.models.layer_scan import Flows, Passes, Saved, SumOverReplicas, Weights
from tunix.sharding.table import EXPERTS


class GatheredWeights(Weights):
    """Parameters of layers which are gathered for use, and whose gradients are then sums over devices."""

    def gather(self, params: list[jax.Array], number: jax.Array | int) -> list[jax.Array]:
        """Return the weights of layer `number` of [L, ...] as products take them, arrays [...]; on stages [S, ...]."""
        one_layer = [jax.lax.dynamic_index_in_dim(p, number, axis=self.dim, keepdims=False) for p in params]

        def gather(one_layer):
            return [self.layout.gather(p, equation) for p, equation in zip(one_layer, self.equations, strict=True)]

        with jax.named_scope("gather"):
            return self.on_each_stage(gather)(one_layer)

    def zero_parts(self, gathered: list[jax.Array]) -> list[jax.Array]:
        """Return zeros of the shapes of `gathered`: each device's part of the gradients, `unreduced`."""
        pairs = zip(gathered, self.equations, strict=True)
        return [self._zeros(weight.shape, weight.dtype, self.layout.unreduced(equation)) for weight, equation in pairs]

    def zero_shards(self, params: list[jax.Array]) -> list[jax.Array]:
        """Return zeros [...] like the results of `scatter_over_devices`, of parameters [L, ...]."""
        shapes = [(*param.shape[: self.dim], *param.shape[self.dim + 1 :]) for param in params]
        specs = map(self.layout.scattered, self.equations, self._list_rests(params))
        return [self._zeros(shape, self.layout.reduce, spec) for shape, spec in zip(shapes, specs, strict=True)]

    def _list_rests(self, params: list[jax.Array]) -> list[PartitionSpec]:
        """Return the place where each weight of one layer rests."""
        return [PartitionSpec(*jax.typeof(p).sharding.spec.partitions[self.dim + 1 :]) for p in params]

    def _zeros(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.Array:
        """Return zeros of one layer, laid out as `spec` says of one stage."""
        if self.stages:
            spec = PartitionSpec(self.stages, *spec.partitions, unreduced=spec.unreduced)
        return reshard(jnp.zeros(shape, dtype), spec)

    def scatter_over_devices(self, grads: list[jax.Array | None], params: list[jax.Array]) -> list[jax.Array | None]:
        """Return the gradients [...] of one layer as parts of sums over replicas; None stays.

        See `Layout.scatter_gradient`.
        """
        return self._map(self.layout.scatter_gradient, grads, params)

    def sum_parts(self, parts: list[jax.Array | None], params: list[jax.Array]) -> list[jax.Array | None]:
        """Return the gradients of one layer, in the shapes of its weights, as `Layout.gather` would; None stays."""
        return self._map(reshard, parts, params)

    def _map(
        self,
        function: Callable[[jax.Array, PartitionSpec], jax.Array],
        arrays: list[jax.Array | None],
        params: list[jax.Array],
    ) -> list[jax.Array | None]:
        """Return a function of each gradient of one layer and of the place where its weight rests."""
        rests = self._list_rests(params)

        def map_all(arrays):
            pairs = zip(arrays, rests, strict=True)
            return [None if array is None else function(array, spec) for array, spec in pairs]

        with jax.named_scope("reduce"):
            return self.on_each_stage(map_all)(arrays)


class PrefetchPasses(Passes):
    """Passes that gather the weights of each layer ahead.

    What `block` keeps for its backward pass is its own matter (`jax.checkpoint`), but no gathered weight is kept. Where
    the layout is that inside of stages, all arrays have a first dimension [S] before these dimensions, also those that
    all layers share; only the results are [L / S, S, ...]. `block` is written for one stage.

    A scan over layers of which JAX takes the gradient would keep the gathered weights of every layer, because the
    backward pass of a product needs them. So the backward pass is written here: it gathers them once more.
    """

    WEIGHTS = GatheredWeights
    weights: GatheredWeights
    UNROLL = 2  # layers of an iteration: weights that arrive are then not copied to the place of those in use

    def run_layers(
        self, params: list[jax.Array], x: jax.Array, layers: Any, shared: Any, run: Callable[..., tuple[jax.Array, Any]]
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        """Return what `run` gives for all layers, as `Passes.run_layers` does, and the gathered weights [...] of the
        last layer."""
        last = self.weights.count(params) - 1

        def body(carry, each):
            x, gathered = carry
            number, layer = each
            # Nothing here waits for the next layer's weights. The last layer gathers its own: the backward pass begins
            # with them.
            next_weights = self.weights.gather(params, jnp.minimum(number + 1, last))
            x, results = run(gathered, x, layer, shared)
            return (x, next_weights), jax.tree.map(_place, results)

        first, each = (x, self.weights.gather(params, 0)), (jnp.arange(last + 1), layers)
        (x, gathered), results = jax.lax.scan(body, first, each, unroll=self.unrolled or self.UNROLL)
        return x, results, gathered

    def begin_backward(self, params: list[jax.Array]) -> list[jax.Array]:
        """Return the gathered weights [...] of the last layer of `params` [L, ...]."""
        return self.weights.gather(params, self.weights.count(params) - 1)

    def run_backward(
        self, saved: Saved, d_x: jax.Array, d_results: Any, sums: Any
    ) -> tuple[Any, Flows, list[jax.Array], Any]:
        """Return what `Passes.run_backward` does, in the same shapes; d_x is [B, t, D]."""
        weights, params, has_sums = self.weights, saved.params, bool(sums)
        count = weights.count(params)

        def write_sums(sums, parts, number, is_due=True):
            """Sum the gradients of a layer over replicas, and put them at its place.

            Sums of several microbatches are parts of replicas too; the last microbatch sums both at once.
            """
            if has_sums:
                return self.slices.add(sums, parts, number, SumOverReplicas(weights.layout.reduce, is_due))
            summed = weights.sum_parts(parts, params)
            layer_sums = [None if x is None else x.astype(p.dtype) for x, p in zip(summed, params, strict=True)]
            update = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=weights.dim)
            return jax.tree.map(update, sums, layer_sums)

        # Layer n. What it computes with was gathered in the iteration before, and what it leaves is summed in the next
        # ones: inside of a replica, and one later over replicas. So no sum waits for something of its iteration.
        #
        #     carry         gathered weights of n     open sums: each        parts: shards of
        #                       |                     device's own of n + 1  a replica, of n + 2
        #     iteration     backward pass of n        reduce-scatter         all-reduce, put at n + 2     gather n - 1
        #                       |                         |                                                  |
        #     carry         open sums of n            parts of n + 1                               weights of n - 1
        #
        # Without replicas the result of the reduce-scatter is put at n + 1 at once.
        has_replicas = weights.layout.has_replicas(get_abstract_mesh().shape)
        delay = 2 if has_replicas else 1
        # Sums take turns: that of the layer before begins before this layer computes, and ends before its own begins.
        # Else XLA would join the two of an iteration where shards are small, and begin when both layers are done. With
        # experts, and on stages whose layers exchange tokens, a step is slower so (docs/log/sharding.md).
        exchanges_on_stages = bool(weights.stages and weights.layout.stream_axes)
        take_turns = not exchanges_on_stages and not any(EXPERTS in equation.w for equation in weights.equations)

        def body(carry, each):
            flows, gathered, open_sums, parts, sums, place = carry  # the place is `number + delay`, for the sums alone
            number, layer, vjp, d_results = each
            next_weights = weights.gather(params, jnp.maximum(number - 1, 0))
            if take_turns:
                wide = [None if part is None else part.astype(weights.layout.reduce) for part in open_sums]
                open_sums, flows = jax.lax.optimization_barrier((wide, flows))
            scattered = weights.scatter_over_devices(open_sums, params)
            open_sums, flows, d_values = saved.go_back(vjp, gathered, layer, flows, d_results)
            if take_turns:
                open_sums, scattered = jax.lax.optimization_barrier((open_sums, scattered))
            # In the first iterations these are zeros: the next ones overwrite them, and sums do not change by them.
            done = parts if has_replicas else scattered
            sums = write_sums(sums, done, jnp.minimum(place, count - 1), place < count)
            flows, scattered = self.end_layer((flows, scattered))
            return (flows, next_weights, open_sums, scattered if has_replicas else None, sums, place - 1), d_values

        gradients = sums if has_sums else saved.mask_frozen(jax.tree.map(jnp.zeros_like, params))
        nothing = saved.mask_frozen(weights.zero_parts(saved.last))
        parts = saved.mask_frozen(weights.zero_shards(params)) if has_replicas else None
        each = jnp.arange(count), saved.layers, saved.vjps, d_results
        # In an iteration of two layers the second sum over replicas would wait for the first layer's reduce-scatter.
        carry, d_values = jax.lax.scan(
            body,
            (saved.begin(d_x), saved.last, nothing, parts, gradients, jnp.asarray(count - 1 + delay)),
            each,
            reverse=True,
            unroll=self.unrolled or (1 if has_replicas else self.UNROLL),
        )
        flows, _, open_sums, parts, gradients, _ = carry
        if has_replicas:
            gradients = write_sums(gradients, parts, min(1, count - 1), count > 1)
        gradients = write_sums(gradients, weights.scatter_over_devices(open_sums, params), 0)
        of_params, sums = ([None] * len(params), gradients) if has_sums else (gradients, sums)
        return of_params, flows, d_values, sums


def _place(x: jax.Array) -> jax.Array:
    """Return a constant that a backward pass takes, as the 16 numbers of nf4, on every device; it may lie nowhere."""
    return reshard(x, PartitionSpec()) if jax.typeof(x).sharding.mesh.empty else x
