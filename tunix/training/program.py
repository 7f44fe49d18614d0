"""The training program of a config on a mesh: architecture, loss, optimizer, and the step made of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from tunix.base.dotted import import_object
from tunix.base.errors import UserError
from tunix.config import Config, Model, Training
from tunix.config.batch_stages import BatchSchedule, BatchShape, Spans
from tunix.config.mlp import ExpertsMlp
from tunix.config.pipeline_shape import PIPELINE_SCHEDULES, PipelineShape
from tunix.config.training import REMAT_BY_PLATFORM
from tunix.data.batch import abstract_arrays
from tunix.models.expert_exchanges import check_expert_exchange, choose_expert_exchange
from tunix.models.kernels import choose_expert_products, choose_kernel, mesh_device
from tunix.models.remat import Remat
from tunix.sharding.arrays import abstract_results
from tunix.sharding.dims import keeping_axes
from tunix.sharding.layout import STRATEGIES, Layout
from tunix.sharding.mesh import device_mesh
from tunix.sharding.mesh_shape import data_shards, num_stages, unsplit_dims
from tunix.training.copies import Copy, make_copies, start_copies
from tunix.training.losses import LossFn, loss_kind, try_out_loss
from tunix.training.optim import make_optimizer, make_schedule
from tunix.training.overlap import Options, Overlap, choose_overlap, known_options
from tunix.training.pipelined import make_pipelined_gradients
from tunix.training.program_checks import check_host_memory, check_model, check_pipeline_chunks
from tunix.training.spikes import SpikeGuard, make_guard
from tunix.training.state import Architecture, State, abstract_params, describe, new_state, optimizer_view, start_state
from tunix.training.step import Gradients, Update, make_gradients, make_train_step


def build_layout(cfg: Config, mesh: Mesh) -> Layout:
    strategy, dtypes = STRATEGIES[cfg.training.sharding_strategy], cfg.training.dtypes
    unsplit = frozenset(unsplit_dims(cfg.dims, mesh.shape))
    on_host = cfg.training.offload == "optimizer"
    layout = Layout(
        strategy,
        unsplit,
        dtypes["param"],
        dtypes["compute"],
        dtypes["reduce"],
        block_products="plain" if cfg.training.matmul_dtype is None else cfg.training.matmul_dtype,
        moments_on_host=on_host,
        expert_exchange=choose_expert_exchange(cfg.model, mesh.shape, _platform(mesh)).name,
        splits_stream=_splits_stream(cfg, mesh.shape),
    )
    return layout if num_stages(mesh.shape) > 1 else layout.with_all_layers()


def _platform(mesh: Mesh | AbstractMesh) -> str | None:
    """Return the platform of the devices of a mesh; None if it has no devices."""
    device = (mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh).abstract_device
    return None if device is None else device.platform


def _splits_stream(cfg: Config, sizes: Mapping[str, int]) -> bool:
    """Return whether devices split the tokens of the residual stream.

    Experts with biases keep it whole: jax 0.10.2 cannot give such a vector to tokens that vary over more axes than it.
    """
    has_biases = isinstance(cfg.model.mlp, ExpertsMlp) and cfg.model.mlp.biases
    if has_biases and cfg.training.sequence_parallel is True:
        raise UserError(
            "training.sequence_parallel=true: the experts of this model have biases (model.mlp.biases=true); set "
            "training.sequence_parallel=auto"
        )
    return cfg.training.splits_stream(sizes) and not has_biases


def build_mesh(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a run; see `device_mesh`."""
    return device_mesh(cfg.model.mesh_shape, cfg.dims, cfg.distributed.allow_idle_devices, devices)


def read_remat(training: Training) -> Remat:
    """Return what blocks keep for their backward pass; see `Training.remat_policy` for what it raises."""
    return Remat(training.remat_policy, training.remat_every, on_host=training.offload == "activations")


def settle_remat(cfg: Config, platform: str | None) -> Config:
    """Return the config with a policy in place of `training.remat=auto`; `platform` None is not known."""
    if cfg.training.remat != "auto":
        return cfg
    policy = REMAT_BY_PLATFORM.get(platform or "", "full")
    return cfg.model_copy(update={"training": cfg.training.model_copy(update={"remat": policy})})


