"""Collectives of a training step, derived from equations: weights gathered, gradients reduced, tokens exchanged.

An example: a weight [1024, 4096] in each of 4 blocks, over 8 devices of fsdp, with full_shard, products in bfloat16,
gradients reduced in float32, and one microbatch. Each block gathers its weight before the forward pass and again
before the backward pass, and then sums its gradient. One block's weight has 4 Mi numbers, so a step has

    8 all-gathers        4 blocks x 2 passes x 4 Mi x 2 bytes   64 MiB
    4 reduce-scatters    4 blocks x 4 Mi x 4 bytes              64 MiB

Blocks that gather ahead (training.overlap) have one more of each, so 72 and 80 MiB. These are the bytes of whole
arrays. Each device has 1/8 of an array already, and sends 7/8 of the bytes (BUS_FACTORS).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tunix.base.dotted_path import import_object
from tunix.config import DeviceKind, Model
from tunix.config.batch import PipelineShape
from tunix.config.layers import ExpertsMlp, HeadSizes
from tunix.costs.devices import Group, predict_collective_s
from tunix.models.context_parallel import count_repeats
from tunix.models.expert_parallel import count_rows
from tunix.models.layer_scan import sums_in_layers
from tunix.models.layers import parameter_name
from tunix.models.linear_attention import count_rounds
from tunix.models.pipeline import list_sends
from tunix.models.remat import Remat, product_name
from tunix.models.table import CP_EXCHANGES, EXPERT_EXCHANGES
from tunix.sharding.arrays import AnyMesh
from tunix.sharding.layout import STRATEGIES, Layout
from tunix.sharding.mesh import count_devices, token_shards
from tunix.sharding.table import DIMS, EXPERTS, STREAM_TOKENS, TOKENS, Equation, axis_names, token_axes
from tunix.training.choices import Choices
from tunix.training.loss import find_loss_kind
from tunix.training.state import Weight
from tunix.training.teacher import Teacher
from tunix.training.train_spec import TrainSpec


@dataclass(frozen=True)
class Transfer:
    """All collectives of one kind and purpose in one step, over some mesh axes."""

    kind: str  # of `BUS_FACTORS` (costs/devices.py)
    axes: tuple[str, ...]
    num_bytes: int  # in one step: of the arrays that BUS_FACTORS counts
    # Share of its time in which arithmetic goes on meanwhile; 0 where the next instruction waits for the result.
    overlaps: float = 1.0
    count: int = 1  # executions in one step, which have equal shares of the bytes


def predict_seconds(transfer: Transfer, sizes: dict[str, int], kind: DeviceKind, per_node: int) -> float:
    """Return the time of all executions of a transfer, if nothing else uses the links."""
    group, num_bytes = find_group(transfer.axes, sizes, per_node), transfer.num_bytes / transfer.count
    return transfer.count * predict_collective_s(transfer.kind, num_bytes, group, kind, per_node)


def find_group(axes: Sequence[str], sizes: dict[str, int], per_node: int) -> Group:
    """Return the devices that communicate over these axes. Neighbours on inner axes are neighbours in a node."""
    return Group(count_devices(sizes, axes), _count_neighbours(axes, sizes, per_node))


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


def list_transfers(train_spec: TrainSpec) -> list[Transfer]:
    """Return all collectives of one step."""
    lists = (
        _list_attention_transfers, _list_stage_transfers, _list_matmul_transfers, _list_expert_transfers,
        _list_teacher_transfers,
    )  # fmt: skip
    of_weights = _join_small(_list_weight_transfers(train_spec), train_spec)
    return [*of_weights, *(transfer for each in lists for transfer in each(train_spec))]


JOINED_BYTES = 30 << 20  # of results that XLA makes one collective: its `xla_gpu_all_gather_combine_threshold_bytes`


def _join_small(transfers: Iterable[Transfer], train_spec: TrainSpec) -> Iterator[Transfer]:
    """Yield transfers as XLA joins them: those of a kind in a layer, in their order, up to `JOINED_BYTES`."""
    groups: dict[tuple, list[Transfer]] = {}
    has_experts = isinstance(train_spec.cfg.model.mlp, ExpertsMlp)
    for transfer in transfers:
        key = transfer.kind, transfer.axes, transfer.overlaps, transfer.count
        groups.setdefault(key, []).append(transfer)
    for (kind, axes, overlaps, count), group in groups.items():
        # XLA is told to join no gathers where two parts take turns with their experts (training/choices.py).
        is_apart = count == 1 or (kind == "all-gather" and has_experts and train_spec.layout.batch_parts > 1)
        shards = count_devices(train_spec.mesh.shape, axes) if kind == "reduce-scatter" else 1
        limit, joined = 0 if is_apart else JOINED_BYTES * count * shards, [0]
        for transfer in group:
            if joined[-1] and joined[-1] + transfer.num_bytes > limit:
                joined.append(0)
            joined[-1] += transfer.num_bytes
        yield from (Transfer(kind, axes, num_bytes, overlaps, count) for num_bytes in joined)


def _list_teacher_transfers(train_spec: TrainSpec) -> Iterator[Transfer]:
    """Yield the collectives of the forward pass of a teacher in the loss.

    They are those that one more forward pass of its layers would add to its own training, and its tables, gathered
    once. Its weights are no part of the state: nothing keeps them gathered for a step. What devices of tp exchange
    before its first layer and behind its last one is left out.
    """
    teacher = train_spec.teacher
    if not (isinstance(teacher, Teacher) and teacher.in_loss):
        return
    arch, mesh, choices = teacher.arch, train_spec.mesh, train_spec.choices
    if (layout := arch.layout).strategy.splits:
        layout = replace(layout, strategy=STRATEGIES["full_shard"])
    cfg = train_spec.cfg.model_copy(update={"model": arch.model})

    def list_of_training(recompute_runs: bool) -> list[Transfer]:
        pipeline = choices.pipeline._replace(recompute_runs=recompute_runs)
        of_teacher = replace(choices, layout=layout, pipeline=pipeline, sync_every=1, prefetch=False)
        return list_transfers(replace(train_spec, cfg=cfg, arch=arch, choices=of_teacher, teacher=None))

    for once, twice in zip(list_of_training(False), list_of_training(True), strict=True):
        if twice.count > once.count:
            yield replace(once, num_bytes=twice.num_bytes - once.num_bytes, count=twice.count - once.count)
    for weight in jax.tree.leaves(arch.weights):
        axes = layout.gather_axes(weight.equation)
        if axes and layout.strategy.splits and not weight.equation.is_stacked:
            dtype = find_gathered_dtype(weight, layout)
            yield Transfer("all-gather", axes, count_shard_bytes(weight, layout.in_use(weight.equation), dtype, mesh))


def _list_weight_transfers(train_spec: TrainSpec) -> Iterator[Transfer]:
    """Yield gathers of weights before they are used, and reductions of their gradients.

    Blocks on stages gather in every tick, and once more where the backward pass runs a stage again.
    """
    layout, strategy = train_spec.layout, train_spec.layout.strategy
    mesh, sync_every = train_spec.mesh, train_spec.choices.sync_every
    in_blocks = layout.gathers_in_blocks(sync_every)
    reductions = 1 if train_spec.choices.pipeline.num_stages > 1 else train_spec.batch.num_microbatches // sync_every
    has_replicas = layout.has_replicas(mesh.shape)
    is_trained = jax.tree.leaves(train_spec.arch.is_trained)
    weights = jax.tree.leaves_with_path(train_spec.arch.weights)
    for (path, weight), trained in zip(weights, is_trained, strict=True):
        equation, pipeline = weight.equation, find_passes(weight, train_spec)
        # `model.mtp` gathers when it runs.
        ahead = train_spec.choices.prefetch and path[0].key in train_spec.cfg.model.stacks
        gathers_of_block = (2 + pipeline.recompute_runs) * pipeline.num_passes
        in_use, gathered_over = layout.in_use(equation), layout.gather_axes(equation)
        blocks = count_layers(weight, train_spec) if equation.is_stacked else 1
        if gathered_over and strategy.splits:
            times = gathers_of_block if in_blocks and equation.is_stacked else 1
            size = round(times * count_shard_bytes(weight, in_use, find_gathered_dtype(weight, layout), mesh))
            count = round(times * blocks) if in_blocks else 1
            if ahead:  # each forward pass ends with one more, of the last block
                more = (1 + pipeline.recompute_runs) * pipeline.num_iterations
                size, count = size * (count + more) // count, count + more
            yield Transfer("all-gather", gathered_over, size, count=count)
        if not trained:
            continue
        times = pipeline.num_passes if in_blocks and equation.is_stacked else reductions
        size = round(times * count_shard_bytes(weight, in_use, layout.reduce, mesh))
        summed_over = layout.gradient_axes(equation)
        count = round(times * blocks) if in_blocks else reductions
        if ahead:  # and each backward pass begins with one more, of zeros
            size, count = size * (count + pipeline.num_iterations) // count, count + pipeline.num_iterations
        if gathered_over and strategy.splits:
            yield Transfer("reduce-scatter", gathered_over, size, count=count)
            size //= count_devices(mesh.shape, gathered_over)
            summed_over = tuple(axis for axis in summed_over if axis not in gathered_over)
        if ahead and has_replicas:
            # Over replicas one iteration later; of several microbatches in the last one, if layers add to the sums.
            once = sums_in_layers(layout, train_spec.choices.remat)
            passes, iterations = (1, 1) if once else (pipeline.num_passes, pipeline.num_iterations)
            later = round(passes * blocks) + 2 * iterations
            yield Transfer("all-reduce", summed_over, size // count * later, count=later)
            continue
        # Compiled programs sum over dp at the end of the backward pass, where nothing is left to do meanwhile.
        yield Transfer("all-reduce", summed_over, size, overlaps=0.0, count=count)


def _list_stage_transfers(train_spec: TrainSpec) -> Iterator[Transfer]:
    """Yield the rows that stages send one another in each tick, their gradients, and what all stages share."""
    cfg, layout, mesh, pipeline = train_spec.cfg, train_spec.layout, train_spec.mesh, train_spec.choices.pipeline
    if pipeline.num_stages == 1:
        return
    rows, tokens = count_microbatch_rows(train_spec), train_spec.batch.seq_len
    local_tokens = tokens // token_shards(mesh.shape)
    joined = rows * local_tokens * cfg.model.embed_dim * jnp.dtype(layout.compute).itemsize
    stream = joined // count_devices(mesh.shape, layout.stream_axes)
    extra_bytes = rows * (local_tokens + tokens) * 4  # positions, and segments of whole sequences: no gradients
    times = pipeline.num_iterations
    # The next stage waits for the rows.
    yield Transfer("collective-permute", layout.stage_axes, times * (2 * stream + extra_bytes), 0.0, times)
    # A part comes in and its result goes out, forward; backward the gradients of both.
    parts = pipeline.num_microbatches * pipeline.num_parts
    entered = parts + pipeline.num_stages - 1  # with what the first stage takes when all parts have gone in
    returned = parts if pipeline.num_chunks > 1 else entered
    if not (cfg.model.first_runs or train_spec.arch.is_trained["embedding"]["table"]):
        returned = 0  # in front of the stages nothing needs a gradient
    num_bytes = (entered + parts) * stream + entered * extra_bytes
    yield Transfer("all-gather", layout.stage_axes, num_bytes, overlaps=0.0)
    yield Transfer("reduce-scatter", layout.stage_axes, (parts + returned) * stream, overlaps=0.0)
    if layout.stream_axes:  # outside of the stages, devices that split the stream have other tokens of it
        between, crossings = (*layout.stage_axes, *layout.stream_axes), entered + 2 * parts + returned
        num_bytes = crossings * stream // pipeline.num_stages
        yield Transfer("collective-permute", between, num_bytes, overlaps=0.0, count=crossings)
    if cfg.model.first_runs:  # entries of all parts, and their gradients
        yield Transfer("all-to-all", layout.stage_axes, 2 * parts * joined // pipeline.num_stages, overlaps=0.0)
    # Once a step the batch is dealt out anew: its tokens in the place of its sequences.
    fields = sum(field.dims == "ABT" for field in find_loss_kind(cfg).fields.values())
    batch = pipeline.num_microbatches * train_spec.choices.batch.sequences_per_shard * local_tokens * 4
    yield Transfer("all-to-all", layout.stage_axes, fields * batch, overlaps=0.0)
    if pipeline.num_chunks > 1:
        # Stages deal layers out before the first tick, and gradients of the trained ones afterwards.
        arch = train_spec.arch
        dealt_out = [(weight, weight.dtype) for weight in jax.tree.leaves(arch.weights)]
        dealt_out += [(weight, "float32") for weight in jax.tree.leaves(arch.trained_weights)]
        chunks = range(pipeline.num_chunks)  # each travels in a permute of its own, of which one may move nothing
        trips = [list_sends(pipeline.num_stages, pipeline.num_chunks, number) for number in chunks]
        moving = sum(any(source != target for source, _, target, _ in each) for each in trips)
        num_bytes, count = 0, 0
        for weight, dtype in dealt_out:
            if weight.equation.is_stacked and not weight.equation.is_before_stages:
                in_all = count_shard_bytes(weight, layout.stored(weight.equation), dtype, mesh)
                num_bytes += in_all * moving // pipeline.num_chunks
                count += moving
        yield Transfer("collective-permute", layout.stage_axes, num_bytes, overlaps=0.0, count=count)


def find_passes(weight: Weight, train_spec: TrainSpec) -> PipelineShape:
    """Return the passes of a step through the layers of a weight."""
    pipeline = train_spec.choices.pipeline
    return pipeline.before_stages if weight.equation.is_before_stages else pipeline


def find_table_of_logits(train_spec: TrainSpec) -> Weight | None:
    """Return the table that logits are made with, None of a model without logits."""
    weights, cfg = train_spec.arch.weights, train_spec.cfg
    return weights["embedding" if cfg.model.tied_head else "head"]["table"] if cfg.has_logits else None


def count_layers(weight: Weight, train_spec: TrainSpec) -> int:
    """Return the layers of a stack that a device has: those of its stage, or all where stages do not share them."""
    return weight.shape[0] // find_passes(weight, train_spec).num_stages


def list_passes(train_spec: TrainSpec, layers: Sequence[int]) -> list[tuple[PipelineShape, int]]:
    """Return the passes of a step through these layers, each with the number of layers that have such passes."""
    first = {layer for run in train_spec.cfg.model.first_runs for layer in run.layers}
    num_first, pipeline = len(first.intersection(layers)), train_spec.choices.pipeline
    pairs = (pipeline.before_stages, num_first), (pipeline, len(layers) - num_first)
    return [(passes, number) for passes, number in pairs if number]


def count_microbatch_rows(train_spec: TrainSpec) -> int:
    """Return the sequences of one part of a microbatch on one device, while it is on a stage."""
    pipeline = train_spec.choices.pipeline
    return train_spec.choices.batch.sequences_per_shard * pipeline.num_stages // pipeline.num_parts


def _list_attention_transfers(train_spec: TrainSpec) -> Iterator[Transfer]:
    """Yield the transfers of attention, linear too, between devices that share sequences, and of the segment ids,
    spread once."""
    cfg, axes, mesh = train_spec.cfg, token_axes(), train_spec.mesh
    if token_shards(mesh.shape) == 1:
        return
    num_microbatches, rows, tokens = train_spec.batch
    segment_ids = math.prod(find_shard_shape((rows, tokens), train_spec.layout.activation("BS"), mesh)) * 4
    yield Transfer("all-gather", axes, num_microbatches * segment_ids, overlaps=0.0, count=num_microbatches)
    exchanged = import_object(CP_EXCHANGES[train_spec.layout.cp_exchange].transfers)
    for kind, numbers in _list_head_kinds(cfg.model):
        heads = measure_heads(cfg.model, kind, train_spec.choices, mesh)
        for pipeline, number in list_passes(train_spec, numbers):
            layers = num_microbatches * number * pipeline.iterations_per_microbatch
            layer = exchanged(train_spec.choices.remat, heads, pipeline.recompute_runs)
            num_bytes, count = round(layers * layer.num_bytes), max(1, round(layers * layer.count))
            yield replace(layer, num_bytes=num_bytes, count=count)
    yield from _list_memory_transfers(train_spec)


def _list_head_kinds(model: Model) -> list[tuple[HeadSizes, tuple[int, ...]]]:
    """Return the kinds of heads with their layers, also that of the layer of `model.mtp`."""
    further = [] if model.mtp is None else [*model.mtp_model.head_kinds.items()]
    return [*model.head_kinds.items(), *further]


def _list_memory_transfers(train_spec: TrainSpec) -> Iterator[Transfer]:
    """Yield what devices that share sequences send in layers of linear attention: the last tokens that filters take,
    and the memory of the delta rule, float32 (models/linear_attention.py)."""
    model, layout, mesh = train_spec.cfg.model, train_spec.layout, train_spec.mesh
    pipeline = train_spec.choices.pipeline
    if (linear := model.linear_attention) is None:
        return
    num_microbatches, rows, tokens = train_spec.batch

    def count_numbers(dim_names: str, length: int = 1) -> int:
        sizes = model.dims | {"B": rows, TOKENS: length * token_shards(mesh.shape)}
        return count_local_numbers(sizes, dim_names, layout, mesh)

    local_tokens, earlier = tokens // token_shards(mesh.shape), linear.filter_size - 1
    hops, rounds = -(-earlier // local_tokens), count_rounds(token_shards(mesh.shape))
    filtered = 2 * count_numbers("BTIE", min(earlier, local_tokens)) + count_numbers("BTJM", min(earlier, local_tokens))
    state, transition = count_numbers("BJEM"), count_numbers("BJE") * linear.key_dim
    num_bytes = hops * filtered * jnp.dtype(layout.compute).itemsize
    num_bytes += 4 * ((rounds + 1) * state + max(0, rounds - 1) * transition)  # the last round needs no transition
    count = 3 * hops + rounds + 1 + max(0, rounds - 1)
    layers = num_microbatches * model.num_linear_layers * pipeline.iterations_per_microbatch
    times = layers * (2 + train_spec.choices.remat.recompute_fraction("exchange") + pipeline.recompute_runs)
    kind, total = "collective-permute", round(times * num_bytes)
    yield Transfer(kind, token_axes(), total, overlaps=0.0, count=max(1, round(times * count)))


class LocalHeads(NamedTuple):
    """Sizes of attention's arrays on one device, for one microbatch, before an exchange."""

    rows: int
    queries: int  # query heads
    keys: int  # key/value heads
    numbers: int  # in one head: rows x own tokens x head dim
    num_devices: int  # that share a sequence
    itemsize: int  # bytes of a number in products


