"""What each mesh of a cluster would hold and take: `python -m tunix.plan [group=option] [key=value]`.

The keys are those of training, and plan.topology=KIND:GPUS or KIND:NODESxGPUS; conf/command/device has the kinds.
No device is needed: the best meshes are compiled by XLA's GPU compiler, all others derived, times are predicted.
Ranked by tokens per second; with model.mesh_shape, that mesh alone. Exit code 2 where no mesh fits.
"""

import sys
from pathlib import Path

from tunix.base.errors import UserError
from tunix.cli import command, compose
from tunix.plan import text
from tunix.plan.ranking import nothing_fits, rank
from tunix.plan.topology import read_topology
from tunix.processes import exits


def main() -> int:
    """Exit code of the command line."""
    parser = command.command_parser("plan", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    args = parser.parse_intermixed_args()

    def work() -> None:
        overrides = compose.searched(args.overrides, args.config_dir)
        cfg = compose.compose(overrides).config
        cluster = read_topology(cfg.plan.topology)
        ranking = rank(cfg, cluster, lambda line: print(line, file=sys.stderr))
        show = text.as_json if args.json else text.text
        print(show(ranking, cluster, overrides))
        if not ranking.fit:
            raise UserError(nothing_fits(ranking, cluster))
        if cfg.plan.output is not None:
            text.save(Path(cfg.plan.output), ranking, cluster, overrides)

    return exits.reported(work)


if __name__ == "__main__":
    sys.exit(main())
