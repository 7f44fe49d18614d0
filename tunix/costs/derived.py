"""Bytes, collectives and FLOPs of a training step, derived from config and mesh; no device and no compile is needed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tunix.config import Config, DeviceKind
from tunix.models.attention import QUERY_BLOCK
from tunix.models.flops import flops_per_token, forward_flops_per_token
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.dims import Equation, axis_names, data_axes
from tunix.sharding.layout import Layout
from tunix.sharding.mesh_shape import data_shards
from tunix.training.program import Program, abstract_batch, assemble
from tunix.training.state import Weight, describe

RECOMPUTED = {"none": 0, "dots": 0, "attention": 1, "full": 1}  # forward passes, by training.remat
# Keys of the section training.
BATCH_KEYS = {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "global_batch_tokens"}
TRAVERSALS = {  # of a ring (Patarasuk and Yuan 2009)
    "all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "collective-permute": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """All collectives of one kind and purpose in one step, over some mesh axes."""

    kind: str  # of TRAVERSALS
    axes: tuple[str, ...]
    num_bytes: int  # in one step: of the whole arrays that a group gathers, reduces or scatters
    overlaps: bool = True  # arithmetic goes on meanwhile; false where the next product waits for the result


@dataclass(frozen=True)
class Costs:
    """Costs of one optimizer step on one device."""

    num_bytes: dict[str, int]  # held at one time, by what it is
    transfers: list[Transfer]
    model_flops: float  # what MFU counts
    flops: float  # with what rematerialization computes again
    tokens_per_step: int  # of the whole mesh

    @property
    def memory(self) -> int:
        return sum(self.num_bytes.values())


def derive(cfg: Config, sizes: dict[str, int]) -> Costs:
    """Return the costs of a step of `cfg` on a mesh of these sizes, which must divide model and batch."""
    # The program of one sequence per shard serves for all micro batches.
    alike = cfg.model_copy(update={"training": cfg.training.model_copy(update={"micro_batch_size": 1})})
    program, mesh = _program(alike.model_dump_json(by_alias=True), tuple(sizes[axis] for axis in axis_names()))
    with jax.sharding.use_abstract_mesh(mesh):
        return costs_of(cfg, program, mesh)


def costs_of(cfg: Config, program: Program, mesh: Mesh | AbstractMesh) -> Costs:
    """Return the costs of a step of an assembled program on the mesh in use."""
    training, shards = cfg.training, data_shards(mesh.shape)
    microbatches = training.accumulation(shards)
    tokens = microbatches * training.sequences_per_shard * shards * training.seq_len
    arch, share = program.arch, tokens / mesh.size
    flops = flops_per_token(cfg.model, arch.num_parameters, arch.num_trained, training.seq_len) * share
    again = forward_flops_per_token(cfg.model, arch.num_parameters, training.seq_len) * share
    return Costs(
        _held(program, mesh, microbatches) | {"activations": _activation_bytes(cfg, program, mesh)},
        [*_weight_transfers(program, mesh, microbatches), *_activation_transfers(program, mesh, microbatches)],
        flops,
        flops + RECOMPUTED[training.remat] * again,
        tokens,
    )


@lru_cache(maxsize=1)
def _program(config: str, sizes: tuple[int, ...]) -> tuple[Program, AbstractMesh]:
    mesh = AbstractMesh(sizes, axis_names(), axis_types=(AxisType.Explicit,) * len(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        return assemble(Config.model_validate_json(config), mesh), mesh  # type: ignore[arg-type]


def _held(program: Program, mesh: Mesh | AbstractMesh, microbatches: int) -> dict[str, int]:
    layout, arch, in_blocks = program.layout, program.arch, _gathers_in_blocks(program)
    trained, sharded = jax.tree.leaves(arch.trained_weights), layout.strategy.gradients
    # XLA transposes tables too; a trained one's copy is gone before its own part of the gradient is there.
    transposed = [weight for weight in jax.tree.leaves(arch.frozen(arch.weights)) if not weight.equation.is_stacked]
    gathered = [
        (weight, _gathered_bytes(weight, layout, mesh)) for weight in [*jax.tree.leaves(arch.weights), *transposed]
    ]
    # One block and the next are gathered at a time; the tables stay, and so does their gradient until it is summed.
    share = {True: 2 / program.cfg.model.num_layers if in_blocks else 1.0, False: 1.0}
    own_parts = [
        _bytes(weight, layout.in_use(weight.equation), "float32", mesh)
        for weight in trained
        if not (in_blocks and weight.equation.is_stacked)
    ]
    sums = [_bytes(weight, layout.at_rest(weight.equation, sharded), "float32", mesh) for weight in trained]
    accumulates = microbatches > 1 and (in_blocks or program.cfg.training.sync_gradients_every > 1)
    of_one = sum(sums) if in_blocks else sum(own_parts) * jnp.dtype(layout.compute).itemsize // 4
    return {
        "weights": bytes_per_device(program.abstract["params"]),
        "optimizer": bytes_per_device(program.abstract["opt_state"]),
        "gradients": sum(own_parts) + sum(sums) + (of_one if accumulates else 0),
        "gathered": round(sum(share[weight.equation.is_stacked] * size for weight, size in gathered)),
    }


def _activation_bytes(cfg: Config, program: Program, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of activations: what the forward pass keeps of each sequence, and one layer's inside or a chunk's logits.

    The second part is an estimate.
    """
    model, training = cfg.model, cfg.training
    item = jnp.dtype(training.dtypes["compute"]).itemsize
    local = {letter: _shard((size,), program.layout.activation(letter), mesh)[0] for letter, size in cfg.dims.items()}
    length, heads, head_dim = local["T"], local["N"], local["H"]
    keys = min(local["K"], heads)  # of heads that every device keeps, it uses one
    mlp = (3 if model.mlp.startswith("gated") else 2) * local["F"]
    inside = 2 * length * item * (6 * local["D"] + 2 * (heads + keys) * head_dim + mlp)
    if model.attention == "xla":
        inside += heads * min(length, QUERY_BLOCK) * length * (4 + item)
    positions = min(training.loss_chunk_size, length)
    logits = 1.75 * positions * local["V"] * 4  # float32, and part of their gradient
    return round(training.sequences_per_shard * (_kept_per_sequence(program, mesh) + max(inside, logits)))


