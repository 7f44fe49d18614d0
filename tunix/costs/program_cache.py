"""Programs for devices that need not exist: costs are derived from them."""

from functools import lru_cache

import jax
from jax.sharding import AbstractMesh, AxisType

from tunix.config import Config
from tunix.sharding.dims import axis_names
from tunix.training.program import Program, assemble

# Values of the keys of training that say how many sequences there are, for one sequence per data shard.
ONE_SEQUENCE = {"micro_batch_size": 1, "pipeline_microbatches": "auto", "batch_stages": ()}


def find_program(cfg: Config, sizes: dict[str, int], platform: str | None = None) -> Program:
    """Return the program of `cfg` on a mesh of these sizes, which must divide model and batch.

    `platform` is that of the devices, by which `training.remat`, `training.overlap` and `model.expert_exchange`
    choose. Configs that differ in their batch alone share an assembled program: a plan asks for hundreds of them.
    """
    smallest = cfg.model_copy(update={"training": cfg.training.model_copy(update=ONE_SEQUENCE)})
    lengths = tuple(sizes[axis] for axis in axis_names())
    return _assemble(smallest.model_dump_json(by_alias=True), lengths, platform).with_batch(cfg.training)


@lru_cache(maxsize=8)  # as many as there are policies that training.remat=budget compares, and a few more
def _assemble(config: str, lengths: tuple[int, ...], platform: str | None) -> Program:
    names = axis_names()
    mesh = AbstractMesh(lengths, names, axis_types=(AxisType.Explicit,) * len(names))
    with jax.sharding.use_abstract_mesh(mesh):
        return assemble(Config.model_validate_json(config), mesh, platform)