def choose_sync(training: Training, mesh: Mesh | AbstractMesh) -> int:
    """Return the microbatches between two reductions of gradients on a mesh.

    Where an axis splits the gradients, a reduction once a step needs whole gradients on each device, and weights that
    are gathered for the step. Elsewhere each device has whole gradients anyway.
    """
    sizes, strategy = mesh.shape, STRATEGIES[training.sharding_strategy]
    num_microbatches = training.batch_shape(sizes).num_microbatches
    every = training.sync_gradients_every
    if every == "auto":
        splits = strategy.gradients and any(sizes[axis] > 1 for axis in keeping_axes())
        every = 1 if splits or data_shards(sizes) == 1 else num_microbatches
    if training.pipeline(sizes).is_stream and (every > 1 or strategy.gathered_for == "step"):
        return num_microbatches  # parts of two microbatches are at work in one tick
    return every


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Program:
    """The parts of a training program. No array is made yet, and the devices need not exist."""

    cfg: Config
    layout: Layout
    arch: Architecture
    optimizer: optax.GradientTransformation
    loss_fn: LossFn
    pipeline: PipelineShape
    sync_every: int  # microbatches between two reductions of gradients
    overlap: Overlap
    copies: dict[str, Copy]  # of the parameters, that the state carries
    guard: SpikeGuard | None
    abstract: State  # shapes, dtypes and shardings of the state

    def new_state(self, seed: int, given: dict[str, Any] | None = None) -> State:
        """The state of step 0, made on its shards.

        `given` is a tree of parameters that exist already (see `load_init_from`), with None for those to be made; its
        arrays are donated.
        """
        return self._new_state(seed, given)

    def compile_new_state(self, seed: int) -> Callable[[], State]:
        """Compile what `new_state` runs for a seed, and return a function that runs it."""
        compiled = self._new_state.lower(seed, None).compile()
        return lambda: compiled(seed, None)

    @property
    def _new_state(self) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        make = partial(new_state, self.arch, self.cfg.model, self.layout, self.optimizer, self.copies, self.guard)
        return jax.jit(make, out_shardings=shardings, donate_argnums=1)

    def new_params(self, seed: int, given: dict[str, Any] | None = None) -> dict[str, Any]:
        """The parameters of step 0 without the rest of the state, which is not made; see `new_state`."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract["params"])
        make = partial(new_state, self.arch, self.cfg.model, self.layout, self.optimizer, {}, None)
        own = jax.jit(lambda seed, given: make(seed, given)["params"], out_shardings=shardings, donate_argnums=1)
        return own(seed, given)

    def try_out_loss(self, mesh: Mesh) -> None:
        """Raise `UserError` where the loss that a user brings does not work on a microbatch of this program."""
        shape = self.cfg.training.batch_shape(mesh.shape)
        batch = abstract_arrays(loss_kind(self.cfg).fields, shape._replace(num_microbatches=1), mesh)
        rows = jax.eval_shape(lambda batch: {name: leaf[0] for name, leaf in batch.items()}, batch)
        try_out_loss(self.cfg, self.loss_fn, self.arch.module, self.abstract["params"], rows)

    def complete(self, state: State) -> State:
        """The state of a checkpoint with the parts that it lacks, because the config asks for them only now.

        Copies of the parameters start from its parameters, and the window of spikes starts empty.
        """
        if self.guard and "spikes" not in state:
            log.warning("the checkpoint has no window of %d steps for spikes: it starts empty", self.guard.window)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract["spikes"])
            state = state | jax.jit(self.guard.start, out_shardings={"spikes": shardings})()
        absent = sorted(self.copies.keys() - state.get("copies", {}).keys())
        if not absent:
            return state
        log.warning("the checkpoint has no %s of the parameters: it starts from those of now", " and ".join(absent))

        copies = {name: self.copies[name] for name in absent}
        shardings = jax.tree.map(lambda leaf: leaf.sharding, {name: self.abstract["copies"][name] for name in absent})

        def start(params):
            return start_copies(copies, optimizer_view(self.arch.trained(params), self.arch, self.layout))["copies"]

        started = jax.jit(start, out_shardings=shardings)(state["params"])
        return state | {"copies": state.get("copies", {}) | started}

    def compiler_options(self, mesh: Mesh) -> Options:
        """Return XLA's options for the step on a mesh; those of the config win."""
        return known_options(self.overlap.options, mesh) | self.cfg.training.compiler_options

    def gradients(self) -> Gradients:
        """Return what computes the gradients of a step, by the schedule of the pipeline."""
        return import_object(PIPELINE_SCHEDULES[self.pipeline.schedule].gradients)(self)

    def step(self, spans: Spans) -> Callable[[State, dict[str, Any]], tuple[State, dict]]:
        """The train step of a run of these steps, on which the learning rate depends; to be compiled."""
        cfg = self.cfg
        schedule = make_schedule(cfg.scheduler, cfg.optimizer.learning_rate, spans)
        gradients = self.gradients()
        norms_every = cfg.logging.layer_norms_every
        update = Update(self.optimizer, schedule, self.copies, self.guard, _bias_rate(cfg.model), norms_every)
        return make_train_step(gradients, self.arch, self.layout, update)


