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
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec, reshard

from tunix.sharding.equations import Equation
from tunix.sharding.layout import Layout

# (x, weights of one layer, values of the layer, values of all layers) -> (x, results)
Block = Callable[[jax.Array, Any, Any, Any], tuple[jax.Array, Any]]


def scan_prefetch(
    block: Block, params: Any, x: jax.Array, layers: Any, shared: Any, layout: Layout, unroll: int = 2
) -> tuple[jax.Array, Any]:
    """Return x after `block` of every layer, and the results of all layers with a first dimension L.

    `params` is a tree of variables and `layers` a tree of values, both [L, ...]; all layers take `shared`. The gradient
    is that of a scan over `block`, of `params` and x alone: that of `layers` and `shared` is left out. What `block`
    keeps for its backward pass is its own matter (`jax.checkpoint`), but no gathered weight is kept.

    Where `layout` is that inside of stages, all arrays have a first dimension [S] before these dimensions, also those
    of `shared`; only the results are [L / S, S, ...]. `block` is written for one stage.
    """
    weights = Weights(layout, params)
    passes = Passes(block, weights, unroll)
    scan = jax.custom_vjp(passes.run)
    # With symbolic zeros the forward rule learns which parameters are frozen, so their gradients are not computed.
    scan.defvjp(passes.forward, passes.backward, symbolic_zeros=True)
    return scan([each.get_value() for each in weights.variables], x, weights.by_layer(layers), shared)


def as_variables(module: nnx.Module, values: Any) -> Any:
    """Return values of the parameters of a module as its variables, which know their equations."""
    variables, tree = jax.tree.flatten(nnx.state(module), is_leaf=lambda node: isinstance(node, nnx.Variable))
    pairs = zip(variables, jax.tree.leaves(values), strict=True)
    return jax.tree.unflatten(tree, [variable.replace(value) for variable, value in pairs])


