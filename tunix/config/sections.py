"""Sections around the training: checkpoints, evaluation, logs, processes."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tunix.base.buckets import BUCKETS, is_address, is_bucket
from tunix.base.config_types import Count, CountOrZero, Flag, NonNegative, Positive, Section, Share, Temperature, row_of
from tunix.base.files import expand_home
from tunix.config.task import Sampling
from tunix.data.sources import AnySource
from tunix.run.table import SINKS, try_out


class Checkpoint(Section):
    """Steps after which the state is saved, and checkpoints that are kept. The last step is always saved."""

    save_every_steps: Count | None
    """Steps between checkpoints; null saves only the last."""
    save_at_steps: tuple[Count, ...]
    """Steps whose checkpoints are saved too, and kept for good."""
    save_first: Flag
    """Also save before the first step."""
    max_to_keep: Count
    """Newest checkpoints kept."""
    keep_every_steps: Count | None
    """Checkpoints at multiples of this are kept for good."""
    keep_best: Flag
    """Also keep the checkpoint with the lowest held-out loss, of those at evaluated steps; of task=grpo that with the
    highest held-out reward."""
    async_: Flag = Field(alias="async")
    """Write in the background while training goes on."""
    folder: str | None
    """Where checkpoints are written, with what a run needs to go on from there: a folder, or an address like
    s3://BUCKET/RUN or gs://BUCKET/RUN; resume=ADDRESS goes on. null is the run's folder."""
    timeout_s: Positive
    """Seconds for which a request that a bucket does not answer is tried again, before a save has failed."""
    verify: Literal["always", "once", "never"]
    """Compare a checkpoint with the digests of its files before it is read: each time, only once, or never."""

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, folder: str | None) -> str | None:
        if folder is None:
            return None
        if not is_address(folder):  # a run that goes on from elsewhere finds its checkpoints
            return str(expand_home(folder).absolute())
        if not is_bucket(folder):
            schemes = " or ".join(f"{scheme}://BUCKET/NAME" for scheme in BUCKETS)
            raise ValueError(f"cannot be written; expected a folder, {schemes}")
        return folder.rstrip("/")


class Evaluation(Section):
    """Held-out loss on a fixed set, and a sampled continuation at the end."""

    every_steps: Count | None
    """Steps between evaluations; null evaluates only at the end."""
    patience: Count | None
    """The run ends, with everything saved, after this many evaluations in a row that did not lower the held-out loss,
    or with task=grpo did not raise the held-out reward; null never ends it."""
    min_improvement: NonNegative
    """Least decrease of the held-out loss, or increase of the reward, that counts for evaluation.patience."""
    num_sequences: Count
    """Held-out sequences of seq_len tokens, the same at every evaluation; fewer if there are fewer. Of each set too."""
    sets: dict[str, AnySource]
    """More sets by name, each all documents of a source: evaluation.sets.NAME=jsonl takes the keys of data=jsonl, and
    evaluation.sets.NAME.paths=[...] changes one. metrics.jsonl has a line for each, with NAME as its split."""
    choices: dict[str, str]
    """Files of questions with several choices, by name: +evaluation.choices.NAME=FILE.jsonl (docs/metrics.md has their
    form). metrics.jsonl has a line for each, with the share of questions whose right choice is the likeliest."""
    sample_tokens: CountOrZero
    """Tokens sampled at the end as the continuation of a held-out document, half of the context at most; 0 for none."""
    sample_temperature: Temperature
    """Sampling temperature; 0 takes the likeliest token."""
    num_prompts: Count
    """task=grpo: held-out prompts that are answered, the same at every evaluation; fewer if there are fewer."""
    num_samples: Count
    """task=grpo: answers drawn to each; pass@k is reported for k = 2, 4, ... up to this."""
    sampling: Sampling
    """task=grpo: how these answers are drawn. sampling@evaluation.sampling=standard takes another preset."""

    @model_validator(mode="after")
    def _check(self) -> "Evaluation":
        for name, source in self.sets.items():
            source._key = f"evaluation.sets.{name}"
        for key, names in (("sets", self.sets), ("choices", self.choices)):
            others = ("train", "held_out", "all", "goodput", *(self.sets if key == "choices" else ()))
            if taken := [name for name in names if name in others]:
                raise ValueError(f"evaluation.{key}.{taken[0]}: this name is taken; choose another")
        if self.num_samples > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"evaluation.num_samples={self.num_samples} answers are all the same at "
                "evaluation.sampling.temperature=0; raise it"
            )
        return self


class WandbKeys(Section):
    """Weights & Biases, where logging.sinks names wandb. `wandb login` or WANDB_API_KEY gives the key."""

    mode: Literal["online", "offline"]
    """offline keeps the run in its folder; `wandb sync` sends it later. The variable WANDB_MODE wins."""
    project: str | None
    """Project; null takes project_name."""
    entity: str | None
    """User or team; null takes the one of the key."""
    group: str | None
    """Group of runs."""
    tags: tuple[str, ...]
    """Tags of the run."""
    artifacts: tuple[str, ...]
    """Patterns of files in the run's folder that are sent as an artifact at the end: [config.yaml,samples.jsonl]."""


class MlflowKeys(Section):
    """MLflow, where logging.sinks names mlflow."""

    tracking_uri: str | None
    """Address of the server; null takes the variable MLFLOW_TRACKING_URI."""
    experiment: str | None
    """Experiment; null takes project_name."""
    tags: dict[str, str]
    """Tags of the run."""


