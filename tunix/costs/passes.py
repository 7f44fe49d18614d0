"""Work of a step beside its matrix products, derived from the config: what passes through a device's memory.

Norms, rotations, activations, casts and copies compute little and read and write much, so their time is that of their
bytes. They are counted in numbers per token and layer, as multiples of three widths, and in bytes per weight. The
multiples are those of compiled programs: gemma3_1b and llama3_1b on one device, llama3_8b and qwen3_30b_a3b on eight
(docs/log/costs.md says how near they come). With more recomputation fewer values are copied and more are computed
again, which is about the same.

    width of                    passes, forward and backward      numbers of a token and a layer
    the residual stream D       norms, sums, casts                45 D
    attention                   rotations, copies of what is kept 20 (queries + keys + values)
    the MLP F                   activation, copies                15 F
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix.config import Model
from tunix.config.layers import ExpertsMlp
from tunix.costs.communication import count_shard_bytes, find_passes
from tunix.models.expert_parallel import buffer_rows_per_token
from tunix.models.kernels import CAPACITY_FACTOR
from tunix.models.table import EXPERT_EXCHANGES, FUSED
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.mesh_shape import count_devices
from tunix.sharding.table import EXPERTS
from tunix.training.train_spec import TrainSpec

STREAM, HEADS, HIDDEN = 45, 20, 15
LOGITS = 4  # reads and writes of each logit: its largest, its sum, and its gradient
KEPT_ROWS = 5  # of each number of gate and up that is kept for a row of an expert: zeros, a copy in and one out
GRADIENT = 6  # bytes of each weight in use: its gradient is read in 16 bits, and written in 32
EXPERT_GRADIENT = 4  # and of experts, where two parts of a microbatch are added up
TURNED = 8  # bytes of each weight of experts in use: kernels want another order than gathers, forward and backward
AT_REST = 20  # bytes of each weight at rest: it is cast for two gathers, and its gradient is put into its place
# How often a layer reads or writes the buffer of `rows`: it is filled with zeros, copied, and filled with sums.
# Counted in a compiled program (qwen3_235b_a22b, fsdp=4 x ep=64, 256 H200).
BUFFER_PASSES = 8
EMPTY_ROWS = 64  # that a fused kernel computes for each expert beside its own: half of a block of 128


class FusedWork(NamedTuple):
    """Work of one step in the fused kernels of experts (models/fused_experts.py), on one device."""

    counted_flops: float = 0.0  # that `Costs.flops` has for experts
    flops: float = 0.0  # that the kernels compute
    num_bytes: float = 0.0  # of rows and their sums, which `combine` reads and writes, or of passes over a buffer


NO_FUSED_WORK = FusedWork()


def count_fused_work(train_spec: TrainSpec) -> FusedWork:
    """Return the work of fused kernels of experts with equal loads; nothing where other products compute experts."""
    model, layout, mlp, batch = train_spec.cfg.model, train_spec.layout, train_spec.cfg.model.mlp, train_spec.batch
    if not isinstance(mlp, ExpertsMlp) or layout.expert_products != FUSED:
        return NO_FUSED_WORK
    num_tokens, per_token = batch.num_tokens / train_spec.mesh.size, mlp.experts_per_token
    num_devices = count_devices(train_spec.mesh.shape, layout.expert_axes)
    forward = 6.0 * model.embed_dim * mlp.expert_dim * per_token * len(model.expert_layers) * num_tokens
    recompute, runs = train_spec.choices.remat.recompute_fraction("product"), train_spec.choices.pipeline.recompute_runs
    # Half a block of each expert is empty, of the rows of one part of a microbatch.
    local_rows = num_tokens / batch.num_microbatches * per_token / layout.batch_parts
    empty = 1 + EMPTY_ROWS * mlp.num_experts / num_devices / local_rows
    # The backward pass needs two of the three products again, and no result of the third one.
    flops = (3 + recompute * 2 / 3 + runs) * forward * empty
    if EXPERT_EXCHANGES[layout.expert_exchange].has_buffer:
        numbers = BUFFER_PASSES * buffer_rows_per_token(model, num_devices, layout.expert_exchange) * model.embed_dim
    else:  # for each row and for each token that arrives, forward and backward
        numbers = 2 * (per_token + num_devices) * model.embed_dim
    num_bytes = len(model.expert_layers) * num_tokens * numbers * jnp.dtype(layout.compute).itemsize
    return FusedWork((3 + recompute + runs) * forward, flops, num_bytes)


def count_pass_bytes(train_spec: TrainSpec) -> float:
    """Return the bytes that everything beside products, our own kernels and the update reads and writes in a step.

    They are those of one device.
    """
    model, batch = train_spec.cfg.model, train_spec.batch
    kept = 1 - train_spec.choices.remat.recompute_fraction("product")
    numbers = _count_numbers(model, kept) * train_spec.choices.pipeline.iterations_per_microbatch
    numbers += LOGITS * model.num_outputs
    of_tokens = numbers * batch.num_tokens / train_spec.mesh.size * jnp.dtype(train_spec.layout.compute).itemsize
    return of_tokens + batch.num_microbatches * _count_weight_bytes(train_spec)


def _count_numbers(model: Model, kept: float) -> float:
    """Return the numbers that all layers read and write for a token, forward and backward."""
    dims, mlp, numbers = model.dims, model.mlp, float(STREAM * model.embed_dim * model.num_layers)
    for heads, layers in model.head_kinds.items():
        width = model.num_heads * heads.dim + heads.num_kv_heads * (heads.dim + heads.value_dim)
        numbers += HEADS * width * len(layers)
    if not isinstance(mlp, ExpertsMlp):
        return numbers + HIDDEN * dims["F"] * model.num_layers * (2 / 3 if mlp.kind == "plain" else 1)
    num_dense = model.num_layers if mlp.beside_mlp else model.num_layers - len(model.expert_layers)
    rows = KEPT_ROWS * kept * 2 * mlp.expert_dim * mlp.experts_per_token * CAPACITY_FACTOR
    return numbers + HIDDEN * dims["F"] * num_dense + (rows + HIDDEN * dims.get("U", 0)) * len(model.expert_layers)


def _count_weight_bytes(train_spec: TrainSpec) -> float:
    """Return the bytes of passes over weights and their gradients in one microbatch."""
    layout, mesh, num_bytes = train_spec.layout, train_spec.mesh, 0.0
    leaves = zip(jax.tree.leaves(train_spec.arch.weights), jax.tree.leaves(train_spec.arch.is_trained), strict=True)
    for weight, is_trained in leaves:
        equation, ticks = weight.equation, find_passes(weight, train_spec).iterations_per_microbatch
        in_use = count_shard_bytes(weight, layout.in_use(equation), "int8", mesh) * ticks
        num_bytes += GRADIENT * in_use * is_trained
        if EXPERTS in equation.w and count_devices(mesh.shape, layout.gather_axes(equation)) > 1:
            num_bytes += (TURNED + EXPERT_GRADIENT * is_trained * (layout.batch_parts > 1)) * in_use
    return num_bytes + AT_REST / 4 * bytes_per_device(train_spec.abstract["params"])
