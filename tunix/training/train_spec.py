"""The train spec of a config on a mesh (`TrainSpec`): architecture, loss, optimizer, and the step made of them."""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from tunix.base.errors import UserError
from tunix.config import Config, Model, Training, list_dims
from tunix.config.batch import BatchSchedule, BatchShape, PipelineShape, Spans
from tunix.config.layers import ExpertsMlp
from tunix.config.model_checks import check_stages
from tunix.config.task import Grpo
from tunix.data.batches import BEGINNING, DataSchedule, Position, abstract_arrays, make_data_schedule, schedule_after
from tunix.models.context_parallel import select_exchange
from tunix.models.flops import flops_per_token, tower_flops
from tunix.sharding.arrays import AnyMesh, abstract_results, has_host_memory
from tunix.sharding.layout import Layout
from tunix.sharding.mesh import check_divides, list_divisors, nearest
from tunix.training.choices import Choices, Options, Planned, keep_known_options, select
from tunix.training.ema import Copy, init_ema, make_ema
from tunix.training.loss import LossFn, find_loss_kind, make_loss, try_out_loss
from tunix.training.optimizer import SpikeGuard, make_guard, make_optimizer, make_schedule
from tunix.training.pipeline_step import make_pipelined_gradients
from tunix.training.qk_clip import make_clip
from tunix.training.state import Architecture, State, abstract_params, describe, new_state, start_state
from tunix.training.step import Gradients, Update, make_gradients, make_train_step
from tunix.training.teacher import AnyTeacher, describe_teacher

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sizes:
    """The numbers that follow from config and mesh."""

    schedule: BatchSchedule
    data_schedule: DataSchedule  # through the data
    total_steps: int | None  # None: only the data will tell
    flops_by_length: dict[int, float]  # FLOPs of a token, keyed by the length of its sequence
    num_devices: int

    @property
    def batch(self) -> BatchShape:
        """The batch of the run, which follows all stages."""
        return self.schedule.periods[-1].shape

    @property
    def flops_per_token(self) -> float:
        return self.flops_by_length[self.batch.seq_len]

    @property
    def tflop_per_step(self) -> float:
        return self.flops_per_token * self.batch.num_tokens / 1e12


def derive_flops_per_token(cfg: Config, arch: Architecture, seq_len: int) -> float:
    """Return the FLOPs of both passes for a token of a run's task, without images."""
    return flops_per_token(cfg.model, arch.num_active, arch.num_active_trained, seq_len, cfg.task.needs_head)


def derive_sizes(train_spec: "TrainSpec", num_samples: int | None, start: Position = BEGINNING) -> Sizes:
    """Derive the sizes of a run that goes on from `start`. `num_samples`, those to train on, is None in a dry run."""
    cfg, arch = train_spec.cfg, train_spec.arch
    schedule = schedule_after(start, train_spec.choices.batch, train_spec.mesh.shape)
    data_schedule = make_data_schedule(cfg, schedule, start)
    lengths = {period.shape.seq_len for period in schedule.periods}
    # Images of a row are computed whatever its slots hold; each token has its share of them.
    of_images = tower_flops(cfg.model, arch.trained_shares_of_vision) * cfg.training.images_per_row
    return Sizes(
        schedule,
        data_schedule,
        last_step(cfg.training, data_schedule, schedule.periods[-1].shape.num_tokens, num_samples),
        {length: derive_flops_per_token(cfg, arch, length) + of_images / length for length in lengths},
        train_spec.mesh.size,
    )


