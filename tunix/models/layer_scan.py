"""A scan over layers with a backward rule of its own, which adds the gradients of a layer to sums as they are made.

Autodiff stacks the gradients of all layers in the dtype of products, and the step converts this array and adds it to
the float32 sums of the microbatches before: 48 bytes of a GPU's memory are read and written for each parameter, and
there is room for two arrays of gradients. Here the backward pass carries the sums, and a layer adds to its own place:

    backward    layer 3          layer 2          layer 1          layer 0
    sums        [. . . +]   ->   [. . + .]   ->   [. + . .]   ->   [+ . . .]

The sums come into the backward pass by JAX's own way: as the gradient of an array that the scan takes and returns
unchanged. Such an array is a *slot*. It has the shape of the sums, nobody reads its numbers, and so it takes no memory:

    forward     slot -----------> scan over layers -----------> the same slot
    backward    new sums <------- a layer adds its own <------- sums so far

`GradientSums` has the slots of all stacks. A scan that takes a part of a stack, or a second scan over the same stack
(models whose stacks take turns), hands the slot on to the next.

The sums of unrolled layers may be lists, one array [...] for each layer. XLA's GPU compiler then adds inside of the
kernel of the product, which gives float32: the gradient itself is never written.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import get_opaque_trace_state
from jax.sharding import PartitionSpec, get_abstract_mesh, reshard

from tunix.models.kernels import products_add_to_sums
from tunix.models.remat import Remat
from tunix.sharding.arrays import bring_to, map_on_devices
from tunix.sharding.layout import Layout
from tunix.sharding.table import Equation

# (x, weights of one layer, values of the layer, values of all layers) -> (x, results)
Block = Callable[[jax.Array, Any, Any, Any], tuple[jax.Array, Any]]


def sums_in_layers(layout: Layout, remat: Remat) -> bool:
    """Return whether layers can add to sums: not on stages, which have sums of their own, and not in groups."""
    return not layout.stage_axes and remat.every == 1


def make_slots(sums: Any) -> Any:
    """Return arrays whose gradients are arrays like `sums`: gradients of `reduced` arrays are `unreduced`."""

    def make(total: jax.Array) -> jax.Array:
        spec = jax.typeof(total).sharding.spec
        return reshard(jnp.zeros(total.shape, total.dtype), PartitionSpec(*spec.partitions, reduced=spec.unreduced))

    return jax.tree.map(make, sums)


# Of stacked parameters, in lists by the name of a stack: [L, ...] float32, or a list of L arrays [...]; None where a
# parameter is frozen.
Sums = dict[str, list[Any]]


class GradientSums:
    """Slots of stacked parameters."""

    def __init__(self, slots: Sums, is_last: bool):
        """With `is_last` the sums are complete when a layer has added to them, and it sums them over replicas.

        It does so in the memory of the parts, so their type still says that each device has a part (`as_summed`).
        """
        self.slots, self.is_last = slots, is_last
        self.by_layer = any(isinstance(slot, list) for stack in slots.values() for slot in stack)
        self.missed = False  # whether some layers left their gradients to autodiff
        self._trace = get_opaque_trace_state()

    def can_take(self, layout: Layout, remat: Remat) -> bool:
        """Return whether layers that run now can take the slots.

        A loss of a user may run the model inside of a loop or of a `jax.checkpoint`, whose arrays are its own.
        """
        fits = sums_in_layers(layout, remat) and get_opaque_trace_state() == self._trace
        self.missed |= not fits
        return fits


class LayerSlice(NamedTuple):
    """Where the layers of a scan are in a stack: layer n of the scan is layer first + n step of the stack."""

    stack: str
    first: int
    step: int

    def layer(self, number: Any) -> Any:
        """Return the number in the stack of layer `number` of the scan: an int, or an int32 scalar as `number` is."""
        return self.first + self.step * number


def as_variables(module: nnx.Module, values: Any) -> Any:
    """Return values of the parameters of a module as its variables, which know their equations."""
    variables, tree = jax.tree.flatten(nnx.state(module), is_leaf=_is_variable)
    pairs = zip(variables, jax.tree.leaves(values), strict=True)
    return jax.tree.unflatten(tree, [variable.replace(value) for variable, value in pairs])


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


class Weights:
    """Parameters of layers, arrays [L, ...] or on stages [S, L / S, ...] in a list, with the equation of each."""

    def __init__(self, layout: Layout, params: Any):
        """`params` is a tree of variables."""
        self.layout = layout
        self.variables, self.tree = jax.tree.flatten(params, is_leaf=_is_variable)
        self.equations: list[Equation] = [each.get_metadata()["equation"] for each in self.variables]
        self.values: list[jax.Array] = [each.get_value() for each in self.variables]
        self.stages = layout.stages_around
        self.dim = 1 if self.stages else 0  # that of the layers
        # (array [S, v, L / (S v), ...], number) -> [S, ...]: on stages that take layers out of all their chunks
        self.take_one: Callable[..., jax.Array] | None = None

    def on_each_stage(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one stage's arrays as one of the arrays of all stages, [S, ...]."""
        return jax.vmap(function) if self.stages else function

    def count(self, params: list[jax.Array]) -> int:
        """Return L, the number of layers; on stages L / S, that of each stage."""
        return params[0].shape[self.dim + (self.take_one is not None)]

    def list_layers(self, params: list[jax.Array]) -> Any:
        """Return what a scan over layers takes of parameters: one layer after the other, or with `take_one` numbers."""
        return self.by_layer(params) if self.take_one is None else jnp.arange(self.count(params))

    def take(self, params: list[jax.Array], listed: Any) -> list[jax.Array]:
        """Return the parameters of one layer, [...] or on stages [S, ...], given what such a scan gives of it."""
        return listed if self.take_one is None else [self.take_one(param, listed) for param in params]

    def by_layer(self, values: Any) -> Any:
        """[S, L / S, ...] -> [L / S, S, ...], as a scan over layers takes values; without stages they stay."""
        return jax.tree.map(lambda x: x.swapaxes(0, 1), values) if self.stages else values

    def as_params(self, values: list[jax.Array]) -> Any:
        """Return the tree of variables with the values of one layer, arrays [...] without the dimension L."""
        replaced = [each.replace(value) for each, value in zip(self.variables, values, strict=True)]
        return jax.tree.unflatten(self.tree, replaced)


