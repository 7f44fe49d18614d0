"""Train: `python run_training.py [group=option] [key=value] [--multirun] [--cfg job] [--help]`.

    compose -> validate -> who am I -> run

Hydra composes conf/ with the command line (tunix/compose.py), mistakes end here with exit code 2, and
`tunix.train.run` does the rest.
"""

import os
import sys
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from tunix import compose
from tunix.config import UserError

EXIT_USER_ERROR, EXIT_NOT_FINITE = 2, 77


def main() -> int:
    """Exit code of the command line."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra's errors are raised, not printed
    args = get_args_parser().parse_args()
    only_hydra = (args.cfg, args.help, args.hydra_help, args.info, args.shell_completion, args.multirun)
    try:
        if any(only_hydra):
            with compose.explained():
                hydra_main()
            return 0
        return train(compose.compose(args.overrides, args.config_path, args.config_name or "config"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def train(job: compose.Job) -> int:
    from tunix.train import NotFinite, run  # jax starts here, after the config has passed

    try:
        run(job)
    except NotFinite as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_FINITE
    return 0


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def hydra_main(composed: DictConfig) -> None:
    """One point of a sweep, in the folder that Hydra made for it."""
    if composed.resume:
        raise UserError("resume goes on with one run; it cannot be part of a sweep")
    point = HydraConfig.get()
    overrides = list(OmegaConf.to_container(point.overrides.task))
    job = compose.Job(compose.checked(composed), overrides, Path(point.runtime.output_dir), run_dir_is_explicit=True)
    if code := train(job):
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
