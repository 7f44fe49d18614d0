"""Derived memory of a step on one device. Read `count_bytes` first."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from tunix.config import Model
from tunix.config.batch import BatchShape
from tunix.config.layers import ExpertsMlp
from tunix.config.model import list_keys_outside
from tunix.config.training import StepKeys
from tunix.costs.communication import (
    count_layers,
    count_microbatch_rows,
    count_shard_bytes,
    find_gathered_dtype,
    find_shard_shape,
    find_table_of_logits,
)
from tunix.data.batches import IMAGE_FIELDS, IMAGES, abstract_arrays, split_shared
from tunix.models.attention import select_query_block
from tunix.models.context_parallel import is_in_blocks
from tunix.models.expert_parallel import buffer_rows_per_token
from tunix.models.kernels import CAPACITY_FACTOR, FLASH_BLOCKS, find_row_in_use
from tunix.models.layer_scan import sums_in_layers
from tunix.models.layers import parameter_name
from tunix.models.linear_attention import CHUNK
from tunix.models.remat import Remat, product_name
from tunix.models.table import EXPERT_EXCHANGES, FUSED
from tunix.models.vision import Images
from tunix.sharding.arrays import AnyMesh, bytes_per_device
from tunix.sharding.layout import Layout
from tunix.sharding.mesh import count_devices, data_shards, token_shards
from tunix.sharding.table import EXPERTS, STREAM_TOKENS, TOKENS, data_axes
from tunix.training.logprobs import count_chunk_positions
from tunix.training.loss import find_loss_kind, make_loss
from tunix.training.state import Weight, abstract_params, describe
from tunix.training.teacher import OfflineTeacher, Teacher
from tunix.training.train_spec import TrainSpec

# Memory of a step: what rests on a device, and beside it the most that exists at one moment.
#
# XLA frees each array behind its last use. So the gradient of a table and the inside of a layer do not meet all else
# that a step has: they belong to different moments, of which the largest counts.
#
#     moment     gradients                              gathered               activations
#     loss       table: the sum of all chunks, float32, table of logits        kept for the backward pass, logits of
#                and that of a chunk                                           a chunk
#     backward   table: the sum; those of the blocks    blocks at work         kept, and the inside of a block
#     sums       a device's own parts of the tables'                           the residual stream
#                gradients, and sums of all
#
# With several microbatches, the sums of those before are there in each moment. Weights that are gathered once a step,
# and copies of weights that rest in another order than they travel in, are too.


class Snapshot(NamedTuple):
    """Bytes of one device at one moment of a step, beside what rests there."""

    gradients: float
    gathered: float
    activations: float


def count_bytes(train_spec: TrainSpec, with_activations: bool = True) -> dict[str, int]:
    """Return the bytes of one device at the moment of a step that has the most of them, by what they are for."""
    list_them = _list_snapshots if train_spec.choices.pipeline.num_stages == 1 else _list_snapshots_on_stages
    largest = max(list_them(train_spec, with_activations), key=sum)
    return {
        "weights": bytes_per_device(train_spec.abstract["params"]),
        "optimizer": bytes_per_device([train_spec.abstract["opt_state"], train_spec.abstract.get("copies", {})]),
        **({"teacher": count_teacher_bytes(train_spec)} if isinstance(train_spec.teacher, Teacher) else {}),
        **{name: round(size) for name, size in largest._asdict().items()},
    }


def count_summed_bytes(weight: Weight, train_spec: TrainSpec) -> int:
    """Return the bytes of one device for the gradient of a weight that all devices have summed."""
    return count_shard_bytes(weight, train_spec.layout.stored(weight.equation), "float32", train_spec.mesh)


def count_teacher_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes of one device for the teacher between two uses; 0 without one in memory."""
    teacher = train_spec.teacher
    return bytes_per_device(teacher.abstract_params(train_spec.mesh)) if isinstance(teacher, Teacher) else 0


