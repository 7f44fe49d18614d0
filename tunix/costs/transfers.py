"""Collectives of a training step, derived from equations: weights gathered, gradients reduced, tokens exchanged.

An example: a weight [1024, 4096] in each of 4 blocks, over 8 devices of fsdp, with full_shard, products in bfloat16,
gradients reduced in float32, and one microbatch. Each block gathers its weight before the forward pass and again before
the backward pass, and then sums its gradient. One block's weight has 4 Mi numbers, so a step has

    8 all-gathers        4 blocks x 2 passes x 4 Mi x 2 bytes   64 MiB
    4 reduce-scatters    4 blocks x 4 Mi x 4 bytes              64 MiB

Blocks that gather ahead (training.overlap) have one more of each, so 72 and 80 MiB. These are the bytes of whole
arrays. Each device has 1/8 of an array already, and sends 7/8 of the bytes (BUS_FACTORS).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tunix.base.dotted import import_object
from tunix.config import Config, DeviceKind
from tunix.config.exchange_tables import CP_EXCHANGES
from tunix.config.mixers import HeadSizes
from tunix.costs.links import Group, predict_collective_s
from tunix.models.exchanges import choose_exchange, count_repeats
from tunix.sharding.dims import axis_names, token_axes
from tunix.sharding.layout import Layout
from tunix.sharding.mesh_shape import count_devices, token_shards
from tunix.training.losses import find_loss_kind
from tunix.training.mesh_choices import read_remat
from tunix.training.program import Program
from tunix.training.state import Weight


@dataclass(frozen=True)
class Transfer:
    """All collectives of one kind and purpose in one step, over some mesh axes."""

    kind: str  # of links.BUS_FACTORS
    axes: tuple[str, ...]
    num_bytes: int  # in one step: of the arrays that BUS_FACTORS counts
    overlaps: bool = True  # arithmetic goes on meanwhile; false where the next instruction waits for the result
    count: int = 1  # executions in one step, which have equal shares of the bytes


def predict_seconds(transfer: Transfer, sizes: dict[str, int], kind: DeviceKind, per_node: int) -> float:
    """Return the time of all executions of a transfer, if nothing else uses the links.

    Neighbours on inner axes are neighbours in a node.
    """
    size = count_devices(sizes, transfer.axes)
    group = Group(size, min(_count_neighbours(transfer.axes, sizes, per_node), size))
    return transfer.count * predict_collective_s(
        transfer.kind, transfer.num_bytes / transfer.count, group, kind, per_node
    )


def _count_neighbours(axes: Sequence[str], sizes: dict[str, int], per_node: int) -> int:
    """Return how many devices of a group along these axes one node has, where groups and nodes overlap least.

    Other axes may lie between: of a group along fsdp and cp of [fsdp, ep=4, cp=2], a node of 8 devices has two.
    `stride` is the distance of two neighbours on an axis, in devices. In the example:

        cp     of the group, 2 devices side by side
        ep     not of the group: the node has those 2, and the next of the group are stride = 2 x 4 = 8 devices away
        fsdp   of the group, but a node of 8 ends before the next: still 2
    """
    neighbours, stride, run = 1, 1, 1  # `run` is the size of the axes of the group that lie side by side
    for axis in (*reversed(axis_names()), None):
        if axis in axes and axis is not None:
            run *= sizes[axis]
        elif axis is None or sizes[axis] > 1:  # an axis of size 1 separates nothing
            neighbours *= max(1, math.gcd(stride * run, per_node) // stride)
            stride, run = stride * run * (1 if axis is None else sizes[axis]), 1
    return neighbours


def list_transfers(program: Program) -> list[Transfer]:
    """Return the collectives of one step that are not of products or experts, which have files of their own."""
    return [*_list_weight_transfers(program), *_list_attention_transfers(program), *_list_stage_transfers(program)]


def _list_weight_transfers(program: Program) -> Iterator[Transfer]:
    """Yield gathers of weights before they are used, and reductions of their gradients.

    Blocks on stages gather in every tick, and once more where the backward pass runs a stage again.
    """
    layout, strategy = program.layout, program.layout.strategy
    mesh, pipeline, sync_every = program.mesh, program.pipeline, program.sync_every
    in_blocks = layout.gathers_in_blocks(sync_every)
    reductions = 1 if pipeline.is_stream else program.batch.num_microbatches // sync_every
    ahead = program.overlap.prefetch
    gathers_of_block = (2 + pipeline.runs_again) * pipeline.num_passes
    is_trained = jax.tree.leaves(program.arch.is_trained)
    for weight, trained in zip(jax.tree.leaves(program.arch.weights), is_trained, strict=True):
        equation = weight.equation
        in_use, gathered_over = layout.in_use(equation), layout.gather_axes(equation)
        blocks = weight.shape[0] // pipeline.num_stages if equation.is_stacked else 1
        if gathered_over and strategy.params:
            times = gathers_of_block if in_blocks and equation.is_stacked else 1
            size = round(times * count_shard_bytes(weight, in_use, find_gathered_dtype(weight, layout), mesh))
            count = round(times * blocks) if in_blocks else 1
            if ahead and equation.is_stacked:  # each forward pass ends with one more, of the last block
                more = (1 + pipeline.runs_again) * pipeline.num_ticks
                size, count = size * (count + more) // count, count + more
            yield Transfer("all-gather", gathered_over, size, count=count)
        elif gathered_over and strategy.optimizer and trained:  # the updated weights
            yield Transfer("all-gather", gathered_over, count_shard_bytes(weight, in_use, layout.param, mesh))
        if not trained:
            continue
        times = pipeline.num_passes if in_blocks and equation.is_stacked else reductions
        size = round(times * count_shard_bytes(weight, in_use, layout.reduce, mesh))
        summed_over = layout.gradient_axes(equation)
        count = round(times * blocks) if in_blocks else reductions
        if ahead and equation.is_stacked:  # and each backward pass begins with one more, of zeros
            size, count = size * (count + pipeline.num_ticks) // count, count + pipeline.num_ticks
        if gathered_over and strategy.gradients:
            yield Transfer("reduce-scatter", gathered_over, size, count=count)
            size //= count_devices(mesh.shape, gathered_over)
            summed_over = tuple(axis for axis in summed_over if axis not in gathered_over)
        # Compiled programs sum over dp at the end of the backward pass, where nothing is left to do meanwhile.
        yield Transfer("all-reduce", summed_over, size, overlaps=False, count=count)


def _list_stage_transfers(program: Program) -> Iterator[Transfer]:
    """Yield the rows that stages send one another in each tick, their gradients, and what all stages of 1F1B share."""
    cfg, layout, mesh, pipeline = program.cfg, program.layout, program.mesh, program.pipeline
    if pipeline.num_stages == 1:
        return
    rows, tokens = count_part_rows(cfg, mesh), cfg.training.seq_len
    own_tokens = tokens // token_shards(mesh.shape)
    joined = rows * own_tokens * cfg.model.embed_dim * jnp.dtype(layout.compute).itemsize
    stream = joined // count_devices(mesh.shape, layout.stream_axes)
    beside = rows * (own_tokens + tokens) * 4  # positions, and segments of whole sequences; they have no gradient
    # The next stage waits for the rows.
    yield Transfer(
        "collective-permute", layout.stage_axes, pipeline.num_ticks * (2 * stream + beside), False, pipeline.num_ticks
    )
    if not pipeline.is_stream:  # a place of the queue has time until it is needed
        yield Transfer("collective-permute", layout.stage_axes, pipeline.num_ticks * (2 * stream + beside))
        return
    # A part comes in and its result goes out, forward; backward the gradients of both.
    parts = pipeline.num_microbatches * pipeline.num_parts
    entered = parts + pipeline.num_stages - 1  # with what the first stage takes when all parts have gone in
    times = entered + parts
    yield Transfer("all-gather", layout.stage_axes, times * joined + entered * beside, overlaps=False)
    returned = parts if pipeline.num_chunks > 1 else entered
    yield Transfer("reduce-scatter", layout.stage_axes, (parts + returned) * joined, overlaps=False)
    if layout.stream_axes:  # on its way between stages and what is outside of them, a part has its tokens joined
        yield Transfer("all-gather", layout.stream_axes, times * (joined + joined // pipeline.num_stages), False)
    # Once a step the batch is dealt out anew: its tokens in the place of its sequences.
    fields = sum(field.dims == "ABT" for field in find_loss_kind(cfg).fields.values())
    batch = pipeline.num_microbatches * cfg.training.sequences_per_shard * own_tokens * 4
    yield Transfer("all-to-all", layout.stage_axes, fields * batch, overlaps=False)
    if pipeline.num_chunks > 1:
        yield _deal_layers(program)


def _deal_layers(program: Program) -> Transfer:
    """Return the transfer of layers that stages deal out before the first tick, and of gradients afterwards."""
    layout, mesh, num_chunks = program.layout, program.mesh, program.pipeline.num_chunks
    num_bytes, count = 0, 0
    is_trained = jax.tree.leaves(program.arch.is_trained)
    for weight, trained in zip(jax.tree.leaves(program.arch.weights), is_trained, strict=True):
        if not weight.equation.is_stacked:
            continue
        num_bytes += count_shard_bytes(
            weight, layout.at_rest(weight.equation, layout.strategy.params), weight.dtype, mesh
        )
        count += num_chunks
        if trained:
            at_rest = layout.at_rest(weight.equation, layout.strategy.gradients)
            num_bytes += count_shard_bytes(weight, at_rest, "float32", mesh)
            count += num_chunks
    return Transfer("collective-permute", layout.stage_axes, num_bytes, overlaps=False, count=count)


def count_part_rows(cfg: Config, mesh: Mesh | AbstractMesh) -> int:
    """Return the sequences of one part of a microbatch on one device, while it is on a stage."""
    pipeline = cfg.training.pipeline(mesh.shape)
    return cfg.training.sequences_per_shard * pipeline.num_stages // pipeline.num_parts


def _list_attention_transfers(program: Program) -> Iterator[Transfer]:
    """Yield the transfers of attention between devices that share sequences, and of the segment ids, spread once."""
    cfg, axes, mesh = program.cfg, token_axes(), program.mesh
    if token_shards(mesh.shape) == 1:
        return
    num_microbatches, rows, tokens = program.batch
    segment_ids = math.prod(find_shard_shape((rows, tokens), program.layout.activation("BS"), mesh)) * 4
    yield Transfer("all-gather", axes, num_microbatches * segment_ids, overlaps=False, count=num_microbatches)
    pipeline = program.pipeline
    exchanged = import_object(CP_EXCHANGES[choose_exchange(cfg.model, mesh.shape).name].transfers)
    for kind, numbers in cfg.model.kinds_of_heads.items():
        layers = num_microbatches * len(numbers) * pipeline.ticks_per_part
        layer = exchanged(cfg, measure_heads(cfg, kind, program.layout, mesh), pipeline.runs_again)
        num_bytes, count = round(layers * layer.num_bytes), max(1, round(layers * layer.count))
        yield replace(layer, num_bytes=num_bytes, count=count)


class LocalHeads(NamedTuple):
    """Sizes of attention's arrays on one device, for one microbatch, before an exchange."""

    rows: int
    queries: int  # query heads
    keys: int  # key/value heads
    numbers: int  # in one head: rows x own tokens x head dim
    num_devices: int  # that share a sequence
    itemsize: int  # bytes of a number in products


