"""Bytes, collectives and FLOPs of a training step, derived from config and mesh; no device and no compile is needed."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from tunix.config import Config
from tunix.config.exchange_tables import EXPERT_EXCHANGES
from tunix.config.mlp import ExpertsMlp
from tunix.costs.expert_transfers import list_expert_transfers
from tunix.costs.matmul_dtypes import matmul_share
from tunix.costs.product_transfers import list_product_transfers
from tunix.costs.transfers import (
    Transfer,
    gathered_dtype,
    list_transfers,
    part_rows,
    shard_bytes,
    shard_shape,
)
from tunix.models.attention import QUERY_BLOCK
from tunix.models.delta_rule import CHUNK
from tunix.models.exchanges import choose_exchange, is_in_blocks
from tunix.models.expert_exchanges import buffer_rows_per_token, choose_expert_exchange
from tunix.models.flops import chunk_flops_per_token, flops_per_token, forward_flops_per_token
from tunix.models.kernels import choose_kernel
from tunix.models.paths import parameter_name
from tunix.models.remat import Remat, product_name
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.dims import STREAM_TOKENS, axis_names, data_axes
from tunix.sharding.layout import Layout
from tunix.sharding.mesh_shape import count_devices, token_shards
from tunix.training.chunks import chunk_positions
from tunix.training.overlap import choose_overlap
from tunix.training.program import Program, abstract_batch, assemble, choose_sync, read_remat, settle_remat
from tunix.training.state import Weight, abstract_params, describe

MARKS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)  # primes
# Keys of the section training that say how many sequences there are.
BATCH_KEYS = {
    "micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "global_batch_tokens", "batch_stages",
    "pipeline_microbatches", "pipeline_schedule", "pipeline_chunks",
}  # fmt: skip
QUEUES = 3  # of the rows of a microbatch: what enters the stages, what leaves them, and one of their gradients
LONG = 2048  # tokens of a sequence on one device, of which all are traced
ONE_SEQUENCE = {"micro_batch_size": 1, "pipeline_microbatches": "auto", "batch_stages": ()}


@dataclass(frozen=True)
class Costs:
    """Costs of one optimizer step on one device."""

    num_bytes: dict[str, int]  # held at one time, by what it is
    transfers: list[Transfer]
    model_flops: float  # what MFU counts
    flops: float  # with what rematerialization computes again
    tokens_per_step: int  # of the whole mesh
    matmul_share: float = 0.0  # of the FLOPs: products of `training.matmul_dtype`

    @property
    def memory(self) -> int:
        return sum(self.num_bytes.values())


def derive(cfg: Config, sizes: dict[str, int], platform: str | None = None, with_activations: bool = True) -> Costs:
    """Return the costs of a step of `cfg` on a mesh of these sizes, which must divide model and batch.

    `platform` is that of the devices, by which `training.remat`, `training.overlap` and `model.expert_exchange`
    choose. Activations are traced, which takes most of the time. Without them, everything else is the same.
    """
    # The program of one sequence per shard has the costs of any micro batch in it.
    cfg = settle_remat(cfg, platform)
    program, mesh = assemble_once(cfg, sizes)
    exchange = choose_expert_exchange(cfg.model, sizes, platform).name
    layout = replace(program.layout, expert_exchange=exchange)
    sync_every = choose_sync(cfg.training, mesh)
    overlap = choose_overlap(cfg.training, layout, mesh, sync_every, platform, cfg.model)
    program = replace(program, overlap=overlap, layout=layout)
    with jax.sharding.use_abstract_mesh(mesh):
        return costs_of(cfg, program, mesh, with_activations)


def costs_of(cfg: Config, program: Program, mesh: Mesh | AbstractMesh, with_activations: bool = True) -> Costs:
    """Return the costs of a step of an assembled program on the mesh in use."""
    training, batch = cfg.training, cfg.training.batch_shape(mesh.shape)
    microbatches = batch.num_microbatches
    # `program` may be that of another micro batch.
    program = replace(program, cfg=cfg, sync_every=choose_sync(training, mesh))
    arch, share = program.arch, batch.num_tokens / mesh.size
    flops = flops_per_token(cfg.model, arch.num_active, arch.num_active_trained, training.seq_len) * share
    forward_flops = forward_flops_per_token(cfg.model, arch.num_active, training.seq_len) * share
    again = _share_again(program)
    by_chunks = chunk_flops_per_token(cfg.model, training.seq_len) * share
    all_flops = flops + again * forward_flops + (3 + again) * by_chunks
    activations = _activation_bytes(cfg, program, mesh) if with_activations else 0
    lists = list_transfers, list_product_transfers, list_expert_transfers
    return Costs(
        _state_bytes(program, mesh, microbatches) | {"activations": activations},
        [transfer for each in lists for transfer in each(program, mesh, microbatches)],
        flops,
        all_flops + _pipeline_flops(cfg, mesh, all_flops, forward_flops, share),
        batch.num_tokens,
        matmul_share(cfg, arch, training.seq_len),
    )


def _share_again(program: Program) -> float:
    """Return the share of the blocks' products that the backward pass computes again; the logits are not in blocks."""
    remat, again, in_all = read_remat(program.cfg.training), 0.0, 0
    for path, weight in jax.tree.leaves_with_path(program.arch.weights):
        if weight.equation.is_stacked and not weight.equation.is_vector:
            size = round(weight.size * weight.used)
            again += size * remat.computes_again(product_name(parameter_name(path)))
            in_all += size
    return again / in_all