def last_step(
    training: Training, data_schedule: DataSchedule, tokens_per_step: int, num_samples: int | None
) -> int | None:
    """Return the last step of a run, which ends a cycle: that at which it reaches the first of its limits.

    `tokens_per_step` are those behind all stages. None: only the data will tell, and their `num_samples` are not known.
    """
    limits, start, cycle = [], data_schedule.start, data_schedule.cycle
    if training.max_tokens is not None:
        # A cycle of `cycle.samples` samples gives `cycle.steps` steps their tokens: max_tokens as a number of samples.
        samples = training.max_tokens * cycle.samples // (tokens_per_step * cycle.steps)
        limits.append(data_schedule.last_step_within(samples - start.num_samples))
    if training.num_epochs is not None and num_samples is not None:
        # Samples that are left out belong to their epoch: they bring its end nearer.
        end = math.floor(training.num_epochs * num_samples)
        last = data_schedule.last_step_within(max(0, end - start.next_sample))
        # `next_sample` grows with the step, so the last step that stays within the end is found by bisection.
        steps = range(start.step, last + 1, cycle.steps)
        limits.append(steps[bisect_right(steps, end, key=data_schedule.next_sample) - 1])
    limits = [max(1, limit) for limit in limits]
    if training.max_steps is not None:
        limits.append(training.max_steps)
    return max(start.step, min(limits)) if limits else None


def check_model_on_mesh(model: Model, sizes: Mapping[str, int]) -> None:
    """Raise `UserError` where a model does not run on a mesh of these sizes, whatever the training is."""
    check_stages(model, sizes)
    check_divides(model.dims, sizes)
    select_exchange(model, sizes, model.cp_exchange)


def check_on_mesh(cfg: Config, sizes: Mapping[str, int]) -> None:
    """Raise `UserError` where the model, its sequences or its batch do not fit a mesh of these sizes.

    A batch that is left open (`training.micro_batch_size=auto`) fits every mesh.
    """
    # Check the model first: its messages are the most useful.
    check_model_on_mesh(cfg.model, sizes)
    check_divides(cfg.dims, sizes)  # `cfg.dims` has the tokens of a sequence too
    if cfg.training.micro_batch_size != "auto":
        check_shared_rows(cfg, cfg.training.batch_shape(sizes))


def check_shared_rows(cfg: Config, batch: BatchShape) -> None:
    """Raise `UserError` where answers share rows, and a step has no microbatch that could be left out."""
    if isinstance(cfg.task, Grpo) and cfg.task.answers_per_row > 1 and batch.num_microbatches == 1:
        raise UserError(
            f"task.answers_per_row={cfg.task.answers_per_row}: a step has one microbatch, and none can be left out; "
            "lower training.micro_batch_size, or set task.answers_per_row=1"
        )


def check_pipeline_chunks(model: Model, pipeline: PipelineShape) -> None:
    """Raise `UserError` where the layers of a stage do not make equal chunks."""
    staged = model.runs[-1]  # the only one that stages share
    num_turns = len(staged.layers) // len(staged.pattern)
    if pipeline.num_stages == 1 or num_turns % (pipeline.num_stages * pipeline.num_chunks) == 0:
        return
    turns_per_stage = num_turns // pipeline.num_stages
    units = "layers" if len(staged.pattern) == 1 else f"turns of {len(staged.pattern)} layers"
    valid = [count for count in range(2, turns_per_stage + 1) if turns_per_stage % count == 0]
    hint = f"nearest: {' or '.join(map(str, nearest(valid, pipeline.num_chunks)))}, or " if valid else "set "
    raise UserError(
        f"training.pipeline_chunks={pipeline.num_chunks} does not divide the {turns_per_stage} {units} of each of "
        f"{pipeline.num_stages} stages; {hint}training.pipeline_schedule=1f1b"
    )


def check_memory_keys(cfg: Config, pipeline: PipelineShape, mesh: AnyMesh) -> None:
    """Raise `UserError` where the layers do not make groups of `training.remat_every`, or nothing can be offloaded."""
    training = cfg.training
    for run in cfg.model.runs:
        num_shares = 1 if run in cfg.model.first_runs else pipeline.num_stages * pipeline.num_chunks
        count = len(run.layers) // len(run.pattern) // num_shares
        if count % training.remat_every:
            units = "layers" if len(run.pattern) == 1 else f"times {len(run.pattern)} layers"
            raise UserError(
                f"training.remat_every={training.remat_every} does not divide {count} {units} in a row; it may be "
                f"{', '.join(map(str, list_divisors(count)))}"
            )
    if not isinstance(mesh, Mesh) or has_host_memory(mesh):
        return
    kind = mesh.devices.flat[0].device_kind
    if training.offload != "none":
        raise UserError(
            f"training.offload={training.offload} needs devices that read the host's pinned memory, and {kind} does "
            "not; leave training.offload=none, and save memory with training.remat and model.mesh_shape"
        )
    if training.ema_decay is not None and training.ema_memory == "host":
        raise UserError(
            f"training.ema_memory=host needs devices that read the host's pinned memory, and {kind} does not; leave "
            "training.ema_memory=device, and halve the averages with training.ema_dtype=bfloat16"
        )


