"""The training program of a config on a mesh: architecture, loss, optimizer, and the step made of them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from tunix.base.dotted import import_object
from tunix.config import Config, Model, Training
from tunix.config.batch_stages import BatchSchedule, BatchShape, Spans
from tunix.config.mlp import ExpertsMlp
from tunix.config.pipeline_shape import PIPELINE_SCHEDULES, PipelineShape
from tunix.data.batch import abstract_arrays
from tunix.models.expert_exchanges import check_expert_exchange
from tunix.models.kernels import choose_expert_products, choose_kernel, mesh_device
from tunix.models.remat import Remat
from tunix.sharding.arrays import abstract_results
from tunix.sharding.layout import Layout
from tunix.training.copies import Copy, make_copies, start_copies
from tunix.training.losses import LossFn, find_loss_kind, try_out_loss
from tunix.training.mesh_choices import build_layout, choose_sync, find_platform, read_remat, settle_remat
from tunix.training.optim import make_optimizer, make_schedule
from tunix.training.overlap import Options, Overlap, choose_overlap, keep_known_options
from tunix.training.pipelined import make_pipelined_gradients
from tunix.training.program_checks import check_host_memory, check_model_on_mesh, check_pipeline_chunks
from tunix.training.spikes import SpikeGuard, make_guard
from tunix.training.state import (
    Architecture,
    State,
    abstract_params,
    describe,
    lay_out_for_optimizer,
    new_state,
    start_state,
)
from tunix.training.step import Gradients, Update, make_gradients, make_train_step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Program:
    """The parts of a training program. No array is made yet, and the devices need not exist."""

    cfg: Config  # with a policy in place of training.remat=auto
    mesh: Mesh | AbstractMesh
    platform: str | None  # of the devices; None is not known
    layout: Layout
    arch: Architecture
    optimizer: optax.GradientTransformation
    loss_fn: LossFn
    overlap: Overlap
    copies: dict[str, Copy]  # of the parameters, that the state carries
    guard: SpikeGuard | None
    abstract: State  # shapes, dtypes and shardings of the state

    @property
    def abstract_mesh(self) -> AbstractMesh:
        return self.mesh.abstract_mesh if isinstance(self.mesh, Mesh) else self.mesh

    @property
    def batch(self) -> BatchShape:
        return self.cfg.training.batch_shape(self.mesh.shape)

    @property
    def pipeline(self) -> PipelineShape:
        return self.cfg.training.pipeline(self.mesh.shape)

    @property
    def sync_every(self) -> int:
        """Microbatches between two reductions of gradients."""
        return choose_sync(self.cfg.training, self.mesh)

    @property
    def remat(self) -> Remat:
        """Arrays that blocks keep for their backward pass."""
        return read_remat(self.cfg.training)

    def with_batch(self, training: Training) -> "Program":
        """Return the program with the batch of another `training`, whose other keys are the same.

        Model, optimizer and state know no batch: costs of many batches are derived from one program.
        """
        training = training.model_copy(update={"remat": self.cfg.training.remat})
        cfg = self.cfg.model_copy(update={"training": training})
        return replace(self, cfg=cfg, overlap=choose_overlap(cfg, self.layout, self.mesh, self.platform))

    def new_state(self, seed: int, given: dict[str, Any] | None = None) -> State:
        """Make the state of step 0 on its shards.

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
        # With these shardings each device makes its own shards, and no larger part of a weight than it keeps.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        make = partial(new_state, self.arch, self.optimizer, self.copies, self.guard)
        return jax.jit(make, out_shardings=shardings, donate_argnums=1)

    def new_params(self, seed: int, given: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make the parameters of step 0 without the rest of the state; see `new_state`."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract["params"])
        make = partial(new_state, self.arch, self.optimizer, {}, None)
        # XLA leaves out what the result does not need: no moments are made.
        params_alone = jax.jit(
            lambda seed, given: make(seed, given)["params"], out_shardings=shardings, donate_argnums=1
        )
        return params_alone(seed, given)

    def try_out_loss(self) -> None:
        """Raise `UserError` where the loss that a user brings does not work on a microbatch of this program."""
        batch = abstract_arrays(find_loss_kind(self.cfg).fields, self.batch._replace(num_microbatches=1), self.mesh)
        rows = jax.eval_shape(lambda batch: {name: leaf[0] for name, leaf in batch.items()}, batch)
        try_out_loss(self.cfg, self.loss_fn, self.arch.module, self.abstract["params"], rows)

    def complete(self, state: State) -> State:
        """Return the state of a checkpoint with the parts that it lacks, because the config asks for them only now.

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
            return start_copies(copies, lay_out_for_optimizer(self.arch.trained(params), self.arch))["copies"]

        started = jax.jit(start, out_shardings=shardings)(state["params"])
        return state | {"copies": state.get("copies", {}) | started}

    def compiler_options(self) -> Options:
        """Return XLA's options for the step; those of the config win."""
        return keep_known_options(self.overlap.options, self.mesh) | self.cfg.training.compiler_options

    def gradients(self) -> Gradients:
        """Return what computes the gradients of a step, by the schedule of the pipeline."""
        return import_object(PIPELINE_SCHEDULES[self.pipeline.schedule].gradients)(self)

    def step(self, spans: Spans) -> Callable[[State, dict[str, Any]], tuple[State, dict]]:
        """Return the train step of a run of these steps, on which the learning rate depends; to be compiled."""
        cfg = self.cfg
        schedule = make_schedule(cfg.scheduler, cfg.optimizer.learning_rate, spans)
        gradients = self.gradients()
        norms_every = cfg.logging.layer_norms_every
        update = Update(self.optimizer, schedule, self.copies, self.guard, _read_bias_rate(cfg.model), norms_every)
        return make_train_step(gradients, self.arch, update)


def one_by_one(program: Program) -> Gradients:
    """Return what computes the gradients of a step microbatch after microbatch."""
    return make_gradients(program.arch, program.loss_fn, program.sync_every)


def as_stream(program: Program) -> Gradients:
    """Return what computes the gradients of a step of which the parts are one stream through the stages."""
    return make_pipelined_gradients(program.arch, program.loss_fn, program.sync_every, program.pipeline.num_chunks)


def abstract_batch(cfg: Config, mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes, dtypes and shardings of the batch that a step takes: the fields that the loss needs."""
    return abstract_arrays(find_loss_kind(cfg).fields, cfg.training.batch_shape(mesh.shape), mesh)


def assemble(cfg: Config, mesh: Mesh | AbstractMesh, platform: str | None = None) -> Program:
    """Return the program of `cfg` for `mesh`, which must be the mesh in use (`jax.set_mesh`).

    `platform` is that of the devices, where the mesh has none: a plan describes meshes of devices that it has not.

    Raises:
        UserError: the model, or a choice of the config, does not run on this mesh.
    """
    platform = platform or find_platform(mesh)
    cfg = settle_remat(cfg, platform)
    training, layout = cfg.training, build_layout(cfg, mesh, platform)
    # A kernel or an exchange that does not fit is refused here.
    for heads in cfg.model.kinds_of_heads:
        choose_kernel(cfg.model.attention, heads.dim, layout.compute, cfg.model.attention_options)
    choose_expert_products(cfg.model.expert_products, layout.compute)
    check_model_on_mesh(cfg.model, mesh.shape)
    check_expert_exchange(cfg.model, layout.expert_exchange, mesh_device())
    check_pipeline_chunks(cfg, mesh)
    check_host_memory(cfg, mesh)
    overlap = choose_overlap(cfg, layout, mesh, platform)
    # From here on everything is made of shapes: `describe` traces the model, `abstract_results` the state of step 0.
    parts_per_stage = training.parts_per_stage(mesh.shape)
    arch = describe(cfg.model, layout, read_remat(training), parts_per_stage, overlap.prefetch)
    optimizer = make_optimizer(cfg.optimizer, arch.trained_weights, training.max_grad_norm)
    copies, guard = make_copies(training), make_guard(training)
    start = partial(start_state, arch, optimizer, copies, guard)
    abstract = abstract_results(mesh, start, abstract_params(arch, mesh))
    loss_fn = find_loss_kind(cfg).make(cfg)
    return Program(cfg, mesh, platform, layout, arch, optimizer, loss_fn, overlap, copies, guard, abstract)


def assemble_stages(program: Program, schedule: BatchSchedule) -> dict[BatchShape, Program]:
    """Return a program for each shape of the batch, in the order in which a run needs them.

    `program` is that of the batch behind all stages. All programs have the same state.
    """
    programs: dict[BatchShape, Program] = {}
    last = schedule.periods[-1].shape
    for period in schedule.periods:
        if period.shape not in programs:
            cfg = program.cfg.model_copy(update={"training": period.training})
            programs[period.shape] = program if period.shape == last else assemble(cfg, program.mesh, program.platform)
    return programs


def _read_bias_rate(model: Model) -> float | None:
    """Return the rate of the routers' biases; None where they have none, or where a frozen base keeps them."""
    return model.mlp.bias_rate if isinstance(model.mlp, ExpertsMlp) and not model.lora.rank else None
