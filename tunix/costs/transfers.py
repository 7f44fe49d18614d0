"""Collectives of a training step, derived from equations: weights gathered, gradients reduced, activations summed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tunix.config import DeviceKind
from tunix.models.remat import computes_products_again
from tunix.sharding.dims import Equation, axis_names
from tunix.sharding.layout import Layout
from tunix.training.program import Program
from tunix.training.state import Weight

TRAVERSALS = {  # of a ring (Patarasuk and Yuan 2009)
    "all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "collective-permute": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """All collectives of one kind and purpose in one step, over some mesh axes."""

    kind: str  # of TRAVERSALS
    axes: tuple[str, ...]
    num_bytes: int  # in one step: of the whole arrays that a group gathers, reduces or scatters
    overlaps: bool = True  # arithmetic goes on meanwhile; false where the next product waits for the result


def seconds(transfer: Transfer, sizes: dict[str, int], kind: DeviceKind, per_node: int) -> float:
    """Return the time of a ring over the slowest link of its axes, if nothing else uses it.

    Neighbours on inner axes are neighbours in a node. A group with several devices in a node has their network shares
    together.
    """
    size = math.prod(sizes[axis] for axis in transfer.axes)
    names = axis_names()
    stride = math.prod(sizes[axis] for axis in names[names.index(transfer.axes[-1]) + 1 :])
    neighbours = max(1, math.gcd(stride * size, per_node) // stride)  # where groups and nodes overlap least
    crosses = neighbours < size
    speed = min(kind.link_gb_per_s, neighbours * kind.network_gb_per_s) if crosses else kind.link_gb_per_s
    return TRAVERSALS[transfer.kind] * transfer.num_bytes * (size - 1) / size / (speed * 1e9)


def list_transfers(program: Program, mesh: Mesh | AbstractMesh, num_microbatches: int) -> list[Transfer]:
    """Return the collectives of one step; the mesh must be the one in use."""
    of_weights = _weight_transfers(program, mesh, num_microbatches)
    return [*of_weights, *_activation_transfers(program, mesh, num_microbatches)]


def _weight_transfers(program: Program, mesh: Mesh | AbstractMesh, num_microbatches: int) -> Iterator[Transfer]:
    """Weights gathered before they are used, and their gradients reduced after."""
    layout, strategy = program.layout, program.layout.strategy
    sync_every = program.sync_every
    reductions, in_blocks = num_microbatches // sync_every, layout.gathers_in_blocks(sync_every)
    is_trained = jax.tree.leaves(program.arch.is_trained)
    for weight, trained in zip(jax.tree.leaves(program.arch.weights), is_trained, strict=True):
        equation = weight.equation
        in_use, gathered_over = layout.in_use(equation), layout.gather_axes(equation)
        if gathered_over and strategy.params:
            times = 2 * num_microbatches if in_blocks and equation.is_stacked else 1
            size = shard_bytes(weight, in_use, gathered_dtype(weight, layout), mesh)
            yield Transfer("all-gather", gathered_over, times * size)
        elif gathered_over and strategy.optimizer and trained:  # the updated weights
            yield Transfer("all-gather", gathered_over, shard_bytes(weight, in_use, layout.param, mesh))
        if not trained:
            continue
        size = reductions * shard_bytes(weight, in_use, layout.reduce, mesh)
        summed_over = layout.gradient_axes(equation)
        if gathered_over and strategy.gradients:
            yield Transfer("reduce-scatter", gathered_over, size)
            size //= math.prod(mesh.shape[axis] for axis in gathered_over)
            summed_over = tuple(axis for axis in summed_over if axis not in gathered_over)
        yield Transfer("all-reduce", summed_over, size)


def _activation_transfers(program: Program, mesh: Mesh | AbstractMesh, num_microbatches: int) -> Iterator[Transfer]:
    """Sums of activations over devices, wherever a product sums over a dimension that a mesh axis splits.

    A product `x,w->y` of a block runs forward, once more where `training.remat` computes it again, and transposed for
    the gradient of x. A vocabulary that is split is summed over in the lookup of tokens and in the gradient of the
    logits' product.
    """
    cfg, layout = program.cfg, program.layout
    sizes = cfg.dims | {"B": cfg.training.batch_shape(mesh.shape).num_rows}
    forward_passes = 1 + computes_products_again(cfg.training.remat)
    products: list[tuple[Equation, int]] = []  # with the times that each runs for a sequence
    for weight in jax.tree.leaves(program.arch.weights):
        equation = weight.equation.dequantized()
        if equation.is_stacked and not equation.is_vector and not equation.is_scales:
            products.append((equation, forward_passes * cfg.model.num_layers))
            products.append((equation.transposed(), cfg.model.num_layers))
    table = program.arch.weights["embedding"]["table"].equation
    products.append((table.transposed(), 2))
    for equation, times in products:
        if axes := layout.product_axes(equation):
            shape = shard_shape([sizes[letter] for letter in equation.y], layout.activation(equation.y), mesh)
            num_bytes = math.prod(shape) * jnp.dtype(layout.compute).itemsize
            yield Transfer("all-reduce", axes, num_microbatches * times * num_bytes, overlaps=False)


def gathered_dtype(weight: Weight, layout: Layout) -> str:
    """Return the dtype in which a weight is gathered: codes and scales travel as they are."""
    return weight.dtype if weight.equation.is_quantized else layout.use_dtype(weight.equation)


def shard_bytes(weight: Weight, spec: PartitionSpec, dtype: str, mesh: Mesh | AbstractMesh) -> int:
    """Return the bytes that one device has of a weight laid out as `spec` in this dtype."""
    return math.prod(shard_shape(weight.shape, spec, mesh)) * jnp.dtype(dtype).itemsize


def shard_shape(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Return the shape of the part of an array that one device has."""
    return NamedSharding(mesh, PartitionSpec(*spec.partitions)).shard_shape(tuple(shape))
