"""How communication hides behind arithmetic: layers that gather ahead, and options of XLA, chosen from the mesh.

training.overlap   XLA's options   layers gather ahead (models/prefetch.py)
none               its own         no
options            of `OPTIONS`    no
prefetch           of `OPTIONS`    yes
"""

import logging
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.sharding.dims import data_axes, keeping_axes
from tunix.sharding.layout import Layout
from tunix.training.mesh_choices import choose_sync

Options = dict[str, bool | int | float | str]

# By platform; a platform that is not named has none, and `auto` takes `none` there.
OPTIONS: dict[str, Options] = {
    # Collectives that XLA's scheduler lets run at the same time. With 1, its own choice, a gather waits for the sum
    # before it, and begins only when its result is already needed.
    "gpu": {"xla_gpu_experimental_parallel_collective_overlap_limit": 8},
}

log = logging.getLogger(__name__)


class Overlap(NamedTuple):
    """Means by which a step hides communication, and the reason for them."""

    prefetch: bool  # layers gather ahead
    options: Options  # of XLA
    reason: str


def choose_overlap(cfg: Config, layout: Layout, mesh: Mesh | AbstractMesh, platform: str | None) -> Overlap:
    """Return what `training.overlap` is on a mesh; `platform` is that of its devices, None where there are none.

    Raises:
        UserError: `prefetch` where layers cannot gather ahead.
    """
    name, options = cfg.training.overlap, OPTIONS.get(platform or "", {})
    lacks = _find_obstacle(cfg, layout, choose_sync(cfg.training, mesh))
    if name == "prefetch" and lacks:
        raise UserError(f"training.overlap=prefetch: {lacks}; training.overlap=auto takes what fits")
    if name != "auto":
        return Overlap(name == "prefetch", {} if name == "none" else options, f"training.overlap={name}")
    if not options:
        return Overlap(False, {}, f"on {platform or 'no device'}: XLA's own order")
    if all(mesh.shape[axis] == 1 for axis in (*data_axes(), *keeping_axes())):
        return Overlap(False, options, "no weights or gradients travel")
    return Overlap(not lacks, options, lacks or "layers gather their weights")


def _find_obstacle(cfg: Config, layout: Layout, sync_every: int) -> str | None:
    """Return why layers cannot gather ahead; None if they can."""
    training = cfg.training
    for key in ("shared_kv", "layer_inputs"):
        if getattr(cfg.model, key) is not None:
            return f"model.{key} has gradients that a scan which gathers ahead does not give"
    if not layout.gathers_in_blocks(sync_every):
        return (
            f"with training.sharding_strategy={training.sharding_strategy} and gradients reduced every {sync_every} "
            "microbatch(es), weights are gathered once for the step"
        )
    if training.remat_every > 1:
        return f"training.remat_every={training.remat_every} takes so many layers at a time"
    if training.offload == "activations":
        return "training.offload=activations waits for the host's memory in each layer"
    return None


def keep_known_options(options: Options, mesh: Mesh | AbstractMesh) -> Options:
    """Return those of `options` that the installed compiler knows for the devices of a mesh, which need not exist.

    Options of XLA come and go with its versions. One that is gone makes a step slower; it must not end a run.
    """
    # XLA has no list of its options to ask: an empty program is compiled with each of them.
    known = {}
    for name, value in options.items():
        try:
            _compile_nothing({name: value}, NamedSharding(mesh, PartitionSpec()))
        except jax.errors.JaxRuntimeError as error:
            log.warning("compiler option %s=%s is left out: %s", name, value, str(error).splitlines()[0])
        else:
            known[name] = value
    return known


def check_compiler_options(options: Options) -> None:
    """Raise `UserError` for an option of a user that XLA does not know, before anything is written."""
    try:
        _compile_nothing(options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"training.compiler_options: {str(error).splitlines()[0]}") from None


def _compile_nothing(options: Any, place: NamedSharding | None = None) -> None:
    jax.jit(lambda: 0, out_shardings=place).lower().compile(compiler_options=options)