def measure_heads(cfg: Config, kind: HeadSizes, layout: Layout, mesh: Mesh | AbstractMesh) -> LocalHeads:
    """Return the sizes on one device of heads of a kind (`Model.kinds_of_heads`)."""
    rows, tokens = cfg.training.batch_shape(mesh.shape).num_rows, cfg.training.seq_len
    shape = rows, tokens, cfg.model.num_heads, kind.dim
    own_rows, own_tokens, queries, head_dim = find_shard_shape(shape, layout.activation("BTNH"), mesh)
    letter = kind.letters[0]
    keys = layout.num_own_kv_heads(find_shard_shape((kind.num_kv_heads,), layout.activation(letter), mesh)[0], letter)
    numbers, itemsize = own_rows * own_tokens * head_dim, jnp.dtype(layout.compute).itemsize
    return LocalHeads(own_rows, queries, keys, numbers, token_shards(mesh.shape), itemsize)


def swap_heads(cfg: Config, heads: LocalHeads, runs_again: bool) -> Transfer:
    """Return the transfers of a layer whose devices swap queries, keys, values and results: heads for tokens.

    `runs_again` is true where the backward pass runs a whole stage once more.
    """
    keys = heads.keys * count_repeats(heads.keys, heads.num_devices)
    # Forward, once more where they are not kept, and backward the same in the other direction.
    times = 2 + read_remat(cfg.training).computes_again("exchange") + runs_again
    num_bytes = round(times * 2 * (heads.queries + keys) * heads.numbers * heads.itemsize)
    return Transfer("all-to-all", token_axes(), num_bytes, overlaps=False, count=round(4 * times))


