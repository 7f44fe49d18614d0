"""Start the processes of this node, of one node or of several: `python -m tunix.launch [flags] SCRIPT [arguments]`.

Takes torchrun's flags in both spellings (--nproc_per_node, --nproc-per-node), the environment variables that users of
torchrun export, and accelerate's YAML.
"""

import argparse
import math
import os
import sys
from pathlib import Path

from tunix.base.errors import FlagParser
from tunix.base.files import is_whole_number
from tunix.launch import children
from tunix.launch.nodes import find_node, read_config
from tunix.processes import exits
from tunix.processes.identity import Environment

EPILOG = """
MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK are read from the environment if no flag is given; RANK is the first
global rank of this node, or the number of this node. docs/coming_from.md has examples.
"""

# Flags of `accelerate launch`, and ours.
ACCELERATE = {
    "config_file": "--accelerate_config",
    "main_process_ip": "--master_addr",
    "main_process_port": "--master_port",
    "machine_rank": "--node_rank",
    "multi_gpu": "--nprocs=gpu",
    "num_machines": "--nnodes",
    "num_processes": "--nprocs, which counts those of this node",
}


def main(argv: list[str]) -> int:
    """Run the command line; return 0, or the worst exit code of the processes."""

    def work() -> int:
        args, environment = read_flags(argv, os.environ)
        command = children.build_command(args.script, args.arguments, args.module, args.no_python)
        return children.run(find_node(args, environment), command, environment, args.log_dir, args.grace_s, args.label)

    try:
        return exits.report_errors(work)
    except KeyboardInterrupt:  # while this node waits for the others
        return 130


def read_flags(argv: list[str], environment: Environment) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the flags of a command line, and the environment of the processes.

    An accelerate config adds to both, but a flag wins over it. All nodes may share one file, so NODE_RANK in the
    environment wins over the file's node_rank.

    Raises:
        UserError: as `read_config` raises it.
    """
    reader = parser()
    args = reader.parse_args(argv)
    if args.accelerate_config is None:
        return args, dict(environment)
    file = read_config(args.accelerate_config)
    values = file.flags
    if (args.nnodes or 1) > 1:
        values["standalone"] = None
    if environment.get("NODE_RANK"):
        values["node_rank"] = None
    reader.set_defaults(**values)
    return reader.parse_args(argv), {**environment, **file.environment}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; each flag has a spelling with _ and one with -."""
    parser = FlagParser("python -m tunix.launch", description=__doc__, epilog=EPILOG, allow_abbrev=False)

    def flag(*names: str, **kwargs) -> None:
        spellings = dict.fromkeys(spelling for name in names for spelling in (name, name.replace("_", "-")))
        parser.add_argument(*(f"--{spelling}" for spelling in spellings), **kwargs)

    processes = "processes on this node: a number, gpu (one a GPU), cpu (one a core), or auto"
    flag("nprocs", "nproc_per_node", help=processes)
    flag("nnodes", type=_read_nodes, help="nodes of the run")
    flag("node_rank", type=int, help="number of this node, from 0 [NODE_RANK]")
    flag("master_addr", help="host name or address of node 0 [MASTER_ADDR]")
    flag("master_port", type=int, help="a port of node 0; the run listens on the port after it [MASTER_PORT]")
    flag("standalone", action="store_true", default=None, help="one node, whatever the environment says")
    flag("rdzv_backend", choices=["static", "c10d"], help="c10d: nodes get their numbers as they arrive")
    flag("rdzv_endpoint", help="HOST[:PORT] where the nodes of --rdzv_backend=c10d meet; HOST becomes node 0")
    flag("rdzv_id", help="nodes with different ids do not meet")
    flag("max_restarts", type=int, choices=[0], help="only 0: resume=RUN_DIR goes on with a run")
    flag("accelerate_config", type=Path, metavar="FILE", help="read an accelerate config; flags win over it")
    flag("log_dir", type=Path, help="folder for train.RANK.log; a temporary one if not given")
    grace = "seconds between SIGTERM and SIGKILL after a process died [30]"
    flag("grace_s", type=_read_seconds, default=30.0, help=grace)
    flag("label", action="store_true", help="show the output of every process, each line behind its rank")
    for name, ours in ACCELERATE.items():
        flag(name, action=_Accelerate, nargs=0 if name == "multi_gpu" else None, const=ours, help=argparse.SUPPRESS)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    flag("no_python", action="store_true", help="SCRIPT is a program, not a Python script")
    parser.add_argument("script", metavar="SCRIPT")
    # Not required: the message for a missing SCRIPT would name them too.
    parser.add_argument("arguments", nargs=argparse.REMAINDER).required = False
    return parser


class _Accelerate(argparse.Action):
    """Refuses a flag of accelerate, and says ours."""

    def __call__(self, parser, *_) -> None:
        parser.error(f"--{self.dest} is of accelerate; here it is {self.const}")


def _read_nodes(text: str) -> int:
    """Read a number of nodes, or torchrun's MIN:MAX if both are the same."""
    least, _, high = text.partition(":")
    if high and least != high:
        raise argparse.ArgumentTypeError(f"{text}: the number of nodes is fixed; give one number")
    if not is_whole_number(least):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number")
    return int(least)


def _read_seconds(text: str) -> float:
    """Read a number of seconds, from 0 on."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of seconds, from 0 on")
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
