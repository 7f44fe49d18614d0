"""The command that trains, on the command line: `python run_training.py [group=option] [key=value]`.

Hydra composes conf/ with the command line (tunix/config/compose.py), a wrong input ends here with exit code 2, and
`tunix.trainer.run` does the rest.
"""

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import DictConfig

from tunix.base.config_types import CONF
from tunix.base.errors import UserError
from tunix.base.progress import announcing
from tunix.config import Distributed, Local, compose
from tunix.config.compose import add_implied_model, add_search_path, check_inputs
from tunix.config.mistakes import describe_errors, reject_flags
from tunix.processes import exits, supervisor
from tunix.processes.identity import find_identity, reject_restart


def train_command() -> int:
    """Train as the command line says; returns the exit code."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra's errors are raised, not printed
    if code := exits.report_errors(reject_foreign_flags):
        return code
    args = get_args_parser().parse_intermixed_args()
    flags = [word for word in sys.argv[1:] if word not in args.overrides]
    only_hydra = (args.cfg, args.help, args.hydra_help, args.info, args.shell_completion, args.multirun)

    def work() -> int | None:
        argv = [compose.select_set(word) for word in args.overrides]
        argv = add_search_path(argv, args.config_dir, args.config_path and CONF)
        sys.argv[1:] = [*flags, *add_implied_model(argv)]  # flags anywhere
        config_file = args.config_path, args.config_name or "config"
        if not any(only_hydra):
            return launch(compose.compose(argv, *config_file))
        if args.cfg == "job" and any(word.startswith("resume=") for word in argv):
            print(compose.to_yaml(compose.compose(argv).config), end="")
            return None
        with describe_errors():
            if args.multirun:
                return sweep([word for word in flags if word not in ("--multirun", "-m")], argv, *config_file)
            if args.cfg and args.package:
                print_package(args.cfg, args.package)
            else:
                under_hydra(make_point)
            return 0

    return exits.report_errors(work, supervisor.tell_refusal)


def reject_foreign_flags() -> None:
    """Raise `UserError` for a flag of another program, and for a topic of --info that Hydra does not have."""
    parser = get_args_parser()
    reject_flags(sys.argv[1:], list(parser._option_string_actions))
    topics = next(action.choices for action in parser._actions if action.dest == "info") or ()
    argv = sys.argv[1:]
    for flag, topic in pairwise(argv):
        if flag in ("--info", "-i") and not topic.startswith("-") and "=" not in topic and topic not in topics:
            raise UserError(f"--info {topic}: choose from {', '.join(topics)}; --help lists the config groups")


def sweep(flags: list[str], argv: list[str], config_dir: str | None, config_name: str) -> int:
    """Run every point of a grid; returns the first exit code that is not 0. `flags` are those of each point."""
    jobs = compose.check_sweep(argv, config_dir, config_name)
    for job in jobs:
        check_inputs(job)
    if repeated := compose.remark_on_repeated(argv):  # the words of a point have each key once
        print(repeated, flush=True)
    search = [word for word in argv if word.startswith(compose.SEARCH)]
    codes: list[int] = []  # one for each point that has begun

    def run_point(job: compose.Job) -> None:
        number = len(codes)
        codes.append(0)
        print(f"sweep job {number}: {' '.join(job.overrides)}", flush=True)
        # Of several processes, each has a child for each point: JAX's runtime, and its handlers of signals, begin anew.
        sys.argv[1:] = [*flags, *search, *job.overrides, f"hydra.run.dir={compose.quote_path(job.run_dir)}"]
        exits.exit_on_stop_signals()  # until this point handles them; the one before may have left them ignored
        try:
            codes[number] = code = exits.report_errors(lambda: launch(job))
        except Exception as error:  # Hydra would run the other points, and show it then
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(1)
        if code and not concerns_one_point(code, job.config.distributed):
            sys.exit(code)
        if code:
            print(f"sweep job {number} ended with exit code {code}; the next one begins", flush=True)

    if jobs and all(job.config.dry_run for job in jobs):  # Hydra would make a folder for each
        for job in jobs:
            run_point(job)
        return next(filter(None, codes), 0)
    try:
        under_hydra(lambda composed: run_point(make_point(composed)))
    except OSError as error:
        if codes or isinstance(error, MissingConfigException):
            raise
        raise UserError(
            f"the sweep's folder {error.filename} cannot be written ({error.strerror}); choose hydra.sweep.dir=DIR"
        ) from None
    return next(filter(None, codes), 0)


def under_hydra(work: Callable[[DictConfig], object]) -> None:
    """Let Hydra do what the command line asks of it: print a config or a help text, or call `work` for each point."""
    hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(work)()


def print_package(kind: str, package: str) -> None:
    """Let Hydra print a part of a config (--cfg KIND --package NAME); raises `UserError` where it has none."""
    hydras = io.StringIO()
    try:
        with redirect_stderr(hydras):
            under_hydra(make_point)
    except SystemExit as ended:
        if ended.code != 1:
            raise
        hint = "leave --package out to print all"
        if kind == "hydra" and package.partition(".")[0] != "hydra":
            hint = f"did you mean hydra.{package}?"
        raise UserError(f"--package {package}: --cfg {kind} has no such section, or it is null; {hint}") from None
    print(hydras.getvalue(), end="", file=sys.stderr)


def make_point(composed: DictConfig) -> compose.Job:
    """Return the job of one point of a sweep, in the folder that Hydra made for it."""
    point = HydraConfig.get()
    overrides = [str(word) for word in point.overrides.task]
    return compose.Job(compose.check(composed), overrides, Path(point.runtime.output_dir), run_dir_is_explicit=True)


def concerns_one_point(code: int, distributed: Distributed) -> bool:
    """Return True for an exit code that says nothing of a sweep's other points: not finite, or the time limit.

    Of several processes, only the one that got a signal knows that it was no time limit: then a stop ends the sweep.
    """
    if code == exits.STOPPED and find_identity(distributed) is None:
        from tunix.processes import watchdog

        return not watchdog.stopped_by_signal()
    return code == exits.DIVERGED


def launch(job: compose.Job) -> int:
    """Start the run where `launcher` says: here, or by the file of tunix/launch that has its name."""
    check_inputs(job)
    if isinstance(job.config.launcher, Local):
        return train(job)
    exits.restore_stop_signals()  # the run is elsewhere: 75 would say that it can be resumed
    return import_module(f"tunix.launch.{job.config.launcher.name}").launch(job)


def train(job: compose.Job) -> int:
    """Train here, under a supervisor where the run has several processes; returns the exit code."""
    distributed = job.config.distributed
    if not job.config.resume:
        reject_restart("at step 0 in a folder of its own")
    elif job.resume_step is not None:
        reject_restart(f"at step {job.resume_step} again, without what it has saved since")
    if (code := supervisor.supervise(distributed)) is not None:
        return code
    exits.exit_on_stop_signals()  # also where Python calls `train_command` by itself

    def work() -> None:
        with exits.ending_at_interrupts(), announcing("importing tunix"):
            from tunix.trainer import run  # imports jax: a wrong config is refused before

        run(job)

    exits.ends_with_leave.set()
    try:
        return supervisor.run_member(distributed, work)
    finally:
        exits.ends_with_leave.clear()