_kept: dict[tuple[str | int, ...], int] = {}


def _kept_per_sequence(program: Program, mesh: Mesh | AbstractMesh) -> int:
    """Bytes that `training.remat` keeps of a sequence for the backward pass, on one device, as JAX traces it."""
    cfg = program.cfg
    config = cfg.model.model_dump_json(exclude={"mesh_shape"}), cfg.training.model_dump_json(exclude=BATCH_KEYS)
    # Each data shard has its own sequences, so the axes that split the batch change nothing of one sequence.
    key = (*config, *(size for axis, size in mesh.shape.items() if axis not in data_axes()))
    if key in _kept:
        return _kept[key]
    # cuDNN's kernel cannot be traced without cuDNN; it keeps what the plain one keeps of long sequences.
    plain = cfg.model.model_copy(update={"attention": "xla"})
    arch = describe(plain, program.layout, cfg.training.remat)

    def kept(params, batch):
        rows = {name: leaf[0] for name, leaf in batch.items()} | {"noise": jnp.zeros((), jnp.int32)}
        trained = arch.trained(params)
        return jax.vjp(lambda trained: program.loss_fn(arch.module(arch.merge(trained, params)), rows)[0], trained)[1]

    def num_bytes(sequences: int) -> int:
        values = {"micro_batch_size": sequences, "global_batch_size": None, "global_batch_tokens": None}
        alike = cfg.model_copy(update={"training": cfg.training.model_copy(update=values)})
        batch = abstract_batch(alike, mesh)  # type: ignore[arg-type]
        return bytes_per_device(jax.eval_shape(kept, program.abstract["params"], batch))

    _kept[key] = num_bytes(2) - num_bytes(1)  # weights are the same in both
    return _kept[key]


