"""Launchers, which start the processes of a run: on this machine, by Slurm, on Kubernetes, on a Ray cluster."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from tunix.base.config_types import Count, CountOrZero, Flag, Positive, Section


def _matching(pattern: str, expected: str) -> AfterValidator:
    """Return a check that a text matches a regular expression as a whole; `expected` says so to users."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


ONE_LINE = _matching(r"[^\n\r\0]*[^\s\0][^\n\r\0]*", "one line of text")
Line = Annotated[str, ONE_LINE]
Assignment = Annotated[str, _matching(r"[A-Za-z_][A-Za-z0-9_]*=.*", "NAME=VALUE, in quotes"), ONE_LINE]
TimeLimit = Annotated[str, _matching(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", "MINUTES, HH:MM:SS or DAYS-HH:MM:SS")]
Label = Annotated[str, _matching(r"[A-Za-z0-9./_-]+=[A-Za-z0-9._-]*", "LABEL=VALUE, in quotes")]
HeadNode = Annotated[
    str,
    _matching(
        r"auto|[^\s/]+:\d+",
        "auto, or HOST:PORT of the head node; without access to a node, use `ray job submit` (docs/ray.md)",
    ),
]
SlurmMemory = Annotated[str, _matching(r"\d+([KMGTkmgt][Bb]?)?", "MiB, or a number with K, M, G or T: 64G; 0 is all")]
# Kubernetes counts 1024 in Ki, Mi and Gi, and 1000 in M and G.
Bytes = Annotated[str, _matching(r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?", "bytes as Kubernetes takes them: 256Gi")]
Cores = Annotated[str, _matching(r"\d+(\.\d+)?|\d+m", "cores as Kubernetes takes them: 32, 0.5 or 500m")]
Amount = Annotated[str, _matching(r"[^\s=]+=\d+(\.\d+)?", "NAME=NUMBER, in quotes")]


class Local(Section):
    """Train in this process; the environment tells it if it is one of several."""

    retries_key: ClassVar[str | None] = None
    name: Literal["local"]
    """What starts the processes."""


class Nodes(Section):
    """Nodes of one kind, and the processes on each of them."""

    # The key with the number of new starts after exit code 75. None: this launcher knows why the run stopped, and does
    # not start it again after training.hard_stop.
    retries_key: ClassVar[str | None] = None
    nodes: Annotated[Count, Field(le=1_000_000)]
    """Nodes of the run."""
    gpus_per_node: Annotated[CountOrZero, Field(le=1000)]
    """GPUs used on each node; 0 trains on CPUs, one device a process."""
    tasks_per_node: Annotated[Count, Field(le=1000)] | None
    """Processes on each node: 1, or null for one a GPU."""
    extra_env: tuple[Assignment, ...]
    """Environment variables of the run, each 'NAME=VALUE'."""

    @property
    def tasks(self) -> int:
        """Processes on each node."""
        return self.tasks_per_node or self.gpus_per_node or 1

    @property
    def num_devices(self) -> int:
        return self.nodes * (self.gpus_per_node or self.tasks)

    @property
    def which_devices(self) -> str:
        """The keys that give the number of devices, for messages."""
        each = f"gpus_per_node={self.gpus_per_node}" if self.gpus_per_node else f"tasks_per_node={self.tasks}"
        return f"asked for by launcher.nodes={self.nodes} x launcher.{each}"

    @model_validator(mode="after")
    def _check(self) -> "Nodes":
        if self.gpus_per_node and self.tasks not in (1, self.gpus_per_node):
            raise ValueError(
                f"launcher.tasks_per_node={self.tasks} must be 1 or launcher.gpus_per_node={self.gpus_per_node}: "
                "a process takes one GPU or all of its node"
            )
        return self


class Slurm(Nodes):
    """Submit the run as a Slurm job (docs/slurm.md). Null leaves a setting to the cluster."""

    retries_key: ClassVar[str | None] = "max_requeues"
    name: Literal["slurm"]
    """What starts the processes."""
    cpus_per_task: Count | None
    """CPU cores of each process."""
    memory: SlurmMemory | None
    """Memory of each node, as Slurm takes it: 64G; 0 is all."""
    exclusive: Flag
    """Share the nodes with no other job."""
    partition: Line | None
    """Slurm partition."""
    qos: Line | None
    """Slurm quality of service."""
    account: Line | None
    """Account that is charged."""
    constraint: Line | None
    """Features the nodes must have."""
    time_limit: TimeLimit | None
    """HH:MM:SS, DAYS-HH:MM:SS or minutes; a run that needs longer is requeued and goes on."""
    email: Line | None
    """Address for mail at the job's begin, end and failure."""
    signal_before_end_s: Count
    """Seconds before the time limit at which the run saves and stops; Slurm may be a minute early."""
    max_requeues: CountOrZero
    """Times that the job is queued again after it was stopped early (75) or lost a process (76)."""
    tmp_dir: Line
    """Temporary folder on the nodes."""
    pre_launch_commands: tuple[Line, ...]
    """Shell commands of the job's script before the training, like 'module load cuda'."""
    container_image: Line | None
    """Image that the tasks run in, by the pyxis plugin of Slurm."""
    container_mounts: Line | None
    """Folders the container sees, as pyxis takes them: /data:/data,/outputs:/outputs."""
    python: Line | None
    """Interpreter on the nodes; null takes the one that submits (in a container: python3)."""
    train_script: Line | None
    """Script that each task runs; null takes run_training.py."""
    configs_path: Line | None
    """Folder for one more copy of the resolved config."""
    logs_path: Line | None
    """Folder for the job's output; null takes the run's folder."""
    scripts_path: Line | None
    """Folder for the sbatch script; null takes the run's folder."""
    dry_run: Flag
    """Write config and script, submit nothing; needs no Slurm."""
    show_logs: Flag
    """Show the job's output until it ends."""

    @property
    def time_limit_s(self) -> int | None:
        """`time_limit` in seconds; None where it is null or 0: no limit."""
        # Slurm's forms: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. The first number is minutes, or hours where
        # there are days or two colons.
        days, _, remaining = (self.time_limit or "0").rpartition("-")
        parts = [int(part) for part in remaining.split(":")]
        hours, minutes, seconds = (*parts, 0, 0)[:3] if days or len(parts) == 3 else (0, *parts, 0)[:3]
        return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds or None

    @model_validator(mode="after")
    def _check_signal(self) -> "Slurm":
        if self.time_limit_s and self.signal_before_end_s >= self.time_limit_s:
            raise ValueError(
                f"launcher.signal_before_end_s={self.signal_before_end_s} must be less than launcher.time_limit="
                f"{self.time_limit}, which is {self.time_limit_s} s: no time would be left to train"
            )
        return self


class Kubernetes(Nodes):
    """Write the run as a JobSet for kubectl (docs/kubernetes.md). One pod is one node."""

    retries_key: ClassVar[str | None] = "max_restarts"
    name: Literal["kubernetes"]
    """What starts the processes."""
    image: Line
    """Container image with tunix in its working directory."""
    cpu: Cores | None
    """CPU cores of each pod, as Kubernetes takes them: 32."""
    memory: Bytes | None
    """Memory of each pod, as Kubernetes takes it: 256Gi."""
    shared_memory: Bytes
    """Size of /dev/shm, which GPUs of one pod exchange data through."""
    volume_claim: Line
    """PersistentVolumeClaim, ReadWriteMany, that holds the run's folder."""
    mount_path: Annotated[str, Field(pattern=r"^(/[\w.-]+)+$")]
    """Where pods see the volume."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    """Kubernetes namespace."""
    service_account: Line | None
    """Account of the pods."""
    node_selector: tuple[Label, ...]
    """Labels that nodes must have, each 'LABEL=VALUE'."""
    port: Annotated[int, Field(ge=1, le=65534)]
    """MASTER_PORT; process 0 listens on the port after it."""
    grace_period_s: Count
    """Seconds that pods have to save when they are told to stop."""
    max_restarts: CountOrZero
    """Times that all pods are started again after one ended early."""
    train_script: Line
    """Script in the image that each process runs."""

    @model_validator(mode="after")
    def _check_env(self) -> "Kubernetes":
        _reject_ranks(self.extra_env, "the manifest sets for each pod")
        return self


class Ray(Nodes):
    """Start the run on a Ray cluster and follow it (docs/ray.md)."""

    name: Literal["ray"]
    """What starts the processes."""
    address: HeadNode
    """The cluster: auto finds the one that this machine belongs to; or HOST:PORT of its head node."""
    min_nodes: Count | None
    """Smallest number of nodes on which the run goes on when others are lost or busy; null: launcher.nodes."""
    cpus_per_task: Positive
    """CPU cores of each process, by Ray's count; Ray does not enforce it."""
    resources: tuple[Amount, ...]
    """Further resources of each node, each 'NAME=NUMBER': 'accelerator_type:H100=0.001'."""
    start_timeout_s: Positive
    """Seconds to wait for launcher.nodes nodes at each start; then fewer will do, down to launcher.min_nodes."""
    max_restarts: CountOrZero
    """Times that the run is started again after a node or a process was lost."""
    grace_period_s: Positive
    """Seconds between SIGTERM and SIGKILL for the other processes after one has died."""
    train_script: Line | None
    """Script that each process runs; null takes tunix as it is installed on the nodes."""

    @model_validator(mode="after")
    def _check_nodes(self) -> "Ray":
        _reject_ranks(self.extra_env, "the launcher sets for each process")
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(f"launcher.min_nodes={self.min_nodes} is more than launcher.nodes={self.nodes}")
        return self


def _reject_ranks(extra_env: tuple[str, ...], who: str) -> None:
    """Raise ValueError if the environment of a run sets the number or the address of a process. `who` ends the message:
    who sets this variable. One value for all processes would give all of them one number."""
    for name in (text.partition("=")[0] for text in extra_env):
        if name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
            raise ValueError(f"launcher.extra_env has {name}, which {who}; leave it out")


AnyLauncher = Annotated[Local | Slurm | Kubernetes | Ray, Field(discriminator="name")]
