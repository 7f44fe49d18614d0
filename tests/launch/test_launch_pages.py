"""Every command on the pages about launchers composes, and says who each process is."""

import re
import shlex
from pathlib import Path
from string import Template

import pytest
from launch.test_launch import TWO_MACHINES
from support.harness import ROOT

from tunix.config import compose
from tunix.launch import kubernetes, ray, slurm
from tunix.launch import nodes as rendezvous
from tunix.launch.__main__ import read_flags
from tunix.launch.nodes import Node, find_node

PAGES = [ROOT / "docs" / name for name in ("coming_from.md", "slurm.md", "kubernetes.md", "ray.md")]
HERE = {  # what the shell of each example has
    "NUM_NODES": "2", "HOST_NODE_ADDR": "10.0.0.1:29400", "JOB_ID": "7", "NODE": "1", "MASTER_ADDR": "10.0.0.1", "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}  # fmt: skip


def commands(page: Path) -> list[tuple[dict[str, str], list[str]]]:
    """Environment and words of each command in the page's sh blocks."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S):
        environment = dict(HERE)
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            words = [Template(word).substitute(environment) for word in words]
            if words[0] == "export":
                environment |= [words[1].split("=", 1)]
            else:
                found.append((environment, words))
    return found


CASES = [pytest.param(*case, id=" ".join(case[1])[:90]) for page in PAGES for case in commands(page)]


@pytest.mark.parametrize(("environment", "words"), CASES)
def test_command(environment, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rendezvous, "meet", lambda addr, port, nodes, run: 1)
    (tmp_path / "two_nodes.yaml").write_text(TWO_MACHINES)
    saved = compose.to_yaml(compose.compose([]).config)
    for folder in ("outputs/tunix/latest", "shared"):  # of the runs that examples go on with
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.yaml").write_text(saved)
    if words[:3] == ["python", "-m", "tunix.launch"]:
        node = launched(words[3:], environment)
        assert (node.rank, node.num_nodes) in ((0, 1), (1, 2))
    words = words[words.index("run_training.py") + 1 :]
    if "--config-path" in words:
        assert compose.compose([], tmp_path / "shared").config.launcher.name == "local"
        return
    points = [word for word in words if word != "--multirun"]
    if points != words:
        compose.check_sweep(points)
        return
    job = compose.compose(words)
    if job.config.launcher.name == "slurm":
        assert f"--nodes={job.config.launcher.nodes}" in slurm.format_script(job.config, job.config.launcher, tmp_path)
    if job.config.launcher.name == "kubernetes":
        assert len(kubernetes.make_manifests(job.config, job.config.launcher, "name")) == 2
    if job.config.launcher.name == "ray":
        assert ray.list_sizes(job.config, job.config.launcher)[0] == job.config.launcher.nodes


def launched(words: list[str], environment: dict[str, str]) -> Node:
    return find_node(*read_flags(words, environment))


def test_every_launcher_is_shown():
    starts = {" ".join(words[:3]) for _, words in commands(PAGES[0])}
    for launcher in (
        "python -m tunix.launch",
        "torchrun",
        "accelerate launch",
        "mpirun",
        "srun",
        "python run_training.py launcher=slurm",
    ):
        assert any(start.startswith(launcher) for start in starts), launcher
