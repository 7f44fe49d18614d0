"""Muon (Jordan et al. 2024): the momentum of a matrix is orthogonalised by Newton-Schulz iterations.

The rule is that of `optax.contrib.muon`, and so is its state. What differs is where the iterations run. They multiply
whole matrices, and momenta rest split over devices, in another dimension than the layers. XLA would gather them for
each product. Here each device gets whole matrices of some layers, and works alone:

    at rest        layer 0 [a0|a1]   layer 1 [b0|b1]        device 0 has a0 and b0, device 1 has a1 and b1
       | all-to-all
    iterations     device 0: [a0 a1]   device 1: [b0 b1]
       | all-to-all
    direction      layer 0 [A0|A1]   layer 1 [B0|B1]
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from tunix.optimizers.table import Muon, store_moments_as
from tunix.sharding.table import DIMS, LAYERS, data_axes, keeping_axes

RMS = 0.2  # updates as large as AdamW's: one learning rate serves both (arXiv:2502.16982)


def make_muon(keys: Muon, weights: dict[str, Any]) -> optax.GradientTransformation:
    """Return Muon for matrices, by their fan-in and fan-out, layer by layer; AdamW for vectors and tables.

    `weights` is the tree of `state.Weight`.
    """
    dims = jax.tree.map(_find_matrix_dims, weights)
    labels = jax.tree.map(lambda each: "adam" if each == ADAM else "muon", dims, is_leaf=_is_dims)
    momentum = store_moments_as(_make_momentum(keys, dims), keys.moments, weights)
    adam = store_moments_as(optax.scale_by_adam(keys.b1, keys.b2, keys.eps, nesterov=True), keys.moments, weights)
    return optax.partition(
        {
            # As many parts as optax's chains have, so that checkpoints of earlier versions fit.
            "muon": optax.chain(momentum, optax.identity(), optax.identity(), optax.scale(-1.0)),
            "adam": optax.chain(adam, optax.identity(), optax.scale(-1.0)),
        },
        labels,
    )


ADAM = MuonDimensionNumbers((), ())  # of a parameter that is no matrix


def _is_dims(node: Any) -> bool:
    return isinstance(node, MuonDimensionNumbers)


def _find_matrix_dims(weight: Any) -> MuonDimensionNumbers:
    """Return the places of the fan-in and of the fan-out among the dimensions of a weight."""
    equation = weight.equation
    if equation.is_vector or {"V", "P", "v"} & set(equation.w):
        return ADAM
    matrix_dims = [n for n, dim_name in enumerate(equation.w) if dim_name not in equation.summed + equation.copies]
    return MuonDimensionNumbers([equation.w.index(dim_name) for dim_name in equation.summed], matrix_dims)


def _make_momentum(keys: Muon, dims: dict[str, Any]) -> optax.GradientTransformation:
    """Return the direction of matrices: Nesterov momentum, orthogonalised, with a root mean square of `RMS`."""
    init = scale_by_muon(ns_steps=keys.ns_steps, beta=keys.beta, eps=keys.eps).init

    def update(gradients, state, params=None):
        beta, count = keys.beta, optax.safe_increment(state.count)
        momentum = optax.tree.update_moment(gradients, state.mu, beta, 1)
        # Nesterov: the momentum counts as that of the next step, so its bias is corrected for one step more.
        ahead = optax.tree.bias_correction(momentum, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(gradients, beta, count)

        def direction(matrix, ahead, now):
            if matrix == ADAM:
                return ahead  # masked: a node without arrays
            return _orthogonalise(beta * ahead + (1 - beta) * now, matrix, state.ns_coeffs, keys)

        directions = jax.tree.map(direction, dims, ahead, now, is_leaf=_is_dims)
        return directions, MuonState(count, momentum, state.ns_coeffs)

    return optax.GradientTransformation(init, update)


def _orthogonalise(x: jax.Array, matrix: MuonDimensionNumbers, coefficients: jax.Array, keys: Muon) -> jax.Array:
    """Return an array of matrices [..., in, ..., out, ...] with each matrix orthogonalised."""
    rows, columns = list(matrix.reduction_axis), list(matrix.output_axis)
    copies = [axis for axis in range(x.ndim) if axis not in rows + columns]
    order = copies + rows + columns  # [layers, D, N, H] of queries: rows D, columns N H, a copy for each layer
    turned = x.transpose(order)
    num_in, num_out = (math.prod(x.shape[axis] for axis in axes) for axes in (rows, columns))
    matrices = spread(turned.reshape(-1, num_in, num_out))
    if num_in > num_out:  # the iterations multiply by a square of the number of rows
        matrices = matrices.mT
    matrices = matrices / (jnp.linalg.norm(matrices, axis=(1, 2), keepdims=True) + keys.eps)
    # Each iteration moves every singular value s of a matrix X = U diag(s) V to a s + b s^3 + c s^5: towards 1. The
    # norm was at most 1 before, as that needs, and X keeps its U and V.
    for _ in range(keys.ns_steps):
        squares = matrices @ matrices.mT
        a, b, c = (coefficients[n] for n in range(3))
        matrices = a * matrices + (b * squares + c * squares @ squares) @ matrices
    if num_in > num_out:
        matrices = matrices.mT
    # Numbers of an orthogonal matrix [in, out] have a root mean square of 1 / sqrt(max(in, out)).
    scaled = RMS * math.sqrt(max(num_in, num_out)) * collect(matrices)[: math.prod(x.shape[axis] for axis in copies)]
    return scaled.reshape(turned.shape).transpose([order.index(axis) for axis in range(x.ndim)])


def spread(matrices: jax.Array) -> jax.Array:
    """Return matrices [n, in, out] with each of them whole on one device; zeros fill n up to the devices of the mesh.

    Arrays of the update have no sharding in their types (`auto_axes` in training/step.py), so this is a request to XLA.
    """
    # Zeros stay zeros through the iterations: their norm is 0, and eps keeps the division finite.
    axes, sizes = _split_axes(), jax.sharding.get_abstract_mesh().shape
    missing = -len(matrices) % math.prod(sizes[axis] for axis in axes)
    matrices = jnp.pad(matrices, ((0, missing), (0, 0), (0, 0)))
    for index in range(len(axes)):
        matrices = _lay_out(matrices, axes[: index + 1])
    return jax.lax.with_sharding_constraint(matrices, PartitionSpec(axes, None, None)) if axes else matrices


def collect(matrices: jax.Array) -> jax.Array:
    """Return matrices [n, in, out] that `spread` gave to the devices, split again as the arrays they came from."""
    axes = _split_axes()
    for index in range(len(axes), 0, -1):
        matrices = _lay_out(matrices, axes[:index])
    return matrices


def _lay_out(matrices: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Ask for matrices whose first dimension these axes split. XLA moves one axis at a time without a detour."""
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(matrices, PartitionSpec(axes, free, free))


def _split_axes() -> tuple[str, ...]:
    """Return the mesh axes of more than one device: first those that split layers and weights at rest."""
    sizes = jax.sharding.get_abstract_mesh().shape
    first = (*DIMS[LAYERS].weight_axes, *keeping_axes())
    remaining = [axis for axis in sizes if axis not in first]
    remaining.sort(key=lambda axis: axis in data_axes())  # along those of the batch alone, momenta are all the same
    return tuple(axis for axis in (*first, *remaining) if sizes.get(axis, 1) > 1)
