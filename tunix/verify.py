"""Train a few steps on several meshes and compare: `python -m tunix.verify [group=option] [key=value]`.

`python -m tunix.verify checkpoint=RUN_DIR` does something else: it compares files with their digests, to find damage.
It takes a run's folder, RUN_DIR/checkpoints/STEP, an export or a prepared corpus. Exit code 1 if a file is damaged.

Every mesh starts from the same weights and takes the same global batches of the config's data (the batch that follows
all training.batch_stages). Numbers are float32 unless training.mixed_precision is given. Exit code 1 if loss or
gradient norm differ by more than the tolerance. Without GPUs, the CPUs of all processes together act as 8 devices;
XLA_FLAGS or JAX_NUM_CPU_DEVICES choose another number for each process.

The processes of a launcher join as they do for training. If the devices of process 0 are enough for a mesh, process 0
trains on it alone and the others wait. So one device is compared with a cluster.
"""

import math
import os
import sys
from argparse import Namespace
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from tunix.base.buckets import is_address
from tunix.base.digests import FILE, VERIFIED, Damaged, check_files, list_files, walk_digests
from tunix.base.errors import UserError, name_first
from tunix.base.files import expand_home, is_whole_number, read_yaml
from tunix.base.progress import announcing
from tunix.base.text import print_table
from tunix.checkpoints.bucket import Bucket
from tunix.checkpoints.store import find_storage
from tunix.config import Config, command_line, compose
from tunix.config.compose import add_search_path
from tunix.config.saved_runs import find_run
from tunix.config.task import Taught
from tunix.costs.step import check_matmul_dtype
from tunix.data.batches import Position
from tunix.data.documents import DOCUMENTS
from tunix.data.prompts import AnyCorpus
from tunix.feeds import load_data, make_feed
from tunix.inference.pretrained import check_init_from, load_init_from
from tunix.processes import exits, peers, supervisor
from tunix.processes.identity import find_identity
from tunix.processes.watchdog import Watchdog
from tunix.run.compiling import compile_step
from tunix.sharding.mesh import explicit_sizes, format_mesh_shape, meshes, resolve
from tunix.sharding.table import axis_names
from tunix.training.choices import build_mesh, check_compiler_options
from tunix.training.train_spec import assemble, check_on_mesh, derive_sizes

# A mesh says only where arrays are, so it must not change the numbers. Two meshes sum the same numbers in another
# order: in float32 that changes about the seventh digit. A wrong sharding changes the first digits.

COMPARED = ("loss", "grad_norm")
FAKE_DEVICES = 8  # of all processes together
EVERY = "all"  # --meshes all: every mesh that divides the model and the batch


@dataclass(frozen=True)
class Trial:
    """The numbers of a few steps on one mesh."""

    mesh: str  # as users write it
    num_microbatches: int  # A
    metrics: dict[str, list[float]]  # one number a step, keyed by the names in COMPARED

    def compute_differences(self, reference: "Trial", num_steps: int | None = None) -> dict[str, float]:
        """Return the largest relative difference of each metric over the first steps; infinite if one is not finite."""
        pairs = {key: list(zip(self.metrics[key], reference.metrics[key], strict=True))[:num_steps] for key in COMPARED}
        return {name: max(_relative(ours, theirs) for ours, theirs in pair) for name, pair in pairs.items()}


def verify(cfg: Config, mesh_shapes: list[Any] | None, num_steps: int, every: bool = False) -> list[Trial]:
    """Take `num_steps` steps on each mesh, by default on those of `select_meshes`; the first is the reference."""
    sequences = cfg.training.global_batch_size
    if sequences is None or not mesh_shapes:  # else the meshes that are named alone have to divide the batch
        visible = resolve(cfg.model.mesh_shape, jax.device_count(), cfg.dims, cfg.distributed.allow_idle_devices)
        sequences = cfg.training.batch_shape(visible).num_sequences
    shapes = mesh_shapes or [read_yaml(format_mesh_shape(sizes)) for sizes in select_meshes(cfg, sequences, every)]
    configs = [_on_mesh(cfg, shape, sequences) for shape in shapes]
    # All meshes are built, and so checked, before the first one trains for minutes.
    device_meshes = [build_mesh(each, _select_devices(each)) for each in configs]
    check_compiler_options(cfg.training.compiler_options)
    device = device_meshes[0].devices.flat[0]
    check_matmul_dtype(cfg, device.platform, device.device_kind)
    with announcing("preparing the data", peers.print_progress):
        corpus = load_data(cfg)
    trials = []
    for each, mesh in zip(configs, device_meshes, strict=True):
        with announcing(f"compiling and training on {format_mesh_shape(mesh.shape)}", peers.print_progress):
            trials.append(_train_together(each, mesh, corpus, num_steps))
    return trials


