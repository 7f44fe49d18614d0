"""What each mesh of a cluster would hold and take: `python -m tunix.plan [group=option] [key=value]`.

The keys are those of training, and plan.topology=KIND:GPUS or KIND:NODESxGPUS; conf/command/device has the kinds.
Nothing is compiled and no device is needed: bytes of weights and optimizer are exact, the rest is derived, times are
predicted. Ranked by tokens per second; with model.mesh_shape, that mesh alone. Exit code 2 where no mesh fits.
"""

import argparse
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from tunix import compose
from tunix.config import Config, DeviceKind, Plan, UserError
from tunix.costs import Costs, derive, seconds
from tunix.flops import device_kinds
from tunix.layout import check_divides, meshes, resolve, shown
from tunix.mistakes import did_you_mean

GIB = 2**30
SMALLER = {  # what would make a model fit, by what takes most
    "activations": "a smaller training.micro_batch_size or training.loss_chunk_size, or training.remat=full",
    "gathered": "training.sharding_strategy=full_shard with training.sync_gradients_every=1",
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices."""

    kind: DeviceKind
    num_nodes: int
    per_node: int

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.per_node


@dataclass(frozen=True)
class Candidate:
    """A mesh, its costs, and the time they are predicted to take."""

    sizes: dict[str, int]
    costs: Costs
    cluster: Cluster

    @property
    def compute_s(self) -> float:
        """Products at the kind's efficiency, and one reading and writing of the state by the optimizer."""
        kind, held = self.cluster.kind, self.costs.num_bytes
        update = 2 * (held["weights"] + held["optimizer"]) / (kind.hbm_gb_per_s * 1e9)
        return self.costs.flops / (kind.peak_tflops * 1e12 * kind.efficiency) + update

    def communication_s(self, *, overlaps: bool) -> float:
        """Of weights and gradients, which arithmetic can hide; or of activations on tp, which it waits for."""
        chosen = [transfer for transfer in self.costs.transfers if (transfer.axes != ("tp",)) == overlaps]
        return sum(seconds(each, self.sizes, self.cluster.kind, self.cluster.per_node) for each in chosen)

    @property
    def step_s(self) -> float:
        return max(self.compute_s, self.communication_s(overlaps=True)) + self.communication_s(overlaps=False)

    @property
    def tokens_per_s(self) -> float:
        return self.costs.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        return self.costs.model_flops / self.step_s / (self.cluster.kind.peak_tflops * 1e12)

    def record(self) -> dict[str, Any]:
        """As --json shows it."""
        moved: dict[str, int] = {}
        for each in self.costs.transfers:
            name = f"{each.kind} {'+'.join(each.axes)}"
            moved[name] = moved.get(name, 0) + each.num_bytes
        return {
            "mesh_shape": shown(self.sizes),
            "bytes_per_device": {**self.costs.num_bytes, "total": self.costs.memory},
            "bytes_moved_per_step": moved,
            "tflop_per_step_per_device": self.costs.flops / 1e12,
            "tokens_per_step": self.costs.tokens_per_step,
            "predicted": {
                "compute_s": self.compute_s,
                "overlappable_communication_s": self.communication_s(overlaps=True),
                "exposed_communication_s": self.step_s - self.compute_s,
                "step_time_s": self.step_s,
                "tokens_per_s": self.tokens_per_s,
                "mfu": self.mfu,
            },
        }


@dataclass(frozen=True)
class Ranking:
    """All meshes of a cluster: those that fit, best first, and why not the others."""

    fit: list[Candidate]
    too_large: list[Candidate]  # nearest first
    refused: dict[str, str]  # reason by mesh
    limit: float  # bytes that a device may use


def rank(cfg: Config, cluster: Cluster, memory_share: float) -> Ranking:
    """Every mesh of the cluster's devices, or the one that the config names."""
    candidates, refused = [], {}
    for sizes in _asked(cfg, cluster):
        try:
            check_divides(cfg.model.dims, sizes)
            cfg.training.accumulation(sizes["dp"] * sizes["fsdp"])
        except ValueError as error:  # UserError is one
            refused[shown(sizes)] = str(error)
        else:
            candidates.append(Candidate(sizes, derive(cfg, sizes), cluster))
    limit = cluster.kind.memory_gib * GIB * memory_share
    return Ranking(
        sorted((each for each in candidates if each.costs.memory <= limit), key=lambda each: -each.tokens_per_s),
        sorted((each for each in candidates if each.costs.memory > limit), key=lambda each: each.costs.memory),
        refused,
        limit,
    )


def _asked(cfg: Config, cluster: Cluster) -> list[dict[str, int]]:
    if cfg.model.mesh_shape == "auto":
        return list(meshes(cluster.num_devices))
    try:
        return [resolve(cfg.model.mesh_shape, cluster.num_devices, cfg.model.dims, False, "in plan.topology")]
    except ValueError as error:
        raise UserError(str(error)) from None


def read_topology(text: str) -> Cluster:
    """`h200:8` or `h200:32x8`; the kind may be a path."""
    name, _, product = text.rpartition(":")
    numbers = product.split("x")
    if not name or len(numbers) > 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise UserError(f"plan.topology={text}: expected KIND:GPUS or KIND:NODESxGPUS like h200:8 or h200:32x8")
    nodes, per_node = map(int, numbers if len(numbers) == 2 else ("1", *numbers))
    return Cluster(_read_kind(name), nodes, per_node)


def _read_kind(name: str) -> DeviceKind:
    known, path = device_kinds(), Path(name).expanduser()
    if name in known:
        return known[name]
    if path.suffix != ".yaml":
        hint = did_you_mean(name, list(known))
        raise UserError(f"plan.topology: there is no kind {name}; kinds are {', '.join(known)}, or FILE.yaml{hint}")
    try:
        return DeviceKind.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise UserError(f"plan.topology: {path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError:
        raise UserError(f"plan.topology: {path} is not YAML") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "its content"
        raise UserError(f"plan.topology: {path}: {key}: {first['msg'].lower()}") from None


def table(ranking: Ranking, cluster: Cluster) -> Table:
    """A row for each mesh that divides the model."""
    title = f"{cluster.num_nodes} x {cluster.per_node} {cluster.kind.name}: derived and predicted, not measured"
    found = Table(title=title, title_justify="left")
    held = ("weights", "optimizer", "gradients", "gathered", "activations")
    for name in ("mesh", *held, "GiB in all", "compute s", "exposed s", "step s", "tokens/s", "MFU"):
        found.add_column(name, justify="left" if name == "mesh" else "right", no_wrap=True)
    for each in [*ranking.fit, *ranking.too_large]:
        found.add_row(
            shown(each.sizes),
            *(f"{each.costs.num_bytes[name] / GIB:.2f}" for name in held),
            f"{each.costs.memory / GIB:.2f}{' !' if each.costs.memory > ranking.limit else ''}",
            *(f"{value:.3f}" for value in (each.compute_s, each.step_s - each.compute_s, each.step_s)),
            f"{each.tokens_per_s:,.0f}",
            f"{each.mfu:.1%}",
        )
    return found


def nothing_fits(ranking: Ranking, cluster: Cluster) -> str:
    """By how much, and what would make it fit."""
    if not ranking.too_large:
        return f"no mesh of {cluster.num_devices} devices divides this model and batch: " + next(
            iter(ranking.refused.values())
        )
    best = ranking.too_large[0]
    largest = max(SMALLER, key=lambda name: best.costs.num_bytes[name])
    return (
        f"the model fits on no mesh of plan.topology: {shown(best.sizes)} needs {best.costs.memory / GIB:.1f} GiB of "
        f"the {ranking.limit / GIB:.1f} GiB that a device may use; take more devices, {SMALLER[largest]}, or raise "
        "plan.memory_share"
    )


def command(overrides: list[str], best: Candidate) -> str:
    words = [word for word in overrides if not word.startswith("model.mesh_shape=")]
    return shlex.join(["python", "run_training.py", *words, f"model.mesh_shape={shown(best.sizes)}"])


def main() -> int:
    """Exit code of the command line."""
    parser = argparse.ArgumentParser(
        "python -m tunix.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as run_training.py takes them")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    args = parser.parse_intermixed_args()
    own = [word.removeprefix("plan.") for word in args.overrides if word.startswith("plan.")]
    overrides = [word for word in args.overrides if not word.startswith("plan.")]
    try:
        plan = compose.settings(Plan, own)
        cluster = read_topology(plan.topology)
        ranking = rank(compose.compose(overrides).config, cluster, plan.memory_share)
        show = _print_json if args.json else _print_tables
        show(ranking, cluster, overrides)
        if not ranking.fit:
            raise UserError(nothing_fits(ranking, cluster))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _print_json(ranking: Ranking, cluster: Cluster, overrides: list[str]) -> None:
    values = {
        "device": cluster.kind.model_dump(),
        "limit_bytes": round(ranking.limit),
        "fit": [each.record() for each in ranking.fit],
        "too_large": [each.record() for each in ranking.too_large],
        "refused": ranking.refused,
        "command": command(overrides, ranking.fit[0]) if ranking.fit else None,
    }
    print(json.dumps(values, indent=1))


def _print_tables(ranking: Ranking, cluster: Cluster, overrides: list[str]) -> None:
    if ranking.fit or ranking.too_large:
        Console(width=max(170, Console().width)).print(table(ranking, cluster))
    print(f"! more than the {ranking.limit / GIB:.1f} GiB that a device may use (plan.memory_share)")
    for mesh, reason in ranking.refused.items():
        print(f"refused {mesh}: {reason}")
    if ranking.fit:
        print(f"\n{command(overrides, ranking.fit[0])}")


if __name__ == "__main__":
    sys.exit(main())