def measure_heads(model: Model, kind: HeadSizes, choices: Choices, mesh: AnyMesh) -> LocalHeads:
    """Return the sizes on one device of heads of a kind (`Model.head_kinds`)."""
    layout, (_, rows, tokens) = choices.layout, choices.shape
    shape = rows, tokens, model.num_heads, kind.dim
    local_rows, local_tokens, queries, head_dim = find_shard_shape(shape, layout.activation("BTNH"), mesh)
    dim_name = kind.dim_names[0]
    [kv_heads] = find_shard_shape((kind.num_kv_heads,), layout.activation(dim_name), mesh)
    keys = layout.num_local_kv_heads(kv_heads, dim_name)
    numbers, itemsize = local_rows * local_tokens * head_dim, jnp.dtype(layout.compute).itemsize
    return LocalHeads(local_rows, queries, keys, numbers, token_shards(mesh.shape), itemsize)


def swap_heads(remat: Remat, heads: LocalHeads, recompute_runs: bool) -> Transfer:
    """Return the transfers of a layer whose devices swap queries, keys, values and results: heads for tokens.

    `recompute_runs` is true where the backward pass runs a whole stage once more.
    """
    keys = heads.keys * count_repeats(heads.keys, heads.num_devices)
    # Forward, once more where they are not kept, and backward the same in the other direction.
    times = 2 + remat.recompute_fraction("exchange") + recompute_runs
    num_bytes = round(times * 2 * (heads.queries + keys) * heads.numbers * heads.itemsize)
    return Transfer("all-to-all", token_axes(), num_bytes, overlaps=0.0, count=round(4 * times))


