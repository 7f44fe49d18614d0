"""Choices that a config leaves to the mesh of a run and to its devices: `select` makes all of them, before a trace."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractDevice, Mesh, NamedSharding, PartitionSpec

from tunix.base.errors import UserError, first_line
from tunix.config import Config, Model, Training, list_dims
from tunix.config.batch import BatchKeys, BatchShape, PipelineShape
from tunix.config.layers import ExpertsMlp
from tunix.config.task import Grpo
from tunix.config.training import REMAT
from tunix.models.context_parallel import select_exchange
from tunix.models.expert_parallel import check_expert_exchange, select_expert_exchange
from tunix.models.kernels import Choice, choose_kernels, select_expert_matmul
from tunix.models.remat import Remat
from tunix.models.table import MATMUL_DTYPES
from tunix.sharding.arrays import AnyMesh
from tunix.sharding.layout import STRATEGIES, Layout
from tunix.sharding.mesh import check_divides, data_shards, device_mesh, format_mesh_shape, num_stages, unsplit_dims
from tunix.sharding.table import DIMS, data_axes, keeping_axes

log = logging.getLogger(__name__)

Options = dict[str, bool | int | float | str]
# What `training.remat=auto` takes by platform. Elsewhere it is "full", which needs the least memory, unless "dots" is
# known to fit (plan/ranking.py). A CPU computes slowly and has much memory: benchmarks/results.md has the figures.
REMAT_BY_PLATFORM = {"cpu": "dots"}


class Planned(NamedTuple):
    """Keys that a plan may choose: their values in the config, or those that the plan has found."""

    mesh_shape: Any
    batch: BatchKeys
    remat: str
    cp_exchange: str
    loss_chunk_size: int | str

    @classmethod
    def of(cls, cfg: Config) -> "Planned":
        training, model = cfg.training, cfg.model
        return cls(model.mesh_shape, training, training.remat, model.cp_exchange, training.loss_chunk_size)


@dataclass(frozen=True)
class Choices:
    """All that a config leaves to its mesh and its devices: chosen before anything is traced, and read from here."""

    planned: Planned
    shape: BatchShape
    layout: Layout  # with kernels, exchanges, products of experts, and whether devices split the residual stream
    pipeline: PipelineShape
    parts_per_stage: int | None  # `Training.parts_per_stage`
    remat: Remat  # what blocks keep for their backward pass
    sync_every: int  # microbatches between two reductions of gradients
    prefetch: bool  # layers gather ahead
    options: Options  # of XLA
    reasons: dict[str, str]  # of choices that the config left open, by key

    @property
    def batch(self) -> BatchKeys:
        return self.planned.batch

    def reason(self, key: str) -> str:
        """Return the reason of a choice in brackets, to stand behind it; nothing where the config made the choice."""
        return f" ({self.reasons[key]})" if key in self.reasons else ""


def select(cfg: Config, mesh: AnyMesh, platform: str | None = None, planned: Planned | None = None) -> Choices:
    """Make all choices of a config on a mesh. `platform` is that of the devices, where the mesh has none.

    Raises:
        UserError: a value of the config does not run on this mesh.
    """
    training, sizes, device, planned = cfg.training, mesh.shape, find_device(mesh), planned or Planned.of(cfg)
    platform = platform or (device.platform if device else None)
    reasons: dict[str, str] = {}
    layout = _lay_out(cfg, planned, sizes, device, platform, reasons)
    pipeline = planned.batch.pipeline(sizes)
    sync_every = _choose_sync(training, sizes, pipeline)
    if planned.remat == "budget":
        choices = ", ".join(REMAT)
        raise UserError(f"training.remat=budget is chosen by a run and by tunix.plan only; choose from {choices}")
    policy = REMAT_BY_PLATFORM.get(platform or "", "full") if planned.remat == "auto" else planned.remat
    remat = Remat(policy, training.remat_every, training.offload == "activations", training.unroll_layers)
    _check_kept_on_stages(training, pipeline)
    if pipeline.num_stages > 1 and training.matmul_dtype and not MATMUL_DTYPES[training.matmul_dtype].on_stages:
        raise UserError(
            f"training.matmul_dtype={training.matmul_dtype} does not run on stages; leave pp out of model.mesh_shape, "
            "or set training.matmul_dtype=fp8"
        )
    prefetch, options, reasons["training.overlap"] = _choose_overlap(cfg, layout, sync_every, sizes, platform)
    if _takes_turns(cfg, layout, sizes, prefetch or (bool(options) and training.overlap == "auto")):
        layout = replace(layout, batch_parts=2)
        if isinstance(cfg.model.mlp, ExpertsMlp):
            options = options | OPTIONS_OF_PARTS.get(platform or "", {})
    if training.unroll_layers and not layout.gathers_in_blocks(sync_every) and not cfg.model.lora.rank:
        options = options | OPTIONS_OF_SUMS.get(platform or "", {})
    shape, parts = planned.batch.batch_shape(sizes), planned.batch.parts_per_stage(sizes)
    return Choices(planned, shape, layout, pipeline, parts, remat, sync_every, prefetch, options, reasons)


def build_mesh(cfg: Config, devices: Sequence[jax.Device] | None = None, planned: Planned | None = None) -> Mesh:
    """Return the mesh of a run; see `device_mesh`."""
    mesh_shape = (planned or Planned.of(cfg)).mesh_shape
    devices = split_devices(cfg, jax.devices())[0] if devices is None else devices
    return device_mesh(mesh_shape, cfg.dims, cfg.distributed.allow_idle_devices, devices)


def split_devices(cfg: Config, devices: Sequence[jax.Device]) -> tuple[list[jax.Device], list[jax.Device]]:
    """Return the devices of a run that learn, and those of task.rollout_devices: the last ones of each host. Raises
    `UserError` where no device of a host would be left to learn."""
    count = cfg.task.rollout_devices if isinstance(cfg.task, Grpo) else None
    if count is None:
        return list(devices), []
    learning: list[jax.Device] = []
    drawing: list[jax.Device] = []
    for host in dict.fromkeys(device.process_index for device in devices):
        local = [device for device in devices if device.process_index == host]
        check_rollout_devices(cfg, len(local))
        learning += local[:-count]
        drawing += local[-count:]
    return learning, drawing


def check_rollout_devices(cfg: Config, per_host: int) -> int:
    """Return how many of the devices of a host learn; raise `UserError` where none does."""
    count = cfg.task.rollout_devices if isinstance(cfg.task, Grpo) else None
    if count is not None and count >= per_host:
        raise UserError(
            f"task.rollout_devices={count} leaves none of {per_host} device(s) of a host to learn; lower it, or set it "
            "to null: then the same devices learn and draw"
        )
    return per_host - (count or 0)


def build_rollout_mesh(cfg: Config, mesh: Mesh) -> Mesh:
    """Return the mesh that draws answers: that of training, or one of task.rollout_devices. Raises `UserError` where
    the model does not fit that mesh."""
    drawing = split_devices(cfg, jax.devices())[1]
    if not drawing:
        return mesh
    sizes = select_rollout_sizes(cfg, mesh.shape, jax.process_count())
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=mesh.axis_types, devices=drawing)


def select_rollout_sizes(cfg: Config, sizes: Mapping[str, int], num_hosts: int) -> dict[str, int]:
    """Return the sizes of the axes of the mesh of task.rollout_devices on so many hosts, beside one that learns.

    The axis of the heads (tp) keeps its size where it divides the devices; the others split sequences, and keep weights
    between two uses.

    Raises:
        UserError: the model does not fit that mesh, or weights cannot go there (`copy_to`).
    """
    assert isinstance(cfg.task, Grpo)
    assert cfg.task.rollout_devices is not None
    num_devices = num_hosts * cfg.task.rollout_devices
    (heads,), keeping = DIMS["N"].activation_axes, keeping_axes()[0]
    num_parts = sizes[heads] if num_devices % sizes[heads] == 0 else 1
    rollout_sizes = {**dict.fromkeys(sizes, 1), heads: num_parts, keeping: num_devices // num_parts}
    try:
        check_divides(cfg.model.dims, rollout_sizes)
    except UserError as error:
        raise UserError(f"task.rollout_devices={cfg.task.rollout_devices}: {error}") from None
    if num_hosts > 1 and rollout_sizes != dict(sizes):
        drawing, learning = format_mesh_shape(rollout_sizes), format_mesh_shape(sizes)
        raise UserError(
            f"task.rollout_devices: on {num_hosts} hosts the devices that draw, {drawing}, must be split like those "
            f"that learn, {learning}; take as many of both, on fsdp and tp alone, or task.rollout_devices=null"
        )
    return rollout_sizes


def find_device(mesh: AnyMesh) -> AbstractDevice | None:
    """Return platform and kind of the devices of a mesh; None if it has none."""
    return (mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh).abstract_device


def build_layout(cfg: Config, mesh: AnyMesh) -> Layout:
    """Return the layout of a config on a mesh, whatever its batch is."""
    device = find_device(mesh)
    return _lay_out(cfg, Planned.of(cfg), mesh.shape, device, device.platform if device else None, {})


def lay_out_teacher(cfg: Config, model: Model, mesh: AnyMesh, platform: str | None, planned: Planned) -> Layout:
    """Return the layout of a second model of a run, which is not trained: it rests in the dtype of products.

    Every device has all of its layers; axes of stages split the sequences.
    """
    device = find_device(mesh)
    platform = platform or (device.platform if device else None)
    with_exchange = planned._replace(cp_exchange=model.cp_exchange)
    layout = _lay_out(cfg.model_copy(update={"model": model}), with_exchange, mesh.shape, device, platform, {})
    return replace(layout, param=layout.compute, block_matmul="plain", moments_on_host=False).with_all_layers()


def _lay_out(
    cfg: Config,
    planned: Planned,
    sizes: Mapping[str, int],
    device: AbstractDevice | None,
    platform: str | None,
    reasons: dict[str, str],
) -> Layout:
    """Return the layout of a run, and add the reasons of its choices to `reasons`."""
    model, dtypes = cfg.model, cfg.training.dtypes

    def name(key: str, value: str, choice: Choice) -> str:
        if value == "auto":
            reasons[f"model.{key}"] = choice.reason
        return choice.name

    kernels = choose_kernels(model, dtypes["compute"], device, cfg.optimizer.score_limit is not None)
    products = select_expert_matmul(model.expert_products, dtypes["compute"], device, model, platform)
    layout = Layout(
        STRATEGIES[cfg.training.sharding_strategy],
        frozenset(unsplit_dims(list_dims(cfg.model, planned.batch), sizes)),
        dtypes["param"],
        dtypes["compute"],
        dtypes["reduce"],
        block_matmul="plain" if cfg.training.matmul_dtype is None else cfg.training.matmul_dtype,
        moments_on_host=cfg.training.offload == "optimizer",
        kernels=tuple((dim, name(f"attention.{dim}", model.attention, each)) for dim, each in kernels.items()),
        cp_exchange=name("cp_exchange", planned.cp_exchange, select_exchange(model, sizes, planned.cp_exchange)),
        expert_products=name("expert_products", model.expert_products, products),
        expert_exchange=name("expert_exchange", model.expert_exchange, select_expert_exchange(model, sizes, platform)),
        splits_stream=_splits_stream(model, planned.batch, sizes),
    )
    check_expert_exchange(model, layout.expert_exchange, device)
    return layout if num_stages(sizes) > 1 else layout.with_all_layers()


def _splits_stream(model: Model, batch: BatchKeys, sizes: Mapping[str, int]) -> bool:
    """Return whether devices split the tokens of the residual stream. Experts with biases keep it whole: jax 0.10.2
    cannot give such a vector to tokens that vary over more axes than it."""
    has_biases = isinstance(model.mlp, ExpertsMlp) and model.mlp.biases
    if has_biases and batch.sequence_parallel is True:
        raise UserError(
            "training.sequence_parallel=true: the experts of this model have biases (model.mlp.biases=true); set "
            "training.sequence_parallel=auto"
        )
    return batch.splits_stream(sizes) and not has_biases


def _choose_sync(training: Training, sizes: Mapping[str, int], pipeline: PipelineShape) -> int:
    """Return the microbatches between two reductions of gradients. Where an axis splits the gradients, a reduction once
    a step needs whole gradients on each device, and weights that are gathered for the step. Elsewhere each device has
    whole gradients anyway."""
    strategy, every = STRATEGIES[training.sharding_strategy], training.sync_gradients_every
    if every == "auto":
        splits = strategy.summed_for == "microbatch" and any(sizes[axis] > 1 for axis in keeping_axes())
        every = 1 if splits or data_shards(sizes) == 1 else pipeline.num_microbatches
    # On stages a tick works on parts of two microbatches, whose gradients are added up together: they are reduced in
    # every tick, or once for all microbatches.
    if pipeline.num_stages > 1 and (every > 1 or strategy.gathered_for == "step"):
        return pipeline.num_microbatches
    return every


def _check_kept_on_stages(training: Training, pipeline: PipelineShape) -> None:
    """Raise `UserError` for values of keys with which stages cannot keep what their backward pass needs."""
    if pipeline.num_stages == 1 or pipeline.recompute_runs:
        return
    obstacles = {"remat_every": training.remat_every > 1, "offload": training.offload == "activations"}
    for key, is_obstacle in obstacles.items():
        if is_obstacle:
            raise UserError(
                f"training.{key}={getattr(training, key)}: stages keep what training.remat says of each layer, on the "
                "device; set training.pipeline_recompute=true, or leave pp out of model.mesh_shape"
            )


# How communication hides behind arithmetic: layers that gather ahead, and options of XLA, chosen from the mesh.
#
# training.overlap   XLA's options   layers gather ahead (models/prefetch.py)
# none               its own         no
# options            of `OPTIONS`    no
# prefetch           of `OPTIONS`    yes

# By platform; a platform that is not named has none, and `auto` takes `none` there.
OPTIONS: dict[str, Options] = {
    "gpu": {
        # Collectives that XLA's scheduler lets run at the same time. With 1, its own choice, a gather waits for the sum
        # before it, and begins only when its result is already needed.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
        # The scheduler itself: by itself XLA takes it for Hopper and Blackwell alone, and elsewhere waits for each
        # transfer where it starts.
        "xla_gpu_enable_latency_hiding_scheduler": True,
    },
}
# The same where layers are not split into stages, on which steps with tp and cp wait longer with it.
OPTIONS_WITHOUT_STAGES: dict[str, Options] = {
    # By itself XLA begins a collective as late as it thinks is early enough. It does not know how long our kernels
    # take, so that many would begin too late.
    "gpu": {"xla_gpu_experimental_collective_start_as_early_as_possible": True},
}

# The same where two parts of a microbatch take turns with their experts.
OPTIONS_OF_PARTS: dict[str, Options] = {
    # XLA joins gathers of up to so many bytes. It would join what the routers of both parts say: the first part would
    # wait for the second one.
    "gpu": {"xla_gpu_all_gather_combine_threshold_bytes": 1000},
}

# The same where layers that gather ahead have replicas: an iteration has gathers, sums inside of a replica and sums
# over replicas, some twenty in all. With 8 the gathers that are needed last keep the sums over replicas waiting.
OPTIONS_OF_REPLICAS: dict[str, Options] = {"gpu": {"xla_gpu_experimental_parallel_collective_overlap_limit": 64}}

# Whatever training.overlap is, where products add gradients to the sums of one layer (models/layer_scan.py): XLA would
# merge the products of queries, keys and values, and a merged product adds to no sum.
OPTIONS_OF_SUMS: dict[str, Options] = {"gpu": {"xla_gpu_dot_merger_threshold_mb": 0}}


def _choose_overlap(
    cfg: Config, layout: Layout, sync_every: int, sizes: Mapping[str, int], platform: str | None
) -> tuple[bool, Options, str]:
    """Return whether layers gather ahead, options of XLA, and the reason. Raises `UserError` for `prefetch` where
    layers cannot gather ahead."""
    name, options = cfg.training.overlap, OPTIONS.get(platform or "", {})
    if not layout.stage_axes:
        options = options | OPTIONS_WITHOUT_STAGES.get(platform or "", {})
    lacks = _find_obstacle(cfg, layout, sync_every)
    if lacks is None and name in ("auto", "prefetch") and layout.has_replicas(sizes):
        options = options | OPTIONS_OF_REPLICAS.get(platform or "", {})
    if name == "prefetch" and lacks:
        raise UserError(f"training.overlap=prefetch: {lacks}; training.overlap=auto takes what fits")
    if name != "auto":
        return name == "prefetch", {} if name == "none" else options, f"training.overlap={name}"
    if not options:
        return False, {}, f"on {platform or 'no device'}: XLA's own order"
    if all(sizes[axis] == 1 for axis in (*data_axes(), *keeping_axes())):
        return False, options, "no weights or gradients travel"
    return not lacks, options, lacks or "layers gather their weights"


def _takes_turns(cfg: Config, layout: Layout, sizes: Mapping[str, int], hides: bool) -> bool:
    """Return whether two parts of a microbatch take turns in a layer, each of which hides what the other one exchanges:
    tokens of experts, or those of a split stream. `hides` says whether communication is to be hidden at all."""
    lora = cfg.model.lora
    # With dropout, rows draw by their numbers in the whole microbatch, and donors of keys leave them for whole rows.
    whole = bool(lora.rank and lora.dropout) or cfg.model.shared_kv is not None or bool(layout.stage_axes)
    if isinstance(cfg.model.mlp, ExpertsMlp):
        has_exchange = any(sizes[axis] > 1 for axis in layout.expert_axes)
    else:
        # Each part would have scales of its own for products of 8 bits, so losses would depend on the mesh.
        has_exchange = bool(layout.stream_axes) and cfg.training.matmul_dtype is None
    return hides and has_exchange and not whole


def _find_obstacle(cfg: Config, layout: Layout, sync_every: int) -> str | None:
    """Return why layers cannot gather ahead; None if they can."""
    training = cfg.training
    if not layout.gathers_in_blocks(sync_every):
        return (
            f"with training.sharding_strategy={training.sharding_strategy} and gradients reduced every {sync_every} "
            "microbatch(es), weights are gathered once for the step"
        )
    if training.remat_every > 1:
        return f"training.remat_every={training.remat_every} takes so many layers at a time"
    if training.offload == "activations":
        return "training.offload=activations waits for the host's memory in each layer"
    return None


def keep_known_options(options: Options, mesh: AnyMesh) -> Options:
    """Return those of `options` that the installed compiler knows for the devices of a mesh, which need not exist.

    Options of XLA come and go with its versions. One that is gone makes a step slower; it must not end a run.
    """
    # XLA has no list of its options to ask: an empty program is compiled with each of them.
    known = {}
    for name, value in options.items():
        try:
            _compile_nothing({name: value}, NamedSharding(mesh, PartitionSpec()))
        except jax.errors.JaxRuntimeError as error:
            log.warning("compiler option %s=%s is left out: %s", name, value, first_line(error))
        else:
            known[name] = value
    return known


def check_compiler_options(options: Options) -> None:
    """Raise `UserError` for an option of a user that XLA does not know, before anything is written."""
    try:
        _compile_nothing(options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"training.compiler_options: {first_line(error)}") from None


def _compile_nothing(options: Any, sharding: NamedSharding | None = None) -> None:
    jax.jit(lambda: 0, out_shardings=sharding).lower().compile(compiler_options=options)