def one_by_one(program: Program) -> Gradients:
    """Return what computes the gradients of a step microbatch after microbatch."""
    return make_gradients(program.arch, program.loss_fn, program.layout, program.sync_every)


def as_stream(program: Program) -> Gradients:
    """Return what computes the gradients of a step of which the parts are one stream through the stages."""
    chunks = program.pipeline.num_chunks
    return make_pipelined_gradients(program.arch, program.loss_fn, program.layout, program.sync_every, chunks)


def abstract_batch(cfg: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the batch that a step takes: the fields that the loss needs."""
    return abstract_arrays(loss_kind(cfg).fields, cfg.training.batch_shape(mesh.shape), mesh)


def assemble(cfg: Config, mesh: Mesh) -> Program:
    """The program of `cfg` for `mesh`, which must be the mesh in use (`jax.set_mesh`)."""
    cfg = settle_remat(cfg, _platform(mesh))
    training = cfg.training
    layout = build_layout(cfg, mesh)
    # A kernel or an exchange that does not fit is refused here.
    for heads in cfg.model.kinds_of_heads:
        choose_kernel(cfg.model.attention, heads.dim, layout.compute, cfg.model.attention_options)
    choose_expert_products(cfg.model.expert_products, layout.compute)
    check_model(cfg.model, mesh.shape)
    check_expert_exchange(cfg.model, layout.expert_exchange, mesh_device())
    check_pipeline_chunks(cfg, mesh)
    check_host_memory(cfg, mesh)
    sync_every = choose_sync(training, mesh)
    device = mesh_device()
    platform = device.platform if device else None
    overlap = choose_overlap(training, layout, mesh, sync_every, platform, cfg.model)
    parts = training.parts_per_stage(mesh.shape)
    arch = describe(cfg.model, layout, read_remat(training), parts, overlap.prefetch)
    optimizer = make_optimizer(cfg.optimizer, arch.trained_weights, training.max_grad_norm)
    copies, guard = make_copies(training), make_guard(training)
    make = partial(start_state, arch, layout, optimizer, copies, guard)
    abstract = abstract_results(mesh, make, abstract_params(arch, mesh, layout))
    pipeline = training.pipeline(mesh.shape)
    return Program(
        cfg, layout, arch, optimizer, loss_kind(cfg).make(cfg), pipeline, sync_every, overlap, copies, guard, abstract
    )


def assemble_stages(program: Program, schedule: BatchSchedule, mesh: Mesh) -> dict[BatchShape, Program]:
    """Return a program for each shape of the batch, in the order in which a run needs them.

    `program` is that of the batch behind all stages. All programs have the same state.
    """
    programs: dict[BatchShape, Program] = {}
    last = schedule.periods[-1].shape
    for period in schedule.periods:
        if period.shape not in programs:
            cfg = program.cfg.model_copy(update={"training": period.training})
            programs[period.shape] = program if period.shape == last else assemble(cfg, mesh)
    return programs


def _bias_rate(model: Model) -> float | None:
    """Return the rate of the routers' biases; None where they have none, or where a frozen base keeps them."""
    return model.mlp.bias_rate if isinstance(model.mlp, ExpertsMlp) and not model.lora.rank else None
