"""Trials: a few steps of one config on several meshes, from the same weights and with the same global batches.

A mesh says only where arrays are, so it must not change the numbers. Two meshes sum the same numbers in another order:
in float32 that changes about the seventh digit. A wrong sharding changes the first digits.

`verify` chooses the meshes, `_on_mesh` makes the config of each, `_train` takes the steps.
"""

import json
import math
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import jax
import yaml

from tunix.base.errors import UserError
from tunix.cli import compose
from tunix.cli.runs import find_run
from tunix.config import Config
from tunix.config.document_kinds import DOCUMENTS
from tunix.costs.matmul_dtypes import check_matmul_dtype
from tunix.data.position import Position
from tunix.data.prompts import AnyCorpus
from tunix.inference.start import check_init_from, load_init_from
from tunix.processes import peers
from tunix.processes.watchdog import Watchdog
from tunix.rl.feeds import load_data, make_feed
from tunix.run.compile_step import compile_step
from tunix.sharding.dims import axis_names
from tunix.sharding.mesh_shape import explicit_sizes, format_mesh_shape, meshes, resolve
from tunix.training.mesh_choices import build_mesh
from tunix.training.overlap import check_compiler_options
from tunix.training.program import assemble
from tunix.training.program_checks import check_on_mesh
from tunix.training.sizes import derive_sizes

COMPARED = ("loss", "grad_norm")


@dataclass(frozen=True)
class Trial:
    """The numbers of a few steps on one mesh."""

    mesh: str  # as users write it
    num_microbatches: int  # A
    metrics: dict[str, list[float]]  # one number a step, keyed by the names in COMPARED

    def measure_differences(self, reference: "Trial") -> dict[str, float]:
        """Return the largest relative difference of each metric over the steps; infinite if a number is not finite."""
        pairs = {name: zip(self.metrics[name], reference.metrics[name], strict=True) for name in COMPARED}
        return {name: max(_relative(ours, theirs) for ours, theirs in pair) for name, pair in pairs.items()}


def verify(cfg: Config, mesh_shapes: list[Any] | None, num_steps: int, every: bool = False) -> list[Trial]:
    """Take `num_steps` steps on each mesh, by default on those of `choose_meshes`; the first is the reference."""
    sequences = _global_batch(cfg)
    shapes = mesh_shapes or [yaml.safe_load(format_mesh_shape(sizes)) for sizes in choose_meshes(cfg, sequences, every)]
    configs = [_on_mesh(cfg, shape, sequences) for shape in shapes]
    # All meshes are built, and so checked, before the first one trains for minutes.
    device_meshes = [build_mesh(each, _choose_devices(each)) for each in configs]
    check_compiler_options(cfg.training.compiler_options)
    device = device_meshes[0].devices.flat[0]
    check_matmul_dtype(cfg, device.platform, device.device_kind)
    corpus = peers.main_first(lambda: load_data(cfg), "preparing the data")
    return [_train_together(each, mesh, corpus, num_steps) for each, mesh in zip(configs, device_meshes, strict=True)]


def _choose_devices(cfg: Config) -> list[jax.Device]:
    """Return the devices of process 0 if the mesh of the config fits on them, else all devices.

    Raises:
        UserError: some processes would have no device, and the run needs every process.
    """
    devices = jax.devices()
    of_main = [device for device in devices if device.process_index == 0]
    sizes = explicit_sizes(cfg.model.mesh_shape)
    if sizes is None or math.prod(sizes.values()) > len(of_main) or len(of_main) == len(devices):
        return devices
    if reason := _find_shared_work(cfg):
        raise UserError(
            f"mesh {format_mesh_shape(sizes)}: {reason} needs every process, and this mesh has devices of process 0 "
            "alone; name meshes of more devices by --meshes"
        )
    return of_main


def _find_shared_work(cfg: Config) -> str:
    """Return the key whose work all processes share outside of the steps; empty where there is none.

    Such work waits for every process: answers that are scored, a checkpoint that is read.
    """
    if DOCUMENTS[cfg.task.documents].asks_peers:
        return f"task={cfg.task.name}"
    source = cfg.model.init_from
    return f"model.init_from={source}" if source and find_run(source, "model.init_from") else ""


