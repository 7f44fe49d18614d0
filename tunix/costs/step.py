"""Costs of a training step on one device, derived from config and mesh: memory, FLOPs, and with them its transfers.

No device and no compile is needed. Read `derive_costs` first.
"""

from dataclasses import dataclass, replace

import jax
from jax.sharding import AbstractMesh, AxisType

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.config.task import Grpo
from tunix.costs.communication import (
    Transfer,
    find_passes,
    find_table_of_logits,
    list_transfers,
)
from tunix.costs.devices import compute_peak_tflops, find_kind, find_matmul_tflops, read_device_kinds
from tunix.costs.memory import NO_RESIDUALS, count_bytes, count_summed_bytes, has_matmul_dtype
from tunix.costs.passes import NO_FUSED_WORK, FusedWork, count_fused_work, count_pass_bytes
from tunix.models.flops import chunk_flops_per_token, forward_flops_per_token, tower_flops
from tunix.models.layers import parameter_name
from tunix.models.remat import product_name
from tunix.models.table import MATMUL_DTYPES
from tunix.sharding.arrays import bytes_per_device
from tunix.sharding.layout import list_axes
from tunix.sharding.mesh import count_devices, token_shards
from tunix.sharding.table import EXPERTS, STREAM_TOKENS, TOKENS, axis_names
from tunix.training.choices import select
from tunix.training.loss import find_loss_kind
from tunix.training.state import Architecture
from tunix.training.teacher import OfflineTeacher, Teacher
from tunix.training.train_spec import TrainSpec, assemble, derive_flops_per_token


@dataclass(frozen=True)
class Costs:
    """Costs of one optimizer step on one device."""

    num_bytes: dict[str, int]  # at one time, by what they are for
    transfers: list[Transfer]
    model_flops: float  # what MFU counts
    flops: float  # with what rematerialization computes again
    tokens_per_step: int  # of the whole mesh
    matmul_share: float = 0.0  # of the FLOPs: products of `training.matmul_dtype`
    fused: FusedWork = NO_FUSED_WORK
    standalone_bytes: int = 0  # of a teacher at rest that runs before the state is made (task.teacher_top_k)
    pass_bytes: float = 0.0  # that what is no product reads and writes (costs/passes.py)
    gradient_bytes: int = 0  # of the sums that the update takes, float32; `num_bytes` has those of its moment
    outside_flops: float = 0.0  # for each step, of forward passes outside of it (`_count_outside_passes`)

    @property
    def memory(self) -> int:
        return sum(self.num_bytes.values())


def derive(cfg: Config, sizes: dict[str, int], platform: str | None = None, with_activations: bool = True) -> Costs:
    """Return the costs of a step of `cfg` on a mesh of these sizes; see `find_train_spec` and `derive_costs`."""
    return derive_costs(find_train_spec(cfg, sizes, platform), with_activations)


def derive_costs(train_spec: TrainSpec, with_activations: bool = True) -> Costs:
    """Return the costs of a step of a training.

    Activations are traced, which takes most of the time. Without them, everything else is the same.
    """
    cfg, arch, batch = train_spec.cfg, train_spec.arch, train_spec.batch
    num_tokens = batch.num_tokens / train_spec.mesh.size  # of one device
    flops = derive_flops_per_token(cfg, arch, batch.seq_len) * num_tokens
    num_images = batch.num_sequences * cfg.training.images_per_row / train_spec.mesh.size
    forward_flops = forward_flops_per_token(cfg.model, arch.num_active, batch.seq_len, cfg.task.needs_head) * num_tokens
    chunk_flops = chunk_flops_per_token(cfg.model, batch.seq_len, token_shards(train_spec.mesh.shape)) * num_tokens
    recompute = _derive_recompute_fraction(train_spec)
    # `flops` leaves out what linear attention computes inside of its chunks: one time forward and two times backward.
    logits = 2.0 * cfg.num_outputs * cfg.model.embed_dim * num_tokens  # forward; backward twice as many
    in_blocks = forward_flops - logits * (1 if cfg.model.mtp is None else 2)  # which has logits of its own
    all_flops = flops + recompute * in_blocks + (3 + recompute) * chunk_flops
    all_flops += _count_pipeline_flops(train_spec, all_flops, in_blocks, logits)
    widths = [cfg.model.embed_dim]  # of what logits are made of
    if isinstance(teacher := train_spec.teacher, Teacher) and teacher.in_loss:
        widths.append(teacher.arch.model.embed_dim)
        all_flops += forward_flops_per_token(teacher.arch.model, teacher.arch.num_active, batch.seq_len) * num_tokens
    all_flops += _count_repeated_flops(train_spec, num_tokens)
    if find_loss_kind(cfg).logits_again:
        all_flops += logits * sum(widths) / cfg.model.embed_dim
    # Devices that share the tokens of a row all compute its images.
    shares = arch.trained_shares_of_vision
    all_flops += tower_flops(cfg.model, shares, recompute) * num_images * token_shards(train_spec.mesh.shape)
    flops += tower_flops(cfg.model, shares) * num_images
    with jax.sharding.use_abstract_mesh(train_spec.abstract_mesh):
        num_bytes = count_bytes(train_spec, with_activations)
        transfers = list_transfers(train_spec)
    share = compute_matmul_share(cfg, arch, batch.seq_len)
    teacher = train_spec.teacher.model if isinstance(train_spec.teacher, OfflineTeacher) else None
    apart = 0 if teacher is None else bytes_per_device(teacher.abstract_params(train_spec.mesh))
    fused, passes = count_fused_work(train_spec), count_pass_bytes(train_spec)
    summed = sum(count_summed_bytes(weight, train_spec) for weight in jax.tree.leaves(arch.trained_weights))
    outside = _count_outside_passes(cfg) * forward_flops
    return Costs(num_bytes, transfers, flops, all_flops, batch.num_tokens, share, fused, apart, passes, summed, outside)