def _list_snapshots(train_spec: TrainSpec, with_activations: bool) -> list[Snapshot]:
    """Return the moments of a step without stages of which one needs the most memory."""
    layout, mesh, arch = train_spec.layout, train_spec.mesh, train_spec.arch
    sync_every, num_microbatches = train_spec.choices.sync_every, train_spec.batch.num_microbatches
    in_blocks, several = layout.gathers_in_blocks(sync_every), num_microbatches > 1

    def count_local(weight: Weight, dtype: str) -> int:
        return count_shard_bytes(weight, layout.in_use(weight.equation), dtype, mesh)

    count_summed = partial(count_summed_bytes, train_spec=train_spec)

    # Microbatches are added up where the newest one is summed over devices, or as each device's own parts. Of one
    # microbatch there are the gradients of autodiff, which the update makes float32 as it reads them.
    def count_total(weight: Weight) -> int:
        if not in_blocks:
            return count_local(weight, "float32")
        dtype = "float32" if several else layout.param
        return count_shard_bytes(weight, layout.stored(weight.equation), dtype, mesh)

    trained, of_logits = jax.tree.leaves(arch.trained_weights), find_table_of_logits(train_spec)
    outside = [weight for weight in trained if not weight.equation.is_stacked]
    of_blocks = sum(count_total(weight) for weight in trained if weight.equation.is_stacked)
    # The sums that each moment has; with one microbatch, those of blocks begin with the backward pass.
    before = sum(map(count_total, trained)) if several or not in_blocks else 0
    if not in_blocks and num_microbatches > sync_every:  # and those that devices have summed
        before += sum(map(count_summed, trained))
    latest = _count_latest_bytes(train_spec)
    ahead, turned = _count_ahead(train_spec), _count_turned_bytes(train_spec)
    table = 0 if of_logits is None else _count_bytes_in_use(of_logits, train_spec)
    everything = sum(_count_bytes_in_use(weight, train_spec) for weight in jax.tree.leaves(arch.weights))
    table_sum = part_of_chunk = 0  # of the gradient of a table that is trained
    if of_logits is not None and any(weight is of_logits for weight in outside):
        table_sum, part_of_chunk = count_local(of_logits, "float32"), count_local(of_logits, layout.compute)
    found = _count_activations(train_spec) if with_activations else Activations()
    of_teacher = _count_teacher_at_work(train_spec)
    loss = Snapshot(
        # Sums of blocks that gather ahead begin as zeros, which XLA makes before the loss.
        gradients=max(before, of_blocks if train_spec.choices.prefetch else 0)
        + table_sum
        + part_of_chunk
        + ahead.parts
        + ahead.summed,
        gathered=turned + (table + ahead.in_use if in_blocks else everything) + of_teacher.table,
        activations=found.kept + found.streams + found.logits,
    )
    if several and train_spec.choices.prefetch and layout.has_replicas(mesh.shape):
        # The last microbatch is a piece of program of its own (`make_gradients`), of which XLA gathers the tables and
        # makes room for sums and kept values before the loop over the others is done.
        tables = sum(_count_bytes_in_use(weight, train_spec) for weight in outside)
        loss = Snapshot(
            loss.gradients + table_sum + ahead.parts + ahead.summed,
            loss.gathered + tables + ahead.in_use,
            loss.activations + found.kept,
        )
    backward = Snapshot(
        gradients=max(before, of_blocks)
        + latest
        + table_sum * in_blocks
        + ahead.parts
        + ahead.summed
        + ahead.more
        + ahead.in_flight,
        gathered=turned + (_count_neighbour_bytes(train_spec) if in_blocks else everything),
        activations=found.kept + found.inside,
    )
    # A table of another order than it travels in is there twice before the loss begins.
    has_copy = in_blocks and of_logits is not None and _is_turned(of_logits, train_spec)
    gather = Snapshot(loss.gradients - part_of_chunk, loss.gathered + table * has_copy, found.kept + found.streams)
    local = sum(count_local(weight, "float32") for weight in outside)
    # Beside own parts, the gradient of a lookup in the dtype of products, or a part in the order in which it travels:
    # XLA turns it before the backward pass of blocks or behind it.
    reordered = any(_is_turned(weight, train_spec) for weight in outside)
    copied = max((count_local(weight, "float32" if reordered else layout.compute) for weight in outside), default=0)
    are_parts = any(count_local(weight, "float32") > count_summed(weight) for weight in outside)
    sums = Snapshot(
        gradients=max(before, of_blocks)
        + latest
        + local * in_blocks
        + copied
        + sum(map(count_summed, outside if in_blocks else trained)) * are_parts
        + ahead.parts
        + ahead.summed,
        gathered=turned,
        activations=found.streams,
    )
    teaching = Snapshot(before, turned + of_teacher.gathered, found.kept + of_teacher.inside * with_activations)
    return [gather, teaching, loss, backward, sums]


class TeacherAtWork(NamedTuple):
    """Bytes of one device for a teacher in the loss while it works, beside its parameters at rest."""

    table: int = 0  # gathered, that its logits are made with
    gathered: int = 0  # of the block at work and of the next, or of the whole teacher
    inside: int = 0  # of one block at work


