"""Optimizers: the choices of the group `optimizer`. Each is one class: its keys, and how it makes a direction.

To add an optimizer, write its class and add it to `OPTIMIZERS`; to add a schedule, add a shape to `SHAPES` of
`schedules.py`. optax is imported where it is called, because a config is checked before jax is imported.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field, model_validator

from tunix.base.config_types import Count, Decay, DottedPath, Flag, NonNegative, Positive, Regex, Section, Share
from tunix.base.dotted_path import blame_user, import_object

if TYPE_CHECKING:
    from optax import GradientTransformation


class ParameterGroup(Section):
    """Parameters with an optimizer setting of their own. The one class with defaults: lists have no file in conf/."""

    params: Regex
    """Regular expression searched for in the parameter's dotted path."""
    weight_decay: NonNegative | None = Field(default=None)
    """Weight decay of these parameters."""
    learning_rate: Positive | None = Field(default=None)
    """Peak learning rate of these parameters."""


class Optimizer(Section):
    learning_rate: Positive
    """Peak learning rate; the scheduler scales it."""
    weight_decay: NonNegative
    """Decoupled weight decay, times the learning rate; not for vectors (norm scales)."""
    groups: tuple[ParameterGroup, ...]
    """Settings for some parameters; the first pattern that matches wins, one that matches nothing is an error."""

    if TYPE_CHECKING:  # each subclass declares the one value that it takes
        name: str

    def rule(self, weights: dict[str, Any]) -> "GradientTransformation":
        """Return the optax transformation of clipped gradients to a direction that is subtracted from the parameters.

        `weights` is the tree of `state.Weight`. The learning rate and weight decay are applied after it.
        """
        raise NotImplementedError

    @property
    def score_limit(self) -> float | None:
        """Largest score of attention that a head keeps (training/qk_clip.py); None where none is looked for."""
        return None

    def try_out(self) -> None:
        """Run the user's own code once, if the rule has any; raise `UserError` if it does not work."""


# How moments rest between two updates: as the parameters do, or as one of `KINDS` of moments.py.
Moments = Literal["param", "bfloat16", "int8"]


def store_moments_as(rule: "GradientTransformation", moments: str, weights: dict[str, Any]) -> "GradientTransformation":
    """Return the rule with moments that rest as the key says. `weights` is the tree of `state.Weight`."""
    if moments == "param":
        return rule
    from tunix.optimizers.moments import store_moments

    return store_moments(rule, moments, weights)


def make_by_matrix(rule: "GradientTransformation", weights: dict[str, Any]) -> "GradientTransformation":
    """Return a rule, one without a state, that sees each matrix by itself: that of each layer, and of each expert.

    An array of parameters has those of all layers of a stack. `weights` is the tree of `state.Weight`.
    """
    import jax
    import optax

    from tunix.sharding.table import STACKED

    def update(updates, state, params=None):
        def of_array(weight, update, param):
            def of_matrix(update, param):
                return rule.update(update, optax.EmptyState(), param)[0]

            equation = weight.equation
            copies = set(STACKED) if equation.is_vector else set(equation.copies)
            for axis, dim_name in enumerate(equation.w):
                if dim_name in copies:
                    of_matrix = jax.vmap(of_matrix, axis, axis)
            return of_matrix(update, param)

        return jax.tree.map(of_array, weights, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update)


class AdamW(Optimizer):
    """Loshchilov & Hutter 2019, arXiv:1711.05101."""

    name: Literal["adamw"]
    """Update rule."""
    b1: Decay
    """Decay of the mean of gradients."""
    b2: Decay
    """Decay of the mean of squared gradients."""
    eps: Positive
    """Added to the root of the second moment."""
    moments: Moments
    """Both moments between two updates: param, in training.param_dtype; bfloat16; or int8, codes of 8 bits with a scale
    for each block of 128. Those of vectors stay as param."""

    def rule(self, weights):
        import optax

        return store_moments_as(optax.scale_by_adam(self.b1, self.b2, self.eps), self.moments, weights)


class Adafactor(Optimizer):
    """Shazeer & Stern 2018, arXiv:1804.04235: second moments as row and column means."""

    name: Literal["adafactor"]
    """Update rule."""
    decay_rate: Share
    """Exponent of the second moment's decay, 1 - step ** -decay_rate."""
    clipping_threshold: Positive
    """Root mean square above which an update is scaled down."""

    def rule(self, weights):
        import optax

        # In the paper's order: divide by the root of the second moment, clip, multiply by the size of the parameter.
        return optax.chain(
            optax.scale_by_factored_rms(decay_rate=self.decay_rate),
            make_by_matrix(optax.clip_by_block_rms(self.clipping_threshold), weights),
            make_by_matrix(optax.scale_by_param_block_rms(), weights),
        )