def hand_on_keys(remat: Remat, heads: LocalHeads, recompute_runs: bool) -> Transfer:
    """Return the transfers of a layer whose keys, values and their gradients go round a ring."""
    # Forward, once more where the results are not kept, and backward. The last two begin with the same transfer, which
    # XLA makes once. Gradients, float32, also go home.
    hops = (2 + recompute_runs) * (heads.num_devices - 1)
    hops += round(remat.recompute_fraction("attention") * (heads.num_devices - 2))
    num_bytes = 2 * heads.keys * heads.numbers * (hops * heads.itemsize + heads.num_devices * 4)
    return Transfer("collective-permute", token_axes(), num_bytes, count=2 * (hops + heads.num_devices))


def find_gathered_dtype(weight: Weight, layout: Layout) -> str:
    """Return the dtype in which a weight is gathered: codes and scales travel as they are."""
    return weight.dtype if weight.equation.is_quantized else layout.use_dtype(weight.equation)


def count_shard_bytes(weight: Weight, spec: PartitionSpec, dtype: str, mesh: AnyMesh) -> int:
    """Return the bytes that one device has of a weight laid out as `spec` in this dtype."""
    return math.prod(find_shard_shape(weight.shape, spec, mesh)) * jnp.dtype(dtype).itemsize