def _count_teacher_at_work(train_spec: TrainSpec) -> TeacherAtWork:
    teacher, cfg = train_spec.teacher, train_spec.cfg
    if not isinstance(teacher, Teacher) or not teacher.in_loss:
        return TeacherAtWork()
    model, layout = teacher.arch.model, teacher.arch.layout
    teacher_spec = replace(
        train_spec,
        cfg=cfg.model_copy(update={"model": model}),
        arch=teacher.arch,
        choices=replace(train_spec.choices, layout=layout),
    )

    def count_gathered(weight: Weight) -> int:  # of one that rests on its devices in parts
        stored, in_use = (find(weight.equation) for find in (layout.stored, layout.in_use))
        shapes = {find_shard_shape(weight.shape, spec, teacher_spec.mesh) for spec in (stored, in_use)}
        return _count_bytes_in_use(weight, teacher_spec) if len(shapes) > 1 else 0

    table = teacher.arch.weights["embedding" if model.tied_head else "head"]["table"]
    all_bytes = sum(map(count_gathered, jax.tree.leaves(teacher.arch.weights)))
    in_blocks = layout.gathers_in_blocks(train_spec.choices.sync_every)
    gathered = min(all_bytes, _count_neighbour_bytes(teacher_spec)) if in_blocks else all_bytes
    inside = estimate_inside_bytes(model, layout, train_spec.mesh, train_spec.batch.seq_len)
    rows = train_spec.choices.batch.sequences_per_shard
    return TeacherAtWork(count_gathered(table), gathered, rows * inside)


def _count_latest_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes of the newest gradients of blocks beside the float32 sums, where layers do not add to these."""
    layout, mesh = train_spec.layout, train_spec.mesh
    in_blocks = layout.gathers_in_blocks(train_spec.choices.sync_every)
    if in_blocks and train_spec.batch.num_microbatches == 1:  # the gradients of autodiff are the sums
        return 0
    add_themselves = sums_in_layers(layout, train_spec.choices.remat)
    dtype, find_spec = (layout.param, layout.stored) if in_blocks else (layout.compute, layout.in_use)
    return sum(
        count_shard_bytes(weight, find_spec(weight.equation), dtype, mesh)
        for weight in jax.tree.leaves(train_spec.arch.trained_weights)
        if weight.equation.is_stacked and not (add_themselves and weight.used > 0)  # a tower's are added as a whole
    )


class Ahead(NamedTuple):
    """Bytes of one turn of blocks that gather ahead: what travels from iteration to iteration."""

    in_use: float = 0.0  # gathered weights
    parts: float = 0.0  # a device's own parts of gradients, in the dtype of products
    summed: float = 0.0  # sums inside of a replica
    more: float = 0.0  # parts of the block at work
    in_flight: float = 0.0  # parts that devices sum


def _count_ahead(train_spec: TrainSpec) -> Ahead:
    """Return the bytes of the turn that needs the most; none where blocks do not gather ahead.

    A part is summed in `training.reduce_dtype`. XLA puts two turns into one iteration: sums of experts' gradients,
    which take longer than a layer computes, are on their way for both where a turn is one layer. Kernels of experts add
    up each round apart.
    """
    if not train_spec.choices.prefetch:
        return Ahead()
    layout, mesh, arch = train_spec.layout, train_spec.mesh, train_spec.arch
    is_alone = all(len(run.pattern) == 1 for run in train_spec.cfg.model.runs)

    def count_weight(weight: Weight, is_trained: bool) -> Ahead:
        num_layers, is_expert = weight.shape[0], EXPERTS in weight.equation.w
        has_rounds = is_expert and count_devices(mesh.shape, layout.expert_axes) > 1

        def count(spec: PartitionSpec, dtype: str) -> float:
            return count_shard_bytes(weight, spec, dtype, mesh) / num_layers

        stored, used = layout.stored(weight.equation), layout.in_use(weight.equation)
        in_use = _count_bytes_in_use(weight, train_spec) / num_layers
        if not is_trained:
            return Ahead(in_use)
        part, summed, wide = count(used, layout.compute), count(stored, layout.reduce), count(used, layout.reduce)
        travels = count_devices(mesh.shape, layout.gradient_axes(weight.equation)) > 1
        in_flight = wide * travels * (layout.reduce != layout.compute)
        return Ahead(in_use, part, summed, (1 + has_rounds) * part, (2 if is_expert and is_alone else 1) * in_flight)

    def count_block(name: str) -> Ahead:
        pairs = zip(jax.tree.leaves(arch.weights[name]), jax.tree.leaves(arch.is_trained[name]), strict=True)
        return Ahead(*map(sum, zip(*(count_weight(*pair) for pair in pairs), strict=True)))

    def count_turn(names: Sequence[str]) -> Ahead:
        blocks = [count_block(name) for name in names]
        turn = Ahead(*map(sum, zip(*blocks, strict=True)))
        return turn._replace(more=max(block.more for block in blocks))

    return max((count_turn(run.pattern) for run in train_spec.cfg.model.runs), key=sum)


def _is_turned(weight: Weight, train_spec: TrainSpec) -> bool:
    """Return whether a weight rests in another order than it travels in.

    Devices gather the parts of an array one after the other, so the dimension that is split comes first in memory.
    """
    layout, mesh = train_spec.layout, train_spec.mesh
    stored = find_shard_shape(weight.shape, layout.stored(weight.equation), mesh)
    in_use = find_shard_shape(weight.shape, layout.in_use(weight.equation), mesh)
    return stored[int(weight.equation.is_stacked) + 1 :] != in_use[int(weight.equation.is_stacked) + 1 :]


# Letters of experts, of a router's scores, and of inputs of layers: their products keep the compute dtype, whatever
# `training.matmul_dtype` is.
IN_COMPUTE_DTYPE = "XYp"


def has_matmul_dtype(name: str, weight: Weight) -> bool:
    """Return whether the product of a weight has `training.matmul_dtype`: that of an `Einsum` (models/layers.py)."""
    equation = weight.equation
    return equation.is_stacked and name.endswith(".w") and not set(IN_COMPUTE_DTYPE) & set(equation.w)


def _count_turned_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes of copies of weights at rest in the order in which they travel.

    Those of stacks are made before the scan over layers, those of tables before a loop over microbatches.
    """
    layout, several = train_spec.layout, train_spec.batch.num_microbatches > 1
    if not layout.gathers_in_blocks(train_spec.choices.sync_every):
        return 0
    is_narrow, remat = train_spec.cfg.training.matmul_dtype is not None, train_spec.choices.remat

    # Products of 8 bits take weights with their summed dimensions last. Behind the forward pass only products that are
    # computed again do.
    def is_copied(name: str, weight: Weight) -> bool:
        if is_narrow and has_matmul_dtype(name, weight) and remat.recompute_fraction(product_name(name)) > 0:
            return True
        return (several or weight.equation.is_stacked) and _is_turned(weight, train_spec)

    return sum(
        count_shard_bytes(weight, layout.stored(weight.equation), weight.dtype, train_spec.mesh)
        for path, weight in jax.tree.leaves_with_path(train_spec.arch.weights)
        if is_copied(parameter_name(path), weight)
    )