def hand_on_keys(cfg: Config, heads: LocalHeads, runs_again: bool) -> Transfer:
    """Return the transfers of a layer whose keys, values and their gradients go round a ring."""
    # Forward, once more where the results are not kept, and backward. The last two begin with the same transfer, which
    # XLA makes once. Gradients, float32, also go home.
    hops = (2 + runs_again) * (heads.num_devices - 1)
    hops += round(read_remat(cfg.training).computes_again("attention") * (heads.num_devices - 2))
    num_bytes = 2 * heads.keys * heads.numbers * (hops * heads.itemsize + heads.num_devices * 4)
    return Transfer("collective-permute", token_axes(), num_bytes, count=2 * (hops + heads.num_devices))


def find_gathered_dtype(weight: Weight, layout: Layout) -> str:
    """Return the dtype in which a weight is gathered: codes and scales travel as they are."""
    return weight.dtype if weight.equation.is_quantized else layout.use_dtype(weight.equation)


def count_shard_bytes(weight: Weight, spec: PartitionSpec, dtype: str, mesh: Mesh | AbstractMesh) -> int:
    """Return the bytes that one device has of a weight laid out as `spec` in this dtype."""
    return math.prod(find_shard_shape(weight.shape, spec, mesh)) * jnp.dtype(dtype).itemsize


def find_shard_shape(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Return the shape of the part of an array that one device has."""
    return NamedSharding(mesh, PartitionSpec(*spec.partitions)).shard_shape(tuple(shape))
