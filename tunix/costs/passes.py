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
from tunix.costs.communication import count_shard_bytes, find_passes, find_table_of_logits
from tunix.models.expert_parallel import buffer_rows_per_token
from tunix.models.kernels import CAPACITY_FACTOR
from tunix.models.table import EXPERT_EXCHANGES, FUSED
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.mesh import count_devices, data_shards, token_shards
from tunix.sharding.table import EXPERTS
from tunix.training.logprobs import ROWS
from tunix.training.train_spec import TrainSpec

STREAM, HEADS, HIDDEN = 45, 20, 15
LOGITS = 4  # reads and writes of each logit: its largest, its sum, and its gradient
KEPT_ROWS = 5  # of each number of gate and up that is kept for a row of an expert: zeros, a copy in and one out
# Bytes of each weight in use, in a pass through its layers. Its gradient is read in 16 bits, and written in 32.
GRADIENT = 6
# Where weights are gathered once a step, a pass cuts the weights of a layer out of their stack (forward, backward, and
# once more where a stage runs again), and adds their gradient to a float32 sum, which is read and written.
CUT_OUT, SUMMED = 4, 10
STACKED = 6  # a stage that runs again fills an array of gradients with zeros, and puts each layer's into it
# The table of logits: the sum of a microbatch's gradient begins with zeros and is added to that of the step; each chunk
# of logits reads and writes it.
TABLE, CHUNK = 4 + 12, 10
EXPERT_GRADIENT = 4  # and of experts, where two parts of a microbatch are added up
TURNED = 8  # bytes of each weight of experts in use: kernels want another order than gathers, forward and backward
AT_REST = 20  # bytes of each weight at rest: it is cast for two gathers, and its gradient is put into its place
# How often a layer reads or writes the buffer of `rows`: it is filled with zeros, copied, and filled with sums.
# Counted in a compiled program (qwen3_235b_a22b, fsdp=4 x ep=64, 256 H200).
BUFFER_PASSES = 8
# And for the bias of the last product, which is a product of its own: written, added in a pass of its own, copied, and
# its gradient read twice. Counted in a compiled program (gpt_oss_20b, ep=8, 8 H100).
BIAS_PASSES = 8
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
        passes = BUFFER_PASSES + BIAS_PASSES * mlp.biases
        numbers = passes * buffer_rows_per_token(model, num_devices, layout.expert_exchange) * model.embed_dim
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
    numbers += LOGITS * train_spec.cfg.num_outputs
    of_tokens = numbers * batch.num_tokens / train_spec.mesh.size * jnp.dtype(train_spec.layout.compute).itemsize
    return of_tokens + count_weight_bytes(train_spec)


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


def count_weight_bytes(train_spec: TrainSpec) -> float:
    """Return the bytes of passes over weights and their gradients in one step."""
    layout, mesh, choices, num_bytes = train_spec.layout, train_spec.mesh, train_spec.choices, 0.0
    in_blocks = layout.gathers_in_blocks(choices.sync_every)
    of_logits, shards = find_table_of_logits(train_spec), data_shards(mesh.shape)
    shards *= token_shards(mesh.shape) * choices.pipeline.num_stages
    num_chunks = train_spec.batch.num_tokens / shards / ROWS
    leaves = zip(jax.tree.leaves(train_spec.arch.weights), jax.tree.leaves(train_spec.arch.is_trained), strict=True)
    for weight, is_trained in leaves:
        equation, pipeline = weight.equation, find_passes(weight, train_spec)
        local = count_shard_bytes(weight, layout.in_use(equation), "int8", mesh)
        in_use, of_gradient = local * pipeline.num_passes, float(GRADIENT)
        if equation.is_stacked and not in_blocks:
            of_gradient = SUMMED
            num_bytes += CUT_OUT * (2 + pipeline.recompute_runs) * in_use * (not choices.remat.unrolled)
        if equation.is_stacked and pipeline.num_stages > 1:
            of_gradient += STACKED * pipeline.recompute_runs
        num_bytes += of_gradient * in_use * is_trained
        if weight is of_logits and is_trained:
            num_bytes += TABLE * in_use + CHUNK * local * max(2 * pipeline.num_passes, num_chunks)
        if EXPERTS in equation.w and count_devices(mesh.shape, layout.gather_axes(equation)) > 1:
            num_bytes += (TURNED + EXPERT_GRADIENT * is_trained * (layout.batch_parts > 1)) * in_use
    times = choices.pipeline.num_passes if in_blocks else 1
    return num_bytes + times * AT_REST / 4 * bytes_per_device(train_spec.abstract["params"])