STREAMS = 3  # that the loss has of the residual stream: of the last block, of the final norm, and of a chunk


class Activations(NamedTuple):
    """Bytes of the activations of a microbatch on one device."""

    kept: float = 0.0  # for the backward pass
    inside: float = 0.0  # of one block at work
    logits: float = 0.0  # of a chunk, and at the same place their gradient
    streams: float = 0.0


def _count_activations(train_spec: TrainSpec) -> Activations:
    cfg, layout, mesh, length = train_spec.cfg, train_spec.layout, train_spec.mesh, train_spec.batch.seq_len
    rows = train_spec.choices.batch.sequences_per_shard
    in_layers = replace(layout, batch_parts=layout.count_parts(rows))
    inside = estimate_inside_bytes(cfg.model, in_layers, mesh, length, train_spec.choices.remat)
    if train_spec.choices.prefetch:  # XLA computes all blocks of a turn again before the first of them goes backward
        inside *= max(len(run.pattern) for run in cfg.model.runs)
    local_tokens = find_shard_shape((length,), layout.activation(TOKENS), mesh)[0]
    item = jnp.dtype(layout.compute).itemsize
    return Activations(
        kept=rows * _count_residual_bytes(train_spec),
        inside=rows * max(inside, _estimate_tower_bytes(train_spec)),
        logits=rows * _count_logit_bytes(train_spec, rows, local_tokens),
        streams=rows * item * STREAMS * local_tokens * cfg.model.embed_dim,
    )


def _count_logit_bytes(train_spec: TrainSpec, num_rows: int, num_tokens: int) -> int:
    """Return the bytes of logits of one of `num_rows` sequences in a chunk, of which a device has `num_tokens` tokens.

    Without a teacher and a cap they are there once. A teacher in the loss has logits too, and the gradient of a
    divergence or of a cap is made of float32 numbers. The likeliest tokens of a teacher's files are spread over the
    vocabulary: two float32 arrays, and whether a token is one of them.
    """
    cfg, layout, teacher = train_spec.cfg, train_spec.layout, train_spec.teacher
    item = jnp.dtype(layout.compute).itemsize
    outputs = layout.activation("V" if cfg.model.labels is None else "v")
    num_outputs = find_shard_shape((cfg.num_outputs,), outputs, train_spec.mesh)[0]
    if isinstance(teacher, OfflineTeacher):
        of_each = item + 2 * 4 + 1
    elif teacher is not None and teacher.in_loss:
        of_each = 2 * item + 4
    else:
        of_each = item + 4 * (cfg.model.logits_cap is not None)
    chunk_size = train_spec.choices.planned.loss_chunk_size
    return of_each * count_chunk_positions(chunk_size, num_rows, num_tokens) * num_outputs


