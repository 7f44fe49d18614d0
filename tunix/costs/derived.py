"""What a step holds, moves and computes on a mesh whose devices need not exist: derived, not compiled."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tunix.config import Config, DeviceKind
from tunix.models.attention import QUERY_BLOCK
from tunix.models.flops import flops_per_token, forward_flops_per_token
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.dims import DATA_AXES, MESH_AXES
from tunix.sharding.layout import Layout
from tunix.sharding.mesh_shape import data_shards
from tunix.training.program import Program, abstract_batch, assemble
from tunix.training.state import Weight, describe

RECOMPUTED = {"none": 0, "dots": 0, "attention": 1, "full": 1}  # forward passes, by training.remat
BATCH = {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "global_batch_tokens"}  # of training
TRAVERSALS = {  # of a ring (Patarasuk and Yuan 2009)
    "all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "collective-permute": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """A collective of one step, over the mesh axes named."""

    kind: str  # of TRAVERSALS
    axes: tuple[str, ...]
    num_bytes: int  # in one step: of the whole arrays that a group gathers, reduces or scatters


@dataclass(frozen=True)
class Costs:
    """Of one optimizer step, on one device."""

    num_bytes: dict[str, int]  # held at one time, by what it is
    transfers: list[Transfer]
    model_flops: float  # what MFU counts
    flops: float  # with what rematerialization computes again
    tokens_per_step: int  # of the whole mesh

    @property
    def memory(self) -> int:
        return sum(self.num_bytes.values())


def derive(cfg: Config, sizes: dict[str, int]) -> Costs:
    """The costs of a step of `cfg` on a mesh of these sizes, which must divide model and batch."""
    # The program of one sequence per shard serves for all micro batches.
    alike = cfg.model_copy(update={"training": cfg.training.model_copy(update={"micro_batch_size": 1})})
    program, mesh = _program(alike.model_dump_json(by_alias=True), tuple(sizes[axis] for axis in MESH_AXES))
    with jax.sharding.use_abstract_mesh(mesh):
        return costs_of(cfg, program, mesh)


def costs_of(cfg: Config, program: Program, mesh: Mesh | AbstractMesh) -> Costs:
    """The same for a program that is assembled already, for a mesh that is in use."""
    training, shards = cfg.training, data_shards(mesh.shape)
    microbatches = training.accumulation(shards)
    tokens = microbatches * training.sequences_per_shard * shards * training.seq_len
    arch, share = program.arch, tokens / mesh.size
    flops = flops_per_token(cfg.model, arch.num_parameters, arch.num_trained, training.seq_len) * share
    again = forward_flops_per_token(cfg.model, arch.num_parameters, training.seq_len) * share
    return Costs(
        _held(program, mesh, microbatches) | {"activations": _activation_bytes(cfg, program, mesh)},
        [*_of_weights(program, mesh, microbatches), *_of_activations(cfg, microbatches)],
        flops,
        flops + RECOMPUTED[training.remat] * again,
        tokens,
    )


@lru_cache(maxsize=1)
def _program(config: str, sizes: tuple[int, ...]) -> tuple[Program, AbstractMesh]:
    mesh = AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES))
    with jax.sharding.use_abstract_mesh(mesh):
        return assemble(Config.model_validate_json(config), mesh), mesh  # type: ignore[arg-type]


def _held(program: Program, mesh: Mesh | AbstractMesh, microbatches: int) -> dict[str, int]:
    layout, arch, in_blocks = program.layout, program.arch, _gathers_in_blocks(program)
    trained, sharded = jax.tree.leaves(arch.trained_weights), layout.strategy.gradients
    # XLA transposes tables too; a trained one's copy is gone before its own part of the gradient is there.
    transposed = [weight for weight in jax.tree.leaves(arch.frozen(arch.weights)) if not _is_stacked(weight)]
    gathered = [
        (weight, _gathered_bytes(weight, layout, mesh)) for weight in [*jax.tree.leaves(arch.weights), *transposed]
    ]
    # One block and the next are gathered at a time; the tables stay, and so does their gradient until it is summed.
    share = {True: 2 / program.cfg.model.num_layers if in_blocks else 1.0, False: 1.0}
    own_parts = [
        _bytes(weight, layout.gathered(weight.equation), "float32", mesh)
        for weight in trained
        if not (in_blocks and _is_stacked(weight))
    ]
    sums = [_bytes(weight, layout.rest(weight.equation, sharded), "float32", mesh) for weight in trained]
    accumulates = microbatches > 1 and (in_blocks or program.cfg.training.sync_gradients_every > 1)
    of_one = sum(sums) if in_blocks else sum(own_parts) * jnp.dtype(layout.compute).itemsize // 4
    return {
        "weights": bytes_per_device(program.abstract["params"]),
        "optimizer": bytes_per_device(program.abstract["opt_state"]),
        "gradients": sum(own_parts) + sum(sums) + (of_one if accumulates else 0),
        "gathered": round(sum(share[_is_stacked(weight)] * size for weight, size in gathered)),
    }


def _activation_bytes(cfg: Config, program: Program, mesh: Mesh | AbstractMesh) -> int:
    """What the forward pass keeps of each sequence, and what is at work: one layer's inside, or a chunk's logits.

    The second part is an estimate.
    """
    model, training, tp = cfg.model, cfg.training, mesh.shape["tp"]
    item, length = jnp.dtype(training.dtypes["compute"]).itemsize, training.seq_len
    heads, keys = model.num_heads / tp, 2 * model.num_kv_heads / min(tp, model.num_kv_heads)
    mlp = (3 if model.mlp.startswith("gated") else 2) * model.mlp_dim / tp
    inside = 2 * length * item * (6 * model.embed_dim + (2 * heads + keys) * model.head_dim + mlp)
    if model.attention == "xla":
        inside += heads * min(length, QUERY_BLOCK) * length * (4 + item)
    positions = min(training.loss_chunk_size, length)
    logits = 1.75 * positions * model.vocab_size / tp * 4  # float32, and part of their gradient
    return round(training.sequences_per_shard * (_kept_per_sequence(program, mesh) + max(inside, logits)))


_kept: dict[tuple[str, str, int], int] = {}


def _kept_per_sequence(program: Program, mesh: Mesh | AbstractMesh) -> int:
    """Bytes that `training.remat` keeps of a sequence for the backward pass, on one device, as JAX traces it."""
    cfg = program.cfg
    config = cfg.model.model_dump_json(exclude={"mesh_shape"}), cfg.training.model_dump_json(exclude=BATCH)
    key = (*config, mesh.shape["tp"])  # each data shard has its own sequences: dp and fsdp change nothing of one
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


def _of_weights(program: Program, mesh: Mesh | AbstractMesh, microbatches: int) -> Iterator[Transfer]:
    """Weights gathered before they are used, and gradients reduced after."""
    layout, strategy = program.layout, program.layout.strategy
    reductions = microbatches // program.cfg.training.sync_gradients_every
    is_trained = jax.tree.leaves(program.arch.is_trained)
    for weight, trained in zip(jax.tree.leaves(program.arch.weights), is_trained, strict=True):
        equation = weight.equation
        whole, split = layout.gathered(equation), "fsdp" in layout.rest(equation, True)
        if split and strategy.params:
            times = 2 * microbatches if _gathers_in_blocks(program) and _is_stacked(weight) else 1
            size = _bytes(weight, whole, _use_dtype(weight, layout), mesh)
            yield Transfer("all-gather", ("fsdp",), times * size)
        elif split and strategy.optimizer and trained:  # the updated weights
            yield Transfer("all-gather", ("fsdp",), _bytes(weight, whole, layout.param, mesh))
        if not trained:
            continue
        size = reductions * _bytes(weight, whole, layout.reduce, mesh)
        if split and strategy.gradients:
            yield Transfer("reduce-scatter", ("fsdp",), size)
            yield Transfer("all-reduce", ("dp",), size // mesh.shape["fsdp"])
        else:
            yield Transfer("all-reduce", DATA_AXES, size)


def _of_activations(cfg: Config, microbatches: int) -> Iterator[Transfer]:
    """Sums over tp: after attention and MLP of each layer, forward and backward; around the two tables."""
    training = cfg.training
    in_layers = cfg.model.num_layers * (6 if training.remat == "full" else 4)
    item = jnp.dtype(training.dtypes["compute"]).itemsize
    size = training.sequences_per_shard * training.seq_len * cfg.model.embed_dim * item
    yield Transfer("all-reduce", ("tp",), microbatches * (in_layers + 2) * size)


def seconds(transfer: Transfer, sizes: dict[str, int], kind: DeviceKind, per_node: int) -> float:
    """Time of a ring over the slowest link of its axes, if nothing else uses it.

    Neighbours on inner axes are neighbours in a node. A group with several devices in a node has their network shares
    together.
    """
    size = math.prod(sizes[axis] for axis in transfer.axes)
    stride = math.prod(sizes[axis] for axis in MESH_AXES[MESH_AXES.index(transfer.axes[-1]) + 1 :])
    neighbours = max(1, math.gcd(stride * size, per_node) // stride)  # where groups and nodes overlap least
    crosses = neighbours < size
    speed = min(kind.link_gb_per_s, neighbours * kind.network_gb_per_s) if crosses else kind.link_gb_per_s
    return TRAVERSALS[transfer.kind] * transfer.num_bytes * (size - 1) / size / (speed * 1e9)


def _gathers_in_blocks(program: Program) -> bool:
    return program.layout.strategy.gathered_for == "block" and program.cfg.training.sync_gradients_every == 1


def _use_dtype(weight: Weight, layout: Layout) -> str:
    """In which a weight is gathered: codes and scales travel as they are."""
    return weight.dtype if weight.equation.is_quantized else layout.use_dtype(weight.equation)


def _gathered_bytes(weight: Weight, layout: Layout, mesh: Mesh | AbstractMesh) -> int:
    """As it travels, and for codes the matrix made of them."""
    spec = layout.gathered(weight.equation)
    made = weight.size / math.prod(weight.shape) if weight.equation.is_quantized else 0
    return _bytes(weight, spec, _use_dtype(weight, layout), mesh) + round(
        made * _bytes(weight, spec, layout.compute, mesh)
    )


def _is_stacked(weight: Weight) -> bool:
    return "L" in weight.equation.w


def _bytes(weight: Weight, spec: PartitionSpec, dtype: str, mesh: Mesh | AbstractMesh) -> int:
    shard = NamedSharding(mesh, PartitionSpec(*spec.partitions)).shard_shape(weight.shape)
    return math.prod(shard) * jnp.dtype(dtype).itemsize
