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
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jax.sharding import reshard

from tunix.sharding.dims import Equation
from tunix.sharding.layout import Layout

# (x, weights of one layer, values of the layer, values of all layers) -> (x, results)
Block = Callable[[jax.Array, Any, Any, Any], tuple[jax.Array, Any]]


def scan_ahead(
    block: Block, params: Any, x: jax.Array, layers: Any, shared: Any, layout: Layout, unroll: int = 2
) -> tuple[jax.Array, Any]:
    """Return x after `block` of every layer, and the results of all layers with a first dimension L.

    `params` is a tree of variables and `layers` a tree of values, both [L, ...]; all layers take `shared`. The gradient
    is that of a scan over `block`, of `params` and x alone: that of `layers` and `shared` is left out. What `block`
    keeps for its backward pass is its own matter (`jax.checkpoint`), but no gathered weight is kept.
    """
    variables, tree = jax.tree.flatten(params, is_leaf=lambda node: isinstance(node, nnx.Variable))
    weights = Weights(layout, [each.get_metadata()["equation"] for each in variables])

    def run_block(gathered, x, layer, shared):
        replaced = [each.replace(value) for each, value in zip(variables, gathered, strict=True)]
        return block(x, jax.tree.unflatten(tree, replaced), layer, shared)

    def forward(params, x, layers, shared, run):
        """Return what `run` gives for all layers, and the gathered weights of the last layer."""
        last = _count(params) - 1

        def body(carry, each):
            x, gathered = carry
            number, layer = each
            ahead = weights.gather(params, jnp.minimum(number + 1, last))
            x, results = run(gathered, x, layer, shared)
            return (x, ahead), results

        first = x, weights.gather(params, 0)
        (x, gathered), results = jax.lax.scan(body, first, (jnp.arange(last + 1), layers), unroll=unroll)
        return x, results, gathered

    @jax.custom_vjp
    def scan(params, x, layers, shared):
        return forward(params, x, layers, shared, run_block)[:2]

    def scan_forward(params, x, layers, shared):
        is_trained = [each.perturbed for each in params]
        params, x, layers, shared = jax.tree.map(lambda each: each.value, (params, x, layers, shared))

        def run(gathered, x, layer, shared):
            vjp: Any  # a tree: the arguments that the backward pass needs, by place, and the values that it keeps
            (x, results), vjp = jax.vjp(run_block, gathered, x, layer, shared)
            _, x_needed, _, _ = vjp.args_res
            vjp.args_res = [None, x_needed, None, None]  # the backward pass has the other arguments anyway
            return x, (results, vjp)

        x, (results, vjps), gathered = forward(params, x, layers, shared, run)
        return (x, results), (params, layers, shared, vjps, gathered, _Static(tuple(is_trained)))

    def scan_backward(kept, gradients):
        params, layers, shared, vjps, gathered, is_trained = kept
        d_x, d_results = jax.tree.map(_instantiate, gradients, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
        count = _count(params)

        def body(carry, each):
            d_x, gathered, late, sums = carry
            number, layer, vjp, d_results = each
            ahead = weights.gather(params, jnp.maximum(number - 1, 0))
            # In the first iteration these are zeros, which the next one overwrites.
            sums = put(sums, late, jnp.minimum(number + 1, count - 1))
            vjp.args_res = [gathered, vjp.args_res[1], layer, shared]
            late, d_x, *_ = vjp((d_x, d_results))
            return (d_x, ahead, keep(late), sums), None

        def keep(values):
            return [value if trained else None for value, trained in zip(values, is_trained.value, strict=True)]

        def put(sums, late, number):
            late = weights.sum_over_devices(late, params)
            update = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
            return jax.tree.map(update, sums, late)

        start = d_x, gathered, keep(weights.own_zeros(gathered)), keep(jax.tree.map(jnp.zeros_like, params))
        each = jnp.arange(count), layers, vjps, d_results
        (d_x, _, late, sums), _ = jax.lax.scan(body, start, each, reverse=True, unroll=unroll)
        return put(sums, late, 0), d_x, None, None

    scan.defvjp(scan_forward, scan_backward, symbolic_zeros=True)
    return scan([each.get_value() for each in variables], x, layers, shared)


class Weights:
    """Parameters of layers, arrays [L, ...] in a list, with the equation of each."""

    def __init__(self, layout: Layout, equations: list[Equation]):
        self.layout, self.equations = layout, equations

    def gather(self, params: list[jax.Array], number: jax.Array | int) -> list[jax.Array]:
        """Return the weights of one layer as products take them."""
        one_layer = (jax.lax.dynamic_index_in_dim(p, number, keepdims=False) for p in params)
        with jax.named_scope("gather"):
            return [self.layout.gather(p, equation) for p, equation in zip(one_layer, self.equations, strict=True)]

    def own_zeros(self, gathered: list[jax.Array]) -> list[jax.Array]:
        """Return zeros in the place of this device's part of the gradients."""
        pairs = zip(gathered, self.equations, strict=True)
        return [reshard(jnp.zeros(g.shape, g.dtype), self.layout.unreduced(equation)) for g, equation in pairs]

    def sum_over_devices(self, gradients: list[jax.Array | None], params: list[jax.Array]) -> list[jax.Array | None]:
        """Return the gradients of one layer as a scan over `Layout.gather` would; None stays None."""
        sums: list[jax.Array | None] = []
        with jax.named_scope("reduce"):
            for gradient, param in zip(gradients, params, strict=True):
                rest = jax.sharding.PartitionSpec(*jax.typeof(param).sharding.spec.partitions[1:])
                total = None if gradient is None else self.layout.sum_gradient(gradient, rest).astype(param.dtype)
                sums.append(total)
        return sums


class _Static:
    """A value that JAX passes through as it is: a part of the structure of a tree, and no leaf."""

    def __init__(self, value: tuple[bool, ...]):
        self.value = value


jax.tree_util.register_pytree_node(_Static, lambda each: ((), each.value), lambda value, _: _Static(value))


def _count(params: list[jax.Array]) -> int:
    return params[0].shape[0]


def _instantiate(gradient: Any) -> Any:
    if not isinstance(gradient, SymbolicZero):
        return gradient
    aval: Any = gradient.aval
    return jnp.zeros(aval.shape, aval.dtype, out_sharding=aval.sharding)
