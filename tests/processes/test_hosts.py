"""Two hosts that share nothing: network namespaces with names, addresses and disks of their own, and a link to cut."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import installs
from support.devices import xla_flags
from support.harness import PAIR, ROOT, metrics

pytestmark = pytest.mark.slow
# What follows in $@ runs on host $1 of two, which has folder $2 as its disk, seen by all at $3.
ON_HOST = """
hostname host$1 && printf '127.0.0.1 localhost\\n10.77.0.1 host0\\n10.77.0.2 host1\\n' > $2.hosts &&
mount --bind $2.hosts /etc/hosts && mount --bind $2 $3 && cd $3 && shift 3 && exec "$@"
"""


class Hosts:
    def __init__(self, root: Path):
        self.root, self.names = root, [f"tunix{os.getpid()}-{number}" for number in (0, 1)]
        self.disks = [root / "disk0", root / "disk1"]
        self.seen_at = root / "disk"
        for folder in (*self.disks, self.seen_at):
            folder.mkdir()
        self.runs: list[subprocess.Popen] = []

    def __enter__(self) -> "Hosts":
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        ip(*f"link add eth0 netns {first} type veth peer name eth0 netns {second}".split())
        for number, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.runs:
            process.kill()
            process.wait()
        for name in self.names:
            ip("netns", "del", name)

    def link(self, state: str) -> None:
        ip("-n", self.names[0], "link", "set", "eth0", state)

    def start(self, *words: str) -> None:
        """A process on each host."""
        self.runs = []
        for number, name in enumerate(self.names):
            who = {"coordinator_address": "host0:29501", "num_processes": 2, "process_id": number}
            training = [
                sys.executable,
                ROOT / "run_training.py",
                *words,
                *(f"distributed.{k}={v}" for k, v in who.items()),
            ]
            inside = ["sh", "-c", ON_HOST, "sh", str(number), self.disks[number], self.seen_at, *training]
            environment = {**os.environ, "XLA_FLAGS": xla_flags(1), "TUNIX_CACHE_DIR": str(self.seen_at / "cache")}
            command = ["ip", "netns", "exec", name, "unshare", "--uts", *map(str, inside)]
            with (self.root / f"out.{number}").open("w") as out:
                self.runs.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))

    def ends(self, timeout: float) -> tuple[list[int], list[str]]:
        """Exit codes and outputs."""
        deadline = time.monotonic() + timeout
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in self.runs]
        return codes, [(self.root / f"out.{number}").read_text() for number in (0, 1)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    installs.apt(("ip",), ("iproute2",))
    if os.getuid() or subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], check=False).returncode:
        pytest.skip("NOT TESTED: hosts as network namespaces need root")
    with Hosts(tmp_path) as both:
        yield both


@pytest.mark.nightly
def test_the_link_is_cut_and_comes_back(hosts, corpus):
    """Both end with 76 in bounded time; the run goes on from the checkpoint of process 0 to the same digits."""
    words = [*PAIR, "data=text", f"data.paths=['{corpus}']", "evaluation.every_steps=null", "scheduler.warmup_steps=0",
             "training.max_steps=100000", "checkpoint.save_every_steps=10", "distributed.heartbeat_timeout_s=6", "distributed.step_deadline_s=600"]  # fmt: skip
    run, others = hosts.disks[0] / "run", hosts.disks[1] / "run"
    hosts.start(*words)
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "10").is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts.link("down")
    codes, outputs = hosts.ends(120)  # less than the deadline of a step: the heartbeat ends them
    assert codes == [76, 76], outputs
    assert "is on no shared disk: every host keeps its own" in outputs[0]
    assert not (others / "checkpoints").exists()
    assert (others / "config.yaml").read_text() == (run / "config.yaml").read_text()
    assert (others / "train.1.log").exists()
    for disk in hosts.disks:  # each tokenized for itself
        assert (disk / "cache" / "tokens").is_dir()

    hosts.link("up")
    before = [(line["step"], line["loss"]) for line in metrics(run)]
    last = before[-1][0]
    hosts.start("resume=run", f"training.max_steps={last + 1}")
    codes, outputs = hosts.ends(120)
    assert codes == [0, 0], outputs
    assert "resumed at step" in outputs[0]
    again = [(line["step"], line["loss"]) for line in metrics(run)[last:]]
    assert 0 < len(again) <= last
    assert again[:-1] == before[last + 1 - len(again) :]


@pytest.mark.nightly
def test_a_shared_disk_that_is_none(hosts, corpus):
    words = [*PAIR, "data=text", f"data.paths=['{corpus}']", "distributed.shared_filesystem=true"]
    hosts.start(*words)
    codes, outputs = hosts.ends(120)
    assert codes == [2, 2], outputs
    for output in outputs:
        assert f"the run's folder {hosts.seen_at}/run is not seen by host1; choose one on a disk" in output
    assert not (hosts.disks[0] / "run").exists()