class GradientSlots:
    """The slots of a scan, and for each of its parameters which slot and which layers of it are its own."""

    def __init__(self, sums: GradientSums | None, slices: Sequence[LayerSlice] = (), params: Sequence[Any] = ()):
        """`params` are trees of variables, one for each slice. Without `sums` there are no slots."""
        self.by_layer = sums is not None and sums.by_layer  # the sums of a layer are arrays of their own
        self.sums, self.stacks = sums, list(dict.fromkeys(layer_slice.stack for layer_slice in slices))
        self.parts: list[tuple[str, int, LayerSlice]] = []  # of each parameter: the stack, its number there, the slice
        for layer_slice, tree in zip(slices, params, strict=True):
            count = len(jax.tree.leaves(tree, is_leaf=_is_variable))
            self.parts += [(layer_slice.stack, number, layer_slice) for number in range(count)]
        self.add_one: Callable[..., jax.Array] = add_in_place  # stages have a way of their own

    def read(self) -> Sums:
        """Return the slots of the stacks of this scan, arrays [L, ...] like their parameters."""
        return {} if self.sums is None else {name: self.sums.slots[name] for name in self.stacks}

    def write(self, slots: Sums) -> None:
        """Hand the slots, arrays [L, ...], on to the next scan."""
        if self.sums is not None:
            self.sums.slots = self.sums.slots | slots

    def add(
        self,
        sums: Any,
        gradients: Sequence[jax.Array | None],
        number: jax.Array | int,
        over_replicas: "SumOverReplicas | None" = None,
    ) -> Any:
        """Return sums [L, ...] of stacks with the gradients [...] of layer `number` of the scan added in place.

        `over_replicas` says how replicas sum the result, where these gradients are the last ones.
        """
        sums = {name: list(each) for name, each in sums.items()}
        if self.sums is None or not self.sums.is_last:
            over_replicas = None
        for (stack, index, layer_slice), gradient in zip(self.parts, gradients, strict=True):
            if (total := sums[stack][index]) is not None and gradient is not None:
                layer = layer_slice.layer(number)
                if isinstance(total, list):
                    sums[stack][index] = [*total[:layer], gradient, *total[layer + 1 :]]
                else:
                    sums[stack][index] = self.add_one(total, gradient, layer, over_replicas)
        return sums

    def add_to_layer(self, sums: Sums, gradients: Sequence[jax.Array | None], number: int) -> list[jax.Array | None]:
        """Return the sums [...] of layer `number` with its gradients added; `add` puts them in their place."""
        added: list[jax.Array | None] = [None] * len(gradients)
        for place, ((stack, index, layer_slice), gradient) in enumerate(zip(self.parts, gradients, strict=True)):
            if gradient is not None:
                total = sums[stack][index][layer_slice.layer(number)]
                spec = jax.typeof(total).sharding.spec
                arrays = total, bring_to(gradient, spec)
                added[place] = map_on_devices(lambda total, more: total + more.astype(total.dtype), arrays, spec)
        return added