class Passes:
    """Forward and backward pass of `scan_prefetch`, in the form that `jax.custom_vjp` takes.

    A scan over layers of which JAX takes the gradient would keep the gathered weights of every layer, because the
    backward pass of a product needs them. So the backward pass is written here: it gathers them once more.
    """

    def __init__(self, block: Block, weights: "Weights", unroll: int):
        self.weights, self.unroll = weights, unroll
        self._run_block = weights.on_each_stage(
            lambda gathered, x, layer, shared: block(x, weights.as_params(gathered), layer, shared)
        )

    def run(self, params: list[jax.Array], x: jax.Array, layers: Any, shared: Any) -> tuple[jax.Array, Any]:
        """Return x [B, t, D] and the results of each layer [L, ...], where no gradient is asked for."""
        return self._run_layers(params, x, layers, shared, self._run_block)[:2]

    def forward(self, params: Any, x: Any, layers: Any, shared: Any) -> tuple[tuple[jax.Array, Any], Any]:
        """Return what `run` returns, and what `backward` needs, [L, ...]. Arguments say whether they have gradients."""
        is_trained = [each.perturbed for each in params]
        params, x, layers, shared = jax.tree.map(lambda each: each.value, (params, x, layers, shared))

        # A scan stacks what its body returns. JAX's backward function of a block is a tree of arrays, so the scan can
        # return it for each layer: the values that the policy of the block keeps, and in `args_res` those arguments of
        # the block that its backward pass needs. Three of these are taken out here and put back in `backward`:
        #
        #     gathered    the weights, gathered again: stacked, they would be the whole model
        #     layer       the backward scan has them anyway
        #     shared      one copy serves all layers
        def run_with_vjp(gathered, x, layer, shared):
            vjp: Any
            (x, results), vjp = jax.vjp(self._run_block, gathered, x, layer, shared)
            _, x_needed, _, _ = vjp.args_res
            vjp.args_res = [None, x_needed, None, None]
            return x, (results, vjp)

        x, (results, vjps), gathered = self._run_layers(params, x, layers, shared, run_with_vjp)
        return (x, results), (params, layers, shared, vjps, gathered, _Static(tuple(is_trained)))

    def backward(self, residuals: Any, gradients: Any) -> tuple[list[jax.Array | None], jax.Array, None, None]:
        """Return the gradients of the arguments of `run`, in their shapes."""
        params, layers, shared, vjps, gathered, is_trained = residuals

        def instantiate(gradient):  # of a result that the loss does not use, JAX says only that it is zero
            is_array = not isinstance(gradient, SymbolicZero)
            shape = gradient.aval
            return gradient if is_array else jnp.zeros(shape.shape, shape.dtype, out_sharding=shape.sharding)

        d_x, d_results = jax.tree.map(instantiate, gradients, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
        weights, count = self.weights, self.weights.count(params)

        def mask_frozen(values):
            return [value if trained else None for value, trained in zip(values, is_trained.value, strict=True)]

        def write_sums(sums, open_sums, number):
            """Sum the gradients of a layer over devices, and put them at its place."""
            layer_sums = weights.sum_over_devices(open_sums, params)
            update = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=weights.dim)
            return jax.tree.map(update, sums, layer_sums)

        # Layer n. What it computes with was gathered in the iteration before, and what it leaves is summed in the next.
        #
        #     carry         gathered weights of n     open sums: each device's part of the gradients of n + 1
        #                       |                         |
        #     iteration     backward pass of n        sum them over devices, put them at n + 1       gather n - 1
        #                       |                                                                       |
        #     carry         open sums of n                                                           weights of n - 1
        def body(carry, each):
            d_x, gathered, open_sums, sums = carry
            number, layer, vjp, d_results = each
            next_weights = weights.gather(params, jnp.maximum(number - 1, 0))
            # In the first iteration these are zeros, which the next one overwrites.
            sums = write_sums(sums, open_sums, jnp.minimum(number + 1, count - 1))
            vjp.args_res = [gathered, vjp.args_res[1], layer, shared]
            open_sums, d_x, *_ = vjp((d_x, d_results))
            return (d_x, next_weights, mask_frozen(open_sums), sums), None

        no_gradients = mask_frozen(weights.zero_parts(gathered)), mask_frozen(jax.tree.map(jnp.zeros_like, params))
        each = jnp.arange(count), layers, vjps, d_results
        carry, _ = jax.lax.scan(body, (d_x, gathered, *no_gradients), each, reverse=True, unroll=self.unroll)
        d_x, _, open_sums, sums = carry
        return write_sums(sums, open_sums, 0), d_x, None, None

    def _run_layers(
        self, params: list[jax.Array], x: jax.Array, layers: Any, shared: Any, run: Callable[..., tuple[jax.Array, Any]]
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        """Return what `run` gives for all layers, and the gathered weights of the last layer."""
        last = self.weights.count(params) - 1

        def body(carry, each):
            x, gathered = carry
            number, layer = each
            # Nothing here waits for the next layer's weights. The last layer gathers its own: the backward pass begins
            # with them.
            next_weights = self.weights.gather(params, jnp.minimum(number + 1, last))
            x, results = run(gathered, x, layer, shared)
            return (x, next_weights), results

        first = x, self.weights.gather(params, 0)
        (x, gathered), results = jax.lax.scan(body, first, (jnp.arange(last + 1), layers), unroll=self.unroll)
        return x, results, gathered


class Weights:
    """Parameters of layers, arrays [L, ...] or on stages [S, L / S, ...] in a list, with the equation of each."""

    def __init__(self, layout: Layout, params: Any):
        """`params` is a tree of variables."""
        self.layout = layout
        self.variables, self.tree = jax.tree.flatten(params, is_leaf=lambda node: isinstance(node, nnx.Variable))
        self.equations: list[Equation] = [each.get_metadata()["equation"] for each in self.variables]
        self.stages = layout.stages_around
        self.dim = 1 if self.stages else 0  # that of the layers

    def on_each_stage(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one stage's arrays as one of the arrays of all stages, [S, ...]."""
        return jax.vmap(function) if self.stages else function

    def count(self, params: list[jax.Array]) -> int:
        """Return L, the number of layers; on stages L / S, that of each stage."""
        return params[0].shape[self.dim]

    def by_layer(self, values: Any) -> Any:
        """[S, L / S, ...] -> [L / S, S, ...], as a scan over layers takes values; without stages they stay."""
        return jax.tree.map(lambda x: x.swapaxes(0, 1), values) if self.stages else values

    def as_params(self, values: list[jax.Array]) -> Any:
        """Return the tree of variables with the values of one layer, arrays without the dimension L."""
        replaced = [each.replace(value) for each, value in zip(self.variables, values, strict=True)]
        return jax.tree.unflatten(self.tree, replaced)

    def gather(self, params: list[jax.Array], number: jax.Array | int) -> list[jax.Array]:
        """Return the weights of layer `number` of [L, ...] as products take them, arrays [...]; on stages [S, ...]."""
        one_layer = [jax.lax.dynamic_index_in_dim(p, number, axis=self.dim, keepdims=False) for p in params]

        def gather(one_layer):
            return [self.layout.gather(p, equation) for p, equation in zip(one_layer, self.equations, strict=True)]

        with jax.named_scope("gather"):
            return self.on_each_stage(gather)(one_layer)

    def zero_parts(self, gathered: list[jax.Array]) -> list[jax.Array]:
        """Return zeros of the shapes of `gathered`: each device's part of the gradients, `unreduced`."""
        zeros = []
        for weight, equation in zip(gathered, self.equations, strict=True):
            spec = self.layout.unreduced(equation)
            if self.stages:
                spec = PartitionSpec(self.stages, *spec.partitions, unreduced=spec.unreduced)
            zeros.append(reshard(jnp.zeros(weight.shape, weight.dtype), spec))
        return zeros

    def sum_over_devices(self, gradients: list[jax.Array | None], params: list[jax.Array]) -> list[jax.Array | None]:
        """Return the gradients of one layer, in the shapes of its weights, as `Layout.gather` would; None stays."""
        rests = [PartitionSpec(*jax.typeof(p).sharding.spec.partitions[self.dim + 1 :]) for p in params]
        dtypes = [param.dtype for param in params]

        def sum_all(gradients):
            return [
                None if gradient is None else self.layout.sum_gradient(gradient, spec).astype(dtype)
                for gradient, spec, dtype in zip(gradients, rests, dtypes, strict=True)
            ]

        with jax.named_scope("reduce"):
            return self.on_each_stage(sum_all)(gradients)


class _Static:
    """A value that JAX passes through as it is: a part of the structure of a tree, and no leaf.

    What a forward rule returns for the backward rule must be a tree of arrays; which parameters are trained is none.
    """

    def __init__(self, value: tuple[bool, ...]):
        self.value = value


jax.tree_util.register_pytree_node(_Static, lambda each: ((), each.value), lambda value, _: _Static(value))
