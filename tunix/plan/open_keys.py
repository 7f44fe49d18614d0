"""The key of `training` that a config leaves open: its values, and the config with one of them."""

from collections.abc import Callable
from typing import Any

from tunix.base.errors import UserError
from tunix.cli import compose
from tunix.config import Config
from tunix.config.training import REMAT
from tunix.costs.derived import derive
from tunix.plan.topology import PLATFORM

LARGEST_MICRO_BATCH = 1024


def find_open_key(cfg: Config) -> str | None:
    """Return the key of `training` whose value is the largest that fits; None if every value is given."""
    if cfg.training.remat == "budget":
        return "remat"
    return "micro_batch_size" if cfg.training.micro_batch_size == "auto" else None


def replace_mesh(cfg: Config, sizes: dict[str, int], choice: Any = None) -> Config:
    """Return the config with this mesh and, if given, this value of its open key."""
    # Built anew from plain values: checks that depend on the mesh run again.
    values: dict[str, Any] = cfg.model_dump(mode="json", by_alias=True)
    values["model"]["mesh_shape"] = [list(sizes.values()), list(sizes)]
    if choice is not None:
        values["training"] |= {find_open_key(cfg): choice, "remat_memory_gib": None}
    values["launcher"] = {"name": "local"}  # a plan tries meshes of other sizes than the launcher would start
    return compose.build(values)


def list_choices(cfg: Config, sizes: dict[str, int]) -> list[Any]:
    """Return the values that the open key of a config may take, the one of least memory first."""
    return CHOICES[find_open_key(cfg) or ""](cfg, sizes)


def _list_policies(cfg: Config, sizes: dict[str, int]) -> list[str]:
    """Return the policies that training.remat=budget chooses from, the one that keeps the least first."""

    policies = list(REMAT)  # most first: of two that need the same, the one that keeps less comes first here

    def least_first(policy: str) -> tuple[int, int]:
        num_bytes = derive(replace_mesh(cfg, sizes, policy), sizes, PLATFORM).num_bytes["activations"]
        return num_bytes, -policies.index(policy)

    return sorted(policies, key=least_first)


def list_micro_batch_sizes(cfg: Config, sizes: dict[str, int]) -> list[int]:
    """Return the values that training.micro_batch_size=auto may take, smallest first.

    They are the powers of two that divide the global batch.

    Raises:
        UserError: there is none.
    """
    allowed, first_error = [], None
    for size in (2**power for power in range(LARGEST_MICRO_BATCH.bit_length())):
        training = cfg.training.model_copy(update={"micro_batch_size": size})
        try:
            training.batch_shape(sizes)
        except UserError as error:
            first_error = first_error or error
        else:
            allowed.append(size)
    if not allowed:
        assert first_error is not None
        raise first_error
    return allowed


# What an open key may be, by the key.
CHOICES: dict[str, Callable[[Config, dict[str, int]], list[Any]]] = {
    "micro_batch_size": list_micro_batch_sizes,
    "remat": _list_policies,
}


def describe_choice(cfg: Config, chosen: Config) -> str:
    """Return the open key of a config with the value that `chosen` has for it."""
    key = find_open_key(cfg)
    return f"training.{key}={getattr(chosen.training, key or '')}"