def find_shard_shape(shape: Sequence[int], spec: PartitionSpec, mesh: AnyMesh) -> tuple[int, ...]:
    """Return the shape of the part of an array that one device has."""
    return NamedSharding(mesh, PartitionSpec(*spec.partitions)).shard_shape(tuple(shape))


def count_local_numbers(sizes: Mapping[str, int], dim_names: str, layout: Layout, mesh: AnyMesh) -> int:
    """Return the numbers of an activation that one device has; `sizes` are those of the dimensions."""
    return math.prod(find_shard_shape([sizes[name] for name in dim_names], layout.activation(dim_names), mesh))


# Collectives of activations around products: sums over devices, and tokens that enter and leave branches.

ENTERED = "BTD"  # what the first products of a branch take, and the sums of its last product before they are scattered


# Of the exchanges of two parts that take turns in a layer (models/block.py), the share that hides: the first one of an
# iteration of the loop over layers has nothing before it.
HIDDEN_BY_OTHER_PART = 0.8


class Exchange(NamedTuple):
    """Collectives of one kind on arrays of the same dimensions."""

    kind: str
    dim_names: str
    axes: tuple[str, ...]
    times: float  # in one microbatch


def _list_matmul_transfers(train_spec: TrainSpec) -> Iterator[Transfer]:
    """Yield the collectives of one step that bring activations to products and sum their results.

    A product `x,w->y` of a block runs forward, once more where `training.remat` computes it again, and transposed for
    the gradient of x.
    """
    cfg, layout, mesh, batch = train_spec.cfg, train_spec.layout, train_spec.mesh, train_spec.batch
    sizes = train_spec.dims | {"B": batch.num_rows, STREAM_TOKENS: batch.seq_len}
    if (vision := cfg.model.vision) is not None:  # of all images of a row, each of the largest size
        num_images = cfg.training.images_per_row
        sizes |= {"i": num_images * vision.num_patches, "g": num_images * vision.tokens_per_image}
    item = jnp.dtype(layout.compute).itemsize

    count_numbers = partial(count_local_numbers, sizes, layout=layout, mesh=mesh)

    def transfer(kind: str, axes: tuple[str, ...], num_bytes: float, times: float, overlaps: float = 0.0) -> Transfer:
        in_all = batch.num_microbatches * times  # a bubble of interleaved stages may be a half of a pass
        return Transfer(kind, axes, round(in_all * num_bytes), overlaps, count=max(1, round(in_all)))

    takes_turns = layout.count_parts(train_spec.choices.batch.sequences_per_shard) > 1
    hidden = HIDDEN_BY_OTHER_PART if takes_turns and not isinstance(cfg.model.mlp, ExpertsMlp) else 0.0
    for exchanges, overlaps in ((_list_in_blocks(train_spec), hidden), (_list_at_ends(train_spec), 0.0)):
        for kind, dim_names, axes, times in exchanges:
            if axes and times:
                yield transfer(kind, axes, count_numbers(dim_names) * item, times, overlaps)
    if isinstance(cfg.model.mlp, ExpertsMlp) and layout.stream_axes:  # numbers of a token's experts, and their weights
        choices = count_numbers("BT") * cfg.model.mlp.experts_per_token * 4
        for pipeline, number in list_passes(train_spec, _list_expert_layers(cfg.model)):
            layers = number * pipeline.iterations_per_microbatch
            entered = count_entries(pipeline) * layers
            yield transfer("all-gather", layout.stream_axes, choices, 2 * entered)
            yield transfer("reduce-scatter", layout.stream_axes, choices, layers)  # the gradient of the weights


