"""Memory and time of a training step on each mesh of a cluster: `python -m tunix.plan [group=option] [key=value]`.

It takes the keys of training. plan.topology=KIND:GPUS or KIND:NODESxGPUS names the cluster; conf/command/device has the
kinds. No device is needed: the costs of each mesh are derived from the config, XLA's GPU compiler compiles the best
meshes, and all times are predicted. Meshes are ranked by tokens per second. model.mesh_shape=... shows that mesh alone.
Exit code 2 if no mesh fits.
"""

import sys

from tunix.base.errors import UserError
from tunix.cli import command, compose
from tunix.cli.hydra_words import add_search_path
from tunix.plan import text
from tunix.plan.ranking import explain_no_fit, rank
from tunix.plan.topology import read_topology
from tunix.processes import exits


def main() -> int:
    """Run the command line and return its exit code."""
    parser = command.command_parser("plan", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    args = parser.parse_intermixed_args()

    def work() -> None:
        overrides = add_search_path(args.overrides, args.config_dir)
        cfg = compose.compose(overrides).config
        cluster = read_topology(cfg.plan.topology, cfg.plan.network)
        folder = text.find_folder(cfg.plan.output)  # refused now, and not after minutes of compiling
        ranking = rank(cfg, cluster, lambda line: print(line, file=sys.stderr))
        show = text.format_json if args.json else text.format_text
        print(show(ranking, cluster, overrides))
        if not ranking.fit:
            raise UserError(explain_no_fit(ranking, cluster))
        if folder is not None:
            text.save(folder, ranking, cluster, overrides)

    return exits.report_errors(work)


if __name__ == "__main__":
    sys.exit(main())
