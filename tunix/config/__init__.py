"""Config: types, units and checks of every key. Values live in conf/, each in one place. Imports no jax.

Sections have no defaults on purpose: `--cfg job` then shows everything that a run uses. A key's description is the
string below it; docs/config.md is made from these.

`compose` makes a `Config` of a command line, and `command_line` the settings of the other commands (`commands`).
`mistakes` says what a wrong key may have meant, and `foreign_names` what a key of another program is here.
`saved_runs` and `pretrained_config` fill in what a run, or the files of a model, decide. The sections are in `model`
(`layers`, `vision`; its keys together: `model_checks`), `data`, `task` (`rewards`), `training` (`batch`), `launcher`,
and small ones in `sections`.
"""

from typing import Any

from pydantic import model_validator

from tunix.base.config_types import Flag, ProjectName, RunName, Section, Seed
from tunix.base.errors import near_multiples
from tunix.config.batch import BatchKeys
from tunix.config.commands import Average, DeviceKind, Evaluate, Export, Generate, Network, Play, Samples, Serve
from tunix.config.data import AnyData, Loading, Mixture, Tokenizer
from tunix.config.launcher import AnyLauncher, Kubernetes, Local, Ray, Slurm
from tunix.config.layers import PROJECTIONS, Lora
from tunix.config.model import Model
from tunix.config.model_checks import check_qk_clip, check_stages
from tunix.config.sections import Checkpoint, Distributed, Evaluation, Logging, Plan, Profile
from tunix.config.task import FILTERS, AnyTask, Embed, Grpo, Paired, Sampling, Task, Uncut, list_tasks_of_loss
from tunix.config.training import Training, read_steps
from tunix.data.files import Source
from tunix.optimizers.schedules import Scheduler
from tunix.optimizers.table import AnyOptimizer, Optimizer
from tunix.sharding import mesh
from tunix.sharding.table import read_dims

__all__ = [
    "PROJECTIONS", "Average", "Checkpoint", "Config", "DeviceKind", "Distributed", "Evaluate", "Evaluation", "Export",
    "Generate", "Kubernetes", "Loading", "Local", "Logging", "Lora", "Model", "Network", "Optimizer",
    "Plan", "Play", "Profile", "Ray", "Samples", "Sampling", "Scheduler", "Section", "Serve", "Slurm", "Task",
    "Tokenizer", "Training",
]  # fmt: skip

# Losses that training.z_loss and the layer of model.mtp add a term to.
LOSSES_WITH_TERMS = "next_token", "dft", "grpo"


def list_dims(model: Model, batch: BatchKeys) -> dict[str, int]:
    """Return the size of each dimension of weights and activations by its letter (`tunix.sharding.table.DIMS`)."""
    return model.dims | read_dims("training", batch)