def _list_in_blocks(train_spec: TrainSpec) -> Iterator[Exchange]:
    """Yield the exchanges around the products of blocks."""
    cfg, layout = train_spec.cfg, train_spec.layout
    remat, stream = train_spec.choices.remat, layout.stream_axes
    entered: dict[str, tuple[float, int]] = {}  # of each branch that tokens enter, by its name: layers, times of each
    around_experts: dict[tuple[str, str], list[Exchange]] = {}  # by stack, and by what the products take
    for path, weight in jax.tree.leaves_with_path(train_spec.arch.weights):
        equation = weight.equation.dequantized()
        if not equation.is_stacked or equation.is_vector or equation.is_scales:
            continue
        pipeline = find_passes(weight, train_spec)
        name, layers = parameter_name(path), weight.shape[0] * pipeline.iterations_per_microbatch
        recompute = remat.recompute_fraction(product_name(name))
        gives_stream = equation.y.endswith("D") and not equation.x.endswith("D")
        if ".mlp." in name and gives_stream and cfg.model.norm_placement == "pre":
            recompute = 0.0  # nothing behind the last product needs its result again
        forward = (1 + recompute + pipeline.recompute_runs) * layers
        is_update = "r" in equation.w  # of low rank: it takes what the product beside it takes
        if EXPERTS in equation.w:
            # Sums of experts' products are summed over devices once for each token: not once for each expert, and not
            # apart for the two products that take it.
            if is_update:  # a factor that devices with parts of an expert all have: each has a part of its gradient
                axes = () if "G" in equation.w else DIMS["G"].activation_axes
                yield Exchange("all-reduce", equation.w[1:], axes, layers)
            else:
                around = _list_around_expert(layout, equation, forward, layers, count_entries(pipeline) * layers)
                around_experts[path[0].key, equation.x] = [*around]
        elif stream and equation.leaves_branch:
            axes, summed = layout.product_axes(equation), equation.y.replace(STREAM_TOKENS, TOKENS)
            yield Exchange("reduce-scatter", summed, axes, forward)
            yield Exchange("all-gather", summed, axes, layers)  # of its gradient
            yield Exchange("all-reduce", equation.x, layout.product_axes(equation.transposed()), layers)
        else:
            yield Exchange("all-reduce", equation.y, layout.product_axes(equation), forward)
            if stream and equation.x == ENTERED and not is_update:
                entered[name.rsplit(".", 2)[0]] = layers, count_entries(pipeline)
            else:
                yield Exchange("all-reduce", equation.x, layout.product_axes(equation.transposed()), layers)
    for exchanges in around_experts.values():
        yield from exchanges
    for kind, numbers in _list_head_kinds(cfg.model):
        if kind.dim_names[0] in layout.unsplit:
            # Every device has all keys and values, and their gradients of its own queries alone.
            for pipeline, number in list_passes(train_spec, numbers):
                times = 2 * number * pipeline.iterations_per_microbatch
                yield Exchange("all-reduce", f"BT{kind.dim_names}", DIMS["N"].activation_axes, times)
    for layers, times in entered.values():
        yield Exchange("all-gather", ENTERED, stream, times * layers)
        yield Exchange("reduce-scatter", ENTERED, stream, layers)


