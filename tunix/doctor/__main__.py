"""`python -m tunix.doctor [group=option] [key=value] [--json]`: is what is here fit for this run.

Takes the keys of training; started by a launcher, as training is, it looks at all processes and the links between them.
Exit code 0, or 1 where something would make training fail; 2 for a mistake in the command line.
"""

import json
import os
import platform
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import jax
from rich.console import Console

from tunix.base.errors import PeerLost, UserError
from tunix.cli import command, compose
from tunix.doctor import machine, software, together
from tunix.doctor.findings import Finding
from tunix.processes import exits, joining, peers
from tunix.training.program import build_mesh

START_S, TOGETHER_S = 30, 90  # for all processes to come, and for all that they do together
MARKS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "error": "[red]error  [/]"}


@dataclass
class Diagnosis:
    """All that was found."""

    hosts: list[str]  # of the processes
    of_each: list[list[Finding]]  # by process
    between: list[Finding] = field(default_factory=list)
    links: list[together.Link] = field(default_factory=list)
    joined: bool = True  # the other processes, if there are any

    @property
    def is_fit(self) -> bool:
        return all(each.status != "error" for found in [self.between, *self.of_each] for each in found)

    def merged(self) -> dict[Finding, list[int]]:
        """What processes found, with their numbers."""
        found: dict[Finding, list[int]] = defaultdict(list)
        for rank, findings in enumerate(self.of_each):
            for each in findings:
                found[each].append(rank)
        return found


def examine(job: compose.Job) -> Diagnosis:
    """Join the other processes, look, and tell each other."""
    mine = [*software.versions(), *software.variables(os.environ), *software.xla_flags(os.environ)]
    soon = job.config.distributed.model_copy(update={"init_timeout_s": START_S})
    try:
        joining.start(soon, {})  # differences are told below, all of them
    except (UserError, PeerLost) as error:
        return Diagnosis([socket.gethostname()], [[*mine, Finding("processes", "error", str(error))]], joined=False)
    mine += machine.examine(job)
    with peers.deadline(TOGETHER_S, "the processes did not all answer (a collective hangs, or a process has died)"):
        return _together(job, mine)


def _together(job: compose.Job, mine: list[Finding]) -> Diagnosis:
    hosts = peers.hosts()
    everyone = [json.loads(text) for text in peers.gather(json.dumps([*map(asdict, mine)]), "findings")]
    found = Diagnosis(hosts, [[Finding(**each) for each in one] for one in everyone])
    facts = {
        **{name: software.installed(name) for name in software.SHOWN},
        "Python": platform.python_version(),
        "kind of device": jax.local_devices()[0].device_kind,
        "number of devices": str(jax.local_device_count()),
        **{name: os.environ.get(name) for name in sorted({"XLA_FLAGS", *_nccl_of_all()})},
    }
    found.between = [*together.compare(job, facts), *together.slow_processes()]
    try:
        mesh = build_mesh(job.config)
    except UserError:
        return found  # each process has said so
    per_node = max(Counter(hosts).values()) * jax.local_device_count()
    found.links = list(together.links(mesh, per_node))
    found.between += together.judge(found.links)
    return found


def _nccl_of_all() -> set[str]:
    """Names of NCCL's variables that one of the processes has."""
    mine = [name for name in os.environ if name.startswith("NCCL_")]
    return {name for text in peers.gather(json.dumps(mine), "variables") for name in json.loads(text)}


def show(found: Diagnosis) -> None:
    """A line for each finding, the bad ones last."""
    console, every = Console(highlight=False, soft_wrap=True), len(found.of_each)
    lines = [(each, "" if len(ranks) == every else _who(ranks, found.hosts)) for each, ranks in found.merged().items()]
    lines += [(each, "") for each in found.between]
    for each, who in sorted(lines, key=lambda line: list(MARKS).index(line[0].status)):
        console.print(MARKS[each.status], f"{each.check:16}", end=" ")
        console.print(f"{who}{each.says}", markup=False)
    errors = sum(each.status == "error" for each, _ in lines)
    console.print(f"{every} process(es): {'fit to train' if found.is_fit else f'not fit to train, {errors} errors'}")


def _who(ranks: list[int], hosts: list[str]) -> str:
    shown = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks[:4])
    return f"process {shown}{f' and {len(ranks) - 4} more' if len(ranks) > 4 else ''}: "


def record(found: Diagnosis) -> str:
    """As --json shows it."""
    findings = [{**asdict(each), "processes": ranks} for each, ranks in found.merged().items()]
    return json.dumps(
        {
            "fit": found.is_fit,
            "hosts": found.hosts,
            "findings": findings + [{**asdict(each), "processes": None} for each in found.between],
            "links": [asdict(link) for link in found.links],
        },
        indent=1,
    )


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Gloo prints how it connects; that is no part of what is asked for."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def main() -> int:
    """Exit code of the command line."""
    parser = command.command_parser("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    args = parser.parse_intermixed_args()

    def work() -> int:
        job = compose.compose(compose.searched(args.overrides, args.config_dir))
        with _stdout_as_stderr():
            found = examine(job)
        if not found.joined or peers.is_main():
            print(record(found)) if args.json else show(found)
        return int(not found.is_fit)

    return exits.reported(work)


if __name__ == "__main__":
    sys.exit(main())
