"""Frozen matrices in 8 or 4 bits: a code for each weight, and a scale for each block of weights along D.

qwix does the arithmetic (https://github.com/google/qwix). At rest there are two arrays in place of a matrix: codes
[.., c, ..], bytes, two nf4 codes in each, and scales [.., e, ..] bfloat16. The letters are in sharding/table.py.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, auto_axes

from tunix.base.errors import UserError
from tunix.config import Model
from tunix.sharding.layout import Layout, stage_shard_map
from tunix.sharding.table import Equation, values_per_byte, weights_per_scale

STORED = {"int8": ("int8", "bfloat16"), "nf4": ("uint8", "bfloat16")}  # dtypes of codes and scales


def quantize(weight: jax.Array, dim_names: str, qtype: str) -> tuple[jax.Array, jax.Array]:
    """Return codes and scales of a weight: `int8`, or `nf4` (QLoRA, arXiv:2305.14314).

    The letters are the weight's dimensions. Both results have its shape but along D: codes
    [.., D / codes in a byte, ..] and scales [.., D / weights of a scale, ..].
    """
    axis = dim_names.index("D")
    remaining = tuple(dim for dim in range(weight.ndim) if dim != axis)
    block = weights_per_scale(weight.shape[axis])
    array = _qwix().quantize(
        weight.astype(jnp.float32), qtype, channelwise_axes=remaining, tiled_axes={axis: block}, scale_dtype="bfloat16"
    )
    quantized = array.qvalue
    if values_per_byte(qtype) == 2:
        pairs = quantized.astype(jnp.uint8).reshape(*weight.shape[:axis], -1, 2, *weight.shape[axis + 1 :])
        low, high = jnp.moveaxis(pairs, axis + 1, 0)  # neighbours along D share a byte
        quantized = low | high << 4
    return quantized, array.scale


def stack_quantized(matrices: Iterable[jax.Array], equation: Equation, cfg: Model, layout: Layout) -> list[jax.Array]:
    """Return codes and scales of all layers, laid out at rest; matrices [1, ..] come one after the other.

    Only one of them is there at a time: all matrices of a stack may not fit into memory before they are quantized.
    """
    qtype, parts = cfg.lora.quantize_base, equation.quantized()
    assert qtype is not None
    specs = tuple(map(layout.stored, parts))

    @partial(jax.jit, donate_argnums=0)
    def put(arrays, matrix, layer):
        # XLA splits the arithmetic of qwix, which names no mesh axes.
        new = auto_axes(lambda matrix: quantize(matrix, equation.w, qtype), out_sharding=specs)(matrix)
        return [jax.lax.dynamic_update_slice_in_dim(*both, layer, 0) for both in zip(arrays, new, strict=True)]

    arrays = [
        jnp.zeros([cfg.dims[dim_name] for dim_name in part.w], dtype, out_sharding=spec)
        for part, dtype, spec in zip(parts, STORED[qtype], specs, strict=True)
    ]
    for layer, matrix in enumerate(matrices):
        arrays = put(arrays, matrix, layer)
    return arrays


def dequantize(
    quantized: jax.Array,
    scales: jax.Array,
    equation: Equation,
    qtype: str,
    dtype: str,
    spec: PartitionSpec,
    stage_axes: tuple[str, ...] = (),
) -> jax.Array:
    """Return the weight, in the shape of `equation.w` and in `dtype`, of codes and scales as `quantize` makes them.

    `spec` is where it lies, not split along D; codes and scales lie there too.

    `stage_axes` are those of the stages around this place (`Layout.stages_around`).
    """
    axis, qwix = equation.w.index("D"), _qwix()

    @jax.custom_vjp  # the matrix is used like a gathered weight, and codes and scales have no gradient
    def make_weight(quantized, scales):
        return stage_shard_map(dequantize_local, (spec, spec), spec, stage_axes)(quantized, scales)

    def dequantize_local(quantized, scales):
        if values_per_byte(qtype) == 2:
            pairs = jnp.stack([quantized & 15, quantized >> 4], axis + 1)
            quantized = pairs.reshape(*quantized.shape[:axis], -1, *quantized.shape[axis + 1 :]).astype(jnp.uint4)
        return qwix.dequantize(qwix.QArray(quantized, scales.astype(dtype), qtype=qtype))

    make_weight.defvjp(lambda *arrays: (make_weight(*arrays), None), lambda *_: (None, None))
    return make_weight(quantized, scales)


def _qwix() -> Any:
    try:
        import qwix
    except ImportError:
        raise UserError("model.lora.quantize_base needs qwix: pip install 'tunix-trainer[quantize]'") from None
    return qwix