class WebhookKeys(Section):
    """Messages at start, end and failure, where logging.sinks names webhook."""

    url: str | None
    """Address that takes {"text": "..."}, as Slack's incoming webhooks do; null takes the variable TUNIX_WEBHOOK_URL,
    which is not saved with the config."""


class PrometheusKeys(Section):
    """Numbers of a running job in Prometheus' text format, where logging.sinks names prometheus."""

    host: str
    """Address to listen on: 127.0.0.1 is this machine alone, 0.0.0.0 everybody who can reach it."""
    port: Annotated[int, Field(ge=1, le=65535)] | None
    """Port of http://HOST:PORT/metrics; null is none."""


class Logging(Section):
    """Sinks of numbers, texts and images, and how often a line is shown."""

    every_steps: Count
    """Steps between lines on the console and in train.log, where the first and the last step of a start have one too;
    every other sink gets every step."""
    layer_norms_every: Count | None
    """Steps between lines with norms of each layer: of gradients, weights and their changes; null for none."""
    level: Literal["debug", "info", "warning", "error"]
    """Least severe messages of tunix that are shown and kept in train.log."""
    ranks: tuple[CountOrZero, ...] | None
    """Processes whose messages are shown on their terminal; null is all of them. Each has a log file of its own."""
    sinks: tuple[row_of(SINKS), ...]  # type: ignore[valid-type]
    """What is written: jsonl is metrics.jsonl, tensorboard its events; wandb, mlflow, webhook and prometheus tell other
    programs (docs/metrics.md); `package.module:name` is a sink of your own (docs/extending.md). The console is always
    there."""
    close_timeout_s: NonNegative
    """Seconds at the end of a run for sinks that have not sent everything yet."""
    wandb: WandbKeys
    """Weights & Biases."""
    mlflow: MlflowKeys
    """MLflow."""
    webhook: WebhookKeys
    """Messages."""
    prometheus: PrometheusKeys
    """Numbers for a monitor to fetch."""

    def try_out(self, config: dict[str, Any]) -> None:
        """Raise `UserError` where a sink cannot work: a package, a key or an address is missing, or its code fails.

        `config` has the values of every key, as a sink gets them.
        """
        for name in self.sinks:
            try_out(name, config)


class Profile(Section):
    """Steps and processes that `training.profile_communication` traces."""

    after_step: Count
    """The trace starts after this step: the first ones warm up."""
    steps: Count
    """Steps that are traced."""
    ranks: tuple[CountOrZero, ...] | None
    """Processes that trace; null is all of them."""


class Distributed(Section):
    """Processes of one run. The environment gives the values that are null."""

    coordinator_address: str | None
    """host:port of process 0."""
    num_processes: Count | None
    """Processes of the run."""
    process_id: CountOrZero | None
    """Number of this process, from 0."""
    local_device_ids: tuple[CountOrZero, ...] | None
    """Devices of this host that belong to this process."""
    init_timeout_s: Count
    """Seconds to wait for all processes at start."""
    heartbeat_timeout_s: Count
    """Seconds without a sign of life after which a process counts as dead and the run ends."""
    shutdown_timeout_s: Count
    """Seconds to wait for the other processes at the end."""
    step_deadline_factor: Positive
    """The run counts as hung when a step takes this many times the median step."""
    step_deadline_s: Positive
    """Shortest deadline of a step, in seconds."""
    phase_deadline_s: Positive
    """Longest time in seconds for each of these: compiling, saving, an evaluation, reading the data."""
    shared_filesystem: Flag | Literal["auto"]
    """True if all hosts see the run's folder; auto finds out. If not, every host keeps a folder of its own, and
    process 0 keeps the checkpoints: it gathers the whole state in its memory."""
    allow_idle_devices: Flag
    """Accept a mesh smaller than the machine."""

    @model_validator(mode="after")
    def _check(self) -> "Distributed":
        if self.process_id is not None and self.num_processes is not None and self.process_id >= self.num_processes:
            raise ValueError(
                f"distributed.process_id={self.process_id} must be below distributed.num_processes={self.num_processes}"
            )
        return self


class Plan(Section):
    """Plans: memory, communication and time of a step on each mesh, for `tunix.plan` and for choices left to `auto`."""

    topology: str
    """The cluster of tunix.plan, KIND:GPUS for one node or KIND:NODESxGPUS; a kind is a file of conf/command/device, or
    a path to one like it. In a run it only gives the kind, where that of the run's devices is not known."""
    network: str | None
    """Network between nodes, a file of conf/command/network like infiniband_400, tcpx_200 or efa_400; null is that of
    the kind of device."""
    choose_mesh: Flag
    """model.mesh_shape=auto takes the mesh that is predicted to be fastest, not all devices on fsdp."""
    memory_share: Annotated[Share, Field(gt=0)]
    """Share of a device's memory that the program may use. Set XLA_PYTHON_CLIENT_MEM_FRACTION, by default 0.75, to the
    same."""
    num_compiled: CountOrZero
    """Meshes to compile first, the best by derived costs; more follow until the first place is settled. 0 compiles
    none, and all numbers are derived."""
    output: str | None
    """Folder for plan.txt, plan.json and plan.png of tunix.plan; null writes none."""
