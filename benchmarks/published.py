"""Predicted step times beside published ones: `python -m benchmarks.published`, with JAX's CUDA plugin.

The runs are those of benchmarks/published.yaml. Each is compiled once for its cluster, which takes one to four minutes,
and its program is kept in .cache/published. Then its time is predicted twice: with the constants of tunix, and with the
share of the peak (`efficiency`) times a factor that is chosen on the runs of other frameworks alone. A second table
says where a compiled step goes: products at the assumed speed, all other arithmetic, and waits for communication.

`python -m benchmarks.published derived` derives all times, which takes seconds and needs no plugin. Names of runs
choose them: `python -m benchmarks.published maxtext_7b_1 foundry_7b_1`.
"""

import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from benchmarks.arguments import check_names
from tunix.config import Config
from tunix.config.compose import compose
from tunix.costs.compiled_time import StepTime, predict_time
from tunix.costs.devices import HBM_SHARE, PLATFORM, Cluster, read_topology
from tunix.costs.hlo import read_collectives
from tunix.costs.step import derive
from tunix.plan.compile import XLA_SHARE, assume_speeds, compile_for, derive_kernel_data, describe_devices
from tunix.plan.derived_time import derive_time
from tunix.sharding.mesh import explicit_sizes

CACHE = Path(__file__).parents[1] / ".cache" / "published"
RUNS = Path(__file__).with_suffix(".yaml")
FACTORS = np.arange(0.82, 1.121, 0.03)  # of the `efficiency` of a kind of device, from which one is chosen


@dataclass(frozen=True)
class Run:
    """One published run."""

    name: str
    framework: str  # that made the run: all runs of one are left out together
    topology: str  # as plan.topology
    network: str  # as plan.network
    words: list[str]  # keys of training, several in a line
    seconds: float  # of a step
    source: str
    # Bytes for each parameter that the run's optimizer reads and writes beside those of one fused update.
    unfused_bytes: int = 0

    @property
    def cfg(self) -> Config:
        # Whoever published the run had communication in an order of his own: XLA's is the neutral choice. So is the
        # share of the memory that XLA takes for a device that is only described, where a run does not need more.
        words = " ".join(self.words).split()
        return compose([f"plan.memory_share={XLA_SHARE}", *words, "training.overlap=none"]).config

    @property
    def cluster(self) -> Cluster:
        return read_topology(self.topology, self.network)

    def hlo(self) -> str:
        """Return the compiled program of a step, from the cache if it is there."""
        path = CACHE / f"{self.name}.hlo"
        if not path.exists():
            cfg, cluster = self.cfg, self.cluster
            _, hlo = compile_for(cfg, cluster, describe_devices(cluster, cfg.plan.memory_share), timed=False)
            CACHE.mkdir(parents=True, exist_ok=True)
            path.write_text(hlo)
        return path.read_text()

    def predict(self, factors: Iterable[float]) -> list[StepTime]:
        """Return the predicted times of a step for several factors of the efficiency of the kind of device."""
        cfg, cluster, hlo = self.cfg, self.cluster, self.hlo()
        sizes, collectives = explicit_sizes(cfg.model.mesh_shape), read_collectives(hlo)
        assert sizes is not None
        times = []
        for factor in factors:
            kind = cluster.kind.model_copy(update={"efficiency": factor * cluster.kind.efficiency})
            speeds = assume_speeds(replace(cluster, kind=kind), sizes)
            walked = predict_time(hlo, collectives, speeds, derive_kernel_data(cfg, kind.name, sizes))
            times.append(replace(walked, compute_s=walked.compute_s + self.unfused_s()))
        return times

    def unfused_s(self) -> float:
        """Return the seconds in which the run's optimizer reads and writes `unfused_bytes` for each parameter."""
        if not self.unfused_bytes:
            return 0.0
        cluster, sizes = self.cluster, explicit_sizes(self.cfg.model.mesh_shape)
        assert sizes is not None
        costs = derive(self.cfg, sizes, PLATFORM, with_activations=False)
        parameters = costs.num_bytes["weights"] / 4  # of a device, float32
        return parameters * self.unfused_bytes / (cluster.kind.hbm_gb_per_s * 1e9 * HBM_SHARE)

    def derive(self) -> float:
        """Return the predicted seconds of a step that is not compiled."""
        sizes = explicit_sizes(self.cfg.model.mesh_shape)
        assert sizes is not None
        costs = derive(self.cfg, sizes, PLATFORM, with_activations=False)
        return derive_time(self.cfg, sizes, costs, self.cluster).step_s + self.unfused_s()


def main(words: list[str]) -> None:
    runs = [Run(name, **values) for name, values in yaml.safe_load(RUNS.read_text()).items()]
    check_names(words, ["derived", *(run.name for run in runs)])
    chosen = [word for word in words if word != "derived"]
    runs = [run for run in runs if run.name in chosen or not chosen]
    if "derived" in words:
        print("| run | nodes | published s | derived |\n|---|---|---|---|")
        errors = [run.derive() / run.seconds - 1 for run in runs]
        for run, error in zip(runs, errors, strict=True):
            print(f"| {run.source} | {run.cluster.num_nodes} | {run.seconds:g} | {error:+.0%} |")
        print(f"derived: median {statistics.median(map(abs, errors)):.1%}, worst {max(map(abs, errors)):.1%}")
        return
    published = np.array([run.seconds for run in runs])
    walks = [run.predict([1.0])[0] for run in runs]
    ours = np.array([walk.step_s for walk in walks]) / published - 1
    derived = np.array([run.derive() for run in runs]) / published - 1
    by_factor = np.array([[walk.step_s for walk in run.predict(FACTORS)] for run in runs]) / published[:, None] - 1
    left_out = []
    for place, left in enumerate(runs):
        others = by_factor[[run.framework != left.framework for run in runs]]
        best = int(np.abs(np.log1p(others)).mean(0).argmin())
        left_out.append((FACTORS[best], by_factor[place, best]))
    print("| run | nodes | published s | compiled | left out (factor) | derived |\n|---|---|---|---|---|---|")
    for place, run in enumerate(runs):
        factor, error = left_out[place]
        errors = f"{ours[place]:+.0%} | {error:+.0%} ({factor:.2f}) | {derived[place]:+.0%}"
        print(f"| {run.source} | {run.cluster.num_nodes} | {run.seconds:g} | {errors} |")
    for name, errors in (("compiled", ours), ("left out", [error for _, error in left_out]), ("derived", derived)):
        sizes = np.abs(errors)
        print(f"{name}: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")
    print("\n| run | published s | compiled s | products | passes | waits |\n|---|---|---|---|---|---|")
    for run, walk in zip(runs, walks, strict=True):
        products = walk.flops / (run.cluster.kind.efficiency * run.cluster.kind.peak_tflops * 1e12)
        parts = walk.step_s, products, walk.compute_s - products, walk.exposed_s
        print(f"| {run.source} | {run.seconds:g} | {' | '.join(f'{part:.2f}' for part in parts)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
