"""Train a few steps on several meshes and compare: `python -m tunix.verify [group=option] [key=value]`.

`python -m tunix.verify checkpoint=RUN_DIR` does something else: it compares files with their digests, to find damage.
It takes a run's folder, RUN_DIR/checkpoints/STEP, an export or a prepared corpus. Exit code 1 if a file is damaged.

Every mesh starts from the same weights and takes the same global batches of the config's data (the batch that follows
all training.batch_stages). Numbers are float32 unless training.mixed_precision is given. Exit code 1 if loss or
gradient norm differ by more than the tolerance. On a machine without GPUs the CPU acts as 8 devices; XLA_FLAGS or
JAX_NUM_CPU_DEVICES choose another number.

The processes of a launcher join as they do for training. If the devices of process 0 are enough for a mesh, process 0
trains on it alone and the others wait. So one device is compared with a cluster.
"""

import argparse
import os
import sys
from typing import Any

import jax
import yaml
from rich.table import Table

from tunix.base.errors import UserError
from tunix.base.tables import print_table
from tunix.cli import command, compose
from tunix.cli.hydra_words import add_search_path
from tunix.config import Config
from tunix.config.values import CONF
from tunix.processes import exits, peers
from tunix.run.integrity import check_everything
from tunix.verify.trials import COMPARED, Trial, verify

FAKE_DEVICES = 8
EVERY = "all"  # --meshes all: every mesh that divides the model and the batch


def report(trials: list[Trial], tolerance: float) -> tuple[Table, float]:
    """Return a table with a row for each mesh, and the largest difference from the first mesh."""
    num_steps = len(trials[0].metrics[COMPARED[0]])
    table = Table(title=f"after {num_steps} steps on {jax.devices()[0].device_kind}", title_justify="left")
    for name in ("mesh", "microbatches", "loss", "gradient norm", "loss differs by", "norm differs by"):
        table.add_column(name, justify="left" if name == "mesh" else "right", no_wrap=True)
    largest = 0.0
    for trial in trials:
        differences = trial.measure_differences(trials[0])
        largest = max(largest, *differences.values())
        table.add_row(
            trial.mesh,
            str(trial.num_microbatches),
            *(f"{trial.metrics[name][-1]:.8g}" for name in COMPARED),
            *(f"{value:.1e}{' !' if value > tolerance else ''}" for value in differences.values()),
        )
    return table, largest


def _read_meshes(text: str) -> list[Any]:
    try:
        shapes = yaml.safe_load(text)
    except yaml.YAMLError:
        shapes = None
    if not isinstance(shapes, list) or not shapes or not all(isinstance(shape, list) for shape in shapes):
        raise UserError(
            f'--meshes {text}: expected all, or a list of meshes like [[[8],["fsdp"]],[[4,2],["fsdp","tp"]]]'
        )
    return shapes


def _read_arguments() -> argparse.Namespace:
    parser = command.command_parser("verify", __doc__)
    parser.add_argument(
        "--meshes",
        help='list of meshes like [[[8],["fsdp"]],[[2,4],["dp","tp"]]], the first is the reference; or all: every mesh '
        "that divides the model and the batch",
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps on each mesh")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference")
    return parser.parse_intermixed_args()


def _compose_config(args: argparse.Namespace) -> Config:
    given = [word.lstrip("+").split("=")[0] for word in args.overrides]
    if "resume" in given:
        raise UserError("resume: tunix.verify starts from new weights; leave it out, or set model.init_from")
    if args.steps < 1:
        raise UserError(f"--steps {args.steps} must be 1 or more")
    if not args.tolerance >= 0:
        raise UserError(f"--tolerance {args.tolerance} must be 0 or more")
    # bf16 has 8 bits: meshes would differ in the third digit, and a real error would not show.
    precision = [] if "training.mixed_precision" in given else ["training.mixed_precision=fp32"]
    return compose.compose(add_search_path([*precision, *args.overrides], args.config_dir)).config


def _find_checked_folder(words: list[str]) -> str | None:
    """Return the FOLDER of checkpoint=FOLDER; None without it, or where it names a file of conf/checkpoint."""
    choices = {f"checkpoint={path.stem}" for path in (CONF / "checkpoint").glob("*.yaml")}
    given = [word for word in words if word.startswith("checkpoint=") and word not in choices]
    if given and len(words) > 1:
        others = " ".join(word for word in words if word != given[0])
        raise UserError(f"{given[0]} compares files with their digests and takes no other words: {others}")
    return given[0].partition("=")[2] if given else None


def main() -> int:
    """Run the command line and return its exit code."""
    args = _read_arguments()
    command.print_warnings()

    def work() -> int:
        if folder := _find_checked_folder(args.overrides):
            lines, is_whole = check_everything(folder)
            print("\n".join(lines))
            return int(not is_whole)
        cfg = _compose_config(args)
        # jax reads the number of CPU devices when it starts, which is after this. A number of the user's own stays.
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", "") and (
            jax.config.jax_num_cpu_devices < 0  # type: ignore[attr-defined]
        ):
            jax.config.update("jax_num_cpu_devices", FAKE_DEVICES)
        every = args.meshes == EVERY
        mesh_shapes = _read_meshes(args.meshes) if args.meshes and not every else None
        facts = compose.list_facts(cfg) | {"--meshes": args.meshes, "--steps": args.steps}

        def compare() -> int:
            return _print_report(verify(cfg, mesh_shapes, args.steps, every), args.tolerance)

        return command.run_joined("verify", cfg.distributed, facts, compare)

    return exits.report_errors(work)


def _print_report(trials: list[Trial], tolerance: float) -> int:
    """Print the table on process 0; return the exit code, the same on every process."""
    table, largest = report(trials, tolerance)
    if peers.is_main():
        print_table(table)
        verdict = "within" if largest <= tolerance else "past"
        print(f"largest relative difference {largest:.2e}, {verdict} the tolerance of {tolerance:g}")
    return int(largest > tolerance)


if __name__ == "__main__":
    sys.exit(main())
