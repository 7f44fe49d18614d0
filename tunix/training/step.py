"""The train step: gradients of A microbatches, one division by the number of tokens, one update. Pure."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec, auto_axes, reshard

from tunix.sharding.layout import Layout
from tunix.training.copies import Update, update_copies
from tunix.training.optim import Schedule
from tunix.training.state import Architecture, State, Weight, optimizer_view

Batch = dict[str, jax.Array]
LossFn = Callable[[Any, Batch], tuple[jax.Array, dict[str, jax.Array]]]


def make_train_step(
    arch: Architecture,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    schedule: Schedule,
    layout: Layout,
    sync_every: int,
    copy_updates: dict[str, Update],
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """(state, batch) -> (state, metrics), to be compiled with the state donated; batch leaves are [A, B, T], metrics
    scalars: loss in nats per token, grad_norm before clipping, learning_rate, skipped, the loss's other sums per token.

    A step whose loss or gradient is not finite changes nothing but its counters. Gradients are reduced over the
    data shards after every `sync_every` microbatches; until then each device adds up its own part in float32.
    """
    gradients = make_gradients(arch, loss_fn, layout, sync_every)

    def update(grads, opt_state, params):
        # Optimizers that mix elements (Muon's matrix products) name no mesh axes, so XLA lays their inside out.
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (params, opt_state))
        return auto_axes(tx.update, out_sharding=specs)(grads, opt_state, params)

    def train_step(state, batch):
        num_microbatches = len(batch["tokens"])
        batch = batch | {"noise": state["step"] * num_microbatches + jnp.arange(num_microbatches)}
        grads, sums = gradients(state["params"], batch)
        with jax.named_scope("optimizer"):
            grads = optimizer_view(jax.tree.map(lambda g: g / sums["tokens"], grads), arch, layout)
            grad_norm = optax.tree.norm(grads)
            trained = arch.trained(state["params"])
            params = optimizer_view(trained, arch, layout)
            direction, opt_state = update(grads, state["opt_state"], params)
            rate = schedule(state["step"])
            params = jax.tree.map(lambda p, d: (p - rate * d).astype(p.dtype), params, direction)
            finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums["nll"])
            copies = update_copies(copy_updates, state.get("copies", {}), params)
            new = {"params": params, "opt_state": opt_state, **copies}
            old = {name: state[name] for name in new} | {"params": trained}
            kept = jax.tree.map(lambda n, o: jnp.where(finite, reshard(n, jax.typeof(o).sharding.spec), o), new, old)
        skipped = jnp.where(finite, 0, state["skipped"] + 1)
        metrics = {
            "loss": sums["nll"] / sums["tokens"], "grad_norm": grad_norm, "learning_rate": rate, "skipped": skipped,
            **{name: value / sums["tokens"] for name, value in sums.items() if name not in ("nll", "tokens")},
        }  # fmt: skip
        kept["params"] = arch.merge(kept["params"], state["params"])
        return {**kept, "step": state["step"] + 1, "skipped": skipped}, metrics

    return train_step


def make_gradients(arch: Architecture, loss_fn: LossFn, layout: Layout, sync_every: int):
    """(params, batch [A, B, T]) -> summed gradients, float32 and reduced, and the loss's sums."""
    # Either each block gathers its weights when it needs them, and the backward pass leaves shards that are summed
    # already. Or all are gathered here, once for the step, and gradients stay what each device computed until summed.
    in_blocks = layout.gathers_in_blocks(sync_every)

    def spec(weight: Weight, *, own_part: bool) -> PartitionSpec:
        if own_part:
            return layout.unreduced(weight.equation)
        return layout.at_rest(weight.equation, layout.strategy.gradients)

    def zeros(*, own_part: bool):
        return jax.tree.map(
            lambda weight: reshard(jnp.zeros(weight.shape), spec(weight, own_part=own_part)), arch.trained_weights
        )

    def gathered(params):
        with jax.named_scope("gather"):
            return jax.tree.map(lambda p, weight: layout.gather(p, weight.equation), params, arch.weights)

    def summed(grads):
        with jax.named_scope("reduce"):
            return jax.tree.map(
                lambda g, weight: layout.sum_gradient(g, spec(weight, own_part=False)), grads, arch.trained_weights
            )

    def add(total, more):
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)

    def gradients(params, batch):
        weights = params if in_blocks else gathered(params)
        groups = jax.tree.map(lambda x: x.reshape(-1, sync_every, *x.shape[1:]), batch)

        def loss(trained, batch):
            return loss_fn(arch.module(arch.merge(trained, weights)), batch)

        def microbatch(carry, batch):
            (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(arch.trained(weights), batch)
            return add(carry, (grads, sums)), None

        def group(carry, batch):
            total, sums = carry
            (part, sums), _ = jax.lax.scan(microbatch, (zeros(own_part=not in_blocks), sums), batch)
            return (add(total, part if in_blocks else summed(part)), sums), None

        shapes = jax.eval_shape(lambda: loss(arch.trained(weights), jax.tree.map(lambda x: x[0], batch)))[1]
        no_sums = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        return jax.lax.scan(group, (zeros(own_part=False), no_sums), groups)[0]

    return gradients