class Config(Section):
    """One run."""

    project_name: ProjectName
    """Runs are grouped under outputs/PROJECT_NAME."""
    run_name: RunName | None
    """Name shown in reports; null takes the run folder's."""
    seed: Seed
    """Initial weights, data order and sampling follow from it."""
    dry_run: Flag
    """Print every derived number, start nothing, write nothing."""
    resume: str | None
    """A run folder, RUN_DIR/checkpoints/STEP, or latest: go on from there."""
    model: Model
    """Architecture, size and mesh."""
    data: AnyData
    """Documents."""
    loading: Loading
    """From documents to batches."""
    tokenizer: Tokenizer
    """Text to tokens."""
    task: AnyTask
    """Batches and loss."""
    sampling: Sampling
    """How answers are drawn in post-training."""
    training: Training
    """The step and the run's length."""
    optimizer: AnyOptimizer
    """Update rule."""
    scheduler: Scheduler
    """Learning rate over time."""
    checkpoint: Checkpoint
    """Saving."""
    evaluation: Evaluation
    """Held-out evaluation."""
    logging: Logging
    """Console, files, TensorBoard."""
    profile: Profile
    """Traced steps."""
    distributed: Distributed
    """Processes."""
    launcher: AnyLauncher
    """What starts the processes."""
    plan: Plan
    """Memory and time before anything runs."""

    @property
    def dims(self) -> dict[str, int]:
        """Size of each dimension of weights and activations by its letter (`tunix.sharding.table.DIMS`)."""
        return list_dims(self.model, self.training)

    @property
    def sources(self) -> dict[str, Source]:
        """Sources of the training data by name; a single one has that of its kind."""
        return self.data.parts if isinstance(self.data, Mixture) else {self.data.source: self.data}

    @property
    def max_prompt_length(self) -> int:
        """Tokens of a prompt that a rollout answers, at most."""
        return self.training.seq_len - self.sampling.max_new_tokens

    @property
    def has_logits(self) -> bool:
        """True where the loss takes logits: not the numbers of model.labels, and no vectors (task=embed)."""
        return self.model.labels is None and self.task.needs_head

    @property
    def num_outputs(self) -> int:
        """Numbers of the model's head that the loss takes for each token; 0 where it takes vectors (task=embed)."""
        return self.model.num_outputs if self.task.needs_head else 0

    def with_training(self, **values: Any) -> "Config":
        """Return the config with other values of keys of `training`, which are not checked again."""
        return self.model_copy(update={"training": self.training.model_copy(update=values)})

    @model_validator(mode="after")
    def _check(self) -> "Config":
        rows, context = self.model.vocab_size, self.model.context_length
        if self.tokenizer.path is None and self.tokenizer.vocab_size > rows:
            raise ValueError(f"tokenizer.vocab_size={self.tokenizer.vocab_size} is more than model.vocab_size={rows}")
        if self.training.seq_len > context:
            raise ValueError(f"training.seq_len={self.training.seq_len} is more than model.context_length={context}")
        # A launcher takes exit code 75 for a time limit and starts the job again: a hard stop would have no effect.
        key, hard_stop = self.launcher.retries_key, self.training.hard_stop
        if hard_stop is not None and key and (times := getattr(self.launcher, key)):
            raise ValueError(
                f"training.hard_stop={hard_stop} ends the job with exit code 75, and launcher.{key}={times} starts "
                f"it again, past that step; set launcher.{key}=0"
            )
        # What depends on the mesh is checked here if the mesh is known: the user gave its sizes, or a launcher gives
        # the number of devices. Otherwise the run checks it when it sees its devices.
        sizes = mesh.explicit_sizes(self.model.mesh_shape)
        check_qk_clip(self.model, self.optimizer.score_limit)
        self._check_terms()
        if sizes:
            check_stages(self.model, sizes)
        if not isinstance(self.launcher, Local):
            launcher, allow_idle = self.launcher, self.distributed.allow_idle_devices
            devices = launcher.num_devices, self.dims, allow_idle, launcher.which_devices
            sizes = mesh.resolve(self.model.mesh_shape, *devices)
        if sizes and self.training.micro_batch_size != "auto":
            batch = self.training.batch_shape(sizes)
            if isinstance(self.task, Grpo):
                self.task.num_prompts(batch.num_sequences, batch.num_rows)
        if isinstance(self.task, Grpo):
            self._check_grpo(self.task)
        self._check_stage_lengths()
        for key in ("sets", "choices"):
            names = getattr(self.evaluation, key)
            if names and self.task.documents not in ("text", "conversation"):
                raise ValueError(
                    f"evaluation.{key}.{next(iter(names))}: task={self.task.name} has no loss on other documents; "
                    f"leave evaluation.{key} out, or measure the checkpoints with another task"
                )
        if isinstance(self.task, Embed):  # first: it takes fewer packings than other tasks whose documents stay whole
            self._check_embed(self.task)
        if isinstance(self.task, Paired | Uncut) and self.loading.packing == "concat":
            cut = "pairs" if isinstance(self.task, Paired) else "documents"
            raise ValueError(
                f"loading.packing=concat cuts {cut} of task={self.task.name} in two; set it to best_fit or pad"
            )
        if self.model.labels != self.task.output_labels:
            raise ValueError(self._describe_labels())
        return self

    def _check_terms(self) -> None:
        """Raise ValueError for another task's loss, and for terms of the loss that the task's loss does not have."""
        loss = self.task.loss or self.task.default_loss
        tasks = list_tasks_of_loss(loss)
        if tasks and self.task.name not in tasks:
            raise ValueError(
                f"task.loss={loss} is the loss of task={' and task='.join(tasks)}: batches of task={self.task.name} "
                "lack its fields, or have others that it leaves out; choose that task, or leave task.loss out"
            )
        if self.training.z_loss and loss not in LOSSES_WITH_TERMS:
            which = f"task.loss={loss}" if self.task.loss else f"the loss of task={self.task.name}"
            raise ValueError(f"training.z_loss={self.training.z_loss:g}: {which} has no such term; set it to 0")
        if self.model.mtp is not None and loss not in LOSSES_WITH_TERMS:
            raise ValueError(
                f"model.mtp: task={self.task.name} with its loss does not train this layer; pretrain, sft and grpo "
                "do; set model.mtp=null"
            )
        for key, keys in (("sampling", self.sampling), ("evaluation.sampling", self.evaluation.sampling)):
            if keys.by_mtp and self.model.mtp is None:
                raise ValueError(
                    f"{key}.guess_by=mtp: model.mtp=null has no layer to guess by; set it to prompt_lookup"
                )

    def _check_stage_lengths(self) -> None:
        for number, stage in enumerate(self.training.batch_stages):
            if stage.seq_len is not None and self.task.offline_top_k is not None:
                raise ValueError(
                    f"training.batch_stages.{number}.seq_len={stage.seq_len} cuts sequences that the teacher of "
                    f"task.teacher_top_k={self.task.offline_top_k} has read whole; leave seq_len out, or set "
                    "task.teacher_top_k=null"
                )
            if stage.seq_len is not None and self.task.documents != "text":
                raise ValueError(
                    f"training.batch_stages.{number}.seq_len={stage.seq_len} would cut a {self.task.documents} of "
                    f"task={self.task.name} in parts; leave seq_len out, or set task=pretrain"
                )

    def _describe_labels(self) -> str:
        """Return what is wrong where the model gives other numbers than the task learns."""
        found, wanted = self.model.labels, self.task.output_labels
        if found is None:
            return f"task={self.task.name} needs model.labels={list(wanted or ())}"
        if wanted is None:
            return (
                f"task={self.task.name} needs a model that gives logits, and this one gives {', '.join(found)} "
                "(model.labels); start from a language model, or set task=reward or task=classify"
            )
        return (
            f"task={self.task.name} learns {', '.join(wanted)}, and the model gives {', '.join(found)} "
            "(model.labels); start from a language model, or give the labels that it has"
        )

    def _check_embed(self, task: Embed) -> None:
        """Raise ValueError where sections contradict the task."""
        if self.loading.packing != "pad":
            raise ValueError(
                f"loading.packing={self.loading.packing}: a row of task=embed has one query with its documents; set it "
                "to pad"
            )
        if self.model.lora.rank and self.model.lora.dropout:
            raise ValueError(
                f"model.lora.dropout={self.model.lora.dropout:g}: task=embed computes its vectors twice in a step, and "
                "they have to be the same; set model.lora.dropout=0"
            )
        if self.model.vision is not None and self.training.images_per_row:
            raise ValueError(
                f"training.images_per_row={self.training.images_per_row}: task=embed reads texts; set it to 0"
            )
        if large := [size for size in task.sizes or () if size >= self.model.embed_dim]:
            raise ValueError(
                f"task.sizes={list(task.sizes or ())}: {large[0]} is no part of a vector of "
                f"model.embed_dim={self.model.embed_dim}; the whole vector is learnt without being named"
            )

    def _check_grpo(self, task: Grpo) -> None:
        """Raise ValueError where sections contradict the task: the policy that learns must be the one that answers."""
        sampling = self.sampling
        if self.training.batch_stages:
            raise ValueError(
                "training.batch_stages does not go with task=grpo, whose steps share rollouts of one size; leave it "
                "out, or change training.global_batch_size with resume"
            )
        if sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature=0 gives all answers of a group the same tokens, so none is better than another; "
                "set sampling=default"
            )
        leaving_out = {key: getattr(sampling, key) for key in FILTERS}
        filters = [f"sampling.{key}={value}" for key, value in leaving_out.items() if value is not None]
        if filters and task.max_importance is not None:
            raise ValueError(
                f"{' and '.join(filters)} with task.max_importance={task.max_importance:g}: a filtered distribution is "
                "not the one that is trained, so their ratio is biased; remove the filters, or set "
                "task.max_importance=null"
            )
        if sampling.max_new_tokens >= self.training.seq_len:
            raise ValueError(
                f"sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt within "
                f"training.seq_len={self.training.seq_len}; lower it (sampling.max_new_tokens="
                f"{max(1, self.training.seq_len // 2)}), or raise training.seq_len"
            )
        if self.model.lora.rank and self.model.lora.dropout:
            raise ValueError(
                f"model.lora.dropout={self.model.lora.dropout:g}: the model that learns would not be the one that "
                "answers; set model.lora.dropout=0"
            )
        if task.answers_per_row > 1 and self.model.vision is not None and self.training.images_per_row:
            raise ValueError(
                f"task.answers_per_row={task.answers_per_row}: a row has the images of one answer "
                f"(training.images_per_row={self.training.images_per_row}); set task.answers_per_row=1, or "
                "training.images_per_row=0"
            )
        if task.adaptive and self.training.num_epochs is not None:
            raise ValueError(
                f"training.num_epochs={self.training.num_epochs:g}: {task.adaptive} reads more prompts than its steps "
                "learn from, as many as it takes; set training.max_steps in its place"
            )
        # A checkpoint has no answers of a rollout. So a run can only stop, and leave steps out, between two rollouts.
        cycle = task.num_steps_of_rollout
        for text in self.training.skip_steps:
            skipped = read_steps(text)
            if (skipped[0] - 1) % cycle or skipped[-1] % cycle:
                first, last = (skipped[0] - 1) // cycle * cycle + 1, -(-skipped[-1] // cycle) * cycle
                raise ValueError(
                    f"training.skip_steps={text} is not made of whole rollouts, each of which serves {cycle} steps "
                    f"(task.steps_per_rollout x task.passes_per_rollout); nearest: {first}:{last}"
                )
        ends = [("training.max_steps", self.training.max_steps), ("training.hard_stop", self.training.hard_stop)]
        saves = [("checkpoint.save_at_steps", step) for step in self.checkpoint.save_at_steps]
        for key, steps in (("checkpoint.save_every_steps", self.checkpoint.save_every_steps), *ends, *saves):
            if steps is not None and steps % cycle:
                raise ValueError(
                    f"{key}={steps} is within a rollout, which serves {cycle} steps (task.steps_per_rollout x "
                    f"task.passes_per_rollout); nearest: {near_multiples(steps, cycle)}"
                )