def count_entries(pipeline: PipelineShape) -> int:
    """Return how often a step brings tokens to a branch of a layer, or to its experts: no policy keeps them there."""
    return 2 + pipeline.recompute_runs


def _list_around_expert(
    layout: Layout, equation: Equation, forward: float, layers: float, entered: float
) -> Iterator[Exchange]:
    """Yield the exchanges around a product of experts, which runs forward `forward` times in all its `layers`.

    Where devices split the stream, their tokens come to it `entered` times.
    """
    gives, takes = layout.product_axes(equation), layout.product_axes(equation.transposed())
    if not layout.stream_axes:
        yield Exchange("all-reduce", ENTERED, gives, forward)
        yield Exchange("all-reduce", ENTERED, takes, layers)
    elif gives:
        yield Exchange("reduce-scatter", ENTERED, gives, forward)
        yield Exchange("all-gather", ENTERED, gives, layers)
    else:
        yield Exchange("all-gather", ENTERED, takes, entered)
        yield Exchange("reduce-scatter", ENTERED, takes, layers)


def _list_at_ends(train_spec: TrainSpec) -> Iterator[Exchange]:
    """Yield the exchanges of embedding and head.

    A vocabulary that is split is summed over in the lookup of tokens, and in the gradient of the logits' product.
    """
    table: Weight = train_spec.arch.weights["embedding"]["table"]
    times = 2 if train_spec.cfg.model.mtp is None else 4  # the layer of `model.mtp` looks tokens up, and has logits
    sums = times if train_spec.cfg.has_logits else 1
    yield Exchange("all-reduce", ENTERED, train_spec.layout.product_axes(table.equation.transposed()), sums)
    if (inputs := train_spec.arch.weights.get("layer_inputs")) is not None:  # a lookup in a table of its own
        yield Exchange("all-reduce", "BTlp", train_spec.layout.product_axes(inputs["table"].equation), 1)
    # What the head takes, and the gradient of what the lookup gives: the stream begins and ends between them. A frozen
    # table needs no gradient.
    gathers = times if train_spec.arch.is_trained["embedding"]["table"] else times // 2
    yield Exchange("all-gather", ENTERED, train_spec.layout.stream_axes, gathers)