@dataclass(frozen=True)
class TrainSpec:
    """The parts of a training on a mesh. No array is made yet, and the devices need not exist."""

    cfg: Config
    mesh: AnyMesh
    platform: str | None  # of the devices, where the mesh has none
    choices: Choices
    arch: Architecture
    optimizer: optax.GradientTransformation
    loss_fn: LossFn
    ema: dict[str, Copy]  # of the parameters, that the state carries
    guard: SpikeGuard | None
    abstract: State  # shapes, dtypes and shardings of the state
    teacher: AnyTeacher | None
    num_hosts: int = 1  # of the devices, where the mesh has none

    @property
    def abstract_mesh(self) -> AbstractMesh:
        return self.mesh.abstract_mesh if isinstance(self.mesh, Mesh) else self.mesh

    @property
    def batch(self) -> BatchShape:
        return self.choices.shape

    @property
    def dims(self) -> dict[str, int]:
        """Size of each dimension of weights and activations, with the batch of this training (`Config.dims`)."""
        return list_dims(self.cfg.model, self.choices.batch)

    @property
    def abstract_batch(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of the batch that a step takes: the fields that the loss needs, and its
        teacher."""
        return abstract_arrays(find_loss_kind(self.cfg).fields, self.batch, self.mesh) | self.abstract_shared

    @property
    def abstract_shared(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of what all microbatches of a batch share."""
        return {} if self.teacher is None else self.teacher.abstract_shared(self.mesh)

    @property
    def layout(self) -> Layout:
        return self.choices.layout

    def new_state(self, seed: int, initial: dict[str, Any] | None = None) -> State:
        """Make the state of step 0 on its shards.

        `initial` is a tree of parameters that exist already (see `load_init_from`), with None for those to be made; its
        arrays are donated.
        """
        return self._jit_new_state()(seed, initial)

    def compile_new_state(self, seed: int) -> Callable[[], State]:
        """Compile what `new_state` runs for a seed, and return a function that runs it."""
        return partial(self._jit_new_state().lower(seed, None).compile(), seed, None)

    def new_params(self, seed: int, initial: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make the parameters of step 0 without the rest of the state; see `new_state`."""
        return self._jit_new_state("params")(seed, initial)["params"]

    def _jit_new_state(self, *parts: str) -> Any:
        """Return what makes the state of step 0, or these parts of it: XLA leaves out what the others need."""
        # With these shardings each device makes its own shards, and no larger part of a weight than it keeps.
        wanted = {name: tree for name, tree in self.abstract.items() if not parts or name in parts}

        def make(seed, initial):
            state = new_state(self.arch, self.optimizer, self.ema, self.guard, seed, initial)
            return {name: state[name] for name in wanted}

        shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
        return jax.jit(make, out_shardings=shardings, donate_argnums=1)

    def try_out_loss(self) -> None:
        """Raise `UserError` where the loss that a user brings does not work on a microbatch of this training."""
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
        absent = sorted(self.ema.keys() - state.get("copies", {}).keys())
        if not absent:
            return state
        log.warning("the checkpoint has no %s of the parameters: it starts from those of now", " and ".join(absent))

        ema = {name: self.ema[name] for name in absent}
        shardings = jax.tree.map(lambda leaf: leaf.sharding, {name: self.abstract["copies"][name] for name in absent})

        def start(params):
            return init_ema(ema, self.arch.trained(params))

        return state | {"copies": state.get("copies", {}) | jax.jit(start, out_shardings=shardings)(state["params"])}

    def compiler_options(self) -> Options:
        """Return XLA's options for the step; those of the config win."""
        return keep_known_options(self.choices.options, self.mesh) | self.cfg.training.compiler_options

    def with_microbatches(self, count: int) -> "TrainSpec":
        """Return the same with steps of so many microbatches; the state is the same."""
        alone = {"gradient_accumulation_steps": count, "global_batch_size": None, "global_batch_tokens": None}
        planned = self.choices.planned
        batch = planned.batch.model_copy(update=alone)
        return assemble(self.cfg, self.mesh, self.platform, planned._replace(batch=batch))

    def gradients(self) -> Gradients:
        """Return what computes the gradients of a step: one microbatch after another, or one stream through stages."""
        pipeline, sync_every = self.choices.pipeline, self.choices.sync_every
        reports_scores = self.cfg.optimizer.score_limit is not None
        if pipeline.num_stages == 1:
            # Of layers that gather ahead, which hide the sum over replicas behind their work.
            sums_in_last = self.choices.prefetch and self.layout.has_replicas(self.mesh.shape)
            unrolled = self.choices.remat.unrolled
            return make_gradients(self.arch, self.loss_fn, sync_every, sums_in_last, reports_scores, unrolled)
        return make_pipelined_gradients(
            self.arch, self.loss_fn, sync_every, pipeline.num_chunks, pipeline.recompute_runs, reports_scores
        )

    def step(self, spans: Spans) -> Callable[[State, dict[str, Any]], tuple[State, dict]]:
        """Return the train step of a run of these steps, on which the learning rate depends; to be compiled."""
        cfg = self.cfg
        schedule = make_schedule(cfg.scheduler, cfg.optimizer.learning_rate, spans)
        # A frozen base keeps the biases of its routers.
        mlp = cfg.model.mlp
        bias_rate = mlp.bias_rate if isinstance(mlp, ExpertsMlp) and not cfg.model.lora.rank else None
        norms_every = cfg.logging.layer_norms_every
        update = Update(self.optimizer, schedule, self.ema, self.guard, bias_rate, norms_every, make_clip(cfg))
        return make_train_step(self.gradients(), self.arch, update)


def assemble(cfg: Config, mesh: AnyMesh, platform: str | None = None, planned: Planned | None = None) -> TrainSpec:
    """Return what `cfg` trains on `mesh`, which must be the mesh in use (`jax.set_mesh`).

    `platform` is that of the devices, where the mesh has none: a plan describes meshes of devices that are not there.

    Raises:
        UserError: the model, or a choice of the config, does not run on this mesh.
    """
    check_model_on_mesh(cfg.model, mesh.shape)
    training, choices = cfg.training, select(cfg, mesh, platform, planned)
    check_pipeline_chunks(cfg.model, choices.pipeline)
    check_memory_keys(cfg, choices.pipeline, mesh)
    # From here on everything is made of shapes: `describe` traces the model, `abstract_results` the state of step 0.
    arch = describe(cfg.model, choices.layout, choices.remat, choices.parts_per_stage, choices.prefetch)
    optimizer = make_optimizer(
        cfg.optimizer, arch.trained_weights, training.max_grad_norm, cfg.model.lora.loraplus_lr_ratio
    )
    ema, guard = make_ema(training), make_guard(training)
    start = partial(start_state, arch, optimizer, ema, guard)
    abstract = abstract_results(mesh, start, abstract_params(arch, mesh))
    teacher = describe_teacher(cfg, choices.planned, mesh, platform)
    loss_fn = make_loss(cfg.with_training(loss_chunk_size=choices.planned.loss_chunk_size), teacher)
    return TrainSpec(cfg, mesh, platform, choices, arch, optimizer, loss_fn, ema, guard, abstract, teacher)


def assemble_stages(train_spec: TrainSpec, schedule: BatchSchedule) -> dict[BatchShape, TrainSpec]:
    """Return one for each shape of the batch, in the order in which a run needs them.

    `train_spec` is that of the batch behind all stages. All programs have the same state.
    """
    train_specs: dict[BatchShape, TrainSpec] = {}
    for period in schedule.periods:
        if period.shape == train_spec.batch:
            train_specs[period.shape] = train_spec
        elif period.shape not in train_specs:
            planned = train_spec.choices.planned._replace(batch=period.batch)
            train_specs[period.shape] = assemble(train_spec.cfg, train_spec.mesh, train_spec.platform, planned)
    return train_specs