def gives_wide_gradients(params: Any, sums: GradientSums | None) -> bool:
    """Return whether products give the gradients of trees of variables in float32, to be added to sums of one layer.

    Not beside a quantized base: jax 0.10.2 refuses barriers of single arguments in a block with constants of its own.
    """
    variables = jax.tree.leaves(params, is_leaf=_is_variable)
    is_quantized = any(each.get_metadata()["equation"].is_quantized for each in variables)
    return sums is not None and sums.by_layer and products_add_to_sums() and not is_quantized


def is_narrow(weight: jax.Array) -> bool:
    """Return whether a weight [...] has fewer bits than the sum of its gradients."""
    return weight.dtype != jnp.float32


def scan_by_number(body: Callable[..., Any], carry: Any, each: Any) -> tuple[Any, Any]:
    """Return what `jax.lax.scan` does backward over arrays [L, ...], as L pieces of program that know their number."""
    results: list[Any] = []
    for number in reversed(range(len(jax.tree.leaves(each)[0]))):
        carry, result = body(carry, jax.tree.map(partial(jax.lax.index_in_dim, index=number, keepdims=False), each))
        results.insert(0, result)
    return carry, jax.tree.map(lambda *layers: jnp.stack(layers), *results)


class SumOverReplicas(NamedTuple):
    """How devices sum a layer of which each has a part, when it has got all of its gradients."""

    dtype: str
    is_due: jax.Array | bool  # false where only zeros are added: a layer that is summed twice would be too large


def add_in_place(
    total: jax.Array, gradient: jax.Array, index: jax.Array | int, over_replicas: SumOverReplicas | None = None
) -> jax.Array:
    """Return [L, ...] with a gradient [...] added to the layer `index`, in the dtype of the sums."""
    spec = jax.typeof(total).sharding.spec
    axes = tuple(sorted(spec.unreduced))
    of_layer = PartitionSpec(*spec.partitions[1:], unreduced=spec.unreduced)
    gradient = bring_to(gradient, of_layer)

    # XLA reads, adds and writes in one kernel where both places are the same scalar of its loop: no check for negative
    # indices, and no array of numbers that is looked up.
    def add(total: jax.Array, gradient: jax.Array, index: jax.Array, is_due: jax.Array) -> jax.Array:
        where = [index, *[jnp.zeros_like(index)] * gradient.ndim]
        local = jax.lax.dynamic_slice(total, where, (1, *gradient.shape), allow_negative_indices=False)
        added = local + gradient[None].astype(total.dtype)
        if over_replicas is not None and axes:
            summed = jax.lax.psum(added.astype(over_replicas.dtype), axes).astype(total.dtype)
            added = jnp.where(is_due, summed, local)
        return jax.lax.dynamic_update_slice(total, added, where, allow_negative_indices=False)

    # jax 0.10.2 has no slices of arrays that are still to be summed over devices. Each device adds to its own part in a
    # `shard_map` that does not ask for types. Where these axes have one device, nothing is left to be summed.
    scalars = jnp.asarray(index), jnp.asarray(True if over_replicas is None else over_replicas.is_due)
    if _are_single(axes):
        plain = PartitionSpec(*spec.partitions)
        of_layer = PartitionSpec(*plain[1:])
        return bring_to(add(bring_to(total, plain), bring_to(gradient, of_layer), *scalars), spec)
    specs_in = spec, of_layer, PartitionSpec(), PartitionSpec()
    return jax.shard_map(add, in_specs=specs_in, out_specs=spec, check_vma=False)(total, gradient, *scalars)


