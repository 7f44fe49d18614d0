"""The train step: gradients of A microbatches, one division by the weight of the loss, one update. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec, auto_axes, reshard

from tunix.data.batches import Batch, split_shared
from tunix.models.layer_scan import GradientSums, as_summed, make_slots
from tunix.models.layers import named
from tunix.sharding.arrays import map_on_devices, to_device_memory, to_host_memory
from tunix.sharding.table import Equation
from tunix.training.ema import Copy, move_ema
from tunix.training.logprobs import ROUTING, LossFn, Sums, add_up, report_sums
from tunix.training.optimizer import Schedule, SpikeGuard, move_biases
from tunix.training.state import Architecture, State, Weight, add_gradients

# Norms of each weight in each layer tell which layer a spike comes from, and whether all layers learn at the same pace:
# in a healthy run, the norm of a change over the norm of its weight is about the same in every layer.
NORMS = "layer_norms"  # their name among the numbers of a step


def compute_norms(weights: dict[str, Any], trees: dict[str, dict[str, Any]]) -> dict[str, jax.Array]:
    """Return the norms of the leaves of `trees`, such as {"gradient": ...}, keyed `gradient/blocks.attention.q.w`.

    `weights` is the tree of `Weight` of what is trained. A weight that is stacked over layers gives a norm for each
    layer, [L]; any other one a scalar. Norms are whole on every device.
    """
    equations = {name: weight.equation for name, weight in named(weights)}

    def norm(x: jax.Array, equation: Equation) -> jax.Array:
        first = int(equation.is_stacked)
        squares = jnp.square(x.astype(jnp.float32)).sum(range(first, x.ndim))
        return reshard(jnp.sqrt(squares), PartitionSpec(*[None] * first))

    return {f"{label}/{name}": norm(x, equations[name]) for label, tree in trees.items() for name, x in named(tree)}


# (params, batch [A, B, T], seeds [A]) -> (gradients, weight, sums), summed over microbatches.
Gradients = Callable[[dict, Batch, jax.Array], tuple[dict, jax.Array, Sums]]


class Update(NamedTuple):
    """Rules by which a step changes the state, given the gradients."""

    optimizer: optax.GradientTransformation
    schedule: Schedule  # the learning rate of each step
    ema: dict[str, Copy]  # of the parameters, by name
    guard: SpikeGuard | None  # against spikes
    bias_rate: float | None  # of routers (optimizer.py); None where they have no bias
    norms_every: int | None  # steps between two that report the norms of each layer; None reports none
    clip: Callable[[dict, Sums], dict] | None  # of queries and keys by their scores (qk_clip.py)

    def direct(self, grads: Any, moments: Any, params: Any) -> tuple[Any, Any]:
        """Return the direction of the update, and the new moments, both laid out like the old ones."""
        # Optimizers that mix elements (Muon's matrix products) name no mesh axes, so XLA lays their inside out.
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (params, moments))
        return auto_axes(self.optimizer.update, out_sharding=specs)(grads, moments, params)

    def report_norms(self, step: jax.Array, arch: Architecture, grads: Any, old: Any, new: Any) -> dict[str, Any]:
        """Return norms [L] of gradients, parameters and their change by `compute_norms`; zeros between due steps."""
        if not self.norms_every:
            return {}
        change = jax.tree.map(lambda n, o: n.astype(jnp.float32) - o, new, old)
        compute = partial(compute_norms, arch.trained_weights)
        trees = {"gradient": grads, "weight": new, "change": change}
        # Both ways of a condition must return equal shapes; a step between two due ones reads none of the trees.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, trees))
        is_due = (step + 1) % self.norms_every == 0  # `step` counts the steps before this one
        return {NORMS: jax.lax.cond(is_due, compute, lambda _: zeros, trees)}


def make_train_step(
    gradients: Gradients, arch: Architecture, update: Update
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """Return a function (state, batch) -> (state, metrics), to be compiled with the state donated.

    Fields of the batch are [A, B, T]. Metrics are scalars: grad_norm before clipping, learning_rate, skipped, and the
    numbers of `report_sums`, of which some are vectors; and a dict `NORMS` where the update has `norms_every`.

    A gradient g and a parameter p go this way, each device with the shards of both that it keeps:

        gradients   g, summed over microbatches and devices
        division    g / weight
        optimizer   clip, update rule, decay: direction d
        update      p - rate d
        choice      the new p or the old one

    A step whose loss or gradient is not finite changes nothing but its counters, and so does one without a token that
    is learnt, and a spike, where there is a guard. `gradients` is what `make_gradients` or `make_pipelined_gradients`
    returns.
    """
    on_host = arch.layout.moments_on_host

    def train_step(state, batch):
        num_microbatches = len(batch["tokens"])
        # Seeds follow from the step alone: a resumed run drops the same numbers out as one that was never stopped.
        seeds = state["step"] * num_microbatches + jnp.arange(num_microbatches)
        grads, weight, sums = gradients(state["params"], batch, seeds)
        with jax.named_scope("optimizer"):
            # The one division: `weight` is that of all microbatches on all devices, and sums become means here.
            # A batch may have no token that is learnt: its sums and gradients are 0, and 0 / 1 is a number.
            is_empty = weight == 0
            grads = jax.tree.map(lambda g: g / jnp.where(is_empty, 1, weight), grads)
            grad_norm = optax.tree.norm(grads)  # before clipping, which is a part of the optimizer
            trained = arch.trained(state["params"])
            moments = to_device_memory(state["opt_state"]) if on_host else state["opt_state"]
            direction, opt_state = update.direct(grads, moments, trained)
            rate = update.schedule(state["step"])
            params = jax.tree.map(lambda p, d: (p - rate * d).astype(p.dtype), trained, direction)
            if update.clip is not None:
                params = update.clip(params, sums)
            reported = {**report_sums(sums, weight), "grad_norm": grad_norm}
            # A step that is not good changes nothing. Its update is computed like any other, and then left out: each
            # array takes its new values or keeps its old ones, so no step waits for the host to look at its numbers.
            finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums["loss"])
            is_good, watched = finite & ~is_empty, dict[str, Any]()
            # `watched` is the part of the state that the guard keeps, `numbers` are for metrics.jsonl.
            if update.guard:
                spike, watched, numbers = update.guard.check(state["spikes"], reported, is_good)
                is_good, reported = is_good & ~spike, reported | numbers
            copies = move_ema(update.ema, state.get("copies", {}), to_device_memory)
            moved = {name: update.ema[name].update(tree, params) for name, tree in copies.items()}
            new = {"params": params, "opt_state": opt_state, "copies": moved}
            old = {"params": trained, "opt_state": moments, "copies": copies}
            # Moments rest in the dtype of parameters, and are computed in that of gradients.
            selected = jax.tree.map(lambda n, o: jax.lax.select(is_good, n.astype(o.dtype), o), new, old)
            reported |= update.report_norms(state["step"], arch, grads, trained, selected["params"])
            if on_host:
                selected["opt_state"] = to_host_memory(selected["opt_state"])
            if copies := move_ema(update.ema, selected.pop("copies"), to_host_memory):
                selected["copies"] = copies
        # Counted in a row: training.max_skipped_steps ends the run. A spike has a count of its own (optimizer.py).
        skipped = jnp.where(finite, 0, state["skipped"] + 1)
        # Frozen parameters come from the old state.
        selected["params"] = arch.merge(selected["params"], state["params"])
        if update.bias_rate:  # a router's bias follows the loads of its experts, and has no gradient
            bias_rate = jnp.where(is_good, update.bias_rate, 0.0)
            selected["params"] = move_biases(selected["params"], arch.weights, arch.model, sums[ROUTING], bias_rate)
        new_state = {**selected, **watched, "step": state["step"] + 1, "skipped": skipped}
        return new_state, {**reported, "learning_rate": rate, "skipped": skipped}

    return train_step


# Where weights and gradients are while a step runs. Two devices share a weight W (fsdp=2), and each has its own half of
# every microbatch. The gradient dW is a sum over both halves. [W0|W1] is a matrix of which each device keeps one half.
#
#   full_shard, sync_every=1: gathered in blocks        any other strategy, or sync_every > 1: gathered for the step
#
#   at rest          [W0|W1]  split                     at rest          [W0|W1] split, or W on both
#   block, forward   W on both: all-gather              once a step      W on both: all-gather, if it is split
#   block, backward  W on both: all-gather again        A microbatches   W stays; dW(0) on device 0, dW(1) on device 1:
#                    dW -> [dW0|dW1]: reduce-scatter,                    each has a whole matrix of its own part, which
#                    the custom backward of `gather`                     JAX types `unreduced`; parts add up in float32
#   accumulator      [dW0|dW1]  split, summed           every sync_every microbatches: dW(0) + dW(1) -> the accumulator,
#                                                       by reduce-scatter (split) or all-reduce (whole on both)
#
# Left: least memory, 2 gathers and 1 reduction a microbatch. Right: a whole W and dW, 1 gather a step, and as few
# reductions as `sync_every` asks for. Values that differ between devices never meet before they are summed: JAX's types
# (`reduced`, `unreduced`) make a forgotten sum an error while tracing.


def _of_layer(spec: PartitionSpec) -> PartitionSpec:
    """Return where one layer [...] of a stack [L, ...] lies."""
    return PartitionSpec(*spec.partitions[1:], reduced=spec.reduced, unreduced=spec.unreduced)


@dataclass(frozen=True)
class StepArrays:
    """Where weights and gradients are while a step runs (above), and the ways between."""

    arch: Architecture
    in_blocks: bool  # each block gathers its own weights
    unrolled: bool  # the layers of a stack are a piece of program each

    def spec(self, path: Any, weight: Weight, *, local_part: bool) -> PartitionSpec:
        """Return where a gradient is: summed, or the part of it that a device has before the sum."""
        layout, arch = self.arch.layout, self.arch
        if not local_part:
            return layout.stored(weight.equation)
        if not self.in_blocks:  # as large as the weight in use, and of a type that cannot be taken for the sum
            return layout.unreduced(weight.equation)
        # Gradients of other stacks, as that of `model.mtp`, are those of autodiff, which sums them.
        return layout.scattered(weight.equation) if path[0].key in arch.model.stacks else layout.stored(weight.equation)

    def zeros(self, *, local_part: bool) -> Any:
        """Return zeros like the gradients of all trained weights, to add them up in."""

        def of_weight(path: Any, weight: Weight) -> Any:
            spec = self.spec(path, weight, local_part=local_part)
            if not local_part or not self._is_apart(weight) or path[0].key not in self.arch.model.stacks:
                return reshard(jnp.zeros(weight.shape), spec)
            return [reshard(jnp.zeros(weight.shape[1:]), _of_layer(spec)) for _ in range(weight.shape[0])]

        return jax.tree.map_with_path(of_weight, self.arch.trained_weights)

    def _is_apart(self, weight: Weight) -> bool:
        """Return whether each layer of a stack is an array of its own inside of the loop over microbatches."""
        return self.unrolled and not self.in_blocks and weight.equation.is_stacked

    def list_layers(self, params: Any) -> Any:
        """Return the arrays of each weight for all microbatches: gathered, if blocks do not gather them.

        A stack [L, ...] that is gathered and whose layers are unrolled is a list of its layers [1, ...]. A layer that
        is cut out of a stack inside of the loop over microbatches is a copy in each of them, and in memory from its
        forward pass until its backward pass. A layer of layers that were put together is the layer itself.
        """

        def list_parts(weight: Weight, values: jax.Array) -> list[jax.Array]:
            parts = [values[i : i + 1] for i in range(len(values))] if self._is_apart(weight) else [values]
            # Where blocks gather their weights, `params` are at rest: a block's gradient then arrives summed and split.
            return parts if self.in_blocks else [layout.gather(part, weight.equation) for part in parts]

        layout = self.arch.layout
        with jax.named_scope("gather"):
            return jax.tree.map(list_parts, self.arch.weights, params)

    def put_together(self, layers: Any) -> Any:
        """Return the weights of `list_layers`, a stack as one array."""
        return jax.tree.map(lambda _, xs: jnp.concatenate(xs) if len(xs) > 1 else xs[0], self.arch.weights, layers)

    def sum_over_devices(self, grads: Any) -> Any:
        """Return the sums of gradients of which each device has a part, a stack as one array."""

        def sum_gradient(path: Any, weight: Weight, gradient: Any) -> jax.Array:
            spec, sum_one = self.spec(path, weight, local_part=False), self.arch.layout.sum_gradient
            if isinstance(gradient, list):
                return jnp.stack([sum_one(each, _of_layer(spec)) for each in gradient])
            return sum_one(gradient, spec)

        with jax.named_scope("reduce"):
            return jax.tree.map_with_path(sum_gradient, self.arch.trained_weights, grads)


def _lay_out_as_sum(gradient: jax.Array, total: Any) -> Any:
    """Return the gradient of a stack [L, ...] as its sum is, which may be a list of layers [...]."""
    if not isinstance(total, list):
        return gradient
    spec, numbers = _of_layer(jax.typeof(gradient).sharding.spec), range(len(total))
    return [map_on_devices(lambda g, n=n: g[n], (gradient,), spec) for n in numbers]


def make_gradients(
    arch: Architecture,
    loss_fn: LossFn,
    sync_every: int,
    sums_in_last: bool = False,
    reports_scores: bool = False,
    unrolled: bool = False,
) -> Gradients:
    """Return a function (params, batch [A, B, T], seeds [A]) -> (gradients, weight, sums), summed over microbatches.

    Gradients are float32 and summed over devices too; weight and sums are those of `Loss`. The dropout of a microbatch
    draws from its seed. Microbatches make groups, whose gradients devices sum together:

        microbatches    0   1   2     3   4   5         A = 6, sync_every = 3
        groups          `---group---' `---group---'
        on each device  0 + 1 + 2     3 + 4 + 5         parts of sums, without communication
        over devices            sum1  +       sum2      one reduction a group

    With `sums_in_last` layers add to sums of each device, which replicas sum in the last microbatch.
    """
    arrays = StepArrays(arch, arch.layout.gathers_in_blocks(sync_every), unrolled)
    in_blocks = arrays.in_blocks

    def gradients(params, batch, seeds):
        fields, shared = split_shared(batch)
        layers = arrays.list_layers(params)
        # Of one microbatch with sums that rest as weights do, the gradients of autodiff are the sums.
        names = () if in_blocks and len(seeds) == 1 else tuple(arch.model.stacks)

        def objective(trained, slots, weights, fields, seed, is_last):
            model = arch.module(arch.merge(trained, weights))
            model.gradient_sums, model.reports_scores = GradientSums(slots, is_last), reports_scores
            loss = loss_fn(model, fields | shared, seed)
            sums = model.gradient_sums
            missed.append(sums.missed)
            return (loss.objective, sums.slots), (loss.weight, loss.sums)

        missed: list[bool] = []  # whether layers left gradients to autodiff, for each trace

        def microbatch(total, inputs, is_last=False):
            # Layers add to the sums of stacks (models/layer_scan.py). Other gradients are added here, and so are those
            # of layers that are run in a way of their own.
            stacks = {name: jax.tree.flatten(total[name], lambda x: x is None or isinstance(x, list)) for name in names}
            sums = {name: leaves for name, (leaves, _) in stacks.items()}
            weights = arrays.put_together(layers)
            rows = partial(objective, weights=weights, fields=inputs[0], seed=inputs[1], is_last=is_last)
            (value, _), vjp, reported = jax.vjp(rows, arch.trained(weights), make_slots(sums), has_aux=True)
            grads, sums = vjp((jnp.ones_like(value), sums))
            total = total | {name: jax.tree.unflatten(tree, sums[name]) for name, (_, tree) in stacks.items()}
            added = [name for name in total if missed[-1] or name not in names]
            more = {name: jax.tree.map(_lay_out_as_sum, grads[name], total[name]) for name in added}
            return total | {name: add_gradients(total[name], more[name]) for name in added}, reported

        def in_replicas(inputs):
            """Return gradients of several microbatches, which replicas sum in the last one."""
            first, last = (jax.tree.map(lambda x, part=part: x[part], inputs) for part in (slice(-1), -1))
            total, reported = jax.lax.scan(microbatch, arrays.zeros(local_part=True), first)
            are_summed = not missed[-1]
            total, latest = microbatch(total, last, is_last=are_summed)
            reported = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), reported, latest)
            return jax.tree.map(as_summed, total) if are_summed else arrays.sum_over_devices(total), reported

        def group(total, inputs):
            part, reported = add_all(arrays.zeros(local_part=True), inputs)
            return add_gradients(total, arrays.sum_over_devices(part)), add_up(reported)

        def add_all(total, inputs):
            if not unrolled or len(inputs[1]) == 1 or arch.model.lora.rank:  # whose sums are small
                return jax.lax.scan(microbatch, total, inputs)
            # Where layers are pieces of program, so is the first microbatch: nothing is added to zeros, and the gather
            # of a layer's weights hides behind the layers before it.
            first, others = (jax.tree.map(lambda x, part=part: x[part], inputs) for part in (0, slice(1, None)))
            total, reported = microbatch(total, first)
            total, more = jax.lax.scan(microbatch, total, others)
            return total, jax.tree.map(lambda x, rest: jnp.concatenate([x[None], rest]), reported, more)

        if in_blocks and names and sums_in_last:
            grads, reported = in_replicas((fields, seeds))
        elif in_blocks:
            grads, reported = jax.lax.scan(microbatch, arrays.zeros(local_part=False), (fields, seeds))
        else:
            groups = jax.tree.map(lambda x: x.reshape(-1, sync_every, *x.shape[1:]), (fields, seeds))
            grads, reported = jax.lax.scan(group, arrays.zeros(local_part=False), groups)
        return grads, *add_up(reported)

    return gradients
