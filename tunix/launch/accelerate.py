"""Read a config file of accelerate (made by `accelerate config`) as flags of the launcher."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tunix.base.errors import UserError
from tunix.launch.nodes import NodeFlags


class Settings(BaseModel):
    """Keys of accelerate's config file, with its defaults.

    The first keys say how many processes run where. From `distributed_type` on, a key asks for something that is chosen
    elsewhere in tunix, or not needed: it is accepted only with a value that asks for nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_processes: int = Field(1, ge=1)
    """Processes on all machines together."""
    num_machines: int = Field(1, ge=1)
    machine_rank: int = Field(0, ge=0)
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: Literal["static", "c10d"] = "static"
    gpu_ids: str | int | None = None
    """`all`, or numbers separated by commas."""
    use_cpu: bool = False
    distributed_type: Literal["MULTI_GPU", "MULTI_CPU", "NO"] = "NO"
    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    main_training_function: Literal["main"] = "main"
    mixed_precision: Literal["no", False] = "no"
    downcast_bf16: Literal["no", False] = "no"
    enable_cpu_affinity: Literal[False] = False
    debug: Literal[False] = False
    same_network: bool = True
    tpu_env: tuple[()] = ()
    tpu_use_cluster: Literal[False] = False
    tpu_use_sudo: Literal[False] = False

    @property
    def flags(self) -> NodeFlags:
        """The flags of the launcher that mean the same."""
        if self.num_processes % self.num_machines:
            raise UserError(f"num_processes={self.num_processes} is not a multiple of num_machines={self.num_machines}")
        many = self.num_machines > 1
        return NodeFlags(
            nprocs=str(self.num_processes // self.num_machines),
            nnodes=self.num_machines,
            node_rank=self.machine_rank if many else None,
            master_addr=self.main_process_ip if many else None,
            master_port=self.main_process_port,
            standalone=not many,
        )

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that choose the devices."""
        if self.use_cpu or self.distributed_type == "MULTI_CPU":
            return {"JAX_PLATFORMS": "cpu"}
        return {} if self.gpu_ids in (None, "all") else {"CUDA_VISIBLE_DEVICES": str(self.gpu_ids)}


# What to do instead, added to the message for a value or a key that is not accepted.
INSTEAD = {
    "mixed_precision": "; choose training.mixed_precision on the command line of the training",
    "distributed_type": "; set it to MULTI_GPU, and choose training.sharding_strategy on the training's command line",
    "fsdp_config": "; choose training.sharding_strategy on the command line of the training",
    "deepspeed_config": "; choose training.sharding_strategy on the command line of the training",
}


def read_config(file: Path) -> Settings:
    """Read the file.

    Raises:
        UserError: the file cannot be read, or a key or value has no meaning here; the message names it.
    """
    try:
        values: Any = yaml.safe_load(file.read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UserError(f"--accelerate_config={file} cannot be read: {str(error).splitlines()[0]}") from None
    if isinstance(values, dict):  # `accelerate config` writes an empty section for each plugin that is not used
        values = {key: value for key, value in values.items() if value != {} or key in Settings.model_fields}
    try:
        return Settings.model_validate(values)
    except ValidationError as errors:
        first = errors.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        instead = INSTEAD.get(key, "")
        if first["type"] == "extra_forbidden":
            raise UserError(f"--accelerate_config={file}: {key} has no meaning here; remove it{instead}") from None
        reason = f"{first['msg'][0].lower()}{first['msg'][1:]}{instead}"
        raise UserError(f"--accelerate_config={file}: {key}={first['input']}: {reason}") from None