def _weight_transfers(program: Program, mesh: Mesh | AbstractMesh, microbatches: int) -> Iterator[Transfer]:
    """Weights gathered before they are used, and their gradients reduced after."""
    layout, strategy = program.layout, program.layout.strategy
    reductions = microbatches // program.cfg.training.sync_gradients_every
    is_trained = jax.tree.leaves(program.arch.is_trained)
    for weight, trained in zip(jax.tree.leaves(program.arch.weights), is_trained, strict=True):
        equation = weight.equation
        in_use, gathered_over = layout.in_use(equation), layout.gather_axes(equation)
        if gathered_over and strategy.params:
            times = 2 * microbatches if _gathers_in_blocks(program) and equation.is_stacked else 1
            size = _bytes(weight, in_use, _use_dtype(weight, layout), mesh)
            yield Transfer("all-gather", gathered_over, times * size)
        elif gathered_over and strategy.optimizer and trained:  # the updated weights
            yield Transfer("all-gather", gathered_over, _bytes(weight, in_use, layout.param, mesh))
        if not trained:
            continue
        size = reductions * _bytes(weight, in_use, layout.reduce, mesh)
        summed_over = layout.gradient_axes(equation)
        if gathered_over and strategy.gradients:
            yield Transfer("reduce-scatter", gathered_over, size)
            size //= math.prod(mesh.shape[axis] for axis in gathered_over)
            summed_over = tuple(axis for axis in summed_over if axis not in gathered_over)
        yield Transfer("all-reduce", summed_over, size)


def _activation_transfers(program: Program, mesh: Mesh | AbstractMesh, microbatches: int) -> Iterator[Transfer]:
    """Sums of activations over devices, wherever a product sums over a dimension that a mesh axis splits.

    A product `x,w->y` of a block runs forward, once more where `training.remat` computes it again, and transposed for
    the gradient of x. A vocabulary that is split is summed over in the lookup of tokens and in the gradient of the
    logits' product.
    """
    cfg, layout = program.cfg, program.layout
    sizes = cfg.dims | {"B": cfg.training.sequences_per_shard * data_shards(mesh.shape)}
    forward_passes = 1 + RECOMPUTED[cfg.training.remat]
    products: list[tuple[Equation, int]] = []  # with the times that each runs for a sequence
    for weight in jax.tree.leaves(program.arch.weights):
        equation = weight.equation.dequantized()
        if equation.is_stacked and not equation.is_vector and not equation.is_scales:
            products.append((equation, forward_passes * cfg.model.num_layers))
            products.append((equation.transposed(), cfg.model.num_layers))
    table = program.arch.weights["embedding"]["table"].equation
    products.append((table.transposed(), 2))
    for equation, times in products:
        if axes := layout.product_axes(equation):
            shape = _shard([sizes[letter] for letter in equation.y], layout.activation(equation.y), mesh)
            num_bytes = math.prod(shape) * jnp.dtype(layout.compute).itemsize
            yield Transfer("all-reduce", axes, microbatches * times * num_bytes, overlaps=False)


def seconds(transfer: Transfer, sizes: dict[str, int], kind: DeviceKind, per_node: int) -> float:
    """Return the time of a ring over the slowest link of its axes, if nothing else uses it.

    Neighbours on inner axes are neighbours in a node. A group with several devices in a node has their network shares
    together.
    """
    size = math.prod(sizes[axis] for axis in transfer.axes)
    names = axis_names()
    stride = math.prod(sizes[axis] for axis in names[names.index(transfer.axes[-1]) + 1 :])
    neighbours = max(1, math.gcd(stride * size, per_node) // stride)  # where groups and nodes overlap least
    crosses = neighbours < size
    speed = min(kind.link_gb_per_s, neighbours * kind.network_gb_per_s) if crosses else kind.link_gb_per_s
    return TRAVERSALS[transfer.kind] * transfer.num_bytes * (size - 1) / size / (speed * 1e9)


def _gathers_in_blocks(program: Program) -> bool:
    return program.layout.strategy.gathered_for == "block" and program.cfg.training.sync_gradients_every == 1


def _use_dtype(weight: Weight, layout: Layout) -> str:
    """Dtype in which a weight is gathered: codes and scales travel as they are."""
    return weight.dtype if weight.equation.is_quantized else layout.use_dtype(weight.equation)


def _gathered_bytes(weight: Weight, layout: Layout, mesh: Mesh | AbstractMesh) -> int:
    """As it travels, and for codes the matrix made of them."""
    spec = layout.in_use(weight.equation)
    made = weight.size / math.prod(weight.shape) if weight.equation.is_quantized else 0
    return _bytes(weight, spec, _use_dtype(weight, layout), mesh) + round(
        made * _bytes(weight, spec, layout.compute, mesh)
    )


def _bytes(weight: Weight, spec: PartitionSpec, dtype: str, mesh: Mesh | AbstractMesh) -> int:
    return math.prod(_shard(weight.shape, spec, mesh)) * jnp.dtype(dtype).itemsize


def _shard(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Shape of the part of an array that one device has."""
    return NamedSharding(mesh, PartitionSpec(*spec.partitions)).shard_shape(tuple(shape))