def _pipeline_flops(
    cfg: Config, mesh: Mesh | AbstractMesh, flops: float, forward_flops: float, num_tokens: float
) -> float:
    """Return the FLOPs that stages add on one device: the bubble, and the forward pass of the stages once more.

    `flops` are those without stages, of `num_tokens` tokens. The logits are outside of the stages.
    """
    pipeline = cfg.training.pipeline(mesh.shape)
    logits = 2.0 * cfg.model.vocab_size * cfg.model.embed_dim * num_tokens  # forward; three times in all
    again = pipeline.runs_again * (forward_flops - logits)
    in_blocks = flops - 3 * logits + again
    return again + in_blocks * (pipeline.ticks_per_part - 1)


def assemble_once(cfg: Config, sizes: dict[str, int]) -> tuple[Program, AbstractMesh]:
    """Return the program of one sequence per shard, and its mesh; the newest ones are kept."""
    smallest = cfg.model_copy(update={"training": cfg.training.model_copy(update=ONE_SEQUENCE)})
    return _program(smallest.model_dump_json(by_alias=True), tuple(sizes[axis] for axis in axis_names()))


@lru_cache(maxsize=8)  # as many as there are policies that training.remat=budget compares, and a few more
def _program(config: str, sizes: tuple[int, ...]) -> tuple[Program, AbstractMesh]:
    mesh = AbstractMesh(sizes, axis_names(), axis_types=(AxisType.Explicit,) * len(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        return assemble(Config.model_validate_json(config), mesh), mesh  # type: ignore[arg-type]


def _state_bytes(program: Program, mesh: Mesh | AbstractMesh, num_microbatches: int) -> dict[str, int]:
    """Bytes of one device for weights, optimizer, gradients and gathered weights.

    Gathered in blocks, weights of the block at work and of the next exist at a time, and gradients of blocks are summed
    at once. Gathered for the step, all exist, and a whole gradient that only this data shard has computed.
    """
    layout, arch, sync_every = program.layout, program.arch, program.sync_every
    in_blocks, weights = layout.gathers_in_blocks(sync_every), jax.tree.leaves(arch.weights)
    # XLA transposes tables too; a trained one's copy is gone before its own part of the gradient is there.
    weights += [weight for weight in jax.tree.leaves(arch.frozen(arch.weights)) if not weight.equation.is_stacked]
    pipeline = program.cfg.training.pipeline(mesh.shape)
    gathered = float(_gathered_blocks(program, mesh)) if in_blocks else 0.0
    for weight in weights:
        is_in_blocks = in_blocks and weight.equation.is_stacked
        if not is_in_blocks:
            gathered += _gathered_bytes(weight, layout, mesh)
        if is_in_blocks and pipeline.num_chunks > 1:  # dealt out to the stages, and the chunk at work
            copies = 1 + 1 / pipeline.num_chunks
            gathered += copies * shard_bytes(weight, layout.at_rest(weight.equation, True), weight.dtype, mesh)
    unreduced, reduced = 0, 0  # gradients before and after their sum over devices
    for weight in jax.tree.leaves(arch.trained_weights):
        equation = weight.equation
        reduced += shard_bytes(weight, layout.at_rest(equation, layout.strategy.gradients), "float32", mesh)
        if not (in_blocks and equation.is_stacked):
            unreduced += shard_bytes(weight, layout.in_use(equation), "float32", mesh)
        elif program.overlap.prefetch:  # of the block whose gradients are summed while another is at work
            own_part = shard_bytes(weight, layout.in_use(equation), layout.compute, mesh)
            unreduced += own_part * pipeline.num_stages // weight.shape[0]
        if not (equation.is_stacked or equation.is_vector):  # the loss adds the table's up, and then rounds the sum
            unreduced += shard_bytes(weight, layout.in_use(equation), layout.compute, mesh)
    accumulated = 0  # beside the sum of all microbatches, the gradients of one
    if not pipeline.is_stream and num_microbatches > 1 and (in_blocks or sync_every > 1):
        accumulated = reduced if in_blocks else unreduced * jnp.dtype(layout.compute).itemsize // 4
    elif in_blocks and jnp.dtype(layout.param).itemsize < 4:  # gradients of blocks have the dtype of their weights
        accumulated = reduced * jnp.dtype(layout.param).itemsize // 4
    if pipeline.num_stages > 1:  # autodiff adds up the gradients of the ticks before the microbatch has them
        accumulated += reduced if in_blocks else unreduced * jnp.dtype(layout.compute).itemsize // 4
    return {
        "weights": bytes_per_device(program.abstract["params"]),
        "optimizer": bytes_per_device([program.abstract["opt_state"], program.abstract.get("copies", {})]),
        "gradients": unreduced + reduced + accumulated,
        "gathered": round(gathered),
    }


def _gathered_blocks(program: Program, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of the gathered weights of the block at work and of the next, where blocks gather their own weights.

    Blocks that gather ahead have all blocks of a turn and of the next one, where stacks take turns.
    """
    model, stages = program.cfg.model, program.cfg.training.pipeline(mesh.shape).num_stages
    of_block = {}
    for name in model.stacks:
        weights = jax.tree.leaves(program.arch.weights[name])
        of_block[name] = stages * sum(_gathered_bytes(each, program.layout, mesh) / each.shape[0] for each in weights)
    most = 0.0
    for run in model.runs:
        blocks = [of_block[name] for name in run.pattern]
        neighbours = max(block + following for block, following in zip(blocks, [*blocks[1:], blocks[0]], strict=True))
        most = max(most, 2 * sum(blocks) if program.overlap.prefetch else neighbours)
    return round(most)


def _activation_bytes(cfg: Config, program: Program, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of activations: what the forward pass keeps of each sequence, and one layer's inside or a chunk's logits.

    The second part is an estimate. On stages the forward pass keeps of each tick the rows that a stage takes; a part of
    the batch at a time has in one stage what it has without stages.
    """
    training = cfg.training
    inside = inside_bytes(cfg, program.layout, mesh, training.seq_len)
    own_tokens = shard_shape((training.seq_len,), program.layout.activation("T"), mesh)[0]
    positions = chunk_positions(training.loss_chunk_size, training.sequences_per_shard, own_tokens)
    words = shard_shape((cfg.model.vocab_size,), program.layout.activation("V"), mesh)[0]
    logits = 1.75 * positions * words * 4  # float32, and part of their gradient
    residual, pipeline = _residual_bytes(program, mesh), training.pipeline(mesh.shape)
    if pipeline.num_stages == 1:
        return round(training.sequences_per_shard * (residual + max(inside, logits)))
    stream = _stream_bytes(cfg, program.layout, mesh)
    row = stream + 4 * (own_tokens + training.seq_len)  # with its positions and segments
    of_stage = part_rows(cfg, mesh) * (residual / (pipeline.num_stages * pipeline.num_chunks) + inside)
    if pipeline.is_stream:
        positions = chunk_positions(training.loss_chunk_size, part_rows(cfg, mesh), own_tokens // pipeline.num_stages)
        of_loss = part_rows(cfg, mesh) * 1.75 * positions * words * 4
        kept = 2 * pipeline.num_stages * pipeline.num_chunks + QUEUES
        return round(kept * part_rows(cfg, mesh) * row + max(of_stage, of_loss))
    of_ticks = part_rows(cfg, mesh) * (pipeline.num_ticks // pipeline.num_microbatches) * row
    of_batch = training.sequences_per_shard * (QUEUES * row + logits)
    return round(of_ticks + max(of_stage, of_batch))


def inside_bytes(cfg: Config, layout: Layout, mesh: Mesh | AbstractMesh, length: int) -> int:
    """Bytes inside of one layer on one device, for a sequence of `length` tokens. An estimate."""
    model, item = cfg.model, jnp.dtype(layout.compute).itemsize
    local = {letter: shard_shape((size,), layout.activation(letter), mesh)[0] for letter, size in model.dims.items()}
    tokens = shard_shape((length,), layout.activation("T"), mesh)[0]
    heads, kinds = local["N"], model.kinds_of_heads
    # Numbers of queries and keys of a token; of key/value heads that every device keeps, it uses one.
    of_heads = max((heads + min(local[each.letters[0]], heads)) * each.dim for each in kinds)
    mlp = (2 if model.mlp.kind == "plain" else 3) * max(local["F"], local.get("f", 0))
    if isinstance(model.mlp, ExpertsMlp):
        # Rows for which the exchange has room, for each token of this device.
        num_rows = buffer_rows_per_token(model, count_devices(mesh.shape, layout.expert_axes), layout.expert_exchange)
        of_experts = num_rows * (3 * local["G"] + 2 * local["D"]) + 3 * local.get("U", 0)
        if EXPERT_EXCHANGES[layout.expert_exchange].has_buffer:  # sent, and returned
            of_experts += 2 * model.mlp.experts_per_token * local["D"]
        if model.mlp.beside_mlp:
            mlp = round(of_experts) + mlp
        else:
            mlp = max(round(of_experts), mlp if "dense_blocks" in model.stacks else 0)
    of_linear = 0
    if model.linear_attention is not None:
        linear = model.linear_attention
        chunk = min(CHUNK, length)
        of_values = 3 * linear.value_dim + 2 * linear.key_dim + 4 * chunk + linear.key_dim * linear.value_dim / chunk
        numbers = 2 * local["I"] * linear.key_dim + local["J"] * of_values  # of a token, float32
        of_linear = round(2 * tokens * (item * (6 * local["D"] + mlp) + 4 * numbers))
    copies = 2 if token_shards(mesh.shape) == 1 else 4  # of queries, keys, values and results: exchanged ones are more
    inside = 2 * tokens * item * (6 * local["D"] + copies * of_heads + mlp)
    # Also where a mesh has no devices. Devices that share a sequence split its scores, by heads or by keys.
    kernels = {choose_kernel(model.attention, each.dim, layout.compute, model.attention_options).name for each in kinds}
    if is_in_blocks(choose_exchange(model, mesh.shape).name) or "xla" in kernels:
        inside += heads * min(length, QUERY_BLOCK) * tokens * (4 + item)
    return max(inside, of_linear)


_known_residual_bytes: dict[tuple[str | int, ...], int] = {}  # a plan asks for one model on many meshes


def _residual_bytes(program: Program, mesh: Mesh | AbstractMesh) -> int:
    """Bytes that `training.remat` keeps of a sequence for the backward pass, on one device, as JAX traces it.

    On stages, those of the same program without stages, whose axis then splits the batch alone.
    """
    cfg = program.cfg
    config = cfg.model.model_dump_json(exclude={"mesh_shape"}), cfg.training.model_dump_json(exclude=BATCH_KEYS)
    # Each data shard has its own sequences, so the axes that split the batch change nothing of one sequence.
    others = (size for axis, size in mesh.shape.items() if axis not in data_axes())
    key = (*config, program.layout.expert_exchange, *others)
    if key in _known_residual_bytes:
        return _known_residual_bytes[key]
    # cuDNN's kernel cannot be traced without cuDNN; it keeps what the plain one keeps of long sequences.
    plain = cfg.model.model_copy(update={"attention": "xla"})
    layout = program.layout.with_all_layers()
    remat = read_remat(cfg.training)
    arch = describe(plain, layout, remat._replace(on_host=False))
    if remat.on_host:  # what is kept waits in the host's memory, what blocks take too: the rest is outside of blocks
        arch = describe(plain, layout, Remat("full"))

    def residuals(params, batch):
        rows, seed = {name: leaf[0] for name, leaf in batch.items()}, jnp.zeros((), jnp.int32)

        def objective(trained):
            return program.loss_fn(arch.module(arch.merge(trained, params)), rows, seed).objective

        return jax.vjp(objective, arch.trained(params))[1]

    # Some residuals are weights. To tell those of the sequences apart, the number of sequences is a prime that divides
    # no other size: it divides a size of each array that grows with the sequences, and of no other array.
    prime = next(prime for prime in MARKS if all(size % prime for size in cfg.dims.values() if size))
    # What is kept of a sequence grows with its tokens. The plain attention is a piece of program for each block of
    # queries, so a long sequence takes long to trace: a part of it is traced, and counted several times.
    times, length = 1, cfg.training.seq_len
    shards = length // shard_shape((length,), layout.activation(STREAM_TOKENS), mesh)[0]
    while length % (2 * times * shards) == 0 and length // (2 * times) >= LONG * token_shards(mesh.shape):
        times *= 2
    values = {
        "micro_batch_size": prime, "global_batch_size": None, "global_batch_tokens": None, "batch_stages": (),
        "seq_len": length // times,
    }  # fmt: skip
    marked = cfg.model_copy(update={"training": cfg.training.model_copy(update=values)})
    batch = abstract_batch(marked, mesh)  # type: ignore[arg-type]
    leaves = jax.tree.leaves(jax.eval_shape(residuals, abstract_params(arch, mesh, layout), batch))
    grown = [leaf for leaf in leaves if any(size % prime == 0 for size in leaf.shape)]
    num_bytes = times * bytes_per_device(grown) // prime
    if remat.on_host:
        num_bytes -= cfg.model.num_layers * _stream_bytes(cfg, layout, mesh)
    _known_residual_bytes[key] = num_bytes
    return _known_residual_bytes[key]


def _stream_bytes(cfg: Config, layout: Layout, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of the residual stream of one sequence on one device."""
    own_tokens = shard_shape((cfg.training.seq_len,), layout.activation(STREAM_TOKENS), mesh)[0]
    return own_tokens * cfg.model.embed_dim * jnp.dtype(layout.compute).itemsize


def _gathered_bytes(weight: Weight, layout: Layout, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of a gathered weight, and for codes those of the matrix made of them."""
    spec = layout.in_use(weight.equation)
    size = shard_bytes(weight, spec, gathered_dtype(weight, layout), mesh)
    if weight.equation.is_quantized:
        weights_per_code = weight.size / math.prod(weight.shape)
        size += round(weights_per_code * shard_bytes(weight, spec, layout.compute, mesh))
    return size
