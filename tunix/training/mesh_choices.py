"""Choices that a config leaves to the mesh of a run and to the platform of its devices.

build_layout    which axes split which arrays, and how tokens reach their experts
settle_remat    what blocks keep for their backward pass, where training.remat=auto
choose_sync     microbatches between two reductions of gradients, where training.sync_gradients_every=auto
"""

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from tunix.base.errors import UserError
from tunix.config import Config, Training
from tunix.config.mlp import ExpertsMlp
from tunix.config.training import REMAT_BY_PLATFORM
from tunix.models.expert_exchanges import choose_expert_exchange
from tunix.models.remat import Remat
from tunix.sharding.dims import keeping_axes
from tunix.sharding.layout import Layout
from tunix.sharding.mesh import device_mesh
from tunix.sharding.mesh_shape import data_shards, num_stages, unsplit_dims
from tunix.sharding.placement import STRATEGIES


def build_mesh(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh of a run; see `device_mesh`."""
    return device_mesh(cfg.model.mesh_shape, cfg.dims, cfg.distributed.allow_idle_devices, devices)


def find_platform(mesh: Mesh | AbstractMesh) -> str | None:
    """Return the platform of the devices of a mesh; None if it has no devices."""
    device = (mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh).abstract_device
    return None if device is None else device.platform


def build_layout(cfg: Config, mesh: Mesh | AbstractMesh, platform: str | None = None) -> Layout:
    """Return the layout of a run on a mesh; `platform` is that of its devices, where the mesh has none."""
    dtypes, sizes = cfg.training.dtypes, mesh.shape
    layout = Layout(
        STRATEGIES[cfg.training.sharding_strategy],
        frozenset(unsplit_dims(cfg.dims, sizes)),
        dtypes["param"],
        dtypes["compute"],
        dtypes["reduce"],
        block_products="plain" if cfg.training.matmul_dtype is None else cfg.training.matmul_dtype,
        moments_on_host=cfg.training.offload == "optimizer",
        expert_exchange=choose_expert_exchange(cfg.model, sizes, platform or find_platform(mesh)).name,
        splits_stream=_splits_stream(cfg, sizes),
    )
    return layout if num_stages(sizes) > 1 else layout.with_all_layers()


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


def settle_remat(cfg: Config, platform: str | None) -> Config:
    """Return the config with a policy in place of `training.remat=auto`; `platform` is None where it is not known."""
    if cfg.training.remat != "auto":
        return cfg
    policy = REMAT_BY_PLATFORM.get(platform or "", "full")
    return set_remat(cfg, policy)


def set_remat(cfg: Config, policy: str) -> Config:
    """Return the config with this policy, a key of `REMAT`."""
    return cfg.model_copy(update={"training": cfg.training.model_copy(update={"remat": policy})})


def read_remat(training: Training) -> Remat:
    """Return what blocks keep for their backward pass; see `Training.remat_policy` for what it raises."""
    return Remat(training.remat_policy, training.remat_every, on_host=training.offload == "activations")


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
    # In a stream of parts (1F1B) a tick works on parts of two microbatches, whose gradients are added up together: they
    # are reduced in every tick, or once for all microbatches.
    if training.pipeline(sizes).is_stream and (every > 1 or strategy.gathered_for == "step"):
        return num_microbatches
    return every
