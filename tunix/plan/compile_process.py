"""Processes that compile training steps: each reads a question as JSON on stdin, and writes its answer on stdout.

Each compile has a process of its own, `python -m tunix.plan.compile_process`, for two reasons: XLA reads its options
from the environment of a process, and when XLA aborts, only that process ends.

    compile_all -> _compile_in_process -> [stdin, stdout] -> main -> compile_for
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax

from tunix.cli import compose
from tunix.config import Config, DeviceKind
from tunix.costs.schedule import StepTime
from tunix.plan.compiled import AxisTraffic, Compiled, compile_for
from tunix.plan.described_devices import describe_devices, find_backend
from tunix.plan.topology import Cluster

WORKERS = 2  # compiles at one time: each takes about one core, and 2 GB


def compile_all(configs: list[Config], cluster: Cluster) -> Iterator[Compiled | str]:
    """Compile the step of each config for the cluster, and yield the results in order.

    A result is text where a compile failed: the reason.
    """
    with ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(partial(_compile_in_process, cluster=cluster), configs)


def _compile_in_process(cfg: Config, cluster: Cluster) -> Compiled | str:
    question = {
        "config": cfg.model_dump(mode="json", by_alias=True),
        "kind": cluster.kind.model_dump(),
        "num_nodes": cluster.num_nodes,
        "per_node": cluster.per_node,
        "backend": find_backend(),
    }
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": path,
    }
    # Variables of the caller that would give the new process other devices than the plan asks for.
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    if question["backend"] == "gpu":
        environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    else:  # the CPU backend compiles for devices that exist: it makes as many as the cluster has
        count = f"--xla_force_host_platform_device_count={cluster.num_devices}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {count} --xla_backend_optimization_level=0"
        environment["XLA_FLAGS"] = flags
    result = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(question),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        # XLA may abort with pages of text: the last line that names an error says most.
        lines = [line for line in result.stderr.splitlines() if line.strip() and "JAX_TRACEBACK_FILTERING" not in line]
        return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "killed")
    return _read_answer(json.loads(result.stdout.splitlines()[-1]))


def _read_answer(answer: dict[str, Any]) -> Compiled:
    traffic = [AxisTraffic(**each | {"axes": tuple(each["axes"])}) for each in answer["traffic"]]
    step_time = StepTime(**answer["step_time"]) if answer["step_time"] else None
    return Compiled(**answer | {"traffic": traffic, "step_time": step_time})


def main() -> None:
    """Answer one question of `_compile_in_process`."""
    question = json.load(sys.stdin)
    cluster = Cluster(DeviceKind.model_validate(question["kind"]), question["num_nodes"], question["per_node"])
    for_gpu = question["backend"] == "gpu"
    devices = describe_devices(cluster) if for_gpu else jax.devices()
    compiled, _ = compile_for(compose.build(question["config"]), cluster, devices, timed=for_gpu)
    print(json.dumps(asdict(compiled)))


if __name__ == "__main__":
    main()