def _list_expert_layers(model: Model) -> list[int]:
    """Return the layers with experts; the layer of `model.mtp` stands behind the last one."""
    return [*model.expert_layers, *([] if model.mtp is None else [model.num_layers])]


NUMBER = 4  # bytes of the number of an expert, of a share and of a count


class ExpertTokens(NamedTuple):
    """Sizes and counts of an exchange of experts in one step."""

    mlp: ExpertsMlp
    axes: tuple[str, ...]  # that split the experts
    num_devices: int  # along them
    num_tokens: int  # of one device in a microbatch
    row: int  # bytes of a token in products
    capacity: float | None  # of `count_rows`
    layers: float  # layers with experts x microbatches, with those of the bubble of a pipeline
    runs: float  # passes of a layer in which tokens come to experts: one, and those that the backward pass needs again
    hidden: float  # share of the time in which another part of the batch computes
    results: float  # forward passes of which the results come back: nothing but a norm behind them needs them again


def _list_expert_transfers(train_spec: TrainSpec) -> Iterator[Transfer]:
    """Yield the collectives of one step that bring tokens to experts of other devices, and results back."""
    cfg, layout, mesh, batch = train_spec.cfg, train_spec.layout, train_spec.mesh, train_spec.batch
    axes, mlp = layout.expert_axes, cfg.model.mlp
    num_devices = count_devices(mesh.shape, axes)
    if num_devices == 1 or not isinstance(mlp, ExpertsMlp):
        return
    num_rows, length = find_shard_shape((batch.num_rows, batch.seq_len), layout.activation("BT"), mesh)
    remat = train_spec.choices.remat
    needs_results = remat.recompute_fraction("product") * (cfg.model.norm_placement != "pre")
    for pipeline, number in list_passes(train_spec, _list_expert_layers(cfg.model)):
        exchanged = ExpertTokens(
            mlp,
            axes,
            num_devices,
            num_rows * length,
            row=cfg.model.embed_dim * jnp.dtype(layout.compute).itemsize,
            capacity=cfg.model.expert_buffer_factor,
            layers=number * batch.num_microbatches * pipeline.iterations_per_microbatch,
            # The exchange of one of two parts hides behind the other part; nothing is left to hide the last one.
            hidden=1 - 1 / layout.count_parts(num_rows),
            runs=count_entries(pipeline),
            results=1 + pipeline.recompute_runs + needs_results,
        )
        yield from import_object(EXPERT_EXCHANGES[layout.expert_exchange].transfers)(exchanged)


