"""Schedules of the learning rate: the choices of the group `scheduler` (that of a run: training/optimizer.py).

optax and jax are imported where they are called, because a config is checked before jax is imported.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import ValidationInfo, field_validator, model_validator

from tunix.base.config_types import CountOrZero, Section, Share, row_of
from tunix.base.dotted_path import blame_user, import_object, is_dotted


class Phases(NamedTuple):
    """Lengths of a schedule in optimizer steps, and where it ends."""

    warmup: int
    rest: int  # after the warmup
    decay: int  # at the end of the rest
    final: float  # factor at the end, as a share of the peak


Factor = Callable[[Any], Any]  # steps since the end of the warmup, a number or a traced array -> share of the peak rate


class Shape(NamedTuple):
    """Course of the learning rate after its warmup."""

    factor: Callable[[Phases], Factor]
    has_decay: bool = False  # whether `scheduler.decay_*` is read


def _cosine(phases: Phases) -> Factor:
    import optax

    return optax.cosine_decay_schedule(1.0, phases.rest, phases.final)


def _linear(phases: Phases) -> Factor:
    import optax

    return optax.linear_schedule(1.0, phases.final, phases.rest)


def _inverse_sqrt(phases: Phases) -> Factor:
    # sqrt(warmup / step), with steps counted from the beginning of the run (Vaswani et al. 2017, arXiv:1706.03762).
    return lambda step: (1 + step / max(1, phases.warmup)) ** -0.5


def _hold_then(fall: Factor) -> Callable[[Phases], Factor]:
    """Make a shape that stays at 1 until the decay, then falls from 1 to `final` as fall(share of the decay).

    1       -----------.
                         `.
    final                   `
    step    0      rest-decay  rest
    """

    def shape(phases: Phases) -> Factor:
        import jax.numpy as jnp

        def factor(step):
            share = jnp.clip((step - (phases.rest - phases.decay)) / max(1, phases.decay), 0, 1)
            return phases.final + (1 - phases.final) * fall(share)

        return factor

    return shape


def _half_cosine(share: Any) -> Any:
    import jax.numpy as jnp

    return (1 + jnp.cos(jnp.pi * share)) / 2


def _rise(phases: Phases) -> Factor:
    """Rise by the same factor in each step, from `final` to 1."""
    first = max(phases.final, 1e-12)  # a rise by factors cannot begin at 0
    return lambda step: first ** (1 - step / max(1, phases.rest))


SHAPES = {
    "warmup_cosine": Shape(_cosine),
    "warmup_linear": Shape(_linear),
    "constant": Shape(lambda phases: lambda step: 1.0),
    "wsd": Shape(_hold_then(lambda share: 1 - share), has_decay=True),  # Hu et al. 2024, arXiv:2404.06395
    "cosine_hold": Shape(_hold_then(_half_cosine), has_decay=True),
    "inverse_sqrt": Shape(_inverse_sqrt),
    "range_test": Shape(_rise),  # Smith 2017, arXiv:1506.01186
    # Haegele et al. 2024, arXiv:2405.18392
    "sqrt_decay": Shape(_hold_then(lambda share: 1 - share**0.5), has_decay=True),
}


class Scheduler(Section):
    """Learning rate over the run, as a multiple of its peak."""

    name: row_of(SHAPES)  # type: ignore[valid-type]
    """Shape after the warmup, or `package.module:name` of your own (docs/extending.md)."""
    warmup_ratio: Share
    """Share of the run over which the rate rises, from peak / steps at the first one; warmup_steps and warmup_tokens
    win over it."""
    warmup_steps: CountOrZero | None
    """Warmup in steps."""
    warmup_tokens: CountOrZero | None
    """Warmup in tokens."""
    decay_ratio: Share
    """Share of the run, at its end, over which wsd, sqrt_decay and cosine_hold fall; decay_steps and decay_tokens win
    over it."""
    decay_steps: CountOrZero | None
    """The same decay in steps."""
    decay_tokens: CountOrZero | None
    """The same decay in tokens."""
    final_ratio: Share
    """Rate at the end as a share of the peak (not for constant and inverse_sqrt); that at the start of range_test."""

    @field_validator("warmup_steps", "decay_steps", mode="before")
    @classmethod
    def _refuse_share(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a share of the run, as `warmup_steps` of transformers may be."""
        if isinstance(value, float) and 0 < value < 1:
            raise ValueError(f"a share of the run is scheduler.{str(info.field_name)[:-5]}ratio={value:g}")
        return value

    @model_validator(mode="after")
    def _check(self) -> "Scheduler":
        for phase in ("warmup", "decay"):
            if getattr(self, f"{phase}_steps") is not None and getattr(self, f"{phase}_tokens") is not None:
                raise ValueError(f"scheduler.{phase}_steps and scheduler.{phase}_tokens are both set; keep one")
        others = self.warmup_steps, self.warmup_tokens, self.decay_steps, self.decay_tokens
        by_ratio = all(length is None for length in others)
        if by_ratio and self.shape.has_decay and self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(
                f"scheduler.warmup_ratio={self.warmup_ratio:g} and scheduler.decay_ratio={self.decay_ratio:g} "
                "are more than the run together; their sum may be 1"
            )
        return self

    @property
    def shape(self) -> Shape:
        if is_dotted(self.name):
            return Shape(import_object(self.name), has_decay=True)
        return SHAPES[self.name]

    def try_out(self) -> None:
        """Raise `UserError` where a user's shape gives no share of the rate, or asks for the value of a traced step."""
        if not is_dotted(self.name):
            return
        import jax

        with blame_user("scheduler.name", self.name):
            phases = Phases(warmup=10, rest=90, decay=30, final=self.final_ratio)
            for step in (0, phases.rest):
                factor = float(self.shape.factor(phases)(step))
                if not 0 <= factor < math.inf:
                    raise ValueError(f"its factor is {factor} at step {step} of {phases}")
            jax.eval_shape(self.shape.factor(phases), phases.rest)
