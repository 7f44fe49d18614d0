"""Update rules and the learning rate over time."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunix.config.base import Count, CountOrZero, Flag, Positive, PositiveOrZero, Regex, Section, Share

FALLING_AT_THE_END = ("wsd", "sqrt_decay")  # schedules with a decay phase


class ParameterGroup(Section):
    """Parameters with an optimizer setting of their own. The one class with defaults: lists have no file in conf/."""

    params: Regex
    """Regular expression searched for in the parameter's dotted path."""
    weight_decay: PositiveOrZero | None = Field(default=None)
    """Weight decay of these parameters."""
    learning_rate: Positive | None = Field(default=None)
    """Peak learning rate of these parameters."""


class Optimizer(Section):
    learning_rate: Positive
    """Peak learning rate; the scheduler scales it."""
    weight_decay: PositiveOrZero
    """Decoupled weight decay, times the learning rate; not for vectors (norm scales)."""
    groups: tuple[ParameterGroup, ...]
    """Settings for some parameters; the first pattern that matches wins, one that matches nothing is an error."""


class AdamW(Optimizer):
    """Loshchilov & Hutter 2019, arXiv:1711.05101."""

    name: Literal["adamw"]
    """Update rule."""
    b1: Share
    """Decay of the mean of gradients."""
    b2: Share
    """Decay of the mean of squared gradients."""
    eps: Positive
    """Added to the root of the second moment."""


class Adafactor(Optimizer):
    """Shazeer & Stern 2018, arXiv:1804.04235: second moments as row and column means."""

    name: Literal["adafactor"]
    """Update rule."""
    decay_rate: Share
    """Exponent of the second moment's decay, 1 - step ** -decay_rate."""
    clipping_threshold: Positive
    """Root mean square above which an update is scaled down."""


class Lion(Optimizer):
    """Chen et al. 2023, arXiv:2302.06675: the sign of an interpolated momentum."""

    name: Literal["lion"]
    """Update rule."""
    b1: Share
    """Weight of the momentum in the update."""
    b2: Share
    """Decay of the momentum."""


class Muon(Optimizer):
    """Jordan et al. 2024: orthogonalised momentum for matrices, AdamW for embeddings and vectors."""

    name: Literal["muon"]
    """Update rule."""
    beta: Share
    """Decay of the momentum of matrices."""
    ns_steps: Count
    """Newton-Schulz iterations."""
    b1: Share
    """AdamW's decay of the mean, for embeddings and vectors."""
    b2: Share
    """AdamW's decay of the squares, for embeddings and vectors."""
    eps: Positive
    """AdamW's epsilon, for embeddings and vectors."""


class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"]
    """Update rule."""
    momentum: Share
    """Decay of the momentum; 0 keeps none."""
    nesterov: Flag
    """Look ahead along the momentum."""


class Scheduler(Section):
    """Learning rate over the run, as a multiple of its peak."""

    name: Literal["warmup_cosine", "warmup_linear", "constant", "wsd", "inverse_sqrt", "sqrt_decay"]
    """Shape after the warmup."""
    warmup_ratio: Share
    """Share of the run over which the rate rises, from peak / steps at the first one; the next two win over it."""
    warmup_steps: CountOrZero | None
    """Warmup in steps."""
    warmup_tokens: CountOrZero | None
    """Warmup in tokens."""
    decay_ratio: Share
    """Share of the run, at its end, over which wsd and sqrt_decay fall; the next two win over it."""
    decay_steps: CountOrZero | None
    """That decay in steps."""
    decay_tokens: CountOrZero | None
    """That decay in tokens."""
    final_ratio: Share
    """Rate at the end as a share of the peak (not for constant and inverse_sqrt)."""

    @model_validator(mode="after")
    def _check(self) -> "Scheduler":
        for phase in ("warmup", "decay"):
            if getattr(self, f"{phase}_steps") is not None and getattr(self, f"{phase}_tokens") is not None:
                raise ValueError(f"scheduler.{phase}_steps and scheduler.{phase}_tokens are both set; keep one")
        by_ratio = all(
            getattr(self, f"{phase}_{unit}") is None for phase in ("warmup", "decay") for unit in ("steps", "tokens")
        )
        if by_ratio and self.name in FALLING_AT_THE_END and self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(
                f"scheduler.warmup_ratio={self.warmup_ratio:g} and scheduler.decay_ratio={self.decay_ratio:g} "
                "are more than the run together; their sum may be 1"
            )
        return self


AnyOptimizer = Annotated[AdamW | Adafactor | Lion | Muon | SGD, Field(discriminator="name")]