def _list_snapshots_on_stages(train_spec: TrainSpec, with_activations: bool) -> list[Snapshot]:
    """Return the one moment that is derived for a step on stages: the largest of each part."""
    activations = _count_activations_on_stages(train_spec) if with_activations else 0
    return [Snapshot(_count_gradient_bytes(train_spec), _count_gathered_bytes(train_spec), activations)]


def _count_gathered_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes of gathered weights that exist at one time.

    Gathered in blocks, they are those of the block at work and of the next; gathered for the step, all of them.
    """
    layout, arch, num_chunks = train_spec.layout, train_spec.arch, train_spec.choices.pipeline.num_chunks
    in_blocks = layout.gathers_in_blocks(train_spec.choices.sync_every)
    gathered = float(_count_neighbour_bytes(train_spec)) if in_blocks else 0.0
    # XLA transposes tables too; a trained one's copy is gone before its own part of the gradient is there.
    frozen_tables = [weight for weight in jax.tree.leaves(arch.frozen(arch.weights)) if not weight.equation.is_stacked]
    for weight in jax.tree.leaves(arch.weights) + frozen_tables:
        if not (in_blocks and weight.equation.is_stacked):
            gathered += _count_bytes_in_use(weight, train_spec)
        elif num_chunks > 1 and not weight.equation.is_before_stages:  # dealt out to the stages, and the chunk at work
            dealt_out = count_shard_bytes(weight, layout.stored(weight.equation), weight.dtype, train_spec.mesh)
            gathered += (1 + 1 / num_chunks) * dealt_out
    return round(gathered)


def _count_neighbour_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes of the gathered weights of the block at work and of the next.

    Blocks that gather ahead have all blocks of a turn and of the next one, where stacks take turns.
    """
    model, block_bytes = train_spec.cfg.model, {}
    for name in model.stacks:
        weights = jax.tree.leaves(train_spec.arch.weights[name])
        of_a_layer = (_count_bytes_in_use(each, train_spec) / count_layers(each, train_spec) for each in weights)
        block_bytes[name] = sum(of_a_layer)
    peak = 0.0
    for run in model.runs:
        blocks = [block_bytes[name] for name in run.pattern]
        neighbours = max(block + following for block, following in zip(blocks, [*blocks[1:], blocks[0]], strict=True))
        peak = max(peak, 2 * sum(blocks) if train_spec.choices.prefetch else neighbours)
    if model.vision is not None:  # the tower has run before the first block does
        tower = jax.tree.leaves(train_spec.arch.weights["vision"]["tower"]["blocks"])
        peak = max(peak, 2 * sum(_count_bytes_in_use(each, train_spec) / each.shape[0] for each in tower))
    return round(peak)


def _count_bytes_in_use(weight: Weight, train_spec: TrainSpec) -> int:
    """Return the bytes of a gathered weight, and for codes those of the matrix made of them."""
    layout, mesh = train_spec.layout, train_spec.mesh
    spec = layout.in_use(weight.equation)
    size = count_shard_bytes(weight, spec, find_gathered_dtype(weight, layout), mesh)
    if weight.equation.is_quantized:
        weights_per_code = weight.size / math.prod(weight.shape)
        size += round(weights_per_code * count_shard_bytes(weight, spec, layout.compute, mesh))
    return size


