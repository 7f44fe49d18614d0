"""From module to pytrees: the one place where the model is split into what it is and the arrays it holds."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, reshard

from tunix.config import Model
from tunix.layout import Equation
from tunix.mesh import Layout
from tunix.models.transformer import Transformer

State = dict[str, Any]  # params, opt_state: trees; step: optimizer steps taken; skipped: of the last ones, in a row


@dataclass(frozen=True)
class Weight:
    """What is known of a parameter before it has a value."""

    equation: Equation
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """A model without its parameters."""

    graphdef: nnx.GraphDef
    weights: dict[str, Any]  # tree of Weight

    def module(self, params: dict[str, Any]) -> Transformer:
        return nnx.merge(self.graphdef, params)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(weight.shape) for weight in jax.tree.leaves(self.weights))


def describe(cfg: Model, layout: Layout, remat: str = "none") -> Architecture:
    """Split the model on shapes only: no array is made."""
    graphdef, variables = nnx.split(nnx.eval_shape(lambda: Transformer(cfg, layout, nnx.Rngs(0), remat)))

    def weight(variable: nnx.Variable) -> Weight:
        equation, shape = variable.get_metadata()["equation"], variable.get_value().shape
        return Weight(equation.stacked() if len(shape) > len(equation.w) else equation, shape)

    weights = jax.tree.map(weight, variables, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return Architecture(graphdef, nnx.to_pure_dict(weights))


def make_init(arch: Architecture, cfg: Model, layout: Layout, tx: optax.GradientTransformation):
    """A function seed -> State, to be compiled: every array is born on its own shards, the same on every mesh."""

    def init(seed) -> State:
        params = nnx.to_pure_dict(nnx.state(Transformer(cfg, layout, nnx.Rngs(jax.random.key(seed)))))
        params = jax.tree.map(lambda p, weight: reshard(p, layout.rest(weight.equation)), params, arch.weights)
        moments_like = optimizer_view(params, arch, layout)
        zero = jnp.zeros((), jnp.int32)
        return {"params": params, "opt_state": tx.init(moments_like), "step": zero, "skipped": zero}

    return init


def optimizer_view(tree: dict[str, Any], arch: Architecture, layout: Layout) -> dict[str, Any]:
    """Parameters or gradients laid out as the optimizer works on them."""
    sharded = layout.strategy.optimizer
    return jax.tree.map(lambda x, weight: reshard(x, layout.rest(weight.equation, sharded)), tree, arch.weights)


def abstract_state(init, mesh: Mesh) -> State:
    """Shapes, dtypes and shardings of the state, without making it."""

    def concrete(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(concrete, jax.eval_shape(init, 0))


def init_state(init, mesh: Mesh, seed: int) -> State:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(init, mesh))
    return jax.jit(init, out_shardings=shardings)(seed)
