"""`launcher=kubernetes`: the JobSet it writes, field by field (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2)."""

import re
import shlex
from types import SimpleNamespace

import pytest
import yaml

from tunix.base.errors import UserError
from tunix.config import compose
from tunix.launch import kubernetes
from tunix.launch.__main__ import parser
from tunix.launch.nodes import find_node

WORDS = [
    "launcher=kubernetes",
    "launcher.image=registry.example/tunix:1",
    "launcher.volume_claim=shared",
    "hydra.run.dir=run",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(here, *words: str) -> tuple[dict, dict]:
    """ConfigMap and JobSet."""
    assert kubernetes.launch(compose.compose([*WORDS, *words])) == 0
    return tuple(yaml.safe_load_all((here / "run" / "jobset.yaml").read_text()))


def test_a_dry_run_prints_what_would_train(here, capsys):
    assert kubernetes.launch(compose.compose([*WORDS, "dry_run=true"])) == 0
    config_map, _ = yaml.safe_load_all(capsys.readouterr().out)
    assert not yaml.safe_load(config_map["data"]["config.yaml"])["dry_run"]
    assert not (here / "run").exists()


def test_jobset(here, capsys):
    _, jobset = written(
        here, "launcher.nodes=4", "run_name=My Run", "launcher.max_restarts=3", "launcher.namespace=team"
    )
    assert f"kubectl apply -f {here}/run/jobset.yaml" in capsys.readouterr().out
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["metadata"] == {"name": "my-run", "namespace": "team"}
    spec = jobset["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": "my-run"}
    assert spec["coordinator"] == {"replicatedJob": "workers", "jobIndex": 0, "podIndex": 0}
    assert spec["failurePolicy"]["maxRestarts"] == 3
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    (replicated,) = spec["replicatedJobs"]
    assert (replicated["name"], replicated["replicas"]) == ("workers", 1)
    job = replicated["template"]["spec"]
    assert (job["completionMode"], job["parallelism"], job["completions"], job["backoffLimit"]) == ("Indexed", 4, 4, 0)
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [2, 77]},
    }
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy demands it


def test_pod(here):
    words = [
        "run_name=r",
        "launcher.cpu=32",
        "launcher.memory=256Gi",
        "launcher.service_account=me",
        "launcher.grace_period_s=60",
    ]
    words += [
        "launcher.node_selector=['gpu.vendor/kind=h200']",
        r"launcher.extra_env=['NCCL_DEBUG=WARN','A=$(MASTER_PORT) $$ $HOME']",
        "launcher.train_script='$(A).py'",
        "launcher.mount_path=/mnt/runs",
    ]
    _, jobset = written(here, *words)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (init,), (container,) = pod["initContainers"], pod["containers"]
    assert (pod["serviceAccountName"], pod["nodeSelector"], pod["terminationGracePeriodSeconds"]) == (
        "me",
        {"gpu.vendor/kind": "h200"},
        60,
    )
    assert container["image"] == init["image"] == "registry.example/tunix:1"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8, "cpu": "32", "memory": "256Gi"}}
    # Kubernetes reads $$ as $, so these arrive as they were typed: $(MASTER_PORT) would be 29500, and $$ be $.
    assert container["env"][-1] == {"name": "A", "value": "$$(MASTER_PORT) $$$$ $$HOME"}
    assert container["args"][-2] == "$$(A).py"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["outputs"]["persistentVolumeClaim"]["claimName"] == "shared"
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    for mount in container["volumeMounts"] + init["volumeMounts"]:
        assert mount["name"] in volumes
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/mnt/runs", "/dev/shm"}


@pytest.mark.parametrize("tasks", [1, 8])
def test_the_pods_find_each_other(here, tasks):
    """What tunix.launch makes of each pod's flags and environment: every rank once, one coordinator."""
    _, jobset = written(here, "run_name=r", "launcher.nodes=4", f"launcher.tasks_per_node={tasks}")
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["command"] == ["python3", "-m", "tunix.launch"]
    flags = parser().parse_args(container["args"])
    assert (flags.script, flags.arguments) == ("run_training.py", ["resume=/outputs/r"])
    index, *given = container["env"]
    assert index["name"] == "NODE_RANK"
    assert (
        index["valueFrom"]["fieldRef"]["fieldPath"]
        == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    )
    environment = {variable["name"]: variable["value"] for variable in given}
    ranks = []
    for pod_index in range(4):
        node = find_node(flags, {**environment, "NODE_RANK": str(pod_index)})
        ranks += [int(node.environment(local)["RANK"]) for local in range(node.num_processes)]
        assert (node.master_addr, node.master_port, node.world_size) == ("r-workers-0-0.r", 29500, 4 * tasks)
    assert ranks == list(range(4 * tasks))


def test_the_pods_read_the_saved_config(here, tmp_path):
    """The init container puts the config map's text where `resume=` looks."""
    import subprocess

    outputs = tmp_path / "outputs"
    config, jobset = written(here, "run_name=r", "training.max_steps=7", f"launcher.mount_path={outputs}")
    name = jobset["metadata"]["name"]
    assert (config["kind"], config["metadata"]["name"]) == ("ConfigMap", name)
    volumes = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "config", "configMap": {"name": name}} in volumes
    (init,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["initContainers"]
    assert {"name": "config", "mountPath": "/etc/tunix"} in init["volumeMounts"]
    mounted = tmp_path / "etc"
    mounted.mkdir()
    (mounted / "config.yaml").write_text(config["data"]["config.yaml"])
    command = [word.replace("/etc/tunix", str(mounted)) for word in init["command"]]
    for host in ("pod-0", "pod-1"):
        subprocess.run(command, env={"HOSTNAME": host, "PATH": "/usr/bin:/bin"}, check=True)
    assert [path.name for path in (outputs / "r").iterdir()] == ["config.yaml"]
    job = compose.compose([f"resume={outputs}/r"])
    assert (job.config.training.max_steps, job.config.launcher.name) == (7, "local")


def test_names(here, monkeypatch):
    _, jobset = written(here)  # of the run's folder
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", jobset["metadata"]["name"])
    for name in ("9lives", "x" * 41):
        with pytest.raises(UserError) as error:
            kubernetes.launch(compose.compose([*WORDS, f"run_name={name}"]))
        assert "Kubernetes takes at most 40 letters" in str(error.value)
    sweep = SimpleNamespace(initialized=lambda: True, get=lambda: SimpleNamespace(job=SimpleNamespace(num=3)))
    monkeypatch.setattr(kubernetes, "HydraConfig", sweep)
    assert kubernetes._select_name(compose.compose([*WORDS, "run_name=Try"])) == "try-3"


def test_dry_run_writes_nothing(here, capsys):
    assert kubernetes.launch(compose.compose([*WORDS, "dry_run=true"])) == 0
    assert len(list(yaml.safe_load_all(capsys.readouterr().out))) == 2
    assert list(here.iterdir()) == []


def test_resume_is_the_pods(here):
    written(here, "run_name=r")
    words = shlex.split("resume=run launcher=kubernetes launcher.image=a launcher.volume_claim=b")
    with pytest.raises(UserError) as error:
        kubernetes.launch(compose.compose(words))
    assert "apply the manifest of that run again" in str(error.value)