def _select_devices(cfg: Config) -> list[jax.Device]:
    """Return the devices of process 0 if the mesh of the config fits on them, else all devices.

    Raises:
        UserError: some processes would have no device, and the run needs every process.
    """
    devices = jax.devices()
    main_devices = [device for device in devices if device.process_index == 0]
    sizes = explicit_sizes(cfg.model.mesh_shape)
    if sizes is None or math.prod(sizes.values()) > len(main_devices) or len(main_devices) == len(devices):
        return devices
    if reason := _find_shared_work(cfg):
        raise UserError(
            f"mesh {format_mesh_shape(sizes)}: {reason} needs every process, and this mesh has devices of process 0 "
            "alone; name meshes of more devices by --meshes"
        )
    return main_devices


def _find_shared_work(cfg: Config) -> str:
    """Return the key whose work all processes share outside of the steps; empty where there is none.

    Such work waits for every process: answers that are scored, a checkpoint that is read.
    """
    if DOCUMENTS[cfg.task.documents].asks_peers:
        return f"task={cfg.task.name}"
    if isinstance(cfg.task, Taught) and cfg.task.teacher is not None:
        return f"task.teacher={cfg.task.teacher}"
    source = cfg.model.init_from
    return f"model.init_from={source}" if source and find_run(source, "model.init_from") else ""


def select_meshes(cfg: Config, sequences: int, every: bool = False) -> list[dict[str, int]]:
    """Choose one device, all devices on each axis alone, and the most even split over as many axes as possible.

    With `every`, choose one device and each mesh of all devices that divides the model and the batch. One device is
    left out where several processes are needed.
    """
    num_devices = jax.device_count()
    # A mesh of one axis shows which axis is wrong. Some errors need two axes at once: the mixed mesh shows those.
    valid = [sizes for sizes in meshes(num_devices, cfg.dims) if _is_valid(cfg, sizes, sequences)]
    alone = [sizes for sizes in valid if max(sizes.values()) == num_devices]
    mixed = sorted(valid, key=lambda sizes: (-sum(size > 1 for size in sizes.values()), max(sizes.values())))
    one_device = [dict.fromkeys(axis_names(), 1)] if jax.process_count() == 1 or not _find_shared_work(cfg) else []
    chosen = [*one_device, *alone, *(mixed if every else mixed[:1])]
    return [sizes for index, sizes in enumerate(chosen) if sizes not in chosen[:index]]


def _is_valid(cfg: Config, sizes: dict[str, int], sequences: int) -> bool:
    try:
        check_on_mesh(cfg.with_training(**_in_sequences(sequences)), sizes)
    except UserError:
        return False
    return True


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
    return Trial(**peers.agree(trial and asdict(trial), "the numbers of process 0"))


def _train(cfg: Config, mesh: jax.sharding.Mesh, corpus: AnyCorpus, num_steps: int) -> Trial:
    """Return the trial of a mesh: train for `num_steps` steps from new weights."""
    # By default GPUs round the factors of float32 products to 10 bits (TF32). Then differences between meshes would be
    # a thousand times larger, and the tolerance would say nothing.
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        train_spec = assemble(cfg, mesh)
        check_init_from(cfg, train_spec.arch)
        sizes = derive_sizes(train_spec, corpus.num_samples)
        assert sizes.total_steps is not None
        state = train_spec.new_state(cfg.seed, load_init_from(train_spec, mesh))
        train_step = compile_step(train_spec, sizes.schedule.spans(sizes.total_steps))
        metrics: dict[str, list[float]] = {name: [] for name in COMPARED}
        feed = make_feed(cfg, corpus, train_spec, mesh, Watchdog(cfg.distributed))
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


def _print_report(trials: list[Trial], tolerance: float) -> int:
    """Print a row for each mesh on process 0; return the exit code, the same on every process."""
    num_steps = len(trials[0].metrics[COMPARED[0]])
    table = Table(title=f"after {num_steps} steps on {jax.devices()[0].device_kind}", title_justify="left")
    for name in ("mesh", "microbatches", "loss", "gradient norm", "loss differs by", "norm differs by"):
        table.add_column(name, justify="left" if name == "mesh" else "right", no_wrap=True)
    max_difference = at_first = 0.0
    for trial in trials:
        differences = trial.compute_differences(trials[0]).values()
        max_difference = max(max_difference, *differences)
        at_first = max(at_first, *trial.compute_differences(trials[0], num_steps=1).values())
        numbers = [f"{trial.metrics[name][-1]:.8g}" for name in COMPARED]
        numbers += [f"{value:.1e}{' !' if value > tolerance else ''}" for value in differences]
        table.add_row(trial.mesh, str(trial.num_microbatches), *numbers)
    if peers.is_main():
        print_table(table)
        verdict = "within" if max_difference <= tolerance else "past"
        first_step = f" ({at_first:.2e} in the first step)" if num_steps > 1 else ""
        print(f"largest relative difference {max_difference:.2e}{first_step}, {verdict} the tolerance of {tolerance:g}")
    return int(max_difference > tolerance)