def _count_gradient_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes of gradients on stages.

    Each tick adds those of its layers to sums of all ticks; where blocks gather ahead, it begins with zeros as large.
    Of tables there are a device's own parts, of all ticks, and the sum of the logits' table over the chunks of a tick.
    """
    layout, mesh, of_logits = train_spec.layout, train_spec.mesh, find_table_of_logits(train_spec)
    in_blocks, num_bytes = layout.gathers_in_blocks(train_spec.choices.sync_every), 0
    for weight in jax.tree.leaves(train_spec.arch.trained_weights):
        summed = count_shard_bytes(weight, layout.stored(weight.equation), "float32", mesh)
        local = count_shard_bytes(weight, layout.in_use(weight.equation), "float32", mesh)
        in_compute = local * jnp.dtype(layout.compute).itemsize // 4
        if not weight.equation.is_stacked:
            num_bytes += local * (1 + (weight is of_logits)) + summed * (local > summed)
        elif in_blocks:
            num_bytes += (2 + train_spec.choices.prefetch) * summed
            if train_spec.choices.prefetch:  # of the block whose gradients are summed while another is at work
                num_bytes += in_compute // count_layers(weight, train_spec)
        else:
            num_bytes += local + in_compute + summed * (local > summed)
    return num_bytes


# Memory of activations: what the forward pass keeps for the backward pass, and what one layer needs while it works.
# The first part is traced: JAX says which arrays the backward pass takes. The second part is an estimate, because XLA
# decides which arrays of a layer exist at the same time.

MARKS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)  # primes
QUEUES = 3  # of the rows of a part: what enters the stages, what leaves them, and one of their gradients
LONG = 2048  # tokens of a sequence on one device, of which all are traced


def _count_activations_on_stages(train_spec: TrainSpec) -> int:
    """Return the bytes of activations on stages: what ticks keep, and one layer's inside or the logits of a chunk.

    The forward pass keeps what the backward pass of a part needs until it comes by (`assign_slots`): with 4 stages of 7
    parts, however many follow. Where `training.pipeline_recompute` says so, this is only the rows that a stage takes,
    and one part at a time has in one stage what it has without stages.
    """
    layout, mesh, pipeline = train_spec.layout, train_spec.mesh, train_spec.choices.pipeline
    length = train_spec.batch.seq_len
    inside = max(estimate_inside_bytes(train_spec.cfg.model, layout, mesh, length), _estimate_tower_bytes(train_spec))
    local_tokens = find_shard_shape((length,), layout.activation("T"), mesh)[0]
    residual = _count_residual_bytes(train_spec)
    row = _count_stream_bytes(train_spec) + 4 * (local_tokens + length)  # with its positions and segments
    rows_of_microbatch = count_microbatch_rows(train_spec)
    # Of one sequence in one chunk of layers, and in the layers before the stages, of which a device has all.
    of_layer, num_first = residual / train_spec.cfg.model.num_layers, train_spec.cfg.model.num_first_layers
    kept = (residual - num_first * of_layer) / (pipeline.num_stages * pipeline.num_chunks)
    at_work = rows_of_microbatch * (max(kept, num_first * of_layer) + inside)
    loss = rows_of_microbatch * _count_logit_bytes(train_spec, rows_of_microbatch, local_tokens // pipeline.num_stages)
    num_slots = (pipeline.num_chunks + 1) * pipeline.num_stages - 1  # as many as `assign_slots` needs
    in_slot = row if pipeline.recompute_runs else row + kept
    parts = pipeline.num_microbatches * pipeline.num_parts if num_first else 0
    entries = parts * _count_stream_bytes(train_spec) / pipeline.num_stages
    return round(rows_of_microbatch * (num_slots * in_slot + QUEUES * row + entries) + max(at_work, loss))


def estimate_inside_bytes(model: Model, layout: Layout, mesh: AnyMesh, length: int, remat: Remat | None = None) -> int:
    """Return the bytes inside of one layer on one device, for a sequence of `length` tokens. An estimate."""
    item = jnp.dtype(layout.compute).itemsize

    def count_local(size: int, dim_name: str) -> int:
        return find_shard_shape((size,), layout.activation(dim_name), mesh)[0]

    local = {dim_name: count_local(size, dim_name) for dim_name, size in model.dims.items()}
    tokens = count_local(length, "T")
    heads, kinds = local["N"], model.head_kinds
    # Numbers of queries and of keys or values of a token; of key/value heads that every device keeps, it uses one.
    head_numbers = max(
        4 * heads * each.dim + 3 * min(local[each.dim_names[0]], heads) * (each.dim + each.value_dim) for each in kinds
    )
    mlp = _count_mlp_numbers(model, layout, mesh, local, remat)
    inside = tokens * item * (5 * local["D"] + head_numbers * (1 if token_shards(mesh.shape) == 1 else 2) + mlp)
    # Also where a mesh has no devices. Devices that share a sequence split its scores, by heads or by keys.
    if is_in_blocks(layout.cp_exchange) or "xla" in dict(layout.kernels).values():
        inside += heads * min(length, select_query_block(length)) * tokens * (4 + item)
    if (linear := model.linear_attention) is None:
        return inside
    # What linear attention has inside for each token, float32 (models/linear_attention.py).
    chunk = min(CHUNK, tokens)
    columns = linear.value_dim + (linear.key_dim if token_shards(mesh.shape) > 1 else 0)  # of errors, results, memory
    per_value_head = 2 * columns + linear.value_dim + 2 * linear.key_dim + 4 * chunk + linear.key_dim * columns / chunk
    numbers = 2 * local["I"] * linear.key_dim + local["J"] * per_value_head
    return max(inside, round(tokens * (item * (5 * local["D"] + mlp) + 2 * 4 * numbers)))


def _estimate_tower_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes inside of one layer of the tower on one device, for the images of a row. An estimate."""
    vision, layout = train_spec.cfg.model.vision, train_spec.layout
    if vision is None:
        return 0
    sizes, item = {"m": vision.mlp_dim, "q": vision.num_heads}, jnp.dtype(layout.compute).itemsize
    mesh = train_spec.mesh
    local = {name: find_shard_shape((size,), layout.activation(name), mesh)[0] for name, size in sizes.items()}
    num_images, width = train_spec.cfg.training.images_per_row, local["q"] * vision.head_dim
    numbers = 6 * vision.embed_dim + 4 * width + 2 * local["m"]
    passes = 1 if vision.freeze_tower else 2  # forward, and backward at once
    # Patches of images of any size are in one row of the tower, squares in a row each.
    length = vision.unit_patches if vision.unit_patches > 1 else num_images * vision.num_patches
    num_patches = num_images * vision.num_patches
    scores = num_patches // length * local["q"] * min(length, select_query_block(length)) * length * (4 + item)
    return passes * num_patches * item * numbers + scores


