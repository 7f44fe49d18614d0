"""The model as a description (`Architecture`) and arrays (the state).

Outside of models/, only this file and inference/gathered.py take modules apart.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, reshard

from tunix.base.errors import UserError
from tunix.config import Model
from tunix.config.layers import ExpertsMlp
from tunix.config.model import list_keys_outside
from tunix.config.vision import Vision
from tunix.models.layers import Initializer, parameter_name
from tunix.models.lora import start_updates
from tunix.models.remat import KEEP_ALL, Remat
from tunix.models.transformer import Transformer
from tunix.sharding.arrays import AnyMesh, bring_to, to_host_memory
from tunix.sharding.layout import Layout
from tunix.sharding.table import EXPERTS, FIRST_LAYERS, LAYERS, Equation
from tunix.training.ema import Copy, init_ema
from tunix.training.optimizer import SpikeGuard

# params, opt_state: trees of arrays; copies: such trees by name (ema.py), absent where there are none;
# spikes: the window of the guard (optimizer.py), absent without a guard; step: optimizer steps taken;
# skipped: steps in a row, to now, that were not finite
State = dict[str, Any]

VISION = "vision."  # names of the tower's and the projector's parameters begin with it
MAX_REMEMBERED = 16  # architectures that `describe` keeps


@dataclass(frozen=True)
class Weight:
    """Facts about a parameter before it has a value."""

    equation: Equation
    shape: tuple[int, ...]
    dtype: Any  # at rest
    used: float = 1.0  # share of it that computes each token: less than 1 of experts, 0 of what computes images

    @property
    def size(self) -> int:
        """Parameters of the model in it: none in scales, two in a byte of nf4 codes."""
        return math.prod(self.shape) * (0 if self.equation.is_scales else 2 if self.dtype == jnp.uint8 else 1)


@dataclass(frozen=True)
class Architecture:
    """A model without its parameters."""

    graphdef: nnx.GraphDef
    weights: dict[str, Any]  # tree of Weight
    is_trained: dict[str, Any]  # tree of bool: false where a parameter is frozen
    model: Model
    layout: Layout

    def for_generation(self) -> "Architecture":
        """Return the architecture of programs that draw answers; see `Layout.for_generation`."""
        layout = self.layout.for_generation()
        return self if layout == self.layout else describe(self.model, layout)

    def with_tokens_on_stages(self) -> "Architecture":
        """Return the architecture of what is outside of the stages in 1F1B; see `Layout.with_tokens_on_stages`."""
        return describe(self.model, self.layout.with_tokens_on_stages())

    def module(self, params: dict[str, Any]) -> Transformer:
        return nnx.merge(self.graphdef, params)

    def trained(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return a tree of parameters with None, which jax passes over, in the place of those that are frozen."""
        return keep_trained(tree, self.is_trained)

    def merge(self, trained: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
        """Return the tree with the trained parameters in it replaced."""
        return jax.tree.map(lambda new, old: old if new is None else new, trained, tree, is_leaf=lambda x: x is None)

    @property
    def trained_weights(self) -> dict[str, Any]:
        return self.trained(self.weights)

    def frozen(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the tree with None in the place of what is trained."""
        return jax.tree.map(lambda leaf, trained: None if trained else leaf, tree, self.is_trained)

    @property
    def num_parameters(self) -> int:
        return count(self.weights)

    @property
    def num_trained(self) -> int:
        return count(self.trained_weights)

    @property
    def num_active(self) -> int:
        """Parameters that compute each token: of experts, those of as many as a token is sent to."""
        return count(self.weights, active=True)

    @property
    def num_active_trained(self) -> int:
        """Trained parameters that compute each token."""
        return count(self.trained_weights, active=True)

    @property
    def trained_shares_of_vision(self) -> tuple[float, float]:
        """Shares of the parameters of tower and projector that are trained; 0 of a model of text alone."""
        if self.model.vision is None:
            return 0.0, 0.0
        all_parts, trained = self.weights["vision"], self.trained_weights["vision"]
        tower, projector = (count(trained[part]) / count(all_parts[part]) for part in ("tower", "projector"))
        return tower, projector


def keep_trained(tree: Any, is_trained: Any) -> Any:
    """Return the tree with None in the place of what is frozen; `is_trained` is a tree of bool."""
    return jax.tree.map(lambda leaf, trained: leaf if trained else None, tree, is_trained)


def add_gradients(total: Any, more: Any) -> Any:
    """Return the sum of two trees of gradients, each in the dtype of the first: float32, also of 16-bit gradients.

    Gradients that are sums over devices may be added to arrays of which each device has a part.
    """
    return jax.tree.map(lambda a, b: a + bring_to(b.astype(a.dtype), jax.typeof(a).sharding.spec), total, more)


def count(weights: dict[str, Any], active: bool = False) -> int:
    """Return the parameters in a tree of Weight; with `active`, those that compute each token."""
    return sum(round(weight.size * (weight.used if active else 1)) for weight in jax.tree.leaves(weights))


_known: dict[tuple[Any, ...], Architecture] = {}  # a plan asks for one model on hundreds of meshes


def describe(
    cfg: Model, layout: Layout, remat: Remat = KEEP_ALL, parts_per_stage: int | None = None, prefetch: bool = False
) -> Architecture:
    """Split the model on shapes only: no array is made. See `Transformer` for the other arguments."""
    # The layout holds all that matters of the mesh, so models on other meshes with equal layouts are one entry.
    key = cfg.model_dump_json(exclude=list_keys_outside("mesh")), layout, remat, parts_per_stage, prefetch
    if key not in _known:
        if len(_known) > MAX_REMEMBERED:
            _known.clear()
        _known[key] = _describe(cfg, layout, partial(Transformer, cfg, layout, Initializer(None), *key[2:]))
    return _known[key]


def _describe(cfg: Model, layout: Layout, make: Callable[[], Transformer]) -> Architecture:
    # `eval_shape` of JAX, not of NNX: that one also takes the model apart and puts it together again.
    graphdef, variables = jax.eval_shape(lambda: nnx.split(make()))
    active_share = cfg.mlp.experts_per_token / cfg.mlp.num_experts if isinstance(cfg.mlp, ExpertsMlp) else 1.0

    first = tuple(f"{name}." for run in cfg.first_runs for name in run.pattern)

    def weight(path: Any, variable: nnx.Variable) -> Weight:
        equation, value = variable.get_metadata()["equation"], variable.get_value()
        used = active_share if EXPERTS in equation.w else 1.0
        used = 0.0 if parameter_name(path).startswith(VISION) else used
        # One dimension more than the equation names: the layers of a stack, [L, ...].
        if value.ndim > len(equation.w):
            equation = equation.stacked(FIRST_LAYERS if parameter_name(path).startswith(first) else LAYERS)
        return Weight(equation, value.shape, value.dtype, used)

    def is_trained(path, weight: Weight) -> bool:
        name = parameter_name(path)
        also = cfg.lora.train_also is not None and re.search(cfg.lora.train_also, name) is not None
        if also and weight.equation.is_quantized:
            raise UserError(
                f"model.lora.train_also={cfg.lora.train_also} trains {name}, of which "
                f"model.lora.quantize_base={cfg.lora.quantize_base} keeps only codes; leave it to the updates"
            )
        if weight.equation.is_choice:  # a step moves the router's bias by the experts' loads
            return False
        if cfg.vision is not None and name.startswith(frozen_parts(cfg.vision)):
            return False
        is_update = ".lora." in name and not name.endswith("_start")  # PiSSA's start is frozen
        # The base has no scores, so its head is always trained.
        return not cfg.lora.rank or is_update or also or name.startswith("score.")

    described = jax.tree.map_with_path(weight, variables, is_leaf=lambda node: isinstance(node, nnx.Variable))
    weights = nnx.to_pure_dict(described)
    return Architecture(graphdef, weights, jax.tree.map_with_path(is_trained, weights), cfg, layout)


def frozen_parts(vision: Vision) -> tuple[str, ...]:
    """Return how the names of the parameters begin that `model.vision` freezes."""
    parts = {f"{VISION}tower.": vision.freeze_tower, f"{VISION}projector.": vision.freeze_projector}
    return tuple(part for part, is_frozen in parts.items() if is_frozen)


def new_state(
    arch: Architecture,
    optimizer: optax.GradientTransformation,
    ema: dict[str, Copy],
    guard: SpikeGuard | None,
    seed: jax.Array | int,
    initial: dict[str, Any] | None = None,
) -> State:
    """Make the state of step 0 from `seed`, a scalar, the same on every mesh.

    It is to be compiled: each device then makes only its own shards. `initial` is a tree of parameters that exist
    already, with None for those to be made.
    """
    params = nnx.to_pure_dict(nnx.state(Transformer(arch.model, arch.layout, Initializer(jax.random.key(seed)))))
    params = params if initial is None else arch.merge(initial, params)
    params = start_updates(params, initial, arch.weights, arch.model.lora, arch.layout)
    return start_state(arch, optimizer, ema, guard, params)


def start_state(
    arch: Architecture,
    optimizer: optax.GradientTransformation,
    ema: dict[str, Copy],
    guard: SpikeGuard | None,
    params: dict[str, Any],
) -> State:
    """Return the state of step 0 with these parameters."""
    stored = arch.layout.stored
    params = jax.tree.map(lambda p, weight: reshard(p, stored(weight.equation)), params, arch.weights)
    trained = arch.trained(params)  # moments and copies lie like them, through the whole run
    zero, moments = jnp.zeros((), jnp.int32), optimizer.init(trained)
    moments = to_host_memory(moments) if arch.layout.moments_on_host else moments
    state = {"params": params, "opt_state": moments, "step": zero, "skipped": zero}
    copies = {"copies": init_ema(ema, trained)} if ema else {}
    return state | copies | (guard.start() if guard else {})


def abstract_params(arch: Architecture, mesh: AnyMesh) -> dict[str, Any]:
    """Return shapes, dtypes and shardings of the parameters at rest."""

    def abstract(weight: Weight) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, arch.layout.stored(weight.equation))
        return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=sharding)

    return jax.tree.map(abstract, arch.weights)
