"""Write the manifest of a run for Kubernetes, a JobSet (https://jobset.sigs.k8s.io). The user applies it.

The JobSet has one Job, with one pod for each node. A pod's index is the number of its node. JobSet also makes the
service by which pods have host names. In each pod `python -m tunix.launch` starts the processes.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig

from tunix.base.errors import UserError
from tunix.config import Config, Kubernetes, Local, compose
from tunix.launch import submission
from tunix.processes import exits

JOB, CONTAINER = "workers", "trainer"
FOR_GOOD = [exits.USER_ERROR, exits.DIVERGED]  # exit codes after which starting again would fail the same way
INDEX = "batch.kubernetes.io/job-completion-index"
MAX_NAME = 40  # a host name has at most 63 characters; this leaves room for "-workers-0-15"


def launch(job: compose.Job) -> int:
    """Write config and manifest into the run's folder, and print how to start the run."""
    kubernetes = job.config.launcher
    assert isinstance(kubernetes, Kubernetes)
    if job.config.resume:
        raise UserError("launcher=kubernetes with resume: apply the manifest of that run again; its pods resume")
    name = _select_name(job)
    text = yaml.safe_dump_all(make_manifests(job.config, kubernetes, name), sort_keys=False)
    if job.config.dry_run:
        print(text)
        submission.print_numbers(job.config, kubernetes)
        return 0
    with submission.prepare_folder(job) as folder:
        file = submission.write_file(folder / "jobset.yaml", text)
    print(f"run folder in the pods: {_pod_folder(kubernetes, name)}")
    print(f"start it: kubectl apply -f {shlex.quote(str(file))}")
    print(f"its output: kubectl -n {kubernetes.namespace} logs -f -l {INDEX}=0,jobset.sigs.k8s.io/jobset-name={name}")
    return 0


def make_manifests(config: Config, kubernetes: Kubernetes, name: str) -> list[dict[str, Any]]:
    """Return the two manifests of a run: a ConfigMap with the resolved config, and the JobSet that trains it."""
    local = config.model_copy(update={"launcher": Local(name="local"), "dry_run": False})
    metadata = {"name": name, "namespace": kubernetes.namespace}
    data = {"config.yaml": compose.to_yaml(local)}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "coordinator": {"replicatedJob": JOB, "jobIndex": 0, "podIndex": 0},
            # JobSet takes the first rule that fits a failure. A Job that ends by its own rule (`_job`: an exit code of
            # `FOR_GOOD`) has the reason `PodFailurePolicy`. After every other failure all pods start again.
            "failurePolicy": {
                "maxRestarts": kubernetes.max_restarts,
                "rules": [
                    {"name": "forGood", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                    {"name": "again", "action": "RestartJobSet"},
                ],
            },
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": _job(kubernetes, name)}}],
        },
    }
    return [config_map, jobset]


def _job(kubernetes: Kubernetes, name: str) -> dict[str, Any]:
    """Return the Job: all pods at once, each with an index. A pod that fails ends the Job, and JobSet decides."""
    ends_for_good = {"containerName": CONTAINER, "operator": "In", "values": FOR_GOOD}
    return {
        "parallelism": kubernetes.nodes,
        "completions": kubernetes.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # the Job starts no pod again: the other pods could not take it back into their run
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": ends_for_good}]},
        "template": {"spec": _pod(kubernetes, name)},
    }


def _pod(kubernetes: Kubernetes, name: str) -> dict[str, Any]:
    folder = _pod_folder(kubernetes, name)
    mounts = {"outputs": kubernetes.mount_path, "config": "/etc/tunix", "shared-memory": "/dev/shm"}
    outputs, config, shared_memory = ({"name": volume, "mountPath": path} for volume, path in mounts.items())
    nodes = [f"--nnodes={kubernetes.nodes}", f"--nprocs={kubernetes.tasks}", f"--log_dir={folder}"]
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    variables = {
        "MASTER_ADDR": f"{name}-{JOB}-0-0.{name}",  # the host name that JobSet gives pod 0
        "MASTER_PORT": str(kubernetes.port),
        **{key: _quote(value) for key, value in _pairs(kubernetes.extra_env).items()},
    }
    gpus = kubernetes.gpus_per_node or None
    limits = {"nvidia.com/gpu": gpus, "cpu": kubernetes.cpu, "memory": kubernetes.memory}
    # Every pod writes the same text to a file of its own and renames it, so that nobody reads half a file.
    new = f"{folder}/config.$HOSTNAME"
    copy = f"mkdir -p {folder} && cp /etc/tunix/config.yaml {new} && mv {new} {folder}/config.yaml"
    pod = {
        "restartPolicy": "Never",  # as above
        "terminationGracePeriodSeconds": kubernetes.grace_period_s,
        "serviceAccountName": kubernetes.service_account,
        "nodeSelector": _pairs(kubernetes.node_selector) or None,
        "initContainers": [
            {
                "name": "config",
                "image": kubernetes.image,
                "command": ["sh", "-c", copy],
                "volumeMounts": [outputs, config],
            }
        ],
        "containers": [
            {
                "name": CONTAINER,
                "image": kubernetes.image,
                "command": ["python3", "-m", "tunix.launch"],
                "args": [*nodes, _quote(kubernetes.train_script), f"resume={folder}"],
                "env": [
                    {"name": "NODE_RANK", "valueFrom": index},
                    *({"name": key, "value": value} for key, value in variables.items()),
                ],
                # Kubernetes sets the requests to the values of the limits.
                "resources": {"limits": {key: value for key, value in limits.items() if value is not None}},
                "volumeMounts": [dict(outputs), shared_memory],  # a copy: YAML would refer to one dict by an anchor
            }
        ],
        "volumes": [
            {"name": "outputs", "persistentVolumeClaim": {"claimName": kubernetes.volume_claim}},
            {"name": "config", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes.shared_memory}},
        ],
    }
    return {key: value for key, value in pod.items() if value is not None}


def _quote(text: str) -> str:
    """Return how a text is written that a pod is to have as it is: Kubernetes puts a variable in the place of $(NAME),
    and $ in that of $$."""
    return text.replace("$", "$$")


def _pairs(assignments: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, _, value in (text.partition("=") for text in assignments)}


def _pod_folder(kubernetes: Kubernetes, name: str) -> str:
    return str(Path(kubernetes.mount_path) / name)


def _select_name(job: compose.Job) -> str:
    """Return run_name (in a sweep with the point's number), or project and time, in characters that DNS accepts.

    Raises:
        UserError: no such name can be made of run_name.
    """
    text = job.config.run_name or f"{job.config.project_name}-{'-'.join(job.run_dir.parts[-2:])}"
    if job.config.run_name and HydraConfig.initialized():
        text += f"-{HydraConfig.get().job.num}"
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > MAX_NAME:
        raise UserError(f"run_name={text}: Kubernetes takes at most {MAX_NAME} letters, digits and -, a letter first")
    return name