def _count_mlp_numbers(model: Model, layout: Layout, mesh: AnyMesh, local: dict[str, int], remat: Remat | None) -> int:
    """Return the numbers that the MLP has inside for each token of a device; `local` has its sizes of dimensions.

    Gate and up, where they are computed again, their gradients, and the gradient of what the last product takes.
    """
    kept = 0 if remat is None else 1 - remat.recompute_fraction("product")
    products = 1 if model.mlp.kind == "plain" else 2
    mlp = round((2 * products - kept * (products - 1)) * max(local["F"], local.get("f", 0)))
    if not isinstance(model.mlp, ExpertsMlp):
        return mlp
    # Rows for which the exchange has room, for each token of this device.
    num_rows = buffer_rows_per_token(model, count_devices(mesh.shape, layout.expert_axes), layout.expert_exchange)
    has_buffer = EXPERT_EXCHANGES[layout.expert_exchange].has_buffer
    if layout.expert_products == FUSED:
        # Tokens arrive, and sums for them or for rows go back; rows of a round have room for more than equal loads.
        per_token = model.mlp.experts_per_token
        arriving = num_rows if has_buffer else num_rows / per_token
        in_round = min(num_rows, CAPACITY_FACTOR * per_token)
        # XLA makes the empty buffers of both parts, and fills those of both, before one part is done.
        arrays = 10 if has_buffer and layout.batch_parts > 1 else 6
        expert_numbers = in_round * (3 * local["G"] + 2 * local["D"]) + arrays * arriving * local["D"]
    elif layout.expert_products == "xla":  # each expert multiplies all rows, of which it masks those of the others
        expert_numbers = num_rows * local["X"] * (6 * local["G"] + 3 * local["D"])
    else:
        expert_numbers = 2 * num_rows * (3 * local["G"] + 2 * local["D"])
    expert_numbers += 4 * local.get("U", 0)
    if has_buffer:  # sent, and returned
        expert_numbers += 4 * model.mlp.experts_per_token * local["D"]
    expert_numbers /= layout.batch_parts  # while one part is with its experts, the other one is not
    if model.mlp.beside_mlp:
        return round(expert_numbers) + mlp
    return max(round(expert_numbers), mlp if len(model.expert_layers) < model.num_layers else 0)


NO_RESIDUALS = {"loss_chunk_size": "auto"}  # of logits nothing is kept, whatever the size of their chunks
_known_residual_bytes: dict[tuple[Any, ...], int] = {}  # a plan asks for one model on many meshes