def _count_outside_passes(cfg: Config) -> float:
    """Return the forward passes of the model over the batch of a step that are programs of their own.

    They are those of the reference of GRPO, which serves all passes over a rollout; of the numbers that KTO needs of
    all rows before any loss; and of the vectors that embeddings are compared with.
    """
    if isinstance(cfg.task, Grpo):
        return (cfg.task.kl_coefficient > 0) / cfg.task.passes_per_rollout
    return float(find_loss_kind(cfg).complete is not None)


def _derive_recompute_fraction(train_spec: TrainSpec) -> float:
    """Return the share of the blocks' products that the backward pass computes again; the logits are not in blocks."""
    recompute, in_all = 0.0, 0
    for path, weight in jax.tree.leaves_with_path(train_spec.arch.weights):
        if weight.equation.is_stacked and not weight.equation.is_vector:
            size = round(weight.size * weight.used)
            recompute += size * train_spec.choices.remat.recompute_fraction(product_name(parameter_name(path)))
            in_all += size
    return recompute / in_all


def _count_pipeline_flops(train_spec: TrainSpec, flops: float, in_blocks: float, logits: float) -> float:
    """Return the FLOPs that stages add on one device: the bubble, and the forward pass of the stages once more.

    `flops` are those without stages; `in_blocks` and `logits` are those of a forward pass. The logits are outside of
    the stages. In a bubble a stage computes what nobody uses: 4 stages with 12 parts take 12 + 3 ticks, 15 / 12 = 1.25
    for each part, so the blocks' FLOPs grow by a quarter.
    """
    model, pipeline = train_spec.cfg.model, train_spec.choices.pipeline
    in_all = (2 if model.lora.rank else 3) * logits  # a frozen table has no gradient
    # The share of the blocks' products that are in layers before the stages.
    stacked = [weight for weight in jax.tree.leaves(train_spec.arch.weights) if weight.equation.is_stacked]
    first = sum(weight.size * weight.used for weight in stacked if weight.equation.is_before_stages)
    first /= sum(weight.size * weight.used for weight in stacked)
    on_stages = (1 - first) * (flops - in_all + pipeline.recompute_runs * in_blocks)
    recompute = ((1 - first) * pipeline.recompute_runs + first) * in_blocks
    return recompute + on_stages * (pipeline.iterations_per_microbatch - 1)


BATCH = "B", TOKENS, STREAM_TOKENS