class Lion(Optimizer):
    """Chen et al. 2023, arXiv:2302.06675: the sign of an interpolated momentum."""

    name: Literal["lion"]
    """Update rule."""
    b1: Share
    """Weight of the momentum in the update."""
    b2: Share
    """Decay of the momentum."""
    moments: Moments
    """The momentum between two updates: param, in training.param_dtype; bfloat16; or int8, codes of 8 bits with a scale
    for each block of 128. Those of vectors stay as param."""

    def rule(self, weights):
        import optax

        return store_moments_as(optax.scale_by_lion(self.b1, self.b2), self.moments, weights)


class Muon(Optimizer):
    """Jordan et al. 2024: orthogonalised momentum for matrices, AdamW for embeddings and vectors."""

    name: Literal["muon"]
    """Update rule."""
    beta: Decay
    """Decay of the momentum of matrices."""
    ns_steps: Count
    """Newton-Schulz iterations."""
    qk_clip: Positive | None
    """Largest score of attention (QK-clip, arXiv:2507.20534): after an update, a head whose largest score in the step
    was above it has its queries and keys scaled down, by this over the score. The score is the log of the sum of
    exp(score) of a query. Null scales nothing."""
    b1: Decay
    """AdamW's decay of the mean, for embeddings and vectors."""
    b2: Decay
    """AdamW's decay of the squares, for embeddings and vectors."""
    eps: Positive
    """AdamW's epsilon, for embeddings and vectors."""
    moments: Moments
    """All moments between two updates: param, in training.param_dtype; bfloat16; or int8, codes of 8 bits with a scale
    for each block of 128. Those of vectors stay as param."""

    def rule(self, weights):
        import optax

        from tunix.optimizers.muon import make_muon

        # `make_muon` is made of optax's parts, whose updates are added to the parameters; the step subtracts.
        return optax.chain(make_muon(self, weights), optax.scale(-1.0))

    @property
    def score_limit(self):
        return self.qk_clip


class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"]
    """Update rule."""
    momentum: Share
    """Decay of the momentum; 0 keeps none."""
    nesterov: Flag
    """Look ahead along the momentum."""
    moments: Moments
    """The momentum between two updates: param, in training.param_dtype; bfloat16; or int8, codes of 8 bits with a scale
    for each block of 128. Those of vectors stay as param."""

    @model_validator(mode="after")
    def _check(self) -> "SGD":
        if not self.momentum and self.moments != "param":
            raise ValueError(f"optimizer.moments={self.moments}: optimizer.momentum=0 keeps no moments; leave one out")
        return self

    def rule(self, weights):
        import optax

        if not self.momentum:
            return optax.identity()
        return store_moments_as(optax.trace(self.momentum, self.nesterov), self.moments, weights)


class Custom(Optimizer):
    """Update rule of your own function (docs/extending.md)."""

    name: Literal["custom"]
    """Update rule."""
    function: DottedPath
    """`package.module:name` of a function that returns an optax transformation for a learning rate of 1."""
    arguments: dict[str, Any] | None
    """Keyword arguments of the function, {name: value}; null gives none."""

    def rule(self, weights):
        import optax

        with blame_user("optimizer.function", self.function):
            rule: Any = import_object(self.function)(**(self.arguments or {}))
            if not isinstance(rule, optax.GradientTransformation):
                raise TypeError(f"returned {rule!r:.40}, not an optax.GradientTransformation")
        return optax.chain(rule, optax.scale(-1.0))  # optax adds its updates to the parameters, the step subtracts

    def try_out(self) -> None:
        """Make one update of two small parameters; raise `UserError` unless it lowers the loss, as optax's own do."""
        import jax
        import jax.numpy as jnp

        params = {"matrix": jnp.ones((4, 4)), "vector": jnp.ones(4)}
        gradients = jax.tree.map(lambda leaf: 0.1 * leaf, params)
        rule = self.rule(params)
        with blame_user("optimizer.function", self.function):
            state = rule.init(params)
            jax.eval_shape(rule.update, gradients, state, params)  # a step traces it: no `if` may ask for a number
            direction, _ = rule.update(gradients, state, params)
            slope = jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, gradients, direction))
            if not slope > 0:
                raise ValueError(
                    "its update does not lower the loss; return optax's updates, which are added to the parameters, "
                    "like optax.adam(1.0)"
                )


OPTIMIZERS = (AdamW, Adafactor, Lion, Muon, SGD, Custom)

# A type checker needs a type that it can read. At run time pydantic chooses the class by the value of the key `name`.
if TYPE_CHECKING:
    AnyOptimizer = Optimizer
else:
    AnyOptimizer = Annotated[Union[OPTIMIZERS], Field(discriminator="name")]  # noqa: UP007