def choose_meshes(cfg: Config, sequences: int, every: bool = False) -> list[dict[str, int]]:
    """Choose one device, all devices on each axis alone, and the most even split over as many axes as possible.

    With `every`, choose one device and each mesh of all devices that divides the model and the batch. One device is
    left out where several processes are needed.
    """
    num_devices = jax.device_count()
    # A mesh of one axis shows which axis is wrong. Some errors need two axes at once: the mixed mesh shows those.
    legal = [sizes for sizes in meshes(num_devices) if _is_legal(cfg, sizes, sequences)]
    alone = [sizes for sizes in legal if max(sizes.values()) == num_devices]
    mixed = sorted(legal, key=lambda sizes: (-sum(size > 1 for size in sizes.values()), max(sizes.values())))
    one_device = [dict.fromkeys(axis_names(), 1)] if jax.process_count() == 1 or not _find_shared_work(cfg) else []
    chosen = [*one_device, *alone, *(mixed if every else mixed[:1])]
    return [sizes for place, sizes in enumerate(chosen) if sizes not in chosen[:place]]


def _is_legal(cfg: Config, sizes: dict[str, int], sequences: int) -> bool:
    training = cfg.training.model_copy(update=_in_sequences(sequences))
    try:
        check_on_mesh(cfg.model_copy(update={"training": training}), sizes)
    except UserError:
        return False
    return True


def _global_batch(cfg: Config) -> int:
    """Return the sequences in one step of this config on the visible devices."""
    sizes = resolve(cfg.model.mesh_shape, jax.device_count(), cfg.dims, cfg.distributed.allow_idle_devices)
    return cfg.training.batch_shape(sizes).num_sequences


def _in_sequences(count: int) -> dict[str, Any]:
    """Return the keys of `training` that ask for a global batch of so many sequences, without stages."""
    keys = {"gradient_accumulation_steps": None, "global_batch_tokens": None, "global_batch_size": count}
    return keys | {"batch_stages": ()}


def _on_mesh(cfg: Config, mesh_shape: Any, sequences: int) -> Config:
    """Return the config with another mesh and the same global batch; the mesh may leave devices idle."""
    values = cfg.model_dump(mode="json", by_alias=True)
    values["model"]["mesh_shape"] = mesh_shape
    values["training"] |= _in_sequences(sequences)
    values["distributed"]["allow_idle_devices"] = True
    return compose.build(values)


def _train_together(cfg: Config, mesh: jax.sharding.Mesh, corpus: AnyCorpus, num_steps: int) -> Trial:
    """Return the trial of a mesh on every process; where the mesh has devices of process 0 alone, it trains alone."""
    if jax.process_count() == len({device.process_index for device in mesh.devices.flat}):
        return _train(cfg, mesh, corpus, num_steps)
    # Below, process 0 works alone: a question to the other processes would wait forever. The step needs the hosts, so
    # all processes are asked for them now; `hosts` keeps the answer.
    peers.hosts()
    trial = peers.on_main(lambda: _train(cfg, mesh, corpus, num_steps), f"training on {cfg.model.mesh_shape}")
    text = peers.agree(json.dumps(asdict(trial)) if trial else "", "the numbers of process 0")
    return Trial(**json.loads(text))


def _train(cfg: Config, mesh: jax.sharding.Mesh, corpus: AnyCorpus, num_steps: int) -> Trial:
    """Return the trial of a mesh: train for `num_steps` steps from new weights."""
    # By default GPUs round the factors of float32 products to 10 bits (TF32). Then differences between meshes would be
    # a thousand times larger, and the tolerance would say nothing.
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        program = assemble(cfg, mesh)
        check_init_from(cfg, program.arch)
        sizes = derive_sizes(cfg, mesh, program.arch, corpus.num_samples)
        assert sizes.total_steps is not None
        state = program.new_state(cfg.seed, load_init_from(program, mesh))
        train_step = compile_step(program, sizes.schedule.spans(sizes.total_steps), mesh)
        metrics: dict[str, list[float]] = {name: [] for name in COMPARED}
        feed = make_feed(cfg, corpus, program, mesh, Watchdog(cfg.distributed))
        with feed, closing(feed.batches(Position(0, 0, "", ""), num_steps, None, None)) as source:
            for _ in range(num_steps):
                batch, _ = source.next(state)
                state, scalars = train_step(state, batch)
                for name in COMPARED:
                    metrics[name].append(float(scalars[name]))
    return Trial(format_mesh_shape(mesh.shape), sizes.batch.num_microbatches, metrics)


def _relative(ours: float, theirs: float) -> float:
    if not math.isfinite(ours) or not math.isfinite(theirs):
        return math.inf
    return 0.0 if ours == theirs else abs(ours - theirs) / abs(theirs or ours)