def gather_tokens(each: ExpertTokens) -> Iterator[Transfer]:
    """Yield gathers of tokens, experts and shares, reduce-scatters of sums, and the opposite for gradients.

    An example: tokens of 2,048 bytes (`row`) with 2 experts each; their numbers are 8 bytes (`choices`), and so are
    their shares. Where the backward pass needs nothing again, one layer moves for each token

        all-gather       8 + 8, 2,048    forward: the numbers of its experts with their shares, and the token
                         2,048           backward: the gradient of its sum
        reduce-scatter   2,048           forward: the sum of its experts' results
                         2,048 + 8       backward: the gradients of the token and of its shares
    """
    local = each.num_tokens * each.num_devices  # tokens of a group
    choices = each.mlp.experts_per_token * NUMBER
    gathers = each.runs * (each.row + 2 * choices) + each.row
    count = round(each.layers * (2 * each.runs + 1))
    yield Transfer("all-gather", each.axes, round(each.layers * local * gathers), overlaps=each.hidden, count=count)
    num_bytes = round(each.layers * local * ((each.results + 1) * each.row + choices))
    count = round(each.layers * (each.results + 2))
    yield Transfer("reduce-scatter", each.axes, num_bytes, overlaps=each.hidden, count=count)


def send_rows(each: ExpertTokens) -> Iterator[Transfer]:
    """Yield counts that all devices gather, rows and their shares there, results back, and the same for gradients.

    A row is a token on its way to one expert: a token with 2 experts sends 2 rows. Before rows travel, each device
    tells all others how many rows it has for each expert.

        forward    counts to all   rows and shares to the experts   results back
        backward                   gradients of results there       gradients of rows and shares back
    """
    num_experts, per_token = each.mlp.num_experts, each.mlp.experts_per_token
    counts = each.num_devices * num_experts * NUMBER
    times = each.layers * each.runs
    yield Transfer("all-gather", each.axes, round(times * counts), overlaps=0.0, count=round(times))
    num_local = num_experts // each.num_devices
    capacity = count_rows(each.num_tokens, per_token, each.num_devices, num_local, each.capacity)
    num_rows = min(each.num_tokens * per_token, capacity)
    num_sends = each.runs + 1
    factor = 0.0 if each.mlp.weighted == "inputs" else num_sends
    num_bytes = round(each.layers * num_rows * ((num_sends + each.results + 1) * each.row + factor * NUMBER))
    count = round(each.layers * (num_sends + each.results + 1 + factor))
    yield Transfer("ragged-all-to-all", each.axes, num_bytes, overlaps=each.hidden, count=count)