def as_summed(total: jax.Array) -> jax.Array:
    """Return an array of any shape [...] that devices have summed in the memory of their parts, with the type of the
    sum."""
    spec = jax.typeof(total).sharding.spec
    summed = PartitionSpec(*spec.partitions)
    if _are_single(spec.unreduced):
        return bring_to(total, summed)
    return jax.shard_map(lambda x: x, in_specs=spec, out_specs=summed, check_vma=False)(total)


def _are_single(axes: Iterable[str]) -> bool:
    sizes = get_abstract_mesh().shape
    return all(sizes[axis] == 1 for axis in axes)


class Passes:
    """Forward and backward pass of a scan over layers, in the form that `jax.custom_vjp` takes."""

    WEIGHTS = Weights

    def __init__(
        self,
        block: Block,
        params: Sequence[Any],
        layout: Layout,
        sums: GradientSums | None,
        slices: Sequence[LayerSlice] = (),
        unrolled: bool = False,
    ):
        """`params` are trees of variables [L, ...]. Their gradients go into `sums`, if given; `slices` say where to.

        With `unrolled` each layer is a piece of program of its own.
        """
        self.unrolled, self.wide_gradients = unrolled, gives_wide_gradients(params, sums)
        weights = self.weights = self.WEIGHTS(layout, params)
        self.slices = GradientSlots(sums, slices, params if slices else ())
        self.run_block = weights.on_each_stage(
            lambda local, x, layer, shared: block(x, weights.as_params(local), layer, shared)
        )

    def scan(self, x: jax.Array, layers: Any, shared: Any) -> tuple[jax.Array, Any]:
        """Return x [B, t, D] after `block` of every layer, and the results of each layer [L, ...].

        `layers` is a tree of values [L, ...]; all layers take `shared`. On stages there is no gradient of these two.
        """
        scan = jax.custom_vjp(self._run)
        # With symbolic zeros the forward rule learns which parameters are frozen, so their gradients are not computed.
        scan.defvjp(self._forward, self._backward, symbolic_zeros=True)
        weights, slices = self.weights, self.slices
        x, results, slots = scan(weights.values, slices.read(), x, weights.by_layer(layers), shared)
        slices.write(slots)
        return x, results

    def run_layers(
        self, params: list[jax.Array], x: jax.Array, layers: Any, shared: Any, run: Callable[..., tuple[jax.Array, Any]]
    ) -> tuple[jax.Array, Any, Any]:
        """Return what `run` gives for all layers, and what the backward pass begins with.

        `params` and `layers` are [L, ...], x is [B, t, D]; the results of `run` are stacked, [L, ...].
        """

        def body(x, each):
            listed, layer = each
            return run(self.weights.take(params, listed), x, layer, shared)

        return *jax.lax.scan(body, x, (self.weights.list_layers(params), layers), unroll=self.unrolled), None

    def run_backward(
        self, saved: "Saved", d_x: jax.Array, d_results: Any, sums: Any
    ) -> tuple[Any, "Flows", list[jax.Array], Any]:
        """Return the gradients of parameters that go into no sums, of what flows along, of the layers' values, and the
        new sums.

        d_x is [B, t, D], the gradient behind the last layer; all others are [L, ...], like what they are gradients of.
        """

        def body(carry, each):
            flows, sums, number = carry
            listed, layer, vjp, d_results = each
            local = self.as_gradients(self.weights.take(saved.params, listed))
            gradients, flows, d_values = saved.go_back(vjp, local, layer, flows, d_results)
            if by_layer:
                gradients = self.slices.add_to_layer(sums, gradients, number)
            gradients, flows = self.end_layer((gradients, flows))
            if not has_sums:
                return (flows, sums, number - 1), (gradients, d_values)
            return (flows, self.slices.add(sums, gradients, number), number - 1), (None, d_values)

        has_sums = bool(sums)
        last, by_layer = self.weights.count(saved.params) - 1, has_sums and self.slices.by_layer
        first = saved.begin(d_x), sums, last if by_layer else jnp.asarray(last)
        each = self.weights.list_layers(saved.params), saved.layers, saved.vjps, d_results
        scan = scan_by_number if by_layer else partial(jax.lax.scan, reverse=True, unroll=self.unrolled)
        (flows, sums, _), (gradients, d_values) = scan(body, first, each)
        gradients = [None] * len(saved.params) if has_sums else self.weights.by_layer(gradients)
        return gradients, flows, d_values, sums

    def as_gradients(self, local: list[jax.Array]) -> list[jax.Array]:
        """Return the weights [...] of a layer; those that are trained in the dtype that their gradients shall have."""
        if not self.wide_gradients:
            return local
        slots = self.slices.read()
        is_trained = [slots[stack][index] is not None for stack, index, _ in self.slices.parts]
        pairs = zip(local, is_trained, strict=True)
        return [w.astype(jnp.float32) if trained and is_narrow(w) else w for w, trained in pairs]

    def end_layer(self, results: Any) -> Any:
        """Return what a layer hands on in the backward pass; none of it goes on before all of it is there.

        In a loop this is so by itself. In unrolled layers XLA's scheduler would put sums of gradients off until all
        layers are done: they would hide behind nothing, and all gradients would be in memory.
        """
        return jax.lax.optimization_barrier(results) if self.unrolled else results

    def _run(self, params: list[jax.Array], slots: Any, x: jax.Array, layers: Any, shared: Any) -> tuple[Any, ...]:
        """Return x, results and slots, where no gradient is asked for."""
        return *self.run_layers(params, x, layers, shared, self.run_block)[:2], slots

    def _forward(self, params: Any, slots: Any, x: Any, layers: Any, shared: Any) -> tuple[tuple[Any, ...], "Saved"]:
        """Return what `_run` returns, and what `_backward` needs, [L, ...]. Arguments say whether they have
        gradients."""
        arguments = params, layers, shared
        has_gradient = Static(tuple(tuple(each.perturbed for each in jax.tree.leaves(x)) for x in arguments))
        params, slots, x, layers, shared = jax.tree.map(lambda each: each.value, (params, slots, x, layers, shared))
        x, results, vjps, last = self.keep(params, x, layers, shared)
        return (x, results, slots), Saved(params, layers, shared, vjps, last, has_gradient)

    def keep(self, params: list[jax.Array], x: jax.Array, layers: Any, shared: Any) -> tuple[jax.Array, Any, Any, Any]:
        """Return x [B, t, D], results and backward functions of all layers [L, ...], and what the backward pass begins
        with."""

        # A scan stacks what its body returns. JAX's backward function of a block is a tree of arrays, so the scan can
        # return it for each layer: the values that the policy of the block keeps, and in `args_res` those arguments of
        # the block that its backward pass needs. Three of these are taken out here and put back by `Saved.go_back`:
        #
        #     local       the weights: the backward scan takes them again, and where layers gather them, it gathers
        #                 them again; stacked, they would be the whole model
        #     layer       the backward scan has them anyway
        #     shared      one copy serves all layers
        def run_with_vjp(local, x, layer, shared):
            vjp: Any
            (x, results), vjp = jax.vjp(self.run_block, self.as_gradients(local), x, layer, shared)
            _, x_needed, _, _ = vjp.args_res
            vjp.args_res = [None, x_needed, None, None]
            return x, (results, vjp)

        x, (results, vjps), last = self.run_layers(params, x, layers, shared, run_with_vjp)
        return x, results, vjps, last

    def go_back(
        self,
        layers: Any,
        shared: Any,
        vjps: Any,
        d_x: jax.Array,
        d_results: Any,
        is_trained: Sequence[bool],
        sums: Sums,
    ) -> tuple[list[jax.Array | None], jax.Array, Sums]:
        """Return the gradients of the parameters [L, ...], None for frozen ones, that of x [B, t, D], and the sums.

        `vjps` are those of `keep`. With `sums` the gradients of parameters are added to them, and are None.
        """
        params = self.weights.values
        nothing = ((False,) * len(jax.tree.leaves(each)) for each in (layers, shared))
        has_gradient = Static((tuple(is_trained), *nothing))
        saved = Saved(params, layers, shared, vjps, self.begin_backward(params), has_gradient)
        gradients, flows, _, sums = self.run_backward(saved, d_x, d_results, sums)
        return gradients, flows.d_x, sums

    def begin_backward(self, params: list[jax.Array]) -> Any:
        """Return what the backward pass of `params` [L, ...] begins with, where it does not follow the forward pass at
        once."""
        return None

    def _backward(self, saved: "Saved", gradients: Any) -> tuple[Any, Any, jax.Array, Any, Any]:
        """Return the gradients of the arguments of `_run`, in their shapes."""

        def instantiate(gradient):  # of a result that the loss does not use, JAX says only that it is zero
            is_array = not isinstance(gradient, SymbolicZero)
            shape = gradient.aval
            return gradient if is_array else jnp.zeros(shape.shape, shape.dtype, out_sharding=shape.sharding)

        zeros = jax.tree.map(instantiate, gradients, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
        d_x, d_results, sums = zeros
        d_params, flows, d_values, sums = self.run_backward(saved, d_x, d_results, sums)
        _, of_layers, of_shared = saved.has_gradient.value
        d_layers, d_shared = fill(saved.layers, of_layers, d_values), fill(saved.shared, of_shared, flows.d_shared)
        return d_params, sums, flows.d_x, d_layers, d_shared


class Static:
    """A value that JAX passes through as it is: a part of the structure of a tree, and no leaf.

    What a forward rule returns for the backward rule must be a tree of arrays; which parameters are trained is none.
    """

    def __init__(self, value: Any):
        self.value = value


jax.tree_util.register_pytree_node(Static, lambda each: ((), each.value), lambda value, _: Static(value))


class Flows(NamedTuple):
    """Gradients that go backward from layer to layer."""

    d_x: jax.Array
    d_shared: list[jax.Array]  # sums over the layers so far, of those arrays of `shared` that have a gradient


def select(tree: Any, chosen: Sequence[bool]) -> list[Any]:
    """Return the leaves of a tree that are chosen."""
    if not any(chosen):  # on stages, where rows lack some arrays in the backward pass
        return []
    return [leaf for leaf, is_chosen in zip(jax.tree.leaves(tree), chosen, strict=True) if is_chosen]


def fill(tree: Any, chosen: Sequence[bool], values: Sequence[Any]) -> Any:
    """Return a tree with these values in the place of the leaves that are chosen, and None in that of the others."""
    remaining = iter(values)
    return jax.tree.unflatten(jax.tree.structure(tree), [next(remaining) if each else None for each in chosen])


class Saved(NamedTuple):
    """Values that the forward pass of a scan leaves for its backward pass."""

    params: list[jax.Array]
    layers: Any
    shared: Any
    vjps: Any  # the backward functions of all blocks, as a tree of arrays [L, ...]
    last: Any  # what `Passes.run_layers` returns last
    has_gradient: Static  # for each array of `params`, of `layers` and of `shared`

    def begin(self, d_x: jax.Array) -> Flows:
        """Return the gradients behind the last layer; d_x is [B, t, D]."""
        return Flows(d_x, jax.tree.map(jnp.zeros_like, select(self.shared, self.has_gradient.value[2])))

    def go_back(
        self, vjp: Any, local: list[jax.Array], layer: Any, flows: Flows, d_results: Any
    ) -> tuple[list[jax.Array | None], Flows, list[jax.Array]]:
        """Return the gradients of a layer's weights, arrays [...] like them, None for frozen ones; those before it; and
        those of its values."""
        _, of_layers, of_shared = self.has_gradient.value
        vjp.args_res = [local, vjp.args_res[1], layer, self.shared]
        gradients, d_x, d_layer, d_shared = vjp((flows.d_x, d_results))
        d_shared = jax.tree.map(jnp.add, flows.d_shared, select(d_shared, of_shared))
        return self.mask_frozen(gradients), Flows(d_x, d_shared), select(d_layer, of_layers)

    def mask_frozen(self, values: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Return values [...] of all parameters with None in the place of those that are frozen."""
        return [value if trained else None for value, trained in zip(values, self.has_gradient.value[0], strict=True)]
