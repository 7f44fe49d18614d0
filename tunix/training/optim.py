"""Optimizer and schedule: one optax chain that gives the direction, and the learning rate that scales it."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from tunix.base.errors import UserError
from tunix.config import Optimizer, Scheduler
from tunix.config.optimizer import FALLING_AT_THE_END
from tunix.models.paths import parameter_name

Schedule = Callable[[jax.Array | int], jax.Array]


def make_optimizer(
    cfg: Optimizer, weights: dict[str, Any], max_grad_norm: float | None
) -> optax.GradientTransformation:
    """Gradients to the direction that is multiplied by the learning rate and subtracted from the parameters.

    Clip by global norm, scale by the update rule, add decoupled weight decay, apply the groups' own settings.
    `weights` is the tree of `state.Weight`.
    """
    groups = _assign_groups(cfg, weights)

    def decay_and_scale(update, param, group):
        decay, rate = group
        return (update + decay * param) * rate

    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.chain(
        clip,
        RULES[cfg.name](cfg, weights),  # type: ignore[attr-defined]
        optax.stateless(lambda updates, params: jax.tree.map(decay_and_scale, updates, params, groups)),
    )


def _assign_groups(cfg: Optimizer, weights: dict[str, Any]) -> dict[str, Any]:
    """For each parameter its weight decay and its learning rate as a multiple of the optimizer's.

    Raises:
        UserError: a pattern that matches no parameter.
    """
    used = set()

    def settings(path, weight):
        decay = 0.0 if weight.equation.is_vector else cfg.weight_decay
        rate = cfg.learning_rate
        for index, group in enumerate(cfg.groups):
            if re.search(group.params, parameter_name(path)):
                used.add(index)
                decay = decay if group.weight_decay is None else group.weight_decay
                rate = rate if group.learning_rate is None else group.learning_rate
                break
        return _Settings((decay, rate / cfg.learning_rate))

    assigned = jax.tree.map_with_path(settings, weights)
    for index, group in enumerate(cfg.groups):
        if index not in used:
            names = [parameter_name(path) for path, _ in jax.tree.leaves_with_path(weights)]
            raise UserError(
                f"optimizer.groups.{index}.params={group.params} matches no parameter that an earlier group left; "
                f"parameters are {', '.join(names)}"
            )
    return assigned


class _Settings(tuple):
    """A leaf: jax would take a plain tuple for a branch."""


def _adafactor(cfg, weights):
    return optax.chain(
        optax.scale_by_factored_rms(decay_rate=cfg.decay_rate),
        optax.clip_by_block_rms(cfg.clipping_threshold),
        optax.scale_by_param_block_rms(),
    )


def _muon(cfg, weights):
    """Matrices by their fan-in and fan-out whatever their number of dimensions, one by one for each layer."""

    def dimensions(weight):
        equation = weight.equation
        if equation.is_vector or {"V", "P"} & set(equation.w):
            return None  # vectors and tables: AdamW
        kept = [n for n, letter in enumerate(equation.w) if letter not in equation.summed + "L"]
        return MuonDimensionNumbers([equation.w.index(letter) for letter in equation.summed], kept)

    muon = optax.contrib.muon(
        1.0, ns_steps=cfg.ns_steps, beta=cfg.beta, eps=cfg.eps, adam_b1=cfg.b1, adam_b2=cfg.b2,
        muon_weight_dimension_numbers=jax.tree.map(dimensions, weights),
        consistent_rms=0.2,  # updates as large as AdamW's, so that one learning rate serves both (arXiv:2502.16982)
    )  # fmt: skip
    return optax.chain(muon, optax.scale(-1.0))


RULES = {
    "adamw": lambda cfg, weights: optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps),
    "adafactor": _adafactor,
    "lion": lambda cfg, weights: optax.scale_by_lion(cfg.b1, cfg.b2),
    "muon": _muon,
    "sgd": lambda cfg, weights: optax.trace(cfg.momentum, cfg.nesterov) if cfg.momentum else optax.identity(),
}


def make_schedule(cfg: Scheduler, peak: float, total_steps: int, tokens_per_step: int) -> Schedule:
    """Learning rate of each step, counted from 0."""
    warmup, decay = (phase_steps(cfg, phase, total_steps, tokens_per_step) for phase in ("warmup", "decay"))
    shape = SHAPES[cfg.name](cfg.final_ratio, warmup, max(1, total_steps - warmup), decay)
    rise = optax.linear_schedule(1 / max(1, warmup), 1.0, max(1, warmup - 1))
    factor = optax.join_schedules([rise, shape], [warmup])
    return lambda step: jnp.asarray(peak * factor(step), jnp.float32)


def check_phases(cfg: Scheduler, total_steps: int, tokens_per_step: int) -> str:
    """What a warmup and a decay that do not fit into the run cut off; empty where they fit.

    No error: a trial of a few steps keeps the schedule of the run that it tries.
    """
    phases = ("warmup", "decay") if cfg.name in FALLING_AT_THE_END else ("warmup",)
    steps = {phase: phase_steps(cfg, phase, total_steps, tokens_per_step) for phase in phases}
    if sum(steps.values()) <= total_steps:
        return ""
    told = " and ".join(f"{phase} of {count}" for phase, count in steps.items())
    return (
        f"the schedule does not fit into the run: {told} steps, of {total_steps} in all; set scheduler.warmup_steps"
        + (" and scheduler.decay_steps" if "decay" in steps else "")
    )


def phase_steps(cfg: Scheduler, phase: str, total_steps: int, tokens_per_step: int) -> int:
    """Length in steps of the `warmup` or `decay` phase, given in steps, tokens or as a share of the run."""
    steps, tokens = getattr(cfg, f"{phase}_steps"), getattr(cfg, f"{phase}_tokens")
    if steps is not None:
        return steps
    if tokens is not None:
        return round(tokens / tokens_per_step)
    return round(getattr(cfg, f"{phase}_ratio") * total_steps)


def _hold_then(fall: Callable, final: float, steps: int, decay: int) -> Schedule:
    """1, and over the last `decay` of `steps` down to `final` by fall(share of the decay)."""

    def factor(step):
        share = jnp.clip((step - (steps - decay)) / max(1, decay), 0, 1)
        return final + (1 - final) * fall(share)

    return factor


# Each takes the final ratio, the warmup's length, the steps after it, and the length of the decay at the end.
SHAPES = {
    "warmup_cosine": lambda final, warmup, steps, decay: optax.cosine_decay_schedule(1.0, steps, final),
    "warmup_linear": lambda final, warmup, steps, decay: optax.linear_schedule(1.0, final, steps),
    "constant": lambda final, warmup, steps, decay: optax.constant_schedule(1.0),
    "wsd": lambda final, warmup, steps, decay: _hold_then(lambda share: 1 - share, final, steps, decay),
    "inverse_sqrt": lambda final, warmup, steps, decay: lambda step: (1 + step / max(1, warmup)) ** -0.5,
    # Haegele et al. 2024, arXiv:2405.18392
    "sqrt_decay": lambda final, warmup, steps, decay: _hold_then(lambda share: 1 - share**0.5, final, steps, decay),
}