def check_everything(source: str) -> tuple[list[str], bool]:
    """Compare a run (or one of its checkpoints), an export or a prepared corpus with its digests.

    Returns:
        A line for each checkpoint or folder, and True if nothing is damaged.

    Raises:
        UserError: the folder is none of these, or it has no digests.
    """
    lines, is_intact = [], True
    for folder, is_checkpoint in _find_folders(source):
        name, files = str(folder), f", {len(list_files(folder))} files"
        try:
            if is_checkpoint:
                storage, step = find_storage(folder)
                name, files = f"{storage.folder}/{step}", "" if isinstance(storage, Bucket) else files
                size = storage.check(step, 0, 1)
            else:
                size = check_files([folder / FILE])
                named = {folder / FILE, folder / VERIFIED, *(path for path, _ in walk_digests([folder / FILE]))}
                others = [path.relative_to(folder) for path in list_files(folder) if path not in named]
                added = f"; {name_first(others)} came later" if others else ""
                files = f", {len(named) - 1} files{added}"
        except Damaged as damage:
            lines.append(f"DAMAGED {name}: {damage}")
            is_intact = False
            continue
        result = "no digests (an older version wrote it); it can be read"
        if size is not None:
            result = f"as written, {size / 2**30:.3f} GiB read"
        lines.append(f"{name}: {result}{files}")
    return lines, is_intact


def _find_folders(source: str) -> list[tuple[Path, bool]]:
    """Return the folders to check, each with True if it is a checkpoint."""
    if run := find_run(source):
        # Files and links to nothing with such a name are listed too: whoever wants to know is told that they are wrong.
        steps = sorted(int(path.name) for path in (run[0] / "checkpoints").glob("*") if is_whole_number(path.name))
        requested = steps if run[1] is None else [run[1]]
        if not steps or not {*requested} <= {*steps}:
            entries = f"the run has {', '.join(map(str, steps))}" if steps else f"{run[0]} has none yet"
            raise UserError(f"checkpoint={source}: there is no such checkpoint; {entries}")
        return [(run[0] / "checkpoints" / str(step), True) for step in requested]
    if is_address(source):
        raise UserError(f"checkpoint={source} is no run, and only runs are compared in a bucket; copy it here")
    folder = expand_home(source)
    if not (folder / FILE).is_file():
        missing = FILE if folder.is_dir() else "such folder"
        raise UserError(
            f"checkpoint={source}: there is no {missing}; expected the folder of a run, an export or a prepared corpus"
        )
    return [(folder, False)]


def _read_meshes(text: str) -> list[Any]:
    try:
        shapes = read_yaml(text)
    except ValueError:
        shapes = None
    listed = shapes if isinstance(shapes, list) and shapes else [None]
    if not all(isinstance(mesh, list) and [type(part) for part in mesh] == [list, list] for mesh in listed):
        raise UserError(
            f'--meshes {text}: expected all, or a list of meshes like [[[8],["fsdp"]],[[4,2],["fsdp","tp"]]]'
        )
    return listed


def _compose_config(args: Namespace) -> Config:
    passed = [word.lstrip("+").split("=")[0] for word in args.overrides]
    if "resume" in passed:
        raise UserError("resume: tunix.verify starts from new weights; leave it out, or set model.init_from")
    if args.steps < 1:
        raise UserError(f"--steps {args.steps} must be 1 or more")
    if not args.tolerance >= 0:
        raise UserError(f"--tolerance {args.tolerance} must be 0 or more")
    # bf16 has 8 bits: meshes would differ in the third digit, and a real error would not show.
    precision = [] if "training.mixed_precision" in passed else ["training.mixed_precision=fp32"]
    return compose.compose(add_search_path([*precision, *args.overrides], args.config_dir)).config


def main() -> int:
    """Run the command line and return its exit code."""
    parser = command_line.command_parser("verify", __doc__)
    parser.add_argument(
        "--meshes",
        help='list of meshes like [[[8],["fsdp"]],[[2,4],["dp","tp"]]], the first is the reference; or all: every mesh '
        "that divides the model and the batch",
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps on each mesh")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference")
    args = parser.parse_intermixed_args()
    command_line.print_warnings()

    def work() -> int:
        if folder := command_line.find_checked_folder(args.overrides):
            lines, is_whole = check_everything(folder)
            print("\n".join(lines))
            return int(not is_whole)
        cfg = _compose_config(args)
        # jax reads the number of CPU devices when it starts, which is after this. A number of the user's own stays.
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", "") and (
            jax.config.jax_num_cpu_devices < 0  # type: ignore[attr-defined]
        ):
            identity = find_identity(cfg.distributed)
            num_local = FAKE_DEVICES // (identity.num_processes if identity else 1)
            jax.config.update("jax_num_cpu_devices", max(1, num_local))
        every = args.meshes == EVERY
        mesh_shapes = _read_meshes(args.meshes) if args.meshes and not every else None
        info = compose.list_info(cfg) | {"--meshes": args.meshes, "--steps": args.steps}

        def compare() -> int:
            return _print_report(verify(cfg, mesh_shapes, args.steps, every), args.tolerance)

        return command_line.run_joined("verify", cfg.distributed, info, compare, args.overrides)

    return exits.report_errors(work, supervisor.tell_refusal)


if __name__ == "__main__":
    sys.exit(main())
