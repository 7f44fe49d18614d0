"""The optimizer: one optax chain, the learning rate, steps skipped for spikes, biases of routers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tunix.base.errors import UserError, did_you_mean
from tunix.config import Model, Optimizer, Scheduler, Training
from tunix.config.batch import Spans
from tunix.models.layers import Routing, parameter_name
from tunix.optimizers.schedules import Phases

# Spikes: steps whose loss or gradient norm lies far above those of the steps before. Their update is skipped.
#
# The devices decide, within the step: no step waits for the host. `state["spikes"]` is there only where
# `training.spike_deviations` is set:
#
#     loss, grad_norm   [training.spike_window] float32: a ring of the newest numbers of steps that were taken
#     taken             int32: numbers that were written into the rings so far
#     row, total        int32: spikes in a row up to now, and spikes of the whole run
#
# A number of a spike does not go into the ring: it would raise the limit for the steps behind it.

WATCHED = ("loss", "grad_norm")


@dataclass(frozen=True)
class SpikeGuard:
    """The limit of a step: `deviations` standard deviations above the mean of the last `window` steps."""

    deviations: float
    window: int

    def start(self) -> dict[str, Any]:
        """Return the part `spikes` of the state of a run that has no steps yet; to be compiled."""
        zero = jnp.zeros((), jnp.int32)
        rings = {name: jnp.zeros(self.window, jnp.float32) for name in WATCHED}
        return {"spikes": {**rings, "taken": zero, "row": zero, "total": zero}}

    def check(
        self, spikes: dict[str, jax.Array], numbers: dict[str, jax.Array], finite: jax.Array
    ) -> tuple[jax.Array, dict[str, Any], dict[str, jax.Array]]:
        """Judge a step by its numbers `loss` and `grad_norm`, scalars.

        Returns:
            True where the step is a spike; the part of the state after the step; numbers for metrics.jsonl.
        """
        taken, position = spikes["taken"], jnp.arange(self.window)
        above = {name: self._count_deviations(spikes[name], taken, numbers[name]) for name in WATCHED}
        is_high = [value > self.deviations for value in above.values()]  # False where `above` is not a number
        spike = finite & (is_high[0] | is_high[1])
        # A step that is not finite has a counter of its own, and does not end a row of spikes.
        row = jnp.where(finite, jnp.where(spike, spikes["row"] + 1, 0), spikes["row"])
        total = spikes["total"] + spike
        # A ring is written by comparison with all places, which needs no scatter: it has a few hundred numbers.
        written = (position == taken % self.window) & finite & ~spike
        rings = {name: jnp.where(written, numbers[name], spikes[name]) for name in WATCHED}
        new = {**rings, "taken": taken + (finite & ~spike), "row": row, "total": total}
        reported = {f"{name}_deviations": value for name, value in above.items()}
        return spike, {"spikes": new}, {"spikes": row, "spikes_total": total, **reported}

    def _count_deviations(self, ring: jax.Array, taken: jax.Array, number: jax.Array) -> jax.Array:
        """Return by how many standard deviations a number lies above the mean of a ring; NaN until it is half full."""
        is_set = jnp.arange(self.window) < taken
        count = jnp.maximum(1, is_set.sum())
        mean = jnp.where(is_set, ring, 0).sum() / count
        deviation = jnp.sqrt(jnp.where(is_set, (ring - mean) ** 2, 0).sum() / count)
        smallest = jnp.finfo(jnp.float32).eps * jnp.abs(mean) + jnp.finfo(jnp.float32).tiny  # equal numbers: rounding
        # The deviation of a few numbers says little: any of the first steps of a run could be a spike.
        is_ready = taken >= self.window // 2
        return jnp.where(is_ready, (number - mean) / jnp.maximum(deviation, smallest), jnp.nan)


def make_guard(training: Training) -> SpikeGuard | None:
    """Make the guard that the config asks for; None where it asks for none."""
    deviations, window = training.spike_deviations, training.spike_window
    return None if deviations is None else SpikeGuard(deviations, window)


Schedule = Callable[[jax.Array | int], jax.Array]


def make_optimizer(
    optimizer: Optimizer, weights: dict[str, Any], max_grad_norm: float | None, loraplus_lr_ratio: float = 1.0
) -> optax.GradientTransformation:
    """Make the chain from gradients to the direction, which is multiplied by the learning rate and then subtracted.

    It clips by global norm, applies the update rule, adds decoupled weight decay, and applies the groups' settings.
    `weights` is the tree of `state.Weight`. Second factors of low-rank updates, and magnitudes, learn by
    `loraplus_lr_ratio` times the rate, unless a group names them.
    """
    groups = _assign_groups(optimizer, weights, loraplus_lr_ratio)

    def decay_and_scale(update, param, group):
        decay, rate = group
        # Of a product by 0 XLA keeps the zeros, an array as large as all parameters, through the whole step.
        return (update + decay * param if decay else update) * rate

    # Decay comes after the rule ("decoupled", AdamW): moments do not see it. A group scales both by its rate.
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.chain(
        clip,
        optimizer.rule(weights),
        optax.stateless(lambda updates, params: jax.tree.map(decay_and_scale, updates, params, groups)),
    )


def _assign_groups(optimizer: Optimizer, weights: dict[str, Any], loraplus_lr_ratio: float) -> dict[str, Any]:
    """Return for each parameter its weight decay, and its learning rate as a multiple of the optimizer's. Raises
    `UserError` where a pattern matches no parameter."""
    used = set()

    def settings(path, weight):
        decay = 0.0 if weight.equation.is_vector else optimizer.weight_decay  # norms and biases are not pulled to 0
        rate = optimizer.learning_rate
        if parameter_name(path).endswith((".lora.b", ".lora.magnitude")):
            rate *= loraplus_lr_ratio
        for index, group in enumerate(optimizer.groups):
            if re.search(group.params, parameter_name(path)):  # the first group that matches has the parameter
                used.add(index)
                decay = decay if group.weight_decay is None else group.weight_decay
                rate = rate if group.learning_rate is None else group.learning_rate
                break
        # A multiple, because the schedule multiplies the direction of all parameters by one rate.
        return decay, rate / optimizer.learning_rate

    assigned = jax.tree.map_with_path(settings, weights)
    for index, group in enumerate(optimizer.groups):
        if index not in used:
            names = [parameter_name(path) for path, _ in jax.tree.leaves_with_path(weights)]
            key = f"optimizer.groups.{index}.params={group.params}"
            if taken := [name for name in names if re.search(group.params, name)]:
                raise UserError(f"{key} matches {taken[0]}, which an earlier group has; put the narrower group first")
            hint = did_you_mean(group.params, [*names, *(name.partition(".")[0] for name in names)])
            raise UserError(f"{key} matches no parameter{hint}; parameters are {', '.join(names)}")
    return assigned


def make_schedule(scheduler: Scheduler, peak: float, spans: Spans) -> Schedule:
    """Return the function from a step, counted from 0, to its learning rate, for the steps of a run."""
    warmup, decay = (count_phase_steps(scheduler, phase, spans) for phase in ("warmup", "decay"))
    total_steps = count_steps(spans)
    shape = scheduler.shape.factor(Phases(warmup, max(1, total_steps - warmup), decay, scheduler.final_ratio))
    # Step 0 has a rate above 0, or it would change nothing: it is 1 / warmup of the peak. Warmup of 4 steps: 1/4, 2/4,
    # 3/4, 4/4 of the peak, and then the shape begins.
    rise = optax.linear_schedule(1 / max(1, warmup), 1.0, max(1, warmup - 1))
    factor = optax.join_schedules([rise, shape], [warmup])
    return lambda step: jnp.asarray(peak * factor(step), jnp.float32)


def check_phases(scheduler: Scheduler, spans: Spans) -> str:
    """Return a warning where the warmup and the decay do not fit into the run; empty where they fit.

    This is no error: a trial of a few steps keeps the schedule of the long run that it tries.
    """
    phases = ("warmup", "decay") if scheduler.shape.has_decay else ("warmup",)
    steps = {phase: count_phase_steps(scheduler, phase, spans) for phase in phases}
    total_steps = count_steps(spans)
    if sum(steps.values()) <= total_steps:
        return ""
    phrase = " and ".join(f"{phase} of {count}" for phase, count in steps.items())
    return (
        f"the schedule does not fit into the run: {phrase} steps, of {total_steps} in all; set scheduler.warmup_steps"
        + (" and scheduler.decay_steps" if "decay" in steps else "")
    )


def count_steps(spans: Spans) -> int:
    """Return the steps of a run."""
    return sum(count for count, _ in spans)


def count_phase_steps(scheduler: Scheduler, phase: str, spans: Spans) -> int:
    """Return the length in steps of the `warmup` or `decay` phase, given in steps, tokens or as a share of the run."""
    steps, tokens = getattr(scheduler, f"{phase}_steps"), getattr(scheduler, f"{phase}_tokens")
    if steps is not None:
        return steps
    if tokens is not None:
        # The decay is counted from the end of the run, so it begins with the last span.
        return _count_steps_with(tokens, spans if phase == "warmup" else spans[::-1])
    return round(getattr(scheduler, f"{phase}_ratio") * count_steps(spans))


def _count_steps_with(tokens: int, spans: Spans) -> int:
    """Return how many steps have so many tokens, rounded; beyond the last span they go on as in it."""
    # A span is a number of steps with equal batches; steps of a later span have more tokens.
    steps, (*before, last) = 0, spans
    for count, tokens_per_step in before:
        if tokens <= count * tokens_per_step:
            return steps + round(tokens / tokens_per_step)
        steps, tokens = steps + count, tokens - count * tokens_per_step
    return steps + round(tokens / last[1])


def move_biases(
    params: dict[str, Any], weights: dict[str, Any], model: Model, routing: Routing, rate: jax.Array
) -> dict[str, Any]:
    """Return the parameters with the bias [L, X] of each expert raised or lowered by `rate` (arXiv:2408.15664).

    It follows the loads, without a gradient: it rises where the expert had fewer tokens in this step than the mean of
    its layer, and falls where it had more. `weights` is the tree of `state.Weight`.
    """
    # The sign alone: a bias moves as far for an expert with few tokens as for one with none, so it never jumps.
    missing = jnp.sign(jnp.mean(routing.load, 1, keepdims=True) - routing.load)
    step = rate * missing

    def move(path: Any, param: jax.Array, weight: Any) -> jax.Array:
        if not weight.equation.is_choice:
            return param
        if path[0].key == "mtp":  # the last one
            return param + step[-1:]
        layers = model.stacks[path[0].key]  # routing has those of all stacks
        return param + step[np.searchsorted(model.expert_layers, layers)]

    return jax.tree.map_with_path(move, params, weights)