def _count_residual_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes that `training.remat` keeps of a sequence for the backward pass, on one device.

    On stages, they are those of the same program without stages, whose axis then splits the batch alone.
    """
    cfg = train_spec.cfg
    layout, length = train_spec.layout.with_all_layers(), train_spec.batch.seq_len
    model = cfg.model.model_dump_json(exclude=list_keys_outside("mesh"))
    step = cfg.training.model_dump_json(include=set(StepKeys.model_fields), exclude=set(NO_RESIDUALS))
    # Each data shard has its own sequences, so the axes that split the batch change nothing of one sequence.
    others = (size for axis, size in train_spec.mesh.shape.items() if axis not in data_axes())
    task = cfg.task.model_dump_json() if train_spec.teacher and train_spec.teacher.in_loss else ""
    images = cfg.training.images_per_row if cfg.model.vision is not None else 0
    key = (model, step, length, images, layout, train_spec.choices.remat, task, *others)
    if key not in _known_residual_bytes:
        axes = train_spec.abstract_mesh
        # Without devices any kernel can be traced.
        mesh = AbstractMesh(axes.axis_sizes, axes.axis_names, axis_types=axes.axis_types)
        with jax.sharding.use_abstract_mesh(mesh):
            _known_residual_bytes[key] = _trace_residuals(replace(train_spec, mesh=mesh))
    return _known_residual_bytes[key]


def _trace_residuals(train_spec: TrainSpec) -> int:
    """Trace the forward pass, and return the bytes of what it leaves for the backward pass of one sequence.

    Some residuals are weights. To tell those of the sequences apart, the number of sequences is a prime p that divides
    no other size: it divides a size of each array that grows with the sequences, and of no other array.

        [p, T, D]   grows: an activation         [D, F]   does not: a weight
    """
    cfg, mesh = train_spec.cfg, train_spec.mesh

    # What a kernel keeps of a sequence is what `flash` keeps, where it has blocks for the heads: no other can be traced
    # without its devices, and the plain one keeps keys once more for each block of queries, which XLA finds out.
    def with_kernels(layout: Layout, model: Model) -> Layout:
        max_dim = max(find_row_in_use(FLASH_BLOCKS))
        named = ((heads.dim_names[0], "flash" if heads.dim <= max_dim else "xla") for heads in model.head_kinds)
        return replace(layout, kernels=tuple(named))

    layout, remat = train_spec.layout.with_all_layers(), train_spec.choices.remat
    layout = with_kernels(layout, cfg.model)
    # Where what is kept waits in the host's memory, what blocks take does too: the rest is outside of blocks.
    arch = describe(cfg.model, layout, Remat("full") if remat.on_host else remat)
    teacher, loss_fn = train_spec.teacher, train_spec.loss_fn
    if isinstance(teacher, Teacher) and teacher.in_loss:
        plain = describe(teacher.arch.model, with_kernels(teacher.arch.layout, teacher.arch.model))
        loss_fn = make_loss(cfg, replace(teacher, arch=plain))

    def residuals(params, batch):
        fields, shared = split_shared(batch)
        rows, seed = {name: leaf[0] for name, leaf in fields.items()}, jnp.zeros((), jnp.int32)

        def objective(trained):
            return loss_fn(arch.module(arch.merge(trained, params)), rows | shared, seed).objective

        return jax.vjp(objective, arch.trained(params))[1]

    def residuals_of_images(params, batch):
        images = Images(*(batch[name][0] for name in IMAGE_FIELDS))

        def see(trained):
            module = arch.module(arch.merge(trained, params))
            tokens, positions = batch["tokens"][0], batch["positions"][0]
            inputs = module.add_images(module.embed(module.vocab_weights(), tokens, positions), positions, images)
            return inputs.x, inputs.features

        return jax.vjp(see, arch.trained(params))[1]

    sizes = [*train_spec.dims.values()]
    if teacher is not None:
        sizes += teacher.arch.model.dims.values() if isinstance(teacher, Teacher) else [teacher.top_k]
    prime = next(prime for prime in MARKS if all(size % prime for size in sizes if size))
    times = _count_equal_parts(train_spec.batch.seq_len, layout, mesh)
    shape = BatchShape(1, prime * data_shards(mesh.shape), train_spec.batch.seq_len // times)
    batch = abstract_arrays(find_loss_kind(cfg).fields, shape, mesh) | train_spec.abstract_shared

    def is_kept(leaf: jax.ShapeDtypeStruct) -> bool:
        # Outside of stacks, what is made float32 is kept as it was before: a kernel makes it float32 where it reads it.
        is_wide_copy = leaf.dtype == jnp.float32 and layout.compute != "float32" and leaf.shape[:1] == (shape.num_rows,)
        return any(size % prime == 0 for size in leaf.shape) and not is_wide_copy

    def count_bytes(function: Callable, batch: Any) -> int:
        leaves = jax.tree.leaves(jax.eval_shape(function, abstract_params(arch, mesh), batch))
        return bytes_per_device(list(filter(is_kept, leaves))) // prime

    # What is kept of images does not grow with the tokens, so it is traced apart.
    text = {name: leaf for name, leaf in batch.items() if name not in IMAGE_FIELDS}
    num_bytes = times * count_bytes(residuals, text)
    num_bytes += count_bytes(residuals_of_images, batch) if IMAGES in batch else 0
    return num_bytes - cfg.model.num_layers * _count_stream_bytes(train_spec) if remat.on_host else num_bytes


def _count_equal_parts(length: int, layout: Layout, mesh: AnyMesh) -> int:
    """Return into how many parts a sequence is cut of which one is traced, and counted as often.

    What is kept of a sequence grows with its tokens. The plain attention is a piece of program for each block of
    queries, so a long sequence takes long to trace.
    """
    times = 1
    shards = length // find_shard_shape((length,), layout.activation(STREAM_TOKENS), mesh)[0]
    while length % (2 * times * shards) == 0 and length // (2 * times) >= LONG * token_shards(mesh.shape):
        times *= 2
    return times


def _count_stream_bytes(train_spec: TrainSpec) -> int:
    """Return the bytes of the residual stream of one sequence on one device."""
    layout = train_spec.layout
    local_tokens = find_shard_shape((train_spec.batch.seq_len,), layout.activation(STREAM_TOKENS), train_spec.mesh)[0]
    return local_tokens * train_spec.cfg.model.embed_dim * jnp.dtype(layout.compute).itemsize
