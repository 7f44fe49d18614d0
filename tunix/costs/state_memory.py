"""Memory of what does not grow with the batch: weights, optimizer, gradients, and weights that are gathered.

An example: a weight [1024, 4096] in each of 4 blocks, over 8 devices of fsdp, with full_shard, float32 parameters,
bfloat16 products, adamw, and one microbatch. One block's weight has 4 Mi numbers, so one device holds

    weights     4 blocks x 4 Mi x 4 bytes / 8 devices         8 MiB
    optimizer   two moments, each as large as the weights    16 MiB
    gradients   float32, split as the weights rest            8 MiB
    gathered    the whole weight of the block at work and
                of the next one: 2 x 4 Mi x 2 bytes          16 MiB

Where blocks gather ahead (training.overlap), gradients have 8 MiB more: those of one block, before they are summed.
"""

import math

import jax
import jax.numpy as jnp

from tunix.costs.transfers import count_shard_bytes, find_gathered_dtype
from tunix.sharding.arrays import bytes_per_device
from tunix.training.program import Program
from tunix.training.state import Weight


def count_state_bytes(program: Program) -> dict[str, int]:
    """Return the bytes of one device for weights, optimizer, gradients and gathered weights."""
    return {
        "weights": bytes_per_device(program.abstract["params"]),
        "optimizer": bytes_per_device([program.abstract["opt_state"], program.abstract.get("copies", {})]),
        "gradients": _count_gradient_bytes(program),
        "gathered": _count_gathered_bytes(program),
    }


def _count_gathered_bytes(program: Program) -> int:
    """Return the bytes of gathered weights that exist at one time.

    Gathered in blocks, they are those of the block at work and of the next; gathered for the step, all of them.
    """
    layout, arch, num_chunks = program.layout, program.arch, program.pipeline.num_chunks
    in_blocks = layout.gathers_in_blocks(program.sync_every)
    gathered = float(_count_neighbour_bytes(program)) if in_blocks else 0.0
    # XLA transposes tables too; a trained one's copy is gone before its own part of the gradient is there.
    frozen_tables = [weight for weight in jax.tree.leaves(arch.frozen(arch.weights)) if not weight.equation.is_stacked]
    for weight in jax.tree.leaves(arch.weights) + frozen_tables:
        is_in_blocks = in_blocks and weight.equation.is_stacked
        if not is_in_blocks:
            gathered += _count_bytes_in_use(weight, program)
        if is_in_blocks and num_chunks > 1:  # dealt out to the stages, and the chunk at work
            dealt_out = count_shard_bytes(weight, layout.at_rest(weight.equation, True), weight.dtype, program.mesh)
            gathered += (1 + 1 / num_chunks) * dealt_out
    return round(gathered)


def _count_neighbour_bytes(program: Program) -> int:
    """Return the bytes of the gathered weights of the block at work and of the next.

    Blocks that gather ahead have all blocks of a turn and of the next one, where stacks take turns.
    """
    model, stages = program.cfg.model, program.pipeline.num_stages
    block_bytes = {}
    for name in model.stacks:
        weights = jax.tree.leaves(program.arch.weights[name])
        block_bytes[name] = stages * sum(_count_bytes_in_use(each, program) / each.shape[0] for each in weights)
    most = 0.0
    for run in model.runs:
        blocks = [block_bytes[name] for name in run.pattern]
        neighbours = max(block + following for block, following in zip(blocks, [*blocks[1:], blocks[0]], strict=True))
        most = max(most, 2 * sum(blocks) if program.overlap.prefetch else neighbours)
    return round(most)


def _count_bytes_in_use(weight: Weight, program: Program) -> int:
    """Return the bytes of a gathered weight, and for codes those of the matrix made of them."""
    layout, mesh = program.layout, program.mesh
    spec = layout.in_use(weight.equation)
    size = count_shard_bytes(weight, spec, find_gathered_dtype(weight, layout), mesh)
    if weight.equation.is_quantized:
        weights_per_code = weight.size / math.prod(weight.shape)
        size += round(weights_per_code * count_shard_bytes(weight, spec, layout.compute, mesh))
    return size


def _count_gradient_bytes(program: Program) -> int:
    """Return the bytes of gradients that exist at one time, in each of the places that they pass through.

    own part    of this data shard alone, as large as the gathered weight; none where blocks sum theirs at once
       | sum over devices
    summed      as the weight rests, float32
       | added to
    sum of all microbatches: with several of them, one more array beside the gradients of the newest
    """
    layout, mesh, pipeline = program.layout, program.mesh, program.pipeline
    in_blocks = layout.gathers_in_blocks(program.sync_every)
    own_parts, summed = 0, 0
    for weight in jax.tree.leaves(program.arch.trained_weights):
        equation = weight.equation
        summed += count_shard_bytes(weight, layout.at_rest(equation, layout.strategy.gradients), "float32", mesh)
        if not (in_blocks and equation.is_stacked):
            own_parts += count_shard_bytes(weight, layout.in_use(equation), "float32", mesh)
        elif program.overlap.prefetch:  # of the block whose gradients are summed while another is at work
            own_part = count_shard_bytes(weight, layout.in_use(equation), layout.compute, mesh)
            own_parts += own_part * pipeline.num_stages // weight.shape[0]
        if not (equation.is_stacked or equation.is_vector):  # the loss adds the table's up, and then rounds the sum
            own_parts += count_shard_bytes(weight, layout.in_use(equation), layout.compute, mesh)
    in_compute = own_parts * jnp.dtype(layout.compute).itemsize // 4  # own parts, in the dtype of products
    newest = 0
    if not pipeline.is_stream and program.batch.num_microbatches > 1 and (in_blocks or program.sync_every > 1):
        newest = summed if in_blocks else in_compute
    elif in_blocks and jnp.dtype(layout.param).itemsize < 4:  # gradients of blocks have the dtype of their weights
        newest = summed * jnp.dtype(layout.param).itemsize // 4
    if pipeline.num_stages > 1:  # autodiff adds up the gradients of the ticks before the microbatch has them
        newest += summed if in_blocks else in_compute
    return own_parts + summed + newest