def _count_repeated_flops(train_spec: TrainSpec, num_tokens: float) -> float:
    """Return the FLOPs of one device that others have too: of products whose weights and tokens no axis splits.

    With 4 devices on tp and 2 key/value heads, each computes both heads: 4 times the share that it would have of one
    product in 4 parts. So it is with low-rank factors beside the width, with a vocabulary that tp does not divide, and
    with experts whose products are XLA's own.
    """
    layout, mesh, cfg, repeated = train_spec.layout.with_all_layers(), train_spec.mesh, train_spec.cfg, 0.0
    of_logits, weights = find_table_of_logits(train_spec), jax.tree.leaves_with_path(train_spec.arch.weights)
    for (path, weight), is_trained in zip(weights, jax.tree.leaves(train_spec.arch.is_trained), strict=True):
        equation = weight.equation.dequantized()
        is_multiplied = weight is of_logits or equation.is_stacked
        if not is_multiplied or equation.is_vector or equation.is_scales:
            continue
        tokens = layout.activation("".join(letter for letter in equation.x if letter in BATCH))
        axes = list_axes(layout.in_use(equation)) | list_axes(tokens)
        repeats, pipeline = mesh.size / count_devices(mesh.shape, tuple(axes)), find_passes(weight, train_spec)
        if EXPERTS in equation.w and layout.expert_products == "xla":  # each expert multiplies the rows of all
            repeats *= cfg.dims[EXPERTS] / count_devices(mesh.shape, layout.expert_axes)
        recompute = train_spec.choices.remat.recompute_fraction(product_name(parameter_name(path)))
        passes = (2 + is_trained + recompute + pipeline.recompute_runs) * pipeline.iterations_per_microbatch
        if weight is of_logits:
            passes = 2 + is_trained + find_loss_kind(cfg).logits_again
        repeated += 2.0 * weight.size * weight.used * num_tokens * passes * (repeats - 1)
    return repeated


# Values of the keys of training that say how many sequences there are, for one sequence per data shard.
ONE_SEQUENCE = {"micro_batch_size": 1, "micro_batch_tokens": None, "pipeline_microbatches": "auto", "batch_stages": ()}
MAX_PROGRAMS = 8  # as many as there are policies that training.remat=budget compares, and a few more
_programs: dict[tuple[str, AbstractMesh, str | None], TrainSpec] = {}  # each with one sequence, the newest last


def find_train_spec(cfg: Config, sizes: dict[str, int], platform: str | None = None) -> TrainSpec:
    """Return what `cfg` trains on a mesh of these sizes, which must divide model and batch.

    `platform` is that of the devices, by which `training.remat`, `training.overlap` and `model.expert_exchange`
    choose. Configs that differ in their batch alone share an assembled program: a plan asks for hundreds of them.
    """
    smallest, names = cfg.with_training(**ONE_SEQUENCE, **NO_RESIDUALS), axis_names()
    mesh = AbstractMesh(tuple(sizes[axis] for axis in names), names, axis_types=(AxisType.Explicit,) * len(names))
    key = smallest.model_dump_json(by_alias=True), mesh, platform
    if key not in _programs:
        if len(_programs) == MAX_PROGRAMS:
            del _programs[next(iter(_programs))]
        with jax.sharding.use_abstract_mesh(mesh):
            _programs[key] = assemble(smallest, mesh, platform)
    return replace(_programs[key], cfg=cfg, choices=select(cfg, mesh, platform))


def check_matmul_dtype(cfg: Config, platform: str, device_kind: str) -> None:
    """Raise `UserError` where `training.matmul_dtype` is asked of devices that do not multiply its numbers.

    CPUs are no mistake: they emulate it, for tests and for a look at the loss. `device_kind` is the driver's name.
    """
    dtype, kind = cfg.training.matmul_dtype, find_kind(device_kind)
    if dtype is None or platform == "cpu" or (kind is not None and find_matmul_tflops(kind, dtype) is not None):
        return
    chips = ", ".join(each.name for each in read_device_kinds().values() if find_matmul_tflops(each, dtype) is not None)
    raise UserError(
        f"training.matmul_dtype={dtype}: {device_kind} has no products of {MATMUL_DTYPES[dtype].numbers} that are "
        f"known here; {chips} have them, and CPUs emulate them. Leave training.matmul_dtype=null"
    )


def compute_matmul_share(cfg: Config, arch: Architecture, seq_len: int) -> float:
    """Return the share of a step's model FLOPs that products of `training.matmul_dtype` have; 0 without it."""
    if cfg.training.matmul_dtype is None:
        return 0.0
    flops = 0.0
    trained = jax.tree.leaves(arch.is_trained)
    for (path, weight), is_trained in zip(jax.tree.leaves_with_path(arch.weights), trained, strict=True):
        if has_matmul_dtype(parameter_name(path), weight):
            flops += (6 if is_trained else 4) * weight.size
    return flops / derive_flops_per_token(cfg, arch, seq_len)


def find_run_peak_tflops(cfg: Config, arch: Architecture, seq_len: int, device_kind: str) -> float | None:
    """Return the peak of one device for a run's products, by the driver's name; None if the name is not known."""
    if (kind := find_kind(device_kind)) is None:
        return None
    return compute_peak_tflops(kind, cfg.training.matmul_dtype, compute_matmul_share(cfg, arch, seq_len))
