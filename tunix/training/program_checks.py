"""Checks of a model on a mesh, beyond those of the config; errors name the keys, the values and the way out."""

from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from tunix.base.errors import UserError
from tunix.config import Config, Model
from tunix.config.stage_checks import check_stages
from tunix.models.exchanges import choose_exchange
from tunix.sharding.arrays import has_host_memory
from tunix.sharding.mesh_shape import check_divides, nearest


def check_model_on_mesh(model: Model, sizes: Mapping[str, int]) -> None:
    """Raise `UserError` where a model does not run on a mesh of these sizes, whatever the training is."""
    check_stages(model, sizes)
    check_divides(model.dims, sizes)
    choose_exchange(model, sizes)


def check_on_mesh(cfg: Config, sizes: Mapping[str, int]) -> None:
    """Raise `UserError` where the model, its sequences or its batch do not fit a mesh of these sizes.

    A batch that is left open (`training.micro_batch_size=auto`) fits every mesh.
    """
    # First the model: of the reasons against a mesh, its reasons say most.
    check_model_on_mesh(cfg.model, sizes)
    check_divides(cfg.dims, sizes)  # `cfg.dims` has the tokens of a sequence too
    if cfg.training.micro_batch_size != "auto":
        cfg.training.batch_shape(sizes)


def check_pipeline_chunks(cfg: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raise `UserError` where the layers of a stage do not make equal chunks."""
    pipeline = cfg.training.pipeline(mesh.shape)
    first = cfg.model.runs[0]  # the only one, where there are stages
    turns = len(first.layers) // len(first.pattern)
    if pipeline.num_stages == 1 or turns % (pipeline.num_stages * pipeline.num_chunks) == 0:
        return
    turns_per_stage = turns // pipeline.num_stages
    units = "layers" if len(first.pattern) == 1 else f"turns of {len(first.pattern)} layers"
    legal = [count for count in range(2, turns_per_stage + 1) if turns_per_stage % count == 0]
    way_out = f"nearest: {' or '.join(map(str, nearest(legal, pipeline.num_chunks)))}, or " if legal else ""
    raise UserError(
        f"training.pipeline_chunks={pipeline.num_chunks} does not divide the {turns_per_stage} {units} of each of "
        f"{pipeline.num_stages} stages; {way_out}training.pipeline_schedule=1f1b"
    )


def check_host_memory(cfg: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raise `UserError` where the layers do not make groups of `training.remat_every`, or nothing can be offloaded."""
    training = cfg.training
    pipeline = training.pipeline(mesh.shape)
    for run in cfg.model.runs:
        count = len(run.layers) // len(run.pattern) // (pipeline.num_stages * pipeline.num_chunks)
        if count % training.remat_every:
            units = "layers" if len(run.pattern) == 1 else f"times {len(run.pattern)} layers"
            legal = [every for every in range(1, count + 1) if count % every == 0]
            raise UserError(
                f"training.remat_every={training.remat_every} does not divide {count} {units} in a row; it may be "
                f"{', '.join(map(str, legal))}"
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
