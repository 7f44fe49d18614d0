"""Calls of kernels that are written in Pallas and lowered by Triton. It stands apart because it imports Pallas."""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


def call_kernel(kernel: Any, arrays: tuple[Any, ...], *, block: Any, **params: Any) -> Any:
    """Return what a kernel computes of arrays, or of trees of them; its `block` says how many threads run a program."""
    run = triton.CompilerParams(num_warps=block.warps, num_stages=block.stages)
    return pl.pallas_call(kernel, compiler_params=run, **params)(*arrays)


def shape_like(x: jax.Array, shape: tuple[int, ...], dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Return the shape of a result that varies over the mesh as `x` does, inside a shard_map."""
    return jax.ShapeDtypeStruct(shape, dtype or x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
