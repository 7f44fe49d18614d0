"""Check machine, software and links for a run: `python -m tunix.doctor [group=option] [key=value] [--json]`.

Takes the keys of training. Started by a launcher, as training is, it checks all processes and the links between them.
Exit code 0; 1 if something would make training fail; 2 for an error in the command line.
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
from tunix.cli.hydra_words import add_search_path
from tunix.doctor import machine, software, together
from tunix.doctor.findings import Finding
from tunix.processes import exits, joining, peers
from tunix.training.mesh_choices import build_mesh

# Seconds until all processes must have come, and for all checks between processes. A run waits longer; whoever asks the
# doctor waits for the answer, and a process that is missing is an answer.
START_S, TOGETHER_S = 30, 90
MARKS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "error": "[red]error  [/]"}


@dataclass
class Diagnosis:
    """All findings of all processes."""

    hosts: list[str]  # host of each process
    by_process: list[list[Finding]]
    between: list[Finding] = field(default_factory=list)  # findings that compare processes
    links: list[together.Link] = field(default_factory=list)
    joined: bool = True  # False: the other processes could not be joined, and these are the findings of one

    @property
    def is_fit(self) -> bool:
        return all(finding.status != "error" for group in [self.between, *self.by_process] for finding in group)

    def merge(self) -> dict[Finding, list[int]]:
        """Return each finding once, with the ranks of the processes that have it."""
        ranks: dict[Finding, list[int]] = defaultdict(list)
        for rank, findings in enumerate(self.by_process):
            for finding in findings:
                ranks[finding].append(rank)
        return ranks


def examine(job: compose.Job) -> Diagnosis:
    """Check this process, join the others, and exchange findings with them."""
    # The software first: flags of XLA, which may abort this process, must be checked before jax starts.
    findings = [
        *software.check_versions(),
        *software.check_variables(os.environ),
        *software.check_xla_flags(os.environ),
    ]
    distributed = job.config.distributed.model_copy(update={"init_timeout_s": START_S})
    try:
        joining.start(distributed, {})  # no facts to compare here: `together.compare` reports every difference
    except (UserError, PeerLost) as error:
        error_finding = Finding("processes", "error", str(error))
        return Diagnosis([socket.gethostname()], [[*findings, error_finding]], joined=False)
    findings += machine.examine(job)
    with peers.deadline(TOGETHER_S, "the processes did not all answer (a collective hangs, or a process has died)"):
        return _examine_together(job, findings)


def _examine_together(job: compose.Job, findings: list[Finding]) -> Diagnosis:
    """Exchange findings with the other processes, and compare what they have in common."""
    hosts = peers.hosts()
    answers = [json.loads(text) for text in peers.gather(json.dumps([*map(asdict, findings)]), "findings")]
    diagnosis = Diagnosis(hosts, [[Finding(**values) for values in answer] for answer in answers])
    facts = {
        **{name: software.installed_version(name) for name in software.SHOWN},
        "Python": platform.python_version(),
        "kind of device": jax.local_devices()[0].device_kind,
        "number of devices": str(jax.local_device_count()),
        # The names of all processes, so that a variable that one process lacks is compared too.
        **{name: os.environ.get(name) for name in sorted({"XLA_FLAGS", *_gather_nccl_names()})},
    }
    diagnosis.between = [*together.compare(job, facts), *together.find_slow_processes()]
    try:
        mesh = build_mesh(job.config)
    except UserError:
        return diagnosis  # `machine.examine` has reported the error on each process
    per_node = max(Counter(hosts).values()) * jax.local_device_count()
    diagnosis.links = list(together.measure_links(mesh, per_node))
    diagnosis.between += together.judge(diagnosis.links)
    return diagnosis


def _gather_nccl_names() -> set[str]:
    """Return the names of NCCL's variables that at least one process has."""
    names = [name for name in os.environ if name.startswith("NCCL_")]
    return {name for text in peers.gather(json.dumps(names), "variables") for name in json.loads(text)}


def show(diagnosis: Diagnosis) -> None:
    """Print a line for each finding, the bad ones last."""
    console, num_processes = Console(highlight=False, soft_wrap=True), len(diagnosis.by_process)
    lines = []
    for finding, ranks in diagnosis.merge().items():
        lines.append((finding, "" if len(ranks) == num_processes else _name_processes(ranks, diagnosis.hosts)))
    lines += [(finding, "") for finding in diagnosis.between]
    for finding, processes in sorted(lines, key=lambda line: list(MARKS).index(line[0].status)):
        console.print(MARKS[finding.status], f"{finding.check:16}", end=" ")
        console.print(f"{processes}{finding.says}", markup=False)
    errors = sum(finding.status == "error" for finding, _ in lines)
    verdict = "fit to train" if diagnosis.is_fit else f"not fit to train, {errors} error{'s' * (errors > 1)}"
    console.print(f"{num_processes} process(es): {verdict}")


def _name_processes(ranks: list[int], hosts: list[str]) -> str:
    names = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks[:4])
    return f"process {names}{f' and {len(ranks) - 4} more' if len(ranks) > 4 else ''}: "


def format_json(diagnosis: Diagnosis) -> str:
    """Format the diagnosis as --json shows it."""
    findings = [{**asdict(finding), "processes": ranks} for finding, ranks in diagnosis.merge().items()]
    return json.dumps(
        {
            "fit": diagnosis.is_fit,
            "hosts": diagnosis.hosts,
            "findings": findings + [{**asdict(finding), "processes": None} for finding in diagnosis.between],
            "links": [asdict(link) for link in diagnosis.links],
        },
        indent=1,
    )


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Send to stderr what is written to stdout: Gloo prints there, and --json must stay readable."""
    # Gloo, which does the collectives of CPUs, is C++ and writes to file descriptor 1, whatever `sys.stdout` is.
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = command.command_parser("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    args = parser.parse_intermixed_args()

    def work() -> int:
        job = compose.compose(add_search_path(args.overrides, args.config_dir))
        with _stdout_as_stderr():
            diagnosis = examine(job)
        if not diagnosis.joined or peers.is_main():
            print(format_json(diagnosis)) if args.json else show(diagnosis)
        return int(not diagnosis.is_fit)

    return exits.report_errors(work)


if __name__ == "__main__":
    sys.exit(main())
