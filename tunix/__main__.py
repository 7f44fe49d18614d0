"""The command `tunix`: train, or the command that the first word names.

    python -m tunix [group=option] [key=value]      train; also `python run_training.py` and, from a wheel, `tunix`
    python -m tunix plan [group=option] [key=value] the same as `python -m tunix.plan`

Training: Hydra composes conf/ with the command line (tunix/cli/compose.py), a wrong input ends here with exit code 2,
and `tunix.trainer.run` does the rest.
"""

import os
import runpy
import sys
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from tunix.base.errors import UserError
from tunix.cli import compose
from tunix.cli.mistakes import explained
from tunix.config.values import CONF
from tunix.processes import exits, supervisor
from tunix.processes.identity import who_am_i

COMMANDS = ("plan", "doctor", "verify", "prepare", "generate", "evaluate", "export", "launch")  # tunix.NAME


def main() -> int:
    """Run the command that the first word names, training where it names none; returns the exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"tunix.{name}", run_name="__main__", alter_sys=True)  # ends with SystemExit
    if name == "train":
        del sys.argv[1]
    return train_command()


def train_command() -> int:
    """Train as the command line says; returns the exit code."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra's errors are raised, not printed
    args = get_args_parser().parse_intermixed_args()
    flags = [word for word in sys.argv[1:] if word not in args.overrides]
    only_hydra = (args.cfg, args.help, args.hydra_help, args.info, args.shell_completion, args.multirun)

    def work() -> int | None:
        words = compose.searched(args.overrides, args.config_dir, args.config_path and CONF)
        sys.argv[1:] = [*flags, *compose.implied(words)]  # flags anywhere
        where = args.config_path, args.config_name or "config"
        if not any(only_hydra):
            return launch(compose.compose(words, *where))
        if args.cfg == "job" and any(word.startswith("resume=") for word in words):
            print(compose.to_yaml(compose.compose(words).config), end="")
            return None
        with explained():
            return sweep(words, *where) if args.multirun else hydra_main()

    return exits.reported(work)


def sweep(words: list[str], config_dir: str | None, config_name: str) -> int:
    """Run every point; the first exit code that is not 0."""
    first = compose.check_sweep(words, config_dir, config_name)
    if first and first.config.launcher.name == "local" and (code := watched_over(first)) is not None:
        return code
    try:
        hydra_main()
    except OSError as error:
        if ends:
            raise
        raise UserError(
            f"the sweep's folder {error.filename} cannot be written ({error.strerror}); choose hydra.sweep.dir=DIR"
        ) from None
    return next(filter(None, ends), 0)


def launch(job: compose.Job) -> int:
    """Start the run where `launcher` says."""
    return LAUNCHERS[job.config.launcher.name](job)


def watched_over(job: compose.Job) -> int | None:
    """Exit code of this command line, run in a child; None in the child, and for a run of one process."""
    identity = who_am_i(job.config.distributed)
    if identity is None or supervisor.is_child():
        return None
    return supervisor.supervise(identity, job.config.distributed.heartbeat_timeout_s)


def train(job: compose.Job) -> int:
    if (ended := watched_over(job)) is not None:
        return ended
    exits.stop_before_it_began()

    from tunix.processes import peers, stopping  # jax starts here, after the config has passed
    from tunix.trainer import NotFinite, run

    code, why = 0, ""
    try:
        run(job)
    except stopping.Stopped as stopped:
        exits.ignore_stop_signals()
        print(stopped, flush=True)
        return exits.STOPPED
    except UserError as error:
        code, why = exits.USER_ERROR, str(error)
    except NotFinite as error:
        code, why = exits.NOT_FINITE, str(error)
    except Exception as error:
        if not who_am_i(job.config.distributed):
            raise
        code, why = peers.blame(error)
    if code:
        print(f"error: {why}", file=sys.stderr)
        peers.leave(code, why)
    return code


def submit_to_slurm(job: compose.Job) -> int:
    from tunix.launch import slurm

    return slurm.launch(job)


def write_for_kubernetes(job: compose.Job) -> int:
    from tunix.launch import kubernetes

    return kubernetes.launch(job)


ends: list[int] = []  # exit codes of the points of a sweep
LAUNCHERS = {"local": train, "slurm": submit_to_slurm, "kubernetes": write_for_kubernetes}


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def hydra_main(composed: DictConfig) -> None:
    """One point of a sweep, in the folder that Hydra made for it."""
    point = HydraConfig.get()
    print(f"sweep job {point.job.num}: {' '.join(point.overrides.task)}", flush=True)
    overrides = [str(word) for word in point.overrides.task]
    job = compose.Job(compose.checked(composed), overrides, Path(point.runtime.output_dir), run_dir_is_explicit=True)
    ends.append(0)
    ends[-1] = code = launch(job)
    if code and not only_this_point(code):
        sys.exit(code)
    if code:
        print(f"sweep job {point.job.num} ended with exit code {code}; the next one begins", flush=True)


def only_this_point(code: int) -> bool:
    """Whether a code says nothing of the other points of a sweep: a loss that is not finite, or the time limit."""
    if code == exits.STOPPED:
        from tunix.processes import stopping

        return not stopping.told_to_stop()
    return code == exits.NOT_FINITE


if __name__ == "__main__":
    sys.exit(main())
