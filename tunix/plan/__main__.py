"""Memory and time of a training step on each mesh of a cluster: `python -m tunix.plan [group=option] [key=value]`.

It takes the keys of training. plan.topology=KIND:GPUS or KIND:NODESxGPUS names the cluster; conf/command/device has the
kinds. No device is needed: the costs of each mesh are derived from the config, XLA's GPU compiler compiles the best
meshes, and all times are predicted. Meshes are ranked by tokens per second. model.mesh_shape=... shows that mesh alone.
Exit code 2 if no mesh fits.
"""

import sys

from tunix.base.errors import UserError
from tunix.config import command_line, compose
from tunix.config.compose import add_search_path
from tunix.costs.devices import read_topology
from tunix.plan import report
from tunix.plan.ranking import describe_no_fit, leave_to_learning, rank
from tunix.processes import exits


def main() -> int:
    """Run the command line and return its exit code."""
    parser = command_line.command_parser("plan", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    args = parser.parse_intermixed_args()

    def work() -> None:
        overrides = add_search_path(args.overrides, args.config_dir)
        cfg = compose.compose(overrides).config
        if repeated := compose.remark_on_repeated(overrides):
            print(repeated, file=sys.stderr)
        cluster = read_topology(cfg.plan.topology, cfg.plan.network)
        # A folder is refused now, and not after minutes of compiling.
        folder = report.find_folder(cfg.plan.output) if cfg.plan.output is not None else None
        ranking = rank(cfg, leave_to_learning(cfg, cluster), lambda line: print(line, file=sys.stderr))
        show = report.format_json if args.json else report.format_text
        print(show(ranking, cluster, overrides))
        if not ranking.fit:
            raise UserError(describe_no_fit(ranking, cluster))
        if folder is not None:
            report.save(folder, ranking, cluster, overrides)

    return exits.report_errors(work)


if __name__ == "__main__":
    sys.exit(main())
