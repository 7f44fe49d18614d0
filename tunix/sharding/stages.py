"""Stages side by side: `vmap` over a first dimension [S, ...] that mesh axes split, so a device computes its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import api
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec


def stage_shard_map(
    function: Callable, in_specs: Any, out_specs: Any, axes: tuple[str, ...], stand_in: Callable | None = None
) -> Callable:
    """Return `jax.shard_map(function, ...)`, which may be vmapped over stages where `axes` split them.

    `jax.vmap` of a plain `shard_map` leaves the axes of the stages to the compiler, which cannot split a kernel. Here
    they are axes of the `shard_map` too, and the function gets the arrays of one stage. `vmap` must come before
    autodiff: differentiate the vmapped function, do not vmap a gradient.

    `vmap` traces the `shard_map` for the types of its results before it asks for the rule, with the axes of the stages
    outside. There jax 0.10.2 refuses `reduced` arguments, and operations that have no rule for shardings. `stand_in` is
    then traced in its place: a function of the same arguments whose results have the same types. It never runs.
    """
    plain = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)
    if not axes:
        return plain
    traced = stand_in or plain
    # In a lambda, because custom_vmap asks a function for the default values of its arguments, and passes them, too.
    mapped = custom_vmap(lambda *arguments: traced(*arguments))

    def split(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(axes, *spec.partitions, reduced=spec.reduced, unreduced=spec.unreduced)

    @mapped.def_vmap
    def over_stages(_, is_batched, *arguments):
        leaves, tree = jax.tree.flatten(arguments)
        flags = jax.tree.leaves(is_batched)
        plain_specs = jax.tree.leaves(jax.tree.broadcast(in_specs, arguments))
        specs = tuple(split(spec) if flag else spec for spec, flag in zip(plain_specs, flags, strict=True))

        def one_stage(*leaves):
            own = [leaf[0] if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
            return jax.tree.map(lambda x: x[None], function(*jax.tree.unflatten(tree, own)))

        results = jax.shard_map(one_stage, in_specs=specs, out_specs=jax.tree.map(split, out_specs))(*leaves)
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _find_mapped_axes(arguments: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """Return the mesh axes that split the mapped dimension, which must be the same in all arguments of `jax.vmap`."""
    entries = []
    for argument, dim in zip(arguments, dims, strict=True):
        sharding = getattr(jax.typeof(argument), "sharding", None)
        if dim is not None:
            entries.append(None if sharding is None else sharding.spec.partitions[dim])
    if len(set(entries)) > 1:
        raise ValueError(f"vmap: the mapped dimensions of the arguments are split in different ways: {entries}")
    axes = entries[0] if entries else None
    return (axes,) if isinstance(axes, str) else axes


# JAX 0.10.2, the version that is locked, asks the arguments of `vmap` for `spec[dim]`. Weights that are gathered for
# the whole step refuse that, because their spec has `reduced` axes; `spec.partitions[dim]` is the answer.
api._mapped_axis_spec = _find_mapped_axes
